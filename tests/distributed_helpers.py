"""Two processes that train together, and the private runs they train."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from helpers import TASKS, Batch, Run, samples, seeded
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.utils.fsdp_utils import has_params, iterate_submodules
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from opacus_slaclip import PrivacyEngine

WORLD_SIZE = 2
HANG = 60  # seconds without an answer from the other rank: it is not coming

# --- processes ---

# Forked from a server that has imported what is slow to import, a process starts in no time.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(
    [
        "opacus_slaclip",
        "pytest",
        "scipy.stats",
        "torch._dynamo",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
    ]
)


def on_ranks(function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``function(*args)`` on each rank of a process group; return what the ranks return.

    Fails with the traceback of a rank that raised, or if a rank does not come to an end.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            _PROCESSES.Process(target=_rank, args=(rank, folder, function, args), daemon=True)
            for rank in range(WORLD_SIZE)
        ]
        for process in ranks:
            process.start()
        _join(ranks)
        codes = [process.exitcode for process in ranks]
        said = [Path(folder, f"{rank}.stderr").read_text() for rank in range(WORLD_SIZE)]
        assert codes == [0] * WORLD_SIZE, f"the ranks ended with {codes}:\n" + "\n".join(said)
        return [
            torch.load(Path(folder, f"{rank}.result"), weights_only=False)
            for rank in range(WORLD_SIZE)
        ]


def _join(ranks: list[Any]) -> None:
    deadline = time.monotonic() + 2 * HANG
    while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
        if any(process.exitcode for process in ranks):
            # The other rank may be waiting for the one that failed, or be failing as well.
            deadline = min(deadline, time.monotonic() + 5)
        time.sleep(0.02)
    for process in ranks:
        if process.is_alive():
            process.kill()
        process.join()


# What pyproject.toml lets pass, and what torch says of any last layer under FSDP2.
_HARMLESS = [
    "Secure RNG turned off",
    "Full backward hook is firing when gradients are computed",
    "FSDP2-wrapped module .* returned a view tensor",
]


def _rank(rank: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.dup2(os.open(f"{folder}/{rank}.stderr", os.O_WRONLY | os.O_CREAT), 2)  # for a traceback
    warnings.simplefilter("error")
    for message in _HARMLESS:
        warnings.filterwarnings("ignore", message)
    torch.set_num_threads(1)
    torch.manual_seed(0)  # on every rank: the usual habit
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", WORLD_SIZE),
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=HANG),
    )
    torch.save(function(*args), f"{folder}/{rank}.result")
    dist.barrier()  # so that neither closes its connection while the other still needs it
    dist.destroy_process_group()


# --- ways to train on several processes ---


@dataclass(frozen=True)
class Family:
    """A distributed wrapper and a ``grad_sample_mode`` that go together."""

    wrapper: str
    mode: str

    @property
    def one_process_mode(self) -> str:
        return "ghost" if self.is_ghost else self.mode

    @property
    def is_ghost(self) -> bool:
        return self.mode in ("ghost", "ghost_fsdp")

    @property
    def reductions(self) -> list[str]:
        return ["mean"] if self.wrapper == "fsdp" else ["mean", "sum"]


FAMILIES = {
    "dpddp-hooks": Family("dpddp", "hooks"),
    "ddp-hooks": Family("ddp", "hooks"),
    "dpddp-ghost": Family("dpddp", "ghost"),
    "ddp-ghost": Family("ddp", "ghost"),
    "fsdp-ghost": Family("fsdp", "ghost_fsdp"),
}
OTHER_MODES = {
    "dpddp-functorch": Family("dpddp", "functorch"),
    "dpddp-ew": Family("dpddp", "ew"),
}


def shard(module: nn.Module, **policy: Any) -> nn.Module:
    """Shard layer by layer over the CPU, as ``FSDP2Wrapper`` does over torch's default device."""
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for layer in list(iterate_submodules(module)):
        if layer is not module and has_params(layer):
            fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))
    return fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "dpddp": DifferentiallyPrivateDistributedDataParallel,
    "ddp": DistributedDataParallel,
    "fsdp": shard,
    "as it is": lambda module: module,
}

TORCH_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.05),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.05, weight_decay=0.1),
}


@dataclass
class RankRun(Run):
    """A private run of this rank."""

    indicators: list[torch.Tensor] = field(default_factory=list)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The whole parameters, also where they are sharded: call it on every rank."""
        return [whole(p.detach()).clone() for p in self.model.parameters()]

    def step(self, batch: Batch) -> None:
        """Take one step; note threshold and indicator if it released something."""
        optimizer, clip_norm = self.optimizer, self.optimizer.max_grad_norm
        releases = optimizer.num_releases
        optimizer.zero_grad()
        self.backward(batch)
        optimizer.step()
        if optimizer.num_releases > releases:
            self.thresholds.append(clip_norm)
            self.indicators.append(optimizer.slack_indicator.values)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def private_on_rank(
    family: Family | None,
    *,
    task: str = "mlp",
    module: nn.Module | None = None,
    dataset: TensorDataset | None = None,
    data_loader: DataLoader[Any] | None = None,
    num_samples: int = 48,
    batch_size: int = 16,
    torch_optimizer: str | Callable[[Any], torch.optim.Optimizer] = "sgd",
    criterion: nn.Module | None = None,
    noise_multiplier: float = 0.0,
    max_grad_norm: float | None = None,
    loss_reduction: str = "mean",
    poisson_sampling: bool = True,
    dtype: torch.dtype = torch.float64,
    clipping: str = "slaclip",
    noise_seed: int | None = 3,
    engine: Any = None,
    **kwargs: Any,
) -> RankRun:
    """Build a seeded private run; ``batch_size`` is global, without a family it is one process."""
    engine = PrivacyEngine(accountant="rdp") if engine is None else engine
    if module is None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            module = TASKS[task].model().to(dtype)
    if family is not None:
        module = WRAPPERS[family.wrapper](module)
        kwargs.setdefault("grad_sample_mode", family.mode)
    if isinstance(torch_optimizer, str):
        torch_optimizer = TORCH_OPTIMIZERS[torch_optimizer]
    dataset = dataset or TensorDataset(*samples(task, num_samples, dtype=dtype))
    is_global = poisson_sampling or family is None
    with warnings.catch_warnings():
        # More slots than the noise allows test the arithmetic better than one or two would.
        warnings.filterwarnings("ignore", "num_slots=.* is above the recommended")
        warnings.filterwarnings("ignore", "grad_sample_mode='ew' raises on the empty batches")
        private, optimizer, *rest = engine.make_private(
            module=module,
            optimizer=torch_optimizer(module.parameters()),
            criterion=criterion or nn.CrossEntropyLoss(reduction=loss_reduction),
            data_loader=data_loader or loader_of(dataset, batch_size, is_global),
            noise_multiplier=noise_multiplier,
            max_grad_norm=TASKS[task].clip_norm if max_grad_norm is None else max_grad_norm,
            clipping=clipping,
            loss_reduction=loss_reduction,
            poisson_sampling=poisson_sampling,
            noise_generator=None if noise_seed is None else seeded(noise_seed),
            **kwargs,
        )
    private_criterion = criterion or nn.CrossEntropyLoss(reduction=loss_reduction)
    if len(rest) == 2:
        private_criterion = rest[0]
    return RankRun(
        engine=engine,
        model=private if kwargs.get("wrap_model", True) else module,
        optimizer=optimizer,
        loader=rest[-1],
        criterion=private_criterion,
        noise_generator=optimizer.generator,
    )


def loader_of(dataset: TensorDataset, batch_size: int, is_global: bool) -> DataLoader[Any]:
    if is_global:
        return DataLoader(dataset, batch_size=batch_size)
    sampler = DistributedSampler(dataset, shuffle=False)
    return DataLoader(dataset, batch_size=batch_size // WORLD_SIZE, sampler=sampler)


def share(batch: Batch) -> Batch:
    """This rank's share of a batch, as a ``DistributedSampler`` deals it out."""
    x, y = batch
    return x[dist.get_rank() :: WORLD_SIZE], y[dist.get_rank() :: WORLD_SIZE]


def on_rank(rank: int, batch: Batch) -> Batch:
    """The batch on one rank, none of it on the others."""
    return batch if dist.get_rank() == rank else (batch[0][:0], batch[1][:0])


# --- what a run leaves behind ---


@dataclass
class Outcome:
    """The public results of a run, comparable between processes."""

    thresholds: list[float]
    indicators: list[torch.Tensor]
    parameters: list[torch.Tensor]
    history: list[Any]
    max_grad_norm: float
    num_slots: int
    num_releases: int
    expected_batch_size: float


def outcome(run: RankRun) -> Outcome:
    optimizer = run.optimizer
    indicator = optimizer.slack_indicator
    return Outcome(
        thresholds=list(run.thresholds),
        indicators=list(run.indicators),
        parameters=run.parameters,
        history=list(run.engine.accountant.history),
        max_grad_norm=optimizer.max_grad_norm,
        num_slots=optimizer.num_slots,
        num_releases=optimizer.num_releases,
        expected_batch_size=indicator.expected_batch_size if indicator else 0.0,
    )


def largest_difference(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    """The largest difference of two lists of tensors, relative to the largest entry."""
    assert [t.shape for t in left] == [t.shape for t in right]
    scale = max(float(t.abs().max()) for t in right)
    return max(float((a - b).abs().max()) for a, b in zip(left, right, strict=True)) / scale


def assert_identical(left: Outcome, right: Outcome) -> None:
    """Assert that two runs went through the very same numbers."""
    assert left.thresholds == right.thresholds
    assert len(left.indicators) == len(right.indicators) == len(left.thresholds)
    assert left.max_grad_norm == right.max_grad_norm
    assert left.history == right.history
    assert (left.num_slots, left.num_releases) == (right.num_slots, right.num_releases)
    assert all(map(torch.equal, left.parameters, right.parameters))
    assert all(map(torch.equal, left.indicators, right.indicators))


def assert_close(left: Outcome, right: Outcome, tolerance: float) -> None:
    """Assert that two runs differ by rounding alone."""
    assert len(left.thresholds) == len(right.thresholds)
    for mine, theirs in zip(left.thresholds, right.thresholds, strict=True):
        assert abs(mine - theirs) <= tolerance * theirs
    assert left.history == right.history
    assert (left.num_slots, left.num_releases) == (right.num_slots, right.num_releases)
    assert left.expected_batch_size == right.expected_batch_size
    assert largest_difference(left.parameters, right.parameters) <= tolerance
    assert largest_difference(left.indicators, right.indicators) <= tolerance
