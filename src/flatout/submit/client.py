"""Asking a cluster's own command-line client."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flatout.errors import SubmitError

# How long one answer may take, and the pauses between tries, in seconds.
_PATIENCE_S = 60.0
_PAUSE_S = 1.0


@dataclass(frozen=True)
class Answer:
    """What a client said.

    Attributes:
        code: with which it ended; None if it did not in time, and was ended.
        output: what it printed.
        errors: what it printed on stderr.
    """

    code: int | None
    output: str
    errors: str

    @property
    def last_words(self) -> str:
        """The last line that says something, without the client's name."""
        lines = [line for line in (self.errors or self.output).splitlines() if line.strip()]
        if not lines:
            return "it said nothing" if self.code is not None else "it took too long"
        _, _, message = lines[-1].rpartition("error: ")
        return message.strip()


def require_program(name: str, package: str) -> str:
    """Where a client is."""
    path = shutil.which(name)
    if path is None:
        raise SubmitError(
            f"{name} is not installed here",
            do=f"install {package}, or go to a machine that has it: --dry-run needs none",
        )
    return path


def ask(
    command: Sequence[str],
    *,
    patience_s: float = _PATIENCE_S,
    tries: int = 1,
    again: Callable[[Answer], bool] = lambda answer: answer.code is None,
    stdin: bytes | None = None,
) -> Answer:
    """Run a client and take its answer."""
    for left in reversed(range(tries)):
        answer = _once(command, patience_s, stdin)
        if not left or not again(answer):
            break
        time.sleep(_PAUSE_S * (tries - left))
    return answer


def _once(command: Sequence[str], patience_s: float, stdin: bytes | None) -> Answer:
    try:
        done = subprocess.run(
            command,
            input=b"" if stdin is None else stdin,
            capture_output=True,
            timeout=patience_s,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        return Answer(None, _text(late.stdout), _text(late.stderr))
    except OSError as error:
        return Answer(127, "", f"{command[0]}: {error.strerror}")
    return Answer(done.returncode, _text(done.stdout), _text(done.stderr))


def _text(data: bytes | None) -> str:
    return (data or b"").decode(errors="replace")
