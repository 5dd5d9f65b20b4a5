"""The look of the report's figures, readable in grayscale and by the color-blind.

Methods differ in color (Okabe and Ito's palette), marker and dashes; orderings use cividis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from benchmarks.report_pools import Group

Figures = TypeVar("Figures", Figure, "Figure | None")

WIDTH = 7.4  # inches: 888 pixels, what a README shows without scaling
DPI = 120
GRID: dict[str, Any] = {"color": "#E2E2E2", "linewidth": 0.8}
CLIP_LABEL = "initial threshold $C_0$ (gradient norm)"
_RC: dict[Any, Any] = {
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.7,
}
_STYLES: dict[str, tuple[str, Any, str]] = {
    "flat": ("#E69F00", "-", "o"),
    "auto-s": ("#CC79A7", (0, (1, 1)), "v"),
    "dc-sgd-e": ("#56B4E9", (0, (6, 1.5, 1, 1.5)), "D"),
    "adaptive": ("#D55E00", (0, (4, 1.5)), "s"),
    "slaclip": ("#0072B2", "-", "^"),
    "slaclip-q": ("#009E73", (0, (3, 1)), "P"),
}
_MORE_STYLES: tuple[tuple[str, Any, str], ...] = (
    ("#000000", (0, (5, 1, 1, 1, 1, 1)), "X"),
    ("#7F7F7F", "-", "*"),
    ("#6A3D9A", (0, (2, 1)), "<"),
)


def styles(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return line styles by method; methods without one of their own get the spare ones."""
    found = {}
    spare = 0
    for method in methods:
        if method in _STYLES:
            color, dashes, marker = _STYLES[method]
        else:
            color, dashes, marker = _MORE_STYLES[spare % len(_MORE_STYLES)]
            spare += 1
        found[method] = {"color": color, "linestyle": dashes, "marker": marker}
    return found


def in_style(draw: Callable[[Group], Figures]) -> Callable[[Group], Figures]:
    """Draw and lay out in the project's look, leaving matplotlib's settings alone."""

    @wraps(draw)
    def styled(group: Group) -> Figures:
        with rc_context(_RC):
            figure = draw(group)
            if figure is not None:
                FigureCanvasAgg(figure).draw()
        return figure

    return styled


def new_figure(height: float) -> Figure:
    """Return an empty figure of the report's width."""
    spacing = ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.05, wspace=0.03, hspace=0.03)
    return Figure(figsize=(WIDTH, height), dpi=DPI, layout=spacing)


def num_columns(panels: int) -> int:
    """Return how many panels stand side by side."""
    return {1: 1, 2: 2, 4: 2}.get(panels, 3)


def ordered_colors(count: int) -> list[Any]:
    """Return colors from dark to light for an ordering, all dark enough on white."""
    return [colormaps["cividis"](0.75 * i / max(count - 1, 1)) for i in range(count)]


def add_legend(figure: Figure, axes: Axes, columns: int) -> None:
    """Put the legend of some axes below all panels."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(columns, max(1, len(labels))),
        frameon=False,
        fontsize=8.5,
        handlelength=3.0,
        columnspacing=1.4,
    )


def add_title(figure: Figure, text: str) -> None:
    """Put a heading at the top left."""
    figure.suptitle(text, x=0.01, ha="left", fontweight="bold", fontsize=10.0)


def label_lowest(axes: np.ndarray, label: str) -> None:
    """Label the x axis of the lowest visible panel of each column, tick labels included."""
    for column in axes.T:
        lowest = [panel for panel in column if panel.get_visible()][-1]
        lowest.set_xlabel(label)
        lowest.tick_params(labelbottom=True)
