"""The time that steps lose to a child process that compiles, measured by pausing the child."""

from __future__ import annotations

from flatout.train.terms import TERMS, Terms


class CompilePauses:
    """Measures the time that steps lose to a compiling child process, which is paused now and then.

    Attributes:
        is_alone: True in a period in which the child is to be paused.
        cost_s: seconds that steps have lost.
    """

    def __init__(self, terms: Terms = TERMS) -> None:
        self.is_alone, self.cost_s = False, 0.0
        self._beside_s, self._alone_s = terms.spells_s
        # Seconds and number of steps in the present period; mean seconds and number of steps in the
        # period before.
        self._took, self._count = 0.0, 0
        self._before: tuple[float, int] | None = None

    def count(self, seconds: float) -> bool:
        """Count a step that took this many seconds; return whether the present period is over."""
        self._took += seconds
        self._count += 1
        if self._took < (self._alone_s if self.is_alone else self._beside_s):
            return False
        mean, count = self._took / self._count, self._count
        self._took, self._count = 0.0, 0
        if not self.is_alone:
            self._before = (mean, count)
        elif self._before is not None:
            self.cost_s += (self._before[0] - mean) * self._before[1]
        return True
