"""What Kubernetes, SageMaker and Ray are given, against their own schemas."""

import base64
import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import yaml
from nasty import NASTY as ALL
from submit_schemas import (
    a_job,
    documents,
    errors_of_many,
    expanded,
    has_crds,
    kubernetes_errors,
    made,
)

from flatout.errors import SubmitError
from flatout.recipe import Recipe
from flatout.submit.inputs import Input
from flatout.submit.target import target_of

pytest.importorskip("yaml")
pytest.importorskip("botocore")

# Kubernetes takes text alone.
NASTY = [one for one in ALL if one.isascii() or one.encode(errors="ignore").decode() == one]


@has_crds
@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_artefacts_are_valid(every, tmp_path):
    """Of 216 jobs all, or every ninth: each by the schema of its vendor."""
    found = list(errors_of_many(tmp_path, every))
    assert [one for one in found if one] == []
    assert len(found) == 3 * 72 // every


@has_crds
def test_the_schemas_find_what_is_wrong(tmp_path):
    *_, train = documents(a_job(tmp_path))
    for change in (
        lambda d: d["spec"].update(numNodes=2),
        lambda d: d["spec"]["trainer"].update(numProcPerNode="4"),
        lambda d: d["spec"].pop("runtimeRef"),
        lambda d: d["spec"].update(activeDeadlineSeconds=0),
    ):
        broken = json.loads(json.dumps(train))
        change(broken)
        assert kubernetes_errors(broken)


# -- Kubernetes ----------------------------------------------------------------------------------


def test_a_train_job(tmp_path):
    job = a_job(
        tmp_path,
        nodes=2,
        devices=4,
        threads=3,
        time_s=7200,
        stop_ahead_s=90,
        recipe=Recipe(),
        fingerprint="EPYC, 12 CPUs",
        checkpoint="/runs/a",
        arguments=("--epochs", "5"),
        options={
            "volumes": "runs:/runs,day:/data:ro",
            "memory": "32Gi",
            "interface": "eth1",
            "queue": "team",
            "node-selector": "pool=cpu",
            "tolerations": "dedicated=train:NoSchedule,spot",
            "namespace": "team",
        },
    )
    config, train = documents(job)
    spec, trainer = train["spec"], train["spec"]["trainer"]
    assert train["metadata"]["namespace"] == "team"
    assert train["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert train["metadata"]["annotations"]["flatout/recipe-fingerprint"] == "EPYC, 12 CPUs"
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
    assert trainer["resourcesPerNode"]["limits"] == {"cpu": "12", "memory": "32Gi"}
    assert spec["activeDeadlineSeconds"] == 7200
    env = {one["name"]: one.get("value") for one in trainer["env"]}
    assert env["GLOO_SOCKET_IFNAME"] == "eth1"
    assert not [name for name in env if name.startswith("PET_")]
    secret = trainer["env"][-1]["valueFrom"]["secretKeyRef"]
    assert secret == {"name": job.name, "key": "FLATOUT_SECRET", "optional": True}
    assert trainer["args"] == [
        *("flatout", "run", "--recipe", "../recipe.toml", "--checkpoints", "/runs/a"),
        *("train.py", "--epochs", "5"),
    ]
    (replicated,) = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"][
        "replicatedJobs"
    ]
    pod = replicated["template"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 90
    assert pod["nodeSelector"] == {"pool": "cpu"}
    assert pod["tolerations"] == [
        {"key": "dedicated", "operator": "Equal", "value": "train", "effect": "NoSchedule"},
        {"key": "spot", "operator": "Exists"},
    ]
    mounts = pod["containers"][0]["volumeMounts"]
    assert [(one["mountPath"], one.get("readOnly", False)) for one in mounts] == [
        *(("/flatout", True), ("/runs", False), ("/data", True)),
    ]
    assert set(config["data"]) == {"recipe.toml", "code_train.py", "code_lib_model.py"}
    assert pod["volumes"][0]["configMap"]["items"] == [
        {"key": "recipe.toml", "path": "recipe.toml"},
        {"key": "code_lib_model.py", "path": "code/lib/model.py"},
        {"key": "code_train.py", "path": "code/train.py"},
    ]


def test_the_code_of_a_config_map_runs_as_it_lies_here(tmp_path):
    """What sh is given, with the volume's files where Kubernetes would lay them."""
    job = a_job(tmp_path, recipe=Recipe())
    (job.root / "data.bin").write_bytes(bytes(range(256)))
    (job.root / "with space.txt").write_text("a: b\n  - c \n\ttab\n")
    code = type(job.code)((*job.code.files, "data.bin", "with space.txt"), 1)
    job = replace(job, code=code)
    config, train = documents(job)
    mounted, copy = tmp_path / "mounted", tmp_path / "copy"
    contents = {key: text.encode() for key, text in config["data"].items()}
    contents |= {key: base64.b64decode(text) for key, text in config["binaryData"].items()}
    patch = train["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
    pod = patch["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    for item in pod["volumes"][0]["configMap"]["items"]:
        path = mounted / item["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents[item["key"]])
    (tmp_path / "flatout").write_text('#!/bin/sh\npwd; echo "$@"; touch written; cat lib/model.py')
    (tmp_path / "flatout").chmod(0o755)
    trainer = train["spec"]["trainer"]
    words = [expanded(one, {}) for one in trainer["command"] + trainer["args"]]
    words = [one.replace("/tmp/flatout", str(copy)).replace("/flatout/.", f"{mounted}/.")
             for one in words]  # fmt: skip
    said = subprocess.run(
        words, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert said[0] == str(copy / "code")
    assert said[1] == "run --recipe ../recipe.toml train.py"
    assert said[2:] == ["# ü", "rows = 3"]
    for name in code.files:
        assert (copy / "code" / name).read_bytes() == (job.root / name).read_bytes()
    assert (copy / "recipe.toml").is_file()


def test_ranks_that_the_nodes_measure(tmp_path):
    train = documents(a_job(tmp_path, is_auto=True))[-1]["spec"]["trainer"]
    assert train["args"][:4] == ["flatout", "run", "--devices", "auto"]
    assert train["numProcPerNode"] == 1  # which the command overrides


def test_code_that_lies_in_the_image(tmp_path):
    job = a_job(tmp_path, recipe=Recipe(), options={"code": "/app dir"})
    config, train = documents(job)
    assert set(config["data"]) == {"recipe.toml"}
    assert train["spec"]["trainer"]["command"][2] == "cd '/app dir' && exec \"$$@\""
    assert "/flatout/recipe.toml" in train["spec"]["trainer"]["args"]
    (alone,) = documents(a_job(tmp_path, options={"code": "/app"}))
    assert alone["kind"] == "TrainJob"


def test_a_command_of_flatouts_own_needs_no_code(tmp_path):
    (found,) = documents(a_job(tmp_path, script="flatout", arguments=("data", "convert", "a", "b")))
    trainer = found["spec"]["trainer"]
    assert trainer["command"] + trainer["args"] == ["flatout", "data", "convert", "a", "b"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"options": {"image": ""}}, "no image: --option image="),
        ({"options": {"image": "a b"}}, "expected an image"),
        ({"options": {"volume": "a:/b"}}, "expected --option of"),
        ({"options": {"volumes": "runs"}}, "CLAIM:/path"),
        ({"options": {"volumes": "runs:/runs:rx"}}, "CLAIM:/path"),
        ({"options": {"node-selector": "pool"}}, "NAME=VALUE"),
        ({"options": {"tolerations": "a:Never"}}, "KEY=VALUE:EFFECT"),
        ({"options": {"code": "app"}}, "a/path/in/the/container"),
        ({"checkpoint": "/runs/a"}, "no node can keep /runs/a"),
        ({"checkpoint": "/runs/a", "options": {"volumes": "r:/runs:ro"}}, "no node can keep"),
        ({"name": "a" * 60}, "at most 50"),
        ({"environment": {"A B": "2"}}, "no name of a variable"),
        ({"arguments": ("\udcff",)}, "not UTF-8"),
        ({"is_auto": True, "has_measured_threads": False}, "say how many with --threads N"),
    ],
)
def test_what_kubernetes_would_refuse_is_said_at_once(changes, words, tmp_path):
    with pytest.raises(SubmitError, match=re.escape(words)):
        made(a_job(tmp_path, **changes), "kubernetes")


def test_code_that_is_too_much_for_a_config_map(tmp_path):
    job = a_job(tmp_path)
    (job.root / "train.py").write_text("#" * (1 << 20))
    with pytest.raises(SubmitError, match="at most 1 MiB") as refused:
        documents(job)
    assert "--option code=/path" in refused.value.do


def test_paths_that_no_pod_sees_are_named(tmp_path):
    inputs = (
        Input("day.svm", "/home/me/day.svm", "/home (ext4)"),
        Input("/data/day.svm", "/data/day.svm", "/data (nfs4)", is_seen=True),
        Input("s3://bucket/day", "s3://bucket/day"),
    )
    job = a_job(tmp_path, inputs=inputs)
    first, second = target_of("kubernetes").unseen(job)
    assert "day.svm lies on /home (ext4), which no pod sees" in first
    assert "volumes=CLAIM:/data" in second  # a pod does not have what is mounted here
    job = a_job(tmp_path, inputs=inputs[1:], options={"volumes": "day:/data"})
    assert target_of("kubernetes").unseen(job) == []


def test_what_is_not_installed_is_named(tmp_path, monkeypatch):
    for name, module, extra in (
        ("kubernetes", "yaml", "kubernetes"),
        ("sagemaker", "botocore.validate", "sagemaker"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(SubmitError, match=f"{module.partition('.')[0]} is not installed") as no:
            made(a_job(tmp_path, name), name)
        assert no.value.do == f"pip install 'flatout[{extra}]'"
        monkeypatch.undo()


# -- arguments -----------------------------------------------------------------------------------

SHOW = "#!{python}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n"


@pytest.fixture
def shown(tmp_path):
    """Runs a command in which flatout is one that prints its arguments as JSON."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "flatout").write_text(SHOW.format(python=sys.executable))
    (folder / "flatout").chmod(0o755)

    def run(command, **options):
        done = subprocess.run(
            command, env={"PATH": f"{folder}:/usr/bin:/bin"}, check=True,
            capture_output=True, **options,
        )  # fmt: skip
        return json.loads(done.stdout)

    return run


def test_no_argument_is_a_number_or_a_truth_to_another_reader_of_yaml(tmp_path):
    given = ("1e3", "0o17", "0x1p-2", "12:30", "1_0", ".5", "-.inf", "y", "NO", "on", "~", "", "<<")
    text = made(a_job(tmp_path, arguments=given), "kubernetes")["job.yaml"]
    styles = {one.value: one.style for one in yaml.parse(text) if isinstance(one, yaml.ScalarEvent)}
    assert {styles[one] for one in given} == {"'"}


def test_nasty_arguments_come_through_kubernetes(tmp_path, shown):
    assert len(NASTY) > 100
    job = a_job(tmp_path, arguments=tuple(NASTY), options={"code": str(tmp_path)})
    found = documents(job)[-1]
    container = found["spec"]["trainer"]
    variables = {"HOME": "/root"}
    words = [expanded(one, variables) for one in container["command"] + container["args"]]
    assert shown(words)[-len(NASTY) :] == NASTY
    environment = dict(enumerate(NASTY))
    job = a_job(tmp_path, environment={f"V{n}": value for n, value in environment.items()})
    env = documents(job)[-1]["spec"]["trainer"]["env"]
    values = [expanded(one["value"], variables) for one in env if one["name"].startswith("V")]
    assert values == NASTY


def test_nasty_arguments_come_through_sagemaker(tmp_path, shown):
    nasty = ALL
    job = a_job(tmp_path, "sagemaker", arguments=tuple(nasty), devices=2, recipe=Recipe())
    for one in target_of("sagemaker").artifacts(job):
        one.write(tmp_path)
    (tmp_path / "recipe.toml").write_text("")
    job.code.write(job.root, tmp_path / "code.tar.gz")
    said = shown(["/bin/bash", str(tmp_path / "start.sh")])
    assert said[:5] == ["run", "--recipe", "../recipe.toml", "--devices", "2"]
    assert said[-len(nasty) :] == nasty


def test_nasty_arguments_come_through_ray(tmp_path):
    nasty = ALL
    for one in target_of("ray").artifacts(a_job(tmp_path, "ray", arguments=tuple(nasty))):
        one.write(tmp_path)
    source = (tmp_path / "driver.py").read_text()
    line = source[source.index("COMMAND, ARGUMENTS") : source.index("ENVIRONMENT =")]
    scope = {}
    exec(line, scope)
    assert scope["ARGUMENTS"][-len(nasty) :] == nasty


# -- Ray -----------------------------------------------------------------------------------------


def test_a_ray_job(tmp_path):
    job = a_job(
        tmp_path, "ray", nodes=2, devices=4, threads=2, gpus=4, retries=7, time_s=3600,
        checkpoint="/shared/run a", environment={"LEVEL": "it's"},
    )  # fmt: skip
    found = made(job, "ray")
    driver, line = found["driver.py"], found["submit.sh"]
    for words in (
        "num_workers=NODES",
        "NODES = 2",
        "resources_per_worker={'CPU': 8, 'GPU': 4}",
        "FailureConfig(max_failures=7)",
        "use_gpu=True",
        "storage_path='/shared/run a-ray'",
        """{'LEVEL': "it's", 'FLATOUT_REMAINING': '/shared/run a-remaining.json'}""",
        "'timeout', '--preserve-status', '--signal=USR1'",
    ):
        assert words in driver
    assert f"--submission-id {job.name}" in line
    subprocess.run(["sh", "-n"], input=line, text=True, check=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nodes": 2}, "a folder that all nodes see"),
        ({"options": {"queue": "a"}}, "expected --option of address"),
        ({"nodes": 2, "script": "flatout", "options": {"storage": "/s"}}, "would do the same"),
    ],
)
def test_what_ray_would_refuse_is_said_at_once(changes, words, tmp_path):
    with pytest.raises(SubmitError, match=re.escape(words)):
        made(a_job(tmp_path, "ray", **changes), "ray")
