"""Files on file systems that all nodes and this machine see."""

from __future__ import annotations

import codecs
import os
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from flatout.errors import SubmitError
from flatout.submit.client import ask
from flatout.submit.inputs import is_seen, mount_of
from flatout.submit.job import Job
from flatout.submit.send import facts_in

# The number of a node by srun, Open MPI or MPICH.
_NODE = "${SLURM_NODEID:-${OMPI_COMM_WORLD_RANK:-$PMI_RANK}}"

_READ_EVERY_S = 0.5
_PIECE = 1 << 16


def unseen(job: Job) -> list[str]:
    """Return the data, folder and checkpoints of a job that are only on this machine."""
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


def output_of_nodes(
    folder: Path, command: Sequence[str], launcher: Callable[[int], list[str]]
) -> list[str]:
    """Return a command's output on each node of a running job.

    It goes through files in the job's folder, so that lines of several nodes are not mixed.
    """
    nodes = facts_in(folder)["nodes"]
    with tempfile.TemporaryDirectory(prefix=".told-", dir=folder) as folder_of_output:
        script = f'exec "$@" > {shlex.quote(folder_of_output)}/"{_NODE}"'
        answer = ask([*launcher(nodes), "sh", "-c", script, "sh", *command])
        if answer.code != 0:
            raise SubmitError(f"its nodes do not answer: {answer.last_words}", where=str(folder))
        return [(Path(folder_of_output) / str(node)).read_text() for node in range(nodes)]


def follow_file(path: Path, goes_on: Callable[[], bool]) -> Iterator[str]:
    """Yield the text of a file, and text that is added while `goes_on` returns True."""
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    at, more = 0, True
    while more:
        # Asked before reading, so that the last output is read.
        more = goes_on()
        try:
            with path.open("rb") as file:
                file.seek(at)
                while piece := file.read(_PIECE):
                    at += len(piece)
                    yield decode(piece)
        except FileNotFoundError:
            if not more:
                raise SubmitError("the job has printed nothing", where=str(path)) from None
        if more:
            time.sleep(_READ_EVERY_S)
