"""How long measuring may take, and whether what is left pays for the next piece of it."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from flatout.measure import OutOfTime

# Measuring may take this many seconds, and this share of the run it is for: of the tenth that is
# promised, what is left where the run turns out to be a fifth shorter than it was taken to be.
LONGEST_S = 6.0
# So many where the length of the run is unknown: it may be short.
UNKNOWN_S = 2.0
SHARE = 0.08


class Budget:
    """Seconds that measuring may take in all, counted from here on.

    The run is taken to last as long as its steps under the fastest settings seen so far, so that
    measuring stays within its share of the run that follows it.

    Args:
        steps: of the run, or None where they are not known.
        clock: returns seconds.

    Attributes:
        steps: of the run.
        step_s: the least seconds that a step of the run is known to take.
        kept_s: set aside for what has to be done at the end.
        longest_s: measuring may take so long, however long the run.
    """

    def __init__(self, steps: int | None, clock: Callable[[], float] = perf_counter) -> None:
        self.clock = clock
        self.step_s = 0.0
        self.kept_s = 0.0
        self.longest_s = min(LONGEST_S, UNKNOWN_S) if steps is None else LONGEST_S
        self.steps = steps
        self._began = clock()

    @property
    def spent_s(self) -> float:
        """Seconds since it began."""
        return self.clock() - self._began

    @property
    def limit_s(self) -> float:
        """Seconds that measuring may take in all, by what is known so far."""
        if self.steps is None:
            return self.longest_s
        return min(self.longest_s, SHARE * self.steps * self.step_s)

    @property
    def left_s(self) -> float:
        """What of them is left to spend."""
        return self.limit_s - self.spent_s - self.kept_s

    def pays_for(self, seconds: float) -> bool:
        """Whether something that takes so long at most may begin."""
        return self.left_s >= seconds

    def require(self, seconds: float) -> None:
        """Go on only if something that takes so long at most may begin.

        Raises:
            OutOfTime: it may not.
        """
        if not self.pays_for(seconds):
            raise OutOfTime
