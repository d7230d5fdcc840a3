"""A cluster's own client: a program or a package, and the output of several processes at once."""

from __future__ import annotations

import queue
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from flatout.errors import SubmitError

# Seconds that one answer may take, and seconds between tries.
_PATIENCE_S = 60.0
_PAUSE_S = 1.0


@dataclass(frozen=True)
class Answer:
    """A client's answer."""

    code: int | None
    output: str
    errors: str

    @property
    def last_words(self) -> str:
        lines = [line for line in (self.errors or self.output).splitlines() if line.strip()]
        if not lines:
            return "it said nothing" if self.code is not None else "it took too long"
        _, _, message = lines[-1].rpartition("error: ")
        return message.strip()


def require(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{module}.".startswith(f"{error.name}."):
            raise
        raise SubmitError(
            f"{module.partition('.')[0]} is not installed here",
            do=f"pip install 'flatout[{extra}]'",
        ) from error


def require_program(name: str, package: str) -> None:
    if shutil.which(name) is None:
        raise SubmitError(
            f"{name} is not installed here",
            do=f"install {package}, or go to a machine that has it: --dry-run needs none",
        )


def ask(
    command: Sequence[str],
    *,
    tries: int = 1,
    again: Callable[[Answer], bool] = lambda answer: answer.code is None,
    stdin: bytes = b"",
) -> Answer:
    for left in reversed(range(tries)):
        answer = _once(command, stdin)
        if not left or not again(answer):
            break
        time.sleep(_PAUSE_S * (tries - left))
    return answer


def _once(command: Sequence[str], stdin: bytes) -> Answer:
    try:
        done = subprocess.run(
            command, input=stdin, capture_output=True, timeout=_PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired as late:
        return Answer(None, _text(late.stdout), _text(late.stderr))
    except OSError as error:
        return Answer(127, "", f"{command[0]}: {error.strerror}")
    return Answer(done.returncode, _text(done.stdout), _text(done.stderr))


def _text(data: bytes | None) -> str:
    return (data or b"").decode(errors="replace")


def merged(streams: Sequence[Iterator[str]]) -> Iterator[str]:
    """Yield the lines of several streams as they come."""
    lines: queue.SimpleQueue[str | SubmitError | None] = queue.SimpleQueue()

    def read(stream: Iterator[str]) -> None:
        try:
            for line in stream:
                lines.put(line)
        except SubmitError as error:
            lines.put(error)
        finally:
            lines.put(None)

    for stream in streams:
        threading.Thread(target=read, args=(stream,), daemon=True).start()
    left = len(streams)
    while left:
        line = lines.get()
        if line is None:
            left -= 1
        elif isinstance(line, SubmitError):
            raise line
        else:
            yield line
