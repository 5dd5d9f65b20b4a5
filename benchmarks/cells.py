"""One cell of a comparison: a private training run and the row of results it leaves."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import platform
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import opacus
import torch
from opacus.accountants import RDPAccountant
from opacus.accountants.utils import get_noise_multiplier
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch.utils.data import DataLoader

import opacus_slaclip
from benchmarks import methods, tasks

EPSILON_TOLERANCE = 1e-5
MAX_CLIP_NORMS = 60
MAX_INDICATORS = 8
EVALUATION_BATCH = 1000

Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """Everything that decides the outcome; equal cells are the same run.

    Attributes:
        task: Name in ``tasks.TASKS``.
        model: Name in ``tasks.MODELS``.
        method: Name in ``methods.METHODS``.
        learning_rate: SGD's learning rate, at the start.
        clip_norm: Initial threshold ``C_0``, in gradient-norm units.
        schedule: "constant", or "cosine" (to zero, step by step).
        seed: Seed of weights, batches and noise.
        epsilon: Budget that the noise is calibrated to.
        delta: The budget's delta.
        batch_size: Expected batch size, in samples.
        epochs: Number of epochs.
        momentum: SGD's momentum.
        weight_decay: SGD's weight decay.
    """

    task: str
    model: str
    method: str
    learning_rate: float
    clip_norm: float
    schedule: str
    seed: int
    epsilon: float
    delta: float
    batch_size: int
    epochs: int
    momentum: float
    weight_decay: float


def steps_per_epoch(num_samples: int, batch_size: int) -> int:
    """Return ``ceil(N / B)``; one over it is the rate of Poisson sampling."""
    return math.ceil(num_samples / batch_size)


@functools.cache
def calibrate(epsilon: float, delta: float, per_epoch: int, epochs: int) -> float:
    """Return Opacus's noise multiplier for exactly ``per_epoch * epochs`` steps (RDP)."""
    # The rate that Opacus accounts for: 1 / per_epoch, but for rounding (1 / 92 for 93).
    rate = 1 / int(1 / (1 / per_epoch))
    with _quiet():
        sigma = get_noise_multiplier(
            target_epsilon=epsilon,
            target_delta=delta,
            sample_rate=rate,
            steps=per_epoch * epochs,
            accountant="rdp",
            epsilon_tolerance=EPSILON_TOLERANCE,
        )
    return float(sigma)


def run_cell(cell: Cell, data_root: Path | None) -> Row:
    """Train and test one cell; a run that raises leaves a row with its message.

    Args:
        cell: What to run.
        data_root: Where the data is.

    Returns:
        The row, ready for JSON. It has ``error`` or the results.
    """
    start = time.perf_counter()
    try:
        with _quiet(), torch.random.fork_rng(devices=[]):
            outcome = _train_and_test(cell, tasks.load(cell.task, data_root))
    except Exception as error:  # noqa: BLE001  (whatever a method raises, the sweep goes on)
        outcome = {"error": f"{type(error).__name__}: {error}"}
    return {"cell": asdict(cell)} | outcome | stamp(start)


def stamp(start: float) -> Row:
    """Return what every row ends with: the time it took since ``start``, versions, machine."""
    return {
        "seconds": round(time.perf_counter() - start, 2),
        "versions": versions(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def versions() -> dict[str, str]:
    """Return the versions that results depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "opacus": opacus.__version__,
        "opacus_slaclip": opacus_slaclip.__version__,
    }


def _train_and_test(cell: Cell, split: tasks.Split) -> Row:
    per_epoch = steps_per_epoch(len(split.train), cell.batch_size)
    num_steps = per_epoch * cell.epochs
    sigma = calibrate(cell.epsilon, cell.delta, per_epoch, cell.epochs)
    private, mode = _make_private(cell, split, sigma)
    recorder = train(cell, private, num_steps)
    module = getattr(private.module, "_module", private.module)
    finite = all(bool(parameter.isfinite().all()) for parameter in module.parameters())
    return {
        "noise_multiplier": sigma,
        "num_steps": sum(steps for _, _, steps in private.engine.accountant.history),
        "epsilon_spent": _epsilon_spent(cell, sigma, private.engine.accountant.history),
        "validation_accuracy": accuracy(module, split.validation),
        "test_accuracy": accuracy(module, split.test),
        "final_clip_norm": _finite(recorder.clip_norms[-1]),
        "diverged": not finite,
        "grad_sample_mode": mode,
        "physical_batch_size": methods.physical_batch_size(cell.model, cell.method),
        "clip_norms": recorder.thinned_clip_norms(),
        "indicators": recorder.indicators,
    }


def _epsilon_spent(cell: Cell, sigma: float, history: list[tuple[float, float, int]]) -> float:
    """Return what the recorded steps cost, each at the noise multiplier of its whole release."""
    told = methods.engine_noise(cell.method, sigma, cell.batch_size)
    if any(noise != told for noise, _, _ in history):
        raise RuntimeError(f"The accountant recorded the noise {history}, not {told}.")
    accountant = RDPAccountant()
    accountant.history = [(sigma, rate, steps) for _, rate, steps in history]
    return float(accountant.get_epsilon(cell.delta))


def _make_private(cell: Cell, split: tasks.Split, sigma: float) -> tuple[methods.Private, str]:
    # The same three streams for every method, learning rate and threshold.
    weights, batches, noise = np.random.SeedSequence(cell.seed).generate_state(3).tolist()
    torch.manual_seed(weights)
    module = tasks.MODELS[cell.model]()
    loader = DataLoader(
        split.train,
        batch_size=cell.batch_size,
        collate_fn=tasks.pass_through,
        generator=torch.Generator().manual_seed(batches),
    )
    mode = methods.grad_sample_mode(cell.model, cell.method)
    optimizer = torch.optim.SGD(
        module.parameters(),
        lr=cell.learning_rate,
        momentum=cell.momentum,
        weight_decay=cell.weight_decay,
    )
    private = methods.make_private(
        cell.method,
        mode=mode,
        module=module,
        optimizer=optimizer,
        loader=loader,
        batch_size=cell.batch_size,
        noise_multiplier=sigma,
        clip_norm=cell.clip_norm,
        noise_generator=torch.Generator().manual_seed(noise),
    )
    return private, mode


class Recorder:
    """Keeps the threshold of every step and a few indicators."""

    def __init__(self, optimizer: Any, num_steps: int) -> None:
        self.optimizer = optimizer
        self.clip_norms = [float(optimizer.max_grad_norm)]
        self.indicators: list[list[Any]] = []
        # From the first step to the last.
        self._snapshots = set(_evenly(1, num_steps, MAX_INDICATORS))

    def after_step(self, step: int) -> None:
        """Record the threshold that follows step ``step`` (from 1)."""
        self.clip_norms.append(float(self.optimizer.max_grad_norm))
        indicator = getattr(self.optimizer, "slack_indicator", None)
        if indicator is not None and step in self._snapshots:
            values = [_finite(round(value, 3)) for value in indicator.values.tolist()]
            self.indicators.append([step, _short(indicator.clip_norm), values])

    def thinned_clip_norms(self) -> list[list[float | None]]:
        """Return [step, C after it] for at most ``MAX_CLIP_NORMS`` steps; step 0 is ``C_0``."""
        steps = _evenly(0, len(self.clip_norms) - 1, MAX_CLIP_NORMS)
        return [[step, _short(self.clip_norms[step])] for step in steps]


def _evenly(first: int, last: int, count: int) -> list[int]:
    return sorted({round(step) for step in np.linspace(first, last, count).tolist()})


def _short(value: float) -> float | None:
    return _finite(float(f"{value:.4g}"))


def _finite(value: float) -> float | None:
    return value + 0.0 if math.isfinite(value) else None  # JSON has no NaN; no -0.0


def train(cell: Cell, private: methods.Private, num_steps: int) -> Recorder:
    """Take exactly this many steps, at the cell's schedule, and return what was recorded."""
    optimizer = private.optimizer
    recorder = Recorder(optimizer, num_steps)
    private.module.train()
    step = 0
    with _physical_batches(cell, private) as loader:
        # Passes without end: Opacus's number of steps in a pass is not always ceil(N / B).
        for inputs, labels in itertools.chain.from_iterable(itertools.repeat(loader)):
            if cell.schedule == "cosine":
                factor = (1 + math.cos(math.pi * step / num_steps)) / 2
                for group in optimizer.param_groups:
                    group["lr"] = cell.learning_rate * factor
            optimizer.zero_grad()
            private.criterion(private.module(inputs), labels).backward()
            optimizer.step()
            if optimizer._is_last_step_skipped:  # the logical batch goes on
                continue
            step += 1
            recorder.after_step(step)
            if step == num_steps:
                break
    return recorder


def _physical_batches(
    cell: Cell, private: methods.Private
) -> contextlib.AbstractContextManager[DataLoader[Any]]:
    limit = methods.physical_batch_size(cell.model, cell.method)
    if limit is None:
        return contextlib.nullcontext(private.loader)
    return BatchMemoryManager(
        data_loader=private.loader, max_physical_batch_size=limit, optimizer=private.optimizer
    )


def accuracy(module: torch.nn.Module, samples: tasks.Samples) -> float:
    """Return the fraction that is classified correctly, by argmax even where outputs are NaN."""
    module.eval()
    correct = 0
    with torch.no_grad():
        parts = zip(
            samples.inputs.split(EVALUATION_BATCH),
            samples.labels.split(EVALUATION_BATCH),
            strict=True,
        )
        for inputs, labels in parts:
            correct += int((module(inputs).argmax(dim=1) == labels).sum())
    return correct / len(samples)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # Of Opacus's seeded noise, of torch's hooks, and of runs that diverge, which rows record.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
