"""Private training of a sharded model (FSDP2) with an adaptive threshold.

Opacus's ``FSDP2Wrapper`` shards parameters, gradients and optimizer state over the processes, and
``grad_sample_mode="ghost_fsdp"`` clips without building a per-sample gradient. Each process noises
its own shard; the slack noise is counted once and all processes go on at the same threshold. Start
it with torchrun, on GPUs with NCCL or on a CPU with gloo::

    torchrun --nproc-per-node 2 examples/fsdp.py
    torchrun --nproc-per-node 2 examples/fsdp.py --width 1024 --layers 6

The batch size and epsilon are those of the whole run, not of one process.
"""

from __future__ import annotations

import argparse
import os

import torch
from opacus.utils.fsdp_utils import FSDP2Wrapper
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

from opacus_slaclip import PrivacyEngine
from opacus_slaclip.demo.data import load


def build_model(width: int, layers: int) -> nn.Module:
    hidden: list[nn.Module] = []
    for _ in range(layers - 1):
        hidden += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), nn.Tanh(), *hidden, nn.Linear(width, 10)
    )


def start() -> torch.device:
    """Join the process group that torchrun describes and return this process's device."""
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("Start this with: torchrun --nproc-per-node 2 examples/fsdp.py")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    return device


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def accuracy(model: nn.Module, test: TensorDataset, device: torch.device) -> float:
    """Test on every process: a sharded layer gathers its parameters from all of them."""
    model.eval()
    correct = 0
    with torch.no_grad():
        for images, labels in DataLoader(test, batch_size=1000):
            correct += int((model(images.to(device)).argmax(1).cpu() == labels).sum())
    return correct / len(test)


def main() -> None:
    args = parse()
    device = start()
    if args.seed is not None:
        torch.manual_seed(args.seed)  # the same everywhere: the loaders still draw differently
    split = load("digits")
    model = build_model(args.width, args.layers).to(device)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)  # all shards are to come from one model
    model = FSDP2Wrapper(model, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
    engine = PrivacyEngine()
    model, optimizer, criterion, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=args.lr),  # after sharding
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(split.train, batch_size=args.batch_size),
        noise_multiplier=args.noise_multiplier,
        max_grad_norm=args.max_grad_norm,
        clipping=args.clipping,
        grad_sample_mode="ghost_fsdp",
    )
    shard = sum(parameter.to_local().numel() for parameter in model.parameters())
    whole = sum(parameter.numel() for parameter in model.parameters())
    say(f"{dist.get_world_size()} processes on {device.type}, {shard:,} of {whole:,} weights each")
    for epoch in range(1, args.epochs + 1):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            criterion(model(images.to(device)), labels.to(device)).backward()
            optimizer.step()
        epsilon = engine.get_epsilon(args.delta)
        say(f"epoch {epoch}: C = {optimizer.max_grad_norm:.4g}, epsilon = {epsilon:.3f}")
    say(
        f"test accuracy = {accuracy(model, split.test, device):.3f}, "
        f"epsilon = {engine.get_epsilon(args.delta):.3f} at delta = {args.delta:g}, "
        f"C: {args.max_grad_norm:.4g} -> {optimizer.max_grad_norm:.4g}"
    )
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--width", type=int, default=128, help="width of the hidden layers (128)")
    add("--layers", type=int, default=2, help="number of hidden layers (2)")
    add("--clipping", choices=["flat", "slaclip", "slaclip-q"], default="slaclip")
    add("--max-grad-norm", type=float, default=1.0, metavar="C_0", help="initial threshold (1.0)")
    add("--noise-multiplier", type=float, default=1.0, help="noise per threshold (1.0)")
    add("--delta", type=float, default=1e-5, help="delta of the budget (1e-5)")
    add("--epochs", type=int, default=10, help="number of epochs (10)")
    add("--batch-size", type=int, default=128, help="expected global batch size (128)")
    add("--lr", type=float, default=0.2, help="learning rate of SGD (0.2)")
    add("--seed", type=int, help="repeatable, so not private: for experiments only (none)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
