"""Three checks of the guarantee, each of which a planted fault must fail and the library pass.

* The audit: draws of whole steps, attacked.
* The noise: scale and independence of every coordinate of two steps in a row.
* The sensitivity: one sample more, without noise, in scenes that each fault gets wrong.

A check returns what it found wrong, in words: nothing, if nothing is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from distributed_helpers import on_ranks
from planted_faults import Fault
from scipy import stats
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.audit_attacks import expected_mu, run_attacks, verdict
from benchmarks.audit_ranks import all_views
from benchmarks.audit_releases import (
    ALONG,
    BASE_SIZE,
    FAMILIES,
    NUM_COORDINATES,
    NUM_ENTRIES,
    NUM_SLOTS,
    Subject,
    base_samples,
    canary_sample,
    draw_sides,
)
from opacus_slaclip.slack import rounding_bound

FALSE_ALARM = 1e-6

# --- the audit ---


@dataclass(frozen=True)
class Audit:
    """One canary in one family, with draws enough to find a planted fault at 97 % of all seeds."""

    family: str
    canary: float
    attack: str
    num_draws: int
    sigma: float

    def __call__(self, plant: Fault = nullcontext) -> str:
        family = FAMILIES[self.family]
        arguments = {"sigma": self.sigma, "num_draws": self.num_draws, "seed": 1, "plant": plant}
        if family.num_ranks == 1:
            sides = draw_sides(family, self.canary, **arguments)
        else:
            sides = all_views(on_ranks(_draw_on_rank, self.family, self.canary, arguments))
        findings = run_attacks(family, self.canary, self.sigma, sides, FALSE_ALARM / 2)
        expected = expected_mu(self.canary, self.sigma, family.num_steps)
        limit = math.sqrt(family.num_steps) / self.sigma
        found = verdict(findings[self.attack], expected, limit)
        return "" if found == "ok" else f"{found}: {findings[self.attack]}, expected {expected}"


def _draw_on_rank(family: str, canary: float, arguments: dict[str, Any]) -> list[torch.Tensor]:
    return draw_sides(FAMILIES[family], canary, **arguments)


# --- the noise ---


def check_noise(plant: Fault = nullcontext, *, num_draws: int = 600) -> str:
    """Check that the noise on two steps in a row is standard normal and independent.

    A standard deviation off by 1/sqrt(2) or sqrt(2), or a correlation of 1/2, is missed less often
    than once in 1e6 by 600 draws of each of 16 coordinates.
    """
    family, sigma = FAMILIES["two-steps"], 2.0
    quiet, _ = draw_sides(family, 0.0, sigma=0.0, num_draws=1, seed=1, plant=plant)
    noisy, _ = draw_sides(family, 0.0, sigma=sigma, num_draws=num_draws, seed=1, plant=plant)
    is_noised = torch.arange(quiet.shape[1]) % NUM_COORDINATES < NUM_ENTRIES + NUM_SLOTS
    noise = ((noisy - quiet) / sigma)[:, is_noised]
    return ", ".join(_deviations(noise))


def _deviations(noise: torch.Tensor) -> Iterator[str]:
    size, num_coordinates = noise.shape
    num_tests = num_coordinates * (num_coordinates + 3) // 2
    error = FALSE_ALARM / num_tests / 2
    low, high = stats.chi2.ppf([error, 1 - error], size)
    for i, total in enumerate(noise.square().sum(0).tolist()):
        if not low <= total <= high:
            yield f"coordinate {i} has standard deviation {math.sqrt(total / size):.3f}"
    # Of two independent ones, the mean product has a standard deviation of 1 / sqrt(size).
    products = noise.T @ noise / math.sqrt(size)
    largest = stats.norm.isf(error)
    for i, j in torch.triu_indices(num_coordinates, num_coordinates, offset=1).T.tolist():
        if abs(products[i, j]) > largest:
            yield f"coordinates {i} and {j} correlate by {products[i, j] / math.sqrt(size):.3f}"
    for i, mean in enumerate(noise.mean(0).mul(math.sqrt(size)).tolist()):
        if abs(mean) > largest:
            yield f"coordinate {i} has mean {mean / math.sqrt(size):.3f}"


# --- the sensitivity ---


@dataclass(frozen=True)
class Scene:
    """Physical batches of one logical batch, in two data sets that differ in one sample.

    Attributes:
        others: Norms, in thresholds, of the other samples of each physical batch; negative ones
            point against the canary.
        canary: Norm of the one sample more.
        place: Physical batch in which it is.
        before: Norms of a logical batch that is released first, to move the threshold.
    """

    others: tuple[tuple[float, ...], ...]
    canary: float
    place: int = 0
    before: tuple[float, ...] = field(default=())

    def change(self, mode: str) -> float:
        """Return how far the release moves, in thresholds."""
        quiet, loud = (self._release(mode, with_canary=side) for side in (False, True))
        return float((loud - quiet).norm())

    def _release(self, mode: str, *, with_canary: bool) -> torch.Tensor:
        loader = DataLoader(TensorDataset(torch.zeros(BASE_SIZE, 1)), batch_size=BASE_SIZE)
        subject = Subject(loader, sigma=0.0, mode=mode, seed=0)
        if self.before:
            subject.step(_batch(self.before))
        pieces = [_batch(norms) for norms in self.others]
        if with_canary:
            pieces[self.place] = torch.cat([pieces[self.place], canary_sample(self.canary)])
        return subject.step(*pieces)[: NUM_ENTRIES + NUM_SLOTS]


def _batch(norms: tuple[float, ...]) -> torch.Tensor:
    return torch.cat([base_samples(0, ALONG), *[canary_sample(norm) for norm in norms]])


AGAINST = (-100.0,) * BASE_SIZE
SCENES = [
    *[Scene((AGAINST,), n) for n in (0.0, 0.2, 0.375, 0.5, 0.999, 1.0, 1.3, 100.0)],
    *[Scene(((0.0, 0.5), (0.1,)), n, place) for n in (0.0, 0.9, 100.0) for place in (0, 1)],
    # The threshold shrinks by a tenth before, so these norms lie above it.
    *[Scene(((-1.0,),), n, before=(0.5,) * BASE_SIZE) for n in (0.92, 0.95, 1.0)],
    # The sum is so large that in eight bits it moves by two thresholds or not at all.
    *[Scene(((1.0,) * 514,), n) for n in (0.016, 0.5, 1.0)],
]


def check_sensitivity(plant: Fault = nullcontext) -> str:
    """Check that no scene moves the release by more than the threshold, but for rounding."""
    found = []
    with plant():
        for scene in SCENES:
            size = sum(map(len, scene.others)) + 1
            eps = torch.finfo(torch.float32).eps
            limit = 1 + rounding_bound(NUM_ENTRIES, 2) + size**2 * eps
            for mode in ("hooks", "ghost"):
                change = scene.change(mode)
                if change > limit:
                    found.append(f"{mode}: {scene} moves the release by {change:.4f} C")
    return "; ".join(found)
