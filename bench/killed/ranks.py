"""Kills of a rank of two, and of the command that started them, which is then started again."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch

from flatout.save.checkpoint import Checkpoints
from flatout.save.model_file import load_model
from killed.leftovers import leftovers
from killed.processes import (
    PATIENCE_S,
    Hang,
    Lost,
    last_words,
    own_places,
    strays,
    until,
)
from killed.series import Kind, Outcome, is_writing

STEPS, EVERY = 120, 3
# About what it takes from the command to the first step.
START_S = 6.0
# Ranks start again by themselves within this time, or nothing goes on.
AGAIN_S = PATIENCE_S

JOB = """
import os, sys, time
import numpy as np, torch, flatout

class Tell(flatout.Callback):
    every = 1
    def on_step(self, state):
        rank = os.environ["RANK"]
        with open(f"step-{rank}.new", "w") as file:
            file.write(str(state.step))
        os.replace(f"step-{rank}.new", f"step-{rank}")
        time.sleep(0.01)

rng = np.random.default_rng(1)
x = rng.normal(size=(200, 20)).astype(np.float32)
y = rng.integers(0, 5, 200)
torch.manual_seed(0)
strategy, *settings = sys.argv[2].split(",")
dropout = 0.0 if strategy == "staged" else 0.2  # where a stage begins, others draw
model = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.ReLU(), torch.nn.Dropout(dropout),
                            torch.nn.Linear(300, 300), torch.nn.ReLU(), torch.nn.Linear(300, 5))
settings = dict(one.split("=") for one in settings)
world = {"strategy": strategy, **{name: int(value) for name, value in settings.items()}}
recipe = flatout.Recipe(world=world).replace({"save.every": EVERY, "save.pieces": sys.argv[1]})
trainer = flatout.Trainer(model, lr=0.01, allow="exact", metrics=["accuracy"], recipe=recipe,
                          run="run")
trainer.fit((x, y), batch_size=10, epochs=EPOCHS, callbacks=[Tell()], progress=False, resume=True)
trainer.save("final.safetensors")
""".replace("EVERY", str(EVERY)).replace("EPOCHS", str(STEPS // 20))


APART = ",apart"
"""Behind a strategy: with a server that computes nothing, behind the ranks."""

# The command would refuse more ranks than CPUs.
LAUNCH = """
import sys
from flatout.world import Nodes
from flatout.world.launch import launch
command = [sys.executable, "-m", "flatout.world.start", *sys.argv[2:]]
sys.exit(launch(command, Nodes(ranks=int(sys.argv[1])), 1000, {}))
"""


def begin(folder: Path, pieces: str, strategy: str = "ddp", count: int = 2) -> psutil.Popen:
    """Start the job in a folder; further settings of `world` may follow a strategy's name."""
    (folder / "train.py").write_text(JOB)
    call = "from flatout.cli.main import main; main()"
    command = [sys.executable, "-c", call, "run", "--devices", "2", "--restarts", "1000"]
    if strategy.endswith(APART):
        command += ["--servers", "1"]
    if count > 2:
        command = [sys.executable, "-c", LAUNCH, str(count)]
    with (folder / "said").open("ab") as said:
        return psutil.Popen(
            [*command, "train.py", pieces, strategy.removesuffix(APART)],
            cwd=folder,
            stdout=said,
            stderr=said,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **own_places(folder)},
        )


def finished(folder: Path, command: psutil.Popen) -> None:
    """Wait for the end of a job that is not killed any more.

    Raises:
        Hang: it does not come.
        Lost: it ends in an error.
    """
    try:
        until(lambda: command.poll() is not None, "the job does not end")
    except Hang as hang:
        raise Hang(f"{hang}\n{last_words(folder / 'said')}") from None
    finally:
        if command.poll() is None:
            command.kill()
            command.wait()
    if command.returncode:
        raise Lost(f"exit code {command.returncode}\n{last_words(folder / 'said')}")


def ranks(command: psutil.Popen) -> dict[int, psutil.Process]:
    found = {}
    try:
        for child in command.children():
            rank = child.environ().get("RANK")
            if rank is not None and child.status() != "zombie":
                found[int(rank)] = child
    except psutil.Error:
        pass
    return found


def step_of(folder: Path) -> int:
    """The latest step of any rank: one of them may have been dropped."""
    found = [0]
    for file in folder.glob("step-?"):
        try:
            found.append(int(file.read_text()))
        except (OSError, ValueError):
            continue
    return max(found)


def wait_for(moment: str, folder: Path, command: psutil.Popen, draw: random.Random) -> bool:
    """Wait for the moment of a kill; False where the job has ended before it.

    Raises:
        Hang: nothing goes on.
    """
    start, first = time.monotonic(), step_of(folder)
    begins = draw.uniform(0, START_S)
    step = draw.randint(first + 1, first + 15)
    after = draw.uniform(0, 0.02)

    def reached() -> bool:
        if moment == "start":
            return time.monotonic() - start > begins
        if moment == "step":
            return step_of(folder) >= step
        # Once it makes steps again: what lies there until then is of the last kill.
        return step_of(folder) > first and is_writing(folder / "run" / "checkpoints")

    try:
        until(lambda: command.poll() is not None or reached(), f"no {moment}", AGAIN_S)
    except Hang as hang:
        raise Hang(f"{hang}\n{last_words(folder / 'said')}") from None
    time.sleep(after if moment != "save" else after / 10)
    return command.poll() is None


def strike(victim: str, command: psutil.Popen) -> bool:
    """Kill; whether there was anything to be killed."""
    if victim == "command":
        command.kill()
        command.wait()
        return True
    process = ranks(command).get(int(victim))
    if process is None:
        return False
    process.kill()
    return True


def undisturbed(folder: Path) -> dict[str, torch.Tensor]:
    place = folder.parent / "undisturbed ranks"
    if (place / "final.safetensors").exists():  # the other kind has just made it
        return load_model(place / "final.safetensors")
    place.mkdir()
    finished(place, begin(place, "merged"))
    return load_model(place / "final.safetensors")


def run(victims: tuple[str, ...]):
    def series(
        folder: Path,
        wanted: int,
        draw: random.Random,
        expected: dict[str, torch.Tensor],
        outcome: Outcome,
    ) -> None:
        killed(folder, wanted, draw, outcome, victims)
        compare(folder, expected)

    return series


def killed(
    folder: Path,
    wanted: int,
    draw: random.Random,
    outcome: Outcome,
    victims: tuple[str, ...],
    strategy: str = "ddp",
    count: int = 2,
) -> None:
    """Run the job to its end, and kill some of it on the way."""
    pieces = draw.choice(["merged", "per_rank"])
    command = begin(folder, pieces, strategy, count)
    try:
        while len(outcome.kills) < wanted and command.poll() is None:
            victim = draw.choice(victims)
            moment = draw.choice(["start", "step", "save"])
            if not wait_for(moment, folder, command, draw) or not strike(victim, command):
                continue
            who = victim if victim == "command" else "rank " + victim
            outcome.kills.append(f"{strategy}, {pieces}, {who}, {moment}")
            if victim == "command":
                outcome.strays += strays()
                command = begin(folder, pieces, strategy, count)
        finished(folder, command)
    finally:
        if command.poll() is None:
            command.kill()
            command.wait()
    outcome.strays += strays()
    outcome.leftovers += leftovers(folder)


def compare(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    found = load_model(folder / "final.safetensors")
    for name, weight in expected.items():
        if not torch.equal(weight, found[name]):
            raise Lost(f"the weights of {name} are not those of the undisturbed run")
    check_checkpoints(folder)


def check_checkpoints(folder: Path) -> None:
    """Those of a job that has ended are whole.

    Raises:
        Lost: the last one is missing.
    """
    left = sorted(os.listdir(folder / "run" / "checkpoints"))
    if not left[-1].startswith(f"step-{STEPS:09d}"):
        raise Lost(f"the last checkpoint is missing: {left}")
    checkpoints = Checkpoints(folder / "run" / "checkpoints")
    for name in left:
        checkpoints.load(name)


RANKS = Kind("ranks", "a rank of two", 90, 15, undisturbed, run(("0", "1")))
AGENTS = Kind("agents", "the command of two ranks", 40, 10, undisturbed, run(("command",)))
