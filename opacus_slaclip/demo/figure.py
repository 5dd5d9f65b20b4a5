"""The demo's figure: thresholds over time, and the last published distribution of norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from opacus_slaclip.demo.records import IndicatorRecord, RunResult, replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# From Okabe and Ito's palette: distinct to color-blind readers, and in their gray values too.
_COLORS = {"flat": "#E69F00", "slaclip": "#0072B2", "slaclip-q": "#009E73"}
# Dashes and marker tell the initial thresholds apart.
_STYLES: tuple[tuple[Any, str], ...] = (
    ("-", "o"),
    ((0, (4, 1.5)), "s"),
    ((0, (1, 1)), "^"),
    ((0, (6, 1.5, 1, 1.5)), "D"),
)
_GRID: dict[str, Any] = {"color": "#E2E2E2", "linewidth": 0.8}
_NOTE: dict[str, Any] = {
    "color": "#444444",
    "bbox": {"facecolor": "white", "edgecolor": "none", "alpha": 0.8},
    "zorder": 4,
}
_LINE_WIDTH = 2.2
_BAND = 2.0  # half-width of the noise band, in standard deviations
_BAND_NOTE = (
    f"points: as released\nline: closest distribution\nband: ±{_BAND:g} std of the noise\n"
    "vertical: threshold"
)


@dataclass(frozen=True)
class _Run:
    """A result and how it is drawn; markers of different size stay visible on one spot."""

    result: RunResult
    color: str
    dashes: Any
    marker: str
    marker_size: float

    def style(self) -> dict[str, Any]:
        return {
            "color": self.color,
            "linestyle": self.dashes,
            "linewidth": _LINE_WIDTH,
            "marker": self.marker,
            "markersize": self.marker_size,
            "markeredgecolor": "white",
        }


def draw(results: Sequence[RunResult], path: Path) -> None:
    """Draw runs of one data set and budget into a PNG file, 1800 pixels wide.

    Left: the threshold after each step, with ``C_0`` marked. Right, if any run published one: the
    last slack indicator as a cumulative distribution of gradient norms, with its noise band.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    runs = _styled(results)
    released = [run for run in runs if run.result.indicator is not None]
    with rc_context({"font.size": 10.5, "axes.spines.top": False, "axes.spines.right": False}):
        spacing = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, wspace=0.06)
        figure = Figure(figsize=(9.0, 4.8), dpi=200, layout=spacing)
        axes = figure.subplots(1, 2 if released else 1, squeeze=False)[0]
        _draw_thresholds(axes[0], runs)
        if released:
            _draw_distribution(axes[1], released)
        _add_legend(figure, axes[0], results)
        replace_file(path, lambda temporary: figure.savefig(temporary, format="png"))


def _styled(results: Sequence[RunResult]) -> list[_Run]:
    clip_norms = list(dict.fromkeys(result.settings.clip_norm for result in results))
    methods = list(dict.fromkeys(result.settings.method for result in results))
    runs = []
    for result in results:
        dashes, marker = _STYLES[clip_norms.index(result.settings.clip_norm) % len(_STYLES)]
        method = result.settings.method
        size = 11.0 - 3.0 * methods.index(method)
        runs.append(_Run(result, _COLORS[method], dashes, marker, size))
    return runs


def _draw_thresholds(axes: Axes, runs: Sequence[_Run]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    for run in runs:
        clip_norms = run.result.clip_norms
        axes.plot(clip_norms, markevery=[0], clip_on=False, label=_label(run.result), **run.style())
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("training step (one logical batch each)")
    axes.set_ylabel("threshold $C_t$ (L2 norm of a gradient)")
    axes.set_title("Clipping threshold over time", loc="left", fontweight="bold")
    axes.margins(x=0.0, y=0.08)
    axes.grid(axis="y", **_GRID)


def _draw_distribution(axes: Axes, runs: Sequence[_Run]) -> None:
    for run in runs:
        if run.result.indicator is not None:
            _draw_indicator(axes, run, run.result.indicator)
    axes.set_xlim(left=0.0)
    axes.set_ylim(0.0, 1.0)
    axes.set_xlabel("L2 norm of a sample's gradient, up to the threshold")
    axes.set_ylabel("fraction of samples at or below")
    axes.set_title("Gradient norms, as last released", loc="left", fontweight="bold")
    axes.text(0.03, 0.97, _BAND_NOTE, transform=axes.transAxes, va="top", **_NOTE)
    axes.grid(axis="y", **_GRID)


def _draw_indicator(axes: Axes, run: _Run, indicator: IndicatorRecord) -> None:
    edges = np.array(indicator.bin_edges[::-1])
    middles = (edges[1:] + edges[:-1]) / 2.0
    values = np.array(indicator.values[::-1])
    low, high = (
        np.clip(values + sign * _BAND * indicator.noise_std, 0.0, 1.0) for sign in (-1.0, 1.0)
    )
    axes.axvline(indicator.bin_edges[0], color=run.color, linestyle=run.dashes, linewidth=1.2)
    axes.fill_between(middles, low, high, color=run.color, alpha=0.15, linewidth=0)
    for edge in (low, high):
        axes.plot(middles, edge, color=run.color, linestyle=run.dashes, linewidth=0.8)
    style = run.style()
    axes.plot(middles, indicator.monotone[::-1], **{**style, "marker": ""})
    dots = {"linestyle": "", "markersize": _dot_size(len(values)), "markeredgewidth": 0.5}
    axes.plot(middles, values, clip_on=False, zorder=3, **{**style, **dots})


def _dot_size(count: int) -> float:
    """Return the diameter in points at which that many dots leave line and band in view."""
    return min(8.0, max(2.5, 70.0 / count))


def _add_legend(figure: Figure, axes: Axes, results: Sequence[RunResult]) -> None:
    settings = results[0].settings
    handles, labels = axes.get_legend_handles_labels()
    legend = figure.legend(
        handles,
        labels,
        title=f"Test accuracy on {settings.data} at $\\varepsilon$ = {settings.epsilon:g}, "
        f"$\\delta$ = {settings.delta:g}, by method and initial threshold $C_0$",
        loc="outside lower center",
        ncols=min(3, len({result.settings.clip_norm for result in results})),
        columnspacing=3,
        frameon=False,
        handlelength=3.2,
    )
    legend.get_title().set_fontweight("bold")


def _label(result: RunResult) -> str:
    settings = result.settings
    return (
        f"{settings.method} from $C_0$ = {settings.clip_norm:g}: {100 * result.test_accuracy:.1f} %"
    )
