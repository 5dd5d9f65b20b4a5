"""Names, IMDB reviews and CIFAR-10 from their usual files; nothing is downloaded.

Reads what is given and refuses what is not understood, with the reason. The IMDB vocabulary is made
from the training reviews and then treated as public: no budget is spent on it.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import re
import string
import tarfile
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

ALPHABET = string.ascii_letters + " .,;'-"  # fixed and public; 0 stands for padding
MAX_CHARACTERS = 16
MAX_WORDS = 256
VOCABULARY_SIZE = 10_000  # without padding (0) and unknown words (1)
IMDB_ARCHIVE = "aclImdb_labelled.tar.xz"

Examples = tuple[torch.Tensor, torch.Tensor]  # inputs and labels (int64)

_SENTIMENTS = ("neg", "pos")
_REVIEW = re.compile(r"(?:^|/)(train|test)/(neg|pos)/[^/]+\.txt$")
_WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?")
_CIFAR_TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))


class CorpusError(Exception):
    """A data set is missing or malformed; the message says what was expected where."""


def load_names(root: Path) -> Examples:
    """Return names as characters, shape (N, ``MAX_CHARACTERS``), and languages, by file name.

    Args:
        root: Folder that holds ``names/*.txt`` or the files themselves, one language each.

    Raises:
        CorpusError: If there are fewer than two languages.
    """
    folder = root / "names" if (root / "names").is_dir() else root
    files = sorted(folder.glob("*.txt"))
    if len(files) < 2:
        raise CorpusError(
            f"{folder} must hold a .txt file for each of several languages, one name on a line; "
            f"found {len(files)}."
        )
    rows, labels = [], []
    for label, file in enumerate(files):
        for line in file.read_text(encoding="utf-8").splitlines():
            characters = encode_name(line)
            if characters:
                rows.append(characters + [0] * (MAX_CHARACTERS - len(characters)))
                labels.append(label)
    return torch.tensor(rows), torch.tensor(labels)


def encode_name(name: str) -> list[int]:
    """Return the letters without accents as numbers from 1, at most ``MAX_CHARACTERS``."""
    plain = unicodedata.normalize("NFKD", name.strip())
    return [ALPHABET.index(c) + 1 for c in plain if c in ALPHABET][:MAX_CHARACTERS]


def load_imdb(root: Path, cache: Path) -> tuple[Examples, Examples]:
    """Return training and test reviews as words, shape (N, ``MAX_WORDS``), and sentiments.

    The words are those of the training reviews, most frequent first; padding is on the right.

    Args:
        root: Folder that holds ``aclImdb_labelled.tar.xz`` or the unpacked ``aclImdb``.
        cache: Folder for the tokenized arrays, so that reading takes a minute only once.

    Raises:
        CorpusError: If neither is there, or reviews are missing.
    """
    source = next((p for p in (root / "aclImdb", root / IMDB_ARCHIVE) if p.exists()), None)
    if source is None:
        raise CorpusError(f"{root} must hold {IMDB_ARCHIVE} or the folder aclImdb.")
    state = source.stat()
    identity = (
        f"{source.resolve()} {state.st_size} {state.st_mtime_ns} {MAX_WORDS} {VOCABULARY_SIZE}"
    )
    path = cache / f"imdb-{hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()}.npz"
    if not path.exists():
        arrays = tokenize_reviews(_reviews(source))
        cache.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial.npz")
        np.savez_compressed(partial, **arrays)
        partial.replace(path)
    with np.load(path) as arrays:
        tensors = {key: torch.from_numpy(arrays[key].astype(np.int64)) for key in arrays}
    return (tensors["x_train"], tensors["y_train"]), (tensors["x_test"], tensors["y_test"])


def tokenize_reviews(reviews: Iterable[tuple[str, str, int, str]]) -> dict[str, Any]:
    """Return (split, name, sentiment, text) as four arrays; the order is by split and name.

    Raises:
        CorpusError: If a split lacks reviews.
    """
    splits: dict[str, list[tuple[str, int, list[str]]]] = {"train": [], "test": []}
    for split, name, label, text in reviews:
        words = _WORD.findall(text.lower().replace("<br />", " "))
        splits[split].append((name, label, words))
    counts: Counter[str] = Counter()
    for _, _, words in splits["train"]:
        counts.update(words)
    # By frequency, then by word: independent of the order of files.
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[:VOCABULARY_SIZE]
    index = {word: number for number, word in enumerate(frequent, start=2)}
    arrays = {}
    for split, rows in splits.items():
        if not rows:
            raise CorpusError(f"There are no reviews {split}/neg/*.txt or {split}/pos/*.txt.")
        rows.sort()
        tokens = np.zeros((len(rows), MAX_WORDS), np.int32)
        for row, (_, _, words) in enumerate(rows):
            known = [index.get(word, 1) for word in words[:MAX_WORDS]]
            tokens[row, : len(known)] = known
        arrays[f"x_{split}"] = tokens
        arrays[f"y_{split}"] = np.array([label for _, label, _ in rows])
    return arrays


def _reviews(source: Path) -> Iterator[tuple[str, str, int, str]]:
    if source.is_dir():
        for path in sorted(source.glob("*/*/*.txt")):
            if match := _REVIEW.search(path.as_posix()):
                yield _review(match, path.read_bytes())
        return
    with tarfile.open(source) as archive:
        for member in archive:
            match = _REVIEW.search(member.name)
            file = archive.extractfile(member) if match else None
            if match and file:
                yield _review(match, file.read())


def _review(match: re.Match[str], content: bytes) -> tuple[str, str, int, str]:
    label = _SENTIMENTS.index(match[2])
    return match[1], match[0], label, content.decode("utf-8", "replace")


def load_cifar10(root: Path) -> tuple[Examples, Examples]:
    """Return training and test images, shape (N, 3, 32, 32) in [-1, 1], and classes.

    Args:
        root: Folder that holds ``cifar-10-batches-py``, or that folder.

    Raises:
        CorpusError: If a file is missing or is not a batch of CIFAR-10's Python version.
    """
    inner = root / "cifar-10-batches-py"
    folder = inner if inner.is_dir() else root
    missing = [n for n in (*_CIFAR_TRAIN, "test_batch") if not (folder / n).is_file()]
    if missing:
        raise CorpusError(f"{folder} lacks {', '.join(missing)} of CIFAR-10's Python version.")
    batches = [read_cifar_batch(folder / name) for name in _CIFAR_TRAIN]
    images, labels = zip(*batches, strict=True)
    return (torch.cat(images), torch.cat(labels)), read_cifar_batch(folder / "test_batch")


def read_cifar_batch(path: Path) -> Examples:
    """Read one pickled batch; a pickle may hold arrays and plain values, and run nothing else.

    Raises:
        CorpusError: If it holds anything else.
    """
    try:
        batch = _ArrayUnpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        pixels, labels = batch[b"data"], torch.tensor(batch[b"labels"])
        images = torch.from_numpy(pixels.astype(np.float32)).view(-1, 3, 32, 32)
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError) as error:
        raise CorpusError(f"{path} is not a batch of CIFAR-10: {error}") from error
    if pixels.dtype != np.uint8 or len(images) != len(labels):
        raise CorpusError(f"{path} must hold uint8 images and as many labels.")
    return images / 127.5 - 1.0, labels


class _ArrayUnpickler(pickle.Unpickler):
    """Knows what an array of numpy's, old or new, is made of; see pickle's own documentation."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "numpy" and name in ("dtype", "ndarray"):
            return getattr(np, name)
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        if (module, name) == ("_codecs", "encode"):
            return _latin1
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which an array does not need")


def _latin1(text: str, encoding: str = "latin1") -> bytes:
    """Return bytes as Python 3 pickles them under protocol 2."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the encoding {encoding!r}")
    return text.encode("latin1")
