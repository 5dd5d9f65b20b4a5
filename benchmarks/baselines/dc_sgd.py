"""DC-SGD-E: the threshold that minimizes an estimated error, from a noisy histogram of norms.

Beside the noisy gradient every step releases a noisy histogram of the per-sample gradient norms.
The next threshold minimizes the squared clipping bias, estimated from that histogram, plus the
variance of the noise on the mean gradient (:func:`optimal_clip_norm`).

Why both releases together cost one step at noise multiplier ``sigma``: adding or removing one
sample moves the clipped sum by at most ``C``, noised at ``sigma_grad C``, and one count of the
histogram by 1, noised at ``sigma_hist``. In units of its noise, the pair moves by at most
``sqrt(1 / sigma_grad^2 + 1 / sigma_hist^2) = 1 / sigma``, and its noise is one standard Gaussian
vector. Both parts are computed on the same Poisson subsample, so the pair is a single subsampled
Gaussian mechanism with noise multiplier ``sigma``. Threshold and range of the next step are
functions of past releases only: post-processing.

Reference: Wei et al., "DC-SGD: Differentially Private SGD with Dynamic Clipping through Gradient
Norm Distribution Estimation", 2025, the variant by expected squared error. How the range of the
histogram follows the norms (:func:`next_norm_range`) is our own rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from opacus.optimizers import DPOptimizer

from opacus_slaclip import _opacus
from opacus_slaclip._validate import (
    check_expected_batch_size,
    check_noise_multiplier,
    check_positive,
)
from opacus_slaclip.optimizers.grad_sample import per_sample_norms

HISTOGRAM_NOISE = 5.0  # sigma_hist, in counts
NUM_BINS = 20

# The range stays within this factor of where it began, so that no threshold can vanish.
_MAX_RANGE_FACTOR = 2.0**20


def gradient_noise_multiplier(noise_multiplier: float, histogram_noise: float) -> float:
    """Return ``sigma_grad`` with ``1 / sigma^2 = 1 / sigma_grad^2 + 1 / sigma_hist^2``.

    Args:
        noise_multiplier: ``sigma`` of the whole step, in [0, ``histogram_noise``).
        histogram_noise: ``sigma_hist``, standard deviation of the noise on one count.

    Raises:
        TypeError, ValueError: If the histogram alone would cost as much as the whole step.
    """
    sigma = check_noise_multiplier(noise_multiplier)
    if sigma >= histogram_noise:
        raise ValueError(
            f"noise_multiplier must be below the histogram's noise {histogram_noise:g}, got "
            f"{sigma:g}: the histogram alone would cost more than a step may. Lower "
            "noise_multiplier or raise histogram_noise."
        )
    # sigma^-2 - sigma_hist^-2 without dividing by a sigma of 0.
    return sigma / math.sqrt((1.0 - sigma / histogram_noise) * (1.0 + sigma / histogram_noise))


def norm_histogram(norms: torch.Tensor, *, norm_range: float, num_bins: int) -> torch.Tensor:
    """Count norms in equal bins of ``[0, norm_range]``; **private** until noise is added.

    Guarantee: each sample adds 1 to one bin, so the L2 sensitivity is 1 under add/remove adjacency.

    Args:
        norms: Per-sample gradient norms, shape (b,); b may be 0.
        norm_range: Upper end of the bins, in gradient-norm units.
        num_bins: Number of bins.

    Returns:
        Counts, shape (num_bins,), int64. The last bin is open: it also holds all norms above the
        range and those that are not finite.
    """
    index = torch.nan_to_num(norms / (norm_range / num_bins), nan=num_bins, posinf=num_bins)
    return torch.bincount(index.clamp(max=num_bins - 1).long(), minlength=num_bins)


def optimal_clip_norm(
    histogram: torch.Tensor, *, norm_range: float, noise_variance: float
) -> float | None:
    """Return the ``C`` that minimizes ``E[max(n - C, 0)]^2 + noise_variance C^2``, exactly.

    The distribution of ``n`` has its mass at the mid-points of the bins; negative counts are taken
    as 0 and the rest is normalized. Between two neighbouring mid-points the bias is linear,
    ``S - W C`` with ``W`` the mass above and ``S`` its first moment, so the objective is a parabola
    with its minimum at ``W S / (W^2 + noise_variance)``; the best of the pieces is taken.

    Args:
        histogram: Noisy counts, shape (num_bins,).
        norm_range: Upper end of the bins, in gradient-norm units.
        noise_variance: ``v = d sigma_grad^2 / B^2``, at least 0: variance of the noise on the mean
            gradient over ``C^2``, summed over the ``d`` parameters. At 0 the smallest ``C`` without
            bias is taken, the mid-point of the highest bin with mass.

    Returns:
        ``C``, positive, in gradient-norm units; None if no count is positive.
    """
    mass = histogram.detach().cpu().double().numpy().clip(min=0.0)
    if not mass.sum() > 0:
        return None
    mass = mass / mass.sum()
    mid_points = (np.arange(len(mass)) + 0.5) * (norm_range / len(mass))
    # Piece i ends at mid-point i; what lies above it is the mass from bin i on.
    above = np.cumsum(mass[::-1])[::-1]
    moment = np.cumsum((mass * mid_points)[::-1])[::-1]
    begin = np.concatenate([[0.0], mid_points[:-1]])
    curvature = above**2 + noise_variance
    lowest = np.divide(above * moment, curvature, out=begin.copy(), where=curvature > 0)
    candidates = lowest.clip(begin, mid_points)
    errors = (moment - above * candidates) ** 2 + noise_variance * candidates**2
    return float(candidates[np.argmin(errors)])


def next_norm_range(
    histogram: torch.Tensor,
    *,
    norm_range: float,
    noise_std: float,
    expected_batch_size: float,
) -> float:
    """Return the range of the next histogram, from what has been released of this one.

    With ``B`` the expected batch size and ``s`` the standard deviation of the noise on one count:

    * The range doubles if the open top bin holds more than ``max(B / 10, 3 s)``.
    * Otherwise it halves if the lowest quarter of the bins (``k`` of them) holds more than
      ``max(B / 2, 3 s sqrt(k))`` and all bins above together hold less than ``B / 20``. (Counts are
      summed with their signs, so the noise has mean 0.)

    After doubling, the norms of the old top bin are far above the lowest quarter; after halving,
    those of the old lowest quarter are below the middle. So no change calls for its opposite, but
    for noise, which the next releases correct. Where ``B`` is below
    about ``3 s`` the noise hides the histogram and the range hardly moves.

    Args:
        histogram: Noisy counts, shape (num_bins,).
        norm_range: Upper end of the bins, in gradient-norm units.
        noise_std: ``s``, in counts.
        expected_batch_size: ``B``, in samples.
    """
    counts = histogram.detach().cpu().double()
    quarter = len(counts) // 4
    if counts[-1] > max(expected_batch_size / 10, 3 * noise_std):
        return 2.0 * norm_range
    is_low = counts[:quarter].sum() > max(
        expected_batch_size / 2, 3 * noise_std * math.sqrt(quarter)
    )
    is_low_only = bool(is_low) and bool(counts[quarter:].sum() < expected_batch_size / 20)
    return norm_range / 2.0 if is_low_only else norm_range


class DCSGDOptimizer(DPOptimizer):
    """:class:`opacus.optimizers.DPOptimizer` whose threshold follows a noisy norm histogram.

    Guarantee: the clipped sum, noised at ``sigma_grad C``, and the histogram, noised at
    ``sigma_hist``, cost together one step of plain DP-SGD at ``noise_multiplier``, which stays the
    ``sigma`` that the accountant reads (see the module's docstring). Clipping is the parent's.

    ``max_grad_norm`` is ``C_t``: fixed from the first physical batch of a logical batch to its
    noise draws, moved at the end of a step that was not skipped. The first histogram reaches to
    ``2 C_0``; the range then follows :func:`next_norm_range`, within a factor of ``2^20`` of the
    first. If no noisy count is positive the threshold stays. The histogram is summed over physical
    batches and noised once; nothing is divided by the realized batch size. An empty batch releases
    noise like any other. Threshold and range are not in ``state_dict``.

    Attributes:
        histogram: Noisy counts of the last release, shape (num_bins,); None before the first.
        norm_range: Upper end of the next histogram's bins, in gradient-norm units.

    Args:
        optimizer: The optimizer to wrap.
        noise_multiplier: ``sigma`` in [0, ``histogram_noise``); 0 switches both noises off.
        max_grad_norm: ``C_0``, positive, in gradient-norm units.
        expected_batch_size: Public expected size of a logical batch, ``B``.
        histogram_noise: ``sigma_hist``, in counts; default 5.
        num_bins: Number of bins, at least 4; default 20.
        **kwargs: As for the parent.

    Raises:
        TypeError, ValueError: If a value is out of its range.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        expected_batch_size: int | None,
        histogram_noise: float = HISTOGRAM_NOISE,
        num_bins: int = NUM_BINS,
        **kwargs: Any,
    ) -> None:
        self.check(
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            histogram_noise=histogram_noise,
        )
        check_expected_batch_size(expected_batch_size)
        if num_bins < 4:
            raise ValueError(f"num_bins must be at least 4, got {num_bins}. Pass more bins.")
        super().__init__(
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=float(max_grad_norm),
            expected_batch_size=expected_batch_size,
            **kwargs,
        )
        self.histogram_noise = histogram_noise
        self.num_bins = num_bins
        self.norm_range = self._first_range = 2.0 * self.max_grad_norm
        self.histogram: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None

    @staticmethod
    def check(
        *, noise_multiplier: float, max_grad_norm: float, histogram_noise: float = HISTOGRAM_NOISE
    ) -> None:
        """Raise ``TypeError`` or ``ValueError`` if a step with these values is not possible."""
        check_positive("histogram_noise", histogram_noise, "Pass sigma_hist, such as 5.")
        gradient_noise_multiplier(noise_multiplier, histogram_noise)
        check_positive("max_grad_norm", max_grad_norm, "Pass the initial threshold C_0.")

    @property
    def gradient_noise_multiplier(self) -> float:
        """``sigma_grad``: the clipped sum's noise has standard deviation ``sigma_grad C``."""
        return gradient_noise_multiplier(self.noise_multiplier, self.histogram_noise)

    @property
    def _histogram_noise_std(self) -> float:
        return self.histogram_noise if self.noise_multiplier > 0 else 0.0

    def clip_and_accumulate(self) -> None:
        """Clip and add up as the parent does; count the norms of the same samples."""
        super().clip_and_accumulate()
        counts = norm_histogram(
            per_sample_norms(self.grad_samples), norm_range=self.norm_range, num_bins=self.num_bins
        )
        self._counts = counts if self._counts is None else self._counts + counts

    def add_noise(self) -> None:
        """Noise the clipped sum, then the histogram: one release."""
        std = self.gradient_noise_multiplier * self.max_grad_norm
        for p in self.params:
            _opacus.check_not_processed(p.summed_grad)
            p.grad = (p.summed_grad + self._noise_like(p.summed_grad, std)).view_as(p)
            _opacus.mark_processed(p.summed_grad)
        counts = self._counts.to(torch.float32)  # exact below 2^24 samples
        self.histogram = counts + self._noise_like(counts, self._histogram_noise_std)

    def _noise_like(self, reference: torch.Tensor, std: float) -> torch.Tensor:
        return _opacus.generate_noise(
            std=std, reference=reference, generator=self.generator, secure_mode=self.secure_mode
        )

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool:
        """Clip, accumulate and, at the end of a logical batch, release and move the threshold."""
        last = self.histogram
        is_released = bool(super().pre_step(closure))
        if self.histogram is not last:
            self._follow(self.histogram)
        return is_released

    def _follow(self, histogram: torch.Tensor) -> None:
        """Move threshold and range by what has just been released."""
        batch_size = self.expected_batch_size * self.accumulated_iterations
        num_parameters = sum(p.numel() for p in self.params)
        clip_norm = optimal_clip_norm(
            histogram,
            norm_range=self.norm_range,
            noise_variance=num_parameters * (self.gradient_noise_multiplier / batch_size) ** 2,
        )
        if clip_norm is not None:
            self.max_grad_norm = clip_norm
        norm_range = next_norm_range(
            histogram,
            norm_range=self.norm_range,
            noise_std=self._histogram_noise_std,
            expected_batch_size=batch_size,
        )
        low, high = self._first_range / _MAX_RANGE_FACTOR, self._first_range * _MAX_RANGE_FACTOR
        self.norm_range = min(max(norm_range, low), high)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear gradients; the counts live and die with ``summed_grad``."""
        super().zero_grad(set_to_none)
        if not _opacus.last_step_was_skipped(self):
            self._counts = None
