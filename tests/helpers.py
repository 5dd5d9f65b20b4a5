"""Small models, loaders and training loops shared by the tests of the optimizers."""

from __future__ import annotations

import math
import multiprocessing
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import opacus
import torch
from opacus.layers import DPLSTM, DPMultiheadAttention
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import opacus_slaclip
from opacus_slaclip import SlackIndicator, SlaClipDPOptimizer

NUM_CLASSES = 3
Batch = tuple[torch.Tensor, torch.Tensor]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- models ---


class LastOutput(nn.Module):
    """A DPLSTM read at its last position."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = DPLSTM(4, 5, batch_first=True)
        self.head = nn.Linear(5, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class SelfAttention(nn.Module):
    """One attention layer over the sequence, averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = DPMultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.attention(x, x, x)[0].mean(1))


class MeanEmbedding(nn.Module):
    """Averaged token embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.head = nn.Linear(5, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x).mean(1))


class TiedWeights(nn.Module):
    """One matrix used twice in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x).tanh()).tanh())


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, NUM_CLASSES))


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(6, NUM_CLASSES))


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


def layernorm() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, NUM_CLASSES, bias=False)
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)),
        nn.Conv2d(1, 2, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(2 * 6 * 4, NUM_CLASSES),
    )


class Task(NamedTuple):
    """A model, a threshold near the median of its first gradient norms, and its input's shape."""

    model: Callable[[], nn.Module]
    clip_norm: float
    shape: tuple[int, ...] = (6,)
    is_tokens: bool = False


TASKS = {
    "attention": Task(SelfAttention, 1.3, (3, 4)),
    "cnn": Task(cnn, 3.4, (6, 4)),
    "embedding": Task(MeanEmbedding, 1.3, (4,), is_tokens=True),
    "frozen": Task(frozen, 1.4),
    "layernorm": Task(layernorm, 2.2),
    "linear": Task(linear, 2.2),
    "lstm": Task(LastOutput, 1.0, (3, 4)),
    "mlp": Task(mlp, 1.7),
    "tied": Task(TiedWeights, 1.5),
}


def samples(task: str, size: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Batch:
    """Draw inputs (of spread norms, so that some gradients are clipped) and labels."""
    generator = seeded(seed)
    shape = (size, *TASKS[task].shape)
    if TASKS[task].is_tokens:
        x = torch.randint(0, 7, shape, generator=generator)
    else:
        scales = torch.rand(size, *[1] * len(TASKS[task].shape), generator=generator)
        x = (torch.randn(shape, generator=generator) * 3 * scales).to(dtype)
    return x, torch.randint(0, NUM_CLASSES, (size,), generator=generator)


def batches(task: str, sizes: Iterable[int], *, seed: int = 1, **kwargs: Any) -> list[Batch]:
    return [samples(task, size, seed=seed + i, **kwargs) for i, size in enumerate(sizes)]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


# --- controllers ---


class Integrating:
    """A controller whose state is an integral of the error."""

    def __init__(self) -> None:
        self.integral = 0.0

    def __call__(self, clip_norm: float, indicator: SlackIndicator) -> float:
        self.integral += 0.5 - float(indicator.values[0])
        return clip_norm * math.exp(0.1 * self.integral)

    def state_dict(self) -> dict[str, float]:
        return {"integral": self.integral}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.integral = state["integral"]


# --- private training ---


@dataclass
class Run:
    """What make_private returned, and the streams of randomness behind it."""

    engine: opacus.PrivacyEngine
    model: Any
    optimizer: Any
    loader: DataLoader
    criterion: nn.Module
    noise_generator: torch.Generator
    thresholds: list[float] = field(default_factory=list)

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def backward(self, batch: Batch) -> None:
        x, y = batch
        self.criterion(self.model(x), y).backward()

    def step(self, batch: Batch) -> None:
        """Take one step on one (physical) batch; note the threshold it was clipped at."""
        self.optimizer.zero_grad()
        self.backward(batch)
        self.thresholds.append(self.optimizer.max_grad_norm)
        self.optimizer.step()


def private(
    task: str = "mlp",
    *,
    engine: opacus.PrivacyEngine | None = None,
    noise_multiplier: float | None = 0.3,
    max_grad_norm: float | None = None,
    num_samples: int = 64,
    batch_size: int = 16,
    torch_optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    loss_reduction: str = "mean",
    dtype: torch.dtype = torch.float32,
    clipping: str = "slaclip",
    dataset: TensorDataset | None = None,
    num_workers: int = 0,
    **kwargs: Any,
) -> Run:
    """Build a seeded private run; equal arguments give equal runs.

    Without a noise multiplier, keyword arguments name the privacy budget to calibrate it to.
    """
    engine = opacus_slaclip.PrivacyEngine(accountant="rdp") if engine is None else engine
    torch.manual_seed(0)
    model = TASKS[task].model().to(dtype)
    if dataset is None:
        dataset = TensorDataset(*samples(task, num_samples, dtype=dtype))
    arguments = dict(
        module=model,
        optimizer=torch_optimizer(model.parameters()),
        data_loader=DataLoader(
            dataset, batch_size=batch_size, generator=seeded(2), num_workers=num_workers
        ),
        max_grad_norm=TASKS[task].clip_norm if max_grad_norm is None else max_grad_norm,
        clipping=clipping,
        loss_reduction=loss_reduction,
        noise_generator=seeded(3),
        **kwargs,
    )
    with warnings.catch_warnings():
        # More slots than the noise allows test the arithmetic better than one or two would.
        warnings.filterwarnings("ignore", "num_slots=.* is above the recommended")
        warnings.filterwarnings("ignore", "grad_sample_mode='ew' raises on the empty batches")
        if noise_multiplier is None:
            module, optimizer, loader = engine.make_private_with_epsilon(**arguments)
        else:
            module, optimizer, loader = engine.make_private(
                noise_multiplier=noise_multiplier, **arguments
            )
    if not kwargs.get("wrap_model", True):
        module = model
    criterion = nn.CrossEntropyLoss(reduction=loss_reduction)
    return Run(engine, module, optimizer, loader, criterion, arguments["noise_generator"])


def per_sample_gradients(model: nn.Module, batch: Batch) -> list[list[torch.Tensor]]:
    """Differentiate the loss of one sample at a time: for each, one gradient a parameter."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    inputs, labels = batch
    if inputs.is_floating_point():
        inputs = inputs.to(parameters[0].dtype)
    gradients = []
    for x, y in zip(inputs, labels, strict=True):
        loss = nn.functional.cross_entropy(model(x.unsqueeze(0)), y.unsqueeze(0))
        gradients.append(list(torch.autograd.grad(loss, parameters)))
    return gradients


# --- one parameter, whose per-sample gradients the test sets itself ---


@dataclass
class Vector:
    """A parameter vector and its optimizer; a step releases the gradients it is given."""

    parameter: Any
    optimizer: Any

    def accumulate(self, gradients: torch.Tensor) -> None:
        """Pass one physical batch of gradients, shape (b, d), that does not end the logical one."""
        self.optimizer.signal_skip_step(do_skip=True)
        self.release(gradients)

    def release(self, gradients: torch.Tensor) -> torch.Tensor:
        """Take one step; return the clipped sum it noised."""
        self.optimizer.zero_grad()
        self.parameter.grad_sample = gradients
        self.optimizer.step()
        return self.parameter.summed_grad


def vector(
    num_entries: int = 1,
    *,
    optimizer_class: type[opacus.optimizers.DPOptimizer] = SlaClipDPOptimizer,
    noise_multiplier: float = 0.0,
    max_grad_norm: float = 1.0,
    expected_batch_size: float = 8,
    dtype: torch.dtype = torch.float32,
    learning_rate: float = 0.1,
    **kwargs: Any,
) -> Vector:
    parameter: Any = nn.Parameter(torch.zeros(num_entries, dtype=dtype))
    parameter.grad_sample = None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "num_slots=.* is above the recommended")
        optimizer = optimizer_class(
            torch.optim.SGD([parameter], lr=learning_rate),
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size,
            **kwargs,
        )
    return Vector(parameter, optimizer)


# --- a process that is killed ---


def kill_after(seconds: float, function: Callable[..., Any], *args: Any) -> None:
    """Call a function in a copy of this process, and kill that, wherever it is by then."""
    process = multiprocessing.get_context("fork").Process(target=_alone, args=(function, *args))
    process.start()
    time.sleep(seconds)
    process.kill()
    process.join()


def _alone(function: Callable[..., Any], *args: Any) -> None:
    # tqdm's lock is shared with this copy: killed while holding it, it would leave us waiting.
    tqdm.set_lock(threading.RLock())
    function(*args)
