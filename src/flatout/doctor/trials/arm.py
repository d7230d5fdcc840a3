"""One of the two processes of a trial, which stays stopped at a step boundary between blocks."""

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.doctor.trials import step_sync
from flatout.doctor.trials.process import Command, Ended, Process
from flatout.doctor.trials.scratch import remove_tree, temporary_of

FEWEST_STEPS, WARM_STEPS = 3, 2
_SEED = "PYTHONHASHSEED"
_WHO = struct.Struct("3i")  # process ID, user and group of the peer of a socket
# A block is stuck after _PATIENCE times its expected time, but not before _PATIENCE_S seconds.
_PATIENCE = 20.0
_PATIENCE_S = 15.0


def _another_layout(life: int) -> dict[str, str]:
    return {} if _SEED in os.environ else {_SEED: str(life)}


def _too_few(steps: int) -> Ended:
    return Ended(f"the script takes {steps} steps only, too few to be measured")


@dataclass(frozen=True)
class Block:
    """Counted steps of one side.

    Attributes:
        side: "a" or "b".
        steps: number of counted steps.
        began, ended: begin and end of the block, in nanoseconds of the clock that all processes
            share.
        between: nanoseconds of evaluation and saving within the block.
        faults: number of minor page faults of the process that trains.
        cpu: CPU nanoseconds of the script and all its children.
    """

    side: str
    steps: int
    began: int
    ended: int
    between: int = 0
    faults: int = 0
    cpu: int = 0

    @property
    def cpu_step_s(self) -> float:
        """CPU seconds per step."""
        return max(self.cpu, 1) / self.steps / 1e9

    @property
    def step_s(self) -> float:
        """Seconds per step, without the time between steps."""
        return max(self.ended - self.began - self.between, 1) / self.steps / 1e9

    @property
    def whole_step_s(self) -> float:
        """Seconds per step, with the time between steps."""
        return (self.ended - self.began) / self.steps / 1e9


@dataclass
class Showed:
    """Results of one side, except for the times of its blocks.

    Attributes:
        losses: one loss for each of the first steps; NaN for a step without a loss.
        batches: for each loader, a hash of the indices of each of the first batches.
        contents: for each loader, a hash of the data of each of the first batches; None if the
            data cannot be hashed.
        applied: fields of a Recipe that were applied.
        left: fields of a Recipe that were not applied, with the reasons.
        started_s: seconds from the start of the process to the end of its first step.
        first_s: seconds of the first step, from its first batch on.
        warm_s: seconds of the steps from the second to the first counted block, in which caches
            are filled.
        warm_steps: number of the steps in `warm_s`.
    """

    losses: list[float] = field(default_factory=list)
    batches: dict[str, list[int]] = field(default_factory=dict)
    contents: dict[str, list[int | None]] = field(default_factory=dict)
    applied: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    started_s: float = 0.0
    first_s: float = 0.0
    warm_s: float = 0.0
    warm_steps: int = 0

    def add(self, message: dict[str, Any]) -> None:
        """Add the results in a message from the process."""
        self.losses += message.get("losses", [])
        self.applied = message.get("applied", self.applied)
        self.left = message.get("left", self.left)
        for loader, value in message.get("batches", {}).items():
            self.batches.setdefault(loader, []).extend(value)
        for loader, read in message.get("contents", {}).items():
            self.contents.setdefault(loader, []).extend(read)


class Arm:
    """A script that is run for some steps at a time.

    Attributes:
        queue: number of batches that the script's loaders prefetch.
        step_s: seconds per step in the latest block.
        is_full: True if the script reports that its caches hold all that later epochs read.
        has_ended: True if the script has failed, or did not answer in time.
        showed: results of the script except for its block times.
    """

    def __init__(
        self,
        name: str,
        job: Command,
        folder: Path,
        until: float,
        *,
        passes: Sequence[Path] = (),
        is_redirected: bool | None = None,
        warm: int = 0,
        most_steps: int | None = None,
        is_renewed: bool = False,
        started: Callable[[str, Process], None] = lambda side, process: None,
    ) -> None:
        self.name = name
        self.until = until
        self.has_ended = False
        self.queue = 0
        self.step_s = math.inf
        self.is_full = True
        self.showed = Showed()
        self.most_steps = self._life = most_steps
        self._job, self._folder = job, folder
        self._passes, self._is_redirected = passes, is_redirected
        self._warm = warm
        self._is_renewed = is_renewed
        self._lives = 0
        self._started = started
        self._refused: list[dict[str, str]] = []
        self._start()

    def _start(self) -> None:
        self._began = time.monotonic()
        self._expected_s = math.inf
        self._waiting = b""
        self._blocks = self._done = 0
        self._seen = Showed()
        self._connection: socket.socket | None = None
        own = f"{self.name}-{secrets.token_hex(4)}"
        folder, temporary = self._folder / own, temporary_of(self._folder) / own
        meeting = temporary.with_name(f"{own}-steps")
        meeting.mkdir()
        self._places = (folder, temporary, meeting)
        self._listener = step_sync.listen(str(meeting))
        variables = {**self._job.variables, step_sync.VARIABLE: str(meeting)}
        if self.showed.losses:
            variables |= {step_sync.RECORDED: "0", **_another_layout(self._lives)}
        self._lives += 1
        try:
            self.process = Process(
                Command(self._job.command, variables),
                folder,
                temporary,
                passes=[*self._passes, meeting],
                is_redirected=self._is_redirected,
            )
        except BaseException:
            self._listener.close()
            raise
        self._started(self.name, self.process)

    def meet(self) -> None:
        """Wait for the script's first step."""
        message = self._heard("its first step")
        self.queue = int(message["queue"])
        self._seen.started_s = time.monotonic() - self._began
        self._seen.first_s = float(message.get("first_s", 0.0))
        self._done = 1
        self._take(message)
        self._stop()

    def warm_up(self, dropped: int) -> None:
        """Run the first steps, which do one-time setup, and do not count them."""
        if self._life and 1 + dropped + self._warm + FEWEST_STEPS > self._life:
            raise _too_few(self._life)
        block, resumed = self._block(dropped + self._warm, FEWEST_STEPS)
        self._seen.warm_s = (block.ended - resumed - block.between) / 1e9
        self._seen.warm_steps = dropped + self._warm + FEWEST_STEPS

    def block(self, dropped: int, steps: int, *, dropped_again: int = 0, unit: int = 1) -> Block:
        """Run `dropped` uncounted steps, then `steps` counted steps.

        If the script has to be restarted for these steps, the larger of `dropped` and
        `dropped_again` is the number of uncounted steps. If the script ends earlier, fewer steps
        count: a multiple of `unit`.
        """
        would_end = self._life and self._done + dropped + steps > self._life
        if self._is_renewed and would_end and self._blocks:
            return self._first_block(max(dropped, dropped_again), steps, unit)
        try:
            block, _ = self._block(dropped, steps)
        except Ended:
            has_room = self._blocks or self._life
            if not (self._is_renewed and self.process.exit == 0 and has_room):
                raise
            self.has_ended = False
            return self._first_block(max(dropped, dropped_again), steps, unit)
        self._blocks += 1
        return block

    def _first_block(self, dropped: int, steps: int, unit: int) -> Block:
        fewest = self.queue + WARM_STEPS
        self.renew(fewest)
        if self._life:
            room = self._life - self._done
            dropped = max(fewest, min(dropped, room - steps))
            fit = (room - dropped) // unit * unit
            if fit < min(steps, FEWEST_STEPS):
                self.has_ended = True
                raise _too_few(self._life)
            steps = min(steps, fit)
        block, _ = self._block(dropped, steps)
        self._blocks += 1
        return block

    def warm_on(self, dropped: int, steps: int) -> None:
        """Run more uncounted steps to fill caches, now and after each restart."""
        block, resumed = self._block(dropped, steps)
        self._seen.warm_s += (block.ended - resumed - block.between) / 1e9
        self._seen.warm_steps += dropped + steps
        self._warm += dropped + steps

    def renew(self, dropped: int) -> None:
        """Restart the script and run its first steps."""
        self.close()
        self._start()
        self.meet()
        self.warm_up(dropped)

    @property
    def renewal_s(self) -> float:
        """Seconds of a restart, up to the first step that can count."""
        return self.showed.started_s + self.showed.warm_s

    def _block(self, dropped: int, steps: int) -> tuple[Block, int]:
        assert self._connection is not None
        self._watched(self.process.go)
        self._connection.sendall(f"{dropped} {steps}\n".encode())
        message = self._heard(f"the end of a block of {dropped + steps} steps")
        self._stop()
        names = ("steps", "began", "ended", "between", "faults", "cpu")
        figures = (int(message[name]) for name in names)
        block = Block(self.name, *figures)
        self._done = int(message["done"])
        self._take(message)
        self.step_s = block.step_s
        self._expected_s = block.whole_step_s * (dropped + steps)
        for refused in self.process.refused():
            if refused["kind"] == "write":
                self.has_ended = True
                raise Ended(f"{refused['what']} ({refused['where']})")
        return block, int(message["resumed"])

    def _take(self, message: dict[str, Any]) -> None:
        self._seen.add(message)
        self.is_full = message.get("is_full", True)
        if len(self._seen.losses) >= len(self.showed.losses):
            self.showed = self._seen

    def refused(self) -> list[dict[str, str]]:
        """Return the actions that the script was not allowed to do: {"kind", "what", "where"}."""
        result = [*self._refused, *self.process.refused()]
        return [json.loads(line) for line in dict.fromkeys(json.dumps(item) for item in result)]

    def close(self) -> None:
        """End the script, and remove the files that it has written."""
        self.process.end()
        self._refused = self.refused()
        self._listener.close()
        if self._connection is not None:
            self._connection.close()
        for place in self._places:
            remove_tree(place)

    def _stop(self) -> None:
        self._watched(self.process.stop)

    def _watched(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Ended:
            self.has_ended = True
            raise

    def _heard(self, what: str) -> dict[str, Any]:
        stuck = time.monotonic() + max(self._expected_s * _PATIENCE, _PATIENCE_S)
        until = min(self.until, stuck)
        while b"\n" not in self._waiting:
            spoken = (self._connection or self._listener).fileno()
            left = max(until - time.monotonic(), 0)
            ready, _, _ = select.select([spoken, self.process.said], [], [], left)
            if not ready:
                self.has_ended = True
                reason = "in the time given" if until == self.until else "long after it was due"
                raise Ended(f"{what} did not come {reason}")
            if spoken not in ready:
                self._watched(self.process.hear)
            elif self._connection is None:
                self._accept()
            else:
                self._read()
        line, _, self._waiting = self._waiting.partition(b"\n")
        message = dict(json.loads(line))
        if "steps_at_all" in message:  # the script is about to end
            self._life = int(message["steps_at_all"])
            return self._heard(what)
        return message

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        who = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _WHO.size)
        if _WHO.unpack(who)[1] != os.geteuid():
            connection.close()
            return
        self._connection = connection
        self._listener.close()

    def _read(self) -> None:
        assert self._connection is not None
        try:
            read = self._connection.recv(65536)
        except ConnectionResetError:
            read = b""
        self._waiting += read
        if not read:  # the process that trains has ended, and the script itself will end soon
            ready, _, _ = select.select([self.process.said], [], [], _PATIENCE_S)
            self.has_ended = True
            if ready:
                self.process.hear()
            raise Ended("the process that trains has ended")
