"""Commands for bash, with arguments of any text."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from flatout.console import printable
from flatout.errors import SubmitError
from flatout.measure import SUBMITTED
from flatout.submit.code import ARCHIVE
from flatout.submit.inputs import is_seen
from flatout.submit.job import SEED, Job

_WIDTH = 100
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONTROL = re.compile(r"[\x01-\x1f\x7f]")
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
REMAINING = "FLATOUT_REMAINING"
"""The variable for the file in which the first rank reports its remaining time."""
SECRET = (
    "# Only nodes that know it take part in the job. Made here, so that no file holds it.",
    "FLATOUT_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')",
    "export FLATOUT_SECRET",
)
"""Lines that make the shared secret of a job's nodes."""


def quoted(text: str, seed: str = "") -> str:
    if "\0" in text:
        raise SubmitError(f"an argument of a program cannot hold a NUL character; found {text!r}")
    if not seed or SEED not in text:
        return _in_one_line(text)
    parts = [_in_one_line(part) if part else "" for part in text.split(SEED)]
    return f'"{seed}"'.join(parts)


def _in_one_line(text: str) -> str:
    if not _CONTROL.search(text):
        return shlex.quote(text)
    plain = text.replace("\\", "\\\\").replace("'", "\\'")
    escaped = _CONTROL.sub(lambda value: _SHORT.get(value[0]) or f"\\{ord(value[0]):03o}", plain)
    return f"$'{escaped}'"


def comment(text: str) -> str:
    return f"# {' '.join(printable(text).split())}"


def words(command: Sequence[str], seed: str = "") -> list[str]:
    return [quoted(item, seed) for item in command]


def array(name: str, words: Sequence[str]) -> list[str]:
    lines, line = [f"{name}=("], "  "
    for word in words:
        if line.strip() and len(line) + len(word) > _WIDTH:
            lines.append(line.rstrip())
            line = "  "
        line += f"{word} "
    return [*lines, line.rstrip(), ")"]


def exports(variables: Mapping[str, str]) -> list[str]:
    if wrong := [name for name in variables if not VARIABLE.fullmatch(name)]:
        raise SubmitError(f"expected the name of a variable, found {wrong[0]!r}")
    return [f"export {name}={quoted(value)}" for name, value in variables.items()]


def environment(job: Job) -> list[str]:
    """Return lines that let a node find this flatout, and that set the user's variables."""
    bin = job.options.get("bin") or str(Path(sys.executable).parent)
    return [
        "# The flatout that has written this; name another where nodes have it elsewhere.",
        f"export PATH={quoted(bin)}:$PATH",
        "# By this flatout top finds the ranks of this job.",
        f"export {SUBMITTED}=$(cat key 2> /dev/null)",
        *exports(job.environment),
    ]


def unpacking(job: Job) -> list[str]:
    """Return lines that unpack the code into the folder `code`, once, and go there.

    A command of Flatout's own brings no code, and runs in the current folder if nodes see it.
    """
    if job.is_command and is_seen(job.root, job.shared):
        return [f"cd -- {quoted(str(job.root))} || exit 1"]
    lines = [
        "# The code as it was when this was written. A job that starts again finds it in place.",
        "if [[ ! -e code ]]; then",
        "  unpacked=$(mktemp -d code.XXXXXX)",
        f'  tar -xzf {ARCHIVE} -C "$unpacked" && mv -nT "$unpacked" code',
        "fi",
        "cd code || exit 1",
    ]
    links = [link for item in job.inputs for link in item.links(job.root)]
    if links:
        lines.append("# Data that are not copied.")
    for path, link in links:
        if "/" in link:
            lines.append(f"mkdir -p -- {quoted(str(Path(link).parent))}")
        lines.append(f"ln -sfnT -- {quoted(path)} {quoted(link)}")
    return lines


def limited(job: Job) -> list[str]:
    if job.time_s is None:
        return []
    ahead = job.time_s - job.stop_ahead_s
    stop = ["--signal=USR1", f"--kill-after={job.stop_ahead_s}"]
    return ["timeout", "--preserve-status", *stop, str(ahead)]
