"""What is seen of memory and of open files: of this process, its children, and of GPUs."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from flatout.observe.meters import Meters, held_mb
from flatout.observe.model_facts import describe
from flatout.observe.observation import Loader, Model, Observation
from flatout.observe.watch import Watch
from flatout.observe.within_loader import files_being_read, fill

SLEEPS = "import sys; held = bytearray({mb} * 2**20); print('up', flush=True); sys.stdin.read()"


@pytest.fixture
def child():
    """A process that holds 64 MB until its input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPS.format(mb=64)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "up\n"
        yield process
        process.stdin.close()


def test_memory_of_a_job_is_that_of_its_processes_and_of_no_file(child, tmp_path):
    alone = held_mb([os.getpid()])
    together = held_mb([os.getpid(), child.pid])
    assert alone is not None
    assert together is not None
    assert 64 < together[0] - alone[0] < 200
    assert together[1] >= alone[1] >= 0


def test_who_has_ended_holds_nothing(child):
    child.stdin.close()
    child.wait()
    assert held_mb([child.pid]) == (0.0, 0.0)


def test_a_job_is_looked_at_while_it_steps(child):
    watch = Watch()
    meters = Meters(watch)
    meters.look_at_job()
    seen = Observation(["train.py"])
    meters.fill(seen)
    assert (seen.job_mb, seen.swapped_mb) == ([], None)  # no step, no look
    watch.lanes.lap(False)
    meters.look_at_job()
    meters.fill(seen)
    assert seen.job_at == [1]
    assert seen.job_mb[0] > 64
    assert seen.swapped_mb >= 0


def test_files_that_stay_open_for_reading_are_named_with_their_size(tmp_path):
    for name, size in (("large", 2**20), ("small", 2**10), ("written", 2**20)):
        (tmp_path / name).write_bytes(bytes(size))
    before = set(files_being_read())
    with (
        (tmp_path / "large").open("rb") as large,
        (tmp_path / "large").open("rb"),
        (tmp_path / "small").open("rb"),
        (tmp_path / "written").open("r+b"),
    ):
        assert set(files_being_read()) - before == {(os.path.realpath(large.name), 2**20)}
    assert set(files_being_read()) == before


def part(files):
    zeros = dict.fromkeys(("read", "decode", "transform", "collate"), 0.0)
    facts = {"opens": 0, "samples": 8, "sample_bytes": 4, "lines": []}
    return {"batches": 2, "lanes_ms": zeros, "files": files, **facts}


def test_files_of_workers_are_told_together_and_none_is_not_unknown():
    for told, expected in (
        ([part([("a", 9)]), part([("a", 9), ("b", 8)])], [("a", 9), ("b", 8)]),
        ([part([]), part(None)], []),
        ([part(None)], None),
    ):
        loader = Loader("DataLoader")
        fill(loader, told)
        assert loader.open_files == expected


def test_dataparallel_tells_its_devices():
    facts = Model("DataParallel")
    wrapped = nn.DataParallel(nn.Linear(2, 2))
    describe(wrapped, facts, whole=False)
    assert facts.wrapper_options == {"devices": torch.cuda.device_count()}
