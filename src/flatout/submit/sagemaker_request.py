"""The CreateTrainingJob request of a job for SageMaker, and the script of its containers.

https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateTrainingJob.html
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from flatout.errors import SubmitError
from flatout.masked import masked
from flatout.submit import shell
from flatout.submit.client import require
from flatout.submit.code import ARCHIVE
from flatout.submit.job import Job
from flatout.submit.target import options_of, refuse

Request = dict[str, Any]

EXTRA = "sagemaker"
START, SECRET = "start.sh", "secret"
OPTIONS = ("image", "role", "instance", "bucket", "region", "volume-gb", "spot", "max-wait")
CODE_CHANNEL = "code"
_CHANNEL = "channel."
_RANK = "{rank}"
_MODES = ("File", "FastFile", "Pipe")
# The folder that SageMaker copies to S3, and the seconds after its SIGTERM.
_CHECKPOINTS, _GRACE_S = "/opt/ml/checkpoints", 120
# The default time limit, and the longest one that SageMaker allows.
_TIME_S, _LONGEST_S = 86_400, 28 * 86_400
_MOST_RETRIES = 30
_SECRET = (
    "# Only nodes that know it take part in the job. Made when the job is sent.",
    f'if [ -f "$here/{SECRET}" ]; then FLATOUT_SECRET=$(cat "$here/{SECRET}"); fi',
    "export FLATOUT_SECRET=${FLATOUT_SECRET:-}",
)


@dataclass(frozen=True)
class Channel:
    """Data in S3 for containers.

    Attributes:
        name: the name of the channel.
        uri: its place in S3.
        mode: "File", "FastFile" or "Pipe".
        by_host: whether each host gets its own objects.
        wrap: "RecordIO" if each object comes in a record.
        shuffle: the seed of the order of objects, changed with each epoch.
    """

    name: str
    uri: str
    mode: str = "File"
    by_host: bool = False
    wrap: str = ""
    shuffle: int | None = None

    @property
    def as_request(self) -> Request:
        split = "ShardedByS3Key" if self.by_host else "FullyReplicated"
        source = {"S3DataType": "S3Prefix", "S3Uri": self.uri, "S3DataDistributionType": split}
        made: Request = {"ChannelName": self.name, "DataSource": {"S3DataSource": source}}
        if self.wrap:
            made["RecordWrapperType"] = self.wrap
        if self.shuffle is not None:
            made["ShuffleConfig"] = {"Seed": self.shuffle}
        return {**made, "InputMode": self.mode}


def request(job: Job) -> Request:
    """Return the parameters of CreateTrainingJob, checked by botocore's model of the service."""
    options = options_of(
        job, [*OPTIONS, *(option for option in job.options if _is_channel(option))]
    )
    refuse(_problems(job, options), where="flatout submit sagemaker")
    limit = _limit(job)
    made: Request = {
        "TrainingJobName": job.name,
        "AlgorithmSpecification": {
            "TrainingImage": options["image"],
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["/bin/bash", f"/opt/ml/input/data/{CODE_CHANNEL}/{START}"],
        },
        "RoleArn": options["role"],
        "InputDataConfig": [
            Channel(CODE_CHANNEL, f"{folder_of(job)}/code/").as_request,
            *(channel.as_request for channel in channels(job)),
        ],
        "OutputDataConfig": {"S3OutputPath": f"{folder_of(job)}/output"},
        "ResourceConfig": {
            "InstanceType": options["instance"],
            "InstanceCount": job.nodes,
            "VolumeSizeInGB": int(options.get("volume-gb", "30")),
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": limit},
        "Tags": _tags(job),
    }
    if job.checkpoint is not None:
        made["CheckpointConfig"] = {"S3Uri": job.checkpoint, "LocalPath": _CHECKPOINTS}
    if job.retries:
        made["RetryStrategy"] = {"MaximumRetryAttempts": min(job.retries, _MOST_RETRIES)}
    if options.get("spot") == "yes":
        made["EnableManagedSpotTraining"] = True
        wait = int(options.get("max-wait", "0")) or limit
        made["StoppingCondition"]["MaxWaitTimeInSeconds"] = max(wait, limit)
    refuse(_refused(made), where="CreateTrainingJob")
    return made


def start_script(job: Job) -> str:
    """Return the script of each container: it unpacks the code and starts the ranks.

    The last lines of stderr become the FailureReason of a job that fails.
    """
    lines = [
        "#!/bin/bash",
        "# Runs in each container, from the channel that has the code beside it.",
        "set -euo pipefail",
        'here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)',
        'work=$(mktemp -d) && mkdir "$work/code"',
        f'tar -xzf "$here/{ARCHIVE}" -C "$work/code"',
        'if [ -f "$here/recipe.toml" ]; then cp "$here/recipe.toml" "$work"; fi',
        'cd "$work/code"',
        *shell.exports(job.environment),
        *(_SECRET if job.nodes > 1 else ()),
        "",
        *shell.array("command", shell.words(_command(job))),
        "set +e",
        "# What goes to stderr is kept as well.",
        'mkfifo "$work/stderr"',
        'tee "$work/errors" < "$work/stderr" >&2 &',
        "tee=$!",
        '"${command[@]}" 2> "$work/stderr" &',
        "pid=$!",
        "# SageMaker stops a job by SIGTERM, and waits 2 minutes for the last checkpoint.",
        "trap 'kill -TERM \"$pid\"' TERM",
        'wait "$pid"',
        "code=$?",
        'while kill -0 "$pid" 2>/dev/null; do wait "$pid"; code=$?; done',
        'for _ in {1..50}; do kill -0 "$tee" 2>/dev/null || break; sleep 0.1; done',
        "if ((code)) && [ -d /opt/ml/output ]; then",
        '  tail -c 1000 "$work/errors" > /opt/ml/output/failure',
        "fi",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def folder_of(job: Job) -> str:
    """Return the place of the job's own files in S3."""
    return f"{job.options['bucket'].rstrip('/')}/{job.name}"


def channels(job: Job) -> list[Channel]:
    """Return the channels of data; in Pipe mode one for each rank, since a FIFO has one reader."""
    made: list[Channel] = []
    for option, text in job.options.items():
        if not _is_channel(option):
            continue
        result = _channel(option.removeprefix(_CHANNEL), text)
        is_own = _RANK in result.uri
        if job.devices > 1 and (is_own or result.mode == "Pipe"):
            made += [
                replace(
                    result, name=f"{result.name}-{rank}", uri=result.uri.replace(_RANK, str(rank))
                )
                for rank in range(job.devices)
            ]
        else:
            made.append(replace(result, uri=result.uri.replace(_RANK, "0")))
    return made


def _is_channel(option: str) -> bool:
    return option.startswith(_CHANNEL)


def _channel(name: str, text: str) -> Channel:
    uri, *settings = text.split(",")
    fields = dict.fromkeys(("mode", "split", "wrap", "shuffle"), "")
    for setting in settings:
        key, equals, value = setting.partition("=")
        if key not in fields or not equals:
            raise SubmitError(
                f"expected mode=, split=, wrap= or shuffle= after the URI, found {setting!r}",
                where=f"--option {_CHANNEL}{name}",
            )
        fields[key] = value
    wrong = [
        f"{key}={fields[key]!r}: expected {', '.join(allowed)}"
        for key, allowed in (("mode", _MODES), ("split", ("host",)), ("wrap", ("recordio",)))
        if fields[key] and fields[key] not in allowed
    ]
    if not uri.startswith("s3://"):
        wrong.append(f"expected s3://bucket/prefix, found {uri!r}")
    if fields["shuffle"] and not fields["shuffle"].isdecimal():
        wrong.append(f"shuffle={fields['shuffle']!r}: expected a seed")
    refuse(wrong, where=f"--option {_CHANNEL}{name}")
    return Channel(
        name,
        uri,
        mode=fields["mode"] or "File",
        by_host=bool(fields["split"]),
        wrap="RecordIO" if fields["wrap"] else "",
        shuffle=int(fields["shuffle"]) if fields["shuffle"] else None,
    )


def _command(job: Job) -> list[str]:
    local = job if job.checkpoint is None else replace(job, checkpoint=_CHECKPOINTS)
    return local.command_with(*job.devices_option)


def _limit(job: Job) -> int:
    if job.time_s is None:
        return _TIME_S
    return job.time_s - min(_GRACE_S, job.stop_ahead_s)


def _tags(job: Job) -> list[Request]:
    tags = {"flatout:command": _tagged(" ".join(masked(job.command)))}
    if job.fingerprint:
        tags["flatout:recipe-fingerprint"] = _tagged(job.fingerprint)
    return [{"Key": name, "Value": value} for name, value in tags.items()]


def _tagged(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9 _.:/=+\-@]", "_", text)[:256]


# -- what is wrong -------------------------------------------------------------------------------


def _problems(job: Job, options: Mapping[str, str]) -> list[str]:
    problems = []
    for name, what in (
        ("image", "--option image=ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG"),
        ("role", "--option role=arn:aws:iam::ACCOUNT:role/NAME"),
        ("instance", "--option instance=ml.c5.2xlarge"),
        ("bucket", "--option bucket=s3://BUCKET/PREFIX, for the code and the output"),
    ):
        if not options.get(name):
            problems.append(f"no {name}: {what}")
    if options.get("bucket") and not options["bucket"].startswith("s3://"):
        problems.append(f"expected bucket=s3://BUCKET/PREFIX, found {options['bucket']!r}")
    for name in ("volume-gb", "max-wait"):
        if name in options and not options[name].isdecimal():
            problems.append(f"expected a whole number as {name}, found {options[name]!r}")
    if options.get("spot", "no") not in ("yes", "no"):
        problems.append(f"expected spot=yes or spot=no, found {options['spot']!r}")
    if options.get("spot") == "yes" and job.checkpoint is None:
        problems.append(
            "spot instances are taken away: --checkpoints s3://BUCKET/RUN lets it go on"
        )
    if job.checkpoint is not None and not job.checkpoint.startswith("s3://"):
        problems.append(f"no container can keep {job.checkpoint}: --checkpoints s3://BUCKET/RUN")
    if _limit(job) > _LONGEST_S:
        problems.append(f"SageMaker runs a job for {_LONGEST_S // 86_400} days at most")
    own = [
        channel.name for channel in channels(replace(job, devices=2)) if channel.name.endswith("-1")
    ]
    if job.is_auto and own:
        problems.append(
            "a channel in Pipe mode, or with {rank}, is made for each rank: say how many with "
            "--devices N"
        )
    names = [channel.name for channel in channels(job)]
    if CODE_CHANNEL in names:
        problems.append(f"the channel {CODE_CHANNEL} has the code: give yours another name")
    return problems


def unseen(job: Job) -> list[str]:
    """Return the inputs that no container finds: those in no channel, no URLs, and no code."""
    paths = [f"/opt/ml/input/data/{channel.name}" for channel in channels(job)]
    return [
        f"{item.given} lies on {item.lies_on}, which no container sees; copy it to S3 and name it "
        "as a channel, --option channel.NAME=s3://BUCKET/PREFIX, which lies at "
        "/opt/ml/input/data/NAME"
        for item in job.inputs
        if not item.is_url and not item.travels and not item.path.startswith(tuple(paths))
    ]


def _refused(made: Request) -> list[str]:
    report = require("botocore.validate", EXTRA).ParamValidator().validate(made, _model())
    return list(report.generate_report().splitlines()) if report.has_errors() else []


@cache
def _model() -> Any:
    loaders, model = require("botocore.loaders", EXTRA), require("botocore.model", EXTRA)
    described = loaders.Loader().load_service_model("sagemaker", "service-2")
    return model.ServiceModel(described).operation_model("CreateTrainingJob").input_shape
