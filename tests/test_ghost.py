"""Ghost clipping: one threshold, fresh norms that cover what is summed, and clean failures."""

from __future__ import annotations

import copy
import functools
import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cases import BATCH_SIZE, CASES, EPS, NUM_SAMPLES, Case, Training, make, make_private
from helpers import NUM_CLASSES, Batch, samples, seeded
from opacus.schedulers import StepGradClip
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_slaclip import FixedController, PrivacyEngine

WRAPPED, BARE = CASES["ghost-mlp"], CASES["ghost-mlp-bare"]
both_ways = pytest.mark.parametrize("case", [WRAPPED, BARE], ids=["wrapped", "bare"])
SIZES = (5, 9, 3, 8, 6)


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def resting(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)


@contextmanager
def nothing_released(run: Training) -> Iterator[None]:
    """Check that the block neither updates, draws, charges, releases nor moves the threshold."""
    before, stream, history = run.parameters, run.noise.get_state(), copy.deepcopy(run.history)
    public = run.optimizer.max_grad_norm, run.optimizer.num_releases
    indicator = run.optimizer.slack_indicator
    yield
    assert same(run.parameters, before)
    assert torch.equal(run.noise.get_state(), stream)
    assert run.history == history
    assert (run.optimizer.max_grad_norm, run.optimizer.num_releases) == public
    assert run.optimizer.slack_indicator is indicator


def backward_and_step(run: Training, loss: Callable[[], Any]) -> None:
    loss().backward()
    run.optimizer.step()


def assert_goes_on(run: Training, twin: Training) -> None:
    """Check that the run takes the same steps as one to which nothing ever happened."""
    for one in (run, twin):
        one.train(run.case.batches(4, 7, seed=30))
    assert same(run.parameters, twin.parameters)
    assert run.thresholds[-2:] == twin.thresholds[-2:]
    assert run.optimizer.max_grad_norm == twin.optimizer.max_grad_norm
    assert torch.equal(run.optimizer.slack_indicator.values, twin.optimizer.slack_indicator.values)
    assert run.history == twin.history


# --- rule 1: one threshold ---


def assert_clips_and_noises_at(run: Training, clip_norm: float) -> None:
    """Step on one sample far above the threshold and look at what is summed and drawn."""
    assert run.optimizer.max_grad_norm == run.handle.max_grad_norm == clip_norm
    x, y = run.case.batches(1)[0]
    twin = seeded(0)
    twin.set_state(run.noise.get_state())
    run.step((1000 * x, y))
    # d = 83 entries, each off by an eps or two; C by its 1e-6 / n.
    assert run.summed_norm() == pytest.approx(clip_norm, rel=2e-6)
    for p in run.optimizer.params:
        noise = torch.normal(0.0, 0.3 * clip_norm, p.shape, generator=twin)
        assert torch.equal(p.grad, (p.summed_grad + noise) / BATCH_SIZE)
    assert run.optimizer.slack_indicator.clip_norm == clip_norm


@both_ways
def test_setting_the_threshold_reaches_the_object_that_clips(case):
    run = make(case, controller=FixedController())

    for clip_norm in (0.5, 2.0, 0.1):
        run.optimizer.max_grad_norm = clip_norm
        assert_clips_and_noises_at(run, clip_norm)


@both_ways
def test_a_checkpoint_reaches_the_object_that_clips(case):
    source, target = make(case), make(case, controller=FixedController())
    source.train(case.batches(*SIZES))
    adapted = source.optimizer.max_grad_norm
    source.optimizer.max_grad_norm = 0.7
    assert adapted != 0.7

    target.optimizer.load_state_dict(source.optimizer.state_dict())

    assert_clips_and_noises_at(target, 0.7)


@both_ways
def test_a_clip_scheduler_reaches_the_object_that_clips(case):
    run = make(case, controller=FixedController(), max_grad_norm=2.0)
    schedule = StepGradClip(run.optimizer, step_size=1, gamma=0.5)

    for clip_norm in (2.0, 1.0, 0.5):
        assert_clips_and_noises_at(run, clip_norm)
        schedule.step()


@both_ways
def test_an_adapted_threshold_reaches_the_object_that_clips(case):
    run = make(case)

    for batch in case.batches(*SIZES):
        run.step(batch)
        assert run.handle.max_grad_norm == run.optimizer.max_grad_norm
    assert len(set(run.thresholds)) == len(SIZES)


def again(run: Training, max_grad_norm: float, **kwargs: Any) -> Training:
    """Call ``make_private`` on what an earlier call returned."""
    return make_private(
        run.case,
        model=run.model,
        engine=run.engine,
        optimizer=run.optimizer,
        data_loader=run.loader,
        criterion=nn.CrossEntropyLoss(),
        clipping="slaclip",
        noise_multiplier=0.3,
        max_grad_norm=max_grad_norm,
        noise_generator=run.noise,
        **kwargs,
    )


@both_ways
@pytest.mark.parametrize("clip_norm", [0.1, 0.9])
def test_a_second_make_private_with_another_threshold_reaches_the_object_that_clips(
    case, clip_norm
):
    run = make(case)
    run.train(case.batches(*SIZES))
    if not case.is_wrapped:
        run.handle.cleanup()

    second = again(run, clip_norm, controller=FixedController())

    assert (second.handle is run.handle) == case.is_wrapped
    assert_clips_and_noises_at(second, clip_norm)


@both_ways
def test_a_second_make_private_with_the_first_threshold_goes_on_at_the_adapted_one(case):
    run = make(case)
    run.train(case.batches(*SIZES))
    adapted = run.optimizer.max_grad_norm
    if not case.is_wrapped:
        run.handle.cleanup()

    second = again(run, case.clip_norm, controller=FixedController())

    assert adapted != case.clip_norm
    assert_clips_and_noises_at(second, adapted)


def test_after_a_second_make_private_the_first_optimizer_takes_no_step():
    run = make(WRAPPED)
    run.train(WRAPPED.batches(4))
    second = again(run, 0.5)
    (batch,) = WRAPPED.batches(6)

    second.optimizer.zero_grad()
    second.backward(batch)
    with nothing_released(run), pytest.raises(RuntimeError, match="needs a fresh backward pass"):
        run.optimizer.step()


@both_ways
def test_the_threshold_of_the_module_cannot_be_set(case):
    run = make(case)

    with pytest.raises(AttributeError, match=r"Set optimizer.max_grad_norm instead"):
        run.handle.max_grad_norm = 0.5

    assert run.optimizer.max_grad_norm == run.handle.max_grad_norm == case.clip_norm
    run.handle.max_grad_norm = case.clip_norm  # Opacus's own code may assign what holds already


@both_ways
def test_the_threshold_cannot_change_between_backward_and_step(case):
    run, twin = make(case), make(case)
    (batch,) = case.batches(6)
    for one in (run, twin):
        one.optimizer.zero_grad()
        one.backward(batch)

    with pytest.raises(RuntimeError, match=r"must stay 1.7 until the logical batch"):
        run.optimizer.max_grad_norm = 0.5

    for one in (run, twin):
        one.optimizer.step()
    assert same(run.parameters, twin.parameters)
    run.optimizer.max_grad_norm = 0.5
    assert run.handle.max_grad_norm == 0.5


def test_the_threshold_cannot_change_inside_a_logical_batch_but_after_it_was_dropped():
    run = make(WRAPPED)
    run.optimizer.signal_skip_step(do_skip=True)
    run.step(WRAPPED.batches(6)[0])
    run.optimizer.zero_grad()

    with pytest.raises(RuntimeError, match=r"must stay 1.7 until the logical batch"):
        run.optimizer.max_grad_norm = 0.5

    run.optimizer.drop_logical_batch()
    run.optimizer.max_grad_norm = 0.5
    assert run.handle.max_grad_norm == 0.5


@both_ways
def test_a_module_that_clips_at_another_threshold_stops_the_step(case, monkeypatch):
    run, twin = make(case), make(case)
    (batch,) = case.batches(6)
    run.optimizer.zero_grad()
    with monkeypatch.context() as patch:
        patch.setattr(type(run.handle), "max_grad_norm", property(lambda self: 3.5))
        run.backward(batch)

    message = "clipped at 3.5, but the noise would be scaled for 1.7"
    with nothing_released(run), pytest.raises(RuntimeError, match=message):
        run.optimizer.step()

    assert_goes_on(run, twin)


@both_ways
def test_a_threshold_changed_behind_the_optimizer_s_back_stops_the_step(case):
    run = make(case)
    run.optimizer.zero_grad()
    run.backward(case.batches(6)[0])
    run.optimizer._state.clip_norm = 0.5  # nothing public can do this

    message = "clipped at 1.7, but the noise would be scaled for 0.5"
    with nothing_released(run), pytest.raises(RuntimeError, match=message):
        run.optimizer.step()


# --- rule 2: the loss, and what counts once ---

Losses = Callable[[Any, Any], Any]
FORMS: dict[str, Losses] = {
    "times": lambda a, b: a * 3,
    "times-from-left": lambda a, b: 0.25 * a,
    "divided": lambda a, b: a / 3,
    "negative": lambda a, b: -a,
    "plus-number": lambda a, b: a + 1,
    "number-plus": lambda a, b: 1.0 + a,
    "minus-number": lambda a, b: a - 1,
    "number-minus": lambda a, b: 1.0 - a,
    "plus-constant": lambda a, b: a + torch.tensor(2.0),
    "plus": operator.add,
    "minus": operator.sub,
    "sum": lambda a, b: sum([a, b]),
    "weighted": lambda a, b: 0.3 * a + b * 0.7,
    "nested": lambda a, b: (2 * (a + b) - a) / 4,
}


@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_arithmetic_on_losses_keeps_adapting_as_in_hooks_mode(form, loss_reduction):
    ghost, hooks = (
        make(
            Case(mode, "mlp"),
            criterion=nn.CrossEntropyLoss(reduction=loss_reduction),
            loss_reduction=loss_reduction,
        )
        for mode in ("ghost", "hooks")
    )

    for run in (ghost, hooks):
        for x, y in WRAPPED.batches(*SIZES):
            run.optimizer.zero_grad()
            output = run.model(x)
            one, other = run.criterion(output, y), run.criterion(output, (y + 1) % NUM_CLASSES)
            form(one, other).backward()
            run.thresholds.append(run.optimizer.max_grad_norm)
            run.optimizer.step()

    assert len(set(ghost.thresholds)) == len(SIZES)
    assert ghost.history == hooks.history
    # Two float32 roads to the same norms and sums, over five steps.
    assert ghost.thresholds == pytest.approx(hooks.thresholds, rel=64 * EPS)
    for mine, theirs in zip(ghost.parameters, hooks.parameters, strict=True):
        assert (mine - theirs).abs().max() <= 64 * EPS * theirs.abs().max()


@both_ways
def test_of_two_backward_passes_before_a_step_the_last_counts_once(case):
    run, twin = make(case), make(case)
    first, second = case.batches(5, 8)

    for one, data in ((run, [first, second]), (twin, [second])):
        one.optimizer.zero_grad()
        for batch in data:
            one.backward(batch)
        one.optimizer.step()

    assert same(run.parameters, twin.parameters)
    assert torch.equal(run.optimizer.slack_indicator.values, twin.optimizer.slack_indicator.values)
    assert run.history == twin.history == [(0.3, 0.25, 1)]
    assert_goes_on(run, twin)


def test_without_poisson_sampling_two_backward_passes_count_once_as_well():
    run, twin = make(WRAPPED, poisson_sampling=False), make(WRAPPED, poisson_sampling=False)
    first, second = WRAPPED.batches(5, 8)

    for one, data in ((run, [first, second]), (twin, [second])):
        one.optimizer.zero_grad()
        for batch in data:
            one.backward(batch)
        one.optimizer.step()

    assert same(run.parameters, twin.parameters)
    assert run.optimizer.max_grad_norm == twin.optimizer.max_grad_norm
    assert run.history == [(0.3, 0.25, 1)]


def test_a_second_backward_pass_inside_a_logical_batch_replaces_its_own_piece_alone():
    run, twin = make(WRAPPED), make(WRAPPED)
    first, wrong, second = WRAPPED.batches(5, 8, 6)

    for one, last in ((run, [wrong, second]), (twin, [second])):
        one.optimizer.signal_skip_step(do_skip=True)
        one.step(first)
        one.optimizer.zero_grad()
        for batch in last:
            one.backward(batch)
        one.optimizer.step()

    assert same(run.parameters, twin.parameters)
    assert run.optimizer.max_grad_norm == twin.optimizer.max_grad_norm


def regression(mode: str, width: int, loss_reduction: str = "mean") -> Training:
    """A linear model with several outputs under nn.MSELoss, whose losses are (B, width)."""
    torch.manual_seed(0)
    model = nn.Linear(6, width)
    x, _ = samples("mlp", NUM_SAMPLES)
    return make_private(
        Case(mode, "mlp"),
        model=model,
        engine=PrivacyEngine(accountant="rdp"),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x, x[:, :width]), batch_size=BATCH_SIZE),
        criterion=nn.MSELoss(reduction=loss_reduction),
        loss_reduction=loss_reduction,
        clipping="slaclip",
        noise_multiplier=0.0,
        max_grad_norm=0.5,
        noise_generator=seeded(0),
    )


@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
@pytest.mark.parametrize("width", [1, 2])
def test_losses_with_more_dimensions_are_clipped_as_in_hooks_mode(width, loss_reduction):
    """Factors of shape (B,) must not broadcast against losses of shape (B, width)."""
    ghost, hooks = (regression(mode, width, loss_reduction) for mode in ("ghost", "hooks"))

    for x, _ in WRAPPED.batches(8, 5, 1):
        for run in (ghost, hooks):
            run.step((10 * x, x[:, :width]))
            assert run.summed_norm() <= len(x) * run.thresholds[-1] * (1 + 8 * EPS)

    for mine, theirs in zip(ghost.parameters, hooks.parameters, strict=True):
        assert (mine - theirs).abs().max() <= 64 * EPS * theirs.abs().max()
    assert ghost.thresholds == pytest.approx(hooks.thresholds, rel=64 * EPS)
    assert ghost.optimizer.num_releases == 3


class Averaging(nn.Module):
    """A criterion that gives one number, whatever reduction is asked for."""

    reduction = "mean"

    def forward(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, y)


@pytest.mark.parametrize("size", [1, 6])
def test_one_loss_for_the_whole_batch_is_refused(size):
    run, twin = make(WRAPPED, criterion=Averaging()), make(WRAPPED)

    message = "one entry a sample in ghost mode, got a single number. Use a criterion that honours"
    with nothing_released(run), pytest.raises(ValueError, match=message):
        run.step(WRAPPED.batches(size)[0])
    with nothing_released(run), pytest.raises(RuntimeError, match="fresh backward pass"):
        run.optimizer.step()

    run.criterion.criterion = nn.CrossEntropyLoss()
    assert_goes_on(run, twin)


class OnTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def of_model(model: nn.Module, *, clip_norm: float = 0.5, task: str = "mlp") -> Training:
    """Make a model for ghost clipping, at noise 0 so that sums can be seen."""
    return make_private(
        Case("ghost", task),
        model=model,
        engine=PrivacyEngine(accountant="rdp"),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(*samples(task, NUM_SAMPLES)), batch_size=BATCH_SIZE),
        criterion=nn.CrossEntropyLoss(),
        clipping="slaclip",
        noise_multiplier=0.0,
        max_grad_norm=clip_norm,
        noise_generator=seeded(0),
    )


@pytest.mark.parametrize("size", [1, 4])
def test_a_loss_a_token_is_refused_for_a_batch_of_sequences(size):
    """Opacus wants ``shape=``, without which one sequence of T tokens counts T times C."""
    run = of_model(OnTokens(), task="attention")
    x, _ = samples("attention", size)
    y = torch.zeros(size, 3, dtype=torch.long)
    output = run.model(10 * x)
    run.optimizer.zero_grad()

    message = "one entry a sample in ghost mode, got another number. For tokens"
    with nothing_released(run), pytest.raises(ValueError, match=message):
        backward_and_step(run, lambda: run.criterion(output.flatten(0, 1), y.flatten()))

    output = run.model(10 * x)
    run.criterion(output.flatten(0, 1), y.flatten(), shape=output.shape).backward()
    run.optimizer.step()
    assert run.summed_norm() <= size * 0.5 * (1 + 8 * EPS)
    assert run.optimizer.num_releases == 1


COUPLED: dict[str, Callable[[Any, Training, torch.Tensor], Any]] = {
    "weight-penalty": lambda loss, run, output: (
        loss + 10 * sum(p.square().sum() for p in run.model.parameters())
    ),
    "penalty-on-the-batch": lambda loss, run, output: loss + output.square().mean(),
    "from-the-left": lambda loss, run, output: output.square().mean() + loss,
    "minus": lambda loss, run, output: loss - output.square().mean(),
    "times-a-trained-number": lambda loss, run, output: loss * output.mean(),
}


@pytest.mark.parametrize("couple", COUPLED.values(), ids=COUPLED)
def test_a_term_that_no_sample_owns_cannot_be_added_to_the_loss(couple):
    """It would enter the sum once a sample, scaled by that sample's factor, outside its norm."""
    run = make(WRAPPED)
    x, y = WRAPPED.batches(6)[0]
    run.optimizer.zero_grad()
    output = run.model(x)
    loss = run.criterion(output, y)

    message = r"Only losses of the criterion and constants .* Use the optimizer's weight decay, or"
    with nothing_released(run), pytest.raises(ValueError, match=message):
        backward_and_step(run, lambda: couple(loss, run, output))


# --- rule 2: no step without a fresh backward pass ---

BEFORE: dict[str, Callable[[Training], None]] = {
    "at-first": lambda run: None,
    "after-zero_grad": lambda run: run.optimizer.zero_grad(),
    "after-a-step": lambda run: run.train(run.case.batches(5)),
    "after-a-step-and-zero_grad": lambda run: (
        run.train(run.case.batches(5)),
        run.optimizer.zero_grad(),
    ),
    "after-clearing-a-backward-pass": lambda run: (
        run.optimizer.zero_grad(),
        run.backward(run.case.batches(5)[0]),
        run.optimizer.zero_grad(),
    ),
    "after-clearing-it-to-none": lambda run: (
        run.optimizer.zero_grad(),
        run.backward(run.case.batches(5)[0]),
        run.optimizer.zero_grad(set_to_none=True),
    ),
    "after-loading": lambda run: (
        run.optimizer.zero_grad(),
        run.backward(run.case.batches(5)[0]),
        run.optimizer.load_state_dict(run.optimizer.state_dict()),
    ),
}


@both_ways
@pytest.mark.parametrize("prepare", BEFORE.values(), ids=BEFORE)
def test_a_step_without_a_backward_pass_raises_and_releases_nothing(case, prepare):
    run, twin = make(case), make(case)
    for one in (run, twin):
        prepare(one)

    for _ in range(2):
        with nothing_released(run), pytest.raises(RuntimeError, match="fresh backward pass"):
            run.optimizer.step()

    assert_goes_on(run, twin)


def test_a_step_without_a_backward_pass_inside_a_logical_batch_keeps_its_sums():
    run, twin = make(WRAPPED), make(WRAPPED)
    first, second = WRAPPED.batches(5, 6)
    for one in (run, twin):
        one.optimizer.signal_skip_step(do_skip=True)
        one.step(first)

    with nothing_released(run), pytest.raises(RuntimeError, match="fresh backward pass"):
        run.optimizer.step()

    for one in (run, twin):
        one.step(second)
    assert same(run.parameters, twin.parameters)
    assert run.optimizer.max_grad_norm == twin.optimizer.max_grad_norm
    assert run.history == [(0.3, 0.25, 1)]


@both_ways
@pytest.mark.parametrize("torch_optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_the_initializing_step_of_a_distributed_checkpoint_passes_silently(case, torch_optimizer):
    """Every learning rate 0 and every gradient 0: torch's only step without a backward pass."""
    run = make(case, torch_optimizer=lambda model: torch_optimizer(model.parameters(), lr=0.1))
    piece, rest = case.batches(5, 6)
    run.optimizer.signal_skip_step(do_skip=True)
    run.step(piece)
    run.optimizer.zero_grad()
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0

    with nothing_released(run):
        run.optimizer.step()

    run.step(rest)  # its learning rate is 0 still, but its gradient is fresh
    twin = make(case)
    twin.optimizer.signal_skip_step(do_skip=True)
    twin.step(piece)
    twin.step(rest)
    assert run.optimizer.num_releases == 1
    assert torch.equal(run.optimizer.slack_indicator.values, twin.optimizer.slack_indicator.values)
    assert run.optimizer.max_grad_norm == twin.optimizer.max_grad_norm


NOT_INITIAL: dict[str, Callable[[Training], None]] = {
    "a-learning-rate": lambda run: run.optimizer.param_groups[-1].update(lr=0.1),
    "a-gradient": lambda run: run.optimizer.params[-1].grad.fill_(1e-30),
    "no-gradient": lambda run: run.optimizer.zero_grad(set_to_none=True),
}


@pytest.mark.parametrize("spoil", NOT_INITIAL.values(), ids=NOT_INITIAL)
def test_a_step_much_like_the_initializing_one_raises(spoil):
    run = make(CASES["ghost-groups"])
    run.train(WRAPPED.batches(5))
    run.optimizer.zero_grad()
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    spoil(run)

    with nothing_released(run), pytest.raises(RuntimeError, match="fresh backward pass"):
        run.optimizer.step()


TOUCHED: dict[str, Callable[[Training], None]] = {
    "clipped-again": lambda run: nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3),
    "set-to-none": lambda run: run.model.zero_grad(set_to_none=True),
    "zeroed": lambda run: run.model.zero_grad(set_to_none=False),
    "replaced": lambda run: setattr(
        run.optimizer.params[0], "grad", torch.ones_like(run.optimizer.params[0])
    ),
    "one-set-to-none": lambda run: setattr(run.optimizer.params[-1], "grad", None),
    "scaled-behind-autograd": lambda run: run.optimizer.params[-1].grad.data.mul_(100),
    "one-entry-behind-autograd": lambda run: run.optimizer.params[0].grad.data.view(-1)[:1].add_(1),
    "added-to-by-a-plain-loss": lambda run: plain_backward(run),
}


def plain_backward(run: Training) -> None:
    x, y = run.case.batches(1, seed=50)[0]
    nn.functional.cross_entropy(run.model(1000 * x), y).backward()


@both_ways
@pytest.mark.parametrize("touch", TOUCHED.values(), ids=TOUCHED)
def test_a_gradient_touched_between_backward_and_step_is_not_released(case, touch):
    run, twin = make(case), make(case)
    run.optimizer.zero_grad()
    run.backward(case.batches(6)[0])
    touch(run)

    with (
        nothing_released(run),
        pytest.raises(RuntimeError, match=r"gradient was changed between backward\(\) and step"),
    ):
        run.optimizer.step()

    assert_goes_on(run, twin)


@both_ways
@pytest.mark.parametrize("end", ["step", "zero_grad", "refused step"])
def test_what_tells_a_touched_gradient_is_forgotten_with_the_norms(case, end):
    """It is made of the sum before noise, so it must not outlive its step."""
    run = make(case)
    run.optimizer.zero_grad()
    run.backward(case.batches(6)[0])
    state = run.optimizer._state
    assert state.grad_checksums is not None
    if end == "refused step":
        run.optimizer.params[0].grad.data.mul_(2)
        with pytest.raises(RuntimeError, match="gradient was changed"):
            run.optimizer.step()
    else:
        getattr(run.optimizer, end)()
    assert state.fresh_norms is None
    assert state.grad_checksums is None


@both_ways
def test_the_backward_pass_of_a_plain_loss_is_not_released(case):
    run, twin = make(case), make(case)
    run.optimizer.zero_grad()
    plain_backward(run)

    with nothing_released(run), pytest.raises(RuntimeError, match="what the criterion returned"):
        run.optimizer.step()

    assert_goes_on(run, twin)


# --- rule 3: the norms cover what is summed ---

CHANGED: dict[str, tuple[str, bool]] = {
    "frozen": ("mlp", False),
    "unfrozen": ("frozen", True),
}


@pytest.mark.parametrize("is_wrapped", [True, False], ids=["wrapped", "bare"])
@pytest.mark.parametrize(("task", "to"), CHANGED.values(), ids=CHANGED)
def test_freezing_and_unfreezing_after_make_private_is_refused_until_undone(task, to, is_wrapped):
    case = Case("ghost", task, is_wrapped=is_wrapped)
    run, twin = make(case), make(case)
    for one in (run, twin):
        one.train(case.batches(5))
    changed = next(iter(run.model.parameters()))
    changed.requires_grad_(to)
    run.optimizer.zero_grad()

    message = r"requires_grad changed for \['0.weight'\]. Undo that, or unwrap the module"
    with nothing_released(run), pytest.raises(ValueError, match=message):
        run.backward(case.batches(6)[0])
    with nothing_released(run), pytest.raises(RuntimeError, match="fresh backward pass"):
        run.optimizer.step()

    changed.requires_grad_(not to)
    assert_goes_on(run, twin)


@pytest.mark.parametrize("moment", ["before-backward", "before-step"])
def test_freezing_inside_a_step_releases_nothing(moment):
    run = make(WRAPPED)
    x, y = WRAPPED.batches(6)[0]
    run.optimizer.zero_grad()
    loss = run.criterion(run.model(x), y)
    first = next(iter(run.model.parameters()))

    def step() -> None:
        if moment == "before-step":
            loss.backward()
        first.requires_grad_(False)
        if moment == "before-backward":
            loss.backward()
        run.optimizer.step()

    message = r"(requires_grad changed|gradient was changed)"
    with nothing_released(run), pytest.raises((ValueError, RuntimeError), match=message):
        step()


class Optional(nn.Module):
    """A layer that a forward pass may leave out or use twice."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(6, NUM_CLASSES)
        self.times = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = self.layer(x).tanh()
        return self.head(x)


@pytest.mark.parametrize(
    "build",
    [lambda: nn.Linear(6, 6), lambda: nn.LayerNorm(6)],
    ids=["ghost-norm", "built-gradient"],
)
def test_a_layer_left_out_of_a_forward_pass_is_refused(build):
    torch.manual_seed(0)
    run = of_model(Optional(build()))
    batch = samples("mlp", 6)
    run.step(batch)  # which leaves norms of its own behind, unless they are dropped
    run.model._module.times = 0
    run.optimizer.zero_grad()

    message = r"must take part in the backward pass in ghost mode, but \['layer.weight', 'layer.b"
    with nothing_released(run), pytest.raises(ValueError, match=message):
        run.backward(batch)
    with nothing_released(run), pytest.raises(RuntimeError, match="fresh backward pass"):
        run.optimizer.step()

    run.model._module.times = 1
    run.step(batch)
    assert run.optimizer.num_releases == 2


def test_a_linear_layer_used_twice_in_a_forward_pass_is_refused():
    run = of_model(Optional(nn.Linear(6, 6)))
    run.model._module.times = 2
    run.optimizer.zero_grad()

    with (
        nothing_released(run),
        pytest.raises(NotImplementedError, match="Parameter tying is not supported with Ghost"),
    ):
        run.backward(samples("mlp", 6))
    with nothing_released(run), pytest.raises(RuntimeError, match="fresh backward pass"):
        run.optimizer.step()


def test_a_layer_whose_gradient_is_built_may_be_used_twice():
    torch.manual_seed(0)
    model = Optional(nn.LayerNorm(6))
    model.times = 2
    run = of_model(model)

    for i in range(8):
        x, y = samples("mlp", 8)
        run.step((100 * x[i : i + 1], y[i : i + 1]))
        assert run.summed_norm() <= run.thresholds[-1] * (1 + 16 * EPS)
    assert run.optimizer.num_releases == 8


class BorrowsWeight(nn.Module):
    """Uses the weight of a linear layer once more, outside that layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.layer(x).tanh() * 100, self.layer.weight)


def test_a_weight_that_is_also_used_outside_its_layer_is_refused():
    """Its second use is summed by the second backward pass but is in no layer's norm."""
    torch.manual_seed(0)
    run = of_model(BorrowsWeight())
    run.optimizer.zero_grad()

    message = (
        r"only by the layer that owns them in ghost mode, but \['layer.weight'\] are used else"
    )
    with nothing_released(run), pytest.raises(ValueError, match=message):
        run.step(samples("mlp", 1))


def test_rows_that_were_frozen_before_make_private_stay_out_of_norm_and_sum():
    torch.manual_seed(0)
    run = make(CASES["ghost-lora"], noise_multiplier=0.0, max_grad_norm=0.2)
    x, y = CASES["ghost-lora"].batches(1)[0]

    run.step((10 * x, y))

    assert run.summed_norm() == pytest.approx(0.2, rel=1e-5)  # the whole threshold, no less
    assert all(p.grad is None for p in run.model.parameters() if not p.requires_grad)


# --- rule 5: norms that are not finite ---

BAD = {"nan": math.nan, "inf": math.inf, "overflow": 1e30}
bad_values = pytest.mark.parametrize("bad", BAD.values(), ids=BAD)


def spoiled(batch: Batch, bad: float) -> Batch:
    x, y = batch
    x = x.clone()
    x[1] = bad
    return x, y


def linear_case(is_wrapped: bool = True) -> Case:
    """A linear model, whose gradient grows with its input instead of saturating."""
    return Case("ghost", "linear", is_wrapped=is_wrapped)


@bad_values
@pytest.mark.parametrize("is_wrapped", [True, False], ids=["wrapped", "bare"])
def test_a_norm_that_is_not_finite_stops_the_step_and_the_next_one_trains_on(is_wrapped, bad):
    case = linear_case(is_wrapped)
    run, twin = make(case), make(case)
    for one in (run, twin):
        one.train(case.batches(5, 6))

    for _ in range(2):
        with nothing_released(run), pytest.raises(FloatingPointError, match="batch was dropped"):
            run.step(spoiled(case.batches(7)[0], bad))
        assert all(p.summed_grad is None and p.grad is None for p in run.optimizer.params)
        with nothing_released(run), pytest.raises(RuntimeError, match="fresh backward pass"):
            run.optimizer.step()

    del run.thresholds[2:]
    assert_goes_on(run, twin)


@pytest.mark.parametrize("name", ["ghost-cnn", "ghost-lora", "ghost-mlp-double", "ghost-groups"])
def test_a_norm_that_is_not_a_number_stops_every_model(name):
    case = CASES[name]
    run, twin = make(case), make(case)

    with (
        nothing_released(run),
        pytest.raises(FloatingPointError, match=r"spoils the whole sum in ghost mode"),
    ):
        run.step(spoiled(case.batches(7)[0], math.nan))

    assert_goes_on(run, twin)


def test_the_error_of_a_bad_norm_gives_no_number_away():
    run = make(linear_case())

    with pytest.raises(FloatingPointError) as caught:
        run.step(spoiled(linear_case().batches(7)[0], math.nan))

    assert "not to be published" in str(caught.value)
    assert not any(character.isdigit() for character in str(caught.value))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_bad_piece_drops_its_whole_logical_batch_and_no_other(place):
    case = linear_case()
    run, twin = make(case), make(case)
    pieces = case.batches(4, 4, 4)
    pieces[place] = spoiled(pieces[place], math.nan)
    for one in (run, twin):
        one.train(case.batches(5))

    with nothing_released(run):
        for piece in pieces[:-1]:
            run.optimizer.signal_skip_step(do_skip=True)
            run.step(piece)
        with pytest.raises(FloatingPointError, match="nothing was released"):
            run.step(pieces[-1])

    assert_goes_on(run, twin)


def loader_case(place: int, bad: float = math.nan, num_workers: int = 0) -> Training:
    """A run whose data set has one bad sample."""
    case = linear_case()
    torch.manual_seed(0)
    model = case.build()
    x, y = samples("linear", NUM_SAMPLES)
    x[place] = bad
    return make_private(
        case,
        model=model,
        engine=PrivacyEngine(accountant="rdp"),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(
            TensorDataset(torch.cat([x, torch.arange(NUM_SAMPLES).unsqueeze(1)], 1), y),
            batch_size=BATCH_SIZE,
            generator=seeded(2),
            num_workers=num_workers,
        ),
        criterion=nn.CrossEntropyLoss(),
        clipping="slaclip",
        noise_multiplier=0.3,
        max_grad_norm=case.clip_norm,
        noise_generator=seeded(3),
    )


def train_in_pieces(run: Training) -> None:
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=3, optimizer=run.optimizer
    ) as loader:
        for x, y in loader:
            run.step((x[:, :-1], y))


def train_through_errors(run: Training, epochs: int = 1) -> tuple[list[list[int]], int]:
    """Train in pieces of 3, going on after errors; return the samples of each release."""
    releases: list[list[int]] = []
    since: list[int] = []
    errors = 0
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=3, optimizer=run.optimizer
    ) as loader:
        for _ in range(epochs):
            for x, y in loader:
                since += x[:, -1].long().tolist()
                before = run.optimizer.num_releases
                try:
                    run.step((x[:, :-1], y))
                except FloatingPointError:
                    errors += 1
                    since = []
                if run.optimizer.num_releases > before:
                    releases.append(since)
                    since = []
    return releases, errors


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loop_of_virtual_batches_goes_on_after_a_bad_one_and_takes_no_sample_twice(num_workers):
    drawn = [
        x[:, -1].long().tolist() for x, _ in loader_case(0, bad=0.0, num_workers=num_workers).loader
    ]
    place = next(i for i in drawn[1] if i not in drawn[0])
    is_bad = [place in batch for batch in drawn]
    run = loader_case(place, num_workers=num_workers)

    releases, errors = train_through_errors(run)

    assert is_bad[:2] == [False, True]
    assert errors == sum(is_bad)
    assert releases == [batch for batch, bad in zip(drawn, is_bad, strict=True) if not bad]
    assert run.history == [(0.3, 0.25, len(releases))]
    assert all(p.isfinite().all() for p in run.parameters)


def test_a_dropped_batch_is_not_taken_for_an_unaccounted_one():
    run = loader_case(0)

    releases, errors = train_through_errors(run, epochs=3)  # each pass looks back at the last

    assert errors > 0
    assert run.history == [(0.3, 0.25, len(releases))]


def test_a_loop_left_at_a_bad_batch_can_be_started_again():
    drawn = [x[:, -1].long().tolist() for x, _ in loader_case(0, bad=0.0).loader]
    place = next(i for i in drawn[1] if i not in drawn[0])
    run = loader_case(place)

    with pytest.raises(FloatingPointError, match="nothing was released"):
        train_in_pieces(run)
    assert run.optimizer.num_releases == 1
    releases, errors = train_through_errors(run)

    assert len(releases) + errors == len(run.loader)
    assert run.optimizer.num_releases == 1 + len(releases)
    assert all(len(set(batch)) == len(batch) for batch in releases)
    assert not any(place in batch for batch in releases)


# --- failures inside backward() ---


class Failing(torch.autograd.Function):
    """Passes its input on; fails in the given backward pass."""

    passes_left = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        Failing.passes_left -= 1
        if Failing.passes_left == 0:
            raise MemoryError("out of memory, say")
        return grad.clone()


class MayFail(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 8)
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Failing.apply(self.first(x).tanh())
        return self.head(self.second(x).tanh())


@pytest.fixture
def failing_model():
    Failing.passes_left = 0
    yield functools.partial(make, Case("ghost", "mlp", model=MayFail))
    Failing.passes_left = 0


@pytest.mark.parametrize("failing_pass", [1, 2])
def test_after_a_failure_inside_backward_nothing_is_released_and_the_hooks_are_on(
    failing_model, failing_pass
):
    run = failing_model()
    run.train(WRAPPED.batches(5))
    Failing.passes_left = failing_pass
    run.optimizer.zero_grad()

    with nothing_released(run), pytest.raises(MemoryError, match="out of memory"):
        run.backward(WRAPPED.batches(6)[0])

    assert run.handle.hooks_enabled
    with (
        nothing_released(run),
        pytest.raises(RuntimeError, match=r"(fresh backward pass|gradient was changed)"),
    ):
        run.optimizer.step()


@pytest.mark.parametrize("failing_pass", [1, 2])
def test_a_failure_inside_backward_after_a_good_one_releases_neither(failing_model, failing_pass):
    """The failed pass has added raw gradients to the clipped sum."""
    run = failing_model()
    run.optimizer.zero_grad()
    run.backward(WRAPPED.batches(5)[0])
    Failing.passes_left = failing_pass

    with pytest.raises(MemoryError, match="out of memory"):
        run.backward(WRAPPED.batches(6)[0])

    with (
        nothing_released(run),
        pytest.raises(RuntimeError, match=r"(fresh backward pass|gradient was changed)"),
    ):
        run.optimizer.step()


@pytest.mark.parametrize("failing_pass", [1, 2])
def test_training_goes_on_after_a_failure_inside_backward(failing_model, failing_pass):
    run, twin = failing_model(), failing_model()
    for one in (run, twin):
        one.train(WRAPPED.batches(5))
    Failing.passes_left = failing_pass

    with pytest.raises(MemoryError, match="out of memory"):
        run.step(WRAPPED.batches(6)[0])

    assert_goes_on(run, twin)


# --- what is private does not stay behind ---


@pytest.mark.parametrize("name", ["ghost-mlp", "ghost-mlp-bare", "ghost-cnn", "ghost-attention"])
def test_no_norm_stays_on_the_module_or_its_parameters(name):
    run = make(CASES[name])

    for moment in ("backward", "step", "zero_grad"):
        if moment == "backward":
            run.backward(CASES[name].batches(6)[0])
        else:
            getattr(run.optimizer, moment)()
        assert not any(hasattr(p, "_norm_sample") for p in run.model.parameters()), moment
        with pytest.raises(AttributeError, match="per_sample_gradient_norms"):
            _ = run.handle.per_sample_gradient_norms


def test_no_norm_stays_behind_a_refused_backward_pass():
    run = of_model(Optional(nn.Linear(6, 6)))
    run.model._module.times = 0

    with pytest.raises(ValueError, match="must take part"):
        run.backward(samples("mlp", 6))

    assert not any(hasattr(p, "_norm_sample") for p in run.model.parameters())
