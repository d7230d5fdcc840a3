"""What a process does is found out from outside, whatever state it is in."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest

from flatout.world.hangs.stacks import Process, inspect_process, own_stack, this_process

CHILD = """
import json, sys, time
from dataclasses import asdict
from flatout.world.hangs.stacks import this_process
print(json.dumps(asdict(this_process())), flush=True)
def busy():
    for _ in range(100):
        sum(range(10**9))  # holds the interpreter
def idle():
    time.sleep(100)
globals()[sys.argv[1]]()
"""


@pytest.fixture
def child(request):
    command = [sys.executable, "-c", CHILD, request.param]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    yield process, Process(**json.loads(process.stdout.readline()))
    process.kill()
    process.wait()


@pytest.mark.parametrize("child", ["busy"], indirect=True)
def test_a_process_that_holds_its_interpreter_writes_its_stack(child):
    _, known = child
    time.sleep(0.1)
    state, stack = inspect_process(known)
    assert "does not answer" in state
    assert "in busy" in stack[-1]
    assert "in <module>" in stack[0]
    # Asked again, it tells again and not what it told before.
    assert len(inspect_process(known)[1]) == len(stack)


@pytest.mark.parametrize("child", ["idle"], indirect=True)
def test_a_stopped_process(child):
    process, known = child
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    state, stack = inspect_process(known)
    assert state == f"is stopped (SIGSTOP, or Ctrl-Z); kill -CONT {process.pid} resumes the process"
    assert stack == []


@pytest.mark.parametrize("child", ["idle"], indirect=True)
def test_a_process_that_has_ended_and_one_that_has_its_number_now(child):
    process, known = child
    # A later process of the same number gets no signal, which could end it.
    assert inspect_process(replace(known, started=known.started - 1)) == ("has ended", [])
    assert process.poll() is None
    process.kill()
    process.wait()
    assert inspect_process(known) == ("has ended", [])


def test_the_own_stack_ends_where_the_main_thread_is():
    stack = own_stack()
    assert any("in test_the_own_stack_ends_where_the_main_thread_is" in line for line in stack)
    known = this_process()
    assert known.pid == os.getpid()
    assert Process(**asdict(known)) == known
