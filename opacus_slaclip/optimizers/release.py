"""The part of a step that every optimizer family shares: slack in, release out, threshold moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from opacus_slaclip import _opacus
from opacus_slaclip._precision import full_precision
from opacus_slaclip._validate import check_noise_scale
from opacus_slaclip._warnings import warn
from opacus_slaclip.controllers import next_clip_norm, note_moved, read_controller_state
from opacus_slaclip.indicator import SlackIndicator
from opacus_slaclip.optimizers.threshold import ThresholdMixin
from opacus_slaclip.slack import indicator_noise_std, normalize_slack, slot_width, sum_slack


class SlackReleaseMixin(ThresholdMixin):
    """Releases the slack beside the gradient and moves the threshold by it.

    Guarantee: the joint sum of clipped gradients and slack has L2 sensitivity ``max_grad_norm``
    under add/remove adjacency, and every coordinate of it receives independent Gaussian noise of
    standard deviation ``noise_multiplier * max_grad_norm``. A step therefore costs what a step of
    plain DP-SGD with the same ``noise_multiplier`` costs, and the accountant records just that.

    The threshold is fixed from the first physical batch of a logical batch to its noise draw, and
    moves at the end of a step that was not skipped.
    """

    # How many batches a trainer takes from the loader before it steps on earlier ones, besides
    # those that the loader's own workers fetch ahead.
    fetched_ahead: int = 0

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # torch's GradScaler reads this before it steps an optimizer; nothing else does.
        raise RuntimeError(
            "A GradScaler cannot step a private optimizer: it multiplies the loss, so every "
            "per-sample gradient looks far too long and is clipped. Use bfloat16 autocast, which "
            "needs no loss scaling, or GradScaler(enabled=False)."
        )

    def note_rounding(self) -> None:
        """Be told that the gradients of this batch pass through a layer of low precision."""
        self._state.is_rounded = True

    def _accumulate_slack(self, norms: torch.Tensor) -> None:
        """Add one physical batch, by the norms, shape (b,), that its gradients are clipped by."""
        sums = sum_slack(norms, clip_norm=self.max_grad_norm, num_slots=self._num_slots)
        pending = self._state.slot_sums
        self._state.slot_sums = sums if pending is None else pending + sums

    def add_noise(self) -> None:
        """Noise the gradient, then the slack, from one stream and at one scale: one release."""
        if self._state.slot_sums is None:
            raise RuntimeError(
                "There is no slack to release beside this gradient. Call step() after a forward "
                "and backward pass, once for each logical batch."
            )
        check_noise_scale(self.noise_multiplier, self.max_grad_norm)
        self._add_gradient_noise()
        self._state.noisy_sums = self._noised_slack(self._state.slot_sums)
        self._state.slot_sums = None

    def _add_gradient_noise(self) -> None:
        super().add_noise()  # type: ignore[no-untyped-call]

    def scale_grad(self) -> None:
        """Apply the loss reduction; then, on request, divide by the threshold: post-processing."""
        super().scale_grad()  # type: ignore[no-untyped-call]
        if self._rescale_to_unit_norm and not self._is_low_precision():
            params: list[Any] = self.params
            for p in params:
                p.grad /= self.max_grad_norm

    def _is_low_precision(self) -> bool:
        """Whether a parameter has less than float32's precision."""
        return False

    def _noised_slack(self, slot_sums: torch.Tensor) -> torch.Tensor:
        """Return what is released of the slack, in slots; its draw follows the gradient's."""
        noise = self._noise_like(slot_sums)
        return slot_sums + noise / slot_width(self.max_grad_norm, self._num_slots)

    def _noise_like(self, reference: torch.Tensor) -> torch.Tensor:
        """Draw noise of the one scale, in gradient-norm units."""
        return _opacus.generate_noise(
            std=self.noise_multiplier * self.max_grad_norm,
            reference=reference,
            generator=self.generator,
            secure_mode=self.secure_mode,
        )

    def _reduced(self, noisy_sums: torch.Tensor) -> torch.Tensor:
        """Return the release summed over all workers."""
        return noisy_sums

    def _any_worker(self, flag: torch.Tensor) -> torch.Tensor:
        """Return whether ``flag`` is set on any worker."""
        return flag

    def step(  # type: ignore[override] # torch overloads it
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Take one private step, or accumulate if the step is skipped.

        torch's distributed checkpoint initializes an optimizer by a step with zero gradients and
        zero learning rates: that one passes through, without noise, charge or release.
        """
        if closure is None and self._is_state_initialization():
            self._check_frozen()
            return self.original_optimizer.step()
        num_releases = self.num_releases
        loss = super().step(closure)
        if self.num_releases != num_releases:
            # Last of all: an error in one must neither cost the update nor part the ranks.
            for hook in list(self._state.release_hooks.values()):
                hook(self)
        return loss

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool:
        """Clip, accumulate and, at the end of a logical batch, release and move the threshold.

        Returns:
            Whether the wrapped optimizer is to step: False inside a logical batch.
        """
        self._check_ready()
        self._check_frozen()
        announced = _opacus.num_announced(self)
        try:
            with full_precision(self.params[0].device.type if self.params else "cpu"):
                self._check_in_step()
                is_released = bool(super().pre_step(closure))
        except BaseException:
            # What is left of the batch must not leak into the next one, nor its skip flag.
            self._abandon(announced - 1)
            raise
        noisy_sums, self._state.noisy_sums = self._state.noisy_sums, None
        if noisy_sums is not None:
            self._move_threshold(self._reduced(noisy_sums))
        return is_released

    def _abandon(self, num_announced: int) -> None:
        """After an error in a physical batch: forget its logical batch and its own skip flag."""
        self._drop_logical_batch()
        self._drop_grad_samples()
        _opacus.forget_announced(self, num_announced)
        self._state.excused_in_pass = True

    def _check_frozen(self) -> None:
        # The wrapped optimizer steps on every gradient there is, also on that of a parameter that
        # was frozen after the backward pass and is neither clipped nor noised any more.
        for p in self._all_parameters():
            if p.requires_grad:
                continue
            is_summed = getattr(p, "summed_grad", None) is not None
            if is_summed or (p.grad is not None and bool(p.grad.any())):
                raise RuntimeError(
                    "requires_grad may change only between zero_grad() and the next forward pass: "
                    "a parameter that was frozen since then still has a gradient, which would be "
                    "applied without clipping or noise. Call zero_grad() after freezing."
                )

    def _check_ready(self) -> None:
        """Raise if there is nothing to take up, with everything as it was."""
        raise NotImplementedError

    def _check_in_step(self) -> None:
        """Raise if the workers are not at the same physical batch."""

    def _move_threshold(self, noisy_sums: torch.Tensor) -> None:
        state = self._state
        batch_size = self._global_batch_size() * self.accumulated_iterations
        values = normalize_slack(noisy_sums, expected_batch_size=batch_size)
        state.indicator = SlackIndicator(
            values=values.cpu().double(),
            clip_norm=state.clip_norm,
            noise_std=indicator_noise_std(
                noise_multiplier=self.noise_multiplier,
                num_slots=self._num_slots,
                expected_batch_size=batch_size,
            ),
            expected_batch_size=batch_size,
        )
        state.num_releases += 1
        state.steps_in_pass += 1
        self._set_clip_norm(self._next_clip_norm(state.indicator))

    def _next_clip_norm(self, indicator: SlackIndicator) -> float:
        if not bool(indicator.values.isfinite().all()):
            warn(
                "The slack indicator is not finite; the threshold stays where it is. Check the "
                "noise generator.",
            )
            return self.max_grad_norm
        low, high = self._clip_bounds
        clip_norm = next_clip_norm(
            self._controller,
            self.max_grad_norm,
            replace(indicator, values=indicator.values.clone()),  # what was released stays
            min_clipbound=low,
            max_clipbound=high,
        )
        note_moved(self._controller)
        read_controller_state(self._controller)  # raises before the threshold moves, if at all
        return clip_norm

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear gradients; the slack sum lives and dies with ``summed_grad``."""
        super().zero_grad(set_to_none)
        self._state.drop_backward()
        self._state.is_rounded = False
        is_between = not _opacus.last_step_was_skipped(self)
        if is_between:
            self._state.slot_sums = None
        for p in self._all_parameters():
            if not p.requires_grad and hasattr(p, "summed_grad"):  # the parent passes it over
                p.grad_sample = None
                if is_between:
                    p.summed_grad = None

    def drop_logical_batch(self) -> None:
        """Forget an unfinished logical batch: its sums, norms and announced physical batches.

        For a loop that was left early. Nothing of the batch has been released, so nothing is
        charged. Loaders with Poisson sampling do this at the beginning of each pass.
        """
        self._drop_logical_batch()
        _opacus.clear_skip_queue(self)

    def begin_pass(self, look_ahead: int) -> int:
        """Start a pass through the data from a clean state; the sampler calls this.

        Args:
            look_ahead: How many batches the loader's workers fetch before they are asked for.

        Returns:
            The number of the pass.
        """
        state = self._state
        in_flight = _opacus.num_announced(self)
        if not (state.pass_has_ended and 0 < in_flight <= self.fetched_ahead):
            unfinished = state.slot_sums is not None
            self.drop_logical_batch()
            if unfinished:
                warn(
                    "The last pass ended inside a logical batch, which was dropped: finish the "
                    "loop of BatchMemoryManager, or call optimizer.drop_logical_batch() when "
                    "leaving it."
                )
            num_batches = 0 if state.excused_in_pass else state.batches_in_pass or 0
            if state.steps_in_pass + self.fetched_ahead < num_batches:
                warn(
                    "Some logical batches of the last pass had no step, so the accountant charged "
                    "too little. Call step() for every batch, empty ones included. (This depends "
                    "on the data: a local diagnostic, not to be published.)"
                )
        state.steps_in_pass, state.batches_in_pass, state.excused_in_pass = 0, None, False
        state.look_ahead, state.pass_has_ended = look_ahead, False
        state.pass_number += 1
        return state.pass_number

    def continue_pass(self, number: int) -> None:
        """Go on with a pass; the sampler calls this.

        Raises:
            RuntimeError: If another pass has begun since, and dropped the physical batches that
                had been announced for this one.
        """
        state = self._state
        if number == state.pass_number:
            return
        state.excused_in_pass = True
        if state.announced_in_pass >= number:
            self.drop_logical_batch()
            raise RuntimeError(
                "Another pass through the data was begun inside this one, so the batches of "
                "BatchMemoryManager and the steps no longer match; the logical batch was dropped. "
                "Draw what you want to look at, as with next(iter(loader)), before the loop."
            )

    def end_pass(self, number: int, num_steps: int | None) -> None:
        """Expect so many steps in the pass (None: not known); the sampler calls this."""
        if number == self._state.pass_number:
            self._state.batches_in_pass, self._state.pass_has_ended = num_steps, True

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Take note of a physical batch that is on its way; its sampler calls this.

        Raises:
            RuntimeError: If an earlier one of this pass went by without a step. Its note would be
                taken for that of the next, and two logical batches would be released as one.
        """
        state, ahead = self._state, _opacus.num_announced(self)
        is_in_pass = state.pass_number > 0 and not state.pass_has_ended
        if is_in_pass and ahead > state.look_ahead + self.fetched_ahead:
            self.drop_logical_batch()
            raise RuntimeError(
                "A physical batch went by without step(), so the batches of BatchMemoryManager and "
                "the steps no longer match; the logical batch was dropped. Call step() for every "
                "physical batch, empty ones included. (If a trainer takes batches from the loader "
                "before it steps on earlier ones, set optimizer.fetched_ahead to how many.)"
            )
        state.announced_in_pass = state.pass_number
        super().signal_skip_step(do_skip)  # type: ignore[no-untyped-call]

    def _has_fresh_gradient(self) -> bool:
        """Whether a backward pass has left something that no step has taken yet."""
        raise NotImplementedError

    def _is_state_initialization(self) -> bool:
        if any(group.get("lr", 1.0) != 0 for group in self.param_groups):
            return False
        if self._has_fresh_gradient():
            return False
        params: list[Any] = self.params
        return all(p.grad is not None and not bool(p.grad.any()) for p in params)

    def _warn_nonfinite_once(self) -> None:
        if not self._state.warned_nonfinite:
            self._state.warned_nonfinite = True
            warn(
                "A per-sample gradient was not finite; such samples contribute zero to the "
                "gradient and to the slack. This warning, given once, depends on the data: it is "
                "a local diagnostic, outside the privacy guarantee, and not to be published.",
            )
