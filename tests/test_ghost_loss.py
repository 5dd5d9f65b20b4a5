"""In ghost mode the loss is part of the mechanism: what it must refuse or repair."""

from __future__ import annotations

import opacus
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from opacus_slaclip import FixedController, PrivacyEngine

C = 1.0
NUM_SAMPLES = 8


class Pooled(nn.Module):
    """A regression over tokens, with outputs of shape (B, 1)."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.inner(x)).mean(dim=1))


class FunctionallyTied(Pooled):
    """Uses a weight a second time, where no hook sees it."""

    def forward(self, x):
        again = functional.linear(torch.tanh(self.inner(x)), self.inner.weight)
        return self.head(again.mean(dim=1))


def make(model=Pooled, criterion=None, engine=PrivacyEngine, mode="ghost", **options):
    torch.manual_seed(0)
    data = TensorDataset(10 * torch.randn(NUM_SAMPLES, 3, 4), torch.randn(NUM_SAMPLES, 1))
    module = model()
    if engine is PrivacyEngine:
        options = {"clipping": "slaclip", "controller": FixedController()} | options
    private = engine().make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
        data_loader=DataLoader(data, batch_size=NUM_SAMPLES),
        criterion=criterion or nn.MSELoss(),
        noise_multiplier=0.0,
        max_grad_norm=C,
        grad_sample_mode=mode,
        poisson_sampling=False,
        **options,
    )
    criterion = private[2] if mode == "ghost" else criterion or nn.MSELoss()
    return private[0], private[1], criterion, data.tensors


def summed_gradient(module, optimizer, criterion, x, y):
    """The sum of clipped gradients that a step releases, flattened."""
    optimizer.zero_grad()
    criterion(module(x), y).backward()
    optimizer.step()
    return torch.cat([p.grad.flatten() for p in module.parameters()]) * NUM_SAMPLES


def test_losses_of_shape_b_by_1_are_clipped_one_by_one():
    """Opacus multiplies every loss by every factor: the sum then exceeds B thresholds."""
    x, y = make()[3]
    ghost = summed_gradient(*make()[:3], x, 100 * y)
    hooks = summed_gradient(*make(mode="hooks")[:3], x, 100 * y)

    # Two roads to the same float32 sum of 8 samples of norm at most C.
    torch.testing.assert_close(ghost, hooks, rtol=0, atol=1e-5 * NUM_SAMPLES * C)
    assert ghost.norm() <= NUM_SAMPLES * C * (1 + 1e-5)


def test_opacus_itself_breaks_on_losses_of_shape_b_by_1():
    """Without this the test above would not show what it repairs."""
    x, y = make()[3]
    module, optimizer, criterion, _ = make(engine=opacus.PrivacyEngine)

    assert summed_gradient(module, optimizer, criterion, x, 100 * y).norm() > NUM_SAMPLES * C


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_of_several_outputs_are_reduced_within_each_sample(reduction):
    class Wide(Pooled):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 2)

    x, y = make()[3]
    options = {"criterion": nn.MSELoss(reduction=reduction), "loss_reduction": reduction}
    ghost, hooks = (
        summed_gradient(*make(Wide, mode=mode, **options)[:3], x, 100 * y.expand(-1, 2))
        for mode in ("ghost", "hooks")
    )

    torch.testing.assert_close(ghost, hooks, rtol=0, atol=1e-4 * NUM_SAMPLES * C)


def test_a_single_number_is_no_loss_a_sample():
    class Reduced(nn.MSELoss):
        def forward(self, outputs, targets):
            return super().forward(outputs, targets).mean()

    module, optimizer, criterion, (x, y) = make(criterion=Reduced())

    with pytest.raises(ValueError, match="one entry a sample in ghost mode, got a single number"):
        criterion(module(x), y).backward()
    assert optimizer.num_releases == 0


def test_losses_that_are_not_samples_are_refused():
    module, _, criterion, (x, y) = make()
    tokens = module(x).repeat(3, 1)

    with pytest.raises(ValueError, match="got another number"):
        criterion(tokens, y.repeat(3, 1)).backward()


@pytest.mark.parametrize(
    "combine",
    [
        lambda loss, penalty: loss + penalty,
        lambda loss, penalty: penalty + loss,
        lambda loss, penalty: loss - penalty,
        lambda loss, penalty: loss * penalty,
    ],
)
def test_a_penalty_that_needs_a_gradient_is_refused(combine):
    module, _, criterion, (x, y) = make()
    penalty = sum(p.square().sum() for p in module.parameters())

    with pytest.raises(ValueError, match="weight decay"):
        combine(criterion(module(x), y), penalty)


class Penalized(nn.MSELoss):
    """Hides the penalty inside the criterion."""

    def __init__(self, module):
        super().__init__()
        self.parameter = module.inner.weight

    def forward(self, outputs, targets):
        return super().forward(outputs, targets) + self.parameter.square().sum()


def test_a_penalty_inside_the_criterion_is_refused():
    module, _, criterion, (x, y) = make()
    criterion.criterion = Penalized(module)

    with pytest.raises(ValueError, match=r"inner\.weight.* used elsewhere"):
        criterion(module(x), y).backward()


def test_a_parameter_used_outside_its_layer_is_refused():
    module, optimizer, criterion, (x, y) = make(FunctionallyTied)

    with pytest.raises(ValueError, match=r"inner\.weight.* used elsewhere"):
        criterion(module(x), y).backward()
    assert optimizer.num_releases == 0


def test_hooks_are_enabled_again_after_an_error_between_the_passes():
    module, _, criterion, (x, y) = make()
    loss = criterion(module(x), y)
    module.head.weight.requires_grad_(False)

    with pytest.raises(ValueError, match="requires_grad changed"):
        loss.backward()
    assert module.hooks_enabled


def test_constants_keep_the_loss_private():
    module, optimizer, criterion, (x, y) = make()
    plain = summed_gradient(*make()[:3], x, y)

    optimizer.zero_grad()
    # The constants cancel: -(-2 l + 1) / 2 + 1 - 0.5 = l; so must their effect on the gradient.
    (-(1 - 2 * criterion(module(x), y)) / 2 + 1 - 0.5).backward()
    optimizer.step()

    combined = torch.cat([p.grad.flatten() for p in module.parameters()]) * NUM_SAMPLES
    torch.testing.assert_close(combined, plain, rtol=0, atol=1e-5 * NUM_SAMPLES * C)
    assert optimizer.num_releases == 1


@pytest.mark.parametrize(
    "combine",
    [
        lambda loss: loss * torch.ones(NUM_SAMPLES, 1),
        lambda loss: loss + torch.ones(NUM_SAMPLES, 1),
    ],
)
def test_broadcasting_a_loss_is_refused(combine):
    """It would give every sample the loss of the others."""
    module, _, criterion, (x, y) = make()

    with pytest.raises(ValueError, match="broadcasting would give every sample"):
        combine(criterion(module(x), y))


def test_losses_of_different_shapes_add_up_sample_by_sample():
    module, optimizer, criterion, (x, y) = make()
    outputs = module(x)
    optimizer.zero_grad()
    (criterion(outputs, y) + criterion(outputs.squeeze(1), y.squeeze(1))).backward()
    optimizer.step()

    gradient = torch.cat([p.grad.flatten() for p in module.parameters()]) * NUM_SAMPLES
    assert gradient.norm() <= NUM_SAMPLES * C * (1 + 1e-5)


def test_targets_of_another_shape_are_refused():
    module, _, criterion, (x, y) = make()

    with pytest.raises(ValueError, match="must have one shape"):
        criterion(module(x), y.squeeze(1))
    criterion(module(x), y).backward()  # the error has left nothing behind


def test_whole_numbers_as_targets_of_another_shape_are_refused():
    """(B, 1) rates beside (B,) counts would compare every sample with every other."""
    rates = nn.PoissonNLLLoss()
    module, _, criterion, (x, y) = make(criterion=rates)
    counts = y.round().abs().long()

    with pytest.raises(ValueError, match="must have one shape"):
        criterion(module(x), counts.squeeze(1))
    criterion(module(x), counts).backward()


def test_targets_inside_a_dict_are_looked_at_too():
    class OfDict(nn.MSELoss):
        def forward(self, outputs, batch):
            return super().forward(outputs, batch["target"])

    module, _, criterion, (x, y) = make(criterion=OfDict())
    with pytest.raises(ValueError, match="must have one shape"):
        criterion(module(x), {"target": y.squeeze(1)})
    criterion(module(x), {"target": y}).backward()


def test_a_criterion_that_raises_keeps_its_reduction():
    class Raises(nn.MSELoss):
        def forward(self, outputs, target):
            raise KeyError("target")

    mine = Raises()
    module, _, criterion, (x, y) = make(criterion=mine)
    with pytest.raises(KeyError):
        criterion(module(x), y)
    assert mine.reduction == "mean"


def test_a_parameter_that_is_reused_later_in_the_run_is_refused():
    class LateTying(Pooled):
        is_tied = False

        def forward(self, x):
            hidden = torch.tanh(self.inner(x))
            if self.is_tied:
                hidden = functional.linear(hidden, self.inner.weight)
            return self.head(hidden.mean(dim=1))

    module, optimizer, criterion, (x, y) = make(LateTying)
    summed_gradient(module, optimizer, criterion, x, y)
    LateTying.is_tied = True

    with pytest.raises(ValueError, match=r"inner\.weight.* used elsewhere"):
        criterion(module(x), y).backward()


def test_a_parameter_added_to_the_optimizer_later_is_refused():
    module, optimizer, criterion, (x, y) = make()
    extra = nn.Parameter(torch.ones(4))
    optimizer.add_param_group({"params": [extra]})
    optimizer.zero_grad()
    criterion(module(x * extra), y).backward()

    with pytest.raises(RuntimeError, match="not those it was made with"):
        optimizer.step()
    assert optimizer.num_releases == 0


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_freezing_between_backward_and_step_is_refused(mode):
    """torch steps on every gradient there is: the raw one would be applied, without noise."""
    module, optimizer, criterion, (x, y) = make(mode=mode)
    before = module.head.weight.detach().clone()
    optimizer.zero_grad()
    criterion(module(x), y).backward()
    module.head.weight.requires_grad_(False)

    with pytest.raises(RuntimeError, match=r"requires_grad may change|gradient was changed"):
        optimizer.step()
    assert torch.equal(module.head.weight, before)
    assert optimizer.num_releases == 0


def test_freezing_inside_a_logical_batch_is_refused():
    module, optimizer, criterion, (x, y) = make(mode="hooks")
    optimizer.signal_skip_step(do_skip=True)
    optimizer.zero_grad()
    criterion(module(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    module.head.weight.requires_grad_(False)
    criterion(module(x), y).backward()

    with pytest.raises(RuntimeError, match="requires_grad may change"):
        optimizer.step()


def test_a_criterion_with_another_reduction_is_refused_before_anything_is_wrapped():
    model = Pooled()
    with pytest.raises(ValueError, match=r"criterion\.reduction must be loss_reduction='mean'"):
        make(lambda: model, criterion=nn.MSELoss(reduction="sum"))
    make(lambda: model)  # would raise if hooks were left on it
