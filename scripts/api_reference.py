#!/usr/bin/env python3
"""Build the API reference from the docstrings, by pdoc, into build/docs.

The pages are those of the modules that users import from. The exit status is not 0 if pdoc warns or
a docstring refers to something that does not exist, or that pdoc would show with its mark-up.
"""
# ruff: noqa: T201 - a script that talks to a person

from __future__ import annotations

import argparse
import importlib
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pdoc

from opacus_slaclip import __version__

TARGET = Path(__file__).resolve().parent.parent / "build" / "docs"
PAGES = (
    "opacus_slaclip",
    "opacus_slaclip.auto",
    "opacus_slaclip.controllers",
    "opacus_slaclip.indicator",
    "opacus_slaclip.lightning",
    "opacus_slaclip.optimizers",
    "opacus_slaclip.optimizers.release",  # what all optimizers inherit, threshold and indicator
    "opacus_slaclip.optimizers.threshold",
    "opacus_slaclip.plotting",
    "opacus_slaclip.recorder",
    "opacus_slaclip.slack",
)
REFERENCE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`([^`]+)`")


def build(target: Path, pages: Sequence[str] = PAGES) -> list[str]:
    """Write the pages and return what is wrong with them, nothing in the best case."""
    modules = [importlib.import_module(page) for page in pages]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pdoc.render.configure(
            docformat="google",
            footer_text=f"opacus-slaclip {__version__}",
            show_source=False,
        )
        pdoc.pdoc(*pages, output_directory=target)
        faults = [fault for module in modules for fault in broken_references(module)]
    return [f"pdoc: {warning.message}" for warning in caught] + faults


def broken_references(module: Any) -> Iterator[str]:
    """Yield a line for each reference of the module's docstrings that leads nowhere."""
    for entry in documented(pdoc.doc.Module(module)):
        for target in REFERENCE.findall(entry.docstring):
            owners = [entry.fullname.rpartition(".")[0], entry.fullname, entry.modulename]
            if not any(exists(name) for name in (target, *(f"{o}.{target}" for o in owners))):
                yield f"{entry.fullname}: {target} does not exist, or is not written in full"


def documented(owner: Any) -> Iterator[Any]:
    """Yield a module or class of pdoc's and what it documents itself."""
    yield owner
    for member in owner.own_members:
        if member.name.startswith("_"):
            continue
        if isinstance(member, pdoc.doc.Class):
            yield from documented(member)
        elif not isinstance(member, pdoc.doc.Module):
            yield member


def exists(name: str) -> bool:
    """Whether a dotted name leads to a module or to something in one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            found = getattr(found, part, None)
        return found is not None
    return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the pages; return the number of faults."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=TARGET, help="the folder to write to")
    options = parser.parse_args(arguments)
    faults = build(options.output)
    for fault in faults:
        print(fault, file=sys.stderr)
    print(f"{len(PAGES)} pages, {len(faults)} faults")
    return len(faults)


if __name__ == "__main__":
    sys.exit(main())
