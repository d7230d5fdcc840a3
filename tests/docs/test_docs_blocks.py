"""The code blocks of the documentation, run word for word, each page in a fresh folder.

A Python block with a title is the file of that name; bash blocks are run in order, between them;
the Python blocks without a title make one script, which is run at the end. Text blocks are output:
where one follows a bash block or ends a page's script, each of its lines must be said, whatever its
numbers are.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FENCE = re.compile(
    r"^```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
PAGES = [
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("trainer", "loop", "checkpoints", "devices")),
]
# What measuring decides differs between machines, and so do the machines themselves.
DIFFERS = ("flatout: auto:", "of it ", "ran ", "CPU ", "RAM ", "GPU ", "torch ")


@dataclass(frozen=True)
class Block:
    language: str
    title: str | None
    body: str


def blocks(page: Path) -> list[Block]:
    return [Block(**match.groupdict()) for match in FENCE.finditer(page.read_text())]


def run(command: list[str], folder: Path) -> str:
    beside = str(Path(sys.executable).parent)
    env = {
        **os.environ,
        "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}",
        "FLATOUT_CACHE": str(folder / ".cache"),
    }
    done = subprocess.run(
        command,
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout}"
    return done.stdout


def run_page(page: Path, folder: Path) -> None:
    script: list[str] = []
    last = ""
    for number, block in enumerate(blocks(page)):
        if block.language == "python" and block.title:
            (folder / block.title).write_text(block.body)
        elif block.language == "python":
            script.append(block.body)
            last = "script"
        elif block.language == "bash":
            last = run(["bash", "-euo", "pipefail", "-c", block.body], folder)
        elif block.language == "text" and number and last != "script":
            expect_said(block.body, last)
    if script:
        # The whole page at once, as its reader would collect it.
        (folder / "page.py").write_text("\n".join(script))
        said = run([sys.executable, "page.py"], folder)
        if blocks(page)[-1].language == "text":
            expect_said(blocks(page)[-1].body, said)


def expect_said(shown: str, said: str) -> None:
    lines = {shape(line) for line in said.splitlines()}
    for line in shown.splitlines():
        if line.strip() and not line.startswith(DIFFERS):
            assert shape(line) in lines, f"not said: {line}\n--- said:\n{said}"


def shape(line: str) -> str:
    """A line without what differs between two runs: numbers, and how wide they are."""
    return re.sub(r"\s+", " ", re.sub(r"[\d][\d.,:-]*[kM]?", "#", line)).strip()


def test_a_page_has_blocks_of_every_kind():
    kinds = [(block.language, block.title) for block in blocks(ROOT / "docs" / "quickstart.md")]
    assert ("python", "train.py") in kinds
    assert kinds.count(("bash", None)) >= 5
    assert all(language in ("python", "bash", "text") for language, _ in kinds)


def test_every_opened_fence_is_a_block_that_the_tests_see():
    for page in [*PAGES, ROOT / "docs" / "quickstart.md"]:
        opened = re.findall(r"^ *```\w+.*$", page.read_text(), re.MULTILINE)
        assert len(opened) == len(blocks(page)), page


def test_the_quick_start_runs_word_for_word(tmp_path):
    run_page(ROOT / "docs" / "quickstart.md", tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(page, tmp_path):
    run_page(page, tmp_path)
