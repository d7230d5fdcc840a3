"""Amazon SageMaker: training jobs through boto3, which reads the credentials."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flatout.errors import SubmitError
from flatout.submit.client import require
from flatout.submit.code import ARCHIVE
from flatout.submit.job import Job
from flatout.submit.sagemaker_request import (
    EXTRA,
    SECRET,
    START,
    channels,
    folder_of,
    request,
    start_script,
    unseen,
)
from flatout.submit.send import facts_in
from flatout.submit.target import Artifact, JobState, NotSent, SentJob, State, UnknownOutcome

FILE = "training_job.json"
_KEY = "flatout:key"
_GROUP = "/aws/sagemaker/TrainingJobs"
_ASK_EVERY_S = 5.0
_SET_UP = "set up AWS' own configuration: credentials, and AWS_REGION or --option region="
_UNKNOWN = ("ResourceNotFound", "ValidationException")

_BY_STATUS = {
    "Completed": State.succeeded,
    "Failed": State.failed,
    "Stopping": State.stopping,
    "Stopped": State.canceled,
    "Deleting": State.stopping,
}
# The steps of a job in progress.
_BY_STEP = {
    "Pending": State.queued,
    "Training": State.running,
    "Uploading": State.running,
    "Interrupted": State.requeued,
    "Restarting": State.requeued,
    "Stopping": State.stopping,
}


class _SageMaker:
    """Sends training jobs; the code goes to S3 first. A job's id is its name."""

    name = "sagemaker"
    takes_seeds = False

    def artifacts(self, job: Job) -> list[Artifact]:
        made = json.dumps(request(job), indent=2) + "\n"
        return [Artifact(FILE, made), Artifact(START, start_script(job), 0o755)]

    def unseen(self, job: Job) -> list[str]:
        return unseen(job)

    def check(self, job: Job) -> list[str]:
        cloud = _Cloud(job.options.get("region"))
        result = []
        with cloud.answered():
            storage, identities = cloud.client("s3"), cloud.client("iam")
            bucket, _ = _split(folder_of(job))
            if said := cloud.refusal(lambda: storage.head_bucket(Bucket=bucket)):
                result.append(f"the bucket {bucket}: {said}")
            for channel in channels(job):
                where, prefix = _split(channel.uri)
                listed = storage.list_objects_v2(Bucket=where, Prefix=prefix, MaxKeys=1)
                if not listed.get("KeyCount"):
                    result.append(
                        f"there is nothing at {channel.uri}, for the channel {channel.name}"
                    )
            role = job.options["role"].rpartition("/")[2]
            said = cloud.refusal(lambda: identities.get_role(RoleName=role))
            # a caller without the right to ask gets another error
            if said.startswith("NoSuchEntity"):
                result.append(f"there is no role {role}: {said}")
        return result

    def send(self, job: Job, key: str) -> SentJob:
        cloud = _Cloud(job.options.get("region"))
        made = _request(job.folder)
        made.setdefault("Tags", []).append({"Key": _KEY, "Value": key})
        try:
            self._upload(cloud, job)
        except cloud.refused as error:
            raise NotSent(f"S3 did not take the code: {_message(error)}") from error
        except cloud.unknown as error:
            raise NotSent(f"the code did not come to S3: {error}") from error
        try:
            cloud.client("sagemaker", tries=1).create_training_job(**made)
        except cloud.refused as error:
            if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) >= 500:
                raise UnknownOutcome(f"AWS has failed: {_message(error)}") from error
            raise NotSent(f"AWS did not take the job: {_message(error)}") from error
        except cloud.unreached as error:
            raise NotSent(f"AWS was not reached: {error}") from error
        except cloud.lost as error:
            raise UnknownOutcome(f"AWS did not answer: {error}") from error
        except cloud.unknown as error:
            raise NotSent(f"AWS was not asked: {error}") from error
        return SentJob(job.name, f"code and output in {folder_of(job)}")

    def _upload(self, cloud: _Cloud, job: Job) -> None:
        bucket, prefix = _split(folder_of(job))
        storage = cloud.client("s3")
        for name in (ARCHIVE, START, "recipe.toml"):
            path = job.folder / name
            if path.is_file():
                with path.open("rb") as file:
                    storage.put_object(Bucket=bucket, Key=f"{prefix}/code/{name}", Body=file)
        if job.nodes > 1:
            secret = secrets.token_hex(32)
            storage.put_object(Bucket=bucket, Key=f"{prefix}/code/{SECRET}", Body=secret)

    def find(self, key: str, folder: Path) -> SentJob | None:
        cloud = _Cloud(_region(folder))
        name = _request(folder)["TrainingJobName"]
        with cloud.answered():
            client = cloud.client("sagemaker")
            result = _described(cloud, client, name)
            if result is None:
                return None
            tags = client.list_tags(ResourceArn=result["TrainingJobArn"])["Tags"]
        return SentJob(name) if {"Key": _KEY, "Value": key} in tags else None

    def state(self, id: str, folder: Path) -> JobState:
        cloud = _Cloud(_region(folder))
        with cloud.answered():
            result = _described(cloud, cloud.client("sagemaker"), id)
        return JobState(State.lost, "no such job") if result is None else _state(result)

    def logs(self, id: str, folder: Path, *, follow: bool) -> Iterator[str]:
        cloud = _Cloud(_region(folder))
        read = _Logs(cloud, id)
        while True:
            # Asked before reading, so that the last output is read.
            goes_on = follow and not self.state(id, folder).state.is_final
            with cloud.answered():
                yield from read.more()
            if not goes_on:
                break
            time.sleep(_ASK_EVERY_S)
        if not read.streams:
            raise SubmitError("the job has printed nothing yet", where=f"{_GROUP}/{id}")

    def top(self, id: str, folder: Path, key: str) -> list[str]:
        raise SubmitError(
            "SageMaker's containers cannot be entered", where=id, do=f"flatout logs {id} -f"
        )

    def cancel(self, id: str, folder: Path) -> None:
        cloud = _Cloud(_region(folder))
        with cloud.answered():
            cloud.client("sagemaker").stop_training_job(TrainingJobName=id)


TARGET = _SageMaker()


class _Cloud:
    """boto3, and the meaning of its errors."""

    def __init__(self, region: str | None) -> None:
        boto3, errors = require("boto3", EXTRA), require("botocore.exceptions", EXTRA)
        self._config = require("botocore.config", EXTRA).Config
        self.refused = errors.ClientError
        self.unreached = (errors.EndpointConnectionError, errors.ConnectTimeoutError)
        self.lost = errors.HTTPClientError
        self.unknown = errors.BotoCoreError
        self._session = boto3.session.Session(region_name=region)

    def client(self, service: str, tries: int = 3) -> Any:
        retries = {"total_max_attempts": tries, "mode": "standard"}
        config = self._config(connect_timeout=5, read_timeout=30, retries=retries)
        try:
            return self._session.client(service, config=config)
        except self.unknown as error:
            raise SubmitError(
                f"boto3 cannot ask {service}: {error}",
                do=_SET_UP,
            ) from error

    @contextmanager
    def answered(self) -> Iterator[None]:
        try:
            yield
        except self.refused as error:
            raise SubmitError(f"AWS refuses: {_message(error)}") from error
        except (self.lost, *self.unreached) as error:
            raise SubmitError(f"AWS does not answer: {error}") from error
        except self.unknown as error:
            raise SubmitError(f"boto3 cannot ask AWS: {error}", do=_SET_UP) from error

    def refusal(self, ask: Any) -> str:
        try:
            ask()
        except self.refused as error:
            return _message(error)
        return ""


class _Logs:
    """Continues to read all streams of a job."""

    def __init__(self, cloud: _Cloud, job: str) -> None:
        self._client, self._cloud, self._job = cloud.client("logs"), cloud, job
        self.streams: dict[str, str | None] = {}

    def more(self) -> Iterator[str]:
        try:
            listed = self._client.describe_log_streams(
                logGroupName=_GROUP, logStreamNamePrefix=f"{self._job}/"
            )
        except self._cloud.refused as error:
            if error.response["Error"]["Code"] == "ResourceNotFoundException":
                return
            raise
        for item in listed["logStreams"]:
            self.streams.setdefault(item["logStreamName"], None)
        for stream in self.streams:
            host = stream.rpartition("/")[2].rpartition("-")[0]
            for line in self._of(stream):
                yield f"{host}: {line}\n" if len(self.streams) > 1 else f"{line}\n"

    def _of(self, stream: str) -> Iterator[str]:
        while True:
            token = self.streams[stream]
            page = self._client.get_log_events(
                logGroupName=_GROUP,
                logStreamName=stream,
                startFromHead=True,
                **({} if token is None else {"nextToken": token}),
            )
            yield from (item["message"] for item in page["events"])
            self.streams[stream] = page["nextForwardToken"]
            if page["nextForwardToken"] == token:
                return


def _request(folder: Path) -> dict[str, Any]:
    path = folder / FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        str(data["TrainingJobName"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise SubmitError(
            f"expected the parameters of CreateTrainingJob, found {error!r}", where=str(path)
        ) from error
    return dict(data)


def _region(folder: Path) -> str | None:
    data = facts_in(folder)["options"].get("region")
    return None if data is None else str(data)


def _split(uri: str) -> tuple[str, str]:
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    return bucket, prefix


def _described(cloud: _Cloud, client: Any, name: str) -> dict[str, Any] | None:
    try:
        return dict(client.describe_training_job(TrainingJobName=name))
    except cloud.refused as error:
        if error.response["Error"]["Code"] in _UNKNOWN:
            return None
        raise


def _state(found: dict[str, Any]) -> JobState:
    status, step = found["TrainingJobStatus"], found.get("SecondaryStatus", "")
    state = _BY_STATUS.get(status) or _BY_STEP.get(step, State.starting)
    if status == "Stopped" and step in ("MaxRuntimeExceeded", "MaxWaitTimeExceeded"):
        state = State.failed
    transitions = found.get("SecondaryStatusTransitions") or [{}]
    why = found.get("FailureReason") or transitions[-1].get("StatusMessage") or ""
    words = f"{status} / {step}" if step and step != status else status
    code = 0 if state == State.succeeded else None
    if (told_code := re.search(r"exit code: (\d+)", why)) is not None:
        code = int(told_code[1])
    return JobState(
        state,
        f"{words}: {why}" if why else words,
        exit_code=code,
        since_s=found.get("TrainingTimeInSeconds"),
        paid_s=found.get("BillableTimeInSeconds"),
        starts=1 + sum(item.get("Status") == "Restarting" for item in transitions),
    )


def _message(error: Any) -> str:
    result = error.response.get("Error", {})
    return f"{result.get('Code', 'refused')}: {result.get('Message', '')}"
