"""The rows of results files: read, checked, one a cell."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_OWN = ("method", "learning_rate", "clip_norm", "schedule", "seed")  # the rest a group shares


@dataclass(frozen=True, order=True)
class Config:
    """A point of the pool; the order breaks ties between equal validation accuracies."""

    learning_rate: float
    clip_norm: float
    schedule: str


@dataclass(frozen=True)
class Run:
    """A finished or failed cell."""

    settings: tuple[tuple[str, Any], ...]
    method: str
    config: Config
    seed: int
    row: Mapping[str, Any]

    @property
    def failed(self) -> bool:
        """Whether the cell ended in an exception and has no accuracy."""
        return "error" in self.row

    @property
    def diverged(self) -> bool:
        """Whether the runner saw the training diverge."""
        return bool(self.row.get("diverged"))

    def accuracy(self, part: str, chance: float) -> float:
        """Return the ``"test"`` or ``"validation"`` accuracy as a fraction.

        A diverged run that has none (null or NaN) counts as ``chance``: leaving it out would
        flatter the method.
        """
        value = self.row[f"{part}_accuracy"]
        if value is not None and math.isfinite(value):
            return float(value)
        return chance


@dataclass
class Rows:
    """What was read: one run a cell, and the lines that could not be read."""

    runs: list[Run] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)  # "file:line"


def load(paths: Iterable[Path]) -> Rows:
    """Read results files in order.

    A cell found twice keeps one row: a result beats an error, else the later one wins. A last line
    cut short by a killed run is ignored; other lines that are no JSON are skipped and listed.

    Raises:
        ValueError: if a line is JSON but no row of ``benchmarks.compare``.
    """
    rows = Rows()
    kept: dict[tuple[Any, ...], Run] = {}
    for path in paths:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                if number < len(lines):  # the last piece is what no newline ended
                    rows.unreadable.append(f"{path.name}:{number}")
                continue
            run = run_of(row, f"{path}:{number}")
            key = (run.settings, run.method, run.config, run.seed)
            if key not in kept or kept[key].failed or not run.failed:
                kept[key] = run
    rows.runs = list(kept.values())
    return rows


def run_of(row: Any, place: str) -> Run:
    """Return what a row says; ``place`` is named in errors."""
    try:
        cell = row["cell"]
        config = Config(float(cell["learning_rate"]), float(cell["clip_norm"]), cell["schedule"])
        settings = {name: value for name, value in cell.items() if name not in _OWN}
        missing = {"task", "model", "epsilon"} - settings.keys()
        if "error" not in row:
            missing |= {"test_accuracy", "validation_accuracy"} - row.keys()
        if missing:
            raise KeyError(*sorted(missing))
        run = Run(tuple(sorted(settings.items())), cell["method"], config, cell["seed"], row)
        hash(run.settings)
    except (KeyError, TypeError) as problem:
        raise ValueError(
            f"{place}: not a row of benchmarks.compare ({problem!r}); remove the line or the file "
            "from the command"
        ) from problem
    accuracies = [] if run.failed else [row["test_accuracy"], row["validation_accuracy"]]
    if not run.diverged and any(x is None or not 0.0 <= x <= 1.0 for x in accuracies):
        raise ValueError(f"{place}: accuracies must be fractions in [0, 1], got {accuracies}")
    return run
