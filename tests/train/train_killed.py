"""Fits in forked children that are to be killed: a kill costs milliseconds and not seconds."""

import hashlib
import os
import sys
import time
from collections.abc import Callable

import flatout


class Slow(flatout.Callback):
    """Gives the killer time, and tells it that steps are being made."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def on_step(self, state) -> None:
        os.write(self.pipe, b".")
        time.sleep(0.002)


def started(fit: Callable[..., None], *arguments) -> tuple[int, int]:
    """A child that fits; its number, and a pipe that gets a dot for each step."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            os.close(reading)
            fit(*arguments, writing)
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(writing)
    return pid, reading


def finished(pid: int, reading: int) -> int:
    """Waits for a child; its exit code."""
    with os.fdopen(reading, "rb") as pipe:
        pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def digest_of(model, optimizer) -> str:
    """Over all weights and the optimizer's state."""
    digest = hashlib.sha256()
    for value in {**model.state_dict(), **optimizer.state_dict()["state"]}.values():
        for part in value.values() if isinstance(value, dict) else [value]:
            digest.update(part.numpy().tobytes())
    return digest.hexdigest()
