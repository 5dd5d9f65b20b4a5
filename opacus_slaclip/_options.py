"""The options of the slaclip values of ``clipping``: names, defaults, what goes together."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from opacus.optimizers import get_optimizer_class

from opacus_slaclip._validate import (
    check_clip_bounds,
    check_clip_norm,
    check_flag,
    check_num_slots,
)
from opacus_slaclip.auto import AUTO_CLIP_BOUNDS, AUTO_START, AutoController
from opacus_slaclip.controllers import (
    Controller,
    SlaClipController,
    SlaClipQController,
    check_controller,
)

CONTROLLERS: dict[str, type[SlaClipController] | type[SlaClipQController]] = {
    "slaclip": SlaClipController,
    "slaclip-q": SlaClipQController,
}

# Ours alone; the other options have Opacus's own names for its adaptive clipping.
ONLY_OURS = ("num_slots", "controller", "rescale_to_unit_norm")
_AUTO = "auto"
DEFAULT_CLIP_BOUNDS = (0.1, 50.0)
# Name: default.
OPTIONS: dict[str, Any] = {
    "num_slots": None,
    "controller": None,
    "clipbound_learning_rate": SlaClipQController.clipbound_learning_rate,
    "target_unclipped_quantile": SlaClipQController.target_unclipped_quantile,
    "min_clipbound": DEFAULT_CLIP_BOUNDS[0],
    "max_clipbound": DEFAULT_CLIP_BOUNDS[1],
    "rescale_to_unit_norm": False,
}

_CONTROLLER_OPTIONS = ("clipbound_learning_rate", "target_unclipped_quantile")


def check_names(names: Iterable[str], accepted: Iterable[str], *, clipping: str) -> None:
    """Raise a ``TypeError`` for the first name that is not accepted, naming the nearest one."""
    accepted = sorted(accepted)
    for name in names:
        if name in accepted:
            continue
        if name == "noise_multiplier":
            raise TypeError(
                "noise_multiplier is what make_private_with_epsilon calibrates to target_epsilon. "
                "Remove it, or call make_private."
            )
        if name == "unclipped_num_std":
            raise TypeError(
                f"unclipped_num_std does not apply to clipping={clipping!r}: SlaClip needs no "
                "extra noisy count. Remove it."
            )
        nearest = difflib.get_close_matches(name, accepted, n=1)
        hint = f"Did you mean {nearest[0]!r}? " if nearest else ""
        raise TypeError(
            f"make_private got an unexpected keyword argument {name!r} for clipping={clipping!r}. "
            f"{hint}Accepted options are {', '.join(OPTIONS)}."
        )


def refuse_only_ours(options: Mapping[str, Any], *, clipping: Any) -> None:
    """Check what goes through to Opacus.

    Raises:
        ValueError: If ``clipping`` is a misspelt value of ours, or one that Opacus has not either.
        TypeError: If an option that only SlaClip has is given to another clipping.
    """
    nearest = difflib.get_close_matches(str(clipping).lower(), CONTROLLERS, n=1, cutoff=0.7)
    if nearest:
        raise ValueError(
            f"clipping must be one of {sorted(CONTROLLERS)} or a value of Opacus's, got "
            f"{clipping!r}. Did you mean {nearest[0]!r}?"
        )
    if not any(_opacus_knows(clipping, mode) for mode in ("hooks", "ghost")):
        raise ValueError(
            f"clipping must be one of {sorted(CONTROLLERS)} or a value of Opacus's, such as "
            f"'flat', got {clipping!r}."
        )
    if options.get("max_grad_norm") == _AUTO:
        raise TypeError(
            f'max_grad_norm="auto" does not apply to clipping={clipping!r}. Pass a number, or use '
            f"one of {sorted(CONTROLLERS)}."
        )
    for name in ONLY_OURS:
        if name in options:
            raise TypeError(
                f"{name} does not apply to clipping={clipping!r}. Remove it, or use one of "
                f"{sorted(CONTROLLERS)}."
            )


def _opacus_knows(clipping: Any, mode: str) -> bool:
    try:
        get_optimizer_class(clipping, distributed=False, grad_sample_mode=mode)
    except ValueError:
        return False
    return True


def resolve_options(
    clipping: str, options: Mapping[str, Any], *, max_grad_norm: Any
) -> dict[str, Any]:
    """Check the options and turn them into arguments of our optimizers.

    Args:
        clipping: "slaclip" or "slaclip-q".
        options: Those of ``OPTIONS`` that were given.
        max_grad_norm: Initial threshold, checked against the bounds, or "auto".

    Returns:
        ``max_grad_norm`` as a number, ``num_slots``, ``controller``, ``min_clipbound``,
        ``max_clipbound`` and ``rescale_to_unit_norm``.

    Raises:
        TypeError, ValueError: If a value is not valid or an option does not apply.
    """
    num_slots = options.get("num_slots")
    controller = _resolve_controller(clipping, options)
    is_auto = isinstance(max_grad_norm, str) and max_grad_norm == _AUTO
    bounds = AUTO_CLIP_BOUNDS if is_auto else DEFAULT_CLIP_BOUNDS
    low, high = check_clip_bounds(
        options.get("min_clipbound", bounds[0]), options.get("max_clipbound", bounds[1])
    )
    if is_auto:
        max_grad_norm = min(max(AUTO_START, low), high)
        if not isinstance(controller, AutoController):
            quantile = getattr(controller, "target_unclipped_quantile", 0.5)
            controller = AutoController(controller, search_quantile=quantile)
    return {
        "max_grad_norm": check_clip_norm(max_grad_norm, low, high),
        "num_slots": None if num_slots is None else check_num_slots(num_slots),
        "controller": controller,
        "min_clipbound": low,
        "max_clipbound": high,
        "rescale_to_unit_norm": check_flag(
            "rescale_to_unit_norm", options.get("rescale_to_unit_norm", False)
        ),
    }


def _resolve_controller(clipping: str, options: Mapping[str, Any]) -> Controller:
    given = [name for name in _CONTROLLER_OPTIONS if name in options]
    controller: Controller | None = options.get("controller")
    if controller is not None:
        if given:
            raise TypeError(
                f"controller and {given[0]} exclude each other: the controller takes the place of "
                "rate and quantile. Set them on the controller, or leave it out."
            )
        return check_controller(controller)
    if clipping == "slaclip" and "target_unclipped_quantile" in given:
        raise TypeError(
            "target_unclipped_quantile does not apply to clipping='slaclip', which finds its own "
            "target. Remove it, or use clipping='slaclip-q'."
        )
    return CONTROLLERS[clipping](**{name: options[name] for name in given})
