"""Warnings that name the user's own line."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_NOT_THE_USER = ("opacus_slaclip", "opacus", "torch")


def warn(message: str) -> None:
    """Warn at the innermost line that is not torch's, Opacus's or ours."""
    frame: FrameType | None = sys._getframe()
    level = 1
    while frame is not None and _package(frame) in _NOT_THE_USER:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
