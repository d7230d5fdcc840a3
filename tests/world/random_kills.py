"""Kills ranks and the command that started them, at random, and looks at what comes out.

    python tests/world/random_kills.py --kills 100 --seed 1

Two ranks train a small model with dropout. Each run is killed some times: a rank or the command
(which is then started again), at a random moment of its start, after a random step, or while a
checkpoint is being written. In the end the weights must be those of an undisturbed run, bit for
bit, and no process and no unfinished file may be left. A seed replays the choices.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
import torch

from flatout.save.checkpoint import Checkpoints
from flatout.save.model_file import load_model
from flatout.unfinished import is_unfinished

STEPS, EVERY = 60, 3
KILLS_A_RUN = 5
MARK = "FLATOUT_RANDOM_KILLS"
PATIENCE_S = 180

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
model = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.ReLU(), torch.nn.Dropout(0.2),
                            torch.nn.Linear(300, 300), torch.nn.ReLU(), torch.nn.Linear(300, 5))
recipe = flatout.Recipe().replace({"save.every": EVERY, "save.pieces": sys.argv[1]})
trainer = flatout.Trainer(model, lr=0.01, allow="exact", metrics=["accuracy"], recipe=recipe,
                          run="run")
trainer.fit((x, y), batch_size=10, epochs=EPOCHS, callbacks=[Tell()], progress=False, resume=True)
trainer.save("final.safetensors")
""".replace("EVERY", str(EVERY)).replace("EPOCHS", str(STEPS // 20))


def begin(folder: Path, pieces: str) -> psutil.Popen:
    call = "from flatout.cli.main import main; main()"
    command = [sys.executable, "-c", call, "run", "--devices", "2", "--restarts", "1000"]
    with (folder / "said").open("ab") as said:
        return psutil.Popen(
            [*command, "train.py", pieces],
            cwd=folder,
            stdout=said,
            stderr=said,
            stdin=subprocess.DEVNULL,
            env={**os.environ, MARK: str(folder), "FLATOUT_CACHE": str(folder / "cache")},
        )


def ours(folder: Path) -> list[psutil.Process]:
    """All living processes of a run, by a variable in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(folder) and process.status() != "zombie":
                found.append(process)
        except psutil.Error:
            continue
    return found


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
    try:
        return int((folder / "step-1").read_text())
    except (OSError, ValueError):
        return 0


def is_saving(folder: Path) -> bool:
    try:
        return any(is_unfinished(name) for name in os.listdir(folder / "run" / "checkpoints"))
    except OSError:
        return False


def until(moment: str, folder: Path, command: psutil.Popen, draw: random.Random) -> bool:
    """Wait for the moment of a kill; False where the run has ended before it."""
    start, first = time.monotonic(), step_of(folder)
    begins = draw.uniform(0, 3.5)
    step = draw.randint(first + 1, first + 15)
    after = draw.uniform(0, 0.02)
    while command.poll() is None:
        if time.monotonic() - start > PATIENCE_S:
            raise AssertionError(f"nothing goes on: {(folder / 'said').read_text()}")
        reached = {
            "start": time.monotonic() - start > begins,
            "step": step_of(folder) >= step,
            "save": step_of(folder) >= first and is_saving(folder),
        }
        if reached[moment]:
            time.sleep(after if moment != "save" else after / 10)
            return command.poll() is None
        time.sleep(0.0005)
    return False


def strike(victim: str, folder: Path, command: psutil.Popen) -> bool:
    """Kill; whether there was anything to be killed."""
    if victim == "command":
        command.kill()
        command.wait()
        _, alive = psutil.wait_procs(ours(folder), timeout=10)
        assert not alive, f"left behind: {alive}"
        return True
    process = ranks(command).get(int(victim))
    if process is None:
        return False
    process.kill()
    return True


def one_run(folder: Path, kills: int, seed: str, expected: dict) -> list[str]:
    """A run that is killed so many times; what was done to it. Its weights must be as expected."""
    draw = random.Random(seed)
    pieces = draw.choice(["merged", "per_rank"])
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(JOB)
    done: list[str] = []
    command = begin(folder, pieces)
    try:
        while len(done) < kills and command.poll() is None:
            victim = draw.choice(["0", "1", "0", "1", "command"])
            moment = draw.choice(["start", "step", "save", "save"])
            if not until(moment, folder, command, draw) or not strike(victim, folder, command):
                continue
            done.append(f"{victim} {moment}")
            if victim == "command":
                command = begin(folder, pieces)
        code = command.wait(PATIENCE_S)
        assert code == 0, (folder / "said").read_text()
    except BaseException:
        print(f"seed {seed!r}, {pieces}: {done}", flush=True)
        raise
    finally:
        for process in ours(folder):
            process.kill()
    check(folder, expected)
    return [f"{pieces} {what}" for what in done]


def check(folder: Path, expected: dict) -> None:
    assert not ours(folder)
    found = load_model(folder / "final.safetensors")
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        assert torch.equal(weight, expected[name]), name
    left = sorted(os.listdir(folder / "run" / "checkpoints"))
    assert left[-1].startswith(f"step-{STEPS:09d}"), left
    assert not any(map(is_unfinished, left)), left
    checkpoints = Checkpoints(folder / "run" / "checkpoints")
    for name in left:
        assert checkpoints.load(name).step <= STEPS


def kill_at_random(folder: Path, kills: int, seed: int) -> Counter[str]:
    """Runs until there were so many kills; how many of which kind."""
    (folder / "undisturbed").mkdir(parents=True)
    (folder / "undisturbed" / "train.py").write_text(JOB)
    command = begin(folder / "undisturbed", "merged")
    assert command.wait(PATIENCE_S) == 0, (folder / "undisturbed" / "said").read_text()
    expected = load_model(folder / "undisturbed" / "final.safetensors")
    counted: Counter[str] = Counter()
    number = 0
    while counted.total() < kills:
        own = f"{seed}.{number}"
        began = time.monotonic()
        wanted = min(KILLS_A_RUN, kills - counted.total())
        done = one_run(folder / own, wanted, own, expected)
        counted.update(done)
        took = f"{time.monotonic() - began:.0f} s"
        print(f"seed {own}: {took}, {counted.total()} kills so far: {done}", flush=True)
        number += 1
    return counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="flatout-kills-") as folder:
        began = time.monotonic()
        counted = kill_at_random(Path(folder), asked.kills, asked.seed)
        print(
            json.dumps({"kills": counted.total(), "seconds": time.monotonic() - began, **counted})
        )


if __name__ == "__main__":
    main()
