"""The baselines of the benchmarks: their mechanisms, their accounting and how DC-SGD adapts.

Every test is seeded. Each statistical check names its number of draws; its false-alarm rate, the
chance to reject a right mechanism under a fresh seed, is 1e-6, and it has to reject wrong scales.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import opacus
import pytest
import torch
from helpers import (
    Run,
    Vector,
    mlp,
    per_sample_gradients,
    private,
    samples,
    seeded,
    sgd,
    vector,
)
from opacus.accountants import RDPAccountant
from opacus.utils.batch_memory_manager import BatchMemoryManager
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.baselines import BASELINES, AutoSOptimizer, DCSGDOptimizer, make_private
from benchmarks.baselines.dc_sgd import (
    gradient_noise_multiplier,
    next_norm_range,
    norm_histogram,
    optimal_clip_norm,
)
from opacus_slaclip import PrivacyEngine

EPS = torch.finfo(torch.float32).eps
FALSE_ALARM_RATE = 1e-6
STEPS = 145
ENTRIES = 20  # of the parameter, and bins of the histogram
DRAWS = STEPS * ENTRIES  # 2,900: the chi-square check then tells 1.1 from 1 with a power of 99 %
METHODS = list(BASELINES)


def private_run(
    method: str, *, noise_multiplier: float = 1.0, num_samples: int = 64, batch_size: int = 16
) -> Run:
    torch.manual_seed(0)
    model = mlp()
    engine = PrivacyEngine(accountant="rdp")
    noise_generator = seeded(3)
    dataset = TensorDataset(*samples("mlp", num_samples))
    module, optimizer, loader = make_private(
        method,
        engine,
        module=model,
        optimizer=sgd(model.parameters()),
        data_loader=DataLoader(dataset, batch_size=batch_size, generator=seeded(2)),
        noise_multiplier=noise_multiplier,
        max_grad_norm=1.7,
        noise_generator=noise_generator,
    )
    return Run(engine, module, optimizer, loader, nn.CrossEntropyLoss(), noise_generator)


def empty(num_entries: int) -> torch.Tensor:
    return torch.zeros(0, num_entries)


def of_norm(norm: float, size: int, num_entries: int = 1) -> torch.Tensor:
    gradients = torch.zeros(size, num_entries)
    gradients[:, 0] = norm
    return gradients


def has_scale(draws: torch.Tensor, std: float) -> bool:
    """Say whether the draws may be Gaussian of mean 0 and this standard deviation (1e-6)."""
    low = stats.chi2.ppf(FALSE_ALARM_RATE / 2, draws.numel())
    high = stats.chi2.isf(FALSE_ALARM_RATE / 2, draws.numel())
    return bool(low <= float((draws.double() / std).square().sum()) <= high)


def assert_scale_is(draws: torch.Tensor, std: float) -> None:
    assert draws.numel() == DRAWS
    assert has_scale(draws, std)
    for wrong in (0.9, 1.1, math.sqrt(2), math.sqrt(0.5)):
        assert not has_scale(draws, wrong * std)


def released_gradient(optimized: Vector) -> torch.Tensor:
    """Return the noisy sum: the mean gradient times the expected size, here a power of two."""
    return optimized.parameter.grad * optimized.optimizer.expected_batch_size


# --- AUTO-S ---


@pytest.mark.parametrize("norm", [0.0, 1e-6, 0.01, 0.3, 1.0, 50.0, 1e6])
def test_auto_s_scales_one_gradient_below_r_by_the_closed_form(norm: float) -> None:
    optimized = vector(3, optimizer_class=AutoSOptimizer, max_grad_norm=2.0)
    direction = np.array([2.0, -1.0, 2.0]) / 3.0
    gradient = torch.tensor(norm * direction, dtype=torch.float32)
    got = optimized.release(gradient.unsqueeze(0)).double().numpy()
    exact = gradient.double().numpy()
    exact_norm = np.linalg.norm(exact)
    # Rounding: the norm of 3 entries, an addition, a division, a product.
    np.testing.assert_allclose(got, exact * 2.0 / (exact_norm + 0.01), rtol=8 * EPS, atol=0)
    assert np.linalg.norm(got) < 2.0 * (1 + 8 * EPS)
    if norm <= 50.0:  # above, R n / (n + gamma) is closer to R than rounding
        assert np.linalg.norm(got) < 2.0


def test_auto_s_on_a_model_is_the_oracles_sum() -> None:
    run = private_run("auto-s", noise_multiplier=0.0)
    batch = samples("mlp", 12, seed=5)
    model = mlp().double()
    model.load_state_dict(
        {k.removeprefix("_module."): v for k, v in run.model.state_dict().items()}
    )
    gradients = [
        np.concatenate([g.flatten().numpy() for g in sample])
        for sample in per_sample_gradients(model, batch)
    ]
    expected = sum(g * 1.7 / (np.linalg.norm(g) + 0.01) for g in gradients)
    run.step(batch)
    got = torch.cat([p.summed_grad.flatten() for p in run.optimizer.params]).double().numpy()
    # 12 samples of norm below 1.7, each off by the rounding of a backward pass of three layers.
    np.testing.assert_allclose(got, expected, rtol=0, atol=64 * EPS * 12 * 1.7)


def test_auto_s_noise_has_scale_sigma_r() -> None:
    optimized = vector(
        ENTRIES,
        optimizer_class=AutoSOptimizer,
        noise_multiplier=3.0,
        max_grad_norm=0.5,
        generator=seeded(0),
    )
    drawn = []
    for _ in range(STEPS):
        optimized.release(empty(ENTRIES))
        drawn.append(released_gradient(optimized))
    assert_scale_is(torch.stack(drawn), 1.5)


@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_no_gradient_is_taken_twice(method: str, is_last: bool) -> None:
    run = private_run(method)
    for _ in range(2):
        run.optimizer.signal_skip_step(do_skip=not is_last)
    run.step(samples("mlp", 4))
    with pytest.raises(ValueError, match="zero_grad"):
        run.optimizer.step()
    assert len(run.engine.accountant) == is_last


# --- the release of DC-SGD ---


def test_the_budget_is_split_as_stated() -> None:
    """1/9 - 1/25 = 16/225, so sigma = 3 and sigma_hist = 5 leave 15/4."""
    assert gradient_noise_multiplier(3.0, 5.0) == pytest.approx(15 / 4, rel=1e-14)
    assert gradient_noise_multiplier(0.0, 5.0) == 0.0


def noisy_steps(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gradient over C and histogram of empty batches at sigma = 3, one row a step."""
    optimized = vector(
        ENTRIES,
        optimizer_class=DCSGDOptimizer,
        noise_multiplier=3.0,
        max_grad_norm=0.5,
        generator=seeded(seed),
    )
    gradients, histograms = [], []
    for _ in range(STEPS):
        clip_norm = optimized.optimizer.max_grad_norm
        optimized.release(empty(ENTRIES))
        gradients.append(released_gradient(optimized).double() / clip_norm)
        histograms.append(optimized.optimizer.histogram.double())
    return torch.stack(gradients), torch.stack(histograms)


def test_dc_sgd_noise_has_scale_sigma_grad_c_and_sigma_hist() -> None:
    """Empty batches are noised like any; the threshold moves all the while."""
    gradients, histograms = noisy_steps()
    assert_scale_is(gradients, 15 / 4)
    assert not has_scale(gradients, 3.0)  # the whole budget spent on the gradient
    assert_scale_is(histograms, 5.0)


def test_dc_sgd_noise_of_gradient_and_histogram_is_independent() -> None:
    """2,900 pairs of Gaussians; r sqrt((n - 2) / (1 - r^2)) has Student's distribution."""
    gradients, histograms = noisy_steps()

    def may_be_independent(x: torch.Tensor, y: torch.Tensor) -> bool:
        return bool(stats.pearsonr(x.flatten(), y.flatten()).pvalue > FALSE_ALARM_RATE)

    assert may_be_independent(gradients, histograms)
    assert not may_be_independent(gradients + 0.2 * histograms, histograms)


def test_one_sample_moves_the_joint_release_by_one_over_sigma_in_units_of_its_noise() -> None:
    """Neighbouring batches, without noise; at or above C the bound is attained."""
    gradients = torch.randn(9, 4, generator=seeded(1))
    others = [gradients * scale for scale in (0.1, 1.0, 30.0)]
    for norm in (0.0, 0.3, 1.0, 1.9, 7.0):
        for rest in others:
            sums, histograms = [], []
            for batch in (rest, torch.cat([rest, of_norm(norm, 1, 4)])):
                optimized = vector(4, optimizer_class=DCSGDOptimizer, max_grad_norm=1.0)
                sums.append(optimized.release(batch.clone()).double())
                histograms.append(optimized.optimizer.histogram.double())
            moved = torch.cat(
                [(sums[1] - sums[0]) / (15 / 4), (histograms[1] - histograms[0]) / 5.0]
            )
            expected = math.hypot(min(norm, 1.0) / (15 / 4), 1 / 5)
            # Sums of 10 vectors of norm at most 1; Opacus's 1e-6 in the divisor.
            assert float(moved.norm()) == pytest.approx(expected, abs=10 * 4 * EPS + 1e-6)
            assert float(moved.norm()) <= 1 / 3 + 40 * EPS
    assert math.hypot(1 / (15 / 4), 1 / 5) == pytest.approx(1 / 3, rel=1e-14)


def test_the_privacy_loss_of_the_joint_release_is_that_of_one_gaussian_at_sigma() -> None:
    """The log-likelihood ratio for one clipped sample is Gaussian of variance 1 / sigma^2.

    A shift by e_k in one gradient entry (over C) and one bin, for each of 20 disjoint pairs and 145
    steps: 2,900 independent scores.
    """
    gradients, histograms = noisy_steps(seed=1)
    scores = gradients / (15 / 4) ** 2 + histograms / 25
    assert_scale_is(scores, 1 / 3)
    # The two mechanisms without a split of the budget would show more.
    assert not has_scale(scores, math.hypot(1 / 3, 1 / 5))


def test_the_histogram_of_known_norms() -> None:
    norms = torch.tensor([0.0, 0.49, 0.5, 1.99, 2.0, 7.0, math.inf, math.nan])
    counts = norm_histogram(norms, norm_range=2.0, num_bins=4)
    assert counts.tolist() == [2, 1, 0, 5]
    assert norm_histogram(norms[:0], norm_range=2.0, num_bins=4).tolist() == [0, 0, 0, 0]


def test_noise_that_would_cost_more_than_the_step_is_refused() -> None:
    for sigma in (5.0, 7.5):
        with pytest.raises(ValueError, match="noise_multiplier must be below the histogram's"):
            vector(optimizer_class=DCSGDOptimizer, noise_multiplier=sigma)
    optimized = vector(
        optimizer_class=DCSGDOptimizer, noise_multiplier=7.5, histogram_noise=12.5
    ).optimizer
    assert optimized.gradient_noise_multiplier == pytest.approx(7.5 / 0.8, rel=1e-14)


# --- the optimal threshold ---


def brute_force(histogram: np.ndarray, norm_range: float, variance: float) -> tuple[float, float]:
    """Return the best C on a grid of 40,001 points and its error, bin by bin."""
    grid = np.linspace(0.0, norm_range, 40_001)
    weights = [max(float(count), 0.0) for count in histogram]
    bias = np.zeros_like(grid)
    for j, weight in enumerate(weights):
        mid_point = norm_range * (2 * j + 1) / (2 * len(weights))
        bias += weight / sum(weights) * np.maximum(mid_point - grid, 0.0)
    errors = bias**2 + variance * grid**2
    return float(grid[errors.argmin()]), float(errors.min())


@pytest.mark.parametrize("variance", [1e-4, 1e-2, 0.3, 4.0])
@pytest.mark.parametrize("seed", range(4))
def test_the_optimum_is_that_of_a_fine_grid(variance: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    norms = generator.lognormal(0.0, 0.7, size=400)
    counts = np.histogram(norms, bins=20, range=(0.0, 5.0))[0] + generator.normal(0, 5, size=20)
    expected, _ = brute_force(counts, 5.0, variance)
    got = optimal_clip_norm(torch.tensor(counts), norm_range=5.0, noise_variance=variance)
    assert got == pytest.approx(expected, abs=5.0 / 40_000)


def test_the_optimum_in_closed_form() -> None:
    """One bin at m: C = m / (1 + v). Two, where C lies between their mid-points."""
    one = torch.tensor([0.0, 0.0, 12.0, 0.0])
    assert optimal_clip_norm(one, norm_range=8.0, noise_variance=0.25) == pytest.approx(4.0)
    # Mid-points 1 and 3, half the mass each: above C in (1, 3) is W = 1/2, S = 3/2.
    two = torch.tensor([5.0, 5.0])
    assert optimal_clip_norm(two, norm_range=4.0, noise_variance=0.25) == pytest.approx(1.5)
    assert optimal_clip_norm(two, norm_range=4.0, noise_variance=0.0) == pytest.approx(3.0)


def test_negative_counts_are_no_mass_and_without_mass_the_threshold_stays() -> None:
    counts = torch.tensor([-3.0, 7.0, -1e9, 2.0])
    clean = torch.tensor([0.0, 7.0, 0.0, 2.0])
    options = {"norm_range": 3.0, "noise_variance": 0.1}
    assert optimal_clip_norm(counts, **options) == optimal_clip_norm(clean, **options)
    assert optimal_clip_norm(-counts.abs(), **options) is None
    optimized = vector(optimizer_class=DCSGDOptimizer, max_grad_norm=1.3)
    optimized.release(empty(1))  # at noise 0: no count is positive
    assert optimized.optimizer.max_grad_norm == 1.3


def test_a_step_moves_the_threshold_to_the_optimum_at_the_public_batch_size() -> None:
    """v = d sigma_grad^2 / B^2 = 20 (15/4)^2 / 64^2, although the batch has 40 samples."""
    optimized = vector(
        ENTRIES,
        optimizer_class=DCSGDOptimizer,
        noise_multiplier=3.0,
        expected_batch_size=64,
        generator=seeded(0),
    )
    optimized.release(torch.randn(40, ENTRIES, generator=seeded(1)) * 0.2)
    histogram = optimized.optimizer.histogram.numpy()
    expected, _ = brute_force(histogram, 2.0, 20 * (15 / 4) ** 2 / 64**2)
    assert optimized.optimizer.max_grad_norm == pytest.approx(expected, abs=2.0 / 40_000)
    assert optimized.optimizer.noise_multiplier == 3.0


# --- the range follows the norms ---


def followed(norm: float, num_steps: int, *, num_entries: int = 1) -> Vector:
    batch_size = 512
    optimized = vector(
        num_entries,
        optimizer_class=DCSGDOptimizer,
        noise_multiplier=1.0,
        expected_batch_size=batch_size,
        generator=seeded(0),
    )
    for _ in range(num_steps):
        optimized.release(of_norm(norm, batch_size, num_entries))
    return optimized


@pytest.mark.parametrize(
    ("norm", "num_steps"),
    [
        # Ten doublings lead from 2 C_0 to 2,048 C_0, one a step: the top bin holds 512 (std 5).
        (1000.0, 10),
        # Nine halvings lead to 2 C_0 / 512 = 0.0039 C_0. The bins above the quarter hold noise of
        # std 19.4, below B / 20 = 25.6 in 90.6 % of the steps: fewer than 9 of 24 is below 1e-9.
        (0.001, 24),
    ],
)
def test_the_range_reaches_norms_a_thousandfold_off(norm: float, num_steps: int) -> None:
    # So many entries that the variance (v = 0.04) outweighs the mass that noise leaves on top.
    optimizer = followed(norm, num_steps, num_entries=10_000).optimizer
    assert optimizer.norm_range / 4 <= norm <= optimizer.norm_range
    assert norm / 2 <= optimizer.max_grad_norm <= 2 * norm
    assert stats.binom.cdf(8, 24, stats.norm.cdf(25.6 / math.sqrt(15 * 25))) < 1e-9


@pytest.mark.parametrize("norm", [0.6, 1.0, 1.7])
def test_the_range_stays_where_it_fits(norm: float) -> None:
    """100 steps: no norm in the top bin or the lowest quarter, at 512 samples (std 5 a count)."""
    assert followed(norm, 100).optimizer.norm_range == 2.0


def test_the_rule_of_the_range() -> None:
    options = {"norm_range": 2.0, "noise_std": 5.0, "expected_batch_size": 200.0}

    def moved(**counts: float) -> float:
        histogram = torch.zeros(20)
        for name, count in counts.items():
            histogram[int(name.removeprefix("bin"))] = count
        return next_norm_range(histogram, **options) / 2.0

    assert moved(bin10=180.0, bin19=20.5) == 2.0
    assert moved(bin10=180.0, bin19=19.5) == 1.0
    assert moved(bin0=60.0, bin4=60.0, bin5=9.5) == 0.5
    assert moved(bin0=60.0, bin4=60.0, bin5=10.5) == 1.0
    assert moved(bin0=60.0, bin4=60.0, bin5=-30.0, bin18=39.0) == 0.5  # 9 in all: noise
    assert moved(bin0=99.0) == 1.0
    options["expected_batch_size"] = 40.0  # here the noise sets the limits: 15 and 33.5
    assert moved(bin19=14.5) == 1.0
    assert moved(bin19=15.5) == 2.0
    assert moved(bin0=33.0) == 1.0
    assert moved(bin0=34.0) == 0.5


def test_neither_vanishing_nor_endless_norms_let_the_range_run_away() -> None:
    for norm, limit in ((0.0, 2.0**-19), (math.inf, 2.0**21)):
        optimized = vector(optimizer_class=DCSGDOptimizer, learning_rate=0.0)
        for _ in range(30):
            optimized.release(of_norm(norm, 8))
        assert optimized.optimizer.norm_range == limit
        assert 0 < optimized.optimizer.max_grad_norm <= limit


# --- logical batches and accounting ---


def train_in_pieces(run: Run, max_physical_batch_size: int) -> int:
    """Train an epoch through Opacus's BatchMemoryManager; return the number of pieces."""
    num_pieces = 0
    with BatchMemoryManager(
        data_loader=run.loader,
        max_physical_batch_size=max_physical_batch_size,
        optimizer=run.optimizer,
    ) as loader:
        for batch in loader:
            run.step(batch)
            num_pieces += 1
    return num_pieces


@pytest.mark.parametrize("method", METHODS)
def test_virtual_batches_are_whole_batches(method: str) -> None:
    """Without noise: equal sums and thresholds but for the order of summation, equal counts."""
    gradients = torch.randn(24, 5, generator=seeded(1)) * torch.linspace(0.1, 3, 24).unsqueeze(1)
    whole, pieces = (vector(5, optimizer_class=BASELINES[method]) for _ in range(2))
    for _ in range(3):
        clip_norm = whole.optimizer.max_grad_norm
        expected = whole.release(gradients.clone())
        for piece in (gradients[:7], gradients[7:7], gradients[7:20]):
            pieces.accumulate(piece)
            assert pieces.optimizer.max_grad_norm == pytest.approx(clip_norm, rel=4 * EPS)
        got = pieces.release(gradients[20:])
        # 24 gradients of norm at most C, summed in another order.
        assert torch.allclose(got, expected, rtol=0, atol=24 * EPS * 24 * clip_norm)
        if method == "dc-sgd-e":
            assert torch.equal(pieces.optimizer.histogram, whole.optimizer.histogram)
            assert whole.optimizer.histogram.sum() == 24
    assert (whole.optimizer.max_grad_norm != 1.0) == (method == "dc-sgd-e")
    assert torch.allclose(pieces.parameter, whole.parameter, rtol=0, atol=100 * EPS)


@pytest.mark.parametrize("method", METHODS)
def test_a_logical_batch_is_charged_once_and_trains_as_in_one_piece(method: str) -> None:
    whole, pieces = (private_run(method, noise_multiplier=0.8) for _ in range(2))
    for batch in whole.loader:
        whole.step(batch)
    assert train_in_pieces(pieces, 3) > 4
    for run in (whole, pieces):
        assert run.engine.accountant.history == [(0.8, 0.25, 4)]
    for p, q in zip(whole.parameters, pieces.parameters, strict=True):
        # Equal noise, sums of about 16 gradients in another order, four steps.
        assert torch.allclose(p, q, rtol=0, atol=1000 * EPS)


@pytest.mark.parametrize("method", METHODS)
def test_epsilon_is_that_of_plain_dp_sgd(method: str) -> None:
    run = private_run(method, noise_multiplier=1.2)
    num_steps = 0
    for _ in range(3):
        for batch in run.loader:
            run.step(batch)
            num_steps += 1
    plain = RDPAccountant()
    for _ in range(num_steps):
        plain.step(noise_multiplier=1.2, sample_rate=0.25)
    assert run.engine.get_epsilon(1e-5) == plain.get_epsilon(1e-5)
    assert run.optimizer.noise_multiplier == 1.2


@pytest.mark.parametrize("method", METHODS)
def test_an_empty_batch_is_noised_and_charged(method: str) -> None:
    run = private_run(method)
    before = run.parameters
    x, y = samples("mlp", 1)
    run.step((x[:0], y[:0]))
    assert run.engine.accountant.history == [(1.0, 0.25, 1)]
    for p, q in zip(before, run.parameters, strict=True):
        assert (p != q).all()
    if method == "dc-sgd-e":
        assert run.optimizer.histogram.count_nonzero() == 20


@pytest.mark.parametrize("method", METHODS)
def test_an_empty_batch_within_a_poisson_pass_through_pieces(method: str) -> None:
    run = private_run(method, num_samples=12, batch_size=1)  # a third of the batches are empty
    sizes = [len(y) for _, y in run.loader]
    assert 0 in sizes
    train_in_pieces(run, 2)
    assert run.engine.accountant.history == [(1.0, pytest.approx(1 / 12), 12)]


def test_counts_of_an_abandoned_batch_do_not_leak_into_the_next() -> None:
    optimized = vector(optimizer_class=DCSGDOptimizer)
    optimized.parameter.grad_sample = of_norm(0.5, 6)
    optimized.optimizer.clip_and_accumulate()
    optimized.release(of_norm(0.5, 2))
    assert optimized.optimizer.histogram.sum() == 2


# --- make_private ---


@pytest.mark.parametrize("method", METHODS)
def test_all_but_the_optimizers_class_is_as_with_flat_clipping(method: str) -> None:
    run = private_run(method)
    flat = private("mlp", noise_multiplier=1.0, max_grad_norm=1.7, clipping="flat")
    assert type(run.optimizer) is BASELINES[method]
    assert isinstance(run.optimizer.original_optimizer, torch.optim.SGD)
    assert type(run.model) is type(flat.model)
    assert type(run.loader) is type(flat.loader)
    assert type(run.loader.batch_sampler) is type(flat.loader.batch_sampler)
    assert run.loader.batch_sampler.sample_rate == flat.loader.batch_sampler.sample_rate
    names = (
        "noise_multiplier",
        "max_grad_norm",
        "expected_batch_size",
        "loss_reduction",
        "secure_mode",
    )
    for name in names:
        assert getattr(run.optimizer, name) == getattr(flat.optimizer, name)
    assert run.optimizer.generator is run.noise_generator
    assert [y.tolist() for _, y in run.loader] == [y.tolist() for _, y in flat.loader]


def test_auto_s_draws_the_noise_of_flat_clipping() -> None:
    run = private_run("auto-s")
    flat = private("mlp", noise_multiplier=1.0, max_grad_norm=1.7, clipping="flat")
    x, y = samples("mlp", 1)
    for each in (run, flat):
        each.step((x[:0], y[:0]))
    for p, q in zip(run.parameters, flat.parameters, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("dc-sgd", {}, r"method must be one of 'auto-s', 'dc-sgd-e', got 'dc-sgd'"),
        ("dc-sgd-e", {"noise_multiplier": 5.0}, "must be below the histogram's noise 5, got 5"),
        ("dc-sgd-e", {"max_grad_norm": 0.0}, "max_grad_norm must be positive, got 0"),
        ("auto-s", {"max_grad_norm": -1.0}, "max_grad_norm must be positive, got -1"),
        ("auto-s", {"noise_multiplier": -1.0}, "noise_multiplier must not be negative, got -1"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_wrapped(
    method: str, options: dict[str, Any], message: str
) -> None:
    model = mlp()
    arguments: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0} | options
    with pytest.raises(ValueError, match=message):
        make_private(
            method,
            opacus.PrivacyEngine(),
            module=model,
            optimizer=sgd(model.parameters()),
            data_loader=DataLoader(TensorDataset(*samples("mlp", 8)), batch_size=4),
            **arguments,
        )
    assert not any(layer._forward_hooks for layer in model.modules())


@pytest.mark.parametrize("method", METHODS)
def test_training_reduces_the_loss(method: str) -> None:
    """Two separable clouds, a linear model, 60 private steps at sigma = 1."""
    x = torch.randn(512, 2, generator=seeded(0))
    y = (x.sum(1) > 0).long()
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    criterion = nn.CrossEntropyLoss()

    @torch.no_grad()
    def loss() -> float:
        return float(criterion(model(x), y))

    module, optimizer, loader = make_private(
        method,
        PrivacyEngine(accountant="rdp"),
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=128, generator=seeded(2)),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        noise_generator=seeded(3),
    )
    before = loss()
    for _ in range(15):
        for inputs, labels in loader:
            optimizer.zero_grad()
            criterion(module(inputs), labels).backward()
            optimizer.step()
    assert loss() < before / 2
