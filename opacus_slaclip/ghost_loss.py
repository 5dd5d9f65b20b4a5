"""The loss of ghost clipping: a backward pass that clips each sample, and nothing else."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch
from opacus.utils.fast_gradient_clipping_utils import (
    DPLossFastGradientClipping,
    DPTensorFastGradientClipping,
)
from torch.utils._pytree import tree_leaves

from opacus_slaclip._precision import full_precision


class GhostLossTensor(DPTensorFastGradientClipping):
    """Per-sample losses with a ``backward()`` that clips.

    Differs from Opacus's parent: the passes run in full float32; after an error in them the next
    forward pass starts afresh; losses of shape (B, ...) are reduced to (B,), where the parent would
    multiply every loss by every clip factor; a penalty that needs a gradient is refused, since no
    norm covers it.
    """

    def backward(self) -> None:
        """Run the two backward passes of ghost clipping.

        Raises:
            ValueError: If the losses are not per sample, or a parameter is used outside its layer.
        """
        module: Any = self.module
        optimizer: Any = self.optimizer
        try:
            module.losses = self.loss_per_sample
            module.check_uses(self.loss_per_sample)
            with full_precision(self.loss_per_sample.device.type):
                super().backward()  # type: ignore[no-untyped-call]
        except BaseException:
            optimizer.abandon_backward()
            module.forget_pass()
            raise
        finally:
            module.losses = None
        optimizer.note_gradients()


def _one_a_sample(losses: torch.Tensor, loss_reduction: str) -> torch.Tensor:
    """Reduce all dimensions but the first as the criterion would have, shape (B,)."""
    if losses.dim() == 0:
        raise ValueError(
            "The loss must have one entry a sample in ghost mode, got a single number. Use a "
            "criterion that honours reduction='none'."
        )
    if losses.dim() == 1:
        return losses
    each = losses.flatten(1)
    return each.mean(dim=1) if loss_reduction == "mean" else each.sum(dim=1)


def _check_shapes(inputs: Any) -> None:
    tensors = [t for t in tree_leaves(inputs) if isinstance(t, torch.Tensor)]
    for a, b in combinations(tensors, 2):
        if not (a.is_floating_point() or b.is_floating_point()):
            continue  # two kinds of labels
        one, other = a.shape, b.shape
        try:
            together: Any = torch.broadcast_shapes(one, other)  # type: ignore[no-untyped-call]
        except RuntimeError:
            continue  # not compared entry by entry
        if together not in (one, other):
            raise ValueError(
                "The criterion's inputs must have one shape in ghost mode: "
                "broadcasting would compare every sample with every other. Reshape the targets."
            )


def _keeping_class(name: str) -> Any:
    operation = getattr(DPTensorFastGradientClipping, name)

    def method(self: GhostLossTensor, *args: Any) -> GhostLossTensor:
        for other in args:
            if isinstance(other, torch.Tensor) and other.requires_grad:
                raise ValueError(
                    "Only losses of the criterion and constants may be combined in ghost mode: a "
                    "penalty that needs a gradient adds to every sample what no norm covers. Use "
                    "the optimizer's weight decay, or grad_sample_mode='hooks'."
                )
        result: Any = operation(self, *args)
        if result.loss_per_sample.shape != self.loss_per_sample.shape:
            raise ValueError(
                "What a loss is combined with in ghost mode must be a number, or have one entry a "
                "sample, shape (B,): broadcasting would give every sample the loss of the others. "
                "Flatten it first."
            )
        result.__class__ = GhostLossTensor
        return result  # type: ignore[no-any-return]

    method.__doc__ = operation.__doc__
    return method


# Opacus's arithmetic names its own class.
for _name in (
    "__add__",
    "__radd__",
    "__sub__",
    "__rsub__",
    "__mul__",
    "__rmul__",
    "__truediv__",
    "__neg__",
):
    setattr(GhostLossTensor, _name, _keeping_class(_name))


class GhostLoss(DPLossFastGradientClipping):
    """Wraps a criterion so that its loss clips when it is backpropagated."""

    def __call__(self, *args: Any, **kwargs: Any) -> GhostLossTensor:
        """Return the per-sample losses as one object with a ``backward()``."""
        module: Any = self.module
        reduction = self.criterion.reduction
        try:
            _check_shapes((args, kwargs))
            loss: Any = super().__call__(*args, **kwargs)
            loss.loss_per_sample = _one_a_sample(loss.loss_per_sample, self.loss_reduction)
        except BaseException:
            self.criterion.reduction = reduction  # which the parent does not put back then
            module.forget_pass()
            raise
        loss.__class__ = GhostLossTensor
        return loss  # type: ignore[no-any-return]
