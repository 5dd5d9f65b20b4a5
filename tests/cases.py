"""The table of cases that every way of training must pass, and what it takes to train one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import opacus
import torch
from helpers import (
    NUM_CLASSES,
    TASKS,
    Batch,
    batches,
    per_sample_gradients,
    samples,
    seeded,
    sgd,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_slaclip import FixedController, PrivacyEngine

NUM_SAMPLES = 64
BATCH_SIZE = 16
EPS = torch.finfo(torch.float32).eps


class LowRank(nn.Module):
    """A frozen layer with a trainable detour of low rank, as LoRA adds it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 8).requires_grad_(False)
        self.down = nn.Linear(6, 2, bias=False)
        self.up = nn.Linear(2, 8, bias=False)
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((self.base(x) + self.up(self.down(x))).tanh())


def trainable(model: nn.Module) -> torch.optim.Optimizer:
    """Hold the trainable parameters alone."""
    return sgd([p for p in model.parameters() if p.requires_grad])


def everything(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(model.parameters())


def one_group_a_layer(model: nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": list(layer.parameters()), "lr": 0.1 / (1 + i)}
        for i, layer in enumerate(model.children())
    ]
    return torch.optim.SGD([group for group in groups if group["params"]], momentum=0.9)


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        mode: How per-sample gradients or norms are computed.
        task: Name of a task of the helpers: the inputs, a threshold and, by default, the model.
        is_wrapped: Whether ``make_private`` wraps the model.
        model: Another model for the same inputs.
        torch_optimizer: Builds the optimizer of a model.
        takes_empty: Whether an empty batch can be taken here; where not, Opacus raises too.
        is_bounded: Whether our ghost norms are upper bounds, slightly above Opacus's.
    """

    mode: str
    task: str
    is_wrapped: bool = True
    dtype: torch.dtype = torch.float32
    model: Callable[[], nn.Module] | None = None
    torch_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = everything
    takes_empty: bool = True
    is_bounded: bool = False

    @property
    def clip_norm(self) -> float:
        return TASKS[self.task].clip_norm

    def build(self) -> nn.Module:
        return (self.model or TASKS[self.task].model)().to(self.dtype)

    def batches(self, *sizes: int, seed: int = 1) -> list[Batch]:
        return batches(self.task, sizes, seed=seed, dtype=self.dtype)


def _lora(mode: str, **kwargs: Any) -> Case:
    return Case(mode, "mlp", model=LowRank, torch_optimizer=trainable, **kwargs)


def _groups(mode: str, **kwargs: Any) -> Case:
    return Case(mode, "mlp", torch_optimizer=one_group_a_layer, **kwargs)


DOUBLE = {"dtype": torch.float64}
BARE = {"is_wrapped": False}
RAISES_ON_EMPTY = {"takes_empty": False}

CASES = {
    "hooks-mlp": Case("hooks", "mlp"),
    "hooks-mlp-bare": Case("hooks", "mlp", **BARE),
    "hooks-cnn": Case("hooks", "cnn"),
    "hooks-cnn-double": Case("hooks", "cnn", **DOUBLE),
    "hooks-embedding": Case("hooks", "embedding"),
    "hooks-lstm": Case("hooks", "lstm"),
    "hooks-attention": Case("hooks", "attention", **RAISES_ON_EMPTY),
    "hooks-layernorm-bare": Case("hooks", "layernorm", **BARE),
    "hooks-frozen": Case("hooks", "frozen"),
    "hooks-lora-bare": _lora("hooks", **BARE),
    "hooks-tied": Case("hooks", "tied"),
    "hooks-groups": _groups("hooks"),
    "functorch-mlp-bare": Case("functorch", "mlp", **BARE),
    "functorch-cnn": Case("functorch", "cnn", **RAISES_ON_EMPTY),
    "functorch-layernorm-double": Case("functorch", "layernorm", **DOUBLE),
    "functorch-lora": _lora("functorch"),
    "ew-mlp": Case("ew", "mlp", **RAISES_ON_EMPTY),
    "ew-cnn": Case("ew", "cnn", **RAISES_ON_EMPTY),
    "ew-embedding-double": Case("ew", "embedding", **DOUBLE, **RAISES_ON_EMPTY),
    "ew-frozen": Case("ew", "frozen", **RAISES_ON_EMPTY),
    "no_op-mlp": Case("no_op", "mlp"),
    "no_op-lstm-double": Case("no_op", "lstm", **DOUBLE),
    "no_op-groups-bare": _groups("no_op", **BARE),
    "ghost-mlp": Case("ghost", "mlp"),
    "ghost-mlp-bare": Case("ghost", "mlp", **BARE),
    "ghost-mlp-double": Case("ghost", "mlp", **DOUBLE),
    "ghost-cnn": Case("ghost", "cnn"),
    "ghost-embedding": Case("ghost", "embedding", is_bounded=True),
    "ghost-lstm": Case("ghost", "lstm"),
    "ghost-attention": Case("ghost", "attention", is_bounded=True, **RAISES_ON_EMPTY),
    "ghost-attention-bare-double": Case(
        "ghost", "attention", is_bounded=True, **BARE, **DOUBLE, **RAISES_ON_EMPTY
    ),
    "ghost-layernorm-bare": Case("ghost", "layernorm", **BARE),
    "ghost-frozen": Case("ghost", "frozen"),
    "ghost-lora": _lora("ghost"),
    "ghost-lora-bare": _lora("ghost", **BARE),
    "ghost-groups": _groups("ghost"),
}


@dataclass
class Training:
    """What ``make_private`` returned, and the source of its noise."""

    case: Case
    engine: Any
    handle: Any  # the wrapper, or the hooks beside an unwrapped model
    model: Any
    optimizer: Any
    criterion: Any
    loader: Any
    noise: torch.Generator
    thresholds: list[float] = field(default_factory=list)

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    @property
    def history(self) -> list[Any]:
        return list(self.engine.accountant.history)

    def backward(self, batch: Batch) -> None:
        if self.case.mode == "no_op":
            give_gradients(self.model, batch)
        else:
            x, y = batch
            self.criterion(self.model(x), y).backward()

    def step(self, batch: Batch, *, seed: int | None = None) -> None:
        """Take a step; with a seed, reset the source of noise right before it."""
        self.optimizer.zero_grad()
        self.backward(batch)
        self.thresholds.append(self.optimizer.max_grad_norm)
        if seed is not None:
            self.noise.manual_seed(seed)
        self.optimizer.step()

    def train(self, data: Iterable[Batch]) -> None:
        for batch in data:
            self.step(batch)

    def summed_norm(self) -> float:
        """Length of the clipped sum that the last step noised."""
        sums = [p.summed_grad.double().flatten() for p in self.optimizer.params]
        return torch.cat(sums).norm().item()


def give_gradients(model: nn.Module, batch: Batch) -> None:
    """Do what mode "no_op" leaves to the user."""
    if len(batch[1]) == 0:
        for p in model.parameters():
            p.grad_sample = p.new_zeros(0, *p.shape) if p.requires_grad else None
        return
    gradients = per_sample_gradients(model, batch)
    params: list[Any] = [p for p in model.parameters() if p.requires_grad]
    for p, grad_sample in zip(params, zip(*gradients, strict=True), strict=True):
        p.grad_sample = torch.stack(grad_sample)


def make(
    case: Case,
    *,
    engine: Any = None,
    clipping: str = "slaclip",
    noise_multiplier: float = 0.3,
    max_grad_norm: float | None = None,
    torch_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    criterion: Any = None,
    num_workers: int = 0,
    **kwargs: Any,
) -> Training:
    """Make a case private; equal arguments give equal objects."""
    torch.manual_seed(0)
    model = case.build()
    return make_private(
        case,
        model=model,
        engine=PrivacyEngine(accountant="rdp") if engine is None else engine,
        optimizer=(torch_optimizer or case.torch_optimizer)(model),
        data_loader=DataLoader(
            TensorDataset(*samples(case.task, NUM_SAMPLES, dtype=case.dtype)),
            batch_size=BATCH_SIZE,
            generator=seeded(2),
            num_workers=num_workers,
        ),
        criterion=nn.CrossEntropyLoss() if criterion is None else criterion,
        clipping=clipping,
        noise_multiplier=noise_multiplier,
        max_grad_norm=case.clip_norm if max_grad_norm is None else max_grad_norm,
        noise_generator=None if getattr(engine, "secure_mode", False) else seeded(3),
        **kwargs,
    )


def make_private(case: Case, *, model: Any, engine: Any, **arguments: Any) -> Training:
    """Call ``make_private`` on given objects and pack up what it returns."""
    plain = model._module if isinstance(model, opacus.GradSampleModule) else model
    arguments = {
        "module": model,
        "grad_sample_mode": case.mode,
        "wrap_model": case.is_wrapped,
        **arguments,
    }
    with warnings.catch_warnings():
        # More slots than the noise allows test the arithmetic better than one or two would.
        warnings.filterwarnings("ignore", "num_slots=.* is above the recommended")
        warnings.filterwarnings("ignore", "grad_sample_mode='ew' raises on the empty batches")
        handle, optimizer, *criterion, loader = engine.make_private(**arguments)
    return Training(
        case=case,
        engine=engine,
        handle=handle,
        model=handle if case.is_wrapped else plain,
        optimizer=optimizer,
        criterion=criterion[0] if criterion else arguments["criterion"],
        loader=loader,
        noise=arguments["noise_generator"],
    )


def flat(case: Case, **kwargs: Any) -> Training:
    """Make the case private with Opacus's own engine."""
    return make(case, engine=opacus.PrivacyEngine(accountant="rdp"), clipping="flat", **kwargs)


def fixed(case: Case, **kwargs: Any) -> Training:
    """Make the case private with SlaClip at a threshold that stays."""
    return make(case, controller=FixedController(), **kwargs)


# --- an independent measure of how far two float32 roads to one gradient can part ---


def term_lengths(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return ``S``, shape (B,): how long the terms are that a sample's gradient is summed from.

    For a layer that sees ``T`` tokens ``a_t`` and is told their gradients ``b_t``, ``S`` is
    ``sum |b_t| |a_t|`` for a weight and ``sum |b_t|`` for a bias or an embedding; in quadrature
    over the layers. A layer that sees no tokens sums nothing.
    """
    seen: list[tuple[nn.Module, torch.Tensor, torch.Tensor]] = []

    def keep(layer: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda grad: seen.append((layer, inputs[0].detach(), grad)))

    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)]
    handles = [layer.register_forward_hook(keep) for layer in layers]
    x, y = batch
    nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    squares = torch.zeros(len(y), dtype=torch.float64)
    for layer, a, b in seen:
        if b.dim() == 2:
            continue
        lengths = b.double().flatten(1, -2).norm(dim=-1)  # (B, T)
        squares += lengths.sum(1) ** 2
        if isinstance(layer, nn.Linear):
            squares += (lengths * a.double().flatten(1, -2).norm(dim=-1)).sum(1) ** 2
    return squares.sqrt()


def true_norms(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return per-sample gradient norms, shape (B,), float64, one sample at a time."""
    return torch.stack(
        [
            torch.cat([g.double().flatten() for g in gradient]).norm()
            for gradient in per_sample_gradients(model, batch)
        ]
    )
