"""The method, slowly: float64 and exact fractions, straight from the paper's equations.

Nothing here imports the package under test. Slack is in units of the slot width
``lambda = C / sqrt(K)`` unless a name says otherwise.
"""

from __future__ import annotations

import math
from fractions import Fraction


def clip(gradient: list[float], clip_norm: float) -> list[float]:
    """Scale a gradient to norm at most C, as Opacus does (with its 1e-6 in the divisor)."""
    norm = math.hypot(*gradient)
    factor = min(1.0, clip_norm / (norm + 1e-6))
    return [factor * entry for entry in gradient]


def slack_vector(norm: float, clip_norm: float, num_slots: int) -> list[Fraction]:
    """Encode one norm, eq. 6-8: ``sqrt(K) max(C - n, 0) = a lambda + b``; exact.

    Dividing by lambda leaves no square root: ``K max(C - n, 0) / C = a + b / lambda``.
    """
    n, C, K = Fraction(norm), Fraction(clip_norm), num_slots
    a, b = divmod(K * max(C - n, Fraction(0)), C)  # b: still in units of C
    if a == K:
        return [Fraction(1)] * K
    return [Fraction(1)] * int(a) + [b / C] + [Fraction(0)] * (K - int(a) - 1)


def slack_sum(norms: list[float], clip_norm: float, num_slots: int) -> list[Fraction]:
    """Add the slack vectors of a batch."""
    total = [Fraction(0)] * num_slots
    for norm in norms:
        vector = slack_vector(norm, clip_norm, num_slots)
        total = [x + y for x, y in zip(total, vector, strict=True)]
    return total


def slack_norm(norm: float, clip_norm: float, num_slots: int) -> float:
    """Length of one sample's slack vector, in gradient-norm units."""
    slot_width = clip_norm / math.sqrt(num_slots)
    squares = sum(float(slot) ** 2 for slot in slack_vector(norm, clip_norm, num_slots))
    return slot_width * math.sqrt(squares)


def indicator(
    norms: list[float],
    clip_norm: float,
    num_slots: int,
    expected_batch_size: float,
    noise: list[float] | None = None,
) -> list[float]:
    """Average the noisy slack sum, eq. 9-11; ``noise`` is in gradient-norm units."""
    slot_width = clip_norm / math.sqrt(num_slots)
    total = [slot_width * float(slot) for slot in slack_sum(norms, clip_norm, num_slots)]
    noise = [0.0] * num_slots if noise is None else noise
    return [(s + z) / (slot_width * expected_batch_size) for s, z in zip(total, noise, strict=True)]


def next_slaclip(
    clip_norm: float, s_hat: list[float], *, eta: float, c_min: float, c_max: float
) -> float:
    """Move the threshold by Algorithm 1, eq. 28-30 of Appendix C (r is clamped first)."""
    r = min(max(s_hat[-1] / clip_norm, 0.0), 1.0)  # eq. 28
    gamma = 1 - 0.5 * (1 - r)  # eq. 29, beta = 1/2
    return _multiply(clip_norm, eta * (gamma - s_hat[0]), c_min, c_max)  # eq. 30


def next_slaclip_q(
    clip_norm: float, s_hat: list[float], *, eta: float, q: float, c_min: float, c_max: float
) -> float:
    """Move the threshold towards a fixed unclipped fraction, eq. 12."""
    return _multiply(clip_norm, eta * (q - s_hat[0]), c_min, c_max)


def _multiply(clip_norm: float, exponent: float, c_min: float, c_max: float) -> float:
    if exponent > 700:  # math.exp overflows beyond; C_max / C is far below e^700
        return c_max
    return min(max(clip_norm * math.exp(exponent), c_min), c_max)


def num_slots_fit(num_slots: int, expected_batch_size: float, noise_multiplier: float) -> bool:
    """Say whether K slots satisfy eq. 14: half a noise band under half a step of the CDF."""
    band = 2.576 * noise_multiplier * math.sqrt(num_slots) / expected_batch_size
    return band <= 1 / (2 * num_slots)


def largest_num_slots(expected_batch_size: float, noise_multiplier: float) -> int:
    """Find by search the largest K that satisfies eq. 14, at least 1."""
    num_slots = 1
    while num_slots_fit(num_slots + 1, expected_batch_size, noise_multiplier):
        num_slots += 1
    return num_slots
