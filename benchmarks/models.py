"""The models that are measured: the paper's, Opacus's MNIST example, and a few shapes more."""

from __future__ import annotations

import torch
from opacus.layers import DPLSTM
from torch import nn


def mlp() -> nn.Module:
    """784-256-10, 203,530 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))


def small_cnn() -> nn.Module:
    """The CNN of Opacus's MNIST example, 26,010 parameters; 28 x 28 images."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def lenet_cnn() -> nn.Module:
    """The paper's MNIST model, 421,642 parameters; 28 x 28 images."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


class CharLSTM(nn.Module):
    """Character embedding, one LSTM layer, its last output: the paper's names model, narrower."""

    def __init__(self, vocabulary: int = 60, width: int = 64, num_classes: int = 18) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = DPLSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, num_classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits, shape (B, num_classes), of tokens, shape (B, T)."""
        outputs, _ = self.lstm(self.embedding(tokens))
        return self.head(outputs[:, -1])


class NameLSTM(nn.Module):
    """The paper's names model: character embedding, DPLSTM, its output at the last character.

    Token 0 is padding, on the right. An LSTM runs forward, so padding has no part in the output.
    """

    def __init__(self, vocabulary: int = 59, width: int = 128, num_classes: int = 18) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=0)
        self.lstm = DPLSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, num_classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits, shape (B, num_classes), of tokens, shape (B, T)."""
        outputs, _ = self.lstm(self.embedding(tokens))
        last = ((tokens != 0).sum(dim=1) - 1).clamp(min=0)
        return self.head(
            outputs.gather(1, last.view(-1, 1, 1).expand(-1, 1, outputs.shape[-1]))[:, 0]
        )


class MeanWords(nn.Module):
    """The paper's IMDB model: word embedding(16), mean over the words, fc(16), fc(2).

    Token 0 is padding and takes no part in the mean.
    """

    def __init__(self, vocabulary: int = 10_002, width: int = 16, num_classes: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=0)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits, shape (B, num_classes), of tokens, shape (B, T)."""
        mask = (tokens != 0).unsqueeze(-1)
        mean = (self.embedding(tokens) * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
        return self.head(nn.functional.relu(self.hidden(mean)))


def cifar_cnn() -> nn.Module:
    """The paper's CIFAR-10 model, 131,466 parameters: four convolutions; 3 x 32 x 32 images."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


class Block(nn.Module):
    """Pre-norm self-attention with one head, then a feed-forward layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output, shape (B, T, width), as its input."""
        y = self.norm1(x)
        attended = nn.functional.scaled_dot_product_attention(
            self.query(y), self.key(y), self.value(y)
        )
        x = x + self.out(attended)
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Two blocks over embedded tokens, mean pooling, a linear head."""

    def __init__(self, vocabulary: int = 200, width: int = 64, num_classes: int = 10) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, num_classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits, shape (B, num_classes), of tokens, shape (B, T)."""
        return self.head(self.blocks(self.embedding(tokens)).mean(dim=1))
