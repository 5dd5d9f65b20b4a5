"""What SlaClip refuses, and why: checked before anything is wrapped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import chain
from typing import Any

from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.grad_sample import AbstractGradSampleModule
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset

from opacus_slaclip import _opacus
from opacus_slaclip._precision import accumulation_dtype, is_low
from opacus_slaclip._warnings import warn
from opacus_slaclip.ghost_modules import GhostClippingMixin
from opacus_slaclip.optimizers import get_optimizer_class
from opacus_slaclip.optimizers.grad_sample import LOW_PRECISION_MEAN
from opacus_slaclip.sampling import is_distributed_sampler

GHOST_MODES = ("ghost", "ghost_fsdp")
_DISTRIBUTED = (
    DifferentiallyPrivateDistributedDataParallel,
    DistributedDataParallel,
    FSDPModule,
)


def is_distributed(module: nn.Module) -> bool:
    """Whether Opacus takes ``module`` for a distributed one."""
    return isinstance(module, _DISTRIBUTED)


def check_mode(arguments: Mapping[str, Any], *, is_own_criterion: bool) -> None:
    """Check that SlaClip can keep its guarantee with these arguments of ``make_private``.

    Raises:
        ValueError: If it cannot, saying why and what to use instead.
    """
    module, mode = arguments["module"], arguments["grad_sample_mode"]
    _check_wrapping(module, mode)
    get_optimizer_class(grad_sample_mode=mode, distributed=is_distributed(module))
    if arguments["loss_reduction"] not in ("mean", "sum"):
        raise ValueError(
            f"loss_reduction must be 'mean' or 'sum', got {arguments['loss_reduction']!r}. Pass "
            "the reduction of your criterion."
        )
    if mode not in ("no_op", *GHOST_MODES) and arguments["loss_reduction"] == "mean":
        _check_precision(module)
    _check_layers(module, mode)
    if arguments["poisson_sampling"] and isinstance(
        arguments["data_loader"].dataset, IterableDataset
    ):
        raise ValueError(
            "data_loader must not stream from an IterableDataset with Poisson sampling, which "
            "draws samples by index. Pass a map-style dataset."
        )
    if is_distributed(module):
        _check_distributed(arguments)
    if isinstance(module, FSDPModule):
        _check_sharding(module)
    criterion = arguments["criterion"]
    reduction = getattr(criterion, "reduction", arguments["loss_reduction"])
    if (is_own_criterion or mode in GHOST_MODES) and reduction != arguments["loss_reduction"]:
        raise ValueError(
            f"criterion.reduction must be loss_reduction={arguments['loss_reduction']!r}, got "
            f"{reduction!r}. Pass the same to both."
        )
    if mode in GHOST_MODES:
        _check_ghost(module, arguments["optimizer"])
    _warn_of_empty_batches(arguments)


def _check_precision(module: nn.Module) -> None:
    low = sorted(name for name, p in module.named_parameters() if p.requires_grad and is_low(p))
    if low:
        raise ValueError(f"{LOW_PRECISION_MEAN} Such are {low}.")


def _check_layers(module: nn.Module, mode: str) -> None:
    if any(getattr(layer, "max_norm", None) is not None for layer in module.modules()):
        raise ValueError(
            "module must not hold an embedding with max_norm: it rescales the rows of the tokens "
            "it sees in every forward pass, so data changes parameters without noise. Use "
            "max_norm=None."
        )
    if mode not in ("hooks", *GHOST_MODES):
        return
    for name, layer in module.named_modules():
        if not any(p.requires_grad for p in layer.parameters(recurse=False)):
            continue
        if getattr(layer, "padding_mode", "zeros") != "zeros":
            raise ValueError(
                f"{name}.padding_mode must be 'zeros', got {layer.padding_mode!r}: Opacus takes "
                "the per-sample gradient of another layer. Pad before the layer, or use "
                "grad_sample_mode='functorch'."
            )
        if isinstance(layer, nn.EmbeddingBag):
            raise ValueError(
                f"module must not train an EmbeddingBag ({name}): Opacus's per-sample gradient "
                "counts a repeated token once. Use Embedding, and sum or average its outputs."
            )


def _check_wrapping(module: nn.Module, mode: str) -> None:
    if isinstance(module, AbstractGradSampleModule):
        if is_distributed(_opacus.inner_module(module)):
            raise ValueError(
                "module must be the distributed module itself, not its private wrapper, or the "
                "optimizer would not reduce over the ranks. Pass module.to_standard_module()."
            )
        if mode in GHOST_MODES and not isinstance(module, GhostClippingMixin):
            raise ValueError(
                f"module must be plain, or wrapped by an earlier make_private with SlaClip and "
                f"the same mode; got {type(module).__name__}. Pass module.to_standard_module()."
            )
    elif hasattr(module, "autograd_grad_sample_hooks"):
        raise ValueError(
            "module still has the hooks of an earlier make_private. Call cleanup() on what that "
            "call returned (wrap_model=False), or pass that wrapper itself."
        )


def _check_distributed(arguments: Mapping[str, Any]) -> None:
    module, mode = arguments["module"], arguments["grad_sample_mode"]
    if isinstance(module, FSDPModule) != (mode == "ghost_fsdp"):
        raise ValueError(
            f"grad_sample_mode={mode!r} does not go with {type(module).__name__}. Use "
            "'ghost_fsdp' with FSDP2 modules, and only with them."
        )
    if mode == "ghost_fsdp" and arguments["loss_reduction"] == "sum":
        raise ValueError(
            "loss_reduction='sum' does not go with grad_sample_mode='ghost_fsdp': FSDP2 averages "
            "the gradients over the ranks, but not the noise. Use loss_reduction='mean'."
        )
    if not arguments["poisson_sampling"] and not is_distributed_sampler(arguments["data_loader"]):
        raise ValueError(
            "data_loader must have a distributed sampler if poisson_sampling=False: otherwise one "
            "sample enters on every rank and moves the sum by several thresholds. Pass "
            "sampler=torch.utils.data.DistributedSampler(dataset), or use Poisson sampling."
        )


def _check_sharding(module: Any) -> None:
    sharding: Any = fully_shard  # typed as if it were a plain function
    replicated = sorted(
        name
        for name, p in module.named_parameters()
        if p.requires_grad
        and (
            not isinstance(p, DTensor)
            or p.device_mesh.ndim != 1
            or p.device_mesh.size() != dist.get_world_size()
        )
    )
    if replicated:
        raise ValueError(
            f"module must be sharded over all ranks by a one-dimensional mesh; {replicated} are "
            "not, so every replica would draw noise of its own for one sum. Use fully_shard with "
            "a one-dimensional mesh and without ignored_params."
        )
    for layer in module.modules():
        policy = sharding.state(layer)._mp_policy if isinstance(layer, FSDPModule) else None
        for name in ("param_dtype", "reduce_dtype"):
            dtype = getattr(policy, name, None)
            if dtype is not None and accumulation_dtype(dtype) != dtype:
                raise ValueError(
                    f"mp_policy must have float32 or float64 as its {name}, got {dtype}: sums of "
                    "clipped gradients would be rounded to 8 bits before they are noised. Leave "
                    "it out."
                )


def _check_ghost(module: nn.Module, optimizer: Any) -> None:
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    held = set(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    left_out = sorted(name for name, p in trainable.items() if p not in held)
    if left_out:
        raise ValueError(
            f"optimizer must hold every trainable parameter in ghost mode, where all of them are "
            f"in the norm; {left_out} are not. Freeze them, add them, or use "
            "grad_sample_mode='hooks'."
        )
    low = sorted(name for name, p in trainable.items() if is_low(p))
    if low:
        raise ValueError(
            f"module must be float32 or float64 in ghost mode: the second backward pass would "
            f"round the clipped sums of {low} to 8 bits, which the noise does not cover. Use "
            "grad_sample_mode='hooks', which sums in float32, with reduction='sum'."
        )
    hooked = sorted(name for name, p in trainable.items() if p._backward_hooks)
    if hooked:
        raise ValueError(
            f"Parameters must carry no hooks in ghost mode, as {hooked} do: these change the "
            "gradient that is summed, but not its norm. Remove them, or use "
            "grad_sample_mode='hooks'."
        )
    _check_single_owners(module, trainable)
    if any(
        isinstance(layer, nn.Embedding) and layer.scale_grad_by_freq for layer in module.modules()
    ):
        raise ValueError(
            "module must not hold an Embedding with scale_grad_by_freq=True in ghost mode: it "
            "divides a sample's gradient by how often its tokens are in the batch, after its norm "
            "was taken. Use scale_grad_by_freq=False, or grad_sample_mode='hooks'."
        )


def _check_single_owners(module: nn.Module, trainable: Mapping[str, nn.Parameter]) -> None:
    owners: dict[int, list[type]] = defaultdict(list)
    for layer in module.modules():
        for p in layer.parameters(recurse=False):
            owners[id(p)].append(type(layer))
    has_norm = GhostClippingMixin.NORM_SAMPLERS
    tied = sorted(
        name
        for name, p in trainable.items()
        if len(owners[id(p)]) > 1 and any(owner in has_norm for owner in owners[id(p)])
    )
    if tied:
        raise ValueError(
            f"module must not share parameters between layers in ghost mode, whose norms are "
            f"those of single layers; {tied} are shared. Use grad_sample_mode='hooks'."
        )


def _warn_of_empty_batches(arguments: Mapping[str, Any]) -> None:
    if not arguments["poisson_sampling"]:
        return
    if arguments["rand_on_empty"]:
        warn(
            "rand_on_empty=True puts a made-up sample into an empty batch; it takes part in the "
            "gradient and the slack like a real one. A sample that joins such a batch replaces it, "
            "which moves the sum by up to 2 C instead of C: keep the expected batch so large that "
            "an empty one, of probability about exp(-expected batch size), does not matter.",
        )
    elif arguments["grad_sample_mode"] == "ew":
        warn(
            "grad_sample_mode='ew' raises on the empty batches that Poisson sampling can draw. "
            "Use 'hooks', or pass rand_on_empty=True, which lets a made-up sample take part.",
        )
