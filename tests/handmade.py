"""Optimizers made by hand and fed per-sample gradients by hand: no model, no backward pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from opacus_slaclip import FixedController, SlaClipDPOptimizer


def make_optimizer(
    *shapes: tuple[int, ...],
    max_grad_norm: float = 1.0,
    expected_batch_size: float = 2**30,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> SlaClipDPOptimizer:
    """Return an optimizer over zero parameters of these shapes that reports sums, not means.

    By default the threshold stays where it is, and the expected batch size is a power of two, by
    which division is exact, and so large that any number of slots is a recommended one.
    """
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    arguments = {
        "noise_multiplier": 0.0,
        "loss_reduction": "sum",
        "controller": FixedController(),
        "min_clipbound": min(max_grad_norm, 0.1),
        "max_clipbound": max(max_grad_norm, 50.0),
    }
    return SlaClipDPOptimizer(
        torch.optim.SGD(parameters, lr=0.0),
        max_grad_norm=max_grad_norm,
        expected_batch_size=expected_batch_size,
        **arguments | options,
    )


def take_step(optimizer: SlaClipDPOptimizer, grad_samples: Sequence[torch.Tensor]) -> None:
    """Release one batch, given as one tensor a parameter, shape (B, *parameter)."""
    optimizer.zero_grad()
    for parameter, grad_sample in zip(optimizer.params, grad_samples, strict=True):
        parameter.grad_sample = grad_sample.clone()
    optimizer.step()


def take_empty_step(optimizer: SlaClipDPOptimizer) -> None:
    """Release an empty batch: whatever comes out is noise alone."""
    take_step(optimizer, [p.new_zeros(0, *p.shape) for p in optimizer.params])


def released_gradient(optimizer: SlaClipDPOptimizer) -> torch.Tensor:
    """Return the noisy gradient sum of the last step as one float64 vector."""
    return torch.cat([p.grad.flatten().double() for p in optimizer.params])


def released_slack(optimizer: SlaClipDPOptimizer) -> torch.Tensor:
    """Return the noisy slack sum of the last step, in gradient-norm units, float64."""
    release = optimizer.slack_indicator
    slot_width = release.clip_norm / math.sqrt(release.num_slots)
    return release.values * release.expected_batch_size * slot_width
