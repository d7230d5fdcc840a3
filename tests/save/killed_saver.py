"""Saves checkpoints in child processes and really kills them; run by test_save_kill.py.

    python killed_saver.py random FOLDER KILLS SEED    kill -9 at random times
    python killed_saver.py instants FOLDER             kill -9 before each file operation

Half of the savers save asynchronously.
One process imports torch and forks the savers, which have one further thread at most, so that
a kill costs milliseconds. Prints one JSON object; every failed expectation is an exception.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from typing import NoReturn

import torch

from flatout import unfinished
from flatout.save.checkpoint import Checkpoints, LoadedCheckpoint

FILE_OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def content(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((20_000,), float(step)), "b": torch.arange(100) + step}


def check(loaded: LoadedCheckpoint) -> None:
    for tensors in (loaded.model, loaded.state["moments"]):
        for name, tensor in content(loaded.step).items():
            assert torch.equal(tensors[name], tensor), (loaded.step, name)
    assert loaded.state["step"] == loaded.step


def save_for_ever(folder: str, asynchronous: bool, first: int, done: int) -> NoReturn:
    """Saves, and tells `done` each step that is whole, until it is killed."""
    checkpoints = Checkpoints(folder, keep_last=2, keep_best=1, asynchronous=asynchronous)
    os.write(done, b"ready\n")
    for step in range(first, first + 1_000_000):
        tensors = content(step)
        checkpoints.save(step, tensors, {"step": step, "moments": content(step)}, score=-step)
        if asynchronous:
            # A save waits for the one before it, so that one is whole.
            os.write(done, b"%d\n" % (step - 1) if step > first else b"")
        else:
            os.write(done, b"%d\n" % step)
    raise AssertionError("no one killed it")


def fork(work: object, *args: object) -> tuple[int, int]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            work(*args, writing)  # type: ignore[operator]
        finally:
            os._exit(3)
    os.close(writing)
    return pid, reading


def leftovers(folder: str) -> int:
    return sum(map(unfinished.is_unfinished, os.listdir(folder)))


def kill_at_random(folder: str, kills: int, seed: int) -> dict[str, int]:
    draw = random.Random(seed)
    last, within, told = 0, 0, 0
    for kill in range(kills):
        pid, reading = fork(save_for_ever, folder, kill % 2 == 0, last + 1)
        with os.fdopen(reading) as pipe:
            assert pipe.readline() == "ready\n"
            time.sleep(draw.uniform(0, 0.2))
            os.kill(pid, signal.SIGKILL)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
            reported = [int(line) for line in pipe.read().splitlines(True) if line.endswith("\n")]
        within += leftovers(folder) > 0
        checkpoints = Checkpoints(folder)
        assert leftovers(folder) == 0
        name = checkpoints.latest()
        assert name is not None or not (reported or last)
        if name is not None:
            loaded = checkpoints.load()
            assert loaded.name == name
            assert loaded.step >= max([last, *reported])
            check(loaded)
            last = loaded.step
        told += len(reported)
        for other in os.listdir(folder):
            check(checkpoints.load(other))
    return {"kills": kills, "within": within, "told": told, "last": last}


def save_until(folder: str, asynchronous: bool, instant: int, done: int) -> None:
    """One save, during which the process kills itself before its file operation `instant`."""
    checkpoints = Checkpoints(folder, keep_last=1, asynchronous=asynchronous)
    seen = -1

    def hook(event: str, _args: object) -> None:
        nonlocal seen
        if event in FILE_OPERATIONS:
            seen += 1
            if seen == instant:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    checkpoints.save(2, content(2), {"step": 2, "moments": content(2)})
    checkpoints.wait()
    os.write(done, b"done\n")
    os._exit(0)


def kill_at_every_instant(folder: str, asynchronous: bool) -> dict[str, int]:
    old = new = 0
    start = os.path.join(folder, "start")
    first = Checkpoints(start, asynchronous=False)
    first.save(1, content(1), {"step": 1, "moments": content(1)})
    for instant in range(1000):
        place = os.path.join(folder, str(instant))
        shutil.copytree(start, place)
        pid, reading = fork(save_until, place, asynchronous, instant)
        with os.fdopen(reading) as pipe:
            done = pipe.read() == "done\n"
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code == (0 if done else -signal.SIGKILL), code
        checkpoints = Checkpoints(place)
        loaded = checkpoints.load()
        assert loaded.name == checkpoints.latest()
        check(loaded)
        assert leftovers(place) == 0
        if done:
            assert os.listdir(place) == ["step-000000002"]
            return {"instants": instant, "old": old, "new": new}
        old, new = old + (loaded.step == 1), new + (loaded.step == 2)
        if instant % 5 == 0:  # the next run goes on as if nothing had happened
            checkpoints.save(2, content(2), {"step": 2, "moments": content(2)})
            checkpoints.wait()
            assert checkpoints.load().step == 2
            check(checkpoints.load())
    raise AssertionError("a save has no end")


if __name__ == "__main__":
    torch.set_num_threads(1)  # no thread of torch's may be left behind by a fork
    kind, target, *rest = sys.argv[1:]
    if kind == "random":
        print(json.dumps(kill_at_random(target, int(rest[0]), int(rest[1]))))
    else:
        for mode in ("asynchronous", "synchronous"):
            place = os.path.join(target, mode)
            print(json.dumps(kill_at_every_instant(place, mode == "asynchronous")))
