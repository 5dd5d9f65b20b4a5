"""Checkpoints of distributed runs: every way to save and load resumes the straight run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_helpers import (
    FAMILIES,
    Family,
    Outcome,
    RankRun,
    assert_identical,
    on_ranks,
    outcome,
    private_on_rank,
    share,
)
from helpers import TASKS, Batch, batches
from torch import distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from opacus_slaclip import SlackIndicator

SAVED_AFTER = 2


@dataclass
class Swinging:
    """A controller whose state decides where the threshold goes."""

    calls: int = 0

    def __call__(self, clip_norm: float, indicator: SlackIndicator) -> float:
        self.calls += 1
        return clip_norm * (1.0 + 0.2 * (-1) ** self.calls / self.calls)

    def state_dict(self) -> dict[str, float]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, float], /) -> None:
        self.calls = int(state["calls"])


def build(family: Family, torch_optimizer: str, *, seed: int = 0) -> RankRun:
    torch.manual_seed(seed)
    return private_on_rank(
        family,
        module=TASKS["mlp"].model().double(),
        torch_optimizer=torch_optimizer,
        noise_multiplier=0.3,
        num_slots=6,
        controller=Swinging(),
        wrap_model=torch_optimizer != "adam",
    )


def data() -> list[Batch]:
    return [share(batch) for batch in batches("mlp", [16, 9, 12, 16], dtype=torch.float64)]


# --- ways to save and load ---


def save_plain(run: RankRun, folder: Path) -> Any:
    return copy.deepcopy([run.model.state_dict(), run.optimizer.state_dict()])


def load_plain(run: RankRun, saved: Any, folder: Path) -> None:
    model, optimizer = saved
    run.model.load_state_dict(model)
    run.optimizer.load_state_dict(optimizer)


def save_with_engine(run: RankRun, folder: Path) -> Path:
    """Save on rank 0; of a sharded run every rank has a part to save."""
    is_sharded = hasattr(next(run.model.parameters()), "placements")
    path = folder / f"{dist.get_rank() if is_sharded else 0}.pt"
    if is_sharded or dist.get_rank() == 0:
        run.engine.save_checkpoint(path=path, module=run.model, optimizer=run.optimizer)
    return path


def load_with_engine(run: RankRun, saved: Path, folder: Path) -> None:
    run.engine.load_checkpoint(path=saved, module=run.model, optimizer=run.optimizer)


def of_torch(**options: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """torch's distributed state dicts; a full one is saved by rank 0 alone and sent around."""
    is_full = "full_state_dict" in options
    getting = StateDictOptions(**options, cpu_offload=is_full)
    setting = StateDictOptions(**options, broadcast_from_rank0=is_full)
    # Flattening is a form of optimizer states.
    of_model = StateDictOptions() if not is_full else None

    def save(run: RankRun, folder: Path) -> Any:
        return copy.deepcopy(
            [
                get_model_state_dict(run.model, options=of_model or getting),
                get_optimizer_state_dict(run.model, run.optimizer, options=getting),
            ]
        )

    def load(run: RankRun, saved: Any, folder: Path) -> None:
        model, optimizer = saved
        if is_full and dist.get_rank() != 0:
            model, optimizer = {}, {}
        set_model_state_dict(run.model, model, options=of_model or setting)
        set_optimizer_state_dict(run.model, run.optimizer, optimizer, options=setting)

    return save, load


def save_to_disk(run: RankRun, folder: Path) -> None:
    checkpoint.save(
        {
            "model": get_model_state_dict(run.model),
            "optimizer": get_optimizer_state_dict(run.model, run.optimizer),
        },
        checkpoint_id=folder / "sharded",
    )


def load_from_disk(run: RankRun, saved: None, folder: Path) -> None:
    state = {
        "model": get_model_state_dict(run.model),
        "optimizer": get_optimizer_state_dict(run.model, run.optimizer),
    }
    checkpoint.load(state, checkpoint_id=folder / "sharded")
    set_model_state_dict(run.model, state["model"])
    set_optimizer_state_dict(run.model, run.optimizer, state["optimizer"])


METHODS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "plain": (save_plain, load_plain),
    "engine": (save_with_engine, load_with_engine),
    "torch": of_torch(),
    "torch, full": of_torch(full_state_dict=True),
    "torch, flat": of_torch(flatten_optimizer_state_dict=True),
    "torch, on disk": (save_to_disk, load_from_disk),
}


# --- what they must keep ---


@dataclass
class Resumed:
    saved: Outcome
    after_saving: Outcome
    loaded: Outcome
    controller_calls: int
    resumed: Outcome
    is_noise_drawn: bool


def resume(
    family: Family, torch_optimizer: str, folder: Path
) -> tuple[Outcome, dict[str, Resumed]]:
    straight = build(family, torch_optimizer)
    for batch in data():
        straight.step(batch)
    return outcome(straight), {
        name: resume_by(*method, family, torch_optimizer, folder / name)
        for name, method in METHODS.items()
    }


def resume_by(
    save: Callable[..., Any],
    load: Callable[..., Any],
    family: Family,
    torch_optimizer: str,
    folder: Path,
) -> Resumed:
    folder.mkdir(exist_ok=True)
    dist.barrier()
    run, fresh = build(family, torch_optimizer), build(family, torch_optimizer, seed=1)
    for batch in data()[:SAVED_AFTER]:
        run.step(batch)
    before, noise = outcome(run), run.noise_generator.get_state()
    fresh_noise = fresh.noise_generator.get_state()
    saved = save(run, folder)
    accounted = run.engine.accountant.state_dict()
    dist.barrier()
    after = outcome(run)
    for batch in data()[SAVED_AFTER:]:
        run.step(batch)  # what was saved is a copy

    load(fresh, saved, folder)
    fresh.engine.accountant.load_state_dict(accounted)
    is_noise_drawn = not torch.equal(fresh.noise_generator.get_state(), fresh_noise)
    loaded, calls = outcome(fresh), fresh.optimizer.controller.calls
    fresh.noise_generator.set_state(noise)
    for batch in data()[SAVED_AFTER:]:
        fresh.step(batch)
    return Resumed(before, after, loaded, calls, outcome(fresh), is_noise_drawn)


@pytest.mark.parametrize("torch_optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_resumed_run_equals_the_straight_one(name, torch_optimizer, tmp_path):
    for straight, methods in on_ranks(resume, FAMILIES[name], torch_optimizer, tmp_path):
        assert len(set(straight.thresholds)) == 4, "the threshold did not move"
        for method, resumed in methods.items():
            saved, loaded = resumed.saved, resumed.loaded
            # Saving changes nothing.
            assert_identical(saved, resumed.after_saving)
            # Loading brings back the public state, and spends and draws nothing.
            assert loaded.max_grad_norm == saved.max_grad_norm == straight.thresholds[2], method
            assert loaded.num_slots == saved.num_slots == 6
            assert loaded.num_releases == saved.num_releases == SAVED_AFTER, method
            assert loaded.history == saved.history == [(0.3, 1 / 3, SAVED_AFTER)]
            assert all(map(torch.equal, loaded.parameters, saved.parameters)), method
            assert resumed.controller_calls == SAVED_AFTER, method
            assert not resumed.is_noise_drawn, method
            # From there on the steps are those of the straight run.
            after = resumed.resumed
            assert after.thresholds == straight.thresholds[SAVED_AFTER:], method
            assert after.max_grad_norm == straight.max_grad_norm
            assert all(map(torch.equal, after.parameters, straight.parameters)), method
            assert all(map(torch.equal, after.indicators, straight.indicators[SAVED_AFTER:]))
            assert after.history == straight.history == [(0.3, 1 / 3, 4)]


# --- torch's calls at awkward moments ---


def initialize(optimizer: torch.optim.Optimizer) -> None:
    """What torch does to a new optimizer before it reads its state: AdamW then has a step more."""
    for group in optimizer.param_groups:
        rate, group["lr"] = group["lr"], 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)


def interrupt(family: Family, torch_optimizer: str) -> list[tuple[Outcome, Outcome]]:
    """Let torch initialize and read the optimizer's state before, in and after a logical batch."""
    outcomes = []
    for moments in ((), ("before",), ("within",), ("before", "within", "after")):
        run = build(family, torch_optimizer)

        def read(moment: str, run: RankRun = run, moments: Any = moments) -> None:
            if moment in moments:
                run.optimizer.zero_grad(set_to_none=True)
                get_optimizer_state_dict(run.model, run.optimizer)

        first, second, third, fourth = data()
        if not moments:
            initialize(run.optimizer.original_optimizer)
        read("before")
        for is_piece, batch in ((True, first), (True, second), (False, third)):
            run.optimizer.signal_skip_step(do_skip=is_piece)
            run.step(batch)
            if is_piece:
                read("within")
        read("after")
        run.step(fourth)
        outcomes.append(outcome(run))
    return [(outcomes[0], interrupted) for interrupted in outcomes[1:]]


@pytest.mark.parametrize("torch_optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", FAMILIES)
def test_reading_the_state_leaves_a_logical_batch_alone(name, torch_optimizer):
    for rank in on_ranks(interrupt, FAMILIES[name], torch_optimizer):
        for quiet, interrupted in rank:
            assert_identical(interrupted, quiet)
            assert quiet.history == [(0.3, 1 / 3, 2)]
            assert quiet.num_releases == 2
