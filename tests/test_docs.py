"""The pages hang together: links, symbols, numbers, the table of modes, the API reference."""

from __future__ import annotations

import inspect
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case, make
from PIL import Image
from torch import nn

import opacus_slaclip
from opacus_slaclip import (
    PrivacyEngine,
    SlackIndicator,
    SlaClipController,
    SlaClipDPOptimizer,
    SlaClipQController,
    recommended_num_slots,
    slack,
)
from opacus_slaclip.optimizers import get_optimizer_class

ROOT = Path(__file__).resolve().parent.parent
INDEX, METHOD, MODES = (ROOT / "docs" / name for name in ("README.md", "method.md", "modes.md"))
NOT_OURS = {"build", "dist", "outputs", "slaclip-demo"}  # and whatever begins with a dot

FENCE = re.compile(r"^(`{3,}).*?^\1\s*$", re.M | re.S)
LINK = re.compile(r"\]\(<?([^)\s>]+)>?[^)]*\)|(?:src|href)=\"([^\"]+)\"")
ELSEWHERE = re.compile(r"[a-z][a-z+.-]*:")  # a URL with a scheme
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.M)


# --- links ---


def pages() -> list[Path]:
    """Every page of the project: Markdown files, and notebooks, whose text is Markdown."""
    folders = [path for path in ROOT.iterdir() if path.is_dir() and is_ours(path)]
    found = [*ROOT.glob("*.md"), *(path for folder in folders for path in folder.rglob("*.*"))]
    return sorted(path for path in found if path.suffix in (".md", ".ipynb") and is_ours(path))


def is_ours(path: Path) -> bool:
    return not any(p[0] == "." or p in NOT_OURS for p in path.relative_to(ROOT).parts)


@cache
def text_of(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells)
    return FENCE.sub("", text)


def links(page: Path) -> list[tuple[Path, str]]:
    """The files and anchors a page links to within the project."""
    prose = re.sub(r"`[^`\n]*`", "", text_of(page))
    targets = [markdown or html for markdown, html in LINK.findall(prose)]
    split = [target.partition("#") for target in targets if not ELSEWHERE.match(target)]
    return [((page.parent / file).resolve() if file else page, a) for file, _, a in split]


@cache
def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    found: set[str] = set()
    for heading in HEADING.findall(text_of(page)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        count, unique = 0, slug
        while unique in found:
            count += 1
            unique = f"{slug}-{count}"
        found.add(unique)
    return found


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page):
    for file, anchor in links(page):
        assert file.is_relative_to(ROOT), file
        assert file.exists(), file
        if anchor:
            assert anchor in anchors(file), f"{file.name}#{anchor}: there is {anchors(file)}"


def test_the_check_of_links_sees_them():
    assert len(pages()) >= 10
    assert sum(len(links(page)) for page in pages()) >= 60
    assert sum(bool(anchor) for page in pages() for _, anchor in links(page)) >= 2
    assert "one-step" in anchors(METHOD)


def test_every_page_is_reached_from_the_index_and_that_from_the_readme():
    reached = {file for file, _ in links(INDEX)}

    assert {path.resolve() for path in (ROOT / "docs").rglob("*.md")} <= reached | {INDEX}
    assert set((ROOT / "notebooks").glob("*.ipynb")) <= reached
    assert INDEX in {file for file, _ in links(ROOT / "README.md")}


# --- tables ---


def rows(page: Path, first: str) -> list[list[str]]:
    """The rows of the table whose header begins with ``first``, headers first, without its rule."""
    lines = iter(page.read_text(encoding="utf-8").splitlines())
    table = [next(line for line in lines if line.startswith(f"| {first} |"))]
    for line in lines:
        if not line.startswith("|"):
            break
        table.append(line)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return [cells[0], *cells[2:]]


def documented_names() -> Iterator[str]:
    for row in rows(INDEX, "symbol")[1:]:
        yield from (name for name in re.findall(r"`([^`]+)`", row[2]))


def arguments_of(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def exists(name: str) -> bool:
    """Whether a name of the table of symbols is one of the code."""
    owner, _, attribute = name.rpartition(".")
    if owner == "optimizer":
        return isinstance(inspect.getattr_static(SlaClipDPOptimizer, attribute), property)
    if owner == "indicator":
        members = SlackIndicator.__dataclass_fields__.keys() | vars(SlackIndicator).keys()
        return attribute in members
    if owner == "slack":
        return callable(getattr(slack, attribute, None))
    if owner:
        return hasattr(getattr(opacus_slaclip, owner), attribute)
    functions = [function for _, function in inspect.getmembers(slack, inspect.isfunction)]
    known = [PrivacyEngine.make_private, SlaClipDPOptimizer, *functions]
    return any(name in arguments_of(one) for one in known)


def test_every_name_in_the_table_of_symbols_exists():
    names = [name for name in documented_names() if name != "sample_rate"]  # Opacus's

    assert len(names) >= 20
    assert [name for name in names if not exists(name)] == []
    assert not exists("slot_width")
    assert not exists("indicator.clip_norms")


# --- the worked example ---


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.\d+|\d+", text)]


def between(start: str, end: str) -> str:
    """What the page on the method says between two pieces of its text."""
    text = " ".join(METHOD.read_text(encoding="utf-8").split())
    assert text.count(start) == 1, start
    return text.split(start)[1].split(end)[0]


def shown(values: Any, digits: int = 3) -> list[float]:
    """Numbers as the page rounds them."""
    return [round(float(value), digits) for value in values]


NORMS = torch.arange(15, dtype=torch.float64)
EXAMPLE: dict[str, Any] = {"clip_norm": 5.0, "num_slots": 5}


def indicator_of(values: torch.Tensor) -> SlackIndicator:
    return SlackIndicator(values=values, clip_norm=5.0, noise_std=0.0, expected_batch_size=15)


def test_the_slots_of_the_example_are_those_of_the_code():
    slots = slack.encode_slack(NORMS, **EXAMPLE)
    table = rows(METHOD, "norm n")[1:]

    assert shown([slack.slot_width(5.0, 5)]) == numbers(between("so λ = 5/√5 = ", ". | norm"))
    for norm, row in enumerate(table[:5]):
        assert numbers(row[0]) == [norm]
        assert numbers(row[1]) == shown(slack.slack_in_slots(NORMS, **EXAMPLE)[norm : norm + 1])
        assert numbers(row[2]) == shown(slots[norm])
    assert table[5] == ["5 to 14", "0", "0, 0, 0, 0, 0"]
    assert not slots[5:].any()

    joint = torch.hypot(NORMS.clamp(max=5.0), slots.norm(dim=1))
    assert numbers(between("√(4² + 2.236²) = ", ", those of")) == shown(joint[4:5])
    assert joint.max() <= 5.0 + 1e-12  # rounding of float64
    assert shown(joint[[0, *range(5, 15)]]) == [5.0] * 11


def test_the_release_and_the_thresholds_of_the_example_are_those_of_the_code():
    sums = slack.sum_slack(NORMS, **EXAMPLE)
    clean = slack.normalize_slack(sums, expected_batch_size=15)
    mean_slack = slack.encode_slack(NORMS, **EXAMPLE).mean(0)
    noisy = (mean_slack + 0.01) / slack.slot_width(5.0, 5)
    paper, fixed = SlaClipController(), SlaClipQController()

    assert numbers(between("The mean slack is (", ")")) == shown(mean_slack)
    assert numbers(between("ŝ = (5, 4, 3, 2, 1)/15 = (", ")")) == shown(clean)
    assert indicator_of(clean).mean_clipped_norm() == pytest.approx(4.0, rel=1e-12)
    assert float(NORMS.clamp(max=5.0).mean()) == 4.0
    assert numbers(between("r = 0.067/5 = ", ",")) == shown(clean[4:] / 5, 4)
    assert numbers(between("γ = (1 + r)/2 = ", ",")) == shown((1 + clean[4:] / 5) / 2, 4)
    assert numbers(between("5 exp(0.2 (0.5067 − 0.3333)) = ", ". The")) == shown(
        [paper(5.0, indicator_of(clean))]
    )
    assert numbers(between("5 exp(0.2 (0.5 − 0.3333)) = ", ". -")) == shown(
        [fixed(5.0, indicator_of(clean))]
    )
    assert numbers(between("of the mean slack makes ŝ = (", ")")) == shown(noisy)
    assert numbers(between("0.071), r = ", " and")) == shown(noisy[4:] / 5, 4)
    assert numbers(between("r = 0.0142 and the next threshold ", ". ##")) == shown(
        [paper(5.0, indicator_of(noisy))]
    )


def test_the_recommended_numbers_of_slots_are_those_of_the_code():
    batches, *table = rows(METHOD, "B")

    for sigma, row in zip((1.0, 2.0), table, strict=True):
        assert row[0] == f"K at σ = {sigma:g}"
        assert [int(k) for k in row[1:]] == [
            recommended_num_slots(int(batch), sigma) for batch in batches[1:]
        ]


@pytest.mark.parametrize("kind", [SlaClipController, SlaClipQController])
def test_a_factor_of_ten_takes_the_steps_that_the_page_says(kind):
    said = numbers(between("exp(±η/2) a step: at η = 0.2 a factor of 10 takes ", " steps"))

    assert said == [math.ceil(math.log(10) / (kind().clipbound_learning_rate / 2))]
    for values, sign in (([0.0] * 5, 1), ([1.0] * 5, -1)):  # r is near 0 for a large C
        after = kind()(1000.0, indicator_of(torch.tensor(values, dtype=torch.float64)))
        assert math.log(after / 1000.0) == pytest.approx(sign * 0.1, abs=1e-3)


def test_the_papers_rule_rests_at_one_where_all_norms_are_tiny():
    clip_norm, tiny = 40.0, indicator_of(torch.ones(5, dtype=torch.float64))
    for _ in range(2000):
        clip_norm = SlaClipController()(clip_norm, tiny)

    assert clip_norm == pytest.approx(1.0, abs=1e-3)
    assert SlaClipController()(0.3, tiny) == 0.3


# --- the tables of modes ---

PROCESSES = {"one process": False, "Opacus's DPDDP": True, "torch's DDP": True, "FSDP2": True}


def test_the_table_of_modes_is_that_of_the_optimizers():
    header, *table = rows(MODES, "`grad_sample_mode`")
    columns = [(i, name) for i, name in enumerate(header) if name in PROCESSES]

    assert len(columns) == 4
    for row in table:
        mode = row[0].strip("`")
        for i, name in columns:
            try:
                get_optimizer_class(grad_sample_mode=mode, distributed=PROCESSES[name])
                works = name == "one process" or (mode == "ghost_fsdp") == (name == "FSDP2")
            except ValueError:
                works = False
            assert row[i] == ("yes" if works else "no"), (mode, name)
    assert len(table) == 6


def is_taken(mode: str, reduction: str, *, is_autocast: bool) -> bool:
    """Whether a model in bfloat16, or a float32 one under autocast, trains in this mode."""
    case = Case(mode, "mlp", dtype=torch.float32 if is_autocast else torch.bfloat16)
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    try:
        run = make(case, loss_reduction=reduction, criterion=criterion)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            run.step(case.batches(6)[0])
    except ValueError:
        return False
    return True


def test_the_table_of_precisions_is_what_happens():
    header, *table = rows(MODES, "`grad_sample_mode` | float32, float64")
    columns = header[2:]

    assert len(table) == 5
    assert len(columns) == 4
    for row in table:
        mode = re.findall(r"`(\w+)`", row[0])[0]
        for column, said in zip(columns, row[2:], strict=True):
            reduction = re.findall(r'"(\w+)"', column)[0]
            taken = is_taken(mode, reduction, is_autocast=column.startswith("autocast"))
            assert taken != said.startswith("no"), (mode, column)


# --- the API reference, and the animation ---


def test_the_reference_is_built_without_a_fault(tmp_path):
    script = ROOT / "scripts" / "api_reference.py"
    command = [sys.executable, str(script), "--output", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)

    assert result.returncode == 0, result.stderr
    page = (tmp_path / "opacus_slaclip.html").read_text(encoding="utf-8")
    for name in opacus_slaclip.__all__:
        assert f'id="{name}"' in page, name
    for name in ("max_grad_norm", "slack_indicator"):
        assert f'id="SlaClipDPOptimizer.{name}"' in page, name
    hidden = [path.name for path in tmp_path.rglob("_*.html")]
    assert hidden == []


def test_the_animation_is_small_and_ends_with_a_still():
    path = ROOT / "docs" / "images" / "slaclip.gif"

    assert path.stat().st_size < 1_000_000
    with Image.open(path) as picture:
        assert picture.width <= 900
        assert 60 <= picture.n_frames <= 90
        picture.seek(picture.n_frames - 1)
        assert 1000 <= picture.info["duration"] <= 3000
