"""Forward hooks that notice what neither gradients nor norms show afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from opacus.layers.dp_rnn import DPRNNBase
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from opacus_slaclip._precision import is_low


class PrecisionWatch:
    """Reports, in the backward pass, a gradient that passes an output in low precision.

    Args:
        report: A bound method, called with no arguments and held weakly.
    """

    def __init__(self, report: Callable[[], None]) -> None:
        self._report: weakref.WeakMethod[Callable[[], None]] | None = weakref.WeakMethod(report)

    def __call__(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        """Wait for a gradient at the output, or its parts, where they are of low precision."""
        report = None if self._report is None else self._report()
        if report is None:
            return
        for part in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(part, torch.Tensor) and part.requires_grad and is_low(part):
                part.register_hook(lambda _gradient: report())  # type: ignore[no-untyped-call]

    def __reduce__(self) -> Any:
        """Copy and pickle as a watch that reports to nobody, as the copy of a module needs it."""
        return _nobodys_watch, ()


def _nobodys_watch() -> PrecisionWatch:
    watch = PrecisionWatch.__new__(PrecisionWatch)
    watch._report = None
    return watch


def refuse_reordered_rows(layer: nn.Module, inputs: Any, output: Any) -> None:
    """Raise where a recurrent layer computes its rows in another order than that of the samples.

    Norms and factors would then belong to different samples.
    """
    packed = inputs[0] if inputs else None
    if not isinstance(layer, DPRNNBase) or not isinstance(packed, PackedSequence):
        return
    order = packed.sorted_indices
    if order is not None and not torch.equal(order, torch.arange(len(order), device=order.device)):
        raise ValueError(
            "A packed sequence must hold its samples in the order of the batch: the rows inside "
            f"{type(layer).__name__} would be other samples than those of the loss, and be clipped "
            "by their norms. Sort the batch by length first and use enforce_sorted=True, or pass "
            "padded sequences."
        )
