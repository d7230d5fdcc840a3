"""A parameter server that steps its share of the weights with each gradient that arrives.

With bounded staleness, a worker that is too many steps ahead of the slowest worker waits for its
answer: stale synchronous parallel (Ho et al., "More Effective Distributed ML via a Stale
Synchronous Parallel Parameter Server", 2013).
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from threading import Condition, Lock

import torch

from flatout.strategies.servers.share import Push, Share


class Server:
    """Takes the workers' gradients, one after the other."""

    def __init__(
        self, shares: Sequence[Share], workers: int, staleness: int | None, timeout_s: float
    ) -> None:
        self.shares = list(shares)
        self._timeout_s = timeout_s
        self._staleness = staleness
        # The present workers that have steps left, and the step that each has reached.
        self._living = set(range(workers))
        self._clocks = dict.fromkeys(self._living, 0)
        self._resting: set[int] = set()
        self._meetings, self._is_over = 0, False
        self.epoch = EpochParts(workers)
        self.stale: list[Counter[int]] = [Counter() for _ in range(workers)]
        self._changed = Condition()
        self._stop_at = 0

    @torch.no_grad()
    def push(self, worker: int, push: Push, gradient: torch.Tensor, into: torch.Tensor) -> int:
        """Step with a worker's gradient and copy the weights; wait if it is too far ahead."""
        share = self.shares[push.place]
        with self._changed:
            self._clocks[worker] = push.clock
            if push.wants_to_stop and not self._stop_at:
                # Every worker gets this number with the answer to a step at or before it.
                self._stop_at = max(self._clocks.values()) + 1
            if push.used:
                self._take(worker, push, gradient)
            self.epoch.used(worker, push.part)
            self._changed.notify_all()
            self._wait_for_others(lambda: self._may_go(worker))
            share.read(worker, into)
            return self._stop_at

    def _take(self, worker: int, push: Push, gradient: torch.Tensor) -> None:
        share = self.shares[push.place]
        self.stale[worker][share.step(worker, push, gradient)] += 1

    def _wait_for_others(self, may_go: Callable[[], bool]) -> None:
        if not self._changed.wait_for(may_go, self._timeout_s):
            raise RuntimeError(f"other workers made no step in {self._timeout_s:g} s")

    def _may_go(self, worker: int) -> bool:
        bound = self._staleness
        return bound is None or self._clocks[worker] - min(self._clocks.values()) <= bound

    def begin(self, workers: Collection[int], clock: int) -> None:
        with self._changed:
            self._living, self._is_over = set(workers), False
            self._clocks = dict.fromkeys(workers, clock)

    def leave(self, worker: int) -> None:
        """Note that a worker has ended or has no step left, so no worker waits for it."""
        with self._changed:
            self._clocks.pop(worker, None)
            self._changed.notify_all()

    def drop(self, worker: int) -> None:
        """Drop a killed worker, give its parts to other workers, and let these continue."""
        self.epoch.give_back(worker)
        with self._changed:
            self._living.discard(worker)
            self._meet_if_all_rest()

    def living(self) -> list[int]:
        with self._changed:
            return sorted(self._living)

    def lose(self) -> None:
        """Note the end of a worker without which the others cannot continue after they meet."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def rest(self, worker: int, patience_s: float) -> list[int]:
        self.leave(worker)
        with self._changed:
            before = self._meetings
            self._resting.add(worker)
            self._meet_if_all_rest()
            self._changed.wait_for(lambda: self._meetings > before or self._is_over, patience_s)
            return self._met if self._meetings > before else []

    def _meet_if_all_rest(self) -> None:
        if self._resting >= self._living:
            self._met = sorted(self._living)
            self._resting.clear()
            self._meetings += 1
            self._changed.notify_all()

    def pull(self, worker: int, place: int, into: torch.Tensor) -> None:
        with self._changed:
            self.shares[place].read(worker, into)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        with self._changed:
            yield


class EpochParts:
    """Assigns parts of an epoch's batches to the workers that ask, each part once.

    A slow worker thus takes fewer parts, and no worker waits for another one's share of the epoch.
    If a worker ends, other workers get the parts that it has claimed and not used.
    """

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self._next = self._last = 0
        # _held: by worker, parts that it has claimed and not used, in that order. _back: parts of
        # workers that have ended, for other workers.
        self._held: defaultdict[int, deque[int]] = defaultdict(deque)
        self._back: deque[int] = deque()
        self._lock = Lock()

    def open(self, steps: int) -> None:
        with self._lock:
            self._next, self._last = 0, steps * self.parts
            self._held.clear()
            self._back.clear()

    def claim(self, worker: int) -> tuple[int, int]:
        """Return the number of the next part and the count of parts left, or -1 and the end."""
        with self._lock:
            if self._back:
                number = self._back.popleft()
            elif self._next < self._last:
                number, self._next = self._next, self._next + 1
            else:
                return -1, self._last
            self._held[worker].append(number)
            return number, self._last - self._next + len(self._back)

    def used(self, worker: int, number: int) -> None:
        """Note a worker's gradient of a part: that part and those claimed before it are done."""
        with self._lock:
            held = self._held[worker]
            while number in held:
                held.popleft()

    def give_back(self, worker: int) -> None:
        with self._lock:
            self._back.extend(self._held.pop(worker, ()))

    def close(self) -> None:
        """End after the last step of which a part was claimed; the rest of it may be claimed."""
        with self._lock:
            self._last = min(self._last, -(-self._next // self.parts) * self.parts)

    def untaken(self) -> int:
        """Return the number of parts of ended workers that no other worker has taken."""
        with self._lock:
            return len(self._back)
