"""Argument checks with one style of message: name, value, rule, remedy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real

import numpy as np

# Far above any useful number; keeps a vanishing noise multiplier from asking for gigabytes.
MAX_NUM_SLOTS = 100_000

_FLOAT32_TINY = float(np.finfo(np.float32).tiny)


def check_real(name: str, value: object, remedy: str) -> float:
    """Return ``value`` as a finite float.

    Raises:
        TypeError: If ``value`` is not a real number (booleans are not).
        ValueError: If it is NaN or infinite.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Real):
        raise TypeError(
            f"{name} must be a real number, got {value!r} ({type(value).__name__}). {remedy}"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}. {remedy}")
    return number


def check_in_range(
    name: str, value: object, low: float, high: float, remedy: str, *, open_ends: bool = False
) -> float:
    """Return ``value`` as a float within ``[low, high]``, or ``(low, high)`` with ``open_ends``."""
    number = check_real(name, value, remedy)
    inside = low < number < high if open_ends else low <= number <= high
    if not inside:
        brackets = "()" if open_ends else "[]"
        raise ValueError(
            f"{name} must be in {brackets[0]}{low:g}, {high:g}{brackets[1]}, got {number:g}. "
            + remedy
        )
    return number


def check_positive(name: str, value: object, remedy: str) -> float:
    """Return ``value`` as a float that is finite and positive, in float32 too.

    Float32 subnormals count as zero: some devices flush them, and their reciprocal overflows.
    """
    number = check_real(name, value, remedy)
    if number <= 0:
        raise ValueError(f"{name} must be positive, got {number:g}. {remedy}")
    if not is_float32_positive(number):
        raise ValueError(
            f"{name} must be finite and positive as a float32, got {number:g}, which is outside "
            f"[{_FLOAT32_TINY:.4g}, {np.finfo(np.float32).max:.4g}]. {remedy}"
        )
    return number


def is_float32_positive(number: float) -> bool:
    """Whether ``number`` rounds to a finite, positive, normal float32."""
    return _FLOAT32_TINY <= number <= float(np.finfo(np.float32).max)


def check_flag(name: str, value: object) -> bool:
    """Return ``value`` if it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(
            f"{name} must be True or False, got {value!r} ({type(value).__name__}). Pass a bool."
        )
    return value


def check_num_slots(value: object) -> int:
    """Return ``value`` as a number of slots, an int in ``[1, MAX_NUM_SLOTS]``."""
    remedy = "Pass a positive int, or None for the recommended number."
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Integral):
        raise TypeError(
            f"num_slots must be a positive integer, got {value!r} ({type(value).__name__}). "
            + remedy
        )
    number = int(value)
    if not 1 <= number <= MAX_NUM_SLOTS:
        raise ValueError(
            f"num_slots must be a positive integer of at most {MAX_NUM_SLOTS}, got {number}. "
            + remedy
        )
    return number


def check_noise_multiplier(value: object) -> float:
    """Return ``value`` as a noise multiplier: finite and not negative."""
    remedy = "Pass sigma >= 0; 0 switches the noise (and the guarantee) off."
    number = check_real("noise_multiplier", value, remedy)
    if number < 0:
        raise ValueError(f"noise_multiplier must not be negative, got {number:g}. {remedy}")
    return number


def check_budget(budget: Mapping[str, object]) -> None:
    """Check a privacy budget before it is calibrated to, which can otherwise take forever."""
    for name in ("target_epsilon", "epsilon_tolerance", "epochs"):
        if name in budget:
            check_positive(name, budget[name], "Pass a positive number.")
    check_in_range(
        "target_delta", budget["target_delta"], 0.0, 1.0, "Pass less than 1 / N.", open_ends=True
    )


def check_expected_batch_size(value: object) -> float:
    """Return ``value`` as an expected logical batch size: finite and at least 1."""
    remedy = (
        "It is the public denominator of the slack indicator: pass the expected (not the "
        "realized) size of a logical batch, at least 1."
    )
    if value is None:
        raise TypeError(f"expected_batch_size must be a number, got None. {remedy}")
    number = check_real("expected_batch_size", value, remedy)
    if number < 1:
        raise ValueError(f"expected_batch_size must be at least 1, got {number:g}. {remedy}")
    return number


def check_clip_bounds(min_clipbound: object, max_clipbound: object) -> tuple[float, float]:
    """Return the bounds of the threshold as floats, ``0 < min <= max``."""
    low = check_positive("min_clipbound", min_clipbound, "Pass a lower bound above 0.")
    high = check_positive("max_clipbound", max_clipbound, "Pass a finite upper bound.")
    if low > high:
        raise ValueError(
            f"min_clipbound must not exceed max_clipbound, got {low:g} > {high:g}. "
            "Swap or widen the bounds."
        )
    return low, high


def check_clip_norm(value: object, min_clipbound: float, max_clipbound: float) -> float:
    """Return ``value`` as a threshold: a positive float within the bounds."""
    if isinstance(value, (list, tuple)):
        raise TypeError(
            f"max_grad_norm must be one number, got {value!r}. SlaClip has one threshold for the "
            "whole gradient; per-layer thresholds need clipping='per_layer'."
        )
    number = check_positive(
        "max_grad_norm",
        value,
        'Pass the initial threshold C_0, such as 1.0, or "auto"; no value switches clipping off.',
    )
    if not min_clipbound <= number <= max_clipbound:
        raise ValueError(
            f"max_grad_norm must be within [min_clipbound, max_clipbound] = "
            f"[{min_clipbound:g}, {max_clipbound:g}], got {number:g}. "
            "Choose another threshold or widen the bounds."
        )
    return number


def check_noise_scale(noise_multiplier: float, clip_norm: float) -> None:
    """Check that noise of scale ``noise_multiplier * clip_norm`` exists in float32.

    Raises:
        ValueError: If the scale overflows, or vanishes although ``noise_multiplier > 0``: the
            accountant would then charge for noise that is never added.
    """
    scale = check_noise_multiplier(noise_multiplier) * clip_norm
    # With room for the draws, which reach several times the scale.
    if noise_multiplier > 0 and not (
        is_float32_positive(scale) and is_float32_positive(16 * scale)
    ):
        raise ValueError(
            f"noise_multiplier * max_grad_norm must be finite and positive as a float32, got "
            f"{noise_multiplier:g} * {clip_norm:g} = {scale:g}. Choose noise_multiplier, "
            "min_clipbound and max_clipbound so that every threshold gives representable noise."
        )
