"""A PyTorch Lightning module trained privately, with the live clipping threshold in its log.

Model, optimizer and loader are made private first and then handed to Lightning, whose automatic
optimization does what DP-SGD needs: for every batch one ``zero_grad``, one backward pass, one step.
The threshold ``C`` is logged after each step to ``metrics.csv``, from the optimizer that Lightning
hands out::

    python examples/lightning_module.py
    python examples/lightning_module.py --resume outputs/lightning/last.ckpt --epochs 20

What to mind with Lightning and differential privacy:

* ``use_distributed_sampler=False`` and no other loader than the engine's: its Poisson sampling is
  what the accounting is about.
* No ``accumulate_grad_batches`` (use Opacus's ``BatchMemoryManager``), no ``gradient_clip_val``, no
  half precision.
* The optimizer's checkpoint holds the threshold; the budget spent so far has to be saved too, or a
  resumed run would report too little.
* Log what is released or public: C, the slack indicator, epsilon. A training loss is neither.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from opacus_slaclip import PrivacyEngine
from opacus_slaclip.demo.data import load


class PrivateClassifier(LightningModule):
    """Trains what :meth:`PrivacyEngine.make_private` returned."""

    def __init__(self, engine: PrivacyEngine, network: nn.Module, optimizer: Any, delta: float):
        super().__init__()
        self.engine, self.network, self.private_optimizer = engine, network, optimizer
        self.delta = delta

    def configure_optimizers(self) -> Any:
        """Hand over the private optimizer."""
        return self.private_optimizer

    def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
        """Return the loss; zero_grad, backward and step are Lightning's."""
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def on_train_batch_end(self, *_: Any) -> None:
        """Log the threshold that the next batch is clipped at."""
        # Lightning's own wrapper of the optimizer, as users meet it; C in it is alive.
        self.log("C", self.optimizers().max_grad_norm)
        self.log("releases", float(self.optimizers().num_releases))

    def on_train_epoch_end(self) -> None:
        """Show what the epoch has come to."""
        clip_norm = self.private_optimizer.max_grad_norm
        epsilon = self.engine.get_epsilon(self.delta)
        self.print(f"epoch {self.current_epoch + 1}: C = {clip_norm:.6g}, epsilon = {epsilon:.3f}")

    def test_step(self, batch: Any, batch_index: int) -> None:
        """Count hits; test data counts as public."""
        images, labels = batch
        hits = (self.network(images).argmax(1) == labels).float().mean()
        self.log("test_accuracy", hits, batch_size=len(labels))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the budget spent beside weights and threshold."""
        checkpoint["privacy_accountant"] = self.engine.accountant.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on counting from there."""
        self.engine.accountant.load_state_dict(checkpoint["privacy_accountant"])


def build_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, 10),
    )


def main() -> None:
    args = parse()
    if args.seed is not None:
        torch.manual_seed(args.seed)
    split = load("digits")
    network = build_network()
    engine = PrivacyEngine()
    network, optimizer, loader = engine.make_private(
        module=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=args.lr),
        data_loader=DataLoader(split.train, batch_size=args.batch_size),
        noise_multiplier=args.noise_multiplier,
        max_grad_norm=args.max_grad_norm,
        clipping=args.clipping,
    )
    classifier = PrivateClassifier(engine, network, optimizer, args.delta)
    trainer = Trainer(
        max_epochs=args.epochs,
        accelerator=args.accelerator,
        devices=1,
        use_distributed_sampler=False,
        logger=CSVLogger(args.output, name=None, version=""),
        log_every_n_steps=1,
        enable_checkpointing=False,  # one checkpoint at the end is enough here
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(classifier, loader, ckpt_path=args.resume, weights_only=True)
    trainer.save_checkpoint(args.output / "last.ckpt")
    [result] = trainer.test(classifier, DataLoader(split.test, batch_size=1000), verbose=False)
    print(
        f"test accuracy = {result['test_accuracy']:.3f}, "
        f"epsilon = {engine.get_epsilon(args.delta):.3f} at delta = {args.delta:g}, "
        f"C: {args.max_grad_norm:.4g} -> {optimizer.max_grad_norm:.4g}"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--clipping", choices=["slaclip", "slaclip-q"], default="slaclip")
    add("--max-grad-norm", type=float, default=1.0, metavar="C_0", help="initial threshold (1.0)")
    add("--noise-multiplier", type=float, default=1.0, help="noise per threshold (1.0)")
    add("--delta", type=float, default=1e-5, help="delta of the budget (1e-5)")
    add("--epochs", type=int, default=10, help="epochs in all, those before a resume too (10)")
    add("--batch-size", type=int, default=128, help="expected batch size (128)")
    add("--lr", type=float, default=0.2, help="learning rate of SGD (0.2)")
    add("--output", type=Path, metavar="DIR", default=Path("outputs/lightning"), help="for the log")
    add("--resume", type=Path, metavar="CKPT", help="go on from this checkpoint")
    add("--seed", type=int, help="repeatable, so not private: for experiments only (none)")
    add("--accelerator", default="auto", help="Lightning's choice of device (auto)")
    args = parser.parse_args()
    if args.resume and args.seed is not None:
        parser.error("a resumed run must not draw the noise of --seed again: leave one of them out")
    return args


if __name__ == "__main__":
    main()
