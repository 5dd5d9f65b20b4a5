"""Published rivals of SlaClip that Opacus does not have, as Opacus optimizers.

name     | class             | reference
---------|-------------------|---------------------------------------------------------------
auto-s   | AutoSOptimizer    | Bu et al., "Automatic Clipping", NeurIPS 2023
dc-sgd-e | DCSGDOptimizer    | Wei et al., "DC-SGD", 2025, the expectation variant
"""

from __future__ import annotations

from typing import Any

import opacus
import torch
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.baselines.auto_s import AutoSOptimizer
from benchmarks.baselines.dc_sgd import DCSGDOptimizer

BASELINES: dict[str, type[AutoSOptimizer] | type[DCSGDOptimizer]] = {
    "auto-s": AutoSOptimizer,
    "dc-sgd-e": DCSGDOptimizer,
}


def make_private(
    method: str,
    engine: opacus.PrivacyEngine,
    *,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_loader: DataLoader[Any],
    noise_multiplier: float,
    max_grad_norm: float,
    noise_generator: torch.Generator | None = None,
) -> tuple[nn.Module, DPOptimizer, DataLoader[Any]]:
    """Make module, optimizer and loader private by a baseline: hooks mode, Poisson sampling.

    The engine makes them private with ``clipping="flat"``; its optimizer then gives its place, its
    settings and its accountant's hook to the baseline's and is never stepped.

    Args:
        method: A name in :data:`BASELINES`.
        engine: The engine whose accountant is charged, one step a logical batch.
        module: Model to train, in one process.
        optimizer: Optimizer of the model's parameters.
        data_loader: Loader of the training data.
        noise_multiplier: ``sigma`` of a whole step, at least 0.
        max_grad_norm: ``R`` of AUTO-S, ``C_0`` of DC-SGD; positive, in gradient-norm units.
        noise_generator: Source of the noise; None for torch's global one.

    Returns:
        (module, optimizer, data_loader), as the engine returns them.

    Raises:
        TypeError, ValueError: For an unknown method or an argument out of range, before anything
            is wrapped; for a distributed module.
    """
    if method not in BASELINES:
        known = ", ".join(map(repr, BASELINES))
        raise ValueError(f"method must be one of {known}, got {method!r}. Choose one of these.")
    baseline = BASELINES[method]
    baseline.check(noise_multiplier=noise_multiplier, max_grad_norm=max_grad_norm)
    private_module, flat, private_loader = engine.make_private(
        module=module,
        optimizer=optimizer,
        data_loader=data_loader,
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        clipping="flat",
        noise_generator=noise_generator,
    )
    if type(flat) is not DPOptimizer:
        raise ValueError(
            f"The baselines train in one process, but the engine made a {type(flat).__name__}. "
            "Pass a module that is not distributed."
        )
    private_optimizer = baseline(
        flat.original_optimizer,
        noise_multiplier=flat.noise_multiplier,
        max_grad_norm=flat.max_grad_norm,
        expected_batch_size=flat.expected_batch_size,
        loss_reduction=flat.loss_reduction,
        generator=flat.generator,
        secure_mode=flat.secure_mode,
    )
    private_optimizer.attach_step_hook(flat.step_hook)
    return private_module, private_optimizer, private_loader
