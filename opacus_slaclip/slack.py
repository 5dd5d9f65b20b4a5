"""The mechanism as pure functions on tensors: encode, sum and normalize the slack.

Clipping at ``C`` leaves ``C - min(n, C)`` of a sample's norm budget unused. That slack is packed
into ``K`` extra coordinates ("slots") of the same noisy release so that the joint vector (clipped
gradient, slack) still has L2 norm at most ``C``, for every norm ``n`` (Lemma 3.2):

    joint^2 = C^2 - m (C - m) - b (lambda - b) <= C^2,   m = min(n, C), lambda = C / sqrt(K)

so the L2 sensitivity of the sum under add/remove adjacency is that of the clipped gradient alone.

Slack is held in units of the slot width ``lambda``: the sums are then counts of samples, and
neither a tiny nor a huge ``C`` under- or overflows. Edge cases of one sample:

| norm        | slack, in slots                                           |
|-------------|-----------------------------------------------------------|
| 0           | K full slots (joint norm exactly C)                       |
| in (0, C)   | u = K (1 - n / C): floor(u) full ones, one holds the rest |
| C and above | 0 (joint norm at most C)                                  |
| inf or NaN  | 0; the caller zeroes such a sample's gradient             |

Reference: Zou et al., "SlaClip: Gradient Norm Slacks can be Indicator for Adaptive Clipping in
DP-SGD", ICML 2026. Equation numbers below are that paper's.
"""

from __future__ import annotations

import math

import torch

from opacus_slaclip._validate import (
    MAX_NUM_SLOTS,
    check_expected_batch_size,
    check_noise_multiplier,
    check_num_slots,
    check_positive,
)

# Two-sided 99 % quantile of the standard normal distribution, as the paper rounds it.
_Z_99 = 2.576

# Opacus's guard against a division by zero. It also keeps a norm that underflowed to 0 harmless.
_NORM_OFFSET = 1e-6


def slot_width(clip_norm: float, num_slots: int) -> float:
    """Return ``lambda = C / sqrt(K)``, a full slot in gradient-norm units (eq. 6)."""
    return clip_norm / math.sqrt(num_slots)


def clip_factors(norms: torch.Tensor, *, clip_norm: float) -> torch.Tensor:
    """Return the factor that scales each sample's gradient to norm at most ``clip_norm``.

    Args:
        norms: Per-sample gradient norms, shape (B,), float32 or better.
        clip_norm: Threshold ``C`` in gradient-norm units.

    Returns:
        ``min(1, C / (n + 1e-6))``, shape (B,): Opacus's, bit for bit, unless it is subnormal.
        Such a factor has lost its precision and could double a sample; it becomes 0.
    """
    factors = (clip_norm / (norms + _NORM_OFFSET)).clamp(max=1.0)
    return factors.masked_fill(factors < torch.finfo(factors.dtype).tiny, 0.0)


def slack_in_slots(norms: torch.Tensor, *, clip_norm: float, num_slots: int) -> torch.Tensor:
    """Return each sample's slack as a number of slots, ``u = K max(1 - n / C, 0)`` (eq. 7).

    Args:
        norms: Per-sample gradient norms, shape (B,), float32 or better.
        clip_norm: Threshold ``C`` in gradient-norm units.
        num_slots: Number of slots ``K``.

    Returns:
        Values in [0, K], shape (B,), dtype of ``norms``. A norm that is not finite has no slack.
    """
    # In this form rounding cannot push u above K, as (C - n) / (C / K) can.
    unused = num_slots * (1.0 - norms / clip_norm).clamp(min=0.0)
    return torch.nan_to_num(unused, nan=0.0)


def encode_slack(norms: torch.Tensor, *, clip_norm: float, num_slots: int) -> torch.Tensor:
    """Return the slack vectors of a batch, one row a sample (eq. 6-8).

    This is the definition, for inspection and pictures; training sums rows with :func:`sum_slack`
    without ever building this matrix.

    Args:
        norms: Per-sample gradient norms, shape (B,).
        clip_norm: Threshold ``C`` in gradient-norm units.
        num_slots: Number of slots ``K``.

    Returns:
        Shape (B, K), in gradient-norm units: slot ``j`` holds ``lambda clamp(u - j + 1, 0, 1)``.

    Raises:
        TypeError, ValueError: If ``clip_norm`` or ``num_slots`` is not valid.
    """
    num_slots = check_num_slots(num_slots)
    clip_norm = check_positive("clip_norm", clip_norm, "Pass the threshold C.")
    slack = slack_in_slots(norms, clip_norm=clip_norm, num_slots=num_slots)
    offsets = torch.arange(num_slots, dtype=slack.dtype, device=slack.device)
    filled = (slack.unsqueeze(1) - offsets).clamp(0.0, 1.0)
    return filled * slot_width(clip_norm, num_slots)


def sum_slack(norms: torch.Tensor, *, clip_norm: float, num_slots: int) -> torch.Tensor:
    """Return the batch sum of the slack vectors in units of the slot width, in O(B + K).

    Slot ``j`` of the sum is the number of samples with at least ``j`` full slots plus the partly
    filled slots of those with exactly ``j - 1``: one histogram, one weighted histogram and one
    reversed cumulative sum. **This value is private** until noise is added.

    Args:
        norms: Per-sample gradient norms, shape (B,), float32 or better; B may be 0.
        clip_norm: Threshold ``C`` in gradient-norm units.
        num_slots: Number of slots ``K``.

    Returns:
        Sums in [0, B], shape (K,), dtype of ``norms``; times :func:`slot_width` for
        gradient-norm units. Its L2 sensitivity, jointly with the clipped gradients, is ``C``.
    """
    slack = slack_in_slots(norms, clip_norm=clip_norm, num_slots=num_slots)
    full = slack.floor()
    index = full.long()
    # Whole samples are counted in integers: exact, and deterministic on every device.
    samples = index.new_zeros(num_slots + 1).index_add(0, index, torch.ones_like(index))
    partial = slack.new_zeros(num_slots + 1).index_add(0, index, slack - full)
    return samples[1:].flip(0).cumsum(0).flip(0).to(slack.dtype) + partial[:-1]


def normalize_slack(noisy_sum: torch.Tensor, *, expected_batch_size: float) -> torch.Tensor:
    """Return the slack indicator: the noisy sum over the public, expected batch size (eq. 9-11).

    Args:
        noisy_sum: Noisy slack sum in units of the slot width, shape (K,).
        expected_batch_size: Global expected logical batch size ``B``, in samples. Never the
            realized size, which is private under Poisson sampling.

    Returns:
        ``s_hat``, shape (K,): slot ``j`` estimates the mean of the gradient-norm CDF over the bin
        ``[C (1 - j / K), C (1 - (j - 1) / K)]``. Noisy, so not confined to [0, 1].
    """
    return noisy_sum / check_expected_batch_size(expected_batch_size)


def indicator_noise_std(
    *, noise_multiplier: float, num_slots: int, expected_batch_size: float
) -> float:
    """Return the standard deviation ``sigma sqrt(K) / B`` of the Gaussian noise on one slot."""
    return noise_multiplier * math.sqrt(num_slots) / expected_batch_size


def recommended_num_slots(expected_batch_size: float, noise_multiplier: float) -> int:
    """Return the number of slots whose noise stays below the resolution it buys (eq. 14 and 36).

    ``K = max(1, floor((B / (2 z sigma))^(2/3)))`` with ``z = 2.576``: the half-width of a slot's
    99 % noise band is then at most half the mean step ``1 / K`` of the CDF. At ``sigma = 0`` the
    rule sets no bound, so the value at ``sigma = 1`` is used. At most 100,000.

    Args:
        expected_batch_size: Global expected logical batch size ``B``, in samples.
        noise_multiplier: ``sigma``.

    Returns:
        ``K``, at least 1.

    Raises:
        TypeError, ValueError: If an argument is not a finite number in its range.
    """
    batch = check_expected_batch_size(expected_batch_size)
    sigma = check_noise_multiplier(noise_multiplier) or 1.0
    slots = (batch / (2.0 * _Z_99 * sigma)) ** (2.0 / 3.0)
    return max(1, int(min(slots, MAX_NUM_SLOTS)))


def rounding_bound(
    num_entries: int, num_tensors: int, *, dtype: torch.dtype = torch.float32
) -> float:
    """Return how far rounding can lift one sample's joint norm above ``C``, relative to ``C``.

    With ``d`` gradient entries in ``P`` tensors, ``joint / C - 1 <= ((d + P) / 4 + 3.5) eps``,
    independent of K. Measured excesses are far below.

    Args:
        num_entries: Gradient entries of one sample, ``d``.
        num_tensors: Parameter tensors, ``P``.
        dtype: Type in which norms and sums are held.

    Returns:
        The bound, dimensionless.
    """
    return ((num_entries + num_tensors) / 4.0 + 3.5) * torch.finfo(dtype).eps
