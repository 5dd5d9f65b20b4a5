"""The step-time benchmark: paired medians by hand, real rows measured once, memory that is seen."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import step_time

SETTING = {
    "device": "cpu",
    "model": "small_cnn",
    "mode": "hooks",
    "dtype": "float32",
    "batch_size": 4,
}
BLOCKS = [
    {"flat 3": 1.0, "slaclip 3": 1.5, "slaclip 5": 1.0, "adaptive 3": 3.0},
    {"flat 3": 2.0, "slaclip 3": 2.0, "slaclip 5": 3.0, "adaptive 3": 2.0},
    {"flat 3": 4.0, "slaclip 3": 4.4, "slaclip 5": 4.8, "adaptive 3": 2.2},
]
PEAKS = {"flat": 1.0, "slaclip": 1.1, "adaptive": 1.2}


def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    def peak(row: dict[str, Any], method: str, device: str) -> float:
        return 2**30 * (PEAKS[method] + (row["num_slots"] == 5))

    monkeypatch.setattr(step_time, "make_step", lambda *_: None)
    monkeypatch.setattr(
        step_time, "time_blocks", lambda steps, *_: [{m: b[m] for m in steps} for b in BLOCKS]
    )
    monkeypatch.setattr(step_time, "peak_memory", peak)


def options(*methods: str) -> argparse.Namespace:
    return step_time.parse(["--methods", *methods, "--device", "cpu", "--memory"])


def test_ratios_are_paired_and_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch)
    rows = step_time.measure(SETTING, [3, 5], options("flat", "slaclip", "adaptive"))
    assert [row["num_slots"] for row in rows] == [3, 5]
    assert [row["flat_ms"] for row in rows] == [2000.0] * 2
    three, five = rows
    assert three["slaclip_time_ratio"] == pytest.approx(1.1)  # of 1.5, 1, 1.1; not 2 / 2
    assert three["slaclip_time_ratio_iqr"] == pytest.approx([1.0, 1.5])  # of three: the ends
    assert three["slaclip_adaptive_time_ratio"] == pytest.approx(1.0)  # of 0.5, 1, 2
    assert five["slaclip_time_ratio"] == pytest.approx(1.2)  # of 1, 1.5, 1.2
    assert five["slaclip_adaptive_time_ratio"] == pytest.approx(1.5)  # of 1/3, 1.5, 2.2
    head, _, line = (part.split(" | ") for part in step_time.table(rows).splitlines())
    shown = dict(zip(head, line, strict=True))
    assert (shown["flat, ms"], shown["flat, MiB"]) == ("2000.00", "1024")
    assert (shown["K = 3"], shown["K = 5"]) == ("1.100 ± 0.250", "1.200 ± 0.250")
    assert shown["slaclip / adaptive"] == "1.250"  # between 1 and 1.5
    assert shown["memory / flat"] == "2.100"  # of 1.1 and 2.1
    assert shown["memory / adaptive |"] == f"{2.1 / 1.2:.3f} |"


def test_adaptive_clipping_has_hooks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch)
    setting = SETTING | {"mode": "ghost"}
    rows = step_time.measure(setting, [3], options("flat", "slaclip", "adaptive"))
    assert not [name for name in rows[0] if "adaptive" in name]
    assert step_time.table(rows).endswith("| 1.100 ± 0.250 |  |  | 1.100 |  |")


def test_a_row_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "rows.jsonl"
    command = ["--models", "small_cnn", "--batch-sizes", "32", "--blocks", "2", "--seconds", "0"]
    command += ["--no-memory", "--device", "cpu", "--output", str(output)]
    step_time.main([*command, "--num-slots", "2"])  # real steps
    real, measured = step_time.measure, []

    def measure(setting: Any, slots: list[int], args: Any) -> Any:
        measured.append(slots)
        return real(setting, slots, args)

    monkeypatch.setattr(step_time, "measure", measure)
    step_time.main([*command, "--num-slots", "2", "7"])
    step_time.main([*command, "--num-slots", "7", "2"])
    assert measured == [[7]]
    for more in (["--methods", "slaclip", "adaptive"], ["--memory"]):
        step_time.main([*command, "--num-slots", "2", *more])  # what a row lacks is measured
    assert measured == [[7], [2], [2]]
    two, seven, *_ = map(json.loads, output.read_text().splitlines())
    assert (two["num_slots"], seven["num_slots"]) == (2, 7)
    assert two["flat_ms"] > 0
    assert two["slaclip_time_ratio"] > 0
    assert two["machine"]["threads"] >= 1
    assert "| small_cnn | hooks | float32 | 32 |" in capsys.readouterr().out


@pytest.mark.skipif(not step_time._PROCESS.exists(), reason="needs /proc")
def test_peak_memory_is_that_of_the_steps_alone() -> None:
    ballast = torch.ones(2**28)  # 1 GiB of this process, which is not the measured one's
    row = SETTING | {"model": "mlp", "batch_size": 64, "num_slots": 10}
    per_sample_gradients = 4 * 64 * 203_530
    assert per_sample_gradients < step_time.peak_memory(row, "slaclip", "cpu") < ballast.nbytes / 2
