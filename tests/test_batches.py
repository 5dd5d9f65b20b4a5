"""What counts as one release: physical, empty and accumulated batches, and samples that are bad."""

from __future__ import annotations

import copy
import math
import re
import warnings
from typing import Any

import opacus
import oracle
import pytest
import torch
from helpers import (
    TASKS,
    Batch,
    Run,
    batches,
    per_sample_gradients,
    private,
    samples,
    seeded,
    vector,
)
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch.utils.data import TensorDataset

from opacus_slaclip import FixedController, PrivacyEngine

EPS = torch.finfo(torch.float32).eps
RATE = 0.2  # the default clipbound_learning_rate, eta
BOUNDS = {"c_min": 0.1, "c_max": 50.0}


def logical_batches(task: str = "mlp", *, epochs: int = 1, **options: Any) -> list[Batch]:
    """Draw what the loader of an equal run will, with Opacus's own engine."""
    engine = opacus.PrivacyEngine(accountant="rdp")
    loader = private(task, engine=engine, clipping="flat", **options).loader
    return [(x, y) for _ in range(epochs) for x, y in loader]


def train_in_pieces(run: Run, max_physical_batch_size: int, epochs: int = 1) -> list[int]:
    """Train through Opacus's BatchMemoryManager; return the sizes of the physical batches."""
    sizes = []
    with BatchMemoryManager(
        data_loader=run.loader,
        max_physical_batch_size=max_physical_batch_size,
        optimizer=run.optimizer,
    ) as loader:
        for _ in range(epochs):
            for batch in loader:
                run.step(batch)
                sizes.append(len(batch[1]))
    return sizes


def once_a_release(run: Run) -> list[float]:
    """Thresholds without the repetitions that physical batches make."""
    return list(dict.fromkeys(run.thresholds))


def norms_of(model: Any, batch: Batch) -> list[float]:
    return [
        math.hypot(*(entry for g in gradient for entry in g.flatten().tolist()))
        for gradient in per_sample_gradients(model, batch)
    ]


# --- an independent trajectory, in float64 ---


def oracle_run(
    task: str,
    data: list[Batch],
    *,
    clip_norm: float,
    num_slots: int,
    noise_multiplier: float,
    expected_batch_size: float,
) -> tuple[list[float], list[torch.Tensor], list[list[float]]]:
    """Follow private SGD with SlaClip by the equations, one sample at a time."""
    torch.manual_seed(0)
    model = TASKS[task].model().double()
    parameters = list(model.parameters())
    generator = seeded(3)  # the one of helpers.private
    thresholds, indicators = [], []

    def noise(*shape: int) -> torch.Tensor:
        # float32 numbers, as drawn in training: gradient first, slack after it, one stream.
        std = noise_multiplier * clip_norm
        if std == 0:
            return torch.zeros(shape, dtype=torch.float64)
        return torch.normal(0.0, std, shape, generator=generator).double()

    for x, y in data:
        gradients = per_sample_gradients(model, (x, y))
        norms = norms_of(model, (x, y))
        sums = [torch.zeros_like(p) for p in parameters]
        for gradient, norm in zip(gradients, norms, strict=True):
            for total, g in zip(sums, gradient, strict=True):
                total += g * min(1.0, clip_norm / (norm + 1e-6))
        with torch.no_grad():
            for p, total in zip(parameters, sums, strict=True):
                p -= 0.1 * (total + noise(*p.shape)) / expected_batch_size
        s_hat = oracle.indicator(
            norms, clip_norm, num_slots, expected_batch_size, noise(num_slots).tolist()
        )
        thresholds.append(clip_norm)
        indicators.append(s_hat)
        clip_norm = oracle.next_slaclip(clip_norm, s_hat, eta=RATE, **BOUNDS)
    return thresholds, [p.detach() for p in parameters], indicators


@pytest.mark.parametrize("noise_multiplier", [0.0, 0.3])
@pytest.mark.parametrize("max_physical_batch_size", [1, 3, 7, 64])
def test_pieces_of_a_logical_batch_release_what_the_whole_does(
    max_physical_batch_size, noise_multiplier
):
    options: dict[str, Any] = {"noise_multiplier": noise_multiplier, "num_slots": 6}
    whole, pieces = (private(**options) for _ in range(2))
    for batch in (data := logical_batches()):
        whole.step(batch)

    sizes = train_in_pieces(pieces, max_physical_batch_size)

    thresholds, parameters, indicators = oracle_run(
        "mlp",
        data,
        clip_norm=TASKS["mlp"].clip_norm,
        num_slots=6,
        noise_multiplier=noise_multiplier,
        expected_batch_size=16,
    )
    assert max(sizes) <= max_physical_batch_size
    assert sum(sizes) == sum(len(y) for _, y in data)
    assert len(set(thresholds)) == len(data) == pieces.optimizer.num_releases
    # Rounding: a norm of d = 83 entries and each of B = 16 additions are off by a few eps of their
    # size; what four steps of training make of it is smaller than the slack in this factor.
    tolerance = 32 * EPS
    for run in (whole, pieces):
        assert once_a_release(run) == pytest.approx(thresholds, rel=tolerance)
        assert run.optimizer.slack_indicator.values.tolist() == pytest.approx(
            indicators[-1], abs=tolerance * 6
        )
        for mine, theirs in zip(run.parameters, parameters, strict=True):
            assert (mine - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize("task", ["cnn", "embedding", "lstm"])
def test_other_models_follow_the_oracle_as_well(task):
    run, data = private(task), logical_batches(task)

    train_in_pieces(run, 5)

    thresholds, parameters, _ = oracle_run(
        task,
        data,
        clip_norm=TASKS[task].clip_norm,
        num_slots=run.optimizer.num_slots,
        noise_multiplier=0.3,
        expected_batch_size=16,
    )
    assert once_a_release(run) == pytest.approx(thresholds, rel=64 * EPS)
    for mine, theirs in zip(run.parameters, parameters, strict=True):
        assert (mine - theirs).abs().max() <= 64 * EPS * theirs.abs().max()


# --- the slack sum lives and dies with the gradient sum ---


def gradients(*norms: float) -> torch.Tensor:
    """Per-sample gradients, shape (b, 1), of these norms."""
    return torch.tensor(norms).unsqueeze(1)


def test_clearing_gradients_inside_a_logical_batch_keeps_both_sums():
    one = vector(num_slots=2, expected_batch_size=4)

    one.accumulate(gradients(0.0, 0.25))
    for _ in range(3):
        one.optimizer.zero_grad()
    one.accumulate(gradients(3.0))
    summed = one.release(gradients(0.75))

    # Slots of (0, 1/4, 3/4): full and full, full and half, half and empty.
    assert one.optimizer.slack_indicator.values.tolist() == [2.5 / 4, 1.5 / 4]
    assert summed.item() == pytest.approx(2.0, rel=4e-6)  # 3 is clipped to C / (1 + 1e-6 / 3)
    assert one.optimizer.num_releases == 1


def test_clearing_gradients_at_its_end_clears_both_sums():
    one = vector(num_slots=2, expected_batch_size=4, controller=FixedController())

    one.accumulate(gradients(0.0, 0.0))
    one.release(gradients(0.0))
    one.optimizer.zero_grad()
    assert one.parameter.summed_grad is None
    summed = one.release(gradients(0.5))

    assert summed.item() == 0.5
    assert one.optimizer.slack_indicator.values.tolist() == [0.25, 0.0]
    assert one.optimizer.num_releases == 2


@pytest.mark.parametrize("set_to_none", [False, True])
def test_either_way_to_clear_gradients_keeps_a_logical_batch(set_to_none):
    one = vector(num_slots=1, expected_batch_size=4)

    one.accumulate(gradients(0.0))
    one.optimizer.zero_grad(set_to_none=set_to_none)
    one.release(gradients(0.0))

    assert one.optimizer.slack_indicator.values.item() == 0.5


def test_clearing_gradients_between_backward_and_step_leaves_nothing_to_release():
    run = private()
    start = run.parameters
    run.backward(samples("mlp", 5))
    run.optimizer.zero_grad()

    with pytest.raises(ValueError, match="Per sample gradient is not initialized"):
        run.optimizer.step()

    assert all(map(torch.equal, run.parameters, start))
    assert run.engine.accountant.history == []
    run.step(samples("mlp", 5))
    assert run.optimizer.num_releases == 1


def test_a_step_without_a_backward_pass_since_the_last_is_refused():
    run = private()
    run.step(samples("mlp", 5))
    after, history = run.parameters, copy.deepcopy(run.engine.accountant.history)

    with pytest.raises(ValueError, match="Gradients haven't been cleared since the last"):
        run.optimizer.step()

    assert all(map(torch.equal, run.parameters, after))
    assert run.engine.accountant.history == history
    assert run.optimizer.num_releases == 1


def test_clearing_gradients_on_the_model_alone_is_refused_and_counts_nothing_twice():
    run, twin = private(noise_multiplier=0.0), private(noise_multiplier=0.0)
    first, second = batches("mlp", [5, 6])
    for one in (run, twin):
        one.step(first)
    after = run.parameters

    run.model.zero_grad()
    run.backward(second)
    with pytest.raises(ValueError, match=r"you must call optimizer.zero_grad\(\)"):
        run.optimizer.step()

    assert all(map(torch.equal, run.parameters, after))
    assert run.optimizer.num_releases == 1
    for one in (run, twin):
        one.step(second)
    assert all(map(torch.equal, run.parameters, twin.parameters))
    assert torch.equal(run.optimizer.slack_indicator.values, twin.optimizer.slack_indicator.values)


def test_clearing_only_the_model_after_a_release_is_refused_before_anything_is_added():
    """Not only at the end of the next logical batch, where Opacus would notice."""
    one = vector(num_slots=1, expected_batch_size=4)
    one.release(gradients(0.5))

    one.parameter.grad_sample = gradients(0.5)
    one.optimizer.signal_skip_step(do_skip=True)
    with pytest.raises(ValueError, match=r"you must call optimizer.zero_grad\(\)"):
        one.optimizer.step()

    assert one.optimizer.num_releases == 1


def test_a_step_that_fails_before_its_noise_leaves_nothing_once_cleared():
    one = vector(num_slots=1, expected_batch_size=4, noise_multiplier=0.5)
    one.optimizer.noise_multiplier = math.nan
    with pytest.raises(ValueError, match="noise_multiplier must be finite, got nan"):
        one.release(gradients(0.0, 0.0))
    assert one.optimizer.num_releases == 0
    one.optimizer.noise_multiplier = 0.0

    one.optimizer.zero_grad()
    one.optimizer.max_grad_norm = 2.0  # allowed between logical batches only
    summed = one.release(gradients(1.0))

    assert summed.item() == 1.0
    assert one.optimizer.slack_indicator.values.item() == 0.5 / 4


def test_a_logical_batch_whose_release_fails_is_not_part_of_the_next():
    """A sample may be in both: counted twice, it would move one release by up to 2 C."""
    one = vector(num_slots=1, expected_batch_size=4, noise_multiplier=0.5)
    one.accumulate(gradients(0.0, 0.0))
    one.optimizer.noise_multiplier = math.nan
    with pytest.raises(ValueError, match="noise_multiplier must be finite, got nan"):
        one.release(gradients(0.0))
    one.optimizer.noise_multiplier = 0.0

    summed = one.release(gradients(0.5))

    assert summed.item() == 0.5
    assert one.optimizer.slack_indicator.values.item() == 0.5 / 4


def test_a_failing_step_hook_does_not_move_the_threshold_of_the_next_logical_batch():
    one = vector(num_slots=1, expected_batch_size=4)

    def refuse(optimizer: Any) -> None:
        raise RuntimeError("no budget left")

    one.optimizer.attach_step_hook(refuse)
    with pytest.raises(RuntimeError, match="no budget left"):
        one.release(gradients(0.0))
    one.optimizer.attach_step_hook(lambda optimizer: None)
    before = one.optimizer.max_grad_norm

    one.accumulate(gradients(0.5))

    assert one.optimizer.max_grad_norm == before, "moved inside a logical batch"
    one.release(gradients(0.5))
    assert one.optimizer.slack_indicator.values.item() == 0.25
    assert one.optimizer.slack_indicator.clip_norm == before


def test_a_run_in_physical_batches_goes_on_after_a_failing_step_hook():
    one = vector(num_slots=1, expected_batch_size=4, controller=FixedController())
    one.accumulate(gradients(0.0))
    one.optimizer.attach_step_hook(lambda optimizer: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        one.release(gradients(0.0))
    one.optimizer.attach_step_hook(lambda optimizer: None)

    summed = one.release(gradients(0.5))

    assert summed.item() == 0.5
    assert one.optimizer.slack_indicator.values.item() == 0.5 / 4


# --- empty batches ---

EMPTY_WORKS = [
    ("hooks", "linear"),
    ("hooks", "cnn"),
    ("hooks", "embedding"),
    ("hooks", "lstm"),
    ("functorch", "linear"),
]
EMPTY_RAISES = [
    ("ew", "linear"),
    ("ew", "cnn"),
    ("functorch", "cnn"),
    ("functorch", "embedding"),
    ("hooks", "attention"),
    ("functorch", "attention"),
]
TOKENS_IN_FUNCTORCH = pytest.mark.filterwarnings(
    "ignore:In CPU autocast, but the target dtype is not supported"
)


@pytest.mark.parametrize(("mode", "task"), EMPTY_WORKS)
def test_an_empty_batch_releases_noise_steps_and_is_accounted(mode, task):
    run = private(task, grad_sample_mode=mode, num_slots=4, noise_multiplier=0.5)
    run.step(samples(task, 5))
    start, clip_norm = run.parameters, run.optimizer.max_grad_norm
    twin = seeded(0)
    twin.set_state(run.noise_generator.get_state())

    run.step(samples(task, 0))

    std = 0.5 * clip_norm
    for before, after in zip(start, run.parameters, strict=True):
        noise = torch.normal(0.0, std, before.shape, generator=twin)
        assert torch.equal(after, before.add(noise / 16, alpha=-0.1))
    slack_noise = torch.normal(0.0, std, (4,), generator=twin).double() / (clip_norm / 2 * 16)
    released = run.optimizer.slack_indicator.values
    assert (released - slack_noise).abs().max() <= 4 * EPS * slack_noise.abs().max()
    assert run.engine.accountant.history == [(0.5, 0.25, 2)]
    assert run.optimizer.max_grad_norm == pytest.approx(
        oracle.next_slaclip(clip_norm, released.tolist(), eta=RATE, **BOUNDS), rel=1e-12
    )


@pytest.mark.parametrize(("mode", "task"), EMPTY_WORKS)
def test_an_empty_batch_without_noise_counts_as_zero_slack(mode, task):
    run = private(task, grad_sample_mode=mode, noise_multiplier=0.0, num_slots=4)
    run.step(samples(task, 5))
    start, clip_norm = run.parameters, run.optimizer.max_grad_norm

    run.step(samples(task, 0))

    assert all(map(torch.equal, run.parameters, start))
    assert run.optimizer.slack_indicator.values.tolist() == [0.0] * 4
    assert run.engine.accountant.history == [(0.0, 0.25, 2)]
    # eq. 13 at s_hat = 0: r = 0, gamma = 1/2
    assert run.optimizer.max_grad_norm == pytest.approx(clip_norm * math.exp(0.1), rel=1e-12)


@TOKENS_IN_FUNCTORCH
@pytest.mark.parametrize("clipping", ["flat", "slaclip"])
@pytest.mark.parametrize(("mode", "task"), EMPTY_RAISES)
def test_an_empty_batch_raises_where_it_does_in_opacus(mode, task, clipping):
    engine = (opacus.PrivacyEngine if clipping == "flat" else PrivacyEngine)(accountant="rdp")
    run = private(task, engine=engine, clipping=clipping, grad_sample_mode=mode)
    run.step(samples(task, 5))

    with pytest.raises(
        RuntimeError,
        match=r"0 elements|Batch size must be positive|groups=0|returned an invalid gradient",
    ):
        run.step(samples(task, 0))

    assert run.engine.accountant.history == [(0.3, 0.25, 1)]


@pytest.mark.parametrize("max_physical_batch_size", [1, 8])
def test_empty_poisson_batches_between_others_are_releases_as_well(max_physical_batch_size):
    options = {"num_samples": 8, "batch_size": 2}
    run = private("linear", noise_multiplier=0.0, num_slots=3, **options)
    data = logical_batches("linear", epochs=4, **options)
    assert 0 in [len(y) for _, y in data]

    train_in_pieces(run, max_physical_batch_size, epochs=4)

    thresholds, parameters, _ = oracle_run(
        "linear",
        data,
        clip_norm=TASKS["linear"].clip_norm,
        num_slots=3,
        noise_multiplier=0.0,
        expected_batch_size=2,
    )
    assert run.engine.accountant.history == [(0.0, 0.25, 16)]
    assert run.optimizer.num_releases == 16
    assert once_a_release(run) == pytest.approx(list(dict.fromkeys(thresholds)), rel=128 * EPS)
    for mine, theirs in zip(run.parameters, parameters, strict=True):
        assert (mine - theirs).abs().max() <= 128 * EPS * theirs.abs().max()


# The warning that a made-up sample takes part.
@pytest.mark.filterwarnings("ignore:rand_on_empty=True:UserWarning")
def test_a_made_up_sample_takes_the_place_of_an_empty_batch_on_request():
    run = private(
        "linear",
        num_samples=8,
        batch_size=2,
        noise_multiplier=0.0,
        num_slots=1,
        rand_on_empty=True,
        grad_sample_mode="ew",
    )
    data = logical_batches("linear", epochs=4, num_samples=8, batch_size=2)
    assert 0 in [len(y) for _, y in data]

    torch.manual_seed(0)  # the made-up sample comes from the global generator
    sizes = [len(batch[1]) for _ in range(4) for batch in run.loader if run.step(batch) is None]

    assert min(sizes) == 1
    assert run.optimizer.num_releases == 16
    assert run.engine.accountant.history == [(0.0, 0.25, 16)]


# --- the denominator is public ---


def copy_of(task: str, run: Run) -> Any:
    """Build an unwrapped model, in float64, with the run's present parameters."""
    model = TASKS[task].model().double()
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), run.model.parameters(), strict=True):
            mine.copy_(theirs)
    return model


def test_poisson_batches_of_any_size_are_divided_by_the_expected_one():
    run = private(noise_multiplier=0.0, num_slots=5)
    sizes = set()

    for batch in run.loader:
        model = copy_of("mlp", run)
        clip_norm = run.optimizer.max_grad_norm
        run.step(batch)
        expected = oracle.indicator(norms_of(model, batch), clip_norm, 5, 16)
        assert run.optimizer.slack_indicator.values.tolist() == pytest.approx(
            expected, abs=32 * 5 * EPS
        )
        assert run.optimizer.slack_indicator.expected_batch_size == 16
        sizes.add(len(batch[1]))

    assert len(sizes) > 1, "every batch had one size, so nothing was tested"


@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
def test_uniform_batches_are_divided_by_the_batch_size(loss_reduction):
    run = private(
        poisson_sampling=False, noise_multiplier=0.0, num_slots=5, loss_reduction=loss_reduction
    )

    for batch in run.loader:
        model, clip_norm = copy_of("mlp", run), run.optimizer.max_grad_norm
        run.step(batch)
        assert len(batch[1]) == 16
        assert run.optimizer.slack_indicator.values.tolist() == pytest.approx(
            oracle.indicator(norms_of(model, batch), clip_norm, 5, 16), abs=32 * 5 * EPS
        )

    assert run.optimizer.num_releases == 4


@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
def test_accumulated_batches_are_divided_by_their_number_too(loss_reduction):
    run = private(
        poisson_sampling=False, noise_multiplier=0.4, num_slots=5, loss_reduction=loss_reduction
    )
    pieces = batches("mlp", [16, 16, 16])
    norms = [norm for batch in pieces for norm in norms_of(copy_of("mlp", run), batch)]
    clip_norm = run.optimizer.max_grad_norm
    twin = seeded(3)
    for p in run.parameters:
        torch.normal(0.0, 0.4 * clip_norm, p.shape, generator=twin)
    noise = torch.normal(0.0, 0.4 * clip_norm, (5,), generator=twin).tolist()

    run.optimizer.zero_grad()
    for batch in pieces:
        run.backward(batch)
    run.optimizer.step()

    indicator = run.optimizer.slack_indicator
    assert indicator.values.tolist() == pytest.approx(
        oracle.indicator(norms, clip_norm, 5, 48, noise), abs=32 * 5 * EPS
    )
    assert indicator.expected_batch_size == 48
    assert indicator.noise_std == pytest.approx(0.4 * math.sqrt(5) / 48, rel=1e-12)
    assert run.engine.accountant.history == [(0.4, 0.75, 1)]


def test_mean_and_sum_losses_give_one_threshold_trajectory():
    runs = [
        private(
            loss_reduction=loss_reduction,
            torch_optimizer=lambda params, lr=lr: torch.optim.SGD(params, lr=lr),
            num_slots=6,
        )
        for loss_reduction, lr in (("mean", 0.16), ("sum", 0.16 / 16))
    ]

    for run in runs:
        for _ in range(3):
            train_in_pieces(run, 8)

    mean, total = (once_a_release(run) for run in runs)
    # The two losses round their gradients differently; 12 steps carry that on.
    assert len(mean) == 12
    assert mean == pytest.approx(total, rel=64 * EPS)


# --- samples that are not finite ---

BAD = [math.nan, math.inf, -math.inf]
WARNING = "per-sample gradient was not finite"


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
def test_a_bad_sample_counts_for_nothing_and_the_others_train_on(mode, bad):
    options: dict[str, Any] = {"grad_sample_mode": mode, "loss_reduction": "sum"}
    with_it, without = (private(num_slots=6, **options) for _ in range(2))
    x, y = samples("mlp", 9)
    spoiled = x.clone()
    spoiled[4, 2] = bad
    keep = torch.arange(9) != 4

    with pytest.warns(UserWarning, match=WARNING):
        with_it.step((spoiled, y))
    without.step((x[keep], y[keep]))

    ours, theirs = with_it.optimizer, without.optimizer
    # Equal up to the order in which eight gradients, then as many slots, are added.
    assert ours.slack_indicator.values.tolist() == pytest.approx(
        theirs.slack_indicator.values.tolist(), abs=8 * EPS
    )
    assert ours.max_grad_norm == pytest.approx(theirs.max_grad_norm, rel=8 * EPS)
    for mine, other in zip(with_it.parameters, without.parameters, strict=True):
        assert (mine - other).abs().max() <= 8 * EPS * max(1.0, other.abs().max().item())


@pytest.mark.parametrize("bad", [*BAD, 1e30, -3e38])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_bad_gradient_is_exactly_absent(bad, place):
    spoiled, clean = (vector(2, num_slots=4, noise_multiplier=0.3) for _ in range(2))
    good = torch.tensor([[0.25, 0.0], [0.0, 0.75], [3.0, 4.0]])
    rows = list(good)
    rows.insert(place, torch.tensor([0.1, bad]))

    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=WARNING):
        sums = spoiled.release(torch.stack(rows))
    torch.manual_seed(0)
    expected = clean.release(good)

    assert torch.equal(sums, expected)
    assert torch.equal(
        spoiled.optimizer.slack_indicator.values, clean.optimizer.slack_indicator.values
    )
    assert torch.equal(spoiled.parameter, clean.parameter)


def test_a_batch_of_bad_samples_is_an_empty_one():
    spoiled, empty = (vector(2, num_slots=4, noise_multiplier=0.3) for _ in range(2))

    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=WARNING):
        spoiled.release(torch.full((3, 2), math.nan))
    torch.manual_seed(0)
    empty.release(torch.zeros(0, 2))

    assert torch.equal(spoiled.parameter, empty.parameter)
    assert torch.equal(
        spoiled.optimizer.slack_indicator.values, empty.optimizer.slack_indicator.values
    )


def test_a_run_warns_of_bad_samples_once_and_gives_no_number_away():
    run = private()
    spoiled = []
    for x, y in batches("mlp", [7, 8, 9]):
        x[3] = math.nan
        spoiled.append((x, y))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in spoiled:
            run.step(batch)

    texts = [str(w.message) for w in caught if WARNING in str(w.message)]
    assert len(texts) == 1
    assert "local diagnostic" in texts[0]
    assert not re.search(r"\d", texts[0])


def test_a_bad_sample_in_one_physical_batch_leaves_the_others_alone():
    x, y = samples("mlp", 64)
    spoiled = x.clone()
    spoiled[::5] = math.nan
    run = private(dataset=TensorDataset(spoiled, y), noise_multiplier=0.0, num_slots=5)
    data = []
    for inputs, labels in logical_batches(dataset=TensorDataset(spoiled, y)):
        good = inputs.isfinite().all(1)
        data.append((inputs[good], labels[good]))

    with pytest.warns(UserWarning, match=WARNING):
        train_in_pieces(run, 4)

    thresholds, parameters, _ = oracle_run(
        "mlp",
        data,
        clip_norm=TASKS["mlp"].clip_norm,
        num_slots=5,
        noise_multiplier=0.0,
        expected_batch_size=16,
    )
    assert once_a_release(run) == pytest.approx(thresholds, rel=32 * EPS)
    for mine, theirs in zip(run.parameters, parameters, strict=True):
        assert (mine - theirs).abs().max() <= 32 * EPS * theirs.abs().max()
