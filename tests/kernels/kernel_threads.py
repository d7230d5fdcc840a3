"""Kernels beside other threads: which run meanwhile, or change what a kernel reads."""

import sys
import threading
from contextlib import contextmanager


def runs_beside(work):
    """Whether this thread runs while another one is within `work`; what that gave, each time."""
    started, results = threading.Event(), []

    def run():
        started.set()
        results.append(work())

    before = sys.getswitchinterval()
    # So long that no thread gets the interpreter unless it is given away.
    sys.setswitchinterval(100)
    try:
        for tried in range(20):
            started.clear()
            thread = threading.Thread(target=run)
            thread.start()
            started.wait()
            was_beside = len(results) == tried
            thread.join()
            if was_beside:
                break
    finally:
        sys.setswitchinterval(before)
    return was_beside, results


@contextmanager
def repeated_beside(change):
    """Within, a thread calls `change` again and again."""
    stop = threading.Event()

    def run():
        while not stop.is_set():
            change()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
