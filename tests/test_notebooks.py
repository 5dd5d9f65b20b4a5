"""Every notebook runs from a clean start, and the page that is stored is that of its code."""

from __future__ import annotations

import base64
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "notebooks.py"
NAMES = (
    "01_dp_sgd_from_scratch",
    "02_slaclip_in_ten_minutes",
    "03_choosing_nothing",
    "04_large_models",
)
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SECONDS = 900  # so that one that hangs ends; on two cores they take 10 to 60
MOST_BYTES = 1_500_000
INSTALL = re.compile(r'%pip install -q "opacus-slaclip\[notebooks\]" +# .*Colab')
# A path of one machine, an object's address, or where a kernel ran.
MACHINE = re.compile(
    r"(?<![\w./])/(?:home|root|tmp|work|usr|opt|mnt|Users|private|content|var)/|[A-Z]:\\|"
    r"\bat 0x[0-9a-f]{6,}|ipykernel_\d+|site-packages"
)
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("notebooks_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    """All code but the cell for Colab, which is not run."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"][1:]


def outputs(notebook):
    return [output for cell in code_cells(notebook) for output in cell.outputs]


def texts(output):
    """What a reader sees of an output, without its pictures."""
    data = output.get("data", {})
    parts = [output.get("text", ""), *(data.get(f"text/{kind}", "") for kind in ("plain", "html"))]
    return "".join(parts)


def test_the_four_notebooks_are_there():
    assert {path.stem for path in NOTEBOOKS} == set(NAMES)


@each
def test_runs_without_an_error_and_leaves_no_trace(path, script):
    before = path.read_bytes(), sorted(path.parent.iterdir())
    notebook = script.execute(path, SECONDS)
    assert not [out for out in outputs(notebook) if out.output_type == "error"]
    assert (path.read_bytes(), sorted(path.parent.iterdir())) == before
    # The same kinds of outputs in the same cells as on the stored page.
    kinds = [[out.output_type for out in cell.outputs] for cell in code_cells(notebook)]
    stored = [[out.output_type for out in cell.outputs] for cell in code_cells(read(path))]
    assert kinds == stored


@each
def test_begins_with_one_line_for_colab(path):
    first = read(path).cells[0]
    assert first.cell_type == "code"
    assert INSTALL.match(first.source)
    assert "\n" not in first.source
    assert first.execution_count is None
    assert not first.outputs


@each
def test_stored_outputs_are_of_the_stored_code(path, script):
    notebook = read(path)
    assert notebook.metadata.get(script.HASH) == script.source_hash(notebook), (
        f"the code has changed since the last run: python scripts/notebooks.py {path.stem}"
    )
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1))
    assert not [out for out in outputs(notebook) if out.output_type == "error"]


@each
def test_shows_figures_as_png(path):
    figures = [
        out.data["image/png"] for out in outputs(read(path)) if "image/png" in out.get("data", {})
    ]
    assert figures
    for figure in figures:
        assert base64.b64decode(figure).startswith(PNG_MAGIC)


@each
def test_asserts_its_key_numbers(path):
    code = "\n".join(cell.source for cell in code_cells(read(path)))
    assert len(re.findall(r"^\s*assert ", code, re.M)) >= 3


@each
def test_explains_more_than_it_computes(path):
    cells = read(path).cells
    prose = [cell for cell in cells if cell.cell_type == "markdown"]
    assert len(prose) >= 0.35 * len(cells)
    assert sum(len(cell.source.split()) for cell in prose) >= 300
    assert cells[1].cell_type == "markdown"
    assert cells[1].source.startswith("# ")
    titles = [line for cell in prose for line in cell.source.splitlines() if line.startswith("# ")]
    assert len(titles) == 1


@each
def test_stored_outputs_have_no_warnings_and_no_error_stream(path):
    for output in outputs(read(path)):
        assert output.get("name") != "stderr", output.text
        assert not re.search(r"\b\w*Warning\b|Traceback", texts(output))


@each
def test_names_no_machine(path):
    notebook = read(path)
    shown = [cell.source for cell in notebook.cells] + [texts(out) for out in outputs(notebook)]
    for text in shown:
        assert not MACHINE.search(text), MACHINE.search(text)


@each
def test_stores_nothing_that_changes_from_run_to_run(path, script):
    notebook = read(path)
    assert set(notebook.metadata) == {"kernelspec", "language_info", script.HASH}
    assert notebook.metadata.language_info == {"name": "python"}
    for cell in notebook.cells:
        assert set(cell.metadata) <= {"tags", "jupyter"}
        for output in cell.get("outputs", []):
            assert set(output.get("data", {})) <= {*script.MIME_TYPES, "text/plain"}
    assert path.stat().st_size < MOST_BYTES


@each
def test_links_lead_somewhere(path):
    prose = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if not target.startswith(("https://", "#", "attachment:")):
            assert (path.parent / target.partition("#")[0]).exists(), target


def test_readme_lists_every_notebook():
    text = (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8")
    for name in NAMES:
        assert f"]({name}.ipynb)" in text


def write_notebook(folder, *sources):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in sources])
    path = folder / "example.ipynb"
    nbformat.write(notebook, path)
    return path


def test_script_stores_the_same_bytes_twice(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "FOLDER", tmp_path)
    path = write_notebook(
        tmp_path,
        "%pip install nothing",
        "import ipywidgets, os, sys\nprint(sys.executable, os.environ['OMP_NUM_THREADS'])",
        "import matplotlib.pyplot as plt\nplt.plot([1, 2]);",
        "ipywidgets.IntSlider()",
    )
    assert script.main(["exa"]) == 0
    first = path.read_bytes()
    assert script.main([]) == 0
    assert path.read_bytes() == first
    skipped, printed, drawn, widget = read(path).cells
    assert skipped.execution_count is None
    assert printed.outputs[0].text == f"{sys.executable} 1\n"
    assert "image/png" in drawn.outputs[0].data
    assert widget.outputs == []


def test_script_stores_nothing_when_a_cell_fails(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "FOLDER", tmp_path)
    path = write_notebook(tmp_path, "print('before')", "assert 1 + 1 == 3")
    before = path.read_bytes()
    assert script.main([]) == 1
    assert "AssertionError" in capsys.readouterr().out
    assert path.read_bytes() == before


def test_script_stops_a_notebook_that_takes_too_long(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "FOLDER", tmp_path)
    write_notebook(tmp_path, *["import time; time.sleep(2)"] * 30)
    assert script.main(["--timeout", "5", "--check"]) == 1
    assert "FAILED, took more than 5 s" in capsys.readouterr().out


def test_script_knows_the_names(script):
    with pytest.raises(SystemExit, match="No notebook starts with '99'"):
        script.choose(["99"])
