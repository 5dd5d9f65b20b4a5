"""One contract for every way to train: each test holds for each case of the table."""

from __future__ import annotations

import copy
import functools
import gc
import io
import math
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import opacus
import pytest
import torch
from cases import (
    BATCH_SIZE,
    CASES,
    NUM_SAMPLES,
    Case,
    Training,
    fixed,
    flat,
    make,
    make_private,
    term_lengths,
    true_norms,
)
from helpers import Batch, Integrating, batches, seeded
from opacus.schedulers import ExponentialGradClip, ExponentialNoise, LambdaGradClip, LambdaNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from scipy import stats
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR

from opacus_slaclip import FixedController, PrivacyEngine

SIZES = (5, 9, 3, 8, 6)

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def some_cases(*names: str) -> Any:
    return pytest.mark.parametrize("case", [CASES[name] for name in names], ids=names)


def cases_where(condition: Callable[[Case], bool]) -> Any:
    return some_cases(*(name for name, case in CASES.items() if condition(case)))


# One or two of each mode, wrapped and not.
one_case_a_mode = some_cases(
    "hooks-mlp",
    "hooks-mlp-bare",
    "functorch-mlp-bare",
    "ew-mlp",
    "no_op-mlp",
    "no_op-groups-bare",
    "ghost-mlp",
    "ghost-mlp-bare",
)
# Where a threshold has more than one copy that a change must reach.
hooks_and_ghost = some_cases("hooks-mlp", "ghost-mlp", "ghost-mlp-bare", "ghost-groups")


def same(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def assert_close(
    ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], factor: float
) -> None:
    """Allow ``factor`` rounding errors of the largest entry of each tensor."""
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= factor * torch.finfo(b.dtype).eps * b.abs().max()


def test_the_table_has_every_mode_model_and_kind_of_parameters():
    axes = {(case.mode, case.is_wrapped) for case in CASES.values()}

    assert axes == {
        (mode, is_wrapped)
        for mode in ("hooks", "functorch", "ew", "no_op", "ghost")
        for is_wrapped in (True, False)
        if (mode, is_wrapped) != ("ew", False)  # which Opacus lacks, see below
    }
    for mode in ("hooks", "ghost"):
        tasks = {case.task for case in CASES.values() if case.mode == mode}
        assert tasks >= {"mlp", "cnn", "embedding", "lstm", "attention", "layernorm", "frozen"}


def test_the_table_has_clipped_and_unclipped_samples():
    for name, case in CASES.items():
        torch.manual_seed(0)
        norms = torch.cat([true_norms(case.build(), b) for b in case.batches(*SIZES)])

        assert 0 < (norms > case.clip_norm).sum() < len(norms), name


@pytest.mark.parametrize("engine", [opacus.PrivacyEngine, PrivacyEngine])
def test_expanded_weights_without_a_wrapper_are_missing_in_opacus_and_here(engine):
    clipping = "flat" if engine is opacus.PrivacyEngine else "slaclip"

    with pytest.raises(ValueError, match="Unexpected grad_sample_mode: ew"):
        make(
            Case("ew", "mlp", is_wrapped=False),
            engine=engine(accountant="rdp"),
            clipping=clipping,
        )


# --- rescaled to a unit norm: the same steps at another learning rate ---


@every_case
def test_rescaled_steps_are_the_plain_ones_at_the_learning_rate_times_the_threshold(case):
    """And at the weight decay over the threshold. Two divisions more, each by eps / 2."""
    lr, decay, num_steps = 0.1, 0.01, len(SIZES)
    clip_norm = 0.7 * case.clip_norm

    def descending(lr: float, decay: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
        def build(model: nn.Module) -> torch.optim.Optimizer:
            optimizer = case.torch_optimizer(model)
            for group in optimizer.param_groups:
                group |= {"lr": lr, "weight_decay": decay, "momentum": 0.9}
            return optimizer

        return build

    plain = fixed(case, torch_optimizer=descending(lr, decay), max_grad_norm=clip_norm)
    rescaled = fixed(
        case,
        torch_optimizer=descending(lr * clip_norm, decay / clip_norm),
        max_grad_norm=clip_norm,
        rescale_to_unit_norm=True,
    )
    for run in (plain, rescaled):
        for seed, batch in enumerate(case.batches(*SIZES)):
            run.step(batch, seed=seed)

    assert rescaled.history == plain.history
    # A step is rounded a dozen times; rounding errors of parameters feed back into later steps.
    factor = 100 * num_steps
    scale = max(p.abs().max() for p in plain.parameters)
    for a, b in zip(rescaled.parameters, plain.parameters, strict=True):
        assert (a - b).abs().max() <= factor * torch.finfo(case.dtype).eps * scale


@every_case
def test_a_rescaled_release_is_the_released_sum_over_the_threshold_it_was_clipped_at(case):
    run = make(case, rescale_to_unit_norm=True, noise_multiplier=0.0, num_slots=5)
    for batch in case.batches(*SIZES):
        clip_norm = run.optimizer.max_grad_norm
        run.step(batch)
        assert run.optimizer.max_grad_norm != clip_norm
        for p in run.optimizer.params:
            expected = p.summed_grad.double() / (BATCH_SIZE * clip_norm)
            error = (p.grad.double() - expected.view_as(p)).abs().max()
            assert error <= 2 * torch.finfo(case.dtype).eps * expected.abs().max()


@every_case
def test_a_rescaled_run_resumes_and_takes_virtual_batches_as_a_plain_one_does(case):
    def build() -> Training:
        return make(case, rescale_to_unit_norm=True, max_grad_norm="auto", num_slots=5)

    assert_resuming_is_the_straight_run(build, by_state_dict, 3)
    whole, pieces = (
        make(case, rescale_to_unit_norm=True, num_slots=6, noise_multiplier=0.0) for _ in range(2)
    )
    (x, y), *_ = case.batches(8)
    whole.step((x, y))
    for part, do_skip in ((slice(0, 3), True), (slice(3, 8), False)):
        pieces.optimizer.signal_skip_step(do_skip)
        pieces.step((x[part], y[part]))
    scale = max(p.abs().max() for p in whole.parameters)
    for a, b in zip(whole.parameters, pieces.parameters, strict=True):
        assert (a - b).abs().max() <= 64 * torch.finfo(case.dtype).eps * scale
    assert whole.history == pieces.history


# --- a fixed threshold: the steps and the accounting of flat clipping ---


@cases_where(lambda case: not case.is_bounded)
def test_a_fixed_threshold_takes_the_steps_of_flat_clipping(case):
    ours, theirs = fixed(case), flat(case)
    start = theirs.parameters
    assert same(ours.parameters, start)

    for run in (ours, theirs):
        for seed, batch in enumerate(case.batches(*SIZES)):
            run.step(batch, seed=seed)

    assert same(ours.parameters, theirs.parameters)
    assert not same(theirs.parameters, start), "nothing was trained"
    assert ours.optimizer.num_releases == len(SIZES)


@cases_where(lambda case: case.is_bounded)
def test_bounded_norms_take_the_steps_of_flat_clipping_up_to_their_rounding(case):
    ours, theirs = fixed(case), flat(case)
    eps, num_tokens, num_entries = torch.finfo(case.dtype).eps, 4, 8

    for seed, batch in enumerate(case.batches(*SIZES)):
        torch.manual_seed(0)
        plain = case.build()
        with torch.no_grad():
            for p, q, r in zip(
                ours.model.parameters(),
                theirs.model.parameters(),
                plain.parameters(),
                strict=True,
            ):
                p.copy_(q)
                r.copy_(q)
        # How many times longer the terms are than the gradient they sum to, S / n: a few.
        ratio = (term_lengths(plain, batch) / true_norms(plain, batch)).max().item()
        for run in (ours, theirs):
            run.step(batch, seed=seed)

        # Our norm is at most 2 T eps S above the true one, and the Gram matrices of Opacus, sums
        # of (T^2 + d) terms of size S^2, miss n^2 by that many eps S^2. Each sample of length C
        # is scaled by as much less, in a mean over B and times the learning rate .1.
        relative = (2 * num_tokens * ratio + (num_tokens**2 + num_entries) * ratio**2) * eps
        tolerance = 0.1 * len(batch[1]) / BATCH_SIZE * case.clip_norm * relative
        for a, b in zip(ours.parameters, theirs.parameters, strict=True):
            assert (a - b).abs().max() <= tolerance + eps * b.abs().max()
        assert ratio < 4
    assert ours.optimizer.num_releases == len(SIZES)


@every_case
def test_an_adaptive_run_is_accounted_as_flat_clipping_is_and_moves_its_threshold(case):
    ours, theirs = make(case), flat(case)

    for run in (ours, theirs):
        run.train(case.batches(*SIZES))

    assert ours.history == theirs.history == [(0.3, BATCH_SIZE / NUM_SAMPLES, len(SIZES))]
    assert len(set(ours.thresholds)) == len(SIZES)
    assert ours.thresholds[0] == case.clip_norm
    assert ours.optimizer.slack_indicator.clip_norm == ours.thresholds[-1]
    assert set(theirs.thresholds) == {case.clip_norm}


# --- the noise: of the gradient and of the slack, from one source, at one scale ---

FALSE_ALARM = 1e-6


def assert_standard_deviation_is_one(noise: torch.Tensor) -> None:
    """Reject at a false-alarm rate of 1e-6 (two-sided chi-squared, N degrees of freedom)."""
    low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], noise.numel())
    assert low <= noise.double().square().sum().item() <= high


@pytest.mark.parametrize(("size", "scale"), [(5000, 1.1), (5000, 0.9), (300, math.sqrt(2))])
def test_the_test_of_the_noise_rejects_a_wrong_scale(size, scale):
    noise = torch.randn(size, generator=seeded(0), dtype=torch.float64)

    assert_standard_deviation_is_one(noise)
    with pytest.raises(AssertionError):
        assert_standard_deviation_is_one(scale * noise)


def observed_noise(case: Case, num_steps: int, noise_multiplier: float = 2.0) -> list[torch.Tensor]:
    """Return the noise on gradient and slack in units of its standard deviation.

    At a learning rate of exactly 0 the same batch has the same sums in every step.
    """
    num_slots = 96
    still = functools.partial(fixed, case, torch_optimizer=resting, num_slots=num_slots)
    run, quiet = still(noise_multiplier=noise_multiplier), still(noise_multiplier=0.0)
    (batch,) = case.batches(6)
    quiet.step(batch)
    std = noise_multiplier * case.clip_norm
    gradient, slack = [], []
    for _ in range(num_steps):
        run.step(batch)
        for p in run.optimizer.params:
            gradient.append((p.grad.double() * BATCH_SIZE - p.summed_grad.double()).flatten() / std)
        released = run.optimizer.slack_indicator.values - quiet.optimizer.slack_indicator.values
        slack.append(released * BATCH_SIZE / math.sqrt(num_slots) / noise_multiplier)
    return [torch.cat(gradient), torch.cat(slack)]


def resting(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)


@some_cases(
    "hooks-mlp",
    "functorch-mlp-bare",
    "ew-mlp",
    "no_op-mlp",
    "ghost-mlp",
    "ghost-mlp-bare",
    "ghost-mlp-double",
    "ghost-attention",
)
def test_gradient_and_slack_are_noised_at_sigma_times_the_threshold(case):
    """Rejects 1.1 times it: N > 5000 makes a miss less likely than 1e-5."""
    gradient, slack = observed_noise(case, num_steps=62)

    for noise in (gradient, slack):
        assert noise.numel() >= 5000
        assert_standard_deviation_is_one(noise)
        # The mean of N: beyond 4.9 / sqrt(N) once in 1e6.
        assert abs(noise.mean()) * math.sqrt(noise.numel()) < 4.9
    # Independent: the correlation of N pairs has a standard deviation of 1 / sqrt(N).
    pairs = min(len(gradient), len(slack))
    correlation = (gradient[:pairs] * slack[:pairs]).mean()
    assert abs(correlation) * math.sqrt(pairs) < 4.9


@every_case
def test_gradient_and_slack_are_noised_at_a_scale_near_that_one(case):
    """Rejects sqrt(2) times it: N > 300 makes a miss less likely than 1e-3."""
    for noise in observed_noise(case, num_steps=12):
        assert noise.numel() > 300
        assert_standard_deviation_is_one(noise)


# --- batches: virtual, empty ---


def train_in_pieces(run: Training, max_physical_batch_size: int) -> list[int]:
    sizes = []
    with BatchMemoryManager(
        data_loader=run.loader,
        max_physical_batch_size=max_physical_batch_size,
        optimizer=run.optimizer,
    ) as loader:
        for x, y in loader:
            run.step((x, y))
            sizes.append(len(y))
    return sizes


@pytest.mark.parametrize("max_physical_batch_size", [3, 7])
@every_case
def test_virtual_batches_train_like_whole_ones(case, max_physical_batch_size):
    whole, pieces = make(case, num_slots=6), make(case, num_slots=6)
    whole.train(tuple(batch) for batch in whole.loader)

    sizes = train_in_pieces(pieces, max_physical_batch_size)

    assert max(sizes) <= max_physical_batch_size < sum(sizes) / len(whole.thresholds)
    # Sums of B = 16 terms in another order, each off by a few eps, over four steps of training.
    eps = torch.finfo(case.dtype).eps
    assert_close(pieces.parameters, whole.parameters, 64)
    once_a_release = list(dict.fromkeys(pieces.thresholds))
    assert once_a_release == pytest.approx(whole.thresholds, rel=64 * eps)
    assert pieces.optimizer.max_grad_norm == pytest.approx(
        whole.optimizer.max_grad_norm, rel=64 * eps
    )
    assert pieces.optimizer.num_releases == whole.optimizer.num_releases == 4
    assert pieces.history == whole.history


@some_cases("hooks-mlp", "ghost-mlp", "ghost-mlp-bare")
def test_worker_processes_change_nothing_in_virtual_batches(case):
    alone, helped = make(case), make(case, num_workers=2)

    for run in (alone, helped):
        for _ in range(2):
            train_in_pieces(run, 5)

    assert same(helped.parameters, alone.parameters)
    assert helped.thresholds == alone.thresholds
    assert helped.history == alone.history == [(0.3, 0.25, 8)]


@cases_where(lambda case: case.takes_empty)
def test_an_empty_batch_is_a_noised_and_accounted_release(case):
    run = make(case, torch_optimizer=resting)
    run.train(case.batches(5))
    twin = seeded(0)
    twin.set_state(run.noise.get_state())
    clip_norm = run.optimizer.max_grad_norm

    run.step(case.batches(0)[0])

    for p in run.optimizer.params:
        noise = torch.normal(0.0, 0.3 * clip_norm, p.shape, generator=twin, dtype=p.dtype)
        assert torch.equal(p.grad, noise / BATCH_SIZE)
    assert run.optimizer.num_releases == 2
    assert run.history == [(0.3, 0.25, 2)]
    assert run.optimizer.max_grad_norm != clip_norm


@cases_where(lambda case: not case.takes_empty)
def test_an_empty_batch_fails_with_the_error_of_flat_clipping_where_that_has_one(case):
    errors = []
    for run in (make(case), flat(case)):
        run.train(case.batches(5))
        before = run.parameters
        with pytest.raises(RuntimeError) as caught:
            run.step(case.batches(0)[0])
        errors.append(str(caught.value))
        assert same(run.parameters, before)
        assert run.history == [(0.3, 0.25, 1)]

    assert errors[0] == errors[1]


# --- checkpoints ---


def held(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


TORCH_OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(held(model), lr=0.1, momentum=0.9),
    "adam": lambda model: torch.optim.Adam(held(model), lr=0.01),
    "adamw": lambda model: torch.optim.AdamW(held(model), lr=0.01),
}
every_torch_optimizer = pytest.mark.parametrize(
    "torch_optimizer", TORCH_OPTIMIZERS.values(), ids=TORCH_OPTIMIZERS
)


def by_state_dict(source: Training, target: Training) -> None:
    target.model.load_state_dict(source.model.state_dict())
    target.optimizer.load_state_dict(source.optimizer.state_dict())
    target.engine.accountant.load_state_dict(source.engine.accountant.state_dict())


def by_engine(source: Training, target: Training) -> None:
    file = io.BytesIO()
    source.engine.save_checkpoint(path=file, module=source.model, optimizer=source.optimizer)
    file.seek(0)
    target.engine.load_checkpoint(path=file, module=target.model, optimizer=target.optimizer)


def by_distributed_checkpoint(source: Training, target: Training) -> None:
    target.model.load_state_dict(source.model.state_dict())
    saved = copy.deepcopy(get_optimizer_state_dict(source.model, source.optimizer))
    set_optimizer_state_dict(target.model, target.optimizer, optim_state_dict=saved)
    target.engine.accountant.load_state_dict(source.engine.accountant.state_dict())


def assert_resuming_is_the_straight_run(
    fresh: Callable[[], Training], transfer: Callable[[Training, Training], None], stop: int
) -> None:
    straight, stopped, resumed = fresh(), fresh(), fresh()
    data = straight.case.batches(*SIZES[:4])
    straight.train(data)
    stopped.train(data[:stop])

    transfer(stopped, resumed)
    resumed.noise.set_state(stopped.noise.get_state())
    assert resumed.optimizer.max_grad_norm == stopped.optimizer.max_grad_norm
    resumed.train(data[stop:])

    assert same(resumed.parameters, straight.parameters)
    assert resumed.thresholds == straight.thresholds[stop:]
    assert resumed.optimizer.max_grad_norm == straight.optimizer.max_grad_norm
    assert resumed.optimizer.num_releases == straight.optimizer.num_releases
    assert resumed.history == straight.history


@pytest.mark.parametrize("stop", [0, 1, 3])
@every_case
def test_a_resumed_run_is_the_straight_run(case, stop):
    assert_resuming_is_the_straight_run(lambda: make(case), by_state_dict, stop)


@every_torch_optimizer
@one_case_a_mode
def test_a_run_resumed_by_the_engine_is_the_straight_run(case, torch_optimizer):
    def fresh() -> Training:
        return make(case, torch_optimizer=torch_optimizer, controller=Integrating())

    assert_resuming_is_the_straight_run(fresh, by_engine, 2)


# --- torch's distributed checkpoint, in one process ---


@pytest.mark.parametrize("stop", [1, 3])
@every_torch_optimizer
@one_case_a_mode
def test_a_run_resumed_by_a_distributed_checkpoint_is_the_straight_run(case, torch_optimizer, stop):
    def fresh() -> Training:
        return make(case, torch_optimizer=torch_optimizer, controller=Integrating())

    assert_resuming_is_the_straight_run(fresh, by_distributed_checkpoint, stop)


@every_torch_optimizer
@some_cases("hooks-mlp", "ghost-mlp", "ghost-lora-bare")
def test_a_distributed_checkpoint_of_an_untrained_optimizer_loads(case, torch_optimizer):
    source, target = (make(case, torch_optimizer=torch_optimizer) for _ in range(2))
    source.optimizer.max_grad_norm = 2.5

    by_distributed_checkpoint(source, target)

    assert target.optimizer.max_grad_norm == 2.5
    assert target.optimizer.num_releases == 0
    target.train(case.batches(*SIZES))
    assert target.thresholds[0] == 2.5


@one_case_a_mode
def test_a_distributed_checkpoint_carries_the_number_of_slots(case):
    source, target = make(case, num_slots=2), make(case, num_slots=1)
    source.train(case.batches(5))
    saved = get_optimizer_state_dict(source.model, source.optimizer)

    with pytest.raises(ValueError, match=r"num_slots must be that of the checkpoint, 2, got 1"):
        set_optimizer_state_dict(target.model, target.optimizer, optim_state_dict=saved)


@pytest.mark.parametrize("num_steps", [0, 2])
@every_torch_optimizer
@one_case_a_mode
def test_a_distributed_checkpoint_charges_and_moves_nothing(case, torch_optimizer, num_steps):
    run = make(case, torch_optimizer=torch_optimizer)
    run.train(case.batches(*SIZES[:num_steps]))
    before = run.parameters, run.optimizer.max_grad_norm, run.history
    released, stream = run.optimizer.slack_indicator, run.noise.get_state()

    for _ in range(2):
        get_optimizer_state_dict(run.model, run.optimizer)

    assert same(run.parameters, before[0])
    assert (run.optimizer.max_grad_norm, run.history) == before[1:]
    assert run.optimizer.slack_indicator is released
    assert run.optimizer.num_releases == num_steps
    assert torch.equal(run.noise.get_state(), stream)
    assert [group["lr"] for group in run.optimizer.param_groups] == [
        group["lr"] for group in torch_optimizer(case.build()).param_groups
    ]


@pytest.mark.parametrize("num_steps", [0, 2])
@one_case_a_mode
def test_a_distributed_checkpoint_leaves_announced_physical_batches_alone(case, num_steps):
    run = make(case, torch_optimizer=TORCH_OPTIMIZERS["sgd"])
    run.train(case.batches(*SIZES[:num_steps]))
    piece, rest = case.batches(4, 5, seed=20)
    run.optimizer.zero_grad(set_to_none=True)
    run.optimizer.signal_skip_step(do_skip=True)

    get_optimizer_state_dict(run.model, run.optimizer)

    run.step(piece)
    assert run.optimizer.num_releases == num_steps, "the announced piece was released"
    run.step(rest)
    assert run.optimizer.num_releases == num_steps + 1


@one_case_a_mode
def test_a_distributed_checkpoint_before_the_first_step_takes_no_step_of_its_own(case):
    """Where autograd leaves p.grad empty, torch fills in zeros beside the fresh gradients."""
    run = make(case, torch_optimizer=TORCH_OPTIMIZERS["sgd"])
    run.optimizer.zero_grad()
    run.backward(case.batches(5)[0])
    before, stream = run.parameters, run.noise.get_state()

    get_optimizer_state_dict(run.model, run.optimizer)

    assert same(run.parameters, before)
    assert torch.equal(run.noise.get_state(), stream)
    assert run.history == []
    assert run.optimizer.num_releases == 0
    assert run.optimizer.max_grad_norm == case.clip_norm
    run.step(case.batches(5)[0])
    assert run.history == [(0.3, 0.25, 1)]


CLEARING: dict[str, Callable[[Training], None]] = {
    "after-step": lambda run: None,
    "after-zero_grad": lambda run: run.optimizer.zero_grad(),
    "after-zero_grad-to-none": lambda run: run.optimizer.zero_grad(set_to_none=True),
}


@pytest.mark.parametrize("num_steps", [0, 2])
@pytest.mark.parametrize("clear", CLEARING.values(), ids=CLEARING)
@one_case_a_mode
def test_a_distributed_checkpoint_inside_a_logical_batch_keeps_its_sums(case, clear, num_steps):
    straight, run = (make(case, torch_optimizer=TORCH_OPTIMIZERS["sgd"]) for _ in range(2))
    piece, rest = case.batches(4, 5, seed=20)

    for one in (straight, run):
        one.train(case.batches(*SIZES[:num_steps]))
        one.optimizer.signal_skip_step(do_skip=True)
        one.step(piece)
        clear(one)
        if one is run:
            get_optimizer_state_dict(one.model, one.optimizer)
        one.step(rest)

    assert same(run.parameters, straight.parameters)
    assert run.optimizer.max_grad_norm == straight.optimizer.max_grad_norm
    assert run.optimizer.num_releases == num_steps + 1
    assert run.history == straight.history


@one_case_a_mode
def test_loading_a_distributed_checkpoint_drops_an_unfinished_logical_batch(case):
    source, target, clean = (
        make(case, torch_optimizer=TORCH_OPTIMIZERS["adam"], noise_multiplier=0.0) for _ in range(3)
    )
    source.train(case.batches(*SIZES))
    target.train(case.batches(7))  # torch's function loads no state beside a first gradient
    piece, batch = case.batches(4, 5, seed=20)
    target.optimizer.signal_skip_step(do_skip=True)
    target.step(piece)

    for one in (target, clean):
        by_distributed_checkpoint(source, one)
        one.step(batch)

    assert same(target.parameters, clean.parameters)
    assert target.optimizer.max_grad_norm == clean.optimizer.max_grad_norm


# --- schedulers ---

LR_SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "warmup": lambda optimizer: LambdaLR(optimizer, lambda step: step / 3),  # from 0 exactly
    "step": lambda optimizer: StepLR(optimizer, step_size=1, gamma=0.5),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=4),
}


@pytest.mark.parametrize("scheduler", LR_SCHEDULERS.values(), ids=LR_SCHEDULERS)
@one_case_a_mode
def test_learning_rate_schedulers_take_the_steps_of_flat_clipping(case, scheduler):
    ours, theirs = (build(case, torch_optimizer=TORCH_OPTIMIZERS["sgd"]) for build in (fixed, flat))

    for run in (ours, theirs):
        schedule = scheduler(run.optimizer)
        for seed, batch in enumerate(case.batches(*SIZES)):
            run.step(batch, seed=seed)
            schedule.step()

    assert same(ours.parameters, theirs.parameters)
    assert ours.history == theirs.history


@every_case
def test_a_step_at_a_learning_rate_of_zero_is_noised_and_charged(case):
    run = make(case, torch_optimizer=TORCH_OPTIMIZERS["sgd"])
    schedule = LambdaLR(run.optimizer, lambda step: float(step > 1))
    start, stream = run.parameters, run.noise.get_state()

    for number, batch in enumerate(case.batches(5, 6)):
        assert [group["lr"] for group in run.optimizer.param_groups] == [0.0]
        run.step(batch)
        schedule.step()
        assert run.history == [(0.3, 0.25, number + 1)]
        assert run.optimizer.num_releases == number + 1

    assert same(run.parameters, start)
    assert not torch.equal(run.noise.get_state(), stream)
    assert len({*run.thresholds, run.optimizer.max_grad_norm}) == 3
    run.step(case.batches(5)[0])
    assert not same(run.parameters, start)


@pytest.mark.parametrize(
    ("scheduler", "factors"),
    [
        (functools.partial(ExponentialNoise, gamma=0.5), [1, 0.5, 0.25]),
        (functools.partial(LambdaNoise, noise_lambda=lambda step: 1.0 + step), [1, 2, 3]),
    ],
    ids=["exponential", "lambda"],
)
@one_case_a_mode
def test_noise_schedulers_scale_the_noise_of_gradient_and_slack(case, scheduler, factors):
    run = fixed(case, torch_optimizer=resting, num_slots=2)
    quiet = fixed(case, torch_optimizer=resting, num_slots=2, noise_multiplier=0.0)
    (batch,) = case.batches(6)
    quiet.step(batch)
    clean = quiet.optimizer.slack_indicator.values
    schedule = scheduler(run.optimizer)
    history = []

    for factor in factors:
        twin = seeded(0)
        twin.set_state(run.noise.get_state())
        run.step(batch)
        std = 0.3 * factor * case.clip_norm
        for p in run.optimizer.params:
            noise = torch.normal(0.0, std, p.shape, generator=twin, dtype=p.dtype)
            assert torch.equal(p.grad, (p.summed_grad + noise) / BATCH_SIZE)
        # In slots, of width C / sqrt(2), over the expected batch size.
        slack = torch.normal(0.0, std, (2,), generator=twin) / case.clip_norm * math.sqrt(2)
        released = run.optimizer.slack_indicator
        error = released.values - clean - slack.double() / BATCH_SIZE
        assert error.abs().max() <= 8 * torch.finfo(torch.float32).eps
        assert released.noise_std == pytest.approx(0.3 * factor * math.sqrt(2) / BATCH_SIZE)
        history.append((pytest.approx(0.3 * factor), 0.25, 1))
        schedule.step()

    assert run.history == history


@pytest.mark.parametrize(
    ("scheduler", "factors"),
    [
        (functools.partial(ExponentialGradClip, gamma=0.5), [1, 0.5, 0.25]),
        (functools.partial(LambdaGradClip, scheduler_function=lambda step: 1.0 + step), [1, 2, 3]),
    ],
    ids=["exponential", "lambda"],
)
@hooks_and_ghost
def test_clip_schedulers_reach_whatever_clips_and_noises(case, scheduler, factors):
    run = fixed(case, torch_optimizer=resting, max_grad_norm=0.5, min_clipbound=0.01)
    schedule = scheduler(run.optimizer)
    x, y = case.batches(1)[0]

    for factor in factors:
        clip_norm = 0.5 * factor
        twin = seeded(0)
        twin.set_state(run.noise.get_state())
        run.step((1000 * x, y))  # far above every threshold here
        # d = 83 entries: each is off by an eps or two, and C is off by its 1e-6 / n.
        assert run.summed_norm() == pytest.approx(clip_norm, rel=2e-6)
        for p in run.optimizer.params:
            noise = torch.normal(0.0, 0.3 * clip_norm, p.shape, generator=twin)
            assert torch.equal(p.grad, (p.summed_grad + noise) / BATCH_SIZE)
        assert run.optimizer.slack_indicator.clip_norm == clip_norm
        schedule.step()

    assert run.optimizer.max_grad_norm != clip_norm
    if case.mode == "ghost":
        assert run.handle.max_grad_norm == run.optimizer.max_grad_norm


def test_adaptation_goes_on_from_what_a_clip_scheduler_sets():
    run, twin = (make(CASES["ghost-mlp"], noise_multiplier=0.0) for _ in range(2))
    first, second = CASES["ghost-mlp"].batches(6, 7)
    run.step(first)
    before = run.optimizer.max_grad_norm

    schedule = ExponentialGradClip(run.optimizer, gamma=0.5)
    schedule.step()
    assert run.optimizer.max_grad_norm == 0.5 * before
    run.step(second)

    by_state_dict(run, twin)
    assert run.thresholds[-1] == 0.5 * before
    assert run.optimizer.max_grad_norm != 0.5 * before
    assert twin.handle.max_grad_norm == twin.optimizer.max_grad_norm == run.optimizer.max_grad_norm


# --- low precision, where gradients are at hand ---

SUMS: dict[str, Any] = {
    "loss_reduction": "sum",
    "criterion": nn.CrossEntropyLoss(reduction="sum"),
}


@some_cases("hooks-mlp", "hooks-mlp-bare", "hooks-cnn", "hooks-layernorm-bare")
def test_under_autocast_gradients_are_bfloat16_and_sums_are_not(case):
    run = make(case, poisson_sampling=False, **SUMS)

    for batch in case.batches(*SIZES):
        run.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            run.backward(batch)
        run.thresholds.append(run.optimizer.max_grad_norm)
        run.optimizer.step()
        for p in run.optimizer.params:
            assert p.summed_grad.dtype == p.grad.dtype == case.dtype
            assert p.grad.isfinite().all()

    assert any(p.grad_sample.dtype == torch.bfloat16 for p in run.optimizer.params)
    assert len(set(run.thresholds)) == len(SIZES)
    assert run.history == flat_history(case)


def flat_history(case: Case) -> list[Any]:
    run = flat(case)
    run.train(case.batches(*SIZES))
    return run.history


@pytest.mark.parametrize("is_wrapped", [True, False])
@pytest.mark.parametrize("task", ["mlp", "cnn", "frozen"])
def test_bfloat16_parameters_are_updated_from_float32_sums(task, is_wrapped):
    case = Case("hooks", task, is_wrapped=is_wrapped, dtype=torch.bfloat16)
    run = make(case, **SUMS)
    start = run.parameters

    for batch in case.batches(*SIZES):
        run.step(batch)
        for p in run.optimizer.params:
            assert (p.dtype, p.grad.dtype) == (torch.bfloat16, torch.bfloat16)
            assert p.summed_grad.dtype == torch.float32
            assert p.grad.isfinite().all()

    assert len(set(run.thresholds)) == len(SIZES)
    moved = [not torch.equal(a, b) for a, b in zip(run.parameters, start, strict=True)]
    assert moved == [p.requires_grad for p in run.model.parameters()]


# --- the end of it: cleanup, and being private again ---

with_hooks = some_cases(
    "hooks-mlp",
    "hooks-mlp-bare",
    "functorch-mlp-bare",
    "no_op-groups-bare",
    "ghost-mlp",
    "ghost-mlp-bare",
)


@with_hooks
def test_after_cleanup_nothing_of_ours_keeps_the_hooks_alive(case):
    run = make(case)
    run.train(case.batches(*SIZES))
    alive = weakref.ref(run.handle)
    model = run.model._module if case.is_wrapped else run.model

    run.handle.cleanup()
    # The criterion of ghost mode is the user's reference to them, like the handle itself.
    run.handle = run.model = run.criterion = None
    gc.collect()

    assert alive() is None
    assert run.optimizer.state_dict()["param_groups"][0]["slaclip_num_releases"] == len(SIZES)
    assert run.optimizer.num_releases == len(SIZES)
    assert not any(hasattr(p, "grad_sample") for p in model.parameters())
    model.train()
    model(case.batches(3)[0][0]).sum().backward()  # no hook stumbles over it


@with_hooks
def test_a_checkpoint_written_after_cleanup_loads(case):
    run, target = make(case), make(case)
    run.train(case.batches(*SIZES))
    saved = run.optimizer.state_dict()

    run.handle.cleanup()

    assert run.optimizer.state_dict()["param_groups"] == saved["param_groups"]
    target.optimizer.load_state_dict(run.optimizer.state_dict())
    assert target.optimizer.max_grad_norm == run.optimizer.max_grad_norm


def again(run: Training, model: Any, optimizer: Any, **kwargs: Any) -> Training:
    return make_private(
        run.case,
        model=model,
        engine=run.engine,
        optimizer=optimizer,
        data_loader=run.loader,
        criterion=nn.CrossEntropyLoss(),
        clipping="slaclip",
        noise_multiplier=0.3,
        max_grad_norm=run.case.clip_norm,
        noise_generator=run.noise,
        **kwargs,
    )


@some_cases("hooks-mlp-bare", "functorch-mlp-bare", "ghost-mlp-bare", "ghost-lora-bare")
def test_without_a_wrapper_a_second_make_private_needs_cleanup_first(case):
    run = make(case)
    run.train(case.batches(*SIZES))
    adapted = run.optimizer.max_grad_norm

    with pytest.raises(ValueError, match=r"hooks of an earlier make_private. Call cleanup\(\)"):
        again(run, run.model, run.optimizer)

    run.train(case.batches(4))  # it went on as if nothing had happened
    assert run.thresholds[-1] == adapted
    adapted = run.optimizer.max_grad_norm
    run.handle.cleanup()
    second = again(run, run.model, run.optimizer)
    assert second.optimizer.max_grad_norm == adapted
    second.train(case.batches(*SIZES))
    assert second.thresholds[0] == adapted
    assert second.history == [(0.3, 0.25, 2 * len(SIZES) + 1)]
    assert len(set(second.thresholds)) == len(SIZES)


# --- secure mode ---


@pytest.fixture
def secure_source(monkeypatch):
    """Stand in for torchcsprng; return the one generator that everything must draw from."""
    generator = seeded(5)
    module = types.ModuleType("torchcsprng")
    module.create_random_device_generator = lambda device: generator
    monkeypatch.setitem(sys.modules, "torchcsprng", module)
    return generator


def secure_noise(std: float, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw as Opacus's secure mode: one number thrown away, then four Gaussians over two."""
    torch.normal(0.0, std, (1, 1), generator=generator)
    total = torch.zeros_like(like)
    for _ in range(4):
        total += torch.normal(0.0, std, like.shape, generator=generator)
    return total / 2


@some_cases("hooks-mlp", "hooks-mlp-bare", "functorch-mlp-bare", "ew-mlp", "no_op-mlp")
def test_secure_mode_draws_all_noise_from_the_secure_source(case, secure_source):
    assert_all_noise_is_secure(case, secure_source)


@some_cases("ghost-mlp", "ghost-mlp-bare", "ghost-mlp-double", "ghost-cnn", "ghost-attention")
def test_secure_mode_draws_all_noise_from_the_secure_source_in_ghost_mode(case, secure_source):
    assert_all_noise_is_secure(case, secure_source)


def assert_all_noise_is_secure(case: Case, source: torch.Generator) -> None:
    run, quiet = (
        make(
            case,
            engine=PrivacyEngine(accountant="rdp", secure_mode=True),
            noise_multiplier=noise_multiplier,
            torch_optimizer=resting,
            controller=FixedController(),
            num_slots=2,
        )
        for noise_multiplier in (0.3, 0.0)
    )
    assert run.noise is None
    (batch,) = case.batches(6)
    quiet.step(batch)
    clean = quiet.optimizer.slack_indicator.values

    for _ in range(2):
        twin, others = seeded(0), torch.get_rng_state()
        twin.set_state(source.get_state())
        run.step(batch)
        for p in run.optimizer.params:
            noise = secure_noise(0.3 * case.clip_norm, p.detach(), twin)
            assert torch.equal(p.grad, (p.summed_grad + noise) / BATCH_SIZE)
        slack = (
            secure_noise(0.3 * case.clip_norm, torch.zeros(2), twin) / case.clip_norm * math.sqrt(2)
        )
        error = run.optimizer.slack_indicator.values - clean - slack.double() / BATCH_SIZE
        assert error.abs().max() <= 8 * torch.finfo(torch.float32).eps
        assert torch.equal(source.get_state(), twin.get_state()), "something else was drawn"
        assert torch.equal(torch.get_rng_state(), others)

    assert run.history == [(0.3, 0.25, 2)]


@some_cases("hooks-mlp", "ghost-mlp-bare")
def test_secure_mode_samples_batches_from_the_secure_source(case, secure_source):
    drawn = []

    for _ in range(2):
        run = make(case, engine=PrivacyEngine(accountant="rdp", secure_mode=True))
        secure_source.manual_seed(7)
        drawn.append([x for x, _ in run.loader])

    assert same(*drawn)
    assert len({len(x) for x in drawn[0]}) > 1, "not Poisson sampling"
    secure_source.manual_seed(8)
    other = make(case, engine=PrivacyEngine(accountant="rdp", secure_mode=True))
    other.train(tuple(batch) for batch in other.loader)
    assert other.optimizer.num_releases == 4


def test_the_secure_noise_of_gradient_and_slack_has_the_right_scale(secure_source):
    """Rejects 1.1 times it: N > 5000 makes a miss less likely than 1e-5."""
    case = CASES["ghost-mlp"]
    arguments: dict[str, Any] = {
        "engine": PrivacyEngine(accountant="rdp", secure_mode=True),
        "torch_optimizer": resting,
        "controller": FixedController(),
        "num_slots": 96,
    }
    run = make(case, noise_multiplier=2.0, **arguments)
    (batch,) = batches("mlp", [0])
    gradient, slack = [], []

    for _ in range(62):
        run.step(batch)
        gradient += [p.grad.flatten().clone() for p in run.optimizer.params]
        slack.append(run.optimizer.slack_indicator.values)

    unit = 2.0 * case.clip_norm / BATCH_SIZE
    assert_standard_deviation_is_one(torch.cat(gradient) / unit)
    assert_standard_deviation_is_one(torch.cat(slack) / (2.0 * math.sqrt(96) / BATCH_SIZE))


# --- closures ---


@one_case_a_mode
def test_a_closure_takes_the_step_of_flat_clipping(case):
    ours, theirs = fixed(case), flat(case)

    def closure(run: Training, batch: Batch) -> float:
        run.optimizer.zero_grad()
        run.backward(batch)
        return 0.0

    for run in (ours, theirs):
        for seed, batch in enumerate(case.batches(*SIZES)):
            run.noise.manual_seed(seed)
            run.optimizer.step(functools.partial(closure, run, batch))

    assert same(ours.parameters, theirs.parameters)
    assert ours.history == theirs.history


@hooks_and_ghost
def test_an_initialization_step_beside_a_gradient_frozen_since_is_refused(case):
    """At a learning rate of 0 an un-noised gradient would still enter the momentum."""
    run = make(case, torch_optimizer=TORCH_OPTIMIZERS["sgd"])
    first, *others = run.optimizer.params
    first.requires_grad_(False)
    first.grad = torch.ones_like(first)
    for p in others:
        p.grad = torch.zeros_like(p)
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0

    with pytest.raises(RuntimeError, match="still has a gradient"):
        run.optimizer.step()
    assert not run.optimizer.original_optimizer.state
