"""Opacus's optimizers with the slack release mixed in, one class a family."""

from __future__ import annotations

import difflib

from opacus_slaclip.optimizers.distributed import (
    SlaClipDistributedDPOptimizer,
    SlaClipDistributedDPOptimizerFastGradientClipping,
    SlaClipFSDPOptimizerFastGradientClipping,
)
from opacus_slaclip.optimizers.ghost import SlaClipDPOptimizerFastGradientClipping
from opacus_slaclip.optimizers.grad_sample import SlaClipDPOptimizer
from opacus_slaclip.optimizers.release import SlackReleaseMixin

__all__ = [
    "SlaClipDPOptimizer",
    "SlaClipDPOptimizerFastGradientClipping",
    "SlaClipDistributedDPOptimizer",
    "SlaClipDistributedDPOptimizerFastGradientClipping",
    "SlaClipFSDPOptimizerFastGradientClipping",
    "SlackReleaseMixin",
    "get_optimizer_class",
]

_OPTIMIZERS: dict[tuple[str, bool], type[SlackReleaseMixin]] = {
    ("hooks", False): SlaClipDPOptimizer,
    ("functorch", False): SlaClipDPOptimizer,
    ("ew", False): SlaClipDPOptimizer,
    ("no_op", False): SlaClipDPOptimizer,
    ("ghost", False): SlaClipDPOptimizerFastGradientClipping,
    ("hooks", True): SlaClipDistributedDPOptimizer,
    ("functorch", True): SlaClipDistributedDPOptimizer,
    ("ew", True): SlaClipDistributedDPOptimizer,
    ("no_op", True): SlaClipDistributedDPOptimizer,
    ("ghost", True): SlaClipDistributedDPOptimizerFastGradientClipping,
    ("ghost_fsdp", True): SlaClipFSDPOptimizerFastGradientClipping,
}


def get_optimizer_class(*, grad_sample_mode: str, distributed: bool) -> type[SlackReleaseMixin]:
    """Return the optimizer of a mode.

    Raises:
        ValueError: If SlaClip does not support the mode.
    """
    try:
        return _OPTIMIZERS[grad_sample_mode, distributed]
    except KeyError:
        modes = sorted({mode for mode, many in _OPTIMIZERS if many == distributed})
        where = "distributed" if distributed else "in one process"
        nearest = difflib.get_close_matches(str(grad_sample_mode), modes, n=1)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(
            f"grad_sample_mode={grad_sample_mode!r} {where} is not supported with SlaClip. Use one "
            f"of {modes}.{hint}"
        ) from None
