"""The trial variants of the benchmark: what each claims to be is what is measured."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import ideas
from opacus_slaclip import FixedController, PrivacyEngine, SlackIndicator, SlaClipController
from opacus_slaclip.slack import encode_slack


def exponential_indicator(clip_norm: float, *, num_slots: int, noise_std: float) -> SlackIndicator:
    """The indicator of norms of mean 1, exponentially distributed, without noise."""
    edges = clip_norm * (1 - np.arange(num_slots + 1) / num_slots)
    integral = edges + np.exp(-edges)  # of the distribution function
    means = (integral[:-1] - integral[1:]) * num_slots / clip_norm
    return SlackIndicator(
        values=torch.from_numpy(means),
        clip_norm=clip_norm,
        noise_std=noise_std,
        expected_batch_size=100.0,
    )


# --- only the ends ---


@pytest.mark.parametrize("num_slots", [2, 3, 5, 20, 200])
def test_end_amplitudes_exhaust_the_joint_norm_and_no_more(num_slots: int) -> None:
    norms = torch.linspace(0, 1.5, 200_001, dtype=torch.float64)
    unit = encode_slack(norms, clip_norm=1.0, num_slots=num_slots) * math.sqrt(num_slots)
    first, last = ideas.end_amplitudes(num_slots)

    def joint(first: float, last: float) -> float:
        slack = (first * unit[:, 0]) ** 2 + (last * unit[:, -1]) ** 2
        return float((norms.clamp(max=1.0) ** 2 + slack).max())

    assert joint(first, last) == pytest.approx(1.0, abs=1e-9)
    assert joint(first * 1.01, last) > 1.0 + 1e-5
    assert joint(first, last * 1.01) > 1.0 + 1e-5


def private_linear(sigma: float, **options: Any) -> tuple[nn.Module, Any]:
    data = TensorDataset(torch.linspace(0, 2, 20).unsqueeze(1), torch.zeros(20, 1))
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    module, optimizer, _ = PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.0),
        data_loader=DataLoader(data, batch_size=20),
        noise_multiplier=sigma,
        max_grad_norm=1.0,
        poisson_sampling=False,
        clipping="slaclip",
        controller=FixedController(),
        **options,
    )
    return module, optimizer


def take_step(module: nn.Module, optimizer: Any) -> torch.Tensor:
    """Step on samples whose gradients are 0, 2 / 19, ..., 2; return the indicator."""
    optimizer.zero_grad()
    module(torch.linspace(0, 2, 20).unsqueeze(1)).mean().backward()
    optimizer.step()
    values: torch.Tensor = optimizer.slack_indicator.values
    return values


@pytest.mark.filterwarnings("ignore:num_slots=5 is above the recommended:UserWarning")
def test_the_ends_are_those_of_the_whole_indicator() -> None:
    whole = take_step(*private_linear(0.0, num_slots=5))
    module, optimizer = private_linear(0.0, num_slots=5)
    ideas.release_ends_only(optimizer)
    ends = take_step(module, optimizer)
    assert ends[[0, -1]].tolist() == pytest.approx(whole[[0, -1]].tolist(), rel=1e-6)


@pytest.mark.filterwarnings("ignore:num_slots=5 is above the recommended:UserWarning")
def test_the_ends_carry_the_noise_that_goes_with_their_amplitudes() -> None:
    module, optimizer = private_linear(0.7, num_slots=5)
    ideas.release_ends_only(optimizer)
    torch.manual_seed(0)
    draws = torch.stack([take_step(module, optimizer)[[0, -1]] for _ in range(2000)])
    # 0.7 / (20 a). At n = 2000 a sample deviation is within 8 % of the true one, but for once in
    # 2 million; the noise of a whole indicator would be 1.34 and 1.79 times as large.
    expected = [0.035 / math.sqrt(2 / 5 - 1 / 25), 0.035 / (1 - 1 / 5)]
    assert draws.std(dim=0).tolist() == pytest.approx(expected, rel=0.08)


def test_one_slot_has_no_two_ends() -> None:
    _, optimizer = private_linear(0.7, num_slots=1)
    with pytest.raises(ValueError, match="num_slots must be at least 2"):
        ideas.release_ends_only(optimizer)


# --- averaging ---


def test_the_average_forgets_at_its_weight() -> None:
    seen: list[torch.Tensor] = []

    def spy(clip_norm: float, indicator: SlackIndicator, /) -> float:
        seen.append(indicator.values)
        return clip_norm

    averaging = ideas.AveragingController(spy, weight=0.25)
    shown = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    for values in shown:
        averaging(1.0, SlackIndicator(values, 1.0, 0.1, 10.0))
    assert seen[0].tolist() == [1.0, 0.0]
    assert seen[1].tolist() == [0.75, 0.25]
    assert seen[2].tolist() == [0.75 * 0.75 + 0.25, 0.75 * 0.25 + 0.25]


def test_a_weight_of_one_is_no_average() -> None:
    averaging = ideas.AveragingController(weight=1.0)
    for clip_norm in (0.5, 1.0, 2.0):
        indicator = exponential_indicator(clip_norm, num_slots=10, noise_std=0.0)
        assert averaging(clip_norm, indicator) == SlaClipController()(clip_norm, indicator)


# --- bias against variance ---


@pytest.mark.parametrize("variance", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_the_trade_off_is_the_least_error_for_exponential_norms(
    variance: float, scale: float
) -> None:
    num_slots, num_parameters = 400, 1000
    noise_std = math.sqrt(variance * num_slots / num_parameters)
    controller = ideas.TradeOffController(num_parameters)
    clip_norm = 1.0  # in units of the mean norm
    for _ in range(300):
        seen = exponential_indicator(clip_norm, num_slots=num_slots, noise_std=noise_std)
        clip_norm = controller(clip_norm * scale, seen) / scale
    grid = np.geomspace(1e-3, 20, 200_001)
    best = grid[np.argmin(np.exp(-2 * grid) + variance * grid**2)]
    assert clip_norm == pytest.approx(best, rel=0.01)
