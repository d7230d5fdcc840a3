"""Runner of a case: its ranks and the plain loop, each in a fork of a process with torch loaded."""

from __future__ import annotations

import atexit
import os
import select
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "world"))
from world_ranks import environment, free_port

import forked
from flatout.processes import die_with_parent

# Keras reads this variable at its import, in the forked processes.
os.environ.setdefault("KERAS_BACKEND", "torch")
LOADED = (*forked.TRAINING, "combinations.check", "combinations.job", "combinations.run")
PATIENCE_S = 120
CODE = "import sys; from combinations.run import main; main(*sys.argv[1:])"


def found(case: object, folder: Path) -> list[str]:
    """Return the faults of a case, one line each; an empty list if there is none."""
    own = {"FLATOUT_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    done = forked.run(
        ["-c", CODE, str(case), folder], folder, {**os.environ, **own}, LOADED, 4 * PATIENCE_S
    )
    if done.returncode:
        return [f"ended with {done.returncode}: {done.stdout}{done.stderr}"]
    lines = [line for line in (folder / "faults").read_text().split("\0") if line]
    if any(" ended with " in line for line in lines):
        lines.append(done.stderr[-2000:])
    return lines


def main(name: str, folder: str) -> None:
    """Fork the ranks and the plain loop, which is rank -1, and compare their results."""
    from combinations.axes import Case
    from combinations.check import faults
    from combinations.job import load

    case = Case.parse(name)
    port, ranks = free_port(), range(-1, case.ranks)
    children = [started(name, folder, rank, case.ranks, port) for rank in ranks]
    until = time.monotonic() + PATIENCE_S
    codes = [ended(child, until) for child in children]
    failed = [
        f"rank {rank} did not end within {PATIENCE_S} s"
        if code is None
        else f"rank {rank} ended with {code}"
        for rank, code in zip(ranks, codes, strict=True)
        if code != 0
    ]
    lines = failed or faults(case, *(load(folder, rank) for rank in ranks))
    Path(folder, "faults").write_text("\0".join(lines))


def started(name: str, folder: str, rank: int, ranks: int, port: int) -> int:
    """Start a process that runs a rank of a case, or the plain loop as rank -1."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        die_with_parent()
        from combinations.job import main as run_rank

        if ranks > 1 and rank >= 0:
            os.environ.update(environment(rank, ranks, port))
        run_rank(name, folder, rank)
        threading._shutdown()
        atexit._run_exitfuncs()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ended(child: int, until: float) -> int | None:
    """Return the exit code of a process, or None if it had to be killed."""
    waiting = os.pidfd_open(child)
    poll = select.poll()
    poll.register(waiting, select.POLLIN)
    in_time = poll.poll(max(0, until - time.monotonic()) * 1000)
    os.close(waiting)
    if not in_time:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if in_time else None
