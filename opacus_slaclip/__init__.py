"""SlaClip for Opacus: adaptive gradient clipping at the privacy cost of plain DP-SGD."""

from __future__ import annotations

from importlib.metadata import version

from opacus_slaclip.auto import AutoController
from opacus_slaclip.controllers import (
    Controller,
    FixedController,
    SlaClipController,
    SlaClipQController,
)
from opacus_slaclip.indicator import SlackIndicator
from opacus_slaclip.optimizers import SlaClipDPOptimizer
from opacus_slaclip.privacy_engine import PrivacyEngine
from opacus_slaclip.recorder import ThresholdRecorder
from opacus_slaclip.slack import recommended_num_slots

__version__ = version("opacus-slaclip")

__all__ = [
    "AutoController",
    "Controller",
    "FixedController",
    "PrivacyEngine",
    "SlaClipController",
    "SlaClipDPOptimizer",
    "SlaClipQController",
    "SlackIndicator",
    "ThresholdRecorder",
    "recommended_num_slots",
]
