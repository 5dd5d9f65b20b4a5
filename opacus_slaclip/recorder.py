"""Recording what every release of an optimizer was: threshold, indicator, bounds that were hit."""

from __future__ import annotations

import csv
import math
import os
from collections import deque
from collections.abc import Mapping
from importlib import import_module
from itertools import islice, pairwise
from numbers import Integral
from typing import Any, Protocol

import numpy as np

from opacus_slaclip import _warnings
from opacus_slaclip._records import Record, as_rows, write
from opacus_slaclip.optimizers import SlackReleaseMixin
from opacus_slaclip.slack import recommended_num_slots

# A bound is said to be hit in most steps on the evidence of 20 to 50 of them.
_FEWEST, _WINDOW = 20, 50
_NEARLY_ALL = 0.9  # of the samples in the last bin


class Writer(Protocol):
    """What live scalars go to: torch's ``SummaryWriter`` or anything with its ``add_scalar``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> Any:
        """Write one number."""
        ...


class ThresholdRecorder:
    """Keeps one record per release of an optimizer.

    A record is a plain dict of released values only, so it may be published like the model:

    | key | value |
    |---|---|
    | ``step`` | the optimizer's ``num_releases`` after the release, from 1 |
    | ``clip_norm`` | ``C_t``, which clipped and noised it, in gradient-norm units |
    | ``next_clip_norm`` | ``C_{t+1}``, in gradient-norm units |
    | ``indicator`` | ``s_hat``, K fractions, that of norms just under ``C_t`` first |
    | ``noise_std`` | standard deviation of the Gaussian noise on each slot |
    | ``expected_batch_size`` | public denominator ``B`` of the release, in samples |
    | ``bound`` | "min" or "max" where ``C_{t+1}`` was left at that bound, else None |

    Skipped physical batches, refused steps and a release whose controller failed leave no record.
    Nothing is read from the device beyond what the release has read. Where several ranks train one
    model, each one's recorder keeps the same. It holds no reference to the optimizer and can be
    copied and pickled; the copy is detached.

    Args:
        optimizer: What ``make_private`` returned with ``clipping="slaclip"`` or ``"slaclip-q"``,
            bare or in Lightning's wrapper. None to :meth:`attach` it later.
        max_records: Keep only this many, the newest; None for all.
        warn: Warn once when a bound is hit in most steps.

    Raises:
        TypeError, ValueError: If an argument is not valid.
    """

    def __init__(
        self,
        optimizer: SlackReleaseMixin | None = None,
        *,
        max_records: int | None = None,
        warn: bool = True,
    ) -> None:
        self._records: deque[Record] = deque(maxlen=_check_max_records(max_records))
        self._handle: Any = None
        self._writers: list[tuple[Writer, str]] = []
        self._warn = warn
        if optimizer is not None:
            self.attach(optimizer)

    def attach(self, optimizer: SlackReleaseMixin) -> None:
        """Record this optimizer from now on, and no longer any other."""
        if not isinstance(optimizer, SlackReleaseMixin):
            raise TypeError(
                "optimizer must be one of SlaClip's, which release an indicator, got "
                f"{type(optimizer).__name__}. Pass what make_private(..., clipping='slaclip') "
                "returned."
            )
        self.detach()
        self._handle = optimizer.register_release_hook(self._take)

    def detach(self) -> None:
        """Stop recording; the records stay."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = None

    def _take(self, optimizer: SlackReleaseMixin) -> None:
        record = Record.of(optimizer)
        while self._records and self._records[-1].step >= record.step:
            self._records.pop()  # the optimizer went back to a checkpoint
        self._records.append(record)
        for writer, prefix in self._writers:
            write(writer, prefix, record.to_dict())
        hint = self._bound_hint() if self._warn and record.bound else None
        if hint is not None:
            self._warn = False
            _warnings.warn(hint)

    # ---- reading ---------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._records)

    def __repr__(self) -> str:
        limit = "" if self._records.maxlen is None else f", max_records={self._records.maxlen}"
        return f"{type(self).__name__}({len(self)} records{limit})"

    @property
    def records(self) -> list[dict[str, Any]]:
        """The records as new plain dicts, oldest first."""
        return [record.to_dict() for record in self._records]

    @property
    def last(self) -> dict[str, Any] | None:
        """The newest record as a new dict, or None."""
        return self._records[-1].to_dict() if self._records else None

    def hints(self) -> list[str]:
        """Return what the records suggest to change, one sentence or two each; often nothing."""
        hints = (self._bound_hint(), self._rest_hint(), self._noise_hint())
        return [hint for hint in hints if hint is not None]

    def _bound_hint(self) -> str | None:
        recent = list(islice(reversed(self._records), _WINDOW))
        for bound, beyond, remedy in (("min", "below", "lower"), ("max", "above", "higher")):
            hits = [record.next_clip_norm for record in recent if record.bound == bound]
            if len(recent) >= _FEWEST and 2 * len(hits) > len(recent):
                return (
                    f"The threshold rested on {bound}_clipbound={hits[0]:g} after {len(hits)} of "
                    f"the last {len(recent)} releases: the controller wants to go {beyond} it. "
                    f"Pass a {remedy} {bound}_clipbound to make_private, unless that is meant"
                    + ("." if bound == "min" else ", or lower the learning rate.")
                )
        return None

    def _rest_hint(self) -> str | None:
        recent = list(islice(reversed(self._records), _FEWEST))
        tiny = [record for record in recent if record.indicator[-1] > _NEARLY_ALL]
        if len(recent) < _FEWEST or 2 * len(tiny) <= len(recent):
            return None
        level = recent[0].clip_norm / len(recent[0].indicator)
        return (
            f"Nearly all norms lie below C / K = {level:.3g}, so the noise, which is scaled by C, "
            "is far larger than the gradients, and the paper's rule may rest there. Use "
            "clipping='slaclip-q' or max_grad_norm='auto'."
        )

    def _noise_hint(self) -> str | None:
        last = self._records[-1] if self._records else None
        if last is None or not last.noise_std:
            return None
        num_slots, batch_size = len(last.indicator), last.expected_batch_size
        sigma = last.noise_std * batch_size / math.sqrt(num_slots)
        most = recommended_num_slots(batch_size, sigma * (1.0 - 1e-9))  # eq. 14, up to rounding
        if num_slots <= most:
            return None
        return (
            f"num_slots={num_slots} is more than this noise allows: its standard deviation on a "
            f"slot is {last.noise_std:.3g}, and the CDF rises by {1 / num_slots:.3g} a slot. Pass "
            f"num_slots={most} (or None) to make_private, or use a larger batch."
        )

    # ---- writing ---------------------------------------------------------------------------

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the records as a table: one row a release, slot ``j`` in column ``slot_j``.

        Numbers are written so that reading them back gives the same bits; no bound is an empty
        cell.
        """
        rows = as_rows(self.records)
        columns = dict.fromkeys(name for row in rows for name in row)
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)

    def to_frame(self) -> Any:
        """Return the table of :meth:`to_csv` as a ``pandas.DataFrame``.

        Raises:
            ImportError: If pandas is not installed.
        """
        try:
            pandas = import_module("pandas")
        except ImportError as error:
            raise ImportError(
                "to_frame() needs pandas: pip install pandas. Without it, use records or to_csv()."
            ) from error
        return pandas.DataFrame(as_rows(self.records))

    def log_to(self, writer: Writer, *, prefix: str = "slaclip/") -> None:
        """Write the scalars of every record, those kept so far and each new one, to ``writer``.

        Where the writer has ``add_histogram_raw``, as TensorBoard's has, the indicator goes there
        as a histogram of clipped gradient norms. Log on one rank only.

        Args:
            writer: For example ``torch.utils.tensorboard.SummaryWriter(folder)``.
            prefix: In front of every tag.
        """
        if not callable(getattr(writer, "add_scalar", None)):
            raise TypeError(
                f"writer must have add_scalar(tag, value, step), got {type(writer).__name__}. "
                "Pass a SummaryWriter, or an object of your own with that method."
            )
        for record in self.records:
            write(writer, prefix, record)
        self._writers.append((writer, prefix))

    # ---- checkpoints -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the records as plain numbers, strings and lists, to be saved in a checkpoint."""
        return {"records": self.records}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the records of a checkpoint; those kept until now are dropped.

        An optimizer that goes back without this call is followed too: its next release drops the
        records that it has overtaken.

        Raises:
            ValueError: If ``state`` is not what :meth:`state_dict` gave. Nothing has changed then.
        """
        try:
            records = [Record.from_dict(record) for record in state["records"]]
            is_ordered = all(a.step < b.step for a, b in pairwise(records))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{_NO_STATE} ({error!r})") from error
        if not is_ordered:
            raise ValueError(f"{_NO_STATE} (its steps do not increase)")
        self._records = deque(records, maxlen=self._records.maxlen)

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle the records, neither the optimizer's hook nor writers."""
        records = self._records.copy()  # a shallow copy must not share it
        return self.__dict__ | {"_records": records, "_handle": None, "_writers": []}


def _check_max_records(value: object) -> int | None:
    if value is None:
        return None
    is_integer = isinstance(value, Integral) and not isinstance(value, (bool, np.bool_))
    if not is_integer or int(value) < 1:  # type: ignore[call-overload]
        raise ValueError(
            f"max_records must be a positive integer, got {value!r}. Pass None to keep them all."
        )
    return int(value)  # type: ignore[call-overload,no-any-return]


_NO_STATE = "state must be the state_dict() of a ThresholdRecorder. Load an unmodified checkpoint."
