"""A rank waits for gloo's threads before it ends."""

import threading
import time

import pytest

from flatout.world import gloo_threads


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    monkeypatch.setattr(gloo_threads, "_TASKS", tmp_path)

    def write(number, name, state):
        task = tmp_path / str(number)
        task.mkdir(exist_ok=True)
        for file, words in (("comm", f"{name}\n"), ("stat", f"{number} ({name}) {state} 1 2 3")):
            # At once, as the kernel's are: a reader must not find an empty one.
            (tmp_path.parent / "next").write_text(words)
            (tmp_path.parent / "next").replace(task / file)

    return write


def test_it_waits_for_those_that_run_and_for_no_others(tasks):
    tasks(1, "python", "R")
    tasks(2, "pt_gloo_runloop", "S")
    gloo_threads.wait_until_idle()
    tasks(3, "pt_gloo_runloop", "R")
    ended = []

    def end():
        time.sleep(0.05)
        ended.append(True)
        tasks(3, "pt_gloo_runloop", "S")

    threading.Thread(target=end).start()
    gloo_threads.wait_until_idle()
    assert ended


def test_it_ends_where_they_do_not_or_cannot_be_seen(tasks, tmp_path, monkeypatch):
    monkeypatch.setattr(gloo_threads, "_LONGEST_S", 0.05)
    tasks(1, "pt_gloo_runloop", "R")
    gloo_threads.wait_until_idle()
    monkeypatch.setattr(gloo_threads, "_TASKS", tmp_path / "absent")
    gloo_threads.wait_until_idle()
