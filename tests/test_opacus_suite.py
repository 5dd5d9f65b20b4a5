"""The script that runs Opacus's tests with our engine: what it reads, compares and refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
SCHEDULER_TESTS = "schedulers/grad_clip_scheduler_test.py"
OWN_MODULES = ("torchvision", "opacus_suite", "opacus_suite_plugin")

JUNIT = """<testsuites><testsuite>
<testcase classname="a_test.T" name="passes"><properties>
  <property name="nodeid" value="a_test.py::T::passes" />
  <property name="make_private_calls" value="2" /></properties></testcase>
<testcase classname="a_test.T" name="fails"><properties>
  <property name="nodeid" value="a_test.py::T::fails" />
  <property name="make_private_calls" value="3" /></properties>
  <failure message="first line&#10;second">trace</failure></testcase>
<testcase classname="a_test.T" name="fails"><properties>
  <property name="nodeid" value="a_test.py::T::fails" /></properties>
  <error message="teardown" /></testcase>
<testcase classname="a_test.T" name="skips"><properties>
  <property name="nodeid" value="a_test.py::T::skips" /></properties>
  <skipped message="no GPU" /></testcase>
<testcase classname="" name="b_test"><error message="collection failure" /></testcase>
</testsuite></testsuites>"""

# An engine that spoils one method, in the place of ours.
BROKEN = """
import opacus

class PrivacyEngine(opacus.PrivacyEngine):
    def make_private(self, **kwargs):
        module, optimizer, loader = super().make_private(**kwargs)
        optimizer.max_grad_norm *= 2
        return module, optimizer, loader
"""


@pytest.fixture
def suite(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.syspath_prepend(str(SCRIPTS / "opacus_suite_path"))
    import opacus_suite

    yield opacus_suite
    # A stand-in must not outlive the test.
    for name in [n for n in sys.modules if n.split(".")[0] in OWN_MODULES]:
        del sys.modules[name]


def sides(suite, theirs: list[dict[str, str]], ours: list[dict[str, str]]):
    """Two sides whose attempts have these outcomes; every test calls the engine once."""
    return [
        suite.Side(
            engine,
            attempts=[{k: suite.Result(v, calls=1) for k, v in a.items()} for a in attempts],
        )
        for engine, attempts in ((suite.OPACUS, theirs), (suite.OURS, ours))
    ]


# --- reading and comparing ---


def test_the_results_are_read_from_the_xml_file_and_the_worse_report_counts(suite, tmp_path):
    file = tmp_path / "results.xml"
    file.write_text(JUNIT, encoding="utf-8")

    results = suite.read_results(file)

    assert {name: result.outcome for name, result in results.items()} == {
        "a_test.py::T::passes": "passed",
        "a_test.py::T::fails": "errors",
        "a_test.py::T::skips": "skipped",
        "::b_test": "errors",
    }
    assert results["a_test.py::T::passes"].calls == 2


@pytest.mark.parametrize("outcome", ["failed", "errors", "skipped", "not run"])
def test_a_test_that_never_passes_with_ours_is_lost(suite, outcome):
    first = {"a.py::t": "passed", "a.py::u": "passed"}
    worse = {"a.py::u": "passed"} | ({} if outcome == "not run" else {"a.py::t": outcome})
    theirs, ours = sides(suite, [first], [worse])

    assert suite.suspects(theirs, ours) == ["a.py::t"]
    assert suite.lost_tests(theirs, ours) == ["a.py::t"]


def test_a_test_that_passes_on_repetition_is_not_lost(suite):
    theirs, ours = sides(
        suite,
        [{"a.py::t": "passed"}, {"a.py::t": "passed"}],
        [{"a.py::t": "failed"}, {"a.py::t": "passed"}],
    )

    assert suite.lost_tests(theirs, ours) == []


def test_a_test_that_fails_with_opacus_too_is_in_doubt_but_not_lost(suite):
    theirs, ours = sides(suite, [{"a.py::t": "failed"}], [{"a.py::t": "failed"}])

    assert suite.suspects(theirs, ours) == ["a.py::t"]
    assert suite.lost_tests(theirs, ours) == []


def test_a_test_that_passes_for_opacus_only_on_repetition_counts(suite):
    theirs, ours = sides(
        suite,
        [{"a.py::t": "failed"}, {"a.py::t": "passed"}],
        [{"a.py::t": "failed"}, {"a.py::t": "failed"}],
    )

    assert suite.lost_tests(theirs, ours) == ["a.py::t"]


def test_a_run_in_which_nothing_passed_or_nothing_was_called_is_a_fault(suite):
    theirs, ours = sides(suite, [{"a.py::t": "passed"}], [{"a.py::t": "skipped"}])
    assert suite.faults(theirs, ours) == [f"No test passed with {suite.OURS}."]

    ours.attempts = [{"a.py::t": suite.Result("passed", calls=0)}]
    [fault] = suite.faults(theirs, ours)
    assert "never called" in fault


# --- whole runs, on a few tests ---


def test_ours_passes_where_opacus_does(suite, capsys):
    assert suite.main([SCHEDULER_TESTS, "--processes=0"]) == 0

    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    counted = {row[0]: row[2:7] for row in rows if row and row[0] in (suite.OPACUS, suite.OURS)}
    # passed, skipped, failed, errors, calls: one of make_private in each of the three tests
    row = ["3", "0", "0", "0", "3"]
    assert counted == {suite.OPACUS: row, suite.OURS: row}


def test_a_broken_engine_is_noticed(suite, monkeypatch, tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    side = suite.Side("broken:PrivacyEngine")

    side.run(suite.opacus_tests(), [SCHEDULER_TESTS], processes=0, limit=600)

    assert [result.outcome for result in side.attempts[0].values()] == ["failed"] * 3


def test_a_test_module_that_holds_another_engine_stops_the_run(suite, tmp_path):
    (tmp_path / "a_test.py").write_text(
        "class PrivacyEngine: ...\ndef test_it(): ...\n", encoding="utf-8"
    )

    with pytest.raises(suite.SuiteError, match="a_test holds"):
        suite.Side(suite.OPACUS).run(tmp_path, ["a_test.py"], processes=0, limit=600)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [({}, "slaclip"), ({"clipping": "flat"}, "slaclip"), ({"clipping": "per_layer"}, "per_layer")],
)
def test_another_clipping_takes_the_place_of_flat_alone(suite, monkeypatch, asked, expected):
    import opacus
    import opacus_suite_plugin

    class Engine:
        def make_private(self, clipping="flat"):
            return clipping

        make_private_with_epsilon = make_private

    for module in (opacus, opacus.privacy_engine):  # put back after the test
        monkeypatch.setattr(module, "PrivacyEngine", opacus.PrivacyEngine)
    substitution = opacus_suite_plugin.Substitution(Engine, "slaclip", seed=0)

    assert opacus.PrivacyEngine is opacus.privacy_engine.PrivacyEngine is Engine
    assert Engine().make_private(**asked) == expected
    assert Engine().make_private_with_epsilon(**asked) == expected
    assert substitution.calls == 1


# --- the stand-in for torchvision ---


def test_the_stand_in_makes_the_same_image_for_the_same_index(suite):
    from torchvision import transforms
    from torchvision.datasets import FakeData

    scale = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.25,))])
    data = FakeData(size=3, image_size=(1, 4, 5), num_classes=10, transform=scale)
    images = [image for image, _ in (data[0], data[0], data[1])]

    assert images[0].shape == (1, 4, 5)
    assert torch.equal(images[0], images[1])
    assert not torch.equal(images[0], images[2])
    assert -2 <= images[0].min() < images[0].max() <= 2
    assert all(isinstance(label, int) and 0 <= label < 10 for _, label in data)


def test_the_models_of_the_stand_in_have_batch_normalization(suite):
    from torchvision import models

    for make in (models.resnet18, models.densenet121, models.mobilenet_v3_small):
        model = make(weights=None)
        assert any(isinstance(layer, nn.BatchNorm2d) for layer in model.modules())
        assert model(torch.zeros(2, 3, 16, 16)).shape == (2, 1000)
    assert models.densenet121().classifier.in_features == 64
