"""Opacus's ghost-clipping modules and hooks, bound to the optimizer that owns the threshold."""

from __future__ import annotations

from collections import ChainMap, Counter
from dataclasses import dataclass
from typing import Any

import torch
from opacus.grad_sample import (
    AbstractGradSampleModule,
    GradSampleHooksFastGradientClipping,
    GradSampleHooksFastGradientClippingFSDP,
    GradSampleModuleFastGradientClipping,
    GradSampleModuleFastGradientClippingFSDP,
)
from opacus.utils.module_utils import trainable_parameters
from torch import nn

from opacus_slaclip import _opacus
from opacus_slaclip._precision import accumulation_dtype, is_low
from opacus_slaclip.ghost_norms import embedding_norm_sample, linear_norm_sample
from opacus_slaclip.optimizers.ghost import GhostReleaseMixin
from opacus_slaclip.optimizers.threshold import ReleaseState
from opacus_slaclip.slack import clip_factors

_HOOKS_INSTEAD = (
    "Use grad_sample_mode='hooks', which sums clipped gradients in float32, with reduction='sum'."
)
_ROUNDED = (
    "Ghost clipping cannot pass gradients through {}: the second backward pass would round them, "
    "or their batch sum, to 8 bits after their norms were taken, which the noise does not cover. "
    + _HOOKS_INSTEAD
)
# What norm and gradient of a sample may differ by; rounding takes them less than 1e-5 apart.
_TOLERANCE = 1e-3


class GhostClippingMixin(GradSampleHooksFastGradientClipping):
    """Clips at the optimizer's threshold, by norms that cover exactly what is summed.

    Differs from Opacus's parent: the threshold is the optimizer's own, not a copy; the set of
    trainable parameters may not change unnoticed; ghost norms of sequences are upper bounds; a
    gradient that passes through bfloat16 is refused, since the second backward pass rounds it anew.
    """

    NORM_SAMPLERS: Any = ChainMap(  # noqa: RUF012 # declared so by the parent
        {nn.Linear: linear_norm_sample, nn.Embedding: embedding_norm_sample},
        GradSampleHooksFastGradientClipping.NORM_SAMPLERS,
    )
    _state: ReleaseState | None = None
    _initial_max_grad_norm: float = 1.0
    _trainable_names: frozenset[str] = frozenset()
    _counted: frozenset[nn.Parameter] = frozenset()
    losses: torch.Tensor | None = None  # of the backward pass at hand, shape (B,)
    _num_passes: int = 0

    @property
    def max_grad_norm(self) -> float:
        """The optimizer's threshold; set it there."""
        return self._initial_max_grad_norm if self._state is None else self._state.clip_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        if self._state is not None and value != self._state.clip_norm:
            raise AttributeError(
                f"max_grad_norm of the module follows the optimizer's, {self._state.clip_norm:g}, "
                f"got {value!r}. Set optimizer.max_grad_norm instead."
            )
        self._initial_max_grad_norm = value

    def bind(self, optimizer: GhostReleaseMixin) -> None:
        """Follow the threshold of ``optimizer`` and report to it the norms that were clipped by."""
        self._trainable_names = frozenset(self._named_trainable())
        optimizer.note_parameters()
        self._counted = self._counted_parameters()
        self._state = optimizer._state

    def _named_trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self._module.named_parameters() if p.requires_grad}

    def get_clipping_coef(self) -> torch.Tensor:
        """Return the clip factors of the batch, shape (B,), and hand its norms to the optimizer."""
        norms = self.get_norm_sample()
        if self.losses is not None and len(norms) != len(self.losses):
            raise ValueError(
                "The loss must have one entry a sample in ghost mode, got another number. For "
                "tokens, pass shape=(batch, length, ...) to the criterion, or average them within "
                "each sample."
            )
        clip_norm = self.max_grad_norm
        factors = clip_factors(norms, clip_norm=clip_norm)
        self._check_one_sample(norms.clamp(max=clip_norm), factors)
        if self._state is not None:
            self._state.fresh_norms = norms.detach()
            self._state.fresh_clip_norm = clip_norm
        return factors

    def _check_one_sample(self, clipped: torch.Tensor, factors: torch.Tensor) -> None:
        """Differentiate one sample's loss as the second pass will, in passes 1, 2, 4, 8 and so on.

        Norms come from formulas for known layers. A hook on a tensor, a backward pass of a user's
        own or a layer with an option that its formula does not know makes the gradient another.
        """
        self._num_passes += 1
        is_due = self._num_passes & (self._num_passes - 1) == 0
        if self.losses is None or len(self.losses) == 0 or not is_due:
            return
        i = self._num_passes % len(clipped)
        self.disable_hooks()
        gradients = torch.autograd.grad(
            factors[i].to(self.losses) * self.losses[i],
            list(self._named_trainable().values()),
            retain_graph=True,
            allow_unused=True,
        )
        self.enable_hooks()
        parts = [g.double().norm() for g in gradients if g is not None]
        length, limit = float(torch.stack(parts).norm()), float(clipped[i])
        if length > limit * (1 + _TOLERANCE):
            raise ValueError(
                "The gradient of a sample is longer than the norm that it was clipped by: a layer "
                "of the module has an option, a hook or a backward pass of its own that its norm "
                "misses, or uses the parameters of another. Use grad_sample_mode='functorch' or "
                "'hooks'. (Seen on one sample: a local diagnostic, not to be published.)"
            )

    def get_norm_sample(self) -> torch.Tensor:
        """Return the norms of the batch, shape (B,), once, if they cover what is summed.

        Raises:
            ValueError: If a parameter was frozen or unfrozen since ``make_private``, or a
                trainable layer took no part in the backward pass.
        """
        try:
            self._check_coverage()
            norms: torch.Tensor = super().get_norm_sample()
        finally:
            self._forget_norms()
            self.per_sample_gradient_norms = None
        return norms

    def _check_coverage(self) -> None:
        trainable = self._named_trainable()
        changed = sorted(self._trainable_names.symmetric_difference(trainable))
        if changed:
            raise ValueError(
                f"The trainable parameters must stay those of make_private in ghost mode, but "
                f"requires_grad changed for {changed}. Undo that, or unwrap the module "
                "(to_standard_module() or cleanup()) and call make_private again."
            )
        missing = self._without_norm()
        if missing:
            raise ValueError(
                f"Every trainable parameter must take part in the backward pass in ghost mode, but "
                f"{missing} had no gradient. Freeze it before make_private, use it in every "
                "forward pass, or use grad_sample_mode='hooks'."
            )

    def check_uses(self, loss: torch.Tensor) -> None:
        """Check that parameters are used only by their own layers, and nothing in low precision.

        A functional call or a penalty on a parameter adds to the gradient that is summed, but not
        to the norms. A gradient that passes through a frozen layer in bfloat16 is rounded anew in
        the second backward pass.

        Raises:
            ValueError: If a parameter is used elsewhere, or a gradient would be rounded.
        """
        graph = _Graph.of(loss)
        if graph.is_recomputed:
            raise ValueError(
                "Ghost clipping cannot see through a reentrant checkpoint, inside which parameters "
                "could be used unnoticed. Pass use_reentrant=False to torch.utils.checkpoint."
            )
        if graph.rounded is not None:
            raise ValueError(_ROUNDED.format(graph.rounded))
        outside = [
            name
            for name, p in self._named_trainable().items()
            if name in self._trainable_names
            and p in self._counted
            and graph.uses[p] > _opacus.forward_count(p)
        ]
        if outside:
            raise ValueError(
                f"Parameters must be used only by the layer that owns them in ghost mode, but "
                f"{outside} are used elsewhere too (in a functional call, or a penalty in the "
                "loss), which their norms miss. Use weight decay, or grad_sample_mode='hooks'."
            )

    def _counted_parameters(self) -> frozenset[nn.Parameter]:
        """Parameters of layers that are known to use each of them once in a forward pass."""
        return frozenset(
            p
            for layer in self._module.modules()
            if type(layer) in self.GRAD_SAMPLERS
            and type(layer).__module__.startswith(("torch.nn.", "opacus."))
            for p in layer.parameters(recurse=False)
        )

    def _without_norm(self) -> list[str]:
        return [n for n, p in self._named_trainable().items() if not _opacus.has_norm_sample(p)]

    def forget_pass(self) -> None:
        """Forget what a forward and backward pass left on the layers, after an error in them."""
        for layer in self._module.modules():
            _opacus.delete_activations(layer)
        for p in self._module.parameters():
            _opacus.reset_forward_count(p)
        self._forget_norms()
        self.enable_hooks()

    def _forget_norms(self) -> None:
        for p in self._module.parameters():
            _opacus.delete_norm_sample(p)

    def capture_activations_hook(
        self, module: nn.Module, forward_input: list[torch.Tensor], forward_output: torch.Tensor
    ) -> None:
        """Capture activations; refuse autocast, under which the batch sum would have 8 bits."""
        is_recorded = module.training and torch.is_grad_enabled() and self.hooks_enabled
        if is_recorded and torch.is_autocast_enabled(_device_type(module)):
            raise ValueError(
                f"Ghost clipping cannot run under autocast: the second backward pass of "
                f"{type(module).__name__} would round the clipped batch sum to 8 bits, which the "
                f"noise does not cover. {_HOOKS_INSTEAD} Or leave the autocast context."
            )
        super().capture_activations_hook(module, forward_input, forward_output)


class GhostClippingHooks(GhostClippingMixin, GradSampleHooksFastGradientClipping):
    """Ghost clipping without a wrapper (``wrap_model=False``)."""


class GhostClippingModule(GhostClippingMixin, GradSampleModuleFastGradientClipping):
    """Ghost clipping as a wrapper around the module."""


class _ShardedMixin(GhostClippingMixin):
    """FSDP2 keeps norms on modules: its parameters come and go."""

    def _check_one_sample(self, clipped: torch.Tensor, factors: torch.Tensor) -> None:
        pass  # one sample's gradient is of no rank's own

    def _counted_parameters(self) -> frozenset[nn.Parameter]:
        return frozenset()  # what a layer uses under FSDP2 is not the parameter it owns

    def capture_backprops_hook(
        self,
        module: nn.Module,
        _forward_input: torch.Tensor,
        forward_output: torch.Tensor,
        loss_reduction: str,
        batch_first: bool,
    ) -> None:
        """Compute norms; of an empty local batch there are none, whatever the layer.

        Opacus's parent takes an empty batch for linear layers alone.
        """
        backprops = forward_output[0].detach()
        if not self.hooks_enabled or backprops.shape[0 if batch_first else 1] > 0:
            super().capture_backprops_hook(
                module, _forward_input, forward_output, loss_reduction, batch_first
            )
            return
        layer: Any = module
        self.rearrange_grad_samples(  # takes the activations off the layer
            module=module,
            backprops=backprops,
            loss_reduction=loss_reduction,
            batch_first=batch_first,
        )
        _opacus.count_backward(layer)
        layer.norm_sample = [backprops.new_zeros(0) for _ in trainable_parameters(module)]
        if not layer.activations and hasattr(layer, "max_batch_len"):
            del layer.max_batch_len

    def _layers(self) -> list[Any]:
        return list(self.iterate_submodules(self._module))

    def _without_norm(self) -> list[str]:
        return [repr(layer) for layer in self._layers() if not hasattr(layer, "norm_sample")]

    def _forget_norms(self) -> None:
        for layer in self._layers():
            if hasattr(layer, "norm_sample"):
                del layer.norm_sample


class ShardedGhostClippingHooks(_ShardedMixin, GradSampleHooksFastGradientClippingFSDP):
    """Ghost clipping under FSDP2 without a wrapper."""


class ShardedGhostClippingModule(_ShardedMixin, GradSampleModuleFastGradientClippingFSDP):
    """Ghost clipping under FSDP2 as a wrapper around the module."""


_CLASSES: dict[tuple[str, bool], type[GhostClippingMixin]] = {
    ("ghost", True): GhostClippingModule,
    ("ghost", False): GhostClippingHooks,
    ("ghost_fsdp", True): ShardedGhostClippingModule,
    ("ghost_fsdp", False): ShardedGhostClippingHooks,
}


def prepare_ghost_module(
    module: nn.Module,
    *,
    grad_sample_mode: str,
    wrap_model: bool,
    batch_first: bool,
    loss_reduction: str,
    max_grad_norm: float,
) -> GhostClippingMixin:
    """Wrap ``module`` for ghost clipping, or return it if it is wrapped that way already.

    Raises:
        ValueError: If it is wrapped in another way.
    """
    ghost_class = _CLASSES[grad_sample_mode, wrap_model]
    if not isinstance(module, AbstractGradSampleModule):
        return ghost_class(
            module,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            max_grad_norm=max_grad_norm,
        )
    found: Any = (type(module), module.batch_first, module.loss_reduction)
    if found != (ghost_class, batch_first, loss_reduction):
        raise ValueError(
            f"module must be plain, or wrapped by an earlier make_private with the same clipping "
            f"and arguments; got (class, batch_first, loss_reduction) = {found}, wanted "
            f"{(ghost_class, batch_first, loss_reduction)}. Pass module.to_standard_module()."
        )
    return module  # type: ignore[return-value]


@dataclass
class _Graph:
    """What the graph of a loss shows before it is run.

    Attributes:
        uses: How often each leaf enters it.
        rounded: A precision below float32 in it, if there is one.
        is_recomputed: Whether parts of it are hidden until their forward pass is run again.
    """

    uses: Counter[Any]
    rounded: torch.dtype | None
    is_recomputed: bool = False

    @classmethod
    def of(cls, loss: torch.Tensor) -> _Graph:
        graph = cls(Counter(), loss.dtype if is_low(loss) else None)
        seen, waiting = set(), [loss.grad_fn]
        if loss.grad_fn is not None:
            graph._look_at(loss.grad_fn)
        while waiting:
            for function, _ in getattr(waiting.pop(), "next_functions", ()):
                if hasattr(function, "variable"):
                    graph.uses[function.variable] += 1
                elif function is not None and function not in seen:
                    seen.add(function)
                    waiting.append(function)
                    graph._look_at(function)
        return graph

    def _look_at(self, function: Any) -> None:
        self.is_recomputed |= function.name() == "CheckpointFunctionBackward"
        for output in function._input_metadata:
            if accumulation_dtype(output.dtype) != output.dtype:
                self.rounded = output.dtype


def _device_type(module: nn.Module) -> str:
    return next(module.parameters()).device.type
