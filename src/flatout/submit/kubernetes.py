"""Kubernetes: TrainJobs of Kubeflow Trainer, through the official client."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flatout.errors import SubmitError
from flatout.submit.client import ask, merged, require
from flatout.submit.job import Job
from flatout.submit.kubernetes_manifests import (
    EXTRA,
    KEY,
    SECRET,
    Manifest,
    add_key,
    manifests,
    unseen,
    volumes_of,
    yaml_of,
)
from flatout.submit.send import facts_in
from flatout.submit.target import Artifact, JobState, NotSent, SentJob, State, UnknownOutcome
from flatout.words import clock

FILE = "job.yaml"
# The mark of a job that was canceled from here: Kubernetes forgets deleted jobs.
_CANCELED = "canceled"
# Seconds to connect, and until an answer comes.
_PATIENCE_S = (5, 30)
_NOT_FOUND, _CONFLICT = 404, 409
# From this status on the server may have done the request.
_BROKEN = 500
# Maximum number of pods that are asked at once.
_MOST_AT_ONCE = 16
_GROUP, _VERSION, _PLURAL = "trainer.kubeflow.org", "v1alpha1", "trainjobs"
# The label of a TrainJob's pods with the job's name, and the container of the script.
_POD_LABEL, _CONTAINER = "jobset.sigs.k8s.io/jobset-name", "node"


class _Kubernetes:
    """Sends jobs to the cluster and namespace of kubectl's context; an id is NAMESPACE/NAME."""

    name = "kubernetes"
    takes_seeds = False

    def artifacts(self, job: Job) -> list[Artifact]:
        made = manifests(job)
        head = f"# kubectl apply -f {FILE}\n"
        return [Artifact(FILE, head + yaml_of(made))]

    def unseen(self, job: Job) -> list[str]:
        return unseen(job)

    def check(self, job: Job) -> list[str]:
        cluster = _Cluster()
        *_, made = _documents(job.folder)
        space = cluster.space(made)
        result = []
        with _answered(f"namespace {space}"):
            refused = cluster.refusal(lambda: cluster.create(made, space, dry_run="All"))
            if refused:
                result.append(refused)
            for item in volumes_of(job.options.get("volumes", "")):
                if cluster.is_missing(
                    cluster.core.read_namespaced_persistent_volume_claim, item.claim, space
                ):
                    result.append(f"there is no PersistentVolumeClaim {item.claim} in {space}")
        return result

    def send(self, job: Job, key: str) -> SentJob:
        cluster = _Cluster()
        *others, made = _documents(job.folder)
        space = cluster.space(made)
        add_key(made, key)
        try:
            created = cluster.create(made, space)
        except cluster.error as error:
            if error.status == _CONFLICT:
                raise NotSent(
                    f"there is a job {job.name} in {space} already",
                    do="give this one another --name",
                ) from error
            if error.status >= _BROKEN:
                raise UnknownOutcome(f"the API server has failed: {_message(error)}") from error
            raise NotSent(f"Kubernetes did not take the job: {_message(error)}") from error
        except cluster.lost as error:
            if isinstance(getattr(error, "reason", error), cluster.unreached):
                raise NotSent(f"the API server was not reached: {error}") from error
            raise UnknownOutcome(f"the API server did not answer: {error}") from error
        if job.nodes > 1:
            others.append(_secret(job.name))
        try:
            cluster.complete(created, others, space)
        except cluster.lost as error:
            raise UnknownOutcome(f"the API server did not answer: {error}") from error
        except cluster.error as error:
            if error.status >= _BROKEN:
                raise UnknownOutcome(f"the API server has failed: {_message(error)}") from error
            problem = f"the job's code was not taken: {_message(error)}"
            try:  # or its pods would wait for ever
                cluster.delete(space, job.name)
            except (cluster.error, cluster.lost) as left:
                raise UnknownOutcome(f"{problem}, and the job could not be deleted") from left
            raise NotSent(problem) from error
        return SentJob(f"{space}/{job.name}", f"(kubectl get {_PLURAL} {job.name})")

    def find(self, key: str, folder: Path) -> SentJob | None:
        cluster = _Cluster()
        *others, made = _documents(folder)
        space = cluster.space(made)
        with _answered(f"namespace {space}"):
            result = cluster.labeled(space, f"{KEY}={key}")
            if not result:
                return None
            name = result[0]["metadata"]["name"]
            if facts_in(folder)["nodes"] > 1:
                others.append(_secret(name))
            cluster.complete({**made, **result[0]}, others, space)
        return SentJob(f"{space}/{name}")

    def state(self, id: str, folder: Path) -> JobState:
        space, _, name = id.partition("/")
        cluster = _Cluster()
        with _answered(id):
            result = cluster.read(space, name)
        if result is None:
            is_ours = (folder / _CANCELED).exists()
            return JobState(State.canceled if is_ours else State.lost, "deleted")
        state = _state(result)
        with suppress(cluster.error, cluster.lost):  # a user without rights to pods knows less
            pods = cluster.pods(space, name)
            state = replace(state, since_s=_since_s(pods))
            if state.state == State.failed:
                return replace(state, exit_code=_exit_code(pods))
        return state

    def logs(self, id: str, folder: Path, *, follow: bool) -> Iterator[str]:
        space, _, name = id.partition("/")
        cluster = _Cluster()
        with _answered(id):
            pods = sorted(pod.metadata.name for pod in cluster.pods(space, name))
        if not pods:
            raise SubmitError("the job has no pods: it waits, or they were deleted", where=id)

        def lines(pod: str) -> Iterator[str]:
            with _answered(f"pod {pod}"):
                answer = cluster.core.read_namespaced_pod_log(
                    pod, space, container=_CONTAINER, follow=follow, _preload_content=False
                )
                for line in _lines(answer):
                    yield f"{pod}: {line}" if len(pods) > 1 else line

        if not follow or len(pods) == 1:
            for pod in pods:
                yield from lines(pod)
            return
        yield from merged([lines(pod) for pod in pods])

    def top(self, id: str, folder: Path, key: str) -> list[str]:
        space, _, name = id.partition("/")
        cluster = _Cluster()
        with _answered(id):
            pods = cluster.pods(space, name)
        running = [
            pod.metadata.name for pod in pods if pod.status and pod.status.phase == "Running"
        ]
        if not running:
            raise SubmitError("none of its pods runs", where=id, do=f"flatout jobs {id}")

        def shown(pod: str) -> str:
            where = ["--namespace", space, pod, "--container", _CONTAINER]
            answer = ask(["kubectl", "exec", *where, "--", "flatout", "top", "--json", key])
            if answer.code != 0:
                raise SubmitError(f"kubectl exec: {answer.last_words}", where=f"pod {pod}")
            return answer.output

        with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
            return list(pool.map(shown, running))

    def cancel(self, id: str, folder: Path) -> None:
        space, _, name = id.partition("/")
        with _answered(id):
            _Cluster().delete(space, name)
        (folder / _CANCELED).touch()


TARGET = _Kubernetes()


class _Cluster:
    """The official client, which knows the user's rights."""

    def __init__(self) -> None:
        client = require("kubernetes.client", EXTRA)
        config = require("kubernetes.config", EXTRA)
        self.error = client.exceptions.ApiException
        errors = require("urllib3.exceptions", EXTRA)
        self.lost = errors.HTTPError
        self.unreached = (errors.NewConnectionError, errors.ConnectTimeoutError)
        try:
            _load(config)
        except config.ConfigException as error:
            raise SubmitError(
                f"the Kubernetes client knows no cluster: {error}",
                do="see that `kubectl get pods` answers, or set KUBECONFIG",
            ) from error
        self._config = config
        self.core = client.CoreV1Api()
        self.custom = client.CustomObjectsApi()

    def space(self, manifest: Manifest) -> str:
        given = manifest["metadata"].get("namespace")
        if given is not None:
            return str(given)
        with suppress(self._config.ConfigException):
            file = os.environ.get("KUBECONFIG")
            _, present = self._config.list_kube_config_contexts(config_file=file)
            return str(present["context"].get("namespace") or "default")
        own = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
        return own.read_text().strip() if own.is_file() else "default"

    def create(self, manifest: Manifest, space: str, dry_run: str | None = None) -> Any:
        options: dict[str, Any] = {"_request_timeout": _PATIENCE_S}
        if dry_run is not None:
            options["dry_run"] = dry_run
        if manifest["kind"] == "ConfigMap":
            return self.core.create_namespaced_config_map(space, manifest, **options)
        if manifest["kind"] == "Secret":
            return self.core.create_namespaced_secret(space, manifest, **options)
        return self.custom.create_namespaced_custom_object(
            _GROUP, _VERSION, space, _PLURAL, manifest, **options
        )

    def read(self, space: str, name: str) -> Any:
        try:
            return self.custom.get_namespaced_custom_object(
                _GROUP, _VERSION, space, _PLURAL, name, _request_timeout=_PATIENCE_S
            )
        except self.error as error:
            if error.status == _NOT_FOUND:
                return None
            raise

    def complete(self, job: Manifest, others: Sequence[Manifest], space: str) -> None:
        for item in others:
            item["metadata"]["ownerReferences"] = [_owner(job)]
            try:
                self.create(item, space)
            except self.error as error:
                if error.status != _CONFLICT:
                    raise

    def labeled(self, space: str, labels: str) -> list[Manifest]:
        result = self.custom.list_namespaced_custom_object(
            _GROUP, _VERSION, space, _PLURAL, label_selector=labels, _request_timeout=_PATIENCE_S
        )
        return list(result["items"])

    def pods(self, space: str, name: str) -> list[Any]:
        listed = self.core.list_namespaced_pod(
            space, label_selector=f"{_POD_LABEL}={name}", _request_timeout=_PATIENCE_S
        )
        return list(listed.items)

    def delete(self, space: str, name: str) -> None:
        try:
            self.custom.delete_namespaced_custom_object(
                _GROUP,
                _VERSION,
                space,
                _PLURAL,
                name,
                propagation_policy="Foreground",
                _request_timeout=_PATIENCE_S,
            )
        except self.error as error:
            if error.status != _NOT_FOUND:
                raise

    def refusal(self, ask: Callable[[], object]) -> str:
        try:
            ask()
        except self.error as error:
            return _message(error)
        return ""

    def is_missing(self, read: Callable[..., object], name: str, space: str) -> bool:
        try:
            read(name, space, _request_timeout=_PATIENCE_S)
        except self.error as error:
            if error.status >= _BROKEN:
                raise
            return bool(error.status == _NOT_FOUND)
        return False


def _load(config: Any) -> None:
    try:
        config.load_kube_config(config_file=os.environ.get("KUBECONFIG"))
    except config.ConfigException:
        if "KUBERNETES_SERVICE_HOST" not in os.environ:
            raise
        config.load_incluster_config()


@contextmanager
def _answered(where: str) -> Iterator[None]:
    error = require("kubernetes.client", EXTRA).exceptions.ApiException
    lost = require("urllib3.exceptions", EXTRA).HTTPError
    try:
        yield
    except error as refused:
        raise SubmitError(f"Kubernetes refuses: {_message(refused)}", where=where) from refused
    except lost as silent:
        raise SubmitError(
            f"the API server does not answer: {silent}",
            where=where,
            do="see that `kubectl get pods` answers",
        ) from silent


def _message(error: Any) -> str:
    body = getattr(error, "body", None)
    with suppress(ValueError, TypeError):
        return str(json.loads(body or "")["message"])
    return str(getattr(error, "reason", None) or error)


def _documents(folder: Path) -> list[Manifest]:
    yaml = require("yaml", EXTRA)
    path = folder / FILE
    try:
        result = [item for item in yaml.safe_load_all(path.read_text(encoding="utf-8")) if item]
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SubmitError(f"expected manifests, found {error}", where=str(path)) from error
    if not result or result[-1].get("kind") != "TrainJob":
        raise SubmitError("expected a TrainJob as the last document", where=str(path))
    return result


def _owner(created: Manifest) -> Manifest:
    return {
        "apiVersion": created["apiVersion"],
        "kind": created["kind"],
        "name": created["metadata"]["name"],
        "uid": created["metadata"]["uid"],
    }


def _secret(name: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name},
        "stringData": {SECRET: secrets.token_hex(32)},
    }


def _words(condition: Manifest) -> str:
    message = condition.get("message") or condition.get("reason") or ""
    return f"{condition['type']} ({message})" if message else str(condition["type"])


def _state(manifest: Manifest) -> JobState:
    status = manifest.get("status", {})
    trainer = status.get("trainerStatus") or {}
    eta, left_s = _eta(trainer), trainer.get("estimatedRemainingSeconds")
    listed = status.get("conditions") or []
    conditions = {item["type"]: item for item in listed if item.get("status") == "True"}
    if "Complete" in conditions:
        return JobState(State.succeeded, _words(conditions["Complete"]), exit_code=0)
    if "Failed" in conditions:
        return JobState(State.failed, _words(conditions["Failed"]))
    if manifest["metadata"].get("deletionTimestamp"):
        return JobState(State.stopping, "being deleted", eta=eta)
    if "Suspended" in conditions:
        return JobState(State.queued, _words(conditions["Suspended"]), eta=eta)
    jobs = status.get("jobsStatus") or []
    if any(job.get("ready") for job in jobs):
        return JobState(State.running, "pods are ready", eta=eta, left_s=left_s)
    if any(job.get("active") for job in jobs):
        return JobState(State.starting, "pods are created")
    return JobState(State.queued, "no pods yet")


def _exit_code(pods: list[Any]) -> int | None:
    terminated = [
        one.state.terminated
        for pod in pods
        for one in (pod.status and pod.status.container_statuses) or ()
        if one.name == _CONTAINER and one.state and one.state.terminated
    ]
    failed = sorted(
        (status for status in terminated if status.exit_code),
        key=lambda status: str(status.finished_at or ""),
    )
    return int(failed[0].exit_code) if failed else None


def _since_s(pods: list[Any]) -> float | None:
    own = [pod.status for pod in pods if pod.status and pod.status.start_time]
    if not own:
        return None
    ends = [
        [status.state.terminated.finished_at for status in status.container_statuses or ()
         if status.state and status.state.terminated]
        for status in own
    ]  # fmt: skip
    last = max(map(max, ends)) if all(ends) else datetime.now(UTC)
    return float((last - min(status.start_time for status in own)).total_seconds())


def _eta(manifest: Manifest) -> str:
    parts = []
    if "estimatedRemainingSeconds" in manifest:
        parts.append(clock(manifest["estimatedRemainingSeconds"]))
    if "progressPercentage" in manifest:
        parts.append(f"{manifest['progressPercentage']}% done")
    return ", ".join(parts)


def _lines(answer: Any) -> Iterator[str]:
    rest = b""
    for piece in answer.stream():
        *whole, rest = (rest + piece).split(b"\n")
        yield from (f"{line.decode(errors='replace')}\n" for line in whole)
    if rest:
        yield rest.decode(errors="replace")
