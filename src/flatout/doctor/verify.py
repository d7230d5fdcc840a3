"""Checks that whole runs learn the same with the prescribed cures: paired runs of several seeds.

    verified = verify(["train.py"], prescription, seeds=3, told=print)

Each seed runs the script twice to its end, contained as in a trial: as it is, and with all
prescribed cures. Compared are the mean losses over the last 5% of the steps, since a script's own
printed metrics cannot be interpreted. Also compared are the times until such a mean reached a
target. The seeds initialize the random generators. A script that seeds itself runs the same each
time, which is detected and reported.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, stdev
from typing import Any

from flatout.doctor.prescription import Prescription
from flatout.doctor.proving.cure import NOTHING, Cure
from flatout.doctor.proving.jobs import job
from flatout.doctor.trials.process import Command, Ended, Process
from flatout.doctor.trials.scratch import scratch, temporary_of
from flatout.doctor.trials.start import LOSSES, SEED
from flatout.doctor.trials.whole import Curve
from flatout.errors import FlatoutError
from flatout.words import counted, rounded

STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""Half-width of a 95% interval in standard errors (Student's t), by number of seeds."""


@dataclass(frozen=True)
class WholeRun:
    """One run of the script to its end.

    Attributes:
        loss: mean loss over the last steps.
        steps: number of steps.
        seconds: seconds from start to end.
        to_target_s: seconds from start until the loss reached the target; None if it never did.
    """

    loss: float
    steps: int
    seconds: float
    to_target_s: float | None = None


@dataclass(frozen=True)
class Verified:
    """Results of whole runs.

    Attributes:
        pairs: for each seed, the run of the script as it is, and the run with the cures.
        stopped: why not all seeds were run; "" if all were run.
        target: loss for which times are compared; None for the higher final loss of each pair,
            which both runs reach.
    """

    pairs: list[tuple[WholeRun, WholeRun]] = field(default_factory=list)
    stopped: str = ""
    target: float | None = None

    @property
    def draws_alike(self) -> bool:
        """True if all seeds gave the same run, since the script seeds itself."""
        return len({(plain.loss, plain.steps) for plain, _ in self.pairs}) < len(self.pairs)

    @property
    def difference(self) -> tuple[float, float, float] | None:
        """Differences of final losses, cured minus plain, as a 95% interval [low, mean, high].

        None with fewer than two seeds, or if the script seeds itself.
        """
        count = len(self.pairs)
        if count < 2 or self.draws_alike:
            return None
        apart = [cured.loss - plain.loss for plain, cured in self.pairs]
        reach = STUDENT[count] * stdev(apart) / math.sqrt(count)
        return fmean(apart) - reach, fmean(apart), fmean(apart) + reach

    def words(self) -> list[str]:
        """Return the lines to print."""
        stopped = [f"whole runs ended early: {self.stopped}"] if self.stopped else []
        if not self.pairs:
            return stopped
        before, after = (fmean(pair[side].loss for pair in self.pairs) for side in (0, 1))
        taken = [fmean(pair[side].seconds for pair in self.pairs) for side in (0, 1)]
        count = len(self.pairs)
        seeds = counted(count, "seed")
        return [
            f"whole runs, {seeds}: final loss {rounded(before, 4)} → {rounded(after, 4)}, "
            f"{self._judgment(seeds)}",
            f"  measured from start to end: {rounded(taken[0])} s → {rounded(taken[1])} s, "
            f"{taken[0] / taken[1]:.2f}x",
            self._to_target(),
            *stopped,
        ]

    def _to_target(self) -> str:
        loss = "the loss that both reach" if self.target is None else f"a loss of {self.target:g}"
        times = [[pair[side].to_target_s for pair in self.pairs] for side in (0, 1)]
        reached = [[seconds for seconds in of_side if seconds is not None] for of_side in times]
        if all(len(item) == len(self.pairs) for item in reached):
            before, after = (fmean(item) for item in reached)
            return (
                f"  time to {loss}: {rounded(before)} s → {rounded(after)} s, {before / after:.2f}x"
            )
        came = [f"{len(item)} of {len(self.pairs)}" for item in reached]
        return (
            f"  {loss} was reached by {came[0]} runs of the script as it is, by {came[1]} runs "
            "with the proven settings"
        )

    def _judgment(self, seeds: str) -> str:
        if all(plain.loss == cured.loss for plain, cured in self.pairs):
            seeded = ", which is one comparison only: the script seeds itself"
            return f"the same in each{seeded if self.draws_alike else ''}"
        if self.draws_alike:
            return "one comparison only, since the script seeds itself"
        if self.difference is None:
            return "one comparison only"
        low, middle, high = self.difference
        figures = f"{middle:+.2g} [{low:+.2g}, {high:+.2g}]"
        if low <= 0 <= high:
            return f"{figures}: no difference that {seeds} can show"
        return f"{figures}: it {'grows' if middle > 0 else 'falls'}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        result = {"difference": self.difference, "draws_alike": self.draws_alike}
        return {**asdict(self), **result, "words": self.words()}


def verify(
    what: Sequence[str],
    prescription: Prescription,
    *,
    seeds: int = 3,
    target: float | None = None,
    told: Callable[[str], None] = lambda line: None,
) -> Verified:
    """Run the script to its end, as it is and with the prescribed cures, once for each seed.

    Ctrl-C stops early, with the results until then.
    """
    verified = Verified(target=target)
    cure = _prescribed(prescription)
    try:
        for seed in range(seeds):
            # The order alternates, so that a machine that slows down or warms up favors neither.
            order = [NOTHING, cure] if seed % 2 == 0 else [cure, NOTHING]
            runs = {}
            for item in order:
                runs[item is cure] = _whole_run(what, item, seed)
                run, _ = runs[item is cure]
                words = "with the prescription" if item is cure else "as it is"
                took = f"{rounded(run.seconds)} s"
                told(f"seed {seed}, {words}: loss {rounded(run.loss, 4)} after {took}")
            low = max(run.loss for run, _ in runs.values()) if target is None else target
            plain, cured = (
                replace(run, to_target_s=curve.reached(low))
                for run, curve in (runs[False], runs[True])
            )
            verified = replace(verified, pairs=[*verified.pairs, (plain, cured)])
    except KeyboardInterrupt:
        return replace(verified, stopped="by Ctrl-C")
    except FlatoutError as error:
        return replace(verified, stopped=error.what)
    return verified


def _prescribed(prescription: Prescription) -> Cure:
    proofs = prescription.prescribed
    together = prescription.together
    fields = together.recipe if together else {f: v for p in proofs for f, v in p.recipe.items()}
    own_edits = prescription.own_edits
    return Cure(("prescribed",), "what was prescribed", recipe=dict(fields), own_edits=own_edits)


def _whole_run(what: Sequence[str], cure: Cure, seed: int) -> tuple[WholeRun, Curve]:
    with scratch() as folder:
        results = temporary_of(folder) / "results"
        results.mkdir()
        losses = results / "losses"
        made = job(what, cure, results)
        variables = {**made.variables, SEED: str(seed), LOSSES: str(losses)}
        began = time.monotonic()
        process = Process(
            Command(made.command, variables),
            folder / "run",
            temporary_of(folder) / "run",
            passes=[results],
        )
        try:
            process.hear()
        except Ended as error:
            if process.exit != 0:
                raise FlatoutError(f"{cure.words}, seed {seed}: {error.what}") from None
        finally:
            process.end()
        seconds = time.monotonic() - began
        curve = Curve.read(losses, began)
    loss = curve.final()
    if math.isnan(loss):
        raise FlatoutError(f"{cure.words}, seed {seed}: no loss was observed")
    return WholeRun(loss, curve.steps, seconds), curve
