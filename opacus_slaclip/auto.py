"""``max_grad_norm="auto"``: find the level of the gradient norms first, then adapt in its units."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace

from opacus_slaclip._validate import check_in_range
from opacus_slaclip._warnings import warn
from opacus_slaclip.controllers import (
    Controller,
    SlaClipController,
    ask,
    check_controller,
    is_stateful,
    read_controller_state,
)
from opacus_slaclip.indicator import SlackIndicator

# Where the search starts: far below the norms of ordinary models, so that clipped gradients stay
# within the range of what they will be; from there thirty doublings reach 100,000.
AUTO_START = 1e-4
AUTO_CLIP_BOUNDS = (1e-6, 1e6)

# A step; what the search may overshoot by. It slows down near the target to overshoot less, but not
# below 1.7: each look at a wide distribution is another chance for the noise to reach the target.
_MAX_GROWTH, _LEAST_EXPONENT = 2.0, 0.75
_MAX_DOUBTS = 3  # looks at a release that could be understood in several ways
_MAX_MISSES = 2  # releases in a row that find nearly all samples clipped, noise granted
_MANY_RESTARTS = 3
_CERTAIN = 3.0  # standard deviations of the noise
_MIN_DESCENT = 4.0  # a step, where so few slots are resolved that 1 / K would be no step at all


@dataclass
class AutoController:
    """Search for the level of the gradient norms, then hand over, in units of that level.

    Searching, it aims at the quantile ``q`` of the norms. Where that lies in the last bin, beside
    samples of gradient near 0, it aims at ``gamma = 1 - (1 - q) (1 - s_hat[K])``: for ``q = 1/2``
    halfway between those and all, as the paper's rule does.

    * Nearly all samples, more than ``(1 + q) / 2``, are in the last bin: fall to its upper edge,
      ``C / K``.
    * Fewer than the target are below ``C``: grow to ``C 2^max(3/4, 1 - s_hat[1] / target)``, so at
      most twice as far as the quantile that is looked for, noise aside.
    * Else the release covers it: go there, and remember it as the reference. (While it lies in the
      last bin, a small batch, wide norms and samples of gradient 0 look alike: look again from
      where ``C`` is, then from the estimated quantile ``q``, then settle for that of ``gamma``.)

    From then on ``controller`` decides on ``C / reference``, so any controller becomes free of the
    scale of the gradients. For the paper's rule this replaces the gradient norm 1, by which it
    divides in ``r = s_hat[K] / C``, by a norm that the run itself has found. The search begins
    again when two releases in a row find all but ``q / 4`` of the samples clipped, noise granted,
    so a ``controller`` that keeps fewer than that unclipped needs a ``q`` of its own; with the
    third new search comes a warning.

    Everything it reads has been released, so it costs no privacy.

    Attributes:
        controller: Decides after the search; default the paper's rule.
        search_quantile: ``q``, in (0, 1).

    Raises:
        TypeError, ValueError: If an argument is not valid.
    """

    controller: Controller = field(default_factory=SlaClipController)
    search_quantile: float = 0.5
    _reference: float | None = field(default=None, init=False)
    _doubts: int = field(default=0, init=False)
    _misses: int = field(default=0, init=False)
    _restarts: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Check the configuration."""
        check_controller(self.controller)
        check_in_range(
            "search_quantile",
            self.search_quantile,
            0.0,
            1.0,
            "Pass the fraction of samples to find, such as 0.5.",
            open_ends=True,
        )

    @property
    def reference(self) -> float | None:
        """The level that was found, in gradient-norm units; None while searching."""
        return self._reference

    def __call__(self, clip_norm: float, indicator: SlackIndicator, /) -> float:
        """Return the next threshold."""
        if self._reference is not None:
            below = float(indicator.monotone()[0]) + _CERTAIN * indicator.noise_std
            self._misses = self._misses + 1 if below < self.search_quantile / 4 else 0
            if self._misses < _MAX_MISSES:
                unit = self._reference
                seen = replace(indicator, clip_norm=clip_norm / unit)
                wanted = unit * ask(self.controller, clip_norm / unit, seen)
                largest = sys.float_info.max
                return min(max(wanted, -largest), largest)
            self._reference, self._misses = None, 0
            self._restarts += 1
            if self._restarts == _MANY_RESTARTS:
                warn(
                    "AutoController has begun a new search for the third time: its controller "
                    "keeps nearly all samples clipped, or the gradients grow without end. Pass "
                    "AutoController(controller, search_quantile=q) with the fraction q that the "
                    "controller leaves unclipped, or lower the learning rate."
                )
        return self._search(clip_norm, indicator)

    def _search(self, clip_norm: float, indicator: SlackIndicator) -> float:
        cdf, q = indicator.monotone(), self.search_quantile
        below, near_zero = float(cdf[0]), float(cdf[-1])
        if near_zero > (1 + q) / 2:
            self._doubts = 0
            return clip_norm / max(indicator.num_slots, _MIN_DESCENT)
        is_resolved = near_zero < q or indicator.num_slots == 1
        target = q if is_resolved else 1 - (1 - q) * (1 - near_zero)
        if below < target:
            exponent = max(_LEAST_EXPONENT, 1 - below / target)
            return float(clip_norm * _MAX_GROWTH**exponent)
        self._doubts = 0 if is_resolved else self._doubts + 1
        if self._doubts == 1 or indicator.num_slots == 1:
            found = clip_norm
        else:
            found = indicator.quantile(q if self._doubts < _MAX_DOUBTS else target)
        if self._doubts in (0, _MAX_DOUBTS):
            self._reference, self._doubts = found, 0
        return found

    def state_dict(self) -> dict[str, float]:
        """Return the reference, 0 while searching, and the state of a controller that has one."""
        state = read_controller_state(self.controller)
        own: dict[str, float] = {
            "reference": self._reference or 0.0,
            "doubts": self._doubts,
            "misses": self._misses,
        }
        return own | {f"then_{name}": value for name, value in state.items()}

    def load_state_dict(self, state: dict[str, float], /) -> None:
        """Take the state back."""
        self._reference = state["reference"] or None
        self._doubts, self._misses = int(state["doubts"]), int(state["misses"])
        if is_stateful(self.controller):
            prefix = "then_"
            self.controller.load_state_dict(
                {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            )
