"""Cells run by worker processes, one thread each; results come back as they are ready.

A worker may die (out of memory, a crash in native code) without taking the sweep with it: its cell
gets a row that says so and another worker takes its place. If the parent dies, so do the workers.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from benchmarks.cells import Cell, Row, run_cell, stamp

_SPAWN = multiprocessing.get_context("spawn")


def run_cells(cells: list[Cell], jobs: int, data_root: Path | None) -> Iterator[Row]:
    """Yield the row of each cell as it finishes.

    Args:
        cells: What to run, first things first.
        jobs: Number of processes; 1 runs the cells in this one.
        data_root: Where the data is.
    """
    if jobs == 1:
        torch.set_num_threads(1)
        for cell in cells:
            yield run_cell(cell, data_root)
        return
    with contextlib.closing(run_in_processes(cells, min(jobs, len(cells)), data_root)) as rows:
        yield from rows


class Worker:
    """A process and the cell it is working on."""

    def __init__(self, data_root: Path | None) -> None:
        self.connection, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_serve, args=(theirs, data_root), daemon=True)
        self.process.start()
        theirs.close()  # so that reading ends when the worker does
        self.cell: Cell | None = None
        self.start = time.perf_counter()

    def give(self, cell: Cell) -> None:
        """Start on a cell."""
        self.cell, self.start = cell, time.perf_counter()
        with contextlib.suppress(OSError):  # it is dead, which collecting its row will show
            self.connection.send(cell)

    def collect(self) -> Row | None:
        """Return the row of its cell, or None if it died."""
        try:
            row: Row = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            return None
        return row

    def obituary(self) -> Row:
        """Return the row for the cell that it died on."""
        assert self.cell is not None
        error = f"the worker process died with exit code {self.process.exitcode}"
        return {"cell": asdict(self.cell), "error": error} | stamp(self.start)

    def end(self) -> None:
        """Stop it, whatever it is doing."""
        self.process.terminate()
        self.process.join()
        self.connection.close()


def run_in_processes(cells: list[Cell], jobs: int, data_root: Path | None) -> Iterator[Row]:
    """Do what ``run_cells`` does, in processes of their own."""
    waiting = deque(cells)
    workers: dict[Connection, Worker] = {}

    def hire() -> None:
        worker = Worker(data_root)
        workers[worker.connection] = worker
        worker.give(waiting.popleft())

    try:
        for _ in range(jobs):
            hire()
        while workers:
            for connection in wait(list(workers)):
                worker = workers[connection]  # type: ignore[index]
                row = worker.collect()
                finished = worker.obituary() if row is None else row
                if row is not None and waiting:
                    worker.give(waiting.popleft())
                else:
                    worker.end()
                    del workers[worker.connection]
                    if waiting:
                        hire()
                yield finished
    finally:
        for worker in workers.values():
            worker.end()


def _serve(connection: Connection, data_root: Path | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_die_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    while True:
        try:
            cell = connection.recv()
        except EOFError:
            return
        connection.send(run_cell(cell, data_root))


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
