"""The clipping methods that are compared, each made private through the engine of this project."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks import ideas
from opacus_slaclip import PrivacyEngine, SlaClipController

# Models whose step takes half as long in ghost mode as with hooks, on one core at the task's batch
# size. For digits_cnn, small_cnn, name_lstm and cifar_cnn ghost mode takes as long or longer.
GHOST_MODELS: tuple[str, ...] = ("lenet_cnn",)

# Models whose per-sample gradients are so large that a step is three times as fast in physical
# batches that fit into a cache (32 samples: 13 MB for name_lstm, 20 MB for mean_words, which is
# then faster than ghost mode). The sum, and so the step, is the same.
PHYSICAL_BATCH_SIZES: dict[str, int] = {"name_lstm": 32, "mean_words": 32}

_MIN_CLIPBOUND, _MAX_CLIPBOUND = 0.1, 50.0
_BASELINES = ("auto-s", "dc-sgd-e")


Options = Callable[[float, int, int], dict[str, Any]]


@dataclass(frozen=True)
class Method:
    """How to make a model private.

    Attributes:
        options: Keyword arguments of the engine's ``make_private``, from ``C_0``, the batch size
            and the number of parameters; they may replace ``max_grad_norm``. None for a baseline
            written in this folder.
        ghost: Whether it can run in ghost mode.
        uses_clip_norm: Whether ``C_0`` makes a difference; where not, one is as good as all.
        virtual_batches: Whether a step may come in several physical batches.
        change: What is done to the private optimizer before training.
    """

    options: Options | None
    ghost: bool = False
    uses_clip_norm: bool = True
    virtual_batches: bool = True
    change: Callable[[Any], None] | None = None


def _clipping(name: str) -> Options:
    return lambda clip_norm, *rest: {"clipping": name}


def _bounds(clip_norm: float) -> dict[str, Any]:
    return {
        "clipbound_learning_rate": 0.2,
        "min_clipbound": min(_MIN_CLIPBOUND, clip_norm),
        "max_clipbound": max(_MAX_CLIPBOUND, clip_norm),
    }


def _slaclip(name: str) -> Options:
    return lambda clip_norm, *rest: {"clipping": name} | _bounds(clip_norm)


def _unit(name: str) -> Options:
    """Beyond the paper: the release is divided by the threshold it was clipped at."""
    plain = _slaclip(name)
    return lambda *cell: plain(*cell) | {"rescale_to_unit_norm": True}


def _auto(name: str) -> Options:
    """Beyond the paper: no C_0 either, whatever the cell says."""
    auto = {"max_grad_norm": "auto", "rescale_to_unit_norm": True}
    return lambda clip_norm, *rest: {"clipping": name} | auto


def _averaged(clip_norm: float, *rest: int) -> dict[str, Any]:
    options = _unit("slaclip")(clip_norm, *rest)
    controller = SlaClipController(options.pop("clipbound_learning_rate"))
    return options | {"controller": ideas.AveragingController(controller)}


def _low_quantile(*cell: Any) -> dict[str, Any]:
    return _auto("slaclip-q")(*cell) | {"target_unclipped_quantile": 0.1}


def _trade_off(clip_norm: float, batch_size: int, num_parameters: int) -> dict[str, Any]:
    auto = _auto("slaclip")(clip_norm, batch_size, num_parameters)
    return auto | {"controller": ideas.TradeOffController(num_parameters)}


def _adaptive(clip_norm: float, batch_size: int, num_parameters: int) -> dict[str, Any]:
    counting = {"unclipped_num_std": batch_size / 20, "target_unclipped_quantile": 0.5}
    return {"clipping": "adaptive"} | counting | _bounds(clip_norm)


def engine_noise(method: str, noise_multiplier: float, batch_size: int) -> float:
    """Return what to tell the engine so that a step costs what ``noise_multiplier`` says.

    Opacus's adaptive clipping noises a count of sensitivity 1 with ``s = unclipped_num_std``, but
    splits the budget as if the sensitivity were 1/2: told sigma, it takes a step that costs
    ``(1 / sigma^2 + 3 / (4 s^2))^(-1/2)``, while its accountant records sigma. (It also divides
    the count by the realized batch size, without noise; that stays an advantage.)

    Raises:
        ValueError: If the count alone would cost as much as the whole step.
    """
    if method != "adaptive":
        return noise_multiplier
    deviation = batch_size / 20
    left = noise_multiplier**-2 - 0.75 * deviation**-2
    if left <= 0:
        raise ValueError(
            f"batch_size must be above {20 * 0.75**0.5 * noise_multiplier:.3g} for adaptive "
            f"clipping at noise multiplier {noise_multiplier:.3g}, got {batch_size}: its count, "
            "noised at B / 20, would cost more than a step may."
        )
    return left**-0.5


PAPER: dict[str, Method] = {
    "flat": Method(_clipping("flat"), ghost=True),
    # Opacus's forgets the counts of all physical batches but the last.
    "adaptive": Method(_adaptive, virtual_batches=False),
    "slaclip": Method(_slaclip("slaclip"), ghost=True),
    "slaclip-q": Method(_slaclip("slaclip-q"), ghost=True),
} | {name: Method(None) for name in _BASELINES}
BEYOND: dict[str, Method] = {
    "slaclip-unit": Method(_unit("slaclip"), ghost=True),
    "slaclip-q-unit": Method(_unit("slaclip-q"), ghost=True),
    "slaclip-auto": Method(_auto("slaclip"), ghost=True, uses_clip_norm=False),
    "slaclip-q-auto": Method(_auto("slaclip-q"), ghost=True, uses_clip_norm=False),
}
IDEAS: dict[str, Method] = {
    "slaclip-average": Method(_averaged, ghost=True),
    "slaclip-trade-off": Method(_trade_off, ghost=True, uses_clip_norm=False),
    "slaclip-q10-auto": Method(_low_quantile, ghost=True, uses_clip_norm=False),
    "slaclip-ends": Method(_unit("slaclip"), change=ideas.release_ends_only),
}
METHODS: dict[str, Method] = PAPER | BEYOND | IDEAS


@dataclass(frozen=True)
class Private:
    """What is trained: Opacus's four objects."""

    engine: PrivacyEngine
    module: nn.Module
    optimizer: Any
    criterion: Any
    loader: DataLoader[Any]


def grad_sample_mode(model: str, method: str) -> str:
    """Return the faster of hooks and ghost, hooks where the method has nothing else."""
    return "ghost" if METHODS[method].ghost and model in GHOST_MODELS else "hooks"


def physical_batch_size(model: str, method: str) -> int | None:
    """Return how many samples to take at once, None for a whole batch."""
    return PHYSICAL_BATCH_SIZES.get(model) if METHODS[method].virtual_batches else None


def make_private(
    method: str,
    *,
    mode: str,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    batch_size: int,
    noise_multiplier: float,
    clip_norm: float,
    noise_generator: torch.Generator,
) -> Private:
    """Make a model private with one of ``METHODS``, the RDP accountant watching.

    Raises:
        ValueError: If Opacus refuses the settings.
    """
    engine = PrivacyEngine(accountant="rdp")
    criterion = nn.CrossEntropyLoss()
    common: dict[str, Any] = {
        "module": module,
        "optimizer": optimizer,
        "data_loader": loader,
        "noise_multiplier": engine_noise(method, noise_multiplier, batch_size),
        "max_grad_norm": clip_norm,
        "noise_generator": noise_generator,
    }
    options = METHODS[method].options
    if options is None:
        from benchmarks import baselines

        return _private(engine, criterion, baselines.make_private(method, engine, **common))
    num_parameters = sum(p.numel() for p in module.parameters())
    common |= options(clip_norm, batch_size, num_parameters)
    common |= {"grad_sample_mode": mode, "criterion": criterion}
    private = _private(engine, criterion, engine.make_private(**common))
    change = METHODS[method].change
    if change is not None:
        change(private.optimizer)
    return private


def _private(engine: PrivacyEngine, criterion: Any, made: tuple[Any, ...]) -> Private:
    module, optimizer, *ghost_criterion, loader = made
    return Private(engine, module, optimizer, (ghost_criterion or [criterion])[0], loader)
