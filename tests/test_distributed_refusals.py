"""What the engine refuses on several processes, because the guarantee would not hold there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed_helpers import (
    FAMILIES,
    WORLD_SIZE,
    Family,
    assert_identical,
    loader_of,
    on_ranks,
    outcome,
    private_on_rank,
    shard,
    share,
)
from helpers import TASKS, samples
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def refusal(family: Family, *, with_step: bool = True, **options: Any) -> str:
    """What make_private says, or what a first step does if it accepts."""
    try:
        run = private_on_rank(family, **options)
        if with_step:
            run.step(share(samples(options.get("task", "mlp"), 8, dtype=options["dtype"])))
    except ValueError as error:
        return str(error)
    return "accepted"


def refuse_loaders(family: Family) -> dict[str, str]:
    dataset = TensorDataset(*samples("mlp", 16))
    one_share = {
        "ours": {},
        "all of it": {"num_replicas": 1, "rank": 0},
        "that of rank 0": {"num_replicas": 2, "rank": 0},
    }
    loaders = {
        name: DataLoader(dataset, 8, sampler=DistributedSampler(dataset, **which))
        for name, which in one_share.items()
    }
    loaders["no sampler"] = loader_of(dataset, 8, is_global=True)
    options: dict[str, Any] = {"dataset": dataset, "dtype": torch.float32, "with_step": False}
    return {
        name: refusal(family, data_loader=loader, poisson_sampling=False, **options)
        for name, loader in loaders.items()
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_a_loader_that_gives_two_ranks_the_same_samples_is_refused(name):
    ranks = on_ranks(refuse_loaders, FAMILIES[name])

    for rank in ranks:
        assert rank["ours"] == "accepted"
        for same in ("no sampler", "all of it"):
            assert "data_loader must have a distributed sampler" in rank[same], same
    # Rank 0 cannot see that rank 1 was given its share.
    assert "data_loader must have a distributed sampler" in ranks[1]["that of rank 0"]


def refuse_combinations() -> dict[str, str]:
    options: dict[str, Any] = {"dtype": torch.float32}
    pairs = {
        "fsdp, hooks": ("fsdp", "hooks"),
        "fsdp, functorch": ("fsdp", "functorch"),
        "fsdp, ghost": ("fsdp", "ghost"),
        "ddp, ghost_fsdp": ("ddp", "ghost_fsdp"),
        "dpddp, ghost_fsdp": ("dpddp", "ghost_fsdp"),
    }
    said = {name: refusal(Family(*pair), **options) for name, pair in pairs.items()}
    said["plain"] = refusal(Family("as it is", "ghost_fsdp"), **options)
    said["sum"] = refusal(FAMILIES["fsdp-ghost"], loss_reduction="sum", **options)
    return said


def test_modes_that_do_not_go_with_the_wrapper_are_refused():
    for said in on_ranks(refuse_combinations):
        for name, message in said.items():
            if name == "sum":
                assert "loss_reduction='sum' does not go with" in message
            elif name == "plain":
                assert "'ghost_fsdp' in one process is not supported" in message
            else:
                assert "does not go with" in message, name
                assert "Use 'ghost_fsdp' with FSDP2 modules" in message


def refuse_sharding() -> dict[str, str]:
    def build(policy: dict[str, torch.dtype]) -> nn.Module:
        return shard(TASKS["mlp"].model(), **policy)

    low, full = torch.bfloat16, torch.float32
    policies = {
        "param_dtype": {"param_dtype": low},
        "reduce_dtype": {"reduce_dtype": low},
        "float32 outputs": {"param_dtype": low, "reduce_dtype": full, "output_dtype": full},
    }
    family = Family("as it is", "ghost_fsdp")
    said = {
        name: refusal(family, module=build(policy), dtype=full) for name, policy in policies.items()
    }
    tied = fully_shard(TASKS["tied"].model(), mesh=init_device_mesh("cpu", (WORLD_SIZE,)))
    said["tied"] = refusal(family, module=tied, task="tied", dtype=full)
    replicated = init_device_mesh("cpu", (WORLD_SIZE, 1), mesh_dim_names=("replicate", "shard"))
    hybrid = fully_shard(TASKS["mlp"].model(), mesh=replicated)
    said["replicated"] = refusal(family, module=hybrid, dtype=full)
    return said


def test_sharding_that_would_break_the_guarantee_is_refused():
    for said in on_ranks(refuse_sharding):
        assert "must not share parameters between layers" in said["tied"]
        # Low precision would round a rank's share, or the sum over ranks, to 8 bits before noise.
        for name in ("param_dtype", "reduce_dtype", "float32 outputs"):
            assert "8 bits" in said[name], f"{name}: {said[name]}"
        # Every replica would draw noise of its own for one sum, and go its own way.
        assert said["replicated"] != "accepted"


def make_private_twice(family: Family) -> dict[str, Any]:
    batch, options = share(samples("mlp", 16, dtype=torch.float64)), {"noise_multiplier": 0.3}
    run, twin = (private_on_rank(family, **options) for _ in range(2))
    for each in (run, twin):
        each.step(batch)
    arguments: dict[str, Any] = {
        "optimizer": run.optimizer,
        "data_loader": run.loader,
        "criterion": nn.CrossEntropyLoss(),
        "noise_multiplier": 0.3,
        "max_grad_norm": TASKS["mlp"].clip_norm,
        "clipping": "slaclip",
        "grad_sample_mode": family.mode,
        "noise_generator": run.noise_generator,
    }
    with pytest.raises(ValueError, match="must be the distributed module itself"):
        run.engine.make_private(module=run.model, **arguments)
    for each in (run, twin):
        each.step(batch)
    results: dict[str, Any] = {"run": outcome(run), "twin": outcome(twin)}

    # What the message advises: the bare module, at the adapted threshold.
    module = run.model.to_standard_module()
    run.model, run.optimizer, *rest = run.engine.make_private(module=module, **arguments)
    run.criterion, run.loader = (rest[0] if family.is_ghost else run.criterion), rest[-1]
    for each in (run, twin):
        each.step(batch)
    return results | {"again": outcome(run), "on": outcome(twin)}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_wrapped_module_is_refused_and_a_bare_one_goes_on(name):
    for rank in on_ranks(make_private_twice, FAMILIES[name]):
        assert_identical(rank["run"], rank["twin"])
        assert_identical(rank["again"], rank["on"])
        assert rank["again"].history == [(0.3, 1 / 3, 3)]
