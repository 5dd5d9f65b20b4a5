"""Claim: a step of SlaClip costs what a step of flat clipping costs, in time and in memory.

Times whole steps (forward, backward, step, zero_grad) of private optimizers in one process, in
blocks that alternate between the methods, and reports the median over blocks of the paired ratio,
with half the distance between its quartiles. Peak memory is what model, batch and steps add to the
resident size of a separate process (the allocator's peak on a GPU).

    python -m benchmarks.step_time
    python -m benchmarks.step_time --models lenet_cnn --num-slots 10 500 --batch-sizes 64

Numbers of slots that are measured together share their blocks of flat and adaptive clipping. They
are appended to ``--output`` at once, and rows that are there are not run again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import opacus_slaclip
from benchmarks import models
from benchmarks.cells import versions
from benchmarks.rows import RowFile

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
_PROCESS = Path("/proc/self/status")
_MEMORY_STEPS = 3
# Forked from a server that has imported what takes seconds to import, and nothing else.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["opacus_slaclip", "benchmarks.models"])
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
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            loss = criterion(module(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()  # at the end, so that a method that waits keeps no gradients
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def time_blocks(
    steps: dict[str, Callable[[], None]], num_blocks: int, seconds: float
) -> Iterator[dict[str, float]]:
    """Yield, block by block, the seconds a step of each method takes, side by side."""
    for step in steps.values():
        for _ in range(2):
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
    """Return the bytes that model, batch and a few steps add to a fresh process, at their peak."""
    with _PROCESSES.Pool(1) as pool:
        return int(pool.apply(_peak_memory, (row, method, device)))


def _peak_memory(row: dict[str, Any], method: str, device: str) -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    before = 0 if device == "cuda" else _process_memory("VmRSS")
    step = make_step(row, method, device)
    for _ in range(_MEMORY_STEPS):
        step()
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return _process_memory("VmHWM") - before


def _process_memory(name: str) -> int:
    # Not getrusage: its maximum is that of the parent where the parent is larger.
    fields = dict(line.split(":", 1) for line in _PROCESS.read_text().splitlines())
    return 1024 * int(fields[name].split()[0])


def measure(
    setting: dict[str, Any], slots: list[int], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return a row for each number of slots, with times, ratios and peak memories.

    All are timed side by side, so they share the blocks of flat and adaptive clipping.
    """
    methods = _methods(setting, args)
    rows = {num_slots: setting | {"num_slots": num_slots} for num_slots in slots}
    runs = [(m, k) for m in methods for k in (slots if m == "slaclip" else slots[:1])]
    steps = {f"{m} {k}": make_step(rows[k], m, args.device) for m, k in runs}
    blocks = list(time_blocks(steps, args.blocks, args.seconds))
    peaks = {}
    if args.memory:
        peaks = {f"{m} {k}": peak_memory(rows[k], m, args.device) for m, k in runs}
    for num_slots, row in rows.items():
        keys = {m: f"{m} {num_slots if m == 'slaclip' else slots[0]}" for m in methods}
        for method, key in keys.items():
            row[f"{method}_ms"] = 1e3 * statistics.median(b[key] for b in blocks)
            if peaks:
                row[f"{method}_peak_mib"] = peaks[key] / 2**20
        for name, (method, base) in _PAIRS.items():
            if {method, base} <= set(methods):
                ratios = sorted(b[keys[method]] / b[keys[base]] for b in blocks)
                quarter = len(ratios) // 4
                row[f"{name}_time_ratio"] = statistics.median(ratios)
                row[f"{name}_time_ratio_iqr"] = [ratios[quarter], ratios[-1 - quarter]]
    return list(rows.values())


def settings(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the settings that are asked for; ghost clipping has no bfloat16."""
    return [
        {"device": args.device, "model": model, "mode": mode, "dtype": dtype}
        | {"batch_size": batch or CASES[model][3]}
        for model in args.models
        for mode in args.modes
        for dtype in args.dtypes
        for batch in (args.batch_sizes or [None])
        if not (mode == "ghost" and dtype == "bfloat16")
    ]


def machine(device: str) -> dict[str, Any]:
    """Return what the numbers depend on."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    } | versions()


def table(results: list[dict[str, Any]]) -> str:
    """Return the results as a Markdown table, a line a setting.

    Time ratios are medians +- half the distance between the quartiles. Of the ratios to adaptive
    clipping it has the median over K, and of memory the ratio that is largest over K.
    """
    by_setting: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in results:
        by_setting.setdefault(_key(row)[1:-1], []).append(row)
    slots = sorted({row["num_slots"] for row in results})
    heads = ["model", "mode", "dtype", "batch", "flat, ms", "flat, MiB"]
    heads += [f"K = {k}" for k in slots]
    heads += ["adaptive / flat", "slaclip / adaptive", "memory / flat", "memory / adaptive"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for setting, rows in by_setting.items():
        by_slots = {row["num_slots"]: row for row in rows}
        first = rows[0]
        cells = [*setting, _number(first.get("flat_ms"), 2), _number(first.get("flat_peak_mib"), 0)]
        cells += [_time_ratio(by_slots.get(k, {}), "slaclip") for k in slots]
        cells.append(_time_ratio(first, "adaptive"))
        name = "slaclip_adaptive_time_ratio"
        to_adaptive = [row[name] for row in rows if name in row]
        cells.append(_number(statistics.median(to_adaptive) if to_adaptive else None, 3))
        for base in ("flat", "adaptive"):
            pair = ("slaclip_peak_mib", f"{base}_peak_mib")
            most = [r[pair[0]] / r[pair[1]] for r in rows if set(pair) <= set(r)]
            cells.append(_number(max(most) if most else None, 3))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _time_ratio(row: dict[str, Any], name: str) -> str:
    if f"{name}_time_ratio" not in row:
        return ""
    low, high = row[f"{name}_time_ratio_iqr"]
    return f"{row[f'{name}_time_ratio']:.3f} ± {(high - low) / 2:.3f}"


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
    has_cuda = torch.cuda.is_available()
    can_see = has_cuda or _PROCESS.exists()
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=can_see)
    parser.add_argument("--device", default="cuda" if has_cuda else "cpu")
    parser.add_argument("--output", type=Path, default=Path("outputs/step_time.jsonl"))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Measure what is missing in the output file and print the table."""
    warnings.simplefilter("ignore")  # Opacus's notices; nothing here is trained
    args = parse(argv)
    file = RowFile(args.output, _key)
    done = {_key(row): row for row in file.read()}
    about = {"machine": machine(args.device), "blocks": args.blocks}
    print(about)
    wanted = settings(args)
    for setting in tqdm(wanted, unit="setting"):
        known = {k: done.get(_key(setting | {"num_slots": k})) for k in args.num_slots}
        missing = [k for k, row in known.items() if not _is_measured(row, args)]
        for row in measure(setting, missing, args) if missing else ():
            done[_key(row)] = row
            file.append(row | about)
    keys = [_key(setting | {"num_slots": k}) for setting in wanted for k in args.num_slots]
    print(table([done[key] for key in keys]))


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    names = ("device", "model", "mode", "dtype", "batch_size", "num_slots")
    return tuple(row[name] for name in names)


def _is_measured(row: dict[str, Any] | None, args: argparse.Namespace) -> bool:
    """Return whether a row has all that is asked for."""
    if row is None:
        return False
    units = ("ms", "peak_mib") if args.memory else ("ms",)
    return all(f"{method}_{unit}" in row for method in _methods(row, args) for unit in units)


def _methods(setting: dict[str, Any], args: argparse.Namespace) -> list[str]:
    return [m for m in args.methods if m != "adaptive" or setting["mode"] == "hooks"]


if __name__ == "__main__":
    main()
