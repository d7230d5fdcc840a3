"""Writes a job into its folder, and sends it once."""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flatout.errors import SubmitError
from flatout.masked import masked
from flatout.recipe import dumps
from flatout.submit.code import ARCHIVE
from flatout.submit.job import Job
from flatout.submit.ledger import REFUSED, SENDING, SENT, Entry, Ledger
from flatout.submit.target import Artifact, NotSent, SentJob, Target, UnknownOutcome

RECIPE = "recipe.toml"
FACTS = "job.json"
KEY = "key"
# Seconds for which Flatout searches a job that the cluster may have.
_LOOK_FOR_S = 20.0


def artifacts_of(job: Job, target: Target) -> list[Artifact]:
    """Return all texts of a job's folder: the target's own, the Recipe, and the job's facts."""
    own = target.artifacts(job)
    recipe = [] if job.recipe is None else [Artifact(RECIPE, dumps(job.recipe))]
    facts = json.dumps(facts_of(job, target), indent=2) + "\n"
    return [*own, *recipe, Artifact(FACTS, facts)]


def runs_of(job: Job, target: Target) -> list[Job]:
    """Return the jobs to send: the job itself, or one for each seed if the target needs that."""
    if job.seeds and not target.takes_seeds:
        return [job.of_seed(seed) for seed in job.seeds]
    return [job]


def facts_of(job: Job, target: Target) -> dict[str, Any]:
    """Return a job as plain data."""
    return {
        "target": target.name,
        "name": job.name,
        "command": masked(job.command),
        "root": str(job.root),
        "nodes": job.nodes,
        "devices": "auto" if job.is_auto else job.devices,
        "servers": job.servers,
        "threads": job.threads,
        "gpus": job.gpus,
        "time_s": job.time_s,
        "stop_ahead_s": job.stop_ahead_s,
        "recipe_fingerprint": job.fingerprint,
        "environment": dict(job.environment),
        "inputs": [{"path": item.path, "seen": not item.is_missing} for item in job.inputs],
        "checkpoint": job.checkpoint,
        "seeds": list(job.seeds),
        "retries": job.retries,
        "price": None if job.price is None else asdict(job.price),
        "options": dict(job.options),
        "files": list(job.code.files),
    }


def facts_in(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / FACTS).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise SubmitError(
            f"the job's folder is not as it was: {error}", where=str(folder)
        ) from error


def top_words(folder: Path, key: str) -> list[str]:
    """Return the command that shows a job's ranks on one of its nodes, as JSON."""
    facts = facts_in(folder)
    bin = facts["options"].get("bin") or str(Path(sys.executable).parent)
    # FLATOUT_CACHE may be one of them: ranks write their lanes below it.
    variables = [f"{name}={value}" for name, value in facts["environment"].items()]
    return ["env", *variables, f"{bin}/flatout", "top", "--json", key]


def write(job: Job, target: Target) -> list[Artifact]:
    """Write a job's folder; return the files other than the code.

    Raises:
        SubmitError: the target cannot take the job, or the folder cannot be written.
    """
    artifacts = artifacts_of(job, target)
    folder = job.folder
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise SubmitError(
            f"the job's folder cannot be made: {error.strerror}",
            where=str(folder),
            do="choose another with --folder, or another name with --name",
        ) from error
    try:
        job.code.write(job.root, folder / ARCHIVE)
        for artifact in artifacts:
            artifact.write(folder)
    except OSError as error:
        raise SubmitError(f"cannot write: {error.strerror}", where=str(folder)) from error
    return artifacts


def send_once(job: Job, target: Target, ledger: Ledger, wait_s: float = _LOOK_FOR_S) -> SentJob:
    """Send a job once; if no answer comes, search for the job and never send it again.

    Raises:
        NotSent: the cluster did not take it.
        UnknownOutcome: the cluster may have it.
    """
    entry = Entry(
        key=uuid.uuid4().hex[:16],
        target=target.name,
        name=job.name,
        folder=os.fspath(job.folder),
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        nodes=job.nodes,
        price=None if job.price is None else job.price.per_hour,
        currency="" if job.price is None else job.price.currency,
    )
    ledger.write(entry)
    Artifact(KEY, entry.key).write(job.folder)
    try:
        sent = target.send(job, entry.key)
    except NotSent:
        ledger.write(replace(entry, status=REFUSED))
        raise
    except UnknownOutcome as error:
        result, why = _look_for(lambda: target.find(entry.key, job.folder), wait_s)
        if result is None:
            raise UnknownOutcome(
                f"{error.what}; asked for the job, {why}",
                where=error.where,
                do="flatout jobs looks for it again; send another only when it stays unknown",
            ) from error
        sent = result
    ledger.write(replace(entry, status=SENT, id=sent.id))
    return sent


def send_all(jobs: Sequence[Job], target: Target, ledger: Ledger) -> list[SentJob]:
    """Send several jobs, each once, until one is not taken.

    Raises:
        NotSent, UnknownOutcome: of one job; the message names the jobs that were sent and run.
    """
    sent: list[SentJob] = []
    for job in jobs:
        try:
            sent.append(send_once(job, target, ledger))
        except (NotSent, UnknownOutcome) as error:
            if not sent:
                raise
            ids = ", ".join(item.id for item in sent)
            words = f"{job.name}: {error.what}; sent were {ids}, and no more after this one"
            raise type(error)(words, where=error.where, do=error.do) from error
    return sent


def settle(entry: Entry, target: Target, ledger: Ledger) -> Entry:
    """Ask the cluster for a job that was sent without an answer; return its new entry."""
    if entry.status != SENDING:
        return entry
    sent = target.find(entry.key, Path(entry.folder))
    if sent is None:
        return entry
    entry = replace(entry, status=SENT, id=sent.id)
    ledger.write(entry)
    return entry


def _look_for(look: Callable[[], SentJob | None], wait_s: float) -> tuple[SentJob | None, str]:
    until = time.monotonic() + wait_s
    pause = 0.2
    while True:
        result, why = None, "the cluster does not know it by now"
        try:
            result = look()
        except SubmitError as error:
            why = error.what
        if result is not None or time.monotonic() > until:
            return result, why
        time.sleep(pause)
        pause = min(2 * pause, 5.0)
