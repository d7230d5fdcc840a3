"""Kills inside saves: of one process, and of two ranks that write a checkpoint together."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from flatout.save.checkpoint import Checkpoints
from flatout.save.pieces import Pieces
from flatout.world import join
from flatout.world.stores import own_files
from killed.leftovers import leftovers
from killed.processes import Child, Lost, Tell, strays, until
from killed.series import Kind, Outcome, forked, is_writing, looking

# How many are saved before the work is done, and how long an agent gives a rank that has lost one.
SAVES, LAST_BREATH_S = 25, 1.0
PORT = 29_500


def content(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((50_000,), float(step)), "b": torch.arange(1000) + step}


def save(tell: Tell, checkpoints: Checkpoints, last: int, rank: int = 0) -> None:
    """Save steps until there were so many; tells each that is whole."""
    own = [{"rank": rank}]
    for step in range(last + 1, SAVES + 1):
        state = {"step": step, "moments": content(step)}
        checkpoints.save(step, content(step), state, score=-step, own=own, replicated=["moments"])
        # A save waits for the one before it, so that one is whole.
        tell(f"saved {step - 1 if checkpoints.asynchronous else step}")
    checkpoints.wait()


def one(tell: Tell, folder: Path, variation: str) -> str:
    checkpoints = Checkpoints(
        folder / "run", keep_last=2, keep_best=1, asynchronous=variation == "asynchronous"
    )
    save(tell, checkpoints, last_of(folder))
    return str(checkpoints.load().step)


def last_of(folder: Path) -> int:
    checkpoints = Checkpoints(folder / "run")
    return checkpoints.load().step if checkpoints.latest() else 0


def look(folder: Path, variation: str, told: Sequence[str]) -> None:
    """The newest checkpoint is the last that was told of or newer; all hold what they should."""
    reported = max([0, *(int(line.split()[1]) for line in told if line.startswith("saved "))])
    checkpoints = Checkpoints(folder / "run")
    names = sorted(os.listdir(folder / "run")) if (folder / "run").exists() else []
    if not names and not reported:
        return
    newest = checkpoints.load()
    if newest.step < reported or newest.name != checkpoints.latest():
        raise Lost(f"step {reported} was saved, and {newest.name} is the newest: {names}")
    for name in names:
        loaded = checkpoints.load(name)
        for tensors in (loaded.model, loaded.state["moments"]):
            for key, tensor in content(loaded.step).items():
                if not torch.equal(tensors[key], tensor):
                    raise Lost(f"{name}: {key} is not what was saved")


def piece(folder: Path, rank: int, asynchronous: bool, tell: Tell) -> None:
    """What a rank does."""
    world = join()
    last = world.from_first(last_of(folder) if rank == 0 else None)
    checkpoints = Checkpoints(
        folder / "run", keep_last=2, keep_best=1, asynchronous=asynchronous, pieces=Pieces(world)
    )
    tell("joined")
    save(tell, checkpoints, last, rank)
    world.wait()


def start_ranks(folder: Path, asynchronous: bool, files: dict[str, str]) -> list[Child]:
    def rank(number: int) -> Child:
        environment = {
            "RANK": str(number),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(number),
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(PORT),
            **files,
        }
        work = lambda tell: piece(folder, number, asynchronous, tell)  # noqa: E731
        return Child(work, folder, environment=environment)

    return [rank(0), rank(1)]


def run_pieces(
    folder: Path, wanted: int, draw: random.Random, known: object, outcome: Outcome
) -> None:
    asynchronous = draw.random() < 0.5
    words = "asynchronous" if asynchronous else "synchronous"
    told: list[str] = []
    done = False
    while len(outcome.kills) < wanted and not done:
        victim, moment = draw.randrange(2), draw.choice(["random", "writing"])
        with own_files(PORT) as files:
            ranks = start_ranks(folder, asynchronous, files)
            joined = lambda: all(r.ended() or "joined" in r.lines() for r in ranks)  # noqa: B023, E731
            until(joined, "the ranks do not join")
            _wait(moment, folder, ranks, draw)
            ranks[victim].kill()
            ended = ranks[victim].wait("killed")
            # As an agent does where a rank was killed.
            other = ranks[1 - victim]
            if ended != 0 and not other.ended():
                os.kill(other.pid, signal.SIGTERM)
                _patiently(other)
            codes = [rank.wait(f"the ranks, {moment}") for rank in ranks]
        told += ranks[0].lines()
        outcome.strays += strays()
        if ended == 0:
            done = codes == [0, 0]
            if not done:
                raise Lost(f"exit codes {codes}\n{ranks[0].last_words()}")
            break
        outcome.kills.append(f"{words}, rank {victim}, {moment}")
        if len(outcome.kills) < wanted:
            looking(look, folder, words, told)
    with own_files(PORT) as files:
        ranks = start_ranks(folder, asynchronous, files)
        codes = [rank.wait("the ranks, at the end") for rank in ranks]
    if codes != [0, 0]:
        raise Lost(f"exit codes {codes} at the end\n{ranks[0].last_words()}")
    looking(look, folder, words, [f"saved {SAVES}"])
    outcome.strays += strays()
    outcome.leftovers += leftovers(folder)


def _wait(moment: str, folder: Path, ranks: Sequence[Child], draw: random.Random) -> None:
    strike = time.monotonic() + draw.uniform(0, 0.4)
    until(lambda: time.monotonic() > strike or ranks[0].ended(), "")
    if moment == "writing":
        until(lambda: is_writing(folder) or ranks[0].ended(), "nothing is written")
        time.sleep(draw.uniform(0, 0.003))


def _patiently(rank: Child) -> None:
    strike = time.monotonic() + LAST_BREATH_S
    while time.monotonic() < strike and not rank.ended():
        time.sleep(0.005)
    rank.kill()


MERGED = forked(
    "saves",
    "a process that saves checkpoints",
    150,
    ["asynchronous", "synchronous"],
    one,
    look,
)
PIECES = Kind(
    "pieces",
    "a rank of two that save checkpoints in pieces",
    150,
    10,
    lambda folder: None,
    run_pieces,
)
