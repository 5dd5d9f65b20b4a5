"""Sums that the guarantee rests on are float32 or better, whatever the model is held in."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import oracle
import pytest
import torch
from helpers import TASKS, Run, Vector, batches, private, samples, seeded, sgd, vector
from hypothesis import given
from hypothesis import strategies as st
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from opacus_slaclip import FixedController, SlaClipDPOptimizer
from opacus_slaclip.optimizers.grad_sample import per_sample_norms
from opacus_slaclip.slack import rounding_bound

EPS = torch.finfo(torch.float32).eps
LOW = [torch.bfloat16, torch.float16]


def gradients(size: int, num_entries: int, dtype: torch.dtype, *, seed: int = 0) -> torch.Tensor:
    """Gradients with a common direction and norms around 1, as stored in ``dtype``."""
    generator = seeded(seed)
    noise = torch.randn(size, num_entries, generator=generator)
    scales = torch.rand(size, 1, generator=generator) * 2
    return ((noise / 2 + 1) * scales / math.sqrt(num_entries)).to(dtype)


def clipped(rows: torch.Tensor, clip_norm: float) -> torch.Tensor:
    """Clip the gradients as they are stored, in float64, as Opacus does."""
    stored = rows.double()
    norms = torch.tensor([math.hypot(*row) for row in stored.tolist()], dtype=torch.float64)
    return stored * (clip_norm / (norms + 1e-6)).clamp(max=1.0).unsqueeze(1)


def rounding(rows: torch.Tensor, clip_norm: float) -> torch.Tensor:
    """How far float32 may take the clipped sum from the exact one, entry by entry.

    A float32 norm of d entries is off by at most d eps / 2 of itself, and a float32 sum of n terms
    by n eps / 2 of the sum of their sizes; twice that leaves room for the factor.
    """
    size, num_entries = rows.shape
    return (size + num_entries) * EPS * clipped(rows, clip_norm).abs().sum(0)


# --- the clipped sum ---


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("parameter_dtype", [*LOW, torch.float32])
@pytest.mark.parametrize("gradient_dtype", LOW)
def test_the_clipped_sum_is_exact_to_float32_rounding(gradient_dtype, parameter_dtype, pieces):
    rows = gradients(320, 20, gradient_dtype)
    one = vector(20, dtype=parameter_dtype, expected_batch_size=320)

    for piece in (parts := rows.chunk(pieces))[:-1]:
        one.accumulate(piece.clone())
    summed = one.release(parts[-1].clone())

    assert summed.dtype == torch.float32
    error = (summed.double() - clipped(rows, 1.0).sum(0)).abs()
    assert (error <= rounding(rows, 1.0)).all()


@pytest.mark.parametrize("dtype", LOW)
def test_the_clipped_sum_of_opacus_misses_it_in_low_precision(dtype):
    """Why the sums here are float32; and that the test above can tell the difference."""
    rows = gradients(320, 20, dtype)
    flat = vector(20, optimizer_class=DPOptimizer, dtype=dtype, expected_batch_size=320)

    summed = flat.release(rows.clone())

    error = (summed.double() - clipped(rows, 1.0).sum(0)).abs()
    assert (error > 2 * rounding(rows, 1.0)).any()


def test_the_clipped_sum_of_float64_gradients_is_exact_to_float64_rounding():
    rows = gradients(320, 20, torch.float64)
    one = vector(20, dtype=torch.float64, expected_batch_size=320)

    summed = one.release(rows.clone())

    assert summed.dtype == torch.float64
    error = (summed - clipped(rows, 1.0).sum(0)).abs()
    assert (error <= rounding(rows, 1.0) * torch.finfo(torch.float64).eps / EPS).all()


@pytest.mark.parametrize("dtype", [*LOW, torch.float32, torch.float64])
def test_one_clipped_sample_stays_within_the_threshold(dtype):
    for seed in range(20):
        one = vector(500, dtype=dtype, max_grad_norm=0.7)
        summed = one.release(gradients(1, 500, dtype, seed=seed) * 4)
        excess = math.hypot(*summed.tolist()) / 0.7 - 1
        assert excess <= rounding_bound(500, 1)


def test_one_clipped_sample_of_opacus_exceeds_the_threshold_in_bfloat16():
    excesses = []
    for seed in range(20):
        flat = vector(500, optimizer_class=DPOptimizer, dtype=torch.bfloat16, max_grad_norm=0.7)
        summed = flat.release(gradients(1, 500, torch.bfloat16, seed=seed) * 4)
        excesses.append(math.hypot(*summed.tolist()) / 0.7 - 1)

    assert max(excesses) > 1e-3


# --- the slack ---


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("dtype", LOW)
def test_the_slack_is_that_of_float32_norms(dtype, pieces):
    rows = gradients(320, 20, dtype)
    one = vector(20, dtype=dtype, expected_batch_size=320, num_slots=40)

    for piece in (parts := rows.chunk(pieces))[:-1]:
        one.accumulate(piece.clone())
    one.release(parts[-1].clone())

    norms = [math.hypot(*row) for row in rows.double().tolist()]
    expected = torch.tensor(oracle.indicator(norms, 1.0, 40, 320), dtype=torch.float64)
    error = (one.optimizer.slack_indicator.values - expected).abs().max()
    # A slot's share of a sample, K (1 - n / C), moves by K times the norm's error of d eps / 2;
    # bfloat16 norms would move it by up to 40 * 2^-8 = 0.16. Means of n values: n eps / 2.
    assert error <= (40 * 20 + 320) * EPS


# --- noise first, then the cast ---


@pytest.mark.parametrize("dtype", LOW)
def test_the_result_is_cast_only_after_the_noise(dtype):
    rows = gradients(320, 20, dtype)
    one = vector(
        20,
        dtype=dtype,
        noise_multiplier=0.8,
        expected_batch_size=320,
        num_slots=4,
        loss_reduction="sum",
        generator=seeded(9),
    )
    twin = seeded(9)

    summed = one.release(rows.clone())

    noise = torch.normal(0.0, 0.8, (20,), generator=twin)
    slack_noise = torch.normal(0.0, 0.8, (4,), generator=twin)
    assert noise.dtype == slack_noise.dtype == torch.float32
    assert torch.equal(one.parameter.grad, (summed + noise).to(dtype))
    assert one.parameter.grad.dtype == dtype
    silent = vector(20, dtype=dtype, expected_batch_size=320, num_slots=4)
    silent.release(rows.clone())
    added = one.optimizer.slack_indicator.values - silent.optimizer.slack_indicator.values
    # In units of the slot width C / sqrt(K) = 1/2, over B = 320; sums reach 320.
    assert (added - slack_noise.double() * 2 / 320).abs().max() <= 4 * EPS


@pytest.mark.parametrize("task", ["cnn", "embedding", "lstm", "mlp"])
def test_a_model_in_bfloat16_trains_and_stays_in_bfloat16(task):
    run = private(task, dtype=torch.bfloat16, num_slots=4, loss_reduction="sum")
    start = run.parameters

    for batch in batches(task, [5, 1, 9, 4], dtype=torch.bfloat16):
        run.step(batch)
        for p in run.model.parameters():
            assert p.dtype == p.grad.dtype == torch.bfloat16
            assert p.summed_grad.dtype == torch.float32

    assert not any(map(torch.equal, run.parameters, start))
    assert run.engine.accountant.history == [(0.3, 0.25, 4)]


def test_an_empty_batch_in_bfloat16_is_noise_alone():
    run = private("linear", dtype=torch.bfloat16, num_slots=4, loss_reduction="sum")
    run.step(samples("linear", 5, dtype=torch.bfloat16))
    twin, std = seeded(0), 0.3 * run.optimizer.max_grad_norm
    twin.set_state(run.noise_generator.get_state())

    run.step(samples("linear", 0, dtype=torch.bfloat16))

    for p in run.model.parameters():
        noise = torch.normal(0.0, std, p.shape, generator=twin)
        assert torch.equal(p.grad, noise.to(torch.bfloat16))


def test_parameters_of_several_precisions_are_clipped_by_one_norm():
    dtypes = [torch.bfloat16, torch.float32, torch.float64, torch.float16]
    parameters: list[Any] = [nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in dtypes]
    optimizer = SlaClipDPOptimizer(
        sgd(parameters), noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=16
    )
    rows = [gradients(6, 3, dtype, seed=i) for i, dtype in enumerate(dtypes)]
    for p, grad_sample in zip(parameters, rows, strict=True):
        p.grad_sample = grad_sample.clone()

    optimizer.step()

    together = torch.cat([grad_sample.double() for grad_sample in rows], dim=1)
    summed = torch.cat([p.summed_grad.double() for p in parameters])
    error = (summed - clipped(together, 1.0).sum(0)).abs()
    assert (error <= rounding(together, 1.0)).all()
    assert [p.grad.dtype for p in parameters] == dtypes
    widths = [p.summed_grad.dtype for p in parameters]
    assert widths == [torch.float32, torch.float32, torch.float64, torch.float32]


def test_the_norms_of_an_empty_batch_have_the_type_of_any_other():
    """Ranks reduce what follows from them together, and one of them may have drawn no sample."""
    for dtypes in (
        [torch.bfloat16],
        [torch.float32, torch.float64],
        [torch.float64, torch.float16],
    ):
        rows = [torch.ones(2, 3, dtype=dtype) for dtype in dtypes]
        assert per_sample_norms([g[:0] for g in rows]).dtype == per_sample_norms(rows).dtype


def test_a_rescaled_release_is_divided_before_the_cast():
    """1024 gradients of norm C = 100: their sum, 102,400, is no float16; divided by C it is."""
    one = vector(
        1,
        dtype=torch.float16,
        loss_reduction="sum",
        max_grad_norm=100.0,
        max_clipbound=100.0,
        rescale_to_unit_norm=True,
    )
    one.release(torch.full((1024, 1), 100.0, dtype=torch.float16))
    assert one.parameter.grad.tolist() == [1024.0]


# --- how far low precision takes us from Opacus ---


@pytest.mark.parametrize("pieces", [1, 8])
def test_steps_in_bfloat16_differ_from_flat_ones_by_a_few_roundings(pieces):
    """At most (7 + m) u of the mean size of the clipped gradients, entry by entry, u = 2^-8.

    Without noise, Opacus rounds to bfloat16: the tensors' norms, the whole norm, the factor, the
    sum of each of m physical batches, their m - 1 additions and the mean (5 u and m - 1 more).
    Here only the sum and the mean are (2 u). The last u is for products of roundings.
    """
    differences = []
    for seed in range(5):
        rows = gradients(200, 20, torch.bfloat16, seed=seed)
        ours, flat = (
            vector(20, optimizer_class=cls, dtype=torch.bfloat16, expected_batch_size=200)
            for cls in (SlaClipDPOptimizer, DPOptimizer)
        )

        for one in (ours, flat):
            for piece in (parts := rows.chunk(pieces))[:-1]:
                one.accumulate(piece.clone())
            one.release(parts[-1].clone())

        difference = (ours.parameter.grad.double() - flat.parameter.grad.double()).abs()
        bound = (7 + pieces) * 2**-8 * clipped(rows, 1.0).abs().mean(0)
        assert (difference <= bound).all()
        differences.append(difference.max().item())
    assert max(differences) > 0, "there was nothing to bound"


# --- autocast ---


def stored_gradients(run: Run) -> torch.Tensor:
    parameters: list[Any] = [p for p in run.model.parameters() if p.requires_grad]
    return torch.cat([p.grad_sample.double().flatten(1) for p in parameters], dim=1)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
@pytest.mark.parametrize("task", ["cnn", "layernorm", "mlp"])
def test_under_autocast_norms_sums_and_slack_are_float32(task, mode):
    run = private(
        task, grad_sample_mode=mode, num_slots=8, noise_multiplier=0.0, loss_reduction="sum"
    )
    clip_norm = TASKS[task].clip_norm
    run.optimizer.zero_grad()

    with torch.autocast("cpu", torch.bfloat16):
        run.backward(samples(task, 16))
        rows = stored_gradients(run)
        stored = {p.grad_sample.dtype for p in run.model.parameters()}
        run.optimizer.step()

    assert mode == "functorch" or torch.bfloat16 in stored
    summed = torch.cat([p.summed_grad.flatten() for p in run.model.parameters()])
    assert summed.dtype == torch.float32
    error = (summed.double() - clipped(rows, clip_norm).sum(0)).abs()
    assert (error <= rounding(rows, clip_norm)).all()
    norms = [math.hypot(*row) for row in rows.tolist()]
    expected = torch.tensor(oracle.indicator(norms, clip_norm, 8, 16), dtype=torch.float64)
    slack_error = (run.optimizer.slack_indicator.values - expected).abs().max()
    assert slack_error <= (8 * rows.shape[1] + 16) * EPS


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
def test_a_mean_of_losses_is_refused_for_parameters_in_low_precision(mode):
    message = r"loss_reduction must be 'sum' for .* 'mean'.*rounds all others.*Such are \['0"
    with pytest.raises(ValueError, match=message):
        private("mlp", grad_sample_mode=mode, dtype=torch.bfloat16)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
def test_a_mean_of_losses_is_refused_under_autocast(mode):
    run = private("mlp", grad_sample_mode=mode)
    before = (run.parameters, run.optimizer.max_grad_norm)
    with torch.autocast("cpu", torch.bfloat16):
        run.backward(samples("mlp", 5))

    with pytest.raises(ValueError, match=r"loss_reduction must be 'sum' for .*learning rate"):
        run.optimizer.step()

    assert all(map(torch.equal, run.parameters, before[0]))
    assert run.engine.accountant.history == []
    run.step(samples("mlp", 5))  # in float32
    assert run.optimizer.num_releases == 1


def test_gradients_of_a_users_own_making_may_come_from_a_mean():
    """Nobody but the user knows how mode "no_op" came by them."""
    run = private("mlp", grad_sample_mode="no_op", dtype=torch.bfloat16)
    for p in run.model.parameters():
        p.grad_sample = torch.ones(3, *p.shape, dtype=p.dtype)
    run.optimizer.step()
    assert run.optimizer.num_releases == 1


def test_autocast_is_back_on_after_the_step():
    run = private(loss_reduction="sum")
    run.optimizer.zero_grad()

    with torch.autocast("cpu", torch.bfloat16):
        run.backward(samples("mlp", 5))
        run.optimizer.step()
        product = torch.ones(2, 2) @ torch.ones(2, 2)

    assert product.dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


# --- sensitivity, through the real optimizer ---


def joint_release(one: Vector, rows: torch.Tensor, pieces: int = 1) -> torch.Tensor:
    """What is noised, in gradient-norm units: the clipped sum and, after it, the slack sum."""
    for piece in (parts := rows.chunk(pieces))[:-1]:
        one.accumulate(piece.clone())
    clip_norm = one.optimizer.max_grad_norm
    summed = one.release(parts[-1].clone())
    indicator = one.optimizer.slack_indicator
    width = clip_norm / math.sqrt(indicator.num_slots)
    slack = indicator.values * indicator.expected_batch_size * width
    return torch.cat([summed.double(), slack])


def allowed_distance(clip_norm: float, num_entries: int, size: int) -> float:
    """One sample's joint norm, with its rounding, and the rounding of two sums of ``size``."""
    return clip_norm * (1 + rounding_bound(num_entries, 1) + size**2 * EPS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_adding_a_tiny_sample_moves_the_release_by_at_most_the_threshold(dtype):
    """514 samples of norm C, one of 0.016 C: a bfloat16 sum goes from 512 C to 516 C."""
    rows = torch.ones(514, 1, dtype=dtype)
    more = torch.cat([rows, torch.full((1, 1), 0.016, dtype=dtype)])

    without, with_it = (
        joint_release(vector(1, dtype=dtype, expected_batch_size=514, num_slots=21), batch)
        for batch in (rows, more)
    )

    assert (with_it - without).norm() <= allowed_distance(1.0, 1, 515)
    assert abs((with_it - without)[0] - 0.016) < 1e-3


def test_adding_a_tiny_sample_moves_the_sum_of_opacus_by_four_thresholds():
    rows = torch.ones(514, 1, dtype=torch.bfloat16)
    more = torch.cat([rows, torch.full((1, 1), 0.016, dtype=torch.bfloat16)])

    without, with_it = (
        vector(1, optimizer_class=DPOptimizer, dtype=torch.bfloat16).release(batch)
        for batch in (rows, more)
    )

    assert (with_it - without).item() == 4.0


ENTRY = st.one_of(
    st.floats(-4, 4, width=16),
    st.sampled_from([0.0, 1e-6, -1e-3, 1.0, 2.0, 1e4, math.nan, math.inf]),
)
ROW = st.lists(ENTRY, min_size=3, max_size=3)


@pytest.mark.filterwarnings("ignore:A per-sample gradient was not finite")
@pytest.mark.parametrize("dtype", [*LOW, torch.float32, torch.float64])
@given(
    rows=st.lists(ROW, min_size=1, max_size=12),
    extra=ROW,
    place=st.integers(0, 12),
    pieces=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    clip_norm=st.sampled_from([0.1, 0.7, 1.0, 5.0, 50.0]),
    num_slots=st.sampled_from([1, 2, 3, 21]),
)
def test_adding_one_sample_moves_the_release_by_at_most_the_threshold(
    dtype, rows, extra, place, pieces, clip_norm, num_slots
):
    without = torch.tensor(rows).to(dtype)
    with_it = torch.tensor([*rows[:place], extra, *rows[place:]]).to(dtype)

    releases = [
        joint_release(
            vector(
                3,
                dtype=dtype,
                max_grad_norm=clip_norm,
                num_slots=num_slots,
                controller=FixedController(),
            ),
            batch,
            count,
        )
        for batch, count in zip((without, with_it), pieces, strict=True)
    ]

    distance = (releases[1] - releases[0]).norm().item()
    assert distance <= allowed_distance(clip_norm, 3, len(with_it))


@pytest.mark.parametrize("norm", [0.0, 1.0, 1.5, 1e4])
def test_a_sample_of_norm_zero_or_from_the_threshold_on_uses_all_of_it(norm):
    """The bound is met with equality, so nothing tighter could be tested."""
    one = vector(2, num_slots=7)

    released = joint_release(one, torch.tensor([[0.6 * norm, 0.8 * norm]]))

    assert released.norm().item() == pytest.approx(1.0, rel=1e-6 + 8 * EPS)


# --- settings of torch that would round float32 products ---


def reduced_switches() -> list[str]:
    """Return those of torch's switches by which a float32 product loses bits now."""
    backends: Any = torch.backends
    if hasattr(backends.cuda.matmul, "fp32_precision"):
        switches = {"cuda": backends.cuda.matmul, "mkldnn": backends.mkldnn.matmul}
        return [n for n, s in switches.items() if s.fp32_precision in ("tf32", "bf16")]
    return ["all"] if torch.get_float32_matmul_precision() != "highest" else []  # torch < 2.9


class WatchProducts(TorchDispatchMode):
    """Notes, at every matrix product, what would round it."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self.reduced: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.mm, torch.ops.aten.mv):
            self.products += 1
            self.reduced += reduced_switches()
        return func(*args, **(kwargs or {}))


@pytest.fixture
def medium_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("medium_precision")
def test_a_reduced_matmul_precision_does_not_reach_the_clipped_sum():
    one = vector(20, expected_batch_size=64)
    assert reduced_switches() != []

    with WatchProducts() as watch:
        one.release(gradients(64, 20, torch.float32))
        during = watch.products, list(watch.reduced)
        torch.ones(2, 2) @ torch.ones(2, 2)

    assert during[0] > 0
    assert during[1] == []
    assert watch.reduced == reduced_switches(), "the watch sees no difference"


@pytest.mark.usefixtures("medium_precision")
def test_a_reduced_matmul_precision_is_restored_after_the_step():
    before = reduced_switches()
    one = vector(20, expected_batch_size=64)

    one.release(gradients(64, 20, torch.float32))
    assert torch.get_float32_matmul_precision() == "medium"
    assert reduced_switches() == before

    with pytest.raises(ValueError, match="Gradients haven't been cleared"):
        one.optimizer.step()
    assert torch.get_float32_matmul_precision() == "medium"
    assert reduced_switches() == before


def test_the_default_matmul_precision_is_left_as_it_is():
    one = vector(20, expected_batch_size=64)

    one.release(gradients(64, 20, torch.float32))

    assert torch.get_float32_matmul_precision() == "highest"
    assert reduced_switches() == []
