"""``python -m opacus_slaclip``: train with a fixed and an adaptive threshold, side by side."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from opacus_slaclip.demo import DemoError
from opacus_slaclip.demo.arguments import parse, run_settings
from opacus_slaclip.demo.data import DataSplit, load
from opacus_slaclip.demo.figure import draw
from opacus_slaclip.demo.records import ResultFile, RunResult, RunSettings
from opacus_slaclip.demo.report import describe, summary, table
from opacus_slaclip.demo.training import train

RESULTS_NAME = "results.jsonl"
FIGURE_NAME = "thresholds.png"

_EXIT_ERROR = 2
_EXIT_INTERRUPTED = 130  # what a shell reports for a command that Ctrl-C ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo.

    Args:
        argv: Arguments without the program's name; None for those of this process.

    Returns:
        The exit code: 0, 2 after an error that is explained on standard error, 130 after Ctrl-C.
    """
    args = parse(argv)
    file = ResultFile(args.output / RESULTS_NAME)
    try:
        _demo(args, file)
    except DemoError as error:
        print(f"error: {error}", file=sys.stderr)
        return _EXIT_ERROR
    except KeyboardInterrupt:
        print(
            f"\nInterrupted. The runs that were finished are kept in {file.path}; the same command "
            "goes on after them.",
            file=sys.stderr,
        )
        return _EXIT_INTERRUPTED
    return 0


def _demo(args: argparse.Namespace, file: ResultFile) -> None:
    _require_extra(args.data)
    file.prepare()
    split = load(args.data, args.data_root)
    runs = run_settings(args, split)
    print(describe(runs[0], split), end="\n\n")
    results = [_finish(settings, split, file, fresh=args.fresh) for settings in runs]
    print(f"\n{table(results)}\n\n{summary(results, len(split.test))}".rstrip(), end="\n\n")
    figure_path = args.output / FIGURE_NAME
    draw(results, figure_path)
    print(f"results: {file.path}\nfigure:  {figure_path}")


def _finish(settings: RunSettings, split: DataSplit, file: ResultFile, *, fresh: bool) -> RunResult:
    """Return the run's result, from the file if it is there, and else by running it."""
    found = None if fresh else file.find(settings)
    if found is not None:
        print(f"{settings.label()}: finished before, see {file.path}")
        return found
    result = _train_with_progress(settings, split)
    file.append(result)
    return result


def _train_with_progress(settings: RunSettings, split: DataSplit) -> RunResult:
    from tqdm import tqdm

    steps = settings.epochs * -(-len(split.train) // settings.batch_size)
    interval = 0.1 if sys.stderr.isatty() else 5.0  # in seconds; a log file keeps every line
    with tqdm(total=steps, desc=settings.label(), unit="step", mininterval=interval) as bar:

        def on_step(clip_norm: float) -> None:
            bar.set_postfix_str(f"C = {clip_norm:.3g}", refresh=False)
            bar.update()

        return train(settings, split, on_step)


def _require_extra(data: str) -> None:
    """Raise an error that says what to install, unless all that the demo needs is there."""
    needed = {"matplotlib": "matplotlib", "tqdm": "tqdm"}
    if data == "digits":
        needed["scikit-learn"] = "sklearn"
    missing = []
    for package, module in needed.items():
        try:
            importlib.import_module(module)
        except ImportError:
            missing.append(package)
    if missing:
        raise DemoError(
            f"The demo needs {', '.join(missing)}. Install what is missing with\n"
            '    pip install "opacus-slaclip[demo]"'
        )


if __name__ == "__main__":
    sys.exit(main())
