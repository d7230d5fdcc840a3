"""Limits on the seconds that tuning may cost a run, and the seconds that remain.

Steps under tried settings are steps of the run. They cost the time by which they are slower than
steps under the best settings known by then. All time of work between steps counts.
"""

from __future__ import annotations

from flatout.train.terms import TERMS, Terms

# Fraction of a long run's time that tuning may take in addition to fixed seconds. The run's time is
# estimated from plain steps. A well tuned run lasts about half of that estimate, so the real
# fraction is larger.
_SHARE = 0.0125
# Maximum fraction of the run's time that tuning and the time before the first step may take
# together: (fraction, seconds of a run up to which it holds), and (fraction, seconds of a run from
# which it holds).
_MOST = (0.04, 10.0), (0.02, 60.0)
# Assumed seconds of a run of unknown length, until it has lasted longer.
_UNKNOWN_S = 20.0


class Budget:
    """The time that tuning may take.

    Attributes:
        steps: planned number of optimizer steps; None if that is unknown.
        terms: clocks and limits of `auto`.
        step_s: best estimate of a step's seconds; before steps were measured, a lower bound.
        input_s: best estimate of the seconds for which a step waits for its batches.
        elapsed_s: seconds since the first step.
        before_s: seconds spent before the first step.
        lost_s: seconds lost since the first step.
        rehearsed_s: seconds spent before the first step on steps that are not part of the run.
    """

    def __init__(self, steps: int | None, terms: Terms = TERMS) -> None:
        self.steps, self.terms = steps, terms
        self.step_s = self.input_s = self.elapsed_s = self.before_s = self.lost_s = 0.0
        self.rehearsed_s = 0.0

    @property
    def run_s(self) -> float:
        """Estimated seconds of the whole run."""
        if self.steps is None:
            return max(_UNKNOWN_S, self.elapsed_s)
        return self.steps * (self.step_s + self.input_s)

    @property
    def cost_s(self) -> float:
        """Seconds that tuning has cost so far."""
        return self.before_s + self.rehearsed_s + self.lost_s

    @property
    def limit_s(self) -> float:
        """Maximum number of seconds that slower steps may cost in total."""
        terms, run_s = self.terms, self.run_s
        return min(terms.short_share * run_s, terms.fixed_s + _SHARE * run_s)

    @property
    def left_s(self) -> float:
        """Seconds that slower steps may still cost."""
        (short, from_s), (long, to_s) = _MOST
        way = (min(max(self.run_s, from_s), to_s) - from_s) / (to_s - from_s)
        most_s = self.run_s * (short + (long - short) * way) - self.before_s
        # Keep at least half of the limit for steps, however long the time before the first step.
        return min(self.limit_s, max(most_s, self.limit_s / 2)) - self.lost_s

    def pays_for(self, seconds: float) -> bool:
        """Return whether the budget allows work that costs this many seconds."""
        return self.left_s >= seconds

    def pays_before(self, seconds: float) -> bool:
        """Return whether the budget allows work of this many seconds before the first step."""
        return self.before_s + seconds <= self.before_limit_s

    @property
    def before_limit_s(self) -> float:
        """Maximum number of seconds that may be spent before the first step."""
        return min(self.terms.longest_s, self.terms.before_share * self.run_s)
