"""The threshold: who owns it, who may read and set it, and how it survives a checkpoint."""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from opacus.optimizers import DPOptimizer
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from opacus_slaclip import _opacus
from opacus_slaclip._options import DEFAULT_CLIP_BOUNDS
from opacus_slaclip._validate import (
    check_clip_bounds,
    check_clip_norm,
    check_expected_batch_size,
    check_flag,
    check_noise_multiplier,
    check_noise_scale,
    check_num_slots,
)
from opacus_slaclip._warnings import warn
from opacus_slaclip.controllers import (
    Controller,
    SlaClipController,
    check_controller,
    is_stateful,
    read_controller_state,
)
from opacus_slaclip.indicator import SlackIndicator
from opacus_slaclip.optimizers.checkpoint import (
    SavedRelease,
    check_controller_state,
    read_param_groups,
    write_param_groups,
)
from opacus_slaclip.slack import recommended_num_slots

__all__ = ["ThresholdMixin"]


@dataclass
class ReleaseState:
    """Everything that changes, in one object.

    Wrappers such as Lightning's copy an optimizer's attributes once; sharing this object instead
    of plain attributes keeps their copies live. In ghost mode the module that clips shares it too,
    so that there is one threshold.
    """

    clip_norm: float
    initial_clip_norm: float
    num_releases: int = 0
    indicator: SlackIndicator | None = None
    # Private until noised; None outside a logical batch.
    slot_sums: torch.Tensor | None = field(default=None, repr=False)
    # Noised; the threshold has yet to move by it.
    noisy_sums: torch.Tensor | None = field(default=None, repr=False)
    # Private; ghost: clipped by, not yet accumulated, and the threshold that clipped.
    fresh_norms: torch.Tensor | None = field(default=None, repr=False)
    fresh_clip_norm: float | None = None
    # Private; ghost: no bad norm in this logical batch.
    is_finite: torch.Tensor | None = field(default=None, repr=False)
    # Ghost: the parameters in the norms, and the gradients that backward() left on them.
    bound_parameters: list[int] | None = field(default=None, repr=False)
    grad_versions: list[Any] | None = field(default=None, repr=False)
    grad_checksums: torch.Tensor | None = field(default=None, repr=False)  # private
    is_rounded: bool = False  # gradients of the batch at hand passed through low precision
    warned_nonfinite: bool = False
    steps_in_pass: int = 0
    excused_in_pass: bool = False  # a step of the pass failed with an error of its own
    batches_in_pass: int | None = None  # known once the sampler has handed out the last one
    release_hooks: OrderedDict[int, Callable[[Any], None]] = field(
        default_factory=OrderedDict, repr=False
    )
    pass_number: int = 0
    pass_has_ended: bool = False
    look_ahead: int = 0  # batches that the loader's workers fetch before they are asked for
    announced_in_pass: int = -1  # number of the last pass with physical batches

    def drop_backward(self) -> None:
        """Forget what a backward pass in ghost mode has left for the step: used up, or refused."""
        self.fresh_norms = self.grad_checksums = None

    def drop_private(self) -> None:
        """Forget everything that has not been noised and used."""
        self.__dict__.update(_NOTHING_PRIVATE)

    def __getstate__(self) -> dict[str, Any]:
        """Leave what is private out of copies and pickles, and who listens."""
        return self.__dict__ | _NOTHING_PRIVATE | {"release_hooks": OrderedDict()}


_NOTHING_PRIVATE = dict.fromkeys(
    ("slot_sums", "noisy_sums", "fresh_norms", "is_finite", "grad_checksums")
)


class ThresholdMixin(DPOptimizer):
    """Owns an adaptive threshold on top of one of Opacus's optimizers.

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
        rescale_to_unit_norm: Divide what is released by the threshold it was clipped at.

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
        rescale_to_unit_norm: bool = False,
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
        self._controller = (
            SlaClipController() if controller is None else check_controller(controller)
        )
        self._rescale_to_unit_norm = check_flag("rescale_to_unit_norm", rescale_to_unit_norm)
        self._state = ReleaseState(clip_norm=clip_norm, initial_clip_norm=clip_norm)
        _warn_of_a_noisy_indicator(self._num_slots, recommended, batch_size)
        super().__init__(
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=clip_norm,
            expected_batch_size=expected_batch_size,  # type: ignore[arg-type] # see above
            loss_reduction=loss_reduction,
            generator=generator,
            secure_mode=secure_mode,
        )

    def _global_batch_size(self) -> float:
        """Expected logical batch size over all workers, in samples: public."""
        return check_expected_batch_size(self.expected_batch_size)

    # ---- what a user may read and set -----------------------------------------------------

    @property
    def max_grad_norm(self) -> float:
        """The threshold ``C_t``, in gradient-norm units: a finite float within the bounds.

        Setting it (a scheduler does) is allowed between logical batches, and adaptation goes on
        from the new value.
        """
        return self._state.clip_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        clip_norm = check_clip_norm(value, *self._clip_bounds)
        state = self._state
        pending = (state.slot_sums, state.fresh_norms, state.noisy_sums)
        is_clipping = any(sums is not None for sums in pending)
        if is_clipping and clip_norm != state.clip_norm:
            raise RuntimeError(
                f"max_grad_norm must stay {state.clip_norm:g} until the logical batch that was "
                f"begun with it is released, got {clip_norm:g}. Set it after the step that ends "
                "the batch."
            )
        self._set_clip_norm(clip_norm)

    @property
    def slack_indicator(self) -> SlackIndicator | None:
        """The last release, or None before the first step (also after a resume)."""
        return self._state.indicator

    @property
    def num_slots(self) -> int:
        """Number of slots ``K``."""
        return self._num_slots

    @property
    def num_releases(self) -> int:
        """Number of releases so far, those before a checkpoint included."""
        return self._state.num_releases

    @property
    def controller(self) -> Controller:
        """What moves the threshold."""
        return self._controller

    @property
    def initial_max_grad_norm(self) -> float:
        """``C_0``, the threshold this optimizer (or the one it continues) was first made with."""
        return self._state.initial_clip_norm

    @property
    def min_clipbound(self) -> float:
        """Lower bound of the threshold."""
        return self._clip_bounds[0]

    @property
    def max_clipbound(self) -> float:
        """Upper bound of the threshold."""
        return self._clip_bounds[1]

    def register_release_hook(self, hook: Callable[[Any], None]) -> RemovableHandle:
        """Have ``hook(optimizer)`` called at the end of each step that released something.

        The threshold has moved and the parameters are updated by then. Hooks are not copied or
        saved.

        Returns:
            A handle; its ``remove()`` ends the calls.
        """
        handle = RemovableHandle(self._state.release_hooks)
        self._state.release_hooks[handle.id] = hook
        return handle

    @property
    def rescale_to_unit_norm(self) -> bool:
        """Whether what is released is divided by the threshold it was clipped at."""
        return self._rescale_to_unit_norm

    def continue_from(self, previous: ThresholdMixin) -> None:
        """Go on at the threshold of ``previous``, if both were first made with the same ``C_0``.

        Federated rounds call ``make_private`` on objects that are private already; the adapted
        threshold then survives. It carries the privacy cost of the run that found it.
        """
        if previous.initial_max_grad_norm != self.initial_max_grad_norm:
            return
        low, high = self._clip_bounds
        self._state.num_releases = previous.num_releases
        own, other = self._controller, previous.controller
        state, names = read_controller_state(other), read_controller_state(own).keys()
        if type(own) is type(other) and is_stateful(own) and names in (state.keys(), set()):
            own.load_state_dict(state)
        self.max_grad_norm = min(max(previous.max_grad_norm, low), high)

    def _set_clip_norm(self, clip_norm: float) -> None:
        """The one way to a new threshold, so that every copy of it follows."""
        self._state.clip_norm = clip_norm
        self._mirror()

    # ---- checkpoints ----------------------------------------------------------------------

    def _mirror(self) -> None:
        write_param_groups(
            self.param_groups,
            max_grad_norm=self._state.clip_norm,
            initial_max_grad_norm=self._state.initial_clip_norm,
            num_slots=self._num_slots,
            num_releases=self._state.num_releases,
            rescale_to_unit_norm=int(self._rescale_to_unit_norm),
            controller_state=read_controller_state(self._controller),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state with ours in every param group, as plain numbers.

        Only released values: the threshold, ``K``, the number of releases, the controller's state.
        """
        self._mirror()
        state: dict[str, Any] = super().state_dict()  # type: ignore[no-untyped-call]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint; an unfinished logical batch is dropped.

        A checkpoint without our entries loads with a warning and keeps the live threshold.

        Raises:
            ValueError: If our entries disagree, hold another ``K``, a threshold outside the bounds
                or the state of another controller. Nothing has changed then.
        """
        saved = self.check_state_dict(state_dict)
        clip_norm, controller = self.max_grad_norm, self._controller
        before: dict[str, float] | None = None
        with contextlib.suppress(TypeError):  # a state gone bad is nothing to go back to
            before = read_controller_state(controller)
        try:
            if saved is not None and is_stateful(controller):
                controller.load_state_dict(saved.controller_state)  # may refuse: nothing else yet
            super().load_state_dict(state_dict)
        except BaseException:
            if before is not None and is_stateful(controller):
                controller.load_state_dict(before)
            raise
        self._drop_logical_batch()
        self._drop_grad_samples()
        self._state.batches_in_pass = self._state.indicator = None
        if saved is None:
            warn(
                f"The checkpoint has no SlaClip entry; the threshold stays at {clip_norm:g}.",
            )
        else:
            clip_norm = saved.max_grad_norm
            self._state.initial_clip_norm = saved.initial_max_grad_norm
            self._state.num_releases = saved.num_releases
        self._set_clip_norm(clip_norm)

    def check_state_dict(self, state_dict: dict[str, Any]) -> SavedRelease | None:
        """Return our entries of a checkpoint, None if it has none, and change nothing.

        Raises:
            ValueError: As :meth:`load_state_dict`.
        """
        saved = read_param_groups(state_dict["param_groups"])
        if saved is not None:
            if saved.num_slots != self._num_slots:
                raise ValueError(
                    f"num_slots must be that of the checkpoint, {saved.num_slots}, got "
                    f"{self._num_slots}. Pass num_slots={saved.num_slots} to make_private."
                )
            if saved.rescale_to_unit_norm != self._rescale_to_unit_norm:
                raise ValueError(
                    f"rescale_to_unit_norm must be that of the checkpoint, "
                    f"{saved.rescale_to_unit_norm}, got {self._rescale_to_unit_norm}: the learning "
                    "rate would mean something else. Pass it to make_private."
                )
            check_clip_norm(saved.max_grad_norm, *self._clip_bounds)
            check_controller_state(self._controller, saved.controller_state)
        return saved

    def _drop_logical_batch(self) -> None:
        """Forget every private sum of an unfinished logical batch."""
        _opacus.forget_skipped_step(self)
        self._state.drop_private()
        for p in self._all_parameters():
            p.summed_grad = None

    def _all_parameters(self) -> list[Any]:
        """Every parameter that the wrapped optimizer steps on, frozen since or not."""
        return [p for group in self.param_groups for p in group["params"]]

    def _drop_grad_samples(self) -> None:
        for p in self._all_parameters():
            if hasattr(p, "grad_sample"):
                p.grad_sample = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copies and pickles: they would hold private sums, and break Opacus's class."""
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled. Save optimizer.state_dict() and "
            "load it into a new optimizer from make_private."
        )


def _warn_of_a_noisy_indicator(num_slots: int, recommended: int, batch_size: float) -> None:
    if math.floor(batch_size) <= 1:
        warn(
            "The expected batch size is 1: one sample's slack under noise of the same size says "
            "almost nothing, so the threshold will wander. Use a larger logical batch.",
        )
    elif num_slots > recommended:
        warn(
            f"num_slots={num_slots} is above the recommended {recommended} for this batch size and "
            "noise: each slot's noise then exceeds the resolution it buys. The guarantee holds, "
            "but the threshold will be noisier.",
        )
