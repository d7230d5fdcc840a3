"""What nodes would not find, where they see only what this machine has mounted from a network."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from flatout.errors import SubmitError
from flatout.submit.client import ask
from flatout.submit.inputs import is_seen, mount_of
from flatout.submit.job import Job
from flatout.submit.sending import facts_in

# Which node this is: srun's word for it, Open MPI's and MPICH's.
_NODE = "${SLURM_NODEID:-${OMPI_COMM_WORLD_RANK:-$PMI_RANK}}"


def unseen(job: Job) -> list[str]:
    """Data, the job's folder and its checkpoints on file systems of this machine alone."""
    result = [
        f"{item.words}; put it on a shared path, or say --shared PATH if nodes see it"
        for item in job.inputs
        if item.is_missing
    ]
    places = [("the job's folder", str(job.folder), "--folder")]
    if job.is_command:
        places.append(("the current folder", str(job.root), "cd"))
    if job.checkpoint is not None and "://" not in job.checkpoint:
        places.append(("the run folder", job.checkpoint, "--checkpoints"))
    for what, path, option in places:
        if not is_seen(path, job.shared):
            result.append(
                f"{what} {path} lies on {mount_of(path)}: no node sees it; choose a shared "
                f"one with {option}, or say --shared PATH if nodes see it"
            )
        elif option == "--checkpoints" and (denied := _not_writable(path)):
            result.append(f"{what} {path}: you may not write into {denied}")
    return result


def _not_writable(path: str) -> str:
    for folder in (path, os.path.dirname(path)):
        if os.path.exists(folder):
            return "" if os.path.isdir(folder) and os.access(folder, os.W_OK) else folder
    return ""


def told_by_nodes(
    folder: Path, command: Sequence[str], launcher: Callable[[int], list[str]]
) -> list[str]:
    """What a command prints on each node of a running job.

    It goes through files in the job's folder: lines of several nodes would come mixed.
    """
    nodes = facts_in(folder)["nodes"]
    with tempfile.TemporaryDirectory(prefix=".told-", dir=folder) as reports:
        script = f'exec "$@" > {shlex.quote(reports)}/"{_NODE}"'
        answer = ask([*launcher(nodes), "sh", "-c", script, "sh", *command])
        if answer.code != 0:
            raise SubmitError(f"its nodes do not answer: {answer.last_words}", where=str(folder))
        return [(Path(reports) / str(node)).read_text() for node in range(nodes)]
