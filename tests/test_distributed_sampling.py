"""Poisson sampling over two processes: equal numbers of steps, disjoint shares, own streams."""

from __future__ import annotations

import math
import sys
import types
import warnings
from collections.abc import Iterable
from typing import Any

import opacus
import pytest
import torch
from distributed_helpers import (
    FAMILIES,
    WORLD_SIZE,
    Family,
    Outcome,
    assert_identical,
    on_ranks,
    outcome,
    private_on_rank,
)
from helpers import seeded
from scipy import stats
from torch import distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from opacus_slaclip import PrivacyEngine

FALSE_ALARM = 1e-6


def numbered(num_samples: int) -> TensorDataset:
    """Samples whose label is their number."""
    return TensorDataset(torch.zeros(num_samples, 6), torch.arange(num_samples))


def sampler_of(
    num_samples: int, batch_size: int, *, generator: Any = None, **options: Any
) -> Iterable[Any]:
    """The loader of a private run that is never trained."""
    dataset = numbered(num_samples)
    run = private_on_rank(
        FAMILIES["dpddp-hooks"],
        data_loader=DataLoader(dataset, batch_size=batch_size, generator=generator),
        dtype=torch.float32,
        noise_seed=None,
        **options,
    )
    warnings.filterwarnings("ignore", "Some logical batches of the last pass had no step")
    return run.loader


def selected(loader: Iterable[Any], num_samples: int, epochs: int) -> torch.Tensor:
    """Which samples each batch holds, shape (steps, num_samples), bool."""
    rows = []
    for _ in range(epochs):
        for _, labels in loader:
            row = torch.zeros(num_samples, dtype=torch.bool)
            row[labels.long()] = True
            assert row.sum() == len(labels), "a sample came twice in one batch"
            rows.append(row)
    return torch.stack(rows)


# --- steps ---


def train_on_tiny_batches(family: Family) -> tuple[Outcome, list[int]]:
    run = private_on_rank(
        family, num_samples=12, batch_size=2, noise_multiplier=1.0, num_slots=4, noise_seed=None
    )
    sizes = []
    for _ in range(5):
        for batch in run.loader:
            run.step(batch)
            sizes.append(len(batch[1]))
    return outcome(run), sizes


@pytest.mark.parametrize("name", FAMILIES)
def test_ranks_take_equally_many_steps_with_empty_local_batches_among_them(name):
    ranks = on_ranks(train_on_tiny_batches, FAMILIES[name])

    (first, sizes), (second, other_sizes) = ranks
    assert_identical(first, second)
    assert first.history == [(1.0, 1 / 6, 30)]
    assert len(sizes) == len(other_sizes) == 30
    assert 0 in sizes
    assert 0 in other_sizes
    both_empty = [a + b == 0 for a, b in zip(sizes, other_sizes, strict=True)]
    assert any(both_empty), "no batch was empty on both ranks"


def count_steps() -> tuple[list[int], list[int]]:
    counts = []
    for engine, clipping in (
        (PrivacyEngine(), "slaclip"),
        (opacus.PrivacyEngine(), "flat"),
    ):
        torch.manual_seed(dist.get_rank())
        loader = sampler_of(12, 2, engine=engine, clipping=clipping)
        counts.append([sum(1 for _ in loader) for _ in range(10)])
    return counts[0], counts[1]


def test_opacus_would_drop_empty_local_batches_and_let_ranks_take_different_numbers_of_steps():
    (ours, stock), (our_other, stock_other) = on_ranks(count_steps)

    assert ours == our_other == [6] * 10
    assert stock != stock_other, "the sampler of Opacus is mended: drop ours"


# --- shares ---


def draw_all_in_one_step() -> list[int]:
    (batch,) = sampler_of(13, 13)
    return batch[1].tolist()


def test_the_shares_of_the_ranks_are_disjoint_and_cover_the_data():
    first, second = on_ranks(draw_all_in_one_step)

    assert (len(first), len(second)) == (7, 6)
    assert sorted(first + second) == list(range(13))
    assert first != sorted(first), "the data were dealt out without a shuffle"


# --- streams ---

NUM_SAMPLES, BATCH_SIZE, STEPS_AN_EPOCH, EPOCHS = 200, 20, 10, 20
RATE = BATCH_SIZE / NUM_SAMPLES


def draw(seed: int, *, with_generator: bool = False, **options: Any) -> torch.Tensor:
    torch.manual_seed(seed)
    generator = seeded(seed) if with_generator else None
    loader = sampler_of(NUM_SAMPLES, BATCH_SIZE, generator=generator, **options)
    return selected(loader, NUM_SAMPLES, EPOCHS)


def draw_patterns() -> dict[str, torch.Tensor]:
    (everything,) = sampler_of(NUM_SAMPLES, NUM_SAMPLES)
    stock: dict[str, Any] = {"engine": opacus.PrivacyEngine(), "clipping": "flat"}
    return {
        "share": everything[1],
        "seed 0": draw(0),
        "seed 0 again": draw(0),
        "seed 1": draw(1),
        "generator 5": draw(5, with_generator=True),
        "generator 5 again": draw(5, with_generator=True),
        "stock": draw(0, **stock),
    }


def is_independent(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two selections agree as often as independent ones, at a false-alarm rate of 1e-6."""
    expected = RATE**2 + (1 - RATE) ** 2
    return stats.binomtest(int((left == right).sum()), left.numel(), expected).pvalue > FALSE_ALARM


@pytest.fixture(scope="module")
def patterns() -> list[dict[str, torch.Tensor]]:
    """For each rank and stream: what was selected, by place in the rank's share."""
    ranks = on_ranks(draw_patterns)
    for rank in ranks:
        share = rank.pop("share")
        others = torch.ones(NUM_SAMPLES, dtype=torch.bool)
        others[share] = False
        for name, rows in rank.items():
            assert rows.shape == (STEPS_AN_EPOCH * EPOCHS, NUM_SAMPLES)
            assert not rows[:, others].any(), "a sample of another rank's share"
            rank[name] = rows[:, share]
    return ranks


def test_equal_seeds_give_the_ranks_independent_selections(patterns):
    first, second = patterns
    for stream in ("seed 0", "seed 1", "generator 5"):
        # n = 200 steps * 100 places, agreement .82: off by more than .013 is told.
        assert is_independent(first[stream], second[stream]), stream
    assert torch.equal(first["stock"], second["stock"]), "Opacus's sampler is mended: drop ours"
    assert not is_independent(first["stock"], second["stock"])


@pytest.mark.parametrize("stream", ["seed 0", "seed 1", "generator 5"])
def test_each_sample_is_selected_at_the_rate(patterns, stream):
    steps = STEPS_AN_EPOCH * EPOCHS
    for rank in patterns:
        counts = rank[stream].sum(0).double()
        # n = 20,000 draws: a rate off by more than .0105 is told.
        total = stats.binomtest(int(counts.sum()), steps * len(counts), RATE)
        assert total.pvalue > FALSE_ALARM
        # No sample and no step is favoured: sums of squares of n standardized counts.
        for sums, trials in ((counts, steps), (rank[stream].sum(1).double(), len(counts))):
            z = (sums - trials * RATE) / math.sqrt(trials * RATE * (1 - RATE))
            low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], len(sums))
            assert low <= float(z.square().sum()) <= high


def test_epochs_and_steps_differ_and_seeds_are_reproducible(patterns):
    for rank in patterns:
        rows = rank["seed 0"]
        assert torch.equal(rows, rank["seed 0 again"])
        assert torch.equal(rank["generator 5"], rank["generator 5 again"])
        assert is_independent(rows, rank["seed 1"])
        assert is_independent(rows[:-STEPS_AN_EPOCH], rows[STEPS_AN_EPOCH:])
        assert is_independent(rows[:-1], rows[1:])
        assert len(rows.unique(dim=0)) == len(rows)


# --- secure mode ---


def draw_securely() -> dict[str, Any]:
    rank = dist.get_rank()
    opened = []

    def create_random_device_generator(path: str) -> torch.Generator:
        opened.append(path)
        return seeded(100 + rank)  # a secure device gives every rank a stream of its own

    stand_in: Any = types.ModuleType("torchcsprng")
    stand_in.create_random_device_generator = create_random_device_generator
    sys.modules["torchcsprng"] = stand_in

    engine = PrivacyEngine(secure_mode=True)
    loader = sampler_of(NUM_SAMPLES, BATCH_SIZE, engine=engine)
    start, global_state = engine.secure_rng.get_state(), torch.get_rng_state()
    first = selected(loader, NUM_SAMPLES, 2)
    is_untouched = torch.equal(torch.get_rng_state(), global_state)
    torch.manual_seed(7)
    engine.secure_rng.set_state(start)
    states, again = [], []
    for _, labels in loader:
        states.append(engine.secure_rng.get_state())
        again.append(labels.sort().values)
    drawn = [row.nonzero().flatten() for row in first[:STEPS_AN_EPOCH]]

    engine = PrivacyEngine(secure_mode=True, accountant="rdp")
    run = private_on_rank(
        FAMILIES["dpddp-hooks"], engine=engine, noise_multiplier=1.0, noise_seed=None
    )
    for batch in run.loader:
        run.step(batch)
    return {
        "opened": opened,
        "first": first,
        "is untouched": is_untouched,
        "is reproduced": all(map(torch.equal, drawn, again)),
        "moves": len({tuple(state.tolist()) for state in states}),
        "trained": outcome(run),
        "generator": run.optimizer.generator is engine.secure_rng,
    }


def test_in_secure_mode_every_draw_is_from_the_secure_generator():
    ranks = on_ranks(draw_securely)

    assert_identical(ranks[0]["trained"], ranks[1]["trained"])
    assert not torch.equal(ranks[0]["first"], ranks[1]["first"])
    assert not (ranks[0]["first"].any(0) & ranks[1]["first"].any(0)).any(), "shares overlap"
    for rank in ranks:
        assert rank["opened"] == ["/dev/urandom"] * 2
        assert rank["is untouched"], "the global stream was drawn from"
        assert rank["is reproduced"]
        assert rank["moves"] == STEPS_AN_EPOCH, "a seed was drawn and stretched"
        assert rank["generator"]
        assert rank["trained"].num_releases == 3
    assert len(ranks) == WORLD_SIZE
