"""Pictures of what was released. Needs matplotlib, which is imported only when one is drawn.

Every function draws into ``ax`` and returns it. Without one it opens a figure of pyplot's, as
other libraries do; with one, nothing outside that axes is touched (but for its color bar).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from opacus_slaclip._records import indicator_of
from opacus_slaclip.indicator import SlackIndicator
from opacus_slaclip.recorder import ThresholdRecorder

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Records = Sequence[Mapping[str, Any]]
"""What a recorder keeps, its ``records``, as dicts."""

# From Okabe and Ito's palette, distinct to color-blind readers.
_BLUE, _ORANGE, _RED = "#0072B2", "#E69F00", "#D55E00"
_COLORS = (_BLUE, _ORANGE, "#009E73", "#CC79A7", "#56B4E9", "#000000")
_GID = "opacus_slaclip.threshold"  # tells our lines from others on the same axes
_BAND = 2.0  # half-width of the noise band, in standard deviations
_LEGEND: dict[str, Any] = {"frameon": True, "framealpha": 0.9, "edgecolor": "none"}
_WIDE = 20.0  # from this ratio on, thresholds are drawn on a logarithmic axis
_MAX_COLUMNS = 1000  # more are not seen, and are slow to draw


def plot_threshold(
    source: ThresholdRecorder | Records, *, ax: Axes | None = None, label: str | None = None
) -> Axes:
    """Draw the threshold ``C_t`` over the steps, and mark where a bound was hit.

    The line has the threshold that each step used and ends with the one that the next will use.
    The axis is logarithmic where thresholds differ by a factor of 20 or more.

    Args:
        source: A recorder or its records.
        ax: Where to draw; call again with the same one to compare runs.
        label: The line's name in the legend.

    Raises:
        ValueError: If there is no record.
        ImportError: If matplotlib is not installed and no ``ax`` is given.
    """
    records = _records(source)
    ax = _axes(ax)
    steps = [record["step"] for record in records]
    steps.append(steps[-1] + 1)
    thresholds = [record["clip_norm"] for record in records]
    thresholds.append(records[-1]["next_clip_norm"])
    others = [line for line in ax.lines if line.get_gid() == _GID]
    color = _COLORS[len(others) % len(_COLORS)]
    ax.plot(steps, thresholds, linewidth=2.0, color=color, label=label, gid=_GID)
    _mark_bounds(ax, records)
    if max(thresholds) >= _WIDE * min(thresholds):
        _make_logarithmic(ax)
    _name_steps(ax)
    ax.set_ylabel("threshold $C_t$ (L2 norm of a gradient)")
    _draw_grid(ax)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(**_LEGEND)
    return ax


def plot_cdf(
    source: SlackIndicator | ThresholdRecorder | Mapping[str, Any], *, ax: Axes | None = None
) -> Axes:
    """Draw one indicator as the distribution of gradient norms up to the threshold.

    Each bin shows the released, noisy mean of the CDF over it, within a band of 2 standard
    deviations of the noise to each side, and the closest CDF (:meth:`SlackIndicator.monotone`).
    The band does not cover the error of Poisson sampling.

    Args:
        source: An indicator, one record of a recorder, or a recorder, for its last record.
        ax: Where to draw.

    Raises:
        ImportError: If matplotlib is not installed and no ``ax`` is given.
        ValueError: If the recorder has no records yet.
    """
    record: Any = getattr(source, "last", source)
    if record is None:
        raise ValueError("source must have a record to draw, got a recorder without any.")
    indicator = record if isinstance(record, SlackIndicator) else indicator_of(record)
    ax = _axes(ax)
    edges = indicator.bin_edges.numpy()[::-1]
    values = indicator.values.numpy()[::-1]
    margin = _BAND * indicator.noise_std
    low, high = values - margin, values + margin
    lower, upper = (np.append(bound, bound[-1]) for bound in (low, high))
    band = ax.fill_between(edges, lower, upper, step="post", color=_BLUE, alpha=0.2, linewidth=0)
    band.set_label(f"±{_BAND:g} std of the noise")
    # Wide below narrow: both are seen where they agree.
    closest = indicator.monotone().numpy()[::-1]
    style: dict[str, Any] = {"edges": edges, "baseline": None}
    ax.stairs(closest, color=_ORANGE, linewidth=4.5, label="closest distribution", **style)
    ax.stairs(values, color=_BLUE, linewidth=1.5, label="as released (means of bins)", **style)
    threshold = indicator.clip_norm
    ax.axvline(threshold, color="black", linewidth=1.2, label=f"threshold $C$ = {threshold:.3g}")
    ax.set_xlim(0.0, 1.04 * threshold)
    ax.set_ylim(low[np.isfinite(low)].min(initial=0.0), high[np.isfinite(high)].max(initial=1.0))
    ax.set_xlabel("L2 norm of a sample's gradient")
    ax.set_ylabel("fraction of samples at or below")
    _draw_grid(ax)
    ax.legend(**_LEGEND)
    return ax


def plot_cdf_over_time(source: ThresholdRecorder | Records, *, ax: Axes | None = None) -> Axes:
    """Draw the distribution of gradient norms over the steps as a heat map, with ``C_t`` on it.

    A column is one release: each bin from norm 0 to ``C_t`` in the color of the closest CDF
    (:meth:`SlackIndicator.monotone`). Above ``C_t`` nothing is known, and it is hatched. Of more
    than 1000 records, evenly spaced ones are drawn. The axis is logarithmic where thresholds
    differ by a factor of 20 or more.

    Args:
        source: A recorder or its records.
        ax: Where to draw; the color bar takes its room from it.

    Raises:
        ValueError: If there is no record.
        ImportError: If matplotlib is not installed and no ``ax`` is given.
    """
    records = _records(source)
    ax = _axes(ax)
    left, right, drawn = _columns(records)
    thresholds = np.array([record["clip_norm"] for record in drawn])
    is_wide = thresholds.max() >= _WIDE * thresholds.min()
    indicators = [indicator_of(record) for record in drawn]
    finest = min(float(indicator.bin_edges[-2]) for indicator in indicators)
    bottom = 0.7 * finest if is_wide else 0.0
    mesh = ax.pcolormesh(*_mesh(left, right, indicators, bottom), vmin=0.0, vmax=1.0)
    mesh.set(cmap="viridis", rasterized=True)  # not as thousands of shapes in a PDF
    top = thresholds.max() * (1.25 if is_wide else 1.06)
    has_gap = np.append(left[1:] > right[:-1], False)
    x = np.column_stack([left, right, right]).ravel()
    c = np.column_stack([thresholds, thresholds, np.where(has_gap, np.nan, thresholds)]).ravel()
    ax.fill_between(
        x,
        c,
        top,
        facecolor="none",
        edgecolor="#999999",
        hatch="///",
        linewidth=0,
        label="above $C_t$: unknown",
    )
    ax.plot(x, c, color=_RED, linewidth=1.6, label="threshold $C_t$")
    if is_wide:
        _make_logarithmic(ax)
    ax.set_xlim(x[0], x[-1])
    ax.set_ylim(bottom, top)
    _name_steps(ax)
    ax.set_ylabel("L2 norm of a sample's gradient")
    ax.legend(**_LEGEND)
    ax.figure.colorbar(mesh, ax=ax, label="fraction of samples at or below")
    return ax


def _mark_bounds(ax: Axes, records: Records) -> None:
    """Mark the thresholds that a bound stopped, each at the step that uses it."""
    named = ax.get_legend_handles_labels()[1]
    for name, marker in (("min", "v"), ("max", "^")):
        hits = [record for record in records if record["bound"] == name]
        if hits:
            label = f"at {name}_clipbound"
            ax.scatter(
                [record["step"] + 1 for record in hits],
                [record["next_clip_norm"] for record in hits],
                s=25.0,
                marker=marker,
                color=_RED,
                linewidth=0,
                zorder=3,
                label=None if label in named else label,
            )


def _columns(records: Records) -> tuple[NDArray[Any], NDArray[Any], Records]:
    """Return the left and right edge of each column, in steps, and the record that it shows."""
    count = min(len(records), _MAX_COLUMNS)
    bounds = np.linspace(0, len(records), count + 1).astype(int)
    steps = np.array([record["step"] for record in records])
    shown = [records[(a + b - 1) // 2] for a, b in pairwise(bounds)]
    left = steps[bounds[:-1]] - 0.5
    return left, left + np.diff(bounds), shown  # steps without a record stay blank


def _mesh(
    left: NDArray[Any], right: NDArray[Any], indicators: list[SlackIndicator], bottom: float
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return corners and colors of one mesh: bins scale with each column's threshold.

    Every column has its two sides to itself; what lies between two columns is left blank.
    """
    num_bins = max(indicator.num_slots for indicator in indicators)
    norms = np.empty((num_bins + 1, 2 * len(indicators)))
    colors = np.full((num_bins, 2 * len(indicators) - 1), np.nan)
    for i, indicator in enumerate(indicators):
        edges = np.maximum(indicator.bin_edges.numpy()[::-1], bottom)
        missing = num_bins - indicator.num_slots
        norms[:, 2 * i : 2 * i + 2] = np.pad(edges, (0, missing), mode="edge")[:, None]
        colors[: indicator.num_slots, 2 * i] = indicator.monotone().numpy()[::-1]
    steps = np.column_stack([left, right]).ravel()
    return np.broadcast_to(steps, norms.shape), norms, np.ma.masked_invalid(colors)


def _records(source: ThresholdRecorder | Records) -> Records:
    records = source.records if isinstance(source, ThresholdRecorder) else source
    if not len(records):
        raise ValueError(
            "source must have at least one record, got none. Attach the recorder before training, "
            "and plot after a step that released something."
        )
    return records


def _axes(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            'Plotting needs matplotlib: pip install matplotlib, or "opacus-slaclip[demo]".'
        ) from error
    return pyplot.subplots(layout="constrained")[1]


def _draw_grid(ax: Axes) -> None:
    ax.grid(axis="y", color="#E2E2E2", linewidth=0.8)
    ax.set_axisbelow(True)


def _name_steps(ax: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.set_xlabel("step (one release each)")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))


def _make_logarithmic(ax: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter("{x:g}")
