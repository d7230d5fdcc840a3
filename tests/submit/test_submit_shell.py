"""Whatever an argument holds, the script's own shell passes it on as it is."""

import json
import os
import subprocess

import pytest
from jobs import job
from nasty import NASTY, TELL

from flatout.errors import SubmitError
from flatout.submit import shell, target_of


def passed_on(lines, folder, **variables):
    """What a script gets of the command that lines of bash make."""
    told = folder / "told"
    (folder / "tell.py").write_text(TELL)
    text = "\n".join([*lines, '"${command[@]}"']) + "\n"
    (folder / "job.sh").write_bytes(os.fsencode(text))
    subprocess.run(
        ["bash", str(folder / "job.sh")],
        env={**os.environ, "TOLD": str(told), **variables},
        cwd=folder,
        check=True,
        timeout=60,
    )
    return json.loads(told.read_text())


def test_a_hundred_nasty_arguments_come_through_bash(tmp_path):
    words = shell.words(["python3", "tell.py", *NASTY])
    assert passed_on(shell.array("command", words), tmp_path) == NASTY


def test_the_seed_comes_in_its_place_and_nothing_else_of_an_argument_is_read(tmp_path):
    given = ["--seed={seed}", "{seed}", "$HOME {seed} `id` '{seed}'", "none"]
    words = shell.words(["python3", "tell.py", *given], "$SLURM_ARRAY_TASK_ID")
    found = passed_on(shell.array("command", words), tmp_path, SLURM_ARRAY_TASK_ID="7")
    assert found == [one.replace("{seed}", "7") for one in given]


def test_a_nul_is_refused():
    with pytest.raises(SubmitError, match="NUL"):
        shell.quoted("a\0b")


@pytest.mark.parametrize("name", ["slurm", "ssh", "mpi"])
def test_nasty_arguments_make_no_other_lines_of_a_script(tmp_path, name):
    """Bash takes each script as it is, and no line of it is an option of sbatch but ours."""
    options = () if name == "slurm" else ("hosts=one,two",)
    made = job(tmp_path, *NASTY, nodes=2, devices=2, options=options)
    text = target_of(name).artifacts(made)[0].text
    path = tmp_path / "script"
    path.write_bytes(os.fsencode(text))
    checked = subprocess.run(["bash", "-n", str(path)], capture_output=True, check=False)
    assert checked.stderr == b""
    head = text.split("\n\n")[0]
    assert all(line.startswith("#") for line in head.splitlines()) or name != "slurm"
    assert "nodes=99" not in head
