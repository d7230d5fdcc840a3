"""A Ray cluster of two nodes on this machine, one of which is killed in the middle of a job."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from submit_schemas import a_job

import flatout
from flatout.submit.sending import write
from flatout.submit.target import target_of

pytest.importorskip("ray.train", exc_type=ImportError)
cluster_utils = pytest.importorskip("ray.cluster_utils")

TRAIN = """
import sys
import time
from pathlib import Path

import torch
import flatout
from flatout.recipe import Recipe, Save
from flatout.world import place


class Slow(flatout.Callback):
    def on_step(self, state):
        time.sleep(float(sys.argv[2]))
        Path(sys.argv[1], f"step-{place().rank}").write_text(str(state.step))


torch.manual_seed(0)
x = torch.randn(256, 8)
y = (x.sum(1) > 0).long()
model = torch.nn.Linear(8, 2)
trainer = flatout.Trainer(
    model, loss="cross_entropy", lr=0.1, allow="exact", recipe=Recipe(save=Save(every=5)),
    callbacks=[Slow()],
)
trainer.fit((x, y), batch_size=16, epochs=3)
if place().rank == 0:
    torch.save((place().world_size, model.state_dict()), Path(sys.argv[1], "weights.pt"))
"""


def environment(**more):
    """So that nodes find the flatout that is tested."""
    source = str(Path(flatout.__file__).parents[1])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {"PYTHONPATH": source, "PATH": path, **more}


def a_ray_job(folder, pause, **changes):
    root = folder / "code"
    root.mkdir(parents=True)
    (root / "train.py").write_text(TRAIN)
    (root / "lib").mkdir()
    (root / "lib" / "model.py").write_text("")
    return a_job(
        folder, "ray", nodes=2, checkpoint=str(folder / "run"),
        arguments=(str(folder), str(pause)), environment=environment(), **changes,
    )  # fmt: skip


def until(what, limit_s=90):
    end = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < end, what
        time.sleep(0.1)


@pytest.fixture
def cluster(monkeypatch):
    for name, value in environment(RAY_DEDUP_LOGS="0", RAY_TRAIN_V2_ENABLED="1").items():
        monkeypatch.setenv(name, value)
    made = cluster_utils.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    yield made
    made.shutdown()


@pytest.mark.slow
def test_a_job_ends_right_though_a_node_is_killed_in_the_middle(cluster, tmp_path):
    import torch

    job = a_ray_job(tmp_path, 0.05, retries=2)
    write(job, target_of("ray"))
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(
            [sys.executable, "driver.py"], cwd=job.folder, stdout=log, stderr=log,
            env={**os.environ, "RAY_ADDRESS": cluster.address},
        )  # fmt: skip
    try:
        steps = tmp_path / "step-0"
        until(lambda: run.poll() is not None or (steps.exists() and int(steps.read_text()) > 12))
        assert run.poll() is None, (tmp_path / "log").read_text()
        cluster.remove_node(nodes[1], allow_graceful=False)
        cluster.add_node(num_cpus=1)
        assert run.wait(120) == 0, (tmp_path / "log").read_text()
    finally:
        run.kill()
        run.wait()
    size, weights = torch.load(tmp_path / "weights.pt")
    assert size == 2
    assert "resumed step" in (tmp_path / "log").read_text()
    undisturbed = plain(tmp_path / "plain")
    assert all(torch.equal(weights[name], undisturbed[name]) for name in weights)


def plain(folder):
    """The weights of the same script on two ranks of this machine, undisturbed."""
    import torch

    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    call = [sys.executable, "-c", "from flatout.cli.main import main; main()"]
    subprocess.run(
        [*call, "run", "--devices", "2", "train.py", str(folder), "0"], cwd=folder, check=True,
        env={**os.environ, **environment()}, capture_output=True, timeout=120,
    )  # fmt: skip
    return torch.load(folder / "weights.pt")[1]
