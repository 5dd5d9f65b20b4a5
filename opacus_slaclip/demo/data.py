"""Image data sets as tensors: scikit-learn's digits, and the two usual layouts of MNIST."""

from __future__ import annotations

import gzip
import hashlib
import math
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset

from opacus_slaclip.demo import DemoError

NUM_CLASSES = 10
DIGITS_TEST_FRACTION = 0.2

_NPZ_KEYS = ("x_train", "y_train", "x_test", "y_test")
_IDX_NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
# File in Keras's layout, and folder in which torchvision unpacks the IDX files.
_LAYOUTS = {
    "mnist": ("mnist.npz", "MNIST/raw"),
    "fashion-mnist": ("fashion-mnist.npz", "FashionMNIST/raw"),
}
# Whatever numpy, gzip or zipfile raise for a file that is not what its name says.
_READ_ERRORS = (OSError, EOFError, ValueError, zlib.error, zipfile.BadZipFile)

_Array = npt.NDArray[Any]


@dataclass(frozen=True)
class DataSplit:
    """A data set, divided for training and testing.

    Attributes:
        train: Images, shape (N, 1, height, width), float32 in [0, 1], and labels,
            shape (N,), int64.
        test: The held-out images and labels, alike.
        num_classes: Number of classes; labels are 0 to ``num_classes - 1``.
    """

    train: TensorDataset
    test: TensorDataset
    num_classes: int

    def digest(self) -> str:
        """Return a short hash of every image and label, the same for the same data."""
        state = hashlib.blake2b(digest_size=8)
        for tensor in (*self.train.tensors, *self.test.tensors):
            state.update(str(tuple(tensor.shape)).encode())
            state.update(tensor.numpy().tobytes())
        return state.hexdigest()


def load(name: str, data_root: Path | None = None) -> DataSplit:
    """Load a data set from this machine; nothing is downloaded.

    Args:
        name: "digits" (comes with scikit-learn), "mnist" or "fashion-mnist".
        data_root: Folder that holds ``mnist.npz`` (``fashion-mnist.npz``) in Keras's layout or the
            four IDX files, gzipped or not, directly or where torchvision puts them. Where there
            are both, the npz file is read. Not used for digits.

    Returns:
        The split. For digits the test fifth is stratified and the same every time.

    Raises:
        DemoError: If files are missing or malformed.
        ValueError: If the name is not known.
    """
    if name == "digits":
        return _load_digits()
    if name not in _LAYOUTS:
        known = ", ".join(["digits", *_LAYOUTS])
        raise ValueError(f"name must be one of {known}, got {name!r}.")
    npz_name, idx_folder = _LAYOUTS[name]
    if data_root is None:
        raise DemoError(f"{name} is read from files: say where with --data-root. {_expected(name)}")
    if not data_root.is_dir():
        raise DemoError(f"{data_root} is not a folder. {_expected(name)}")
    if (data_root / npz_name).exists():
        return _load_npz(data_root / npz_name)
    for folder in (data_root, data_root / idx_folder):
        if any(_find_idx(folder, stem) for stem in _IDX_NAMES):
            return _load_idx_folder(folder, name)
    raise DemoError(f"There is no {name} in {data_root}. {_expected(name)}")


def _expected(name: str) -> str:
    npz_name, _ = _LAYOUTS[name]
    return (
        f"Expected there is either {npz_name} (arrays {', '.join(_NPZ_KEYS)}) or the files "
        f"{', '.join(_IDX_NAMES)}, each with or without .gz."
    )


def _load_digits() -> DataSplit:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = torch.from_numpy(digits.images).to(torch.float32).unsqueeze(1) / 16.0
    labels = torch.from_numpy(digits.target).to(torch.int64)
    train, test = train_test_split(
        np.arange(len(labels)),
        test_size=DIGITS_TEST_FRACTION,
        stratify=digits.target,
        random_state=0,  # part of the data set's definition, whatever the seed of a run
    )
    return DataSplit(
        train=TensorDataset(images[train], labels[train]),
        test=TensorDataset(images[test], labels[test]),
        num_classes=NUM_CLASSES,
    )


def _load_npz(path: Path) -> DataSplit:
    def read() -> dict[str, _Array]:
        with path.open("rb") as file:
            content = np.load(file)
            if isinstance(content, np.ndarray):
                raise ValueError("it is one array, not an archive of arrays")
            return {key: content[key] for key in _NPZ_KEYS if key in content}

    arrays = _readable(path, read)
    missing = [key for key in _NPZ_KEYS if key not in arrays]
    if missing:
        raise DemoError(
            f"{path} lacks {', '.join(missing)}. Expected are the arrays {', '.join(_NPZ_KEYS)}."
        )
    return _split([arrays[key] for key in _NPZ_KEYS], [f"{key} in {path}" for key in _NPZ_KEYS])


def _load_idx_folder(folder: Path, name: str) -> DataSplit:
    paths = [_find_idx(folder, stem) for stem in _IDX_NAMES]
    missing = [stem for stem, path in zip(_IDX_NAMES, paths, strict=True) if path is None]
    found = [path for path in paths if path is not None]
    if missing:
        raise DemoError(f"{folder} lacks {', '.join(missing)}. {_expected(name)}")
    return _split([read_idx(path) for path in found], [str(path) for path in found])


def _find_idx(folder: Path, stem: str) -> Path | None:
    for path in (folder / stem, folder / f"{stem}.gz"):
        if path.is_file():
            return path
    return None


def read_idx(path: Path) -> _Array:
    """Read an IDX file of unsigned bytes, gzipped if its name ends in ``.gz``.

    The format: two zero bytes, the type (8: unsigned byte), the number of axes, the length of each
    axis as a big-endian 32-bit integer, then the entries in C order.

    Raises:
        DemoError: If the file cannot be read or is not of that form, to the last byte.
    """
    is_gzip = path.suffix == ".gz"
    content = _readable(
        path, lambda: gzip.decompress(path.read_bytes()) if is_gzip else path.read_bytes()
    )
    if len(content) < 4 or content[:3] != b"\x00\x00\x08" or content[3] == 0:
        raise DemoError(
            f"{path} is not an IDX file of unsigned bytes: it begins with 0x{content[:4].hex()}."
        )
    start = 4 + 4 * content[3]
    shape = tuple(
        int(length) for length in np.frombuffer(content[4:start], ">u4", len(content[4:start]) // 4)
    )
    expected = start + math.prod(shape)
    if len(content) < start or len(content) != expected:
        raise DemoError(
            f"{path} has {len(content)} bytes, but its header promises {expected}. Get the file "
            "again."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _readable(path: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except _READ_ERRORS as error:
        raise DemoError(f"{path} cannot be read: {error}. Get the file again.") from error


def _split(arrays: list[_Array], sources: list[str]) -> DataSplit:
    """Build the split from train images, train labels, test images and test labels."""
    train = _dataset(arrays[0], arrays[1], sources[0], sources[1])
    test = _dataset(arrays[2], arrays[3], sources[2], sources[3])
    if train.tensors[0].shape[1:] != test.tensors[0].shape[1:]:
        raise DemoError(f"{sources[0]} and {sources[2]} hold images of different sizes.")
    return DataSplit(train=train, test=test, num_classes=NUM_CLASSES)


def _dataset(images: _Array, labels: _Array, image_source: str, label_source: str) -> TensorDataset:
    if images.dtype != np.uint8 or images.ndim != 3 or 0 in images.shape:
        raise DemoError(
            f"{image_source} must hold gray images as uint8 of shape (N, height, width), got "
            f"{images.dtype} of shape {images.shape}."
        )
    if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1]:
        raise DemoError(
            f"{label_source} must hold {len(images)} integer labels, one for each image, got "
            f"{labels.dtype} of shape {labels.shape}."
        )
    if labels.min() < 0 or labels.max() >= NUM_CLASSES:
        raise DemoError(
            f"{label_source} must hold labels 0 to {NUM_CLASSES - 1}, got {labels.min()} to "
            f"{labels.max()}."
        )
    pixels = torch.from_numpy(images.astype(np.float32) / 255.0).unsqueeze(1)
    return TensorDataset(pixels, torch.from_numpy(labels.astype(np.int64)))
