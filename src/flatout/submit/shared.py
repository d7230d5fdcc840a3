"""What nodes would not find, where they see only what this machine has mounted from a network."""

from __future__ import annotations

from flatout.submit.inputs import is_seen, mount_of
from flatout.submit.job import Job


def unseen(job: Job) -> list[str]:
    """Data, the job's folder and its checkpoints on file systems of this machine alone."""
    found = [
        f"{one.words}; put it on a shared path, or say --shared PATH if nodes see it"
        for one in job.inputs
        if one.is_missing
    ]
    places = [("the job's folder", str(job.folder), "--folder")]
    if job.is_command:
        places.append(("the current folder", str(job.root), "cd"))
    if job.checkpoint is not None and "://" not in job.checkpoint:
        places.append(("the run folder", job.checkpoint, "--checkpoints"))
    for what, path, option in places:
        if not is_seen(path, job.shared):
            found.append(
                f"{what} {path} lies on {mount_of(path)}: no node sees it; choose a shared "
                f"one with {option}, or say --shared PATH if nodes see it"
            )
    return found
