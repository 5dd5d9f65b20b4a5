"""Two processes train as one does: one sum, one noise draw, one threshold."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from distributed_helpers import (
    FAMILIES,
    OTHER_MODES,
    WORLD_SIZE,
    Family,
    Outcome,
    RankRun,
    assert_close,
    assert_identical,
    on_rank,
    on_ranks,
    outcome,
    private_on_rank,
    share,
)
from helpers import TASKS, Batch, batches, samples, seeded
from opacus.utils.batch_memory_manager import BatchMemoryManager
from scipy import stats
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from opacus_slaclip import SlackIndicator, recommended_num_slots

EPS = torch.finfo(torch.float64).eps
# Sums of a batch added in another order, and what a few steps of training make of that.
ROUNDING = 64 * EPS
FALSE_ALARM = 1e-6

every_family = pytest.mark.parametrize("name", FAMILIES)
every_mode = pytest.mark.parametrize("name", [*FAMILIES, *OTHER_MODES])
ghost_families = pytest.mark.parametrize("name", [n for n in FAMILIES if "ghost" in n])
hooks_families = pytest.mark.parametrize("name", [n for n in FAMILIES if "hooks" in n])
synchronized_families = pytest.mark.parametrize(
    "name", [n for n in FAMILIES if not n.startswith("dpddp")]
)
free_families = pytest.mark.parametrize("name", [n for n in FAMILIES if n.startswith("dpddp")])


def family_of(name: str) -> Family:
    return (FAMILIES | OTHER_MODES)[name]


def train(run: RankRun, data: Iterable[Batch]) -> RankRun:
    for batch in data:
        run.step(batch)
    return run


# --- two processes are one ---

VARIANTS: dict[str, dict[str, Any]] = {
    "slaclip": {},
    "slaclip-q": {"clipping": "slaclip-q", "torch_optimizer": "adam", "num_slots": 6},
    "sum": {"loss_reduction": "sum", "torch_optimizer": "adam"},
    "q, sum": {"loss_reduction": "sum", "clipping": "slaclip-q", "num_slots": 6},
    "noise": {"noise_multiplier": 0.3, "num_slots": 6},
    "rescaled": {"rescale_to_unit_norm": True, "num_slots": 6},
    "float32": {"dtype": torch.float32, "num_slots": 6},
    "not wrapped": {"wrap_model": False, "num_slots": 6},
    "frozen": {"task": "frozen", "num_slots": 6},
    "layernorm": {"task": "layernorm", "num_slots": 6},
    "cnn": {"task": "cnn", "num_slots": 6},
    "embedding": {"task": "embedding", "num_slots": 6},
}


def variants_of(family: Family) -> dict[str, dict[str, Any]]:
    if family in OTHER_MODES.values():
        return {name: VARIANTS[name] for name in ("slaclip", "q, sum")}
    return {
        name: options
        for name, options in VARIANTS.items()
        if options.get("loss_reduction", "mean") in family.reductions
    }


def train_variants(family: Family, is_one: bool) -> dict[str, Outcome]:
    outcomes = {}
    for name, options in variants_of(family).items():
        where: Any = {"grad_sample_mode": family.one_process_mode} if is_one else {}
        run = private_on_rank(
            None if is_one else family, poisson_sampling=False, **where, **options
        )
        for _ in range(2):
            train(run, run.loader)
        outcomes[name] = outcome(run)
    return outcomes


@every_mode
def test_two_processes_equal_one_on_the_union_of_their_samples(name):
    family = family_of(name)
    ranks = on_ranks(train_variants, family, False)
    one = train_variants(family, True)

    for variant in variants_of(family):
        first, second = (rank[variant] for rank in ranks)
        assert_identical(first, second)
        scale = ROUNDING if variant != "float32" else 64 * torch.finfo(torch.float32).eps
        assert_close(first, one[variant], scale)
        assert len(set(first.thresholds)) == 6, f"the threshold did not move: {variant}"
        assert first.expected_batch_size == 16
        assert any(0 < s < 1 for s in torch.cat(first.indicators).tolist()), "nothing was measured"
    assert one["slaclip"].num_slots == recommended_num_slots(16, 0.0) != recommended_num_slots(8, 0)


def spoil_what_ddp_reduces(family: Family) -> list[Outcome]:
    def reduce_to_nonsense(state, bucket):
        future: Any = torch.futures.Future()
        future.set_result(torch.full_like(bucket.buffer(), 123.0))
        return future

    outcomes = []
    for is_spoiled in (False, True):
        module = DistributedDataParallel(TASKS["mlp"].model().double())
        with torch.no_grad():
            for p in module.parameters():
                p.fill_(0.1)
        if is_spoiled:
            module.register_comm_hook(None, reduce_to_nonsense)
        run = private_on_rank(Family("as it is", family.mode), module=module)
        for _ in range(2):
            run.optimizer.signal_skip_step(do_skip=True)
            run.step(share(samples("mlp", 6, dtype=torch.float64)))
            run.optimizer.signal_skip_step(do_skip=False)
            run.step(share(samples("mlp", 8, seed=1, dtype=torch.float64)))
        outcomes.append(outcome(run))
    return outcomes


@pytest.mark.parametrize("name", ["ddp-hooks", "ddp-ghost"])
def test_what_ddp_itself_reduces_in_backward_is_never_released(name):
    for expected, spoiled in on_ranks(spoil_what_ddp_reduces, family_of(name)):
        assert_identical(spoiled, expected)
        assert expected.num_releases == 2


# --- one threshold ---


class RandomController:
    """Picks a threshold by a stream of its own."""

    def __init__(self, seed: int) -> None:
        self.stream = random.Random(seed)

    def __call__(self, clip_norm: float, indicator: SlackIndicator) -> float:
        return self.stream.uniform(1.0, 3.0)


def train_apart(family: Family) -> list[tuple[Outcome, list[int]]]:
    """Train on ranks whose random states, controllers and local batch sizes differ."""
    results = []
    for controller, epochs in ((RandomController(dist.get_rank()), 34), (None, 5)):
        torch.manual_seed(dist.get_rank())
        run = private_on_rank(
            family,
            num_samples=129,  # one share is larger
            batch_size=64,
            noise_multiplier=1.0,
            dtype=torch.float32,
            controller=controller,
            noise_seed=None,
        )
        sizes = []
        for _ in range(epochs):
            for batch in run.loader:
                run.step(batch)
                sizes.append(len(batch[1]))
        results.append((outcome(run), sizes))
    return results


@every_family
def test_all_ranks_hold_one_threshold_whatever_differs_between_them(name):
    ranks = on_ranks(train_apart, family_of(name))

    for first, second in zip(*ranks, strict=True):
        assert_identical(first[0], second[0])
        assert first[1] != second[1], "the local batches had the same sizes"
        # 129 samples in batches of 64 are three steps an epoch.
        assert first[0].num_slots == recommended_num_slots(43, 1.0) != recommended_num_slots(21, 1)
        assert first[0].expected_batch_size == 43
        assert len(set(first[0].thresholds)) == len(first[0].thresholds)
    randomly = ranks[0][0][0]
    assert randomly.history == [(1.0, 1 / 3, 102)]
    of_rank_0 = random.Random(0)
    assert randomly.thresholds[0] == TASKS["mlp"].clip_norm
    assert randomly.thresholds[1:] == [of_rank_0.uniform(1.0, 3.0) for _ in range(101)]


# --- one noise draw ---


class ZeroLoss(nn.Module):
    """A loss whose gradient is zero, so that the noise can be read off the parameters."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses = output.flatten(1).sum(1) * 0.0
        return losses if self.reduction == "none" else getattr(losses, self.reduction)()


NOISE_SLOTS, NOISE_STEPS, NOISE_BATCH = 500, 2, 16


def read_noise(
    family: Family, reduction: str, is_alike: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Return the noise on gradient and slack over sigma C, a step each, and the random state."""
    torch.manual_seed(0 if is_alike else dist.get_rank())
    module = nn.Sequential(nn.Linear(6, 60), nn.Linear(60, 27)).double()
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    run = private_on_rank(
        family,
        module=module,
        criterion=ZeroLoss(reduction),
        loss_reduction=reduction,
        torch_optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
        num_samples=NOISE_BATCH,
        batch_size=NOISE_BATCH,
        noise_multiplier=0.7,
        num_slots=NOISE_SLOTS,
        poisson_sampling=False,
        noise_seed=None,
    )
    scale = NOISE_BATCH if reduction == "mean" else 1
    gradient, slack = [], []
    for _ in range(NOISE_STEPS):
        before, clip_norm = run.parameters, run.optimizer.max_grad_norm
        train(run, run.loader)
        moved = [b - a for b, a in zip(before, run.parameters, strict=True)]
        gradient.append(torch.cat([m.flatten() for m in moved]) * scale / (0.7 * clip_norm))
        # Every sample fills every slot, so that a sum is B + noise.
        noise = (run.optimizer.slack_indicator.values - 1.0) * NOISE_BATCH
        slack.append(noise / (0.7 * math.sqrt(NOISE_SLOTS)))
    return gradient, slack, torch.get_rng_state()


def has_unit_scale(noise: torch.Tensor) -> bool:
    """Whether the noise passes for standard normal in scale, at a false-alarm rate of 1e-6."""
    low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], len(noise))
    return bool(low <= float(noise.square().sum()) <= high)


def is_correlated(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two noises of n entries correlate: |r| sqrt(n) is standard normal if they do not."""
    r = torch.corrcoef(torch.stack([left, right]))[0, 1]
    return bool(r.abs() * math.sqrt(len(left)) > stats.norm.isf(FALSE_ALARM / 2))


@pytest.mark.parametrize("is_alike", [True, False], ids=["one seed", "seed of the rank"])
@pytest.mark.parametrize(
    ("name", "reduction"), [(n, r) for n, family in FAMILIES.items() for r in family.reductions]
)
def test_the_summed_release_has_the_noise_of_one_process(name, reduction, is_alike):
    ranks = on_ranks(read_noise, family_of(name), reduction, is_alike)

    (gradient, slack, state), (other_gradient, other_slack, other_state) = ranks
    assert all(map(torch.equal, gradient + slack, other_gradient + other_slack))
    # n = 2 * 2067 gradient entries and 2 * 500 slots: standard deviations 12 and 25 % off are told.
    for noise, size in ((torch.cat(gradient), 4134), (torch.cat(slack), 1000)):
        assert len(noise) == size
        assert has_unit_scale(noise)
        assert not has_unit_scale(noise * math.sqrt(2))
        assert not has_unit_scale(noise / math.sqrt(2))
        assert abs(noise.mean()) * math.sqrt(size) <= stats.norm.isf(FALSE_ALARM / 2)
    # In float64 a repetition is no chance: of 5134 numbers, two come this close once in 1000 runs.
    ordered = torch.cat(gradient + slack).abs().sort().values
    assert ordered.diff().min() > 1e-10, "some noise was used twice"
    for step in range(NOISE_STEPS):
        for piece in gradient[step].split(NOISE_SLOTS)[:-1]:
            assert not is_correlated(slack[step], piece)
    assert not is_correlated(gradient[0], gradient[1])
    if is_alike and family_of(name).wrapper == "fsdp":
        assert torch.equal(state, other_state), "the random streams of the ranks have parted"


# --- parameters in bfloat16 ---


class SumOfOutputs(nn.Module):
    """A loss whose per-sample gradient, for one linear layer, is the input."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.sum()


def cancelling_samples() -> torch.Tensor:
    """Four inputs, in bfloat16 without rounding: the shares of the ranks all but cancel."""
    first = torch.tensor([[130.0, 77.0, -90.0, 201.0, 5.0], [127.0, 60.0, -91.0, 176.0, 3.0]])
    second = torch.tensor([[-129.0, -76.0, 89.0, -202.0, -3.0], [-127.0, -62.0, 93.0, -174.0, 1.0]])
    return torch.stack([first[0], second[0], first[1], second[1]])


def train_in_bfloat16(family: Family) -> list[torch.Tensor]:
    released = []
    for noise_multiplier in (0.0, 1e-4):
        module = nn.Linear(5, 1, bias=False, dtype=torch.bfloat16)
        nn.init.zeros_(module.weight)
        run = private_on_rank(
            family,
            module=module,
            criterion=SumOfOutputs(),
            torch_optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
            dataset=TensorDataset(cancelling_samples().bfloat16(), torch.zeros(4)),
            batch_size=4,
            noise_multiplier=noise_multiplier,
            max_grad_norm=5000.0,
            max_clipbound=5000.0,
            poisson_sampling=False,
            loss_reduction="sum",
        )
        train(run, run.loader)
        released.append(-run.parameters[0].flatten())
    return released


@hooks_families
def test_bfloat16_parameters_get_a_sum_that_was_rounded_once(name):
    inputs = cancelling_samples()
    assert torch.equal(inputs, inputs.bfloat16().float())
    total = inputs.double().sum(0)
    rounded_early = sum(inputs[rank::WORLD_SIZE].sum(0).bfloat16() for rank in range(WORLD_SIZE))
    assert not torch.equal(rounded_early.double(), total), "these inputs would prove nothing"

    ranks = on_ranks(train_in_bfloat16, family_of(name))

    noise = torch.normal(0.0, 5000.0 * 1e-4, (1, 5), generator=seeded(3)).flatten()
    for quiet, noised in ranks:
        assert torch.equal(quiet.double(), total)
        assert torch.equal(noised, (total.float() + noise).bfloat16())


# --- a sample that is not finite ---


def spoil(batch: Batch, rank: int, value: float) -> Batch:
    """Put one bad sample into the share of one rank."""
    x, y = share(batch)
    if dist.get_rank() == rank:
        x = x.clone()
        x[1, 2] = value
    return x, y


def holds_sums(run: RankRun) -> bool:
    """Whether sums of a logical batch are pending."""
    kept = [state["summed_grad"] for state in getattr(run.optimizer, "grad_state", {}).values()]
    kept += [getattr(p, "summed_grad", None) for p in run.optimizer.params]
    return any(summed is not None for summed in kept)


def train_over_bad_batches(family: Family) -> dict[str, Any]:
    first, second = batches("mlp", [16, 16], dtype=torch.float64)
    options: dict[str, Any] = {"noise_multiplier": 0.3, "num_slots": 6}
    run, twin = (private_on_rank(family, **options) for _ in range(2))
    run.step(share(first))
    before, messages = outcome(run), []
    for rank, value, is_left in ((0, math.nan, False), (1, math.inf, False), (1, math.nan, True)):
        run.optimizer.signal_skip_step(do_skip=True)
        run.step(share(second))
        run.optimizer.signal_skip_step(do_skip=False)
        if is_left:  # workers may have announced batches that are yet to come
            run.optimizer.signal_skip_step(do_skip=True)
        try:
            run.step(spoil(second, rank, value))
        except FloatingPointError as error:
            messages.append(str(error))
        if is_left:
            run.optimizer.drop_logical_batch()
    after, is_clear = outcome(run), not holds_sums(run)
    run.step(share(second))
    train(twin, [share(first), share(second)])
    return {
        "messages": messages,
        "before": before,
        "after": after,
        "is clear": is_clear,
        "run": outcome(run),
        "twin": outcome(twin),
    }


@ghost_families
def test_a_bad_sample_on_one_rank_stops_a_ghost_step_on_all_of_them(name):
    for rank in on_ranks(train_over_bad_batches, family_of(name)):
        assert len(rank["messages"]) == 3
        assert all("norm was not finite" in message for message in rank["messages"])
        before, after = rank["before"], rank["after"]
        assert all(map(torch.equal, before.parameters, after.parameters))
        assert before.history == after.history == [(0.3, 1 / 3, 1)]
        assert before.max_grad_norm == after.max_grad_norm
        assert before.num_releases == after.num_releases == 1
        assert rank["is clear"]
        # Nothing of the bad batches is left, no noise was drawn for them, and training goes on.
        assert_identical(rank["run"], rank["twin"])
        assert rank["run"].num_releases == 2


def train_over_bad_samples(family: Family) -> tuple[Outcome, Outcome, list[str]]:
    first, second = batches("mlp", [16, 16], dtype=torch.float64)
    options: dict[str, Any] = {"noise_multiplier": 0.3, "num_slots": 6, "loss_reduction": "sum"}
    run, twin = (private_on_rank(family, **options) for _ in range(2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(run, [spoil(first, 1, math.nan), spoil(second, 1, math.inf), share(first)])
    for batch in (first, second):
        x, y = share(batch)
        is_kept = torch.arange(len(y)) != (1 if dist.get_rank() == 1 else -1)
        twin.step((x[is_kept], y[is_kept]))
    twin.step(share(first))
    texts = [str(w.message) for w in caught if "was not finite" in str(w.message)]
    return outcome(run), outcome(twin), texts


@hooks_families
def test_a_bad_sample_on_one_rank_counts_for_nothing_with_hooks(name):
    ranks = on_ranks(train_over_bad_samples, family_of(name))

    assert_identical(ranks[0][0], ranks[1][0])
    for run, without_it, _ in ranks:
        assert_close(run, without_it, ROUNDING)
        assert run.history == [(0.3, 1 / 3, 3)]
    assert [len(texts) for _, _, texts in ranks] == [0, 1]


# --- empty local batches ---


def batches_with_empty_ones(task: str) -> list[tuple[str, Batch]]:
    sizes = [16, 7, 9, 0, 12]
    places = ["both", "rank 0", "rank 1", "both", "both"]
    return list(zip(places, batches(task, sizes, dtype=torch.float64), strict=True))


def train_with_empty_batches(
    family: Family, is_one: bool, tasks: list[str]
) -> dict[tuple[str, float], Outcome]:
    outcomes = {}
    for task in tasks:
        for noise_multiplier in (0.0, 0.4):
            run = private_on_rank(
                None if is_one else family,
                task=task,
                noise_multiplier=noise_multiplier,
                num_slots=6,
                grad_sample_mode=family.one_process_mode if is_one else family.mode,
            )
            for place, batch in batches_with_empty_ones(task):
                if is_one:
                    run.step(batch)
                elif place == "both":
                    run.step(share(batch))
                else:
                    run.step(on_rank(int(place[-1]), batch))
            outcomes[task, noise_multiplier] = outcome(run)
    return outcomes


@pytest.mark.parametrize("name", [n for n in (*FAMILIES, *OTHER_MODES) if n != "dpddp-ew"])
def test_a_rank_without_samples_takes_part_in_every_step(name):
    family = family_of(name)
    tasks = ["linear"] if family.mode == "functorch" else ["mlp", "cnn", "layernorm"]
    first, second = on_ranks(train_with_empty_batches, family, False, tasks)
    one = train_with_empty_batches(family, True, tasks)

    for case, expected in one.items():
        assert_identical(first[case], second[case])
        assert_close(first[case], expected, ROUNDING)
        assert first[case].history == [(case[1], 1 / 3, 5)]
        assert first[case].num_releases == 5
    # The fourth batch is empty everywhere: no slack without noise, noise alone with it.
    quiet, noised = (first[tasks[0], sigma].indicators[3] for sigma in (0.0, 0.4))
    assert not quiet.any()
    assert noised.all()


# --- virtual batches ---


def pieces_of(run: RankRun, max_physical_batch_size: int, epochs: int) -> list[int]:
    """Train through Opacus's BatchMemoryManager; return the pieces of each logical batch."""
    counts, count = [], 0
    with BatchMemoryManager(
        data_loader=run.loader,
        max_physical_batch_size=max_physical_batch_size,
        optimizer=run.optimizer,
    ) as loader:
        for _ in range(epochs):
            for batch in loader:
                releases = run.optimizer.num_releases
                run.step(batch)
                count += 1
                if run.optimizer.num_releases > releases:
                    counts.append(count)
                    count = 0
    return counts


def train_whole_and_in_pieces(
    family: Family, poisson_sampling: bool
) -> tuple[Outcome, Outcome, list[int]]:
    outcomes, counts = [], []
    for in_pieces in (False, True):
        torch.manual_seed(0)
        run = private_on_rank(
            family, noise_multiplier=0.3, num_slots=6, poisson_sampling=poisson_sampling
        )
        if in_pieces:
            counts = pieces_of(run, 3, epochs=3)
        else:
            for _ in range(3):
                train(run, run.loader)
        outcomes.append(outcome(run))
    return outcomes[0], outcomes[1], counts


@free_families
def test_ranks_may_differ_in_their_physical_batches_under_dpddp(name):
    ranks = on_ranks(train_whole_and_in_pieces, family_of(name), True)

    assert_identical(ranks[0][1], ranks[1][1])
    assert ranks[0][2] != ranks[1][2], "the ranks had the same numbers of physical batches"
    for whole, pieces, _ in ranks:
        assert_close(pieces, whole, ROUNDING)
        assert pieces.history == [(0.3, 1 / 3, 9)]


@synchronized_families
def test_equal_numbers_of_physical_batches_release_what_the_whole_does(name):
    ranks = on_ranks(train_whole_and_in_pieces, family_of(name), False)

    assert_identical(ranks[0][1], ranks[1][1])
    for whole, pieces, counts in ranks:
        assert counts == [3] * 9
        assert_close(pieces, whole, ROUNDING)
        assert pieces.history == [(0.3, 1 / 3, 9)]


def train_out_of_step(family: Family) -> list[dict[str, Any]]:
    results = []
    for limits in ((3, 4), (8, 4)):  # 3 pieces against 2, 1 against 2
        options: dict[str, Any] = {"noise_multiplier": 0.3, "num_slots": 6}
        run, twin = (private_on_rank(family, poisson_sampling=False, **options) for _ in range(2))
        first, message = next(iter(run.loader)), "no error"
        for each in (run, twin):
            each.step(first)
        before = outcome(run)
        try:
            pieces_of(run, limits[dist.get_rank()], epochs=1)
        except RuntimeError as error:
            message = str(error)
        after, is_clear = outcome(run), not holds_sums(run)
        for each in (run, twin):
            train(each, each.loader)
        results.append(
            {
                "message": message,
                "before": before,
                "after": after,
                "is clear": is_clear,
                "run": outcome(run),
                "twin": outcome(twin),
            }
        )
    return results


@synchronized_families
def test_ranks_that_get_out_of_step_raise_instead_of_hanging(name):
    for rank in on_ranks(train_out_of_step, family_of(name)):
        for result in rank:
            before, after = result["before"], result["after"]
            assert "different numbers of physical batches" in result["message"]
            assert all(map(torch.equal, before.parameters, after.parameters))
            assert before.history == after.history == [(0.3, 1 / 3, 1)]
            assert before.max_grad_norm == after.max_grad_norm
            assert before.num_releases == after.num_releases == 1
            assert result["is clear"]
            # Nothing of the broken batch is left, and training goes on.
            assert_identical(result["run"], result["twin"])
            assert result["run"].history == [(0.3, 1 / 3, 4)]
