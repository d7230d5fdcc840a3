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
    DOCS / "parts.md",
    DOCS / "other_systems.md",
    DOCS / "data" / "pipes.md",
    DOCS / "data" / "jagged.md",
    DOCS / "freezing.md",
]
NOT_RUN = {
    "click_through.md": "trains for minutes on generated clicks; another test runs its example",
    "cures.md": "runs the reader's train.py; tests/cures runs such scripts",
    "doctor.md": "inspects the reader's train.py; the quick start has the same commands",
    "doctor_changes.md": "changes the reader's train.py; tests/doctor does the same",
    "doctor_proving.md": "runs a train.py with proven changes, which takes minutes",
    "doctor_report.md": "needs a verdict; tests/report has each of these calls",
    "explain.md": "draws a roofline, which a busy machine cannot measure",
    "forecast.md": "needs runs on several hosts, or measures a network between them",
    "ranks.md": "needs SLURM; tests/world starts such ranks",
    "recipe.md": "has a Recipe; another test in this file reads it",
    "report.md": "prints the speed of three runs; tests/report has these commands",
    "submit_sagemaker.md": "reads a FIFO that SageMaker fills",
    "top.md": "shows a live screen, and one-line examples of callbacks",
    "trials.md": "empties Flatout's cache folder",
}
"""Pages with code blocks that no test in this file runs, with the reasons."""
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


def test_every_page_with_blocks_is_run_or_has_a_reason():
    run_here = {README, *PAGES, *LONG_PAGES}
    pages = [page for page in DOCS.rglob("*.md") if page.parent.name != "checks"]
    having = {page for page in pages if any(one.language != "text" for one in blocks(page))}
    assert {page.name for page in having - run_here} == set(NOT_RUN)
    assert all(len(reason.split()) > 3 for reason in NOT_RUN.values())


def test_the_recipe_on_its_page_is_valid(tmp_path):
    (block,) = [one for one in blocks(DOCS / "recipe.md") if one.language == "toml"]
    (tmp_path / "flatout.toml").write_text(block.body)
    named = flatout.recipe.load(tmp_path / "flatout.toml").named()
    assert named == {"compute.precision": "bf16", "save.every": 1000}


def test_names_on_pages_exist_after_importing_only_flatout(tmp_path):
    found = {
        name for page in (README, *DOCS.rglob("*.md")) for name in NAME.findall(page.read_text())
    }
    rooms = {".".join(name.split(".")[:3]) for name in found - set(NO_NAMES) if name.count(".") > 1}
    public = [name for name in rooms if name.split(".")[2] in names_of(name.split(".")[1])]
    assert {"flatout.measure.Profile", "flatout.report.Scaling", "flatout.recipe.dump"} <= {*public}
    code = "import flatout\n" + "\n".join(sorted(name for name in public if name not in NEEDING))
    run([sys.executable, "-c", code], tmp_path)


# These names import the package of another trainer.
NEEDING = {
    f"flatout.integrations.{name}" for name in ("KerasTimeline", "HFTimeline", "LightningTimeline")
}


def names_of(room: str) -> list[str]:
    """Return the public names of a room; an empty list for a room of a single file."""
    return list(getattr(import_module(f"flatout.{room}"), "__all__", ()))


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
