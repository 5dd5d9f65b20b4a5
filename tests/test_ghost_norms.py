"""Ghost norms are never below the gradient that is summed, and hardly above it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import opacus
import pytest
import torch
from cases import BATCH_SIZE, EPS, Case, Training, fixed, make_private
from helpers import NUM_CLASSES, TASKS, Batch, samples, seeded
from hypothesis import given
from hypothesis import strategies as st
from opacus.grad_sample.embedding_norm_sample import compute_embedding_norm_sample
from opacus.grad_sample.linear import compute_linear_norm_sample
from opacus.layers import DPMultiheadAttention
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_slaclip import FixedController, PrivacyEngine
from opacus_slaclip.ghost_norms import embedding_norm_sample, linear_norm_sample
from opacus_slaclip.slack import rounding_bound

# --- one layer: the exact norm, and that of what the second backward pass really sums ---


def exact_weight_norms(activations: torch.Tensor, backprops: torch.Tensor) -> torch.Tensor:
    """Return ``|sum_t b_t a_t^T|`` of each sample; in float64, gradients built in full."""
    a, b = activations.double().flatten(1, -2), backprops.double().flatten(1, -2)
    gradients = (b.unsqueeze(-1) * a.unsqueeze(-2)).sum(1)
    return gradients.flatten(1).norm(dim=1)


def exact_bias_norms(backprops: torch.Tensor) -> torch.Tensor:
    return backprops.double().flatten(1, -2).sum(1).norm(dim=1)


def term_sums(backprops: torch.Tensor, activations: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``S``: the summed length of the terms of each sample's gradient."""
    lengths = backprops.double().flatten(1, -2).norm(dim=-1)
    if activations is not None:
        lengths = lengths * activations.double().flatten(1, -2).norm(dim=-1)
    return lengths.sum(1)


def summed_norms(
    layer: nn.Module, parameter: nn.Parameter, inputs: torch.Tensor, backprops: torch.Tensor
) -> torch.Tensor:
    """Backpropagate one sample at a time through the layer, as the second pass does."""
    norms = []
    for x, b in zip(inputs, backprops, strict=True):
        layer.zero_grad()
        layer(x.unsqueeze(0)).backward(b.unsqueeze(0))
        norms.append(parameter.grad.double().norm())
    return torch.stack(norms) if norms else torch.zeros(0, dtype=torch.float64)


def assert_bounds(
    norms: torch.Tensor, exact: torch.Tensor, summed: torch.Tensor, excess: torch.Tensor
) -> None:
    """Check norm >= both roads, and norm <= exact norm + excess."""
    norms = norms.double()
    assert norms.shape == exact.shape
    assert (norms >= exact).all()
    assert (norms >= summed).all()
    assert (norms <= exact + excess).all()


def assert_linear_bounds(
    layer: nn.Linear, activations: torch.Tensor, backprops: torch.Tensor
) -> None:
    num_tokens = math.prod(backprops.shape[1:-1])
    rounding = num_tokens * torch.finfo(backprops.dtype).eps
    norms = linear_norm_sample(layer, [activations], backprops)

    assert set(norms) == {p for p in layer.parameters() if p.requires_grad}
    if layer.weight in norms:
        assert_bounds(
            norms[layer.weight],
            exact_weight_norms(activations, backprops),
            summed_norms(layer, layer.weight, activations, backprops),
            2 * rounding * term_sums(backprops, activations),
        )
    if layer.bias is not None and layer.bias in norms:
        assert_bounds(
            norms[layer.bias],
            exact_bias_norms(backprops),
            summed_norms(layer, layer.bias, activations, backprops),
            2 * rounding * term_sums(backprops),
        )


def cancelling(
    seed: int, *, size: int, d_in: int, d_out: int, dtype: torch.dtype, difference: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two nearly equal tokens, 1000 long in each entry, with opposite gradients."""
    generator = seeded(seed)
    token = torch.randn(size, 1, d_in, generator=generator, dtype=dtype) * 1000
    nearly = token + torch.randn(size, 1, d_in, generator=generator, dtype=dtype) * difference
    backprops = torch.randn(size, 1, d_out, generator=generator, dtype=dtype)
    return torch.cat([token, nearly], 1), torch.cat([backprops, -backprops], 1)


def test_the_norm_of_two_nearly_equal_tokens_is_right_where_that_of_opacus_is_not():
    layer = nn.Linear(32, 8)  # of 256 entries, more than the Gram matrices of 2 tokens

    a, b = cancelling(0, size=200, d_in=32, d_out=8, dtype=torch.float32, difference=0.1)
    theirs = compute_linear_norm_sample(layer, [a], b)[layer.weight]

    far_below = (theirs < exact_weight_norms(a, b) / 3).double().mean()
    assert far_below > 0.25, "the input does not show the fault any more"
    assert_linear_bounds(layer, a, b)


@pytest.mark.parametrize("difference", [1e-4, 1e-6, 1e-8])
def test_the_norm_of_two_nearly_equal_tokens_is_right_in_float64_too(difference):
    layer = nn.Linear(32, 8).double()

    a, b = cancelling(0, size=50, d_in=32, d_out=8, dtype=torch.float64, difference=difference)

    assert_linear_bounds(layer, a, b)


# Tokens, inputs and outputs: built, where that is smaller than two T x T matrices, or not.
SHAPES = {
    "one-token": (1, 5, 3),
    "few-tokens": (2, 32, 8),
    "some-tokens": (8, 20, 16),
    "many-tokens": (32, 6, 4),
    "very-many-tokens": (300, 3, 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_norm_of_a_sequence_bounds_what_is_summed(shape, scale, dtype):
    num_tokens, d_in, d_out = shape
    layer = nn.Linear(d_in, d_out).to(dtype)
    generator = seeded(0)
    a = torch.randn(20, num_tokens, d_in, generator=generator).to(dtype) * scale
    b = torch.randn(20, num_tokens, d_out, generator=generator).to(dtype)

    assert_linear_bounds(layer, a, b)


@pytest.mark.parametrize("num_tokens", [64, 256])
def test_the_norm_of_a_large_layer_with_equal_entries_bounds_what_is_summed(num_tokens):
    """A float32 sum of 260,000 equal squares loses more than the bound adds."""
    layer = nn.Linear(2 * num_tokens, 2 * num_tokens, bias=False)
    a = torch.full((1, num_tokens, 2 * num_tokens), 0.37)
    b = torch.full((1, num_tokens, 2 * num_tokens), 0.11)
    exact = num_tokens * a[0, 0].double().norm() * b[0, 0].double().norm()

    norm = linear_norm_sample(layer, [a], b)[layer.weight].double()

    # One token's term is as long as any other's: S = n.
    assert exact <= norm.item() <= exact * (1 + 2 * num_tokens * EPS)
    assert norm >= summed_norms(layer, layer.weight, a, b)


@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(0, 3),
    num_tokens=st.sampled_from([1, 2, 2, 2, 3, 4, 6, 9]),
    d_in=st.integers(1, 12),
    d_out=st.integers(1, 12),
    log_scale=st.integers(-6, 6),
    log_difference=st.integers(-12, 1),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_every_norm_of_every_sequence_bounds_what_is_summed(
    seed, size, num_tokens, d_in, d_out, log_scale, log_difference, dtype
):
    generator = seeded(seed)
    scale = 10.0**log_scale
    layer = nn.Linear(d_in, d_out).to(dtype)
    # Tokens that differ little, whose gradients come in opposite pairs: much cancels.
    a = torch.randn(size, 1, d_in, generator=generator, dtype=dtype).expand(-1, num_tokens, -1)
    noise = torch.randn(size, num_tokens, d_in, generator=generator, dtype=dtype)
    a = scale * (a + 10.0**log_difference * noise)
    b = torch.randn(size, 1, d_out, generator=generator, dtype=dtype)
    signs = torch.tensor([1.0, -1.0], dtype=dtype).repeat(num_tokens)[:num_tokens]
    b = b * signs.view(1, -1, 1)

    assert_linear_bounds(layer, a, b)


@pytest.mark.parametrize("tokens", [(2, 3), (8, 9), (1, 1)])
def test_the_norm_over_two_token_dimensions_bounds_what_is_summed(tokens):
    layer = nn.Linear(6, 5)
    generator = seeded(1)
    a = torch.randn(7, *tokens, 6, generator=generator)
    b = torch.randn(7, *tokens, 5, generator=generator)

    assert_linear_bounds(layer, a, b)
    flat = linear_norm_sample(layer, [a.flatten(1, 2)], b.flatten(1, 2))
    for parameter, norms in linear_norm_sample(layer, [a], b).items():
        assert torch.equal(norms, flat[parameter])


@pytest.mark.parametrize(
    "make_layer",
    [
        lambda: nn.Linear(6, 5, bias=False),
        lambda: freeze(nn.Linear(6, 5), "weight"),
        lambda: freeze(nn.Linear(6, 5), "bias"),
    ],
    ids=["no-bias", "frozen-weight", "frozen-bias"],
)
def test_only_trainable_parameters_have_a_norm(make_layer):
    layer = make_layer()
    generator = seeded(2)

    a = torch.randn(7, 3, 6, generator=generator)
    b = torch.randn(7, 3, 5, generator=generator)

    assert len(linear_norm_sample(layer, [a], b)) == 1
    assert_linear_bounds(layer, a, b)


def freeze(layer: nn.Module, name: str) -> nn.Module:
    getattr(layer, name).requires_grad_(False)
    return layer


@pytest.mark.parametrize("shape", [(0,), (0, 2), (0, 40), (0, 2, 3)])
def test_an_empty_batch_has_empty_norms(shape):
    layer = nn.Linear(6, 5)

    norms = linear_norm_sample(layer, [torch.zeros(*shape, 6)], torch.zeros(*shape, 5))

    assert [n.shape for n in norms.values()] == [(0,), (0,)]
    assert set(norms) == {layer.weight, layer.bias}


@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(0, 20),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_without_tokens_the_norms_are_those_of_opacus_bit_for_bit(seed, size, dtype):
    layer = nn.Linear(6, 5).to(dtype)
    generator = seeded(seed)
    a = torch.randn(size, 6, generator=generator, dtype=dtype)
    b = torch.randn(size, 5, generator=generator, dtype=dtype)

    ours = linear_norm_sample(layer, [a], b)
    theirs = compute_linear_norm_sample(layer, [a], b)

    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[p], theirs[p]) for p in theirs)


def test_a_norm_of_two_factors_of_very_different_size_does_not_vanish():
    """Opacus squares each factor by itself: 2e-23 squared is 0 in float32."""
    layer = nn.Linear(4, 3, bias=False)
    a, b = torch.full((2, 4), 1e18), torch.full((2, 3), 2e-23)
    exact = exact_weight_norms(a.unsqueeze(1), b.unsqueeze(1))

    ours = linear_norm_sample(layer, [a], b)[layer.weight]

    assert (compute_linear_norm_sample(layer, [a], b)[layer.weight] == 0).all()
    assert ((ours.double() - exact).abs() <= 8 * EPS * exact).all()


def test_a_sequence_of_zeros_has_norm_zero():
    layer = nn.Linear(6, 5)

    norms = linear_norm_sample(layer, [torch.zeros(3, 2, 6)], torch.zeros(3, 2, 5))

    assert all(torch.equal(n, torch.zeros(3)) for n in norms.values())


@pytest.mark.parametrize("num_tokens", [2, 40])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_entry_spoils_the_norm_of_its_sample_alone(bad, num_tokens):
    layer = nn.Linear(6, 5)
    a, b = torch.ones(3, num_tokens, 6), torch.ones(3, num_tokens, 5)
    a[1, 0, 2] = bad

    norms = linear_norm_sample(layer, [a], b)[layer.weight]

    assert norms.isfinite().tolist() == [True, False, True]


# --- embeddings ---


def exact_embedding_norms(
    layer: nn.Embedding, tokens: torch.Tensor, backprops: torch.Tensor
) -> torch.Tensor:
    norms = []
    for indices, b in zip(tokens.flatten(1), backprops.double().flatten(1, -2), strict=True):
        gradient = torch.zeros(layer.weight.shape, dtype=torch.float64)
        for index, row in zip(indices.tolist(), b, strict=True):
            if index != layer.padding_idx:
                gradient[index] += row
        norms.append(gradient.norm())
    return torch.stack(norms)


@given(
    seed=st.integers(0, 2**32 - 1),
    num_tokens=st.integers(1, 12),
    num_embeddings=st.integers(1, 5),
    log_scale=st.integers(-6, 6),
    pairs_cancel=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_every_norm_of_an_embedding_bounds_what_is_summed(
    seed, num_tokens, num_embeddings, log_scale, pairs_cancel, dtype
):
    generator = seeded(seed)
    layer = nn.Embedding(num_embeddings, 4, dtype=dtype)
    tokens = torch.randint(0, num_embeddings, (3, num_tokens), generator=generator)
    b = torch.randn(3, num_tokens, 4, generator=generator, dtype=dtype) * 10.0**log_scale
    if pairs_cancel:
        b[:, 1::2] = -b[:, : 2 * (num_tokens // 2) : 2] * (1 + 1e-4)

    norms = embedding_norm_sample(layer, [tokens], b)[layer.weight]

    assert_bounds(
        norms,
        exact_embedding_norms(layer, tokens, b),
        summed_norms(layer, layer.weight, tokens, b),
        2 * num_tokens * torch.finfo(dtype).eps * term_sums(b),
    )


@pytest.mark.parametrize("shape", [(4, 6), (4, 2, 3), (4, 1)])
def test_a_padding_token_only_adds_to_the_norm_of_an_embedding(shape):
    layer = nn.Embedding(3, 5, padding_idx=0)
    generator = seeded(3)
    tokens = torch.randint(0, 3, shape, generator=generator)
    tokens[0] = 0
    b = torch.randn(*shape, 5, generator=generator)

    norms = embedding_norm_sample(layer, [tokens], b)[layer.weight].double()

    assert (norms >= exact_embedding_norms(layer, tokens, b)).all()
    assert (norms >= summed_norms(layer, layer.weight, tokens, b)).all()
    # As in Opacus, whose norm takes the padding's gradient for a part of it.
    theirs = compute_embedding_norm_sample(layer, [tokens], b)[layer.weight].double()
    num_tokens = math.prod(shape[1:])
    assert (norms <= theirs * (1 + EPS) + 2 * num_tokens * EPS * term_sums(b)).all()


# --- through the engine: what one sample adds to the release, gradient and slack together ---


class TinyTransformer(nn.Module):
    """Embedding, attention, normalization and a position-wise layer, averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.attention = DPMultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.wide = nn.Linear(8, 12)
        self.narrow = nn.Linear(12, 8)
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = self.norm(x + self.attention(x, x, x)[0])
        x = x + self.narrow(self.wide(x).tanh())
        return self.head(x.mean(1))


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(3, 4, 3, padding=1)
        self.second = nn.Conv1d(4, 4, 1)
        self.head = nn.Linear(4, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x.mT).tanh()).tanh().mean(-1))


class OnTokens(nn.Module):
    """Linear layers with a batch of sequences, and of grids of tokens, as their input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 5, bias=False)
        self.head = nn.Linear(5, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x.unsqueeze(1)).tanh()  # (B, 1, T, 6)
        return self.head(self.second(hidden.squeeze(1)).tanh().mean(1))


class Opposite(nn.Module):
    """Takes one token of two from the other: their gradients are opposite."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.layer(x).unbind(1)
        return first - second


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "attention": (TASKS["attention"].model, "attention"),
    "embedding": (TASKS["embedding"].model, "embedding"),
    "lstm": (TASKS["lstm"].model, "lstm"),
    "transformer": (TinyTransformer, "embedding"),
    "conv1d": (lambda: Convolutional(), "conv1d"),
    "tokens": (OnTokens, "attention"),
}


def inputs(task: str, size: int) -> Batch:
    if task != "conv1d":
        return samples(task, size, seed=4)
    generator = seeded(4)
    scales = 6 * torch.rand(size, 1, 1, generator=generator)
    x = torch.randn(size, 5, 3, generator=generator) * scales
    return x, torch.randint(0, NUM_CLASSES, (size,), generator=generator)


def quiet(
    model: nn.Module, batch: Batch, clip_norm: float, *, engine: Any = None, **kwargs: Any
) -> Training:
    """Train at noise 0 and learning rate 0: what is released is what was summed."""
    clipping = {"clipping": "slaclip", "controller": FixedController(), "num_slots": 3}
    return make_private(
        Case("ghost", "mlp", **kwargs),
        model=model,
        engine=engine or PrivacyEngine(accountant="rdp"),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(*batch), batch_size=len(batch[1])),
        criterion=nn.CrossEntropyLoss(),
        noise_multiplier=0.0,
        max_grad_norm=clip_norm,
        noise_generator=seeded(0),
        **(clipping if engine is None else {"clipping": "flat"}),
    )


def released(run: Training, batch: Batch) -> torch.Tensor:
    """Return gradient sum and slack sum of a batch as one float64 vector."""
    run.step(batch)
    indicator = run.optimizer.slack_indicator
    slot_width = indicator.clip_norm / math.sqrt(indicator.num_slots)
    gradients = [p.summed_grad.double().flatten() for p in run.optimizer.params]
    return torch.cat([*gradients, indicator.values * indicator.expected_batch_size * slot_width])


def without(batch: Batch, i: int) -> Batch:
    keep = [j for j in range(len(batch[1])) if j != i]
    return batch[0][keep], batch[1][keep]


def bound(model: nn.Module) -> float:
    entries = sum(p.numel() for p in model.parameters())
    return rounding_bound(entries, len(list(model.parameters())))


@pytest.mark.parametrize("clip_norm", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("is_wrapped", [True, False], ids=["wrapped", "bare"])
@pytest.mark.parametrize("name", MODELS)
def test_one_sample_alone_releases_no_more_than_the_threshold(name, is_wrapped, clip_norm):
    build, task = MODELS[name]
    torch.manual_seed(0)
    model = build()
    x, y = batch = inputs(task, 12)
    run = quiet(model, batch, clip_norm, is_wrapped=is_wrapped)

    joint = torch.stack([released(run, (x[i : i + 1], y[i : i + 1])).norm() for i in range(12)])

    assert (joint <= clip_norm * (1 + bound(model))).all()
    assert (joint >= 0.8 * clip_norm).all()  # joint^2 >= 3/4 C^2: a sample is not scaled to naught


@pytest.mark.parametrize("clip_norm", [0.1, 1.0])
@pytest.mark.parametrize("name", MODELS)
def test_adding_a_sample_to_a_batch_moves_the_release_by_no_more_than_the_threshold(
    name, clip_norm
):
    build, task = MODELS[name]
    torch.manual_seed(0)
    model = build()
    batch = inputs(task, 9)
    run = quiet(model, batch, clip_norm)
    total = released(run, batch)

    moves = torch.stack([(total - released(run, without(batch, i))).norm() for i in range(9)])

    # Neighbouring float32 sums of B terms may differ by B^2 eps C more.
    assert (moves <= clip_norm * (1 + bound(model) + 9**2 * EPS)).all()


def test_a_sample_of_two_nearly_equal_tokens_exceeds_the_threshold_in_opacus_and_not_here():
    x, _ = cancelling(0, size=60, d_in=32, d_out=1, dtype=torch.float32, difference=0.1)
    y = torch.zeros(60, dtype=torch.long)
    excess: dict[str, list[float]] = {"ours": [], "theirs": []}

    for name, engine in (("ours", None), ("theirs", opacus.PrivacyEngine(accountant="rdp"))):
        torch.manual_seed(0)
        run = quiet(Opposite(), (x, y), 0.1, engine=engine)
        for i in range(60):
            run.step((x[i : i + 1], y[i : i + 1]))
            excess[name].append(run.summed_norm() / 0.1)

    assert sum(e > 3 for e in excess["theirs"]) > 10, "the input does not show the fault any more"
    assert max(excess["ours"]) <= 1 + bound(Opposite())
    # Not scaled to naught either: S / n is about 1e4, and T eps S / n about 2e-3.
    assert min(excess["ours"]) > 0.9


@pytest.mark.parametrize("scale", [1e3, 1e5])
def test_a_convolution_exceeds_the_threshold_by_no_more_than_its_stated_rounding(scale):
    """Its norm is that of a gradient built in float32, exact to T (eps / 2) S."""

    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv1d(32, NUM_CLASSES, 1, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = self.layer(x.mT).unbind(-1)
            return first - second

    x, _ = cancelling(1, size=60, d_in=32, d_out=1, dtype=torch.float32, difference=1.0)
    x = x * (scale / 1000)
    y = torch.zeros(60, dtype=torch.long)
    torch.manual_seed(0)
    model = Conv()
    with torch.no_grad():
        model.layer.weight /= scale  # logits of order 1
    run = quiet(model, (x, y), 0.1)

    for i in range(60):
        with torch.no_grad():
            logits = model(x[i : i + 1])
        b = (logits.softmax(1) - nn.functional.one_hot(y[i : i + 1], NUM_CLASSES)).double()
        difference = (x[i, 0] - x[i, 1]).double().norm()
        terms = b.norm() * x[i].double().norm(dim=-1).sum()
        run.step((x[i : i + 1], y[i : i + 1]))
        relative = 2 * EPS * terms / (b.norm() * difference)  # T eps S / n
        assert run.summed_norm() <= 0.1 * (1 + bound(model) + relative)


def test_the_engine_of_these_tests_uses_the_norms_tested_here():
    run = fixed(Case("ghost", "attention", is_bounded=True), noise_multiplier=0.0)

    samplers = run.handle.NORM_SAMPLERS

    assert samplers[nn.Linear] is linear_norm_sample
    assert samplers[nn.Embedding] is embedding_norm_sample
    assert run.optimizer.expected_batch_size == BATCH_SIZE
