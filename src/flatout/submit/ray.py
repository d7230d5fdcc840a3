"""Ray: jobs through the cluster's job server."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flatout.console import colorless
from flatout.errors import SubmitError
from flatout.measure import SUBMITTED
from flatout.submit.client import require
from flatout.submit.inputs import is_seen, mount_of
from flatout.submit.job import Job
from flatout.submit.ray_driver import driver, remaining
from flatout.submit.send import facts_in
from flatout.submit.target import (
    Artifact,
    JobState,
    NotSent,
    SentJob,
    State,
    UnknownOutcome,
    options_of,
    refuse,
)
from flatout.words import clock

DRIVER, SUBMIT = "driver.py", "submit.sh"
_KEY = "flatout_key"
_OPTIONS = ("address", "storage", "python")
_ADDRESS = "http://127.0.0.1:8265"
_TRIES = 3  # tries of a request that changes nothing
# No line of a rank is taken for another rank's, and stdout comes at once.
_VARIABLES = {"RAY_DEDUP_LOGS": "0", "PYTHONUNBUFFERED": "1"}

_BY_STATUS = {
    "PENDING": State.queued,
    "RUNNING": State.running,
    "STOPPED": State.canceled,
    "SUCCEEDED": State.succeeded,
    "FAILED": State.failed,
}
# Plain words for Ray's messages, which are tracebacks or name its actors.
_FAILURES = {
    "RUNTIME_ENV_SETUP_FAILURE": "a node could not lay out the job's folder",
    "JOB_SUPERVISOR_ACTOR_START_TIMEOUT": "no node had room for its driver in time",
    "JOB_SUPERVISOR_ACTOR_START_FAILURE": "its driver was not started",
    "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE": "no node may run its driver",
    "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE": "the cluster lost it",
    "JOB_SUPERVISOR_ACTOR_DIED": "the node that ran its driver is gone",
    "JOB_ENTRYPOINT_COMMAND_START_ERROR": "its driver was not started",
    "JOB_ENTRYPOINT_COMMAND_ERROR": "its driver ended with exit code {code}",
}
_MOST_WORDS = 160


class Ray:
    """Sends jobs to a Ray cluster, on whose nodes Flatout is installed."""

    name = "ray"
    takes_seeds = False

    def __init__(self, patience_s: tuple[float, float] = (5, 30), ask_every_s: float = 1.0) -> None:
        self._patience_s, self._ask_every_s = patience_s, ask_every_s

    def _cluster(self, options: Any) -> _Cluster:
        return _Cluster(options, self._patience_s, self._ask_every_s)

    def artifacts(self, job: Job) -> list[Artifact]:
        options = options_of(job, _OPTIONS)
        refuse(_problems(job), where="flatout submit ray")
        compile(text := driver(job, _storage(job)), DRIVER, "exec")
        return [
            Artifact(DRIVER, text, 0o755),
            Artifact(SUBMIT, _by_hand(job, options), 0o755),
        ]

    def unseen(self, job: Job) -> list[str]:
        result = [
            f"{item.words}; put it on a shared path, or say --shared PATH if nodes see it"
            for item in job.inputs
            if item.is_missing
        ]
        for what, path in (("--checkpoints", job.checkpoint), ("storage", _storage(job))):
            if path and "://" not in path and job.nodes > 1 and not is_seen(path, job.shared):
                result.append(
                    f"{what}, {path}, lies on {mount_of(path)}: no node sees it; choose a shared "
                    "path, or say --shared PATH if nodes see it"
                )
        return result

    def check(self, job: Job) -> list[str]:
        cluster = self._cluster(job.options)
        with cluster.answered():
            names = [job.submission_id for job in cluster.client.list_jobs()]
        return [f"there is a job {job.name} already: choose another --name"] * (job.name in names)

    def send(self, job: Job, key: str) -> SentJob:
        try:
            cluster = self._cluster(job.options)
        except SubmitError as error:
            raise NotSent(error.what, where=error.where, do=error.do) from error
        try:
            id = cluster.client.submit_job(
                entrypoint=_entrypoint(job.options),
                submission_id=job.name,
                runtime_env={
                    "working_dir": str(job.folder),
                    "env_vars": {**_VARIABLES, SUBMITTED: key},
                },
                metadata={_KEY: key},
            )
        except (RuntimeError, ValueError, OSError) as error:
            if cluster.client.is_unanswered:
                raise UnknownOutcome(f"the job server did not answer: {_message(error)}") from error
            raise NotSent(f"Ray did not take the job: {_message(error)}") from error
        return SentJob(str(id), f"(ray job status {id})")

    def find(self, key: str, folder: Path) -> SentJob | None:
        cluster = self._cluster(facts_in(folder)["options"])
        with cluster.answered():
            for job in cluster.client.list_jobs():
                if (job.metadata or {}).get(_KEY) == key:
                    return SentJob(job.submission_id)
        return None

    def state(self, id: str, folder: Path) -> JobState:
        cluster = self._cluster(facts_in(folder)["options"])
        with cluster.answered():
            jobs = {job.submission_id: job for job in cluster.client.list_jobs()}
        if id not in jobs:
            return JobState(State.lost, "the cluster was started again since")
        details = jobs[id]
        status = _status(details)
        end = details.end_time or time.time() * 1000
        left_s = _left_s(folder)
        return JobState(
            _BY_STATUS.get(status, State.lost),
            _words(status, details),
            exit_code=details.driver_exit_code,
            since_s=None if details.start_time is None else (end - details.start_time) / 1000,
            left_s=left_s,
            eta="" if left_s is None else clock(left_s),
        )

    def logs(self, id: str, folder: Path, *, follow: bool) -> Iterator[str]:
        cluster, at = self._cluster(facts_in(folder)["options"]), 0
        while True:
            # Asked before reading, so that the last output is read.
            goes_on = follow and not self.state(id, folder).state.is_final
            with cluster.answered():
                text = cluster.client.get_job_logs(id)
            yield text[at:]
            at = len(text)
            if not goes_on:
                return
            time.sleep(self._ask_every_s)

    def top(self, id: str, folder: Path, key: str) -> list[str]:
        raise SubmitError(
            "the nodes of a Ray cluster cannot be entered", where=id, do=f"flatout logs {id} -f"
        )

    def cancel(self, id: str, folder: Path) -> None:
        cluster = self._cluster(facts_in(folder)["options"])
        with cluster.answered():
            cluster.client.stop_job(id)


TARGET = Ray()


class _Cluster:
    """The client of the job server."""

    def __init__(self, options: Any, patience_s: tuple[float, float], ask_every_s: float) -> None:
        given = os.environ.get("RAY_API_SERVER_ADDRESS") or _ADDRESS
        self._address = options.get("address") or given
        try:
            self.client = _client(self._address, patience_s, ask_every_s)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise self._unreached(error) from error

    @contextmanager
    def answered(self) -> Iterator[None]:
        try:
            yield
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise self._unreached(error) from error

    def _unreached(self, error: BaseException) -> SubmitError:
        return SubmitError(
            f"Ray's job server does not answer: {_message(error)}",
            where=self._address,
            do="see that `ray status` answers there, or name it: --option address=http://HEAD:8265",
        )


def _client(address: str, patience_s: tuple[float, float], ask_every_s: float) -> Any:
    submission, http = require("ray.job_submission", "ray"), require("requests", "ray").exceptions

    class Client(submission.JobSubmissionClient):  # type: ignore[misc, name-defined]
        is_unanswered = False  # whether the server may have done what it was last asked to do

        def _do_request(self, method: str, endpoint: str, **given: Any) -> Any:
            does = method == "POST"  # requests that change nothing are repeated
            self.is_unanswered = does
            for left in reversed(range(1 if does else _TRIES)):
                try:
                    answer = super()._do_request(method, endpoint, timeout=patience_s, **given)
                except (http.ConnectionError, http.Timeout):
                    if not left:
                        raise
                    time.sleep(ask_every_s)
                else:
                    self.is_unanswered = does and answer.status_code >= 500
                    return answer
            raise AssertionError("the last try returns or raises")

    return Client(address)


def _status(details: Any) -> str:
    return str(getattr(details.status, "value", details.status))


def _words(status: str, details: Any) -> str:
    if status == "PENDING":
        return "PENDING (waits for room on a node)"
    if status != "FAILED":
        return status
    error = getattr(details.error_type, "value", details.error_type)
    why = _FAILURES.get(str(error), "").format(code=details.driver_exit_code)
    last = _shortened(details.message or "")
    words = ": ".join(filter(None, (why, last)))
    return f"{status} ({words})" if words else status


def _problems(job: Job) -> list[str]:
    problems = []
    if job.is_auto and not job.has_measured_threads:
        problems.append("--devices auto takes the CPUs of a node: say how many with --threads N")
    if job.is_command and job.nodes > 1:
        problems.append("each node would do the same: a command of Flatout's own wants --nodes 1")
    if job.nodes > 1 and _storage(job) is None:
        problems.append(
            "Ray wants a folder that all nodes see for what it notes of the run: --checkpoints "
            "FOLDER, or --option storage=FOLDER"
        )
    return problems


def _storage(job: Job) -> str | None:
    given = job.options.get("storage")
    if given is None and job.checkpoint is not None:
        return f"{job.checkpoint.rstrip('/')}-ray"
    return given


def _entrypoint(options: Any) -> str:
    return f"{_python(options)} {DRIVER}"


def _python(options: Any) -> str:
    return shlex.quote(options.get("python", "python"))


def _by_hand(job: Job, options: Any) -> str:
    environment = json.dumps({"env_vars": _VARIABLES})
    lines = [
        "#!/bin/sh",
        "# Sends the job by hand, as flatout submit ray does.",
        'cd "$(dirname "$0")" || exit 1',
        "exec ray job submit \\",
        f"  --address {shlex.quote(options.get('address') or _ADDRESS)} \\",
        f"  --submission-id {job.name} \\",
        f"  --working-dir . --runtime-env-json {shlex.quote(environment)} \\",
        f"  -- {_entrypoint(options)}",
    ]
    return "\n".join(lines) + "\n"


def _left_s(folder: Path) -> float | None:
    try:
        where = facts_in(folder)["checkpoint"]
        left_s = json.loads(Path(remaining(where)).read_text())["remaining_s"]
    except (SubmitError, OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return None if left_s is None else float(left_s)


def _message(error: BaseException) -> str:
    return _last_line(str(error)) or type(error).__name__


def _shortened(text: str) -> str:
    last = colorless(_last_line(text))
    return last if len(last) <= _MOST_WORDS else f"{last[: _MOST_WORDS - 1]}…"


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""
