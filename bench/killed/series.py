"""A series: in one folder the same work is begun, killed and begun again until it is done."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.unfinished import is_unfinished
from killed.leftovers import leftovers
from killed.processes import PATIENCE_S, Child, Lost, Tell, strays


@dataclass
class Outcome:
    """What a series came to.

    Attributes:
        kills: what was killed when, one text for each.
        lost, hangs, strays, leftovers: what must not be, in words.
    """

    kills: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Kind:
    """Something that can be killed.

    Attributes:
        name: for `--only`.
        what: for people.
        kills: so many of a thousand.
        each: so many in a series.
        prepare: makes what all series use, in a folder, once: what `run` gets.
        run: a series.
    """

    name: str
    what: str
    kills: int
    each: int
    prepare: Callable[[Path], Any]
    run: Callable[[Path, int, random.Random, Any, Outcome], None]


@dataclass(frozen=True)
class Undisturbed:
    """What work comes to that nothing kills: its result, how long it takes, its file operations."""

    result: str
    seconds: float
    operations: int


# Does a part or all of what is to be done in a folder, going on after what is there; the result.
Work = Callable[[Tell, Path, str], str]
# Looks at a folder whose process was just killed, and what that one had told. Runs in a process.
Look = Callable[[Path, str, Sequence[str]], None]


def forked(
    name: str,
    what: str,
    kills: int,
    variations: Sequence[str],
    work: Work,
    look: Look | None = None,
    prepare: Callable[[Path], object] = lambda folder: None,
    each: int = 10,
) -> Kind:
    """A kind of work that a forked process does.

    Args:
        name, what, kills, each: as of Kind.
        variations: words that `work` gets, one for each series.
        work, look: see there.
        prepare: makes files that `work` reads.
    """

    def undisturbed(folder: Path) -> dict[str, Undisturbed]:
        prepare(folder)
        return {one: _undisturbed(work, folder / f"undisturbed {one}", one) for one in variations}

    def run(folder: Path, wanted: int, draw: random.Random, known: Any, outcome: Outcome) -> None:
        variation = draw.choice(variations)
        _killed(folder, wanted, draw, variation, work, look, known[variation], outcome)

    return Kind(name, what, kills, each, undisturbed, run)


def _undisturbed(work: Work, folder: Path, variation: str) -> Undisturbed:
    folder.mkdir()
    began = time.monotonic()
    child = Child(_telling(work, folder, variation), folder)
    code = child.wait(f"undisturbed {variation}")
    seconds = time.monotonic() - began
    if code:
        raise RuntimeError(f"undisturbed {variation}: exit code {code}\n{child.last_words()}")
    told = dict(line.split(" ", 1) for line in child.lines()[-2:])
    return Undisturbed(told["result"], seconds, int(told["operations"]))


def _telling(work: Work, folder: Path, variation: str) -> Callable[[Tell], None]:
    def telling(tell: Tell) -> None:
        tell(f"result {work(tell, folder, variation)}")

    return telling


def _killed(
    folder: Path,
    wanted: int,
    draw: random.Random,
    variation: str,
    work: Work,
    look: Look | None,
    known: Undisturbed,
    outcome: Outcome,
) -> None:
    told: list[str] = []
    telling = _telling(work, folder, variation)
    while len(outcome.kills) < wanted:
        moment = draw.choice(["random", "random", "writing", "operation"])
        # Most of the work may be there already, and then there are fewer operations.
        at = int(known.operations * draw.random() ** 2) if moment == "operation" else None
        child = Child(telling, folder, dies_at=at)
        if at is None:
            _wait_for(moment, folder, child, draw, known.seconds)
            child.kill()
        code = child.wait(f"{variation}, {moment}")
        told += child.lines()
        outcome.strays += strays()
        if code == 0:
            _compare(child, known, variation)
            break
        if code != -9:
            raise Lost(f"{variation}: exit code {code} after {outcome.kills}\n{child.last_words()}")
        outcome.kills.append(f"{variation}, {moment}")
        # Not after the last kill: what comes to look may tidy up as well.
        if look is not None and len(outcome.kills) < wanted:
            looking(look, folder, variation, told)
    child = Child(telling, folder)
    if child.wait(f"{variation}, at the end"):
        raise Lost(f"{variation}: it does not end well after {outcome.kills}\n{child.last_words()}")
    _compare(child, known, variation)
    if look is not None:
        looking(look, folder, variation, told)
    outcome.strays += strays()
    outcome.leftovers += leftovers(folder)


def looking(look: Look, folder: Path, variation: str, told: Sequence[str]) -> None:
    """Look from its own process: this one must start no thread.

    Raises:
        Lost: it does not find what it expects.
    """
    child = Child(lambda tell: look(folder, variation, told), folder)
    if child.wait("looking"):
        raise Lost(child.last_words())


def _compare(child: Child, known: Undisturbed, variation: str) -> None:
    (result,) = [line.split(" ", 1)[1] for line in child.lines() if line.startswith("result ")]
    if result != known.result:
        raise Lost(f"{variation}: the result is {result}, undisturbed it is {known.result}")


def _wait_for(moment: str, folder: Path, child: Child, draw: random.Random, seconds: float) -> None:
    """Wait for the moment of a kill, or until the process ends."""
    strike = time.monotonic() + draw.uniform(0, seconds)
    while time.monotonic() < strike and not child.ended():
        time.sleep(0.0003)
    if moment == "writing":
        after = draw.uniform(0, 0.002)
        give_up = time.monotonic() + PATIENCE_S
        while not child.ended() and not is_writing(folder) and time.monotonic() < give_up:
            time.sleep(0.0002)
        time.sleep(after)


def is_writing(folder: Path) -> bool:
    """Whether something unfinished is there now."""
    for _, folders, files in os.walk(folder):
        if any(is_unfinished(name) or name.endswith(".part") for name in [*folders, *files]):
            return True
    return False
