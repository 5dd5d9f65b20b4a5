"""The report says what its rows say: choices by validation, statistics by hand, figures as data."""

from __future__ import annotations

import csv
import json
import re

import numpy as np
import pytest
from matplotlib import rcParams
from matplotlib.patches import Rectangle

from benchmarks import methods, report, report_pools, tables
from benchmarks.figure_style import styles
from benchmarks.figures import accuracy_lines, heatmaps
from benchmarks.figures_thresholds import best_trajectories, indicator_curves, starts, trajectory
from benchmarks.report_pools import group
from benchmarks.report_rows import Config, load

PNG_HEADER = b"\x89PNG\r\n\x1a\n"
CELL = {
    "task": "digits",
    "model": "mlp",
    "method": "slaclip",
    "learning_rate": 0.1,
    "clip_norm": 1.0,
    "schedule": "constant",
    "seed": 42,
    "epsilon": 2.0,
    "delta": 1e-5,
    "batch_size": 256,
    "epochs": 3,
    "momentum": 0.9,
    "weight_decay": 0.0,
}


def row(test=0.9, validation=None, *, error=None, diverged=False, clip_norms=None, **cell):
    cell = CELL | cell
    if error is not None:
        return {"cell": cell, "error": error, "seconds": 1.0}
    clip = cell["clip_norm"]
    moves = cell["method"] not in ("flat", "auto-s")
    indicators = [[1, clip, [0.6, 0.3, 0.1]], [30, 1.5, [0.55, 0.35, 0.02]]]
    return {
        "cell": cell,
        "noise_multiplier": 0.9,
        "num_steps": 30,
        "epsilon_spent": 1.99999,
        "validation_accuracy": test if validation is None else validation,
        "test_accuracy": test,
        "final_clip_norm": 1.5,
        "grad_sample_mode": "hooks",
        "seconds": 36.0,
        "diverged": diverged,
        "clip_norms": clip_norms or [[0, clip], [15, 1.2 if moves else clip], [30, 1.5]],
        "indicators": indicators if cell["method"].startswith("slaclip") else [],
        "versions": {"torch": "2.13.0", "opacus": "1.6.0"},
        "machine": "a machine, 2 cores",
    }


def write(path, rows, end=""):
    path.write_text("".join(json.dumps(each) + "\n" for each in rows) + end, encoding="utf-8")
    return path


def groups(tmp_path, rows):
    return group(load([write(tmp_path / "rows.jsonl", rows)]).runs)


def only_group(tmp_path, rows):
    (found,) = groups(tmp_path, rows)
    return found


def only_pool(tmp_path, rows):
    (pool,) = only_group(tmp_path, rows).pools.values()
    return pool


def grid(methods=("flat", "slaclip"), rates=(0.1, 0.5), clips=(0.1, 1.0, 10.0), **cell):
    return [
        row(0.9 - 0.01 * i - 0.002 * k, method=m, learning_rate=r, clip_norm=c, **cell)
        for m in methods
        for i, r in enumerate(rates)
        for k, c in enumerate(clips)
    ]


# Reading


def test_a_torn_last_line_is_ignored_and_a_whole_one_without_newline_is_not(tmp_path):
    torn = load([write(tmp_path / "a", [row()], end='{"cell": {"ta')])
    assert (len(torn.runs), torn.unreadable) == (1, [])
    whole = load([write(tmp_path / "b", [row()], end=json.dumps(row(seed=43)))])
    assert len(whole.runs) == 2


def test_an_unreadable_line_elsewhere_is_skipped_and_listed(tmp_path):
    path = write(tmp_path / "a.jsonl", [row()], end='{"cell": {"ta\n' + json.dumps(row(seed=43)))
    rows = load([path])
    assert (len(rows.runs), rows.unreadable) == (2, ["a.jsonl:2"])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"seconds": 1.0}, "not a row of benchmarks.compare"),
        ([1], "not a row of benchmarks.compare"),
        ({"cell": CELL}, "test_accuracy"),
        (row(test=93.5), r"fractions in \[0, 1\], got \[93.5, 93.5\]"),
        (row(test=float("nan")), r"fractions in \[0, 1\]"),
    ],
)
def test_what_is_no_row_is_refused_with_its_place(tmp_path, bad, message):
    with pytest.raises(ValueError, match=f"x.jsonl:1: .*{message}"):
        load([write(tmp_path / "x.jsonl", [bad])])


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        (row(0.5), row(0.6), 0.6),
        (row(error="E: x"), row(0.6), 0.6),
        (row(0.5), row(error="E: x"), 0.5),
    ],
    ids=["the later", "a result after an error", "a result before an error"],
)
def test_of_duplicates_a_result_beats_an_error_else_the_later_wins(tmp_path, first, second, kept):
    paths = [write(tmp_path / "a", [first]), write(tmp_path / "b", [second])]
    (run,) = load(paths).runs
    assert run.row["test_accuracy"] == kept


def test_integers_and_floats_name_the_same_cell(tmp_path):
    assert len(only_pool(tmp_path, [row(clip_norm=1), row(clip_norm=1.0)]).runs) == 1


def test_runs_that_differ_in_a_shared_setting_are_never_mixed(tmp_path):
    rows = [row(0.9), row(0.5, batch_size=512), row(0.4, epsilon=1.0), row(0.3, extra="new")]
    found = groups(tmp_path, rows)
    assert len(found) == 4
    assert len({each.name for each in found}) == 4
    assert all(len(each.configs) == 1 for each in found)


# Choosing


def test_the_choice_never_reads_test_accuracy(tmp_path):
    validations = {0.1: 0.80, 0.2: 0.85, 0.5: 0.82}
    for poison in (0.0, 1.0):
        rows = [
            row(poison if rate == 0.2 else 0.5, validation, learning_rate=rate)
            for rate, validation in validations.items()
        ]
        assert only_pool(tmp_path, rows).best == Config(0.2, 1.0, "constant")


def test_ties_go_to_the_smaller_rate_then_threshold(tmp_path):
    # 0.1 + 0.2 and 0.3 differ in the last bit: means that are equal but for rounding tie.
    rows = [
        row(0.5, validation, learning_rate=rate, clip_norm=clip, seed=seed)
        for rate, clip, pair in (
            (0.5, 0.1, (0.15, 0.15)),
            (0.1, 1.0, (0.1, 0.2)),
            (0.1, 0.1, (0.2, 0.1)),
        )
        for seed, validation in enumerate(pair)
    ]
    assert only_pool(tmp_path, rows).best == Config(0.1, 0.1, "constant")


def test_one_pool_seed_chooses_and_all_seeds_of_its_cell_are_reported(tmp_path):
    rows = [
        row(0.70, 0.90, learning_rate=0.1, seed=42),
        row(0.72, 0.10, learning_rate=0.1, seed=43),
        row(0.77, 0.10, learning_rate=0.1, seed=44),
        row(0.99, 0.80, learning_rate=0.5, seed=42),
    ]
    (record,) = tables.best_of_pool(only_group(tmp_path, rows))
    assert record["learning_rate"] == 0.1
    assert (record["pool_seeds"], record["validation_mean"]) == ("42", 0.90)
    assert (record["num_seeds"], record["pool_size"]) == (3, 2)
    assert record["test_mean"] == pytest.approx(0.73, abs=1e-12)
    # deviations -.03, -.01, .04: sqrt((9 + 1 + 16) / 2) * .01
    assert record["test_std"] == pytest.approx(0.01 * 13**0.5, abs=1e-12)


def test_with_all_seeds_the_mean_over_them_chooses(tmp_path):
    rows = [
        row(0.5, validation, learning_rate=rate, seed=seed)
        for rate, found in {0.1: (0.9, 0.5, 0.5), 0.5: (0.7, 0.7, 0.7)}.items()
        for seed, validation in zip((42, 43, 44), found, strict=True)
    ]
    pool = only_pool(tmp_path, rows)
    assert pool.seeds == [42, 43, 44]
    assert pool.best == Config(0.5, 1.0, "constant")


def test_an_unfinished_pool_uses_the_seed_that_ran_most(tmp_path):
    rows = [
        row(0.5, 0.6, learning_rate=0.1, seed=42),
        row(0.5, 0.7, learning_rate=0.2, seed=42),
        row(0.5, 0.9, learning_rate=0.5, seed=43),
    ]
    pool = only_pool(tmp_path, rows)
    assert (pool.seeds, pool.best) == ([42], Config(0.2, 1.0, "constant"))


def test_a_configuration_with_an_error_is_not_chosen_and_a_pool_of_errors_has_no_best(tmp_path):
    rows = [row(0.5, 0.6), row(error="E: x", learning_rate=0.5)]
    assert only_pool(tmp_path, rows).best == Config(0.1, 1.0, "constant")
    failed = only_group(tmp_path, [row(error="E: x")])
    (record,) = tables.best_of_pool(failed)
    assert (record["learning_rate"], record["test_mean"], record["num_seeds"]) == (None, None, 0)
    assert "| slaclip | – | – | – | – | – | 0 | 1 | 42 |" in tables.best_markdown(failed)
    assert accuracy_lines(failed) is None
    assert heatmaps(failed).axes


# Robustness


def test_robustness_by_hand(tmp_path):
    flat = (0.90, 0.88, 0.60, 0.19)  # 0.88 is within two points, on the line
    slaclip = (0.93, 0.92, 0.91, 0.20)  # 0.20 is twice chance: not below it
    rows = [
        row(test, method=method, learning_rate=rate)
        for method, tests in {"flat": flat, "slaclip": slaclip}.items()
        for rate, test in zip((0.1, 0.2, 0.5, 1.0), tests, strict=True)
    ]
    rows.append(row(error="E: x", method="slaclip", learning_rate=2.0))
    one, two = tables.robustness(only_group(tmp_path, rows))
    assert one["test_mean"] == pytest.approx(2.57 / 4)
    assert two["test_mean"] == pytest.approx(2.96 / 4)  # the error is not in the mean
    assert (one["share_within_own_best"], one["share_within_overall_best"]) == (2 / 4, 0.0)
    assert (two["share_within_own_best"], two["share_within_overall_best"]) == (3 / 5, 3 / 5)
    assert (one["num_collapsed"], one["num_errors"]) == (1, 0)
    assert (two["num_collapsed"], two["num_errors"]) == (0, 1)
    assert (one["pool_size"], one["pool_expected"], two["pool_size"]) == (4, 5, 5)


def test_robustness_is_over_the_pool_seeds_only(tmp_path):
    rows = [row(0.8), row(0.6, learning_rate=0.5), row(0.0, seed=43)]
    (record,) = tables.robustness(only_group(tmp_path, rows))
    assert record["test_mean"] == pytest.approx(0.7)
    assert (record["num_collapsed"], record["pool_seeds"]) == (0, "42")


@pytest.mark.parametrize(
    ("task", "floor"),
    [("digits", 0.2), ("names", 2 / 18), ("imdb", 0.6), ("CIFAR-10", 0.2), ("new", 0.0)],
)
def test_the_line_of_collapse(tmp_path, task, floor):
    each = only_group(tmp_path, [row(task=task)])
    assert each.pools["slaclip"].floor == pytest.approx(floor)
    stated = f"below {100 * floor:.1f} %" if floor else "number of classes is not known"
    assert stated in tables.robustness_note(each)


def test_a_diverged_run_has_collapsed_and_without_accuracy_counts_as_chance(tmp_path):
    nan = row(learning_rate=0.5, diverged=True) | {
        "test_accuracy": float("nan"),
        "validation_accuracy": None,
    }
    pool = only_pool(tmp_path, [row(0.9), row(0.8, learning_rate=0.2, diverged=True), nan])
    assert [config.learning_rate for config in pool.collapsed] == [0.2, 0.5]
    assert pool.mean("test", Config(0.5, 1.0, "constant")) == pytest.approx(0.1)
    assert pool.best == Config(0.1, 1.0, "constant")


# Methods without C_0


def test_what_the_report_knows_of_methods_is_what_they_are():
    named = report_pools._METHODS
    assert set(named) == {*methods.PAPER, *methods.BEYOND}
    free = {name for name, method in methods.METHODS.items() if not method.uses_clip_norm}
    assert set(report_pools._WITHOUT_START) == free


def without_start(rates, **cell):
    return [
        row(0.9, method="slaclip-auto", learning_rate=rate, clip_norm=0.1, **cell) for rate in rates
    ]


def test_a_method_without_a_start_has_a_whole_pool_in_one_cell_a_rate(tmp_path):
    each = only_group(tmp_path, grid() + without_start((0.1, 0.5)))
    record = tables.best_of_pool(each)[-1]
    assert (record["pool_size"], record["pool_expected"], record["clip_norm"]) == (2, 2, None)
    assert "| slaclip-auto | 0.1 ↓ | – |" in tables.best_markdown(each)
    assert tables.robustness(each)[-1]["pool_expected"] == 2
    assert {r["clip_norm"] for r in tables.pool_cells(each) if r["method"] == "slaclip-auto"} == {
        None
    }
    panel = panels(heatmaps(each))["slaclip-auto"]
    assert texts(panel) == ["90.0", "90.0"]
    assert panel.images[0].get_extent() == panels(heatmaps(each))["flat"].images[0].get_extent()
    frame = panel.patches[-1]
    assert (frame.get_height(), frame.get_xy()) == (3.0, (-0.5, -0.5))  # over all three C_0
    labels = accuracy_lines(each).axes[0].get_legend_handles_labels()[1]
    assert "slaclip-auto" in labels


def test_a_rate_that_only_methods_without_a_start_ran_is_beside_the_pool(tmp_path):
    each = only_group(tmp_path, grid() + without_start((0.1, 0.5, 0.25)))
    assert [record["pool_expected"] for record in tables.robustness(each)] == [6, 6, 2]
    panel = panels(heatmaps(each))["slaclip-auto"]
    assert texts(panel) == ["90.0", "90.0"]
    assert [t.get_text() for t in panel.get_xticklabels()] == ["0.1", "0.5"]


def test_a_cell_is_not_compared_with_itself(tmp_path):
    rows = [row(0.80, method="flat", clip_norm=5.0), row(0.90, method="auto-s", clip_norm=5.0)]
    (record,) = tables.translated(only_group(tmp_path, rows))
    assert (record["method"], record["rival"]) == ("auto-s", "flat")


def test_a_best_rate_at_the_edge_of_the_pool_is_marked(tmp_path):
    rates = {0.1: 0.7, 0.2: 0.8, 0.5: 0.6}
    rows = [row(a, learning_rate=lr, method="flat") for lr, a in rates.items()]
    rows += [row(a, learning_rate=lr, method="adaptive") for lr, a in rates.items() if lr < 0.5]
    rows += [row(a, learning_rate=lr, method="slaclip") for lr, a in rates.items() if lr > 0.1]
    rows += [row(0.8, learning_rate=0.2, method="slaclip-q")]
    table = tables.best_markdown(only_group(tmp_path, rows))
    shown = {line.split(" | ")[0]: line.split(" | ")[1] for line in table.splitlines()}
    assert shown["| flat"] == "0.2"
    assert shown["| adaptive"] == "0.2 ↑"
    assert shown["| slaclip"] == "0.2 ↓"
    assert shown["| slaclip-q"] == "0.2"  # a pool of one rate has no edge


def test_the_translated_rate_is_that_of_flats_best_cell_times_its_threshold(tmp_path):
    flat = {"method": "flat", "clip_norm": 5.0}
    rows = [row(0.80, **flat), row(0.70, learning_rate=0.5, **flat)]  # best: 0.1 x 5
    rows += [row(0.82, seed=43, **flat), row(0.84, seed=44, **flat)]
    rows += [row(0.90, clip_norm=5.0), row(0.10, learning_rate=0.5, clip_norm=5.0)]
    ours = {"method": "slaclip-auto", "clip_norm": 5.0}
    rows += [row(x, seed=s, learning_rate=0.5, **ours) for s, x in ((42, 0.83), (43, 0.87))]
    rows += [row(0.99, learning_rate=0.1, **ours)]  # another rate: of no account
    versus_flat, versus_slaclip = tables.translated(only_group(tmp_path, rows))
    assert versus_flat["learning_rate"] == pytest.approx(0.5)
    assert versus_flat["difference"] == pytest.approx(0.85 - 0.82)
    # Variances 0.0008 (n = 2) and 0.0004 (n = 3).
    assert versus_flat["difference_std"] == pytest.approx((0.0008 / 2 + 0.0004 / 3) ** 0.5)
    assert (versus_flat["num_seeds"], versus_flat["rival_num_seeds"]) == (2, 3)
    assert versus_slaclip["difference"] == pytest.approx(-0.05)
    assert versus_slaclip["difference_std"] is None  # one seed
    table = tables.translated_markdown(only_group(tmp_path, rows))
    assert "at rate 0.5, constant, against the best of | test, % (n) | slaclip-auto, 85.00" in table
    assert "| flat | 82.00 (3) | +3.00 ± 2.31 |" in table
    assert "| slaclip | 90.00 (1) | -5.00 |" in table


def test_the_threshold_of_auto_s_multiplies_its_learning_rate(tmp_path):
    rows = [row(0.80, method="flat", clip_norm=5.0)]  # 0.1 x 5
    rows += [row(0.70, method="auto-s", learning_rate=0.5, clip_norm=1.0)]
    rows += [row(0.71, method="auto-s", seed=s, clip_norm=5.0) for s in (42, 43)]  # the same rate
    rows += [row(0.90, method="auto-s", learning_rate=0.5, clip_norm=5.0)]  # its best; another
    versus_flat, versus_itself = tables.translated(only_group(tmp_path, rows))
    assert (versus_flat["method"], versus_flat["num_seeds"]) == ("auto-s", 2)
    assert versus_flat["difference"] == pytest.approx(-0.09)
    assert versus_itself["difference"] == pytest.approx(-0.19)


@pytest.mark.parametrize("methods_run", [("flat", "slaclip"), ("slaclip", "slaclip-auto")])
def test_nothing_is_translated_without_both_sides(tmp_path, methods_run):
    rows = [row(method=method, learning_rate=1.0) for method in methods_run]
    assert tables.translated_markdown(only_group(tmp_path, rows)) == ""


# Figures


def texts(axes):
    return [text.get_text() for text in axes.texts]


def panels(figure):
    return {axes.get_title(loc="left"): axes for axes in figure.axes if axes.get_title(loc="left")}


def test_heatmaps_have_a_panel_a_method_one_scale_and_every_number(tmp_path):
    rows = [*grid(), row(error="E: x", learning_rate=0.5, clip_norm=5.0)]
    figure = heatmaps(only_group(tmp_path, rows))
    found = panels(figure)
    assert list(found) == ["flat", "slaclip"]
    assert len(figure.axes) == 3  # the third is the only color bar
    assert figure.axes[-1].get_ylabel() == "mean test accuracy (%)"
    images = [axes.images[0] for axes in found.values()]
    assert len({(image.norm.vmin, image.norm.vmax, image.cmap.name) for image in images}) == 1
    shown = ["90.0", "89.0", "89.8", "88.8", "89.6", "88.6"]
    assert texts(found["flat"]) == shown  # C_0 = 5 was not run
    assert texts(found["slaclip"]) == [*shown, "error"]
    hatched = [p for p in found["slaclip"].patches if isinstance(p, Rectangle) and p.get_hatch()]
    assert len(hatched) == 2
    assert [t.get_text() for t in found["flat"].get_xticklabels()] == ["0.1", "0.5"]
    assert [t.get_text() for t in found["flat"].get_yticklabels()] == ["0.1", "1", "5", "10"]
    assert figure.get_supylabel() == "initial threshold $C_0$ (gradient norm)"
    assert {axes.get_xlabel() for axes in found.values()} == {"learning rate"}


def test_heatmaps_have_a_row_a_schedule_and_frame_the_choice(tmp_path):
    rows = grid() + grid(schedule="cosine")
    rows.append(row(0.1, 0.99, learning_rate=0.5, clip_norm=10.0, schedule="cosine"))
    found = panels(heatmaps(only_group(tmp_path, rows)))
    assert sorted(found) == [
        "flat, constant",
        "flat, cosine",
        "slaclip, constant",
        "slaclip, cosine",
    ]
    assert not found["slaclip, constant"].patches
    frame = found["slaclip, cosine"].patches[-1]
    assert frame.get_xy() == (0.5, 1.5)


def test_annotations_keep_their_contrast_on_every_color(tmp_path):
    rows = [row(0.7 + 0.01 * k, learning_rate=0.01 * (k + 1)) for k in range(24)]
    axes = panels(heatmaps(only_group(tmp_path, rows)))["slaclip"]
    image = axes.images[0]
    for text, value in zip(axes.texts, image.get_array()[0], strict=True):
        rgb = np.array(image.cmap(image.norm(value))[:3])
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        luminance = float(linear @ [0.2126, 0.7152, 0.0722])
        contrast = 1.05 / (luminance + 0.05)
        if text.get_color() == "black":
            contrast = (luminance + 0.05) / 0.05
        assert contrast >= 4.5  # WCAG AA for small text


def test_accuracy_lines_show_means_and_ranges_at_the_best_threshold(tmp_path):
    rows = [
        row(test, learning_rate=rate, clip_norm=clip, seed=seed)
        for clip, low in {1.0: 0.9, 10.0: 0.5}.items()
        for rate in (0.1, 0.5)
        for seed, test in ((42, low), (43, low + 0.02))
    ]
    figure = accuracy_lines(only_group(tmp_path, rows))
    (axes,) = figure.axes  # all within the close-up: no second panel
    (line,) = [line for line in axes.lines if line.get_label() == "slaclip ($C_0$ = 1)"]
    assert np.allclose(line.get_ydata(), 91.0, rtol=1e-12)
    (bars,) = axes.containers
    ends = [segment[:, 1] for segment in bars[2][0].get_segments()]
    assert np.allclose(ends, [[90.0, 92.0]] * 2, rtol=1e-12)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("learning rate", "test accuracy (%)")


def test_a_wide_spread_of_accuracies_gets_a_close_up(tmp_path):
    figure = accuracy_lines(only_group(tmp_path, [row(0.9), row(0.1, learning_rate=0.5)]))
    assert list(panels(figure)) == ["Whole range", "The top 10 points"]


def test_a_trajectory_is_median_and_range_over_seeds(tmp_path):
    tracks = ([[0, 1.0], [10, 4.0]], [[0, 1.0], [10, 2.0]], [[0, 1.0], [10, 2.5]])
    tracks += ([[0, 1.0], [10, float("nan")]],)
    rows = [row(seed=seed, clip_norms=track) for seed, track in enumerate(tracks)]
    pool = only_pool(tmp_path, rows)
    found = trajectory(pool.finished_runs(pool.best))
    # The last run ends at step 0.
    assert np.allclose(found, [[0, 1, 1, 1], [10, 2, 2.5, 4]], rtol=1e-12)
    assert trajectory([]) is None


def test_trajectories_are_labelled_and_logarithmic(tmp_path):
    each = only_group(tmp_path, grid(methods=("flat", "adaptive", "slaclip")))
    axes = best_trajectories(each).axes[0]
    labels = axes.get_legend_handles_labels()[1]
    assert labels == [f"{m} (lr 0.1, $C_0$ = 0.1)" for m in ("flat", "adaptive", "slaclip")]
    assert axes.get_yscale() == "log"
    assert "step" in axes.get_xlabel()
    assert "gradient norm" in axes.get_ylabel()


def test_starts_show_every_initial_threshold_of_what_moves(tmp_path):
    still = [[0, 1.0], [30, 1.0]]
    rows = [*grid(methods=("slaclip", "slaclip-q")), row(method="flat", clip_norms=still)]
    free = row(method="slaclip-auto", clip_norms=[[0, 1e-4], [30, 1.5]])
    found = panels(starts(only_group(tmp_path, [*rows, free])))
    assert list(found) == ["slaclip (lr 0.1)", "slaclip-q (lr 0.1)", "slaclip-auto (lr 0.1)"]
    searched = found.pop("slaclip-auto (lr 0.1)")
    assert searched.get_legend_handles_labels()[1] == ["no $C_0$"]
    assert searched.lines[0].get_ydata()[0] == pytest.approx(1e-4)
    for axes in found.values():
        labels = axes.get_legend_handles_labels()[1]
        assert labels == ["$C_0$ = 0.1", "$C_0$ = 1", "$C_0$ = 10"]
        first = [line.get_ydata()[0] for line in axes.lines]
        assert np.allclose(first, [0.1, 1.0, 10.0], rtol=1e-12)
    assert starts(only_group(tmp_path, rows[-1:])) is None


def test_indicators_are_drawn_over_their_bins(tmp_path):
    figure = indicator_curves(only_group(tmp_path, [row(clip_norm=3.0)]))
    (axes,) = panels(figure).values()
    first, last = axes.lines
    # K = 3, C = 3: bins [0, 1], [1, 2], [2, 3]; the first slot is the last bin.
    assert np.allclose(first.get_xdata(), [0.5, 1.5, 2.5], rtol=1e-12)
    assert list(first.get_ydata()) == [0.1, 0.3, 0.6]
    assert np.allclose(last.get_xdata(), [0.25, 0.75, 1.25], rtol=1e-12)
    assert last.get_label() == "30: $C$ = 1.5"
    assert indicator_curves(only_group(tmp_path, [row(method="flat")])) is None


def test_each_panel_of_indicators_shows_its_own_norms(tmp_path):
    values = [0.9, 0.5]
    low = row(method="slaclip-q") | {"indicators": [[1, 0.1, values], [30, 0.11, values]]}
    searched = [[1, 1e-4, values], [10, 0.1, values], [30, 8.0, values]]
    rows = [low, row(method="slaclip-auto") | {"indicators": searched}]
    narrow, wide = panels(indicator_curves(only_group(tmp_path, rows))).values()
    assert (narrow.get_xscale(), narrow.get_xlim()) == ("linear", (0.0, pytest.approx(0.1133)))
    assert wide.get_xscale() == "log"
    # The first step's threshold is far below the axis: no line, and no entry of the legend.
    assert [line.get_label() for line in wide.lines] == ["10: $C$ = 0.1", "30: $C$ = 8"]
    assert all(line.get_xdata().max() > wide.get_xlim()[0] for line in wide.lines)


def test_methods_differ_in_color_marker_and_dashes(tmp_path):
    known = ["flat", "auto-s", "dc-sgd-e", "adaptive", "slaclip", "slaclip-q", "new", "newer"]
    looks = styles(known).values()
    assert len({look["color"] for look in looks}) == len(known)
    assert len({look["marker"] for look in looks}) == len(known)


# All of it


def test_one_command_makes_everything_and_the_same_bytes_again(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = dict(rcParams)
    rows = grid(methods=("flat", "slaclip", "slaclip-unit"))
    rows += [row(0.8, seed=43, clip_norm=0.1), row(error="Boom: no\nlast line", clip_norm=5.0)]
    write(tmp_path / "rows.jsonl", rows, end='{"torn')
    for folder in ("a", "b"):
        assert report.main(["rows.jsonl", "--output-dir", folder]) == 0
    listed = capsys.readouterr().out.split()
    assert dict(rcParams) == settings
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    kinds = ("heatmaps", "learning-rate", "norms", "starts", "thresholds")
    images = [f"digits-mlp-eps2-{kind}.png" for kind in kinds]
    assert names == sorted(["best.csv", "pool.csv", "robustness.csv", "report.md", *images])
    assert sorted(listed) == sorted(f"{folder}/{name}" for folder in "ab" for name in names)
    for name in set(names) - {"report.md"}:
        content = (tmp_path / "a" / name).read_bytes()
        assert content == (tmp_path / "b" / name).read_bytes()
        assert content.startswith(PNG_HEADER) == name.endswith(".png")
        assert len(content) < 150_000
    text = (tmp_path / "a" / "report.md").read_text(encoding="utf-8")
    assert re.findall(r"\]\((\S+\.png)\)", text) == [
        f"digits-mlp-eps2-{kind}.png" for kind in report.FIGURES
    ]
    assert "python -m benchmarks.report rows.jsonl --output-dir a\n" in text
    for said in (
        "| slaclip | 0.1 ↓ | 0.1 | constant | 90.00 | **85.00 ± 7.07** | 2 | 7 | 42 |",
        "| slaclip-unit | 0.1 ↓ | 0.1 | constant | 90.00 | 90.00 | 1 | 6 of 7 | 42 |",
        "Machine: a machine, 2 cores.",
        "Versions: opacus 1.6.0, torch 2.13.0.",
        "ε spent: 1.99999.",
        'slaclip, lr 0.1, C_0 5, constant, seed 42: "last line"',
    ):
        assert said in text
    with (tmp_path / "a" / "best.csv").open(encoding="utf-8", newline="") as file:
        records = list(csv.DictReader(file))
    assert [record["method"] for record in records] == ["flat", "slaclip", "slaclip-unit"]
    assert float(records[1]["test_mean"]) == pytest.approx(0.85)
    assert records[0]["test_std"] == ""


def test_a_file_without_rows_is_an_error(tmp_path, capsys):
    empty = write(tmp_path / "empty.jsonl", [])
    assert report.main([str(empty), "--output-dir", str(tmp_path / "out")]) == 1
    assert "no rows in" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
