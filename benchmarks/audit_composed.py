"""The composed run: ten Poisson-sampled steps in a row, audited as (epsilon, delta).

Base samples have full norm and lie across the canary, so which of them are drawn does not move the
release along it, and the likelihood ratio of the claimed mechanism is exact: with ``v`` the
canary's move and ``R_t`` the release at step t, both in thresholds, it is

    sum_t log(1 - q + q exp((<v, R_t> - |v|^2 / 2) / sigma^2))
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from opacus.accountants import PRVAccountant, RDPAccountant
from scipy.optimize import brentq
from scipy.special import ndtr

from benchmarks.audit_attacks import binomial_bounds, claimed_vector, fitted_attack, mu_interval
from benchmarks.audit_releases import NUM_COORDINATES, composed_draws

SAMPLE_RATE = 0.5
NUM_STEPS = 10
DELTAS = (0.1, 0.01)
QUOTED_DELTA = 1e-5  # too small for simulation: a conversion only

# Where to cut the likelihood ratio is fixed on this many draws a side of the claimed mechanism.
_NUM_SIMULATED = 100_000


def likelihood_ratio(releases: torch.Tensor, move: torch.Tensor, sigma: float) -> torch.Tensor:
    """Return the log likelihood ratio of each run, shape (N,); ``move`` is ``v`` of one step."""
    steps = releases.view(len(releases), -1, NUM_COORDINATES) @ move
    return _sum_of_ratios(steps, float(move.square().sum()), sigma)


def _sum_of_ratios(steps: torch.Tensor, square: float, sigma: float) -> torch.Tensor:
    exponent = (steps - square / 2) / sigma**2 + math.log(SAMPLE_RATE)
    rest = torch.full_like(exponent, math.log(1 - SAMPLE_RATE))
    return torch.logaddexp(exponent, rest).sum(1)


def claimed_scores(move: torch.Tensor, sigma: float) -> list[torch.Tensor]:
    """Return likelihood ratios of simulated runs of the claimed mechanism, without and with."""
    generator = torch.Generator().manual_seed(0)
    square = float(move.square().sum())
    shape = (_NUM_SIMULATED, NUM_STEPS)
    sides = []
    for is_in in (False, True):
        steps = torch.randn(shape, generator=generator, dtype=torch.float64) * sigma * square**0.5
        if is_in:
            steps += square * (torch.rand(shape, generator=generator) < SAMPLE_RATE)
        sides.append(_sum_of_ratios(steps, square, sigma))
    return sides


def epsilon_lower_bound(
    sides: list[torch.Tensor], cut: float, delta: float, error: float, *, is_added: bool
) -> float:
    """Return a lower bound on epsilon from the test "score above the cut", or below it.

    Args:
        sides: Scores without and with the canary.
        cut: Where the test cuts, fixed before these scores were drawn.
        delta: The delta that goes with epsilon.
        error: Probability of failure of each of the two bounds that go into it.
        is_added: Whether the test detects the canary (above the cut), or its absence (below).
    """
    if not is_added:
        sides, cut = [-side for side in reversed(sides)], -cut
    false, true = (binomial_bounds(int((side > cut).sum()), len(side), error) for side in sides)
    return math.log(max(true[0] - delta, 1e-300) / false[1])


def best_cut(sides: list[torch.Tensor], num_draws: int, delta: float, *, is_added: bool) -> float:
    """Return the cut that promises the largest bound from ``num_draws`` draws a side."""
    scores = torch.cat(sides).sort().values
    grid = scores[torch.linspace(0.005, 0.995, 199).mul(len(scores)).long()]

    def promise(cut: float) -> float:
        hits = [side > cut for side in sides] if is_added else [side < cut for side in sides[::-1]]
        false, true = (max(float(side.double().mean()), 1 / num_draws) for side in hits)
        # Three standard errors stand for the bounds.
        spread = [3 * math.sqrt(p * (1 - p) / num_draws) for p in (false, true)]
        return math.log(max(true - spread[1] - delta, 1e-300) / (false + spread[0]))

    return max(grid.tolist(), key=promise)


@dataclass(frozen=True)
class ComposedFinding:
    """Lower bounds on epsilon at each delta, at the audit's budget and at 95 %, and on mu."""

    epsilon_lower_bound: dict[float, float]
    epsilon_lower_bound_95: dict[float, float]
    mu_lower_bound_95: float


def audit_scores(
    planned: list[torch.Tensor], sides: list[torch.Tensor], error: float
) -> ComposedFinding:
    """Cut where ``planned`` scores, drawn beforehand, say; bound by the scores of ``sides``."""
    num_bounds = 2 * 2 * len(DELTAS)  # tests and their two bounds, for each delta
    bounds: dict[float, dict[float, float]] = {error / num_bounds: {}, 0.05 / 4: {}}
    for delta in DELTAS:
        cuts = {a: best_cut(planned, len(sides[0]), delta, is_added=a) for a in (True, False)}
        for each, found in bounds.items():
            found[delta] = max(
                epsilon_lower_bound(sides, cut, delta, each, is_added=is_added)
                for is_added, cut in cuts.items()
            )
    middle = sum(float(side.mean()) for side in planned) / 2
    at_budget, at_95 = bounds.values()
    return ComposedFinding(at_budget, at_95, mu_interval(*sides, middle, 0.05 / 2)[0])


def run_composed(
    canary: float, *, sigma: float, num_draws: int, seed: int, error: float
) -> dict[str, ComposedFinding]:
    """Draw the runs and attack them in both ways."""
    move = claimed_vector(canary, 1)
    sides = []
    for is_in in (False, True):
        draws = composed_draws(
            canary,
            sigma=sigma,
            num_steps=NUM_STEPS,
            num_draws=num_draws,
            with_canary=is_in,
            seed=2 * seed + is_in,
        )
        sides.append(torch.stack(list(draws)))
    half = num_draws // 2
    fitted = fitted_attack(sides[0][:half], sides[1][:half], sigma)
    return {
        "claimed": audit_scores(
            claimed_scores(move, sigma),
            [likelihood_ratio(side, move, sigma) for side in sides],
            error,
        ),
        "fitted": audit_scores(
            [fitted.scores(side[:half]) for side in sides],
            [fitted.scores(side[half:]) for side in sides],
            error,
        ),
    }


def accounted(sigma: float) -> dict[str, dict[float, float]]:
    """Return what Opacus's accountants say of the run, by accountant and delta."""
    found: dict[str, dict[float, float]] = {}
    for accountant in (PRVAccountant(), RDPAccountant()):
        for _ in range(NUM_STEPS):
            accountant.step(noise_multiplier=sigma, sample_rate=SAMPLE_RATE)
        found[accountant.mechanism()] = {
            delta: float(accountant.get_epsilon(delta)) for delta in (*DELTAS, QUOTED_DELTA)
        }
    return found


def epsilon_of_mu(mu: float, delta: float) -> float:
    """Return epsilon of mu Gaussian DP (Dong, Roth and Su 2022, corollary 2.13)."""

    def excess(epsilon: float) -> float:
        upper = ndtr(-epsilon / mu + mu / 2) - math.exp(epsilon) * ndtr(-epsilon / mu - mu / 2)
        return float(upper) - delta

    if mu <= 0 or excess(0.0) <= 0:
        return 0.0
    return float(brentq(excess, 0.0, 100.0))
