import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import forked
from flatout.unfinished import is_abandoned, is_unfinished, new_name


def test_names_are_unique_across_threads() -> None:
    names: list[str] = []
    threads = [
        threading.Thread(target=lambda: names.extend(new_name() for _ in range(500)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(names)) == 2000
    assert all(map(is_unfinished, names))


def test_a_writer_is_alive_until_it_ends_even_if_its_exit_status_was_never_asked_for() -> None:
    program = "from flatout.unfinished import new_name; print(new_name(), flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    assert is_unfinished(name)
    assert not is_abandoned(name)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # now it is a zombie
    assert is_abandoned(name)
    process.wait()
    process.stdin.close()
    process.stdout.close()
    assert is_abandoned(name)


def test_another_process_with_the_same_number_is_not_the_writer() -> None:
    name = new_name()
    earlier = re.sub(r"-(\d+)-(\d+)-(\d+)$", r"-\1-1-\3", name)
    assert not is_abandoned(name)
    assert is_abandoned(earlier)


def test_other_names_are_never_ours() -> None:
    for name in ["", ".tmp-", ".tmp-host-1-2", "tmp-host-1-2-3", ".tmp-host-1-2-3.txt", "step-1"]:
        assert not is_unfinished(name)
        assert not is_abandoned(name)


KILLED = """
import os, signal, sys
import numpy as np
import flatout
from flatout.data.stores import row_folder

def dies(*given, **named):
    os.kill(os.getpid(), signal.SIGKILL)

class Nameless:
    def __init__(self):
        self.pipe = open(os.devnull)

    def __call__(self, x, y):
        return x, y

if sys.argv[1] == "killed":
    if sys.argv[2] == "rows":
        row_folder.Filling.finish = dies
    else:
        os.replace = dies

if sys.argv[2] == "rows":
    rows = flatout.data.arrays(np.zeros((50, 3), np.float32), np.zeros(50))
    list(rows.map(Nameless()).cache("disk").batch(5).batches(0))
elif sys.argv[2] == "index":
    with open("table.csv", "w") as file:
        file.write("a,b,y\\n1,one,0\\n2,two,1\\n")
    os.utime("table.csv", (1, 1))
    list(flatout.data.csv("table.csv", target="y").batch(1).batches(0))
elif sys.argv[2] == "auto":
    from flatout.train.tuning import decision_cache as auto_cache
    auto_cache.dumps = str
    auto_cache.write("a", "kept")
elif sys.argv[2] == "live":
    from flatout.measure import live
    live._write({**live._process(), "rank": 0})
    live.remove_own_file()
"""


@pytest.mark.parametrize("what", ["rows", "index", "auto", "live"])
def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path, tmp_path_factory, what):
    script = tmp_path_factory.mktemp("script") / "killed.py"
    script.write_text(KILLED)

    def run(how: str) -> tuple[int, set[str]]:
        done = forked.run([script, how, what], tmp_path, os.environ)
        base = Path(os.environ["FLATOUT_CACHE"]) / what
        hidden = {path.name for path in base.iterdir()}
        return done.returncode, {name for name in hidden if re.match(r"\.[^m]|tmp|\d+[-.]", name)}

    code, left = run("killed")
    assert code == -signal.SIGKILL
    assert left
    code, after = run("whole")
    assert code == 0
    assert not after
