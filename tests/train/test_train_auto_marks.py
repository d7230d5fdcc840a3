"""auto: what ended the process of an earlier run is not tried again; one kill drops nothing."""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from train_ranks import run_on_two_ranks

from flatout.cache_folder import MARK, cache_folder, kept_text, kind_folder, with_checksum
from flatout.data.source import as_source
from flatout.devices import allocator
from flatout.processes import state_and_start
from flatout.train.contained import Child
from flatout.train.loop import Loop
from flatout.train.terms import Terms
from flatout.train.tuning import crash_markers as auto_marks
from flatout.train.tuning.crash_markers import EndsProcess, Marks
from flatout.world import ONE

PRECISION, FUSED = "compute.precision", "compute.fused_optimizer"
KEY = "0" * 24


@pytest.fixture(autouse=True)
def clock():
    """Seconds that pass only where the model computes."""
    now = [0.0]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield now
    allocator.default_memory()
    torch.set_num_threads(threads)


def read(mark):
    return json.loads(kept_text("looks", mark.name))


def die(number=signal.SIGSEGV):
    """End this process as a fault in a kernel does, without a core file or pages of frames."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.disable()
    os.kill(os.getpid(), number)
    time.sleep(60)


class Faulty(torch.autograd.Function):
    """A function of the user's that cannot take bf16."""

    @staticmethod
    def forward(ctx, x):
        if x.dtype is torch.bfloat16:
            die()
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Net(nn.Module):
    def __init__(self, is_faulty):
        super().__init__()
        self.first, self.last, self.is_faulty = nn.Linear(8, 16), nn.Linear(16, 3), is_faulty

    def forward(self, x):
        x = self.first(x)
        return self.last(Faulty.apply(x) if self.is_faulty else x)


def train(clock, is_faulty=False, before=lambda loop: None, may_fork=True):
    """Return a Loop that has tried all settings; bf16 and fused steps are fast.

    Args:
        clock: counts the seconds of the steps.
        is_faulty: True if bf16 ends the process.
        before: called before each forward.
        may_fork: True if a child may try settings that ended a run.
    """
    torch.manual_seed(0)
    said = []
    loop, model = Loop(say=said.append), Net(is_faulty)
    loop.terms = Terms(
        clock=lambda: clock[0],
        cpu_clock=lambda: clock[0],
        noise=1e9,  # tests run on busy machines
        machine_rates=lambda *machine: None,  # measuring takes seconds
        has_bf16_units=lambda device: True,
        may_fork=may_fork,
    )

    def compute(batch):
        before(loop)
        now = loop.stepper.switch.now
        speed = (2 if now.precision == "bf16" else 1) * (1.5 if now.fused_optimizer == "on" else 1)
        clock[0] += 0.03 / speed * batch.size / 32 * (1 if torch.is_grad_enabled() else 1 / 3)
        return nn.functional.cross_entropy(model(batch.inputs).float(), batch.targets)

    generator = torch.Generator().manual_seed(1)
    x, y = torch.rand(128, 8, generator=generator), torch.arange(128) % 3
    source = as_source((x, y), batch_size=32)
    optimizer = torch.optim.Adam(model.parameters())
    loop.prepare(model, optimizer, compute=compute, data=source, steps=3000)
    while loop.tuner is not None and loop.tuner.is_searching:
        for batch in loop.batches(source):
            loop.step(compute, batch)
        loop.finish_epoch()
    loop.said = said
    return loop


def ended(*given, **named):
    """How a run in a process of its own has ended."""

    def run():
        train(*given, **named)

    return Child(run).result(600).why


def of_job(key=KEY):
    return Marks.of(key, ONE, may_fork=True)


def left():
    folder = cache_folder() / "looks"
    return sorted(path for path in folder.glob("*") if path.name != MARK)


def dropped(loop):
    return loop.tuner.record(loop.step_count)["dropped"]


def test_what_ended_a_run_is_tried_in_a_child_and_no_more(clock, monkeypatch):
    assert ended(clock, is_faulty=True) == "ended by SIGSEGV"
    (mark,) = left()
    assert read(mark) == [[PRECISION], "look", ""]
    loop = train(clock, is_faulty=True)
    assert loop.resolved.compute.precision == "fp32"
    assert loop.resolved.compute.fused_optimizer == "on"
    why = dropped(loop)[PRECISION]
    assert why.startswith("ended an earlier run of this job, and a child process")
    assert "(SIGSEGV)" in why
    assert "flatout clean" in why
    assert f"auto: bf16 {why}" in loop.said
    for kept in (cache_folder() / "auto").glob("*.toml"):
        kept.unlink()
    monkeypatch.setattr(auto_marks, "Child", None)  # it is known
    later = train(clock, is_faulty=True)
    assert dropped(later)[PRECISION] == why
    assert why in later.resolved.choices[PRECISION].reason


def test_two_runs_are_enough_if_no_child_can_try_a_setting(clock):
    alone = {"is_faulty": True, "may_fork": False}
    assert [ended(clock, **alone) for _ in range(2)] == ["ended by SIGSEGV"] * 2
    loop = train(clock, **alone)
    assert dropped(loop)[PRECISION].startswith("ended 2 earlier runs of this job")
    assert loop.resolved.compute.precision == "fp32"


def test_what_only_a_kill_ended_is_tried_as_any_other(clock, tmp_path):
    def kill_once(loop):
        if loop.stepper.switch.now.precision == "bf16" and not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            die(signal.SIGKILL)

    assert ended(clock, before=kill_once) == "memory"  # as the kernel ends what has no memory
    assert len(left()) == 1
    loop = train(clock, before=kill_once)
    assert loop.resolved.compute.precision == "bf16"
    assert left() == []


def test_a_first_step_that_ends_a_run_is_tried_in_a_child(clock):
    def die_fused(loop):
        if loop.stepper.switch.now.fused_optimizer == "on":
            die(signal.SIGABRT)

    assert ended(clock, before=die_fused) == "ended by SIGABRT"
    (mark,) = left()
    fields, at, _ = read(mark)
    assert FUSED in fields
    assert at == "step"
    loop = train(clock, before=die_fused)
    assert "(SIGABRT)" in dropped(loop)[FUSED]
    assert loop.resolved.compute.fused_optimizer == "off"
    assert loop.resolved.compute.precision == "bf16"


def test_a_kill_between_looks_leaves_nothing_that_counts(clock):
    def kill_plain(loop):
        if loop.step_count == 2:
            die(signal.SIGKILL)

    assert ended(clock, before=kill_plain) == "memory"
    assert left() == []
    assert train(clock).resolved.compute.precision == "bf16"


def test_a_run_that_ends_by_itself_leaves_nothing(clock):
    train(clock)
    assert left() == []
    marks = of_job()
    for error in (RuntimeError, KeyboardInterrupt):
        seen = _raises_under_a_mark(marks, error)
        assert len(seen) == 1
        assert left() == []


def _raises_under_a_mark(marks, error):
    seen = []
    try:
        with marks.on([PRECISION], "look"):
            seen += left()
            raise error
    except error:
        return seen


def test_what_a_living_process_tries_is_left_alone():
    with of_job().on([PRECISION], "look"):
        other = of_job()
        assert not other.is_suspect([PRECISION])
        with other.on([PRECISION], "look"):
            assert len(left()) == 2
        assert len(left()) == 1


def _leave(fields=(PRECISION,), at="look", host=None, count=0):
    """What a process leaves that is gone: one of this number has started later."""
    start = state_and_start(os.getpid())[1] - 1
    host = host or socket.gethostname().replace("-", "_").replace(":", "_")
    path = kind_folder("looks") / f"{KEY}.tmp-{host}-{os.getpid()}-{start}-{count}"
    path.write_text(with_checksum(json.dumps([fields, at, ""])))
    return path


def test_a_mark_of_another_host_counts_once_it_is_old():
    path = _leave(host="elsewhere")
    assert not of_job().is_suspect([PRECISION])
    then = time.time() - 2 * 3600
    os.utime(path, (then, then))
    assert of_job().is_suspect([PRECISION])


def test_marks_are_of_one_job_and_of_what_they_name():
    _leave()
    _leave(count=1)
    assert of_job().objection([PRECISION, FUSED])
    assert not of_job().objection([FUSED])
    assert not of_job("1" * 24).objection([PRECISION])


def test_what_came_to_its_end_takes_back_the_marks_of_the_same():
    _leave(), _leave(at="step", count=1)
    with of_job().on([PRECISION], "look"):
        pass
    marks = of_job()
    assert marks.is_suspect([PRECISION])
    with marks.on([PRECISION], "step"):
        pass
    assert left() == []


@pytest.mark.parametrize("text", ["", "[", "{}", "[1, 2]", '[["a"], "look"]'])
def test_a_damaged_mark_names_nothing(text):
    _leave().write_text(with_checksum(text))
    assert of_job().objection([PRECISION]) == ""


def test_a_cache_that_cannot_be_written_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with of_job().on([PRECISION], "look"):
        pass


def test_an_error_in_the_child_is_left_to_the_run():
    _leave()

    def fail():
        raise RuntimeError("fails here")

    marks = of_job()
    marks.check([PRECISION], "look", fail)
    with pytest.raises(EndsProcess, match="SIGABRT"):
        marks.check([PRECISION], "look", lambda: die(signal.SIGABRT))


_SCRIPT = """
import os, signal, sys, resource
import torch
from torch import nn
import flatout
from flatout.train.terms import Terms
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
torch.set_num_threads(1)
class Faulty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if x.dtype is torch.bfloat16:
            os.kill(os.getpid(), signal.SIGSEGV)
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 3)
    def forward(self, x):
        return self.last(Faulty.apply(self.first(x)))
torch.manual_seed(0)
x, y = torch.rand(1024, 32), torch.arange(1024) % 3
trainer = flatout.Trainer(Net())
always = dict.fromkeys(("longest_s", "short_share", "before_share", "fixed_s"), 1e9)
trainer.terms = Terms(has_bf16_units=lambda device: True, **always)
history = trainer.fit((x, y), batch_size=32, epochs=8)
print(history.explain())
"""


@pytest.mark.slow
def test_a_job_that_died_trains_to_its_end_the_next_time(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(_SCRIPT)
    told = {**os.environ, "FLATOUT_CACHE": str(tmp_path / "cache")}
    first, second = (
        subprocess.run([sys.executable, script], env=told, capture_output=True, text=True)
        for _ in range(2)
    )
    assert first.returncode == -signal.SIGSEGV
    assert second.returncode == 0, second.stderr
    why = " ".join(second.stdout.split())
    assert "compute.precision: ended an earlier run of this job, and a child process" in why
    assert not list(Path(tmp_path / "cache" / "auto").glob("*.part"))


@pytest.mark.slow
def test_two_ranks_drop_what_has_ended_two_of_their_runs(tmp_path):
    """The first rank's marks hold for both; the launcher may end it before it has left one."""
    (tmp_path / "train.py").write_text(_SCRIPT)
    for _ in range(4):
        done = run_on_two_ranks(tmp_path)
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stderr
    assert "compute.precision: ended 2 earlier runs of this job" in " ".join(done.stdout.split())
