"""The benchmark of the search: norms as autograd has them, statistics by hand, rows only once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import search, tasks
from opacus_slaclip.auto import AUTO_CLIP_BOUNDS

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")


def test_norms_are_those_of_single_gradients() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    samples = tasks.Samples(torch.randn(70, 3), torch.randint(2, (70,)))  # three chunks
    found = search.gradient_norms(module, samples)
    for index in (0, 31, 32, 69):
        module.zero_grad()
        inputs, labels = samples.__getitems__([index])
        nn.functional.cross_entropy(module(inputs), labels).backward()
        single = torch.cat([p.grad.flatten() for p in module.parameters()]).norm()
        assert float(found[index]) == pytest.approx(float(single), rel=1e-5)
    assert len(found) == 70


def test_a_summary_by_hand() -> None:
    rising = [
        [0.1, 0.4, 0.9, 3.0, 1.0],  # inside, [0.5, 4], from its third; 1.5 beyond
        [0.1, 0.2, 0.3, 0.4, 0.45],  # never; not beyond
        [0.1, 0.6, 5.0, 1.0, 1.2],  # from its fourth, having left again; 2.5 beyond
    ]
    found = search.summarize(rising, low=1.0, high=2.0)
    assert (found["steps"], found["steps_90"]) == (3, 5)
    assert (found["overshoot"], found["overshoot_90"]) == (1.5, 2.5)
    assert (found["end_low"], found["end"], found["end_high"]) == (0.45, 1.0, 1.2)
    assert found["off"] == 1
    falling = search.summarize([[9.0, 5.0, 0.25, 1.0]], low=1.0, high=2.0)
    assert (falling["steps"], falling["overshoot"]) == (3, 4.0)
    assert search.summarize([[1.0, 1.0]], low=1.0, high=2.0)["steps"] == 0
    tens = search.summarize([[float(k)] for k in range(1, 11)], low=0.5, high=1.0)
    assert tens["overshoot_90"] == 1.0  # what starts above did not go beyond
    assert tens["off"] == 8


@pytest.mark.parametrize("start", [1e-6, 1e6])
def test_a_search_over_equal_norms_ends_at_them(start: float) -> None:
    norms = torch.full((5000,), 0.3, dtype=torch.float64)
    track = search.search(norms, start=start, batch_size=256, sigma=1.0, seed=0)
    assert track[0] == start
    assert len(track) == search.NUM_STEPS + 1
    assert track[-1] == pytest.approx(0.3, rel=0.1)


def test_a_search_stays_within_the_bounds_of_auto() -> None:
    gone = torch.zeros(1000, dtype=torch.float64)
    track = search.search(gone, start=1e6, batch_size=256, sigma=1.0, seed=0)
    assert min(track) == track[-1] == AUTO_CLIP_BOUNDS[0]


def test_rows_are_added_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--seeds", "3", "--train-steps", "20"]
    command += ["--output", str(tmp_path / "rows.jsonl")]
    assert search.main([*command, "--batch-sizes", "256"]) == 0
    assert search.main([*command, "--batch-sizes", "64", "256"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    num_starts = len(search.STARTS)
    assert [(row["batch_size"], row["state"]) for row in rows] == [
        (batch, state)
        for batch in (256, 64)
        for state in ("fresh", "trained")
        for _ in range(num_starts)
    ]
    assert {row["seeds"] for row in rows} == {3}
    assert all(row["steps"] <= 30 and row["off"] == 0 for row in rows)
    assert "| median × 1e+06 | 64 |" in capsys.readouterr().out
    assert search.main([*command, "--batch-sizes", "64", "--sigma", "2"]) == 0  # another setting
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 6 * num_starts
    capsys.readouterr()
    assert search.main(["--tasks", "mnist", "--output", str(tmp_path / "other.jsonl")]) == 1
    assert "--data-root" in capsys.readouterr().err
