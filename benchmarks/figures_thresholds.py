"""What the thresholds did, and the gradient norms that the indicators released."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from benchmarks.figure_style import (
    GRID,
    add_legend,
    add_title,
    in_style,
    label_lowest,
    new_figure,
    num_columns,
    ordered_colors,
    styles,
)
from benchmarks.report_pools import Group, Pool
from benchmarks.report_rows import Run

_THRESHOLD = "threshold $C_t$ (gradient norm)"
_DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (6, 1.5, 1, 1.5)), (0, (2, 2)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_LINEAR = 5.0  # thresholds further apart than this factor need a logarithmic axis
_DECADES = 2.5  # of gradient norms that a panel shows, down from its highest threshold
_MOVED = 1.001  # a threshold whose extremes differ by less stood still


def trajectory(runs: Sequence[Run]) -> np.ndarray | None:
    """Return the rows (step, lowest, median, highest threshold) over runs; None without any.

    Steps are those of the longest run; a run that ended earlier counts as far as it went. Points
    that are not finite and positive are left out.
    """
    tracks = []
    for run in runs:
        points = [
            (step, clip)
            for step, clip in run.row.get("clip_norms") or []
            if clip is not None and math.isfinite(clip) and clip > 0
        ]
        if points:
            tracks.append(np.array(sorted(points), dtype=float))
    if not tracks:
        return None
    steps = max((track[:, 0] for track in tracks), key=lambda x: (x[-1], len(x)))
    values = np.array(
        [
            np.exp(np.interp(steps, track[:, 0], np.log(track[:, 1]), right=np.nan))
            for track in tracks
        ]
    )
    low, high = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
    return np.column_stack([steps, low, np.nanmedian(values, axis=0), high])


@in_style
def best_trajectories(group: Group) -> Figure | None:
    """Draw each method's threshold at its best configuration by validation.

    Lines are medians over the seeds that finished, bands reach from the lowest to the highest.
    Returns None if no row has a trajectory.
    """
    figure = new_figure(3.9)
    axes = figure.subplots()
    looks = styles(list(group.pools))
    for index, pool in enumerate(group.pools.values()):
        track = trajectory(pool.finished_runs(pool.best)) if pool.best else None
        if track is None or pool.best is None:
            continue
        start = f", $C_0$ = {pool.best.clip_norm:g}" if pool.has_start else ""
        label = f"{pool.method} (lr {pool.best.learning_rate:g}{start})"
        every = max(1, len(track) // 6)
        marks = (index % every, every)
        _draw_track(axes, track, label=label, markevery=marks, **looks[pool.method])
    if not axes.lines:
        return None
    _finish(axes)
    axes.set_xlabel("training step (one logical batch each)")
    axes.set_ylabel(_THRESHOLD)
    add_title(figure, f"{group.title}: threshold at each method's best cell")
    add_legend(figure, axes, 3)
    return figure


@in_style
def starts(group: Group) -> Figure | None:
    """Draw the thresholds of every method that moves them, from each C_0 of its pool.

    The learning rate and the schedule are those of the method's best configuration by validation.
    Returns None if no threshold moves.
    """
    found = {pool.method: _tracks(pool) for pool in group.pools.values()}
    moving = {m: tracks for m, tracks in found.items() if any(map(_moves, tracks.values()))}
    if not moving:
        return None
    clips = sorted({c for m, t in moving.items() if group.pools[m].has_start for c in t})
    looks = {
        clip: {
            "color": color,
            "linestyle": _DASHES[index % len(_DASHES)],
            "marker": _MARKERS[index % len(_MARKERS)],
        }
        for index, (clip, color) in enumerate(zip(clips, ordered_colors(len(clips)), strict=True))
    }

    def draw(axes: Axes, method: str) -> None:
        for clip, track in moving[method].items():
            at_start = {"markevery": [0], "clip_on": False, "zorder": 4}
            if group.pools[method].has_start:
                look = looks[clip] | {"label": f"$C_0$ = {clip:g}"}
            else:
                look = {"color": "black", "marker": "*", "label": "no $C_0$"}
            _draw_track(axes, track, **at_start, **look)
        best = group.pools[method].best
        if best is not None:
            axes.set_title(f"{method} (lr {best.learning_rate:g})")

    figure, panels = _panels(list(moving), draw, "training step")
    fullest = max(panels, key=lambda axes: len(axes.get_legend_handles_labels()[1]))
    _finish(*panels)
    figure.supylabel(_THRESHOLD, fontsize=9.0)
    add_title(figure, f"{group.title}: threshold from each $C_0$, at the method's best rate")
    add_legend(figure, fullest, 6)
    return figure


@in_style
def indicator_curves(group: Group) -> Figure | None:
    """Draw the slack indicators of one run at each method's best configuration, over time.

    Slot j of K is the average of the distribution function of the gradient norms over the bin
    [C (1 - j/K), C (1 - (j - 1)/K)] and is drawn at the bin's middle, as released: noise included.
    Steps whose threshold is too low for the panel's axis are left out.
    The run is the first pool seed's. Returns None if no row has indicators.
    """
    chosen = {}
    for pool in group.pools.values():
        runs = pool.pool_runs(pool.best) if pool.best else []
        if runs and _snapshots(runs[0]):
            chosen[pool.method] = runs[0]
    if not chosen:
        return None

    columns = 1 if num_columns(len(chosen)) > 2 else 2  # of a legend below its panel

    def draw(axes: Axes, method: str) -> None:
        run = chosen[method]
        highest = max(clip for _, clip, _ in _snapshots(run))
        lowest = highest / 10**_DECADES
        snapshots = [shot for shot in _snapshots(run) if shot[1] > 2 * lowest]
        for index, color in enumerate(ordered_colors(len(snapshots))):
            step, clip, values = snapshots[index]
            slots = np.arange(len(values), 0, -1)
            axes.plot(
                clip * (1.0 - (slots - 0.5) / len(values)),
                values[::-1],
                label=f"{step}: $C$ = {clip:.3g}",
                color=color,
                linestyle=_DASHES[index % len(_DASHES)],
                marker=_MARKERS[index % len(_MARKERS)],
                markevery=[-1],
                markersize=6.0,
                markeredgecolor="white",
                linewidth=1.6,
            )
        if highest > _LINEAR * min(clip for _, clip, _ in snapshots):
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.set_xlim(lowest, 1.1 * highest)
        else:
            axes.set_xlim(0.0, 1.03 * highest)
        axes.set_ylim(-0.03, 1.03)
        axes.grid(axis="y", **GRID)
        axes.set_title(f"{method} (lr {run.config.learning_rate:g})")
        axes.set_xlabel("gradient norm of a sample")
        below: dict[str, Any] = {
            "loc": "upper center",
            "bbox_to_anchor": (0.5, -0.17),
            "ncols": columns,
        }
        axes.legend(title="step and its threshold", frameon=False, fontsize=8.0, **below)

    figure, panels = _panels(list(chosen), draw, "", height=4.9 - 0.35 * columns)
    panels[0].set_ylabel("fraction of samples at or below")
    add_title(figure, f"{group.title}: gradient norms as released")
    return figure


def _snapshots(run: Run) -> list[Any]:
    """Return a run's [step, C, values] whose threshold is finite and positive."""
    found = run.row.get("indicators") or []
    return [shot for shot in found if shot[1] and math.isfinite(shot[1]) and shot[2]]


def _tracks(pool: Pool) -> dict[float, np.ndarray]:
    best = pool.best
    found = {
        config.clip_norm: trajectory(pool.finished_runs(config))
        for config in pool.configs
        if best is not None
        and (config.learning_rate, config.schedule) == (best.learning_rate, best.schedule)
    }
    return {clip: track for clip, track in found.items() if track is not None}


def _moves(track: np.ndarray) -> bool:
    return bool(track[:, 3].max() > _MOVED * track[:, 1].min())


def _draw_track(axes: Axes, track: np.ndarray, **style: Any) -> None:
    steps, low, median, high = track.T
    axes.fill_between(steps, low, high, color=style["color"], alpha=0.18, linewidth=0)
    look = {"linewidth": 1.8, "markersize": 6.0, "markeredgecolor": "white"}
    axes.plot(steps, median, **look, **style)


def _panels(
    methods: Sequence[str], draw: Callable[[Axes, str], None], label: str, height: float = 2.6
) -> tuple[Figure, list[Axes]]:
    """Return a figure with a drawn panel a method, all on the same axes."""
    columns = num_columns(len(methods))
    rows = -(-len(methods) // columns)
    figure = new_figure(rows * height + 0.8)
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    panels = list(grid.flat)
    for axes in panels[len(methods) :]:
        axes.set_visible(False)
    for axes, method in zip(panels, methods, strict=False):
        draw(axes, method)
    if label:
        label_lowest(grid, label)
    return figure, panels[: len(methods)]


def _finish(*panels: Axes) -> None:
    for axes in panels:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        subs = (1.0, 2.0, 5.0) if high / low < 200 else (1.0,)
        axes.yaxis.set_major_locator(LogLocator(subs=subs))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
        axes.margins(x=0.0)
        axes.grid(axis="y", **GRID)
