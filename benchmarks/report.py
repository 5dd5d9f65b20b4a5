"""Make every figure and table of a comparison from its results files.

    python -m benchmarks.report benchmarks/results/compare.jsonl --output-dir report

Reads the rows of ``benchmarks.compare`` and writes, per task, model and privacy budget, heatmaps,
accuracy against the learning rate, threshold trajectories and released distributions of gradient
norms; ``report.md`` with the tables and figures; and the numbers as ``best.csv``,
``robustness.csv``, ``pool.csv`` and, where methods without C_0 ran, ``translated.csv``. The same
rows give the same bytes.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from PIL import Image

from benchmarks import tables
from benchmarks.figures import accuracy_lines, heatmaps
from benchmarks.figures_thresholds import best_trajectories, indicator_curves, starts
from benchmarks.report_pools import Group, group
from benchmarks.report_rows import Rows, Run, load

_PALETTE = Image.Quantize.MAXCOVERAGE
# file name: (what draws it, caption)
FIGURES = {
    "heatmaps": (
        heatmaps,
        "Mean test accuracy over the pool, on the pool's seeds. One color scale for all panels, "
        "at most 20 points wide: what is worse has the darkest color. The frame marks the cell "
        "chosen by validation accuracy.",
    ),
    "learning-rate": (
        accuracy_lines,
        "Test accuracy at each method's best C_0 and schedule by validation. Means over all seeds "
        "that finished, whiskers from the lowest to the highest; markers are shifted sideways to "
        "stay apart.",
    ),
    "thresholds": (
        best_trajectories,
        "Thresholds at each method's best cell by validation: median over seeds, band from the "
        "lowest to the highest. Methods whose rows have no threshold are left out.",
    ),
    "starts": (
        starts,
        "Thresholds of the methods that move them, from every C_0 of the pool (learning rate and "
        "schedule of the method's best cell): median and band as above.",
    ),
    "norms": (
        indicator_curves,
        "Slack indicators at the method's best cell, first of the pool's seeds: each is the "
        "distribution function of the samples' gradient norms up to the threshold, averaged over "
        "bins and noisy, as released at no further privacy cost.",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 1 if no row could be used."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="+", type=Path, help="files of benchmarks.compare")
    parser.add_argument("--output-dir", type=Path, required=True, help="is made if missing")
    options = parser.parse_args(arguments)
    rows = load(options.results)
    for place in rows.unreadable:
        print(f"skipped {place}: not a line of JSON", file=sys.stderr)
    if not rows.runs:
        print(f"no rows in {', '.join(map(str, options.results))}", file=sys.stderr)
        return 1
    written = write_report(rows, options.output_dir, _command(options))
    print("\n".join(str(path) for path in written))
    return 0


def write_report(rows: Rows, output_dir: Path, command: str) -> list[Path]:
    """Write figures, tables and ``report.md`` into a directory; returns the paths written."""
    output_dir.mkdir(parents=True, exist_ok=True)
    groups = group(rows.runs)
    files: dict[str, str | bytes] = {}
    sections = []
    for each in groups:
        images = {kind: draw(each) for kind, (draw, _) in FIGURES.items()}
        drawn = {kind: figure for kind, figure in images.items() if figure is not None}
        files |= {f"{each.name}-{kind}.png": to_png(figure) for kind, figure in drawn.items()}
        sections.append(_section(each, list(drawn)))
    for name, make in (
        ("best", tables.best_of_pool),
        ("robustness", tables.robustness),
        ("pool", tables.pool_cells),
        ("translated", tables.translated),
    ):
        records = [make(each) for each in groups]
        if any(records):
            files[f"{name}.csv"] = tables.to_csv(groups, records)
    files["report.md"] = "\n\n".join(["# Results", *sections, _origin(rows, command)]) + "\n"
    for name, content in files.items():
        data = content.encode() if isinstance(content, str) else content
        (output_dir / name).write_bytes(data)
    return [output_dir / name for name in files]


def to_png(figure: Figure) -> bytes:
    """Return a figure as the bytes of a PNG file, without versions or dates in it."""
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    small = io.BytesIO()
    # A palette makes the file a third as large; of the ways to choose it, this one is at most
    # about ten of 255 levels off anywhere.
    image = Image.open(out).convert("RGB").quantize(256, _PALETTE, dither=Image.Dither.NONE)
    image.save(small, format="png", optimize=True)
    return small.getvalue()


def _section(each: Group, kinds: Iterable[str]) -> str:
    parts = [
        f"## {each.title}",
        _settings(each),
        "**Best of pool**",
        tables.best_markdown(each),
        tables.BEST_NOTE,
        "**Robustness over the pool**",
        tables.robustness_markdown(each),
        tables.robustness_note(each),
    ]
    free = tables.translated_markdown(each)
    if free:
        parts += [
            "**At the one learning rate that flat's best cell gives**",
            free,
            tables.TRANSLATED_NOTE,
        ]
    for kind in kinds:
        caption = FIGURES[kind][1]
        parts += [f"![{each.title}: {kind}]({each.name}-{kind}.png)", caption]
    return "\n\n".join(parts)


def _settings(each: Group) -> str:
    named = {"task", "model", "epsilon"}
    shared = [f"{name.replace('_', ' ')} {value}" for name, value in each.settings.items()]
    shared = [text for name, text in zip(each.settings, shared, strict=True) if name not in named]
    runs = [run for pool in each.pools.values() for run in pool.runs.values() if not run.failed]
    axes = {
        "learning rates": {f"{c.learning_rate:g}": None for c in each.configs},
        "C_0": {f"{c:g}": None for c in sorted({c.clip_norm for c in each.configs})},
        "schedules": {c: None for c in sorted({c.schedule for c in each.configs})},
    }
    text = [f"Shared by all methods: {', '.join(shared)}." if shared else ""]
    text.append("Pool: " + "; ".join(f"{k} {', '.join(v)}" for k, v in axes.items()) + ".")
    for name, label in (
        ("noise_multiplier", "Noise multiplier"),
        ("num_steps", "Steps"),
        ("epsilon_spent", "ε spent"),
        ("grad_sample_mode", "Gradient mode"),
    ):
        values = _distinct(runs, name)
        if values:
            text.append(f"{label}: {values}.")
    return " ".join(filter(None, text))


def _distinct(runs: Iterable[Run], name: str) -> str:
    """Return a field's values over rows: all if few, else their range."""
    values = {run.row[name] for run in runs if run.row.get(name) is not None}
    if not all(isinstance(value, int | float) for value in values):
        return ", ".join(sorted(map(str, values)))
    shown = sorted({f"{value:.6g}" for value in values}, key=float)
    return ", ".join(shown) if len(shown) < 4 else f"{shown[0]} to {shown[-1]}"


def _origin(rows: Rows, command: str) -> str:
    """Return the section on where the numbers come from, from the rows themselves."""
    failed = sum(run.failed for run in rows.runs)
    seconds = math.fsum(run.row.get("seconds") or 0.0 for run in rows.runs)
    lines = [
        "## How these numbers were made",
        f"{len(rows.runs)} cells ({failed} errors), {seconds / 3600:.2f} hours summed over "
        "cells. Figures and tables:",
        f"```sh\n{command}\n```",
    ]
    commands = sorted({run.row["command"] for run in rows.runs if run.row.get("command")})
    if commands:
        lines += ["Cells:", "```sh\n" + "\n".join(commands) + "\n```"]
    machines = sorted({run.row["machine"] for run in rows.runs if run.row.get("machine")})
    if machines:
        lines.append("Machine: " + "; ".join(machines) + ".")
    versions = _versions(run.row.get("versions") or {} for run in rows.runs)
    if versions:
        lines.append(f"Versions: {versions}.")
    if failed:
        lines.append("Errors:\n\n" + "\n".join(_error(run) for run in rows.runs if run.failed))
    if rows.unreadable:
        lines.append("Lines skipped as no JSON: " + ", ".join(rows.unreadable) + ".")
    return "\n\n".join(lines)


def _versions(found: Iterable[Mapping[str, Any]]) -> str:
    merged: dict[str, set[str]] = {}
    for versions in found:
        for name, version in versions.items():
            merged.setdefault(name, set()).add(str(version))
    return ", ".join(f"{name} {' / '.join(sorted(merged[name]))}" for name in sorted(merged))


def _error(run: Run) -> str:
    settings = dict(run.settings)
    place = f"{settings['task']}, ε = {settings['epsilon']:g}, {run.method}"
    config = run.config
    where = f"lr {config.learning_rate:g}, C_0 {config.clip_norm:g}, {config.schedule}"
    text = json.dumps(str(run.row["error"]).strip().splitlines()[-1:], ensure_ascii=False)[1:-1]
    return f"- {place}, {where}, seed {run.seed}: {text}"


def _command(options: argparse.Namespace) -> str:
    """Return the command line, with paths as seen from the current directory."""
    paths = [_relative(path) for path in (*options.results, options.output_dir)]
    words = ["python", "-m", "benchmarks.report", *paths[:-1], "--output-dir", paths[-1]]
    return shlex.join(words)


def _relative(path: Path) -> str:
    here = os.path.relpath(path)
    return path.name if here.startswith(os.pardir) else here


if __name__ == "__main__":
    sys.exit(main())
