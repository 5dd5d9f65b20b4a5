r"""Claim: ``max_grad_norm="auto"`` finds the level of real gradients from far away in 30 steps.

Takes the norms of all per-sample gradients of a model, fresh and after 1,500 steps of training
without privacy, and runs the search over them many times: Poisson batches, encoded and noised as a
step does it. It starts six orders of magnitude below and above the median norm, and where "auto"
starts, with gradients as they are and 1,000 times as small and large. The level is the range from
the median to the 3/4 quantile of the norms, which the search aims into (where half of the gradients
are tiny it aims above the median).

    python -m benchmarks.search --tasks digits mnist names imdb --data-root DIR \
        --output benchmarks/results/search.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from opacus import GradSampleModule
from torch import nn
from tqdm import tqdm

from benchmarks import tasks
from benchmarks.cells import Row, stamp
from benchmarks.corpora import CorpusError
from benchmarks.rows import RowFile
from opacus_slaclip import AutoController, FixedController, SlackIndicator, recommended_num_slots
from opacus_slaclip.auto import AUTO_CLIP_BOUNDS, AUTO_START
from opacus_slaclip.demo import DemoError
from opacus_slaclip.optimizers.grad_sample import per_sample_norms
from opacus_slaclip.slack import indicator_noise_std, normalize_slack, slot_width, sum_slack

STATES = ("fresh", "trained")
# (where it starts, in units of the median norm; None: where "auto" starts; scale of the gradients)
STARTS = ((1e-6, 1.0), (1e6, 1.0), (None, 1e-3), (None, 1.0), (None, 1e3))
NUM_STEPS = 60
CHUNK = 32
LEVEL = (0.5, 0.75)  # quantiles of the norms
_SETTING = ("task", "state", "train_steps", "start", "scale", "batch_size", "sigma", "seeds")


def gradient_norms(module: nn.Module, samples: tasks.Samples) -> torch.Tensor:
    """Return the gradient norm of every sample, shape (N,). **Private**: for benchmarks only."""
    criterion = nn.CrossEntropyLoss(reduction="sum")
    recorded = GradSampleModule(module, loss_reduction="sum")
    norms = []
    for part in torch.arange(len(samples)).split(CHUNK):
        recorded.zero_grad()
        inputs, labels = samples.__getitems__(part.tolist())
        criterion(recorded(inputs), labels).backward()
        norms.append(per_sample_norms([p.grad_sample for p in recorded.parameters()]))
    recorded.to_standard_module()
    return torch.cat(norms).double()


def train(module: nn.Module, samples: tasks.Samples, num_steps: int) -> None:
    """Train without privacy, with Adam."""
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    for _ in range(num_steps):
        optimizer.zero_grad()
        inputs, labels = samples.__getitems__(torch.randint(len(samples), (64,)).tolist())
        criterion(module(inputs), labels).backward()
        optimizer.step()


def search(
    norms: torch.Tensor, *, start: float, batch_size: int, sigma: float, seed: int
) -> list[float]:
    """Return the thresholds of ``NUM_STEPS`` steps over fixed norms; the level that is found stays.

    Args:
        norms: Of all samples, shape (N,).
        start: First threshold, in gradient-norm units; the bounds are those of "auto", widened
            where it lies outside.
        batch_size: Expected size of a Poisson batch.
        sigma: Noise multiplier.
        seed: Of batches and noise.
    """
    generator = torch.Generator().manual_seed(seed)
    num_slots = recommended_num_slots(batch_size, sigma)
    noise_std = indicator_noise_std(
        noise_multiplier=sigma, num_slots=num_slots, expected_batch_size=batch_size
    )
    low, high = min(start, AUTO_CLIP_BOUNDS[0]), max(start, AUTO_CLIP_BOUNDS[1])
    controller = AutoController(FixedController())
    thresholds = [start]
    for _ in range(NUM_STEPS):
        clip_norm = thresholds[-1]
        batch = norms[torch.rand(len(norms), generator=generator) < batch_size / len(norms)]
        noise = sigma * clip_norm * torch.randn(num_slots, generator=generator)
        sums = sum_slack(batch, clip_norm=clip_norm, num_slots=num_slots)
        noisy = sums + noise / slot_width(clip_norm, num_slots)
        values = normalize_slack(noisy.double(), expected_batch_size=batch_size)
        seen = SlackIndicator(values, clip_norm, noise_std, batch_size)
        thresholds.append(min(max(controller(clip_norm, seen), low), high))
    return thresholds


def summarize(tracks: list[list[float]], low: float, high: float) -> dict[str, Any]:
    """Return statistics over seeds: steps until it stays, overshoot, where it ends.

    Args:
        tracks: Thresholds, a list a seed.
        low: Lower end of the level, in gradient-norm units.
        high: Upper end.

    Returns:
        Medians and 90 % quantiles of ``steps``, after which a track stays within a factor of 2 of
        the level (one more than there are if it ends outside), and of ``overshoot``, the factor by
        which it went beyond the level, from where it started; the lowest, median and highest end;
        ``off``, how many end outside.
    """

    def is_outside(clip_norm: float) -> bool:
        return not low / 2 <= clip_norm <= 2 * high

    steps, overshoots = [], []
    for track in tracks:
        steps.append(1 + max((i for i, c in enumerate(track) if is_outside(c)), default=-1))
        beyond = low / min(track) if track[0] > high else max(track) / high
        overshoots.append(max(1.0, beyond))
    ends = [track[-1] for track in tracks]
    return {
        "steps": statistics.median(steps),
        "steps_90": _quantile_90(steps),
        "overshoot": statistics.median(overshoots),
        "overshoot_90": _quantile_90(overshoots),
        "end_low": min(ends),
        "end": statistics.median(ends),
        "end_high": max(ends),
        "off": sum(map(is_outside, ends)),
    }


def _quantile_90(values: Sequence[float]) -> float:
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]


def rows(args: argparse.Namespace, done: set[tuple[Any, ...]]) -> Iterator[Row]:
    """Yield a row for each setting that is not done."""
    for task, state in itertools.product(args.tasks, STATES):
        settings: list[dict[str, Any]] = [
            {"task": task, "state": state, "train_steps": args.train_steps, "start": start}
            | {"scale": scale, "batch_size": batch, "sigma": args.sigma, "seeds": args.seeds}
            for (start, scale), batch in itertools.product(STARTS, args.batch_sizes)
        ]
        missing = [each for each in settings if _key(each) not in done]
        if not missing:
            continue
        samples = tasks.load(task, args.data_root).train
        torch.manual_seed(0)
        module = tasks.MODELS[next(iter(tasks.TASKS[task].models))]()
        if state == "trained":
            train(module, samples, args.train_steps)
        norms = gradient_norms(module, samples)
        for each in missing:
            begin = time.perf_counter()
            scaled = norms * each["scale"]
            median, high = (float(q) for q in scaled.quantile(scaled.new_tensor(LEVEL)))
            start = AUTO_START if each["start"] is None else each["start"] * median
            options = {"start": start, "batch_size": each["batch_size"], "sigma": args.sigma}
            tracks = [search(scaled, seed=seed, **options) for seed in range(args.seeds)]
            about = {"median_norm": median, "quantile_75": high}
            yield each | about | summarize(tracks, median, high) | stamp(begin)


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in _SETTING)


def main(argv: list[str] | None = None) -> int:
    """Run what the output file lacks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=tasks.TASKS, default=["digits"])
    parser.add_argument("--data-root", type=Path, metavar="DIR")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[64, 256, 1024])
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=25)
    parser.add_argument("--train-steps", type=int, default=1500)
    parser.add_argument("--output", type=Path, default=Path("outputs/search.jsonl"))
    args = parser.parse_args(argv)
    file = RowFile(args.output, _key)
    found = file.read()
    done = set(map(_key, found))
    try:
        for row in tqdm(rows(args, done), unit="setting"):
            found.append(row)
            file.append(row)
    except (CorpusError, DemoError) as error:
        print(error, file=sys.stderr)
        return 1
    print(table(found))
    return 0


def table(found: list[dict[str, Any]]) -> str:
    """Return the rows as markdown."""
    lines = [
        "| task | model | 3/4 quantile, in medians | start | B | steps (90 %) | overshoot (90 %) | "
        "found, in medians | off |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        unit = row["median_norm"]
        low, middle, high = (row[name] / unit for name in ("end_low", "end", "end_high"))
        start = f"median × {row['start'] or AUTO_START / unit:.0e}"
        lines.append(
            f"| {row['task']} | {row['state']} | {row['quantile_75'] / unit:.2f} | {start} | "
            f"{row['batch_size']} | {row['steps']:g} ({row['steps_90']:g}) | "
            f"{row['overshoot']:.2f} ({row['overshoot_90']:.2f}) | "
            f"{middle:.2f} ({low:.2f} to {high:.2f}) | {row['off']} of {row['seeds']} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
