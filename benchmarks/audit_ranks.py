"""Draws of the joint release where several processes train together."""

from __future__ import annotations

import multiprocessing
import tempfile
import warnings
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from benchmarks.audit_releases import Family, draw_sides


def all_views(views: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Join the views of the ranks: rank 0's, and how the others differ from it.

    Args:
        views: By rank, draws without and with the canary.

    Returns:
        Draws without and with the canary. Coordinates that are one and the same number in all of
        them, as a difference between ranks should be, are left out.
    """
    joined = [
        torch.cat([sides[0], *(other - sides[0] for other in sides[1:])], dim=1)
        for sides in zip(*views, strict=True)
    ]
    everything = torch.cat(joined)
    varies = (everything != everything[0]).any(dim=0)
    return [side[:, varies] for side in joined]


def releases(family: Family, canary: float, **arguments: Any) -> list[torch.Tensor]:
    """Return draws without and with the canary, as everyone who takes part sees them."""
    if family.num_ranks == 1:
        return draw_sides(family, canary, **arguments)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, folder, family, canary, arguments))
            for rank in range(family.num_ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise RuntimeError("A process of the audit failed; its traceback is above.")
        return all_views([torch.load(f"{folder}/{rank}") for rank in range(family.num_ranks)])


def _rank(rank: int, folder: str, family: Family, canary: float, arguments: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", family.num_ranks),
        rank=rank,
        world_size=family.num_ranks,
        timeout=timedelta(seconds=300),
    )
    torch.save(draw_sides(family, canary, **arguments), f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()
