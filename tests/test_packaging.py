"""What the distribution promises, and the borders between its modules that a reader relies on."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import opacus_slaclip

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(opacus_slaclip.__file__).resolve().parent


def run_python(program: str, *arguments: str) -> None:
    """Run `program` in a fresh, isolated interpreter; fail with what it prints."""
    command = [sys.executable, "-I", "-c", program, *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# --- the distribution ---


def test_the_version_is_written_once():
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    [declared] = re.findall(r'^version = "(.+)"$', pyproject, re.M)

    assert metadata.version("opacus-slaclip") == declared
    assert opacus_slaclip.__version__ == declared


def test_the_runtime_requirements_are_exactly_three():
    lines = [Requirement(line) for line in metadata.requires("opacus-slaclip") or []]
    runtime = {line.name: line.specifier for line in lines if line.marker is None}

    assert runtime == {
        name: Requirement(name + rule).specifier
        for name, rule in {"torch": ">=2.6", "opacus": ">=1.6,<2", "numpy": ""}.items()
    }
    assert all("extra" in str(line.marker) for line in lines if line.marker is not None)


def test_the_package_is_marked_as_typed():
    assert (PACKAGE / "py.typed").is_file()


def test_no_tracked_file_names_a_path_of_one_machine():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so nothing says which files are tracked")
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
        cwd=ROOT,
    ).stdout
    files = [ROOT / name.decode() for name in listing.split(b"\0") if name]
    assert ROOT / "pyproject.toml" in files
    absolute = re.compile(rb"(?<![\w.])/(?:home|root|Users|work)/")

    # A file that was deleted but not yet committed is listed too.
    found = [file for file in files if file.is_file() and absolute.search(file.read_bytes())]

    assert found == []


# --- what an import brings in ---

BLOCK_OPTIONAL = """
import sys
import opacus, torch  # torch itself imports tqdm where it is installed

for optional in ("matplotlib", "sklearn", "tqdm"):
    for loaded in [name for name in sys.modules if name.split(".")[0] == optional]:
        del sys.modules[loaded]
    sys.modules[optional] = None  # from here on, importing it raises

import opacus_slaclip
"""

BLOCK_OPACUS = """
import sys, types
from importlib import import_module

package = types.ModuleType("opacus_slaclip")  # stands in for __init__.py, which needs Opacus
package.__path__ = [sys.argv[2]]
sys.modules["opacus_slaclip"] = package
sys.modules["opacus"] = None  # importing it raises

import_module("opacus_slaclip." + sys.argv[1])
"""


def test_importing_the_package_needs_no_optional_dependency():
    run_python(BLOCK_OPTIONAL)


@pytest.mark.parametrize("module", ["slack", "indicator", "controllers"])
def test_the_mathematics_imports_no_opacus(module):
    run_python(BLOCK_OPACUS, module, str(PACKAGE))


# --- who may touch Opacus's underscore names ---


def opacus_private_names(source: str) -> list[str]:
    """Names of Opacus that start with an underscore and are imported or reached in `source`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            found.append(ast.unparse(node))
    return [name for name in found if re.match(r"opacus\.(.*\.)?_(?!_)", name)]


@pytest.mark.parametrize(
    "source",
    [
        "from opacus.optimizers.optimizer import _mark_as_processed",
        "from opacus import _private",
        "import opacus._private.module",
        "import opacus\nopacus.optimizers.optimizer._mark_as_processed(1)",
    ],
)
def test_the_search_for_private_names_finds_them(source):
    assert opacus_private_names(source)


def test_the_search_for_private_names_passes_public_ones_and_our_own():
    assert not opacus_private_names(
        "import opacus\n"
        "from opacus.optimizers import DPOptimizer\n"
        "from opacus_slaclip._opacus import mark\n"
        "from ._opacus import mark\n"
        "print(opacus.__version__)\n"
    )


def test_only_one_module_touches_private_names_of_opacus():
    touching = {
        file.relative_to(PACKAGE).as_posix(): names
        for file in sorted(PACKAGE.rglob("*.py"))
        if (names := opacus_private_names(file.read_text(encoding="utf-8")))
    }

    assert touching.keys() <= {"_opacus.py"}, touching
