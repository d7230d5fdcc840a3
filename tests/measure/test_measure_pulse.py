"""Bursts between waits, seen from outside."""

import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

from flatout.measure import pulse as pulse_module
from flatout.measure.processes import Processes
from flatout.measure.pulse import Stretch, Watched, pulse_of

# A loader with two workers on one CPU or more, and a process that computes 20 ms of each 100.
FED = Stretch(1.0, cpu_s=0.2, idle_s=0.8, disk_s=0.0, workers_cpu_s=1.5)


def test_waiting_while_workers_compute_is_starvation():
    pulse = pulse_of([FED] * 20, workers=2)
    assert (pulse.watched_s, pulse.still_s, pulse.starved_s) == (20, pytest.approx(16), 20)
    assert pulse.is_starved
    assert pulse.as_dict()["is_starved"] is True


@pytest.mark.parametrize(
    "changes",
    [
        {"workers_cpu_s": 0.1},  # no one makes anything: other ranks, a network, a timer
        {"cpu_s": 0.9, "idle_s": 0.1},  # it hardly waits
        {"cpu_s": 0.001, "idle_s": 0.999},  # a launcher, which only waits for others
    ],
)
def test_standing_still_needs_a_reason_to_be_called_so(changes):
    assert not pulse_of([replace(FED, **changes)] * 20, workers=2).is_starved


def test_who_waits_for_a_disk_is_starved():
    reading = replace(FED, workers_cpu_s=0.0, disk_s=0.6)
    assert pulse_of([reading] * 20, workers=0).is_starved


def test_on_a_gpu_it_is_the_gpu_that_stands_still():
    # It launches kernels, or waits for them at full speed: a CPU that is never idle.
    launching = Stretch(1.0, cpu_s=1.0, idle_s=0.0, disk_s=0.0, workers_cpu_s=0.0, gpu_idle_s=0.6)
    pulse = pulse_of([launching] * 20, workers=0)
    assert (pulse.on_gpu, pulse.still_s, pulse.is_starved) == (True, pytest.approx(12), True)
    assert not pulse_of([replace(launching, gpu_idle_s=0.1)] * 20, workers=0).is_starved


def test_some_seconds_are_needed_and_half_of_them():
    assert not pulse_of([FED] * 4, workers=2).is_starved
    busy = replace(FED, cpu_s=1.0, idle_s=0.0)
    assert not pulse_of([FED] * 9 + [busy] * 11, workers=2).is_starved
    assert pulse_of([FED] * 10 + [busy] * 10, workers=2).is_starved
    assert not pulse_of([], workers=0).is_starved


class Clock:
    """Its time passes only where someone sleeps."""

    now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_a_process_that_sleeps_is_idle_and_one_that_ends_is_no_error(monkeypatch):
    monkeypatch.setattr(pulse_module, "time", Clock())
    script = "import time; print(1, flush=True); time.sleep(60)"
    job = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        job.stdout.readline()
        while psutil.Process(job.pid).status() != psutil.STATUS_SLEEPING:
            time.sleep(0.01)
        watched, processes = Watched(job.pid), Processes()
        watched.wait(30)
        pulse = watched.pulse(processes.read(job.pid), None)
        assert pulse.watched_s == pytest.approx(30)
        assert pulse.still_s == pytest.approx(30, abs=0.1)  # what it had to do before it slept
        assert (pulse.works, pulse.workers, pulse.on_gpu) == (False, 0, False)
    finally:
        job.kill()
        job.communicate()
    watched.wait(0.1)
    assert not watched.pulse([], None).works


WORKERS = """
import multiprocessing, sys, time

def burn(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass

def make(queue):
    while True:
        burn(0.08)
        queue.put(0)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.Queue(2)
    context.Process(target=make, args=(queue,), daemon=True).start()
    print("up", flush=True)
    while True:
        queue.get()
        burn(0.02)
"""


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_process_whose_workers_are_too_slow_is_found(start, tmp_path):
    (tmp_path / "job.py").write_text(WORKERS)
    command = [sys.executable, str(tmp_path / "job.py"), start]
    job = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        job.stdout.readline()
        watched, processes = Watched(job.pid), Processes()
        processes.read(job.pid)
        for _ in range(120):  # ends once it is found: beside other work that takes long
            watched.wait(1.0)
            pulse = watched.pulse(processes.read(job.pid), None)
            if pulse.is_starved:
                break
        assert pulse.is_starved
        assert pulse.workers >= 1
        assert pulse.works
    finally:
        children = psutil.Process(job.pid).children(recursive=True)
        job.kill()
        for child in children:  # they hold the pipe open
            child.kill()
        job.communicate()
