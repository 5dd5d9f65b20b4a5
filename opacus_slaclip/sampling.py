"""Poisson sampling over several processes, with the empty batches and independent streams.

Opacus's distributed sampler drops empty local batches, so that ranks take different numbers of
steps, and draws the same selection pattern on ranks that were seeded alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from opacus.utils.uniform_sampler import DistributedUniformWithReplacementSampler
from torch.utils.data import DataLoader


class DistributedPoissonSampler(DistributedUniformWithReplacementSampler):
    """Each rank draws each sample of its share of the data with the same probability.

    Every rank yields the same number of local batches, empty ones included, and draws from a
    stream of its own even after ``torch.manual_seed(0)`` everywhere.

    Args:
        total_size: Samples in the data set.
        sample_rate: Probability of each sample in each batch.
        generator: Source of randomness; None for torch's global one.
        secure: Draw from ``generator`` itself, which differs between ranks by its nature.
        **kwargs: As for the parent.
    """

    def __init__(
        self,
        *,
        total_size: int,
        sample_rate: float,
        generator: Any = None,
        secure: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            total_size=total_size, sample_rate=sample_rate, generator=generator, **kwargs
        )
        self._secure = secure

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of one local batch after the other."""
        share = self._share()
        generator = self.generator if self._secure else self._own_stream()
        for _ in range(self.num_batches):
            is_drawn = torch.rand(len(share), generator=generator) < self.sample_rate
            yield share[is_drawn].tolist()

    def _share(self) -> torch.Tensor:
        # Equal on all ranks, so that the shares are disjoint.
        if self.shuffle:
            common = torch.Generator().manual_seed(self.shuffle_seed + self.epoch)
            indices = torch.randperm(self.total_size, generator=common)
        else:
            indices = torch.arange(self.total_size)
        return indices[self.rank :: self.num_replicas]

    def _own_stream(self) -> torch.Generator:
        drawn = int(torch.empty((), dtype=torch.int64).random_(generator=self.generator))
        seed = np.random.SeedSequence([drawn, self.rank]).generate_state(1, np.uint64)[0]
        return torch.Generator().manual_seed(int(seed) >> 1)  # torch takes 63 bits


def replace_batch_sampler(data_loader: DataLoader[Any], batch_sampler: Any) -> None:
    """Give ``data_loader`` another batch sampler, which torch allows only at construction."""
    object.__setattr__(data_loader, "batch_sampler", batch_sampler)


def is_distributed_sampler(data_loader: DataLoader[Any]) -> bool:
    """Whether the loader gives each rank a share of its own."""
    samplers = (
        data_loader.sampler,
        data_loader.batch_sampler,
        getattr(data_loader.batch_sampler, "sampler", None),
    )
    return any(hasattr(sampler, "num_replicas") for sampler in samplers)
