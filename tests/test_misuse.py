"""What people do wrong with private optimizers gets an answer; see docs/troubleshooting.md."""

from __future__ import annotations

import copy
import warnings

import opacus
import pytest
import torch
from helpers import batches, private, seeded
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from opacus_slaclip import PrivacyEngine, SlaClipDPOptimizer


def state(run):
    """What a step that is refused must leave as it was."""
    noise = run.noise_generator.get_state().clone()
    return run.parameters, noise, list(run.engine.accountant.history), run.optimizer.max_grad_norm


def assert_unchanged(before, run):
    parameters, noise, history, threshold = state(run)
    assert all(map(torch.equal, before[0], parameters))
    assert torch.equal(before[1], noise)
    assert (before[2], before[3]) == (history, threshold)


def test_a_loop_that_skips_batches_is_told_that_epsilon_is_too_small():
    run = private("mlp")
    for i, batch in enumerate(run.loader):
        if i != 1:
            run.step(batch)

    with pytest.warns(UserWarning, match="had no step.*charged too little") as caught:
        next(iter(run.loader))
    # How many were skipped depends on the data.
    assert not any(character.isdigit() for character in str(caught[0].message))


def test_a_loop_that_steps_on_every_batch_is_told_nothing():
    run = private("mlp")
    for _ in range(2):
        for batch in run.loader:
            run.step(batch)
    # Warnings are errors in this suite.
    assert run.optimizer.num_releases == 2 * len(run.loader)


def test_a_pass_that_was_left_between_batches_is_told_nothing():
    run = private("mlp")
    run.step(next(iter(run.loader)))
    run.step(next(iter(run.loader)))
    assert run.optimizer.num_releases == 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_logical_batch_that_was_left_does_not_leak_into_the_next(num_workers):
    """The run goes on as if the pass that was left had never begun."""
    options = {"noise_multiplier": 0.0, "num_workers": num_workers}
    left, straight = (private("mlp", **options) for _ in range(2))
    with BatchMemoryManager(
        data_loader=left.loader, max_physical_batch_size=2, optimizer=left.optimizer
    ) as physical:
        left.step(next(iter(physical)))
    assert left.optimizer.num_releases == 0

    generators = [seeded(5), seeded(5)]
    for run, generator in zip((left, straight), generators, strict=True):
        run.loader.batch_sampler.generator = generator
    with pytest.warns(UserWarning, match="ended inside a logical batch"):
        drawn = list(left.loader)
    for run, data in ((left, drawn), (straight, list(straight.loader))):
        for batch in data:
            run.step(batch)

    assert all(map(torch.equal, left.parameters, straight.parameters))
    assert left.thresholds[1:] == straight.thresholds
    assert left.engine.accountant.history == straight.engine.accountant.history


class ReadsAhead:
    """Takes batches before it hands out earlier ones, as trainers do that look for the last."""

    def __init__(self, loader, ahead):
        self.loader, self.ahead = loader, ahead

    def __iter__(self):
        waiting = []
        for batch in self.loader:
            waiting.append(batch)
            if len(waiting) > self.ahead:
                yield waiting.pop(0)
        yield from waiting


def step_on(run, physical, but=None):
    for i, batch in enumerate(physical):
        if i != but:
            run.step(batch)


def physical_batches(run, ahead=0):
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=2, optimizer=run.optimizer
    ) as physical:
        yield from ReadsAhead(physical, ahead)


WAYS_TO_LOAD = pytest.mark.parametrize(
    ("num_workers", "ahead"), [(0, 0), (0, 1), (2, 0), (2, 1), (0, 1000)]
)


def reading(num_workers, ahead):
    run = private("mlp", num_workers=num_workers)
    run.optimizer.fetched_ahead = ahead
    return run


@WAYS_TO_LOAD
def test_a_loop_over_physical_batches_may_fetch_ahead(num_workers, ahead):
    run = reading(num_workers, ahead)
    for _ in range(2):
        step_on(run, physical_batches(run, ahead))

    assert run.optimizer.num_releases == 2 * len(run.loader)


def test_a_trainer_that_fetches_ahead_has_to_say_so():
    run = private("mlp")
    with pytest.raises(RuntimeError, match=r"set optimizer\.fetched_ahead to how many"):
        step_on(run, physical_batches(run, ahead=1))
    assert run.optimizer.num_releases == 0


@pytest.mark.parametrize("skipped", [0, 1, 3])
@pytest.mark.parametrize(("num_workers", "ahead"), [(0, 0), (0, 1), (2, 0), (2, 1)])
def test_a_physical_batch_without_a_step_is_noticed(num_workers, ahead, skipped):
    """Its note would be taken for the next batch's, and two logical batches be one release."""
    run = reading(num_workers, ahead)

    with pytest.raises(RuntimeError, match="A physical batch went by without step"):
        step_on(run, physical_batches(run, ahead), but=skipped)

    releases = run.optimizer.num_releases
    assert releases <= 1
    with warnings.catch_warnings():  # of the pass that was left
        warnings.simplefilter("ignore")
        step_on(run, physical_batches(run, ahead))
    assert run.optimizer.num_releases == releases + len(run.loader)


def test_a_pass_inside_a_pass_is_refused_with_physical_batches():
    """It forgets what was announced for the outer one, whose next batches would be merged."""
    run = private("mlp")
    batches_of_pass = physical_batches(run)
    run.step(next(batches_of_pass))
    with pytest.warns(UserWarning, match="ended inside a logical batch"):
        next(iter(run.loader))

    with pytest.raises(RuntimeError, match="Another pass through the data was begun inside"):
        step_on(run, batches_of_pass)
    # What was left of the logical batch at hand is released by itself, and nothing with it.
    assert run.optimizer.num_releases <= 1


def test_a_pass_inside_a_pass_is_harmless_without():
    run = private("mlp")
    for batch in run.loader:
        next(iter(run.loader))
        run.step(batch)
    assert run.optimizer.num_releases == len(run.loader)


def test_an_endless_loader_read_ahead_keeps_its_batches_apart():
    def endless(run):
        while True:
            yield from physical_batches(run)

    run, straight = reading(0, 1), private("mlp")
    for _ in range(2):
        step_on(straight, physical_batches(straight))
    for batch in ReadsAhead(endless(run), ahead=1):
        run.step(batch)
        if run.optimizer.num_releases == 2 * len(run.loader):
            break
    assert all(map(torch.equal, run.parameters, straight.parameters))
    assert run.engine.accountant.history == straight.engine.accountant.history


def test_batch_samplers_of_any_class_are_followed():
    class Backwards(BatchSampler):
        def __iter__(self):
            yield from list(super().__iter__())[::-1]

    data = TensorDataset(*batches("mlp", [64])[0])
    sampler = Backwards(SequentialSampler(data), batch_size=16, drop_last=False)
    model = nn.Sequential(nn.Linear(6, 3))
    _, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_sampler=sampler),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        clipping="slaclip",
        poisson_sampling=False,
    )
    assert isinstance(loader.batch_sampler, Backwards)
    assert torch.equal(next(iter(loader))[0], data.tensors[0][-16:])
    with (
        BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=5, optimizer=optimizer
        ) as physical,
        pytest.raises(RuntimeError, match="A physical batch went by without step"),
    ):
        list(physical)


def test_a_sampler_that_is_followed_already_reports_each_pass_once():
    """A second make_private would else see a pass begin inside every pass."""
    run = private("mlp", poisson_sampling=False)
    _, optimizer, loader = run.engine.make_private(
        module=run.model,
        optimizer=run.optimizer,
        data_loader=run.loader,
        noise_multiplier=0.3,
        max_grad_norm=1.0,
        clipping="slaclip",
        poisson_sampling=False,
    )
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=5, optimizer=optimizer
    ) as physical:
        for x, y in physical:
            optimizer.zero_grad()
            run.criterion(run.model(x), y).backward()
            optimizer.step()
    assert optimizer.num_releases == len(loader)


def test_announcing_physical_batches_by_hand_needs_no_loader():
    run = private("mlp")
    for do_skip in (True, True, False):
        run.optimizer.signal_skip_step(do_skip)
    for batch in batches("mlp", [2, 3, 2]):
        run.step(batch)
    assert run.optimizer.num_releases == 1


def test_a_logical_batch_can_be_dropped_by_hand():
    run, other = (private("mlp", noise_multiplier=0.0) for _ in range(2))
    first, second = batches("mlp", [5, 6])
    run.optimizer.signal_skip_step(do_skip=True)
    run.optimizer.signal_skip_step(do_skip=True)
    run.step(first)

    run.optimizer.drop_logical_batch()
    run.step(second)
    other.step(second)

    assert all(map(torch.equal, run.parameters, other.parameters))
    assert run.optimizer.num_releases == 1


@pytest.mark.parametrize("grad_sample_mode", ["hooks", "ghost"])
def test_a_grad_scaler_is_refused(grad_sample_mode):
    optimizer = private("mlp").optimizer if grad_sample_mode == "hooks" else ghost()[1]
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))

    with pytest.raises(RuntimeError, match=r"GradScaler cannot step a private optimizer.*bfloat16"):
        scaler.step(optimizer)


def test_a_disabled_grad_scaler_is_let_through():
    run, plain = private("mlp"), private("mlp")
    [batch] = batches("mlp", [6])
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    run.optimizer.zero_grad()
    run.backward(batch)
    scaler.step(run.optimizer)
    plain.step(batch)

    assert all(map(torch.equal, run.parameters, plain.parameters))


def ghost(**options):
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    [(x, y)] = batches("mlp", [32])
    data = torch.utils.data.TensorDataset(x, y)
    return PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        clipping="slaclip",
        grad_sample_mode="ghost",
        **options,
    )


def test_clipping_again_between_backward_and_step_is_refused_in_ghost_mode():
    model, optimizer, criterion, _ = ghost()
    [(x, y)] = batches("mlp", [8])
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    with pytest.raises(RuntimeError, match=r"changed between backward.* and step"):
        optimizer.step()
    assert optimizer.num_releases == 0


def test_clipping_again_between_backward_and_step_is_without_effect_in_hooks_mode():
    run, plain = private("mlp"), private("mlp")
    [batch] = batches("mlp", [6])
    run.optimizer.zero_grad()
    run.backward(batch)
    nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3)
    run.optimizer.step()
    plain.step(batch)

    assert all(map(torch.equal, run.parameters, plain.parameters))


def test_two_backward_passes_for_one_poisson_batch_are_refused():
    """A GAN's two passes: each would be a query of its own on the batch."""
    run = private("mlp")
    [batch] = batches("mlp", [6])
    run.optimizer.zero_grad()
    run.backward(batch)

    before = state(run)
    with pytest.raises(ValueError, match="not compatible with grad accumulation"):
        run.backward(batch)
    assert_unchanged(before, run)


def test_several_losses_of_one_forward_pass_are_one_gradient():
    run, plain = private("mlp"), private("mlp")
    [(x, y)] = batches("mlp", [6])
    run.optimizer.zero_grad()
    logits = run.model(x)
    (run.criterion(logits, y) / 2 + run.criterion(logits, y) / 2).backward()
    run.optimizer.step()
    plain.step((x, y))

    # Halves add up exactly in binary floating point, up to the order of two additions.
    for ours, theirs in zip(run.parameters, plain.parameters, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_the_loaders_batch_size_is_no_expected_batch_size():
    run = private("mlp")
    assert run.loader.batch_size is None  # Poisson sampling has none
    parameter = nn.Parameter(torch.zeros(2))

    with pytest.raises(TypeError, match="expected_batch_size must be a number, got None"):
        SlaClipDPOptimizer(
            torch.optim.SGD([parameter], lr=0.1),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            expected_batch_size=run.loader.batch_size,
        )


def test_a_wrapper_that_copied_the_attributes_sees_the_live_threshold():
    run = private("mlp", max_grad_norm=40.0)
    wrapper = object.__new__(type(run.optimizer))
    wrapper.__dict__ = dict(run.optimizer.__dict__)  # what Lightning does
    for batch in batches("mlp", [6, 5, 7]):
        run.step(batch)

    assert wrapper.max_grad_norm == run.optimizer.max_grad_norm != 40.0
    assert wrapper.slack_indicator is run.optimizer.slack_indicator


def test_a_closure_is_one_step():
    run, plain = private("mlp"), private("mlp")
    [(x, y)] = batches("mlp", [6])

    def closure():
        run.optimizer.zero_grad()
        loss = run.criterion(run.model(x), y)
        loss.backward()
        return loss

    run.optimizer.step(closure)
    plain.step((x, y))

    assert all(map(torch.equal, run.parameters, plain.parameters))
    assert run.engine.accountant.history == plain.engine.accountant.history


@pytest.mark.parametrize("attempt", [copy.copy, copy.deepcopy])
def test_copying_an_optimizer_raises_and_leaves_the_class_usable(attempt):
    run = private("mlp")
    [batch] = batches("mlp", [6])
    with pytest.raises(TypeError, match=r"cannot be copied or pickled.*state_dict"):
        attempt(run.optimizer)

    fresh = private("mlp")
    fresh.step(batch)
    run.step(batch)
    assert all(map(torch.equal, run.parameters, fresh.parameters))


def test_copying_a_ghost_module_copies_nothing_private():
    model, optimizer, criterion, _ = ghost()
    [(x, y)] = batches("mlp", [8])
    criterion(model(x), y).backward()
    private_norms = model._state.fresh_norms
    assert private_norms is not None

    copied = copy.deepcopy(model)

    assert copied._state.fresh_norms is None
    assert model._state.fresh_norms is private_norms
    optimizer.step()


def test_the_stock_engine_says_that_it_does_not_know_slaclip():
    model = nn.Linear(6, 3)
    [(x, y)] = batches("mlp", [32])
    with pytest.raises(ValueError, match=r"Unexpected optimizer parameters\. Clipping: slaclip"):
        opacus.PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            clipping="slaclip",
        )


def test_persistent_workers_that_have_run_before_follow_the_private_batches():
    """Their iterator would go on with the loader's old batches, of fixed size and unreported."""
    [(x, y)] = batches("mlp", [32])
    loader = DataLoader(
        torch.utils.data.TensorDataset(x, y),
        batch_size=8,
        num_workers=1,
        persistent_workers=True,
    )
    list(loader)
    model = nn.Linear(6, 3)
    _, optimizer, private_loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        clipping="slaclip",
        poisson_sampling=False,
    )
    optimizer.signal_skip_step(do_skip=True)  # of a pass that was left

    list(private_loader)

    assert not optimizer._step_skip_queue, "the pass was not reported to the optimizer"
