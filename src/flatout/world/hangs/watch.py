"""A thread in each rank that reports the rank that other ranks wait for.

Each rank regularly writes its position among the collectives to the job's store. A rank that has
waited too long in a collective asks all other ranks for their Python stacks. Their watch threads
answer, because these are not stuck. If a watch does not answer, another watch on its machine
inspects that process. Then one rank prints the facts, and the job continues to wait.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from time import monotonic, sleep
from time import perf_counter_ns as clock
from typing import Any, NamedTuple

from flatout.console import say
from flatout.world.agreement_points import all_ask
from flatout.world.hangs.collective_log import APART, CollectiveLog, Waiting
from flatout.world.hangs.hang import RankStatus, explain
from flatout.world.hangs.stacks import Process, inspect_process, own_stack, this_process
from flatout.world.place import Place, restarts
from flatout.world.stores import Board, agent_keeps_it, connect, files_of, part_of

# Interval of a rank's reports: _BEAT_S is the largest one in seconds, _SHARE a share of the
# patience.
_BEAT_S, _SHARE = 5.0, 0.1
# Beats after a question. _INSPECT_AFTER: beats until a process that has not answered is inspected.
# _REPORT_AFTER: beats until the result is printed. Questions are asked this long before the
# patience ends, so that the result is printed when it ends.
_INSPECT_AFTER, _REPORT_AFTER = 2, 5
# Fewest seconds of these times, because inspecting a process may take this long.
_LEAST_S = 1.0
# _LEAST_PATIENCE_S: fewest seconds to wait for a missing rank whose watch reports nothing. _LATEST:
# number of latest collectives in a report.
_LEAST_PATIENCE_S = 30.0
_LATEST = 16


class _Question(NamedTuple):
    """The question of this rank to all other ranks, about a collective that it waits in."""

    number: int
    collective: int
    since: int
    due: float
    is_reported: bool = False


class RankWatch:
    """Watches one rank, and reports a collective that does not end."""

    def __init__(
        self, here: Place, log: CollectiveLog, patience_s: float, store_s: float = 10.0
    ) -> None:
        self._here, self._log, self._patience = here, log, patience_s
        self._store_s = store_s
        self._beat = min(_BEAT_S, patience_s * _SHARE)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flatout-watch", daemon=True)
        self._store: Any = None
        files = files_of(here)
        self._board = None if files is None else Board(files.board)
        self._process = this_process()
        self._ranks: tuple[int, ...] = tuple(range(here.world_size))
        self._answered = 0
        self._to_inspect: list[tuple[int, float]] = []
        self._question: _Question | None = None
        self._reported: set[tuple[str | None, tuple[int, ...]]] = set()

    def watch_only(self, ranks: Sequence[int]) -> None:
        """Watch only these ranks, because the others have ended."""
        self._ranks = tuple(ranks)

    def start(self) -> None:
        with suppress(RuntimeError):
            self._store = _store_of(self._here, self._store_s)
            # Reported before anything can go wrong, because processes outside also read it.
            self._set(f"process/{self._here.rank}", asdict(self._process))
            self._report_status()
            self._thread.start()

    def stop(self) -> None:
        """End, before the interpreter does: a thread in the store's C++ must not outlive it."""
        was_over = self._over.is_set()
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * self._store_s)
        if self._store is not None and not was_over:
            with suppress(RuntimeError):
                self._leave()

    def _leave(self) -> None:
        left = self._store.add("left", 1)
        if self._here.rank != 0 or agent_keeps_it() or self._board is not None:
            return
        if hasattr(sys, "last_value"):
            return  # this rank has failed, and the others must know soon
        self._set("over", True)
        until = monotonic() + 2 * self._beat
        while left < len(self._ranks) and monotonic() < until:
            sleep(0.02)
            left = self._store.add("left", 0)

    def blame(self) -> str:
        """Return the rank that stops the job, in half a sentence; "" if unknown."""
        with suppress(RuntimeError):
            if self._store is not None:
                return str(self._get("blame") or "")
        return ""

    def is_first_to_fail(self) -> bool:
        with suppress(RuntimeError):
            if self._store is not None:
                return int(self._store.add("failed", 1)) == 1
        return True

    def all_ask(self) -> bool:
        """Return True if all ranks ask at this rank's point. Waits until that is known."""
        with suppress(RuntimeError):
            if self._store is not None:
                point, ranks = self._log.passed, len(self._ranks)
                patience = max(self._patience, _LEAST_PATIENCE_S)
                return all_ask(self._store, point, ranks, self._is_passed, patience)
        return False

    def _is_passed(self, point: int) -> bool:
        others = (rank for rank in self._ranks if rank != self._here.rank)
        return any(stand and stand["passed"] > point for stand in map(self._reported_by, others))

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        # Without a store the job is at its end, which others report.
        with suppress(RuntimeError, OSError):
            while not self._over.wait(self._pause_s()):
                if self._store.check(["over"]):
                    self._store.add("left", 1)
                    self._over.set()
                    return
                self._report_status()
                self._answer()
                self._inspect_silent_neighbors()
                self._check_own_waiting()

    def _pause_s(self) -> float:
        if self._question is None or self._question.is_reported:
            return self._beat
        return min(self._beat, max(0.0, self._question.due - monotonic()))

    def _report_status(self) -> None:
        stand = json.dumps(asdict(self._stand()))
        if self._board is not None:
            self._board.write(self._here.rank, stand)
        else:
            self._store.set(f"stand/{self._here.rank}", stand)

    def _reported_by(self, rank: int) -> Any:
        if self._board is None:
            return self._get(f"stand/{rank}")
        record = self._board.read(rank)
        return None if record is None else json.loads(record)

    def _stand(self) -> RankStatus:
        log = self._log
        waiting = log.waiting
        return RankStatus(
            begun=log.begun,
            waiting=None if waiting is None else waiting.number,
            recent=list(log.recent)[-_LATEST:],
            process=self._process.words,
            passed=log.passed,
        )

    def _answer(self) -> None:
        asked = int(self._store.get("asked")) if self._store.check(["asked"]) else 0
        while self._answered < asked:
            self._answered += 1
            stand = self._stand()
            stand.stack = own_stack()
            self._set(f"answer/{self._answered}/{self._here.rank}", asdict(stand))
            self._to_inspect.append((self._answered, monotonic() + _INSPECT_AFTER * self._beat))

    def _inspect_silent_neighbors(self) -> None:
        while self._to_inspect and self._to_inspect[0][1] <= monotonic():
            question, _ = self._to_inspect.pop(0)
            silent = []
            for rank in self._ranks:
                known = self._get(f"process/{rank}")
                if known is None or known["machine"] != self._process.machine:
                    continue
                if not self._store.check([f"answer/{question}/{rank}"]):
                    silent.append((rank, Process(**known)))
                elif rank < self._here.rank:
                    return
            for rank, process in silent:
                self._set(f"seen/{question}/{rank}", inspect_process(process))

    def _check_own_waiting(self) -> None:
        waiting, question = self._log.waiting, self._question
        if question is not None:
            if waiting is None or not _is_same(waiting, question):
                self._end_question(question)
            elif not question.is_reported and monotonic() >= question.due:
                self._report_hang(question)
        elif waiting is not None and self._is_due(waiting) and self._claim_report():
            left = self._patience - (clock() - waiting.since) / 1e9
            due = monotonic() + max(left, _INSPECT_AFTER * self._beat, _LEAST_S)
            number = self._store.add("asked", 1)
            self._question = _Question(number, waiting.number, waiting.since, due)

    def _is_due(self, waiting: Waiting) -> bool:
        early = max(_REPORT_AFTER * self._beat, _LEAST_S)
        asks_after = max(self._patience / 2, self._patience - early)
        late = (clock() - waiting.since) / 1e9 - asks_after
        if late <= 0 or late > _INSPECT_AFTER * self._beat:
            return late > 0
        stands = map(self._reported_by, range(self._here.rank))
        return not any(stand and stand["waiting"] == waiting.number for stand in stands)

    def _claim_report(self) -> bool:
        me = str(self._here.rank)
        return bool(self._store.compare_set("teller", "", me) == me.encode())

    def _report_hang(self, question: _Question) -> None:
        stands = {rank: self._stand_of(rank, question) for rank in self._ranks}
        seconds = (clock() - question.since) / 1e9
        hang = explain(question.collective, self._here.rank, stands, seconds)
        kind = stands[self._here.rank].at(question.collective), hang.culprits
        # A repeated report is printed in short, such as of a callback of rank 0 that is slow each
        # epoch.
        say(*(hang.lines[:1] if kind in self._reported else hang.lines))
        self._reported.add(kind)
        self._set("blame", hang.blame)
        self._question = question._replace(is_reported=True)

    def _stand_of(self, rank: int, question: _Question) -> RankStatus:
        answer = self._get(f"answer/{question.number}/{rank}")
        if answer is not None:
            return RankStatus(**answer)
        stand = RankStatus(**(self._reported_by(rank) or {}))
        process, result = self._get(f"process/{rank}"), self._get(f"seen/{question.number}/{rank}")
        if process is not None:
            stand.process = Process(**process).words
        if result is not None:
            stand.state, stand.stack = result
        elif process is not None:
            stand.state = f"does not answer, nor does another rank on host {process['host']}"
        else:
            stand.state = "has not joined the others"
        return stand

    def _end_question(self, question: _Question) -> None:
        if question.is_reported and not self._log.is_lost:
            seconds = (clock() - question.since) / 1e9
            say(f"all have come after {seconds:.0f} s, and the job goes on")
            self._set("blame", "")
        if not self._log.is_lost:
            self._store.compare_set("teller", str(self._here.rank), "")
        self._question = None

    def _set(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def _get(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None


def _is_same(waiting: Waiting, question: _Question) -> bool:
    """Return whether a rank's wait is still the one of its question; waits apart share a number."""
    is_apart = waiting.number == APART
    return waiting.number == question.collective and not (
        is_apart and waiting.since != question.since
    )


def _store_of(here: Place, longest_s: float) -> Any:
    store = connect(here, timedelta(seconds=longest_s))
    return part_of(store, f"flatout-watch-{restarts()}")
