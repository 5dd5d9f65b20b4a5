"""What the demo says about its results, as text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from opacus_slaclip.demo.data import DataSplit
from opacus_slaclip.demo.records import RunResult, RunSettings

_COLUMNS = ("method", "C_0", "final C", "epsilon", "test accuracy")


def describe(settings: RunSettings, split: DataSplit) -> str:
    """Return what all runs have in common, for the top of the output."""
    count = len(split.train)
    lines = [
        f"{settings.data}: {count:,} training images, {len(split.test):,} test images",
        f"budget: epsilon = {settings.epsilon:g} at delta = {settings.delta:g} for each run "
        f"({settings.accountant} accountant)",
        f"training: epochs {settings.epochs}, batch size {min(settings.batch_size, count)}, "
        f"learning rate {settings.learning_rate:g}, seed {settings.seed}",
    ]
    if settings.delta >= 1 / count:
        lines.append(
            f"note: delta should be well below {1 / count:.1g}, one over the number of training "
            "images; at this delta the guarantee means little"
        )
    return "\n".join(lines)


def table(results: Sequence[RunResult]) -> str:
    """Return the results as an aligned table, one line per run."""
    rows = [_COLUMNS, *(_row(result) for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = [_align(row, widths) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def summary(results: Sequence[RunResult], test_count: int) -> str:
    """Return, for each method, how much the choice of ``C_0`` mattered."""
    lines = []
    for method in dict.fromkeys(result.settings.method for result in results):
        runs = [result for result in results if result.settings.method == method]
        if len(runs) < 2:
            continue
        accuracies = [100 * run.test_accuracy for run in runs]
        lines.append(
            f"{method}: the choice of C_0 moved test accuracy by "
            f"{max(accuracies) - min(accuracies):.1f} points"
        )
    if lines:
        error = max(_standard_error(result.test_accuracy, test_count) for result in results)
        lines.append(
            f"(an accuracy on {test_count:,} test images has a standard error of up to "
            f"{100 * error:.1f} points)"
        )
    return "\n".join(lines)


def _standard_error(accuracy: float, count: int) -> float:
    return math.sqrt(accuracy * (1 - accuracy) / count)


def _row(result: RunResult) -> tuple[str, ...]:
    return (
        result.settings.method,
        f"{result.settings.clip_norm:g}",
        f"{result.final_clip_norm:.3f}",
        f"{result.epsilon:.3f}",
        f"{100 * result.test_accuracy:.1f} %",
    )


def _align(row: Sequence[str], widths: Sequence[int]) -> str:
    name, *numbers = (
        cell.ljust(width) if column == 0 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join([name, *numbers])
