"""The noise on the slack: its scale, shape, independence and source, through the real optimizer.

Every test is seeded, so none is flaky. The false-alarm rate of a check is the chance that it would
reject a right mechanism under a fresh seed: 1e-6 throughout. Each check is also run on a mechanism
that is wrong and has to reject it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import handmade
import pytest
import torch
from opacus.schedulers import ExponentialNoise
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_slaclip import FixedController, PrivacyEngine, SlaClipDPOptimizer

FALSE_ALARM_RATE = 1e-6
DRAWS = 2_900  # enough for the chi-square check to tell 1.1 from 1 with a power of 99 %


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Noise(NamedTuple):
    """What a few empty batches release: noise alone, in gradient-norm units."""

    slack: torch.Tensor  # (steps, K)
    gradient: torch.Tensor  # (steps, d)
    clip_norms: torch.Tensor  # (steps, 1), C_t
    noise_multipliers: torch.Tensor  # (steps, 1), sigma_t

    def in_units_of_sigma_c(self) -> torch.Tensor:
        return self.slack / (self.noise_multipliers * self.clip_norms)


def collect(optimizer: SlaClipDPOptimizer, steps: int, *, scheduler: Any = None) -> Noise:
    slack, gradient, clip_norms, noise_multipliers = [], [], [], []
    for _ in range(steps):
        noise_multipliers.append(optimizer.noise_multiplier)
        clip_norms.append(optimizer.max_grad_norm)
        handmade.take_empty_step(optimizer)
        slack.append(handmade.released_slack(optimizer))
        gradient.append(handmade.released_gradient(optimizer))
        if scheduler is not None:
            scheduler.step()
    column = functools.partial(torch.tensor, dtype=torch.float64)
    return Noise(
        torch.stack(slack),
        torch.stack(gradient),
        column(clip_norms).unsqueeze(1),
        column(noise_multipliers).unsqueeze(1),
    )


def noise(
    steps: int, num_slots: int, *, seed: int = 0, num_entries: int = 2, **options: Any
) -> Noise:
    options = {"noise_multiplier": 1.0, "generator": seeded(seed)} | options
    return collect(handmade.make_optimizer((num_entries,), num_slots=num_slots, **options), steps)


# ---- the checks -------------------------------------------------------------------------------


def chi_square_band(draws: int) -> tuple[float, float]:
    """Return what the sum of squares of this many standard normals lies in, but for 1e-6."""
    tail = FALSE_ALARM_RATE / 2
    return float(stats.chi2.ppf(tail, draws)), float(stats.chi2.isf(tail, draws))


def has_scale(draws: torch.Tensor, std: float) -> bool:
    """Say whether the draws may be Gaussian of this standard deviation (chi-square, 1e-6)."""
    low, high = chi_square_band(draws.numel())
    return low <= float((draws / std).square().sum()) <= high


def is_standard_normal(draws: torch.Tensor) -> bool:
    """Say whether the draws may be standard normal (Kolmogorov-Smirnov, 1e-6)."""
    return bool(stats.kstest(draws.flatten().numpy(), "norm").pvalue > FALSE_ALARM_RATE)


def are_uncorrelated(x: torch.Tensor, y: torch.Tensor | None = None) -> bool:
    """Say whether all columns of x, or of x against y, may be uncorrelated.

    Of independent Gaussian columns with n rows, ``r sqrt((n - 2) / (1 - r^2))`` has Student's
    distribution; the largest is compared with the threshold for 1e-6 over the number of pairs.
    """
    n = len(x)
    z = x if y is None else y
    x, z = ((columns - columns.mean(0)) / columns.std(0, correction=0) for columns in (x, z))
    r = x.T @ z / n
    if y is None:
        r = r[tuple(torch.triu_indices(*r.shape, offset=1))]
    r = r.abs().clamp(max=1 - 1e-12)
    t = r * ((n - 2) / (1 - r * r)).sqrt()
    return float(t.max()) <= stats.t.isf(FALSE_ALARM_RATE / 2 / r.numel(), n - 2)


# ---- scale ------------------------------------------------------------------------------------

SETTINGS = [
    pytest.param(1.0, 1.0, 29, {}, id="sigma 1, C 1"),
    pytest.param(0.3, 20.0, 29, {}, id="sigma 0.3, C 20"),
    pytest.param(8.0, 0.05, 29, {}, id="sigma 8, C 0.05"),
    pytest.param(1.0, 1.0, 1, {}, id="one slot"),
    pytest.param(1.0, 1.0, 2_900, {}, id="2900 slots"),
    pytest.param(1.0, 1e-37, 29, {}, id="tiny C"),
    pytest.param(1.0, 1e37, 29, {}, id="huge C"),
    pytest.param(1.0, 2.0, 29, {"dtype": torch.float64}, id="float64"),
    pytest.param(1.0, 2.0, 29, {"secure_mode": True}, id="secure mode"),
    pytest.param(1.0, 2.0, 29, {"loss_reduction": "mean"}, id="mean reduction"),
]


@pytest.mark.parametrize(("sigma", "clip_norm", "num_slots", "options"), SETTINGS)
def test_slack_noise_has_scale_sigma_c_and_no_other(
    sigma: float, clip_norm: float, num_slots: int, options: dict[str, Any]
) -> None:
    """2,900 draws, false alarm 1e-6; noise of 0.9 and of 1.1 times the scale is rejected."""
    for factor in (1.0, 0.9, 1.1):
        drawn = noise(
            DRAWS // num_slots,
            num_slots,
            noise_multiplier=factor * sigma,
            max_grad_norm=clip_norm,
            **options,
        )
        assert drawn.slack.numel() == DRAWS
        assert has_scale(drawn.slack, sigma * clip_norm) == (factor == 1.0)


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_the_scale_check_rejects_a_scale_off_by_a_tenth_with_a_power_of_99_percent(
    factor: float,
) -> None:
    """2,900 draws, false alarm 1e-6."""
    low, high = (bound / factor**2 for bound in chi_square_band(DRAWS))
    accepted = stats.chi2.cdf(high, DRAWS) - stats.chi2.cdf(low, DRAWS)
    assert accepted < 0.01


def test_slack_and_gradient_noise_have_the_same_scale() -> None:
    """2,900 draws of each, false alarm 1e-6: they are coordinates of one Gaussian draw."""
    drawn = noise(100, 29, num_entries=29, noise_multiplier=0.7, max_grad_norm=3.0)
    assert has_scale(drawn.slack, 0.7 * 3.0)
    assert has_scale(drawn.gradient, 0.7 * 3.0)


def test_the_noise_is_the_same_whatever_the_batch_holds() -> None:
    full, empty = (
        handmade.make_optimizer((2,), noise_multiplier=1.0, num_slots=4, generator=seeded(0))
        for _ in range(2)
    )
    # Norms of 0, 0.5, 0.75 and above C: a slack sum of 4 u = 4 + 2 + 1 slots.
    handmade.take_step(full, [torch.tensor([[0.0, 0.0], [0.5, 0.0], [0.0, 0.75], [3.0, 4.0]])])
    handmade.take_empty_step(empty)
    slack = handmade.released_slack(full) - handmade.released_slack(empty)
    # In float32, the sum of counts of 3 and noise of the same size; lambda is 1/2.
    eps = torch.finfo(torch.float32).eps
    assert slack.tolist() == pytest.approx([1.5, 1.0, 0.5, 0.5], rel=0, abs=8 * eps)


@pytest.mark.parametrize("secure_mode", [False, True])
def test_without_noise_an_empty_batch_releases_exactly_zero(secure_mode: bool) -> None:
    drawn = noise(2, 5, noise_multiplier=0.0, secure_mode=secure_mode)
    assert not drawn.slack.any()
    assert not drawn.gradient.any()


def test_the_noise_follows_the_threshold() -> None:
    """2,900 draws at a threshold that moves at each step, false alarm 1e-6.

    Scaling them by the first threshold, or by the one that the step moved to, is rejected.
    """
    moves = iter([1.5, 0.5, 2.0, 0.75] * 25)
    drawn = noise(100, 29, controller=lambda clip_norm, release: clip_norm * next(moves))
    assert set(drawn.clip_norms.diff(dim=0).sign().flatten().tolist()) == {-1.0, 1.0}
    assert has_scale(drawn.in_units_of_sigma_c(), 1.0)
    assert not has_scale(drawn.slack, drawn.clip_norms[0].item())
    assert not has_scale(drawn.slack[:-1] / drawn.clip_norms[1:], 1.0)


def test_the_noise_follows_a_noise_scheduler() -> None:
    """2,900 draws while sigma falls by 1 % a step, false alarm 1e-6.

    Scaling them by the first or the last sigma is rejected.
    """
    optimizer = handmade.make_optimizer(
        (2,), num_slots=29, noise_multiplier=2.0, generator=seeded(0)
    )
    drawn = collect(optimizer, 100, scheduler=ExponentialNoise(optimizer, gamma=0.99))
    first, last = drawn.noise_multipliers[0].item(), drawn.noise_multipliers[-1].item()
    assert last == pytest.approx(2.0 * 0.99**99, rel=1e-12)  # a hundred products
    assert has_scale(drawn.in_units_of_sigma_c(), 1.0)
    assert not has_scale(drawn.slack, first)
    assert not has_scale(drawn.slack, last)
    assert optimizer.slack_indicator.noise_std == last * math.sqrt(29) / 2**30


def test_the_engine_hands_scale_and_generator_on() -> None:
    """2,900 draws through make_private and a model, false alarm 1e-6.

    The threshold is below every gradient norm, so that no sample has any slack.
    """
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    x = torch.randn(64, 2, generator=seeded(1))
    model, optimizer, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(x, x), batch_size=64),
        noise_multiplier=0.05,
        max_grad_norm=1e-6,
        min_clipbound=1e-6,
        controller=FixedController(),
        clipping="slaclip",
        num_slots=29,
        noise_generator=seeded(2),
        poisson_sampling=False,
    )
    slack = []
    for _ in range(100):
        optimizer.zero_grad()
        (model(x) - 3.0).square().mean().backward()
        optimizer.step()
        slack.append(handmade.released_slack(optimizer))
    assert has_scale(torch.stack(slack), 0.05 * 1e-6)
    assert not has_scale(torch.stack(slack), 1.1 * 0.05 * 1e-6)


# ---- shape ------------------------------------------------------------------------------------


@pytest.mark.parametrize("secure_mode", [False, True])
def test_the_noise_is_gaussian(secure_mode: bool) -> None:
    """50,000 draws, false alarm 1e-6."""
    drawn = noise(100, 500, noise_multiplier=0.5, max_grad_norm=4.0, secure_mode=secure_mode)
    assert is_standard_normal(drawn.in_units_of_sigma_c())


def wrong_shapes() -> Iterator[Any]:
    uniform = torch.rand(50_000, generator=seeded(0), dtype=torch.float64)
    yield pytest.param(math.sqrt(12.0) * (uniform - 0.5), id="uniform, same variance")
    laplace = (1 - 2 * (uniform - 0.5).abs()).log() * (uniform - 0.5).sign() / -math.sqrt(2.0)
    yield pytest.param(laplace, id="Laplace, same variance")
    normal = torch.randn(50_000, generator=seeded(0), dtype=torch.float64)
    yield pytest.param(0.9 * normal, id="scale 0.9")
    yield pytest.param(1.1 * normal, id="scale 1.1")
    yield pytest.param(normal + 0.05, id="mean 0.05")


@pytest.mark.parametrize("draws", list(wrong_shapes()))
def test_the_shape_check_rejects_another_shape_or_scale(draws: torch.Tensor) -> None:
    """50,000 draws, false alarm 1e-6."""
    assert not is_standard_normal(draws)


# ---- independence -----------------------------------------------------------------------------


@functools.cache
def thousand_steps() -> Noise:
    return noise(1_000, 20, num_entries=20)


def mixed(column: torch.Tensor, other: torch.Tensor, correlation: float = 0.3) -> torch.Tensor:
    return correlation * other + math.sqrt(1 - correlation**2) * column


def test_the_slots_are_independent_of_each_other() -> None:
    """1,000 steps, 190 pairs, false alarm 1e-6; a correlation of 0.3 in one pair is rejected."""
    slack = thousand_steps().slack
    assert are_uncorrelated(slack)
    planted = slack.clone()
    planted[:, 7] = mixed(slack[:, 7], slack[:, 12])
    assert not are_uncorrelated(planted)


def test_the_slots_are_independent_of_the_gradient_noise() -> None:
    """1,000 steps, 400 pairs, false alarm 1e-6; a correlation of 0.3 in one pair is rejected."""
    drawn = thousand_steps()
    assert are_uncorrelated(drawn.slack, drawn.gradient)
    planted = drawn.slack.clone()
    planted[:, 0] = mixed(drawn.slack[:, 0], drawn.gradient[:, 19])
    assert not are_uncorrelated(planted, drawn.gradient)


def test_the_slots_are_independent_between_steps() -> None:
    """999 pairs of steps, 400 pairs of slots and 400 of slot and entry, false alarm 1e-6.

    A correlation of 0.3 between one slot and its successor is rejected.
    """
    drawn = thousand_steps()
    assert are_uncorrelated(drawn.slack[:-1], drawn.slack[1:])
    assert are_uncorrelated(drawn.gradient[:-1], drawn.slack[1:])
    planted = drawn.slack.clone()
    planted[1:, 3] = mixed(drawn.slack[1:, 3], drawn.slack[:-1, 3])
    assert not are_uncorrelated(planted[:-1], planted[1:])


def test_the_independence_checks_reject_a_generator_that_is_reset_before_each_step() -> None:
    optimizer = handmade.make_optimizer(
        (20,), num_slots=20, noise_multiplier=1.0, generator=seeded(0)
    )
    steps = []
    for step in range(1_000):
        optimizer.generator.manual_seed(step // 2)  # so that every noise is used twice
        steps.append(collect(optimizer, 1).slack)
    slack = torch.cat(steps)
    assert not are_uncorrelated(slack[::2], slack[1::2])


def test_the_noise_is_fresh_at_each_step_and_in_each_slot() -> None:
    drawn = noise(50, 20, num_entries=20, dtype=torch.float64)
    values = torch.cat([drawn.slack, drawn.gradient], dim=1).flatten()
    # Of 2,000 draws with 53 bits, two agree by chance with a probability below 1e-9.
    assert len(values.unique()) == len(values)


# ---- source -----------------------------------------------------------------------------------


@pytest.mark.parametrize("secure_mode", [False, True])
def test_the_seed_of_the_generator_decides_the_noise(secure_mode: bool) -> None:
    first, again, other = (noise(3, 20, seed=s, secure_mode=secure_mode) for s in (1, 1, 2))
    assert torch.equal(first.slack, again.slack)
    assert torch.equal(first.gradient, again.gradient)
    assert (first.slack != other.slack).all()


@pytest.mark.parametrize("secure_mode", [False, True])
def test_with_a_generator_the_global_stream_is_neither_used_nor_moved(secure_mode: bool) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = noise(3, 20, secure_mode=secure_mode)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(noise(3, 20, secure_mode=secure_mode).slack, first.slack)


def test_without_a_generator_the_noise_comes_from_the_global_stream() -> None:
    """2,900 draws, false alarm 1e-6."""
    torch.manual_seed(0)
    first = noise(100, 29, generator=None)
    torch.manual_seed(0)
    assert torch.equal(noise(100, 29, generator=None).slack, first.slack)
    assert has_scale(first.slack, 1.0)


def test_gradient_and_slack_are_drawn_from_one_stream_the_gradient_first() -> None:
    drawn = noise(1, 16, num_entries=20, noise_multiplier=2.0, max_grad_norm=4.0)
    generator = seeded(0)
    gradient = torch.normal(0.0, 8.0, (20,), generator=generator)
    slack = torch.normal(0.0, 8.0, (16,), generator=generator)
    # lambda and B are powers of two, so that nothing has been rounded.
    assert torch.equal(drawn.gradient[0], gradient.double())
    assert torch.equal(drawn.slack[0], slack.double())
