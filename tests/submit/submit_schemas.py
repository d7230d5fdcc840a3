"""The vendors' own schemas, and jobs to check against them."""

import functools
import itertools
import json
import re
from pathlib import Path

import pytest

from flatout.recipe import Recipe
from flatout.submit.code import CodeArchive
from flatout.submit.job import Job
from flatout.submit.target import target_of

CRDS = Path(__file__).parents[3] / "shared" / "data" / "crd"

has_crds = pytest.mark.skipif(not CRDS.is_dir(), reason="../shared/data is not beside the project")
"""For tests that need the schemas of Kubeflow."""

KUBERNETES = {"image": "registry.example/team/train:1"}
SAGEMAKER = {
    "image": "123456789012.dkr.ecr.eu-west-1.amazonaws.com/train:1",
    "role": "arn:aws:iam::123456789012:role/train",
    "instance": "ml.c5.2xlarge",
    "bucket": "s3://team/jobs",
}
OPTIONS = {"kubernetes": KUBERNETES, "sagemaker": SAGEMAKER, "ray": {}, "slurm": {}}


def a_job(folder, target="kubernetes", **changes):
    """A job with two files of code."""
    root = folder / "code"
    if not root.exists():
        (root / "lib").mkdir(parents=True)
        (root / "train.py").write_text("import lib.model\nprint('trained')\n")
        (root / "lib" / "model.py").write_text("# ü\nrows = 3\n")
    options = {**OPTIONS[target], **changes.pop("options", {})}
    files = ("lib/model.py", "train.py")
    given = {
        "name": "train-2026-11-26-1201",
        "script": "train.py",
        "root": root,
        "folder": folder / "submit",
        "code": CodeArchive(files, sum((root / one).stat().st_size for one in files)),
        "options": options,
    }
    return Job(**{**given, **changes})


def many_jobs(folder, target, every=1):
    """Jobs of all 72 shapes, or of every so many-th."""
    url = {"sagemaker": "s3://team/runs/a"}.get(target, "s3://bucket/runs/a")
    shapes = itertools.product(
        (1, 2, 16),
        ((1, 1, 0), (4, 2, 0), (8, 6, 8)),
        (None, 7200),
        (None, Recipe()),
        (None, url),
    )
    for nodes, (devices, threads, gpus), time_s, recipe, checkpoint in itertools.islice(
        shapes, 0, None, every
    ):
        yield a_job(
            folder,
            target,
            nodes=nodes,
            devices=devices,
            threads=threads,
            gpus=gpus,
            time_s=time_s,
            recipe=recipe,
            checkpoint=checkpoint,
            arguments=("--epochs", "5", "--name", "a b"),
            environment={"LEVEL": "$(HOME) 1"},
            fingerprint="EPYC 9V74, 2 CPUs, torch 2.13.0",
            options={"storage": "s3://bucket/notes"} if target == "ray" else {},
        )


def made(job, name):
    """The artifacts of a job by name."""
    return {one.name: one.text for one in target_of(name).artifacts(job)}


def documents(job):
    """What the API server is given."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return list(yaml.load_all(made(job, "kubernetes")["job.yaml"], loader))


def kubernetes_errors(found):
    """What the API server would say to a document."""
    if found["kind"] == "ConfigMap":
        is_name = re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", found["metadata"]["name"])
        return [] if is_name else ["name"]
    return [one.message for one in validator(found["kind"]).iter_errors(found)]


def errors_of_many(folder, every=1):
    """Of each job of a matrix, or every so many-th of them, what its vendor's schema says."""
    for job in many_jobs(folder, "kubernetes", every):
        yield [error for one in documents(job) for error in kubernetes_errors(one)]
    for job in many_jobs(folder, "sagemaker", every):
        # Refused by botocore's model where it is not as that says.
        name = json.loads(made(job, "sagemaker")["training_job.json"])["TrainingJobName"]
        yield [] if name == job.name else [name]
    for job in many_jobs(folder, "ray", every):
        compile(made(job, "ray")["driver.py"], "driver.py", "exec")
        yield []


def sbatch_errors(cluster, folder):
    """Of 72 batch scripts, what sbatch says to what it does not understand, as it says itself."""
    path = folder / "job.sbatch"
    for job in many_jobs(folder, "slurm"):
        path.write_text(made(job, "slurm")["job.sbatch"])
        done = cluster.run("sbatch", "--test-only", path, cwd=folder)
        # The lab is smaller than the jobs of the matrix.
        is_right = done.returncode == 0 or "node configuration is not available" in done.stderr
        yield [] if is_right else [done.stderr]


@functools.cache
def validator(kind):
    """A validator of Kubeflow's resources that knows no fields beyond theirs."""
    import yaml
    from jsonschema import Draft202012Validator

    file = {"TrainJob": "trainjobs.yaml"}[kind]
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    crd = yaml.load((CRDS / file).read_text(), loader)
    (version,) = crd["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"] = {"type": "object"}
    return Draft202012Validator(_strict(json.loads(json.dumps(schema))))


def _strict(schema):
    """As the API server prunes: what the schema does not name is not kept."""
    if schema.pop("x-kubernetes-int-or-string", False):
        schema.pop("type", None)
        schema["type"] = ["integer", "string"]
        schema.pop("anyOf", None)
    open_ended = schema.pop("x-kubernetes-preserve-unknown-fields", False)
    for one in schema.get("properties", {}).values():
        _strict(one)
    if "properties" in schema and "additionalProperties" not in schema and not open_ended:
        schema["additionalProperties"] = False
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            _strict(schema[name])
    return schema


def expanded(text, variables):
    """As Kubernetes expands $(NAME) in commands, arguments and variables.

    k8s.io/kubernetes/third_party/forked/golang/expansion
    """
    made, at = "", 0
    while at < len(text):
        if text[at] != "$" or at + 1 == len(text):
            made += text[at]
            at += 1
            continue
        following = text[at + 1]
        end = text.find(")", at + 2)
        if following == "$":
            made, at = made + "$", at + 2
        elif following == "(" and end >= 0:
            name = text[at + 2 : end]
            made, at = made + variables.get(name, f"$({name})"), end + 1
        else:
            made, at = made + text[at : at + 2], at + 2
    return made
