"""The demo's figure: thresholds over time, and the last published distribution of norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from opacus_slaclip.demo.records import IndicatorRecord, RunResult, replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colors: distinct to color-blind readers, and here also in their gray values.
_COLORS = {"flat": "#E69F00", "slaclip": "#0072B2", "slaclip-q": "#CC79A7"}
# Dashes and marker tell the initial thresholds apart, in gray as well.
_STYLES = (("-", "o"), ((0, (5, 2)), "s"), ((0, (1, 1.2)), "^"), ((0, (6, 2, 1, 2)), "D"))
_GRAY = "#555555"
_BAND = 2.0  # half-width of the noise band, in standard deviations


@dataclass(frozen=True)
class _Run:
    result: RunResult
    color: str
    dashes: object
    marker: str


def draw(results: Sequence[RunResult], path: Path) -> None:
    """Draw the runs into a PNG file, 1800 pixels wide.

    Left: the threshold after each step, with ``C_0`` marked. Right, if any run published one: the
    last slack indicator as a cumulative distribution of gradient norms, with its noise band.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    runs = _styled(results)
    with rc_context({"font.size": 10.5, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(9.0, 4.6), dpi=200, layout="constrained")
        released = [run for run in runs if run.result.indicator is not None]
        axes = figure.subplots(1, 2 if released else 1, squeeze=False)[0]
        _draw_thresholds(axes[0], runs)
        if released:
            _draw_distribution(axes[1], released)
        _add_legend(figure, axes[0], results)
        replace_file(path, lambda temporary: figure.savefig(temporary, format="png"))


def _styled(results: Sequence[RunResult]) -> list[_Run]:
    clip_norms = list(dict.fromkeys(result.settings.clip_norm for result in results))
    runs = []
    for result in results:
        order = clip_norms.index(result.settings.clip_norm)
        dashes, marker = _STYLES[order % len(_STYLES)]
        runs.append(_Run(result, _COLORS[result.settings.method], dashes, marker))
    return runs


def _draw_thresholds(axes: Axes, runs: Sequence[_Run]) -> None:
    for run in runs:
        clip_norms = run.result.clip_norms
        axes.plot(
            range(len(clip_norms)),
            clip_norms,
            color=run.color,
            linestyle=run.dashes,
            linewidth=2.2,
            marker=run.marker,
            markersize=8,
            markeredgecolor="white",
            markevery=[0],
            clip_on=False,
            label=_label(run.result),
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("training step")
    axes.set_ylabel("clipping threshold $C_t$ (L2 gradient norm)")
    axes.set_title("The threshold over time", loc="left", fontweight="bold")
    axes.margins(x=0.0, y=0.08)
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.8)


def _draw_distribution(axes: Axes, runs: Sequence[_Run]) -> None:
    for run in runs:
        indicator = run.result.indicator
        if indicator is not None:
            _draw_indicator(axes, run, indicator)
    axes.set_xlim(left=0.0)
    axes.set_ylim(0.0, 1.0)
    axes.set_xlabel("L2 norm of a sample's gradient, up to the last threshold")
    axes.set_ylabel("fraction of samples at or below")
    axes.set_title("Gradient norms, as last released", loc="left", fontweight="bold")
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.8)


def _draw_indicator(axes: Axes, run: _Run, indicator: IndicatorRecord) -> None:
    edges = np.array(indicator.bin_edges[::-1])
    values = np.array(indicator.values[::-1])
    reach = _BAND * indicator.noise_std
    axes.stairs(
        np.clip(values + reach, 0.0, 1.0),
        edges,
        baseline=np.clip(values - reach, 0.0, 1.0),
        fill=True,
        color=run.color,
        alpha=0.2,
        linewidth=0,
    )
    axes.plot(
        (edges[1:] + edges[:-1]) / 2.0,
        indicator.monotone[::-1],
        color=run.color,
        linestyle=run.dashes,
        linewidth=2.2,
        marker=run.marker,
        markersize=7,
        markeredgecolor="white",
    )


def _add_legend(figure: Figure, axes: Axes, results: Sequence[RunResult]) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=2,
        frameon=False,
        handlelength=4,
    )


def _label(result: RunResult) -> str:
    settings = result.settings
    return f"{settings.method}, $C_0$ = {settings.clip_norm:g}: {100 * result.test_accuracy:.1f} %"
