"""SlaClip on several processes: one noise draw, one sum, one threshold."""

from __future__ import annotations

import math
from typing import Any

import torch
from opacus.optimizers import (
    DistributedDPOptimizer,
    FSDPOptimizerFastGradientClipping,
)
from opacus.optimizers.ddpoptimizer_fast_gradient_clipping import (
    DistributedDPOptimizerFastGradientClipping,
)
from torch import distributed as dist

from opacus_slaclip import _opacus
from opacus_slaclip._validate import check_expected_batch_size, check_real
from opacus_slaclip.indicator import SlackIndicator
from opacus_slaclip.optimizers.ghost import GhostReleaseMixin
from opacus_slaclip.optimizers.grad_sample import SlaClipDPOptimizer
from opacus_slaclip.optimizers.release import SlackReleaseMixin


class DistributedReleaseMixin(SlackReleaseMixin):
    """The slack noise is drawn once, K numbers are reduced, every rank goes on at rank 0's C."""

    # Whether collectives run inside backward (torch's DDP, FSDP2): ranks then need the same number
    # of physical batches, and a difference would hang them. The check costs one all-reduce of two
    # numbers a physical batch.
    backward_synchronizes = False
    _every_rank_draws = False

    def _global_batch_size(self) -> float:
        per_worker = check_real(
            "expected_batch_size",
            self.expected_batch_size,
            "Pass a worker's share of the expected logical batch size.",
        )
        return check_expected_batch_size(per_worker * dist.get_world_size())

    def _noised_slack(self, slot_sums: torch.Tensor) -> torch.Tensor:
        is_first = dist.get_rank() == 0
        is_drawn = is_first or self._every_rank_draws
        noised = super()._noised_slack(slot_sums) if is_drawn else slot_sums
        return noised if is_first else slot_sums

    def _reduced(self, noisy_sums: torch.Tensor) -> torch.Tensor:
        total = noisy_sums.clone()
        dist.all_reduce(total)
        return total

    def _next_clip_norm(self, indicator: SlackIndicator) -> float:
        # A user's controller may be random or depend on the machine, so rank 0's result counts; and
        # it may fail on one rank, which must then not leave the others waiting.
        own, error = math.inf, None
        try:
            own = super()._next_clip_norm(indicator)
        except Exception as raised:  # noqa: BLE001 # raised again below, on every rank
            error = raised
        counted = own if error is not None or dist.get_rank() == 0 else -math.inf
        agreed = torch.tensor(counted, dtype=torch.float64, device=self.params[0].device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        if error is not None:
            raise error
        low, high = self._clip_bounds
        if not low <= float(agreed) <= high:
            raise RuntimeError(
                "The controller failed on another rank; its error is there. The step was released "
                "and charged; the threshold stays where it is."
            )
        return float(agreed)

    def _any_worker(self, flag: torch.Tensor) -> torch.Tensor:
        worst = flag.to(torch.int32)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return worst

    def _check_in_step(self) -> None:
        if not self.backward_synchronizes:
            return
        ends = not _opacus.next_step_is_skipped(self)
        counts = torch.tensor([int(ends), int(not ends)], device=self.params[0].device)
        dist.all_reduce(counts, op=dist.ReduceOp.MAX)
        if int(counts.sum()) > 1:
            raise RuntimeError(
                "The ranks have different numbers of physical batches in this logical batch, which "
                "would hang collectives inside backward; nothing was released. Use Opacus's "
                "DPDDP, or a max_physical_batch_size that no local batch exceeds."
            )


class SlaClipDistributedDPOptimizer(  # type: ignore[misc] # step is overloaded by torch
    DistributedReleaseMixin, SlaClipDPOptimizer, DistributedDPOptimizer
):
    """:class:`opacus.optimizers.DistributedDPOptimizer` with the slack release."""

    def _low_precision_gradient(self, summed_grad: torch.Tensor) -> torch.Tensor:
        # The parent would round each rank's un-noised share to the parameters' precision.
        is_first = dist.get_rank() == 0
        total = super()._low_precision_gradient(summed_grad) if is_first else summed_grad.clone()
        dist.all_reduce(total)
        return total

    def reduce_gradients(self) -> None:
        """Sum over the ranks what was not summed before it was cast; average for "mean"."""
        if not self._is_low_precision():
            super().reduce_gradients()  # type: ignore[no-untyped-call]
        elif self.loss_reduction == "mean":
            params: list[Any] = self.params
            for p in params:
                p.grad /= dist.get_world_size()


class SlaClipDistributedDPOptimizerFastGradientClipping(  # type: ignore[misc] # as above
    DistributedReleaseMixin, GhostReleaseMixin, DistributedDPOptimizerFastGradientClipping
):
    """Opacus's ``DistributedDPOptimizerFastGradientClipping`` with the slack release."""


class SlaClipFSDPOptimizerFastGradientClipping(
    DistributedReleaseMixin, GhostReleaseMixin, FSDPOptimizerFastGradientClipping
):
    """:class:`opacus.optimizers.FSDPOptimizerFastGradientClipping` with the slack release."""

    backward_synchronizes = True
    # Every rank noises its shard of the gradient, so every rank draws for the slack too, to keep
    # equal random streams aligned.
    _every_rank_draws = True

    def _drop_logical_batch(self) -> None:
        super()._drop_logical_batch()
        for state in self.grad_state.values():
            state["summed_grad"] = None
