"""Every example runs as a user runs it, spends the budget it prints, and moves its threshold."""

from __future__ import annotations

import csv
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from opacus.accountants import PRVAccountant

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

NUM_DIGITS = 1437  # four fifths of scikit-learn's 1797
LAST_LINE = re.compile(
    r"test accuracy = (?P<accuracy>[\d.]+), epsilon = (?P<epsilon>[\d.]+) at delta = "
    r"(?P<delta>\S+), C: (?P<first>\S+) -> (?P<last>\S+)"
)
EPOCH_LINE = re.compile(r"^epoch (\d+): C = (\S+), epsilon = (\S+)$", re.M)


class Outcome(NamedTuple):
    """What an example printed."""

    output: str
    accuracy: float
    epsilon: str
    delta: float
    first: float
    last: float

    @property
    def epochs(self) -> list[tuple[str, str, str]]:
        return EPOCH_LINE.findall(self.output)


def python(*command: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=folder,
        timeout=180,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"},
    )


def run(script: str, *options: str | Path, folder: Path, launcher: tuple[str, ...] = ()) -> Outcome:
    """Run an example, seeded by default, and read its last line."""
    result = python(*launcher, EXAMPLES / script, *options, folder=folder)
    assert result.returncode == 0, result.stderr
    match = LAST_LINE.fullmatch(result.stdout.splitlines()[-1])
    assert match, result.stdout
    return Outcome(
        output=result.stdout,
        accuracy=float(match["accuracy"]),
        epsilon=match["epsilon"],
        delta=float(match["delta"]),
        first=float(match["first"]),
        last=float(match["last"]),
    )


def spent(*, samples: int, batch_size: int, epochs: int, sigma: float = 1.0, delta: float) -> str:
    """Return, as the examples print it, the epsilon of these many steps of plain DP-SGD."""
    steps = -(-samples // batch_size)
    accountant = PRVAccountant()
    accountant.history = [(sigma, 1 / steps, steps * epochs)]
    return f"{accountant.get_epsilon(delta):.3f}"


def load_module(script: str) -> ModuleType:
    """Import an example that needs no framework, to look at one of its parts."""
    spec = importlib.util.spec_from_file_location(f"example_{script[:-3]}", EXAMPLES / script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- all of them ---

ASK_ALL_FOR_HELP = """
import runpy, sys

for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as exit:
        assert exit.code == 0, script
"""


def test_every_example_explains_itself(tmp_path):
    result = python("-c", ASK_ALL_FOR_HELP, *SCRIPTS, folder=tmp_path)

    assert result.returncode == 0, result.stderr
    for script in SCRIPTS:
        title = script.read_text(encoding="utf-8").splitlines()[0].strip('"')
        assert title in result.stdout
        assert f"usage: {script.name}" in result.stdout


def test_the_readme_lists_every_example():
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")

    assert set(re.findall(r"\]\((\w+\.py)\)", readme)) == {script.name for script in SCRIPTS}


# --- mnist.py ---


@pytest.fixture(scope="module")
def plain_digits(tmp_path_factory):
    """Three epochs with hooks on whole batches."""
    return run("mnist.py", "--epochs", "3", "--seed", "0", folder=tmp_path_factory.mktemp("plain"))


def test_mnist_adapts_at_the_price_of_plain_dp_sgd(plain_digits):
    assert plain_digits.first == 1.0
    assert plain_digits.last != plain_digits.first
    assert len({clip_norm for _, clip_norm, _ in plain_digits.epochs}) == 3
    assert plain_digits.epsilon == spent(
        samples=NUM_DIGITS, batch_size=128, epochs=3, delta=plain_digits.delta
    )


def test_mnist_learns_with_its_defaults(tmp_path):
    outcome = run("mnist.py", "--seed", "0", folder=tmp_path)

    assert outcome.accuracy > 0.8  # 0.93, 0.91 and 0.89 for seeds 0, 1 and 2


@pytest.mark.parametrize(
    "options",
    [
        ("--grad-sample-mode", "ghost"),
        ("--max-physical-batch-size", "50"),
        ("--grad-sample-mode", "ghost", "--max-physical-batch-size", "50"),
    ],
    ids=" ".join,
)
def test_mnist_is_the_same_run_in_ghost_mode_and_in_pieces(plain_digits, options, tmp_path):
    outcome = run("mnist.py", "--epochs", "3", "--seed", "0", *options, folder=tmp_path)

    # The same draws; sums in another order differ by rounding, which 36 steps may carry to the
    # last of the printed four digits.
    assert outcome.last == pytest.approx(plain_digits.last, rel=2e-3)
    assert outcome.epsilon == plain_digits.epsilon


def test_mnist_with_flat_clipping_keeps_its_threshold(plain_digits, tmp_path):
    outcome = run("mnist.py", "--epochs", "3", "--seed", "0", "--clipping", "flat", folder=tmp_path)

    assert (outcome.first, outcome.last) == (1.0, 1.0)
    assert outcome.epsilon == plain_digits.epsilon  # adapting costs nothing


def test_mnist_goes_on_where_a_checkpoint_stopped(plain_digits, tmp_path):
    common = ("mnist.py", "--seed", "0", "--checkpoint", "digits.pt")

    begun = run(*common, "--epochs", "1", folder=tmp_path)
    resumed = run(*common, "--epochs", "3", "--resume", folder=tmp_path)

    assert begun.epochs == plain_digits.epochs[:1]
    assert f"resumed after epoch 1: C = {begun.last:.4g}" in resumed.output
    assert resumed.epochs == plain_digits.epochs[1:]
    assert resumed[1:] == plain_digits[1:]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits.pt"]


def test_mnist_reads_mnist_from_a_folder(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        f"{kind}_{part}": rng.integers(0, high, shape, dtype=np.uint8)
        for part, count in (("train", 200), ("test", 50))
        for kind, high, shape in (("x", 256, (count, 28, 28)), ("y", 10, (count,)))
    }
    np.savez(tmp_path / "mnist.npz", **arrays)

    outcome = run(
        *("mnist.py", "--data", "mnist", "--data-root", tmp_path),
        *("--epochs", "1", "--batch-size", "50", "--seed", "0"),
        folder=tmp_path,
    )

    assert outcome.last != outcome.first
    assert outcome.epsilon == spent(samples=200, batch_size=50, epochs=1, delta=outcome.delta)


def test_the_network_for_mnist_is_that_of_the_opacus_example():
    model = load_module("mnist.py").build_model(28)

    assert sum(parameter.numel() for parameter in model.parameters()) == 26_010
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--data", "mnist"), "--data-root"),
        (("--resume",), "--resume needs an existing --checkpoint"),
    ],
)
def test_mnist_says_what_is_missing(options, message, tmp_path):
    result = python(EXAMPLES / "mnist.py", *options, folder=tmp_path)

    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


# --- names.py ---


def test_names_runs_without_data(tmp_path):
    outcome = run("names.py", "--epochs", "1", "--seed", "0", folder=tmp_path)

    assert "1800 names for training, 200 for testing, 4 languages" in outcome.output
    assert outcome.last != outcome.first
    assert 2.98 <= float(outcome.epsilon) <= 3.0  # the noise is calibrated to 3, at most .01 below
    assert list(tmp_path.iterdir()) == []


def test_names_reads_a_folder(tmp_path):
    (tmp_path / "Czech.txt").write_text("Černý\n\nDvořák\n" * 40, encoding="utf-8")
    (tmp_path / "Irish.txt").write_text("O'Néill\nMac Gabhann\n" * 40, encoding="utf-8")

    outcome = run(
        *("names.py", "--data-root", tmp_path, "--epochs", "1", "--batch-size", "48"),
        *("--epsilon", "5", "--seed", "0"),
        folder=tmp_path,
    )

    assert "144 names for training, 16 for testing, 2 languages" in outcome.output
    assert outcome.last != outcome.first
    assert 4.98 <= float(outcome.epsilon) <= 5.0


def test_a_name_is_read_without_its_padding_and_its_neighbours():
    names = load_module("names.py")
    torch.manual_seed(0)
    model = names.NameClassifier(num_languages=3, width=8)
    codes = [names.encode(name, 20) for name in ("Ng", "O'Néill", "Abcdefghijklmnopqrstuvwxyz")]
    lengths = torch.tensor([len(code) for code in codes])
    assert lengths.tolist() == [2, 7, 20]

    def batch(codes: list[list[int]], width: int) -> torch.Tensor:
        return torch.tensor([code + [0] * (width - len(code)) for code in codes])

    together = model(batch(codes, 25), lengths)
    for row, code in enumerate(codes):
        alone = model(batch([code], len(code)), lengths[row : row + 1])
        # Rounding of a matrix product that is blocked by the size of the batch.
        torch.testing.assert_close(together[row], alone[0], rtol=1e-5, atol=1e-6)


def test_names_refuses_a_folder_without_languages(tmp_path):
    result = python(EXAMPLES / "names.py", "--data-root", tmp_path, folder=tmp_path)

    assert result.returncode == 2
    assert "--data-root must hold a *.txt for each of several languages" in result.stderr


# --- lightning_module.py ---


def logged(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["C"]]


def test_lightning_logs_the_live_threshold_and_resumes(tmp_path):
    common = ("lightning_module.py", "--accelerator", "cpu", "--output")
    steps = -(-NUM_DIGITS // 128)

    begun = run(*common, "begun", "--epochs", "2", "--seed", "0", folder=tmp_path)
    resumed = run(
        *common, "resumed", "--epochs", "3", "--resume", "begun/last.ckpt", folder=tmp_path
    )

    rows = logged(tmp_path / "begun")
    assert [float(row["releases"]) for row in rows] == list(range(1, 2 * steps + 1))
    assert len({row["C"] for row in rows}) == len(rows)  # a stale copy would repeat itself
    for epoch, clip_norm, _ in begun.epochs:
        # The optimizer's own, printed with six digits; Lightning logs in float32.
        last = rows[int(epoch) * steps - 1]
        assert float(last["C"]) == pytest.approx(float(clip_norm), rel=1e-5)
    assert begun.first == 1.0
    assert float(rows[-1]["C"]) == pytest.approx(begun.last, rel=1e-3)
    for outcome, epochs in ((begun, 2), (resumed, 3)):
        assert outcome.epsilon == spent(
            samples=NUM_DIGITS, batch_size=128, epochs=epochs, delta=outcome.delta
        )
    after = logged(tmp_path / "resumed")
    assert [float(row["releases"]) for row in after] == list(range(2 * steps + 1, 3 * steps + 1))
    # A step moves log C by eta (gamma - s_1), from -.1 to .2 without noise; the tolerance leaves
    # s_1 more than ten standard deviations. A restart from C_0 = 1 would be far below.
    assert begun.last > 2.0
    assert float(after[0]["C"]) == pytest.approx(begun.last, rel=0.3)


def test_lightning_refuses_to_draw_the_same_noise_twice(tmp_path):
    result = python(
        *(EXAMPLES / "lightning_module.py", "--resume", "last.ckpt", "--seed", "0"),
        folder=tmp_path,
    )

    assert result.returncode == 2
    assert "a resumed run must not draw the noise of --seed again" in result.stderr


# --- lora_transformer.py ---


@pytest.mark.parametrize("targets", [("query", "value"), ("query", "key", "value", "dense")])
def test_lora_trains_adapters_and_head_only(targets, tmp_path):
    outcome = run(
        *("lora_transformer.py", "--documents", "1024", "--epochs", "2", "--batch-size", "128"),
        *("--seed", "0", "--device", "cpu", "--target-modules", *targets),
        folder=tmp_path,
    )

    # Rank 4: per layer 4 * (64 + 64) for each of query, key, value and the attention's dense,
    # 4 * (64 + 128) for each dense of the feed-forward part, and once the pooler's dense.
    adapters = {2: 2 * 2 * 512, 4: 2 * (4 * 512 + 2 * 768) + 512}[len(targets)]
    head = 64 * 4 + 4
    assert f"{adapters + head:,} of " in outcome.output
    assert outcome.last != outcome.first
    assert outcome.epsilon == spent(samples=1024, batch_size=128, epochs=2, delta=outcome.delta)


# --- ddp.py and fsdp.py ---


@pytest.mark.parametrize(
    ("script", "options", "says"),
    [
        ("ddp.py", ("--grad-sample-mode", "hooks"), "2 processes on cpu, hooks"),
        ("ddp.py", ("--grad-sample-mode", "ghost"), "2 processes on cpu, ghost"),
        ("fsdp.py", (), "2 processes on cpu, 13,061 of 26,122 weights each"),
    ],
    ids=["ddp-hooks", "ddp-ghost", "fsdp"],
)
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="takes a GPU for each process if there is one"
)
def test_two_processes_train_one_model_at_one_budget(script, options, says, tmp_path):
    outcome = run(
        script, "--epochs", "2", "--seed", "0", *options, folder=tmp_path, launcher=TORCHRUN
    )

    assert outcome.output.splitlines()[0] == says
    assert [epoch for epoch, _, _ in outcome.epochs] == ["1", "2"]  # only rank 0 prints
    assert outcome.last != outcome.first
    assert outcome.epsilon == spent(
        samples=NUM_DIGITS, batch_size=128, epochs=2, delta=outcome.delta
    )


@pytest.mark.parametrize("script", ["ddp.py", "fsdp.py"])
def test_without_torchrun_it_says_how_to_start(script, tmp_path):
    result = python(EXAMPLES / script, folder=tmp_path)

    assert result.returncode == 1
    assert f"torchrun --nproc-per-node 2 examples/{script}" in result.stderr
