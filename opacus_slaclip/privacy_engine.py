"""A drop-in :class:`opacus.PrivacyEngine` that adds ``clipping="slaclip"`` and ``"slaclip-q"``."""

from __future__ import annotations

import inspect
from typing import Any, Literal

import opacus
import torch
from opacus.accountants.utils import get_noise_multiplier
from opacus.layers.dp_rnn import DPRNNBase
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from opacus_slaclip import _opacus
from opacus_slaclip._modes import GHOST_MODES, check_mode
from opacus_slaclip._options import (
    CONTROLLERS,
    OPTIONS,
    check_names,
    refuse_only_ours,
    resolve_options,
)
from opacus_slaclip._validate import (
    check_budget,
    check_expected_batch_size,
    check_noise_multiplier,
    check_noise_scale,
)
from opacus_slaclip._warnings import warn
from opacus_slaclip._watch import PrecisionWatch, refuse_reordered_rows
from opacus_slaclip.controllers import check_unmoved
from opacus_slaclip.ghost_loss import GhostLoss
from opacus_slaclip.ghost_modules import prepare_ghost_module
from opacus_slaclip.optimizers import (
    SlackReleaseMixin,
    SlaClipDPOptimizer,
    get_optimizer_class,
)
from opacus_slaclip.optimizers.checkpoint import clear_param_groups
from opacus_slaclip.sampling import (
    follow_passes,
    followed,
    own_poisson_sampler,
    with_batch_sampler,
)

# What make_private_with_epsilon hands on to Opacus's calibration and accountants.
_ACCOUNTING_EXTRAS = ("epsilon_tolerance", "alphas", "poisson", "eps_error", "delta_error")
_MAKE_PRIVATE = inspect.signature(opacus.PrivacyEngine.make_private)
_MAKE_PRIVATE_NAMES = {
    name
    for name, parameter in _MAKE_PRIVATE.parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}


_MaxGradNorm = float | list[float] | Literal["auto"]


class PrivacyEngine(opacus.PrivacyEngine):
    """Opacus's engine with SlaClip: an adaptive threshold at the privacy cost of plain DP-SGD.

    Everything else (accountants, modules, loaders, checkpoints) is Opacus's own, and every
    clipping value that Opacus knows goes through unchanged.

    Example:
        >>> engine = PrivacyEngine()
        >>> model, optimizer, loader = engine.make_private(
        ...     module=model, optimizer=optimizer, data_loader=loader,
        ...     noise_multiplier=1.0, max_grad_norm=1.0, clipping="slaclip",
        ... )
        >>> optimizer.max_grad_norm    # C_t
        >>> optimizer.slack_indicator  # the last release
    """

    # The module that make_private is making private with SlaClip: its hooks are not told either.
    _slaclip_module: nn.Module | None = None

    def make_private(self, *, clipping: str = "flat", **kwargs: Any) -> Any:
        """Make module, optimizer and loader private; see :meth:`opacus.PrivacyEngine.make_private`.

        With ``clipping="slaclip"`` (the paper's controller) or ``"slaclip-q"`` (a fixed target
        quantile), ``max_grad_norm`` is the initial threshold ``C_0``, or "auto" to have the level
        of the gradient norms found (:class:`opacus_slaclip.AutoController`; the bounds are then
        1e-6 and 1e6 by default), and these options apply.
        Called again on the objects it returned, training goes on at the adapted threshold if
        ``max_grad_norm`` is the value they were first made with.

        Args:
            clipping: "slaclip", "slaclip-q" or a value of Opacus's.
            num_slots: Number of slots ``K``, a positive int; default
                :func:`opacus_slaclip.recommended_num_slots` (slaclip values only).
            clipbound_learning_rate: ``eta``, how fast the threshold moves; default 0.2.
            target_unclipped_quantile: Target fraction of unclipped samples in (0, 1); default 0.5
                ("slaclip-q" only).
            min_clipbound: Lower bound of the threshold, in gradient-norm units; default 0.1
                (1e-6 with "auto").
            max_clipbound: Upper bound of the threshold, in gradient-norm units; default 50 (1e6
                with "auto").
            rescale_to_unit_norm: Divide what is released by the ``C_t`` it was clipped at, so that
                the learning rate means the same at every threshold; default False. For SGD it is
                then what ``learning rate * C`` was, and weight decay what ``weight decay / C`` was.
            controller: Any callable ``(clip_norm, indicator) -> next clip_norm``, in the place of
                rate and quantile; a new one for each run if it keeps state. With "auto", one that
                leaves fewer than an eighth of the samples unclipped needs
                ``AutoController(controller, search_quantile=q)``.
            **kwargs: Opacus's own arguments.

        Returns:
            What Opacus returns: (module, optimizer, data_loader), in ghost modes (module,
            optimizer, criterion, data_loader). The optimizer also has ``slack_indicator``,
            ``num_slots``, ``num_releases`` and ``controller``.

        Raises:
            TypeError: For an unknown option (naming the nearest one) or one that does not apply.
            ValueError: For a value out of range, or a mode in which the guarantee could not be
                kept. In both cases nothing has been wrapped yet.
        """
        if clipping not in CONTROLLERS:
            refuse_only_ours(kwargs, clipping=clipping)
            return super().make_private(clipping=clipping, **kwargs)
        check_names(kwargs, _MAKE_PRIVATE_NAMES | set(OPTIONS), clipping=clipping)
        resolved = self._check(clipping, kwargs)
        return self._make_private(clipping, kwargs, resolved)

    def _make_private(self, clipping: str, kwargs: dict[str, Any], resolved: dict[str, Any]) -> Any:
        noise_multiplier = check_noise_multiplier(kwargs.get("noise_multiplier"))
        for bound in ("min_clipbound", "max_clipbound"):
            check_noise_scale(noise_multiplier, resolved[bound])
        arguments = {name: kwargs[name] for name in kwargs if name not in (*OPTIONS, *resolved)}
        self._slaclip_module = kwargs["module"]
        try:
            private: Any = super().make_private(clipping=clipping, **arguments, **resolved)
        finally:
            self._slaclip_module = None
        module, optimizer, *_criterion, data_loader = private
        follow_passes(data_loader, optimizer)
        watches: dict[Any, type] = {}
        if getattr(optimizer, "divides_before_rounding", False):
            watches[PrecisionWatch(optimizer.note_rounding)] = nn.Module
        if kwargs.get("grad_sample_mode") != "no_op":
            watches[refuse_reordered_rows] = DPRNNBase
        _opacus.replace_forward_hooks(module, watches)
        return private

    def make_private_with_epsilon(self, *, clipping: str = "flat", **kwargs: Any) -> Any:
        """Like :meth:`make_private`, with the noise calibrated to a budget by Opacus.

        Args:
            clipping: "slaclip", "slaclip-q" or a value of Opacus's.
            **kwargs: As for :meth:`make_private`, with ``target_epsilon``, ``target_delta`` and
                ``epochs`` in the place of ``noise_multiplier``; also ``epsilon_tolerance`` and the
                accountants' ``alphas``, ``poisson``, ``eps_error``, ``delta_error``.

        Returns:
            What :meth:`make_private` returns.

        Raises:
            TypeError, ValueError: As :meth:`make_private`.
        """
        if clipping not in CONTROLLERS:
            refuse_only_ours(kwargs, clipping=clipping)
            return super().make_private_with_epsilon(clipping=clipping, **kwargs)
        target = ("target_epsilon", "target_delta", "epochs")
        accepted = (_MAKE_PRIVATE_NAMES - {"noise_multiplier"}) | set(OPTIONS)
        check_names(kwargs, {*accepted, *target, *_ACCOUNTING_EXTRAS}, clipping=clipping)
        missing = [name for name in target if name not in kwargs]
        if missing:
            raise TypeError(f"make_private_with_epsilon needs {', '.join(missing)}. Pass them.")
        check_budget(kwargs)
        arguments = {name: kwargs[name] for name in kwargs if name in accepted}
        resolved = self._check(clipping, arguments)
        if len(self.accountant) > 0:
            warn(
                "This engine has already spent privacy budget; the calibrated noise assumes none, "
                "so the total epsilon will exceed target_epsilon.",
            )
        noise_multiplier = get_noise_multiplier(
            sample_rate=1 / len(kwargs["data_loader"]),
            accountant=self.accountant.mechanism(),
            **{name: kwargs[name] for name in kwargs if name in (*target, *_ACCOUNTING_EXTRAS)},
        )
        arguments["noise_multiplier"] = noise_multiplier
        return self._make_private(clipping, arguments, resolved)

    def _check(self, clipping: str, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Check all but the noise before anything is wrapped; return our options, resolved."""
        opacus_arguments = {name: kwargs[name] for name in kwargs if name in _MAKE_PRIVATE_NAMES}
        bound = _MAKE_PRIVATE.bind_partial(self, **opacus_arguments)
        bound.apply_defaults()
        arguments = bound.arguments
        for name in ("module", "optimizer", "data_loader"):
            if name not in arguments:
                raise TypeError(f"make_private needs {name}. Pass it.")
        options = {name: kwargs[name] for name in kwargs if name in OPTIONS}
        resolved = resolve_options(clipping, options, max_grad_norm=kwargs.get("max_grad_norm"))
        check_expected_batch_size(
            _expected_batch_size(arguments["data_loader"], bool(arguments["poisson_sampling"]))
        )
        previous = arguments["optimizer"]
        is_continued = (
            isinstance(previous, SlackReleaseMixin)
            and previous.initial_max_grad_norm == resolved["max_grad_norm"]
        )
        check_unmoved(
            resolved["controller"], of_this_run=previous.controller if is_continued else None
        )
        check_mode(arguments, is_own_criterion="criterion" in kwargs)
        return resolved

    def load_checkpoint(self, *, path: Any, optimizer: Any = None, **kwargs: Any) -> Any:
        """Like Opacus's; what our optimizer refuses is refused before anything has been loaded.

        Args:
            path: Of the checkpoint, or an open binary file that can be read again.
            optimizer: As for Opacus.
            **kwargs: Opacus's own arguments.

        Returns:
            What Opacus returns.

        Raises:
            ValueError: As ``optimizer.load_state_dict``.
        """
        if isinstance(optimizer, SlackReleaseMixin):
            begin = path.tell() if hasattr(path, "seek") else None
            options = kwargs.get("torch_load_kwargs") or {}
            saved = torch.load(path, **options, weights_only=False).get("optimizer_state_dict")
            if begin is not None:
                path.seek(begin)
            if saved:
                optimizer.check_state_dict(saved)
        return super().load_checkpoint(path=path, optimizer=optimizer, **kwargs)

    # ---- what Opacus's make_private calls --------------------------------------------------

    def _prepare_model(
        self, module: nn.Module, *, grad_sample_mode: str = "hooks", **kwargs: Any
    ) -> Any:
        if self._slaclip_module is None or grad_sample_mode not in GHOST_MODES:
            return super()._prepare_model(module, grad_sample_mode=grad_sample_mode, **kwargs)
        self.validate(module=module, optimizer=None, data_loader=None)
        return prepare_ghost_module(module, grad_sample_mode=grad_sample_mode, **kwargs)

    def _prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        *,
        poisson_sampling: bool,
        distributed: bool,
        **kwargs: Any,
    ) -> Any:
        private = super()._prepare_data_loader(
            data_loader, poisson_sampling=poisson_sampling, distributed=distributed, **kwargs
        )
        if self._slaclip_module is None:
            return private
        if poisson_sampling:
            sampler = own_poisson_sampler(private.batch_sampler, secure=self.secure_mode)
            return with_batch_sampler(private, sampler)
        if private.batch_sampler is None:
            return private
        return with_batch_sampler(private, followed(private.batch_sampler))

    def _prepare_optimizer(
        self,
        *,
        optimizer: Any,
        clipping: str = "flat",
        distributed: bool = False,
        grad_sample_mode: str = "hooks",
        noise_generator: Any = None,
        **kwargs: Any,
    ) -> Any:
        if clipping not in CONTROLLERS:
            other: Any = super()._prepare_optimizer(
                optimizer=optimizer,
                clipping=clipping,
                distributed=distributed,
                grad_sample_mode=grad_sample_mode,
                noise_generator=noise_generator,
                **kwargs,
            )
            clear_param_groups(other.param_groups)
            return other
        optimizer_class = get_optimizer_class(
            grad_sample_mode=grad_sample_mode, distributed=distributed
        )
        is_private = isinstance(optimizer, opacus.optimizers.DPOptimizer)
        private: Any = optimizer_class(
            optimizer=optimizer.original_optimizer if is_private else optimizer,
            generator=self.secure_rng if self.secure_mode else noise_generator,
            secure_mode=self.secure_mode,
            **kwargs,
        )
        if isinstance(self._slaclip_module, DistributedDataParallel):
            private.backward_synchronizes = True
        if isinstance(private, SlaClipDPOptimizer) and grad_sample_mode != "no_op":
            private.divides_before_rounding = private.loss_reduction == "mean"
        private._drop_grad_samples()
        if isinstance(optimizer, SlackReleaseMixin):
            private.continue_from(optimizer)
        return private

    def _prepare_criterion(
        self,
        *,
        module: Any,
        optimizer: Any,
        criterion: Any,
        loss_reduction: str = "mean",
        **kwargs: Any,
    ) -> Any:
        if self._slaclip_module is None:
            return super()._prepare_criterion(
                module=module,
                optimizer=optimizer,
                criterion=criterion,
                loss_reduction=loss_reduction,
                **kwargs,
            )
        module.bind(optimizer)
        return GhostLoss(module, optimizer, criterion, loss_reduction)


def _expected_batch_size(data_loader: DataLoader[Any], poisson_sampling: bool) -> int:
    """Return the expected logical batch size as Opacus will compute it, in samples."""
    steps = len(data_loader)
    if steps == 0:
        raise ValueError(
            "data_loader must yield at least one batch, got an empty one. Pass a data set with "
            "samples."
        )
    if poisson_sampling:
        steps = int(1 / (1 / steps))
    return int(len(data_loader.dataset) * (1 / steps))  # type: ignore[arg-type]


def _say_what_it_takes(name: str) -> None:
    """Give a method the signature that editors and ``help()`` show: Opacus's, with our options."""
    signature = inspect.signature(getattr(opacus.PrivacyEngine, name))
    *parameters, rest = (
        each.replace(annotation=_MaxGradNorm) if each.name == "max_grad_norm" else each
        for each in signature.parameters.values()
    )
    keyword = inspect.Parameter.KEYWORD_ONLY
    ours = [inspect.Parameter(option, keyword, default=OPTIONS[option]) for option in OPTIONS]
    signature = signature.replace(parameters=[*parameters, *ours, rest])
    setattr(getattr(PrivacyEngine, name), "__signature__", signature)  # noqa: B010 # mypy


for _name in ("make_private", "make_private_with_epsilon"):
    _say_what_it_takes(_name)
