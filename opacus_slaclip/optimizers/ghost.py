"""SlaClip where gradients are clipped without being built: modes "ghost" and "ghost_fsdp"."""

from __future__ import annotations

from typing import Any

import torch
from opacus.optimizers import DPOptimizerFastGradientClipping
from torch.distributed.tensor import DTensor

from opacus_slaclip import _opacus
from opacus_slaclip.optimizers.release import SlackReleaseMixin


def versions(params: list[Any]) -> list[tuple[int, int] | None]:
    """Return what changes when a gradient is replaced or written to in place."""
    return [None if p.grad is None else (id(p.grad), p.grad._version) for p in params]


def checksums(params: list[Any]) -> torch.Tensor:
    """Return the sum of each gradient's bits, which a write through ``.data`` changes too."""
    sums = []
    for p in params:
        if p.grad is not None:
            local = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            bits = local.view(_INTEGERS[local.dtype])
            sums.append(bits.sum(dtype=bits.dtype).long().to(params[0].device))
    return torch.stack(sums) if sums else torch.empty(0)


# Of the same width; sums wrap around, which is as good, and fast. (Lower precision is refused.)
_INTEGERS = {torch.float64: torch.int64, torch.float32: torch.int32}


class GhostReleaseMixin(SlackReleaseMixin):
    """Takes the norms that ``loss.backward()`` clipped by; refuses to step without them."""

    def _check_ready(self) -> None:
        state = self._state
        if state.fresh_norms is None:
            raise RuntimeError(
                "step() needs a fresh backward pass in ghost mode. Call backward() on what the "
                "criterion returned by make_private gives, then step()."
            )
        message = None
        if state.fresh_clip_norm != state.clip_norm:
            message = (
                f"The gradients were clipped at {state.fresh_clip_norm}, but the noise would be "
                f"scaled for {state.clip_norm:g}. The batch was not used; call zero_grad()."
            )
        elif self._gradients_changed():
            message = (
                "A gradient was changed between backward() and step(): clipped again by a trainer, "
                "cleared or replaced. The batch was not used. Leave p.grad alone; the threshold is "
                "the optimizer's to choose."
            )
        elif [id(p) for p in self.params] != state.bound_parameters:
            message = (
                "The optimizer's parameters are not those it was made with, which the norms cover. "
                "The batch was not used. Call make_private again for another set of parameters."
            )
        if message is not None:
            state.drop_backward()
            raise RuntimeError(message)

    def _gradients_changed(self) -> bool:
        state = self._state
        if versions(self.params) != state.grad_versions or state.grad_checksums is None:
            return True
        return not torch.equal(checksums(self.params), state.grad_checksums)

    def accumulate(self) -> None:
        """Add the clipped gradients and the slack of one physical batch to the private sums."""
        state = self._state
        norms = state.fresh_norms
        state.drop_backward()
        assert norms is not None
        super().accumulate()  # type: ignore[misc]
        self._accumulate_slack(norms)
        is_finite = norms.isfinite().all()
        state.is_finite = is_finite if state.is_finite is None else state.is_finite & is_finite

    def note_parameters(self) -> None:
        """Remember the parameters that the norms cover."""
        self._state.bound_parameters = [id(p) for p in self.params]

    def abandon_backward(self) -> None:
        """Forget the logical batch after an error inside ``backward()``."""
        self.original_optimizer.zero_grad()  # the first pass leaves gradients that are not clipped
        self._abandon(_opacus.num_announced(self) - 1)

    def note_gradients(self) -> None:
        """Remember the gradients that ``backward()`` left, to notice if they are touched."""
        self._state.grad_versions = versions(self.params)
        self._state.grad_checksums = checksums(self.params)

    def add_noise(self) -> None:
        """Release, unless a norm was not finite: the batch sum is then lost, for every sample.

        Raises:
            FloatingPointError: On all workers together; nothing has been released or charged.
        """
        if not self._all_finite():
            self.original_optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError(
                "A per-sample gradient norm was not finite, which spoils the whole sum in ghost "
                "mode. The batch was dropped: nothing was released, charged or updated. Lower the "
                "learning rate, clean the data, or use grad_sample_mode='hooks', which leaves such "
                "samples out. (A local diagnostic, not to be published.)"
            )
        super().add_noise()

    def _all_finite(self) -> bool:
        is_finite, self._state.is_finite = self._state.is_finite, None
        return is_finite is None or bool(self._any_worker(~is_finite) == 0)

    def _has_fresh_gradient(self) -> bool:
        return self._state.fresh_norms is not None


class SlaClipDPOptimizerFastGradientClipping(GhostReleaseMixin, DPOptimizerFastGradientClipping):
    """:class:`opacus.optimizers.DPOptimizerFastGradientClipping` with the slack release."""
