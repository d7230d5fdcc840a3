"""What the files around the package say of each other; packaging/check.py builds and installs."""

import os
import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import flatout

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TRY = "pip install -c constraints.txt . && flatout demo"
TEST = "pip install -c constraints.txt '.[test]' && pytest"


def constraints() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {one.name: one for one in found}


def requirements() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"].values()
    texts = [*PROJECT["dependencies"], *(text for extra in extras for text in extra)]
    return [one for one in map(Requirement, texts) if one.name != "flatout"]


def test_the_version_is_one():
    assert flatout.__version__ == PROJECT["version"]
    newest = re.search(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == PROJECT["version"]


def test_the_readme_has_both_commands_and_ci_runs_the_second():
    lines = [line.strip() for line in (ROOT / "README.md").read_text().splitlines()]
    assert TRY in lines
    assert TEST in lines
    assert f'"{TEST}"' in (ROOT / ".ci" / "run").read_text()


def test_ci_can_be_executed():
    assert all(os.access(ROOT / ".ci" / name, os.X_OK) for name in ("run", "checks"))


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_each_requirement_has_a_tested_version_that_it_allows(requirement):
    pinned = constraints()[requirement.name].specifier
    (pin,) = pinned
    assert pin.operator == "=="
    assert requirement.specifier.contains(pin.version), f"{requirement} excludes {pin}"


def test_torch_is_pinned_to_test_and_open_to_use():
    assert constraints()["torch"].specifier == SpecifierSet("==2.13.0")
    (torch,) = [one for one in requirements() if one.name == "torch"]
    assert str(torch.specifier) == ">=2.11"


@pytest.mark.parametrize("name", ["torch", "numpy", "pydantic", "safetensors", "pytest"])
def test_these_tests_run_on_the_tested_versions(name):
    if "CI" not in os.environ:
        pytest.skip("other versions are allowed outside of CI")
    assert constraints()[name].specifier.contains(version(name).partition("+")[0])


def test_every_page_of_the_documentation_can_be_reached():
    reached = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    listed = (ROOT / "docs" / "checks" / "index.md").read_text()
    reached |= {f"checks/{page}" for page in re.findall(r"\]\((\w+\.md)\)", listed)}
    assert reached == {
        str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")
    }
