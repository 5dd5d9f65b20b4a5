"""Long runs on hostile gradients: bounded, finite, accounted, and no larger at the end."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from opacus.accountants import RDPAccountant

from opacus_slaclip import SlaClipController, SlaClipDPOptimizer, SlaClipQController

NUM_STEPS = 10_000
EXPECTED = 8
SHAPES = ((3, 2), (4,))
BOUNDS = (0.01, 100.0)


def hostile_batch(step: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Gradients of 0 to 10 times the expected number of samples, of every kind there is."""
    size = int(torch.randint(0, 10 * EXPECTED + 1, (), generator=generator))
    scale = (0.0, 1e30, 1e-40, 1.0, 1e-3)[step % 5]
    samples = [scale * torch.randn(size, *shape, generator=generator) for shape in SHAPES]
    if step % 2:
        samples = [-g for g in samples]
    if step % 100 == 7 and size:
        samples[0][0, 0, 0] = math.nan
    return samples


@pytest.mark.parametrize("controller", [SlaClipController(), SlaClipQController(1.0)])
@pytest.mark.filterwarnings("ignore:A per-sample gradient was not finite:UserWarning")
def test_ten_thousand_hostile_steps(controller):
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    optimizer = SlaClipDPOptimizer(
        torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=EXPECTED,
        generator=torch.Generator().manual_seed(1),
        controller=controller,
        min_clipbound=BOUNDS[0],
        max_clipbound=BOUNDS[1],
    )
    accountant, reference = RDPAccountant(), RDPAccountant()
    optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(sample_rate=0.01))
    alive = None

    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for parameter, samples in zip(parameters, hostile_batch(step, generator), strict=True):
            parameter.grad_sample = samples
        optimizer.step()
        reference.step(noise_multiplier=1.0, sample_rate=0.01)
        assert type(optimizer.max_grad_norm) is float
        assert BOUNDS[0] <= optimizer.max_grad_norm <= BOUNDS[1]
        if step in (100, NUM_STEPS - 1):
            gc.collect()
            tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
            alive = alive or tensors

    assert all(bool(p.isfinite().all()) for p in parameters)
    assert optimizer.num_releases == NUM_STEPS
    assert tensors <= alive
    assert accountant.history == reference.history
    assert accountant.get_epsilon(1e-5) == reference.get_epsilon(1e-5)
