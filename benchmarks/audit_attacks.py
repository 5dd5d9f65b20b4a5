"""Two attacks on a release, and what their success proves about mu of Gaussian DP.

The first is the likelihood ratio of the mechanism as it is claimed to be; the second is fitted to
draws of the mechanism as it is. Each ends in a score that is higher with the canary, and in
thresholds on it that are fixed before the draws they are used on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from scipy.special import ndtri
from scipy.stats import beta

from benchmarks.audit_releases import (
    ALONG,
    BASE_SIZE,
    NUM_COORDINATES,
    NUM_ENTRIES,
    NUM_SLOTS,
    Family,
)

# Of the variance that the noise is claimed to have. A direction of the release with less than this
# counts as free of noise: a canary that moves it by 1e-3 is then found with certainty, while the
# rounding of float32 is not mistaken for a signal.
_NOISELESS = 1e-8

# Where the score is cut: the middle, and a standard deviation to either side. Each cut needs four
# one-sided bounds: from above and below, with and without the canary.
_CUTS = (0.0, -1.0, 1.0)
NUM_BOUNDS = 4 * len(_CUTS)


def claimed_vector(canary: float, num_steps: int) -> torch.Tensor:
    """Return how the canary (its norm in thresholds) moves the release, by eq. 6-8."""
    unused = NUM_SLOTS * max(1.0 - canary, 0.0)
    slots = [min(max(unused - j, 0.0), 1.0) / math.sqrt(NUM_SLOTS) for j in range(NUM_SLOTS)]
    rest = torch.tensor([*slots, 0.0], dtype=torch.float64)  # 0: the threshold's own move
    return torch.cat([min(canary, 1.0) * ALONG.double(), rest]).repeat(num_steps)


def expected_mu(canary: float, sigma: float, num_steps: int) -> float:
    """Return mu of ``num_steps`` releases at rate 1 against a canary of this norm (Lemma 3.2)."""
    x = min(canary, 1.0)
    f = NUM_SLOTS * (1.0 - x) % 1.0
    return math.sqrt(num_steps * (1.0 - x * (1.0 - x) - f * (1.0 - f) / NUM_SLOTS)) / sigma


@dataclass(frozen=True)
class Attack:
    """A direction to score releases along, and where to cut the score."""

    direction: torch.Tensor
    cuts: list[float]

    def scores(self, releases: torch.Tensor) -> torch.Tensor:
        """Return the score of each release, shape (N,)."""
        return releases[:, : len(self.direction)] @ self.direction


def claimed_attack(family: Family, canary: float, sigma: float) -> Attack:
    """Return the likelihood ratio of the mechanism as claimed; it looks at rank 0's view."""
    direction = claimed_vector(canary, family.num_steps)
    base = torch.zeros(NUM_COORDINATES, dtype=torch.float64)
    base[:NUM_ENTRIES] = -BASE_SIZE * ALONG  # clipped to the threshold, so without slack
    length = direction.norm()
    middle = float(direction @ base.repeat(family.num_steps) + length**2 / 2)
    return Attack(direction, [middle + cut * sigma * float(length) for cut in _CUTS])


def fitted_attack(without: torch.Tensor, with_canary: torch.Tensor, sigma: float) -> Attack:
    """Return the best linear score for draws with these means and this (full) covariance."""
    difference = with_canary.mean(0) - without.mean(0)
    covariance = (torch.cov(without.T) + torch.cov(with_canary.T)) / 2
    variances, axes = torch.linalg.eigh(covariance)
    direction = axes @ ((axes.T @ difference) / variances.clamp(min=_NOISELESS * sigma**2))
    if not direction.any():  # the canary is invisible
        direction = torch.ones_like(direction)
    means = [(side @ direction).mean().item() for side in (without, with_canary)]
    spread = math.sqrt(max(float(direction @ covariance @ direction), 0.0))
    return Attack(direction, [sum(means) / 2 + cut * spread for cut in _CUTS])


def binomial_bounds(hits: int, trials: int, error: float) -> tuple[float, float]:
    """Return Clopper-Pearson bounds on a probability, each of which fails with this probability."""
    low = beta.ppf(error, hits, trials - hits + 1) if hits else 0.0
    high = beta.isf(error, hits + 1, trials - hits) if hits < trials else 1.0
    return float(low), float(high)


def mu_interval(
    without: torch.Tensor, with_canary: torch.Tensor, cut: float, error: float
) -> tuple[float, float]:
    """Return bounds on ``Phi^-1(TPR) - Phi^-1(FPR)`` of the test "score above the cut".

    Args:
        without: Scores without the canary, shape (N,).
        with_canary: Scores with it, shape (M,).
        cut: Where the test says "with".
        error: Probability of failure of each of the four bounds that go into these two.

    Returns:
        (low, high). ``low`` is a lower bound on mu; so is ``-high``, for the opposite test.
    """
    fpr, tpr = (
        binomial_bounds(int((scores > cut).sum()), len(scores), error)
        for scores in (without, with_canary)
    )
    return float(ndtri(tpr[0]) - ndtri(fpr[1])), float(ndtri(tpr[1]) - ndtri(fpr[0]))


@dataclass(frozen=True)
class Finding:
    """What an attack has shown; every bound but the last holds at the audit's error budget."""

    mu_lower_bound: float
    low: float
    high: float
    mu_lower_bound_95: float


def run_attack(attack: Attack, sides: list[torch.Tensor], error: float) -> Finding:
    """Run an attack on draws without and with the canary.

    Args:
        attack: The attack, fixed before the draws.
        sides: Draws without and with the canary.
        error: Probability that any bound of the finding fails, but the last one.
    """
    scores = [attack.scores(side) for side in sides]
    intervals = [mu_interval(*scores, cut, error / NUM_BOUNDS) for cut in attack.cuts]
    return Finding(
        mu_lower_bound=max(bound for low, high in intervals for bound in (low, -high)),
        low=intervals[0][0],
        high=intervals[0][1],
        mu_lower_bound_95=mu_interval(*scores, attack.cuts[0], 0.05 / 2)[0],
    )


def run_attacks(
    family: Family, canary: float, sigma: float, sides: list[torch.Tensor], error: float
) -> dict[str, Finding]:
    """Run both attacks; ``error`` is each one's share of the budget."""
    half = len(sides[0]) // 2
    fitted = fitted_attack(sides[0][:half], sides[1][:half], sigma)
    return {
        "claimed": run_attack(claimed_attack(family, canary, sigma), sides, error),
        "fitted": run_attack(fitted, [side[half:] for side in sides], error),
    }


def verdict(finding: Finding, expected: float, limit: float) -> str:
    """Return "ok", "LEAK" (mu is above the claim) or "MISS" (it is not what it should be)."""
    if finding.mu_lower_bound > limit:
        return "LEAK"
    return "ok" if finding.low <= expected <= finding.high else "MISS"
