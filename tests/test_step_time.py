"""The step-time benchmark: paired medians by hand, a real row, rows that are not measured twice."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import step_time

ROW = {
    "model": "small_cnn",
    "mode": "hooks",
    "dtype": "float32",
    "batch_size": 4,
    "num_slots": 3,
}
BLOCKS = [
    {"flat": 1.0, "slaclip": 1.5, "adaptive": 3.0},
    {"flat": 2.0, "slaclip": 2.0, "adaptive": 2.0},
    {"flat": 4.0, "slaclip": 4.4, "adaptive": 2.2},
]
PEAKS = {"flat": 2.0**30, "slaclip": 1.1 * 2**30, "adaptive": 1.2 * 2**30}


def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_time, "make_step", lambda *_: None)
    monkeypatch.setattr(
        step_time, "time_blocks", lambda steps, *_: [{m: b[m] for m in steps} for b in BLOCKS]
    )
    monkeypatch.setattr(step_time, "peak_memory", lambda row, method, device: PEAKS[method])


def options(*methods: str) -> argparse.Namespace:
    return step_time.parse(["--methods", *methods, "--device", "cpu"])


def test_ratios_are_paired_and_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch)
    row = step_time.measure(ROW, options("flat", "slaclip", "adaptive"))
    assert row["flat_ms"] == 2000.0
    assert row["slaclip_time_ratio"] == pytest.approx(1.1)  # of 1.5, 1, 1.1; not 2 / 2
    assert row["slaclip_adaptive_time_ratio"] == pytest.approx(1.0)  # of 0.5, 1, 2
    assert row["slaclip_memory_ratio"] == pytest.approx(1.1)
    assert row["slaclip_adaptive_memory_ratio"] == pytest.approx(1.1 / 1.2)
    assert "| 1.100 | 1.000 (" in step_time.table([row])


def test_adaptive_clipping_has_hooks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch)
    row = step_time.measure(ROW | {"mode": "ghost"}, options("flat", "slaclip", "adaptive"))
    assert not [name for name in row if "adaptive" in name]
    assert step_time.table([row]).endswith("| 1.100 |  |  |")


def test_a_row_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "rows.jsonl"
    command = ["--models", "small_cnn", "--batch-sizes", "4", "--blocks", "2", "--seconds", "0"]
    command += ["--no-memory", "--device", "cpu", "--output", str(output)]
    step_time.main(command)  # real steps

    def no_more(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(step_time, "measure", no_more)
    step_time.main(command)
    (row,) = map(json.loads, output.read_text().splitlines())
    assert row["flat_ms"] > 0
    assert row["slaclip_time_ratio"] > 0
    assert row["machine"]["threads"] >= 1
    assert "| small_cnn | hooks | float32 | 4 | 10 |" in capsys.readouterr().out
