"""Runs Python scripts in forks of processes that have loaded torch, which takes seconds each time.

For tests of what a script trains, not of how a process starts. As a program it takes a line of
JSON for each script and answers with two: the process id and, at its end, the exit code.
"""

import atexit
import importlib
import json
import multiprocessing.process
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from functools import cached_property
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType

TORCH = ("numpy", "torch", "torch._dynamo", "torch.utils.data")
TRAINING = (*TORCH, "torchmetrics", "flatout.train.trainer", "flatout.train.loop")
_processes = []
_taking = threading.Lock()


def start(command, folder, environment, loaded=TRAINING):
    """A script begins, beside others that were started: each has its own hash seed.

    Args:
        command: a script's path, -m and a module's name, or -c and code, and the arguments.
        folder: where it runs.
        environment: all of its variables.
        loaded: modules that it finds loaded.
    """
    return Script(_taken(loaded), list(map(str, command)), folder, environment)


def _taken(loaded):
    """A process for one script; threads may start scripts at the same time."""
    with _taking:
        process = next((one for one in _processes if one.is_free and one.loaded == loaded), None)
        if process is None:
            process = _Process(loaded)
            _processes.append(process)
        process.is_free = False
        return process


def run(command, folder, environment, loaded=TRAINING, timeout=120):
    """A script from its beginning to its end: what `subprocess.run` gives."""
    script = start(command, folder, environment, loaded)
    try:
        out, error = script.communicate(timeout)
    finally:
        script.kill()
    return subprocess.CompletedProcess(script.args, script.returncode, out, error)


class Script:
    """A script that was started, with what tests use of `subprocess.Popen`."""

    def __init__(self, process, command, folder, environment):
        self.args, self.returncode = command, None
        self._process = process
        self._output = Path(tempfile.mkdtemp())
        process.write(
            {
                "command": command,
                "folder": str(folder),
                "environment": dict(environment),
                "output": str(self._output),
            }
        )

    @cached_property
    def pid(self):
        number = self._process.read(None)
        assert number > 0, number  # a signal to 0 would reach the processes of all tests
        return number

    def wait(self, timeout=None):
        if self.returncode is None and self.pid:
            self.returncode = self._process.read(timeout)
            if self.returncode is None:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self._process.is_free = True
        return self.returncode

    def communicate(self, timeout=None):
        """What it printed to stdout and to stderr."""
        self.wait(timeout)
        said = tuple((self._output / name).read_text() for name in ("out", "err"))
        shutil.rmtree(self._output)
        return said

    def kill(self):
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait()
            shutil.rmtree(self._output)


class _Process:
    """A process that forks for one script at a time."""

    def __init__(self, loaded):
        self.loaded, self.is_free, self._owner = loaded, True, os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, __file__, *loaded],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        atexit.register(self.end)

    def write(self, job):
        self._process.stdin.write(json.dumps(job).encode() + b"\n")

    def read(self, timeout):
        """A number, or None if the time is over."""
        if not wait([self._process.stdout], timeout):
            return None
        return int(self._process.stdout.readline())

    def end(self):
        if os.getpid() != self._owner:
            return
        # A process that a test forked may hold this pipe as well: closing it ends nothing.
        if self.is_free:
            self.write(None)
        else:
            self._process.kill()
        self._process.wait(timeout=60)


def _serve(loaded):
    for name in loaded:
        importlib.import_module(name)
    while job := json.loads(sys.stdin.readline() or "null"):
        child = os.fork()
        if child == 0:
            _become(**job)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    os._exit(0)  # tidying up all that torch has loaded takes seconds


def _become(command, folder, environment, output):
    import numpy as np
    import torch

    files = [
        os.open(os.devnull, os.O_RDONLY),
        *(os.open(f"{output}/{name}", os.O_CREAT | os.O_WRONLY) for name in ("out", "err")),
    ]
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    # What is read when Python, NumPy or OpenMP is loaded.
    multiprocessing.process.ORIGINAL_DIR = folder
    np.random.seed()
    if "OMP_NUM_THREADS" in environment:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    code = _run(command)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(command):
    what = command[0]
    sys.path[0] = os.getcwd() if what in ("-m", "-c") else str(Path(what).resolve().parent)
    try:
        if what == "-m":
            sys.argv = command[1:]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        elif what == "-c":
            sys.argv = ["-c", *command[2:]]
            _execute(compile(command[1], "<string>", "exec"))
        else:
            sys.argv = command
            path = os.path.abspath(what)
            _execute(compile(Path(path).read_bytes(), path, "exec"), __file__=path)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _execute(code, **names):
    main = ModuleType("__main__")
    vars(main).update(names)
    sys.modules["__main__"] = main
    exec(code, vars(main))


if __name__ == "__main__":
    _serve(tuple(sys.argv[1:]))
