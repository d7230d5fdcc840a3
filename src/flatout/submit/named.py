"""Files that the code of a job names in its texts and that are not sent with the job."""

from __future__ import annotations

import ast
import os
from contextlib import suppress
from pathlib import Path

from flatout.submit.job import Job

_LONGEST, _MOST = 200, 20


def named_in_code(job: Job) -> list[tuple[str, str]]:
    """Return files below the code's folder that a text in the code names and that are not sent.

    Args:
        job: with its code and inputs.

    Returns:
        Pairs of the named file and the code file that names it.
    """
    known = [Path(os.path.realpath(item.path)) for item in job.inputs if not item.is_url]
    found: dict[str, str] = {}
    for code in (name for name in job.code.files if name.endswith(".py")):
        with suppress(OSError, ValueError, SyntaxError, RecursionError):
            tree = ast.parse((job.root / code).read_bytes())
            for node in ast.walk(tree):
                text = node.value if isinstance(node, ast.Constant) else None
                if isinstance(text, str) and _stays_here(text, job, known):
                    found.setdefault(text, code)
    return list(found.items())[:_MOST]


def _stays_here(text: str, job: Job, known: list[Path]) -> bool:
    if not 0 < len(text) <= _LONGEST or "\0" in text or "\n" in text:
        return False
    path = job.root / text
    if not os.path.isfile(path):
        return False
    inside = os.path.relpath(path, job.root)
    is_input = any(Path(os.path.realpath(path)).is_relative_to(item) for item in known)
    return not (inside.startswith("..") or inside in job.code.files or is_input)
