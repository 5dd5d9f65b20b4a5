"""The demo: its command, the file that keeps results, the data sets it reads."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from helpers import kill_after

from opacus_slaclip import __main__ as command
from opacus_slaclip.demo import DemoError
from opacus_slaclip.demo.data import load
from opacus_slaclip.demo.records import ResultFile

# Two steps on all images at once: without sampling, the noise is calibrated in no time.
QUICK = ["--epochs", "2", "--batch-size", "1437"]
PNG_HEADER = b"\x89PNG\r\n\x1a\n"
IDX_NAMES = {
    "x_train": "train-images-idx3-ubyte",
    "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return {
        "x_train": rng.integers(0, 256, (60, 8, 6), dtype=np.uint8),
        "y_train": np.arange(60, dtype=np.uint8) % 10,
        "x_test": rng.integers(0, 256, (10, 8, 6), dtype=np.uint8),
        "y_test": np.arange(10, dtype=np.uint8),
    }


def write_idx(path, array):
    content = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    content += array.tobytes()
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def write_idx_folder(folder, arrays, suffix=""):
    folder.mkdir(parents=True, exist_ok=True)
    for key, name in IDX_NAMES.items():
        write_idx(folder / (name + suffix), arrays[key])


def demo(output, *arguments):
    return command.main([*QUICK, "--output", str(output), *arguments])


def read_results(output):
    text = (output / command.RESULTS_NAME).read_text()
    return [json.loads(line) for line in text.splitlines()]


def table_of(text):
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("method"))
    return lines[start : lines.index("", start)]


# ---- a run ----------------------------------------------------------------------------------


def test_a_run_prints_a_table_keeps_results_and_draws(tmp_path, capsys):
    assert demo(tmp_path, "--epochs", "1", "--batch-size", "700") == 0
    header, _, *rows = table_of(capsys.readouterr().out)
    assert header.split() == ["method", "C_0", "final", "C", "epsilon", "test", "accuracy"]
    expected = [("flat", 3.0), ("slaclip", 3.0), ("flat", 0.1), ("slaclip", 0.1)]
    assert [(row.split()[0], float(row.split()[1])) for row in rows] == expected
    assert (tmp_path / command.FIGURE_NAME).read_bytes().startswith(PNG_HEADER)
    results = read_results(tmp_path)
    assert [(r["settings"]["method"], r["settings"]["clip_norm"]) for r in results] == expected
    for result in results:
        assert 0 <= result["test_accuracy"] <= 1
        assert 2.9 < result["epsilon"] <= 3.0  # calibrated from below to within Opacus's 0.01
        assert len(result["clip_norms"]) == 1 + 3  # ceil(1437 / 700) steps
        assert result["clip_norms"][0] == result["settings"]["clip_norm"]
        assert result["clip_norms"][-1] == result["final_clip_norm"]
        is_adaptive = result["settings"]["method"] == "slaclip"
        assert (len(set(result["clip_norms"])) > 1) == is_adaptive
        assert (result["indicator"] is not None) == is_adaptive


def test_the_same_seed_gives_the_same_table_and_another_seed_another(tmp_path, capsys):
    arguments = ("--batch-size", "700", "--methods", "slaclip", "--clip-norms", "1")
    tables = []
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert demo(tmp_path / name, *arguments, "--epochs", "1", "--seed", seed) == 0
        tables.append(table_of(capsys.readouterr().out))
    assert tables[0] == tables[1]
    assert tables[0] != tables[2]
    assert read_results(tmp_path / "a") == read_results(tmp_path / "b")


def test_global_random_state_and_thread_count_are_left_alone(tmp_path):
    threads = torch.get_num_threads()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    assert demo(tmp_path, "--clip-norms", "1", "--threads", str(threads + 1)) == 0
    assert torch.equal(torch.rand(2), expected)
    assert torch.get_num_threads() == threads


def test_small_physical_batches_count_as_one_step(tmp_path):
    arguments = ("--clip-norms", "1", "--methods", "slaclip-q")
    assert demo(tmp_path, *arguments) == 0
    assert demo(tmp_path, *arguments, "--max-physical-batch-size", "100") == 0
    whole, parts = read_results(tmp_path)
    # Sums over parts of a batch round differently in float32, and no more than that.
    assert parts["clip_norms"] == pytest.approx(whole["clip_norms"], rel=1e-4)


def test_flat_alone_is_drawn_without_a_distribution(tmp_path):
    assert demo(tmp_path, "--methods", "flat", "--clip-norms", "1") == 0
    assert (tmp_path / command.FIGURE_NAME).read_bytes().startswith(PNG_HEADER)


@pytest.mark.parametrize("layout", ["npz", "idx"])
def test_mnist_is_trained_from_files(tmp_path, arrays, capsys, layout):
    if layout == "npz":
        np.savez(tmp_path / "mnist.npz", **arrays)
    else:
        write_idx_folder(tmp_path, arrays)
    arguments = ["--data", "mnist", "--data-root", str(tmp_path), "--delta", "0.001"]
    assert demo(tmp_path / "out", *arguments, "--clip-norms", "1") == 0
    assert "mnist: 60 training images, 10 test images" in capsys.readouterr().out


def test_a_delta_that_means_little_is_remarked_on(tmp_path, capsys):
    assert demo(tmp_path, "--methods", "flat", "--clip-norms", "1", "--delta", "0.01") == 0
    assert "delta should be well below 0.0007" in capsys.readouterr().out


# ---- resuming -------------------------------------------------------------------------------


def test_finished_runs_are_reused_and_others_are_not(tmp_path, capsys):
    assert demo(tmp_path, "--methods", "flat") == 0
    first = table_of(capsys.readouterr().out)
    assert demo(tmp_path, "--methods", "flat", "slaclip") == 0
    output = capsys.readouterr().out
    assert output.count("finished before") == 2
    rows = [line.split() for line in table_of(output)]
    assert all(line.split() in rows for line in first if line.startswith("flat"))
    assert len(read_results(tmp_path)) == 4
    assert demo(tmp_path, "--methods", "flat", "--lr", "0.3") == 0
    assert "finished before" not in capsys.readouterr().out
    assert len(read_results(tmp_path)) == 6


def test_fresh_runs_again_and_keeps_what_was_there(tmp_path, capsys):
    arguments = ("--methods", "flat", "--clip-norms", "1")
    assert demo(tmp_path, *arguments) == 0
    assert demo(tmp_path, *arguments, "--fresh") == 0
    assert "finished before" not in capsys.readouterr().out
    first, second = read_results(tmp_path)
    assert first == second


def test_a_torn_last_line_is_ignored_and_replaced(tmp_path, capsys):
    arguments = ("--methods", "flat", "--clip-norms", "1", "2")
    assert demo(tmp_path, *arguments) == 0
    path = tmp_path / command.RESULTS_NAME
    whole = path.read_bytes()
    # Not even a line that lacks nothing but its line feed counts.
    for cut in (len(whole) - 1, len(whole) - 200, whole.index(b"\n") + 2):
        path.write_bytes(whole[:cut])
        assert len(ResultFile(path).read()) == 1
        capsys.readouterr()
        assert demo(tmp_path, *arguments) == 0
        assert capsys.readouterr().out.count("finished before") == 1
        assert path.read_bytes() == whole


def test_a_foreign_results_file_is_refused_untouched(tmp_path, capsys):
    path = tmp_path / command.RESULTS_NAME
    path.write_text('{"epoch": 1}\n')
    assert demo(tmp_path) == 2
    assert "results.jsonl, line 1, is not a result of this version" in capsys.readouterr().err
    assert path.read_text() == '{"epoch": 1}\n'


def test_an_interrupt_keeps_the_finished_runs(tmp_path, capsys, monkeypatch):
    train = command.train

    def interrupted(settings, split, on_step):
        if settings.method == "slaclip":
            raise KeyboardInterrupt
        return train(settings, split, on_step)

    monkeypatch.setattr(command, "train", interrupted)
    assert demo(tmp_path, "--clip-norms", "1") == 130
    assert "Interrupted. The runs that were finished are kept in" in capsys.readouterr().err
    assert [result["settings"]["method"] for result in read_results(tmp_path)] == ["flat"]
    monkeypatch.undo()
    assert demo(tmp_path, "--clip-norms", "1") == 0
    assert capsys.readouterr().out.count("finished before") == 1


def _obeys_interrupts():
    """Undo what nohup and background jobs do: a process that inherits it never sees Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_stopped_process_keeps_what_was_finished(tmp_path, sent, code):
    assert demo(tmp_path, "--methods", "flat", "--clip-norms", "1") == 0
    before = (tmp_path / command.RESULTS_NAME).read_bytes()
    # Far more epochs than it will live for.
    endless = [sys.executable, "-m", "opacus_slaclip", "--output", tmp_path, "--epochs", "5000"]
    with subprocess.Popen(
        endless,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        preexec_fn=_obeys_interrupts,
    ) as process:
        first = process.stderr.read(1)  # of the progress bar: training has begun
        process.send_signal(sent)
        error = (first + process.stderr.read()).decode()
    assert process.returncode == code
    assert ("Interrupted." in error) == (sent == signal.SIGINT)
    assert "Traceback" not in error
    assert (tmp_path / command.RESULTS_NAME).read_bytes() == before


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_twenty_kills_lose_nothing_and_count_nothing_twice(tmp_path):
    """SIGKILL at random moments of runs of some hundred milliseconds, then one run to the end."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    wanted = ["--clip-norms", "0.1", "1", "3", "10"]
    start = time.monotonic()
    assert demo(straight, *wanted) == 0
    whole_run = time.monotonic() - start
    random, finished = np.random.default_rng(0), []
    for _ in range(20):
        kill_after(random.uniform(0, whole_run / 4), demo, killed, *wanted)
        kept = ResultFile(killed / command.RESULTS_NAME)
        kept.prepare()
        assert kept.read()[: len(finished)] == finished  # nothing lost
        finished = kept.read()

    assert demo(killed, *wanted) == 0

    assert len(read_results(killed)) == 8, "a run was done twice, or was lost"
    ours, theirs = (
        {json.dumps(r["settings"]): (r["epsilon"], r["clip_norms"]) for r in read_results(folder)}
        for folder in (killed, straight)
    )
    assert ours == theirs


# ---- errors at the command line -------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epsilon", "0"], "argument --epsilon: must be a positive number, got 0"),
        (["--epsilon", "-1"], "argument --epsilon: must be a positive number, got -1"),
        (["--epsilon", "nan"], "argument --epsilon: must be a positive number, got nan"),
        (["--epsilon", "three"], "argument --epsilon: must be a positive number, got 'three'"),
        (["--delta", "1"], "argument --delta: must be a number between 0 and 1, got 1"),
        (["--epochs", "0"], "argument --epochs: must be a positive integer, got 0"),
        (["--batch-size", "1.5"], "argument --batch-size: must be a positive integer, got '1.5'"),
        (["--lr", "inf"], "argument --lr: must be a positive number, got inf"),
        (["--seed", "-1"], "argument --seed: must be an integer of at least 0, got -1"),
        (["--clip-norms", "0.01"], "argument --clip-norms: must be in [0.1, 50], the bounds"),
        (["--methods", "adaptive"], "argument --methods: invalid choice: 'adaptive'"),
        (["--data", "cifar"], "argument --data: invalid choice: 'cifar'"),
    ],
)
def test_a_bad_argument_is_explained(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        demo(tmp_path, *arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_fixed_threshold_has_no_bounds(tmp_path):
    assert demo(tmp_path, "--methods", "flat", "--clip-norms", "0.01") == 0


def test_a_budget_that_no_noise_can_meet_is_explained(tmp_path, capsys):
    assert demo(tmp_path, "--epsilon", "1e-6") == 2
    assert "error: flat, C_0 = 3 cannot be run: The privacy budget" in capsys.readouterr().err


def test_an_output_that_cannot_be_a_folder_is_explained(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert demo(tmp_path / "file") == 2
    assert "Choose another --output." in capsys.readouterr().err


def test_mnist_without_a_folder_says_what_is_expected(tmp_path, capsys):
    assert demo(tmp_path / "out", "--data", "mnist") == 2
    assert "say where with --data-root" in capsys.readouterr().err
    for root, reason in ((tmp_path / "none", "is not a folder"), (tmp_path, "There is no mnist")):
        assert demo(tmp_path / "out", "--data", "mnist", "--data-root", str(root)) == 2
        error = capsys.readouterr().err
        assert reason in error
        assert "mnist.npz (arrays x_train, y_train, x_test, y_test)" in error
        assert all(name in error for name in IDX_NAMES.values())


@pytest.mark.parametrize(
    ("module", "package"),
    [("sklearn", "scikit-learn"), ("matplotlib", "matplotlib"), ("tqdm", "tqdm")],
)
def test_without_the_extra_it_says_what_to_install(tmp_path, capsys, monkeypatch, module, package):
    monkeypatch.setitem(sys.modules, module, None)  # what makes an import of it fail
    assert demo(tmp_path) == 2
    error = capsys.readouterr().err
    assert f"The demo needs {package}." in error
    assert 'pip install "opacus-slaclip[demo]"' in error
    assert "Traceback" not in error


def test_help_needs_no_extra(capsys, monkeypatch):
    for module in ("sklearn", "matplotlib", "tqdm"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit) as stop:
        command.main(["--help"])
    assert stop.value.code == 0
    assert "--max-physical-batch-size" in capsys.readouterr().out


# ---- data -----------------------------------------------------------------------------------


def test_digits_are_split_the_same_way_every_time():
    split = load("digits")
    images, labels = split.train.tensors
    assert images.shape == (1437, 1, 8, 8)
    assert images.dtype == torch.float32
    assert (images.min(), images.max()) == (0.0, 1.0)
    assert labels.dtype == torch.int64
    test_labels = split.test.tensors[1]
    assert len(test_labels) == 360
    # Stratified: every class gives a fifth of its images, rounded either way.
    shares = test_labels.bincount() / torch.cat([labels, test_labels]).bincount()
    assert len(shares) == split.num_classes
    assert (shares - 0.2).abs().max() < 1 / 170
    assert load("digits").digest() == split.digest()


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("mnist", "mnist.npz"),
        ("fashion-mnist", "fashion-mnist.npz"),
        ("mnist", ""),
        ("mnist", ".gz"),
        ("mnist", "MNIST/raw"),
        ("fashion-mnist", "FashionMNIST/raw"),
    ],
)
def test_every_layout_gives_the_same_images(tmp_path, arrays, name, place):
    if place.endswith(".npz"):
        np.savez(tmp_path / place, **arrays)
    elif place == ".gz":
        write_idx_folder(tmp_path, arrays, suffix=".gz")
    else:
        write_idx_folder(tmp_path / place, arrays)
    split = load(name, tmp_path)
    assert split.num_classes == 10
    for part, dataset in (("train", split.train), ("test", split.test)):
        images, labels = dataset.tensors
        expected = torch.from_numpy(arrays[f"x_{part}"]).unsqueeze(1).to(torch.float32) / 255
        assert torch.equal(images, expected)
        assert labels.tolist() == arrays[f"y_{part}"].tolist()


def test_the_digest_sees_one_changed_label(tmp_path, arrays):
    np.savez(tmp_path / "mnist.npz", **arrays)
    before = load("mnist", tmp_path).digest()
    arrays["y_test"][0] = 1
    np.savez(tmp_path / "mnist.npz", **arrays)
    assert load("mnist", tmp_path).digest() != before


def test_an_unknown_name_is_refused(tmp_path):
    with pytest.raises(ValueError, match="name must be one of digits, mnist, fashion-mnist, got"):
        load("cifar", tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_test": None}, r"mnist\.npz lacks x_test\. Expected are the arrays x_train, y_train"),
        ({"x_train": np.zeros((60, 8, 6))}, r"x_train in .* must hold gray images as uint8"),
        ({"x_train": np.zeros((60, 48), np.uint8)}, r"got uint8 of shape \(60, 48\)"),
        ({"x_train": np.zeros((0, 8, 6), np.uint8)}, r"got uint8 of shape \(0, 8, 6\)"),
        ({"x_test": np.zeros((10, 6, 6), np.uint8)}, "hold images of different sizes"),
        ({"y_train": np.zeros(59, np.uint8)}, r"y_train in .* must hold 60 integer labels"),
        ({"y_train": np.zeros(60)}, "must hold 60 integer labels, .* got float64"),
        ({"y_test": np.full(10, 10)}, "y_test in .* must hold labels 0 to 9, got 10 to 10"),
        ({"y_test": np.array([None] * 10)}, r"mnist\.npz cannot be read: .*pickle"),
    ],
)
def test_a_malformed_npz_file_is_explained(tmp_path, arrays, changes, message):
    arrays.update(changes)
    kept = {key: array for key, array in arrays.items() if array is not None}
    np.savez(tmp_path / "mnist.npz", **kept)
    with pytest.raises(DemoError, match=message):
        load("mnist", tmp_path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not a zip file", b"\x93NUMPY"])
def test_a_file_that_is_no_npz_is_explained(tmp_path, content):
    (tmp_path / "mnist.npz").write_bytes(content)
    with pytest.raises(DemoError, match=r"mnist\.npz cannot be read: .* Get the file again\."):
        load("mnist", tmp_path)


def test_a_single_array_is_no_npz(tmp_path, arrays):
    with (tmp_path / "mnist.npz").open("wb") as file:
        np.save(file, arrays["x_train"])
    with pytest.raises(DemoError, match=r"mnist\.npz cannot be read: it is one array"):
        load("mnist", tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train-images-idx3-ubyte", b"", r"is not an IDX file of unsigned bytes: .* 0x\."),
        ("train-images-idx3-ubyte", b"<html>", "is not an IDX file .* begins with 0x3c68746d"),
        ("train-images-idx3-ubyte", bytes([0, 0, 13, 1]), "begins with 0x00000d01"),
        ("train-images-idx3-ubyte", bytes([0, 0, 8, 3, 0, 0]), "has 6 bytes, but its header"),
        ("train-labels-idx1-ubyte", bytes([0, 0, 8, 1, 0, 0, 0, 3, 1]), "9 bytes, .* promises 11"),
        ("train-labels-idx1-ubyte", bytes([0, 0, 8, 1, 0, 0, 0, 1, 1, 1]), "10 .* promises 9"),
        ("train-labels-idx1-ubyte", bytes([0, 0, 8, 1, 0, 0, 0, 1, 1]), "must hold 60 integer"),
        ("t10k-images-idx3-ubyte.gz", b"not gzipped", "cannot be read: Not a gzipped file"),
        ("t10k-images-idx3-ubyte.gz", gzip.compress(bytes(99), mtime=0)[:-9], "cannot be read: "),
    ],
)
def test_a_malformed_idx_file_is_explained(tmp_path, arrays, name, content, message):
    write_idx_folder(tmp_path, arrays)
    (tmp_path / name.removesuffix(".gz")).unlink()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DemoError, match=message):
        load("mnist", tmp_path)


def test_a_missing_idx_file_is_named(tmp_path, arrays):
    write_idx_folder(tmp_path, arrays)
    (tmp_path / IDX_NAMES["y_test"]).unlink()
    with pytest.raises(DemoError, match=r"lacks t10k-labels-idx1-ubyte\. Expected there is either"):
        load("mnist", tmp_path)


def test_images_too_small_for_the_network_are_explained(tmp_path, arrays, capsys):
    arrays.update(x_train=arrays["x_train"][:, :3], x_test=arrays["x_test"][:, :3])
    np.savez(tmp_path / "mnist.npz", **arrays)
    assert demo(tmp_path / "out", "--data", "mnist", "--data-root", str(tmp_path)) == 2
    assert "Images must be at least 4 by 4 pixels, got (3, 6)" in capsys.readouterr().err
