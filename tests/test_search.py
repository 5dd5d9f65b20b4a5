"""The benchmark of the search: norms as autograd has them, statistics by hand, rows only once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import search, tasks

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
    rising = [[0.1, 0.4, 0.9, 3.0, 1.0], [0.1, 0.2, 0.3, 0.4, 0.45], [0.1, 0.6, 1.0, 1.0, 1.0]]
    found = search.summarize(rising, low=1.0, high=2.0)
    assert found["steps"] == 2  # 2, never, 1: within [0.5, 4]
    assert found["overshoot"] == 1.0  # 1.5, 1, 1
    assert found["overshoot_90"] == 1.0
    assert (found["end_low"], found["end"], found["end_high"]) == (0.45, 1.0, 1.0)
    assert found["off"] == 1
    falling = search.summarize([[9.0, 5.0, 0.25, 1.0]], low=1.0, high=2.0)
    assert (falling["steps"], falling["overshoot"]) == (3, 4.0)


@pytest.mark.parametrize("start", [1e-6, 1e6])
def test_a_search_over_equal_norms_ends_at_them(start: float) -> None:
    norms = torch.full((5000,), 0.3, dtype=torch.float64)
    track = search.search(norms, start=start, batch_size=256, sigma=1.0, seed=0)
    assert len(track) == search.NUM_STEPS + 1
    assert track[-1] == pytest.approx(0.3, rel=0.1)


def test_rows_are_added_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--scales", "1", "--seeds", "3", "--train-steps", "20"]
    command += ["--output", str(tmp_path / "rows.jsonl")]
    assert search.main([*command, "--batch-sizes", "256"]) == 0
    assert search.main([*command, "--batch-sizes", "64", "256"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["state"], row["batch_size"]) for row in rows] == [
        *(("fresh", 256), ("fresh", 256), ("trained", 256), ("trained", 256)),
        *(("fresh", 64), ("fresh", 64), ("trained", 64), ("trained", 64)),
    ]
    assert all(row["steps"] <= 30 and row["off"] == 0 for row in rows)
    assert "| digits | trained | 1 | 64 | 1e+06 |" in capsys.readouterr().out
    assert search.main(["--tasks", "mnist", "--output", str(tmp_path / "other.jsonl")]) == 1
    assert "--data-root" in capsys.readouterr().err
