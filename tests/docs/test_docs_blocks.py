"""The code blocks of the documentation, run word for word, each page in a fresh folder.

A Python block with a title is the file of that name. The Python blocks without one are a script, up
to the next block of another kind. Text blocks are output: each line of them must have been said by
what ran before, whatever its numbers are.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import flatout
from flatout.errors import FlatoutError

ROOT = Path(__file__).parents[2]
FENCE = re.compile(
    r"^```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
DOCS = ROOT / "docs"
# README and quickstart train long enough for measuring to be worth it; most of the others start
# Keras, or several scripts, or write many files.
README = ROOT / "README.md"
LONG_PAGES = [
    DOCS / "quickstart.md",
    DOCS / "keras.md",
    DOCS / "trainer.md",
    DOCS / "checkpoints.md",
    DOCS / "devices.md",
    DOCS / "data" / "index.md",
    DOCS / "large_batches.md",
    DOCS / "data" / "convert.md",
    DOCS / "data" / "images.md",
    DOCS / "image_classifier.md",
    DOCS / "transfer.md",
    DOCS / "data" / "tables.md",
    DOCS / "data" / "ids.md",
    DOCS / "data" / "serve_ids.md",
    *sorted((DOCS / "migrate").glob("*.md")),
]
PAGES = [
    DOCS / "loop.md",
    DOCS / "other_systems.md",
    DOCS / "data" / "pipes.md",
    DOCS / "data" / "jagged.md",
    DOCS / "freezing.md",
]
# What measuring decides differs between machines, and so do the machines themselves.
# What a machine has, and what is wrong with it, is its own.
DIFFERS = (
    "note: auto:", "of it ", "ran ", "CPU ", "RAM ", "GPU ", "torch ", "DANGER", "SLOW", "  do:",
    "12 of 14",
)  # fmt: skip


@dataclass(frozen=True)
class Block:
    language: str
    title: str | None
    body: str


def blocks(page: Path) -> list[Block]:
    return [Block(**match.groupdict()) for match in FENCE.finditer(page.read_text())]


def run(command: list[str], folder: Path, **variables: str) -> str:
    beside = str(Path(sys.executable).parent)
    env = {
        # As for a reader: which backend Keras takes is what the pages say, not what tests set.
        **{name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"},
        **variables,
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
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout}"
    return done.stdout


def need(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def run_page(page: Path, folder: Path) -> None:
    if "import keras\n" in page.read_text():
        need("keras")
    script: list[str] = []
    said = None

    def run_script() -> str:
        (folder / "page.py").write_text("\n".join(script))
        script.clear()
        return run([sys.executable, "page.py"], folder)

    for block in blocks(page):
        if block.language == "python" and block.title is None:
            script.append(block.body)
            continue
        if block.language != "python" and script:
            said = run_script()
        if block.language == "python":
            (folder / block.title).write_text(block.body)
        elif block.language == "bash":
            said = run(["bash", "-euo", "pipefail", "-c", block.body], folder)
        elif said is not None:
            expect_said(block.body, said)
    if script:
        run_script()


def expect_said(shown: str, said: str) -> None:
    lines = {shape(line) for line in said.splitlines()}
    for line in shown.splitlines():
        if line.strip() and not line.startswith(DIFFERS):
            assert shape(line) in lines, f"not said: {line}\n--- said:\n{said}"


def shape(line: str) -> str:
    """A line without what differs between two runs: numbers, and how wide they are."""
    return re.sub(r"\s+", " ", re.sub(r"\d[\d.,:]*(e[+-]\d+)?[kM]?", "#", line)).strip()


def test_a_page_has_blocks_of_every_kind():
    kinds = [(block.language, block.title) for block in blocks(DOCS / "quickstart.md")]
    assert ("python", "train.py") in kinds
    assert kinds.count(("bash", None)) >= 5
    assert all(language in ("python", "bash", "text") for language, _ in kinds)


def test_every_opened_fence_is_a_block_that_the_tests_see():
    for page in [*PAGES, README, *LONG_PAGES]:
        opened = re.findall(r"^ *```\w+.*$", page.read_text(), re.MULTILINE)
        assert len(opened) == len(blocks(page)), page


NAME = re.compile(r"(?<![\w./-])flatout(?:\.\w+)+")
NO_NAMES = (
    "flatout.toml",
    "flatout.doctor.toml",
    "flatout.profile",
    "flatout.readthedocs.io",
    "flatout.signature",
)


@pytest.mark.parametrize("page", [README, *sorted(DOCS.rglob("*.md"))], ids=lambda p: p.stem)
def test_every_name_that_a_page_uses_is_there(page):
    for name in set(NAME.findall(page.read_text())) - set(NO_NAMES):
        found = flatout
        path = "flatout"
        for part in name.split(".")[1:]:
            path += f".{part}"
            try:
                found = getattr(found, part)
            except AttributeError:
                found = import_module(path)
            except FlatoutError:  # it is there, and wants another package
                break


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_blocks_of_the_readme_run(tmp_path):
    run_page(README, tmp_path)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", LONG_PAGES, ids=lambda page: page.stem)
def test_the_blocks_of_a_long_page_run(page, tmp_path):
    run_page(page, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(page, tmp_path):
    run_page(page, tmp_path)
