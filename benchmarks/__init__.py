"""Measurements behind this project's claims; see README.md beside this file."""
