"""Scripts whose loop is a library's: mistakes are named at the user's lines, and no other is."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).with_name("ecosystem")
NEEDS = {
    "with_lightning": "lightning",
    "with_accelerate": "accelerate",
    "with_transformers": "transformers",
    "with_keras": "keras",
    "with_torchrun": "torch",
}
DOCTOR = [sys.executable, "-c", "from flatout.cli.main import main; main()", "doctor"]
MISTAKE = re.compile(r"# wrong: (\w+)$", re.MULTILINE)


def look(name, folder, *arguments):
    """What the doctor's JSON says of a script after its first look."""
    pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
    ranks = ["torchrun", "--standalone", "--nproc-per-node", "2"] if "torchrun" in name else []
    script = str(SCRIPTS / f"{name}.py")
    done = subprocess.run(
        [*DOCTOR, "--json", "--no-trials", "--seconds", "5", "--", *ranks, script, *arguments],
        cwd=folder,
        # Threads that wait for each other would be most of such short steps.
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.stdout, done.stderr
    said = json.loads(done.stdout)
    assert not said["error"], said["error"]
    return said


def lines_of(said):
    """Of the script's own files or others: all lines that were named, as file:line."""
    sites = [finding["where"] for finding in said["findings"] if finding["where"]]
    for rank in said["observations"]:
        sites += [f"{line['site']['file']}:{line['site']['line']}" for line in rank["lines"]]
    return sites


@pytest.mark.parametrize("name", NEEDS)
def test_mistakes_are_named_at_the_users_lines(name, tmp_path):
    text = (SCRIPTS / f"{name}.py").read_text()
    marked = {
        (found[1], text.count("\n", 0, found.start()) + 1) for found in MISTAKE.finditer(text)
    }
    said = look(name, tmp_path, "--wrong")
    found = {(one["name"], int(one["where"].rpartition(":")[2] or 0)) for one in said["findings"]}
    assert marked <= found
    assert {Path(where.rpartition(":")[0]).parent for where in lines_of(said)} == {SCRIPTS}


@pytest.mark.parametrize("name", NEEDS)
def test_a_script_without_mistakes_has_no_danger(name, tmp_path):
    said = look(name, tmp_path)
    assert [one for one in said["findings"] if one["kind"] == "danger"] == []
    assert said["explained"] >= 0.75
