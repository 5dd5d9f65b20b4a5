"""What the audit looks at: draws of everything a step publishes, from the real optimizer.

The model is linear and the loss is its output, so a sample's gradient is the sample itself. The
canary points along one direction and every base sample, at full norm, against it (in the composed
run: across it). A draw is one vector in units of the threshold, for each step

    (noisy gradient sum / C, noisy slack sum / C, log of how far the threshold moved)

so that each of the first d + K coordinates should carry noise of standard deviation sigma.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_slaclip import PrivacyEngine

CLIP_NORM = 0.5
NUM_ENTRIES = 4  # of the gradient, in two tensors
NUM_SLOTS = 4
BASE_SIZE = 4  # also the public, expected batch size of the data set with and without the canary
FAR = 100.0  # a norm far above the threshold, in thresholds
NUM_COORDINATES = NUM_ENTRIES + NUM_SLOTS + 1  # of the view of one step

ALONG = torch.full((NUM_ENTRIES,), 0.5)
ACROSS = torch.tensor([0.5, -0.5, 0.5, -0.5])

Plant = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Family:
    """A way to take the audited steps."""

    mode: str = "hooks"
    num_pieces: int = 1  # physical batches in a logical one
    num_steps: int = 1
    num_ranks: int = 1


FAMILIES = {
    "hooks": Family(),
    "ghost": Family("ghost"),
    "virtual": Family(num_pieces=2),
    "two-steps": Family(num_steps=2),
    "ddp": Family(num_ranks=2),
}


class TwoLayers(nn.Module):
    """Two linear layers, each of which sees half of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(NUM_ENTRIES // 2, 1, bias=False)
        self.right = nn.Linear(NUM_ENTRIES // 2, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output, shape (B,)."""
        left, right = x.chunk(2, dim=1)
        return (self.left(left) + self.right(right)).squeeze(1)


class MeanOutput(nn.Module):
    """The output as its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.reduction = "mean"

    def forward(self, output: torch.Tensor, _target: torch.Tensor) -> torch.Tensor:
        """Return the mean output, or all of them for ghost clipping."""
        return output.mean() if self.reduction == "mean" else output


def base_samples(size: int, direction: torch.Tensor) -> torch.Tensor:
    """Return samples of full norm along ``direction``, shape (size, d)."""
    return (FAR * CLIP_NORM * direction).repeat(size, 1)


def canary_sample(norm: float) -> torch.Tensor:
    """Return the canary, shape (1, d); its gradient norm is given in thresholds."""
    return (norm * CLIP_NORM * ALONG).unsqueeze(0)


class Subject:
    """A private optimizer under audit."""

    def __init__(self, loader: DataLoader[Any], *, sigma: float, mode: str, seed: int) -> None:
        model: nn.Module = TwoLayers()
        if dist.is_initialized():
            model = DifferentiallyPrivateDistributedDataParallel(model)
            seed += 1_000_003 * dist.get_rank()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Secure RNG turned off")  # the audit has a seed
            warnings.filterwarnings("ignore", "num_slots=.* is above the recommended")
            private = PrivacyEngine(accountant="rdp").make_private(
                module=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
                criterion=MeanOutput(),
                data_loader=loader,
                noise_multiplier=sigma,
                max_grad_norm=CLIP_NORM,
                clipping="slaclip",
                grad_sample_mode=mode,
                num_slots=NUM_SLOTS,
                noise_generator=torch.Generator().manual_seed(seed),
            )
        self.model, self.optimizer, *criterion, self.loader = private
        self.criterion = criterion[0] if criterion else MeanOutput()

    def restart(self) -> None:
        """Go back to the first threshold."""
        self.optimizer.max_grad_norm = CLIP_NORM

    def step(self, *pieces: torch.Tensor) -> torch.Tensor:
        """Take one step on the physical batches of a logical one; return what it published."""
        for i, piece in enumerate(pieces):
            if len(pieces) > 1:
                self.optimizer.signal_skip_step(do_skip=i < len(pieces) - 1)
            self.optimizer.zero_grad()
            self.criterion(self.model(piece), torch.zeros(len(piece))).backward()
            self.optimizer.step()
        return self.view()

    def view(self) -> torch.Tensor:
        """Return the last release, shape (NUM_COORDINATES,), in units of its threshold."""
        release = self.optimizer.slack_indicator
        gradient = torch.cat([p.grad.flatten() for p in self.optimizer.params]).double()
        moved = torch.tensor([self.optimizer.max_grad_norm / release.clip_norm]).double().log()
        # In the units of the gradient a slot is C / sqrt(K) wide.
        slack = release.values / NUM_SLOTS**0.5
        return torch.cat([gradient * (BASE_SIZE / release.clip_norm), slack * BASE_SIZE, moved])


def _pieces(family: Family, canary: float, with_canary: bool) -> list[torch.Tensor]:
    """Return the physical batches, of this rank; the canary comes last, on the last rank."""
    batch = base_samples(BASE_SIZE, -ALONG)
    if with_canary:
        batch = torch.cat([batch, canary_sample(canary)])
    parts = family.num_pieces * family.num_ranks
    share = BASE_SIZE // parts
    pieces = [batch[i * share : (i + 1) * share] for i in range(parts - 1)]
    pieces.append(batch[(parts - 1) * share :])
    return pieces if family.num_ranks == 1 else [pieces[dist.get_rank()]]


def draw(
    family: Family, canary: float, *, sigma: float, num_draws: int, with_canary: bool, seed: int
) -> torch.Tensor:
    """Return draws in this process, shape (num_draws, num_steps * NUM_COORDINATES)."""
    dataset = TensorDataset(torch.zeros(BASE_SIZE, 1))
    loader = DataLoader(dataset, batch_size=BASE_SIZE)  # one batch: every sample, every step
    subject = Subject(loader, sigma=sigma, mode=family.mode, seed=seed)
    pieces = _pieces(family, canary, with_canary)
    rows = []
    for _ in range(num_draws):
        subject.restart()
        rows.append(torch.cat([subject.step(*pieces) for _ in range(family.num_steps)]))
    return torch.stack(rows)


def draw_sides(
    family: Family,
    canary: float,
    *,
    sigma: float,
    num_draws: int,
    seed: int,
    plant: Plant = nullcontext,
) -> list[torch.Tensor]:
    """Return draws without and with the canary, while ``plant`` is in force."""
    with plant():
        return [
            draw(
                family,
                canary,
                sigma=sigma,
                num_draws=num_draws,
                with_canary=side,
                seed=2 * seed + side,
            )
            for side in (False, True)
        ]


def composed_draws(
    canary: float, *, sigma: float, num_steps: int, num_draws: int, with_canary: bool, seed: int
) -> Iterator[torch.Tensor]:
    """Yield runs of ``num_steps`` Poisson-sampled steps at rate 1/2, all steps in one vector.

    With and without the canary, the loader has two batches and the expected batch size is 4.
    """
    samples = base_samples(2 * BASE_SIZE, ACROSS)
    if with_canary:
        samples = torch.cat([samples, canary_sample(canary)])
    generator = torch.Generator().manual_seed(seed + 500_009)
    loader = DataLoader(TensorDataset(samples), batch_size=BASE_SIZE + 1, generator=generator)
    subject = Subject(loader, sigma=sigma, mode="hooks", seed=seed)
    for _ in range(num_draws):
        subject.restart()
        passes = range(num_steps // 2)
        yield torch.cat([subject.step(x) for _ in passes for (x,) in subject.loader])
