"""Controllers: the next threshold from a *released* indicator, so at no privacy cost.

A controller is any callable ``(clip_norm, indicator) -> next clip_norm``. The three here are frozen
configurations with a pure update. One that keeps state of its own has it checkpointed by offering
``state_dict()``, a dict of plain numbers, and ``load_state_dict(state)``.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
import weakref
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
import torch

from opacus_slaclip._validate import check_in_range
from opacus_slaclip.indicator import SlackIndicator

__all__ = [
    "Controller",
    "FixedController",
    "SlaClipController",
    "SlaClipQController",
    "StatefulController",
    "next_clip_norm",
]

_MAX_RATE = 10.0


class Controller(Protocol):
    """What moves the threshold: called once a release, with public values only.

    Args:
        clip_norm: Current threshold ``C_t``, in gradient-norm units.
        indicator: What was just released, measured at ``C_t``.

    Returns:
        ``C_{t+1}``, a finite number; the optimizer clamps it to its bounds.
    """

    def __call__(self, clip_norm: float, indicator: SlackIndicator, /) -> float:
        """Return the next threshold."""
        ...


@runtime_checkable
class StatefulController(Protocol):
    """A controller whose state travels in the checkpoint, as plain numbers."""

    def state_dict(self) -> dict[str, float]:
        """Return the state: names to plain finite numbers."""
        ...

    def load_state_dict(self, state: dict[str, float], /) -> None:
        """Take the state back."""
        ...


def is_stateful(controller: Controller) -> TypeGuard[StatefulController]:
    """Return whether the controller keeps state; ``isinstance`` with a protocol takes 10 us."""
    return hasattr(controller, "state_dict") and hasattr(controller, "load_state_dict")


def _check_rate(value: object) -> float:
    return check_in_range(
        "clipbound_learning_rate", value, 0.0, _MAX_RATE, "Pass eta, such as 0.2."
    )


def _multiply(clip_norm: float, log_step: float) -> float:
    # A wild noise draw must hit the threshold's bound, not overflow.
    return min(clip_norm * math.exp(min(log_step, 700.0)), sys.float_info.max)


@dataclass(frozen=True)
class SlaClipController:
    """The paper's controller: aim between the median and everything, by how many norms are tiny.

    ``C' = C exp(eta (gamma - s_hat[1]))`` with ``gamma = 1 - beta (1 - r)`` and
    ``r = clamp(s_hat[K] / C, 0, 1)``.

    ``r`` divides by ``C`` as published, so it has the unit 1 / norm: where all norms are far below
    ``C / K`` the rule comes to rest near ``C = 1`` whatever the norms are.

    Attributes:
        clipbound_learning_rate: ``eta``, in [0, 10].
        beta: Weight of the clipped fraction, in [0, 1]; the paper uses 1/2.

    Raises:
        TypeError, ValueError: If a value is not a number in its range.

    Reference: eq. 13 and Algorithm 1; eq. 28-30 (Appendix C), which clamp ``r`` before use.
    """

    clipbound_learning_rate: float = 0.2
    beta: float = 0.5

    def __post_init__(self) -> None:
        """Check the configuration."""
        _check_rate(self.clipbound_learning_rate)
        check_in_range("beta", self.beta, 0.0, 1.0, "Pass the paper's 0.5.")

    def __call__(self, clip_norm: float, indicator: SlackIndicator, /) -> float:
        """Return the next threshold."""
        first, last = float(indicator.values[0]), float(indicator.values[-1])
        near_zero = min(max(last / clip_norm, 0.0), 1.0)  # eq. 28
        target = 1.0 - self.beta * (1.0 - near_zero)  # eq. 29
        return _multiply(clip_norm, self.clipbound_learning_rate * (target - first))  # eq. 30


@dataclass(frozen=True)
class SlaClipQController:
    """Aim at a fixed fraction of unclipped samples: ``C' = C exp(eta (q - s_hat[1]))``.

    Attributes:
        clipbound_learning_rate: ``eta``, in [0, 10].
        target_unclipped_quantile: ``q``, in (0, 1).

    Raises:
        TypeError, ValueError: If a value is not a number in its range.

    Reference: eq. 12.
    """

    clipbound_learning_rate: float = 0.2
    target_unclipped_quantile: float = 0.5

    def __post_init__(self) -> None:
        """Check the configuration."""
        _check_rate(self.clipbound_learning_rate)
        check_in_range(
            "target_unclipped_quantile",
            self.target_unclipped_quantile,
            0.0,
            1.0,
            "Pass the fraction of samples to leave unclipped, such as 0.5.",
            open_ends=True,
        )

    def __call__(self, clip_norm: float, indicator: SlackIndicator, /) -> float:
        """Return the next threshold."""
        error = self.target_unclipped_quantile - float(indicator.values[0])
        return _multiply(clip_norm, self.clipbound_learning_rate * error)


@dataclass(frozen=True)
class FixedController:
    """Keep the threshold and only publish the indicator: plain DP-SGD with a free CDF."""

    def __call__(self, clip_norm: float, indicator: SlackIndicator, /) -> float:
        """Return ``clip_norm``."""
        return clip_norm


def next_clip_norm(
    controller: Controller,
    clip_norm: float,
    indicator: SlackIndicator,
    *,
    min_clipbound: float,
    max_clipbound: float,
) -> float:
    """Ask ``controller`` for the next threshold, check it and clamp it to the bounds.

    Args:
        controller: Any callable of this module's :class:`Controller` form.
        clip_norm: Current threshold, in gradient-norm units.
        indicator: The last release.
        min_clipbound: Lower bound of the threshold.
        max_clipbound: Upper bound of the threshold.

    Returns:
        A finite Python float in ``[min_clipbound, max_clipbound]``.

    Raises:
        TypeError: If the controller returns something that is not a number.
        ValueError: If it returns NaN or an infinity. (Checked before clamping: ``min`` and ``max``
            would quietly turn NaN into a bound.)
    """
    number = ask(controller, clip_norm, indicator)
    return min(max(number, min_clipbound), max_clipbound)


def ask(controller: Controller, clip_norm: float, indicator: SlackIndicator) -> float:
    """Return what ``controller`` wants, a finite float; the largest there is for a huge number.

    Raises:
        TypeError, ValueError: As :func:`next_clip_norm`.
    """
    result: object = controller(clip_norm, indicator)
    if isinstance(result, torch.Tensor) and result.numel() == 1:
        result = result.item()
    if isinstance(result, (bool, np.bool_)) or not isinstance(result, Real):
        raise TypeError(
            f"controller must return a number, got {result!r} ({type(result).__name__}) from "
            f"{controller!r}. Return the next threshold as a finite float."
        )
    try:
        number = float(result)
    except OverflowError:  # a huge int or fraction is finite all the same
        number = sys.float_info.max if result > 0 else -sys.float_info.max  # type: ignore[operator]
    if not math.isfinite(number):
        raise ValueError(
            f"controller must return a finite threshold, got {number} from {controller!r} at "
            f"clip_norm={clip_norm:g}. Return a finite float; the bounds are applied afterwards."
        )
    return number


# Stateful controllers that a release has reached, by id: most are not hashable.
_MOVED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def note_moved(controller: Controller) -> None:
    """Remember that a controller's state may come from a release."""
    for part in _parts(controller):
        if is_stateful(part):
            with contextlib.suppress(TypeError):  # a class with slots may know no weak references
                _MOVED[id(part)] = part


def check_unmoved(controller: Controller, *, of_this_run: Controller | None) -> None:
    """Check that a controller brings no state from another run.

    Args:
        controller: The new run's.
        of_this_run: The controller of the run that is continued, if one is.

    Raises:
        ValueError: If ``controller``, or one inside, has moved a threshold before.
    """
    own = [] if of_this_run is None else _parts(of_this_run)
    for part in _parts(controller):
        if _MOVED.get(id(part)) is part and not any(part is each for each in own):
            raise ValueError(
                f"controller must be a new one, got {part!r}, which has moved the threshold of "
                "another run: its state would carry over what that run has paid for. Make a new "
                "controller for each run."
            )


def _parts(controller: Controller) -> list[Controller]:
    inner = getattr(controller, "controller", None)  # as AutoController has one
    return [controller, *(_parts(inner) if callable(inner) else [])]


def check_controller(controller: object) -> Controller:
    """Return ``controller`` if it can move a threshold and its state fits into a checkpoint.

    Raises:
        TypeError: If it is not callable, is a class, or its state is not plain numbers.
    """
    if not callable(controller) or isinstance(controller, type):
        raise TypeError(
            f"controller must be callable as (clip_norm, indicator) -> float, got {controller!r}. "
            "Pass one of opacus_slaclip's controllers or a function."
        )
    try:
        inspect.signature(controller).bind(1.0, None)
    except ValueError:  # some builtins do not say what they take
        pass
    except TypeError as error:
        raise TypeError(
            f"controller must take two arguments, (clip_norm, indicator); {controller!r} does not: "
            f"{error}. Write def controller(clip_norm, indicator): return next_clip_norm."
        ) from error
    read_controller_state(controller)
    return controller


def read_controller_state(controller: Controller) -> dict[str, float]:
    """Return the controller's state, empty if it keeps none.

    Raises:
        TypeError: If an entry is not a plain finite number.
    """
    if not is_stateful(controller):
        return {}
    state = controller.state_dict()
    for name, value in state.items():
        if not isinstance(value, Real) or not math.isfinite(value):
            raise TypeError(
                f"controller.state_dict()[{name!r}] must be a plain finite number, got {value!r}. "
                "Return floats and ints only: they travel in optimizer checkpoints."
            )
    return {name: int(v) if isinstance(v, Integral) else float(v) for name, v in state.items()}
