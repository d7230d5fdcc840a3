"""Sends CreateTrainingJob requests by the sagemaker SDK, in an environment that has it alone.

Reads a JSON list of requests from stdin; fails where the SDK would send anything else.
"""

import json
import sys

import boto3
from botocore.stub import Stubber
from sagemaker.core.resources import TrainingJob
from sagemaker.core.utils.code_injection.codec import pascal_to_snake


def snake(value):
    """A request's parameters under the SDK's own names."""
    if isinstance(value, dict):
        return {pascal_to_snake(name): snake(one) for name, one in value.items()}
    if isinstance(value, list):
        return [snake(one) for one in value]
    return value


def described(asked):
    """What DescribeTrainingJob says of a job that was just created."""
    kept = ("TrainingJobName", "AlgorithmSpecification", "ResourceConfig", "StoppingCondition")
    return {
        **{name: asked[name] for name in kept},
        "TrainingJobArn": "arn:aws:sagemaker:eu-west-1:123456789012:training-job/a",
        "TrainingJobStatus": "InProgress",
        "SecondaryStatus": "Starting",
        "CreationTime": 0,
        "ModelArtifacts": {"S3ModelArtifacts": "s3://team/model"},
    }


requests = json.load(sys.stdin)
session = boto3.Session("none", "none", region_name="eu-west-1")
client = session.client("sagemaker")
session.client = lambda *service, **options: client  # all that the SDK asks for is stubbed
with Stubber(client) as stub:
    for asked in requests:
        created = described(asked)
        arn = {"TrainingJobArn": created["TrainingJobArn"]}
        stub.add_response("create_training_job", arn, asked)
        name = {"TrainingJobName": asked["TrainingJobName"]}
        stub.add_response("describe_training_job", created, name)
        job = TrainingJob.create(**snake(asked), session=session, region="eu-west-1")
        assert job.training_job_name == asked["TrainingJobName"]
    stub.assert_no_pending_responses()
print(f"sent {len(requests)} requests")
