"""Opacus's MNIST example with an adaptive clipping threshold: one import and one argument changed.

Shows the plain use of the engine: hooks or ghost clipping, large batches in small pieces
(``--max-physical-batch-size``), and a checkpoint from which a run goes on with its threshold and
its privacy accounting. Where the Opacus example downloads MNIST, this one reads it from files, or
takes the small digits that come with scikit-learn::

    python examples/mnist.py
    python examples/mnist.py --clipping flat --max-grad-norm 0.1
    python examples/mnist.py --data mnist --data-root DIR --lr 0.25 --batch-size 512
    python examples/mnist.py --checkpoint digits.pt
    python examples/mnist.py --checkpoint digits.pt --resume --epochs 20

Training loss is not printed: it is computed from private data without noise.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_slaclip import PrivacyEngine
from opacus_slaclip.demo import DemoError
from opacus_slaclip.demo.data import load


def build_model(image_size: int) -> nn.Module:
    """Return the network of Opacus's example (26,010 parameters), or its like for 8x8 images."""
    if image_size == 28:
        convolutions = nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.Conv2d(16, 32, 4, stride=2)
    elif image_size == 8:
        convolutions = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3)
    else:
        raise ValueError(f"image_size must be 28 or 8, got {image_size}.")
    first, second = convolutions
    features = (first, nn.ReLU(), nn.MaxPool2d(2, 1), second, nn.ReLU(), nn.MaxPool2d(2, 1))
    return nn.Sequential(
        *features, nn.Flatten(), nn.Linear(32 * 4 * 4, 32), nn.ReLU(), nn.Linear(32, 10)
    )


def physical_batches(args: argparse.Namespace, loader: Any, optimizer: Any) -> Any:
    """Return the loader, or what divides its batches into pieces that fit into memory."""
    if args.max_physical_batch_size is None:
        return contextlib.nullcontext(loader)
    return BatchMemoryManager(
        data_loader=loader,
        max_physical_batch_size=args.max_physical_batch_size,
        optimizer=optimizer,
    )


def train_epoch(
    model: nn.Module, optimizer: Any, criterion: Any, batches: Iterable[Any], device: str
) -> None:
    model.train()
    for images, labels in batches:
        optimizer.zero_grad()
        criterion(model(images.to(device)), labels.to(device)).backward()
        optimizer.step()


def accuracy(model: nn.Module, test: TensorDataset, device: str) -> float:
    model.eval()
    correct = 0
    with torch.no_grad():
        for images, labels in DataLoader(test, batch_size=1000):
            correct += int((model(images.to(device)).argmax(1).cpu() == labels).sum())
    return correct / len(test)


def seed_epoch(seed: int | None, epoch: int) -> None:
    """Seed an epoch by its number, so that a resumed run draws no noise a second time."""
    if seed is not None:
        torch.manual_seed(int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0]))


def save(engine: PrivacyEngine, path: Path, model: Any, optimizer: Any, epoch: int) -> None:
    """Save in one move, so that there is a whole checkpoint at any moment."""
    temporary = path.with_name(path.name + ".tmp")
    engine.save_checkpoint(
        path=temporary, module=model, optimizer=optimizer, checkpoint_dict={"epoch": epoch}
    )
    os.replace(temporary, path)


def main() -> None:
    parser, args = parse()
    try:
        split = load(args.data, args.data_root)
    except DemoError as error:
        parser.error(str(error))
    seed_epoch(args.seed, epoch=0)
    model = build_model(split.train.tensors[0].shape[-1]).to(args.device)
    engine = PrivacyEngine()
    private = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=args.lr),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(split.train, batch_size=args.batch_size),
        noise_multiplier=args.noise_multiplier,
        max_grad_norm=args.max_grad_norm,
        clipping=args.clipping,
        grad_sample_mode=args.grad_sample_mode,
    )
    if args.grad_sample_mode == "ghost":
        model, optimizer, criterion, loader = private
    else:
        (model, optimizer, loader), criterion = private, nn.CrossEntropyLoss()
    done = 0
    if args.resume:
        # Weights, threshold and the budget spent so far; a checkpoint is a pickle: load your own.
        done = engine.load_checkpoint(
            path=args.checkpoint,
            module=model,
            optimizer=optimizer,
            torch_load_kwargs={"map_location": args.device},
        )["epoch"]
        print(f"resumed after epoch {done}: C = {optimizer.max_grad_norm:.4g}")
    for epoch in range(done + 1, args.epochs + 1):
        seed_epoch(args.seed, epoch)
        with physical_batches(args, loader, optimizer) as batches:
            train_epoch(model, optimizer, criterion, batches, args.device)
        epsilon = engine.get_epsilon(args.delta)
        print(f"epoch {epoch}: C = {optimizer.max_grad_norm:.4g}, epsilon = {epsilon:.3f}")
        if args.checkpoint:
            save(engine, args.checkpoint, model, optimizer, epoch)
    print(
        f"test accuracy = {accuracy(model, split.test, args.device):.3f}, "
        f"epsilon = {engine.get_epsilon(args.delta):.3f} at delta = {args.delta:g}, "
        f"C: {args.max_grad_norm:.4g} -> {optimizer.max_grad_norm:.4g}"
    )


def parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", choices=["digits", "mnist"], default="digits")
    add("--data-root", type=Path, metavar="DIR", help="folder with mnist.npz or the IDX files")
    add("--clipping", choices=["flat", "slaclip", "slaclip-q"], default="slaclip")
    add("--grad-sample-mode", choices=["hooks", "ghost"], default="hooks")
    add("--max-grad-norm", type=float, default=1.0, metavar="C_0", help="initial threshold (1.0)")
    add("--noise-multiplier", type=float, default=1.0, help="noise per threshold (1.0)")
    add("--delta", type=float, default=1e-5, help="delta of the budget (1e-5)")
    add("--epochs", type=int, default=10, help="epochs in all, those before a resume too (10)")
    add("--batch-size", type=int, default=128, help="expected size of a logical batch (128)")
    add("--max-physical-batch-size", type=int, metavar="N", help="samples in memory at once (all)")
    add("--lr", type=float, default=0.25, help="learning rate of SGD (0.25)")
    add("--checkpoint", type=Path, metavar="PATH", help="save there after each epoch")
    add("--resume", action="store_true", help="go on from --checkpoint")
    add("--seed", type=int, help="repeatable, so not private: for experiments only (none)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.resume and not (args.checkpoint and args.checkpoint.is_file()):
        parser.error("--resume needs an existing --checkpoint")
    return parser, args


if __name__ == "__main__":
    main()
