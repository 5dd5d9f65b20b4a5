"""The part of a step that every optimizer family shares: slack in, release out, threshold moves."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from opacus.optimizers import DPOptimizer
from torch.optim import Optimizer

from opacus_slaclip import _opacus
from opacus_slaclip._options import DEFAULT_CLIP_BOUNDS
from opacus_slaclip._precision import full_precision
from opacus_slaclip._validate import (
    check_clip_bounds,
    check_clip_norm,
    check_expected_batch_size,
    check_noise_multiplier,
    check_noise_scale,
    check_num_slots,
)
from opacus_slaclip.controllers import (
    Controller,
    SlaClipController,
    StatefulController,
    next_clip_norm,
)
from opacus_slaclip.indicator import SlackIndicator
from opacus_slaclip.optimizers.checkpoint import (
    check_controller_state,
    read_controller_state,
    read_param_groups,
    write_param_groups,
)
from opacus_slaclip.slack import (
    indicator_noise_std,
    normalize_slack,
    recommended_num_slots,
    slot_width,
    sum_slack,
)


@dataclass
class _Release:
    """Everything that changes, in one object.

    Wrappers such as Lightning's copy an optimizer's attributes once; sharing this object instead
    of plain attributes keeps their copies live.
    """

    clip_norm: float
    initial_clip_norm: float
    num_releases: int = 0
    indicator: SlackIndicator | None = None
    slot_sums: torch.Tensor | None = None  # private until noised; None outside a logical batch
    noisy_sums: torch.Tensor | None = None  # noised; the threshold has yet to move by it
    warned_nonfinite: bool = False


class SlackReleaseMixin(DPOptimizer):
    """Adds the slack release and an adaptive threshold to the Opacus optimizer it is mixed into.

    Guarantee: the joint sum of clipped gradients and slack has L2 sensitivity ``max_grad_norm``
    under add/remove adjacency, and every coordinate of it receives independent Gaussian noise of
    standard deviation ``noise_multiplier * max_grad_norm``. A step therefore costs what a step of
    plain DP-SGD with the same ``noise_multiplier`` costs, and the accountant records just that.

    The threshold is fixed from the first physical batch of a logical batch to its noise draw, and
    moves at the end of a step that was not skipped.

    Args:
        optimizer: The torch optimizer to wrap.
        noise_multiplier: ``sigma``, at least 0.
        max_grad_norm: Initial threshold ``C_0``, in gradient-norm units, within the bounds.
        expected_batch_size: Expected logical batch size, in samples (a worker's share of it if
            distributed). Needed for either ``loss_reduction``: it is the indicator's denominator.
        loss_reduction: "mean" or "sum".
        generator: Source of the noise, on gradient and slack alike.
        secure_mode: Draw noise robust to floating-point attacks, on gradient and slack alike.
        num_slots: Number of slots ``K``; None for :func:`recommended_num_slots`.
        controller: Moves the threshold; None for :class:`SlaClipController`.
        min_clipbound: Lower bound of the threshold.
        max_clipbound: Upper bound of the threshold.

    Raises:
        TypeError, ValueError: If an argument is not valid; nothing has changed then.
    """

    expected_batch_size: Any  # Opacus says int | None, but makes it a float if distributed

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        expected_batch_size: float,
        loss_reduction: str = "mean",
        generator: Any = None,
        secure_mode: bool = False,
        num_slots: int | None = None,
        controller: Controller | None = None,
        min_clipbound: float = DEFAULT_CLIP_BOUNDS[0],
        max_clipbound: float = DEFAULT_CLIP_BOUNDS[1],
    ) -> None:
        self.expected_batch_size = expected_batch_size
        batch_size = self._global_batch_size()
        noise_multiplier = check_noise_multiplier(noise_multiplier)
        self._clip_bounds = check_clip_bounds(min_clipbound, max_clipbound)
        clip_norm = check_clip_norm(max_grad_norm, *self._clip_bounds)
        for bound in self._clip_bounds:
            check_noise_scale(noise_multiplier, bound)
        recommended = recommended_num_slots(batch_size, noise_multiplier)
        self._num_slots = recommended if num_slots is None else check_num_slots(num_slots)
        self._controller = SlaClipController() if controller is None else controller
        if not callable(self._controller):
            raise TypeError(
                f"controller must be callable as (clip_norm, indicator) -> float, got "
                f"{controller!r}. Pass one of opacus_slaclip's controllers or a function."
            )
        self._release = _Release(clip_norm=clip_norm, initial_clip_norm=clip_norm)
        _warn_of_a_noisy_indicator(self._num_slots, recommended, batch_size)
        super().__init__(
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=clip_norm,
            expected_batch_size=expected_batch_size,  # type: ignore[arg-type] # a float if distributed
            loss_reduction=loss_reduction,
            generator=generator,
            secure_mode=secure_mode,
        )

    # ---- what a user may read -------------------------------------------------------------

    @property
    def max_grad_norm(self) -> float:
        """The threshold ``C_t``, in gradient-norm units: a finite float within the bounds.

        Setting it (a scheduler does) is allowed between logical batches, and adaptation goes on
        from the new value.
        """
        return self._release.clip_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        clip_norm = check_clip_norm(value, *self._clip_bounds)
        if self._release.slot_sums is not None and clip_norm != self._release.clip_norm:
            raise RuntimeError(
                f"max_grad_norm must stay {self._release.clip_norm:g} until the logical batch that "
                f"was begun with it is released, got {clip_norm:g}. Set it after the step that "
                "ends the batch."
            )
        self._set_clip_norm(clip_norm)

    @property
    def slack_indicator(self) -> SlackIndicator | None:
        """The last release, or None before the first step (also after a resume)."""
        return self._release.indicator

    @property
    def num_slots(self) -> int:
        """Number of slots ``K``."""
        return self._num_slots

    @property
    def num_releases(self) -> int:
        """Number of releases so far, those before a checkpoint included."""
        return self._release.num_releases

    @property
    def controller(self) -> Controller:
        """What moves the threshold."""
        return self._controller

    @property
    def initial_max_grad_norm(self) -> float:
        """``C_0``, the threshold this optimizer (or the one it continues) was first made with."""
        return self._release.initial_clip_norm

    @property
    def min_clipbound(self) -> float:
        """Lower bound of the threshold."""
        return self._clip_bounds[0]

    @property
    def max_clipbound(self) -> float:
        """Upper bound of the threshold."""
        return self._clip_bounds[1]

    def continue_from(self, previous: SlackReleaseMixin) -> None:
        """Go on at the threshold of ``previous``, if both were first made with the same ``C_0``.

        Federated rounds call ``make_private`` on objects that are private already; the adapted
        threshold then survives. It carries the privacy cost of the run that found it.
        """
        if previous.initial_max_grad_norm != self.initial_max_grad_norm:
            return
        low, high = self._clip_bounds
        self._release.num_releases = previous.num_releases
        self._set_clip_norm(min(max(previous.max_grad_norm, low), high))

    # ---- one step -------------------------------------------------------------------------

    def _accumulate_slack(self, norms: torch.Tensor) -> None:
        """Add one physical batch, by the norms, shape (b,), that its gradients are clipped by."""
        sums = sum_slack(norms, clip_norm=self.max_grad_norm, num_slots=self._num_slots)
        pending = self._release.slot_sums
        self._release.slot_sums = sums if pending is None else pending + sums

    def add_noise(self) -> None:
        """Noise the gradient, then the slack, from one stream and at one scale: one release."""
        check_noise_scale(self.noise_multiplier, self.max_grad_norm)
        self._add_gradient_noise()
        self._release_slack()

    def _add_gradient_noise(self) -> None:
        super().add_noise()

    def _release_slack(self) -> None:
        sums = self._release.slot_sums
        if sums is None:
            raise RuntimeError(
                "There is no slack to release beside this gradient. Call step() after a forward "
                "and backward pass, once for each logical batch."
            )
        noise = _opacus.generate_noise(
            std=self.noise_multiplier * self.max_grad_norm,
            reference=sums,
            generator=self.generator,
            secure_mode=self.secure_mode,
        )
        width = slot_width(self.max_grad_norm, self._num_slots)
        self._release.noisy_sums = sums + noise / width
        self._release.slot_sums = None

    def _global_batch_size(self) -> float:
        """Expected logical batch size over all workers, in samples: public."""
        return check_expected_batch_size(self.expected_batch_size)

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool:
        """Clip, accumulate and, at the end of a logical batch, release and move the threshold.

        Returns:
            Whether the wrapped optimizer is to step: False inside a logical batch.
        """
        with full_precision(self.params[0].device.type if self.params else "cpu"):
            is_released = bool(super().pre_step(closure))
        noisy_sums, self._release.noisy_sums = self._release.noisy_sums, None
        if noisy_sums is not None:
            self._move_threshold(noisy_sums)
        return is_released

    def _move_threshold(self, noisy_sums: torch.Tensor) -> None:
        release = self._release
        batch_size = self._global_batch_size() * self.accumulated_iterations
        values = normalize_slack(noisy_sums, expected_batch_size=batch_size)
        release.indicator = SlackIndicator(
            values=values.cpu().double(),
            clip_norm=release.clip_norm,
            noise_std=indicator_noise_std(
                noise_multiplier=self.noise_multiplier,
                num_slots=self._num_slots,
                expected_batch_size=batch_size,
            ),
            expected_batch_size=batch_size,
        )
        release.num_releases += 1
        self._set_clip_norm(self._next_clip_norm(release.indicator))

    def _next_clip_norm(self, indicator: SlackIndicator) -> float:
        if not bool(indicator.values.isfinite().all()):
            warnings.warn(
                "The slack indicator is not finite; the threshold stays where it is. Check the "
                "noise generator.",
                stacklevel=2,
            )
            return self.max_grad_norm
        low, high = self._clip_bounds
        return next_clip_norm(
            self._controller,
            self.max_grad_norm,
            indicator,
            min_clipbound=low,
            max_clipbound=high,
        )

    def _set_clip_norm(self, clip_norm: float) -> None:
        """The one way to a new threshold, so that every copy of it follows."""
        self._release.clip_norm = clip_norm
        self._mirror()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear gradients; the slack sum lives and dies with ``summed_grad``."""
        super().zero_grad(set_to_none)
        if not _opacus.last_step_was_skipped(self):
            self._release.slot_sums = None

    def _warn_nonfinite_once(self) -> None:
        if not self._release.warned_nonfinite:
            self._release.warned_nonfinite = True
            warnings.warn(
                "A per-sample gradient was not finite; such samples contribute zero to the "
                "gradient and to the slack. This warning, given once, depends on the data: it is "
                "a local diagnostic, outside the privacy guarantee, and not to be published.",
                stacklevel=2,
            )

    # ---- checkpoints ----------------------------------------------------------------------

    def _mirror(self) -> None:
        write_param_groups(
            self.param_groups,
            max_grad_norm=self._release.clip_norm,
            initial_max_grad_norm=self._release.initial_clip_norm,
            num_slots=self._num_slots,
            num_releases=self._release.num_releases,
            controller_state=read_controller_state(self._controller),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state with ours in every param group, as plain numbers.

        Only released values: the threshold, ``K``, the number of releases, the controller's state.
        """
        self._mirror()
        state: dict[str, Any] = super().state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint; an unfinished logical batch is dropped.

        A checkpoint without our entries loads with a warning and keeps the live threshold.

        Raises:
            ValueError: If our entries disagree, hold another ``K``, a threshold outside the bounds
                or the state of another controller. Nothing has changed then.
        """
        saved = read_param_groups(state_dict["param_groups"])
        if saved is not None:
            if saved.num_slots != self._num_slots:
                raise ValueError(
                    f"num_slots must be that of the checkpoint, {saved.num_slots}, got "
                    f"{self._num_slots}. Pass num_slots={saved.num_slots} to make_private."
                )
            check_clip_norm(saved.max_grad_norm, *self._clip_bounds)
            check_controller_state(self._controller, saved.controller_state)
        super().load_state_dict(state_dict)
        self._drop_logical_batch()
        if saved is None:
            warnings.warn(
                "The checkpoint has no SlaClip entry; the threshold stays at "
                f"{self.max_grad_norm:g}.",
                stacklevel=2,
            )
        else:
            self._release.initial_clip_norm = saved.initial_max_grad_norm
            self._release.num_releases = saved.num_releases
            if isinstance(self._controller, StatefulController):
                self._controller.load_state_dict(saved.controller_state)
        self._set_clip_norm(self.max_grad_norm if saved is None else saved.max_grad_norm)

    def _drop_logical_batch(self) -> None:
        _opacus.forget_skipped_step(self)
        self._release.slot_sums = None
        p: Any
        for p in self.params:
            p.summed_grad = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copies and pickles: they would hold private sums, and break Opacus's class."""
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled. Save optimizer.state_dict() and "
            "load it into a new optimizer from make_private."
        )


def _warn_of_a_noisy_indicator(num_slots: int, recommended: int, batch_size: float) -> None:
    if math.floor(batch_size) <= 1:
        warnings.warn(
            "The expected batch size is 1: one sample's slack under noise of the same size says "
            "almost nothing, so the threshold will wander. Use a larger logical batch.",
            stacklevel=4,
        )
    elif num_slots > recommended:
        warnings.warn(
            f"num_slots={num_slots} is above the recommended {recommended} for this batch size and "
            "noise: each slot's noise then exceeds the resolution it buys. The guarantee holds, "
            "but the threshold will be noisier.",
            stacklevel=4,
        )
