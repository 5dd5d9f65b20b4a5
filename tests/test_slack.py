"""The mechanism: what is encoded, how it is summed, and that it never exceeds the budget."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import handmade
import numpy as np
import oracle
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from opacus_slaclip import SlackIndicator, SlaClipController, recommended_num_slots
from opacus_slaclip.optimizers.grad_sample import per_sample_norms
from opacus_slaclip.slack import (
    clip_factors,
    encode_slack,
    indicator_noise_std,
    normalize_slack,
    rounding_bound,
    slack_in_slots,
    slot_width,
    sum_slack,
)

# Extreme thresholds have their own tests; here float32 must not under- or overflow.
clip_norms = st.floats(min_value=1e-6, max_value=1e6)
dtypes = st.sampled_from([torch.float32, torch.float64])


@st.composite
def batches(draw: st.DrawFn, max_samples: int = 12) -> tuple[torch.Tensor, float, int]:
    """Draw norms below, at, between and above the edges of the bins, with C and K."""
    C, K = draw(clip_norms), draw(st.integers(1, 40))
    anywhere = st.floats(min_value=0.0, max_value=2.0).map(lambda fraction: fraction * C)
    edge = st.integers(0, K).map(lambda j: j / K * C)
    extreme = st.sampled_from([0.0, 1e-38, 1e30, math.inf])
    norms = draw(st.lists(anywhere | edge | extreme, max_size=max_samples))
    return torch.tensor(norms, dtype=draw(dtypes)), C, K


def slot_tolerance(norms: torch.Tensor, num_slots: int) -> float:
    """Bound the rounding of one sample's slot, in slots.

    ``K (1 - n / C)`` rounds C, the quotient, the difference and the product: four times K eps / 2.
    The offset, the slot width and its product add three times eps / 2.
    """
    return (2 * num_slots + 2) * torch.finfo(norms.dtype).eps


# ---- encoding ---------------------------------------------------------------------------------


@given(batches())
def test_encode_slack_follows_the_paper(batch: tuple[torch.Tensor, float, int]) -> None:
    norms, C, K = batch
    in_slots = encode_slack(norms, clip_norm=C, num_slots=K).double() / slot_width(C, K)
    finite = [norm if math.isfinite(norm) else 2 * C for norm in norms.tolist()]
    expected = [[float(x) for x in oracle.slack_vector(norm, C, K)] for norm in finite]
    expected = torch.tensor(expected, dtype=torch.float64).reshape(len(norms), K)
    assert (in_slots - expected).abs().le(slot_tolerance(norms, K)).all()


@given(batches())
def test_sum_slack_is_the_sum_of_the_encoded_rows(batch: tuple[torch.Tensor, float, int]) -> None:
    norms, C, K = batch
    rows = encode_slack(norms, clip_norm=C, num_slots=K).double() / slot_width(C, K)
    summed = sum_slack(norms, clip_norm=C, num_slots=K).double()
    # Each of B additions rounds a number of at most B slots.
    tolerance = len(norms) * (slot_tolerance(norms, K) + len(norms) * torch.finfo(norms.dtype).eps)
    assert (summed - rows.sum(0)).abs().le(tolerance).all()


@given(st.lists(st.integers(0, 160), max_size=50), st.sampled_from([1, 4, 16, 64]), dtypes)
def test_where_nothing_rounds_sum_rows_and_paper_agree_to_the_bit(
    sixteenths: list[int], K: int, dtype: torch.dtype
) -> None:
    norms = torch.tensor(sixteenths, dtype=dtype) / 16  # C, lambda and u need few bits each
    summed = sum_slack(norms, clip_norm=8.0, num_slots=K)
    rows = encode_slack(norms, clip_norm=8.0, num_slots=K)
    expected = [float(slot) for slot in oracle.slack_sum(norms.tolist(), 8.0, K)]
    assert summed.tolist() == expected
    assert torch.equal(summed * slot_width(8.0, K), rows.sum(0))
    assert summed.dtype == rows.dtype == dtype


@given(batches())
def test_a_slot_of_the_sum_is_a_number_of_samples_and_never_rises(
    batch: tuple[torch.Tensor, float, int],
) -> None:
    norms, C, K = batch
    summed = sum_slack(norms, clip_norm=C, num_slots=K).double()
    rounding = len(norms) ** 2 * torch.finfo(norms.dtype).eps
    assert summed.min() >= 0.0
    assert summed.max() <= len(norms) + rounding
    assert summed.diff().le(rounding).all()


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        pytest.param(0.0, [2.0, 2.0, 2.0, 2.0], id="0"),
        pytest.param(1.0, [2.0, 2.0, 2.0, 0.0], id="on an edge"),
        pytest.param(2.5, [2.0, 1.0, 0.0, 0.0], id="in (0, C)"),
        pytest.param(4.0, [0.0, 0.0, 0.0, 0.0], id="C"),
        pytest.param(4.5, [0.0, 0.0, 0.0, 0.0], id="above C"),
        pytest.param(1e30, [0.0, 0.0, 0.0, 0.0], id="far above C"),
        pytest.param(math.inf, [0.0, 0.0, 0.0, 0.0], id="inf"),
        pytest.param(math.nan, [0.0, 0.0, 0.0, 0.0], id="NaN"),
    ],
)
def test_slack_of_one_norm(norm: float, expected: list[float]) -> None:
    norms = torch.tensor([norm])
    assert encode_slack(norms, clip_norm=4.0, num_slots=4).tolist() == [expected]
    assert (2.0 * sum_slack(norms, clip_norm=4.0, num_slots=4)).tolist() == expected


@given(st.floats(1e-37, 1e37), st.integers(1, 1000), dtypes)
def test_a_zero_norm_fills_every_slot_to_the_bit_and_no_more(
    C: float, K: int, dtype: torch.dtype
) -> None:
    zero = torch.zeros(1, dtype=dtype)
    assert slack_in_slots(zero, clip_norm=C, num_slots=K).item() == K
    assert (sum_slack(zero, clip_norm=C, num_slots=K) == 1.0).all()


def test_one_slot_holds_the_whole_unused_norm() -> None:
    norms = torch.tensor([0.0, 1.0, 2.5, 4.0, 5.0])
    rows = encode_slack(norms, clip_norm=4.0, num_slots=1)
    assert rows.tolist() == [[4.0], [3.0], [1.5], [0.0], [0.0]]
    assert sum_slack(norms, clip_norm=4.0, num_slots=1).tolist() == [8.5 / 4.0]


def test_an_empty_batch_has_no_slack() -> None:
    assert encode_slack(torch.zeros(0), clip_norm=4.0, num_slots=3).shape == (0, 3)
    assert sum_slack(torch.zeros(0), clip_norm=4.0, num_slots=3).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("num_slots", [0, -1])
def test_encode_slack_refuses_a_number_of_slots_below_one(num_slots: int) -> None:
    with pytest.raises(ValueError, match=r"num_slots must be a positive integer .*Pass a positive"):
        encode_slack(torch.ones(1), clip_norm=1.0, num_slots=num_slots)


@pytest.mark.parametrize(
    ("clip_norm", "rule"), [(0.0, "positive"), (-1.0, "positive"), (math.nan, "finite")]
)
def test_encode_slack_refuses_a_threshold_that_is_not_positive(clip_norm: float, rule: str) -> None:
    with pytest.raises(ValueError, match=f"clip_norm must be {rule}.*Pass the threshold C"):
        encode_slack(torch.ones(1), clip_norm=clip_norm, num_slots=1)


@pytest.mark.parametrize("expected_batch_size", [0, 0.5, math.nan])
def test_normalize_slack_refuses_a_batch_of_less_than_one_sample(
    expected_batch_size: float,
) -> None:
    with pytest.raises(ValueError, match=r"expected_batch_size must be .*public denominator"):
        normalize_slack(torch.ones(3), expected_batch_size=expected_batch_size)


@given(batches(), st.floats(min_value=1.0, max_value=1e4))
def test_the_indicator_follows_the_paper(
    batch: tuple[torch.Tensor, float, int], batch_size: float
) -> None:
    norms, C, K = batch
    norms = norms[norms.isfinite()].double()
    summed = sum_slack(norms, clip_norm=C, num_slots=K)
    s_hat = normalize_slack(summed, expected_batch_size=batch_size)
    expected = oracle.indicator(norms.tolist(), C, K, batch_size)
    # As for the sum, and two more roundings of the quotient.
    rounding = slot_tolerance(norms, K) + (len(norms) + 2) * torch.finfo(torch.float64).eps
    assert s_hat.tolist() == pytest.approx(expected, rel=0, abs=len(norms) * rounding)


@given(clip_norms, st.integers(1, 10_000))
def test_slots_and_noise_have_the_widths_of_the_paper(C: float, K: int) -> None:
    assert slot_width(C, K) == C / math.sqrt(K)
    std = indicator_noise_std(noise_multiplier=1.5, num_slots=K, expected_batch_size=64)
    # Noise of sigma C on the sum, divided by lambda B; four roundings on either side.
    assert std == pytest.approx(1.5 * C / (slot_width(C, K) * 64), rel=4 * np.finfo(float).eps)


# ---- the worked example -----------------------------------------------------------------------


def test_worked_example() -> None:
    norms = torch.arange(15, dtype=torch.float64)
    C, K, B = 5.0, 5, 15

    rows = encode_slack(norms, clip_norm=C, num_slots=K)
    assert rows[4].tolist() == pytest.approx([2.236, 0, 0, 0, 0], abs=5e-4)  # three decimals given
    assert rows[0].tolist() == pytest.approx([2.236] * 5, abs=5e-4)
    assert not rows[5:].any()
    assert rows.mean(0).tolist() == pytest.approx([0.745, 0.596, 0.447, 0.298, 0.149], abs=5e-4)
    clipped = norms * clip_factors(norms, clip_norm=C)
    assert clipped.mean().item() == pytest.approx(4.0, abs=1e-6)  # Opacus's offset lowers it

    s_hat = normalize_slack(sum_slack(norms, clip_norm=C, num_slots=K), expected_batch_size=B)
    expected = [1 / 3, 4 / 15, 1 / 5, 2 / 15, 1 / 15]
    assert s_hat.tolist() == pytest.approx(expected, rel=1e-14)  # a few dozen roundings
    assert oracle.indicator(norms.tolist(), C, K, B) == pytest.approx(expected, rel=1e-14)


def test_worked_example_with_noise_and_the_next_threshold() -> None:
    norms = torch.arange(15, dtype=torch.float64)
    C, K, B = 5.0, 5, 15
    noise = [0.01 * B] * K  # so that the mean slack is off by 0.01
    summed = sum_slack(norms, clip_norm=C, num_slots=K)
    noisy = summed + torch.tensor(noise, dtype=torch.float64) / slot_width(C, K)
    s_hat = normalize_slack(noisy, expected_batch_size=B)
    published = [0.3378, 0.2711, 0.2045, 0.1378, 0.0711]
    assert s_hat.tolist() == pytest.approx(published, abs=5e-5)  # four decimals given
    expected = oracle.indicator(norms.tolist(), C, K, B, noise)
    assert s_hat.tolist() == pytest.approx(expected, rel=1e-14)

    r = 0.01423
    assert s_hat[-1].item() / C == pytest.approx(r, abs=5e-6)
    release = SlackIndicator(s_hat, clip_norm=C, noise_std=0.0, expected_batch_size=B)
    moved = SlaClipController(clipbound_learning_rate=0.2)(C, release)
    # r and s_hat[1] are rounded at the fifth and fourth decimal.
    assert moved == pytest.approx(5 * math.exp(0.2 * ((1 + r) / 2 - 0.3378)), rel=2e-5)


# ---- memory -----------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Note the size of the largest tensor that any operation in the block returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        outputs = result if isinstance(result, (tuple, list)) else [result]
        sizes = [out.numel() for out in outputs if isinstance(out, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def test_summing_needs_no_matrix() -> None:
    samples, slots = 20_000, 1_000
    norms = torch.rand(samples, generator=torch.Generator().manual_seed(0))
    with LargestTensor() as largest:
        sum_slack(norms, clip_norm=1.0, num_slots=slots)
    assert largest.elements <= samples + slots + 1

    with LargestTensor() as largest:  # the check sees the matrix where there is one
        encode_slack(norms, clip_norm=1.0, num_slots=slots).sum(0)
    assert largest.elements == samples * slots


# ---- the joint norm ---------------------------------------------------------------------------

LAYOUTS: list[list[tuple[int, ...]]] = [
    [(1,)],
    [(7,)],
    [(), (1,)],
    [(3, 2), (3,), (2, 3), (2,)],
    [(5, 3, 2), (1, 1, 1, 1), (40,)],
    [(4,)] * 12,
]


def stretch(direction: list[torch.Tensor], norm: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return one sample's gradient, shapes (1, ...), of about this norm."""
    length = math.hypot(*[entry for part in direction for entry in part.flatten().tolist()])
    return [(part * (norm / length)).to(dtype).unsqueeze(0) for part in direction]


def direction(layout: list[tuple[int, ...]], kind: str, seed: int) -> list[torch.Tensor]:
    """Return float64 tensors of a layout: random, constant or all but one entry zero."""
    if kind == "constant":
        return [torch.ones(shape, dtype=torch.float64) for shape in layout]
    if kind == "one entry":
        parts = [torch.zeros(shape, dtype=torch.float64) for shape in layout]
        parts[-1].view(-1)[0] = -1.0
        return parts
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in layout]


@st.composite
def samples(
    draw: st.DrawFn, min_exponent: float = -37.0, max_exponent: float = 37.0
) -> tuple[list[torch.Tensor], float, int]:
    """Draw one sample's gradient, whatever its norm, with C and K."""
    C = 10.0 ** draw(st.floats(min_exponent, max_exponent))
    K = draw(st.integers(1, 30) | st.integers(1, 1000))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    near = st.floats(-2e-6, 2e-6).map(lambda offset: 1.0 + offset)
    edge = st.integers(0, K).map(lambda j: j / K)
    relative = st.floats(0.0, 2.0) | near | edge | st.sampled_from([0.0, 1e3])
    absolute = st.floats(-46.0, 37.9).map(lambda exponent: 10.0**exponent)
    norm = draw(relative.map(lambda fraction: fraction * C) | absolute)
    layout = draw(st.sampled_from(LAYOUTS))
    kind = draw(st.sampled_from(["random", "constant", "one entry"]))
    parts = direction(layout, kind, draw(st.integers(0, 1000)))
    return stretch(parts, min(norm, 1e38), dtype), C, K


def bound_of(grads: list[torch.Tensor]) -> float:
    """Return the documented bound on the relative rounding excess, from its formula."""
    entries = sum(grad[0].numel() for grad in grads)
    eps = torch.finfo(torch.promote_types(grads[0].dtype, torch.float32)).eps
    return ((entries + len(grads)) / 4 + 3.5) * eps


def joint_norm(
    grads: list[torch.Tensor],
    C: float,
    K: int,
    *,
    norms_of: Callable[..., torch.Tensor] = per_sample_norms,
    encode: Callable[..., torch.Tensor] = encode_slack,
) -> float:
    """Return the norm of one sample's (clipped gradient, slack vector), without further rounding.

    The two arguments after K replace parts of the mechanism by faulty ones.
    """
    norms = norms_of(grads)
    factors = clip_factors(norms, clip_norm=C)
    clipped = [torch.einsum("i,i...", factors, grad.to(factors.dtype)) for grad in grads]
    parts = [*clipped, encode(norms, clip_norm=C, num_slots=K)]
    return math.hypot(*torch.cat([part.flatten().double() for part in parts]).tolist())


def stays_within_budget(grads: list[torch.Tensor], C: float, K: int, **faults: Any) -> bool:
    return joint_norm(grads, C, K, **faults) <= C * (1 + bound_of(grads))


@given(samples())
def test_no_sample_exceeds_the_budget(sample: tuple[list[torch.Tensor], float, int]) -> None:
    grads, C, K = sample
    assert stays_within_budget(grads, C, K)


@pytest.mark.parametrize(("clip_norm", "norm"), [(7.2e-27, 1e19), (3.2e-26, 1e14)])
def test_no_sample_exceeds_the_budget_where_its_factor_is_a_subnormal(
    clip_norm: float, norm: float
) -> None:
    grads = [torch.tensor([[norm]])]  # C / n is below 1.2e-38, where float32 has few bits left
    assert stays_within_budget(grads, clip_norm, 1)


def slack_outside_too(norms: torch.Tensor, *, clip_norm: float, num_slots: int) -> torch.Tensor:
    """Encode |C - n| for norms above C, up to all slots."""
    distance = (clip_norm - norms).abs().clamp(max=clip_norm)
    return encode_slack(clip_norm - distance, clip_norm=clip_norm, num_slots=num_slots)


def wide_slots(norms: torch.Tensor, *, clip_norm: float, num_slots: int) -> torch.Tensor:
    return math.sqrt(2.0) * encode_slack(norms, clip_norm=clip_norm, num_slots=num_slots)


def rounded_up_slots(norms: torch.Tensor, *, clip_norm: float, num_slots: int) -> torch.Tensor:
    width = slot_width(clip_norm, num_slots)
    return (encode_slack(norms, clip_norm=clip_norm, num_slots=num_slots) / width).ceil() * width


def norms_of_the_first_tensor(grads: list[torch.Tensor]) -> torch.Tensor:
    return per_sample_norms(grads[:1])


def grid() -> list[tuple[list[torch.Tensor], float, int]]:
    """Return a few samples of each kind, among them some that every planted fault gets wrong."""
    fractions = [0.0, 0.2, 0.55, 0.9, 0.999, 1.0, 1.5, 10.0]
    return [
        (stretch(direction(layout, "random", 0), fraction * C, torch.float32), C, K)
        for layout in LAYOUTS[2:]
        for fraction in fractions
        for C in (1e-3, 1.0, 1e3)
        for K in (1, 2, 21)
    ]


def test_the_check_accepts_the_mechanism_on_the_grid() -> None:
    assert all(stays_within_budget(*sample) for sample in grid())


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param({"encode": slack_outside_too}, id="slack above C"),
        pytest.param({"encode": wide_slots}, id="slots sqrt(2) too wide"),
        pytest.param({"encode": rounded_up_slots}, id="partial slots rounded up"),
        pytest.param({"norms_of": norms_of_the_first_tensor}, id="norm of one tensor only"),
    ],
)
def test_the_check_rejects_a_planted_fault_on_the_grid(fault: dict[str, Any]) -> None:
    assert not all(stays_within_budget(*sample, **fault) for sample in grid())


@pytest.mark.parametrize("num_slots", [1, 4, 16, 256])
@pytest.mark.parametrize("clip_norm", [2.0**-100, 1.0, 2.0**100])
def test_a_zero_gradient_fills_the_budget_exactly(clip_norm: float, num_slots: int) -> None:
    assert joint_norm([torch.zeros(1, 3)], clip_norm, num_slots) == clip_norm


@pytest.mark.parametrize("num_slots", [2, 3, 21, 1000])
def test_a_zero_gradient_fills_the_budget_to_rounding(num_slots: int) -> None:
    eps = torch.finfo(torch.float32).eps  # of the slot width
    assert joint_norm([torch.zeros(1, 3)], 1.0, num_slots) == pytest.approx(1.0, rel=eps)


@pytest.mark.parametrize("num_slots", [1, 21])
@pytest.mark.parametrize("clip_norm", [0.1, 1.0, 50.0])
def test_a_gradient_at_the_threshold_fills_the_budget_but_for_the_offset(
    clip_norm: float, num_slots: int
) -> None:
    grads = [torch.tensor([[clip_norm]], dtype=torch.float64)]
    # Opacus divides by C + 1e-6; three more roundings.
    expected = clip_norm * clip_norm / (clip_norm + 1e-6)
    eps = torch.finfo(torch.float64).eps
    assert joint_norm(grads, clip_norm, num_slots) == pytest.approx(expected, rel=3 * eps)


@given(st.floats(0.0, 1.0), st.floats(min_value=0.1, max_value=50.0), st.integers(1, 1000))
def test_the_joint_norm_obeys_lemma_3_2(fraction: float, C: float, K: int) -> None:
    m = fraction * C
    slack = oracle.slack_norm(m, C, K)
    b = math.sqrt(K) * (C - m) % (C / math.sqrt(K))
    lemma = C * C - m * (C - m) - b * (C / math.sqrt(K) - b)
    row = encode_slack(torch.tensor([m], dtype=torch.float64), clip_norm=C, num_slots=K)
    # u is off by 2 K eps slots at most, a slot's square by twice that, lambda^2 being C^2 / K.
    tolerance = 8 * K * np.finfo(float).eps
    assert m * m + row.square().sum().item() == pytest.approx(m * m + slack**2, rel=tolerance)
    assert m * m + slack**2 == pytest.approx(lemma, rel=tolerance)


@given(st.integers(1, 10**7), st.integers(1, 1000), dtypes)
def test_rounding_bound_is_the_documented_formula(
    entries: int, tensors: int, dtype: torch.dtype
) -> None:
    expected = ((entries + tensors) / 4 + 3.5) * torch.finfo(dtype).eps
    assert rounding_bound(entries, tensors, dtype=dtype) == expected


# ---- neighbouring batches ---------------------------------------------------------------------


def release(grads: list[torch.Tensor], C: float, K: int) -> torch.Tensor:
    """Return what the real optimizer releases without noise: (gradient sum, slack sum)."""
    optimizer = handmade.make_optimizer(
        *[grad.shape[1:] for grad in grads],
        max_grad_norm=C,
        num_slots=K,
        dtype=torch.promote_types(grads[0].dtype, torch.float32),
    )
    with warnings.catch_warnings():  # a norm above 1e19 overflows in float32
        warnings.filterwarnings("ignore", "A per-sample gradient was not finite")
        handmade.take_step(optimizer, grads)
    gradient = handmade.released_gradient(optimizer)
    return torch.cat([gradient, handmade.released_slack(optimizer)])


def release_in_bfloat16(grads: list[torch.Tensor], C: float, K: int) -> torch.Tensor:
    """Sum clipped gradients in bfloat16, a fault that one sample's joint norm does not show."""
    factors = clip_factors(per_sample_norms(grads), clip_norm=C)
    sums = [torch.zeros_like(grad[0], dtype=torch.bfloat16) for grad in grads]
    for i, factor in enumerate(factors):
        sums = [s + (factor * grad[i]).bfloat16() for s, grad in zip(sums, grads, strict=True)]
    gradient = torch.cat([s.flatten().double() for s in sums])
    return torch.cat([gradient, release(grads, C, K)[len(gradient) :]])


def moves_within_sensitivity(
    grads: list[torch.Tensor],
    C: float,
    K: int,
    *,
    released: Callable[..., torch.Tensor] = release,
) -> bool:
    """Say whether removing the last sample moves the release by C at most, up to rounding."""
    moved = released(grads, C, K) - released([grad[:-1] for grad in grads], C, K)
    eps = torch.finfo(torch.promote_types(grads[0].dtype, torch.float32)).eps
    return math.hypot(*moved.tolist()) <= C * (1 + bound_of(grads)) + len(grads[0]) ** 2 * eps * C


@given(st.data())
def test_one_sample_more_moves_the_release_by_c_at_most(data: st.DataObject) -> None:
    grads, C, K = data.draw(samples(min_exponent=-3.0, max_exponent=3.0))
    others = data.draw(st.integers(0, 12))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    scale = data.draw(st.sampled_from([0.1, 0.5, 1.0, 10.0])) * C
    scale /= math.sqrt(sum(grad.numel() for grad in grads))
    batch = [
        torch.cat([scale * torch.randn(others, *g.shape[1:], generator=generator).to(g.dtype), g])
        for g in grads
    ]
    assert moves_within_sensitivity(batch, C, K)


def test_the_sensitivity_check_rejects_sums_in_bfloat16() -> None:
    generator = torch.Generator().manual_seed(0)
    # A common direction makes the sum large, so that its last bits are worth several C.
    grads = [0.3 + 0.05 * torch.randn(512, 64, generator=generator)]
    assert moves_within_sensitivity(grads, 1.0, 8)
    assert not moves_within_sensitivity(grads, 1.0, 8, released=release_in_bfloat16)


# ---- the recommended number of slots ----------------------------------------------------------


@pytest.mark.parametrize(
    ("batch_size", "expected"), [(128, 8), (256, 13), (512, 21), (1024, 34), (2048, 54)]
)
def test_recommended_num_slots_at_the_batch_sizes_of_the_paper(
    batch_size: int, expected: int
) -> None:
    assert recommended_num_slots(batch_size, 1.0) == expected
    assert oracle.largest_num_slots(batch_size, 1.0) == expected


@given(st.integers(1, 5_000), st.floats(min_value=0.3, max_value=20.0))
def test_recommended_num_slots_is_the_largest_that_satisfies_the_rule(
    batch_size: int, sigma: float
) -> None:
    exact = (batch_size / (2 * 2.576 * sigma)) ** (2 / 3)
    assume(abs(exact - round(exact)) > 1e-9)  # rounding decides there
    assert recommended_num_slots(batch_size, sigma) == oracle.largest_num_slots(batch_size, sigma)


@given(st.floats(min_value=1.0, max_value=1e300))
def test_without_noise_the_recommendation_is_that_of_sigma_1(batch_size: float) -> None:
    assert recommended_num_slots(batch_size, 0.0) == recommended_num_slots(batch_size, 1.0)


@given(
    st.tuples(*[st.floats(min_value=1.0, max_value=1e300)] * 2).map(sorted),
    st.tuples(*[st.floats(min_value=1e-300, max_value=1e300)] * 2).map(sorted),
)
def test_recommended_num_slots_grows_with_the_batch_and_shrinks_with_the_noise(
    sizes: list[float], sigmas: list[float]
) -> None:
    for sigma in sigmas:
        small, large = [recommended_num_slots(size, sigma) for size in sizes]
        assert 1 <= small <= large <= 100_000
    for size in sizes:
        quiet, loud = [recommended_num_slots(size, sigma) for sigma in sigmas]
        assert quiet >= loud


def test_recommended_num_slots_is_at_least_one_and_capped() -> None:
    assert recommended_num_slots(1, 1e300) == 1
    assert recommended_num_slots(1e300, 1e-300) == 100_000
    assert type(recommended_num_slots(np.float64(512), np.float32(1.0))) is int


@pytest.mark.parametrize(
    ("batch_size", "sigma", "error", "match"),
    [
        (0, 1.0, ValueError, "expected_batch_size must be at least 1, got 0"),
        (math.nan, 1.0, ValueError, "expected_batch_size must be finite, got nan"),
        (math.inf, 1.0, ValueError, "expected_batch_size must be finite, got inf"),
        (None, 1.0, TypeError, "expected_batch_size must be a number, got None"),
        ("64", 1.0, TypeError, "expected_batch_size must be a real number, got '64'"),
        (64, -1.0, ValueError, "noise_multiplier must not be negative, got -1"),
        (64, math.nan, ValueError, "noise_multiplier must be finite, got nan"),
        (64, None, TypeError, "noise_multiplier must be a real number, got None"),
        (64, True, TypeError, "noise_multiplier must be a real number, got True"),
    ],
)
def test_recommended_num_slots_refuses(
    batch_size: Any, sigma: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        recommended_num_slots(batch_size, sigma)
