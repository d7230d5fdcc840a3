import os
import subprocess
import sys

import pytest

from flatout.errors import FlatoutError
from flatout.measure.processes import Processes


def test_a_process_is_seen_with_all_that_it_has_started():
    script = (
        "import subprocess, sys, time\n"
        "inner = subprocess.Popen([sys.executable, '-c', 'print(1, flush=True)\\nwhile 1: pass'],\n"
        "                         stdout=subprocess.PIPE)\n"
        "inner.stdout.readline()\n"
        "print(inner.pid, flush=True)\n"
        "try:\n"
        "    sys.stdin.read()\n"
        "finally:\n"
        "    inner.kill()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    job = subprocess.Popen([sys.executable, "-c", script], **pipes)
    try:
        inner = int(job.stdout.readline())
        processes = Processes()
        processes.read(job.pid)
        before = os.times().elapsed
        while os.times().elapsed - before < 0.3:
            pass
        root, child = processes.read(job.pid)
    finally:
        job.communicate()
    assert (root.pid, root.parent) == (job.pid, os.getpid())
    assert (child.pid, child.parent) == (inner, job.pid)
    assert child.cpu_percent > root.cpu_percent
    assert root.state == "sleeping"
    assert min(root.rss_bytes, child.rss_bytes) > 1e6
    assert child.threads == 1
    assert root.command.startswith(sys.executable)
    assert root.read_bytes_per_s is not None
    with pytest.raises(FlatoutError, match=f"no process {job.pid} is running"):
        processes.read(job.pid)
