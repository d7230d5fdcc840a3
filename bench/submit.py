"""What `flatout submit slurm` costs beyond srun by hand, and what a preemption loses.

    python bench/submit.py [--restarts 3] [--preemptions 3] [--json [FILE]]

On a cluster of two nodes that it starts on this machine: SLURM's own daemons, as root. A job of two
ranks is started by srun and by submit in turn, and timed up to its first step. Then one is requeued
some times while it trains, and its weights are compared with those of one that was left alone.

The files of a matrix of jobs are given to their vendors' own schemas: Kubeflow's, botocore's model
of SageMaker, and sbatch. `--artifacts` does that alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from flatout.save.model_file import load_model
from restarts import PROGRESS, PeerFailed, each, run_to_end, tell
from results import Key, Results, add_arguments, figure, finish, positive

sys.path.append(str(Path(__file__).parents[1] / "tests" / "world"))
sys.path.append(str(Path(__file__).parents[1] / "tests" / "submit"))
from slurm_cluster import Cluster, missing
from submit_schemas import CRDS, errors_of_many, sbatch_errors

MAIN = [sys.executable, "-c", "from flatout.cli.main import main; main()"]
JOB = """
    import sys, time
    import numpy as np, torch, flatout

    class Steps(flatout.Callback):
        every = 1
        def on_step(self, state):
            if state.trainer.world().is_first:
                with open(sys.argv[1], "a") as file:
                    file.write(f"{state.step} {time.time()}\\n")
            time.sleep(float(sys.argv[3]))

    rng = np.random.default_rng(1)
    x = rng.normal(size=(2000, 20)).astype(np.float32)
    y = rng.integers(0, 5, 2000)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 5))
    trainer = flatout.Trainer(model, lr=0.01, allow="exact")
    trainer.fit((x, y), batch_size=10, epochs=int(sys.argv[4]), callbacks=[Steps()])
    trainer.save(sys.argv[2])
"""


class Lab:
    """A folder with the script, and the cluster."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self.folder, self.cluster = folder, cluster
        (folder / "job.py").write_text(textwrap.dedent(JOB))
        self.environment = {**cluster.environment, "XDG_STATE_HOME": str(folder / "state")}

    def run(self, *command: str) -> str:
        out, err, code = run_to_end(command, self.folder, variables=self.environment)
        if code:
            raise PeerFailed(f"{command[:6]}: {out}{err}")
        return out

    def submit(self, *words: str) -> dict[str, object]:
        options = ("--yes", "--json", "--nodes", "2", "--threads", "1", "--shared", "/")
        return dict(json.loads(self.run(*MAIN, "submit", "slurm", *options, *words)))

    def steps(self, name: str) -> list[tuple[int, float]]:
        try:
            lines = (self.folder / name).read_text().splitlines()
        except FileNotFoundError:
            return []
        return [(int(step), float(at)) for step, at in (line.split() for line in lines)]

    def words(self, name: str, pause: float, epochs: int) -> list[str]:
        files = [str(self.folder / one) for one in (name, f"{name}.safetensors")]
        return ["job.py", *files, str(pause), str(epochs)]

    def wait_for(self, happened: Callable[[], bool], seconds: float = 180) -> None:
        until = time.monotonic() + seconds
        while not happened():
            if time.monotonic() > until:
                raise PeerFailed("the cluster made no progress in time")
            time.sleep(0.05)

    def wait_for_steps(self, name: str, more: int) -> None:
        seen = len(self.steps(name))
        self.wait_for(lambda: len(self.steps(name)) >= seen + more)

    def is_idle(self) -> bool:
        return not self.cluster.ask("squeue", "-h").strip()


def by_hand(lab: Lab, name: str) -> float:
    """Seconds from srun to the first step."""
    began = time.time()
    flatout = str(Path(sys.executable).parent / "flatout")
    words = lab.words(name, 0, 1)
    lab.run("srun", "-N2", "--ntasks-per-node=1", flatout, "run", "--devices", "1", *words)
    return lab.steps(name)[0][1] - began


def by_submit(lab: Lab, name: str) -> float:
    """Seconds from flatout submit to the first step."""
    began = time.time()
    lab.submit(*lab.words(name, 0, 1))
    lab.wait_for(lambda: bool(lab.steps(name)) and lab.is_idle())
    return lab.steps(name)[0][1] - began


def preempted(lab: Lab, times: int) -> tuple[int, float]:
    """Steps lost by all requeues, and the largest difference of a weight."""
    whole, cut = lab.words("whole", 0, 1), lab.words("cut", 0.05, 1)
    lab.submit(*whole)
    lab.wait_for(lambda: (lab.folder / "whole.safetensors").exists() and lab.is_idle())
    sent = lab.submit("--checkpoints", str(lab.folder / "run"), *cut)
    for _ in range(times):
        lab.wait_for_steps("cut", 20)
        lab.run("scontrol", "requeue", str(sent["id"]))
    lab.wait_for(lambda: (lab.folder / "cut.safetensors").exists() and lab.is_idle())
    done = [step for step, _ in lab.steps("cut")]
    lost = len(done) - len(set(done))
    first, second = (load_model(str(lab.folder / f"{n}.safetensors")) for n in ("whole", "cut"))
    different = max(float((first[k].double() - second[k].double()).abs().max()) for k in first)
    if not all(torch.equal(first[k], second[k]) for k in first):
        different = max(different, sys.float_info.min)
    return lost, different


def artifacts(cluster: Cluster, folder: Path) -> Key:
    """How many of the generated jobs are as their vendors' schemas want them."""
    if not CRDS.is_dir():
        return Key("artefacts_valid", f"Kubeflow's schemas are not in {CRDS}")
    found = [*errors_of_many(folder), *sbatch_errors(cluster, folder)]
    valid = sum(not errors for errors in found)
    return Key("artefacts_valid", float(valid), at_least=len(found), note=f"of {len(found)} jobs")


def results(
    hand: list[float], sent: list[float], times: int, lost: list[tuple[int, float]], valid: Key
) -> Results:
    figures = [("srun by hand", hand), ("flatout submit slurm", sent)]
    return Results(
        title="Two nodes of one rank each, from the command to the first step",
        headers=["", "seconds", "from", "to", ""],
        lines=[
            [name, f"{median(one):.1f}", f"{min(one):.1f}", f"{max(one):.1f}", ""]
            for name, one in figures
            if one
        ],
        remarks=[f"Then a job of 200 steps was requeued {times} times while it trained."],
        keys=[
            Key("overhead_s", figure(lambda: median(sent) - median(hand)), at_most=3),
            Key(
                "requeue_lost_steps",
                figure(lambda: float(lost[0][0])),
                at_most=0,
                note="steps trained twice",
            ),
            Key(
                "resubmit_same_weights",
                figure(lambda: lost[0][1]),
                at_most=0,
                note="largest difference; 0 is bitwise",
            ),
            valid,
        ],
        data={"by_hand_s": hand, "by_submit_s": sent, "preemptions": times},
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, restarts=3)
    parser.add_argument("--preemptions", type=positive, default=3, metavar="N", help="default 3")
    parser.add_argument("--artifacts", action="store_true", help="only look at the matrix of jobs")
    arguments = parser.parse_args()
    hand: list[float] = []
    sent: list[float] = []
    lost: list[tuple[int, float]] = []
    valid: list[Key] = []

    def measure(base: Path) -> None:
        for name in ("slurm", "jobs", "matrix"):
            (base / name).mkdir()
        cluster = Cluster(base / "slurm", "GresTypes=gpu\n")
        try:
            valid.append(artifacts(cluster, base / "matrix"))
            tell(valid[0].words)
            if arguments.artifacts:
                return
            lab = Lab(base / "jobs", cluster)
            for n in range(arguments.restarts):
                hand.append(by_hand(lab, f"hand{n}"))
                sent.append(by_submit(lab, f"sent{n}"))
                tell(f"{n + 1}/{arguments.restarts} by hand {hand[n]:.1f} s, sent {sent[n]:.1f} s")
            lost.append(preempted(lab, arguments.preemptions))
        finally:
            cluster.stop()

    if missing() or os.getuid():
        needed = f"needs root and SLURM; not installed: {', '.join(missing()) or 'none'}"
        PROGRESS.failures.append(needed)
    else:
        with tempfile.TemporaryDirectory(prefix="flatout-bench-") as base:
            each([Path(base)], measure)
    checked = (valid or [Key("artefacts_valid", PROGRESS.reason)])[0]
    return finish(results(hand, sent, arguments.preemptions, lost, checked), arguments)


if __name__ == "__main__":
    raise SystemExit(main())
