"""Commands as a POSIX shell reads them, whatever their arguments hold."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from flatout.errors import SubmitError
from flatout.submit.job import SEED

_WIDTH = 100


def quoted(text: str, seed: str = "") -> str:
    """One word of a shell.

    Args:
        text: what the word is; a NUL cannot be in it.
        seed: the shell's own words for the seed, such as "$SLURM_ARRAY_TASK_ID", put where
            `{seed}` stands; "" where the job has no seeds.

    Raises:
        SubmitError: no process can be given it.
    """
    if "\0" in text:
        raise SubmitError(f"no program can be given a NUL in an argument; found {text!r}")
    if not seed or SEED not in text:
        return shlex.quote(text)
    parts = [shlex.quote(part) if part else "" for part in text.split(SEED)]
    return f'"{seed}"'.join(parts)


def words(command: Sequence[str], seed: str = "") -> list[str]:
    """Each word of a command, quoted."""
    return [quoted(one, seed) for one in command]


def array(name: str, command: Sequence[str], seed: str = "") -> list[str]:
    """Lines of bash that put a command into an array, as few as are readable."""
    lines, line = [f"{name}=("], "  "
    for word in words(command, seed):
        if line.strip() and len(line) + len(word) > _WIDTH:
            lines.append(line.rstrip())
            line = "  "
        line += f"{word} "
    return [*lines, line.rstrip(), ")"]


def exports(variables: Mapping[str, str]) -> list[str]:
    """Lines that set environment variables."""
    return [f"export {name}={quoted(value)}" for name, value in variables.items()]
