"""What `flatout doctor script.py` shows: where a step's time goes, and what could be tried.

console.print(FirstLookReport(verdict, machine, look.seconds, ["train.py"]), crop=False)
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flatout.devices import Inventory, at_start
from flatout.doctor import Finding, Verdict
from flatout.observe import Ablation, Observation
from flatout.recipe import Recipe
from flatout.report.not_contained import not_contained
from flatout.words import clock, counted, rounded

_STEP = ("input", "copy", "forward", "backward", "sync", "optimizer", "host", "gc", "idle")
_BETWEEN = ("evaluation", "saving")
_SHOWN = 0.01
"""Share of a step from which on a lane has its own bar."""
_SHORT = {"forward": "fwd", "backward": "bwd", "optimizer": "opt", "evaluation": "eval"}
"""Of lanes, where a line has no room for their names and bars."""
_TOLD = 0.001
"""Share from which on what is too small for a bar is told."""
_BAR = 24
"""Columns of all bars together."""


@dataclass(frozen=True)
class FirstLookReport:
    """A verdict before any trial.

    Attributes:
        verdict: what was judged.
        machine: where.
        seconds: how long the look took.
        what: the script and its arguments, as the user gave them.
        is_last: whether what can be done now stands here; else trials follow.
        cures: how many of the findings trials could prove.
        held: what contained the script: "overlay", "landlock" or "python"; "" in place.
        lacks: what of it nothing here could contain, as of trials.process.Process.
        uncontained: why nothing could contain it; "" where it was, or was not to be.
    """

    verdict: Verdict
    machine: Inventory
    seconds: float
    what: Sequence[str]
    is_last: bool = True
    cures: int = 0
    held: str = ""
    lacks: Sequence[str] = ()
    uncontained: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(header(self.verdict, self.machine))
        yield Text(self._heading(), style="bold")
        for rank in self.verdict.observations:
            yield from _lanes(rank, len(self.verdict.observations) > 1, options.max_width)
        found = self.verdict.critical
        if found is not None:
            yield Text(", ".join(part for part in (found.words, short(found.where)) if part))
        yield from _taken_out(self.verdict.observations)
        yield from self._dangers()
        yield from self._could_be_tried()
        yield from self._checks()
        yield from self._whereabouts()
        if self.is_last:
            yield from what_next(self.verdict.findings, self.what, self.cures)

    def _heading(self) -> str:
        at = f"[{clock(self.seconds)}]"
        steps = self.verdict.steps
        if not steps:
            return f"{at} no optimizer step was seen: there is nothing to judge yet"
        return (
            f"{at} FIRST LOOK at {counted(steps, 'step')}, nothing proven; "
            f"added {_added(self.verdict)}"
        )

    def _dangers(self) -> Iterator[RenderableType]:
        for danger in self.verdict.dangers:
            place = f"{short(danger.where)} " if danger.where else ""
            yield row("DANGER", "bold red", f"{place}{danger.what}", f"do: {danger.do}")

    def _could_be_tried(self) -> Iterator[RenderableType]:
        slow = [finding for finding in self.verdict.findings if finding.kind == "slow"]
        if slow:
            yield Text("")
            words = "COULD BE TRIED; the most that each could return per step"
            if any(finding.is_estimate and finding.cost_ms is not None for finding in slow):
                words += " (~: an estimate)"
            yield Text(words, style="bold")
        for finding in slow:
            place = f"{short(finding.where)} " if finding.where else ""
            do = f"do: {finding.do}" + (f"  [{finding.parity}]" if finding.parity else "")
            yield row(_bound(finding), "bold yellow", f"{place}{finding.what}", do)
        notes = [finding for finding in self.verdict.findings if finding.kind == "note"]
        for note in notes:
            place = f"{short(note.where)} " if note.where else ""
            cost = "" if note.cost_ms is None else "too little to matter here: "
            yield row("left alone", "bold", f"{cost}{place}{note.what}")

    def _checks(self) -> Iterator[RenderableType]:
        if not self.verdict.steps:
            return
        yield Text("")
        passed, unknown = len(self.verdict.passed), self.verdict.unknown
        yield Text(f"{passed} checks found nothing; {len(unknown)} had no signal")
        reasons: dict[str, list[str]] = {}
        for name, reason in unknown:
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            yield Padding(Text(f"{', '.join(names)}: {reason}", style="dim"), (0, 0, 0, 2))
        for note in dict.fromkeys(n for rank in self.verdict.observations for n in rank.notes):
            yield Padding(Text(note, style="dim"), (0, 0, 0, 2))

    def _whereabouts(self) -> Iterator[RenderableType]:
        """Where what the script has written lies now."""
        if self.uncontained:
            reason = f"it could not be contained ({self.uncontained}): what it wrote, it wrote"
            yield Padding(Text(reason, style="dim"), (0, 0, 0, 2))
        elif self.held == "python":
            words = "it ran in a scratch copy, as far as Python itself writes files"
            yield Padding(Text(words, style="dim"), (0, 0, 0, 2))
        if self.lacks:
            yield Padding(Text(not_contained(self.lacks), style="dim"), (0, 0, 0, 2))


def what_next(findings: Sequence[Finding], what: Sequence[str], cures: int) -> Iterator[Text]:
    """What can be done after a first look, as commands that exist, a line each.

    Args:
        findings: of the verdict.
        what: the script and its arguments.
        cures: how many of the findings trials could prove.
    """
    script = shlex.join(what)
    lines = []
    if cures:
        proves = f"proves {'the cure' if cures == 1 else f'{cures} cures'}"
        lines.append(f"flatout doctor --yes {script}   # {proves} in a scratch copy")
    settings = dict(at_once(findings))
    if settings:
        chosen = " ".join(f"--set {field}={value}" for field, value in settings.items())
        lines.append(f"flatout run {chosen} {script}")
    if any(finding.edits for finding in findings if finding.kind != "note"):
        lines.append(f"flatout doctor --diff {script}   # cures as changes of your code")
    if any(finding.kind != "note" for finding in findings):
        lines.append(f"flatout doctor {script}   # again, after a change")
    yield from commands(lines)


def commands(lines: Sequence[str]) -> Iterator[Text]:
    """Commands to go on with; print them with `crop=False`.

    The terminal is to wrap them, so that each is copied as one line.
    """
    for number, line in enumerate(lines):
        start = "     " if number else "next "
        yield Text(f"{start} {line}", no_wrap=True, overflow="ignore")


def header(verdict: Verdict, machine: Inventory) -> str:
    """Returns torch, the device and the CPUs in one line."""
    version = (machine.torch.version or "absent").partition("+")[0]
    device = verdict.observations[0].device if verdict.observations else "cpu"
    words = "CPU only"
    if device.startswith("cuda"):
        number = int(device.partition(":")[2] or 0)
        gpu = machine.cuda[number].gpu if number < len(machine.cuda) else None
        size = f" {gpu.memory_total / 2**30:.0f} GB" if gpu and gpu.memory_total else ""
        words = f"{gpu.name}{size}" if gpu else device
    elif machine.cuda:
        words = f"computes on the CPU beside {machine.cuda[0].gpu.name}"
    cpus = machine.cpus
    limit = " (cgroup)" if cpus.quota is not None else ""
    ranks = len(verdict.observations)
    return f"torch {version} · {words} · {cpus.usable} of {cpus.present} CPUs{limit}" + (
        f" · {ranks} ranks" if ranks > 1 else ""
    )


def at_once(findings: Sequence[Finding]) -> Iterator[tuple[str, object]]:
    """Gives the cures that any script takes up at its start, field and value."""
    for finding in findings:
        if finding.kind != "slow":
            continue
        yield from ((f, v) for f, v in finding.recipe.items() if at_start(Recipe().replace({f: v})))


def short(where: str) -> str:
    """file:line as seen from the current folder, where that is shorter."""
    file, _, line = where.rpartition(":")
    if not file:
        return where
    relative = os.path.relpath(file)
    return f"{relative if len(relative) < len(file) else file}:{line}"


def _lanes(rank: Observation, of_several: bool, width: int) -> Iterator[RenderableType]:
    """One line: each lane with its bar and its ms; what is too small for a bar, together."""
    if not rank.steps or not any(rank.lanes_ms.values()):
        return
    known = {name: rank.lanes_ms.get(name) or 0.0 for name in (*_STEP, *_BETWEEN)}
    step = sum(known[name] for name in _STEP)
    shown = {name: value for name, value in known.items() if value >= _SHOWN * step}
    other = sum(known[name] for name in _STEP if name not in shown)
    begin = (f"rank {rank.rank} " if of_several else "") + f"step {rounded(step, 2)} ms  "
    last = [f"other {rounded(other, 2)}"] if other >= _TOLD * step else []
    for short_names in ({}, _SHORT):
        words = [f"{short_names.get(n, n)} {{}} {rounded(v, 2)}" for n, v in shown.items()] + last
        # The bars take what the words leave of the line.
        room = width - len(begin) - sum(len(each) for each in words) - 3 * (len(words) - 1)
        columns = min(_BAR, room + 2 * len(shown))
        if columns >= _BAR // 2:
            break
    bars = {
        name: "█" * max(1, int((columns - len(shown)) * value / step))
        for name, value in shown.items()
    }
    line = " | ".join(words).format(*bars.values())
    yield Text(begin + line)


def _taken_out(ranks: Sequence[Observation]) -> Iterator[RenderableType]:
    """One line: what steps gain without each lane, of the rank that gains most."""
    best: dict[str, Ablation] = {}
    for rank in ranks:
        for lane, one in rank.ablations.items():
            best[lane] = max(best.get(lane, one), one, key=lambda one: one.ratio)
    words = [
        f"{lane} {one.ratio:.2f}x" + (f" [{one.low:.2f},{one.high:.2f}]" if one.pairs else "")
        for lane, one in best.items()
    ]
    if words:
        yield Text(f"taken out in place: {', '.join(words)}")


def _bound(finding: Finding) -> str:
    if finding.cost_ms is None:
        return "unknown"
    return f"{'~' if finding.is_estimate else ''}{rounded(finding.cost_ms, 2)} ms"


def _added(verdict: Verdict) -> str:
    """What observing has cost the rank that paid most, and what share of its steps that is."""
    us = verdict.added_us_per_step
    if us is None:
        return "not counted"
    steps_ms = next(r.step_ms for r in verdict.observations if r.added_us_per_step == us)
    step_ms = median(steps_ms) if steps_ms else 0.0
    share = us / 1e3 / step_ms if step_ms else 0.0
    return f"{rounded(us, 2)} us per step" + (f" ({share:.1%})" if share >= _TOLD else "")


def row(label: str, style: str, *lines: str, width: int = 10) -> Table:
    """Lines beside a label."""
    table = Table.grid(padding=(0, 1))
    table.add_column(width=width, style=style, no_wrap=True)
    table.add_column()
    for number, line in enumerate(lines):
        table.add_row(label if not number else "", Text(line))
    return table
