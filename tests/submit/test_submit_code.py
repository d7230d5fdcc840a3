"""The code that travels is what git would take, without data and secrets."""

import io
import shutil
import subprocess
import tarfile

import pytest

from flatout.errors import SubmitError
from flatout.submit import code

FILES = [
    *("train.py", "package/__init__.py", "package/deep/model.py", "notes.txt", "a b.py", "ü.py"),
    *("day.svm", "data/day.svm", "data/keep.txt", "data/in/x.svm", "out/log.txt", "x.tmp"),
    *("package/x.tmp", "package/keep.tmp", "build/a.py", "package/build/b.py", "only/here.log"),
    *("sub/only/here.log", "#hash", "back\\slash", "[x]", "trailing "),
]
IGNORED = "*.tmp\n/build/\n*.svm\n!data/keep.txt\nout/\n/only/*.log\n\\#hash\n# no rule\n"


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "root"
    for name in FILES:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (root / ".gitignore").write_text(IGNORED)
    (root / "package/.gitignore").write_text("!keep.tmp\nbuild\n")
    return root


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("within", [".", "package"])
def test_gitignore_means_what_it_means_to_git(tree, within):
    subprocess.run(["git", "init", "-q", "."], cwd=tree, check=True)
    said = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard", "."],
        cwd=tree / within,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    expected = sorted(filter(None, said.split("\0")))
    assert list(code.collect(tree / within).files) == expected


def test_secrets_and_data_are_left_out_and_named(tree):
    for name in (".env", "package/.env.local", "server.key", ".aws/credentials", "id_rsa"):
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text("secret")
    (tree / "weights.bin").write_bytes(bytes(101))
    found = code.collect(tree, largest=100)
    left = dict(found.left_out)
    assert left["weights.bin"] == "101 bytes: data, not code"
    assert {name for name, why in left.items() if "secret" in why} == {
        *(".env", "package/.env.local", "server.key", ".aws/credentials", "id_rsa")
    }
    assert not set(left) & set(found.files)


def test_the_folder_of_the_jobs_is_no_code(tree):
    (tree / "submit/earlier").mkdir(parents=True)
    (tree / "submit/earlier/job.sbatch").write_text("")
    assert "submit/earlier/job.sbatch" in code.collect(tree).files
    assert "submit/earlier/job.sbatch" not in code.collect(tree, without=(tree / "submit",)).files


def test_a_run_is_no_code_unless_the_script_is_told_of_it(tree):
    (tree / "runs/day/checkpoints/step-1").mkdir(parents=True)
    for name in ("runs.jsonl", "checkpoints/step-1/model.safetensors"):
        (tree / "runs/day" / name).write_text("")
    found = code.collect(tree)
    assert not [one for one in found.files if one.startswith("runs/")]
    assert ("runs/day/", "a run, no code") in found.left_out
    for one in ("runs/day", "runs/day/checkpoints/step-1"):
        found = code.collect(tree, named=(tree / one,))
        assert "runs/day/checkpoints/step-1/model.safetensors" in found.files


def test_a_folder_of_data_is_refused(tree):
    with pytest.raises(SubmitError, match="expected a folder of code"):
        code.collect(tree, largest_archive=20)


def test_the_archive_is_the_same_for_the_same_code(tree, tmp_path):
    (tree / "run.sh").write_text("#!/bin/sh\n")
    (tree / "run.sh").chmod(0o755)
    (tree / "link.py").symlink_to("train.py")
    (tree / "nowhere").symlink_to("nothing")
    found = code.collect(tree)
    found.write(tree, tmp_path / "one.tar.gz")
    (tree / "train.py").touch()
    found.write(tree, tmp_path / "two.tar.gz")
    data = (tmp_path / "one.tar.gz").read_bytes()
    assert data == (tmp_path / "two.tar.gz").read_bytes()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert sorted(tar.getnames()) == sorted(found.files)
        assert tar.getmember("run.sh").mode == 0o755
        # A link to a file travels as the file.
        assert tar.extractfile("link.py").read() == b"train.py"
    assert "nowhere" not in found.files
