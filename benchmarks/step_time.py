"""Claim: a step of SlaClip costs what a step of flat clipping costs, in time and in memory.

Times whole steps (zero_grad, forward, backward, step) of private optimizers in one process, in
blocks that alternate between the methods, and reports the median over blocks of the paired ratio.
Peak memory is the maximum resident size of separate processes (the allocator's peak on a GPU).

    python -m benchmarks.step_time
    python -m benchmarks.step_time --models lenet_cnn --modes hooks --num-slots 10 500

Each finished row is appended to ``--output`` at once, and rows that are there are not run again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import resource
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import opacus
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import opacus_slaclip
from benchmarks import models

# name: (model, makes the inputs of n samples, classes, batch size)
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor], int, int]] = {
    "mlp": (models.mlp, lambda n: torch.randn(n, 1, 28, 28), 10, 256),
    "small_cnn": (models.small_cnn, lambda n: torch.randn(n, 1, 28, 28), 10, 256),
    "lenet_cnn": (models.lenet_cnn, lambda n: torch.randn(n, 1, 28, 28), 10, 64),
    "lstm": (models.CharLSTM, lambda n: torch.randint(0, 60, (n, 16)), 18, 64),
    "transformer": (models.Transformer, lambda n: torch.randint(0, 200, (n, 64)), 10, 32),
}
METHODS = ("flat", "slaclip", "adaptive")
# What is compared: key in a row: (method, what it is divided by).
_PAIRS = {
    "slaclip": ("slaclip", "flat"),
    "adaptive": ("adaptive", "flat"),
    "slaclip_adaptive": ("slaclip", "adaptive"),
}
_ADAPTIVE = {
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 50.0,
    "min_clipbound": 0.1,
}


def make_step(row: dict[str, Any], method: str, device: str) -> Callable[[], None]:
    """Return a function that takes one private step on a fixed batch."""
    make_model, make_inputs, classes, _ = CASES[row["model"]]
    batch = row["batch_size"]
    torch.manual_seed(0)
    inputs, labels = make_inputs(batch).to(device), torch.randint(0, classes, (batch,)).to(device)
    model = make_model().to(device)
    autocast = row["dtype"] == "bfloat16"
    reduction = "sum" if autocast else "mean"  # of gradients in bfloat16 a mean is refused
    options: dict[str, Any] = {"clipping": method, "loss_reduction": reduction}
    if method == "slaclip":
        options["num_slots"] = row["num_slots"]
    elif method == "adaptive":
        options |= _ADAPTIVE | {"unclipped_num_std": batch / 20}
    private = opacus_slaclip.PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        data_loader=DataLoader(TensorDataset(torch.zeros(batch * 4, 1)), batch_size=batch),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=row["mode"],
        criterion=nn.CrossEntropyLoss(reduction=reduction),
        **options,
    )
    module, optimizer = private[:2]
    is_ghost = row["mode"] == "ghost"
    criterion = private[2] if is_ghost else nn.CrossEntropyLoss(reduction=reduction)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            loss = criterion(module(inputs), labels)
        loss.backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def time_blocks(
    steps: dict[str, Callable[[], None]], num_blocks: int, seconds: float
) -> Iterator[dict[str, float]]:
    """Yield, block by block, the seconds a step of each method takes, side by side."""
    for step in steps.values():
        for _ in range(3):
            step()
    start = time.perf_counter()
    for step in steps.values():
        step()
    per_block = max(1, int(seconds * len(steps) / (time.perf_counter() - start)))
    order = list(steps)
    for _ in range(num_blocks):
        order.reverse()  # so that a drift of the machine favours no method
        spent = dict.fromkeys(order, 0.0)
        for _ in range(per_block):
            for method in order:
                begin = time.perf_counter()
                steps[method]()
                spent[method] += time.perf_counter() - begin
        yield {method: total / per_block for method, total in spent.items()}


def peak_memory(row: dict[str, Any], method: str, device: str) -> int:
    """Return the peak memory in bytes of a fresh process that takes five steps."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return int(pool.apply(_peak_memory, (row, method, device)))


def _peak_memory(row: dict[str, Any], method: str, device: str) -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    step = make_step(row, method, device)
    for _ in range(5):
        step()
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(row: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Return the row with times, ratios to flat and peak memories."""
    methods = [m for m in args.methods if m != "adaptive" or row["mode"] == "hooks"]
    steps = {method: make_step(row, method, args.device) for method in methods}
    blocks = list(time_blocks(steps, args.blocks, args.seconds))
    result = dict(row)
    for method in methods:
        result[f"{method}_ms"] = 1e3 * statistics.median(b[method] for b in blocks)
    for name, (method, base) in _PAIRS.items():
        if {method, base} <= set(methods):
            ratios = sorted(b[method] / b[base] for b in blocks)
            result[f"{name}_time_ratio"] = statistics.median(ratios)
            quarter = len(ratios) // 4
            result[f"{name}_time_ratio_iqr"] = [ratios[quarter], ratios[-1 - quarter]]
    if args.memory:
        peaks = {method: peak_memory(row, method, args.device) for method in methods}
        result["flat_peak_mib"] = peaks["flat"] / 2**20
        for name, (method, base) in _PAIRS.items():
            if {method, base} <= set(methods):
                result[f"{name}_memory_ratio"] = peaks[method] / peaks[base]
    return result


def rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows that are asked for; ghost clipping has no bfloat16."""
    return [
        {
            "model": model,
            "mode": mode,
            "dtype": dtype,
            "batch_size": batch or CASES[model][3],
            "num_slots": num_slots,
        }
        for model in args.models
        for mode in args.modes
        for dtype in args.dtypes
        for batch in (args.batch_sizes or [None])
        for num_slots in args.num_slots
        if not (mode == "ghost" and dtype == "bfloat16")
    ]


def machine(device: str) -> dict[str, Any]:
    """Return what the numbers depend on."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "opacus": opacus.__version__,
        "opacus_slaclip": opacus_slaclip.__version__,
    }


def table(results: list[dict[str, Any]]) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| model | mode | dtype | batch | K | flat, ms | slaclip / flat (quartiles) | memory | "
        "slaclip / adaptive (quartiles) | memory |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        cells = [r["model"], r["mode"], r["dtype"], r["batch_size"], r["num_slots"]]
        cells += [f"{r['flat_ms']:.2f}", *_ratios(r, "slaclip"), *_ratios(r, "slaclip_adaptive")]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _ratios(row: dict[str, Any], name: str) -> tuple[str, str]:
    if f"{name}_time_ratio" not in row:
        return "", ""
    low, high = row[f"{name}_time_ratio_iqr"]
    memory = row.get(f"{name}_memory_ratio")
    time_ratio = f"{row[f'{name}_time_ratio']:.3f} ({low:.3f} to {high:.3f})"
    return time_ratio, "" if memory is None else f"{memory:.3f}"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--modes", nargs="+", choices=("hooks", "ghost"), default=["hooks"])
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=("float32", "bfloat16"))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["flat", "slaclip"])
    parser.add_argument("--num-slots", nargs="+", type=int, default=[10], metavar="K")
    parser.add_argument("--batch-sizes", nargs="+", type=int, metavar="B")
    parser.add_argument("--blocks", type=int, default=25, help="paired blocks a row")
    parser.add_argument("--seconds", type=float, default=0.4, help="per method and block")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=Path("outputs/step_time.jsonl"))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Measure what is missing in the output file and print the table."""
    warnings.simplefilter("ignore")  # Opacus's notices; nothing here is trained
    args = parse(argv)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    done = {}
    if args.output.exists():
        for line in args.output.read_text().splitlines():
            result = json.loads(line)
            done[_key(result)] = result
    print(machine(args.device))
    wanted = rows(args)
    for row in tqdm([row for row in wanted if _key(row) not in done]):
        done[_key(row)] = measure(row, args)
        with args.output.open("a") as file:
            file.write(json.dumps(done[_key(row)] | {"machine": machine(args.device)}) + "\n")
    print(table([done[_key(row)] for row in wanted]))


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[k] for k in ("model", "mode", "dtype", "batch_size", "num_slots"))


if __name__ == "__main__":
    main()
