"""Question: how accurate is each clipping method at equal epsilon, and over how wide a pool?

Trains methods x learning rates x initial thresholds x schedules x seeds on one data set, the noise
of every cell calibrated to the same (epsilon, delta). Without options the pool is the paper's.

    python -m benchmarks.compare --jobs 2
    python -m benchmarks.compare --task mnist --data-root DIR --jobs 2 --dry-run

Each finished cell is appended to ``--output`` at once, and cells that are there are not run again:
a killed run loses the cells in flight, and the same command goes on with the rest. Accuracy on the
held-out tenth of the training set is for choosing cells, test accuracy for reporting them.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import methods, report_pools, tasks
from benchmarks.cells import Cell, Row
from benchmarks.corpora import CorpusError
from benchmarks.report_rows import Config, run_of
from benchmarks.rows import RowFile, cell_of
from benchmarks.workers import run_cells
from opacus_slaclip.demo import DemoError

# Of cells whose method takes no C_0: any number, but always the same.
_NO_CLIP_NORM = 0.1


def cells(args: argparse.Namespace) -> list[Cell]:
    """Return the pool: seed by seed, and all methods of a setting side by side."""
    task = tasks.TASKS[args.task]
    axes = (
        args.seeds,
        args.epsilons,
        args.schedules,
        args.learning_rates,
        args.clip_norms,
        args.methods,
    )
    return [
        Cell(
            task=args.task,
            model=args.model,
            method=method,
            learning_rate=learning_rate,
            clip_norm=clip_norm if methods.METHODS[method].uses_clip_norm else _NO_CLIP_NORM,
            schedule=schedule,
            seed=seed,
            epsilon=epsilon,
            delta=task.delta,
            batch_size=args.batch_size,
            epochs=args.epochs,
            momentum=task.momentum,
            weight_decay=args.weight_decay,
        )
        for seed, epsilon, schedule, learning_rate, clip_norm, method in itertools.product(*axes)
        if methods.METHODS[method].uses_clip_norm or clip_norm == args.clip_norms[0]
    ]


def best_cells(pool: list[Cell], rows: list[Row], seeds: list[int]) -> list[Cell]:
    """Return each method's best cell of the pool, as the report chooses it, with other seeds.

    Args:
        pool: The cells to choose from.
        rows: All finished rows.
        seeds: The seeds to repeat the chosen cells with.

    Returns:
        For each method and epsilon, the setting with the highest mean validation accuracy over the
        pool's seeds, ties going to the smaller learning rate, then threshold.
    """
    wanted = set(pool)
    runs = [run_of(row, "a row") for row in rows if cell_of(row) in wanted]
    cell_by_run = {
        (cell.epsilon, cell.method, Config(cell.learning_rate, cell.clip_norm, cell.schedule)): cell
        for cell in pool
    }
    best = [
        cell_by_run[group.settings["epsilon"], method, tried.best]
        for group in report_pools.group(runs)
        for method, tried in group.pools.items()
        if tried.best is not None
    ]
    return [replace(cell, seed=seed) for seed in seeds for cell in best]


def run(missing: list[Cell], file: RowFile, args: argparse.Namespace) -> int:
    """Run cells, adding each row to the file at once; return the number of errors."""
    errors = 0
    with contextlib.closing(run_cells(missing, args.jobs, args.data_root)) as rows:
        for row in tqdm(rows, total=len(missing), unit="cell", smoothing=0.1):
            file.append(row)
            if "error" in row:
                errors += 1
                tqdm.write(f"{cell_of(row)}: {row['error']}", file=sys.stderr)
    return errors


def estimate(missing: list[Cell], rows: list[Row], args: argparse.Namespace) -> float:
    """Return the hours that the cells will take, from finished rows where there are any."""
    per_epoch = defaultdict(list)
    for row in rows:
        cell = cell_of(row)
        if "error" not in row and (cell.task, cell.model) == (args.task, args.model):
            per_epoch[cell.method].append(row["seconds"] / cell.epochs)
    typical = {method: statistics.median(times) for method, times in per_epoch.items()}
    guess = max(typical.values(), default=tasks.TASKS[args.task].models[args.model])
    seconds = sum(typical.get(cell.method, guess) * cell.epochs for cell in missing)
    return seconds / args.jobs / 3600


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments, the task's own where none are given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--task", choices=tasks.TASKS, default="digits")
    add("--model", choices=tasks.MODELS, help="default: the task's first")
    _add_axis(parser, "--methods", tuple(methods.PAPER), choices=methods.METHODS)
    _add_axis(parser, "--learning-rates", tasks.LEARNING_RATES, metavar="LR")
    _add_axis(parser, "--clip-norms", tasks.CLIP_NORMS, metavar="C_0")
    _add_axis(parser, "--schedules", tasks.SCHEDULES, choices=tasks.SCHEDULES)
    _add_axis(parser, "--seeds", tasks.SEEDS, metavar="SEED")
    add("--best-seeds", nargs="+", type=int, default=[], metavar="SEED", help=_BEST_HELP)
    add("--epsilons", nargs="+", type=float, help="at the task's delta; default: the task's")
    add("--epochs", type=int, help="default: the task's")
    add("--batch-size", type=int, metavar="B", help="expected; default: the task's")
    add("--weight-decay", type=float, help="default: the task's")
    add("--jobs", type=int, default=1, metavar="N", help="processes, of one thread each")
    add("--data-root", type=Path, metavar="DIR", help="folder of the data; digits need none")
    add("--output", type=Path, metavar="FILE", help="default: outputs/compare/TASK.jsonl")
    add("--retry-errors", action="store_true", help="run cells again that left an error")
    add("--dry-run", action="store_true", help="only say how much there is to do")
    args = parser.parse_args(argv)
    task = tasks.TASKS[args.task]
    args.model = args.model or next(iter(task.models))
    args.epsilons = args.epsilons or [task.epsilon]
    args.epochs = args.epochs or task.epochs
    args.batch_size = args.batch_size or task.batch_size
    if args.weight_decay is None:
        args.weight_decay = task.weight_decay
    args.output = args.output or Path(f"outputs/compare/{args.task}.jsonl")
    if args.model not in task.models:
        parser.error(f"--model must be one of {', '.join(task.models)} for {args.task}")
    if min(args.jobs, args.epochs, args.batch_size) < 1:
        parser.error("--jobs, --epochs and --batch-size must be at least 1")
    if min(*args.learning_rates, *args.clip_norms, *args.epsilons) <= 0:
        parser.error("--learning-rates, --clip-norms and --epsilons must be positive")
    return args


def _add_axis(
    parser: argparse.ArgumentParser, name: str, default: Sequence[Any], **options: Any
) -> None:
    shown = f"default: {' '.join(map(str, default))}"
    kind = type(default[0])
    parser.add_argument(name, nargs="+", type=kind, default=list(default), help=shown, **options)


_BEST_HELP = "then repeat each method's best cell (on the held-out tenth) with these seeds"


def main(argv: list[str] | None = None) -> int:
    """Run the cells that the output file lacks; return 1 where the data is missing or bad."""
    args = parse(argv)
    file = RowFile(args.output)
    try:
        return _sweep(args, file)
    except (CorpusError, DemoError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nInterrupted. {args.output} keeps what is done; run again to go on.")
        return 130


def _sweep(args: argparse.Namespace, file: RowFile) -> int:
    pool = cells(args)
    if args.dry_run:
        _report("the pool", _missing(pool, file), file, args)
        return 0
    if args.retry_errors:
        wanted = set(pool)
        file.drop(lambda row: "error" in row and cell_of(row) in wanted)
    errors = _run_missing("the pool", pool, file, args)
    if args.best_seeds:
        again = best_cells(pool, file.read(), args.best_seeds)
        errors += _run_missing("the best", again, file, args)
    print(f"{args.output}: {len(file.read())} rows, {errors} new errors")
    return 0


def _missing(wanted: list[Cell], file: RowFile) -> list[Cell]:
    done = {cell_of(row) for row in file.read()}
    return [cell for cell in dict.fromkeys(wanted) if cell not in done]


def _report(what: str, missing: list[Cell], file: RowFile, args: argparse.Namespace) -> None:
    hours = estimate(missing, file.read(), args)
    print(f"{what}: {len(missing)} cells to run, about {hours:.2f} hours with --jobs {args.jobs}")


def _run_missing(what: str, wanted: list[Cell], file: RowFile, args: argparse.Namespace) -> int:
    missing = _missing(wanted, file)
    _report(what, missing, file, args)
    if not missing:
        return 0
    tasks.load(args.task, args.data_root)  # whatever is wrong with the data shows here
    return run(missing, file, args)


if __name__ == "__main__":
    sys.exit(main())
