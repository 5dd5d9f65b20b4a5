"""From bytes to normalized floats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Compose:
    """Apply transforms one after the other."""

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        """Transform one image."""
        for transform in self.transforms:
            image = transform(image)
        return image


class ToTensor:
    """Scale bytes to floats between 0 and 1."""

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """Transform one image."""
        return image.float() / 255


class Normalize:
    """Subtract a mean and divide by a deviation, channel by channel."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean = torch.tensor(mean).view(-1, 1, 1)
        self.std = torch.tensor(std).view(-1, 1, 1)

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """Transform one image."""
        return (image - self.mean) / self.std
