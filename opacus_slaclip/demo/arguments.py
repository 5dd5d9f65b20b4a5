"""The demo's command line: options, their defaults and checks."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from opacus_slaclip._options import CONTROLLERS, DEFAULT_CLIP_BOUNDS
from opacus_slaclip.demo.data import DataSplit
from opacus_slaclip.demo.records import RunSettings, package_versions

METHODS = ("flat", *CONTROLLERS)

_DESCRIPTION = """\
Train a small convolutional network with differential privacy several times, at one budget and one
learning rate: with Opacus's fixed threshold (flat) and with SlaClip's adaptive one, each from a
good initial threshold C_0 and from a poor one. Print what came of it and draw the threshold over
time and the private distribution of gradient norms that SlaClip publishes."""

_EPILOG = """\
It writes into the output folder:
  results.jsonl   one line per finished run: settings, sigma, epsilon, accuracy, all thresholds
  thresholds.png  the figure

A run that is finished is not repeated: after Ctrl-C, or a kill, the same command goes on.

How to read the table: all runs share one learning rate. A fixed threshold that is too small can be
made up for by a larger learning rate, for those who search for it. SlaClip takes the choice of C_0
off your hands, not that of the learning rate: where the noise is large for it (try --epsilon 1),
training is unstable, gradient norms grow, and a threshold that follows them grows too.

Noise and batches are seeded here so that a run can be repeated. Do not do that in production."""


@dataclass(frozen=True)
class Preset:
    """Defaults of a data set.

    Attributes:
        delta: Below one over the number of training samples.
        epochs: Number of epochs.
        batch_size: Expected batch size, in samples.
        learning_rate: Learning rate, the same for all runs.
        clip_norms: A good and a poor ``C_0`` for the fixed threshold at that learning rate.
    """

    delta: float
    epochs: int
    batch_size: int
    learning_rate: float
    clip_norms: tuple[float, ...]


PRESETS = {
    "digits": Preset(
        delta=1e-4, epochs=20, batch_size=128, learning_rate=0.2, clip_norms=(3.0, 0.1)
    ),
    "mnist": Preset(
        delta=1e-5, epochs=1, batch_size=512, learning_rate=0.5, clip_norms=(10.0, 0.1)
    ),
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line and fill in the data set's defaults.

    Exits with code 2 and a message on standard error where an argument is not valid.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    preset = PRESETS[args.data]
    for name in ("delta", "epochs", "batch_size", "clip_norms"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(preset, name))
    args.lr = preset.learning_rate if args.lr is None else args.lr
    args.clip_norms = tuple(dict.fromkeys(args.clip_norms))
    args.methods = tuple(dict.fromkeys(args.methods))
    low, high = DEFAULT_CLIP_BOUNDS
    for clip_norm in args.clip_norms:
        if set(args.methods) & set(CONTROLLERS) and not low <= clip_norm <= high:
            parser.error(
                f"argument --clip-norms: must be in [{low:g}, {high:g}], the bounds of an adaptive "
                f"threshold, got {clip_norm:g}"
            )
    return args


def run_settings(args: argparse.Namespace, split: DataSplit) -> list[RunSettings]:
    """Return the settings of each run, all methods for the first ``C_0`` first."""
    digest, versions = split.digest(), package_versions()
    return [
        RunSettings(
            data=args.data,
            data_digest=digest,
            method=method,
            clip_norm=clip_norm,
            epsilon=args.epsilon,
            delta=args.delta,
            epochs=args.epochs,
            batch_size=args.batch_size,
            learning_rate=args.lr,
            seed=args.seed,
            accountant=args.accountant,
            max_physical_batch_size=args.max_physical_batch_size,
            threads=args.threads,
            versions=versions,
        )
        for clip_norm in args.clip_norms
        for method in args.methods
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m opacus_slaclip",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_data_arguments(parser)
    _add_privacy_arguments(parser)
    _add_training_arguments(parser)
    return parser


def _add_data_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data and output")
    group.add_argument(
        "--data",
        choices=list(PRESETS),
        default="digits",
        help="digits comes with scikit-learn; mnist is read from --data-root (default: digits)",
    )
    group.add_argument(
        "--data-root",
        type=Path,
        metavar="DIR",
        help="folder with mnist.npz in Keras's layout, or the four IDX files, gzipped or not; "
        "nothing is downloaded",
    )
    group.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        default=Path("slaclip-demo"),
        help="folder for results and figure (default: ./slaclip-demo)",
    )
    group.add_argument(
        "--fresh", action="store_true", help="run again what is already among the results"
    )


def _add_privacy_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("privacy")
    group.add_argument(
        "--epsilon",
        type=_positive,
        default=3.0,
        help="budget of each run; the noise is calibrated to it (default: 3)",
    )
    group.add_argument("--delta", type=_fraction, help=_preset_help("delta", "the budget's delta"))
    group.add_argument(
        "--accountant",
        choices=["rdp", "prv"],
        default="rdp",
        help="prv is tighter and slower (default: rdp)",
    )
    group.add_argument(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=["flat", "slaclip"],
        metavar="METHOD",
        help=f"clipping methods among {', '.join(METHODS)} (default: flat slaclip)",
    )
    group.add_argument(
        "--clip-norms",
        nargs="+",
        type=_positive,
        metavar="C_0",
        help=_preset_help("clip_norms", "initial thresholds, the good one first"),
    )


def _add_training_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--epochs", type=_count, help=_preset_help("epochs", "number of epochs"))
    group.add_argument(
        "--batch-size", type=_count, help=_preset_help("batch_size", "expected batch size")
    )
    group.add_argument(
        "--lr", type=_positive, help=_preset_help("learning_rate", "learning rate of plain SGD")
    )
    group.add_argument(
        "--seed", type=_seed, default=0, help="the same seed gives the same table (default: 0)"
    )
    group.add_argument(
        "--max-physical-batch-size",
        type=_count,
        metavar="N",
        help="hold at most N samples in memory at once; batches stay as large (default: all)",
    )
    group.add_argument(
        "--threads",
        type=_count,
        default=1,
        help="CPU threads; more are faster on mnist only, and change rounding (default: 1)",
    )


def _preset_help(field: str, text: str) -> str:
    def show(value: object) -> str:
        return " ".join(f"{x:g}" for x in (value if isinstance(value, tuple) else (value,)))

    defaults = ", ".join(f"{show(getattr(p, field))} for {name}" for name, p in PRESETS.items())
    return f"{text} (default: {defaults})"


def _number(
    kind: Callable[[str], float], rule: str, holds: Callable[[float], bool]
) -> Callable[[str], float]:
    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {rule}, got {text!r}") from None
        if not holds(value):
            raise argparse.ArgumentTypeError(f"must be {rule}, got {text}")
        return value

    return convert


_positive = _number(float, "a positive number", lambda value: 0 < value < math.inf)
_fraction = _number(float, "a number between 0 and 1", lambda value: 0 < value < 1)
_count = _number(int, "a positive integer", lambda value: value > 0)
_seed = _number(int, "an integer of at least 0", lambda value: value >= 0)
