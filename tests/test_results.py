"""The committed results: reports say what the rows say, and the README what the reports say."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import fmean, stdev

import pytest

from benchmarks import step_time, tables
from benchmarks.report_pools import group
from benchmarks.report_rows import load
from benchmarks.rows import RowFile

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
        assert 0.9999 * budget <= spent <= budget


def test_the_readme_has_the_tables_of_every_report() -> None:
    text = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    sections = {part.split(":")[0].lower(): part for part in re.split(r"^### ", text, flags=re.M)}
    for folder in REPORTS:
        (each,) = group(load([folder.with_suffix(".jsonl")]).runs)
        for way in (tables.best_markdown, tables.robustness_markdown):
            assert way(each) in sections[folder.name]
        assert tables.translated_markdown(each) in text


def test_the_main_readme_shows_what_mnist_gave() -> None:
    (each,) = group(load([RESULTS / "mnist.jsonl"]).runs)
    text = (BENCHMARKS.parent / "README.md").read_text(encoding="utf-8")
    for best, pool in zip(tables.best_of_pool(each), tables.robustness(each), strict=True):
        cell = f"{100 * best['test_mean']:.1f} ± {100 * best['test_std']:.1f} %"
        within = f"{pool['num_within_overall_best']} of {pool['pool_size']}"
        row = f"| {best['method']} | {cell} | {100 * pool['test_mean']:.1f} % | {within} |"
        assert row in text


def test_the_means_over_rates_are_those_of_the_rows() -> None:
    text = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    shown: dict[str, list[str]] = {"auto-s at R = 1": [], "slaclip-auto": []}
    for task in ("mnist", "imdb", "names", "digits"):
        (each,) = group(load([RESULTS / f"{task}.jsonl"]).runs)
        rates = {config.learning_rate for config in each.pools["auto-s"].configs}
        for label, cells in shown.items():
            pool = each.pools[label.split(" ")[0]]
            means = [
                mean
                for config, mean in pool.means("test").items()
                if pool.start(config) in (1.0, None) and config.learning_rate in rates
            ]
            cells.append(f"{100 * fmean(means):.1f}")
    for label, cells in shown.items():
        assert f"| {label} | {' | '.join(cells)} |" in text


def test_the_table_of_step_times_is_that_of_its_rows() -> None:
    rows = RowFile(RESULTS / "step_time.jsonl", lambda row: row["model"]).read()
    text = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    assert step_time.table(rows) in text


def test_the_table_of_ideas_is_that_of_its_rows() -> None:
    text = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    (head,) = re.findall(r"\| task, B \| rate \| (.*) \| seeds \|", text)
    found: dict[tuple[str, int, float], dict[str, list[float]]] = defaultdict(dict)
    mnist = [run for run in load([RESULTS / "mnist.jsonl"]).runs if run.method == "slaclip-auto"]
    ideas = load([RESULTS / "ideas.jsonl"]).runs
    rates = {run.config.learning_rate for run in ideas if dict(run.settings)["task"] == "mnist"}
    same = [run for run in mnist if run.config.learning_rate in rates and run.seed == 42]
    for run in [*ideas, *same]:
        cell = run.row["cell"]
        setting = found[cell["task"], cell["batch_size"], cell["learning_rate"]]
        setting.setdefault(run.method, []).append(100 * run.row["test_accuracy"])

    def shown(values: list[float]) -> str:
        spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
        return f"{fmean(values):.1f}{spread}" if values else "–"

    for (task, batch_size, rate), accuracies in found.items():
        cells = " | ".join(shown(accuracies.get(method, [])) for method in head.split(" | "))
        seeds = max(map(len, accuracies.values()))
        assert f"| {task}, {batch_size} | {rate:g} | {cells} | {seeds} |" in text


def test_the_table_of_the_search_is_that_of_its_rows() -> None:
    text = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in (RESULTS / "search.jsonl").read_text().splitlines()]
    assert {row["task"] for row in rows} == {"digits", "mnist", "imdb", "names"}
    for state, batch_size in {(row["state"], row["batch_size"]) for row in rows}:
        some = [r for r in rows if (r["state"], r["batch_size"]) == (state, batch_size)]
        has_note = (state, batch_size) == ("trained", 64)
        steps = max(r["steps"] for r in some if not (has_note and r["task"] == "names"))
        note = "; Names from below: 26 or never" if has_note else ""
        overshoot, off = max(r["overshoot"] for r in some), sum(r["off"] for r in some)
        start = f"| {state} | {batch_size} | {steps:g}{note} |"
        assert f"{start} {overshoot:.2f} | {off} of {sum(r['seeds'] for r in some)} |" in text
    names = [
        r for r in rows if (r["task"], r["state"], r["batch_size"]) == ("names", "trained", 64)
    ]
    assert {r["steps"] for r in names if r["start"] != 1e6} == {26, 61}  # 61: not in 60 steps
