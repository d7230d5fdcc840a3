"""Trials leave files as they were: overlaid by the kernel, and redirected in Python."""

import ctypes
import hashlib
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from flatout.cache_folder import MARK, kind_folder
from flatout.doctor.trials import landlock
from flatout.doctor.trials.process import Command, Ended, Process
from flatout.doctor.trials.scratch import left, scratch, temporary_of, trials_folder
from flatout.processes import machine

WRITES = """
import os, shutil, sqlite3, subprocess, sys, tempfile
from pathlib import Path

import numpy as np

open("old.txt", "a").write("more")
assert open("old.txt").read() == "oldmore"
Path("new.txt").write_text("new")
assert Path("new.txt").exists() and "new.txt" in os.listdir(".")
os.remove("gone.txt")
assert not os.path.exists("gone.txt") and "gone.txt" not in os.listdir(".")
try:
    open("gone.txt")
except FileNotFoundError:
    pass
else:
    raise AssertionError("still there")
os.makedirs("runs/1/deep", exist_ok=True)
Path("runs/1/deep/a").write_text("a")
os.rename("moved.txt", "runs/1/moved.txt")
assert open("runs/1/moved.txt").read() == "moved" and not Path("moved.txt").exists()
os.replace("new.txt", "old2.txt")
assert Path("old2.txt").read_text() == "new"
shutil.rmtree("tree")
assert not Path("tree").exists()
os.mkdir("tree")
assert os.listdir("tree") == []
shutil.copytree("runs", "copied")
assert sorted(p.name for p in Path("copied").rglob("*")) == ["1", "a", "deep", "moved.txt"]
os.rename("folder", "folder2")
assert Path("folder2/inside/x").read_text() == "x" and not Path("folder").exists()
np.save("array.npy", np.arange(3))
assert np.load("array.npy").tolist() == [0, 1, 2]
os.chmod("old.txt", 0o600)
os.truncate("old.txt", 2)
assert os.stat("old.txt").st_size == 2
os.symlink("old.txt", "link")
assert open("link").read() == "ol"
with open("link", "a") as file:
    file.write("!")
assert open("old.txt").read() == "ol!"
with open("theirs", "a") as file:  # a link of the user's, to a file of theirs
    file.write("!")
assert open("linked.txt").read() == "linked!"
with open("in_folder/x", "w") as file:  # through a link to a folder
    file.write("changed")
assert open("behind/x").read() == "changed"
os.chdir("runs/1")
assert Path.cwd() == Path(sys.argv[1]) / "runs" / "1"
open("here", "w").close()
os.chdir("../..")
assert sorted(os.listdir("runs/1")) == ["deep", "here", "moved.txt"]
base = sqlite3.connect("base.db")
base.execute("insert into t values (2)")
base.commit()
assert base.execute("select count(*) from t").fetchone() == (2,)
with tempfile.NamedTemporaryFile() as file:
    file.write(b"t")
assert [entry.name for entry in os.scandir("copied") if entry.is_dir()] == ["1"]
"""

NATIVE = """
import subprocess, torch
from pathlib import Path
from safetensors.torch import load_file, save_file

torch.save({"a": torch.ones(3)}, "model.pt")
assert torch.load("model.pt")["a"].sum() == 3
torch.save({"a": torch.zeros(3)}, Path("there.pt"))
assert torch.load("there.pt")["a"].sum() == 0
save_file({"a": torch.ones(2)}, "model.safetensors")
assert load_file("model.safetensors")["a"].sum() == 2
"""


def user_folder(folder: Path) -> Path:
    folder.mkdir()
    for name in ("old", "old2", "gone", "moved", "linked"):
        (folder / f"{name}.txt").write_text(name)
    for name in ("tree/a", "folder/inside/x", "behind/x"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("x")
    (folder / "theirs").symlink_to("linked.txt")
    (folder / "in_folder").symlink_to("behind")
    (folder / "there.pt").write_bytes(b"theirs")
    base = sqlite3.connect(folder / "base.db")
    base.execute("create table t (x)")
    base.execute("insert into t values (1)")
    base.commit()
    base.close()
    return folder


def all_of(folder: Path) -> dict[str, tuple[int, int, str]]:
    found = {}
    for path in sorted(folder.rglob("*")):
        kept = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        digest = hashlib.sha256(content).hexdigest()
        found[str(path.relative_to(folder))] = (kept.st_mode, kept.st_mtime_ns, digest)
    return found


def contained(tmp_path, monkeypatch, code, *, redirected, argument=""):
    """Runs code in a folder of the user's; returns the exit code, output and refusals."""
    user = tmp_path / "user"
    if not user.exists():
        user_folder(user)
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    monkeypatch.chdir(user)
    before = all_of(user)
    with scratch() as folder:
        process = Process(
            Command([sys.executable, str(script), argument or str(user)]),
            folder / "a",
            temporary_of(folder) / "a",
            is_redirected=redirected,
        )
        try:
            found = process.wait(), process.output(), process.refused()
        finally:
            process.end()
        temporary = temporary_of(folder)
    assert all_of(user) == before
    assert not folder.exists()
    assert not temporary.exists()
    return found


def all_trials() -> list[Path]:
    return sorted(one for one in trials_folder().iterdir() if one.name != MARK)


def can_overlay() -> bool:
    tried = "from pathlib import Path; from flatout.doctor.trials import overlay; import tempfile;"
    tried += "overlay.enter(Path(tempfile.mkdtemp()))"
    return not subprocess.run([sys.executable, "-c", tried], capture_output=True).returncode


@pytest.fixture(scope="module")
def overlays():
    if not can_overlay():
        pytest.skip("the kernel, or what contains this process, allows no overlays")


def test_overlaid_files_stay_as_they_were(tmp_path, monkeypatch, overlays):
    exit_code, output, _ = contained(tmp_path, monkeypatch, WRITES, redirected=False)
    assert (exit_code, output) == (0, "")


def test_redirected_files_stay_as_they_were(tmp_path, monkeypatch):
    exit_code, output, refused = contained(tmp_path, monkeypatch, WRITES, redirected=True)
    assert (exit_code, output, refused) == (0, "", [])


@pytest.mark.slow
@pytest.mark.parametrize("redirected", [False, True])
def test_native_writers_are_contained(tmp_path, monkeypatch, redirected, request):
    if not redirected:
        request.getfixturevalue("overlays")
    exit_code, output, _ = contained(tmp_path, monkeypatch, NATIVE, redirected=redirected)
    assert (exit_code, output) == (0, "")


def test_a_subprocess_is_contained_by_the_kernel(tmp_path, monkeypatch, overlays):
    code = """
    import os
    assert os.system("echo more >> old.txt && rm gone.txt") == 0
    assert open("old.txt").read() == "oldmore\\n" and not os.path.exists("gone.txt")
    """
    assert contained(tmp_path, monkeypatch, code, redirected=False)[:2] == (0, "")


@pytest.mark.skipif(not landlock.version(), reason="the kernel has no Landlock")
def test_where_files_are_redirected_a_subprocess_cannot_write(tmp_path, monkeypatch):
    code = """
    import os
    assert os.system("echo more >> old.txt") != 0
    """
    exit_code, output, _ = contained(tmp_path, monkeypatch, code, redirected=True)
    assert exit_code == 0
    assert "Permission denied" in output


def test_a_write_that_nothing_redirects_is_refused_with_its_line(tmp_path, monkeypatch):
    code = """
    import io
    io.FileIO("old.txt", "w")
    """
    exit_code, output, refused = contained(tmp_path, monkeypatch, code, redirected=True)
    assert exit_code == 1
    assert "old.txt, and nothing has redirected it" in output
    assert [one["where"] for one in refused] == [f"{tmp_path / 'script.py'}:3"]


@pytest.mark.slow
@pytest.mark.parametrize("redirected", [False, True])
def test_spawned_workers_are_contained_too(tmp_path, monkeypatch, redirected, request):
    if not redirected:
        request.getfixturevalue("overlays")
    code = """
    import multiprocessing, os

    def work():
        open("old.txt", "w").write("worker")
        os.remove("gone.txt")

    if __name__ == "__main__":
        for kind in ("fork", "spawn"):
            open("gone.txt", "w").close()
            one = multiprocessing.get_context(kind).Process(target=work)
            one.start()
            one.join()
            assert one.exitcode == 0
            assert open("old.txt").read() == "worker" and not os.path.exists("gone.txt")
    """
    assert contained(tmp_path, monkeypatch, code, redirected=redirected)[:2] == (0, "")


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm")
def test_files_that_cannot_be_overlaid_are_redirected(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as user, scratch() as folder:
        kept = Path(user) / "kept"
        kept.write_text("kept")
        monkeypatch.chdir(user)
        code = "open('kept', 'w').write('changed'); assert open('kept').read() == 'changed'"
        command = [sys.executable, "-c", code]
        process = Process(Command(command), folder / "a", temporary_of(folder) / "a")
        assert process.wait() == 0
        assert process.held in ("landlock", "python")
        assert kept.read_text() == "kept"
        process.end()


def test_a_user_namespace_overlays_without_root(tmp_path, overlays):
    (tmp_path / "passed").mkdir()
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "upper").mkdir()
    code = f"""
import os
from pathlib import Path
from flatout.doctor.trials import overlay
here = Path({str(tmp_path)!r})
os.chdir(here)
who = os.getuid()
overlay.enter(here / "upper", [here / "passed"], as_user=True)
assert os.getuid() == who
Path("kept").write_text("changed")
Path("passed/new").write_text("new")
assert Path("kept").read_text() == "changed"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if "unshare" in done.stderr:
        pytest.skip("no user namespaces here")
    assert not done.stderr
    assert (tmp_path / "kept").read_text() == "kept"
    assert (tmp_path / "passed" / "new").read_text() == "new"


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_folder_below_one_of_root_can_be_written_by_its_owner(overlays):
    """Use a folder like /data/projects/me: a user outside the namespace owns its parents."""
    code = """
import ctypes, os, sys, tempfile
from pathlib import Path
from flatout.doctor.trials import overlay
base, who = Path(sys.argv[1]), 12345
mine = base / "data" / "projects" / "me"
(mine / "runs").mkdir(parents=True)
(base / "data" / "of root").write_text("of root")
(mine / "runs" / "old").write_text("old")
(base / "upper").mkdir()
for path in (mine, mine / "runs", mine / "runs" / "old", base / "upper"):
    os.chown(path, who, who)
b"x".decode("unicode_escape")  # loaded while this user may read Python's own files
os.setgid(who)
os.setuid(who)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # as a process that began as this user: PR_SET_DUMPABLE
os.chdir(mine)
overlay.enter(base / "upper")
Path("new").write_text("new")
Path("runs/old").write_text("changed")
assert sorted(os.listdir()) == ["new", "runs"] and Path("runs/old").read_text() == "changed"
assert Path("../../of root").read_text() == "of root"
"""
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        os.chmod(base, 0o755)
        done = subprocess.run([sys.executable, "-c", code, base], capture_output=True, text=True)
        if "unshare" in done.stderr:
            pytest.skip("no user namespaces here")
        assert not done.stderr
        mine = Path(base, "data", "projects", "me")
        assert (os.listdir(mine), (mine / "runs" / "old").read_text()) == (["runs"], "old")


def test_shared_memory_and_queues_of_the_kernel_end_with_the_trial(tmp_path, monkeypatch, overlays):
    libc = ctypes.CDLL(None)
    key = 0x7A110000 + os.getpid() % 0x10000
    code = f"""
    import ctypes, os
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.shmget({key}, 4096, 0o1600) >= 0
    assert libc.mq_open(b"/flatout-{key}", os.O_CREAT | os.O_RDWR, 0o600, None) >= 0
    """
    assert contained(tmp_path, monkeypatch, code, redirected=False)[:2] == (0, "")
    assert libc.shmget(key, 4096, 0) == -1
    assert libc.mq_open(f"/flatout-{key}".encode(), os.O_RDWR) == -1


@pytest.mark.parametrize("redirected", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_connection_elsewhere_is_refused_and_named(tmp_path, monkeypatch, redirected, request):
    if not redirected:
        request.getfixturevalue("overlays")
    code = """
    import socket, urllib.request

    server = socket.create_server(("127.0.0.1", 0))
    socket.create_connection(server.getsockname()).close()
    try:
        socket.create_connection(("192.0.2.1", 9), timeout=5)
    except OSError as error:
        assert "192.0.2.1" in str(error)
    urllib.request.urlopen("http://upload.example/x")
    """
    exit_code, output, refused = contained(tmp_path, monkeypatch, code, redirected=redirected)
    assert exit_code == 1
    assert "upload.example" in output
    script = tmp_path / "script.py"
    assert [one["where"] for one in refused] == [f"{script}:7", f"{script}:10"]


@pytest.mark.slow
def test_loggers_are_told_to_stay_offline(tmp_path, monkeypatch):
    code = """
    import os, sys
    assert os.environ["WANDB_MODE"] == os.environ["NEPTUNE_MODE"] == "offline"
    assert os.environ["HF_HUB_OFFLINE"] == os.environ["TRANSFORMERS_OFFLINE"] == "1"
    os.makedirs(os.environ["WANDB_DIR"])
    open(os.environ["WANDB_DIR"] + "/run", "w").close()
    assert os.environ["MLFLOW_TRACKING_URI"].startswith("file:")
    """
    assert contained(tmp_path, monkeypatch, code, redirected=True)[:2] == (0, "")


def test_the_users_own_sitecustomize_is_run_too(tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import sys\nsys.theirs = 1\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'own'}:{os.environ.get('PYTHONPATH', '')}")
    code = "import sys; assert sys.theirs == 1; open('old.txt', 'w').close()"
    assert contained(tmp_path, monkeypatch, code, redirected=True)[:2] == (0, "")


@pytest.mark.slow
def test_modules_in_the_users_folder_are_the_scripts_alone(tmp_path, monkeypatch):
    user_folder(tmp_path / "user")
    for name in ("json", "signal", "psutil"):
        (tmp_path / "user" / f"{name}.py").write_text("1 / 0")
    assert contained(tmp_path, monkeypatch, "print(1)", redirected=True)[:2] == (0, "1\n")


@pytest.mark.slow
def test_results_can_be_let_through(tmp_path, monkeypatch):
    results = tmp_path / "results"
    results.mkdir()
    monkeypatch.chdir(tmp_path)
    code = "import sys; open(sys.argv[1] + '/one', 'w').write('1')"
    for redirected in (None, True):
        with scratch() as folder:
            process = Process(
                Command([sys.executable, "-c", code, str(results)]),
                folder / "a",
                temporary_of(folder) / "a",
                passes=[results],
                is_redirected=redirected,
            )
            with pytest.raises(Ended, match="ended by itself"):
                process.hear()
            process.end()
        (results / "one").unlink()


def test_what_a_killed_trial_left_is_removed_by_the_next(tmp_path):
    code = """
import os, signal
from flatout.doctor.trials.scratch import scratch
with scratch() as folder:
    (folder / "a").mkdir(0o000)
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    killed = Path(done.stdout.strip())
    temporary = temporary_of(killed)
    assert left() == [killed]
    assert temporary.exists()
    with scratch() as folder:
        assert all_trials() == [folder]
        assert left() == []
    assert not temporary.exists()
    assert all_trials() == []


def test_an_owner_that_names_a_folder_of_the_users_costs_none(tmp_path):
    kind_folder("trials")
    theirs = tmp_path / "flatout-thesis"
    theirs.mkdir()
    (theirs / "chapter").write_text("mine")
    gone = {"pid": 1, "began": -5, "machine": machine()}
    damaged = [{"pid": "1"}, {"pid": [], "machine": machine()}, [], None, {**gone, "temporary": 7}]
    planted = [{**gone, "temporary": str(theirs)}, *damaged]
    for number, owner in enumerate(planted):
        folder = trials_folder() / f"{number:012x}"
        folder.mkdir()
        (folder / "owner.json").write_text(json.dumps(owner))
    (trials_folder() / ("a" * 12)).symlink_to(theirs)
    theirs.chmod(0o500)
    with scratch() as folder:
        assert [one for one in all_trials() if one != folder] == [trials_folder() / f"{1:012x}"]
    assert (theirs / "chapter").read_text() == "mine"
    assert theirs.stat().st_mode & 0o777 == 0o500


@pytest.mark.slow
def test_a_trial_of_another_machine_is_left_alone(tmp_path):
    other = kind_folder("trials") / ("0" * 12)
    other.mkdir()
    (other / "owner.json").write_text(json.dumps({"pid": 1, "began": 0, "machine": "elsewhere"}))
    with scratch():
        assert other.exists()
