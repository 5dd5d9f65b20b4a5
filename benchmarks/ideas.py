"""Three more uses of the slack indicator, to be measured; none is part of the package.

Each is a variant of ``slaclip`` with unit rescaling. What came of them is in
``benchmarks/README.md``.

* :class:`AveragingController`: decide on the average of the last indicators.
* :class:`TradeOffController`: aim at the threshold of the smallest squared error of the release.
* :func:`release_ends_only`: only the first and the last slot, at full amplitude, with less noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from opacus_slaclip.controllers import Controller, SlaClipController
from opacus_slaclip.indicator import SlackIndicator


@dataclass
class AveragingController:
    """Let ``controller`` see an exponential average of the indicators.

    At weight ``w`` of the newest one the noise is ``sqrt(w / (2 - w))`` of what it was, and the
    average lags ``1 / w - 1`` steps behind. Bins move with the threshold, which this neglects.

    Attributes:
        controller: Decides on the average.
        weight: ``w``, in (0, 1].
    """

    controller: Controller = field(default_factory=SlaClipController)
    weight: float = 0.2
    _average: torch.Tensor | None = field(default=None, init=False)

    def __call__(self, clip_norm: float, indicator: SlackIndicator, /) -> float:
        """Return the next threshold."""
        last = indicator.values if self._average is None else self._average
        self._average = last + self.weight * (indicator.values - last)
        return float(self.controller(clip_norm, replace(indicator, values=self._average)))


@dataclass(frozen=True)
class TradeOffController:
    """Move toward the ``C`` that minimizes squared clipping bias plus noise variance.

    The error of the mean gradient is at most ``E[(n - C)+]^2 + v C^2`` with ``v = d sigma^2 / B^2``
    (the objective of DC-SGD-E), least where ``E[(n - C)+] (1 - F(C)) = v C``. What lies above ``C``
    is not released, but for exponentially distributed norms the mean excess is
    ``E[min(n, C)] / F(C)``, of which the indicator has both parts. With ``a`` the left side over
    ``C`` in that estimate, ``C' = C exp(eta (a - v) / (a + v))``: free of the norms' scale.
    (At a large ``v`` the best ``C`` clips nearly all samples, which ``AutoController`` takes for a
    level that it lost.)

    Attributes:
        num_parameters: ``d``.
        clipbound_learning_rate: ``eta``.
    """

    num_parameters: int
    clipbound_learning_rate: float = 0.2

    def __call__(self, clip_norm: float, indicator: SlackIndicator, /) -> float:
        """Return the next threshold."""
        below = min(max(float(indicator.values[0]), 1e-3), 1.0)
        mean_norm = 1.0 - min(max(float(indicator.values.mean()), 0.0), 1.0)
        bias = (1.0 - below) ** 2 * mean_norm / below
        # noise_std is sigma sqrt(K) / B.
        variance = self.num_parameters * indicator.noise_std**2 / indicator.num_slots
        step = (bias - variance) / max(bias + variance, 1e-30)
        return clip_norm * math.exp(self.clipbound_learning_rate * step)


def end_amplitudes(num_slots: int) -> tuple[float, float]:
    """Return the amplitudes, over ``C``, of the first and the last slot if there are no others.

    A sample of norm ``n = C (1 - (j - 1 + t) / K)``, ``0 <= t <= 1``, whose slots below ``j`` are
    full has the joint norm ``C sqrt((1 - (j - 1 + t) / K)^2 + a_1^2 + ... + a_j^2 t^2)``, convex in
    ``t``, so largest at the ends of a bin: it is at most ``C`` if it is there, which for slot 1
    allows ``sqrt(2 / K - 1 / K^2)`` and then, at ``n = 0``, ``1 - 1 / K`` for slot K.

    Args:
        num_slots: ``K``, at least 2.
    """
    return math.sqrt(2.0 / num_slots - 1.0 / num_slots**2), 1.0 - 1.0 / num_slots


class _EndsOnly:
    """Mixed into an optimizer: what is released of the slack are its two end slots."""

    def _noised_slack(self: Any, slot_sums: torch.Tensor) -> torch.Tensor:
        num_slots = len(slot_sums)
        amplitudes = slot_sums.new_tensor(end_amplitudes(num_slots)) * self.max_grad_norm
        ends = slot_sums[[0, -1]]
        # The parent's stream has num_slots draws here, so that gradients get the same noise.
        noise = self._noise_like(slot_sums)[[0, -1]]
        first, last = (ends + noise / amplitudes).tolist()
        # The rest is only filled in, from what has been released.
        return torch.linspace(first, last, num_slots, dtype=slot_sums.dtype)


def release_ends_only(optimizer: Any) -> None:
    """Make an optimizer in hooks mode release the end slots only, each at its full amplitude.

    The noise on the indicator's ends is ``sigma / (B a)`` with ``a`` of :func:`end_amplitudes`,
    where that of a whole indicator is ``sigma sqrt(K) / B``.

    Raises:
        ValueError: If the optimizer has fewer than two slots.
    """
    num_slots = optimizer.num_slots
    if num_slots < 2:
        raise ValueError(f"num_slots must be at least 2 to have two ends, got {num_slots}.")
    family = type(optimizer)
    optimizer.__class__ = type(f"EndsOnly{family.__name__}", (_EndsOnly, family), {})
