"""The script that a Ray job runs: on each node a worker of TorchTrainer starts its ranks."""

from __future__ import annotations

from flatout.submit import shell
from flatout.submit.code import ARCHIVE
from flatout.submit.job import Job

_SCRIPT = '''#!/usr/bin/env python3
"""Trains on {nodes} of a Ray cluster: one worker on each, which starts the ranks of its node."""

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import ray
import ray.train
import ray.train.collective
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

COMMAND, ARGUMENTS = {command}, {arguments}
ENVIRONMENT = {environment}
NODES = {count}
# Of Ray's own workers: the ranks get theirs from `flatout run`.
NOT_OURS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"),
)
LOST_ANOTHER = 75  # the exit code of ranks that have only lost others
TIME_IS_UP = 128 + signal.SIGUSR1


@ray.remote(num_cpus=0)
class Ends:
    """How the nodes have ended, of the present try."""

    def begin(self):
        self.codes = []

    def add(self, code):
        self.codes.append(code)

    def all(self):
        return self.codes


def die_with_worker():
    """Ranks end with the worker that has started them."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def meeting_place():
    """Where the nodes meet: a free port of the first one."""
    place = None
    if ray.train.get_context().get_world_rank() == 0:
        with socket.create_server(("", 0)) as server:
            place = f"{{ray.util.get_node_ip_address()}}:{{server.getsockname()[1]}}"
    return ray.train.collective.broadcast_from_rank_zero(place)


def run_node(job):
    """What the worker of each node does."""
    node, ends = ray.train.get_context().get_world_rank(), job["ends"]
    if node == 0:
        ray.get(ends.begin.remote())
    folder = Path(tempfile.mkdtemp(prefix="flatout-"))
    (folder / "code").mkdir()  # which stays empty for a command of Flatout's own
    (folder / "code.tar.gz").write_bytes(ray.get(job["code"]))
    with tarfile.open(folder / "code.tar.gz") as archive:
        archive.extractall(folder / "code", filter="data")
    if job["recipe"]:
        (folder / "recipe.toml").write_text(job["recipe"])
    where = []
    if NODES > 1:
        where = ["--nodes", str(NODES), "--node-rank", str(node), "--rendezvous", meeting_place()]
    kept = {{name: value for name, value in os.environ.items() if name not in NOT_OURS}}
    # Where Ray's own Python is, flatout is too.
    path = f"{{Path(sys.executable).parent}}{{os.pathsep}}{{os.environ.get('PATH', '')}}"
    code = subprocess.run(
        [*COMMAND, *where, *ARGUMENTS],
        cwd=folder / "code",
        env={{**kept, "PATH": path, "FLATOUT_SECRET": job["secret"], **ENVIRONMENT}},
        preexec_fn=die_with_worker,
    ).returncode
    ray.get(ends.add.remote(code))
    ray.train.collective.barrier()
    codes = ray.get(ends.all.remote())
    # Killed ranks start again. An error of a script's own would come again.
    if any(one < 0 or one >= 128 and one != TIME_IS_UP for one in codes):
        raise RuntimeError(f"ranks were killed: the nodes ended with {{codes}}")


def main():
    here = Path(__file__).resolve().parent  # the job server starts this elsewhere
    ray.init()
    # With the driver, so that no other node's end is its end.
    here_only = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    ends = Ends.options(scheduling_strategy=here_only).remote()
    recipe = here / "recipe.toml"
    job = {{
        "code": ray.put((here / "{archive}").read_bytes()),
        "recipe": recipe.read_text() if recipe.exists() else "",
        "secret": secrets.token_hex(32),
        "ends": ends,
    }}
    trainer = TorchTrainer(
        run_node,
        train_loop_config=job,
        scaling_config=ScalingConfig(
            num_workers=NODES,
            use_gpu={use_gpu},
            resources_per_worker={resources},
            placement_strategy="STRICT_SPREAD",
        ),
        run_config=RunConfig(
            name={name},
            storage_path={storage},
            # Nodes that are lost and ranks that are killed; not what a script raises itself.
            failure_config=FailureConfig(max_failures={retries}),
        ),
    )
    trainer.fit()
    failed = [code for code in ray.get(ends.all.remote()) if code]
    if failed:
        sys.exit(next((code for code in failed if code != LOST_ANOTHER), LOST_ANOTHER))


if __name__ == "__main__":
    main()
'''


def driver(job: Job, storage: str | None) -> str:
    resources: dict[str, int] = {"CPU": job.cpus}
    if job.gpus:
        resources["GPU"] = job.gpus
    words = job.command_with(*job.devices_option)
    begin = 1 if job.is_command else 2  # flatout run
    return _SCRIPT.format(
        nodes=f"{job.nodes} node{'s' if job.nodes > 1 else ''}",
        command=repr([*shell.limited(job), *words[:begin]]),
        arguments=_listed(words[begin:]),
        environment=repr(_environment(job)),
        count=job.nodes,
        archive=ARCHIVE,
        use_gpu=bool(job.gpus),
        resources=repr(resources),
        name=repr(job.name),
        storage=repr(storage),
        retries=job.retries,
    )


def remaining(checkpoint: str) -> str:
    """Return the file next to the run folder in which the first rank reports its remaining time."""
    return f"{checkpoint.rstrip('/')}-remaining.json"


def _environment(job: Job) -> dict[str, str]:
    own = dict(job.environment)
    if job.checkpoint is not None and "://" not in job.checkpoint:
        own.setdefault(shell.REMAINING, remaining(job.checkpoint))
    return own


def _listed(command: list[str]) -> str:
    line = repr(command)
    if len(line) < 80:
        return line
    return "\n".join(["[", *(f"    {item!r}," for item in command), "]"])
