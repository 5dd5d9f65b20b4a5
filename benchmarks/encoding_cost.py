r"""Claim: encoding the slack of a batch costs O(B + K), not O(B K).

Times ``sum_slack`` alone for batches of B norms and K slots, beside the definition written down
directly as a B x K matrix, in alternating blocks of one process (median over blocks).

    python -m benchmarks.encoding_cost --output benchmarks/results/encoding_cost.jsonl \
        --figure benchmarks/results/encoding_cost.png
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.rows import RowFile
from benchmarks.step_time import machine
from opacus_slaclip.slack import sum_slack

BATCHES = (32, 256, 2048, 16_384)
SLOTS = (1, 10, 50, 500, 5000)
MAX_ENTRIES = 2**24  # of the reference's matrix: 64 MiB


def by_matrix(norms: torch.Tensor, *, clip_norm: float, num_slots: int) -> torch.Tensor:
    """Return the slot sums by the definition: clamp(u - (j - 1), 0, 1) of each sample and slot."""
    u = num_slots * (1 - norms / clip_norm).clamp(min=0)
    slots = torch.arange(num_slots, device=norms.device)
    return (u[:, None] - slots).clamp(0, 1).sum(0)


def measure(batch: int, num_slots: int, *, blocks: int, seconds: float, device: str) -> dict:
    """Return microseconds a call of both, medians over alternating blocks, and their ratio."""
    norms = 2 * torch.rand(batch, generator=torch.Generator().manual_seed(0)).to(device)
    ways: dict[str, Callable[..., torch.Tensor]] = {"sum_slack": sum_slack}
    if batch * num_slots <= MAX_ENTRIES:
        ways["matrix"] = by_matrix
    calls = {
        name: lambda way=way: way(norms, clip_norm=1.0, num_slots=num_slots)
        for name, way in ways.items()
    }
    repeats = {name: _repeats(call, seconds) for name, call in calls.items()}
    spent = [{n: _time(call, repeats[n]) for n, call in calls.items()} for _ in range(blocks)]
    row: dict[str, Any] = {"batch_size": batch, "num_slots": num_slots}
    for name in calls:
        row[f"{name}_us"] = 1e6 * statistics.median(block[name] for block in spent)
    return row


def _repeats(call: Callable[[], Any], seconds: float) -> int:
    for _ in range(3):
        call()
    return max(1, int(seconds / _time(call, 5)))


def _time(call: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def draw(rows: list[dict[str, Any]]) -> Any:
    """Return a figure: time against K for each B, and against B for each K, on log axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    axes = (
        ("num_slots", "batch_size", "K (slots)", "B"),
        ("batch_size", "num_slots", "B (samples)", "K"),
    )
    markers = "osD^v"
    for panel, (along, line, label, name) in zip(panels, axes, strict=True):
        for i, value in enumerate(sorted({row[line] for row in rows})):
            some = sorted((r for r in rows if r[line] == value), key=lambda r: r[along])
            shade = f"C{i}"
            x = [row[along] for row in some]
            panel.plot(x, [r["sum_slack_us"] for r in some], f"-{markers[i]}", color=shade, ms=4)
            known = [(r[along], r["matrix_us"]) for r in some if "matrix_us" in r]
            panel.plot(*zip(*known, strict=True), f":{markers[i]}", color=shade, ms=3, mfc="w")
            panel.plot([], [], f"-{markers[i]}", color=shade, ms=4, label=f"{name} = {value:,}")
        panel.set(xscale="log", yscale="log", xlabel=label)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8, frameon=False)
    panels[0].set_ylabel("time of one encoding (µs)")
    figure.suptitle("solid: SlaClip's encoding; dotted, hollow: the B x K matrix", fontsize=10)
    return figure


def main(argv: list[str] | None = None) -> None:
    """Measure what is missing in the output file, print the table, draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=list(BATCHES), metavar="B")
    parser.add_argument("--num-slots", nargs="+", type=int, default=list(SLOTS), metavar="K")
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.05, help="per way and block")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=Path("outputs/encoding_cost.jsonl"))
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args(argv)
    file = RowFile(args.output, _key)
    done = {_key(row): row for row in file.read()}
    wanted = [(batch, slots) for batch in args.batch_sizes for slots in args.num_slots]
    for batch, slots in tqdm([key for key in wanted if key not in done]):
        row = measure(
            batch, slots, blocks=args.blocks, seconds=args.seconds, device=args.device
        ) | {"machine": machine(args.device)}
        done[batch, slots] = row
        file.append(row)
    print("| B | K | sum_slack, µs | B x K matrix, µs |\n|---|---|---|---|")
    for batch, slots in wanted:
        row = done[batch, slots]
        matrix = f"{row['matrix_us']:.0f}" if "matrix_us" in row else "-"
        print(f"| {batch} | {slots} | {row['sum_slack_us']:.0f} | {matrix} |")
    if args.figure is not None:
        draw([done[key] for key in wanted]).savefig(args.figure, dpi=120)


def _key(row: dict[str, Any]) -> tuple[int, int]:
    return row["batch_size"], row["num_slots"]


if __name__ == "__main__":
    main()
