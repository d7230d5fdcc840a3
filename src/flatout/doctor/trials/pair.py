"""Two live processes of the same script, measured block by block in the order A B B A.

One runs at a time; the other is stopped with everything that it has begun. They change places at
step boundaries (baton.py), after the device has finished. A block is longer than what DataLoader
workers make ahead, and its first steps, as many as that and two more, are not counted.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.doctor.trials import baton
from flatout.doctor.trials.process import Ended, Job, Process
from flatout.doctor.trials.scratch import scratch, temporary_of
from flatout.measure.trial import TrialResult, run_trial

_SHORTEST_S = 0.25
_FEWEST_STEPS = 3
_WARM_STEPS = 2
_WHO = struct.Struct("3i")  # pid, user and group of a socket's other end
# Of a block's expected time, before it counts as stuck.
_PATIENCE = 20.0
_PATIENCE_S = 15.0


@dataclass(frozen=True)
class Block:
    """Steps that were counted.

    Attributes:
        side: "a" or "b".
        steps: how many.
        began, ended: of their time, on the clock that all processes share, in nanoseconds.
    """

    side: str
    steps: int
    began: int
    ended: int

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return (self.ended - self.began) / self.steps / 1e9


@dataclass
class Pair:
    """What came of a trial.

    Attributes:
        result: A against B; None where it ended too early.
        reason: why it ended early; "" where it did not.
        blocks: in the order in which they ran.
        dropped: steps at the start of each block that were not counted.
        held: what contained the processes: "overlay", "landlock" or "python".
        refused: what the script was not allowed to do: {"kind", "what", "where"}.
        seconds: that the whole trial took, starts included.
    """

    result: TrialResult | None = None
    reason: str = ""
    blocks: list[Block] = field(default_factory=list)
    dropped: int = 0
    held: str = ""
    refused: list[dict[str, str]] = field(default_factory=list)
    seconds: float = 0.0


def run_pair(
    a: Job,
    b: Job,
    *,
    budget_s: float = 60.0,
    max_pairs: int = 8,
    block_s: float = 1.0,
    passes: Sequence[Path] = (),
    is_redirected: bool | None = None,
    started: Callable[[str, Process], None] = lambda side, process: None,
) -> Pair:
    """Measure the steps of A against those of B, in the current folder.

    Whatever a script does, both are gone afterwards, and its files are as they were.

    Args:
        a: the script as it is.
        b: the same with a cure. Both must call `baton.at_step` after each optimiser step.
        budget_s: seconds for everything, from the first start on.
        max_pairs: the most quadruples A B B A.
        block_s: seconds that a block lasts at most, unless it must be longer than the queue; less
            where the budget has no room for `max_pairs`.
        passes: folders in which the processes may change files, such as one for their results.
        is_redirected: True: redirect Python's functions even where the kernel can overlay files.
        started: called with "a" or "b" and each process once it runs.

    Raises:
        FlatoutError: a process cannot be started at all.
    """
    began = time.monotonic()
    pair = Pair()
    with scratch() as folder, ExitStack() as stack:
        sides: list[_Side] = []
        try:
            for name, job in (("a", a), ("b", b)):
                side = _Side(name, job, folder, passes, is_redirected, began + budget_s)
                stack.enter_context(closing(side))
                sides.append(side)
                started(name, side.process)
                side.meet()
            pair.held = sides[0].process.held
            _measure(pair, sides[0], sides[1], began + budget_s, max_pairs, block_s)
        except Ended as ended:
            pair.reason = f"{sides[-1].name if len(sides) < 2 else _ended(sides)}: {ended.what}"
            pair.result = _from_whole_quadruples(pair.blocks)
        pair.refused = [one for side in sides for one in side.process.refused()]
    pair.seconds = time.monotonic() - began
    return pair


def _ended(sides: Sequence[_Side]) -> str:
    return next((side.name for side in sides if side.has_ended), sides[-1].name)


def _measure(pair: Pair, a: _Side, b: _Side, until: float, max_pairs: int, block_s: float) -> None:
    queue = max(a.queue, b.queue)
    pair.dropped = queue + _WARM_STEPS
    # What a step takes: these blocks are not counted, and bring both past their first steps.
    slowest = max(side.block(pair.dropped, _FEWEST_STEPS).step_s for side in (a, b))
    left = until - time.monotonic()
    wanted = min(max(left / (4 * max_pairs), _SHORTEST_S), block_s)
    steps = max(math.ceil(wanted / slowest) - pair.dropped, queue + 1, _FEWEST_STEPS)

    def measured(side: _Side) -> Callable[[], float]:
        def one() -> float:
            block = side.block(pair.dropped, steps)
            pair.blocks.append(block)
            return block.step_s

        return one

    pair.result = run_trial(measured(a), measured(b), max_pairs=max_pairs, deadline_s=left)
    if pair.result.pairs == 1 < max_pairs:
        pair.reason = "the time given had room for one comparison only, which proves nothing"


def _from_whole_quadruples(blocks: Sequence[Block]) -> TrialResult | None:
    """The result of what was measured before a trial was cut off."""
    whole = len(blocks) // 4
    if whole < 2:
        return None
    times = {
        side: iter([block.step_s for block in blocks[: 4 * whole] if block.side == side])
        for side in "ab"
    }
    return run_trial(
        lambda: next(times["a"]), lambda: next(times["b"]), max_pairs=whole, min_pairs=whole
    )


class _Side:
    """One of the two, at a step boundary between its blocks, stopped."""

    def __init__(
        self,
        name: str,
        job: Job,
        folder: Path,
        passes: Sequence[Path],
        is_redirected: bool | None,
        until: float,
    ) -> None:
        self.name = name
        self.has_ended = False
        self.queue = 0
        self._until = until
        self._expected_s = math.inf
        self._waiting = b""
        self._connection: socket.socket | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        address = f"flatout-{secrets.token_hex(12)}"
        self._listener.bind(f"\0{address}")
        self._listener.listen(1)
        try:
            self.process = Process(
                Job(job.command, {**job.variables, baton.VARIABLE: address}),
                folder / name,
                temporary_of(folder) / name,
                passes=passes,
                is_redirected=is_redirected,
            )
        except BaseException:
            self._listener.close()
            raise

    def meet(self) -> None:
        """Wait for the script's first step."""
        self.queue = int(self._heard("its first step")["queue"])
        self._stop()

    def block(self, dropped: int, steps: int) -> Block:
        """Let it run for `dropped` steps, and then for `steps` more that are counted."""
        assert self._connection is not None
        self._go()
        self._connection.sendall(f"{dropped} {steps}\n".encode())
        said = self._heard(f"the end of a block of {dropped + steps} steps")
        self._stop()
        block = Block(self.name, int(said["steps"]), int(said["began"]), int(said["ended"]))
        self._expected_s = block.step_s * (dropped + steps)
        for refused in self.process.refused():
            if refused["kind"] == "write":
                raise Ended(f"{refused['what']} ({refused['where']})")
        return block

    def close(self) -> None:
        """End it."""
        self.process.end()
        self._listener.close()
        if self._connection is not None:
            self._connection.close()

    def _go(self) -> None:
        self._watched(self.process.go)

    def _stop(self) -> None:
        self._watched(self.process.stop)

    def _watched(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Ended:
            self.has_ended = True
            raise

    def _heard(self, what: str) -> dict[str, Any]:
        """What the script says next, at a step boundary."""
        stuck = time.monotonic() + max(self._expected_s * _PATIENCE, _PATIENCE_S)
        until = min(self._until, stuck)
        while b"\n" not in self._waiting:
            spoken = (self._connection or self._listener).fileno()
            left = max(until - time.monotonic(), 0)
            ready, _, _ = select.select([spoken, self.process.said], [], [], left)
            if not ready:
                self.has_ended = True
                reason = "in the time given" if until == self._until else "long after it was due"
                raise Ended(f"{what} did not come {reason}")
            if spoken not in ready:
                self._watched(self.process.hear)
            elif self._connection is None:
                self._accept()
            else:
                self._read()
        line, _, self._waiting = self._waiting.partition(b"\n")
        return dict(json.loads(line))

    def _accept(self) -> None:
        """The first process of the script that comes takes part, and nobody else's."""
        connection, _ = self._listener.accept()
        who = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _WHO.size)
        if _WHO.unpack(who)[1] != os.geteuid():
            connection.close()
            return
        self._connection = connection
        self._listener.close()

    def _read(self) -> None:
        assert self._connection is not None
        read = self._connection.recv(65536)
        self._waiting += read
        if not read:  # the process that trains is gone; the script itself is soon
            ready, _, _ = select.select([self.process.said], [], [], _PATIENCE_S)
            self.has_ended = True
            if ready:
                self.process.hear()
            raise Ended("the process that trains has ended")
