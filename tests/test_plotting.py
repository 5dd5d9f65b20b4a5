"""The pictures show the records: values by hand, in the right units, on the axes they are given."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from helpers import batches, private

from opacus_slaclip import SlackIndicator, ThresholdRecorder
from opacus_slaclip.plotting import plot_cdf, plot_cdf_over_time, plot_threshold

matplotlib = pytest.importorskip("matplotlib")


@pytest.fixture
def ax() -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure()
    FigureCanvasAgg(figure)
    return figure.subplots()


def record(step: int, clip_norm: float, values: list[float], **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "clip_norm": clip_norm,
        "next_clip_norm": clip_norm,
        "indicator": values,
        "noise_std": 0.1,
        "expected_batch_size": 8.0,
        "bound": None,
        **changes,
    }


RECORDS = [
    record(1, 4.0, [0.75, 0.25], next_clip_norm=2.0),
    record(2, 2.0, [0.5, 1.25], next_clip_norm=1.0, bound="min"),
    record(3, 1.0, [0.25, -0.25], next_clip_norm=3.0),
]


def recorder_of(records: list[dict[str, Any]]) -> ThresholdRecorder:
    recorder = ThresholdRecorder()
    recorder.load_state_dict({"records": records})
    return recorder


def texts(ax: Any) -> list[str]:
    legend = ax.get_legend()
    return [] if legend is None else [text.get_text() for text in legend.get_texts()]


def drawn(ax: Any) -> None:
    """Render, which is where matplotlib would warn."""
    ax.figure.canvas.draw()


def by_label(ax: Any, label: str) -> Any:
    handles, labels = ax.get_legend_handles_labels()
    return handles[labels.index(label)]


# --- plot_threshold ---


@pytest.mark.parametrize("source", [RECORDS, recorder_of(RECORDS)], ids=["records", "recorder"])
def test_the_line_has_each_threshold_used_and_the_next(ax, source):
    assert plot_threshold(source, ax=ax) is ax

    [line] = ax.lines
    assert line.get_xdata().tolist() == [1, 2, 3, 4]
    assert line.get_ydata().tolist() == [4.0, 2.0, 1.0, 3.0]
    assert ax.get_xlabel() == "step (one release each)"
    assert ax.get_ylabel() == "threshold $C_t$ (L2 norm of a gradient)"
    assert ax.get_yscale() == "linear"
    drawn(ax)


def test_a_bound_is_marked_where_it_stopped_the_threshold(ax):
    plot_threshold([*RECORDS, record(4, 3.0, [0.5], next_clip_norm=50.0, bound="max")], ax=ax)

    assert by_label(ax, "at min_clipbound").get_offsets().tolist() == [[3.0, 1.0]]
    assert by_label(ax, "at max_clipbound").get_offsets().tolist() == [[5.0, 50.0]]
    assert texts(ax) == ["at min_clipbound", "at max_clipbound"]
    drawn(ax)


def test_thresholds_far_apart_are_drawn_on_a_logarithmic_axis(ax):
    plot_threshold([record(1, 40.0, [0.5], next_clip_norm=2.0)], ax=ax)

    assert ax.get_yscale() == "log"
    drawn(ax)


def test_runs_are_told_apart_and_bounds_are_named_once(ax):
    for label in ("first", "second"):
        plot_threshold(RECORDS, ax=ax, label=label)

    assert texts(ax) == ["first", "at min_clipbound", "second"]
    assert len({line.get_color() for line in ax.lines}) == 2
    drawn(ax)


# --- plot_cdf ---

INDICATOR = SlackIndicator(
    values=torch.tensor([0.7, 0.9, 0.2], dtype=torch.float64),
    clip_norm=3.0,
    noise_std=0.25,
    expected_batch_size=8.0,
)


@pytest.mark.parametrize(
    "source", [INDICATOR, record(1, 3.0, [0.7, 0.9, 0.2], noise_std=0.25)], ids=["value", "record"]
)
def test_the_distribution_is_drawn_from_norm_0_to_the_threshold(ax, source):
    assert plot_cdf(source, ax=ax) is ax

    values, edges, _ = by_label(ax, "as released (means of bins)").get_data()
    assert edges.tolist() == [0.0, 1.0, 2.0, 3.0]  # in gradient-norm units
    assert values.tolist() == [0.2, 0.9, 0.7]
    closest, edges, _ = by_label(ax, "closest distribution").get_data()
    assert edges.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert closest.tolist() == pytest.approx([0.2, 0.8, 0.8])
    assert by_label(ax, "threshold $C$ = 3").get_xdata() == [3.0, 3.0]
    assert ax.get_xlabel() == "L2 norm of a sample's gradient"
    assert ax.get_ylabel() == "fraction of samples at or below"
    drawn(ax)


def test_the_band_is_two_standard_deviations_to_each_side(ax):
    plot_cdf(INDICATOR, ax=ax)

    [band] = ax.collections
    assert by_label(ax, "±2 std of the noise").get_facecolor() is not None
    [path] = band.get_paths()
    heights = {
        middle: sorted(
            y for (x, y) in path.vertices.round(9).tolist() if x in (middle - 0.5, middle + 0.5)
        )
        for middle in (0.5, 1.5, 2.5)
    }
    assert {-0.3, 0.7} <= set(heights[0.5])
    assert {0.4, 1.4} <= set(heights[1.5])
    assert {0.2, 1.2} <= set(heights[2.5])
    assert ax.get_ylim() == pytest.approx((-0.3, 1.4))


def test_an_indicator_that_is_not_finite_is_drawn_without_it(ax):
    plot_cdf(record(1, 3.0, [float("nan"), 0.5]), ax=ax)
    plot_cdf_over_time([record(1, 3.0, [float("nan"), float("nan")])], ax=ax)
    drawn(ax)


# --- plot_cdf_over_time ---


def quads(ax: Any) -> dict[tuple[float, float, float, float], float]:
    """The mesh's colored cells: left, right, bottom, top -> fraction."""
    [mesh] = [c for c in ax.collections if type(c).__name__ == "QuadMesh"]
    corners, colors = mesh.get_coordinates(), np.ma.asarray(mesh.get_array())
    rows, columns = corners.shape[0] - 1, corners.shape[1] - 1
    colors = colors.reshape(rows, columns)
    found = {}
    for i in range(rows):
        for j in range(columns):
            if colors[i, j] is not np.ma.masked:
                (left, bottom), (right, top) = corners[i, j], corners[i + 1, j + 1]
                found[left, right, bottom, top] = float(colors[i, j])
    return found


@pytest.mark.parametrize("source", [RECORDS, recorder_of(RECORDS)], ids=["records", "recorder"])
def test_each_column_has_the_bins_of_its_own_threshold(ax, source):
    assert plot_cdf_over_time(source, ax=ax) is ax

    # The closest CDF of (.5, 1.25) is their mean, .875, on both bins; -.25 becomes 0.
    assert quads(ax) == {
        (0.5, 1.5, 0.0, 2.0): 0.25,
        (0.5, 1.5, 2.0, 4.0): 0.75,
        (1.5, 2.5, 0.0, 1.0): 0.875,
        (1.5, 2.5, 1.0, 2.0): 0.875,
        (2.5, 3.5, 0.0, 0.5): 0.0,
        (2.5, 3.5, 0.5, 1.0): 0.25,
    }
    assert ax.get_xlabel() == "step (one release each)"
    assert ax.get_ylabel() == "L2 norm of a sample's gradient"
    assert ax.get_xlim() == (0.5, 3.5)
    [mesh] = [c for c in ax.collections if type(c).__name__ == "QuadMesh"]
    assert mesh.get_cmap().name == "viridis"
    assert mesh.get_clim() == (0.0, 1.0)
    assert mesh.colorbar.ax.get_ylabel() == "fraction of samples at or below"
    drawn(ax)


def test_the_threshold_is_drawn_over_it_and_what_is_above_is_hatched(ax):
    plot_cdf_over_time(RECORDS, ax=ax)

    line = by_label(ax, "threshold $C_t$")
    points = np.column_stack([line.get_xdata(), line.get_ydata()]).tolist()
    assert list(dict.fromkeys(map(tuple, points))) == [
        (0.5, 4.0),
        (1.5, 4.0),
        (1.5, 2.0),
        (2.5, 2.0),
        (2.5, 1.0),
        (3.5, 1.0),
    ]
    unknown = by_label(ax, "above $C_t$: unknown")
    assert unknown.get_hatch() == "///"
    top = ax.get_ylim()[1]
    heights = [y for path in unknown.get_paths() for _, y in path.vertices.tolist()]
    assert (min(heights), max(heights)) == (1.0, top)
    assert top > 4.0


def test_steps_without_a_record_and_missing_slots_stay_blank(ax):
    plot_cdf_over_time([record(1, 2.0, [0.5]), record(4, 2.0, [0.75, 0.25])], ax=ax)

    cells = {cell: value for cell, value in quads(ax).items() if cell[2] < cell[3]}
    assert cells == {
        (0.5, 1.5, 0.0, 2.0): 0.5,
        (3.5, 4.5, 0.0, 1.0): 0.25,
        (3.5, 4.5, 1.0, 2.0): 0.75,
    }
    line = by_label(ax, "threshold $C_t$")
    assert np.isnan(line.get_ydata()).sum() == 1
    drawn(ax)


def test_thresholds_far_apart_make_the_norms_logarithmic(ax):
    plot_cdf_over_time([record(1, 40.0, [1.0, 0.5]), record(2, 2.0, [0.5, 0.25])], ax=ax)

    assert ax.get_yscale() == "log"
    bottom, top = ax.get_ylim()
    assert 0.0 < bottom < 1.0  # the lowest bin of the lowest threshold is seen
    assert top > 40.0
    assert {cell[2] for cell in quads(ax)} == {bottom, 1.0, 20.0}
    drawn(ax)


def test_more_records_than_can_be_seen_are_thinned_evenly(ax):
    many = [record(step, 1.0, [step / 2500]) for step in range(1, 2501)]
    plot_cdf_over_time(many, ax=ax)

    cells = sorted(quads(ax).items())
    assert len(cells) == 1000
    assert cells[0][0][0] == 0.5
    assert cells[-1][0][1] == 2500.5
    for (before, _), (after, _) in pairwise(cells):
        assert before[1] == after[0]
    for (left, right, _, _), value in cells:
        assert left < value * 2500 < right
        assert right - left in (2.0, 3.0)


def test_a_gap_within_thinned_records_is_not_filled(ax):
    steps = [*range(1, 1002), *range(2000, 2999)]  # two a column; the 501st has 1001 and 2000
    plot_cdf_over_time([record(step, 1.0, [0.5]) for step in steps], ax=ax)

    cells = sorted(quads(ax))
    assert cells[500][:2] == (1000.5, 1002.5)
    assert cells[501][0] == 2000.5


# --- all of them ---

PICTURES = {
    "threshold": (plot_threshold, RECORDS),
    "cdf": (plot_cdf, RECORDS[0]),
    "cdf_over_time": (plot_cdf_over_time, RECORDS),
}


@pytest.mark.parametrize(("plot", "source"), PICTURES.values(), ids=PICTURES)
def test_given_axes_leave_pyplot_and_its_settings_alone(ax, plot, source):
    from matplotlib import pyplot, rcParams

    settings, figures = dict(rcParams), pyplot.get_fignums()
    plot(source, ax=ax)
    drawn(ax)

    assert dict(rcParams) == settings
    assert pyplot.get_fignums() == figures


@pytest.mark.parametrize(("plot", "source"), PICTURES.values(), ids=PICTURES)
def test_without_axes_a_figure_is_opened(plot, source):
    from matplotlib import pyplot

    before = pyplot.get_backend()
    pyplot.switch_backend("agg")
    try:
        ax = plot(source)
        assert ax.figure is pyplot.gcf()
        drawn(ax)
        pyplot.close(ax.figure)
    finally:
        pyplot.switch_backend(before)


@pytest.mark.parametrize("plot", [plot_threshold, plot_cdf_over_time])
@pytest.mark.parametrize("source", [[], ThresholdRecorder()], ids=["records", "recorder"])
def test_nothing_recorded_is_an_error_that_says_what_to_do(ax, plot, source):
    with pytest.raises(ValueError, match=r"at least one record, got none\. Attach the recorder"):
        plot(source, ax=ax)


@pytest.mark.parametrize(("plot", "source"), PICTURES.values(), ids=PICTURES)
def test_without_matplotlib_the_error_names_the_remedy(monkeypatch, plot, source):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"needs matplotlib: pip install matplotlib, or .*\[demo"):
        plot(source)


def test_a_real_run_can_be_drawn(ax):
    run = private(num_slots=5)
    recorder = ThresholdRecorder(run.optimizer)
    for batch in batches("mlp", [16] * 6):
        run.step(batch)

    plot_cdf_over_time(recorder, ax=ax)
    plot_threshold(recorder, ax=ax.figure.add_subplot())
    plot_cdf(run.optimizer.slack_indicator, ax=ax.figure.add_subplot())

    assert len(quads(ax)) == 30
    drawn(ax)


def test_the_distribution_of_a_recorder_is_that_of_its_last_record(ax):
    records = [record(1, 1.0, [0.5, 0.2]), record(2, 2.0, [0.9, 0.4])]
    plot_cdf(recorder_of(records), ax=ax)
    assert ax.get_xlim() == (0.0, pytest.approx(1.04 * 2.0))


def test_a_recorder_without_records_has_no_distribution(ax):
    with pytest.raises(ValueError, match="must have a record to draw"):
        plot_cdf(ThresholdRecorder(), ax=ax)
