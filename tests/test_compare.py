"""The comparison: rows that survive a kill, exact budgets, errors as rows, loaders, workers."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import kill_after
from opacus.accountants import RDPAccountant

from benchmarks import cells, compare, corpora, methods, models, tasks, workers
from benchmarks.cells import Cell, Row
from benchmarks.rows import RowFile, cell_of

ROOT = Path(__file__).parent.parent
SMALL = ["--epochs", "1", "--learning-rates", "0.1", "--clip-norms", "1", "--schedules", "constant"]
NAN = float("nan")


def digits_cell(**changes: Any) -> Cell:
    task = tasks.TASKS["digits"]
    cell = Cell(
        task="digits",
        model="digits_cnn",
        method="flat",
        learning_rate=0.1,
        clip_norm=1.0,
        schedule="constant",
        seed=42,
        epsilon=task.epsilon,
        delta=task.delta,
        batch_size=256,
        epochs=1,
        momentum=0.9,
        weight_decay=5e-4,
    )
    return replace(cell, **changes)


def without_time(row: Row) -> Row:
    return {key: value for key, value in row.items() if key != "seconds"}


# --- one cell ---


@pytest.mark.parametrize("method", methods.METHODS)
def test_a_row_holds_what_its_readers_need(method: str) -> None:
    if methods.METHODS[method].options is None:
        pytest.importorskip("benchmarks.baselines")
    cell = digits_cell(method=method, schedule="cosine", epochs=2)
    row = json.loads(json.dumps(cells.run_cell(cell, None)))
    assert "error" not in row, row
    assert cell_of(row) == cell
    assert row["num_steps"] == 2 * 6  # 1,294 samples, 256 at a time
    steps, clip_norms = zip(*row["clip_norms"], strict=True)
    assert steps == tuple(range(13))
    if methods.METHODS[method].options is not None:
        assert clip_norms[0] == (cell.clip_norm if methods.METHODS[method].uses_clip_norm else 1e-4)
    assert clip_norms[-1] == pytest.approx(row["final_clip_norm"], rel=1e-3)
    assert bool(row["indicators"]) == method.startswith("slaclip")
    for step, clip_norm, values in row["indicators"]:
        assert clip_norm == clip_norms[step - 1]  # the threshold that step was taken with
        assert values == [round(value, 3) for value in values]
    if row["indicators"]:
        taken = [step for step, _, _ in row["indicators"]]
        assert len(taken) == 8
        assert (taken[0], taken[-1]) == (1, 12)
    assert 0 <= row["validation_accuracy"] <= 1
    assert 0 <= row["test_accuracy"] <= 1
    assert row["diverged"] is False
    assert row["grad_sample_mode"] == methods.grad_sample_mode(cell.model, method)
    assert set(row["versions"]) == {"python", "torch", "opacus", "opacus_slaclip"}
    assert set(row) == {
        *("cell", "noise_multiplier", "num_steps", "epsilon_spent", "validation_accuracy"),
        *("test_accuracy", "final_clip_norm", "grad_sample_mode", "seconds", "clip_norms"),
        *("indicators", "versions", "machine", "diverged", "physical_batch_size"),
    }


@pytest.mark.parametrize("method", methods.METHODS)
def test_physical_batches_leave_the_step_as_it_is(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = digits_cell(method=method, schedule="cosine")
    whole = cells.run_cell(cell, None)
    monkeypatch.setattr(methods, "PHYSICAL_BATCH_SIZES", {"digits_cnn": 50})
    split = cells.run_cell(cell, None)
    assert whole["physical_batch_size"] is None
    assert split["physical_batch_size"] == (None if method == "adaptive" else 50)
    for same in ("num_steps", "epsilon_spent", "noise_multiplier"):
        assert split[same] == whole[same]
    # To the rounding of sums, which may tip one of 143 or 360 samples.
    for close, tolerance in (("validation_accuracy", 1.5 / 143), ("test_accuracy", 1.5 / 360)):
        assert split[close] == pytest.approx(whole[close], abs=tolerance)
    assert np.array(split["clip_norms"]) == pytest.approx(np.array(whole["clip_norms"]), rel=1e-3)


@pytest.mark.parametrize("batch_size", [14, 256])  # 93 steps an epoch, of which Opacus takes 92
def test_the_budget_is_spent_and_not_exceeded(batch_size: int) -> None:
    cell = digits_cell(batch_size=batch_size, epsilon=1.5)
    row = cells.run_cell(cell, None)
    num_steps = cells.steps_per_epoch(1294, batch_size)
    assert row["num_steps"] == num_steps
    assert cell.epsilon - cells.EPSILON_TOLERANCE <= row["epsilon_spent"] <= cell.epsilon
    accountant = RDPAccountant()
    accountant.history = [(row["noise_multiplier"], 1 / num_steps, num_steps)]
    spent = accountant.get_epsilon(cell.delta)
    assert spent == row["epsilon_spent"] if batch_size == 256 else spent < row["epsilon_spent"]


def test_calibration_gives_the_published_noise() -> None:
    # The project's design notes: MNIST, N = 60,000, 30 epochs, B = 512, epsilon 2.
    sigma = cells.calibrate(2.0, 1e-5, cells.steps_per_epoch(60_000, 512), 30)
    assert round(sigma, 3) == 1.309


def test_long_runs_are_thinned_to_first_and_last() -> None:
    row = cells.run_cell(digits_cell(method="slaclip", batch_size=12), None)
    assert row["num_steps"] == 108
    steps = [step for step, _ in row["clip_norms"]]
    assert len(steps) == cells.MAX_CLIP_NORMS
    assert (steps[0], steps[-1]) == (0, 108)
    assert {later - earlier for earlier, later in itertools.pairwise(steps)} <= {1, 2}


def test_cosine_ends_at_zero_and_begins_at_the_rate() -> None:
    class Spy:
        max_grad_norm = 1.0
        _is_last_step_skipped = False
        param_groups = ({"lr": 0.1},)
        rates: tuple[float, ...] = ()

        def zero_grad(self) -> None:
            pass

        def step(self) -> None:
            self.rates += (self.param_groups[0]["lr"],)

    module = torch.nn.Linear(1, 1)
    loader: Any = [(torch.zeros(1, 1), torch.zeros(1, 1))]
    private = methods.Private(None, module, Spy(), torch.nn.MSELoss(), loader)  # type: ignore[arg-type]
    cells.train(digits_cell(schedule="cosine"), private, 4)
    expected = [0.1 * (1 + c) / 2 for c in (1.0, 2**-0.5, 0.0, -(2**-0.5))]
    assert private.optimizer.rates == pytest.approx(expected)


def test_a_diverged_run_is_a_row_with_its_argmax() -> None:
    row = cells.run_cell(digits_cell(learning_rate=1e38), None)
    assert row["diverged"] is True
    assert 0 < row["test_accuracy"] < 0.3


def test_a_method_that_raises_leaves_an_error_row(monkeypatch: pytest.MonkeyPatch) -> None:
    # At B = 3 counting with a noise of 0.15 alone would cost more than a step may.
    row = cells.run_cell(digits_cell(method="adaptive", batch_size=3), None)
    assert "ValueError: batch_size must be" in row["error"]
    assert row["seconds"] >= 0
    assert "test_accuracy" not in row
    broken = methods.Method(lambda *_: {"clipping": "slaclip", "typo": 1})
    monkeypatch.setitem(methods.METHODS, "broken", broken)
    row = cells.run_cell(digits_cell(method="broken"), None)
    assert "typo" in row["error"]
    assert cell_of(json.loads(json.dumps(row))).method == "broken"


def test_options_of_a_method_may_replace_the_initial_threshold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method = methods.Method(lambda clip_norm, *_: {"max_grad_norm": 3 * clip_norm})
    monkeypatch.setitem(methods.METHODS, "triple", method)
    assert cells.run_cell(digits_cell(method="triple"), None)["final_clip_norm"] == 3.0


# --- the sweep ---


def run_main(output: Path, *more: str) -> list[Row]:
    assert compare.main([*SMALL, "--output", str(output), *more]) == 0
    return RowFile(output).read()


def test_one_process_and_two_give_the_same_rows_and_none_twice(tmp_path: Path) -> None:
    options = ["--methods", "flat", "slaclip", "--seeds", "42"]
    one = run_main(tmp_path / "one.jsonl", *options)
    two = run_main(tmp_path / "two.jsonl", *options, "--jobs", "2")
    by_method = {row["cell"]["method"]: without_time(row) for row in two}
    assert {row["cell"]["method"]: without_time(row) for row in one} == by_method
    before = (tmp_path / "two.jsonl").read_bytes()
    assert run_main(tmp_path / "two.jsonl", *options) == two
    assert (tmp_path / "two.jsonl").read_bytes() == before
    more = run_main(tmp_path / "one.jsonl", *options, "--best-seeds", "43")
    assert more[:2] == one
    assert [(row["cell"]["method"], row["cell"]["seed"]) for row in more[2:]] == [
        ("flat", 43),
        ("slaclip", 43),
    ]


def test_a_kill_loses_only_what_was_in_flight(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    options = ["--methods", "flat", "--seeds", *map(str, range(12))]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.compare", *SMALL, *options, "--output", str(output)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not RowFile(output).read() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = RowFile(output).read()
    assert 0 < len(done) < 12
    rows = run_main(output, *options)
    assert rows[: len(done)] == done
    assert Counter(row["cell"]["seed"] for row in rows) == Counter(range(12))


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_twenty_kills_lose_nothing_and_count_nothing_twice(tmp_path: Path) -> None:
    """SIGKILL at random moments, then one run to the end: the rows of a run that was let be."""
    options = ["--methods", "flat", "slaclip", "--seeds", "0", "1"]
    start = time.monotonic()
    straight = run_main(tmp_path / "straight.jsonl", *options)
    whole_run = time.monotonic() - start
    killed, finished = tmp_path / "killed.jsonl", list[Row]()
    random = np.random.default_rng(0)
    for _ in range(20):
        delay = random.uniform(0, whole_run / 4)
        kill_after(delay, compare.main, [*SMALL, *options, "--output", str(killed)])
        assert RowFile(killed).read()[: len(finished)] == finished
        finished = RowFile(killed).read()
    rows = run_main(killed, *options)
    assert [without_time(row) for row in rows] == [without_time(row) for row in straight]


def fake_row(cell: Cell, **results: Any) -> Row:
    return {"cell": asdict(cell), "seconds": 1.0} | results


def test_a_torn_line_is_ignored_and_cut_off(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "new" / "rows.jsonl")
    first, second = (fake_row(digits_cell(seed=seed)) for seed in (1, 2))
    file.append(first)
    with file.path.open("ab") as raw:
        raw.write(json.dumps(second).encode()[:-5])
    assert file.read() == [first]
    file.append(second)
    assert file.read() == [first, second]
    file.drop(lambda row: row == first)
    assert file.read() == [second]


def test_a_file_of_something_else_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "rows.jsonl"
    output.write_text('{"model": "mlp"}\n')
    assert compare.main(["--dry-run", "--output", str(output)]) == 1
    assert "line 1, is not a row" in capsys.readouterr().err
    assert output.read_text() == '{"model": "mlp"}\n'


def test_errors_are_kept_and_run_again_only_on_demand(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    args = compare.parse([*SMALL, "--methods", "flat", "--seeds", "42"])
    (cell,) = compare.cells(args)
    RowFile(output).append(fake_row(cell, error="the worker process died with exit code -9"))
    options = ["--methods", "flat", "--seeds", "42"]
    assert "error" in run_main(output, *options)[0]
    other = fake_row(replace(cell, seed=7), error="of another pool, which this run would not retry")
    RowFile(output).append(other)
    kept, row = run_main(output, *options, "--retry-errors")
    assert kept == other
    assert "error" not in row


def test_a_dead_worker_leaves_a_row_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    real, pids = workers.Worker, []

    def hire(data_root: Path | None) -> workers.Worker:
        worker = real(data_root)
        if not pids:
            worker.process.kill()
        pids.append(worker.process.pid)
        return worker

    monkeypatch.setattr(workers, "Worker", hire)
    dead, alive = workers.run_in_processes([digits_cell(seed=1), digits_cell(seed=2)], 1, None)
    assert dead["cell"]["seed"] == 1
    assert dead["error"] == "the worker process died with exit code -9"
    assert alive["cell"]["seed"] == 2
    assert "error" not in alive


def test_interrupting_ends_workers_and_keeps_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any) -> Any:
        yield fake_row(digits_cell())
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "run_cells", interrupted)
    output = tmp_path / "rows.jsonl"
    assert compare.main([*SMALL, "--output", str(output)]) == 130
    assert len(RowFile(output).read()) == 1


def test_the_default_pool_is_the_papers(capsys: pytest.CaptureFixture[str]) -> None:
    pool = compare.cells(compare.parse([]))
    assert len(pool) == len(set(pool)) == 6 * 5 * 2 * 3 * len(methods.PAPER)
    assert compare.main(["--dry-run", "--output", "no/such/file"]) == 0
    assert f"{len(pool)} cells to run, about" in capsys.readouterr().out


def test_the_best_cell_is_chosen_on_the_validation_part() -> None:
    good, bad = digits_cell(learning_rate=0.1), digits_cell(learning_rate=0.2)
    other = digits_cell(learning_rate=0.5)
    rows = [
        fake_row(bad, validation_accuracy=0.1, test_accuracy=0.9),
        fake_row(good, validation_accuracy=0.8, test_accuracy=0.2),
        fake_row(other, validation_accuracy=0.9, test_accuracy=0.9),  # not in this pool
        fake_row(digits_cell(method="slaclip"), error="died"),
    ]
    pool = [bad, good, digits_cell(method="slaclip")]
    chosen = compare.best_cells(pool, rows, [43, 44])
    assert chosen == [replace(good, seed=43), replace(good, seed=44)]


def test_the_best_cell_is_that_of_the_report_whatever_the_order_of_rows() -> None:
    """The mean over seeds counts, a failed seed rules a setting out, ties go to the lower rate."""
    scores = {0.05: (0.9, 0.2), 0.1: (0.7, 0.7), 0.2: (0.7, 0.7), 0.5: (0.95, None)}
    rows = [
        fake_row(cell, error="died")
        if score is None
        else fake_row(cell, validation_accuracy=score, test_accuracy=0.5)
        for rate, pair in scores.items()
        for cell, score in zip(
            [digits_cell(learning_rate=rate, seed=seed) for seed in (0, 1)], pair, strict=True
        )
    ]
    pool = [cell_of(row) for row in rows]
    for order in (rows, rows[::-1]):
        assert compare.best_cells(pool, order, [7]) == [digits_cell(learning_rate=0.1, seed=7)]


def test_a_method_without_an_initial_threshold_runs_once_for_all() -> None:
    argv = ["--methods", "slaclip", "slaclip-auto", "--schedules", "constant", "--seeds", "0"]
    pool = compare.cells(compare.parse([*argv, "--clip-norms", "10", "1"]))
    assert Counter(cell.method for cell in pool) == {"slaclip": 12, "slaclip-auto": 6}
    # The same cells whatever the pool of thresholds, so that none is run twice.
    other = compare.cells(compare.parse([*argv, "--clip-norms", "0.1"]))
    assert {c for c in pool if c.method == "slaclip-auto"} == {
        c for c in other if c.method == "slaclip-auto"
    }


def test_accuracies_are_of_the_parts_they_are_named_after(monkeypatch: pytest.MonkeyPatch) -> None:
    split = tasks.load("digits", None)
    monkeypatch.setattr(tasks, "load", lambda name, root: split)
    # Whatever the model says is right on one part and wrong on the other.
    right = {id(split.validation): 1.0, id(split.test): 0.0}
    monkeypatch.setattr(cells, "accuracy", lambda module, part: right[id(part)])
    row = cells.run_cell(digits_cell(), None)
    assert (row["validation_accuracy"], row["test_accuracy"]) == (1.0, 0.0)


def test_adaptive_clipping_runs_with_the_papers_parameters_at_the_claimed_cost() -> None:
    """A count of sensitivity 1 beside the gradient: 1/sigma^2 = 1/sigma_g^2 + 1/sigma_b^2."""
    sigma, split = 2.0, tasks.load("digits", None)
    private, _ = cells._make_private(digits_cell(method="adaptive"), split, sigma)
    optimizer: Any = private.optimizer
    assert optimizer.unclipped_num_std == 256 / 20
    assert optimizer.target_unclipped_quantile == 0.5
    assert optimizer.clipbound_learning_rate == 0.2
    # What Opacus noises the gradient with: it takes the share of a count of sensitivity 1/2 off.
    spread = optimizer.unclipped_num_std
    gradient_noise = (optimizer.noise_multiplier**-2 - (2 * spread) ** -2) ** -0.5
    joint = (gradient_noise**-2 + spread**-2) ** -0.5
    assert joint == pytest.approx(sigma, rel=1e-12)


def test_a_row_of_adaptive_clipping_says_what_it_cost() -> None:
    flat, adaptive = (cells.run_cell(digits_cell(method=m), None) for m in ("flat", "adaptive"))
    assert adaptive["noise_multiplier"] == flat["noise_multiplier"]
    assert adaptive["epsilon_spent"] == flat["epsilon_spent"]


def test_a_row_whose_steps_took_another_noise_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    make_private = methods.make_private

    def forgetful(*args: Any, noise_multiplier: float, **kwargs: Any) -> methods.Private:
        return make_private(*args, noise_multiplier=0.9 * noise_multiplier, **kwargs)

    monkeypatch.setattr(methods, "make_private", forgetful)
    assert "recorded the noise" in cells.run_cell(digits_cell(), None)["error"]


def test_a_trade_off_knows_how_many_parameters_there_are() -> None:
    split = tasks.load("digits", None)
    private, _ = cells._make_private(digits_cell(method="slaclip-trade-off"), split, 1.0)
    optimizer: Any = private.optimizer
    count = sum(p.numel() for p in private.module.parameters())
    assert optimizer.controller.controller.num_parameters == count > 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "lenet_cnn"], "must be one of digits_cnn for digits"),
        (["--jobs", "0"], "must be at least 1"),
        (["--clip-norms", "0"], "must be positive"),
    ],
)
def test_bad_options_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        compare.parse(options)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("task", ["mnist", "names", "imdb", "cifar10"])
def test_missing_data_is_said_before_anything_runs(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "rows.jsonl"
    for where in ([], ["--data-root", str(tmp_path)]):
        assert compare.main(["--task", task, "--output", str(output), *where]) == 1
        assert capsys.readouterr().err.strip()
    assert not output.exists()


# --- data ---


def test_the_held_out_part_is_fixed_and_apart() -> None:
    split = tasks.load("digits", None)
    assert [len(part) for part in (split.train, split.validation, split.test)] == [1294, 143, 360]
    numbered = tasks.Samples(torch.arange(60_000), torch.arange(60_000))
    held, again = (tasks.hold_out(numbered, numbered) for _ in range(2))
    assert len(held.validation) == tasks.MAX_VALIDATION
    assert torch.equal(held.validation.labels, again.validation.labels)
    both = torch.cat([held.train.labels, held.validation.labels])
    assert torch.equal(both.sort().values, torch.arange(60_000))


def test_samples_are_indexed_at_once_and_may_be_none() -> None:
    samples = tasks.Samples(torch.arange(6.0).view(3, 2), torch.arange(3))
    inputs, labels = samples.__getitems__([2, 0])
    assert inputs.tolist() == [[4.0, 5.0], [0.0, 1.0]]
    assert labels.tolist() == [2, 0]
    inputs, labels = samples.__getitems__([])
    assert inputs.shape == (0, 2)
    assert labels.dtype == torch.int64


@pytest.mark.parametrize("method", ["flat", "slaclip", "slaclip-q"])
def test_empty_batches_are_steps(method: str) -> None:
    # A batch is empty with probability exp(-3): about 21 of 432.
    row = cells.run_cell(digits_cell(method=method, batch_size=3, epsilon=20.0), None)
    assert row["num_steps"] == 432


def test_mnist_is_standardized_by_public_numbers(tmp_path: Path) -> None:
    images = np.full((10, 28, 28), 255, np.uint8)
    arrays = {"x_train": images, "x_test": images}
    labels = {"y_train": np.arange(10), "y_test": np.arange(10)}
    np.savez(tmp_path / "mnist.npz", **arrays, **labels)
    split = tasks.load("mnist", tmp_path)
    assert [len(part) for part in (split.train, split.validation, split.test)] == [9, 1, 10]
    assert split.train.inputs.shape == (9, 1, 28, 28)
    assert float(split.test.inputs.min()) == pytest.approx((1 - 0.1307) / 0.3081)


def test_names_are_read_without_accents(tmp_path: Path) -> None:
    (tmp_path / "names").mkdir()
    (tmp_path / "names" / "A.txt").write_text("Zoë\n\nO'Neil\n", encoding="utf-8")
    (tmp_path / "names" / "B.txt").write_text("x" * 40 + "\n", encoding="utf-8")
    tokens, labels = corpora.load_names(tmp_path)
    assert tokens.shape == (3, corpora.MAX_CHARACTERS)
    assert labels.tolist() == [0, 0, 1]
    assert "".join(corpora.ALPHABET[i - 1] for i in tokens[0].tolist() if i) == "Zoe"
    assert (tokens[2] == tokens[2, 0]).all()
    with pytest.raises(corpora.CorpusError, match=r"several languages.*found 0"):
        corpora.load_names(tmp_path / "nowhere")


def write_reviews(folder: Path) -> None:
    texts = {
        "train/pos/0_9": "Good good<br />film",
        "train/neg/0_1": "bad film",
        "test/pos/0_9": "good surprise " * 200,
        "test/neg/0_1": "",
        "train/unsup/0_0": "unlabelled",
    }
    for name, text in texts.items():
        path = folder / "aclImdb" / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_reviews_are_read_from_folder_and_archive(tmp_path: Path) -> None:
    write_reviews(tmp_path / "folder")
    (tmp_path / "archive").mkdir()
    with tarfile.open(tmp_path / "archive" / corpora.IMDB_ARCHIVE, "w:xz") as archive:
        archive.add(tmp_path / "folder" / "aclImdb", arcname="aclImdb")
    for root in ("folder", "archive", "archive"):  # the last one from the cache
        train, test = corpora.load_imdb(tmp_path / root, tmp_path / "cache")
        # Only training words have numbers: film and good (twice each), then bad.
        assert train[0][:, :4].tolist() == [[4, 2, 0, 0], [3, 3, 2, 0]]
        assert train[1].tolist() == test[1].tolist() == [0, 1]
        assert test[0].shape == (2, corpora.MAX_WORDS)
        assert test[0][0].sum() == 0
        assert test[0][1, :3].tolist() == [3, 1, 3]  # 1: a word that training never saw
    assert len(list((tmp_path / "cache").iterdir())) == 2


def write_cifar(folder: Path, dump: Any = pickle.dumps) -> None:
    folder.mkdir()
    pixels = np.arange(2 * 3072, dtype=np.uint8).reshape(2, 3072)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (folder / name).write_bytes(dump({b"data": pixels, b"labels": [3, 9]}, protocol=2))


def test_cifar_batches_are_read(tmp_path: Path) -> None:
    write_cifar(tmp_path / "cifar-10-batches-py")
    train, test = corpora.load_cifar10(tmp_path)
    assert train[0].shape == (10, 3, 32, 32)
    assert test[1].tolist() == [3, 9]
    assert test[0][0, 0, 0, :2].tolist() == [-1.0, pytest.approx(1 / 127.5 - 1)]


class _Evil:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "test_batch"
    path.write_bytes(pickle.dumps({b"data": _Evil(), b"labels": []}))
    with pytest.raises(corpora.CorpusError, match=r"asks for posix\.system"):
        corpora.read_cifar_batch(path)
    path.write_bytes(b"not a pickle")
    with pytest.raises(corpora.CorpusError, match="not a batch of CIFAR-10"):
        corpora.read_cifar_batch(path)


def test_padding_has_no_part_in_the_text_models() -> None:
    torch.manual_seed(0)
    for make in (models.NameLSTM, models.MeanWords):
        model = make()
        short = torch.tensor([[5, 6, 7]])
        padded = torch.tensor([[5, 6, 7, 0, 0]])
        torch.testing.assert_close(model(short), model(padded))
        assert model(torch.zeros(1, 3, dtype=torch.int64)).isfinite().all()


@pytest.mark.parametrize("name", tasks.TASKS)
def test_every_task_has_models_that_exist(name: str) -> None:
    assert set(tasks.TASKS[name].models) <= set(tasks.MODELS)
    count = {"cifar_cnn": 131_466, "small_cnn": 26_010, "lenet_cnn": 421_642}
    for model in tasks.TASKS[name].models:
        if model in count:
            assert sum(p.numel() for p in tasks.MODELS[model]().parameters()) == count[model]
