"""A rank waits for gloo's threads before it ends."""

import threading
import time

import pytest

from flatout.world import gloo_threads


@pytest.fixture
def tasks(tmp_path):
    def write(number, name, state):
        task = tmp_path / str(number)
        task.mkdir(exist_ok=True)
        for file, words in (("comm", f"{name}\n"), ("stat", f"{number} ({name}) {state} 1 2 3")):
            # At once, as the kernel's are: a reader must not find an empty one.
            (tmp_path.parent / "next").write_text(words)
            (tmp_path.parent / "next").replace(task / file)

    return write


def test_the_wait_ends_once_no_thread_of_gloo_runs(tasks, tmp_path):
    tasks(1, "python", "R")
    tasks(2, "pt_gloo_runloop", "S")
    gloo_threads.wait_until_idle(tmp_path)
    tasks(3, "pt_gloo_runloop", "R")
    ended = []

    def end():
        time.sleep(0.05)
        ended.append(True)
        tasks(3, "pt_gloo_runloop", "S")

    threading.Thread(target=end).start()
    gloo_threads.wait_until_idle(tmp_path)
    assert ended


def test_the_wait_ends_if_threads_stay_busy_or_cannot_be_read(tasks, tmp_path):
    tasks(1, "pt_gloo_runloop", "R")
    gloo_threads.wait_until_idle(tmp_path, 0.05)
    gloo_threads.wait_until_idle(tmp_path / "absent", 0.05)
