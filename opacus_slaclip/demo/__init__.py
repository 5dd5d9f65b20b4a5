"""The command-line demo: digits or MNIST, trained with a fixed and with an adaptive threshold."""

from __future__ import annotations


class DemoError(Exception):
    """A failure that the person at the command line can repair; its text says how."""
