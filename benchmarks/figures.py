"""Accuracy over the pool: heatmaps, and accuracy against the learning rate."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from benchmarks.figure_style import (
    CLIP_LABEL,
    GRID,
    add_legend,
    add_title,
    in_style,
    label_lowest,
    new_figure,
    num_columns,
    styles,
)
from benchmarks.report_pools import Group, Pool

_MAP = "viridis"
_SPAN = 20.0  # points of accuracy below the best that get colors of their own
_ZOOM = 10.0  # points in the close-up
_WHOLE = 15.0  # a wider spread of accuracies needs the whole range beside the close-up


@in_style
def heatmaps(group: Group) -> Figure:
    """Draw the mean test accuracy over (learning rate, C_0), a panel a method and schedule.

    All panels share one color scale, which ends 20 points below the best cell at the lowest: what
    is worse has the darkest color, and every cell its number. A frame marks the cell chosen by
    validation accuracy. The cells of a method without C_0 reach over all of them.
    """
    schedules = sorted({config.schedule for config in group.configs})
    rates = sorted({config.learning_rate for config in group.configs})
    clips = sorted({config.clip_norm for config in group.configs})
    columns = num_columns(len(group.pools))
    rows = -(-len(group.pools) // columns) * len(schedules)
    figure = new_figure(max(3.0, rows * (0.55 + 0.27 * len(clips)) + 0.95))
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    scale, extend = _scale(group)
    image = None
    for index, pool in enumerate(group.pools.values()):
        for offset, schedule in enumerate(schedules):
            panel = axes[index // columns * len(schedules) + offset, index % columns]
            image = _heatmap(panel, pool, schedule, rates, clips, scale)
            panel.set_title(pool.method + (f", {schedule}" if len(schedules) > 1 else ""))
    for index in range(len(group.pools), rows // len(schedules) * columns):
        for offset in range(len(schedules)):
            axes[index // columns * len(schedules) + offset, index % columns].set_visible(False)
    label_lowest(axes, "learning rate")
    aspect = 6.0 * figure.get_figheight()
    bar = figure.colorbar(image, ax=axes, extend=extend, aspect=aspect, pad=0.015)
    bar.set_label("mean test accuracy (%)")
    bar.outline.set_visible(False)
    add_title(figure, group.title)
    figure.supylabel(CLIP_LABEL, fontsize=9.0)
    _heatmap_legend(figure, group)
    return figure


def _scale(group: Group) -> tuple[Normalize, str]:
    values = [100 * x for pool in group.pools.values() for x in pool.means("test").values()]
    best, lowest = max(values, default=100.0), min(values, default=0.0)
    top = min(100.0, np.ceil(best))
    bottom = max(np.floor(lowest), top - _SPAN, 0.0)
    return Normalize(min(bottom, top - 1.0), top), "min" if lowest < bottom else "neither"


def _heatmap(
    axes: Axes,
    pool: Pool,
    schedule: str,
    rates: list[float],
    clips: list[float],
    scale: Normalize,
) -> Any:
    size = len(clips) if pool.has_start else 1
    values = np.full((size, len(rates)), np.nan)
    cells = {
        config: (clips.index(config.clip_norm) if pool.has_start else 0, rates.index(rate))
        for config in pool.configs
        for rate in [config.learning_rate]
        if config.schedule == schedule and rate in rates
    }
    for config, cell in cells.items():
        mean = pool.mean("test", config)
        values[cell] = np.nan if mean is None else 100 * mean
    colors = colormaps[_MAP].with_extremes(bad="white")
    height = len(clips) / size
    extent = (-0.5, len(rates) - 0.5, -0.5, len(clips) - 0.5)
    image = axes.imshow(
        values, cmap=colors, norm=scale, origin="lower", aspect="auto", extent=extent
    )

    def square(row: int, column: int, **style: Any) -> Rectangle:
        corner = (column - 0.5, row * height - 0.5)
        return Rectangle(corner, 1.0, height, fill=False, clip_on=False, **style)

    def write(row: int, column: int, text: str, **style: Any) -> None:
        middle = (row + 0.5) * height - 0.5
        axes.text(column, middle, text, ha="center", va="center", fontsize=8, **style)

    for row, column in np.ndindex(*values.shape):
        if np.isnan(values[row, column]):
            axes.add_patch(square(row, column, hatch="////", edgecolor="#BBBBBB", linewidth=0))
        else:
            value = values[row, column]
            write(row, column, f"{value:.1f}", color=_ink(colors(scale(value))))
    for config in set(pool.errors) & cells.keys():
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
        write(*cells[config], "error", bbox=box)
    if pool.best in cells:
        for color, width in (("white", 4.0), ("black", 2.0)):
            frame = {"edgecolor": color, "linewidth": width, "zorder": 3}
            axes.add_patch(square(*cells[pool.best], **frame))
    axes.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
    axes.set_yticks(range(len(clips)), [f"{clip:g}" for clip in clips])
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    return image


def _ink(color: tuple[float, ...]) -> str:
    """Return black or white, whichever has more contrast (WCAG) on a color."""
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in color[:3]]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "black" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "white"


def _heatmap_legend(figure: Figure, group: Group) -> None:
    handles = [Patch(fill=False, edgecolor="black", linewidth=2.0, label="best by validation")]
    complete = sum(map(group.expected_size, group.pools.values()))
    if sum(len(pool.means("test")) for pool in group.pools.values()) < complete:
        hatched = {"hatch": "/////", "edgecolor": "#AAAAAA", "linewidth": 0}
        handles.append(Patch(fill=False, label="not run, or error", **hatched))
    figure.legend(handles=handles, loc="upper right", ncols=2, frameon=False, borderaxespad=0.0)


@in_style
def accuracy_lines(group: Group) -> Figure | None:
    """Draw test accuracy against the learning rate at each method's best C_0 by validation.

    Means over the seeds that finished; whiskers from the lowest to the highest of them. Markers
    are shifted sideways so that whiskers do not hide each other. If accuracies spread wide there
    are two panels: the whole range, and the top ten points. Returns None if nothing finished.
    """
    several = len({config.schedule for config in group.configs}) > 1
    lines = {pool.method: _line(pool, several) for pool in group.pools.values() if pool.best}
    if not lines:
        return None
    lowest = min(values[2].min() for _, values in lines.values())
    top = max(values[3].max() for _, values in lines.values())
    figure = new_figure(3.9)
    *whole, close = figure.subplots(1, 1 if lowest >= top - _WHOLE else 2, squeeze=False)[0]
    for axes in whole:
        axes.set_ylim(0.0, 100.0)
        axes.set_title("Whole range")
    bottom = max(top - _ZOOM, lowest - 0.5) if whole else lowest - 0.5
    close.set_ylim(bottom, min(top + 0.5, 100.0))
    close.set_title(f"The top {_ZOOM:g} points" if whole else "")
    looks = styles(list(group.pools))
    rates = sorted({config.learning_rate for config in group.configs})
    for axes in (*whole, close):
        for index, (method, (label, values)) in enumerate(lines.items()):
            shift = 1.0 + 0.03 * (index - (len(lines) - 1) / 2)
            _draw_line(axes, shift, values, label=label, **looks[method])
        axes.set_xscale("log")
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.set_xticks([], minor=True)
        axes.set_xlim(rates[0] / 1.3, rates[-1] * 1.3)
        axes.set_xlabel("learning rate")
        axes.grid(axis="y", **GRID)
    (whole or [close])[0].set_ylabel("test accuracy (%)")
    add_title(figure, f"{group.title}: accuracy at each method's best $C_0$")
    add_legend(figure, close, 3)
    return figure


def _line(pool: Pool, several_schedules: bool) -> tuple[str, np.ndarray]:
    """Return a label and the rows rate, mean, lowest, highest (in %) at the best C_0."""
    best = pool.best
    assert best is not None
    found = [
        (config.learning_rate, 100 * fmean(values), 100 * min(values), 100 * max(values))
        for config in pool.configs
        for values in [pool.test_accuracies(config)]
        if values and (config.clip_norm, config.schedule) == (best.clip_norm, best.schedule)
    ]
    start = f"$C_0$ = {best.clip_norm:g}" if pool.has_start else ""
    chosen = ", ".join(filter(None, [start, best.schedule if several_schedules else ""]))
    return pool.method + (f" ({chosen})" if chosen else ""), np.array(found).T


def _draw_line(axes: Axes, shift: float, values: np.ndarray, **style: Any) -> None:
    rates, means, low, high = values
    look = {"linewidth": 1.6, "markersize": 6.5, "markeredgecolor": "white"}
    axes.plot(rates * shift, means, markeredgewidth=0.6, **look, **style)
    spread = [means - low, high - means]
    bars = {"elinewidth": 1.2, "capsize": 3.0, "zorder": 1.9}
    axes.errorbar(rates * shift, means, spread, fmt="none", ecolor=style["color"], **bars)
