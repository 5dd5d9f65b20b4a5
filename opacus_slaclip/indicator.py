"""The released slack indicator as a value: a private, binned CDF of the gradient norms."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from opacus_slaclip._validate import check_in_range


@dataclass(frozen=True, eq=False)
class SlackIndicator:
    """One release of the slack indicator ``s_hat``, already noisy, so free to be published.

    Slot ``j`` (1-based) estimates the mean of the gradient-norm CDF over the bin
    ``[C (1 - j / K), C (1 - (j - 1) / K)]``: the first slot looks just under ``C``, the last one
    near 0. Entries carry noise, so they may leave [0, 1] and need not be monotone.

    Attributes:
        values: ``s_hat``, shape (K,), float64 on the CPU; fractions of the expected batch.
        clip_norm: Threshold ``C`` at which it was measured, in gradient-norm units.
        noise_std: Standard deviation of the Gaussian noise on each slot, ``sigma sqrt(K) / B``.
            Poisson sampling adds to the error (strongly correlated between slots).
        expected_batch_size: Public denominator ``B`` of the release, in samples.

    Reference: eq. 9-11.
    """

    values: torch.Tensor
    clip_norm: float
    noise_std: float
    expected_batch_size: float

    @property
    def num_slots(self) -> int:
        """Number of slots ``K``."""
        return len(self.values)

    @property
    def bin_edges(self) -> torch.Tensor:
        """Edges of the bins in gradient-norm units, shape (K + 1,), from ``C`` down to 0.

        Slot ``j`` (0-based) covers ``[bin_edges[j + 1], bin_edges[j]]``.
        """
        steps = torch.arange(self.num_slots, -1, -1, dtype=torch.float64)
        return self.clip_norm * (steps / self.num_slots)

    def monotone(self) -> torch.Tensor:
        """Return the closest CDF: non-increasing over the slots and within [0, 1], shape (K,).

        The least-squares projection (pool adjacent violators). Post-processing: no privacy cost.
        """
        blocks: list[tuple[float, int]] = []  # (mean, number of slots), means non-increasing
        for value in self.values.tolist():
            mean, count = value, 1
            while blocks and blocks[-1][0] < mean:
                last_mean, last_count = blocks.pop()
                mean = (mean * count + last_mean * last_count) / (count + last_count)
                count += last_count
            blocks.append((mean, count))
        means, counts = zip(*blocks, strict=True)
        projected = np.repeat(np.array(means, dtype=np.float64), counts)
        return torch.from_numpy(projected.clip(0.0, 1.0))

    def quantile(self, probability: float) -> float:
        """Return the gradient norm below which about ``probability`` of the samples lie.

        Interpolates the monotone CDF between the midpoints of the bins, from 0 at norm 0.

        Args:
            probability: In [0, 1].

        Returns:
            A norm in [0, C]. It is ``C`` where the release does not reach ``probability`` below
            ``C``: the quantile is then somewhere near or above ``C``.

        Raises:
            TypeError, ValueError: If ``probability`` is not a number in [0, 1].
        """
        probability = check_in_range("probability", probability, 0.0, 1.0, "Pass a fraction.")
        edges = self.bin_edges.numpy()[::-1]
        norms = np.concatenate([[0.0], (edges[1:] + edges[:-1]) / 2.0])
        cdf = np.concatenate([[0.0], self.monotone().numpy()[::-1]])
        if probability > cdf[-1]:
            return self.clip_norm
        return float(np.interp(probability, cdf, norms))

    def mean_clipped_norm(self) -> float:
        """Return the estimate ``C (1 - mean(s_hat))`` of ``E[min(n, C)]``, in gradient-norm units.

        Unbiased over sampling and noise.
        """
        return self.clip_norm * (1.0 - float(self.values.mean()))

    def __repr__(self) -> str:
        """Show what was released, shortened."""
        shown = ", ".join(f"{value:.3f}" for value in self.values[:4].tolist())
        more = ", ..." if self.num_slots > 4 else ""
        return (
            f"SlackIndicator(values=[{shown}{more}], num_slots={self.num_slots}, "
            f"clip_norm={self.clip_norm:.4g}, noise_std={self.noise_std:.3g})"
        )
