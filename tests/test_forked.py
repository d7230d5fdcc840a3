"""Processes that fork for scripts of tests."""

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import forked


def test_threads_that_start_scripts_at_once_get_processes_of_their_own(tmp_path, monkeypatch):
    """Two scripts of one process would read each other's process id and exit code."""
    made = tempfile.mkdtemp

    def slow(*arguments, **options):
        time.sleep(0.1)
        return made(*arguments, **options)

    monkeypatch.setattr(tempfile, "mkdtemp", slow)

    def run(number):
        code = f"print({number}); raise SystemExit({number})"
        return forked.run(["-c", code], tmp_path, os.environ, forked.TORCH)

    done = [run(0)]  # from now on, a process is free
    with ThreadPoolExecutor(3) as pool:
        done += pool.map(run, range(1, 4))
    assert [(one.returncode, one.stdout) for one in done] == [(n, f"{n}\n") for n in range(4)]
