"""Keep sums that a guarantee rests on in full float32, whatever the caller has switched on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type to hold norms and sums of ``dtype`` in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def is_low(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` holds numbers of less than float32's precision."""
    return tensor.is_floating_point() and accumulation_dtype(tensor.dtype) != tensor.dtype


@contextmanager
def full_precision(device_type: str) -> Iterator[None]:
    """Run a block without autocast and without TF32 or bfloat16 inside float32 kernels.

    Summing clipped gradients in 8 or 10 bits of mantissa is not a rounding detail: one sample can
    then move the sum by several times the threshold.
    """
    with ExitStack() as stack:
        if torch.is_autocast_enabled(device_type):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        stack.enter_context(_ieee_float32())
        yield


@contextmanager
def _ieee_float32() -> Iterator[None]:
    backends: Any = torch.backends
    if hasattr(backends.cuda.matmul, "fp32_precision"):
        # Parents first: a child that only inherits is then full already, and stays inherited.
        parents = (backends, backends.cudnn, backends.mkldnn)
        cuda = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
        cpu = (backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn)
        changed = []
        try:
            for switch in (*parents, *cuda, *cpu):
                before = switch.fp32_precision
                if before in ("tf32", "bf16"):
                    switch.fp32_precision = "ieee"
                    changed.append((switch, before))
            yield
        finally:
            for switch, before in changed:
                switch.fp32_precision = before
    else:  # torch < 2.9
        matmul, conv = torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32
        torch.set_float32_matmul_precision("highest")
        backends.cudnn.allow_tf32 = False
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(matmul)
            backends.cudnn.allow_tf32 = conv
