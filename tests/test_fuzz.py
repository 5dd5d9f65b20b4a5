"""Any combination of options gives a working private optimizer or a helpful error."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_slaclip import AutoController, FixedController, PrivacyEngine, SlaClipController

NUMBERS = st.sampled_from(
    [0.0, 1e-50, 1e-30, 1e-3, 0.1, 0.5, 1.0, 2, 50.0, 1e30, 1e300, -1.0, math.inf, math.nan]
)
JUNK = st.sampled_from([None, "1", True, [1.0], object()])
ANYTHING = NUMBERS | JUNK
OPTIONS = {
    "noise_multiplier": NUMBERS | JUNK,
    "max_grad_norm": ANYTHING | st.just("auto"),
    "rescale_to_unit_norm": st.sampled_from([True, False, 1, None, "yes"]),
    "num_slots": st.sampled_from([None, 1, 3, 0, -2, 2.0, True, "4", 10**9]),
    "clipbound_learning_rate": ANYTHING,
    "target_unclipped_quantile": ANYTHING,
    "min_clipbound": ANYTHING,
    "max_clipbound": ANYTHING,
    "controller": st.sampled_from(
        [
            None,
            FixedController(),
            SlaClipController(),
            AutoController(),
            lambda c, _: 2 * c,
            lambda c: c,
            "slaclip",
            3,
        ]
    ),
    "loss_reduction": st.sampled_from(["mean", "sum", "max"]),
    "grad_sample_mode": st.sampled_from(
        ["hooks", "functorch", "ew", "no_op", "ghost", "ghost_fsdp", "ghost_tp", "nothing"]
    ),
    "poisson_sampling": st.booleans(),
    "wrap_model": st.booleans(),
    "num_slot": st.just(3),
}
VALID = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "clipping": "slaclip"}


@st.composite
def options(draw):
    """A valid call with a few options replaced or added."""
    names = draw(st.lists(st.sampled_from(sorted(OPTIONS)), max_size=3, unique=True))
    clipping = draw(st.sampled_from(["slaclip", "slaclip-q"]))
    return VALID | {"clipping": clipping} | {name: draw(OPTIONS[name]) for name in names}


def snapshot(model, optimizer, loader):
    hooks = [
        (len(m._forward_hooks), len(m._backward_hooks), sorted(vars(m))) for m in model.modules()
    ]
    tensors = [(p.requires_grad, sorted(vars(p)), p.tolist()) for p in model.parameters()]
    groups = [sorted(group) for group in optimizer.param_groups]
    return hooks, tensors, groups, loader.batch_sampler


def attempt(arguments):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(32, 4), torch.randint(0, 2, (32,)))
    loader = DataLoader(data, batch_size=16)
    engine = PrivacyEngine(accountant="rdp")
    before = snapshot(model, optimizer, loader)
    message = None
    try:
        private = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, **arguments
        )
    except (ValueError, TypeError) as error:
        message = str(error)
    if message is None:
        return model, private, data.tensors
    assert snapshot(model, optimizer, loader) == before
    assert len(engine.accountant) == 0
    # Every message says what was wrong and, in a sentence of its own, what to do.
    assert ". " in message, message
    return None


def step(arguments, model, private, data):
    module = private[0] if arguments.get("wrap_model", True) else model
    mode = arguments.get("grad_sample_mode", "hooks")
    reduction = arguments.get("loss_reduction", "mean")
    criterion = private[2] if mode == "ghost" else nn.CrossEntropyLoss(reduction=reduction)
    optimizer, (x, y) = private[1], (tensor[:16] for tensor in data)
    optimizer.zero_grad()
    criterion(module(x), y).backward()
    if mode == "no_op":
        for p in model.parameters():
            p.grad_sample = p.grad.expand(16, *p.shape)
    optimizer.step()
    return optimizer


@settings(max_examples=400)
@given(options())
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_combination_works_or_explains_itself(arguments):
    if arguments.get("grad_sample_mode") == "ghost":
        reduction = arguments.get("loss_reduction", "mean")
        if reduction == "sum":
            arguments["criterion"] = nn.CrossEntropyLoss(reduction="sum")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = attempt(arguments)
        if made is None:
            return
        optimizer = step(arguments, *made)
    bounds = (1e-6, 1e6) if arguments["max_grad_norm"] == "auto" else (0.1, 50.0)
    low = arguments.get("min_clipbound", bounds[0])
    high = arguments.get("max_clipbound", bounds[1])
    assert optimizer.num_releases == 1
    assert type(optimizer.max_grad_norm) is float
    assert low <= optimizer.max_grad_norm <= high
    assert all(bool(p.isfinite().all()) for p in optimizer.params)
