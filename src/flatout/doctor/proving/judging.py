"""Makes a Proof from a trial: whether a cure is prescribed, and why not."""

from __future__ import annotations

import math
from dataclasses import replace

from flatout.doctor.judge import Verdict
from flatout.doctor.prescription import Proof
from flatout.doctor.proving.bench import LEFT, why_left
from flatout.doctor.proving.cure import Cure
from flatout.doctor.proving.losses import Compared, compare
from flatout.doctor.proving.whole_run import setup_s
from flatout.doctor.trials.pair import Pair
from flatout.recipe import Parity

CHANGES = "changes what is learned"
# Setup of fewer seconds is not reported.
_LEAST_SETUP_S = 0.5


class Judging:
    """Judges the trials of one script.

    Attributes:
        is_repeatable: True if the unchanged script repeats its losses in each run.
        cpu_floor: largest distance from 1 that the ratio of the script's CPU time to itself may
            have; None if only wall time counts, as on a quiet machine.
    """

    def __init__(self, verdict: Verdict, allow: Parity, run_steps: int | None) -> None:
        self.is_repeatable = False
        self.cpu_floor: float | None = None
        # A Trainer or Loop takes a Recipe itself, and does not report that to this process.
        self._tells_what_applied = verdict.observations[0].framework != "flatout"
        self._allow = allow
        self._run_steps = run_steps

    def proof(self, cure: Cure, pair: Pair) -> Proof:
        """Return the proof of a cure from its trial."""
        compared = self.compared(cure, pair)
        proof = Proof(
            names=cure.names,
            words=cure.words,
            recipe=dict(cure.recipe),
            edits=cure.edits,
            trial=pair.result,
            parity=compared.parity.words,
            loss=compared.words,
            same_batches=compared.same_batches,
            held=pair.held,
        )
        result = pair.result
        if result is None:
            is_late = "in the time given" in pair.reason
            reason = pair.reason.partition(": ")[2]
            if not reason.startswith(LEFT):
                reason = f"with it {reason}"
            return replace(proof, outcome="not tried" if is_late else "left alone", reason=reason)
        a_step, b_step = result.step_s
        once = setup_s(pair.a, pair.b, a_step, b_step)
        if once >= _LEAST_SETUP_S:
            repays = math.ceil(once / (a_step - b_step)) if result.wins else None
            proof = replace(proof, setup_s=once, repays_after=repays)
        is_by_recipe = bool(cure.recipe) and not cure.own_edits
        took_hold = {*pair.b.applied} - {*pair.a.applied}
        if self._tells_what_applied and is_by_recipe and not took_hold:
            reason = f"{LEFT}: nothing was found in the script that it concerns"
            return replace(proof, outcome="left alone", reason=reason)
        if not compared.holds:
            return replace(proof, outcome="left alone", reason=f"{CHANGES}: {compared.words}")
        if not result.wins:
            given_up = why_left(cure, pair.b)
            if given_up:  # the script could not know this in its first steps
                return replace(proof, outcome="left alone", reason=given_up)
            by_cpu = self._by_cpu(proof, pair)
            if by_cpu and compared.parity <= self._allow:
                return replace(proof, outcome="prescribed", reason=by_cpu, rests_on="CPU time")
            why = "slower" if result.loses else pair.reason or "noise"
            return replace(proof, outcome="left alone", reason=f"{result.ratio:.2f}x, {why}")
        if compared.parity > self._allow:
            return replace(proof, outcome="needs your OK", reason=compared.parity.words)
        late = self._too_late(proof)
        return replace(proof, outcome="left alone" if late else "prescribed", reason=late)

    def compared(self, cure: Cure, pair: Pair) -> Compared:
        """Return whether the script learns the same with a cure."""
        return compare(
            pair.a,
            pair.b,
            cure.parity,
            is_repeatable=self.is_repeatable,
            same_input=cure.same_input,
        )

    def _by_cpu(self, proof: Proof, pair: Pair) -> str:
        cpu, result = pair.cpu, pair.result
        if self.cpu_floor is None or cpu is None or result is None or proof.setup_s:
            return ""
        if result.loses or result.ratio < 1 or not (cpu.wins and cpu.low > 1 + self.cpu_floor):
            return ""
        interval = f"[{cpu.low:.2f},{cpu.high:.2f}]"
        return f"rests on CPU time, {cpu.ratio:.2f}x {interval}: wall time is too noisy here"

    def _too_late(self, proof: Proof) -> str:
        after, run = proof.repays_after, self._run_steps
        if after is None or run is None or after < run:
            return ""
        assert proof.trial is not None
        return (
            f"{proof.trial.ratio:.2f}x, {proof.setup_s:.0f} s of set-up repay after {after:,} "
            f"steps; you run {run:,}"
        )
