"""Which language is a name from? A character-level DPLSTM with an adaptive clipping threshold.

The data is a folder of text files, one for each language (``French.txt``), one name on a line: the
layout of PyTorch's tutorial on classifying names. Without ``--data-root`` a small folder of made-up
names is written to a temporary place, so that the example runs anywhere::

    python examples/names.py
    python examples/names.py --data-root DIR --epochs 30 --batch-size 256 --lr 2

The unit of privacy is one name. Names have different lengths, so they are padded, to a length that
is fixed in advance and does not depend on the data. The network is read at each name's own last
letter: an LSTM runs forward, so neither the padding nor another name in the batch takes part.
"""

from __future__ import annotations

import argparse
import random
import string
import tempfile
import unicodedata
from pathlib import Path

import torch
from opacus.layers import DPLSTM
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from opacus_slaclip import PrivacyEngine

ALPHABET = string.ascii_letters + " .,;'-"  # fixed and public; 0 stands for padding
MADE_UP = {  # syllables and endings
    "North": ("hra ska vol gri sten bor", ["son", "gard"]),
    "South": ("la mi ro ca ne to", ["etti", "ucci"]),
    "East": ("ki ha to mu sa yo", ["moto", "yama"]),
    "West": ("mac o bri don kel fin", ["ley", "nan"]),
}


class NameClassifier(nn.Module):
    """Embedding, LSTM, linear layer."""

    def __init__(self, num_languages: int, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET) + 1, width, padding_idx=0)
        self.lstm = DPLSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, num_languages)

    def forward(self, letters: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Map letters, shape (B, L), and lengths, shape (B,), to logits, one row a name."""
        states, _ = self.lstm(self.embedding(letters))
        last = (lengths - 1).view(-1, 1, 1).expand(-1, 1, states.shape[-1])
        return self.head(states.gather(1, last).squeeze(1))


def encode(name: str, max_length: int) -> list[int]:
    """Return the letters without accents as numbers from 1, at most ``max_length`` of them."""
    plain = unicodedata.normalize("NFKD", name)
    return [ALPHABET.index(c) + 1 for c in plain if c in ALPHABET][:max_length]


def read_folder(folder: Path, max_length: int) -> tuple[TensorDataset, list[str]]:
    """Read names as (letters, length, language) and the languages' names."""
    files = sorted(folder.glob("*.txt"))
    letters, lengths, labels = [], [], []
    for label, file in enumerate(files):
        for line in file.read_text(encoding="utf-8").splitlines():
            code = encode(line.strip(), max_length)
            if code:
                letters.append(code + [0] * (max_length - len(code)))
                lengths.append(len(code))
                labels.append(label)
    tensors = (torch.tensor(values) for values in (letters, lengths, labels))
    return TensorDataset(*tensors), [file.stem for file in files]


def write_made_up_names(folder: Path, per_language: int = 500) -> None:
    rng = random.Random(0)
    for language, (syllables, endings) in MADE_UP.items():
        names = [
            "".join(rng.choices(syllables.split(), k=rng.randint(1, 3))).title()
            + rng.choice(endings)
            for _ in range(per_language)
        ]
        (folder / f"{language}.txt").write_text("\n".join(names) + "\n", encoding="utf-8")


def accuracy(model: nn.Module, test: torch.utils.data.Dataset) -> float:
    model.eval()
    correct = total = 0
    with torch.no_grad():
        for letters, lengths, labels in DataLoader(test, batch_size=1000):
            correct += int((model(letters, lengths).argmax(1) == labels).sum())
            total += len(labels)
    return correct / total


def main() -> None:
    parser, args = parse()
    with tempfile.TemporaryDirectory() as temporary:
        if args.data_root is None:
            write_made_up_names(Path(temporary))
        names, languages = read_folder(args.data_root or Path(temporary), args.max_length)
    if len(languages) < 2:
        parser.error(f"--data-root must hold a *.txt for each of several languages: {languages}")
    # The split belongs to the data set's definition, whatever the seed of a run.
    train, test = random_split(names, [0.9, 0.1], torch.Generator().manual_seed(0))
    print(f"{len(train)} names for training, {len(test)} for testing, {len(languages)} languages")
    if args.seed is not None:
        torch.manual_seed(args.seed)
    model = NameClassifier(len(languages))
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=args.lr),
        data_loader=DataLoader(train, batch_size=args.batch_size),
        target_epsilon=args.epsilon,
        target_delta=args.delta,
        epochs=args.epochs,
        max_grad_norm=args.max_grad_norm,
        clipping=args.clipping,
    )
    print(f"noise multiplier = {optimizer.noise_multiplier:.3f}")
    criterion = nn.CrossEntropyLoss()
    for epoch in range(1, args.epochs + 1):
        model.train()
        for letters, lengths, labels in loader:
            optimizer.zero_grad()
            criterion(model(letters, lengths), labels).backward()
            optimizer.step()
        epsilon = engine.get_epsilon(args.delta)
        print(f"epoch {epoch}: C = {optimizer.max_grad_norm:.4g}, epsilon = {epsilon:.3f}")
    print(
        f"test accuracy = {accuracy(model, test):.3f}, "
        f"epsilon = {engine.get_epsilon(args.delta):.3f} at delta = {args.delta:g}, "
        f"C: {args.max_grad_norm:.4g} -> {optimizer.max_grad_norm:.4g}"
    )


def parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data-root", type=Path, metavar="DIR", help="folder of *.txt (made-up names)")
    add("--max-length", type=int, default=20, help="letters read of each name (20)")
    add("--clipping", choices=["flat", "slaclip", "slaclip-q"], default="slaclip")
    add("--max-grad-norm", type=float, default=1.0, metavar="C_0", help="initial threshold (1.0)")
    add("--epsilon", type=float, default=3.0, help="budget; the noise is calibrated to it (3)")
    add("--delta", type=float, default=8e-5, help="delta of the budget (8e-5)")
    add("--epochs", type=int, default=10, help="number of epochs (10)")
    add("--batch-size", type=int, default=128, help="expected batch size (128)")
    add("--lr", type=float, default=1.0, help="learning rate of SGD (1.0)")
    add("--seed", type=int, help="repeatable, so not private: for experiments only (none)")
    return parser, parser.parse_args()


if __name__ == "__main__":
    main()
