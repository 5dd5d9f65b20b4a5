"""Settings and results of runs, and the file of JSON lines that keeps them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from opacus_slaclip.demo import DemoError
from opacus_slaclip.indicator import SlackIndicator

_PACKAGES = ("opacus-slaclip", "opacus", "torch")


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that a result depends on."""
    return {package: version(package) for package in _PACKAGES}


@dataclass(frozen=True)
class RunSettings:
    """Everything that decides the outcome of a run; runs with equal settings are the same run.

    Attributes:
        data: Name of the data set.
        data_digest: Hash of its content.
        method: The engine's ``clipping``.
        clip_norm: Initial threshold ``C_0``, in gradient-norm units.
        epsilon: Privacy budget that the noise is calibrated to.
        delta: The budget's delta.
        epochs: Number of epochs.
        batch_size: Expected logical batch size, in samples.
        learning_rate: Learning rate of plain SGD.
        seed: Seed of weights, batches and noise.
        accountant: Opacus's name of the accountant.
        max_physical_batch_size: Samples held in memory at once, None for all of a batch.
        threads: CPU threads: they decide the order of sums, and so their rounding.
        versions: Package versions.
    """

    data: str
    data_digest: str
    method: str
    clip_norm: float
    epsilon: float
    delta: float
    epochs: int
    batch_size: int
    learning_rate: float
    seed: int
    accountant: str
    max_physical_batch_size: int | None
    threads: int
    versions: Mapping[str, str]

    def label(self) -> str:
        """Return the run's name among runs that share all else."""
        return f"{self.method}, C_0 = {self.clip_norm:g}"


@dataclass(frozen=True)
class IndicatorRecord:
    """What is kept of the last :class:`~opacus_slaclip.SlackIndicator`.

    Attributes:
        bin_edges: Gradient norms from ``C`` down to 0, one more than slots.
        values: Released fraction of samples per slot, noisy.
        monotone: The closest CDF.
        noise_std: Standard deviation of the noise on each value.
    """

    bin_edges: list[float]
    values: list[float]
    monotone: list[float]
    noise_std: float

    @classmethod
    def of(cls, indicator: SlackIndicator | None) -> IndicatorRecord | None:
        """Record an indicator, or None where a method publishes none."""
        if indicator is None:
            return None
        return cls(
            bin_edges=indicator.bin_edges.tolist(),
            values=indicator.values.tolist(),
            monotone=indicator.monotone().tolist(),
            noise_std=float(indicator.noise_std),
        )


@dataclass(frozen=True)
class RunResult:
    """A finished run.

    Attributes:
        settings: What was run.
        noise_multiplier: ``sigma``, calibrated to the budget.
        final_clip_norm: Threshold after the last step, in gradient-norm units.
        epsilon: What the accountant says was spent, at ``settings.delta``.
        test_accuracy: Fraction of the test set classified correctly, in [0, 1].
        clip_norms: Threshold before the first step and after each one.
        indicator: The last release, None where a method publishes none.
    """

    settings: RunSettings
    noise_multiplier: float
    final_clip_norm: float
    epsilon: float
    test_accuracy: float
    clip_norms: list[float]
    indicator: IndicatorRecord | None

    def to_json(self) -> str:
        """Return the result as one line of JSON, without the line feed."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str) -> RunResult:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError, TypeError, KeyError: If the line is anything else.
        """
        fields = dict(json.loads(line))
        indicator = fields["indicator"]
        fields["settings"] = RunSettings(**fields["settings"])
        fields["indicator"] = None if indicator is None else IndicatorRecord(**indicator)
        return cls(**fields)


class ResultFile:
    """A file of results, one line of JSON each, that survives a kill at any moment.

    A line counts once its line feed is there; what a killed process left unfinished is ignored when
    reading and cut off before the next line is added.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def prepare(self) -> None:
        """Make the file and its folder where they are missing, before any work is done for them.

        Raises:
            DemoError: If the file cannot be written.
        """
        with _explained(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.open("ab").close()

    def read(self) -> list[RunResult]:
        """Return the finished results, oldest first.

        Raises:
            DemoError: If the file cannot be read or a finished line is not a result.
        """
        with _explained(self.path):
            lines = self.path.read_bytes().split(b"\n")[:-1]
        results = []
        for number, line in enumerate(lines, start=1):
            try:
                results.append(RunResult.from_json(line.decode()))
            except (ValueError, TypeError, KeyError) as error:
                raise DemoError(
                    f"{self.path}, line {number}, is not a result of this version ({error}). Move "
                    "the file away or choose another --output."
                ) from error
        return results

    def find(self, settings: RunSettings) -> RunResult | None:
        """Return the newest result with exactly these settings, or None."""
        matches = [result for result in self.read() if result.settings == settings]
        return matches[-1] if matches else None

    def append(self, result: RunResult) -> None:
        """Add a result and wait until it is on the disk.

        Raises:
            DemoError: If the file cannot be written.
        """
        with _explained(self.path), self.path.open("a+b") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            file.write(result.to_json().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file by ``write(temporary path)``, then put it in its place in one move.

    Raises:
        DemoError: If the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with _explained(path):
        try:
            write(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise DemoError(f"{path}: {reason}. Choose another --output.") from error
