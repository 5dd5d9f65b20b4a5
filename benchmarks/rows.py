"""A file of result rows, one line of JSON each, that survives a kill at any moment."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from benchmarks.cells import Cell, Row


class RowFile:
    """Rows in the order in which their cells finished; one process writes.

    A line counts once its line feed is there: what a killed process left unfinished is ignored when
    reading and cut off before the next line is added.

    Args:
        path: The file; made, with its folder, by the first row.
        key: Tells what a row is the result of, and raises on one of another benchmark.
    """

    def __init__(self, path: Path, key: Callable[[Row], Any] | None = None) -> None:
        self.path = path
        self.key = key or cell_of

    def read(self) -> list[Row]:
        """Return the finished rows, oldest first.

        Raises:
            ValueError: If a finished line is not a row.
        """
        if not self.path.exists():
            return []
        rows = []
        lines = self.path.read_bytes().split(b"\n")[:-1]
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                self.key(row)
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(
                    f"{self.path}, line {number}, is not a row of this benchmark ({error}). Move "
                    "the file away or choose another --output."
                ) from error
            rows.append(row)
        return rows

    def append(self, row: Row) -> None:
        """Add a row and wait until it is on the disk."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            _cut_torn_line(file)
            file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def drop(self, unwanted: Callable[[Row], bool]) -> None:
        """Take rows out, in one move of a rewritten file."""
        rows = self.read()
        kept = [row for row in rows if not unwanted(row)]
        if len(kept) < len(rows):
            partial = self.path.with_name(f".{self.path.name}.tmp")
            partial.write_text("".join(json.dumps(row) + "\n" for row in kept))
            partial.replace(self.path)


def cell_of(row: Row) -> Cell:
    """Return the cell that a row is the result of."""
    return Cell(**row["cell"])


def _cut_torn_line(file: BinaryIO) -> None:
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - 1))
    if file.read() not in (b"", b"\n"):
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
