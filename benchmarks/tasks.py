"""What is learned: a data set with a fixed split, the models for it, and the paper's settings.

A tenth of the training set, at most 5,000 samples and always the same, is held out to choose
hyperparameters on; the privacy of the rest, ``N`` samples, is what epsilon speaks of.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from benchmarks import corpora, models
from opacus_slaclip.demo import data as demo_data
from opacus_slaclip.demo.training import build_model

VALIDATION_FRACTION = 0.1
MAX_VALIDATION = 5_000
NAMES_TEST_FRACTION = 0.1
CACHE = Path("outputs/cache")

# Mean and standard deviation of pixels, as Opacus's MNIST example and others take them: public.
PIXELS = {"mnist": (0.1307, 0.3081), "fashion-mnist": (0.2860, 0.3530)}

# The paper's shared pools.
LEARNING_RATES = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0)
CLIP_NORMS = (0.1, 0.5, 1.0, 5.0, 10.0)
SCHEDULES = ("constant", "cosine")
SEEDS = (42, 43, 44)

MODELS: dict[str, Callable[[], nn.Module]] = {
    "digits_cnn": lambda: build_model(torch.Size((1, 8, 8)), 10),
    "small_cnn": models.small_cnn,
    "lenet_cnn": models.lenet_cnn,
    "cifar_cnn": models.cifar_cnn,
    "name_lstm": models.NameLSTM,
    "mean_words": models.MeanWords,
}


@dataclass(frozen=True)
class Task:
    """A data set's models (the first is the default) and settings.

    Attributes:
        models: Names in ``MODELS``, the default first, and about how many seconds an epoch at
            these settings takes on one core, in hooks mode.
        epsilon: Middle one of the paper's budgets.
        delta: The budget's delta.
        batch_size: Expected batch size, in samples.
        epochs: Number of epochs.
        momentum: SGD's momentum.
        weight_decay: SGD's weight decay.
    """

    models: dict[str, float]
    epsilon: float
    delta: float
    batch_size: int
    epochs: int
    momentum: float = 0.9
    weight_decay: float = 5e-4


_IMAGES = Task({"small_cnn": 9.0, "lenet_cnn": 150.0}, 2.0, 1e-5, 512, 8)
TASKS = {
    # Without momentum: with 0.9, the adaptive methods' best rate would be the pool's lowest.
    "digits": Task({"digits_cnn": 0.07}, 3.0, 1e-4, 128, 30, momentum=0.0),
    "mnist": _IMAGES,
    "fashion-mnist": _IMAGES,
    "cifar10": Task({"cifar_cnn": 125.0}, 6.0, 1e-5, 1024, 90),
    "names": Task({"name_lstm": 26.0}, 2.0, 8e-5, 256, 30, momentum=0.0, weight_decay=0.0),
    "imdb": Task({"mean_words": 6.0}, 4.0, 1e-5, 512, 90),
}


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Inputs and labels as tensors; a batch is indexed at once, without collation.

    Args:
        inputs: Shape (N, ...).
        labels: Shape (N,), int64.
    """

    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a batch; of shape (0, ...) for no indices, as Poisson sampling may draw them."""
        rows = torch.tensor(indices, dtype=torch.int64)
        return self.inputs[rows], self.labels[rows]

    def part(self, rows: torch.Tensor) -> Samples:
        """Return the samples at these rows."""
        return Samples(self.inputs[rows], self.labels[rows])


def pass_through(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Collate what ``Samples`` has already put together."""
    return batch


@dataclass(frozen=True)
class Split:
    """A data set, divided for training, the choice of hyperparameters, and testing."""

    train: Samples
    validation: Samples
    test: Samples


@functools.lru_cache(maxsize=1)
def load(name: str, data_root: Path | None) -> Split:
    """Load a task's data; the split is the same every time.

    Raises:
        DemoError, CorpusError: If files are missing or malformed.
    """
    if name in ("digits", "mnist", "fashion-mnist"):
        images = demo_data.load(name, data_root)
        return hold_out(_standardized(name, images.train), _standardized(name, images.test))
    if data_root is None:
        raise corpora.CorpusError(f"{name} is read from files: say where with --data-root.")
    if name == "names":
        names = Samples(*corpora.load_names(data_root))
        return hold_out(*divide(names, NAMES_TEST_FRACTION))
    if name == "imdb":
        train, test = corpora.load_imdb(data_root, CACHE)
    else:
        train, test = corpora.load_cifar10(data_root)
    return hold_out(Samples(*train), Samples(*test))


def _standardized(name: str, images: TensorDataset) -> Samples:
    mean, std = PIXELS.get(name, (0.0, 1.0))
    pixels, labels = images.tensors
    return Samples((pixels - mean) / std, labels)


def hold_out(train: Samples, test: Samples) -> Split:
    """Take the validation part out of the training set."""
    fraction = min(VALIDATION_FRACTION, MAX_VALIDATION / len(train))
    return Split(*divide(train, fraction), test=test)


def divide(samples: Samples, fraction: float) -> tuple[Samples, Samples]:
    """Return the samples without a random fraction, the same every time, and that fraction."""
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))
    count = math.floor(len(samples) * fraction)
    # In the order of the data set, so that memory is read forward.
    return samples.part(order[count:].sort().values), samples.part(order[:count].sort().values)
