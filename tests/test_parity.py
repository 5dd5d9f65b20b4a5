"""With a fixed threshold, the steps are those of Opacus, bit for bit; so is the accounting."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import opacus
import pytest
import torch
from helpers import TASKS, Batch, Run, batches, per_sample_gradients, private, vector
from hypothesis import given
from hypothesis import strategies as st
from opacus.optimizers import DPOptimizer
from opacus.utils.batch_memory_manager import BatchMemoryManager

from opacus_slaclip import FixedController, PrivacyEngine, SlaClipDPOptimizer

MODES = ["hooks", "functorch", "ew", "no_op"]
SIZES = [5, 1, 9, 4, 7, 6, 2, 8, 12, 3]


def stock(*args: Any, accountant: str = "rdp", **kwargs: Any) -> Run:
    engine = opacus.PrivacyEngine(accountant=accountant)
    return private(*args, engine=engine, clipping="flat", **kwargs)


def fixed(*args: Any, accountant: str = "rdp", **kwargs: Any) -> Run:
    engine = PrivacyEngine(accountant=accountant)
    return private(*args, engine=engine, controller=FixedController(), **kwargs)


def given_gradients(run: Run, batch: Batch) -> None:
    """Do what grad_sample_mode="no_op" leaves to the user."""
    gradients = per_sample_gradients(run.model, batch)
    parameters: list[Any] = [p for p in run.model.parameters() if p.requires_grad]
    for p, grad_sample in zip(parameters, zip(*gradients, strict=True), strict=True):
        p.grad_sample = torch.stack(grad_sample)


def train(run: Run, data: list[Batch], *, mode: str = "hooks", reset: bool = True) -> None:
    for number, batch in enumerate(data):
        run.optimizer.zero_grad()
        if mode == "no_op":
            given_gradients(run, batch)
        else:
            run.backward(batch)
        if reset:
            # Ours draws the slack's noise after the gradient's: without this, later draws differ.
            run.noise_generator.manual_seed(1000 + number)
        run.optimizer.step()


def assert_same_steps(
    *args: Any, data: list[Batch], mode: str = "hooks", reset: bool = True, **kwargs: Any
) -> None:
    ours = fixed(*args, grad_sample_mode=mode, **kwargs)
    theirs = stock(*args, grad_sample_mode=mode, **kwargs)
    start = theirs.parameters
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters, start, strict=True))

    for run in (ours, theirs):
        train(run, data, mode=mode, reset=reset)

    assert all(map(torch.equal, ours.parameters, theirs.parameters))
    assert not all(map(torch.equal, theirs.parameters, start)), "nothing was trained"
    assert type(ours.optimizer) is SlaClipDPOptimizer
    assert ours.optimizer.num_releases == len(data)


# Opacus's functorch mode asks autocast for the type of an embedding's tokens.
@pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype is not supported")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("mode", MODES)
def test_every_model_and_mode_takes_the_steps_of_opacus(mode, task, dtype):
    assert_same_steps(task, data=batches(task, SIZES, dtype=dtype), mode=mode, dtype=dtype)


def test_the_batches_of_these_tests_hold_clipped_and_unclipped_samples():
    for task in TASKS:
        torch.manual_seed(0)
        model = TASKS[task].model()
        norms = [
            torch.cat([g.flatten() for g in gradients]).norm()
            for batch in batches(task, SIZES)
            for gradients in per_sample_gradients(model, batch)
        ]
        assert 0 < sum(n < TASKS[task].clip_norm for n in norms) < len(norms), task


def one_group_a_layer(optimizer_class: Any, **kwargs: Any) -> Callable[[Any], Any]:
    def build(parameters: Any) -> Any:
        groups = [{"params": [p], "lr": 0.1 / (1 + i)} for i, p in enumerate(parameters)]
        return optimizer_class(groups, **kwargs)

    return build


@pytest.mark.parametrize(
    "torch_optimizer",
    [
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=5e-4),
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        functools.partial(torch.optim.Adam, lr=0.01),
        functools.partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
        one_group_a_layer(torch.optim.SGD, momentum=0.9),
        one_group_a_layer(torch.optim.AdamW),
    ],
    ids=["momentum", "nesterov", "adam", "adamw", "sgd-groups", "adamw-groups"],
)
@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
def test_every_torch_optimizer_and_reduction_takes_the_steps_of_opacus(
    loss_reduction, torch_optimizer
):
    assert_same_steps(
        data=batches("mlp", SIZES), torch_optimizer=torch_optimizer, loss_reduction=loss_reduction
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("task", ["mlp", "cnn"])
def test_without_noise_the_steps_equal_with_no_reset(task, mode):
    assert_same_steps(task, data=batches(task, SIZES), mode=mode, noise_multiplier=0.0, reset=False)


def test_the_first_step_needs_no_reset_since_the_gradient_is_noised_first():
    assert_same_steps(data=batches("mlp", [9]), reset=False)


def test_batches_accumulated_without_poisson_sampling_take_the_step_of_opacus():
    runs = [make(poisson_sampling=False) for make in (fixed, stock)]

    for run in runs:
        for number in range(3):
            run.optimizer.zero_grad()
            for batch in batches("mlp", [4, 6, 3], seed=10 * number):
                run.backward(batch)
            run.noise_generator.manual_seed(number)
            run.optimizer.step()

    ours, theirs = runs
    assert all(map(torch.equal, ours.parameters, theirs.parameters))
    assert ours.engine.accountant.history == theirs.engine.accountant.history


def test_hooks_on_an_unwrapped_model_take_the_steps_of_opacus():
    assert_same_steps(data=batches("mlp", SIZES), wrap_model=False)


def test_a_closure_takes_the_step_of_opacus():
    runs = [make() for make in (fixed, stock)]
    batch = batches("mlp", [9])[0]

    for run in runs:
        run.optimizer.zero_grad()
        run.optimizer.step(functools.partial(run.backward, batch))

    ours, theirs = runs
    assert all(map(torch.equal, ours.parameters, theirs.parameters))


@pytest.mark.parametrize("max_physical_batch_size", [1, 5, 64])
def test_loaders_and_physical_batches_take_the_steps_of_opacus(max_physical_batch_size):
    runs = [make() for make in (fixed, stock)]

    for run in runs:
        with BatchMemoryManager(
            data_loader=run.loader,
            max_physical_batch_size=max_physical_batch_size,
            optimizer=run.optimizer,
        ) as loader:
            for number, batch in enumerate(loader):
                run.noise_generator.manual_seed(number)
                run.step(batch)

    ours, theirs = runs
    assert ours.optimizer.num_releases == len(ours.loader)
    assert all(map(torch.equal, ours.parameters, theirs.parameters))


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "adaptive"])
def test_clipping_values_of_opacus_give_its_own_optimizers(clipping):
    options: dict[str, Any] = {"clipping": clipping}
    if clipping == "per_layer":
        options["max_grad_norm"] = [0.5] * 4
    if clipping == "adaptive":
        options |= {
            "target_unclipped_quantile": 0.5,
            "clipbound_learning_rate": 0.2,
            "max_clipbound": 10.0,
            "min_clipbound": 0.1,
            "unclipped_num_std": 1.0,
        }
    runs = [
        private(engine=engine(accountant="rdp"), **options)
        for engine in (PrivacyEngine, opacus.PrivacyEngine)
    ]

    for run in runs:
        torch.manual_seed(5)  # Opacus draws the noise of its count from the global generator
        for batch in batches("mlp", SIZES):
            run.step(batch)

    ours, theirs = runs
    assert type(ours.optimizer) is type(theirs.optimizer)
    assert all(map(torch.equal, ours.parameters, theirs.parameters))


def test_a_step_inside_autocast_equals_the_step_outside():
    runs = [fixed(loss_reduction="sum"), fixed(loss_reduction="sum")]
    data = batches("mlp", SIZES)

    for is_inside, run in enumerate(runs):
        for batch in data:
            run.optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                run.backward(batch)
            with torch.autocast("cpu", torch.bfloat16, enabled=bool(is_inside)):
                run.optimizer.step()

    outside, inside = runs
    assert all(map(torch.equal, inside.parameters, outside.parameters))
    assert torch.equal(
        inside.optimizer.slack_indicator.values, outside.optimizer.slack_indicator.values
    )


# Squares of larger entries overflow float32, which is test_batches.py's business.
ENTRIES = st.floats(-(2.0**60), 2.0**60, width=32)


@given(
    rows=st.lists(st.lists(ENTRIES, min_size=3, max_size=3), min_size=1, max_size=5),
    clip_norm=st.floats(0.1, 50.0),
)
def test_any_gradients_are_clipped_and_summed_as_opacus_does(rows, clip_norm):
    gradients = torch.tensor(rows, dtype=torch.float32)

    ours, theirs = (
        vector(3, optimizer_class=optimizer_class, max_grad_norm=clip_norm).release(
            gradients.clone()
        )
        for optimizer_class in (SlaClipDPOptimizer, DPOptimizer)
    )

    assert torch.equal(ours, theirs)


# --- accounting ---


def spend(run: Run, steps: int = 4) -> None:
    for batch in batches("mlp", [6] * steps):
        run.step(batch)


def epsilon_or_error(run: Run) -> float | type[Exception]:
    try:
        return run.engine.get_epsilon(delta=1e-5)
    except ArithmeticError as error:
        return type(error)


@pytest.mark.filterwarnings("ignore:GDP accounting is experimental:UserWarning")
@pytest.mark.parametrize("noise_multiplier", [0.0, 0.8])
@pytest.mark.parametrize("clipping", ["slaclip", "slaclip-q"])
@pytest.mark.parametrize("accountant", ["rdp", "gdp", "prv"])
def test_an_adaptive_run_is_accounted_as_a_flat_one(accountant, clipping, noise_multiplier):
    engine = PrivacyEngine(accountant=accountant)
    ours = private(engine=engine, clipping=clipping, noise_multiplier=noise_multiplier)
    theirs = stock(accountant=accountant, noise_multiplier=noise_multiplier)

    for run in (ours, theirs):
        spend(run)

    assert ours.optimizer.max_grad_norm != theirs.optimizer.max_grad_norm
    assert ours.engine.accountant.history == theirs.engine.accountant.history
    assert ours.engine.accountant.history == [(noise_multiplier, 0.25, 4)]
    assert epsilon_or_error(ours) == epsilon_or_error(theirs)


def test_physical_batches_are_accounted_once_a_logical_batch():
    runs = [private(), stock()]

    for run in runs:
        with BatchMemoryManager(
            data_loader=run.loader, max_physical_batch_size=3, optimizer=run.optimizer
        ) as loader:
            for batch in loader:
                run.step(batch)

    ours, theirs = runs
    assert ours.engine.accountant.history == theirs.engine.accountant.history
    assert ours.engine.accountant.history == [(0.3, 0.25, 4)]


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_a_calibrated_run_gets_the_noise_and_steps_of_opacus(accountant):
    budget = {"target_epsilon": 3.0, "target_delta": 1e-5, "epochs": 2}
    ours, theirs = (
        make(accountant=accountant, noise_multiplier=None, **budget) for make in (fixed, stock)
    )

    for run in (ours, theirs):
        train(run, batches("mlp", SIZES[:8]))  # two epochs

    assert ours.optimizer.noise_multiplier == theirs.optimizer.noise_multiplier
    assert all(map(torch.equal, ours.parameters, theirs.parameters))
    assert epsilon_or_error(ours) == epsilon_or_error(theirs) <= 3.01  # the calibration's tolerance
