"""Poisson sampling that tells the optimizer when a pass begins, in one process and in several.

Opacus's distributed sampler drops empty local batches, so that ranks take different numbers of
steps, and draws the same selection pattern on ranks that were seeded alike. And nothing in Opacus
notices a pass that was left inside a logical batch: its sums and announced physical batches then
leak into the next one.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)
from torch import distributed as dist
from torch.utils.data import DataLoader


class PassFollower(Protocol):
    """Who wants to know of passes through the data: the optimizer."""

    def begin_pass(self, look_ahead: int) -> int:
        """Be told of a new pass and how many batches workers fetch ahead; return its number."""
        ...

    def continue_pass(self, number: int) -> None:
        """Be told that a pass goes on, perhaps after another one has begun."""
        ...

    def end_pass(self, number: int, num_steps: int | None) -> None:
        """Be told that all batches of a pass are out, and how many steps they ask for."""
        ...


class _FollowedSampler:
    """Mixed into a batch sampler: reports the beginning and the end of each pass."""

    _follower: weakref.ref[PassFollower] | None = None
    _every_batch_is_a_step = True
    _look_ahead = 0

    def follow(self, follower: PassFollower, look_ahead: int) -> None:
        """Report to ``follower`` for as long as it lives."""
        self._follower, self._look_ahead = weakref.ref(follower), look_ahead

    def _followed(self, batches: Iterator[list[int]]) -> Iterator[list[int]]:
        follower = self._follower() if self._follower is not None else None
        if follower is None:
            yield from batches
            return
        number, num_batches = follower.begin_pass(self._look_ahead), 0
        for batch in batches:
            num_batches += 1
            yield batch
            follower.continue_pass(number)
        follower.end_pass(number, num_batches if self._every_batch_is_a_step else None)


class PoissonSampler(_FollowedSampler, UniformWithReplacementSampler):
    """Opacus's ``UniformWithReplacementSampler`` (Poisson sampling), reporting passes."""

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of one logical batch after the other."""
        batches: Iterator[list[int]] = super().__iter__()  # type: ignore[no-untyped-call]
        return self._followed(batches)


class DistributedPoissonSampler(_FollowedSampler, DistributedUniformWithReplacementSampler):
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
        return self._followed(self._local_batches())

    def _local_batches(self) -> Iterator[list[int]]:
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


def own_poisson_sampler(
    sampler: Any, *, secure: bool
) -> PoissonSampler | DistributedPoissonSampler:
    """Return our sampler in the place of Opacus's, with the same rate, steps and generator."""
    if isinstance(sampler, DistributedUniformWithReplacementSampler):
        return DistributedPoissonSampler(
            total_size=sampler.total_size,
            sample_rate=sampler.sample_rate,
            generator=sampler.generator,
            steps=sampler.num_batches,
            secure=secure,
        )
    return PoissonSampler(
        num_samples=sampler.num_samples,
        sample_rate=sampler.sample_rate,
        generator=sampler.generator,
        steps=sampler.steps,
    )


def followed(batch_sampler: Any) -> Any:
    """Return the same batch sampler, of whatever class, reporting passes.

    Gradients may be accumulated over several of its batches, so it does not ask for a step each.
    """
    if isinstance(batch_sampler, _FollowedSampler):  # by an earlier make_private
        return batch_sampler
    parent = type(batch_sampler)
    methods = {
        "__iter__": lambda self: self._followed(parent.__iter__(self)),
        "__module__": parent.__module__,
        "_every_batch_is_a_step": False,
    }
    kind: Any = type(parent.__name__, (_FollowedSampler, parent), methods)
    twin = kind.__new__(kind)
    vars(twin).update(vars(batch_sampler))
    return twin


def with_batch_sampler(data_loader: DataLoader[Any], batch_sampler: Any) -> DataLoader[Any]:
    """Return the same loader with another batch sampler."""
    twin = copy.copy(data_loader)
    twin._iterator = None  # persistent workers would go on with the old batches
    object.__setattr__(twin, "batch_sampler", batch_sampler)  # torch's own setter refuses
    return twin


def follow_passes(data_loader: DataLoader[Any], follower: PassFollower) -> None:
    """Report the passes through ``data_loader`` to ``follower``, if its sampler is ours."""
    if isinstance(data_loader.batch_sampler, _FollowedSampler):
        look_ahead = data_loader.num_workers * (data_loader.prefetch_factor or 0)
        data_loader.batch_sampler.follow(follower, look_ahead)


def is_distributed_sampler(data_loader: DataLoader[Any]) -> bool:
    """Whether the loader gives each rank a share of its own."""
    samplers = (
        data_loader.sampler,
        data_loader.batch_sampler,
        getattr(data_loader.batch_sampler, "sampler", None),
    )
    own = (dist.get_world_size(), dist.get_rank())
    return any(
        (getattr(sampler, "num_replicas", None), getattr(sampler, "rank", None)) == own
        for sampler in samplers
    )
