"""What cannot keep its promise is refused, with a remedy, before anything is touched."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import opacus
import pytest
import torch
from cases import BATCH_SIZE, CASES, NUM_SAMPLES, Case, make
from helpers import NUM_CLASSES, TASKS, TiedWeights, batches, samples, seeded
from opacus.grad_sample import register_grad_sampler
from opacus.layers import DPLSTM
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from opacus_slaclip import FixedController, PrivacyEngine

# --- make_private: refused with everything as it was ---


class Setup:
    """A plain module, optimizer and loader, to be made private or left alone."""

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        task: str = "mlp",
        params: Callable[[nn.Module], list[nn.Parameter]] | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.module: Any = TASKS[task].model() if model is None else model
        params = params or (lambda module: list(module.parameters()))
        self.optimizer = torch.optim.SGD(params(self.module), lr=0.1)
        self.data_loader = DataLoader(
            TensorDataset(*samples(task, NUM_SAMPLES)),
            batch_size=BATCH_SIZE,
            generator=seeded(2),
        )
        self.engine: Any = PrivacyEngine(accountant="rdp")

    def make_private(self, **kwargs: Any) -> Any:
        arguments = {
            "module": self.module,
            "optimizer": self.optimizer,
            "data_loader": self.data_loader,
            "noise_multiplier": 0.3,
            "max_grad_norm": 1.0,
            "clipping": "slaclip",
        }
        return self.engine.make_private(**arguments | kwargs)

    def calibrate(self, **kwargs: Any) -> Any:
        arguments = {
            "module": self.module,
            "optimizer": self.optimizer,
            "data_loader": self.data_loader,
            "target_epsilon": 3.0,
            "target_delta": 1e-5,
            "epochs": 1,
            "max_grad_norm": 1.0,
            "clipping": "slaclip",
        }
        return self.engine.make_private_with_epsilon(**arguments | kwargs)


def attributes(owner: Any) -> dict[str, Any]:
    """List what an object holds, values that change by themselves apart."""
    return {name: value for name, value in vars(owner).items() if not name.startswith("__")}


def marks(module: nn.Module) -> list[tuple[str, list[str]]]:
    """List every attribute and hook of every layer, and every attribute of its parameters."""
    layers = [
        (name, sorted(vars(layer)) + [repr(sorted(map(str, hooks))) for hooks in hooks_of(layer)])
        for name, layer in module.named_modules()
    ]
    return layers + [(name, sorted(vars(p))) for name, p in module.named_parameters()]


def hooks_of(layer: nn.Module) -> list[Any]:
    return [layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks]


@contextmanager
def untouched(setup: Setup) -> Iterator[None]:
    """Check that module, optimizer and loader, their types included, are what they were."""
    module, optimizer, loader = setup.module, setup.optimizer, setup.data_loader
    before = (marks(module), type(module), type(optimizer), type(loader))
    weights = copy.deepcopy(module.state_dict())
    saved = copy.deepcopy(optimizer.state_dict())
    held = (attributes(loader).copy(), list(optimizer.__dict__))
    stream = loader.generator.get_state()
    sampler = loader.batch_sampler
    yield
    assert (marks(module), type(module), type(optimizer), type(loader)) == before
    assert all(map(torch.equal, weights.values(), module.state_dict().values()))
    assert optimizer.state_dict() == saved
    assert (attributes(loader), list(optimizer.__dict__)) == held
    assert loader.batch_sampler is sampler
    assert torch.equal(loader.generator.get_state(), stream)
    assert len(setup.engine.accountant) == 0


def assert_still_usable(setup: Setup) -> None:
    """Check that the very objects of a refused call can be made private in a supported way."""
    module, optimizer, _ = setup.make_private()
    optimizer.zero_grad()
    x, y = samples("mlp", 5)
    nn.functional.cross_entropy(module(x), y).backward()
    optimizer.step()
    assert optimizer.num_releases == 1


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unknown-mode": (
        {"grad_sample_mode": "hook"},
        ValueError,
        r"grad_sample_mode='hook' in one process is not supported with SlaClip. Use one of \['ew', "
        r"'functorch', 'ghost', 'hooks', 'no_op'\]",
    ),
    "tensor-parallel": (
        {"grad_sample_mode": "ghost_tp"},
        ValueError,
        r"grad_sample_mode='ghost_tp' in one process is not supported with SlaClip. Use one of",
    ),
    "tensor-parallel-bare": (
        {"grad_sample_mode": "ghost_tp", "wrap_model": False},
        ValueError,
        r"grad_sample_mode='ghost_tp' in one process is not supported with SlaClip. Use one of",
    ),
    "sharded-without-shards": (
        {"grad_sample_mode": "ghost_fsdp"},
        ValueError,
        r"grad_sample_mode='ghost_fsdp' in one process is not supported with SlaClip. Use one of",
    ),
    "loss-reduction": (
        {"loss_reduction": "none"},
        ValueError,
        r"loss_reduction must be 'mean' or 'sum', got 'none'. Pass the reduction of your criterion",
    ),
    "list-of-thresholds": (
        {"max_grad_norm": [1.0, 1.0, 1.0, 1.0]},
        TypeError,
        r"max_grad_norm must be .*got \[1.0, 1.0, 1.0, 1.0\]",
    ),
    "per-layer-with-slots": (
        {"clipping": "per_layer", "max_grad_norm": [1.0] * 4, "num_slots": 3},
        TypeError,
        r"num_slots does not apply to clipping='per_layer'. Remove it, or use one of \['slaclip'",
    ),
    "per-layer-with-controller": (
        {"clipping": "per_layer", "max_grad_norm": [1.0] * 4, "controller": FixedController()},
        TypeError,
        r"controller does not apply to clipping='per_layer'. Remove it, or use one of \['slaclip'",
    ),
}


@pytest.mark.parametrize("calibrated", [False, True], ids=["make_private", "with_epsilon"])
@pytest.mark.parametrize(("kwargs", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_arguments_that_cannot_work_are_refused_before_anything_is_wrapped(
    kwargs, error, message, calibrated
):
    setup = Setup()
    call = setup.calibrate if calibrated else setup.make_private

    with untouched(setup), pytest.raises(error, match=message):
        call(**kwargs)

    assert_still_usable(setup)


def first_layer(module: nn.Module) -> list[nn.Parameter]:
    return list(module[0].parameters())


class Head(nn.Module):
    """A layer of its own kind that holds the weight of another."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


class TiedToHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6, bias=False)
        self.head = Head(self.layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x).tanh() * 100)


class TiedEmbedding(nn.Module):
    """A language model whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x).mean(1))


def by_frequency() -> nn.Module:
    model = TASKS["embedding"].model()
    model.embedding = nn.Embedding(7, 5, scale_grad_by_freq=True)
    return model


REFUSED_IN_GHOST: dict[str, tuple[Callable[[], Setup], str]] = {
    "parameters-left-out": (
        lambda: Setup(params=first_layer),
        r"optimizer must hold every trainable parameter in ghost mode, where all of them are in "
        r"the norm; \['2.bias', '2.weight'\] are not. Freeze them,? (or )?add them",
    ),
    "bfloat16": (
        lambda: Setup(TASKS["mlp"].model().bfloat16()),
        r"module must be float32 or float64 in ghost mode: .*'0.weight'.* to 8 bits, which the "
        r"noise does not cover. Use grad_sample_mode='hooks', which sums in float32, with "
        r"reduction='sum'",
    ),
    "one-layer-in-float16": (
        lambda: Setup(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, NUM_CLASSES).half())),
        r"module must be float32 or float64 in ghost mode: .*\['1.bias', '1.weight'\]",
    ),
    "tied": (
        lambda: Setup(TiedWeights()),
        r"module must not share parameters between layers in ghost mode, whose norms are those of "
        r"single layers; \['first.weight'\] are shared. Use grad_sample_mode='hooks'",
    ),
    "tied-embedding": (
        lambda: Setup(TiedEmbedding(), task="embedding"),
        r"module must not share parameters .*\['embedding.weight'\] are shared. Use grad_sample_mo",
    ),
    "tied-to-a-layer-of-another-kind": (
        lambda: Setup(TiedToHead()),
        r"module must not share parameters .*\['layer.weight'\] are shared. Use grad_sample_mode=",
    ),
    "scaled-by-frequency": (
        lambda: Setup(by_frequency(), task="embedding"),
        r"Embedding with scale_grad_by_freq=True in ghost mode: .* Use scale_grad_by_freq=False, "
        r"or grad_sample_mode='hooks'",
    ),
}


@pytest.mark.parametrize("calibrated", [False, True], ids=["make_private", "with_epsilon"])
@pytest.mark.parametrize("wrap_model", [True, False])
@pytest.mark.parametrize(("build", "message"), REFUSED_IN_GHOST.values(), ids=REFUSED_IN_GHOST)
def test_models_that_ghost_norms_cannot_cover_are_refused_before_anything_is_wrapped(
    build, message, wrap_model, calibrated
):
    setup = build()
    call = setup.calibrate if calibrated else setup.make_private

    with untouched(setup), pytest.raises(ValueError, match=message):
        call(grad_sample_mode="ghost", wrap_model=wrap_model)


@pytest.mark.parametrize(
    "name", ["bfloat16", "tied", "tied-embedding", "tied-to-a-layer-of-another-kind"]
)
def test_what_ghost_mode_refuses_trains_in_the_mode_it_names(name):
    build, _ = REFUSED_IN_GHOST[name]
    setup = build()
    task = "embedding" if "embedding" in name else "mlp"
    dtype = next(setup.module.parameters()).dtype

    reduction = "sum" if name == "bfloat16" else "mean"

    module, optimizer, _ = setup.make_private(grad_sample_mode="hooks", loss_reduction=reduction)
    for x, y in batches(task, [5, 8], dtype=torch.float32 if task == "embedding" else dtype):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y, reduction=reduction).backward()
        optimizer.step()

    assert optimizer.num_releases == 2
    assert all(p.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("remedy", ["freeze", "add"])
def test_parameters_left_out_of_the_optimizer_are_frozen_or_added_as_the_error_says(remedy):
    setup = Setup(params=first_layer)
    left_out = list(setup.module[2].parameters())
    if remedy == "freeze":
        setup.module[2].requires_grad_(False)
    else:
        setup.optimizer.add_param_group({"params": left_out})
    before = [p.detach().clone() for p in left_out]

    module, optimizer, criterion, _ = setup.make_private(grad_sample_mode="ghost")
    for x, y in batches("mlp", [5, 8]):
        optimizer.zero_grad()
        criterion(module(x), y).backward()
        optimizer.step()

    assert optimizer.num_releases == 2
    assert all(map(torch.equal, left_out, before)) == (remedy == "freeze")


def test_frozen_layers_may_be_shared_and_of_any_precision_in_ghost_mode():
    model = TASKS["mlp"].model()
    model.append(nn.Identity())
    model[-1].spare = nn.Linear(2, 2).bfloat16().requires_grad_(False)
    model[-1].again = nn.Linear(2, 2).requires_grad_(False)
    model[-1].again.weight = model[-1].spare.weight
    setup = Setup(model, params=trainable)

    module, optimizer, criterion, _ = setup.make_private(grad_sample_mode="ghost")
    x, y = samples("mlp", 5)
    criterion(module(x), y).backward()
    optimizer.step()

    assert optimizer.num_releases == 1


def trainable(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


class Narrow(nn.Module):
    """A layer in bfloat16 among float32 ones, as the frozen base of LoRA adapters may be."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width).bfloat16().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.bfloat16()).float()


def around_a_narrow_layer() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), Narrow(8), nn.Tanh(), nn.Linear(8, NUM_CLASSES))


def test_gradients_through_a_frozen_layer_in_low_precision_are_refused_in_ghost_mode():
    setup = Setup(around_a_narrow_layer(), params=trainable)
    module, _optimizer, criterion, _ = setup.make_private(grad_sample_mode="ghost")
    x, y = samples("mlp", 5)

    with pytest.raises(ValueError, match=r"cannot pass gradients through torch.bfloat16.*'hooks'"):
        criterion(module(x), y).backward()

    assert all(p.grad is None or not p.grad.any() for p in module.parameters())
    assert setup.engine.accountant.history == []


def test_a_frozen_layer_in_low_precision_needs_a_sum_of_losses_in_hooks_mode():
    """Its rounding depends on the size of the batch if each loss was divided by that."""
    refused = Setup(around_a_narrow_layer(), params=trainable)
    module, optimizer, _ = refused.make_private()
    x, y = samples("mlp", 5)
    nn.functional.cross_entropy(module(x), y).backward()
    with pytest.raises(ValueError, match=r"loss_reduction must be 'sum' for gradients in bfloat16"):
        optimizer.step()
    assert refused.engine.accountant.history == []

    size, clip_norm = 1000, 0.1
    setup = Setup(around_a_narrow_layer(), params=trainable)
    module, optimizer, _ = setup.make_private(
        loss_reduction="sum", noise_multiplier=0.0, max_grad_norm=clip_norm
    )
    optimizer.param_groups[0]["lr"] = 0.0
    criterion = nn.CrossEntropyLoss(reduction="sum")
    x, y = samples("mlp", 1)
    sums = []
    for n in (size, size + 1):
        optimizer.max_grad_norm = clip_norm
        optimizer.zero_grad()
        criterion(module(x.expand(n, -1)), y.expand(n)).backward()
        optimizer.step()
        sums.append(torch.cat([p.summed_grad.flatten() for p in optimizer.params]).double())
    # What float32 sums may differ by, beside the sample itself.
    eps = torch.finfo(torch.float32).eps
    assert (sums[1] - sums[0]).norm() <= clip_norm * (1 + size**2 * eps)


@pytest.mark.parametrize("wrap_model", [True, False])
def test_a_frozen_layer_in_low_precision_below_all_that_is_trained_rounds_nothing(wrap_model):
    model = nn.Sequential(Narrow(6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, NUM_CLASSES))
    setup = Setup(model, params=trainable)
    handle, optimizer, _ = setup.make_private(wrap_model=wrap_model)
    x, y = samples("mlp", 5)
    nn.functional.cross_entropy((handle if wrap_model else model)(x), y).backward()
    optimizer.step()
    assert optimizer.num_releases == 1

    copy.deepcopy(model[2]._forward_hooks)  # copies of the watching hooks watch for nobody
    handle.cleanup()
    assert not any(layer._forward_hooks for layer in model.modules())


# --- gradients that Opacus's formulas, or nothing but autograd, know ---


def circular() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(72, 3)
    )


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(10, 3, mode="sum")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.bag(tokens)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (circular, "padding_mode must be 'zeros', got 'circular'"),
        (Bag, "not train an EmbeddingBag"),
    ],
)
def test_layers_whose_gradient_opacus_gets_wrong_are_refused(model, message, mode):
    setup = Setup(model())
    with untouched(setup), pytest.raises(ValueError, match=message):
        setup.make_private(grad_sample_mode=mode)


def test_such_layers_may_be_frozen_or_left_to_functorch():
    frozen = circular()
    frozen[0].requires_grad_(False)
    Setup(frozen, params=trainable).make_private(grad_sample_mode="ghost")
    Setup(circular()).make_private(grad_sample_mode="functorch")


def test_a_hook_on_a_parameter_is_refused_in_ghost_mode():
    setup = Setup()
    setup.module[0].weight.register_hook(lambda grad: 10 * grad)
    with untouched(setup), pytest.raises(ValueError, match=r"must carry no hooks .*0\.weight"):
        setup.make_private(grad_sample_mode="ghost")


class Signs(torch.autograd.Function):
    """A backward pass that is not linear in the gradient it is given."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.sign()


class OwnScale(nn.Module):
    """A layer of a user's own, whose parameter the model uses once more elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@register_grad_sampler(OwnScale)
def own_scale_grad_sample(layer, activations, backprops):
    return {layer.scale: activations[0] * backprops}


class UsedElsewhere(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.head = OwnScale(), nn.Linear(6, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.own(x) + 10 * x * self.own.scale)


class Surprise(nn.Module):
    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.head, self.change = nn.Linear(6, 8), nn.Linear(8, NUM_CLASSES), change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.change(self.first(x)))


def clamped(x: torch.Tensor) -> torch.Tensor:
    if x.requires_grad:
        x.register_hook(lambda grad: 100 * grad.clamp(-1e-3, 1e-3))
    return x


@pytest.mark.parametrize(
    "model",
    [lambda: Surprise(Signs.apply), lambda: Surprise(clamped), UsedElsewhere],
    ids=["a backward pass of its own", "a hook on an activation", "a parameter used elsewhere"],
)
def test_a_gradient_longer_than_its_norm_is_noticed_in_ghost_mode(model):
    setup = Setup(model())
    module, optimizer, criterion, _ = setup.make_private(
        grad_sample_mode="ghost", max_grad_norm=0.01, min_clipbound=0.01
    )
    x, y = samples("mlp", 5)
    before = [p.detach().clone() for p in module.parameters()]

    with pytest.raises(ValueError, match="gradient of a sample is longer than the norm"):
        criterion(module(x), y).backward()

    assert setup.engine.accountant.history == []
    assert all(map(torch.equal, before, module.parameters()))
    assert optimizer.num_releases == 0


def test_one_sample_is_looked_at_in_passes_one_two_four_and_eight(monkeypatch):
    looked_at = []
    plain = torch.autograd.grad
    setup = Setup()
    module, optimizer, criterion, _ = setup.make_private(grad_sample_mode="ghost")

    def noted(*args, **kwargs):
        looked_at.append(optimizer.num_releases + 1)
        return plain(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", noted)
    x, y = samples("mlp", 5)
    for _ in range(9):
        optimizer.zero_grad()
        criterion(module(x), y).backward()
        optimizer.step()
    assert looked_at == [1, 2, 4, 8]


class Sorts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = DPLSTM(4, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.lstm(packed)
        return self.head(hidden[-1])


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_packed_sequences_in_another_order_than_the_batch_are_refused(mode):
    setup = Setup(Sorts())
    module, *_ = setup.make_private(grad_sample_mode=mode)
    x = torch.randn(3, 4, 4)
    module(x, torch.tensor([4, 3, 1]))  # sorted already
    with pytest.raises(ValueError, match="packed sequence must hold its samples in the order"):
        module(x, torch.tensor([2, 4, 1]))


def test_a_criterion_of_another_reduction_is_refused_in_every_mode():
    for reduction, other in (("mean", "sum"), ("sum", "mean")):
        setup = Setup()
        message = f"criterion.reduction must be loss_reduction='{reduction}', got '{other}'"
        with untouched(setup), pytest.raises(ValueError, match=message):
            setup.make_private(
                loss_reduction=reduction, criterion=nn.CrossEntropyLoss(reduction=other)
            )


@pytest.mark.parametrize("is_training", [True, False])
def test_rounding_is_noticed_in_evaluation_mode_and_not_forgotten(is_training):
    setup = Setup(around_a_narrow_layer(), params=trainable)
    setup.module[1].train(is_training)
    module, optimizer, _ = setup.make_private()
    x, y = samples("mlp", 5)
    nn.functional.cross_entropy(module(x), y).backward()
    for _ in range(2):
        with pytest.raises(ValueError, match="loss_reduction must be 'sum'"):
            optimizer.step()
    assert optimizer.num_releases == 0


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow = Narrow(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.narrow, x, use_reentrant=True)


def test_a_reentrant_checkpoint_is_refused_in_ghost_mode():
    model = nn.Sequential(nn.Linear(6, 8), Recomputed(), nn.Linear(8, NUM_CLASSES))
    setup = Setup(model, params=trainable)
    module, _optimizer, criterion, _ = setup.make_private(grad_sample_mode="ghost")
    x, y = samples("mlp", 5)
    with pytest.raises(ValueError, match=r"reentrant checkpoint.*use_reentrant=False"):
        criterion(module(x), y).backward()


def test_a_reentrant_checkpoint_around_the_loss_itself_is_refused_in_ghost_mode():
    class Whole(nn.CrossEntropyLoss):
        def forward(self, outputs, target):
            return torch.utils.checkpoint.checkpoint(
                super().forward, outputs, target, use_reentrant=True
            )

    setup = Setup()
    module, _optimizer, criterion, _ = setup.make_private(
        grad_sample_mode="ghost", criterion=Whole()
    )
    x, y = samples("mlp", 5)
    with pytest.raises(ValueError, match=r"reentrant checkpoint.*use_reentrant=False"):
        criterion(module(x), y).backward()


def test_rounding_inside_a_reentrant_checkpoint_is_noticed_in_hooks_mode():
    model = nn.Sequential(nn.Linear(6, 8), Recomputed(), nn.Linear(8, NUM_CLASSES))
    setup = Setup(model, params=trainable)
    module, optimizer, _ = setup.make_private()
    x, y = samples("mlp", 5)
    nn.functional.cross_entropy(module(x), y).backward()
    with pytest.raises(ValueError, match="loss_reduction must be 'sum'"):
        optimizer.step()


def test_evaluating_in_low_precision_between_steps_is_no_rounding():
    setup = Setup()
    module, optimizer, _ = setup.make_private()
    x, y = samples("mlp", 5)
    nn.functional.cross_entropy(module(x), y).backward()
    with torch.autocast("cpu", torch.bfloat16):
        module.eval()(x)  # with gradients on, and never run backward
    optimizer.step()
    assert optimizer.num_releases == 1


def test_watching_hooks_do_not_pile_up():
    setup = Setup()
    module, optimizer, loader = setup.make_private()
    before = [len(layer._forward_hooks) for layer in setup.module.modules()]
    for _ in range(3):
        module, optimizer, loader = setup.engine.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=0.3,
            max_grad_norm=1.0,
            clipping="slaclip",
        )
    assert [len(layer._forward_hooks) for layer in setup.module.modules()] == before


def test_a_loss_in_low_precision_is_refused_in_ghost_mode():
    class Rounds(nn.CrossEntropyLoss):
        def forward(self, outputs, target):
            return super().forward(outputs, target).bfloat16()

    setup = Setup()
    module, _optimizer, criterion, _ = setup.make_private(
        grad_sample_mode="ghost", criterion=Rounds()
    )
    x, y = samples("mlp", 5)
    with pytest.raises(ValueError, match=r"cannot pass gradients through torch\.bfloat16"):
        criterion(module(x), y).backward()


def renormalizing() -> nn.Module:
    model = TASKS["embedding"].model()
    model.embedding = nn.Embedding(7, 5, max_norm=1.0)
    return model


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "no_op", "ghost"])
def test_an_embedding_that_renormalizes_its_rows_is_refused_in_every_mode(mode):
    setup = Setup(renormalizing(), task="embedding")

    message = r"embedding with max_norm: .* data changes parameters without noise. Use max_norm=Non"
    with untouched(setup), pytest.raises(ValueError, match=message):
        setup.make_private(grad_sample_mode=mode)


class Stream(IterableDataset):
    """Samples that come in an order of their own."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        return iter(TensorDataset(*samples("mlp", NUM_SAMPLES)))


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_poisson_sampling_from_a_stream_is_refused(mode):
    setup = Setup()
    stream = DataLoader(Stream(), batch_size=BATCH_SIZE)

    message = r"must not stream from an IterableDataset with Poisson sampling, .* Pass a map-style"
    with untouched(setup), pytest.raises(ValueError, match=message):
        setup.make_private(grad_sample_mode=mode, data_loader=stream)

    assert len(list(stream)) == NUM_SAMPLES // BATCH_SIZE


# --- modules that are private already ---


def wrapped(mode: str, *, clipping: str = "slaclip", engine: Any = None, **kwargs: Any) -> Any:
    """Make a model private; return it, its optimizer and its loader."""
    setup = Setup()
    setup.engine = engine or setup.engine
    result = setup.make_private(grad_sample_mode=mode, clipping=clipping, **kwargs)
    return result[0], result[1], result[-1]


def make_again(module: Any, optimizer: Any, loader: Any, mode: str, **kwargs: Any) -> Any:
    return PrivacyEngine(accountant="rdp").make_private(
        module=module,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=0.3,
        max_grad_norm=1.0,
        clipping="slaclip",
        grad_sample_mode=mode,
        **kwargs,
    )


def assert_refused_and_left_alone(
    private: tuple[Any, Any, Any], mode: str, message: str, **kwargs: Any
) -> None:
    module, optimizer, loader = private
    before = marks(module), copy.deepcopy(optimizer.state_dict()), type(module)
    sampler = loader.batch_sampler

    with pytest.raises(ValueError, match=message):
        make_again(module, optimizer, loader, mode, **kwargs)

    assert (marks(module), type(module)) == (before[0], before[2])
    assert optimizer.state_dict() == before[1]
    assert loader.batch_sampler is sampler


def test_a_ghost_module_of_opacus_is_refused():
    """Its threshold is a copy, which neither our optimizer nor a scheduler would reach."""
    private = wrapped("ghost", clipping="flat", engine=opacus.PrivacyEngine(accountant="rdp"))

    assert_refused_and_left_alone(
        private,
        "ghost",
        r"wrapped by an earlier make_private with SlaClip and the same mode; got GradSampleModuleF"
        r"astGradientClipping. Pass module.to_standard_module\(\)",
    )


@pytest.mark.parametrize("mode", ["hooks", "functorch", "no_op", "ew"])
@pytest.mark.filterwarnings("ignore:grad_sample_mode='ew' raises on the empty batches")
def test_a_module_wrapped_in_another_mode_is_refused_in_ghost_mode(mode):
    assert_refused_and_left_alone(
        wrapped(mode),
        "ghost",
        r"module must be plain, or wrapped by an earlier make_private with SlaClip and the same "
        r"mode; got GradSampleModule.*. Pass module.to_standard_module\(\)",
    )


def test_a_module_wrapped_in_ghost_mode_is_refused_in_hooks_mode():
    assert_refused_and_left_alone(
        wrapped("ghost"), "hooks", r"Pre-existing GradSampleModule doesn't match new arguments"
    )


@pytest.mark.parametrize(
    "kwargs",
    [{"loss_reduction": "sum"}, {"batch_first": False}, {"wrap_model": False}],
    ids=["loss_reduction", "batch_first", "wrap_model"],
)
def test_a_ghost_module_wrapped_with_other_arguments_is_refused(kwargs):
    criterion = nn.CrossEntropyLoss(reduction=kwargs.get("loss_reduction", "mean"))

    assert_refused_and_left_alone(
        wrapped("ghost"),
        "ghost",
        r"wrapped by an earlier make_private with the same clipping and arguments; got \(class, "
        r"batch_first, loss_reduction\) = .*. Pass module.to_standard_module\(\)",
        criterion=criterion,
        **kwargs,
    )


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_module_unwrapped_as_the_error_says_is_made_private_in_another_mode(mode):
    module, optimizer, loader = wrapped("hooks" if mode == "ghost" else "ghost")

    result = make_again(module.to_standard_module(), optimizer, loader, mode)

    assert result[1].max_grad_norm == 1.0


@pytest.mark.parametrize("second", ["hooks", "functorch", "ghost"])
@pytest.mark.parametrize("first", ["hooks", "functorch", "ghost"])
@pytest.mark.parametrize("owner", ["opacus", "ours"])
def test_hooks_left_over_from_an_earlier_call_are_refused(owner, first, second):
    setup = Setup()
    if owner == "opacus":
        engine = opacus.PrivacyEngine(accountant="rdp")
        private = engine.make_private(
            module=setup.module,
            optimizer=setup.optimizer,
            data_loader=setup.data_loader,
            noise_multiplier=0.3,
            max_grad_norm=1.0,
            grad_sample_mode=first,
            wrap_model=False,
        )
    else:
        private = setup.make_private(grad_sample_mode=first, wrap_model=False)

    for wrap_model in (True, False):
        with (
            untouched(setup),
            pytest.raises(ValueError, match=r"hooks of an earlier make_private. Call cleanup\(\)"),
        ):
            setup.make_private(grad_sample_mode=second, wrap_model=wrap_model)

    private[0].cleanup()
    assert setup.make_private(grad_sample_mode=second, wrap_model=False)


# --- low precision found out while training in ghost mode ---


@pytest.mark.parametrize("name", ["ghost-mlp", "ghost-mlp-bare", "ghost-cnn", "ghost-lora"])
def test_ghost_clipping_under_autocast_is_refused(name):
    case = CASES[name]
    run, twin = make(case), make(case)
    x, y = case.batches(6)[0]
    before, stream = run.parameters, run.noise.get_state()
    run.optimizer.zero_grad()

    message = (
        r"cannot run under autocast: .* to 8 bits, which the noise does not cover. Use grad_sample_"
        r"mode='hooks', which sums clipped gradients in float32, with reduction='sum'. Or leave "
        r"the autocast context"
    )
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=message):
        run.model(x)
    with pytest.raises(RuntimeError, match="fresh backward pass"):
        run.optimizer.step()

    assert all(map(torch.equal, run.parameters, before))
    assert torch.equal(run.noise.get_state(), stream)
    assert run.history == []
    for one in (run, twin):  # and it trains on outside, as the message says
        one.step((x, y))
    assert all(map(torch.equal, run.parameters, twin.parameters))
    assert run.optimizer.max_grad_norm == twin.optimizer.max_grad_norm


def test_evaluating_a_ghost_module_under_autocast_is_allowed():
    run = make(CASES["ghost-mlp"])
    x, _ = CASES["ghost-mlp"].batches(6)[0]

    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            assert run.model(x).dtype == torch.bfloat16
        assert run.model.eval()(x).dtype == torch.bfloat16


def test_a_backward_pass_under_autocast_gives_the_sums_of_one_outside():
    run, twin = make(CASES["ghost-mlp"]), make(CASES["ghost-mlp"])

    for is_inside, one in enumerate((twin, run)):
        for x, y in CASES["ghost-mlp"].batches(6, 7):
            one.optimizer.zero_grad()
            loss = one.criterion(one.model(x), y)
            with torch.autocast("cpu", torch.bfloat16, enabled=bool(is_inside)):
                loss.backward()
                one.optimizer.step()

    assert all(map(torch.equal, run.parameters, twin.parameters))
    assert run.optimizer.max_grad_norm == twin.optimizer.max_grad_norm


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_model_cast_to_bfloat16_after_make_private_is_refused_in_ghost_mode(is_wrapped):
    run = make(Case("ghost", "mlp", is_wrapped=is_wrapped))
    run.model.bfloat16()
    x, y = batches("mlp", [6], dtype=torch.bfloat16)[0]
    run.optimizer.zero_grad()
    before, stream = run.parameters, run.noise.get_state()
    loss = run.criterion(run.model(x), y)

    message = (
        r"cannot pass gradients through torch.bfloat16: .* to 8 bits after their norms were taken, "
        r"which the noise does not cover. Use grad_sample_mode='hooks'"
    )
    with pytest.raises(ValueError, match=message):
        loss.backward()
    with pytest.raises(RuntimeError, match="fresh backward pass"):
        run.optimizer.step()

    assert all(map(torch.equal, run.parameters, before))
    assert torch.equal(run.noise.get_state(), stream)
    assert run.history == []


# --- losses and layers that only the first step shows: see test_ghost.py; loss scaling ---


@pytest.mark.parametrize("name", ["hooks-mlp", "ghost-mlp"])
def test_a_grad_scaler_is_refused(name):
    run = make(CASES[name])
    scaler = torch.amp.GradScaler("cpu")
    run.optimizer.zero_grad()
    x, y = CASES[name].batches(6)[0]
    scaler.scale(torch.ones(()))  # makes the scaler set itself up
    (run.criterion(run.model(x), y) * scaler.get_scale()).backward()

    with pytest.raises(RuntimeError, match=r"GradScaler cannot step .* Use bfloat16 autocast"):
        scaler.step(run.optimizer)

    assert run.history == []
    assert run.optimizer.num_releases == 0


# --- empty batches: allowed with a word of warning ---


@pytest.mark.parametrize("mode", ["hooks", "ew", "ghost"])
def test_made_up_samples_for_empty_batches_are_warned_of(mode):
    with pytest.warns(UserWarning, match=r"rand_on_empty=True puts a made-up sample") as caught:
        Setup().make_private(grad_sample_mode=mode, rand_on_empty=True)

    (warning,) = [w for w in caught if "rand_on_empty" in str(w.message)]
    assert "takes part in the gradient and the slack" in str(warning.message)
    assert warning.filename == __file__, "it points somewhere else"


def test_a_made_up_sample_takes_part_in_the_release():
    setup = Setup()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, optimizer, loader = setup.make_private(
            rand_on_empty=True, noise_multiplier=0.0, max_grad_norm=50.0, num_slots=1
        )
    full = loader.collate_fn([loader.dataset[0]])
    x, y = loader.collate_fn([])
    assert len(full[1]) == len(y) == 1

    optimizer.zero_grad()
    nn.functional.cross_entropy(module(x), y).backward()
    optimizer.step()

    norm = torch.cat([p.summed_grad.flatten() for p in optimizer.params]).norm().item()
    assert norm > 0
    expected = (1 - norm / 50.0) / BATCH_SIZE
    assert optimizer.slack_indicator.values.item() == pytest.approx(expected, rel=1e-6)


def test_expanded_weights_warn_of_the_empty_batches_they_cannot_take():
    with pytest.warns(UserWarning, match=r"raises on the empty batches.*Use 'hooks', or pass rand"):
        Setup().make_private(grad_sample_mode="ew")


@pytest.mark.parametrize(
    "kwargs",
    [
        {"grad_sample_mode": "hooks"},
        {"grad_sample_mode": "ghost"},
        {"grad_sample_mode": "ew", "poisson_sampling": False},
        {"grad_sample_mode": "hooks", "poisson_sampling": False, "rand_on_empty": True},
    ],
    ids=["hooks", "ghost", "ew-without-poisson", "without-poisson"],
)
def test_no_warning_without_a_reason(kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Secure RNG turned off")
        setup = Setup()
        setup.make_private(**kwargs)


# --- the error of Opacus where the error is Opacus's ---


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, NUM_CLASSES)
        self.norm = nn.BatchNorm1d(NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x))


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_model_that_opacus_cannot_train_is_refused_in_its_words(mode):
    setup = Setup(WithBuffer())
    theirs = Setup(WithBuffer())
    theirs.engine = opacus.PrivacyEngine(accountant="rdp")
    flat = functools.partial(theirs.make_private, clipping="flat", grad_sample_mode=mode)

    with pytest.raises(opacus.validators.errors.UnsupportedModuleError) as expected:
        flat()
    with untouched(setup), pytest.raises(opacus.validators.errors.UnsupportedModuleError) as ours:
        setup.make_private(grad_sample_mode=mode)

    assert str(ours.value) == str(expected.value)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_an_optimizer_of_another_model_is_refused_in_the_words_of_opacus(mode):
    setup = Setup()
    setup.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})

    with (
        untouched(setup),
        pytest.raises(ValueError, match="Module parameters are different than optimizer"),
    ):
        setup.make_private(grad_sample_mode=mode)
