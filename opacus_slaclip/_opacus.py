"""The only module that touches Opacus's underscore names, so that a new Opacus breaks one file."""

from __future__ import annotations

from typing import Any

import opacus
import torch

try:
    from opacus.optimizers.optimizer import (
        _check_processed_flag,
        _generate_noise,
        _mark_as_processed,
    )

    # Ours override these; under another name Opacus's own would run instead, unnoticed.
    for _part in ("model", "data_loader", "optimizer", "criterion"):
        _hook = f"_prepare_{_part}"
        if not hasattr(opacus.PrivacyEngine, _hook):
            raise ImportError(f"PrivacyEngine has no {_hook}")
except ImportError as error:  # pragma: no cover - needs another Opacus
    raise ImportError(
        f"opacus-slaclip works with opacus>=1.6,<2, found {opacus.__version__}: {error}. "
        'Install a supported version: pip install "opacus>=1.6,<2".'
    ) from error


def generate_noise(
    *, std: float, reference: torch.Tensor, generator: Any, secure_mode: bool
) -> torch.Tensor:
    """Draw Gaussian noise shaped like ``reference`` as Opacus does, ``secure_mode`` included."""
    noise: torch.Tensor = _generate_noise(
        std=std, reference=reference, generator=generator, secure_mode=secure_mode
    )
    return noise


def check_not_processed(gradient: Any) -> None:
    """Raise ``ValueError`` if ``gradient`` was used in a step before (no ``zero_grad`` since)."""
    _check_processed_flag(gradient)


def is_processed(gradient: Any) -> bool:
    """Whether ``gradient``, a tensor or a list of them, was already used in a step."""
    parts = gradient if isinstance(gradient, list) else [gradient]
    return any(hasattr(part, "_processed") for part in parts)


def mark_processed(gradient: Any) -> None:
    """Mark ``gradient`` as used, so that a second use raises."""
    _mark_as_processed(gradient)


def last_step_was_skipped(optimizer: Any) -> bool:
    """Whether the optimizer is inside a logical batch made of several physical ones."""
    return bool(optimizer._is_last_step_skipped)


def next_step_is_skipped(optimizer: Any) -> bool:
    """Whether the next step only accumulates a physical batch."""
    return bool(optimizer._check_skip_next_step(pop_next=False))


def num_announced(optimizer: Any) -> int:
    """How many physical batches have been announced and not stepped on."""
    return len(optimizer._step_skip_queue)


def forget_announced(optimizer: Any, keep: int) -> None:
    """Forget the oldest announced physical batches but ``keep``."""
    queue = optimizer._step_skip_queue
    del queue[: max(0, len(queue) - max(0, keep))]


def clear_skip_queue(optimizer: Any) -> None:
    """Forget announced physical batches."""
    optimizer._step_skip_queue.clear()


def inner_module(wrapper: Any) -> Any:
    """The module inside one of Opacus's wrappers."""
    return wrapper._module


def replace_forward_hooks(wrapper: Any, hooks: dict[Any, Any]) -> None:
    """Put hooks on the layers inside, of a class each, in the place of those of an earlier call.

    ``cleanup()`` takes them off with the wrapper's own.
    """
    inner, own = inner_module(wrapper), getattr(wrapper, "autograd_grad_sample_hooks", [])
    for handle in inner.__dict__.pop("slaclip_hooks", []):
        handle.remove()
    handles = [
        layer.register_forward_hook(hook)
        for layer in inner.modules()
        for hook, kind in hooks.items()
        if isinstance(layer, kind)
    ]
    inner.__dict__["slaclip_hooks"] = handles
    own.extend(handles)


def count_backward(layer: Any) -> None:
    """Take one forward pass of a sharded layer off those that wait for a backward pass."""
    layer._forward_counter -= 1


def has_norm_sample(parameter: Any) -> bool:
    """Whether the backward pass has left a ghost norm on ``parameter``."""
    return hasattr(parameter, "_norm_sample")


def delete_norm_sample(parameter: Any) -> None:
    """Drop the private ghost norm that Opacus leaves on a parameter."""
    if has_norm_sample(parameter):
        del parameter._norm_sample


def delete_activations(layer: Any) -> None:
    """Drop what a forward pass left on a layer for its backward pass."""
    for name in ("activations", "max_batch_len", "_forward_counter"):
        if hasattr(layer, name):
            delattr(layer, name)


def reset_forward_count(parameter: Any) -> None:
    """Forget forward passes and partial gradients that wait for a backward pass."""
    if hasattr(parameter, "_forward_counter"):
        parameter._forward_counter = 0
    if hasattr(parameter, "_current_grad_sample"):
        del parameter._current_grad_sample


def forward_count(parameter: Any) -> int:
    """How many forward passes of its layer wait for a backward pass."""
    return int(parameter._forward_counter)


def forget_skipped_step(optimizer: Any) -> None:
    """Put the optimizer back at the boundary between two logical batches."""
    optimizer._is_last_step_skipped = False
