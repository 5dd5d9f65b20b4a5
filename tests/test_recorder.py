"""A recorder keeps what was released, no more and no less, and gives it out in other forms."""

from __future__ import annotations

import copy
import csv
import gc
import io
import json
import math
import pickle
import re
import subprocess
import sys
import types
import warnings
import weakref
from array import array
from typing import Any

import pytest
import torch
from cases import CASES, make
from distributed_helpers import FAMILIES, on_ranks, private_on_rank, share
from helpers import batches, private, samples, vector
from opacus.utils.batch_memory_manager import BatchMemoryManager
from test_checkpoint import Secrets, live_tensors_equal_to, secretive

from opacus_slaclip import FixedController, ThresholdRecorder

MODES = ["hooks-mlp", "functorch-cnn", "no_op-mlp", "ghost-mlp", "ghost-embedding"]
KEYS = [
    "step",
    "clip_norm",
    "next_clip_norm",
    "indicator",
    "noise_std",
    "expected_batch_size",
    "bound",
]


def released(optimizer: Any, clip_norm: float) -> dict[str, Any]:
    """What a record must hold, read from the optimizer after a step at `clip_norm`."""
    indicator = optimizer.slack_indicator
    bounds = {optimizer.min_clipbound: "min", optimizer.max_clipbound: "max"}
    return {
        "step": optimizer.num_releases,
        "clip_norm": clip_norm,
        "next_clip_norm": optimizer.max_grad_norm,
        "indicator": indicator.values.tolist(),
        "noise_std": indicator.noise_std,
        "expected_batch_size": indicator.expected_batch_size,
        "bound": bounds.get(optimizer.max_grad_norm),
    }


def stepped(run: Any, data: Any) -> list[dict[str, Any]]:
    expected = []
    for batch in data:
        clip_norm = run.optimizer.max_grad_norm
        run.step(batch)
        expected.append(released(run.optimizer, clip_norm))
    return expected


def recorded(num_steps: int, **kwargs: Any) -> tuple[Any, ThresholdRecorder]:
    run = private(**kwargs)
    recorder = ThresholdRecorder(run.optimizer)
    for batch in batches("mlp", [6] * num_steps):
        run.step(batch)
    return run, recorder


# --- what is recorded ---


@pytest.mark.parametrize("name", MODES)
def test_there_is_one_record_for_each_release_and_it_is_the_release(name):
    run = make(CASES[name])
    recorder = ThresholdRecorder(run.optimizer)

    expected = stepped(run, run.case.batches(9, 6, 12, 5))

    assert recorder.records == expected
    assert recorder.last == expected[-1]
    assert len(recorder) == 4
    assert list(expected[0]) == KEYS == list(recorder.records[0])
    assert len({record["clip_norm"] for record in expected}) == 4


@pytest.mark.parametrize("name", ["hooks-mlp", "ghost-mlp"])
def test_virtual_batches_leave_one_record_for_each_logical_batch(name):
    run = make(CASES[name])
    recorder = ThresholdRecorder(run.optimizer)
    thresholds, expected, num_physical = [run.optimizer.max_grad_norm], [], 0

    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=5, optimizer=run.optimizer
    ) as physical:
        for batch in physical:
            run.step(batch)
            num_physical += 1
            assert len(recorder) == run.optimizer.num_releases
            if len(recorder) > len(expected):
                expected.append(released(run.optimizer, thresholds[-1]))
                thresholds.append(run.optimizer.max_grad_norm)

    assert recorder.records == expected
    assert num_physical > len(expected) == len(run.loader)


def test_accumulated_iterations_are_in_the_recorded_batch_size():
    run = private(poisson_sampling=False)
    recorder = ThresholdRecorder(run.optimizer)
    for _ in range(2):
        run.backward(samples("mlp", 16))
    run.optimizer.step()

    assert recorder.last["expected_batch_size"] == 2 * 16


def test_a_refused_step_leaves_no_record():
    run, recorder = recorded(1)
    before = recorder.records

    with pytest.raises(ValueError, match="cleared since the last"):
        run.optimizer.step()
    run.step(samples("mlp", 4))

    assert recorder.records[:-1] == before
    assert [record["step"] for record in recorder.records] == [1, 2]


def test_the_step_that_initializes_a_state_leaves_no_record():
    run = private()
    recorder = ThresholdRecorder(run.optimizer)
    learning_rate = run.optimizer.param_groups[0]["lr"]
    for parameter in run.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    run.optimizer.param_groups[0]["lr"] = 0.0

    run.optimizer.step()

    assert recorder.records == []
    run.optimizer.param_groups[0]["lr"] = learning_rate
    run.step(samples("mlp", 5))
    assert len(recorder) == 1


def test_a_release_whose_controller_fails_leaves_no_record():
    def controller(clip_norm: float, indicator: Any) -> float:
        if len(recorder) == 1:
            raise ArithmeticError("no idea")
        return clip_norm

    run = private(controller=controller)
    recorder = ThresholdRecorder(run.optimizer)
    run.step(samples("mlp", 5))

    with pytest.raises(ArithmeticError, match="no idea"):
        run.step(samples("mlp", 6))

    assert len(recorder) == 1


@pytest.mark.parametrize(
    ("max_grad_norm", "values", "expected"),
    [(0.11, 1.0, "min"), (49.0, 1e3, "max"), (1.0, 1.0, None)],
)
def test_a_bound_that_was_hit_is_named(max_grad_norm, values, expected):
    # Without noise: norm 0 everywhere shrinks the threshold, norms far above it make it grow.
    private_vector = vector(1, max_grad_norm=max_grad_norm, num_slots=4, expected_batch_size=4)
    recorder = ThresholdRecorder(private_vector.optimizer)
    norms = 0.0 if expected == "min" else values
    private_vector.release(torch.full((8, 1), norms))

    assert recorder.last["bound"] == expected
    bounds = {"min": 0.1, "max": 50.0}
    if expected is not None:
        assert recorder.last["next_clip_norm"] == bounds[expected]


@pytest.mark.parametrize(
    "options",
    [
        {"controller": FixedController(), "max_grad_norm": 0.1},
        {"min_clipbound": 1.0, "max_clipbound": 1.0, "max_grad_norm": 1.0},
    ],
)
def test_a_threshold_that_is_held_on_purpose_hits_no_bound(options):
    _, recorder = recorded(1, **options)

    assert recorder.last["next_clip_norm"] == recorder.last["clip_norm"]
    assert recorder.last["bound"] is None


def test_a_recorder_changes_nothing_about_the_run():
    run, _ = recorded(4)
    plain = private()
    for batch in batches("mlp", [6] * 4):
        plain.step(batch)

    assert all(map(torch.equal, run.parameters, plain.parameters))
    assert run.thresholds == plain.thresholds


# --- attaching ---


def test_a_wrapper_that_copied_the_attributes_can_be_attached_to():
    run = private()
    wrapper = object.__new__(type(run.optimizer))
    wrapper.__dict__ = dict(run.optimizer.__dict__)
    recorder = ThresholdRecorder(wrapper)

    run.step(samples("mlp", 6))

    assert len(recorder) == 1


def test_a_detached_recorder_keeps_its_records_and_takes_no_more():
    run, recorder = recorded(2)

    recorder.detach()
    recorder.detach()
    run.step(samples("mlp", 5))

    assert [record["step"] for record in recorder.records] == [1, 2]


def test_attaching_twice_records_once_and_attaching_elsewhere_moves():
    run, recorder = recorded(1)
    recorder.attach(run.optimizer)
    run.step(samples("mlp", 5))
    assert len(recorder) == 2

    other = private()
    other.optimizer.continue_from(run.optimizer)
    recorder.attach(other.optimizer)
    run.step(samples("mlp", 5))
    other.step(samples("mlp", 5))

    assert [record["step"] for record in recorder.records] == [1, 2, 3]


def test_several_recorders_record_the_same():
    run = private()
    first, second = ThresholdRecorder(run.optimizer), ThresholdRecorder(run.optimizer)
    run.step(samples("mlp", 5))
    first.detach()
    run.step(samples("mlp", 5))

    assert first.records == second.records[:1]
    assert len(second) == 2


def test_an_error_in_a_hook_costs_neither_the_update_nor_the_charge():
    run, other = private(), private()

    def fails(optimizer):
        raise KeyError("hook")

    run.optimizer.register_release_hook(fails)
    with pytest.raises(KeyError):
        run.step(samples("mlp", 5))
    other.step(samples("mlp", 5))

    assert all(map(torch.equal, run.parameters, other.parameters))
    assert run.optimizer.max_grad_norm == other.optimizer.max_grad_norm
    assert run.engine.accountant.history == other.engine.accountant.history


def test_a_hook_may_remove_itself():
    run = private()
    steps = []

    def once(optimizer: Any) -> None:
        steps.append((optimizer.num_releases, optimizer.max_grad_norm))
        handle.remove()

    handle = run.optimizer.register_release_hook(once)
    other = ThresholdRecorder(run.optimizer)
    run.step(samples("mlp", 5))
    after = run.optimizer.max_grad_norm
    run.step(samples("mlp", 5))

    assert steps == [(1, after)]
    assert len(other) == 2


@pytest.mark.parametrize("optimizer", ["slaclip", torch.optim.SGD([torch.zeros(1)], lr=0.1)])
def test_only_an_optimizer_that_releases_can_be_attached_to(optimizer):
    with pytest.raises(TypeError, match=r"one of SlaClip's, .* got (str|SGD). Pass what make_priv"):
        ThresholdRecorder(optimizer)


def test_an_optimizer_of_opacus_is_refused():
    with pytest.raises(TypeError, match="got DPOptimizer"):
        ThresholdRecorder(private(clipping="flat").optimizer)


# --- memory ---


def test_the_newest_records_are_kept():
    run = private()
    everything, newest = (
        ThresholdRecorder(run.optimizer, max_records=count) for count in (None, 3)
    )
    for batch in batches("mlp", [6] * 5):
        run.step(batch)

    assert newest.records == everything.records[-3:]
    assert repr(newest) == "ThresholdRecorder(3 records, max_records=3)"
    assert repr(everything) == "ThresholdRecorder(5 records)"


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "3"])
def test_another_number_of_records_is_refused(value):
    with pytest.raises(ValueError, match=r"max_records must be a positive integer, got .*None"):
        ThresholdRecorder(max_records=value)


def test_a_recorder_keeps_no_optimizer_alive():
    run, recorder = recorded(1)
    gone = weakref.ref(run.optimizer)
    del run
    gc.collect()

    assert gone() is None
    assert len(recorder) == 1
    recorder.detach()


# --- checkpoints ---


def checkpoint(run: Any, recorder: ThresholdRecorder) -> dict[str, Any]:
    """Through a file that may hold nothing but plain values and tensors."""
    file = io.BytesIO()
    torch.save(
        {
            "model": run.model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "recorder": recorder.state_dict(),
        },
        file,
    )
    file.seek(0)
    return torch.load(file, weights_only=True)


def resume(run: Any, recorder: ThresholdRecorder, saved: dict[str, Any]) -> None:
    run.model.load_state_dict(saved["model"])
    run.optimizer.load_state_dict(saved["optimizer"])
    recorder.load_state_dict(saved["recorder"])


def test_a_resumed_run_goes_on_with_the_sequence():
    straight, expected = recorded(6, noise_multiplier=0.0)
    begun, recorder = recorded(3, noise_multiplier=0.0)
    saved = checkpoint(begun, recorder)

    resumed = private(noise_multiplier=0.0)
    continued = ThresholdRecorder(resumed.optimizer)
    resume(resumed, continued, saved)
    for batch in batches("mlp", [6] * 6)[3:]:
        resumed.step(batch)

    assert continued.records == expected.records
    assert all(map(torch.equal, resumed.parameters, straight.parameters))


@pytest.mark.parametrize("is_loaded", [True, False])
def test_going_back_drops_the_records_of_the_abandoned_timeline(is_loaded):
    run, recorder = recorded(2)
    saved = checkpoint(run, recorder)
    kept = recorder.records
    for batch in batches("mlp", [7, 8, 9], seed=50):
        run.step(batch)
    assert len(recorder) == 5

    if is_loaded:
        resume(run, recorder, saved)
        assert recorder.records == kept
    else:
        run.optimizer.load_state_dict(saved["optimizer"])
    clip_norm = run.optimizer.max_grad_norm
    run.step(samples("mlp", 4))

    assert recorder.records == [*kept, released(run.optimizer, clip_norm)]


def test_a_state_is_plain_and_trimmed_to_what_is_kept():
    _, recorder = recorded(4)
    state = json.loads(json.dumps(recorder.state_dict()))

    newest = ThresholdRecorder(max_records=2)
    newest.load_state_dict(state)

    assert newest.records == recorder.records[2:]
    state["records"][3]["indicator"][0] = 7.0
    assert newest.last["indicator"] != state["records"][3]["indicator"]


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({}, "KeyError"),
        ({"records": [{"step": 1}]}, "KeyError"),
        ({"records": [{"indicator": [0.5], "surprise": 1}]}, "TypeError"),
        ({"records": None}, "TypeError"),
        ("twice", "steps do not increase"),
    ],
)
def test_a_state_that_is_something_else_is_refused_and_changes_nothing(state, reason):
    _, recorder = recorded(2)
    before = recorder.records
    if state == "twice":
        state = {"records": 2 * before}

    with pytest.raises(ValueError, match=f"state must be the state_dict.*unmodified.*{reason}"):
        recorder.load_state_dict(state)

    assert recorder.records == before


# --- copies ---

COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda recorder: pickle.loads(pickle.dumps(recorder)),
}


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_a_copy_has_the_records_and_is_detached(duplicate):
    run, recorder = recorded(2)
    recorder.log_to(writer := Writer())
    copied = duplicate(recorder)
    assert copied.records == recorder.records

    copied.detach()  # not the original
    run.step(samples("mlp", 5))
    assert len(recorder) == 3
    assert copied.records == recorder.records[:2]

    recorder.detach()
    copied.attach(run.optimizer)
    run.step(samples("mlp", 5))
    assert [record["step"] for record in copied.records] == [1, 2, 4]
    assert {step for _, _, step in writer.scalars} == {1, 2, 3}, "the copy writes too"


def test_a_copied_ghost_module_tells_nobody():
    run = make(CASES["ghost-mlp"])
    recorder = ThresholdRecorder(run.optimizer)
    copied = copy.deepcopy(run.model)

    assert len(copied._state.release_hooks) == 0
    run.train(run.case.batches(4))
    assert len(recorder) == 1


# --- tables ---


def table(path: Any) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_csv_file_gives_back_the_same_bits(tmp_path):
    _, recorder = recorded(5, max_grad_norm=0.1)
    recorder.to_csv(tmp_path / "run.csv")

    rows = table(tmp_path / "run.csv")
    num_slots = len(recorder.last["indicator"])
    assert list(rows[0]) == [
        *(key for key in KEYS if key != "indicator"),
        *(f"slot_{j}" for j in range(1, num_slots + 1)),
    ]
    back = [
        {
            "step": int(row["step"]),
            "clip_norm": float(row["clip_norm"]),
            "next_clip_norm": float(row["next_clip_norm"]),
            "indicator": [float(row[f"slot_{j + 1}"]) for j in range(num_slots)],
            "noise_std": float(row["noise_std"]),
            "expected_batch_size": float(row["expected_batch_size"]),
            "bound": row["bound"] or None,
        }
        for row in rows
    ]
    assert back == recorder.records


def test_a_table_has_room_for_the_most_slots(tmp_path):
    run, recorder = recorded(1, num_slots=2)
    other = private(num_slots=4)
    other.optimizer.continue_from(run.optimizer)
    recorder.attach(other.optimizer)
    other.step(samples("mlp", 5))
    recorder.to_csv(tmp_path / "run.csv")

    rows = table(tmp_path / "run.csv")
    assert [row["slot_4"] == "" for row in rows] == [True, False]


def test_a_table_of_nothing_is_an_empty_file(tmp_path):
    ThresholdRecorder().to_csv(tmp_path / "run.csv")
    assert table(tmp_path / "run.csv") == []


def test_a_frame_is_made_of_rows(monkeypatch):
    stand_in = types.ModuleType("pandas")
    stand_in.DataFrame = lambda rows: ("frame", rows)
    monkeypatch.setitem(sys.modules, "pandas", stand_in)
    _, recorder = recorded(2, num_slots=2)

    kind, rows = recorder.to_frame()

    assert kind == "frame"
    assert [row["clip_norm"] for row in rows] == [r["clip_norm"] for r in recorder.records]
    assert [[row["slot_1"], row["slot_2"]] for row in rows] == [
        r["indicator"] for r in recorder.records
    ]


def test_a_frame_of_pandas_itself():
    pandas = pytest.importorskip("pandas")
    _, recorder = recorded(3)
    frame = recorder.to_frame()

    assert isinstance(frame, pandas.DataFrame)
    assert frame["step"].tolist() == [1, 2, 3]
    assert frame["slot_1"].tolist() == [r["indicator"][0] for r in recorder.records]


def test_a_frame_without_pandas_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"needs pandas: pip install pandas.*to_csv"):
        ThresholdRecorder().to_frame()


# --- writers ---


class Writer:
    """Takes scalars, as any logger might."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.append((tag, value, step))


class HistogramWriter(Writer):
    """Takes TensorBoard's raw histograms too, by its names of the arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.histograms: list[dict[str, Any]] = []

    def add_histogram_raw(
        self,
        tag: str,
        min: float,
        max: float,
        num: float,
        sum: float,
        sum_squares: float,
        bucket_limits: list[float],
        bucket_counts: list[float],
        global_step: int,
    ) -> None:
        self.histograms.append({name: v for name, v in locals().items() if name != "self"})


def test_scalars_are_written_from_the_first_record_on_and_live():
    run, recorder = recorded(2)
    writer = Writer()
    recorder.log_to(writer, prefix="run/")
    run.step(samples("mlp", 7))

    expected = []
    for record in recorder.records:
        values, step = record["indicator"], record["step"]
        expected += [
            ("run/clip_norm", record["clip_norm"], step),
            ("run/indicator_first", values[0], step),
            ("run/indicator_last", values[-1], step),
            (
                "run/mean_clipped_norm",
                pytest.approx(record["clip_norm"] * (1 - sum(values) / len(values))),
                step,
            ),
        ]
    assert writer.scalars == expected
    recorder.detach()
    run.step(samples("mlp", 7))
    assert len(writer.scalars) == len(expected)


def test_the_histogram_has_the_released_distribution():
    # 8 expected samples, C = 4, K = 2, no noise. Norms 0, 0, 3 and five of at least 4: slot 1
    # (norms 2 to 4) holds 1 + 1 + .5 = 2.5 of 8, slot 2 (norms 0 to 2) holds 2 of 8.
    private_vector = vector(1, max_grad_norm=4.0, num_slots=2, expected_batch_size=8)
    recorder, writer = ThresholdRecorder(private_vector.optimizer), HistogramWriter()
    recorder.log_to(writer)
    private_vector.release(torch.tensor([0.0, 0.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]).unsqueeze(1))

    [histogram] = writer.histograms
    assert histogram == {
        "tag": "slaclip/clipped_norms",
        "min": 0.0,
        "max": 4.0,
        "num": 8.0,
        # 2 samples below 1, half a sample in 1 to 3, and all others at 4.
        "bucket_limits": [1.0, 3.0, 4.0],
        "bucket_counts": [2.0, 0.5, 5.5],
        "sum": 2 * 0.5 + 0.5 * 2.0 + 5.5 * 4.0,
        "sum_squares": 2 * 0.5**2 + 0.5 * 2.0**2 + 5.5 * 4.0**2,
        "global_step": 1,
    }
    assert len(writer.scalars) == 4


def test_tensorboard_itself_takes_it(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    _, recorder = recorded(2)
    with tensorboard.SummaryWriter(tmp_path) as writer:
        recorder.log_to(writer)

    assert sum(file.stat().st_size for file in tmp_path.iterdir()) > 0


def test_an_indicator_that_is_not_finite_gets_no_histogram():
    _, recorder = recorded(1)
    state = recorder.state_dict()
    state["records"][0]["indicator"][0] = math.nan
    recorder.load_state_dict(state)
    writer = HistogramWriter()
    recorder.log_to(writer)

    assert writer.histograms == []
    assert len(writer.scalars) == 4


def test_a_writer_without_scalars_is_refused():
    with pytest.raises(TypeError, match=r"must have add_scalar.* got dict.*SummaryWriter"):
        ThresholdRecorder().log_to({})


# --- hints ---


def with_bounds(recorder: ThresholdRecorder, bounds: list[str | None]) -> ThresholdRecorder:
    """Give a recorder records that hit these bounds, without noise."""
    record = {
        "clip_norm": 1.0,
        "indicator": [0.5],
        "noise_std": 0.0,
        "expected_batch_size": 8.0,
    }
    values = {"min": 0.1, "max": 50.0, None: 1.0}
    records = [
        {**record, "step": step, "bound": bound, "next_clip_norm": values[bound]}
        for step, bound in enumerate(bounds, start=1)
    ]
    recorder.load_state_dict({"records": records})
    return recorder


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        (["min"] * 19, None),
        (["min"] * 20, "rested on min_clipbound=0.1 after 20 of the last 20 .*a lower min_clip"),
        (["max"] * 20, "rested on max_clipbound=50 after 20 of the last 20 .*a higher max_clip"),
        ([None] * 10 + ["max"] * 10, None),
        ([None] * 10 + ["max"] * 11, "after 11 of the last 21"),
        (["max"] * 11 + ["min"] * 11, None),
        (["min"] * 100 + [None] * 25, None),
        ([None] * 100 + ["min"] * 26, "after 26 of the last 50"),
        ([None] * 50, None),
        ([], None),
    ],
)
def test_a_bound_that_is_hit_in_most_steps_gives_a_hint(bounds, expected):
    hints = with_bounds(ThresholdRecorder(), bounds).hints()

    if expected is None:
        assert hints == []
    else:
        [hint] = hints
        assert re.search(expected, hint)


def run_of(thresholds, *, first_slot, last_slot):
    """A recorder of made-up releases with two slots."""
    recorder = ThresholdRecorder()
    pairs = zip(thresholds, [*thresholds[1:], thresholds[-1]], strict=True)
    records = [
        {
            "step": step,
            "clip_norm": clip_norm,
            "next_clip_norm": following,
            "indicator": [first_slot, last_slot],
            "noise_std": 0.0,
            "expected_batch_size": 64.0,
            "bound": None,
        }
        for step, (clip_norm, following) in enumerate(pairs, start=1)
    ]
    recorder.load_state_dict({"records": records})
    return recorder


@pytest.mark.parametrize(
    ("last_slot", "length", "is_told"), [(0.95, 20, True), (0.95, 19, False), (0.85, 30, False)]
)
def test_a_threshold_that_rests_far_above_all_norms_gives_a_hint(last_slot, length, is_told):
    hints = run_of([1.0] * length, first_slot=1.0, last_slot=last_slot).hints()
    assert bool(hints) == is_told
    if is_told:
        assert re.search(r"below C / K = 0\.5, .*max_grad_norm='auto'", hints[0])


def test_a_run_at_its_bound_is_warned_of_once():
    run = private(max_grad_norm=0.5, max_clipbound=0.5)
    recorder = ThresholdRecorder(run.optimizer)
    quiet = ThresholdRecorder(run.optimizer, warn=False)
    batch = samples("mlp", 16)
    for _ in range(19):
        run.step(batch)

    with pytest.warns(UserWarning, match="rested on max_clipbound=0.5 after .*higher max_clipb"):
        run.step(batch)
    run.step(batch)  # warnings are errors in this suite

    assert quiet.hints() == recorder.hints() != []


def test_more_slots_than_the_noise_allows_give_a_hint():
    # B = 16 and sigma = .4: (16 / (2 * 2.576 * .4))^(2/3) = 3.92.
    assert recorded(1, num_slots=3, noise_multiplier=0.4)[1].hints() == []
    assert recorded(1, noise_multiplier=0.4)[1].hints() == []
    assert recorded(1, num_slots=9, noise_multiplier=0.0)[1].hints() == []
    _, recorder = recorded(1, num_slots=9, noise_multiplier=0.4)

    [hint] = recorder.hints()
    # sigma sqrt(K) / B = .4 * 3 / 16 = .075.
    assert "num_slots=9 is more than this noise allows" in hint
    assert "slot is 0.075, and the CDF rises by 0.111 a slot. Pass num_slots=3 " in hint


# --- several processes ---


def recorded_on_a_rank(name: str) -> list[dict[str, Any]]:
    run = private_on_rank(FAMILIES[name], noise_multiplier=0.3)
    recorder = ThresholdRecorder(run.optimizer)
    for batch in batches("mlp", [8, 6, 10], dtype=torch.float64):
        run.step(share(batch))
    assert [record["clip_norm"] for record in recorder.records] == run.thresholds
    return recorder.records


def test_every_rank_records_the_same():
    name = next(name for name in FAMILIES if "hooks" in name)
    first, second = on_ranks(recorded_on_a_rank, name)

    assert first == second
    assert [record["step"] for record in first] == [1, 2, 3]
    assert {record["expected_batch_size"] for record in first} == {16.0}


# --- what it needs and what it shows ---

IMPORTS = """
import sys
import opacus, torch

for optional in ("matplotlib", "pandas", "lightning", "pytorch_lightning", "tensorboard"):
    for loaded in [name for name in sys.modules if name.split(".")[0] == optional]:
        del sys.modules[loaded]
    sys.modules[optional] = None  # from here on, importing it raises

import opacus_slaclip.plotting
opacus_slaclip.ThresholdRecorder()
try:
    import opacus_slaclip.lightning
except ImportError as error:
    assert 'pip install "opacus-slaclip[lightning]"' in str(error)
else:
    raise AssertionError("imported without Lightning")
"""


def test_recording_needs_no_optional_package():
    subprocess.run([sys.executable, "-W", "ignore", "-c", IMPORTS], check=True)


def reachable(value: Any) -> list[Any]:
    """Everything that the recorder leads to, by whatever name, but classes, modules and code."""
    seen: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, (type, types.ModuleType, types.FunctionType)):
            continue
        seen[id(item)] = item
        waiting += item.tolist() if isinstance(item, array) else gc.get_referents(item)
    return list(seen.values())


def test_nothing_private_is_reached_from_a_recorder():
    run = secretive()
    recorder = ThresholdRecorder(run.optimizer)
    size = 23  # of the realized batch, which nothing else here is
    batch = samples("mlp", size, seed=41)
    secrets = Secrets.of(run, batch)
    run.step(batch)

    found = reachable(recorder)
    numbers = [float(item) for item in found if isinstance(item, (int, float))]
    assert recorder.last["clip_norm"] in numbers
    assert set(recorder.last["indicator"]) <= set(numbers)
    assert secrets.shown_in(numbers) == []
    assert size not in numbers
    assert not [item for item in found if isinstance(item, (torch.Tensor, torch.optim.Optimizer))]
    assert live_tensors_equal_to(secrets.slot_sums) == 0


def test_the_search_finds_what_a_recorder_would_hold():
    _, recorder = recorded(1)
    secret = torch.zeros(2)
    recorder._writers.append((types.SimpleNamespace(deep=[secret]), ""))
    assert any(item is secret for item in reachable(recorder))


# --- Lightning ---


def private_module(run: Any, optimizers: Any = None) -> Any:
    """A LightningModule that trains a private run."""
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = run.model

        def configure_optimizers(self) -> Any:
            return [run.optimizer] if optimizers is None else optimizers

        def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
            x, y = batch
            return torch.nn.functional.cross_entropy(self.network(x), y)

    return Module()


def fit(run: Any, callback: Any, folder: Any, *, loader: Any = None, **kwargs: Any) -> Any:
    """Train two epochs (or as told); return the trainer and the rows of its log."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.loggers import CSVLogger

    trainer = Trainer(
        max_epochs=kwargs.pop("max_epochs", 2),
        accelerator="cpu",
        devices=1,
        use_distributed_sampler=False,
        logger=CSVLogger(folder, name=None, version=""),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    with warnings.catch_warnings():
        # Lightning's own: a name of torch's that it still uses, and advice on speed.
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
        warnings.filterwarnings("ignore", category=lightning_warning())
        trainer.fit(
            private_module(run),
            run.loader if loader is None else loader,
            weights_only=True,
            **kwargs,
        )
    return trainer, [row for row in table(folder / "metrics.csv") if row["slaclip/clip_norm"]]


def lightning_warning() -> type[Warning]:
    from lightning.fabric.utilities.warnings import PossibleUserWarning

    return PossibleUserWarning


def test_lightning_logs_each_release_live_and_its_checkpoints_keep_the_records(tmp_path):
    pytest.importorskip("lightning")
    from opacus_slaclip.lightning import ThresholdCallback

    begun = private()
    callback = ThresholdCallback()
    trainer, rows = fit(begun, callback, tmp_path / "begun")
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    records = callback.recorder.records
    resumed, again = private(), ThresholdCallback(ThresholdRecorder(max_records=6))
    _, later = fit(
        resumed, again, tmp_path / "resumed", ckpt_path=tmp_path / "last.ckpt", max_epochs=3
    )

    assert [record["step"] for record in records] == list(range(1, 9))
    assert [int(row["step"]) for row in rows] == list(range(8))  # Lightning counts from 0
    for row, record in zip(rows, records, strict=True):
        # Lightning logs in float32.
        assert float(row["slaclip/clip_norm"]) == pytest.approx(record["clip_norm"], rel=1e-6)
        for name, slot in (("first", 0), ("last", -1)):
            logged = float(row[f"slaclip/indicator_{name}"])
            assert logged == pytest.approx(record["indicator"][slot], rel=1e-6)
    assert again.recorder.records[:2] == records[-2:]
    assert [record["step"] for record in again.recorder.records] == list(range(7, 13))
    assert again.recorder.records[2]["clip_norm"] == records[-1]["next_clip_norm"]
    assert len(later) == 4
    begun.step(samples("mlp", 5))
    assert callback.recorder.records == records, "still attached after the end of training"


def test_lightning_logs_nothing_new_for_a_physical_batch_that_releases_nothing(tmp_path):
    pytest.importorskip("lightning")
    from opacus_slaclip.lightning import ThresholdCallback

    run, callback = private(), ThresholdCallback()
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=5, optimizer=run.optimizer
    ) as physical:
        trainer, rows = fit(run, callback, tmp_path, loader=physical, max_epochs=1)

    # Lightning repeats what was logged last; it also leaves a loader at the length it announces.
    records = callback.recorder.records
    logged = list(dict.fromkeys(float(row["slaclip/clip_norm"]) for row in rows))
    assert logged == pytest.approx([record["clip_norm"] for record in records], rel=1e-6)
    assert 1 < len(records) < len(rows) < trainer.global_step


def test_lightning_lets_go_of_the_optimizer_after_an_error():
    from opacus_slaclip.lightning import ThresholdCallback

    callback = ThresholdCallback()
    run = private()
    callback.recorder.attach(run.optimizer)
    callback.on_exception(None, None, KeyboardInterrupt())
    run.step(samples("mlp", 5))
    assert len(callback.recorder) == 0


@pytest.mark.parametrize("count", [0, 2])
def test_lightning_needs_one_private_optimizer(count):
    pytest.importorskip("lightning")
    from opacus_slaclip.lightning import ThresholdCallback

    plain = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    trainer = types.SimpleNamespace(
        optimizers=[plain, *(private().optimizer for _ in range(count))]
    )
    with pytest.raises(ValueError, match=rf"return one optimizer of SlaClip's, got {count} among"):
        ThresholdCallback().on_train_start(trainer, None)
