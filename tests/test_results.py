"""The committed results: reports say what the rows say, and the README what the reports say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import methods, tables
from benchmarks.report_pools import group
from benchmarks.report_rows import load

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
RESULTS = BENCHMARKS / "results"
REPORTS = sorted(path.parent for path in RESULTS.glob("*/report.md"))


def made(folder: Path) -> list[str]:
    """Return the tables that the rows of a report give now."""
    groups = group(load([folder.with_suffix(".jsonl")]).runs)
    ways = (tables.best_markdown, tables.robustness_markdown, tables.translated_markdown)
    return [way(each) for each in groups for way in ways]


@pytest.mark.parametrize("folder", REPORTS, ids=lambda folder: folder.name)
def test_a_report_is_that_of_its_rows(folder: Path) -> None:
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert all(table in text for table in made(folder))


@pytest.mark.parametrize("folder", REPORTS, ids=lambda folder: folder.name)
def test_every_run_spent_the_budget_and_no_more(folder: Path) -> None:
    runs = load([folder.with_suffix(".jsonl")]).runs
    finished = [run for run in runs if not run.failed]
    assert finished
    for run in finished:
        budget, spent = run.row["cell"]["epsilon"], run.row["epsilon_spent"]
        assert 0.998 * budget <= spent <= budget


def test_the_readmes_rows_are_those_of_the_reports() -> None:
    known = {line for folder in REPORTS for table in made(folder) for line in table.splitlines()}
    lines = (BENCHMARKS / "README.md").read_text(encoding="utf-8").splitlines()
    shown = [line for line in lines if re.match(r"\| (\S+) \|", line)]
    shown = [line for line in shown if line.split(" ")[1] in methods.METHODS]
    assert len(shown) > 20
    assert [line for line in shown if line not in known] == []


def test_the_main_readme_shows_what_mnist_gave() -> None:
    (each,) = group(load([RESULTS / "mnist.jsonl"]).runs)
    text = (BENCHMARKS.parent / "README.md").read_text(encoding="utf-8")
    for best, pool in zip(tables.best_of_pool(each), tables.robustness(each), strict=True):
        cell = f"{100 * best['test_mean']:.1f} ± {100 * best['test_std']:.1f} %"
        within = f"{pool['num_within_overall_best']} of {pool['pool_size']}"
        row = f"| {best['method']} | {cell} | {100 * pool['test_mean']:.1f} % | {within} |"
        assert row in text
