"""What other threads of a script do while it steps."""

import queue
import threading
import time
from types import SimpleNamespace

from flatout.observe import other_threads
from flatout.observe.observation import Observation
from flatout.observe.other_threads import OtherThreads, _users
from flatout.observe.sites import site_of
from flatout.observe.watch import Watch
from flatout.observe.within_loader import _lane_of


def work(end):
    while not end.is_set():
        sum(range(2000))  # the line


def wait(given):
    given.get()


def _is_ours(thread):
    return thread.name in ("maker", "waiter")  # and not one that another test has left


def test_the_line_of_a_busy_thread_is_told_and_one_that_waits_is_not(monkeypatch):
    monkeypatch.setattr(other_threads, "_SHARE", 1.0)  # a look takes long on a busy machine
    end, given = threading.Event(), queue.Queue()
    threads = [
        # Those of libraries may be many.
        *(threading.Thread(target=end.wait, name=f"library-{at}") for at in range(20)),
        threading.Thread(target=work, args=(end,), name="maker"),
        threading.Thread(target=wait, args=(given,), name="waiter"),
    ]
    watch, seen = Watch(), Observation(["train.py"])
    watch.lanes.thread = threading.get_ident()
    others = OtherThreads(watch)
    for thread in threads:
        thread.start()
    try:
        until = time.monotonic() + 60
        while not any(map(_is_ours, seen.other_threads)) and time.monotonic() < until:
            others._begin()  # a thread that was just started may not run code of the user's yet
            time.sleep(0.1)
            others.fill(seen)
    finally:
        others.stop()
        end.set()
        given.put(None)
        for thread in threads:
            thread.join()
    (one,) = filter(_is_ours, seen.other_threads)
    assert (one.name, one.site.file) == ("maker", __file__)
    assert "end.is_set" in one.site.code or "the line" in one.site.code
    assert one.busy > 0.5
    assert others.seconds > 0


def test_a_frame_between_two_lines_is_at_that_of_its_function():
    code = SimpleNamespace(co_filename=__file__, co_firstlineno=7, co_name="work")
    frame = SimpleNamespace(f_code=code, f_lineno=None, f_back=None, f_globals={})
    assert site_of(frame).line == 7
    assert _users(frame) == (__file__, 7)
    assert _lane_of(frame) == "transform"
