"""What tuning may cost a run, in seconds, and whether what is left pays for the next piece of it.

Steps under settings that are tried are steps of the run. What they cost is the time by which they
are slower than those under the best settings known by then, and what is done between steps.
"""

from __future__ import annotations

from flatout.train.auto_terms import TERMS, Terms

# The share of a long run that tuning may take in addition to fixed seconds. The run's time is
# planned from plain steps. A well tuned run lasts about half of that, so tuning takes a larger
# share of its real time.
_SHARE = 0.0125
# With the time before the first step it is at most the first share of a run of up to so many
# seconds, and the second one from so many on.
_MOST = (0.04, 10.0), (0.02, 60.0)
# A run of unknown length is taken to last so long, until it has lasted longer.
_UNKNOWN_S = 20.0


class Budget:
    """The time that tuning may take.

    Attributes:
        steps, terms: as given.
        step_s: seconds of a step, as far as is known: at first the least that it can take.
        input_s: seconds for which a step waits for its batches, as far as is known.
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
        """How long the run lasts, by what is known so far."""
        if self.steps is None:
            return max(_UNKNOWN_S, self.elapsed_s)
        return self.steps * (self.step_s + self.input_s)

    @property
    def cost_s(self) -> float:
        """What tuning has cost so far."""
        return self.before_s + self.rehearsed_s + self.lost_s

    @property
    def limit_s(self) -> float:
        """What slower steps may cost in all."""
        terms, run_s = self.terms, self.run_s
        return min(terms.short_share * run_s, terms.fixed_s + _SHARE * run_s)

    @property
    def left_s(self) -> float:
        """What of it is left."""
        (short, from_s), (long, to_s) = _MOST
        way = (min(max(self.run_s, from_s), to_s) - from_s) / (to_s - from_s)
        most_s = self.run_s * (short + (long - short) * way) - self.before_s
        # What was spent before must not leave nothing to measure with.
        return min(self.limit_s, max(most_s, self.limit_s / 2)) - self.lost_s

    def pays_for(self, seconds: float) -> bool:
        """Whether something may begin that costs about so much."""
        return self.left_s >= seconds

    def pays_before(self, seconds: float) -> bool:
        """Whether it may begin before the first step."""
        return self.before_s + seconds <= self.before_limit_s

    @property
    def before_limit_s(self) -> float:
        """What may be spent before the first step."""
        return min(self.terms.longest_s, self.terms.before_share * self.run_s)
