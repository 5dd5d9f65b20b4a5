"""AUTO-S: every per-sample gradient is scaled to nearly the same norm, so no threshold is tuned.

Reference: Bu, Wang, Zha and Karypis, "Automatic Clipping: Differentially Private Deep Learning
Made Easier and Stronger", NeurIPS 2023.
"""

from __future__ import annotations

from typing import Any

import torch
from opacus.optimizers import DPOptimizer

from opacus_slaclip import _opacus
from opacus_slaclip._validate import check_noise_multiplier, check_positive
from opacus_slaclip.optimizers.grad_sample import per_sample_norms


class AutoSOptimizer(DPOptimizer):
    """:class:`opacus.optimizers.DPOptimizer` with the clip factor ``R / (||g|| + gamma)``.

    Guarantee: a scaled gradient has norm ``R n / (n + gamma) < R`` (in floating point, at most
    ``R`` but for rounding), so the sum has L2 sensitivity ``R = max_grad_norm`` under add/remove
    adjacency. The noise is the parent's, ``noise_multiplier * R``, and a step costs what a step of
    plain DP-SGD costs.

    Edge cases: a gradient of norm 0 stays 0; a short one (``n`` far below ``gamma``) is scaled by
    ``R / gamma``, which may lengthen it; one that is not finite spoils the sum, as in the parent.

    Args:
        optimizer: The optimizer to wrap.
        noise_multiplier: ``sigma``, at least 0.
        max_grad_norm: ``R``, positive, in gradient-norm units.
        stability_constant: ``gamma``, positive, in gradient-norm units; the paper's 0.01.
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
        stability_constant: float = 0.01,
        **kwargs: Any,
    ) -> None:
        self.check(noise_multiplier=noise_multiplier, max_grad_norm=max_grad_norm)
        self.stability_constant = check_positive(
            "stability_constant", stability_constant, "Pass gamma, such as 0.01."
        )
        super().__init__(
            optimizer, noise_multiplier=noise_multiplier, max_grad_norm=max_grad_norm, **kwargs
        )

    @staticmethod
    def check(*, noise_multiplier: float, max_grad_norm: float) -> None:
        """Raise ``TypeError`` or ``ValueError`` if a step with these values is not possible."""
        check_noise_multiplier(noise_multiplier)
        check_positive("max_grad_norm", max_grad_norm, "Pass the norm R to scale gradients to.")

    def clip_and_accumulate(self) -> None:
        """Scale each sample by ``R / (||g|| + gamma)`` and add it to ``summed_grad``."""
        grad_samples = self.grad_samples
        for p in self.params:
            _opacus.check_not_processed(p.grad_sample)
        norms = per_sample_norms(grad_samples)
        factors = self.max_grad_norm / (norms + self.stability_constant)
        for p, grad_sample in zip(self.params, grad_samples, strict=True):
            scale = factors.to(grad_sample.device, p.dtype)
            summed = torch.einsum("i,i...", scale, grad_sample.to(p.dtype))
            if p.summed_grad is None:
                p.summed_grad = summed
            else:
                p.summed_grad += summed  # in place: it keeps the mark of a sum already used
            _opacus.mark_processed(p.grad_sample)
