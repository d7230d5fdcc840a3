"""The containers of two nodes, started as the cluster would, with the variables that it sets."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import examples_as_jobs
import pytest
import yaml
from api_server import add_pod, api_server, kubectl
from examples_as_jobs import EXAMPLES, example
from jobs import until
from submit_schemas import a_job, expanded
from world_ranks import free_port

from flatout.measure import usable_cpus
from flatout.submit import Ledger, send_once, top_of, write
from flatout.submit.code import CodeArchive
from flatout.submit.target import target_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(usable_cpus() < 2, reason="two ranks take two CPUs"),
]

TRAIN = """
import os, sys, time
from pathlib import Path
import torch
import flatout
from flatout.world import join

class Slow(flatout.Callback):
    every = 1

    def on_step(self, state):
        if not Path(os.environ["ENOUGH"]).exists():
            time.sleep(0.2)

world = join()
total = torch.ones(1) * (world.rank + 1)
world.sum(total)
print("ranks", world.size, world.place.nodes, int(total), sys.argv[1], os.environ["LEVEL"])
if "ENOUGH" in os.environ:
    torch.manual_seed(0)
    x, y = torch.randn(128, 4), torch.zeros(128, dtype=torch.long)
    trainer = flatout.Trainer(torch.nn.Linear(4, 2), lr=0.1, allow="exact")
    trainer.fit((x, y), batch_size=8, epochs=50, callbacks=[Slow()])
"""


def job(tmp_path, cluster, variables=(), **options):
    made = a_job(
        tmp_path, cluster, nodes=2, devices=1, options=options, arguments=("a  $(RANK) `b`",),
        environment={"LEVEL": "$(HOME)", **dict(variables)},
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


def start(commands, path):
    """Processes in the place of containers."""
    return [
        subprocess.Popen(command, env={**os.environ, "PATH": path, **env}, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True)
        for command, env in commands
    ]  # fmt: skip


def told_by(containers):
    """What the containers print; all of them end well."""
    told = [one.communicate(timeout=240)[0] for one in containers]
    assert [one.returncode for one in containers] == [0, 0], told
    return told


def check(said):
    for one in said:
        assert "ranks 2 2 3 a  $(RANK) `b` $(HOME)\n" in one


def written(made):
    """The manifest of a job."""
    return list(yaml.safe_load_all(target_of("kubernetes").artifacts(made)[0].text))[-1]


def nodes_of_kubernetes(found):
    """The containers of a manifest, as its nodes start them."""
    port = str(free_port())
    for node in range(2):
        container = found["spec"]["trainer"]
        variables = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": str(container["numProcPerNode"]),
                     "PET_NODE_RANK": str(node), "PET_MASTER_ADDR": "127.0.0.1",
                     "PET_MASTER_PORT": port}  # fmt: skip
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


def test_kubernetes(tmp_path, path, monkeypatch):
    """`flatout top` shows both ranks of a TrainJob meanwhile."""
    pytest.importorskip("kubernetes")
    enough = tmp_path / "enough"
    variables = {"ENOUGH": str(enough)}
    made = job(tmp_path, "kubernetes", variables, code=str(tmp_path / "code"))
    write(made, to := target_of("kubernetes"))
    with api_server(tmp_path) as (server, config):
        monkeypatch.setenv("KUBECONFIG", config)
        id = send_once(made, to, Ledger()).id
        found = server.objects["team", "trainjobs", made.name]
        found["status"] = {"jobsStatus": [{"name": "node", "ready": 1}]}
        containers = start(nodes := list(nodes_of_kubernetes(found)), path)
        pods = {
            add_pod(server, made, number, phase="Running"): {**os.environ, "PATH": path, **env}
            for number, (_, env) in enumerate(nodes)
        }
        monkeypatch.setenv("PATH", kubectl(tmp_path / "kubectl", pods), prepend=":")
        try:
            until(lambda: ranks_shown(id) == [0, 1] or any(one.poll() for one in containers))
        finally:
            enough.touch()
    check(told_by(containers))


def ranks_shown(id):
    jobs = top_of(id).sample().jobs
    return [now.rank.rank for job in jobs for now in job.ranks if now.rank.lanes_ms]


def test_sagemaker(tmp_path, path):
    pytest.importorskip("botocore")
    made = replace(job(tmp_path, "sagemaker"), checkpoint="s3://team/runs/a")
    nodes = list(nodes_of_sagemaker(made, tmp_path / "input"))
    script = tmp_path / "input" / "start.sh"
    text = script.read_text().replace("/opt/ml/checkpoints", str(tmp_path / "checkpoints"))
    script.write_text(text)
    check(told_by(start(nodes, path)))


@pytest.mark.long
@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("target", ["kubernetes", "sagemaker"])
def test_the_examples(target, name, tmp_path, path):
    on_kubernetes = target == "kubernetes"
    pytest.importorskip("kubernetes" if on_kubernetes else "botocore")
    options = {"code": str(tmp_path / "code")} if on_kubernetes else {}
    made = job(tmp_path, target, **options)
    files, (script, *arguments) = example(name, made.root, tmp_path / "shared")
    code = CodeArchive(tuple(files), 1)
    made = replace(made, script=script, arguments=tuple(arguments), code=code)
    nodes = (
        nodes_of_kubernetes(written(made))
        if on_kubernetes
        else nodes_of_sagemaker(made, tmp_path / "input")
    )
    examples_as_jobs.check(name, "".join(told_by(start(nodes, path))), tmp_path / "shared")
