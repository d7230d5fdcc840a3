"""Runs scripts by cures, each in its own forked process: torch is loaded once for all.

As a program it reads a line of JSON for each script and answers with one.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass


@dataclass(frozen=True)
class Done:
    """How a script ended, what it printed, and which cures took hold."""

    code: int
    out: str
    err: str
    applied: dict
    left: dict


class Scripts:
    """The process that forks for each script."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def run(self, script, *settings: str, arguments=(), lacks: str = "", environment=None) -> Done:
        """Runs a script by these settings; without any it runs as it is."""
        job = {
            "command": [str(script), *map(str, arguments)],
            "settings": settings,
            "lacks": lacks,
            "environment": environment or {},
        }
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return Done(**json.loads(self._process.stdout.readline()))

    def end(self) -> None:
        # A process that another test forked may hold this pipe as well: closing it ends nothing.
        self._process.stdin.write("\n")
        self._process.stdin.close()
        self._process.wait(timeout=120)
        self._process.stdout.close()


def _serve() -> None:
    import numpy  # noqa: F401
    import torch._dynamo
    import torch.utils.data  # noqa: F401

    import flatout.cures.install
    import flatout.cures.start  # noqa: F401

    while (line := sys.stdin.readline()).strip():
        folder = tempfile.mkdtemp()
        child = os.fork()
        if child == 0:
            _run(json.loads(line), folder)
        _, status = os.waitpid(child, 0)
        found = {"applied": {}, "left": {}}
        if os.path.exists(f"{folder}/record"):
            with open(f"{folder}/record") as file:
                found = json.load(file)
        for name in ("out", "err"):
            with open(f"{folder}/{name}") as file:
                found[name] = file.read()
        found["code"] = os.waitstatus_to_exitcode(status)
        shutil.rmtree(folder)
        print(json.dumps(found), flush=True)
    os._exit(0)  # tidying up all that torch has loaded takes seconds


def _run(job: dict, folder: str) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY), number)
    import atexit
    import traceback
    from pkgutil import resolve_name

    from flatout import cures
    from flatout.observe.run_script import run
    from flatout.recipe import Recipe, apply

    os.environ.update(job["environment"])
    code = 0
    if job["lacks"]:
        owner, _, name = job["lacks"].rpartition(".")
        delattr(resolve_name(owner), name)
    try:
        cures.install(apply(Recipe(), job["settings"]))
        run(job["command"])
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    with open(f"{folder}/record", "w") as file:
        json.dump({"applied": dict(cures.applied()), "left": dict(cures.left())}, file)
    os._exit(code)


if __name__ == "__main__":
    _serve()
