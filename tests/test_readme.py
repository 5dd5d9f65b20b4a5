"""The README runs as it is written, and what the documents point at is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import opacus
import pytest

ROOT = Path(__file__).resolve().parent.parent
SHELLS = {"bash", "console", "sh", "shell"}

FENCE = re.compile(
    r"^(?P<fence>`{3,})(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=fence)\s*$", re.M | re.S
)


class Block(NamedTuple):
    """A fenced code block and the number of the line before its first."""

    language: str
    code: str
    line: int


def blocks(document: str) -> list[Block]:
    text = (ROOT / document).read_text(encoding="utf-8")
    return [
        Block(match["language"], match["code"], text.count("\n", 0, match.start("code")))
        for match in FENCE.finditer(text)
    ]


def shell_commands(document: str) -> list[str]:
    lines = [
        line.strip().removeprefix("$ ")
        for block in blocks(document)
        if block.language in SHELLS
        for line in block.code.splitlines()
    ]
    return [re.split(r"(?:^|\s)#", line)[0] for line in lines]


def test_every_python_block_of_the_readme_runs_in_order(tmp_path, monkeypatch):
    examples = [block for block in blocks("README.md") if block.language == "python"]
    assert examples, "README.md shows no ```python block"
    monkeypatch.chdir(tmp_path)  # an example may write files

    namespace = {"__name__": "readme"}
    for block in examples:
        # The empty lines in front make a traceback show README.md's own line numbers.
        source = "\n" * block.line + block.code
        exec(compile(source, str(ROOT / "README.md"), "exec"), namespace)


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_every_make_target_shown_exists(document):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.M))
    shown = [
        word
        for command in shell_commands(document)
        for call in re.findall(r"\bmake((?: +[^\s&|;]+)+)", command)
        for word in call.split()
        if re.fullmatch(r"[a-z][\w-]*", word)
    ]

    assert set(shown) <= targets
    assert shown, f"{document} shows no make target"


def test_the_architecture_picture_names_every_module():
    [picture] = [block.code for block in blocks("CONTRIBUTING.md") if block.language == "text"]
    named = set(re.findall(r"\w+\.py\b", picture))
    modules = {file.name for file in (ROOT / "opacus_slaclip").rglob("*.py")} - {"__init__.py"}

    assert named == modules


# What Opacus says itself.
SAID_BY_OPACUS = (
    "Unexpected optimizer parameters. Clipping: slaclip",
    "Gradients haven't been cleared",
    "Poisson sampling is not compatible with grad accumulation",
    "Parameter tying",
)


def said(package: Path) -> str:
    """Return every piece of text in the package's code, in order, run together."""
    pieces = []
    for path in sorted(package.rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        strings = [node for node in nodes if isinstance(node, ast.Constant)]
        strings.sort(key=lambda node: (node.lineno, node.col_offset))
        pieces += [node.value for node in strings if isinstance(node.value, str)]
    return "".join(pieces)


def test_every_message_in_the_troubleshooting_tables_is_one_that_is_given():
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.*?) \| .* \|$", text, re.M)
    messages = [m for row in rows for m in re.findall(r"`([^`]{15,})`", row)]
    ours, theirs = said(ROOT / "opacus_slaclip"), said(Path(opacus.__file__).parent)

    assert len(messages) >= 20
    for message in messages:
        if message not in SAID_BY_OPACUS:
            assert message in ours, message
    for message in SAID_BY_OPACUS:
        assert message in messages
        assert message.removesuffix("slaclip") in theirs, message
