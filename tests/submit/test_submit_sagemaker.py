"""Training jobs of SageMaker: what is asked for, and what boto3 is told to do, by its Stubber."""

import json
import re
import subprocess
import venv
from contextlib import ExitStack
from pathlib import Path

import pytest
from submit_schemas import SAGEMAKER, a_job, many_jobs

from flatout.errors import SubmitError
from flatout.recipe import Recipe
from flatout.submit.sagemaker_request import channels, request
from flatout.submit.send import write
from flatout.submit.target import NotSent, State, UnknownOutcome, target_of

boto3 = pytest.importorskip("boto3")
stub = pytest.importorskip("botocore.stub")
ARN = "arn:aws:sagemaker:eu-west-1:123456789012:training-job/job"


def job(tmp_path, **changes):
    return a_job(tmp_path, "sagemaker", **changes)


# -- what is asked for ---------------------------------------------------------------------------


def test_a_request(tmp_path):
    made = request(job(
        tmp_path, nodes=2, devices=4, time_s=7200, checkpoint="s3://team/runs/a", retries=5,
        fingerprint="EPYC, 4 CPUs", arguments=("--epochs", "5"),
        options={"spot": "yes", "max-wait": "20000", "volume-gb": "100",
                 "channel.train": "s3://team/day,mode=FastFile,split=host"},
    ))  # fmt: skip
    assert made["ResourceConfig"] == {
        "InstanceType": "ml.c5.2xlarge", "InstanceCount": 2, "VolumeSizeInGB": 100,
    }  # fmt: skip
    # SIGTERM comes 2 minutes before the limit, so that the job has ended by then.
    assert made["StoppingCondition"] == {
        "MaxRuntimeInSeconds": 7080, "MaxWaitTimeInSeconds": 20000,
    }  # fmt: skip
    assert made["EnableManagedSpotTraining"] is True
    assert made["RetryStrategy"] == {"MaximumRetryAttempts": 5}
    assert made["CheckpointConfig"] == {
        "S3Uri": "s3://team/runs/a", "LocalPath": "/opt/ml/checkpoints",
    }  # fmt: skip
    code, train = made["InputDataConfig"]
    assert code["DataSource"]["S3DataSource"]["S3Uri"].endswith("train-2026-11-26-1201/code/")
    assert train["InputMode"] == "FastFile"
    assert train["DataSource"]["S3DataSource"]["S3DataDistributionType"] == "ShardedByS3Key"
    tags = {one["Key"]: one["Value"] for one in made["Tags"]}
    assert tags["flatout:recipe-fingerprint"] == "EPYC_ 4 CPUs"
    assert "--epochs 5" in tags["flatout:command"]


def test_the_ranks_of_a_host_have_a_channel_each_where_it_is_a_pipe_or_their_own(tmp_path):
    made = channels(job(tmp_path, devices=2, options={
        "channel.train": "s3://team/day,mode=Pipe,split=host,wrap=recordio,shuffle=7",
        "channel.own": "s3://team/parts/{rank}/",
        "channel.test": "s3://team/test",
    }))  # fmt: skip
    assert [(one.name, one.uri, one.mode) for one in made] == [
        ("train-0", "s3://team/day", "Pipe"),
        ("train-1", "s3://team/day", "Pipe"),
        ("own-0", "s3://team/parts/0/", "File"),
        ("own-1", "s3://team/parts/1/", "File"),
        ("test", "s3://team/test", "File"),
    ]
    assert made[0].as_request["RecordWrapperType"] == "RecordIO"
    assert made[0].as_request["ShuffleConfig"] == {"Seed": 7}
    alone = channels(job(tmp_path, options={"channel.train": "s3://team/{rank},mode=Pipe"}))
    assert [(one.name, one.uri) for one in alone] == [("train", "s3://team/0")]


def without(name):
    return {"options": {name: ""}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *((without(name), f"no {name}: --option {name}=") for name in SAGEMAKER),
        ({"options": {"bucket": "team"}}, "bucket=s3://BUCKET/PREFIX"),
        ({"options": {"role": "train"}}, "RoleArn"),
        ({"options": {"volume-gb": "many"}}, "a whole number as volume-gb"),
        ({"options": {"spot": "maybe"}}, "spot=yes or spot=no"),
        ({"options": {"spot": "yes"}}, "--checkpoints s3://BUCKET/RUN lets it go on"),
        ({"options": {"queue": "a"}}, "expected --option of"),
        ({"options": {"channel.a": "/data"}}, "s3://bucket/prefix"),
        ({"options": {"channel.a": "s3://b/c,mode=Fifo"}}, "File, FastFile, Pipe"),
        ({"options": {"channel.a": "s3://b/c,split=rank"}}, "expected host"),
        ({"options": {"channel.a": "s3://b/c,fast"}}, "mode=, split=, wrap= or shuffle="),
        ({"options": {"channel.code": "s3://b/c"}}, "the channel code has the code"),
        ({"checkpoint": "/runs/a"}, "--checkpoints s3://BUCKET/RUN"),
        ({"time_s": 29 * 86_400}, "28 days"),
        ({"is_auto": True, "options": {"channel.a": "s3://b/c,mode=Pipe"}}, "made for each rank"),
        ({"is_auto": True, "options": {"channel.a": "s3://b/{rank}"}}, "made for each rank"),
    ],
)
def test_what_sagemaker_would_refuse_is_said_at_once(changes, words, tmp_path):
    with pytest.raises(SubmitError, match=re.escape(words)):
        request(job(tmp_path, **changes))


@pytest.mark.slow
@pytest.mark.long
def test_the_sdk_sends_the_same_requests(tmp_path):
    """In its own environment: what it wants installed is not what others here want."""
    venv.create(tmp_path / "sdk", with_pip=True)
    python = str(tmp_path / "sdk" / "bin" / "python")
    install = [python, "-m", "pip", "install", "-q", "sagemaker-core==2.27.0"]
    subprocess.run(install, check=True, timeout=900)
    options = {"spot": "yes", "max-wait": "20000", "region": "eu-west-1",
               "channel.train": "s3://team/day,mode=Pipe,split=host,wrap=recordio,shuffle=7",
               "channel.own": "s3://team/parts/{rank}/,mode=FastFile"}  # fmt: skip
    own = job(tmp_path, nodes=2, devices=4, checkpoint="s3://team/runs/a", options=options)
    requests = [request(one) for one in (own, *many_jobs(tmp_path, "sagemaker"))]
    script = str(Path(__file__).with_name("sagemaker_sdk.py"))
    sent = subprocess.run(
        [python, script], input=json.dumps(requests), text=True, capture_output=True, check=False
    )
    assert sent.stdout == "sent 73 requests\n", sent.stderr


# -- what containers run -------------------------------------------------------------------------


def started(tmp_path, flatout, **changes):
    """The start script in a container whose flatout is a shell script."""
    made = job(tmp_path, **changes)
    for one in target_of("sagemaker").artifacts(made):
        one.write(tmp_path)
    made.code.write(made.root, tmp_path / "code.tar.gz")
    (tmp_path / "recipe.toml").write_text("")
    (tmp_path / "flatout").write_text(f"#!/bin/bash\n{flatout}\n")
    (tmp_path / "flatout").chmod(0o755)
    # The agent's folder for what a container leaves.
    (tmp_path / "output").mkdir()
    script = tmp_path / "start.sh"
    text = script.read_text()
    for name in ("output", "checkpoints"):
        text = text.replace(f"/opt/ml/{name}", str(tmp_path / name))
    script.write_text(text)
    return subprocess.Popen(
        ["/bin/bash", script], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, cwd="/",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_a_container_runs_the_code_beside_its_recipe(tmp_path):
    said, _ = (run := started(
        tmp_path, 'pwd; ls .. ; cat lib/model.py; echo "$LEVEL" "$@"',
        recipe=Recipe(), environment={"LEVEL": "a  b"}, checkpoint="s3://team/runs/a", devices=3,
    )).communicate(timeout=60)  # fmt: skip
    folder, *lines = said.splitlines()
    assert folder.endswith("/code")
    assert "recipe.toml" in lines
    assert lines[-2:] == [
        "rows = 3",
        f"a  b run --recipe ../recipe.toml --checkpoints {tmp_path}/checkpoints --devices 3"
        " train.py",
    ]
    assert run.returncode == 0
    assert not (tmp_path / "output" / "failure").exists()


def test_the_last_words_of_a_container_become_the_reason_of_its_failure(tmp_path):
    run = started(tmp_path, "echo 'ValueError: no such day' >&2; exit 7")
    _, errors = run.communicate(timeout=60)
    assert (run.returncode, errors) == (7, "ValueError: no such day\n")
    assert (tmp_path / "output" / "failure").read_text() == "ValueError: no such day\n"


def test_a_stop_signal_is_handed_on_and_waited_for(tmp_path):
    run = started(
        tmp_path,
        "trap 'kill $!; sleep 0.2; echo saved; exit 143' TERM; echo ready; sleep 60 >&2 & wait",
    )
    assert run.stdout.readline() == "ready\n"
    run.terminate()
    assert run.stdout.readline() == "saved\n"
    assert run.wait(60) == 143
    run.communicate()


# -- what boto3 is told --------------------------------------------------------------------------


@pytest.fixture
def cloud(monkeypatch):
    """Stubbed clients of all services; each test says what they are to be asked."""
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "none")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "none")
    stubs, make = {}, boto3.session.Session.client

    def client(self, service, **options):
        if service not in stubs:
            stubs[service] = stub.Stubber(make(self, service, **options))
            stubs[service].activate()
        return stubs[service].client

    monkeypatch.setattr(boto3.session.Session, "client", client)
    session = boto3.session.Session()
    with ExitStack() as left:

        def of(service):
            session.client(service)
            return stubs[service]

        yield of
        left.close()
    for one in stubs.values():
        one.assert_no_pending_responses()


def written(tmp_path, **changes):
    made = job(tmp_path, **changes)
    write(made, to := target_of("sagemaker"))
    return made, to


def test_the_hosts_of_a_job_share_a_secret_that_is_in_none_of_its_files(tmp_path, cloud):
    made, to = written(tmp_path, nodes=2)
    expect_upload(cloud, ("code.tar.gz", "start.sh", "secret"))
    cloud("sagemaker").add_response("create_training_job", {"TrainingJobArn": ARN})
    to.send(made, "k1")
    assert 'FLATOUT_SECRET=$(cat "$here/secret")' in (made.folder / "start.sh").read_text()
    assert not (made.folder / "secret").exists()


def expect_upload(cloud, names=("code.tar.gz", "start.sh")):
    for name in names:
        key = f"jobs/train-2026-11-26-1201/code/{name}"
        params = {"Bucket": "team", "Key": key, "Body": stub.ANY}
        cloud("s3").add_response("put_object", {}, params)


def test_the_code_goes_to_s3_and_then_the_job(tmp_path, cloud):
    made, to = written(tmp_path, recipe=Recipe())
    expect_upload(cloud, ("code.tar.gz", "start.sh", "recipe.toml"))
    asked = json.loads((made.folder / "training_job.json").read_text())
    asked["Tags"].append({"Key": "flatout:key", "Value": "k1"})
    cloud("sagemaker").add_response("create_training_job", {"TrainingJobArn": ARN}, asked)
    assert to.send(made, "k1").id == made.name


def test_a_refused_job_was_not_sent(tmp_path, cloud):
    made, to = written(tmp_path)
    for code in ("ResourceInUse", "ResourceLimitExceeded", "AccessDenied"):
        expect_upload(cloud)
        cloud("sagemaker").add_client_error("create_training_job", code, "no such quota")
        with pytest.raises(NotSent, match=f"{code}: no such quota"):
            to.send(made, "k1")


def test_a_server_that_fails_may_have_taken_the_job(tmp_path, cloud):
    made, to = written(tmp_path)
    expect_upload(cloud)
    failing = {"service_error_code": "InternalFailure", "http_status_code": 500}
    cloud("sagemaker").add_client_error("create_training_job", **failing)
    with pytest.raises(UnknownOutcome, match="InternalFailure"):
        to.send(made, "k1")


def test_a_lost_answer_is_looked_for_by_its_tag(tmp_path, cloud, monkeypatch):
    made, to = written(tmp_path)
    expect_upload(cloud)
    client, errors = cloud("sagemaker").client, pytest.importorskip("botocore.exceptions")

    def late(**given):
        raise errors.ReadTimeoutError(endpoint_url="https://sagemaker")

    monkeypatch.setattr(client, "create_training_job", late)
    with pytest.raises(UnknownOutcome):
        to.send(made, "k1")
    for key, found in (("k1", True), ("k2", False)):
        cloud("sagemaker").add_response("describe_training_job", described("InProgress"))
        tags = {"Tags": [{"Key": "flatout:key", "Value": "k1"}]}
        cloud("sagemaker").add_response("list_tags", tags)
        assert (to.find(key, made.folder) is not None) is found
    cloud("sagemaker").add_client_error(
        "describe_training_job", "ValidationException", "Requested resource not found."
    )
    assert to.find("k1", made.folder) is None


def described(status, step="Starting", **more):
    return {
        "TrainingJobName": "job", "TrainingJobArn": ARN, "TrainingJobStatus": status,
        "SecondaryStatus": step, "CreationTime": 0, "StoppingCondition": {},
        "ModelArtifacts": {"S3ModelArtifacts": ""}, "AlgorithmSpecification": {
            "TrainingInputMode": "File"}, "ResourceConfig": {"VolumeSizeInGB": 1}, **more,
    }  # fmt: skip


STATES = [
    ("InProgress", "Pending", State.queued, None),
    ("InProgress", "Downloading", State.starting, None),
    ("InProgress", "Training", State.running, None),
    ("InProgress", "Interrupted", State.requeued, None),
    ("Stopping", "Stopping", State.stopping, None),
    ("Stopped", "Stopped", State.canceled, None),
    ("Stopped", "MaxRuntimeExceeded", State.failed, None),
    ("Completed", "Completed", State.succeeded, 0),
    ("Failed", "Failed", State.failed, 7),
]


def test_states(tmp_path, cloud):
    made, to = written(tmp_path)
    why = "AlgorithmError: ValueError: no, exit code: 7"
    for status, step, state, code in STATES:
        more = {"FailureReason": why} if status == "Failed" else {}
        answer = described(status, step, TrainingTimeInSeconds=90, **more)
        cloud("sagemaker").add_response("describe_training_job", answer)
        found = to.state("job", made.folder)
        assert (found.state, found.exit_code, found.since_s) == (state, code, 90)
        assert (why in found.words) is bool(more)


def test_containers_cannot_be_entered(tmp_path, cloud):
    made, to = written(tmp_path)
    with pytest.raises(SubmitError, match="cannot be entered") as no:
        to.top("job", made.folder, "key")
    assert no.value.do == "flatout logs job -f"


def test_logs_of_all_hosts_and_cancel(tmp_path, cloud):
    made, to = written(tmp_path)
    logs = cloud("logs")
    streams = [{"logStreamName": f"job/algo-{n}-1790000000"} for n in (1, 2)]
    logs.add_response("describe_log_streams", {"logStreams": streams})
    for n in (1, 2):
        events = [{"message": f"epoch of {n}"}]
        for page in (events, []):
            logs.add_response("get_log_events", {"events": page, "nextForwardToken": "t"})
    found = list(to.logs("job", made.folder, follow=False))
    assert found == ["algo-1: epoch of 1\n", "algo-2: epoch of 2\n"]
    logs.add_client_error("describe_log_streams", "ResourceNotFoundException")
    with pytest.raises(SubmitError, match="printed nothing yet"):
        list(to.logs("job", made.folder, follow=False))
    cloud("sagemaker").add_response("stop_training_job", {}, {"TrainingJobName": "job"})
    to.cancel("job", made.folder)


def test_what_is_not_there_is_said_before_anything_is_sent(tmp_path, cloud):
    made, to = written(tmp_path, options={"channel.train": "s3://team/day"})
    cloud("s3").add_client_error("head_bucket", "404", "Not Found")
    cloud("s3").add_response("list_objects_v2", {"KeyCount": 0})
    cloud("iam").add_client_error("get_role", "NoSuchEntity", "no role train")
    bucket, data, role = to.check(made)
    assert "the bucket team: 404" in bucket
    assert "nothing at s3://team/day, for the channel train" in data
    assert "there is no role train" in role
    cloud("s3").add_response("head_bucket", {})
    cloud("s3").add_response("list_objects_v2", {"KeyCount": 1})
    cloud("iam").add_client_error("get_role", "AccessDenied", "who may not ask is told nothing")
    assert to.check(made) == []
