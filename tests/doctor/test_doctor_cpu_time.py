"""CPU time of a process and of all below it."""

import subprocess
import sys
import time

from flatout.doctor.trials.cpu_time import cpu_ns

WORKS = """
import subprocess, sys, time
until = time.process_time() + 0.2
while time.process_time() < until:
    pass
if sys.argv[1:]:
    subprocess.run([sys.executable, "-c", sys.argv[1]])
print("done", flush=True)
sys.stdin.read()
"""


def test_it_counts_what_children_and_theirs_compute_and_not_what_others_do():
    before = cpu_ns()
    child = subprocess.Popen(
        [sys.executable, "-c", WORKS, WORKS.replace("sys.stdin.read()", "")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    child.stdout.readline()
    child.stdout.readline()
    alive = cpu_ns() - before
    child.communicate()
    ended = cpu_ns() - before
    assert alive > 0.3e9
    assert ended >= alive - 0.05e9  # what has ended is counted, too

    before = cpu_ns()
    time.sleep(0.3)  # while this waits, whatever else runs here
    assert cpu_ns() - before < 0.2e9
