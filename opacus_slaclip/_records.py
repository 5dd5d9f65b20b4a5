"""One release as a record of plain values, and the forms it is written in."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from opacus_slaclip.controllers import FixedController
from opacus_slaclip.indicator import SlackIndicator
from opacus_slaclip.optimizers import SlackReleaseMixin


@dataclass(frozen=True, slots=True)
class Record:
    """What is kept of one release; only released values.

    Attributes:
        step: The optimizer's ``num_releases`` after the release, from 1.
        clip_norm: ``C_t``, which clipped and noised it, in gradient-norm units.
        next_clip_norm: ``C_{t+1}``, in gradient-norm units.
        indicator: ``s_hat``, K fractions, that of norms just under ``C_t`` first. (An array takes
            an eighth of a list's memory.)
        noise_std: Standard deviation of the Gaussian noise on each slot.
        expected_batch_size: Public denominator ``B`` of the release, in samples.
        bound: "min" or "max" where the controller left ``C_{t+1}`` at that bound, else None.
    """

    step: int
    clip_norm: float
    next_clip_norm: float
    indicator: array[float]
    noise_std: float
    expected_batch_size: float
    bound: str | None

    @classmethod
    def of(cls, optimizer: SlackReleaseMixin) -> Record:
        """Read the last release, once the threshold has moved."""
        indicator = optimizer.slack_indicator
        assert indicator is not None
        return cls(
            step=optimizer.num_releases,
            clip_norm=indicator.clip_norm,
            next_clip_norm=optimizer.max_grad_norm,
            indicator=array("d", indicator.values.tolist()),
            noise_std=indicator.noise_std,
            expected_batch_size=indicator.expected_batch_size,
            bound=_bound(optimizer),
        )

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Record:
        """Take back what :meth:`to_dict` gave.

        Raises:
            KeyError, TypeError: If it is anything else.
        """
        return cls(**{**record, "indicator": array("d", record["indicator"])})

    def to_dict(self) -> dict[str, Any]:
        """Return a new plain dict, JSON-serialisable, with these names as keys."""
        return {**asdict(self), "indicator": self.indicator.tolist()}


def _bound(optimizer: SlackReleaseMixin) -> str | None:
    low, high = optimizer.min_clipbound, optimizer.max_clipbound
    if low == high or isinstance(optimizer.controller, FixedController):
        return None  # the threshold stays where it was put, which hits nothing
    return {low: "min", high: "max"}.get(optimizer.max_grad_norm)


def indicator_of(record: Mapping[str, Any]) -> SlackIndicator:
    """Return the released indicator that a record, as a dict, was made of."""
    return SlackIndicator(
        values=torch.tensor(record["indicator"], dtype=torch.float64),
        clip_norm=record["clip_norm"],
        noise_std=record["noise_std"],
        expected_batch_size=record["expected_batch_size"],
    )


def as_rows(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a table: slot ``j`` of the indicator, 1-based, in column ``slot_j``."""
    rows = []
    for record in records:
        row = {name: value for name, value in record.items() if name != "indicator"}
        row |= {f"slot_{j}": value for j, value in enumerate(record["indicator"], start=1)}
        rows.append(row)
    return rows


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record that are worth a curve.

    Norms in gradient-norm units: ``clip_norm``, ``mean_clipped_norm``. Fractions of the expected
    batch: ``indicator_first``, just under the threshold, and ``indicator_last``, near norm 0.
    """
    values = record["indicator"]
    return {
        "clip_norm": record["clip_norm"],
        "indicator_first": values[0],
        "indicator_last": values[-1],
        "mean_clipped_norm": indicator_of(record).mean_clipped_norm(),
    }


def write(writer: Any, prefix: str, record: Mapping[str, Any]) -> None:
    """Write a record's scalars, and its histogram where ``writer`` can take one."""
    for name, value in scalars(record).items():
        writer.add_scalar(prefix + name, value, record["step"])
    add_histogram = getattr(writer, "add_histogram_raw", None)
    if add_histogram is not None and np.isfinite(record["indicator"]).all():
        add_histogram(
            prefix + "clipped_norms",
            global_step=record["step"],
            **clipped_norm_histogram(indicator_of(record)),
        )


def clipped_norm_histogram(indicator: SlackIndicator) -> dict[str, Any]:
    """Return the released distribution of ``min(n, C)`` as TensorBoard's raw histogram.

    The monotone CDF holds at the middles of the indicator's bins, so these are the buckets' edges;
    the last bucket, up to ``C``, also has the samples that were clipped. Counts are in samples of
    the expected batch, not whole ones.
    """
    edges = indicator.bin_edges.numpy()[::-1]
    limits = np.append((edges[1:] + edges[:-1]) / 2.0, indicator.clip_norm)
    cdf = np.append(indicator.monotone().numpy()[::-1], 1.0)
    counts = indicator.expected_batch_size * np.diff(cdf, prepend=0.0)
    centers = (limits + np.append(0.0, limits[:-1])) / 2.0
    centers[-1] = indicator.clip_norm
    return {
        "min": 0.0,
        "max": indicator.clip_norm,
        "num": float(counts.sum()),
        "sum": float((counts * centers).sum()),
        "sum_squares": float((counts * centers**2).sum()),
        "bucket_limits": limits.tolist(),
        "bucket_counts": counts.tolist(),
    }
