#!/usr/bin/env python3
"""Run Opacus's own tests with Opacus's engine and with ours, and compare.

The tests are those in the installed opacus package, and nothing there is written to. A plugin puts
the engine in the place of ``opacus.PrivacyEngine`` before a test is imported. Both sides see the
same seeds and the same generated examples. A test that fails on one side runs once more on both,
with another seed: only one that fails twice with our engine, and passes with Opacus's, is lost.

The exit status is 0 only if no test is lost, tests passed on both sides and our engine was called.
"""
# ruff: noqa: T201 - a script that talks to a person

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import distribution, version
from pathlib import Path

# From the best to the worst; a test that is reported twice counts as the worse.
OUTCOMES = ("passed", "skipped", "failed", "errors")
OPACUS, OURS = "opacus:PrivacyEngine", "opacus_slaclip:PrivacyEngine"
SUPPORT = Path(__file__).resolve().parent / "opacus_suite_path"
DEFAULT_TESTS = (
    "batch_memory_manager_test.py",
    "gradient_accumulation_test.py",
    "poisson_test.py",
    "privacy_engine_test.py",
    "privacy_engine_validation_test.py",
    "randomness_test.py",
    "schedulers",
)


class SuiteError(Exception):
    """The tests could not be run, so there is nothing to compare."""


@dataclass(frozen=True)
class Result:
    """What became of one test."""

    outcome: str
    calls: int = 0
    message: str = ""


@dataclass
class Side:
    """All attempts with one engine; each maps the id of a test to its result."""

    engine: str
    clipping: str = "flat"
    attempts: list[dict[str, Result]] = field(default_factory=list)
    seconds: float = 0.0

    def run(self, tests: Path, selection: Sequence[str], *, processes: int, limit: float) -> None:
        """Run ``selection`` once more, with a seed of its own, and keep the results."""
        seed = len(self.attempts)
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as name:
            scratch = Path(name)
            # An empty configuration, lest pytest finds that of a project around the environment.
            (scratch / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
            command = [sys.executable, "-m", "pytest", "-c", "pytest.ini", f"--rootdir={tests}"]
            command += ["-p", "opacus_suite_plugin", "-p", "no:cacheprovider", "-q"]
            command += ["--junitxml=results.xml", "--continue-on-collection-errors"]
            command += [f"-n{processes}", f"--engine={self.engine}", f"--engine-seed={seed}"]
            command += [f"--engine-clipping={self.clipping}"]
            command += [str(tests / test) for test in selection]
            self.attempts.append(_run_pytest(command, scratch, limit))
        self.seconds += time.perf_counter() - start

    @property
    def name(self) -> str:
        """The engine, and what it does where a test asks for flat clipping."""
        return f"{self.engine} ({self.clipping})"

    def passes(self, test: str) -> bool:
        """Whether ``test`` passed in any attempt."""
        return any(self.outcome(test, i) == "passed" for i in range(len(self.attempts)))

    def outcome(self, test: str, attempt: int) -> str:
        """What became of ``test`` in one attempt."""
        result = self.attempts[attempt].get(test)
        return "not run" if result is None else result.outcome

    def message(self, test: str) -> str:
        """Return the first line of why ``test`` did not pass in the first attempt."""
        result = self.attempts[0].get(test, Result("not run", message="not run"))
        return (result.message.splitlines() or [result.outcome])[0]


def _run_pytest(command: Sequence[str], scratch: Path, limit: float) -> dict[str, Result]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    paths = [str(SUPPORT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # nothing is left behind in the package
    environment["OMP_NUM_THREADS"] = "1"
    log = scratch / "log"
    with log.open("wb") as stream:
        try:
            status = subprocess.run(
                command, cwd=scratch, env=environment, stdout=stream, stderr=stream, timeout=limit
            ).returncode
        except subprocess.TimeoutExpired as error:
            raise SuiteError(f"pytest ran longer than {limit:.0f} s\n{_tail(log)}") from error
    # 0: all passed, 1: some failed. With anything else the results are not the whole selection.
    if status not in (0, 1):
        raise SuiteError(f"pytest ended with status {status}\n{_tail(log)}")
    return read_results(scratch / "results.xml")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:])


def opacus_tests() -> Path:
    """Return the folder of Opacus's tests, without importing Opacus, and so torch, here."""
    return Path(str(distribution("opacus").locate_file("opacus/tests")))


def read_results(path: Path) -> dict[str, Result]:
    """Read a JUnit XML file; return a result for each node id."""
    tags = {"skipped": "skipped", "failure": "failed", "error": "errors"}
    results: dict[str, Result] = {}
    for case in ElementTree.parse(path).iter("testcase"):
        properties = {p.get("name"): p.get("value", "") for p in case.iter("property")}
        calls = int(properties.get("make_private_calls", "0"))
        # A file that cannot be imported and a worker that dies have no properties.
        name = properties.get("nodeid", f"{case.get('classname')}::{case.get('name')}")
        found = [
            Result(tags[element.tag], calls, element.get("message", ""))
            for element in case
            if element.tag in tags
        ]
        found += [Result("passed", calls)]
        found += [results[name]] if name in results else []
        results[name] = max(found, key=lambda result: OUTCOMES.index(result.outcome))
    return results


def suspects(theirs: Side, ours: Side) -> list[str]:
    """Return the tests that failed on either side, or passed on one only, in the first run."""
    alike = ({"passed"}, {"skipped"})
    names = sorted({*theirs.attempts[0], *ours.attempts[0]})
    return [name for name in names if {theirs.outcome(name, 0), ours.outcome(name, 0)} not in alike]


def lost_tests(theirs: Side, ours: Side) -> list[str]:
    """Return the tests that passed with Opacus's engine and never with ours."""
    names = sorted({name for attempt in theirs.attempts for name in attempt})
    return [name for name in names if theirs.passes(name) and not ours.passes(name)]


def faults(theirs: Side, ours: Side) -> list[str]:
    """Return why a run shows nothing, lost tests apart."""
    found = []
    for side in (theirs, ours):
        if not any(result.outcome == "passed" for result in side.attempts[0].values()):
            found.append(f"No test passed with {side.engine}.")
        if not count_calls(side.attempts[0]):
            found.append(f"make_private of {side.engine} was never called: nothing was tested.")
    return found


def count_calls(results: Mapping[str, Result]) -> int:
    """Return how often the tests called ``make_private``."""
    return sum(result.calls for result in results.values())


def report(theirs: Side, ours: Side, suspected: Sequence[str], lost: Sequence[str]) -> None:
    """Print the counts, the tests that are in doubt, and the lost ones by reason."""
    columns = (*OUTCOMES, "calls", "seconds")
    print(f"\n{'engine (clipping)':42}" + "".join(f"{column:>9}" for column in columns))
    for side in (theirs, ours):
        counts = Counter(result.outcome for result in side.attempts[0].values())
        numbers = [*(counts[name] for name in OUTCOMES), count_calls(side.attempts[0])]
        row = "".join(f"{number:9}" for number in (*numbers, round(side.seconds)))
        print(f"{side.name:42}{row}")
    print("(the first run; calls: of the engine's make_private; seconds: repetitions included)")
    for name in suspected:
        if name not in lost:
            print(f"\nnot lost, but not passed everywhere: {name}")
            for side in (theirs, ours):
                outcomes = ", then ".join(side.outcome(name, i) for i in range(len(side.attempts)))
                print(f"  {side.name}: {outcomes}: {side.message(name)}")
    print(f"\nPass with Opacus's engine and not with ours: {len(lost)}")
    for message, names in itertools.groupby(sorted(lost, key=ours.message), key=ours.message):
        print(f"  {message}")
        print("".join(f"    {name}\n" for name in names), end="")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("tests", nargs="*", help="files below opacus/tests; default: the engine's")
    parser.add_argument("--all", action="store_true", help="run all of Opacus's tests")
    parser.add_argument(
        "--clipping",
        choices=("flat", "slaclip", "slaclip-q"),
        default="flat",
        help="what our engine does where a test asks for flat clipping, given or by default; other "
        "than flat, lost tests are listed but do not fail the run",
    )
    parser.add_argument("--processes", type=int, default=2, help="0: in the main process")
    parser.add_argument("--limit", type=float, default=3600, help="seconds for one run")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, *, engine: str = OURS) -> int:
    """Run both sides and report; return the exit status."""
    options = parse_arguments(arguments)
    tests = opacus_tests()
    selection = ["."] if options.all else options.tests or DEFAULT_TESTS
    theirs, ours = Side(OPACUS), Side(engine, options.clipping)
    print(f"opacus {version('opacus')}, torch {version('torch')}, {options.processes} processes")
    try:
        for side in (theirs, ours):
            side.run(tests, selection, processes=options.processes, limit=options.limit)
        suspected = suspects(theirs, ours)
        # What has no node id, such as a file that cannot be imported, cannot be asked for again.
        repeated = [name for name in suspected if ".py::" in name]
        if repeated:
            for side in (theirs, ours):
                side.run(tests, repeated, processes=options.processes, limit=options.limit)
    except SuiteError as error:
        print(error)
        return 1
    lost = lost_tests(theirs, ours)
    report(theirs, ours, suspected, lost)
    found = faults(theirs, ours)
    print("".join(f"{fault}\n" for fault in found), end="")
    return 1 if found or (lost and options.clipping == "flat") else 0


if __name__ == "__main__":
    sys.exit(main())
