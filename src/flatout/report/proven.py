"""Report of the trials of `flatout doctor`.

console.print(ProvenReport(prescription, verdict, 151.0, ["train.py"], path), crop=False)
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from flatout.doctor import Outcome, Prescription, Proof, Verdict, is_searched, under_torchrun
from flatout.measure import TrialResult
from flatout.report.first_look import Row, commands, short
from flatout.words import clock, counted, duration, rounded

_LABEL = 13
"""Columns of the labels on the left, such as `needs your OK`."""

_WITH_BETWEEN = 1.02
"""Ratio of steps with and without evaluation and saving from which on both are reported."""

_OTHERS: tuple[Outcome, ...] = ("left alone", "needs your OK", "not tried")


@dataclass(frozen=True)
class ProvenReport:
    """The result of the trials, and the next commands."""

    prescription: Prescription
    verdict: Verdict
    seconds: float
    what: Sequence[str]
    recipe: Path | None = None
    budget_s: float = 0.0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text("")
        yield Text(self._heading(), style="bold")
        if self.prescription.prescribed:
            yield self._cures()
        yield from self._others()
        for danger in self.verdict.dangers:
            place = f"{short(danger.where)} " if danger.where else ""
            yield Row("DANGER", "bold red", f"{place}{danger.what}", width=_LABEL)
        if self.prescription.noise:
            yield Row("noise", "bold", self.prescription.noise, width=_LABEL)
        if self.prescription.refused:
            yield Row("refused", "bold", "; ".join(_refused(self.prescription)), width=_LABEL)
        if self.prescription.stopped:
            yield Row("stopped", "bold", self.prescription.stopped, width=_LABEL)
        yield from self._whole_run()
        yield from self._next()

    def _heading(self) -> str:
        given = self.prescription
        measured = any(proof.trial for proof in given.proofs)
        # Report the noise of the last trial, which decided, since a machine's noise changes over
        # time.
        last = given.together.trial if given.together else None
        floor = given.floor if last is None else last.floor
        noise = f"  (A/A noise ±{floor:.1%})" if measured else ""
        if given.prescribed:
            return f"[{clock(self.seconds)}] PROVEN{noise}"
        if any(proof.outcome == "needs your OK" and proof.trial for proof in given.proofs):
            return (
                f"[{clock(self.seconds)}] NOTHING PRESCRIBED: what is faster needs your OK{noise}"
            )
        if self._needs_time:
            untried = sum(proof.outcome == "not tried" for proof in given.proofs)
            left = f"{counted(untried, 'cure')} not tried"
            return f"[{clock(self.seconds)}] NOTHING PROVEN YET: {left}{noise}"
        if measured:
            return f"[{clock(self.seconds)}] NOTHING TO PRESCRIBE: leave it as it is{noise}"
        return f"[{clock(self.seconds)}] NOTHING PROVEN: no cure was measured"

    def _cures(self) -> Table:
        table = Table.grid(padding=(0, 1))
        table.add_column(justify="right", min_width=2)
        table.add_column(min_width=16)
        table.add_column(no_wrap=True, style="bold green")
        table.add_column()
        proofs = self.prescription.prescribed
        for number, proof in enumerate(proofs, 1):
            table.add_row(f"{number}", Text(proof.words), ratio(proof.trial), Text(effect(proof)))
        together = self.prescription.together
        if together is not None and len(proofs) > 1:
            numbers = [str(n) for n, p in enumerate(proofs, 1) if {*p.names} <= {*together.names}]
            label = "+".join(numbers) if len(numbers) < 5 else f"all {len(numbers)}"
            words = Text(f"{label} together", style="bold")
            table.add_row("", words, ratio(together.trial), Text(effect(together)))
        return table

    def _others(self) -> Iterator[RenderableType]:
        for outcome in _OTHERS:
            some = [proof for proof in self.prescription.proofs if proof.outcome == outcome]
            style = "bold yellow" if outcome == "needs your OK" else "bold"
            for number, proof in enumerate(some):
                yield Row("" if number else outcome, style, reasons(proof), width=_LABEL)

    def _whole_run(self) -> Iterator[RenderableType]:
        given = self.prescription
        together = given.together or next(iter(given.prescribed), None)
        if together is None or together.trial is None:
            return
        if given.before_s is not None and given.after_s is not None:
            steps = (
                "your whole run" if given.run_steps is None else counted(given.run_steps, "step")
            )
            change = f"{duration(given.before_s)} → {duration(given.after_s)}"
            yield Text(f"{steps}: {change}, warm-up included", style="bold")
            return
        of_step = together.trial.step_s
        words = "a step"
        whole = given.step_before_s, given.step_after_s
        if whole[0] and whole[1] and whole[0] > _WITH_BETWEEN * of_step[0]:
            of_step = whole[0], whole[1]
            words += " with its share of evaluation and saving"
        before, after = (f"{rounded(1000 * item)} ms" for item in of_step)
        yield Text(
            f"{words}: {before} → {after}; how many your whole run has is not known here",
            style="bold",
        )

    def _next(self) -> Iterator[RenderableType]:
        lines = []
        if self.recipe is not None:
            lines.append(runs_by(self.recipe, self.what))
        edits = [edit for proof in self.prescription.prescribed for edit in proof.edits]
        edits += [edit for danger in self.verdict.dangers for edit in danger.edits]
        if edits:
            places = sorted({f"{short(f'{edit.file}:{edit.line}')}" for edit in edits})
            command = f"flatout doctor --yes --diff {self._what} | patch -p1"
            lines.append(f"{command}   # {', '.join(places)}")
        if self._needs_time:
            minutes = math.ceil(2 * max(self.budget_s, self.prescription.seconds) / 60)
            lines.append(
                f"flatout doctor --yes --budget {minutes}m {self._what}   # with more time"
            )
        if self._widens:
            lines.append(f"flatout doctor --yes --allow redrawn {self._what}")
        yield from commands(lines)

    @property
    def _what(self) -> str:
        return shlex.join(self.what)

    @property
    def _searched(self) -> bool:
        return any(is_searched(name) for proof in self.prescription.proofs for name in proof.names)

    @property
    def _needs_time(self) -> bool:
        given = self.prescription
        untried = any(proof.outcome == "not tried" for proof in given.proofs)
        had_none = not given.stopped or "in the time given" in given.stopped
        return untried and had_none and given.seconds > 0

    @property
    def _widens(self) -> bool:
        asks = [proof for proof in self.prescription.proofs if proof.outcome == "needs your OK"]
        return any(ask.parity == "redrawn" for ask in asks)


def runs_by(recipe: Path, what: Sequence[str]) -> str:
    ranks = under_torchrun(what, ["-m", "flatout.cures.start"])
    if ranks is None:
        return f"flatout run --recipe {shlex.quote(str(recipe))} {shlex.join(what)}"
    ours = ranks[ranks.index("torch.distributed.run") + 1 :]
    return f"FLATOUT_RECIPE={shlex.quote(str(recipe))} torchrun {shlex.join(ours)}"


def ratio(trial: TrialResult | None) -> str:
    return "" if trial is None else f"{trial.ratio:.2f}x [{trial.low:.2f},{trial.high:.2f}]"


def effect(proof: Proof) -> str:
    samples = {True: "same samples", False: "other samples", None: ""}[proof.same_batches]
    parity = f"{proof.parity}: {proof.loss}" if proof.parity and proof.loss else proof.parity
    # Without any change of results, the samples need no words.
    parts = [samples if proof.parity != "bit-identical" else "", parity or proof.loss]
    words = ", ".join(filter(None, parts))
    # Add the reason why a cure that did not win alone is prescribed.
    return "; ".join(filter(None, [words, proof.reason]))


def reasons(proof: Proof) -> str:
    measured = "" if proof.trial is None else f"{proof.trial.ratio:.2f}x"
    reasons = [] if proof.reason.startswith(measured) else [measured]
    why = ", ".join(part for part in (*reasons, proof.reason) if part)
    return f"{proof.words}: {why}" if why else proof.words


def _refused(prescription: Prescription) -> list[str]:
    refused = [f"{item['what']} ({short(item['where'])})" for item in prescription.refused]
    return list(dict.fromkeys(refused))
