"""A stand-in for the few names of torchvision that Opacus's tests use, for those runs only.

The tests need images of the right shape and models of the right layers, never the real ones.
"""

from torchvision import datasets, models, transforms

__all__ = ["datasets", "models", "transforms"]
