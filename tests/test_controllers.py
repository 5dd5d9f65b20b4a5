"""Controllers: the next threshold, from released values only."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import handmade
import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opacus_slaclip import (
    FixedController,
    SlackIndicator,
    SlaClipController,
    SlaClipQController,
)
from opacus_slaclip.controllers import StatefulController, next_clip_norm

BOUNDS = {"min_clipbound": 0.1, "max_clipbound": 50.0}
LIMITS = {"c_min": 0.1, "c_max": 50.0}
LN_2 = math.log(2.0)  # exp(LN_2) is 2 exactly, exp(-LN_2) is 1/2

clip_norms = st.floats(0.1, 50.0)
rates = st.floats(0.0, 10.0)
noisy_values = st.lists(st.floats(-3.0, 4.0), min_size=1, max_size=20)
wild = st.sampled_from([-1.7e308, -1e300, -1e30, 1e30, 1e300, 1.7e308])


def indicator(values: list[float], clip_norm: float = 1.0) -> SlackIndicator:
    return SlackIndicator(
        values=torch.tensor(values, dtype=torch.float64),
        clip_norm=clip_norm,
        noise_std=0.0,
        expected_batch_size=64,
    )


def returning(result: Any) -> Callable[[float, SlackIndicator], Any]:
    return lambda clip_norm, release: result


# ---- the paper's rules ------------------------------------------------------------------------


@given(clip_norms, noisy_values, rates)
def test_slaclip_follows_the_paper(C: float, values: list[float], eta: float) -> None:
    controller = SlaClipController(clipbound_learning_rate=eta)
    moved = next_clip_norm(controller, C, indicator(values, C), **BOUNDS)
    # The exponent is at most 50 in size and rounded a few times; so is the factor, relatively.
    assert moved == pytest.approx(oracle.next_slaclip(C, values, eta=eta, **LIMITS), rel=1e-13)


@given(clip_norms, noisy_values, rates, st.floats(0.01, 0.99))
def test_slaclip_q_follows_the_paper(C: float, values: list[float], eta: float, q: float) -> None:
    controller = SlaClipQController(clipbound_learning_rate=eta, target_unclipped_quantile=q)
    moved = next_clip_norm(controller, C, indicator(values, C), **BOUNDS)
    expected = oracle.next_slaclip_q(C, values, eta=eta, q=q, **LIMITS)
    assert moved == pytest.approx(expected, rel=1e-13)  # as above


@given(clip_norms, noisy_values)
def test_the_fixed_controller_keeps_the_threshold(C: float, values: list[float]) -> None:
    assert next_clip_norm(FixedController(), C, indicator(values, C), **BOUNDS) == C


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        pytest.param(0.5, 0.0, 3.0, id="r=0, on target: stay"),
        pytest.param(-0.5, 0.0, 6.0, id="r=0, one below: double"),
        pytest.param(1.5, 0.0, 1.5, id="r=0, one above: halve"),
        pytest.param(1.0, 3.0, 3.0, id="r=1, on target: stay"),
        pytest.param(1.0, 9.0, 3.0, id="r is at most 1"),
        pytest.param(0.75, 1.5, 3.0, id="r=1/2, on target: stay"),
        pytest.param(0.5, -9.0, 3.0, id="a negative last slot is r=0"),
    ],
)
def test_slaclip_doubles_and_halves_exactly(first: float, last: float, expected: float) -> None:
    controller = SlaClipController(clipbound_learning_rate=LN_2)
    assert controller(3.0, indicator([first, 0.3, last], 3.0)) == expected


@pytest.mark.parametrize(
    ("first", "expected"), [(0.25, 3.0), (-0.75, 6.0), (1.25, 1.5), (2.25, 0.75)]
)
def test_slaclip_q_doubles_and_halves_exactly(first: float, expected: float) -> None:
    controller = SlaClipQController(clipbound_learning_rate=LN_2, target_unclipped_quantile=0.25)
    assert controller(3.0, indicator([first, 0.1], 3.0)) == expected


@pytest.mark.parametrize(("beta", "target"), [(0.0, 1.0), (0.25, 0.75), (1.0, 0.0)])
def test_beta_weighs_the_clipped_fraction(beta: float, target: float) -> None:
    controller = SlaClipController(clipbound_learning_rate=LN_2, beta=beta)
    assert controller(3.0, indicator([target, 0.0], 3.0)) == 3.0
    assert controller(3.0, indicator([target - 1.0, 0.0], 3.0)) == 6.0


def test_with_one_slot_first_and_last_are_the_same() -> None:
    controller = SlaClipController(clipbound_learning_rate=LN_2)
    # r = s / C = 1/4, so gamma = 5/8: off by 1/8.
    assert controller(2.0, indicator([0.5], 2.0)) == 2.0 * math.exp(LN_2 / 8)


@given(clip_norms, st.lists(st.floats(0.0, 1.0), min_size=1, max_size=20), rates)
def test_without_noise_slaclip_shrinks_by_exp_half_the_rate_at_most(
    C: float, values: list[float], eta: float
) -> None:
    moved = SlaClipController(clipbound_learning_rate=eta)(C, indicator(values, C))
    assert moved >= C * math.exp(-eta / 2) * (1 - 1e-13)  # a few roundings of an exponent below 5


@given(clip_norms, st.floats(0.1, 10.0), noisy_values)
def test_slaclip_q_does_not_depend_on_the_unit_of_the_norm(
    C: float, unit: float, values: list[float]
) -> None:
    controller = SlaClipQController()
    moved = controller(C, indicator(values, C))
    assert controller(unit * C, indicator(values, unit * C)) == pytest.approx(
        unit * moved,
        rel=4 * np.finfo(float).eps,  # two products on either side
    )


# ---- wild noise -------------------------------------------------------------------------------


@given(st.floats(1e-37, 1e37), rates, wild, wild | st.just(0.0))
def test_a_wild_draw_gives_a_finite_threshold_within_the_bounds(
    C: float, eta: float, first: float, last: float
) -> None:
    release = indicator([first, last], C)
    for controller in (SlaClipController(eta), SlaClipQController(eta)):
        assert math.isfinite(controller(C, release))
        moved = next_clip_norm(controller, C, release, min_clipbound=1e-37, max_clipbound=1e37)
        assert type(moved) is float
        assert 1e-37 <= moved <= 1e37


@pytest.mark.parametrize("controller", [SlaClipController(), SlaClipQController()])
@pytest.mark.parametrize(("first", "expected"), [(1e300, 0.1), (-1e300, 50.0)])
def test_a_wild_draw_hits_the_bound_it_points_to(
    controller: Any, first: float, expected: float
) -> None:
    assert next_clip_norm(controller, 1.0, indicator([first, 0.0]), **BOUNDS) == expected


# ---- any controller ---------------------------------------------------------------------------

numbers = (
    st.floats(allow_nan=False, allow_infinity=False)
    | st.integers(-(10**300), 10**300)
    | st.fractions(-(10**9), 10**9)
    | st.floats(-1e4, 1e4).map(np.float64)
    | st.floats(-1e4, 1e4, width=32).map(np.float32)
    | st.integers(-(2**60), 2**60).map(np.int64)
    | st.floats(-1e4, 1e4).map(torch.tensor)
    | st.integers(-1000, 1000).map(torch.tensor)
    | st.floats(-1e4, 1e4).map(lambda number: torch.tensor([number], dtype=torch.float64))
)


@given(numbers)
def test_any_finite_number_becomes_a_float_within_the_bounds(number: Any) -> None:
    moved = next_clip_norm(returning(number), 1.0, indicator([0.5]), **BOUNDS)
    assert type(moved) is float
    assert moved == min(max(float(number), 0.1), 50.0)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        pytest.param(7, 7.0, id="int"),
        pytest.param(0, 0.1, id="zero"),
        pytest.param(-0.0, 0.1, id="minus zero"),
        pytest.param(-3.0, 0.1, id="negative"),
        pytest.param(1e308, 50.0, id="1e308"),
        pytest.param(5e-324, 0.1, id="5e-324"),
        pytest.param(Fraction(5, 2), 2.5, id="fraction"),
        pytest.param(np.float32(2.5), 2.5, id="numpy float32"),
        pytest.param(np.int64(3), 3.0, id="numpy int64"),
        pytest.param(torch.tensor(2.5), 2.5, id="0-dim tensor"),
        pytest.param(torch.tensor(2.5, requires_grad=True), 2.5, id="tensor with gradient"),
        pytest.param(torch.tensor([[4]]), 4.0, id="one-element tensor"),
    ],
)
def test_what_a_controller_may_return(result: Any, expected: float) -> None:
    moved = next_clip_norm(returning(result), 1.0, indicator([0.5]), **BOUNDS)
    assert type(moved) is float
    assert moved == expected


@pytest.mark.parametrize(
    ("result", "bound"),
    [
        pytest.param(10**400, "max_clipbound", id="int"),
        pytest.param(-(10**400), "min_clipbound", id="negative int"),
        pytest.param(Fraction(10**400), "max_clipbound", id="fraction"),
    ],
)
def test_a_finite_number_too_large_for_a_float_is_clamped_like_any_other(
    result: Any, bound: str
) -> None:
    assert next_clip_norm(returning(result), 1.0, indicator([0.5]), **BOUNDS) == BOUNDS[bound]


@pytest.mark.parametrize(
    ("result", "error", "match"),
    [
        (math.nan, ValueError, "must return a finite threshold, got nan .*at clip_norm=1.*bounds"),
        (math.inf, ValueError, "must return a finite threshold, got inf"),
        (-math.inf, ValueError, "must return a finite threshold, got -inf"),
        (np.float32("nan"), ValueError, "must return a finite threshold, got nan"),
        (torch.tensor(math.nan), ValueError, "must return a finite threshold, got nan"),
        (None, TypeError, r"must return a number, got None \(NoneType\).*Return the next"),
        ("1.0", TypeError, r"must return a number, got '1.0' \(str\)"),
        (True, TypeError, r"must return a number, got True \(bool\)"),
        (np.bool_(True), TypeError, "must return a number, got np.True_"),
        (torch.tensor(True), TypeError, r"must return a number, got True \(bool\)"),
        (torch.ones(2), TypeError, r"must return a number, got tensor\(\[1., 1.\]\) \(Tensor\)"),
        (torch.ones(0), TypeError, r"must return a number, got tensor\(\[\]\) \(Tensor\)"),
        (1 + 0j, TypeError, r"must return a number, got \(1\+0j\) \(complex\)"),
        ([1.0], TypeError, r"must return a number, got \[1.0\] \(list\)"),
    ],
)
def test_what_a_controller_may_not_return(result: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=f"controller {match}"):
        next_clip_norm(returning(result), 1.0, indicator([0.5]), **BOUNDS)


def test_a_controller_is_given_the_threshold_and_the_release() -> None:
    seen = []
    release = indicator([0.5], 3.0)

    def controller(clip_norm: float, given: SlackIndicator) -> float:
        seen.append((clip_norm, given))
        return clip_norm

    next_clip_norm(controller, 3.0, release, **BOUNDS)
    assert seen == [(3.0, release)]


def test_any_callable_drives_the_optimizer_within_its_bounds() -> None:
    optimizer = handmade.make_optimizer(
        (2,), controller=lambda clip_norm, release: 4 * clip_norm, max_clipbound=50.0
    )
    thresholds = []
    for _ in range(4):
        handmade.take_empty_step(optimizer)
        thresholds.append(optimizer.max_grad_norm)
    assert thresholds == [4.0, 16.0, 50.0, 50.0]


def test_a_controller_may_use_the_whole_release() -> None:
    optimizer = handmade.make_optimizer(
        (2,),
        controller=lambda clip_norm, release: release.quantile(0.25),
        num_slots=4,
        expected_batch_size=64,
        max_grad_norm=4.0,
    )
    handmade.take_step(optimizer, [torch.tensor([[0.5, 0.0], [9.0, 0.0]]).repeat(32, 1)])
    # Half of the norms are 1/2, the middle of the last bin, so that its slot holds 1/4.
    assert optimizer.max_grad_norm == 0.5


@given(st.floats(0.1, 50.0), rates, noisy_values)
def test_a_controller_gives_the_same_answer_twice(
    C: float, eta: float, values: list[float]
) -> None:
    for controller in (SlaClipController(eta), SlaClipQController(eta), FixedController()):
        assert controller(C, indicator(values, C)) == controller(C, indicator(values, C))


# ---- configuration ----------------------------------------------------------------------------


def test_the_defaults_are_those_of_the_paper() -> None:
    assert SlaClipController() == SlaClipController(clipbound_learning_rate=0.2, beta=0.5)
    assert SlaClipQController() == SlaClipQController(
        clipbound_learning_rate=0.2, target_unclipped_quantile=0.5
    )


@pytest.mark.parametrize("controller", [SlaClipController(), SlaClipQController()])
def test_a_controller_cannot_be_reconfigured(controller: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        controller.clipbound_learning_rate = 0.5


@pytest.mark.parametrize("value", [0, 10, np.float32(0.5), Fraction(1, 5)])
@pytest.mark.parametrize("kind", [SlaClipController, SlaClipQController])
def test_a_rate_may_be_any_real_number_from_0_to_10(kind: Any, value: Any) -> None:
    assert math.isfinite(kind(clipbound_learning_rate=value)(1.0, indicator([0.3])))


@pytest.mark.parametrize(
    ("value", "error", "match"),
    [
        (-0.1, ValueError, r"clipbound_learning_rate must be in \[0, 10\], got -0.1. Pass eta"),
        (10.5, ValueError, r"clipbound_learning_rate must be in \[0, 10\], got 10.5"),
        (math.nan, ValueError, "clipbound_learning_rate must be finite, got nan"),
        (math.inf, ValueError, "clipbound_learning_rate must be finite, got inf"),
        (None, TypeError, "clipbound_learning_rate must be a real number, got None"),
        ("0.2", TypeError, "clipbound_learning_rate must be a real number, got '0.2'"),
        (True, TypeError, "clipbound_learning_rate must be a real number, got True"),
    ],
)
@pytest.mark.parametrize("kind", [SlaClipController, SlaClipQController])
def test_a_rate_out_of_range_is_refused(
    kind: Any, value: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        kind(clipbound_learning_rate=value)


@pytest.mark.parametrize(
    ("value", "error", "match"),
    [
        (-0.1, ValueError, r"beta must be in \[0, 1\], got -0.1. Pass the paper's 0.5"),
        (1.1, ValueError, r"beta must be in \[0, 1\], got 1.1"),
        (math.nan, ValueError, "beta must be finite, got nan"),
        ("1/2", TypeError, "beta must be a real number, got '1/2'"),
    ],
)
def test_a_beta_out_of_range_is_refused(value: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        SlaClipController(beta=value)


@pytest.mark.parametrize(
    ("value", "error", "match"),
    [
        (0.0, ValueError, r"target_unclipped_quantile must be in \(0, 1\), got 0. Pass the frac"),
        (1.0, ValueError, r"target_unclipped_quantile must be in \(0, 1\), got 1"),
        (-0.5, ValueError, r"target_unclipped_quantile must be in \(0, 1\), got -0.5"),
        (math.nan, ValueError, "target_unclipped_quantile must be finite, got nan"),
        (None, TypeError, "target_unclipped_quantile must be a real number, got None"),
    ],
)
def test_a_quantile_out_of_range_is_refused(value: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        SlaClipQController(target_unclipped_quantile=value)


# ---- controllers with a state -----------------------------------------------------------------


class CountingController:
    """Double the threshold at every other release."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, clip_norm: float, release: SlackIndicator) -> float:
        self.calls += 1
        return 2 * clip_norm if self.calls % 2 == 0 else clip_norm

    def state_dict(self) -> dict[str, float]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.calls = int(state["calls"])


class SavesOnly:
    """Offer one half of the protocol."""

    def __call__(self, clip_norm: float, release: SlackIndicator) -> float:
        return clip_norm

    def state_dict(self) -> dict[str, float]:
        return {}


def test_a_controller_is_stateful_if_it_saves_and_loads_its_state() -> None:
    assert isinstance(CountingController(), StatefulController)
    stateless = [SavesOnly(), returning(1.0), SlaClipController(), SlaClipQController()]
    assert not any(isinstance(controller, StatefulController) for controller in stateless)


def test_the_state_of_a_controller_travels_with_the_optimizer() -> None:
    optimizer = handmade.make_optimizer((2,), controller=CountingController())
    for _ in range(3):
        handmade.take_empty_step(optimizer)
    assert optimizer.max_grad_norm == 2.0

    resumed = handmade.make_optimizer((2,), controller=CountingController())
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.controller.calls == 3
    handmade.take_empty_step(resumed)
    assert resumed.max_grad_norm == 4.0
