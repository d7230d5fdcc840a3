"""From a verdict to a prescription: try each cure on the script itself, then the winners together.

    1  itself     The script against itself, for the noise and to see if its losses repeat. Noise
                  may come from memory that is returned to the system and allocated again in some
                  steps. Then later trials are measured with that memory kept.
    2  alone      Each cure against the unchanged script, with several numbers of workers or
    threads.
    3  added      Cures that did not win alone, on top of those that did: bf16 alone may be slower
                  while bf16 with channels_last is three times faster. Also cures of problems that
                  another cure causes, such as memory allocated again in each step. A cure that
                  adds nothing is dropped.
    4  together   All remaining cures against the unchanged script, measured again, so that a chance
                  win of step 2 is not prescribed. If no cure has won, the most promising one is
                  tried: this trial is the longest, and detects wins that noise has hidden. If the
                  remaining cures fail, the best cure that won alone but added nothing is tried.

The process of the unchanged script stays alive, but stopped, from the first trial to the last but
one. For the last trial it is started again if time allows, so that both sides are equally old.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from flatout.doctor.checks.memory_returned import KEEP
from flatout.doctor.judge import Verdict
from flatout.doctor.prescription import Outcome, Prescription, Proof
from flatout.doctor.proving.bench import LEFT, Bench, counts_between
from flatout.doctor.proving.cure import NOTHING, Cure, cures_of, together
from flatout.doctor.proving.follow import brought_about
from flatout.doctor.proving.judging import CHANGES, Judging
from flatout.doctor.proving.losses import compare
from flatout.doctor.proving.obstacles import why_no_trial
from flatout.doctor.proving.other_work import OtherWork
from flatout.doctor.proving.whole_run import between_s, run_steps, whole_s
from flatout.doctor.trials.pair import Against, Pair
from flatout.doctor.trials.scratch import scratch
from flatout.errors import FlatoutError
from flatout.measure import TrialResult
from flatout.recipe import Parity

# Shares of the time budget. _ITSELF: for the trial of the script against itself; _KEPT: reserved
# for the last trials. The trial of the script against itself gets at least _ITSELF_S seconds, but
# at most the share _ITSELF_MOST of the remaining time.
_ITSELF, _KEPT = 0.25, 0.25
_ITSELF_S, _ITSELF_MOST = 30.0, 1 / 3
# Noise of the script against itself. _NOISY: from this noise on, its cause is reported.
# _LOUD: from this noise on, each win has to exceed it, not only the noise of its own trial.
_NOISY, _LOUD = 0.2, 0.4
# Noisy scripts get longer blocks, by the factor noise / _CALM but at most by the factor _LONGEST.
_CALM, _LONGEST = 0.1, 4.0
# Limits of the last trial, whose result is promised. _LAST_PAIRS: minimum number of times that
# blocks A B B A run; _MOST_LAST_PAIRS: maximum number, if time allows. _PRECISION: largest width of
# the result's interval. _PACE_S: seconds that each side warms up before its block counts. _LIVES:
# number of processes that each side starts, one after another.
_LAST_PAIRS, _MOST_LAST_PAIRS, _PRECISION, _PACE_S, _LIVES = 4, 16, 0.04, 1.0, 5
# Smallest distance from 1 at which a ratio of CPU times counts as a win.
_LEAST_CPU_FLOOR = 0.02
# A cure with fewer workers or threads is preferred if its ratio is at least this share of the best
# ratio.
_AS_GOOD = 0.98


class _Stopped(Exception):
    """Raised with the reason when no more trials can be made."""


@dataclass(frozen=True)
class _Tried:
    """A cure, its Proof, and the measurements of its trial."""

    cure: Cure
    proof: Proof
    pair: Pair


def prove(
    verdict: Verdict,
    what: Sequence[str],
    *,
    budget_s: float = 120.0,
    allow: Parity = Parity.TOLERANT,
    told: Callable[[str], None] = lambda line: None,
) -> Prescription:
    """Try the cures of a verdict's findings, in the current folder.

    The trials change no file of the user's, and leave no process running. Ctrl-C stops them early,
    with the results until then.
    """
    began = time.monotonic()
    cures = cures_of(verdict, allow) if verdict.observations else []
    reason = why_no_trial(verdict)
    if reason or not cures:
        untried = [_untried(cure, reason) for cure in cures]
        return Prescription(proofs=untried, stopped=reason if cures or not verdict.steps else "")
    with scratch() as folder:
        proving = Proving(verdict, what, Bench(verdict, what, folder, budget_s), allow, told)
        try:
            proving.run(cures)
        except KeyboardInterrupt:
            proving.stopped = "stopped by Ctrl-C"
        except (_Stopped, FlatoutError) as error:
            proving.stopped = str(error)
        prescription = proving.prescription(cures)
    return replace(prescription, seconds=time.monotonic() - began)


class Proving:
    """The trials of one script so far."""

    def __init__(
        self,
        verdict: Verdict,
        what: Sequence[str],
        bench: Bench,
        allow: Parity,
        told: Callable[[str], None],
    ) -> None:
        self.stopped = ""
        self._verdict = verdict
        self._bench = bench
        self._allow = allow
        self._told = told
        self._kept_s = bench.left_s * _KEPT
        self._run_steps = run_steps(verdict, what)
        self._judging = Judging(verdict, allow, self._run_steps)
        self._floor = 0.0
        self._noise = ""
        self._tried: dict[tuple[str, ...], _Tried] = {}
        self._untried: dict[tuple[str, ...], Proof] = {}
        self._brought: list[Cure] = []  # cures of problems that other cures cause
        self._idle: list[_Tried] = []  # cures that win alone, but add nothing to other cures
        self._final: _Tried | None = None

    def run(self, cures: Sequence[Cure]) -> None:
        """Run all trials that the budget allows."""
        with self._bench.against(NOTHING) as plain:
            self._told("the script against itself, for the noise ...")
            left = self._bench.left_s
            budget = max(_ITSELF * left, min(_ITSELF_S, _ITSELF_MOST * left))
            others = OtherWork()
            pair, result = self._with_itself(plain, budget)
            chosen = self._with_memory_kept(plain, cures, pair, result, budget / 2)
            if chosen is None:
                self._itself(plain, pair, result, budget, others)
                chosen = self._chosen(plain, cures)
            if chosen:
                self._together(plain, chosen)

    # -- the trials -------------------------------------------------------------------------------

    def _with_memory_kept(
        self,
        plain: Against,
        cures: Sequence[Cure],
        pair: Pair,
        result: TrialResult,
        budget_s: float,
    ) -> list[Cure] | None:
        kept = next((cure for cure in cures if cure.recipe == KEEP), None)
        if result.floor <= _NOISY or kept is None or not self._has_time(4, starts=2):
            return None
        self._told(f"  A/A noise ±{result.floor:.1%}: again with {kept.words} ...")
        with self._bench.beside(kept) as base:
            calm = self._bench.measure(base, NOTHING, budget_s, min_pairs=3, max_pairs=4).result
            if calm is None or calm.pairs < 2 or calm.floor > min(_NOISY, result.floor / 2):
                return None
            self._believe(pair, calm)
            self._told(f"  A/A noise ±{self._floor:.1%}, so cures are tried in addition to that")
            self._alone(plain, kept, remaining=len(cures))
            alone = self._tried.pop(kept.names, None)
            if alone is None:  # no time was left for this trial
                return []
            chosen = self._chosen(base, [cure for cure in cures if cure is not kept])
        for names, tried in self._tried.items():
            reason = ", ".join(filter(None, (tried.proof.reason, f"together with {kept.words}")))
            self._tried[names] = replace(tried, proof=replace(tried.proof, reason=reason))
        self._tried[kept.names] = alone
        return [kept, *chosen] if chosen or alone.proof.outcome == "prescribed" else []

    def _chosen(self, plain: Against, cures: Sequence[Cure]) -> list[Cure]:
        for at, cure in enumerate(cures):
            self._alone(plain, cure, remaining=len(cures) - at)
        known = {name for cure in cures for name in cure.fields}
        self._brought = [finding for finding in self._follows() if not finding.fields & known]
        return self._beside(plain) or self._hidden()

    def _itself(
        self, plain: Against, pair: Pair, result: TrialResult, budget_s: float, others: OtherWork
    ) -> None:
        if result.floor > _NOISY and self._bench.left_s > 2 * budget_s:
            self._bench.longer = min(result.floor / _CALM, _LONGEST)
            self._told(f"  A/A noise ±{result.floor:.1%}: again in longer blocks ...")
            pair, result = self._with_itself(plain, budget_s)
        self._believe(pair, result)
        if self._floor > _LOUD:  # a win within this noise is not prescribed
            self._bench.floor = self._floor
        if self._floor > _NOISY:
            self._believe_cpu_time(pair)
            self._noise = (
                others.words() or "no other process on this machine used a CPU during trials"
            )
        self._told(f"  A/A noise ±{self._floor:.1%}" + (f": {self._noise}" if self._noise else ""))

    def _believe(self, pair: Pair, result: TrialResult) -> None:
        # Two processes may differ permanently, which the noise within a trial does not show.
        if not result.low <= 1 <= result.high:
            strayed = math.exp(abs(math.log(result.ratio))) - 1
            self._bench.floor = max(self._bench.floor, strayed)
        self._floor = max(self._bench.floor, result.floor)
        compared = compare(pair.a, pair.b, Parity.EXACT, is_repeatable=True)
        self._judging.is_repeatable = compared.is_equal is not False

    def _with_itself(self, plain: Against, budget_s: float) -> tuple[Pair, TrialResult]:
        pair = self._bench.measure(plain, NOTHING, budget_s, min_pairs=3, max_pairs=4)
        if pair.result is None:
            raise _Stopped(f"the script as it is: {pair.reason.partition(': ')[2]}")
        return pair, pair.result

    def _believe_cpu_time(self, pair: Pair) -> None:
        cpu, device = pair.cpu, self._verdict.observations[0].device
        if cpu is not None and device == "cpu":
            strayed = math.exp(abs(math.log(cpu.ratio))) - 1
            self._judging.cpu_floor = max(cpu.floor, strayed, _LEAST_CPU_FLOOR)

    def _alone(self, plain: Against, cure: Cure, remaining: int) -> None:
        if cure.parity is Parity.LEARNING:
            self._untried[cure.names] = _untried(cure, Parity.LEARNING.words, "needs your OK")
            return
        left, needed = self._bench.left_s, self._bench.needed_s
        spare = left - max(self._kept_s, needed)
        if spare < needed:
            if self._tried or left < needed:
                self._untried[cure.names] = _untried(cure, "no time was left for it")
            else:  # there is time for one trial only, so it is also the last
                self._tried[cure.names] = self._try(plain, cure, left, min_pairs=_LAST_PAIRS)
            return
        share = spare / (remaining + len(cure.others))
        tried = [self._try(plain, cure, max(share, needed))]
        if tried[0].proof.reason.startswith(LEFT) and cure.edits and self._has_time(2):
            # A cure that cannot be applied from outside can still be edited into the script.
            tried = [self._try(plain, cure.by_edits, max(share, self._bench.needed_s))]
        self._tried[cure.names] = tried[0]
        for other in cure.others:
            # All other cures are tried before this cure is tried with other values.
            spare = self._bench.left_s - max(self._kept_s, remaining * self._bench.needed_s)
            if spare > self._bench.needed_s:
                tried.append(self._try(plain, other, max(share, self._bench.needed_s)))
                self._tried[cure.names] = _best(tried)

    def _try(self, against: Against, cure: Cure, budget_s: float, *, min_pairs: int = 2) -> _Tried:
        self._told(f"trying {cure.words} ...")
        pair = self._bench.measure(against, cure, budget_s, min_pairs=min_pairs)
        proof = self._judging.proof(cure, pair)
        self._told(f"  {proof.trial.words if proof.trial else proof.reason}")
        tried = _Tried(cure, proof, pair)
        if against.has_ended:
            self._tried[cure.names] = tried
            raise _Stopped(f"the script as it is: {pair.reason.partition(': ')[2]}")
        return tried

    def _follows(self) -> list[Cure]:
        result = {
            finding.name: finding
            for tried in self._tried.values()
            if tried.proof.outcome == "prescribed"
            for finding in brought_about(self._verdict, tried.pair)
        }
        return cures_of(replace(self._verdict, findings=[*result.values()]), self._allow)

    def _beside(self, plain: Against) -> list[Cure]:
        chosen = [t.cure for t in self._tried.values() if t.proof.outcome == "prescribed"]
        rest = [t.cure for t in self._tried.values() if self._may_help(t)]
        if not chosen and len(rest) > 1 and self._has_time(2):
            result = self._try(plain, together(rest), self._bench.left_s / 2)
            if result.proof.outcome == "prescribed":
                chosen, rest = rest, []
        rest += self._brought
        if not chosen or len(chosen) + len(rest) < 2:
            return chosen
        for cure in rest:
            chosen = self._with(chosen, cure)
        return self._without_idle(chosen)

    def _may_help(self, tried: _Tried) -> bool:
        proof = tried.proof
        if proof.outcome != "left alone" or proof.trial is None or proof.repays_after:
            return False
        return not proof.reason.startswith((CHANGES, LEFT))

    def _with(self, chosen: list[Cure], cure: Cure) -> list[Cure]:
        if not self._has_time(3, starts=2):
            return chosen
        with self._bench.against(together(chosen)) as base:
            self._told(f"trying {cure.words} together with {together(chosen).words} ...")
            pair = self._bench.measure(base, together([*chosen, cure]), self._spare())
        if cure in self._brought:  # no trial of this cure alone exists
            proof = self._judging.proof(cure, pair)
            if proof.outcome == "prescribed":
                proof = replace(proof, reason=f"together with {together(chosen).words}")
            self._tried[cure.names] = _Tried(cure, proof, pair)
        learns = self._judging.compared(cure, pair).holds
        if pair.result is None or not pair.result.wins or not learns:
            return chosen
        self._keep(cure, f"pays together with {together(chosen).words}: {pair.result.words}")
        return [*chosen, cure]

    def _without_idle(self, chosen: list[Cure]) -> list[Cure]:
        if len(chosen) < 2 or not self._has_time(3, starts=2):
            return chosen
        left = list(chosen)
        with self._bench.against(together(chosen)) as base:
            # Leave out the least promising cure first.
            for cure in sorted(chosen, key=lambda value: self._ratio(value)):
                fewer = [item for item in left if item is not cure]
                if not fewer or not self._has_time(2):
                    break
                self._told(f"trying without {cure.words} ...")
                # One process may keep memory by chance, and the next process may not.
                is_luck = cure.recipe == KEEP
                lives = _LIVES if is_luck else 1
                pair = self._bench.measure(base, together(fewer), self._spare(), lives=lives)
                if pair.result is None or pair.result.pairs < 2 or pair.result.loses:
                    continue
                least = pair.result.low if is_luck else pair.result.ratio
                if least < 1 - self._bench.floor:
                    continue
                left = fewer
                tried = self._tried[cure.names]
                if cure not in self._brought and tried.proof.trial and tried.proof.trial.wins:
                    self._idle.append(tried)
                self._drop(cure, f"adds nothing to {together(fewer).words}")
        return left

    def _hidden(self) -> list[Cure]:
        if not self._has_time(2):
            return []
        left = [tried.cure for tried in self._tried.values() if self._may_help(tried)]
        best = max(left, key=self._ratio, default=None)
        # The ratio of two processes of the unchanged script may be nearly that far from 1.
        return [best] if best and self._ratio(best) > 1 + 3 * self._bench.floor else []

    def _together(self, plain: Against, chosen: list[Cure]) -> None:
        everything = together(chosen)
        while True:
            final = self._confirmed(plain, everything)
            if final.proof.outcome == "prescribed":
                self._final = final
                if len(chosen) == 1:  # promise the result that was measured last
                    self._tried[everything.names] = final
                for cure in chosen:
                    self._keep(cure, f"pays with the others: {everything.words}")
                return
            worst = f"{final.proof.reason} when measured again"
            if len(chosen) == 1:
                self._drop(chosen[0], worst)
                if not self._idle:
                    return
                spare = max(self._idle, key=lambda tried: self._ratio(tried.cure))
                self._idle.remove(spare)
                self._tried[spare.cure.names] = spare
                chosen, everything = [spare.cure], spare.cure
                continue
            outcome: Outcome = "left alone"
            worst = f"together {worst}"
            if final.proof.outcome == "not tried":  # time was short, no fault of the cure
                outcome, worst = "not tried", "no time was left to measure it with the others"
            best = max(chosen, key=self._ratio)
            for cure in chosen:
                if cure is not best:
                    self._drop(cure, worst, outcome)
            chosen, everything = [best], best

    def _confirmed(self, plain: Against, cure: Cure) -> _Tried:
        if not self._has_time(1) and cure.names in self._tried:
            return self._tried[cure.names]
        self._told(f"measuring again: {cure.words} ...")
        measured = partial(
            self._bench.measure,
            plain,
            cure,
            min_pairs=_LAST_PAIRS,
            max_pairs=_MOST_LAST_PAIRS,
            precision=_PRECISION,
        )
        is_fresh = self._has_time(1, starts=2)
        pair = measured(
            self._bench.left_s, block_s=1.0, pace_s=_PACE_S, fresh=is_fresh, lives=_LIVES
        )
        if pair.is_too_short and self._has_time(1):  # the script ends too soon with the cure
            pair = measured(self._bench.left_s, fresh=is_fresh)
        proof = self._judging.proof(cure, pair)
        self._told(f"  {proof.trial.words if proof.trial else proof.reason}")
        if proof.outcome == "not tried" and cure.names in self._tried:
            return self._tried[cure.names]
        return _Tried(cure, proof, pair)

    # -- results of the trials --------------------------------------------------------------------

    def _ratio(self, cure: Cure) -> float:
        trial = self._tried[cure.names].proof.trial
        return 0.0 if trial is None or cure in self._brought else trial.ratio

    def _keep(self, cure: Cure, reason: str) -> None:
        tried = self._tried[cure.names]
        if tried.proof.outcome != "prescribed":
            proof = replace(tried.proof, outcome="prescribed", reason=reason)
            self._tried[cure.names] = replace(tried, proof=proof)

    def _drop(self, cure: Cure, reason: str, outcome: Outcome = "left alone") -> None:
        tried = self._tried[cure.names]
        proof = replace(tried.proof, outcome=outcome, reason=reason)
        self._tried[cure.names] = replace(tried, proof=proof)

    def _has_time(self, trials: int, starts: int = 1) -> bool:
        more = (starts - 1) * self._bench.start_s
        return self._bench.left_s > trials * self._bench.needed_s + more

    def _spare(self) -> float:
        return max(self._bench.needed_s, (self._bench.left_s - self._bench.needed_s) / 3)

    # -- the outcome ------------------------------------------------------------------------------

    def prescription(self, cures: Sequence[Cure]) -> Prescription:
        """Return the results of all trials."""
        proofs = []
        for cure in [*cures, *self._brought]:
            if cure.names in self._tried:
                proofs.append(self._tried[cure.names].proof)
            else:
                reason = self.stopped or "no time was left for it"
                proofs.append(self._untried.get(cure.names) or _untried(cure, reason))
        took: dict[str, float] = {}
        with suppress(ValueError):
            took = self._whole_run()
        return Prescription(
            proofs=proofs,
            together=self._final.proof if self._final else None,
            floor=self._floor,
            noise=self._noise,
            run_steps=self._run_steps,
            refused=self._bench.refused,
            stopped=self.stopped,
            **took,
        )

    def _whole_run(self) -> dict[str, float]:
        final, steps = self._final, self._run_steps
        if final is None or final.pair.result is None or final.proof.rests_on == "CPU time":
            return {}  # the saved wall time is not known
        pair, result = final.pair, final.pair.result
        lanes = self._verdict.observations[0].lanes_ms
        looked = sum((lanes.get(lane) or 0.0) for lane in ("evaluation", "saving")) / 1e3
        # If the cure is about evaluation or saving, steps include their time already.
        is_in_steps = counts_between(final.cure)
        a_between, b_between = (0.0, 0.0) if is_in_steps else between_s(pair.blocks, looked)
        a_step, b_step = result.step_s
        times = {"step_before_s": a_step + a_between, "step_after_s": b_step + b_between}
        if steps is not None:
            times["before_s"] = whole_s(pair.a, pair.a, steps, a_step, a_between)
            times["after_s"] = whole_s(pair.a, pair.b, steps, b_step, b_between)
        return times


def _untried(cure: Cure, reason: str, outcome: Outcome = "not tried") -> Proof:
    return Proof(
        names=cure.names,
        words=cure.words,
        recipe=dict(cure.recipe),
        edits=cure.edits,
        outcome=outcome,
        reason=reason,
        parity=cure.parity.words,
    )


def _best(tried: Sequence[_Tried]) -> _Tried:
    won = [item for item in tried if item.proof.outcome == "prescribed"]
    won = won or [item for item in tried if item.proof.outcome == "needs your OK"]
    if not won:
        return tried[0]

    def ratio(value: _Tried) -> float:
        assert value.proof.trial is not None
        return value.proof.trial.ratio

    fastest = max(map(ratio, won))
    good = [item for item in won if ratio(item) >= _AS_GOOD * fastest]
    return min(good, key=lambda value: list(value.cure.recipe.values()))
