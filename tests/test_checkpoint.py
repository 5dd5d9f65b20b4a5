"""Checkpoints: a resumed run is the straight run, and nothing private leaves the optimizer."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import io
import math
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import opacus
import oracle
import pytest
import torch
from helpers import (
    TASKS,
    Integrating,
    Run,
    batches,
    per_sample_gradients,
    private,
    samples,
    sgd,
    vector,
)
from opacus.optimizers import DPOptimizer
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn

from opacus_slaclip import FixedController, PrivacyEngine, SlackIndicator

MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = functools.partial(torch.optim.Adam, lr=0.01)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)
SIZES = [5, 8, 3, 6, 9]


def gradients(*norms: float) -> torch.Tensor:
    """Per-sample gradients, shape (b, 1), of these norms."""
    return torch.tensor(norms).unsqueeze(1)


def ours(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key.startswith("slaclip_")}


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    first, *rest = parameters
    return torch.optim.SGD([{"params": [first], "lr": 0.2}, {"params": rest}], lr=0.1, momentum=0.9)


# --- resume from every step ---


def by_state_dict(source: Run, target: Run) -> None:
    target.model.load_state_dict(source.model.state_dict())
    target.optimizer.load_state_dict(source.optimizer.state_dict())
    target.engine.accountant.load_state_dict(source.engine.accountant.state_dict())


def by_engine(source: Run, target: Run) -> None:
    file = io.BytesIO()
    source.engine.save_checkpoint(path=file, module=source.model, optimizer=source.optimizer)
    file.seek(0)
    target.engine.load_checkpoint(path=file, module=target.model, optimizer=target.optimizer)


def by_safe_load(source: Run, target: Run) -> None:
    file = io.BytesIO()
    source.engine.save_checkpoint(path=file, module=source.model, optimizer=source.optimizer)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    target.model.load_state_dict(saved["module_state_dict"])
    target.optimizer.load_state_dict(saved["optimizer_state_dict"])
    target.engine.accountant.load_state_dict(saved["privacy_accountant_state_dict"])


@pytest.mark.parametrize("controller", [None, Integrating], ids=["slaclip", "stateful"])
@pytest.mark.parametrize(
    "torch_optimizer", [MOMENTUM, ADAM, ADAMW, two_groups], ids=["sgd", "adam", "adamw", "groups"]
)
@pytest.mark.parametrize("transfer", [by_state_dict, by_engine, by_safe_load])
def test_resuming_after_any_step_is_the_straight_run(transfer, torch_optimizer, controller):
    def fresh() -> Run:
        options = {} if controller is None else {"controller": controller()}
        return private(torch_optimizer=torch_optimizer, num_slots=5, **options)

    data = batches("mlp", SIZES)
    straight = fresh()
    for batch in data:
        straight.step(batch)
    assert len(set(straight.thresholds)) == len(data)

    for stop in range(len(data) + 1):
        stopped, resumed = fresh(), fresh()
        for batch in data[:stop]:
            stopped.step(batch)
        transfer(stopped, resumed)
        resumed.noise_generator.set_state(stopped.noise_generator.get_state())
        for batch in data[stop:]:
            resumed.step(batch)

        assert all(map(torch.equal, resumed.parameters, straight.parameters)), stop
        assert resumed.thresholds == straight.thresholds[stop:]
        assert resumed.optimizer.max_grad_norm == straight.optimizer.max_grad_norm
        assert resumed.optimizer.num_releases == straight.optimizer.num_releases
        assert resumed.engine.accountant.history == straight.engine.accountant.history
        for theirs, mine in zip(
            straight.optimizer.state_dict()["param_groups"],
            resumed.optimizer.state_dict()["param_groups"],
            strict=True,
        ):
            assert ours(mine) == ours(theirs)


def test_a_resumed_optimizer_has_no_indicator_until_it_releases():
    source, target = private(), private()
    source.step(samples("mlp", 5))

    by_state_dict(source, target)

    assert target.optimizer.slack_indicator is None
    assert target.optimizer.num_releases == 1


def test_the_first_threshold_travels_so_that_make_private_recognizes_it():
    """The resumed run was made with another one: what the checkpoint says counts."""
    source, target = private(), private(max_grad_norm=0.9)
    source.step(samples("mlp", 5))
    by_state_dict(source, target)
    assert target.optimizer.initial_max_grad_norm == 1.7

    def again(max_grad_norm: float) -> Any:
        _, optimizer, _ = target.engine.make_private(
            module=target.model,
            optimizer=target.optimizer,
            data_loader=target.loader,
            noise_multiplier=0.3,
            max_grad_norm=max_grad_norm,
            clipping="slaclip",
        )
        return optimizer

    assert again(0.9).max_grad_norm == 0.9
    assert again(1.7).max_grad_norm == source.optimizer.max_grad_norm != 1.7


# --- what is in the file ---


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{path}/{key}")
    elif isinstance(tree, (list, tuple)):
        for key, value in enumerate(tree):
            yield from leaves(value, f"{path}/{key}")
    else:
        yield path, tree


@pytest.mark.parametrize("controller", [FixedController, Integrating])
@pytest.mark.parametrize("torch_optimizer", [MOMENTUM, ADAM, ADAMW, two_groups])
def test_every_group_of_a_checkpoint_holds_plain_numbers_of_ours(
    torch_optimizer, controller, tmp_path
):
    run = private(torch_optimizer=torch_optimizer, controller=controller(), num_slots=5)
    for batch in batches("mlp", SIZES):
        run.step(batch)
    path = tmp_path / "checkpoint.pt"

    run.engine.save_checkpoint(path=path, module=run.model, optimizer=run.optimizer)

    saved = torch.load(path, weights_only=True)
    expected: dict[str, float] = {
        "slaclip_max_grad_norm": run.optimizer.max_grad_norm,
        "slaclip_initial_max_grad_norm": 1.7,
        "slaclip_num_slots": 5,
        "slaclip_num_releases": 5,
        "slaclip_rescale_to_unit_norm": 0,
    }
    if controller is Integrating:
        expected["slaclip_controller_integral"] = run.optimizer.controller.integral
    for group in saved["optimizer_state_dict"]["param_groups"]:
        assert ours(group) == expected
        assert {type(value) for value in ours(group).values()} <= {int, float}
    elsewhere = [
        path for path, _ in leaves(saved) if "slaclip" in path and "param_groups" not in path
    ]
    assert elsewhere == []


def test_a_checkpoint_holds_no_generator_state():
    run = private(torch_optimizer=ADAM)
    run.step(samples("mlp", 5))
    file = io.BytesIO()

    run.engine.save_checkpoint(path=file, module=run.model, optimizer=run.optimizer)

    file.seek(0)
    found = [leaf for _, leaf in leaves(torch.load(file, weights_only=True))]
    assert not any(isinstance(leaf, torch.Generator) for leaf in found)
    tensors = [leaf for leaf in found if isinstance(leaf, torch.Tensor)]
    assert tensors
    assert all(tensor.is_floating_point() for tensor in tensors)  # a state is made of bytes


def test_the_state_of_a_controller_is_saved_as_plain_numbers():
    controller = Integrating()
    controller.integral = np.float64(0.25)
    one = vector(controller=controller)

    [group] = one.optimizer.state_dict()["param_groups"]

    assert type(group["slaclip_controller_integral"]) is float
    file = io.BytesIO()
    torch.save(one.optimizer.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["param_groups"][0] == group


@pytest.mark.parametrize("value", ["1.0", None, torch.tensor(1.0), [1.0], math.nan, math.inf])
def test_a_controller_state_that_is_no_plain_number_is_refused_at_once(value):
    controller = Integrating()
    controller.integral = value

    with pytest.raises(TypeError, match=r"state_dict\(\)\['integral'\] must be a plain finite"):
        vector(controller=controller)


def test_the_entries_of_a_former_controller_are_not_saved():
    run = private(controller=Integrating())
    run.step(samples("mlp", 5))
    _, optimizer, _ = run.engine.make_private(
        module=run.model,
        optimizer=run.optimizer,
        data_loader=run.loader,
        noise_multiplier=0.3,
        max_grad_norm=1.7,
        clipping="slaclip",
    )

    saved = optimizer.state_dict()

    assert "slaclip_controller_integral" not in saved["param_groups"][0]
    optimizer.load_state_dict(saved)


def test_a_group_added_later_has_the_entries_as_well():
    def first_only(parameters: Any) -> torch.optim.Optimizer:
        return MOMENTUM(list(parameters)[:2])

    def late() -> Run:
        run = private(torch_optimizer=first_only, num_slots=5)
        run.optimizer.add_param_group({"params": list(run.model.parameters())[2:], "lr": 0.2})
        return run

    source, target = late(), late()
    source.step(samples("mlp", 5))

    saved = source.optimizer.state_dict()
    target.optimizer.load_state_dict(saved)

    first, second = saved["param_groups"]
    assert ours(first) == ours(second)
    assert len(ours(second)) == 5
    assert target.optimizer.max_grad_norm == source.optimizer.max_grad_norm


# --- between ours and others ---


def test_a_checkpoint_without_ours_warns_and_keeps_the_live_threshold():
    plain = private(clipping="flat", torch_optimizer=MOMENTUM)
    plain.step(samples("mlp", 5))
    run = private(torch_optimizer=MOMENTUM)
    run.step(samples("mlp", 6))
    clip_norm = run.optimizer.max_grad_norm

    with pytest.warns(UserWarning, match=f"no SlaClip entry; the threshold stays at {clip_norm:g}"):
        run.optimizer.load_state_dict(plain.optimizer.state_dict())

    assert run.optimizer.max_grad_norm == clip_norm
    assert run.optimizer.num_releases == 1
    for mine, theirs in zip(
        run.optimizer.state_dict()["state"].values(),
        plain.optimizer.state_dict()["state"].values(),
        strict=True,
    ):
        assert torch.equal(mine["momentum_buffer"], theirs["momentum_buffer"])
    assert ours(run.optimizer.state_dict()["param_groups"][0])["slaclip_max_grad_norm"] == clip_norm


def test_a_checkpoint_of_ours_loads_into_opacus():
    source = private(torch_optimizer=MOMENTUM)
    source.step(samples("mlp", 5))
    flat = private(engine=opacus.PrivacyEngine(), clipping="flat", torch_optimizer=MOMENTUM)

    flat.optimizer.load_state_dict(source.optimizer.state_dict())

    assert type(flat.optimizer) is DPOptimizer
    assert flat.optimizer.max_grad_norm == 1.7
    buffers = [
        [state["momentum_buffer"] for state in run.optimizer.state_dict()["state"].values()]
        for run in (source, flat)
    ]
    assert all(map(torch.equal, *buffers))
    flat.step(samples("mlp", 5))


def test_a_checkpoint_of_ours_loads_into_torch():
    source = private(torch_optimizer=MOMENTUM)
    source.step(samples("mlp", 5))
    saved = source.optimizer.state_dict()
    model = TASKS["mlp"].model()
    plain = MOMENTUM(model.parameters())

    plain.load_state_dict(copy.deepcopy(saved))  # torch steps on the buffers it is given

    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    start = [p.detach().clone() for p in model.parameters()]
    plain.step()
    for p, before, state in zip(model.parameters(), start, saved["state"].values(), strict=True):
        assert torch.equal(p, before.add(0.9 * state["momentum_buffer"], alpha=-0.1))


# --- refusals ---


def edited(change: Callable[[list[dict[str, Any]]], None]) -> Callable[[dict[str, Any]], None]:
    return lambda saved: change(saved["param_groups"])


def set_all(**entries: Any) -> Callable[[dict[str, Any]], None]:
    def change(groups: list[dict[str, Any]]) -> None:
        for group in groups:
            group.update({f"slaclip_{name}": value for name, value in entries.items()})

    return edited(change)


def drop(name: str) -> Callable[[dict[str, Any]], None]:
    return edited(lambda groups: [group.pop(f"slaclip_{name}") for group in groups])


def nudge_one_group(groups: list[dict[str, Any]]) -> None:
    groups[1]["slaclip_max_grad_norm"] *= 1.5


REFUSALS = {
    "slots": (set_all(num_slots=6), r"num_slots must be that of the checkpoint, 6, got 5\. Pass"),
    "above": (set_all(max_grad_norm=51.0), r"must be within .* = \[0.1, 50\], got 51"),
    "below": (set_all(max_grad_norm=0.01), r"must be within .* = \[0.1, 50\], got 0.01"),
    "nan": (set_all(max_grad_norm=math.nan), r"The checkpoint|must be finite"),
    "rescaling": (set_all(rescale_to_unit_norm=1), "rescale_to_unit_norm must be .* True, got F"),
    "groups": (edited(nudge_one_group), "param groups must agree on the SlaClip entries"),
    "threshold": (drop("max_grad_norm"), "'slaclip_max_grad_norm' is missing"),
    "initial": (drop("initial_max_grad_norm"), "'slaclip_initial_max_grad_norm' is missing"),
    "number": (drop("num_slots"), "'slaclip_num_slots' is missing"),
    "releases": (drop("num_releases"), "'slaclip_num_releases' is missing"),
    "state": (set_all(controller_other=1.0), "controller state .* must match that of the live"),
    "stateless": (drop("controller_integral"), "controller state .* must match that of the live"),
}


@pytest.mark.parametrize(("change", "text"), REFUSALS.values(), ids=REFUSALS)
def test_a_checkpoint_that_does_not_fit_is_refused_and_changes_nothing(change, text):
    options: dict[str, Any] = {"torch_optimizer": two_groups, "num_slots": 5}
    source = private(controller=Integrating(), **options)
    run, twin = (private(controller=Integrating(), **options) for _ in range(2))
    for batch in batches("mlp", SIZES):
        source.step(batch)
    first, second = batches("mlp", [4, 7], seed=50)
    for one in (run, twin):
        one.step(first)
        one.optimizer.signal_skip_step(do_skip=True)
        one.step(second)  # the refusal comes inside a logical batch
    saved = copy.deepcopy(source.optimizer.state_dict())
    change(saved)

    with pytest.raises(ValueError, match=text):
        run.optimizer.load_state_dict(saved)

    assert run.optimizer.max_grad_norm == twin.optimizer.max_grad_norm
    assert run.optimizer.controller.integral == twin.optimizer.controller.integral
    for one in (run, twin):
        one.step(first)
    assert all(map(torch.equal, run.parameters, twin.parameters))
    assert torch.equal(run.optimizer.slack_indicator.values, twin.optimizer.slack_indicator.values)
    mine, theirs = (one.optimizer.state_dict() for one in (run, twin))
    assert mine["param_groups"] == theirs["param_groups"]


def test_another_number_of_slots_is_refused_between_real_runs():
    source, target = private(num_slots=5), private(num_slots=4)

    with pytest.raises(ValueError, match="Pass num_slots=5 to make_private"):
        target.optimizer.load_state_dict(source.optimizer.state_dict())


@pytest.mark.parametrize("opened", [True, False])
def test_what_the_optimizer_refuses_is_refused_before_anything_is_loaded(tmp_path, opened):
    source, target = private(num_slots=5), private(num_slots=4)
    source.step(samples("mlp", 5))
    target.step(samples("mlp", 6))
    path = tmp_path / "checkpoint.pt"
    source.engine.save_checkpoint(path=path, module=source.model, optimizer=source.optimizer)
    before, history = target.parameters, list(target.engine.accountant.history)
    with (
        path.open("rb") if opened else contextlib.nullcontext(path) as place,
        pytest.raises(ValueError, match="Pass num_slots=5"),
    ):
        target.engine.load_checkpoint(path=place, module=target.model, optimizer=target.optimizer)
    assert all(map(torch.equal, target.parameters, before))
    assert target.engine.accountant.history == history


class Late:
    """A controller without a state before its first release, of which it remembers the value."""

    seen: float | None = None

    def __call__(self, clip_norm: float, indicator: SlackIndicator) -> float:
        self.seen = float(indicator.values[0])
        return 1.1 * clip_norm

    def state_dict(self) -> dict[str, float]:
        return {} if self.seen is None else {"seen": self.seen}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.seen = state["seen"]


def test_a_state_that_appears_with_the_first_release_can_be_resumed():
    source, target = private(controller=Late()), private(controller=Late())
    source.step(samples("mlp", 5))
    target.optimizer.load_state_dict(source.optimizer.state_dict())
    assert target.optimizer.controller.seen == source.optimizer.controller.seen is not None


def test_a_good_checkpoint_loads_over_a_state_gone_bad():
    run = private(controller=Integrating())
    run.step(samples("mlp", 5))
    good = copy.deepcopy(run.optimizer.state_dict())
    run.optimizer.controller.integral = math.nan
    run.optimizer.load_state_dict(good)
    assert (
        run.optimizer.controller.integral == good["param_groups"][0]["slaclip_controller_integral"]
    )


# --- loading drops an unfinished logical batch ---


def test_loading_drops_an_unfinished_logical_batch():
    one = vector(num_slots=2, expected_batch_size=4, controller=FixedController())
    saved = one.optimizer.state_dict()
    one.accumulate(gradients(0.0, 0.0))

    one.optimizer.load_state_dict(saved)

    assert one.parameter.summed_grad is None
    one.optimizer.max_grad_norm = 2.0  # allowed between logical batches only
    assert one.release(gradients(1.0)).item() == 1.0
    assert one.optimizer.slack_indicator.values.tolist() == [0.25, 0.0]


def test_loading_after_a_loop_that_was_left_early_resumes_from_a_clean_boundary():
    """A physical batch announced but never stepped on would shift every later boundary."""
    left, fresh = private(), private()
    saved = copy.deepcopy(left.optimizer.state_dict())
    start = copy.deepcopy(left.model.state_dict())
    with BatchMemoryManager(
        data_loader=left.loader, max_physical_batch_size=3, optimizer=left.optimizer
    ) as loader:
        for number, batch in enumerate(loader):
            if number == 8:
                break  # drawn and announced, but not stepped on
            left.step(batch)
    assert all(p.summed_grad is not None for p in left.model.parameters())

    left.model.load_state_dict(start)
    left.optimizer.load_state_dict(saved)
    releases = []
    for run in (left, fresh):
        run.loader.generator.manual_seed(7)
        run.noise_generator.manual_seed(8)
        run.thresholds.clear()
        with BatchMemoryManager(
            data_loader=run.loader, max_physical_batch_size=3, optimizer=run.optimizer
        ) as loader:
            for batch in loader:
                run.step(batch)
        releases.append(run.optimizer.num_releases)

    assert releases == [4, 4]
    assert left.thresholds == fresh.thresholds
    assert all(map(torch.equal, left.parameters, fresh.parameters))


def test_a_failed_step_leaves_nothing_behind_for_a_load():
    one = vector(num_slots=1, expected_batch_size=4)
    saved = one.optimizer.state_dict()
    one.optimizer.attach_step_hook(lambda optimizer: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        one.release(gradients(0.0))
    one.optimizer.attach_step_hook(lambda optimizer: None)

    one.optimizer.load_state_dict(saved)
    one.accumulate(gradients(0.0))

    assert one.optimizer.max_grad_norm == 1.0
    assert one.optimizer.num_releases == 0


# --- copies and pickles ---

COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda optimizer: torch.save(optimizer, io.BytesIO()),
}


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_a_copy_is_refused_and_later_optimizers_still_step(duplicate):
    run = private()
    run.step(samples("mlp", 5))

    with pytest.raises(TypeError, match=r"cannot be copied or pickled. Save optimizer.state_dict"):
        duplicate(run.optimizer)

    run.step(samples("mlp", 5))
    for fresh in (private(), private(engine=opacus.PrivacyEngine(), clipping="flat")):
        start = fresh.parameters
        fresh.step(samples("mlp", 5))
        assert not all(map(torch.equal, fresh.parameters, start))


# --- what is private stays inside ---


@dataclasses.dataclass
class Secrets:
    """What a step on a batch computes and must not show, by the oracle."""

    norms: list[float]
    slot_sums: list[float]
    clip_norm: float

    @classmethod
    def of(cls, run: Run, *pieces: Any) -> Secrets:
        model = TASKS["mlp"].model().double()
        with torch.no_grad():
            for mine, theirs in zip(model.parameters(), run.model.parameters(), strict=True):
                mine.copy_(theirs)
        norms = [
            math.hypot(*(entry for g in gradient for entry in g.flatten().tolist()))
            for piece in pieces
            for gradient in per_sample_gradients(model, piece)
        ]
        clip_norm = run.optimizer.max_grad_norm
        sums = oracle.slack_sum(norms, clip_norm, run.optimizer.num_slots)
        return cls(norms, [float(total) for total in sums], clip_norm)

    def numbers(self) -> torch.Tensor:
        width = self.clip_norm / math.sqrt(len(self.slot_sums))
        sums = torch.tensor(self.slot_sums, dtype=torch.float64)
        norms = torch.tensor(self.norms, dtype=torch.float64)
        factors = self.clip_norm / norms
        # Whole sums are counts, which other numbers may equal by chance.
        sums = sums[(sums - sums.round()).abs() > 1e-4]
        found = torch.cat([norms, factors[factors < 1], sums, sums * width, sums / 16])
        return found.sort().values

    def shown_in(self, numbers: list[float]) -> list[float]:
        """Return the numbers that equal one of the secrets to float32 rounding."""
        secrets = self.numbers()
        values = torch.tensor(numbers, dtype=torch.float64)
        gaps = (values[:, None] / secrets[None, :] - 1).abs().amin(1)
        return values[gaps < 1e-5].tolist()


def public_numbers(value: Any, seen: set[int] | None = None) -> Iterator[float]:
    """Every number that is reached through names without a leading underscore."""
    seen = set() if seen is None else seen
    if isinstance(value, (int, float, np.number)):
        yield float(value)
        return
    if id(value) in seen or value is None or isinstance(value, (str, type, torch.Generator)):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield from value.detach().double().flatten().tolist()
        yield from public_numbers({k: v for k, v in vars(value).items() if k[0] != "_"}, seen)
        if value.is_leaf:
            yield from public_numbers(value.grad, seen)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from public_numbers(key, seen)
            yield from public_numbers(item, seen)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from public_numbers(item, seen)
    elif not callable(value) or type(value).__module__.startswith("opacus_slaclip"):
        for name in [name for name in dir(value) if name[0] != "_"]:
            try:
                item = getattr(value, name)
            except ValueError:  # Opacus's properties raise where there is no gradient
                continue
            yield from public_numbers(item, seen)


def numbers_in(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.?\d*(?:e[+-]?\d+)?", text)]


def everything_shown(run: Run) -> list[float]:
    optimizer = run.optimizer
    shown = [*public_numbers(optimizer), *public_numbers(optimizer.state_dict())]
    return shown + numbers_in(repr(optimizer)) + numbers_in(repr(optimizer.slack_indicator))


def live_tensors_equal_to(values: list[float]) -> int:
    """Count the tensors of this process that hold just these numbers, to float32 rounding."""
    gc.collect()
    expected = torch.tensor(values, dtype=torch.float64)
    found = 0
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.Tensor) and candidate.shape == expected.shape:
            gap = (candidate.detach().double() - expected).abs().max()
            found += bool(gap <= 1e-5 * expected.abs().max()) and candidate is not expected
    return found


def secretive(**kwargs: Any) -> Run:
    run = private(num_slots=6, noise_multiplier=0.3, **kwargs)
    run.step(samples("mlp", 5, seed=40))
    return run


def test_the_search_for_secrets_finds_one_that_is_shown():
    run = secretive()
    batch = samples("mlp", 9, seed=41)
    secrets = Secrets.of(run, batch)
    run.step(batch)

    run.optimizer.leak = {"deep": [torch.tensor(secrets.norms[3])]}
    assert len(secrets.shown_in(everything_shown(run))) == 1
    run.optimizer.leak = torch.tensor(secrets.slot_sums)
    assert len(secrets.shown_in(everything_shown(run))) >= 3
    assert live_tensors_equal_to(secrets.slot_sums) == 1
    del run.optimizer.leak
    assert secrets.shown_in(numbers_in(f"a norm of {secrets.norms[0]}")) == [secrets.norms[0]]


def test_nothing_private_is_shown_after_a_step_and_after_clearing():
    run = secretive()
    for batch in batches("mlp", [9, 6, 8], seed=42):
        secrets = Secrets.of(run, batch)
        run.step(batch)
        assert secrets.shown_in(everything_shown(run)) == []
        run.optimizer.zero_grad()
        assert secrets.shown_in(everything_shown(run)) == []


def test_nothing_private_is_shown_inside_a_logical_batch():
    run = secretive()
    pieces = batches("mlp", [9, 6, 8], seed=45)
    saved = run.optimizer.state_dict()["param_groups"]

    for number, piece in enumerate(pieces[:-1]):
        run.optimizer.signal_skip_step(do_skip=True)
        run.step(piece)
        secrets = Secrets.of(run, *pieces[: number + 1])
        assert secrets.shown_in(everything_shown(run)) == []
        assert run.optimizer.state_dict()["param_groups"] == saved
    secrets = Secrets.of(run, *pieces)
    run.step(pieces[-1])

    assert secrets.shown_in(everything_shown(run)) == []
    assert run.optimizer.state_dict()["param_groups"] != saved


def test_nothing_private_is_shown_to_hooks_and_controllers():
    shown: list[list[float]] = []
    live: list[int] = []

    def controller(clip_norm: float, indicator: SlackIndicator) -> float:
        if "run" in context:
            shown.append(everything_shown(context["run"]) + list(public_numbers(indicator)))
            live.append(live_tensors_equal_to(context["secrets"].slot_sums))
            live.append(live_tensors_equal_to(context["secrets"].norms))
        return clip_norm

    context: dict[str, Any] = {}
    run = secretive(controller=controller)
    account = run.optimizer.step_hook

    def hook(optimizer: Any) -> None:
        shown.append(everything_shown(run))
        live.append(live_tensors_equal_to(context["secrets"].slot_sums))
        account(optimizer)

    run.optimizer.attach_step_hook(hook)
    batch = samples("mlp", 9, seed=48)
    context.update(run=run, secrets=Secrets.of(run, batch))

    run.step(batch)

    assert len(shown) == 2
    for numbers in shown:
        assert context["secrets"].shown_in(numbers) == []
    assert live == [0, 0, 0], "the slack sum or the norms outlive their release"


def test_what_a_step_warns_of_has_no_number_in_it():
    run = secretive()
    x, y = samples("mlp", 9, seed=49)
    x[2] = math.inf

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.step((x, y))

    texts = [str(w.message) for w in caught if "finite" in str(w.message)]
    assert len(texts) == 1
    assert numbers_in(texts[0]) == []


def test_an_optimizer_built_by_hand_checkpoints_as_one_from_the_engine():
    model = nn.Linear(2, 1)
    run = private(torch_optimizer=sgd, engine=PrivacyEngine(accountant="rdp"))
    by_hand = type(run.optimizer)(
        sgd(model.parameters()), noise_multiplier=0.3, max_grad_norm=1.7, expected_batch_size=16
    )

    mine, theirs = (o.state_dict()["param_groups"][0] for o in (by_hand, run.optimizer))

    assert ours(mine) == ours(theirs)


class Refusing(Integrating):
    """A controller that checks what it is given."""

    def load_state_dict(self, state: dict[str, float]) -> None:
        if state["integral"] > 1e6:
            raise ValueError("that is no integral")
        super().load_state_dict(state)


def test_a_controller_that_refuses_its_state_leaves_everything_as_it_was():
    source, target = (private(controller=Refusing(), torch_optimizer=MOMENTUM) for _ in range(2))
    source.step(samples("mlp", 5))
    target.step(samples("mlp", 7))
    saved = source.optimizer.state_dict()
    for group in saved["param_groups"]:
        group |= {"slaclip_controller_integral": 1e7, "lr": 0.77}
    before = copy.deepcopy(target.optimizer.state_dict())

    with pytest.raises(ValueError, match="that is no integral"):
        target.optimizer.load_state_dict(saved)

    assert target.optimizer.state_dict()["param_groups"] == before["param_groups"]
    assert target.optimizer.max_grad_norm != source.optimizer.max_grad_norm
