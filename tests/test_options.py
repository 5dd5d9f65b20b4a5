"""The options of make_private: what they do, and that a refused call changes nothing."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal, get_args

import numpy as np
import opacus
import pytest
import torch
from opacus.optimizers import AdaClipDPOptimizer, DPOptimizer, DPPerLayerOptimizer
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from opacus_slaclip import (
    FixedController,
    PrivacyEngine,
    SlackIndicator,
    SlaClipController,
    SlaClipDPOptimizer,
    SlaClipQController,
    recommended_num_slots,
)

METHODS = ["make_private", "make_private_with_epsilon"]
ABSENT = object()  # in the place of a value: leave the argument out


def loader(samples: int = 2048, batch_size: int = 256, **kwargs: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 2, generator=generator)
    y = torch.randint(0, 2, (samples,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, **kwargs)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


@dataclass
class Setup:
    """The objects of one call, all new."""

    module: nn.Module = field(default_factory=model)
    data_loader: Any = field(default_factory=loader)
    engine: PrivacyEngine = field(default_factory=lambda: PrivacyEngine(accountant="rdp"))

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)

    def call(self, method: str = "make_private", **changes: Any) -> Any:
        """Call a method of the engine with valid arguments but for the changes."""
        arguments: dict[str, Any] = {
            "module": self.module,
            "optimizer": self.optimizer,
            "data_loader": self.data_loader,
            "max_grad_norm": 1.0,
            "clipping": "slaclip",
            "noise_generator": torch.Generator().manual_seed(0),
        }
        if method == "make_private":
            arguments["noise_multiplier"] = 1.0
        else:
            arguments |= {"target_epsilon": 3.0, "target_delta": 1e-4, "epochs": 1}
            arguments["epsilon_tolerance"] = 0.5  # coarse, so fast
        arguments |= changes
        given = {name: value for name, value in arguments.items() if value is not ABSENT}
        return getattr(self.engine, method)(**given)

    def snapshot(self) -> list[Any]:
        """Return everything that a call which fails must leave as it was."""
        modules = [
            (name, type(module), sorted(vars(module)), _hooks(module))
            for name, module in self.module.named_modules()
        ]
        parameters = [
            (name, sorted(vars(p)), p.requires_grad, p.detach().clone().tolist())
            for name, p in self.module.named_parameters()
        ]
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        return [
            modules,
            parameters,
            groups,
            len(self.optimizer.state),
            self.data_loader.batch_sampler,
            self.data_loader.sampler,
            len(self.engine.accountant),
            self.engine.dataset,
        ]


def _hooks(module: nn.Module) -> dict[str, int]:
    return {name: len(value) for name, value in vars(module).items() if name.endswith("_hooks")}


@contextmanager
def nothing_changes(setup: Setup) -> Any:
    before = setup.snapshot()
    yield
    assert setup.snapshot() == before


def assert_refused(
    error: type[Exception], match: str, method: str = "make_private", **changes: Any
) -> None:
    """Assert that a call fails with this message, changes nothing, and works when put right."""
    setup = Setup()
    if isinstance(changes.get("data_loader"), DataLoader):
        setup.data_loader = changes["data_loader"]
    with nothing_changes(setup), pytest.raises(error, match=match):
        setup.call(method, **changes)
    assert isinstance(setup.call(data_loader=loader())[1], SlaClipDPOptimizer)


def take_step(module: nn.Module, optimizer: Any, data_loader: Any) -> None:
    """Take the first step of a pass and check that it was a private one."""
    x, y = next(iter(data_loader))
    before = [p.detach().clone() for p in module.parameters()]
    optimizer.zero_grad()
    nn.functional.cross_entropy(module(x), y).backward()
    optimizer.step()
    assert any(not torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))
    assert optimizer.num_releases == 1
    assert optimizer.min_clipbound <= optimizer.max_grad_norm <= optimizer.max_clipbound


def test_the_snapshot_notices_a_call_that_succeeds() -> None:
    setup = Setup()
    before = setup.snapshot()
    setup.call()
    changed = [x != y for x, y in zip(before, setup.snapshot(), strict=True)]
    assert changed[:3] == [True, True, True]  # hooks, grad_sample, our entries in the groups
    assert setup.engine.dataset is setup.data_loader.dataset


# ---- names ------------------------------------------------------------------------------------


@pytest.mark.parametrize("clipping", ["slaclip", "slaclip-q"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("num_slot", "num_slots"),
        ("max_grad_nrom", "max_grad_norm"),
        ("clipbound_learnig_rate", "clipbound_learning_rate"),
        ("target_quantile", "target_unclipped_quantile"),
        ("max_clip_bound", "max_clipbound"),
        ("Controller", "controller"),
        ("poisson_sample", "poisson_sampling"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(
    name: str, nearest: str, method: str, clipping: str
) -> None:
    match = (
        f"unexpected keyword argument '{name}' for clipping='{clipping}'. Did you mean "
        f"'{nearest}'. Accepted options are num_slots, controller, clipbound_learning_rate, "
        "target_unclipped_quantile, min_clipbound, max_clipbound"
    )
    assert_refused(TypeError, match, method, clipping=clipping, **{name: 1})


@pytest.mark.parametrize("name", ["eta", "lr"])
def test_an_unknown_name_like_no_other_gets_the_list_alone(name: str) -> None:
    match = f"argument '{name}' for clipping='slaclip'. Accepted options are num_slots, controller"
    assert_refused(TypeError, match, clipping="slaclip", **{name: 1})


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("clipping", ["slack", "quantile", True, None])
def test_a_clipping_that_opacus_does_not_know_either_is_refused(clipping: Any, method: str) -> None:
    match = rf"one of \['slaclip', 'slaclip-q'\] or a value of Opacus's, .*got {clipping!r}\."
    assert_refused(ValueError, match, method, clipping=clipping)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("clipping", ["flat", "per_layer", ABSENT])
def test_auto_is_refused_for_a_clipping_of_opacus(clipping: Any, method: str) -> None:
    match = 'max_grad_norm="auto" does not apply to clipping=.* Pass a number, or use one of'
    assert_refused(TypeError, match, method, clipping=clipping, max_grad_norm="auto")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("clipping", "nearest"),
    [
        ("SlaClip", "slaclip"),
        ("slclip", "slaclip"),
        ("slaclip_q", "slaclip-q"),
        ("slaclipq", "slaclip-q"),
    ],
)
def test_a_misspelt_clipping_is_refused_with_the_nearest_one(
    clipping: str, nearest: str, method: str
) -> None:
    match = f"clipping must be one of .*, got '{clipping}'. Did you mean '{nearest}'"
    assert_refused(ValueError, match, method, clipping=clipping)


def test_a_misspelt_mode_is_refused_with_the_nearest_one() -> None:
    match = "grad_sample_mode='hook' in one process is not supported.*Did you mean 'hooks'"
    assert_refused(ValueError, match, grad_sample_mode="hook")


def lower(clip_norm: float) -> float:
    return clip_norm / 2


def first_slot(clip_norm: float, indicator: SlackIndicator, beta: float) -> float:
    return clip_norm * beta


@pytest.mark.parametrize("controller", [lower, first_slot, lambda: 1.0])
def test_a_controller_that_does_not_take_two_arguments_is_refused(controller: Any) -> None:
    match = r"controller must take two arguments, \(clip_norm, indicator\); .* does not: "
    assert_refused(TypeError, match, controller=controller)


@pytest.mark.parametrize("method", METHODS)
def test_the_signature_shows_what_opacus_takes_and_what_we_add(method: str) -> None:
    theirs, ours = (
        inspect.signature(getattr(engine, method)).parameters
        for engine in (opacus.PrivacyEngine, PrivacyEngine)
    )
    added = {name: ours[name].default for name in ours if name not in theirs}

    assert [name for name in ours if name in theirs] == list(theirs)
    assert Literal["auto"] in get_args(ours["max_grad_norm"].annotation)
    assert added == {
        "num_slots": None,
        "controller": None,
        "clipbound_learning_rate": 0.2,
        "target_unclipped_quantile": 0.5,
        "min_clipbound": 0.1,
        "max_clipbound": 50.0,
        "rescale_to_unit_norm": False,
    }


def test_a_warning_names_the_line_that_called() -> None:
    with pytest.warns(UserWarning, match="num_slots=99 is above the recommended") as caught:
        Setup().call(num_slots=99)
    places = [w.filename for w in caught if "num_slots" in str(w.message)]
    assert places == [__file__]


def test_the_argument_of_opacus_adaptive_clipping_that_has_no_use_is_refused_with_a_hint() -> None:
    match = "unclipped_num_std does not apply to clipping='slaclip'.*needs no extra .* Remove it"
    assert_refused(TypeError, match, unclipped_num_std=10.0)


ACCOUNTING_EXTRAS = {
    "epsilon_tolerance": 0.1,
    "alphas": [2.0, 4.0, 8.0, 16.0, 32.0],
    "poisson": True,
    "eps_error": 0.1,
    "delta_error": 1e-6,
}


@pytest.mark.parametrize("name", [*ACCOUNTING_EXTRAS, "target_epsilon", "target_delta", "epochs"])
def test_make_private_refuses_what_only_calibration_needs(name: str) -> None:
    value = ACCOUNTING_EXTRAS.get(name, 1)
    assert_refused(TypeError, f"unexpected keyword argument '{name}'", **{name: value})


def test_make_private_with_epsilon_refuses_a_noise_multiplier() -> None:
    assert_refused(
        TypeError,
        "noise_multiplier is what .* calibrates to target_epsilon. Remove it, or call make_private",
        "make_private_with_epsilon",
        noise_multiplier=1.0,
    )


@pytest.mark.parametrize("name", ACCOUNTING_EXTRAS)
def test_make_private_with_epsilon_hands_accounting_extras_on(name: str) -> None:
    extra = {name: ACCOUNTING_EXTRAS[name]}
    ours = Setup().call("make_private_with_epsilon", **extra)
    opacus_own = Setup().call("make_private_with_epsilon", clipping="flat", **extra)
    assert ours[1].noise_multiplier == opacus_own[1].noise_multiplier
    take_step(*ours)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["module", "optimizer", "data_loader"])
def test_a_missing_object_is_named(name: str, method: str) -> None:
    assert_refused(TypeError, f"make_private needs {name}", method, **{name: ABSENT})


@pytest.mark.parametrize(
    "names", [["target_epsilon"], ["target_delta"], ["epochs"], ["target_epsilon", "epochs"]]
)
def test_a_missing_target_is_named(names: list[str]) -> None:
    match = f"make_private_with_epsilon needs {', '.join(names)}"
    missing = dict.fromkeys(names, ABSENT)
    assert_refused(TypeError, match, "make_private_with_epsilon", **missing)


# ---- options that exclude each other ----------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_slaclip_finds_its_own_target_quantile(method: str) -> None:
    match = "target_unclipped_quantile does not apply to clipping='slaclip'.*slaclip-q"
    assert_refused(TypeError, match, method, target_unclipped_quantile=0.5)


@pytest.mark.parametrize("clipping", ["slaclip", "slaclip-q"])
@pytest.mark.parametrize("name", ["clipbound_learning_rate", "target_unclipped_quantile"])
def test_a_controller_takes_the_place_of_rate_and_quantile(name: str, clipping: str) -> None:
    match = f"controller and {name} exclude each other.*Set them on the controller"
    changes = {"controller": FixedController(), name: 0.5}
    assert_refused(TypeError, match, clipping=clipping, **changes)


@pytest.mark.parametrize("controller", [0.5, "slaclip", [FixedController()]])
def test_a_controller_that_cannot_be_called_is_refused(controller: Any) -> None:
    match = r"controller must be callable as \(clip_norm, indicator\) -> float, got .*Pass one of"
    assert_refused(TypeError, match, controller=controller)


class ControllerWithState(FixedController):
    """Offer a state that a checkpoint may or may not be able to hold."""

    def __init__(self, state: Any) -> None:
        object.__setattr__(self, "state", state)

    def state_dict(self) -> Any:
        return self.state  # type: ignore[attr-defined]

    def load_state_dict(self, state: Any) -> None:
        object.__setattr__(self, "state", state)


@pytest.mark.parametrize("value", [torch.ones(2), "3", None, math.nan])
def test_a_controller_whose_state_no_checkpoint_can_hold_is_refused(value: Any) -> None:
    match = r"controller.state_dict\(\)\['calls'\] must be a plain finite number"
    assert_refused(TypeError, match, controller=ControllerWithState({"calls": value}))


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "adaptive"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("name", "value"), [("num_slots", 8), ("controller", FixedController())])
def test_other_clipping_values_refuse_what_is_ours_alone(
    name: str, value: Any, method: str, clipping: str
) -> None:
    match = (
        rf"{name} does not apply to clipping='{clipping}'. Remove it, or use one of "
        r"\['slaclip', 'slaclip-q'\]"
    )
    assert_refused(TypeError, match, method, clipping=clipping, **{name: value})


def test_without_a_clipping_value_what_is_ours_alone_is_refused_too() -> None:
    match = "num_slots does not apply to clipping='flat'"
    assert_refused(TypeError, match, clipping=ABSENT, num_slots=8)


# ---- values -----------------------------------------------------------------------------------

BAD_VALUES = [
    # num_slots
    ({"num_slots": 0}, ValueError, "num_slots must be a positive integer of at most .*, got 0"),
    ({"num_slots": -1}, ValueError, "num_slots must be a positive integer of at most .*, got -1"),
    ({"num_slots": 100_001}, ValueError, "num_slots must be .* at most 100000, got 100001"),
    ({"num_slots": 2.5}, TypeError, "num_slots must be a positive integer, got 2.5.*or None for"),
    ({"num_slots": True}, TypeError, "num_slots must be a positive integer, got True"),
    ({"num_slots": "3"}, TypeError, "num_slots must be a positive integer, got '3'"),
    ({"num_slots": np.float64(4)}, TypeError, "num_slots must be a positive integer, got np.float"),
    # max_grad_norm
    ({"max_grad_norm": math.nan}, ValueError, "max_grad_norm must be finite, got nan"),
    ({"max_grad_norm": math.inf}, ValueError, "max_grad_norm must be finite, got inf"),
    (
        {"max_grad_norm": 0.0},
        ValueError,
        "max_grad_norm must be positive, got 0.*no value switches",
    ),
    ({"max_grad_norm": -1.0}, ValueError, "max_grad_norm must be positive, got -1"),
    ({"max_grad_norm": None}, TypeError, "max_grad_norm must be a real number, got None"),
    ({"max_grad_norm": ABSENT}, TypeError, "max_grad_norm must be a real number, got None"),
    ({"max_grad_norm": "1"}, TypeError, "max_grad_norm must be a real number, got '1'"),
    ({"max_grad_norm": True}, TypeError, "max_grad_norm must be a real number, got True"),
    (
        {"max_grad_norm": [1.0, 1.0]},
        TypeError,
        r"max_grad_norm must be one number, got \[1.0, 1.0\].*need clipping='per_layer'",
    ),
    (
        {"max_grad_norm": 1e-40},
        ValueError,
        "max_grad_norm must be finite and positive as a float32",
    ),
    ({"max_grad_norm": 1e39}, ValueError, "max_grad_norm must be finite and positive as a float32"),
    ({"max_grad_norm": 10**400}, ValueError, "max_grad_norm must be finite"),
    # bounds
    ({"max_grad_norm": 0.05}, ValueError, r"max_grad_norm must be within .* \[0.1, 50\], got 0.05"),
    ({"max_grad_norm": 51}, ValueError, r"max_grad_norm must be within .* \[0.1, 50\], got 51"),
    (
        {"min_clipbound": 2.0},
        ValueError,
        r"max_grad_norm must be within .* \[2, 50\], got 1. Choose another .* or widen",
    ),
    ({"max_clipbound": 0.5}, ValueError, r"max_grad_norm must be within .* \[0.1, 0.5\], got 1"),
    (
        {"min_clipbound": 2.0, "max_clipbound": 1.0},
        ValueError,
        "min_clipbound must not exceed max_clipbound, got 2 > 1. Swap or widen",
    ),
    ({"min_clipbound": 0}, ValueError, "min_clipbound must be positive, got 0"),
    ({"min_clipbound": math.nan}, ValueError, "min_clipbound must be finite, got nan"),
    ({"min_clipbound": None}, TypeError, "min_clipbound must be a real number, got None"),
    (
        {"min_clipbound": 1e-40},
        ValueError,
        "min_clipbound must be finite and positive as a float32",
    ),
    ({"max_clipbound": math.inf}, ValueError, "max_clipbound must be finite, got inf"),
    ({"max_clipbound": "50"}, TypeError, "max_clipbound must be a real number, got '50'"),
    ({"max_clipbound": 1e39}, ValueError, "max_clipbound must be finite and positive as a float32"),
    # rate and quantile
    (
        {"clipbound_learning_rate": -0.1},
        ValueError,
        r"learning_rate must be in \[0, 10\], got -0.1",
    ),
    ({"clipbound_learning_rate": 11}, ValueError, r"learning_rate must be in \[0, 10\], got 11"),
    ({"clipbound_learning_rate": math.nan}, ValueError, "learning_rate must be finite, got nan"),
    ({"clipbound_learning_rate": None}, TypeError, "learning_rate must be a real number, got None"),
    (
        {"clipping": "slaclip-q", "target_unclipped_quantile": 0.0},
        ValueError,
        r"target_unclipped_quantile must be in \(0, 1\), got 0",
    ),
    (
        {"clipping": "slaclip-q", "target_unclipped_quantile": 1.0},
        ValueError,
        r"target_unclipped_quantile must be in \(0, 1\), got 1",
    ),
    (
        {"clipping": "slaclip-q", "target_unclipped_quantile": math.nan},
        ValueError,
        "target_unclipped_quantile must be finite, got nan",
    ),
    (
        {"clipping": "slaclip-q", "target_unclipped_quantile": "half"},
        TypeError,
        "target_unclipped_quantile must be a real number, got 'half'",
    ),
    # modes
    (
        {"loss_reduction": "avg"},
        ValueError,
        "loss_reduction must be 'mean' or 'sum', got 'avg'. Pass the reduction of your criterion",
    ),
    (
        {"grad_sample_mode": "hook"},
        ValueError,
        r"grad_sample_mode='hook' in one process is not supported with SlaClip. Use one of \[.*'ho",
    ),
    # loaders
    (
        {"data_loader": loader(49, 1)},
        ValueError,
        "expected_batch_size must be at least 1, got 0. It is the public denominator",
    ),
    (
        {"data_loader": loader(49, 1), "poisson_sampling": False},
        ValueError,
        "expected_batch_size must be at least 1, got 0",
    ),
    ({"data_loader": loader(0, 4)}, ValueError, "data_loader must yield at least one batch"),
    (
        {"data_loader": loader(3, 4, drop_last=True)},
        ValueError,
        "data_loader must yield at least one batch, got an empty one",
    ),
]


def described(case: tuple[dict[str, Any], type[Exception], str]) -> Any:
    """Name a test after the values that it changes."""
    changes = case[0]
    names = [name for name in changes if name != "clipping"]
    shown = [str("absent" if changes[n] is ABSENT else changes[n])[:12] for n in names]
    if "data_loader" in changes:
        shown[0] = f"{len(changes['data_loader'].dataset)} samples"
    return pytest.param(*case, id=",".join(f"{n}={v}" for n, v in zip(names, shown, strict=True)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("changes", "error", "match"), [described(case) for case in BAD_VALUES])
def test_a_value_that_cannot_work_is_refused(
    changes: dict[str, Any], error: type[Exception], match: str, method: str
) -> None:
    assert_refused(error, match, method, **changes)


@pytest.mark.parametrize(
    ("value", "error", "match"),
    [
        (-1.0, ValueError, "noise_multiplier must not be negative, got -1. Pass sigma >= 0"),
        (math.nan, ValueError, "noise_multiplier must be finite, got nan"),
        (math.inf, ValueError, "noise_multiplier must be finite, got inf"),
        (None, TypeError, "noise_multiplier must be a real number, got None"),
        (ABSENT, TypeError, "noise_multiplier must be a real number, got None"),
        ("1.0", TypeError, "noise_multiplier must be a real number, got '1.0'"),
        (True, TypeError, "noise_multiplier must be a real number, got True"),
    ],
)
def test_a_noise_multiplier_that_cannot_work_is_refused(
    value: Any, error: type[Exception], match: str
) -> None:
    assert_refused(error, match, noise_multiplier=value)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"noise_multiplier": 1e-38}, id="underflow at the lower bound"),
        pytest.param({"noise_multiplier": 1e37}, id="overflow at the upper bound"),
        pytest.param({"noise_multiplier": 2.0, "max_clipbound": 1e38}, id="its draws overflow"),
        pytest.param({"noise_multiplier": 1e-20, "min_clipbound": 1e-20}, id="tiny times tiny"),
        pytest.param({"noise_multiplier": 1e20, "max_clipbound": 1e20}, id="huge times huge"),
    ],
)
def test_noise_that_no_float32_can_hold_is_refused(changes: dict[str, Any]) -> None:
    match = r"noise_multiplier \* max_grad_norm must be finite and positive as a float32, got .* = "
    assert_refused(ValueError, match, **changes)


def test_calibrated_noise_that_no_float32_can_hold_is_refused() -> None:
    match = r"noise_multiplier \* max_grad_norm must be finite and positive as a float32, got 0\.\d"
    assert_refused(
        ValueError,
        match,
        "make_private_with_epsilon",
        target_epsilon=20.0,  # sigma is below 1 ...
        min_clipbound=1.2e-38,  # ... and this is just above the smallest float32
    )


def test_an_optimizer_of_another_module_is_refused() -> None:
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    assert_refused(ValueError, "parameters are different", optimizer=other)


class Stream(IterableDataset):
    """A dataset of known length that cannot be indexed."""

    def __len__(self) -> int:
        return 512

    def __iter__(self) -> Any:
        return iter([(torch.zeros(2), 0)] * 512)


def test_a_dataset_that_poisson_sampling_cannot_index_is_refused() -> None:
    stream = DataLoader(Stream(), batch_size=256)
    assert_refused(ValueError, "IterableDataset", data_loader=stream)


# ---- an optimizer made by hand ----------------------------------------------------------------


def by_hand(**changes: Any) -> SlaClipDPOptimizer:
    arguments = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": 256}
    arguments |= changes
    given = {name: value for name, value in arguments.items() if value is not ABSENT}
    optimizer = given.pop("optimizer", None) or Setup().optimizer
    return SlaClipDPOptimizer(optimizer, **given)


@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("value", "error", "match"),
    [
        (ABSENT, TypeError, "missing 1 required keyword-only argument: 'expected_batch_size'"),
        (None, TypeError, "expected_batch_size must be a number, got None.*public denominator"),
        (0, ValueError, "expected_batch_size must be at least 1, got 0"),
        (math.nan, ValueError, "expected_batch_size must be finite, got nan"),
    ],
)
def test_by_hand_either_reduction_needs_an_expected_batch_size(
    value: Any, error: type[Exception], match: str, loss_reduction: str
) -> None:
    setup = Setup()
    with nothing_changes(setup), pytest.raises(error, match=match):
        by_hand(optimizer=setup.optimizer, expected_batch_size=value, loss_reduction=loss_reduction)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"loss_reduction": "avg"}, ValueError, "Unexpected value for loss_reduction: avg"),
        ({"num_slots": 0}, ValueError, "num_slots must be a positive integer"),
        ({"controller": 3}, TypeError, "controller must be callable"),
        ({"max_grad_norm": [1.0]}, TypeError, "max_grad_norm must be one number"),
        ({"max_grad_norm": 99.0}, ValueError, r"max_grad_norm must be within .* \[0.1, 50\]"),
        ({"noise_multiplier": -1.0}, ValueError, "noise_multiplier must not be negative"),
        ({"noise_multiplier": 1e-38}, ValueError, r"noise_multiplier \* max_grad_norm must be fin"),
        ({"min_clipbound": 2.0, "max_clipbound": 1.0}, ValueError, "must not exceed max_clipbound"),
        ({"num_slot": 3}, TypeError, "unexpected keyword argument 'num_slot'"),
    ],
)
def test_by_hand_the_same_values_are_refused(
    changes: dict[str, Any], error: type[Exception], match: str
) -> None:
    setup = Setup()
    with nothing_changes(setup), pytest.raises(error, match=match):
        by_hand(optimizer=setup.optimizer, **changes)


def test_by_hand_the_defaults_are_those_of_the_engine() -> None:
    _, made, _ = Setup().call()
    optimizer = by_hand()
    for name in ("num_slots", "controller", "min_clipbound", "max_clipbound", "max_grad_norm"):
        assert getattr(optimizer, name) == getattr(made, name)


# ---- warnings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_more_slots_than_recommended_are_allowed_with_a_warning(method: str) -> None:
    recommended = recommended_num_slots(256, 1.0)
    with pytest.warns(UserWarning, match="num_slots=100 is above the recommended") as caught:
        made = Setup().call(method, num_slots=100)
    assert sum("above the recommended" in str(warning.message) for warning in caught) == 1
    assert made[1].num_slots == 100 > recommended
    take_step(*made)


def test_an_expected_batch_of_one_is_allowed_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="The expected batch size is 1: .*larger logical batch"):
        _, optimizer, _ = Setup().call(data_loader=loader(8, 1))
    assert optimizer.num_slots == 1


@pytest.mark.parametrize("method", METHODS)
def test_expanded_weights_with_poisson_sampling_are_allowed_with_a_warning(method: str) -> None:
    match = "'ew' raises on the empty batches .*Use 'hooks', or pass rand_on_empty=True"
    with pytest.warns(UserWarning, match=match) as caught:
        made = Setup().call(method, grad_sample_mode="ew")
    places = [warning.filename for warning in caught if "'ew'" in str(warning.message)]
    assert places == [__file__]  # once, where the user called
    take_step(*made)


def test_expanded_weights_without_poisson_sampling_need_no_warning() -> None:
    take_step(*Setup().call(grad_sample_mode="ew", poisson_sampling=False))


def test_a_made_up_sample_in_empty_batches_is_allowed_with_a_warning() -> None:
    match = "rand_on_empty=True puts a made-up sample .*by up to 2 C instead of C"
    with pytest.warns(UserWarning, match=match):
        Setup().call(rand_on_empty=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("target_epsilon", math.nan),
        ("target_epsilon", 0.0),
        ("target_delta", 2.0),
        ("target_delta", 0.0),
        ("epochs", 0),
        ("epochs", -1),
        ("epsilon_tolerance", 0.0),
    ],
)
def test_a_budget_that_cannot_be_calibrated_to_is_refused(name: str, value: float) -> None:
    """Opacus's search would never return for some of these."""
    with pytest.raises(ValueError, match=f"{name} must be"):
        Setup().call("make_private_with_epsilon", **{name: value})


def test_a_controller_class_is_refused() -> None:
    assert_refused(TypeError, "controller must be callable", controller=FixedController)


def test_a_controller_class_is_refused_by_hand_too() -> None:
    with pytest.raises(TypeError, match="controller must be callable"):
        by_hand(controller=FixedController)


def test_calibration_after_budget_was_spent_is_allowed_with_a_warning() -> None:
    setup = Setup()
    take_step(*setup.call())
    other = Setup()
    with pytest.warns(UserWarning, match="already spent privacy budget.*exceed target_epsilon"):
        setup.call("make_private_with_epsilon", module=other.module, optimizer=other.optimizer)


# ---- what is accepted -------------------------------------------------------------------------


def test_every_option_has_a_default() -> None:
    module, optimizer, data_loader = Setup().call()
    assert type(optimizer) is SlaClipDPOptimizer
    assert optimizer.num_slots == recommended_num_slots(256, 1.0) == 13
    assert optimizer.controller == SlaClipController(clipbound_learning_rate=0.2)
    assert (optimizer.min_clipbound, optimizer.max_clipbound) == (0.1, 50.0)
    assert (optimizer.max_grad_norm, optimizer.slack_indicator) == (1.0, None)
    take_step(module, optimizer, data_loader)
    assert optimizer.slack_indicator.expected_batch_size == 256


def test_every_option_of_the_quantile_variant_has_a_default() -> None:
    module, optimizer, data_loader = Setup().call(clipping="slaclip-q")
    assert optimizer.controller == SlaClipQController(
        clipbound_learning_rate=0.2, target_unclipped_quantile=0.5
    )
    take_step(module, optimizer, data_loader)


@pytest.mark.parametrize(
    ("changes", "attribute", "expected"),
    [
        ({"num_slots": 5}, "num_slots", 5),
        ({"num_slots": None}, "num_slots", 13),
        ({"num_slots": np.int64(5)}, "num_slots", 5),
        ({"clipbound_learning_rate": 0}, "controller", SlaClipController(0.0)),
        ({"clipbound_learning_rate": 0.5}, "controller", SlaClipController(0.5)),
        ({"min_clipbound": 1}, "min_clipbound", 1.0),
        ({"max_clipbound": 1}, "max_clipbound", 1.0),
        ({"max_grad_norm": 2}, "max_grad_norm", 2.0),
        ({"max_grad_norm": np.float32(1.5)}, "max_grad_norm", 1.5),
        ({"max_grad_norm": Fraction(3, 2)}, "max_grad_norm", 1.5),
        ({"controller": FixedController()}, "controller", FixedController()),
        (
            {"controller": None, "clipbound_learning_rate": 0.5},
            "controller",
            SlaClipController(0.5),
        ),
        ({"controller": math.fmod}, "controller", math.fmod),
        (
            {"clipping": "slaclip-q", "target_unclipped_quantile": 0.9},
            "controller",
            SlaClipQController(target_unclipped_quantile=0.9),
        ),
        (
            {"clipping": "slaclip-q", "controller": FixedController()},
            "controller",
            FixedController(),
        ),
        ({"loss_reduction": "sum"}, "loss_reduction", "sum"),
    ],
)
def test_an_option_reaches_the_optimizer(
    changes: dict[str, Any], attribute: str, expected: Any
) -> None:
    _, optimizer, _ = Setup().call(**changes)
    value = getattr(optimizer, attribute)
    assert value == expected
    assert type(value) is type(expected)


def test_a_controller_that_is_a_function_is_called() -> None:
    module, optimizer, data_loader = Setup().call(
        controller=lambda clip_norm, release: 2 * clip_norm
    )
    take_step(module, optimizer, data_loader)
    assert optimizer.max_grad_norm == 2.0


def test_training_without_noise_works() -> None:
    module, optimizer, data_loader = Setup().call(noise_multiplier=0)
    take_step(module, optimizer, data_loader)
    assert optimizer.slack_indicator.noise_std == 0.0
    assert optimizer.num_slots == recommended_num_slots(256, 1.0)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
@pytest.mark.parametrize("poisson_sampling", [True, False])
@pytest.mark.filterwarnings("ignore:grad_sample_mode='ew' raises:UserWarning")
def test_the_modes_with_per_sample_gradients_work(mode: str, poisson_sampling: bool) -> None:
    take_step(*Setup().call(grad_sample_mode=mode, poisson_sampling=poisson_sampling))


@pytest.mark.parametrize("accountant", ["rdp", "gdp", "prv"])
@pytest.mark.filterwarnings("ignore:GDP accounting is experimental:UserWarning")
def test_the_calibrated_noise_is_that_of_opacus(accountant: str) -> None:
    ours, opacus_own = (
        Setup(engine=engine(accountant=accountant)).call(
            "make_private_with_epsilon", clipping=clipping
        )
        for engine, clipping in ((PrivacyEngine, "slaclip"), (opacus.PrivacyEngine, "flat"))
    )
    assert ours[1].noise_multiplier == opacus_own[1].noise_multiplier
    assert ours[1].num_slots == recommended_num_slots(256, ours[1].noise_multiplier)
    take_step(*ours)


# ---- clipping values of Opacus ----------------------------------------------------------------

ADAPTIVE = {
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 10.0,
    "min_clipbound": 0.5,
    "unclipped_num_std": 12.8,
}


@pytest.mark.parametrize(
    ("changes", "optimizer_class"),
    [
        ({"clipping": ABSENT}, DPOptimizer),
        ({"clipping": "flat"}, DPOptimizer),
        ({"clipping": "per_layer", "max_grad_norm": [1.0] * 4}, DPPerLayerOptimizer),
        ({"clipping": "adaptive", **ADAPTIVE}, AdaClipDPOptimizer),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_opacus_own_clipping_works_as_ever(
    changes: dict[str, Any], optimizer_class: type[DPOptimizer], method: str
) -> None:
    setup = Setup()
    module, optimizer, data_loader = setup.call(method, **changes)
    assert type(optimizer) is optimizer_class
    for name in ADAPTIVE.keys() & changes.keys():
        assert getattr(optimizer, name) == changes[name]
    x, y = next(iter(data_loader))
    nn.functional.cross_entropy(module(x), y).backward()
    optimizer.step()
    assert len(setup.engine.accountant) == 1
    assert not any(key.startswith("slaclip") for group in optimizer.param_groups for key in group)


@pytest.mark.parametrize("method", METHODS)
def test_other_keywords_go_to_opacus_untouched(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    received = {}

    def record(engine: Any, **kwargs: Any) -> Callable[..., Any]:
        received.update(kwargs)
        return "what Opacus returns"

    monkeypatch.setattr(opacus.PrivacyEngine, method, record)
    given = {"clipping": "adaptive", "anything": object(), **ADAPTIVE}
    setup = Setup()
    with nothing_changes(setup):
        assert getattr(setup.engine, method)(**given) == "what Opacus returns"
    assert received == given
