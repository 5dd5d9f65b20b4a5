#!/usr/bin/env python3
"""Run the notebooks and store their outputs, the same bytes from the same code.

``python scripts/notebooks.py`` runs all of them; names or their beginnings (``01``) choose. Each
runs from its first cell on in a fresh kernel of this interpreter, in an empty folder, on one
thread. What would change from run to run (times, versions, the state of widgets) is not stored.
With ``--check`` nothing is written: the exit status says whether every notebook ran.
"""
# ruff: noqa: T201 - a script that talks to a person

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
SECONDS = 180  # that one notebook may take
# What an output may be: pages, reviews and diffs need no more, and a widget needs a live kernel.
MIME_TYPES = ("image/png", "image/svg+xml", "text/html", "text/latex", "text/markdown")
# A cell for Colab, which is not run: what is tested is what is installed here.
INSTALL, SKIP = "%pip install", "skip-execution"
HASH = "source_sha256"  # of the code that the stored outputs are from, in the metadata


class ThisInterpreter(KernelSpecManager):
    """Knows one kernel, this interpreter, whatever kernels are installed or not."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        """Return the spec that ipykernel would install."""
        return KernelSpec(**get_kernel_dict())


def execute(path: Path, seconds: float = SECONDS) -> NotebookNode:
    """Return the notebook with the outputs of a fresh run, which leaves no other trace.

    Raises:
        CellExecutionError: If a cell raises.
        CellTimeoutError: If all cells together take longer than ``seconds``.
    """
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code" and cell.source.startswith(INSTALL):
            cell.metadata["tags"] = [SKIP]
            cell.update(execution_count=None, outputs=[])
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder, "work")  # the kernel's own files stay beside it
        work.mkdir()
        manager = AsyncKernelManager(
            transport_encryption="auto",
            kernel_spec_manager=ThisInterpreter(ensure_native_kernel=False),
        )
        client = NotebookClient(
            notebook,
            km=manager,
            timeout_func=lambda cell: max(1, round(deadline - time.monotonic())),
            resources={"metadata": {"path": str(work)}},
            record_timing=False,
            coalesce_streams=True,
            skip_cells_with_tag=SKIP,
        )
        client.execute(env=_environment(folder), cleanup_kc=True)
    _normalize(notebook)
    return notebook


def source_hash(notebook: NotebookNode) -> str:
    """Return the hash of all code: text may change without a new run."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()


def choose(names: Sequence[str]) -> list[Path]:
    """Return the notebooks whose names start so, all for no name."""
    known = sorted(FOLDER.glob("*.ipynb"))
    if not names:
        return known
    chosen: list[Path] = []
    for name in names:
        matches = [path for path in known if path.name.startswith(Path(name).name)]
        if not matches:
            raise SystemExit(
                f"No notebook starts with {name!r}; there are {[p.name for p in known]}."
            )
        chosen += [path for path in matches if path not in chosen]
    return chosen


def _environment(folder: str) -> dict[str, str]:
    """Return the kernel's environment: one thread, no settings of the user, inline figures."""
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    return environment | {
        "IPYTHONDIR": str(Path(folder, "ipython")),
        "JUPYTER_CONFIG_DIR": str(Path(folder, "jupyter")),
        "MPLCONFIGDIR": str(Path(folder, "matplotlib")),
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
    }


def _normalize(notebook: NotebookNode) -> None:
    """Drop what differs between two runs of the same code, or says where it ran."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [out for out in map(_stored, cell.outputs) if out is not None]
    digest = source_hash(notebook)
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
            HASH: digest,
        }
    )


def _stored(output: NotebookNode) -> NotebookNode | None:
    data: dict[str, Any] | None = output.get("data")
    if data is None:
        return output
    if "application/vnd.jupyter.widget-view+json" in data:
        return None
    output.data = {k: v for k, v in data.items() if k in (*MIME_TYPES, "text/plain")}
    output.metadata = {}
    return output


def _write(path: Path, notebook: NotebookNode) -> None:
    """Replace the file at once, so that a run that is stopped leaves the old one."""
    text = nbformat.writes(notebook).rstrip("\n") + "\n"
    nbformat.validate(nbformat.reads(text, as_version=4))
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was chosen; return the number of notebooks that failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="names of notebooks, or their beginnings")
    parser.add_argument("--check", action="store_true", help="run, but store nothing")
    parser.add_argument("--timeout", type=float, default=SECONDS, help="seconds for each of them")
    options = parser.parse_args(arguments)
    failures = 0
    for path in choose(options.names):
        start = time.perf_counter()
        try:
            notebook = execute(path, options.timeout)
        except CellExecutionError as error:
            print(f"{path.name}: FAILED\n{error}", flush=True)
            failures += 1
            continue
        except CellTimeoutError:
            print(f"{path.name}: FAILED, took more than {options.timeout:g} s", flush=True)
            failures += 1
            continue
        seconds = time.perf_counter() - start
        if not options.check:
            _write(path, notebook)
        print(f"{path.name}: {'ran' if options.check else 'stored'} in {seconds:.0f} s", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main())
