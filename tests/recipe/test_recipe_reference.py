import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.recipe import FIELDS, SECTIONS, loads

SCRIPT = Path(__file__).parents[2] / "docs" / "recipe_reference.py"


def _run(script, *options):
    command = [sys.executable, str(script), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_page_is_up_to_date():
    done = _run(SCRIPT, "--check")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_an_old_or_absent_page_is_noticed(tmp_path):
    shutil.copy(SCRIPT.with_name("generated.py"), tmp_path)
    script = shutil.copy(SCRIPT, tmp_path)
    assert _run(script, "--check").returncode == 1
    page = _run(script)
    assert page.returncode == 0
    (tmp_path / "recipe.md").write_text(page.stdout, encoding="utf-8")
    assert _run(script, "--check").returncode == 0
    (tmp_path / "recipe.md").write_text(page.stdout.replace("bf16", "bf15"), encoding="utf-8")
    done = _run(script, "--check")
    assert done.returncode == 1
    assert "out of date" in done.stderr


def test_the_page_has_every_field_and_a_good_example():
    page = SCRIPT.with_name("recipe.md").read_text(encoding="utf-8")
    assert [line[4:] for line in page.splitlines() if line.startswith("### ")] == list(FIELDS)
    for section in SECTIONS.values():
        for field in section.model_fields.values():
            assert field.description in page
    example = page.partition("```toml\n")[2].partition("```")[0]
    assert loads(example).named() == {"compute.precision": "bf16", "save.every": 1000}
