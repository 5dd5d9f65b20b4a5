"""SlaClip where per-sample gradients are at hand: modes "hooks", "functorch", "ew" and "no_op"."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from opacus.optimizers import DPOptimizer

from opacus_slaclip import _opacus
from opacus_slaclip._precision import accumulation_dtype, is_low
from opacus_slaclip.optimizers.release import SlackReleaseMixin
from opacus_slaclip.slack import clip_factors

LOW_PRECISION_MEAN = (
    "loss_reduction must be 'sum' for gradients in bfloat16 or float16, got 'mean': it divides "
    "every loss by the size of the batch before its gradient is rounded, so one sample more rounds "
    "all others anew, which the noise does not cover. Use reduction='sum' in the criterion and in "
    "make_private (a step is then on the sum: divide the learning rate by the expected batch "
    "size)."
)


def per_sample_norms(grad_samples: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm of each sample's whole gradient, in float32 or better.

    Args:
        grad_samples: One tensor a parameter, shape (B, *parameter).

    Returns:
        Norms, shape (B,), on the device of the first tensor: Opacus's, bit for bit, where the
        gradients are float32 or float64.
    """
    device = grad_samples[0].device
    if len(grad_samples[0]) == 0:
        # As for other batches: ranks reduce what follows from it together.
        dtypes = (accumulation_dtype(g.dtype) for g in grad_samples)
        return torch.zeros(0, device=device, dtype=reduce(torch.promote_types, dtypes))
    norms = [
        g.reshape(len(g), -1).norm(2, dim=-1, dtype=accumulation_dtype(g.dtype)).to(device)
        for g in grad_samples
    ]
    total: torch.Tensor = torch.stack(norms, dim=1).norm(2, dim=1)
    return total


class SlaClipDPOptimizer(SlackReleaseMixin, DPOptimizer):
    """:class:`opacus.optimizers.DPOptimizer` with the slack release and an adaptive threshold.

    With :class:`opacus_slaclip.FixedController` it takes the very steps of its parent, given the
    same generator state before each step's noise, where gradients and parameters are float32 or
    float64. In lower precision the parent sums clipped gradients in 8 bits; here norms, factors
    and sums are float32 and only the noised result is cast.
    """

    # Whether the backward pass divided every loss by the size of the batch before gradients were
    # rounded: the engine knows, who finds gradients on the parameters does not.
    divides_before_rounding = False

    def clip_and_accumulate(self) -> None:
        """Clip each sample to ``max_grad_norm``; add gradients and slack to the private sums."""
        params: list[Any] = self.params
        grad_samples = self.grad_samples
        norms = per_sample_norms(grad_samples)
        factors = clip_factors(norms, clip_norm=self.max_grad_norm)
        finite = norms.isfinite()
        is_finite = bool(finite.all())
        if not is_finite:
            self._warn_nonfinite_once()
            factors = torch.where(finite, factors, 0.0)
        for p, grad_sample in zip(params, grad_samples, strict=True):
            # 0 * NaN is NaN, so a bad sample has to be taken out, not scaled away.
            kept = grad_sample if is_finite else _zero_unless(finite, grad_sample)
            kept = kept.to(accumulation_dtype(p.dtype))
            clipped = torch.einsum("i,i...", factors.to(kept.device, kept.dtype), kept)
            if p.summed_grad is None:
                p.summed_grad = clipped
            else:
                p.summed_grad += clipped
            _opacus.mark_processed(p.grad_sample)
        self._accumulate_slack(norms)

    def _check_ready(self) -> None:
        params: list[Any] = self.params
        for p in params:
            if getattr(p, "grad_sample", None) is None:
                self._get_flat_grad_sample(p)  # says what is missing
            self._check_precision(p.grad_sample)
            _opacus.check_not_processed(p.grad_sample)
            _opacus.check_not_processed(p.summed_grad)

    def _check_precision(self, grad_sample: Any) -> None:
        if not self.divides_before_rounding:
            return
        parts = grad_sample if isinstance(grad_sample, list) else [grad_sample]
        if self._state.is_rounded or any(map(is_low, parts)):
            raise ValueError(LOW_PRECISION_MEAN)

    def _has_fresh_gradient(self) -> bool:
        params: list[Any] = self.params
        samples = ((p, getattr(p, "grad_sample", None)) for p in params)
        fresh = [(p.grad, s) for p, s in samples if s is not None and not _opacus.is_processed(s)]
        if self._state.num_releases > 0 or self.original_optimizer.state:
            return bool(fresh)
        # Modes "ew" and "no_op" leave p.grad None until the first step; torch's checkpoint then
        # fills in zeros beside a first fresh gradient, which autograd would not have.
        is_filled_in = any(
            grad is not None and not bool(grad.any()) and isinstance(s, torch.Tensor) and s.any()
            for grad, s in fresh
        )
        return bool(fresh) and not is_filled_in

    def _add_gradient_noise(self) -> None:
        if not self._is_low_precision():
            super()._add_gradient_noise()
            return
        # The parent would assign a float32 gradient to a low-precision parameter, which raises.
        params: list[Any] = self.params
        for p in params:
            _opacus.check_not_processed(p.summed_grad)
            noised = self._low_precision_gradient(p.summed_grad)
            if self._rescale_to_unit_norm:
                noised /= self.max_grad_norm  # before the cast, in which a large C would overflow
            p.grad = noised.to(p.dtype).view_as(p)
            _opacus.mark_processed(p.summed_grad)

    def _is_low_precision(self) -> bool:  # rescales before it casts, see above
        return any(accumulation_dtype(p.dtype) != p.dtype for p in self.params)

    def _low_precision_gradient(self, summed_grad: torch.Tensor) -> torch.Tensor:
        """Return the noised float32 sum that is then cast to the parameter's precision."""
        return summed_grad + self._noise_like(summed_grad)


def _zero_unless(keep: torch.Tensor, grad_sample: torch.Tensor) -> torch.Tensor:
    shape = (-1,) + (1,) * (grad_sample.dim() - 1)
    return torch.where(keep.to(grad_sample.device).view(shape), grad_sample, 0.0)
