"""Settings shared by all tests."""

from __future__ import annotations

from hypothesis import settings

# Derandomized: a red run is reproducible, and a green one is not luck.
settings.register_profile("deterministic", derandomize=True, deadline=None, max_examples=200)
settings.load_profile("deterministic")
