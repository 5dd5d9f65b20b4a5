"""Sensitivity: whatever sample is added or removed, the release moves by the threshold at most.

Through the real optimizer of every mode, without noise, on models of every kind: two batches that
differ in one sample are cut into physical batches in two ways and released, as the joint vector
(summed clipped gradients, slack sum).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from cases import CASES, EPS, Case, Training, fixed, give_gradients, term_lengths, true_norms
from distributed_helpers import FAMILIES, RankRun, on_ranks, private_on_rank, share, whole
from helpers import samples
from torch import nn

from opacus_slaclip import FixedController
from opacus_slaclip.slack import rounding_bound

EXPECTED_BATCH_SIZE = 16  # a power of two, so dividing by it is exact
BOUNDS = {"min_clipbound": 1e-4, "max_clipbound": 1e4}
# A ghost norm and the gradient it clips come from two backward passes; these rounding errors a
# sample, in float32 or float64 alike, are for the layers that a pass goes through.
TWO_PASSES = 64
NUM_PAIRS = 24


class WeightedCrossEntropy(nn.Module):
    """A weight for each sample's loss makes its gradient as long as one likes."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        labels, weights = target.unbind(1)
        losses = nn.functional.cross_entropy(output, labels.long(), reduction="none") * weights
        return losses if self.reduction == "none" else getattr(losses, self.reduction)()


@dataclass
class Neighbours:
    """A batch, one sample of which is in one data set only, at a threshold."""

    x: torch.Tensor
    target: torch.Tensor
    canary: int
    clip_norm: float

    def without(self) -> tuple[torch.Tensor, torch.Tensor]:
        kept = torch.arange(len(self.x)) != self.canary
        return self.x[kept], self.target[kept]


def neighbours(
    case: Case, source: random.Random, canary_weight: float | None, *, least: int = 1
) -> Neighbours:
    """Draw a batch; its norms are in proportion to weights from 0 to 1e4."""
    size = source.randint(least, 12)
    x, labels = samples(case.task, size, seed=source.randrange(1000), dtype=case.dtype)
    weights = torch.tensor([draw_weight(source) for _ in range(size)])
    canary = source.randrange(size)
    if canary_weight is not None:
        weights[canary] = canary_weight
    clip_norm = case.clip_norm * 10 ** source.uniform(-2, 2)
    return Neighbours(x, torch.stack([labels, weights], dim=1), canary, clip_norm)


def draw_weight(source: random.Random) -> float:
    return source.choice([0.0, 1.0, 10 ** source.uniform(-4, 4), 10 ** source.uniform(-1, 1)])


def pieces(
    batch: tuple[torch.Tensor, torch.Tensor], source: random.Random, takes_empty: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Cut a batch into one to four physical ones, some of them empty where that works."""
    x, target = batch
    lowest, highest = (0, len(x)) if takes_empty else (1, len(x) - 1)
    cuts = {source.randint(lowest, highest) for _ in range(source.randint(0, 3)) if highest > 0}
    edges = [0, *sorted(cuts), len(x)]
    for begin, end in itertools.pairwise(edges):
        yield x[begin:end], target[begin:end]


def backward(run: Training, x: torch.Tensor, target: torch.Tensor) -> None:
    if run.case.mode != "no_op":
        run.criterion(run.model(x), target).backward()
        return
    give_gradients(run.model, (x, target[:, 0].long()))
    params: list[Any] = [p for p in run.model.parameters() if p.requires_grad]
    for p in params:
        weights = target[:, 1].to(p.dtype)
        p.grad_sample = torch.einsum("i,i...->i...", weights, p.grad_sample)


def release(
    run: Training, parts: list[tuple[torch.Tensor, torch.Tensor]], *, autocast: bool = False
) -> torch.Tensor:
    """Take one step; return the summed gradients and the slack sum, in gradient-norm units."""
    optimizer = run.optimizer
    for i, (x, target) in enumerate(parts):
        optimizer.signal_skip_step(do_skip=i < len(parts) - 1)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            backward(run, x, target)
        optimizer.step()
    params = [p for p in optimizer.params if p.requires_grad]
    for p in params:  # what is public is this sum over the public batch size, cast if need be
        scale = 1 if optimizer.loss_reduction == "sum" else EXPECTED_BATCH_SIZE
        assert torch.equal((p.summed_grad / scale).to(p.dtype).view_as(p), p.grad)
    indicator = optimizer.slack_indicator
    slack = indicator.values * EXPECTED_BATCH_SIZE * indicator.clip_norm
    gradient = torch.cat([p.summed_grad.flatten() for p in params]).double()
    return torch.cat([gradient, slack / math.sqrt(indicator.num_slots)])


def allowed(run: Training, pair: Neighbours) -> float:
    """Return the threshold and the rounding that is documented for one sample and two sums."""
    params = [p for p in run.optimizer.params if p.requires_grad]
    dtype = torch.promote_types(params[0].dtype, torch.float32)
    eps, size = torch.finfo(dtype).eps, len(pair.x)
    bound = 1 + rounding_bound(sum(p.numel() for p in params), len(params), dtype=dtype)
    bound += size**2 * eps
    if run.case.mode == "ghost":
        bound += TWO_PASSES * size * eps
    limit = pair.clip_norm * bound
    if run.case.is_bounded:
        limit += eps * sum_of_terms(run, pair)
    return limit


def sum_of_terms(run: Training, pair: Neighbours) -> float:
    """Return ``B T`` times the summed lengths of the terms of all clipped gradients."""
    plain, labels = run.case.build(), pair.target[:, 0].long()
    plain.load_state_dict(
        {k.removeprefix("_module."): v for k, v in run.model.state_dict().items()}
    )
    weights = pair.target[:, 1].double()
    norms = true_norms(plain, (pair.x, labels)) * weights
    factors = (pair.clip_norm / norms).nan_to_num(1.0).clamp(max=1.0)
    lengths = factors * weights * term_lengths(plain, (pair.x, labels))
    return len(pair.x) * pair.x[0].numel() * float(lengths.sum())


def largest_change(run: Training, *, seed: int, **kwargs: Any) -> float:
    """Release neighbours and check that they differ by what is allowed; return the largest C."""
    source, largest, takes_empty = random.Random(seed), 0.0, run.case.takes_empty
    for canary_weight in [0.0, 1e4, *[None] * NUM_PAIRS]:
        pair = neighbours(run.case, source, canary_weight, least=1 if takes_empty else 2)
        run.optimizer.max_grad_norm = pair.clip_norm
        releases = [
            release(run, list(pieces(batch, source, takes_empty)), **kwargs)
            for batch in (pair.without(), (pair.x, pair.target))
        ]
        change = float((releases[1] - releases[0]).norm())
        assert change <= allowed(run, pair), (pair.clip_norm, pair.target, pair.canary)
        largest = max(largest, change / pair.clip_norm)
    return largest


def resting(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    return optimizer


def quiet(case: Case, seed: int, reduction: str = "mean") -> Training:
    """Make the case private without noise, with a number of slots that depends on the seed."""
    return fixed(
        case,
        criterion=WeightedCrossEntropy(reduction),
        loss_reduction=reduction,
        noise_multiplier=0.0,
        num_slots=(1, 2, 5, 21)[seed % 4],
        torch_optimizer=lambda model: resting(case.torch_optimizer(model)),
        **BOUNDS,
    )


@pytest.mark.parametrize("name", CASES)
def test_one_sample_moves_the_release_by_the_threshold_at_most(name):
    case, seed = CASES[name], list(CASES).index(name)

    largest = largest_change(quiet(case, seed), seed=seed)

    # A sample of norm 0 or far above the threshold uses all of it.
    assert largest > 1 - 1e-3


# --- per-sample gradients of eight bits ---


def low_precision_cases() -> dict[str, tuple[Case, bool]]:
    """Return cases whose per-sample gradients are bfloat16, and whether by autocast."""
    found = {}
    for name in ("hooks-mlp", "hooks-mlp-bare", "hooks-lstm", "hooks-frozen", "functorch-cnn"):
        found[f"{name}-autocast"] = (CASES[name], True)
        found[f"{name}-parameters"] = (replace(CASES[name], dtype=torch.bfloat16), False)
    return found


LOW = low_precision_cases()


@pytest.mark.parametrize("name", LOW)
def test_in_bfloat16_too_if_the_loss_is_a_sum(name):
    """The gradients are rounded before their norm is taken, and summed in float32."""
    (case, autocast), seed = LOW[name], list(LOW).index(name)

    largest = largest_change(quiet(case, seed, "sum"), seed=seed, autocast=autocast)

    assert largest > 1 - 1e-3


def test_in_bfloat16_a_mean_would_let_one_sample_move_the_gradients_of_all_others():
    """Why it is refused: by about B / 128 thresholds at worst; a sum does not have it.

    The mean divides each sample's loss by the size of the physical batch before its gradient is
    rounded to eight bits, so where the size is not a power of two, one sample more rounds all
    others anew, before they are clipped.
    """
    case = CASES["hooks-mlp"]
    size, clip_norm = 1000, case.clip_norm / 10
    x, labels = samples(case.task, 2, dtype=case.dtype)
    target = torch.stack([labels, torch.ones(2)], dim=1)
    repeats = torch.tensor([size, 1])
    whole_batch = (x.repeat_interleave(repeats, 0), target.repeat_interleave(repeats, 0))
    pair = Neighbours(*whole_batch, canary=size, clip_norm=clip_norm)

    changes = {}
    for reduction in ("mean", "sum"):
        run = quiet(case, 0, reduction)
        run.optimizer.max_grad_norm = clip_norm
        run.optimizer.divides_before_rounding = False  # as if it were not refused
        quiet_sum, loud_sum = (
            release(run, [batch], autocast=True) for batch in (pair.without(), whole_batch)
        )
        changes[reduction] = float((loud_sum - quiet_sum).norm()) / clip_norm

    assert changes["sum"] <= allowed(run, pair) / clip_norm
    assert changes["mean"] > 1.5


# --- several processes ---


def _changes_on_rank(name: str) -> list[float]:
    """Release neighbours on two ranks; return the changes as shares of what is allowed."""
    run = private_on_rank(
        FAMILIES[name],
        dtype=torch.float32,
        criterion=WeightedCrossEntropy(),
        torch_optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
        controller=FixedController(),
        num_slots=5,
        **BOUNDS,
    )
    source, shares = random.Random(0), []
    case = CASES["hooks-mlp"]
    for canary_weight in [0.0, 1e4, *[None] * NUM_PAIRS]:
        pair = neighbours(case, source, canary_weight, least=6)
        run.optimizer.max_grad_norm = pair.clip_norm
        num_pieces = source.randint(1, 2)
        quiet_sum, loud_sum = (
            _release_on_rank(run, batch, num_pieces)
            for batch in (pair.without(), (pair.x, pair.target))
        )
        change = float((loud_sum - quiet_sum).norm())
        num_entries, size = len(loud_sum) - 5, len(pair.x)
        bound = 1 + rounding_bound(num_entries, 4) + (size**2 + TWO_PASSES * size) * EPS
        shares.append(change / pair.clip_norm / bound)
    return shares


def _release_on_rank(run: RankRun, batch: Any, num_pieces: int) -> torch.Tensor:
    x, target = share(batch)
    parts = list(zip(x.chunk(num_pieces), target.chunk(num_pieces), strict=True))
    for i, part in enumerate(parts):
        run.optimizer.signal_skip_step(do_skip=i < len(parts) - 1)
        run.step(part)
    indicator = run.optimizer.slack_indicator
    size = indicator.expected_batch_size
    gradient = torch.cat([whole(p.grad).flatten() for p in run.optimizer.params]).double() * size
    slack = indicator.values * size * indicator.clip_norm / math.sqrt(indicator.num_slots)
    return torch.cat([gradient, slack])


@pytest.mark.parametrize("name", FAMILIES)
def test_one_sample_on_one_rank_moves_the_release_by_the_threshold_at_most(name):
    for shares in on_ranks(_changes_on_rank, name):
        assert 1 - 1e-3 < max(shares) <= 1
