"""One private training run: a small network, a budget, a clipping method, an initial threshold."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_slaclip import PrivacyEngine
from opacus_slaclip.demo import DemoError
from opacus_slaclip.demo.data import DataSplit
from opacus_slaclip.demo.records import IndicatorRecord, RunResult, RunSettings

OnStep = Callable[[float], None]

_EVALUATION_BATCH = 1000
# Each is printed once by the command in its own words, or says nothing about the result.
_EXPECTED_WARNINGS = (
    "Secure RNG turned off",
    "Full backward hook is firing",
    "Optimal order is the",
)


def build_model(image_shape: torch.Size, num_classes: int) -> nn.Module:
    """Build two small convolutions and a linear layer, without batch normalization.

    Tanh keeps activations, and with them gradient norms, bounded: a better fit for DP-SGD than
    ReLU. Batch normalization would mix samples, which no per-sample clipping can allow.

    Args:
        image_shape: (1, height, width), at least 4 pixels each way.
        num_classes: Number of outputs.

    Raises:
        DemoError: If the images are smaller.
    """
    height, width = image_shape[-2] // 4, image_shape[-1] // 4
    if height == 0 or width == 0:
        raise DemoError(f"Images must be at least 4 by 4 pixels, got {tuple(image_shape[-2:])}.")
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * height * width, num_classes),
    )


def train(settings: RunSettings, split: DataSplit, on_step: OnStep) -> RunResult:
    """Train a model at the settings and test it, once, at the end.

    Weights, batches and noise come from three independent streams derived from the seed, the same
    three for every method and threshold. A seeded noise makes a run repeatable, and for that
    reason is not for production.

    Args:
        settings: What to run.
        split: The data.
        on_step: Called after each logical step with the threshold, in gradient-norm units.

    Raises:
        DemoError: If the settings cannot be run, such as a budget no noise can meet.
    """
    with _quiet(), _threads(settings.threads), torch.random.fork_rng(devices=[]):
        engine = PrivacyEngine(accountant=settings.accountant)
        private = _make_private(engine, settings, split)
        clip_norms = _train_epochs(engine, private, settings, on_step)
        epsilon = float(engine.get_epsilon(settings.delta))  # type: ignore[no-untyped-call]
        model, optimizer, _ = private
        return RunResult(
            settings=settings,
            noise_multiplier=float(optimizer.noise_multiplier),
            final_clip_norm=clip_norms[-1],
            epsilon=epsilon,
            test_accuracy=accuracy(model, split.test),
            clip_norms=clip_norms,
            indicator=IndicatorRecord.of(getattr(optimizer, "slack_indicator", None)),
        )


def accuracy(model: nn.Module, test: TensorDataset) -> float:
    """Return the fraction of the test set that is classified correctly, in [0, 1]."""
    model.eval()
    correct = 0
    with torch.no_grad():
        for images, labels in DataLoader(test, batch_size=_EVALUATION_BATCH):
            correct += int((model(images).argmax(dim=1) == labels).sum())
    return correct / len(test)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        for start in _EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message=start)
        yield


def _make_private(engine: PrivacyEngine, settings: RunSettings, split: DataSplit) -> Any:
    weights, batches, noise = np.random.SeedSequence(settings.seed).generate_state(3).tolist()
    torch.manual_seed(weights)
    module = build_model(split.train.tensors[0].shape[1:], split.num_classes)
    loader = DataLoader(
        split.train,
        batch_size=settings.batch_size,
        generator=torch.Generator().manual_seed(batches),
    )
    try:
        return engine.make_private_with_epsilon(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=settings.learning_rate),
            data_loader=loader,
            target_epsilon=settings.epsilon,
            target_delta=settings.delta,
            epochs=settings.epochs,
            max_grad_norm=settings.clip_norm,
            clipping=settings.method,
            noise_generator=torch.Generator().manual_seed(noise),
        )
    except ValueError as error:
        raise DemoError(f"{settings.label()} cannot be run: {error}") from error


def _train_epochs(
    engine: PrivacyEngine, private: Any, settings: RunSettings, on_step: OnStep
) -> list[float]:
    """Train and return the threshold before the first step and after each one."""
    model, optimizer, _ = private
    criterion = nn.CrossEntropyLoss()
    clip_norms = [float(optimizer.max_grad_norm)]
    for _ in range(settings.epochs):
        with _physical_batches(private, settings.max_physical_batch_size) as batches:
            for images, labels in batches:
                optimizer.zero_grad()
                criterion(model(images), labels).backward()
                optimizer.step()
                # A physical batch inside a logical one is no step: the accountant knows.
                if _steps_taken(engine) == len(clip_norms):
                    clip_norms.append(float(optimizer.max_grad_norm))
                    on_step(clip_norms[-1])
    return clip_norms


def _steps_taken(engine: PrivacyEngine) -> int:
    return sum(steps for _, _, steps in engine.accountant.history)


def _physical_batches(
    private: Any, max_physical_batch_size: int | None
) -> contextlib.AbstractContextManager[Iterable[Any]]:
    _, optimizer, loader = private
    if max_physical_batch_size is None:
        return contextlib.nullcontext(loader)
    return BatchMemoryManager(
        data_loader=loader,
        max_physical_batch_size=max_physical_batch_size,
        optimizer=optimizer,
    )
