"""The released indicator as a value: bins, monotone CDF, quantiles, mean, noise."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import handmade
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

from opacus_slaclip import SlackIndicator
from opacus_slaclip.slack import normalize_slack, sum_slack

EPS = np.finfo(np.float64).eps


def indicator(
    values: list[float], clip_norm: float = 1.0, expected_batch_size: float = 64
) -> SlackIndicator:
    return SlackIndicator(
        values=torch.tensor(values, dtype=torch.float64),
        clip_norm=clip_norm,
        noise_std=0.0,
        expected_batch_size=expected_batch_size,
    )


def measure(norms: torch.Tensor, clip_norm: float, num_slots: int) -> SlackIndicator:
    """Return the indicator of a whole population, without noise."""
    summed = sum_slack(norms.double(), clip_norm=clip_norm, num_slots=num_slots)
    values = normalize_slack(summed, expected_batch_size=len(norms))
    return indicator(values.tolist(), clip_norm, len(norms))


noisy_values = st.lists(st.floats(-2.0, 3.0), min_size=1, max_size=30)
clip_norms = st.floats(1e-3, 1e3)


# ---- bins -------------------------------------------------------------------------------------


def test_bin_edges_fall_from_the_threshold_to_zero() -> None:
    assert indicator([0.5] * 4, clip_norm=2.0).bin_edges.tolist() == [2.0, 1.5, 1.0, 0.5, 0.0]
    assert indicator([0.5], clip_norm=3.0).bin_edges.tolist() == [3.0, 0.0]


@given(noisy_values, clip_norms)
def test_the_bins_cut_the_range_below_the_threshold_into_equal_parts(
    values: list[float], clip_norm: float
) -> None:
    release = indicator(values, clip_norm)
    edges = release.bin_edges
    assert release.num_slots == len(values)
    assert edges.shape == (len(values) + 1,)
    assert edges[0].item() == clip_norm
    assert edges[-1].item() == 0.0
    # Each edge is rounded twice, and the difference of two of them once.
    width = clip_norm / len(values)
    assert (-edges.diff()).tolist() == pytest.approx([width] * len(values), abs=4 * EPS * clip_norm)


@given(st.integers(1, 30), clip_norms, st.data())
def test_a_slot_is_the_mean_of_the_cdf_over_its_bin(
    num_slots: int, clip_norm: float, data: st.DataObject
) -> None:
    norm = data.draw(st.floats(0.0, 1.2)) * clip_norm
    release = measure(torch.tensor([norm], dtype=torch.float64), clip_norm, num_slots)
    upper, lower = release.bin_edges[:-1], release.bin_edges[1:]
    # The CDF of a single norm is 0 below and 1 above it.
    mean = ((upper - norm).clamp(min=0.0) / (upper - lower)).clamp(max=1.0)
    # Every quantity is off by a few eps of C, and a bin is C / K wide.
    assert (release.values - mean).abs().max() <= 8 * num_slots * EPS


# ---- the monotone CDF -------------------------------------------------------------------------


@given(noisy_values)
def test_monotone_is_the_clipped_isotonic_regression(values: list[float]) -> None:
    expected = isotonic_regression(values, increasing=False).x.clip(0.0, 1.0)
    # Sums of up to 30 values of size 3 and less, in another order.
    assert indicator(values).monotone().tolist() == pytest.approx(expected, rel=0, abs=200 * EPS)


@given(noisy_values)
def test_monotone_is_a_cdf_and_leaves_the_release_alone(values: list[float]) -> None:
    release = indicator(values)
    projected = release.monotone()
    assert projected.shape == (len(values),)
    assert projected.dtype == torch.float64
    assert (projected.diff() <= 0.0).all()
    assert projected.min() >= 0.0
    assert projected.max() <= 1.0
    assert release.values.tolist() == values


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=30))
def test_monotone_keeps_a_cdf_as_it_is(values: list[float]) -> None:
    falling = sorted(values, reverse=True)
    assert indicator(falling).monotone().tolist() == falling


# ---- quantiles --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("probability", "expected"),
    [
        pytest.param(0.0, 0.0, id="nothing lies below 0"),
        pytest.param(0.125, 0.25, id="between 0 and the first midpoint"),
        pytest.param(0.25, 0.5, id="first midpoint"),
        pytest.param(0.375, 1.0, id="between midpoints"),
        pytest.param(0.75, 2.5, id="third midpoint"),
        pytest.param(0.875, 3.0, id="between the last two"),
        pytest.param(1.0, 3.5, id="everything"),
    ],
)
def test_quantile_interpolates_between_the_midpoints_of_the_bins(
    probability: float, expected: float
) -> None:
    assert indicator([1.0, 0.75, 0.5, 0.25], clip_norm=4.0).quantile(probability) == expected


@pytest.mark.parametrize(
    ("values", "probability"),
    [
        pytest.param([0.5, 0.5, 0.25, 0.0], 0.6, id="half the norms are above C"),
        pytest.param([0.0, 0.0], 0.1, id="all norms are above C"),
        pytest.param([-0.1], 0.5, id="noise below 0"),
    ],
)
def test_a_quantile_out_of_reach_is_the_threshold(values: list[float], probability: float) -> None:
    assert indicator(values, clip_norm=4.0).quantile(probability) == 4.0


@given(st.integers(1, 50), clip_norms, st.floats(0.0, 1.0))
def test_quantiles_of_uniform_norms_are_exact(
    num_slots: int, clip_norm: float, fraction: float
) -> None:
    midpoints = [1.0 - (j + 0.5) / num_slots for j in range(num_slots)]  # F(x) = x / C there
    probability = fraction * midpoints[0]
    quantile = indicator(midpoints, clip_norm).quantile(probability)
    # Edges, midpoints and the interpolation are each off by a few eps, in a bin C / K wide.
    assert quantile == pytest.approx(probability * clip_norm, abs=16 * EPS * clip_norm)


@given(noisy_values, clip_norms, st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)))
def test_quantile_rises_with_the_probability_within_zero_and_the_threshold(
    values: list[float], clip_norm: float, probabilities: tuple[float, float]
) -> None:
    low, high = [indicator(values, clip_norm).quantile(p) for p in sorted(probabilities)]
    assert 0.0 <= low <= high <= clip_norm
    assert type(low) is type(high) is float


@pytest.mark.parametrize(
    ("probability", "error", "match"),
    [
        (-0.1, ValueError, r"probability must be in \[0, 1\], got -0.1. Pass a fraction"),
        (1.5, ValueError, r"probability must be in \[0, 1\], got 1.5"),
        (math.nan, ValueError, "probability must be finite, got nan"),
        ("0.5", TypeError, "probability must be a real number, got '0.5'"),
        (None, TypeError, "probability must be a real number, got None"),
        (True, TypeError, "probability must be a real number, got True"),
    ],
)
def test_quantile_refuses(probability: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        indicator([0.5]).quantile(probability)


# ---- the mean clipped norm --------------------------------------------------------------------


@given(noisy_values, clip_norms)
def test_mean_clipped_norm_follows_the_formula(values: list[float], clip_norm: float) -> None:
    mean = math.fsum(values) / len(values)
    # The mean of 30 values of size 3 and less, summed in another order.
    tolerance = 100 * EPS * clip_norm
    expected = pytest.approx(clip_norm * (1 - mean), rel=0, abs=tolerance)
    assert indicator(values, clip_norm).mean_clipped_norm() == expected


@given(st.lists(st.floats(0.0, 5.0), min_size=1, max_size=40), clip_norms, st.integers(1, 50))
def test_mean_clipped_norm_is_exact_without_noise(
    fractions: list[float], clip_norm: float, num_slots: int
) -> None:
    norms = [fraction * clip_norm for fraction in fractions]
    expected = math.fsum(min(norm, clip_norm) for norm in norms) / len(norms)
    release = measure(torch.tensor(norms, dtype=torch.float64), clip_norm, num_slots)
    # The slots of a sample add up to u = K (1 - n / C), whatever K is; 40 samples, 50 slots.
    assert release.mean_clipped_norm() == pytest.approx(
        expected, rel=0, abs=(len(norms) + num_slots + 8) * EPS * clip_norm
    )


def test_noise_of_mean_zero_does_not_shift_the_mean_clipped_norm() -> None:
    """100,000 noisy slots; six standard errors, so a false-alarm rate of 2e-9."""
    norms = torch.tensor([0.5, 1.0, 2.5, 7.0])
    exact = (0.5 + 1.0 + 2.5 + 4.0) / 4
    quiet = measure(norms, clip_norm=4.0, num_slots=100_000)
    noise = torch.randn(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    noisy = indicator((quiet.values + 0.5 * noise).tolist(), clip_norm=4.0)
    standard_error = 4.0 * 0.5 / math.sqrt(100_000)
    assert noisy.mean_clipped_norm() != quiet.mean_clipped_norm()
    assert abs(noisy.mean_clipped_norm() - exact) < 6 * standard_error


# ---- what the optimizer puts into it ----------------------------------------------------------


@pytest.mark.parametrize(("sigma", "num_slots", "batch_size"), [(1.0, 5, 128), (0.3, 1, 2)])
def test_the_released_noise_std_is_sigma_sqrt_k_over_b(
    sigma: float, num_slots: int, batch_size: int
) -> None:
    optimizer = handmade.make_optimizer(
        (2,), noise_multiplier=sigma, num_slots=num_slots, expected_batch_size=batch_size
    )
    handmade.take_empty_step(optimizer)
    release = optimizer.slack_indicator
    assert release.noise_std == sigma * math.sqrt(num_slots) / batch_size
    assert release.expected_batch_size == batch_size
    assert release.clip_norm == optimizer.max_grad_norm == 1.0
    assert release.num_slots == num_slots
    assert release.values.dtype == torch.float64


def test_an_indicator_cannot_be_reassigned() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        indicator([0.5]).clip_norm = 2.0


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            [0.75, 0.5],
            "SlackIndicator(values=[0.750, 0.500], num_slots=2, clip_norm=1.5, noise_std=0)",
        ),
        (
            [1.0, 0.8, 0.6, 0.4, 0.2],
            "SlackIndicator(values=[1.000, 0.800, 0.600, 0.400, ...], num_slots=5, "
            "clip_norm=1.5, noise_std=0)",
        ),
    ],
)
def test_repr_shows_the_release_shortened(values: list[float], expected: str) -> None:
    assert repr(indicator(values, clip_norm=1.5)) == expected
