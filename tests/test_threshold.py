"""The threshold: one owner, one clock, and what may move it."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import helpers
import numpy as np
import pytest
import torch
from helpers import Run, Vector, batches, private, samples, seeded, vector
from hypothesis import given
from hypothesis import strategies as st
from opacus.schedulers import (
    ExponentialGradClip,
    ExponentialNoise,
    LambdaGradClip,
    LambdaNoise,
    StepGradClip,
)
from opacus.utils.batch_memory_manager import BatchMemoryManager

from opacus_slaclip import (
    AutoController,
    FixedController,
    PrivacyEngine,
    SlackIndicator,
    SlaClipController,
    SlaClipQController,
)


def gradients(*norms: float) -> torch.Tensor:
    """Per-sample gradients, shape (b, 1), of these norms."""
    return torch.tensor(norms).unsqueeze(1)


def doubling(clip_norm: float, indicator: SlackIndicator) -> float:
    return 2 * clip_norm


# --- one clock ---


def test_a_new_threshold_takes_effect_with_the_next_batch():
    one = vector(controller=doubling)

    clipped = [one.release(gradients(100.0)).item() for _ in range(4)]

    # A norm of 100 is clipped to C / (1 + 1e-6 / 100), in float32.
    assert clipped == pytest.approx([1, 2, 4, 8], rel=1e-7)
    assert one.optimizer.max_grad_norm == 16.0
    assert one.optimizer.slack_indicator.clip_norm == 8.0


def test_a_skipped_step_moves_nothing():
    calls = []

    def controller(clip_norm: float, indicator: SlackIndicator) -> float:
        calls.append(indicator)
        return 2 * clip_norm

    one = vector(controller=controller)
    for _ in range(5):
        one.accumulate(gradients(0.5))
        assert one.optimizer.max_grad_norm == 1.0
        assert one.optimizer.num_releases == 0
        assert one.optimizer.slack_indicator is None
    assert calls == []

    one.release(gradients(0.5))

    assert one.optimizer.max_grad_norm == 2.0
    assert one.optimizer.num_releases == len(calls) == 1
    assert torch.equal(calls[0].values, one.optimizer.slack_indicator.values)


def test_the_threshold_is_fixed_from_the_first_physical_batch_to_the_noise():
    run = private(noise_multiplier=0.3)
    at_noise = []
    account = run.optimizer.step_hook

    def note(optimizer: Any) -> None:
        at_noise.append(optimizer.max_grad_norm)
        account(optimizer)

    run.optimizer.attach_step_hook(note)
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=3, optimizer=run.optimizer
    ) as loader:
        for batch in loader:
            run.step(batch)

    assert list(dict.fromkeys(run.thresholds)) == at_noise
    assert len(run.thresholds) > len(at_noise) == 4


def test_the_controller_is_asked_after_the_accountant_has_recorded_the_step():
    engine = PrivacyEngine(accountant="rdp")
    recorded = []

    def controller(clip_norm: float, indicator: SlackIndicator) -> float:
        recorded.append(engine.accountant.history[-1][-1])
        return clip_norm

    run = private(engine=engine, controller=controller)
    for batch in batches("mlp", [4, 5, 6]):
        run.step(batch)

    assert recorded == [1, 2, 3]


def test_setting_the_threshold_inside_a_logical_batch_is_refused():
    one = vector(controller=FixedController())
    one.accumulate(gradients(3.0))

    with pytest.raises(RuntimeError, match=r"must stay 1 until the logical batch .* got 2\. Set"):
        one.optimizer.max_grad_norm = 2.0

    assert one.optimizer.max_grad_norm == 1.0
    assert one.release(gradients(3.0)).item() == pytest.approx(2.0, rel=1e-6)
    one.optimizer.max_grad_norm = 2.0
    assert one.release(gradients(3.0)).item() == pytest.approx(2.0, rel=1e-6)


def test_setting_the_threshold_between_noise_and_move_is_refused():
    """A step hook runs there: what is released next to it was measured at the old threshold."""
    one = vector(max_grad_norm=1.7)
    one.optimizer.attach_step_hook(lambda optimizer: setattr(optimizer, "max_grad_norm", 5.0))
    with pytest.raises(RuntimeError, match=r"max_grad_norm must stay 1\.7"):
        one.release(gradients(0.5))


def test_a_controller_cannot_rewrite_what_was_released():
    def rewriting(clip_norm: float, indicator: SlackIndicator) -> float:
        indicator.values.fill_(0.25)
        return clip_norm

    one, twin = vector(controller=rewriting), vector()
    for each in (one, twin):
        each.release(gradients(0.5))
    values = one.optimizer.slack_indicator.values
    assert torch.equal(values, twin.optimizer.slack_indicator.values)


def test_a_controller_of_one_run_is_refused_in_another():
    """Its state was paid for by the first run, of which the second's accountant knows nothing."""
    controller = AutoController(helpers.Integrating())
    first = private(max_grad_norm=1.7, controller=controller)
    other = private(max_grad_norm=1.7, controller=controller)  # nothing released yet
    first.step(samples("mlp", 5))
    for make in (private, lambda **options: again(first, **options)):
        with pytest.raises(ValueError, match="controller must be a new one, got AutoController"):
            make(max_grad_norm=0.9, controller=controller)
    with pytest.raises(ValueError, match=r"controller must be a new one, got .*Integrating"):
        private(max_grad_norm="auto", controller=controller.controller)
    again(first, max_grad_norm=1.7, controller=controller)  # the same run goes on
    assert other.optimizer.controller is controller
    for stateless in (FixedController(), lambda clip_norm, indicator: clip_norm):
        private(controller=stateless).step(samples("mlp", 5))
        private(controller=stateless)


def test_adaptation_goes_on_from_a_threshold_set_between_batches():
    one = vector(num_slots=1)
    one.release(gradients(0.0))

    one.optimizer.max_grad_norm = 4.0
    one.release(gradients(2.0))

    # s_hat = (1/2) / 8 for the one slot; r = s_hat / C; eq. 13
    s_hat, clip_norm = 0.5 / 8, 4.0
    exponent = 0.2 * ((1 + s_hat / clip_norm) / 2 - s_hat)
    assert one.optimizer.slack_indicator.clip_norm == 4.0
    assert one.optimizer.max_grad_norm == pytest.approx(4 * math.exp(exponent), rel=1e-12)


@pytest.mark.parametrize("value", [0.05, 60.0, 0.0, -1.0, math.nan, math.inf])
def test_a_threshold_outside_the_bounds_is_refused(value):
    one = vector()

    with pytest.raises(ValueError, match="max_grad_norm must be"):
        one.optimizer.max_grad_norm = value

    assert one.optimizer.max_grad_norm == 1.0


# --- what a controller may return ---

FINITE = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(-(10**300), 10**300),
    st.fractions(),
    st.floats(allow_nan=False, allow_infinity=False, width=32).map(np.float32),
    st.floats(allow_nan=False, allow_infinity=False).map(np.float64),
    st.integers(-(2**31), 2**31 - 1).map(np.int64),
    st.floats(allow_nan=False, allow_infinity=False, width=32).map(torch.tensor),
    st.floats(allow_nan=False, allow_infinity=False).map(
        lambda x: torch.tensor([x], dtype=torch.float64)
    ),
)


@given(st.lists(FINITE, min_size=1, max_size=5))
def test_whatever_finite_number_a_controller_returns_the_threshold_is_a_float_in_bounds(numbers):
    returned: list[Any] = []
    one = vector(controller=lambda clip_norm, indicator: returned[-1])

    for number in numbers:
        returned.append(number)
        one.release(gradients(0.5))
        clip_norm = one.optimizer.max_grad_norm
        assert type(clip_norm) is float
        assert clip_norm == min(max(float(number), 0.1), 50.0)


@given(
    norms=st.lists(st.floats(0, 1e6, width=32), max_size=6),
    noise_multiplier=st.floats(1e-3, 1e3),
    clipping=st.sampled_from([SlaClipController, SlaClipQController]),
    rate=st.floats(0, 10),
)
def test_our_controllers_keep_the_threshold_in_bounds_under_any_noise(
    norms, noise_multiplier, clipping, rate
):
    one = vector(
        noise_multiplier=noise_multiplier,
        num_slots=3,
        generator=seeded(len(norms)),
        controller=clipping(clipbound_learning_rate=rate),
    )
    for _ in range(3):
        one.release(torch.tensor(norms).reshape(-1, 1))
        assert type(one.optimizer.max_grad_norm) is float
        assert 0.1 <= one.optimizer.max_grad_norm <= 50.0


@pytest.mark.parametrize(
    ("result", "error", "text"),
    [
        (math.nan, ValueError, "must return a finite threshold, got nan"),
        (math.inf, ValueError, "must return a finite threshold, got inf"),
        (-math.inf, ValueError, "must return a finite threshold, got -inf"),
        ("1.0", TypeError, r"must return a number, got '1.0' \(str\)"),
        (None, TypeError, r"must return a number, got None \(NoneType\)"),
        (True, TypeError, r"must return a number, got True \(bool\)"),
        (torch.ones(2), TypeError, "must return a number, got tensor"),
    ],
)
def test_what_is_no_threshold_raises_after_the_release_and_before_the_update(result, error, text):
    """The noise was drawn and the step is charged for; the parameters did not move."""
    run = private(controller=lambda clip_norm, indicator: result)
    start, clip_norm = run.parameters, run.optimizer.max_grad_norm

    with pytest.raises(error, match=text):
        run.step(samples("mlp", 6))

    assert all(map(torch.equal, run.parameters, start))
    assert run.engine.accountant.history == [(0.3, 0.25, 1)]
    assert run.optimizer.num_releases == 1
    assert run.optimizer.slack_indicator is not None
    assert run.optimizer.max_grad_norm == clip_norm
    with pytest.raises(ValueError, match="Gradients haven't been cleared"):
        run.optimizer.step()  # what was released cannot be released again


def test_a_run_goes_on_after_a_controller_has_raised():
    results: list[Any] = ["oops", 3.0]
    run = private(controller=lambda clip_norm, indicator: results.pop(0))
    with pytest.raises(TypeError, match="must return a number"):
        run.step(samples("mlp", 6))

    run.step(samples("mlp", 6))

    assert run.optimizer.max_grad_norm == 3.0
    assert run.optimizer.num_releases == 2
    assert run.engine.accountant.history == [(0.3, 0.25, 2)]


def test_the_optimizer_shows_its_controller_slots_and_releases():
    controller = SlaClipQController(0.3, 0.7)
    run = private(controller=controller, num_slots=5, min_clipbound=0.2, max_clipbound=7)
    optimizer = run.optimizer

    assert optimizer.controller is controller
    assert (optimizer.num_slots, optimizer.num_releases) == (5, 0)
    assert optimizer.slack_indicator is None
    assert (optimizer.min_clipbound, optimizer.max_clipbound) == (0.2, 7.0)
    clip_norm = optimizer.max_grad_norm
    run.step(samples("mlp", 6))
    assert optimizer.num_releases == 1
    indicator = optimizer.slack_indicator
    assert indicator.num_slots == 5
    assert indicator.clip_norm == clip_norm
    assert indicator.noise_std == pytest.approx(0.3 * math.sqrt(5) / 16, rel=1e-12)
    assert optimizer.max_grad_norm == controller(clip_norm, indicator)


class Integrating:
    """A controller with a state: an integral of the error."""

    def __init__(self, target: float) -> None:
        self.target = target
        self.integral = 0.0

    def __call__(self, clip_norm: float, indicator: SlackIndicator) -> float:
        self.integral += self.target - float(indicator.values[0])
        return clip_norm * math.exp(0.1 * self.integral)


def test_a_stateful_controller_is_asked_once_a_release():
    one = vector(num_slots=1, controller=Integrating(0.5))

    for _ in range(3):
        one.accumulate(gradients(0.0, 0.0))
        one.release(gradients(*[0.0] * 6))  # s_hat = 1, whatever C is

    assert one.optimizer.controller.integral == -1.5
    expected = math.exp(0.1 * (-0.5 - 1.0 - 1.5))
    assert one.optimizer.max_grad_norm == pytest.approx(expected, rel=1e-12)


# --- convergence ---


@pytest.mark.parametrize("quantile", [0.25, 0.5, 0.8])
@pytest.mark.parametrize("factor", [0.1, 1.0, 10.0])
def test_a_fixed_quantile_is_found_from_a_bad_start(factor, quantile):
    """Norms spread evenly over (0, 4): the first slot holds F at the middle of its bin.

    At rest ``F(C (1 - 1 / 2K)) = q``, so ``C = 4 q / (1 - 1 / 2K)``. A grid of 400 norms makes F
    exact to 1 / 800. From 10 q below, log C rises by up to 0.2 q a step, then halves its distance
    to rest every ln(2) / (0.2 q) steps: 300 are plenty.
    """
    norms = (torch.arange(400) + 0.5) / 100
    one = vector(
        num_slots=10,
        expected_batch_size=400,
        max_grad_norm=4 * quantile * factor,
        controller=SlaClipQController(target_unclipped_quantile=quantile),
    )

    for _ in range(300):
        one.release(norms.unsqueeze(1))

    # dF = 1/800 moves C by at most 4 / 800 / (1 - 1/2K).
    assert one.optimizer.max_grad_norm == pytest.approx(4 * quantile / 0.95, abs=0.006)


def settled(one: Vector, draw: Callable[[], torch.Tensor], *, steps: int, last: int) -> float:
    """Geometric mean of the threshold over the last steps."""
    logs = []
    for _ in range(steps):
        one.release(draw().unsqueeze(1))
        logs.append(math.log(one.optimizer.max_grad_norm))
    return math.exp(sum(logs[-last:]) / last)


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_the_median_of_lognormal_norms_is_found_under_noise_and_sampling(factor):
    """Norms ``exp(N(ln 2, 0.5^2))``, median 2, Poisson batches of 256, sigma = 1, K = 13.

    The middle of the first bin lies ln(1 - 1 / 26) = -0.039 from log C. The first slot rises by
    about 0.75 per unit of log C and errs by 0.046 (sampling and noise), so log C is an AR(1) of
    coefficient 1 - 0.2 * 0.75 = 0.85, and its mean over 200 steps has a standard deviation of
    0.2 * 0.046 / 0.15 / sqrt(200) = 0.0043. The tolerance is nine of them.
    """
    generator = seeded(5)

    def draw() -> torch.Tensor:
        size = int(torch.poisson(torch.tensor(256.0), generator=generator))
        return torch.exp(math.log(2) + 0.5 * torch.randn(size, generator=generator))

    one = vector(
        expected_batch_size=256,
        noise_multiplier=1.0,
        max_grad_norm=2 * factor,
        generator=seeded(6),
        controller=SlaClipQController(),
    )

    found = settled(one, draw, steps=300, last=200)

    assert one.optimizer.num_slots == 13
    assert math.log(found / 2) == pytest.approx(0.039, abs=0.039)


@pytest.mark.parametrize("start", [0.1, 50.0])
def test_the_default_controller_leaves_its_bounds_alone_and_settles_between(start):
    norms = (torch.arange(400) + 0.5) / 100
    one = vector(num_slots=10, expected_batch_size=400, max_grad_norm=start)

    for _ in range(150):
        one.release(norms.unsqueeze(1))

    # At rest gamma = s_hat[1]: with F(x) = x / 4, (1 + 1 / 80) / 2 = 0.95 C / 4.
    assert one.optimizer.max_grad_norm == pytest.approx(2 * (1 + 1 / 80) / 0.95, abs=0.012)


def test_an_empty_stretch_drives_the_threshold_to_its_bound_and_no_further():
    one = vector(max_grad_norm=1.0, num_slots=4, max_clipbound=3.0)

    for _ in range(30):
        one.release(torch.zeros(0, 1))

    assert one.optimizer.max_grad_norm == 3.0


# --- schedulers ---


@pytest.mark.parametrize(
    ("scheduler_class", "options", "expected"),
    [
        (ExponentialGradClip, {"gamma": 0.5}, [2, 1, 0.5, 0.25]),
        (LambdaGradClip, {"scheduler_function": lambda epoch: 1 / (1 + epoch)}, [2, 1, 2 / 3, 0.5]),
        (StepGradClip, {"gamma": 0.5, "step_size": 2}, [2, 2, 1, 1]),
    ],
)
def test_gradient_clip_schedulers_set_the_threshold_between_batches(
    scheduler_class, options, expected
):
    one = vector(max_grad_norm=2.0, controller=FixedController())
    scheduler = scheduler_class(one.optimizer, **options)

    clipped = []
    for _ in range(4):
        clipped.append(one.release(gradients(1000.0)).item())
        scheduler.step()

    assert clipped == pytest.approx(expected, rel=2e-7)


def test_a_scheduler_and_the_controller_take_turns():
    one = vector(max_grad_norm=2.0, controller=doubling)
    scheduler = ExponentialGradClip(one.optimizer, gamma=0.25)

    clipped = []
    for _ in range(4):
        clipped.append(one.release(gradients(1000.0)).item())
        scheduler.step()

    assert clipped == pytest.approx([2, 1, 0.5, 0.25], rel=2e-7)


def test_a_gradient_clip_scheduler_is_refused_inside_a_logical_batch():
    one = vector(max_grad_norm=2.0)
    scheduler = ExponentialGradClip(one.optimizer, gamma=0.5)
    one.accumulate(gradients(1.0))

    with pytest.raises(RuntimeError, match="must stay 2 until the logical batch"):
        scheduler.step()


@pytest.mark.parametrize(
    ("scheduler_class", "options", "expected"),
    [
        (ExponentialNoise, {"gamma": 0.5}, [0.8, 0.4, 0.2]),
        (LambdaNoise, {"noise_lambda": lambda epoch: 1 + epoch}, [0.8, 1.6, 2.4]),
    ],
)
def test_noise_schedulers_change_the_noise_on_both_parts(scheduler_class, options, expected):
    run = private(noise_multiplier=0.8, num_slots=4)
    scheduler = scheduler_class(run.optimizer, **options)

    stds = []
    for batch in batches("mlp", [5, 6, 7]):
        run.step(batch)
        stds.append(run.optimizer.slack_indicator.noise_std)
        scheduler.step()

    assert stds == pytest.approx([sigma * 2 / 16 for sigma in expected], rel=1e-12)
    assert [entry[0] for entry in run.engine.accountant.history] == pytest.approx(expected)


def test_a_noise_scheduler_scales_the_very_noise_that_is_drawn():
    loud, quiet = (
        vector(noise_multiplier=sigma, num_slots=4, generator=seeded(0)) for sigma in (0.8, 0.4)
    )
    scheduler = LambdaNoise(loud.optimizer, noise_lambda=lambda epoch: 0.5)
    assert scheduler.last_epoch == 0

    for one in (loud, quiet):
        one.release(torch.zeros(0, 1))

    assert torch.equal(loud.parameter, quiet.parameter)
    assert torch.equal(
        loud.optimizer.slack_indicator.values, quiet.optimizer.slack_indicator.values
    )


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=2, gamma=0.5), [0.1, 0.1, 0.05]),
        (
            lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda e: 1 / (1 + e)),
            [0.1, 0.05, 0.1 / 3],
        ),
        (
            lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 4),
            [0.1, 0.1 * 0.8535533906, 0.05],
        ),
    ],
    ids=["step", "lambda", "cosine"],
)
def test_learning_rate_schedulers_work_and_leave_the_threshold_alone(make, expected):
    run, plain = private(), private()
    scheduler = make(run.optimizer)
    data = batches("mlp", [5, 6, 7])

    rates = []
    for batch in data:
        rates.append(run.optimizer.param_groups[0]["lr"])
        run.step(batch)
        scheduler.step()
        clip_norm = run.optimizer.max_grad_norm
        assert run.optimizer.param_groups[0]["slaclip_max_grad_norm"] == clip_norm

    assert rates == pytest.approx(expected)
    for group in plain.optimizer.param_groups:
        assert group["lr"] == 0.1
    plain.step(data[0])
    assert plain.optimizer.max_grad_norm == run.thresholds[1]


def test_a_warmup_from_a_learning_rate_of_zero_is_private_from_its_first_step():
    run = private()
    start = run.parameters
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda epoch: epoch / 2)

    run.step(samples("mlp", 5))

    assert all(map(torch.equal, run.parameters, start))
    assert run.engine.accountant.history == [(0.3, 0.25, 1)]
    assert run.optimizer.num_releases == 1
    scheduler.step()
    run.step(samples("mlp", 6))
    assert not all(map(torch.equal, run.parameters, start))
    assert run.engine.accountant.history == [(0.3, 0.25, 2)]


def test_a_fresh_gradient_is_released_at_a_learning_rate_of_zero_too():
    """Zero gradients and rates alone are how torch initializes an optimizer's state."""
    one = vector(learning_rate=0.0, controller=FixedController())
    one.release(gradients(0.5))

    one.release(gradients(0.5))  # zero_grad has left p.grad at 0

    assert one.parameter.grad.item() != 0.0
    assert one.optimizer.num_releases == 2


# --- make_private again on what is private already ---


def again(run: Run, **kwargs: Any) -> Run:
    model, optimizer, loader = run.engine.make_private(
        module=run.model,
        optimizer=run.optimizer,
        data_loader=run.loader,
        **{
            "noise_multiplier": 0.3,
            "max_grad_norm": 1.7,
            "clipping": "slaclip",
            "noise_generator": run.noise_generator,
            **kwargs,
        },
    )
    return Run(run.engine, model, optimizer, loader, run.criterion, run.noise_generator)


def adapted(steps: int = 3) -> Run:
    run = private(max_grad_norm=1.7)
    for batch in batches("mlp", [6] * steps):
        run.step(batch)
    assert run.optimizer.max_grad_norm != 1.7
    return run


def test_a_second_make_private_with_the_first_threshold_goes_on_at_the_adapted_one():
    first = adapted()

    second = again(first)

    assert second.optimizer is not first.optimizer
    assert second.optimizer.max_grad_norm == first.optimizer.max_grad_norm
    assert second.optimizer.initial_max_grad_norm == 1.7
    assert second.optimizer.num_releases == 3
    second.step(samples("mlp", 5))
    assert second.optimizer.num_releases == 4
    assert second.engine.accountant.history == [(0.3, 0.25, 4)]


def test_rounds_of_make_private_train_as_one_run():
    rounds, straight = private(max_grad_norm=1.7), private(max_grad_norm=1.7)

    for number, batch in enumerate(batches("mlp", [6, 5, 7, 4, 6, 8])):
        if number % 2 == 0:
            rounds = again(rounds)
        rounds.step(batch)
        straight.step(batch)

    assert all(map(torch.equal, rounds.parameters, straight.parameters))
    assert rounds.optimizer.max_grad_norm == straight.optimizer.max_grad_norm
    assert rounds.engine.accountant.history == straight.engine.accountant.history


def test_a_second_make_private_keeps_what_the_search_has_found():
    first = private(max_grad_norm="auto", noise_multiplier=0.0, num_slots=4)
    for batch in batches("mlp", [16] * 30):
        first.step(batch)
    reference = first.optimizer.controller.reference
    assert reference is not None

    second = again(first, max_grad_norm="auto")

    assert second.optimizer.max_grad_norm == first.optimizer.max_grad_norm
    assert second.optimizer.controller is not first.optimizer.controller
    assert second.optimizer.controller.reference == reference


def test_rounds_with_auto_may_share_the_controller_inside():
    inside = helpers.Integrating()
    first = private(max_grad_norm="auto", noise_multiplier=0.0, num_slots=4, controller=inside)
    for batch in batches("mlp", [16] * 30):
        first.step(batch)
    integral, reference = inside.integral, first.optimizer.controller.reference
    assert integral != 0.0
    second = again(first, max_grad_norm="auto", controller=inside)
    assert second.optimizer.controller.controller is inside
    assert (inside.integral, second.optimizer.controller.reference) == (integral, reference)


def test_a_second_make_private_with_another_controller_inside_starts_that_one_anew():
    first = private(max_grad_norm="auto", noise_multiplier=0.0, num_slots=4)
    first.step(samples("mlp", 16))
    second = again(first, max_grad_norm="auto", controller=helpers.Integrating())
    assert second.optimizer.max_grad_norm == first.optimizer.max_grad_norm
    assert second.optimizer.controller.controller.integral == 0.0


def test_a_second_make_private_with_another_threshold_starts_anew():
    second = again(adapted(), max_grad_norm=0.9)

    assert second.optimizer.max_grad_norm == 0.9
    assert second.optimizer.initial_max_grad_norm == 0.9
    assert second.optimizer.num_releases == 0
    second.step(samples("mlp", 5))
    assert second.engine.accountant.history == [(0.3, 0.25, 4)]


def test_a_second_make_private_with_narrower_bounds_goes_on_within_them():
    first = adapted()
    assert first.optimizer.max_grad_norm > 1.75

    second = again(first, max_clipbound=1.75)

    assert second.optimizer.max_grad_norm == 1.75


def test_a_second_make_private_may_go_from_flat_to_slaclip_and_back():
    run = private(clipping="flat", max_grad_norm=1.7)
    run.step(samples("mlp", 5))

    run = again(run)
    assert run.optimizer.max_grad_norm == 1.7
    assert run.optimizer.num_releases == 0
    run.step(samples("mlp", 5))
    run = again(run, clipping="flat", max_grad_norm=0.5)
    run.step(samples("mlp", 5))

    assert run.optimizer.max_grad_norm == 0.5
    # Entries left behind would go on saying the threshold that SlaClip had.
    assert not [k for k in run.optimizer.state_dict()["param_groups"][0] if "slaclip" in k]
    assert run.engine.accountant.history == [(0.3, 0.25, 3)]


def test_a_huge_finite_number_from_a_controller_is_clamped_like_any_other():
    for number in (10**400, Fraction(10**400)):
        one = vector(controller=lambda clip_norm, indicator, number=number: number)
        one.release(gradients(0.5))
        assert one.optimizer.max_grad_norm == 50.0


def test_a_controller_whose_state_turns_bad_does_not_move_the_threshold():
    class Spoiled:
        calls = 0

        def __call__(self, clip_norm, indicator):
            self.calls += 1
            return 2 * clip_norm

        def state_dict(self):
            return {"calls": math.nan if self.calls else 0}

        def load_state_dict(self, state):
            self.calls = state["calls"]

    run = private(controller=Spoiled())
    [batch] = batches("mlp", [6])
    before = run.optimizer.max_grad_norm

    with pytest.raises(TypeError, match="must be a plain finite number"):
        run.step(batch)
    assert run.optimizer.max_grad_norm == before
    assert all(g["slaclip_max_grad_norm"] == before for g in run.optimizer.param_groups)
