"""Kills of processes that make batches, in their start and at work, and of their parent."""

from __future__ import annotations

import hashlib
import random
import time
from pathlib import Path

import numpy as np
import psutil

import flatout
from flatout.data.batches.batch import named_tensors
from flatout.errors import DataError
from killed.leftovers import leftovers
from killed.processes import Child, Lost, Tell, strays, until
from killed.series import Kind, Outcome

ROWS, BATCH = 400, 8
# About what a process takes to start.
START_S = 4.0


def slow(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two milliseconds of Python a row."""
    stop = time.thread_time() + 0.002
    while time.thread_time() < stop:
        pass
    return x * 2, y


def batches(tell: Tell, folder: Path, attempts: int) -> None:
    """An epoch by two processes, again and again; tells how each has ended."""
    draw = np.random.default_rng(1)
    rows = flatout.data.arrays(
        draw.normal(size=(ROWS, 10)).astype(np.float32), draw.integers(0, 5, ROWS)
    )
    made = rows.shuffle(seed=1).map(slow).batch(BATCH).options(processes=2)
    for attempt in range(attempts):
        while not (folder / f"go-{attempt}").exists():
            time.sleep(0.005)
        found = hashlib.sha256()
        try:
            tell("begins")
            for number, batch in enumerate(made.batches(0)):
                if number == 0:
                    tell("works")
                for _, tensor in named_tensors("", tuple(batch[:4])):
                    found.update(np.ascontiguousarray(tensor.numpy()).tobytes())
            tell(f"whole {found.hexdigest()}")
        except DataError as error:
            tell("died " + str(error).replace("\n", " "))
        # As an epoch that begins much later, with new processes.
        made._program.pool.close()


def undisturbed(folder: Path) -> str:
    place = folder / "undisturbed"
    place.mkdir()
    (place / "go-0").touch()
    child = Child(lambda tell: batches(tell, place, 1), place)
    if child.wait("undisturbed"):
        raise RuntimeError(child.last_words())
    return whole(child)[0]


def whole(child: Child) -> list[str]:
    return [line.split()[1] for line in child.lines() if line.startswith("whole ")]


def processes_of(pid: int, words: str) -> list[psutil.Process]:
    """Children of a process that have some words in their command."""
    found = []
    for process in psutil.Process(pid).children():
        try:
            if words in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def run(folder: Path, wanted: int, draw: random.Random, expected: str, outcome: Outcome) -> None:
    child = None
    while len(outcome.kills) < wanted:
        victim = draw.choice(["worker", "worker", "both workers", "parent"])
        moment = draw.choice(["starting", "working"])
        if child is None or child.ended():
            _forbid(folder)
            child, attempt = Child(lambda tell: batches(tell, folder, 1000), folder), 0
        (folder / f"go-{attempt}").touch()
        attempt += 1
        struck = _strike(child, victim, moment, attempt, draw)
        if struck:
            outcome.kills.append(f"{victim}, {moment}")
        if victim == "parent" and struck:
            child.wait("the parent")
            outcome.strays += strays()
            child = None
            continue
        until(lambda: _told(child, attempt, ("whole", "died")), "an epoch does not end")  # noqa: B023
        last = _ends(child)[attempt - 1]
        # It waits for leave to begin the next epoch, so that it has no other process now.
        outcome.strays += strays(but=[child.pid, *_trackers(child)])
        if last.startswith("whole") and last.split()[1] != expected:
            raise Lost(f"other batches after {outcome.kills}")
        if last.startswith("died") and not (struck and "SIGKILL" in last):
            raise Lost(f"after {outcome.kills}: {last}")
    if child is not None:
        child.kill()
        child.wait("the parent, at the end")
    outcome.strays += strays()
    child = Child(lambda tell: batches(tell, folder, 1), folder)
    if child.wait("at the end") or whole(child) != [expected]:
        raise Lost(f"{child.lines()}\n{child.last_words()}")
    outcome.strays += strays()
    outcome.leftovers += leftovers(folder)


def _strike(child: Child, victim: str, moment: str, attempt: int, draw: random.Random) -> bool:
    """Wait for the moment, and kill; False where the epoch was over before."""
    until(lambda: _told(child, attempt, ("begins",)), "an epoch does not begin")
    over = lambda: len(_ends(child)) >= attempt or child.ended()  # noqa: E731
    after = draw.uniform(0, START_S)
    if moment == "working":
        until(lambda: over() or _told(child, attempt, ("works",)), "nothing is made")
        after = draw.uniform(0, ROWS * 0.002 / 2)
    until_s = time.monotonic() + after
    while time.monotonic() < until_s and not over():
        works = moment == "starting" and _told(child, attempt, ("works",))
        if works:
            break
        time.sleep(0.0003)
    if over():
        return False
    if victim == "parent":
        child.kill()
        return True
    found = processes_of(child.pid, "spawn_main")
    chosen = found if victim == "both workers" else found[: 1 + draw.randrange(2)][-1:]
    for process in chosen:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            return False
    return bool(chosen)


def _told(child: Child, attempt: int, words: tuple[str, ...]) -> bool:
    if child.ended() and child.code not in (0, -9):
        raise Lost(f"exit code {child.code}\n{child.last_words()}")
    return sum(line.split()[0] in words for line in child.lines()) >= attempt


def _ends(child: Child) -> list[str]:
    return [line for line in child.lines() if line.split()[0] in ("whole", "died")]


def _trackers(child: Child) -> list[int]:
    """Python's own process, which lives as long as the parent does."""
    return [one.pid for one in processes_of(child.pid, "resource_tracker")]


def _forbid(folder: Path) -> None:
    for leave in folder.glob("go-*"):
        leave.unlink()


WORKERS = Kind("workers", "processes that make batches, or their parent", 120, 20, undisturbed, run)
