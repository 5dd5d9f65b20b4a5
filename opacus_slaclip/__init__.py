"""SlaClip for Opacus: adaptive gradient clipping at the privacy cost of plain DP-SGD."""

from __future__ import annotations

from importlib.metadata import version

from opacus_slaclip.controllers import (
    Controller,
    FixedController,
    SlaClipController,
    SlaClipQController,
)
from opacus_slaclip.indicator import SlackIndicator
from opacus_slaclip.optimizers import SlaClipDPOptimizer
from opacus_slaclip.privacy_engine import PrivacyEngine
from opacus_slaclip.slack import recommended_num_slots

__version__ = version("opacus-slaclip")

__all__ = [
    "Controller",
    "FixedController",
    "PrivacyEngine",
    "SlaClipController",
    "SlaClipDPOptimizer",
    "SlaClipQController",
    "SlackIndicator",
    "recommended_num_slots",
]
