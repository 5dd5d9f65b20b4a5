"""Faults planted in the real optimizer, each of which breaks the guarantee; a check finds it.

| fault                                               | found by                                  |
|-----------------------------------------------------|-------------------------------------------|
| slack noise at half scale                           | audit, claimed likelihood ratio; noise    |
| slack noise equal to the gradient's                 | audit, fitted attack; noise               |
| slack noise of the step before                      | audit of two steps; noise                 |
| one noise on all slots                              | audit, fitted attack; noise               |
| slack also above the threshold                      | sensitivity                               |
| slack at the threshold of the step before           | sensitivity                               |
| norm of one layer only                              | sensitivity                               |
| slots sqrt(2) too wide, as many of them filled      | audit, claimed likelihood ratio; noise    |
| slots sqrt(2) too wide, fewer of them filled        | noise                                     |
| partly filled slots rounded up                      | sensitivity                               |
| a threshold that moves within a logical batch       | sensitivity                               |
| a denominator from the realized batch               | sensitivity                               |
| each rank's own noise on the reduced slack          | audit of all ranks' views, fitted attack  |
| a clipped sum in bfloat16                           | sensitivity                               |
| a threshold that moves by the slack without noise   | audit, fitted attack                      |

Why the others do not: the claimed likelihood ratio projects on one direction, in which noise that
is shared between coordinates averages out as if it were independent, and in which fewer but wider
slots look like the claimed ones (their sum is the same). The sensitivity check runs without noise,
so it is blind to whatever is wrong with the noise. The fitted attack would find the fewer, wider
slots, which leak 16 % too much, from ten times as many draws as a test can make.

Each fault is a context manager; while it is in force, every optimizer of the class has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist

from opacus_slaclip import SlaClipDPOptimizer
from opacus_slaclip.optimizers import SlaClipDistributedDPOptimizer, grad_sample, release
from opacus_slaclip.slack import slack_in_slots, slot_width, sum_slack

Fault = Callable[[], AbstractContextManager[Any]]

FAULTS: dict[str, Fault] = {}


def _fault(make: Callable[[], Any]) -> Fault:
    """Register a fault; ``make`` yields once, or returns a patch."""
    FAULTS[make.__name__] = make
    return make


_noised_slack = SlaClipDPOptimizer._noised_slack
_PUBLIC = ("clip_norm", "noise_std", "expected_batch_size")


def _noise(optimizer: Any, slot_sums: torch.Tensor) -> torch.Tensor:
    """Draw what the real optimizer would add, in slots."""
    return _noised_slack(optimizer, slot_sums) - slot_sums


def _noise_by(replace: Callable[[Any, torch.Tensor], torch.Tensor]) -> Any:
    def noised(self: Any, slot_sums: torch.Tensor) -> torch.Tensor:
        return slot_sums + replace(self, slot_sums)

    return mock.patch.object(SlaClipDPOptimizer, "_noised_slack", noised)


# --- the noise ---


@_fault
def slack_noise_at_half_scale():
    return _noise_by(lambda self, sums: _noise(self, sums) / 2)


@_fault
def slack_noise_equal_to_the_gradients():
    def gradients(self: Any, sums: torch.Tensor) -> torch.Tensor:
        noise = torch.cat([(p.grad - p.summed_grad).flatten() for p in self.params])
        return noise[: len(sums)] / slot_width(self.max_grad_norm, self.num_slots)

    return _noise_by(gradients)


@_fault
def slack_noise_of_the_step_before():
    drawn: list[torch.Tensor] = []

    def old(self: Any, sums: torch.Tensor) -> torch.Tensor:
        if self.num_releases % 2 == 0:
            drawn[:] = [_noise(self, sums)]
        return drawn[0]

    return _noise_by(old)


@_fault
def one_noise_on_all_slots():
    return _noise_by(lambda self, sums: _noise(self, sums)[:1].expand_as(sums))


@_fault
@contextmanager
def each_ranks_own_noise_on_the_reduced_slack():
    def reduced(self: Any, sums: torch.Tensor) -> torch.Tensor:
        total = sums.clone()
        dist.all_reduce(total)
        return total + _noise(self, total)

    with ExitStack() as stack:
        own = SlaClipDistributedDPOptimizer
        stack.enter_context(mock.patch.object(own, "_noised_slack", lambda _self, sums: sums))
        stack.enter_context(mock.patch.object(own, "_reduced", reduced))
        yield


# --- the slack ---


def _encoded_by(norms_to_slack: Callable[..., torch.Tensor]) -> Any:
    def summed(norms: torch.Tensor, *, clip_norm: float, num_slots: int) -> torch.Tensor:
        slack = norms_to_slack(norms, clip_norm=clip_norm, num_slots=num_slots).unsqueeze(1)
        return (slack - torch.arange(num_slots)).clamp(0, 1).sum(0)

    return mock.patch.object(release, "sum_slack", summed)


@_fault
def slack_also_above_the_threshold():
    def distance(norms: torch.Tensor, *, clip_norm: float, num_slots: int) -> torch.Tensor:
        return num_slots * (1 - norms / clip_norm).abs()

    return _encoded_by(distance)


@_fault
def partly_filled_slots_rounded_up():
    return _encoded_by(lambda norms, **kwargs: slack_in_slots(norms, **kwargs).ceil())


def _width(factor: float) -> Any:
    return mock.patch.object(release, "slot_width", lambda *args: factor * slot_width(*args))


@_fault
def slots_too_wide_as_many_filled():
    return _width(math.sqrt(2))


@_fault
@contextmanager
def slots_too_wide_fewer_filled():
    def fewer(norms: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return slack_in_slots(norms, **kwargs) / math.sqrt(2)

    with _width(math.sqrt(2)), _encoded_by(fewer):
        yield


@_fault
def slack_at_the_threshold_of_the_step_before():
    def accumulate(self: Any, norms: torch.Tensor) -> None:
        release_before = self.slack_indicator
        before = release_before.clip_norm if release_before else self.max_grad_norm
        self._state.slot_sums = sum_slack(norms, clip_norm=before, num_slots=self.num_slots)

    return mock.patch.object(SlaClipDPOptimizer, "_accumulate_slack", accumulate)


# --- the gradient and the threshold ---


@_fault
def norm_of_one_layer_only():
    norms = grad_sample.per_sample_norms
    return mock.patch.object(grad_sample, "per_sample_norms", lambda grads: norms(grads[:1]))


@_fault
def a_clipped_sum_in_bfloat16():
    clip = SlaClipDPOptimizer.clip_and_accumulate

    def rounded(self: Any) -> None:
        clip(self)
        for p in self.params:
            p.summed_grad = p.summed_grad.bfloat16().float()

    return mock.patch.object(SlaClipDPOptimizer, "clip_and_accumulate", rounded)


@_fault
def a_denominator_from_the_realized_batch():
    accumulate = SlaClipDPOptimizer._accumulate_slack

    def counting(self: Any, norms: torch.Tensor) -> None:
        accumulate(self, norms)
        self.expected_batch_size = len(norms)

    return mock.patch.object(SlaClipDPOptimizer, "_accumulate_slack", counting)


@_fault
def a_threshold_that_moves_within_a_logical_batch():
    accumulate = SlaClipDPOptimizer._accumulate_slack

    def moving(self: Any, norms: torch.Tensor) -> None:
        accumulate(self, norms)
        unclipped = float(self._state.slot_sums[0]) / self.expected_batch_size
        self._set_clip_norm(self.max_grad_norm * math.exp(0.5 - unclipped))  # a rate of 1

    return mock.patch.object(SlaClipDPOptimizer, "_accumulate_slack", moving)


@_fault
@contextmanager
def a_threshold_that_moves_by_the_slack_without_noise():
    quiet: list[torch.Tensor] = []

    def remembering(self: Any, sums: torch.Tensor) -> torch.Tensor:
        quiet[:] = [sums / self.expected_batch_size]
        return _noised_slack(self, sums)

    next_clip_norm = release.next_clip_norm

    def peeking(controller: Any, clip_norm: float, indicator: Any, **bounds: float) -> float:
        private = release.SlackIndicator(
            values=quiet[0].double(), **{n: getattr(indicator, n) for n in _PUBLIC}
        )
        return next_clip_norm(controller, clip_norm, private, **bounds)

    with (
        mock.patch.object(SlaClipDPOptimizer, "_noised_slack", remembering),
        mock.patch.object(release, "next_clip_norm", peeking),
    ):
        yield
