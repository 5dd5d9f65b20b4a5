"""Random images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset


class FakeData(Dataset[tuple[Any, int]]):
    """Images of random bytes, each made from its index alone, so that every epoch sees the same."""

    def __init__(
        self,
        size: int = 1000,
        image_size: tuple[int, int, int] = (3, 224, 224),
        num_classes: int = 10,
        transform: Callable[[torch.Tensor], Any] | None = None,
    ) -> None:
        self.size = size
        self.image_size = image_size
        self.num_classes = num_classes
        self.transform = transform

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if not 0 <= index < self.size:
            raise IndexError(f"{index} is not in a dataset of {self.size} images")
        generator = torch.Generator().manual_seed(index)
        image = torch.randint(256, self.image_size, generator=generator, dtype=torch.uint8)
        target = int(torch.randint(self.num_classes, (), generator=generator))
        return (image if self.transform is None else self.transform(image)), target
