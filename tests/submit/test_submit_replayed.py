"""The containers of two nodes, started as the cluster would, with the variables that it sets."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import examples_as_jobs
import pytest
import yaml
from examples_as_jobs import EXAMPLES, example
from submit_schemas import a_job, expanded
from world_ranks import free_port

from flatout.measure import usable_cpus
from flatout.submit.code import CodeArchive
from flatout.submit.target import target_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(usable_cpus() < 2, reason="two ranks take two CPUs"),
]

TRAIN = """
import os, sys
import torch
from flatout.world import join

world = join()
total = torch.ones(1) * (world.rank + 1)
world.sum(total)
print("ranks", world.size, world.place.nodes, int(total), sys.argv[1], os.environ["LEVEL"])
"""


def job(tmp_path, cluster, **options):
    made = a_job(
        tmp_path, cluster, nodes=2, devices=1, options=options, arguments=("a  $(RANK) `b`",),
        environment={"LEVEL": "$(HOME)"},
    )  # fmt: skip
    (made.root / "train.py").write_text(TRAIN)
    return made


@pytest.fixture
def path(tmp_path):
    """Of an image that has this Flatout."""
    call = "from flatout.cli.main import main; main()"
    (tmp_path / "bin").mkdir()
    flatout = tmp_path / "bin" / "flatout"
    flatout.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{call}' \"$@\"\n")
    flatout.chmod(0o755)
    return f"{tmp_path / 'bin'}:{os.environ['PATH']}"


def run(commands, path):
    """What the containers print; all of them end well."""
    started = [
        subprocess.Popen(command, env={**os.environ, "PATH": path, **env}, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True)
        for command, env in commands
    ]  # fmt: skip
    said = [one.communicate(timeout=240)[0] for one in started]
    assert [one.returncode for one in started] == [0, 0], said
    return said


def check(said):
    for one in said:
        assert "ranks 2 2 3 a  $(RANK) `b` $(HOME)\n" in one


def nodes_of_kubernetes(made, api):
    """The containers of a job, as its nodes start them."""
    text = target_of("kubernetes").artifacts(made)[0].text
    found = list(yaml.safe_load_all(text))[-1]
    port = str(free_port())
    for node in range(2):
        if api == "trainjob":
            container = found["spec"]["trainer"]
            variables = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": str(container["numProcPerNode"]),
                         "PET_NODE_RANK": str(node), "PET_MASTER_ADDR": "127.0.0.1",
                         "PET_MASTER_PORT": port}  # fmt: skip
        else:
            replica = found["spec"]["pytorchReplicaSpecs"][("Master", "Worker")[node]]
            (container,) = replica["template"]["spec"]["containers"]
            # Of operators before 1.7, which say no more than this.
            variables = {"RANK": str(node), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                         "MASTER_PORT": port}  # fmt: skip
        env = {one["name"]: expanded(one["value"], {}) for one in container["env"]
               if "value" in one}  # fmt: skip
        words = [expanded(one, variables) for one in container["command"] + container["args"]]
        yield words, {**env, **variables}


def nodes_of_sagemaker(made, channel):
    """The containers of a job, whose channel of code is a folder."""
    channel.mkdir()
    for one in target_of("sagemaker").artifacts(made):
        one.write(channel)
    made.code.write(made.root, channel / "code.tar.gz")
    (channel / "secret").write_text("known to both")
    hosts = ["127.0.0.1", "127.0.0.2"]
    env = {"SM_HOSTS": json.dumps(hosts), "SM_MASTER_PORT": str(free_port())}
    for host in hosts:
        yield ["/bin/bash", channel / "start.sh"], {**env, "SM_CURRENT_HOST": host}


@pytest.mark.parametrize("api", ["trainjob", "pytorchjob"])
def test_kubernetes(api, tmp_path, path):
    pytest.importorskip("kubeflow_trainer_api")
    made = job(tmp_path, "kubernetes", api=api, code=str(tmp_path / "code"))
    check(run(nodes_of_kubernetes(made, api), path))


def test_sagemaker(tmp_path, path):
    pytest.importorskip("botocore")
    made = job(tmp_path, "sagemaker")
    check(run(nodes_of_sagemaker(made, tmp_path / "input"), path))


@pytest.mark.long
@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("target", ["trainjob", "pytorchjob", "sagemaker"])
def test_the_examples(target, name, tmp_path, path):
    on_kubernetes = target != "sagemaker"
    pytest.importorskip("kubeflow_trainer_api" if on_kubernetes else "botocore")
    options = {"api": target, "code": str(tmp_path / "code")} if on_kubernetes else {}
    made = job(tmp_path, "kubernetes" if on_kubernetes else "sagemaker", **options)
    files, (script, *arguments) = example(name, made.root, tmp_path / "shared")
    code = CodeArchive(tuple(files), 1)
    made = replace(made, script=script, arguments=tuple(arguments), code=code)
    nodes = (
        nodes_of_kubernetes(made, target)
        if on_kubernetes
        else nodes_of_sagemaker(made, tmp_path / "input")
    )
    examples_as_jobs.check(name, "".join(run(nodes, path)), tmp_path / "shared")
