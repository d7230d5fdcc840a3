"""What `flatout doctor script.py` shows: where a step's time goes, and what could be tried.

console.print(FirstLookReport(verdict, machine, look.seconds, ["train.py"]), crop=False)
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from textwrap import wrap
from typing import TypeAlias

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.text import Text

from flatout.devices import Inventory, at_start
from flatout.doctor import Finding, Verdict
from flatout.observe import Ablation, Line, ModuleTime, Observation
from flatout.recipe import Recipe
from flatout.report.lane_bars import BETWEEN, STEP, lane_bars
from flatout.report.not_contained import not_contained
from flatout.words import clock, counted, rounded

Height: TypeAlias = Callable[[Sequence[RenderableType]], int]
"""How many lines of a screen these take."""

MOST_LINES = 20
"""Lines that a first look takes on a screen; --verbose takes what it needs."""

_LABEL = 10
"""Columns of the labels on the left."""
_WORTH = 0.03
"""Share of a step below which nothing is listed."""
_GENERAL = ("channels_first", "cudnn_benchmark", "fp32_slow", "tf32_off")
"""Checks of settings that are the same for any script."""
_GROWS = ("retained_graph",)
"""Checks of what costs the more the longer a script runs, and in a look next to nothing."""
_PROPOSALS, _LINES, _MODULES = 3, 4, 2
"""Things to try, lines of the script, and modules of its backward, that are listed at most."""
_CALLS = 2
"""Calls that were left out that are told at most, each with what it costs."""
_FEW = 3
"""Rows about lines of the script, their heading included, that stand above what could be tried."""
_BUSY, _THREADS = 0.1, 2
"""Share of its time that another thread has to be busy to be told, and how many are."""
_ROOM = 3
"""Lines that what could be tried has before a note gets one."""
_CUTS = (2, 1)
"""Lines of what was found, the first that fits."""
_TRIES = ((2, True), (1, True), (1, False), (0, False))
"""Likewise of what could be tried, and whether a line names what else could be; with 0 lines it is
one of what was found alone."""
_COMMANDS = 4
"""Lines of commands that could come next."""
_RANKS, _FEW_RANKS = 4, 2
"""Ranks whose lanes are shown at most, and where there is little room."""
_FOUND = 6
"""Lines that what was found has at least, before steps without a part are told."""
_LONG_PATH = 28
"""Columns of a path to a file in another folder, beyond which its end alone is shown."""
_TOLD, _ONCE = 0.001, 0.05
"""Share of a step from which on that of watching is told; and of all steps, what it took once."""


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
        verbose: whether all that was found is told in full, with the checks that had no signal.
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
    verbose: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width

        def height(parts: Sequence[RenderableType]) -> int:
            rows = [row for part in parts for row in console.render_lines(part, options, pad=False)]
            # A terminal wraps the commands, which are lines of any length.
            over = [
                (part.cell_len - 1) // width
                for part in parts
                if isinstance(part, Text) and part.no_wrap
            ]
            return len(rows) + sum(over)

        head = list(self._head(width))
        tail = list(self._where_written())
        if self.is_last:
            commands = list(what_next(self.verdict.findings, self.what, self.cures))
            while not self.verbose and len(commands) > 1 and height(commands) > _COMMANDS:
                commands.pop()  # long ones: what was found comes first
            tail += commands
        if self.verbose:
            middle = [*self._where_it_goes(width), *self._dangers()]
            middle += [*self._in_full(), *self._checks()]
        else:
            left = MOST_LINES - height(head) - height(tail)
            if left < _FOUND:
                head = list(self._head(width, is_short=True))
                left = MOST_LINES - height(head) - height(tail)
            middle = list(self._middle(left, width, height))
        for part in (*head, *middle, *tail):
            if isinstance(part, Text) and not part.no_wrap:
                yield from _lines_of(part, console, width)
            else:
                yield part

    def _middle(self, left: int, width: int, height: Height) -> Iterator[RenderableType]:
        worth = len(self._worth())
        choices = [list(self._dangers(cut)) for cut in (None, *_CUTS, 0)]
        lines = list(self._where_it_goes(width, _LINES))
        few = height(lines[:_FEW])
        dangers = _fitting(choices, left - few - bool(worth), height)
        left -= height(dangers)
        notes = list(self._notes())[: max(0, left - few - _ROOM)][:1]
        rooms = [max(0, room - len(notes)) for room in (left - few, left - 2, left)]
        numbers = range(_PROPOSALS, 0, -1)
        tries = [
            list(self._proposals(cut, many, is_named=is_named))
            for many in numbers
            for cut, is_named in _TRIES
        ]
        proposals = next(
            (parts for room in rooms for parts in tries if parts and height(parts) <= room), []
        )
        if worth and not proposals:
            proposals = [Text(f"{worth} could be tried: --verbose", style="bold")]
        shown = lines[: max(0, left - height([*proposals, *notes]))]
        # A heading alone says nothing.
        yield from (*(shown if len(shown) > 1 else ()), *dangers, *proposals, *notes)

    def _head(self, width: int, *, is_short: bool = False) -> Iterator[RenderableType]:
        yield Text(header(self.verdict, self.machine))
        yield Text(self._heading(), style="bold")
        ranks = self.verdict.observations
        for note in dict.fromkeys(rank.became for rank in ranks if rank.became):
            yield Text(note)
        shown = _FEW_RANKS if is_short else _RANKS
        for rank in ranks[:shown]:
            yield from lane_bars(rank, len(ranks) > 1, width)
            yield from _on_gpu(rank)
        if len(ranks) > shown:
            yield Text(f"{len(ranks) - shown} more ranks: --page or --json")
        critical = self.verdict.critical
        if critical is not None:
            yield Text(", ".join(part for part in (critical.words, short(critical.where)) if part))
        if is_short:
            return
        yield from _taken_out(ranks, is_full=self.verbose)
        yield from _left_out(ranks, width, None if self.verbose else _CALLS)
        yield from self._lapse(width)

    def _lapse(self, width: int) -> Iterator[RenderableType]:
        lapse = next((rank.lapse for rank in self.verdict.observations if rank.lapse), None)
        if lapse is None or not (lapse.epochs or lapse.parts):
            return
        *most, last = lapse.parts or ["nothing after them"]
        parts = f"{', '.join(most)} and {last}" if most else last
        epochs = counted(lapse.epochs, "epoch") if lapse.epochs else "no whole epoch"
        words = f"seen in {self.seconds:.0f} s: {epochs} in time-lapse, with {parts}"
        yield Text(words)
        cuts = [
            f"{os.path.basename(place)} after {ran:,}" + (f" of {length:,}" if length else "")
            for place, ran, length in lapse.cut
        ]
        if cuts:
            words = f"cut, and in no time above: {', '.join(cuts)} batches"
            yield Text(words if self.verbose else cut(words, width))

    def _heading(self) -> str:
        at = f"[{clock(self.seconds)}]"
        steps = self.verdict.steps
        if not steps:
            return f"{at} no optimizer step was seen: there is nothing to judge yet"
        return (
            f"{at} FIRST LOOK at {counted(steps, 'step')}, nothing proven; "
            f"added {_added(self.verdict)}"
        )

    def _telling(self) -> Observation | None:
        critical = self.verdict.critical
        ranks = [rank for rank in self.verdict.observations if rank.lines]
        chosen = [rank for rank in ranks if critical is not None and rank.rank == critical.rank]
        return next(iter([*chosen, *ranks]), None)

    def _lines(self) -> list[Line]:
        rank = self._telling()
        return [] if rank is None else [x for x in rank.lines if x.ms >= _WORTH * _whole_ms(rank)]

    def _backwards(self) -> list[ModuleTime]:
        rank = self._telling()
        if rank is None:
            return []
        worth = [
            module for module in rank.modules if module.backward_ms >= _WORTH * _whole_ms(rank)
        ]
        return sorted(worth, key=lambda module: -module.backward_ms)

    def _where_it_goes(self, width: int, most: int | None = None) -> Iterator[RenderableType]:
        explained, room = self.verdict.explained, width - _LABEL - 1
        lines = [line for line in self._lines() if not _is_told_by_lanes(line)]
        modules = self._backwards()[: most and _MODULES]
        if explained is None or not (lines or modules):
            return
        rows = [(line.ms, _line_words(line, room)) for line in lines]
        rows += [(module.backward_ms, cut(_module_words(module), room)) for module in modules]
        yield Text(f"WHERE IT GOES; {explained:.0%} explained", style="bold")
        for ms, words in sorted(rows, key=lambda row: -row[0])[:most]:
            yield Row(f"{rounded(ms, 2)} ms", "bold cyan", words)
        yield from self._other_threads(width)

    def _other_threads(self, width: int) -> Iterator[RenderableType]:
        threads = [thread for rank in self.verdict.observations for thread in rank.other_threads]
        for thread in [thread for thread in threads if thread.busy >= _BUSY][:_THREADS]:
            words = f"{short(str(thread.site))} {thread.site.code}"
            of = f", thread {thread.name}"
            yield Row(
                f"{thread.share:.0%}", "bold cyan", cut(words, width - _LABEL - 1 - len(of)) + of
            )

    def _dangers(self, lines: int | None = None) -> Iterator[RenderableType]:
        for danger in self.verdict.dangers:
            told = _finding_words(danger) if lines != 0 else _finding_words(danger)[:1]
            yield Row("DANGER", "bold red", *told, most=1 if lines == 0 else lines)

    def _slow(self) -> list[Finding]:
        slow = [finding for finding in self.verdict.findings if finding.kind == "slow"]
        return sorted(
            slow,
            key=lambda each: (
                each.name in _GENERAL,
                not (each.takes or each.name in _GROWS),
                -(each.cost_ms or 0.0),
            ),
        )

    def _worth(self) -> list[Finding]:
        step = max((_step_ms(rank) for rank in self.verdict.observations), default=0.0)
        return [
            finding
            for finding in self._slow()
            if finding.cost_ms is None or finding.takes or finding.cost_ms >= _WORTH * step
        ]

    def _proposals(
        self, lines: int, many: int, *, is_named: bool = True
    ) -> Iterator[RenderableType]:
        worth = self._worth()
        once = {finding.name: finding for finding in reversed(worth) if finding.name in _GENERAL}
        # One setting for several models is one thing to try.
        shown = [one for one in worth if once.get(one.name, one) is one][:many]
        others = [finding for finding in self._slow() if finding not in shown]
        if shown:
            hidden = 0 if is_named else len(others)
            yield Text(could_be_tried(shown, hidden), style="bold")
        for finding in shown:
            told = _finding_words(finding)[: 2 if lines else 1]
            yield Row(_bound(finding), "bold yellow", *told, most=max(1, lines))
        if shown and others and is_named:
            names = [f"{finding.name} {short(finding.where)}".rstrip() for finding in others]
            yield Row("--verbose", "bold", ", ".join(dict.fromkeys(names)), most=1)

    def _notes(self) -> Iterator[RenderableType]:
        for note in self.verdict.findings:
            if note.kind == "note" and note.parity == "changes learning":
                yield Row("NOTE", "bold", _finding_words(note)[0], most=1)

    def _in_full(self) -> Iterator[RenderableType]:
        slow = self._slow()
        if slow:
            yield Text("")
            yield Text(could_be_tried(slow, 0), style="bold")
        for finding in slow:
            yield Row(_bound(finding), "bold yellow", *_finding_words(finding))
        notes = [finding for finding in self.verdict.findings if finding.kind == "note"]
        for note in notes:
            place = f"{short(note.where)} " if note.where else ""
            cost = "" if note.cost_ms is None else "too little to matter here: "
            yield Row("left alone", "bold", f"{cost}{place}{note.what}")

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

    def _where_written(self) -> Iterator[RenderableType]:
        if self.uncontained:
            reason = f"it could not be contained ({self.uncontained}): what it wrote, it wrote"
            yield Padding(Text(reason, style="dim"), (0, 0, 0, 2))
        elif self.held == "python":
            words = "it ran in a scratch copy, as far as Python itself writes files"
            yield Padding(Text(words, style="dim"), (0, 0, 0, 2))
        if self.lacks:
            yield Padding(Text(not_contained(self.lacks), style="dim"), (0, 0, 0, 2))


def _lines_of(text: Text, console: Console, width: int) -> Iterator[Text]:
    for line in text.wrap(console, width):
        line.rstrip()
        yield line


def _fitting(
    choices: Sequence[list[RenderableType]],
    left: int,
    height: Height,
) -> list[RenderableType]:
    for parts in choices:
        if height(parts) <= left:
            return parts
    shown = list(choices[-1])
    while shown and height(shown) + 1 > left:
        shown.pop()
    if not shown:
        return []
    hidden = len(choices[-1]) - len(shown)
    return [*shown, Row("", "bold", f"{hidden} more of the dangers: --verbose")]


def cut(text: str, width: int, lines: int = 1) -> str:
    """The text, cut off at a word where it takes more lines than these."""
    if len(wrap(text, width, break_on_hyphens=False)) <= lines:
        return text
    shown = wrap(text, width, max_lines=lines, placeholder="...", break_on_hyphens=False)
    return " ".join(shown)


def could_be_tried(slow: Sequence[Finding], hidden: int) -> str:
    """The line above what could be tried."""
    words = "COULD BE TRIED; at most this much per step"
    if any(finding.is_estimate and finding.cost_ms is not None for finding in slow):
        words += " (~: an estimate)"
    return words + (f"; {hidden} more: --verbose" if hidden else "")


def _finding_words(finding: Finding) -> tuple[str, str]:
    place = f"{short(finding.where)} " if finding.where else ""
    of = f"  [{finding.parity}]" if finding.parity and finding.kind == "slow" else ""
    return f"{place}{finding.what}", f"do: {finding.do}{of}"


def _is_told_by_lanes(line: Line) -> bool:
    most = max(line.lanes_ms, key=lambda lane: line.lanes_ms[lane], default="")
    is_whole = not line.within or line.trainer
    return most in ("backward", "optimizer") and not line.growth and bool(is_whole)


def _module_words(one: ModuleTime) -> str:
    by = f", by {one.operator}" if one.operator else ""
    return f"backward {'of ' if one.kind else ''}{one.words}{by}"


def _line_words(line: Line, width: int) -> str:
    words = f"{short(str(line.site))} {line.words}".rstrip()
    more: list[tuple[str, ...]] = []  # each with shorter words for the same
    if line.growth is not None:
        us, low, high = (rounded(us, 2) for us in vars(line.growth).values())
        more.append((f", {us} us [{low},{high}] more each step", f", {us} us more each step"))
    if line.trainer:
        more.append((f": {line.trainer}'s {line.within}",))
    elif line.within and not line.words.endswith(line.within):
        more.append((f", in {line.within}",))
    if line.callers:
        caller = short(str(line.callers[0]))
        more.append((f", called from {caller}", f", from {caller}"))
    for choices in more:
        words += next((one for one in choices if len(words) + len(one) <= width), "")
    return cut(words, width)


def _whole_ms(rank: Observation) -> float:
    return sum(rank.lanes_ms.get(name) or 0.0 for name in (*STEP, *BETWEEN))


def _step_ms(rank: Observation) -> float:
    return sum(rank.lanes_ms.get(name) or 0.0 for name in STEP)


def what_next(findings: Sequence[Finding], what: Sequence[str], cures: int) -> Iterator[Text]:
    """What can be done after a first look, as commands that exist, a line each."""
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
    """file:line as seen from the current folder, where that is shorter; of a long path to another
    folder, its end."""
    file, _, line = where.rpartition(":")
    if not file:
        return where
    relative = os.path.relpath(file)
    path = relative if len(relative) < len(file) else file
    if len(path) > _LONG_PATH and relative.startswith(os.pardir):
        path = os.path.join("...", *Path(file).parts[-2:])
    return f"{path}:{line}"


def _on_gpu(rank: Observation) -> Iterator[Text]:
    time = rank.device_time
    if time is None:
        return
    parts = {**time.lanes_ms, "copies": time.to_device_ms + time.to_host_ms}
    told = [f"{name} {rounded(ms, 2)}" for name, ms in parts.items() if ms >= _TOLD * time.busy_ms]
    yield Text(f"GPU busy {rounded(time.busy_ms, 2)} ms a step: {', '.join(told)}")


def _taken_out(ranks: Sequence[Observation], *, is_full: bool) -> Iterator[RenderableType]:
    best: dict[str, Ablation] = {}
    for rank in ranks:
        for lane, ablation in rank.ablations.items():
            best[lane] = max(
                best.get(lane, ablation), ablation, key=lambda ablation: ablation.ratio
            )
    words = [
        f"{lane} {ablation.ratio:.2f}x"
        + (f" [{ablation.low:.2f},{ablation.high:.2f}]" if ablation.pairs else "")
        for lane, ablation in best.items()
        if is_full or (ablation.low > 1 and ablation.ratio > 1 + max(_WORTH, ablation.floor))
    ]
    if words:
        yield Text(f"taken out in place: {', '.join(words)}")


def _left_out(
    ranks: Sequence[Observation], width: int, most: int | None
) -> Iterator[RenderableType]:
    proven = [call for rank in ranks for call in rank.left_out if call.is_proven]
    proven.sort(key=lambda call: -call.ms()[1])
    for call in proven[:most]:
        low, middle, high = call.ms()
        share = middle / max(call.measured.step_ms, 1e-9)
        costs = (
            f"costs {rounded(middle, 2)} ms a step [{rounded(low, 2)},{rounded(high, 2)}], "
            f"{share:.0%}"
        )
        place = f"{short(str(call.site))} {call.words}(...)"
        yield Text(f"{cut(place, width - len(costs) - 1)} {costs}")


def _bound(finding: Finding) -> str:
    if finding.takes:
        return finding.takes
    if finding.cost_ms is None:
        return "unknown"
    return f"{'~' if finding.is_estimate else ''}{rounded(finding.cost_ms, 2)} ms"


def _added(verdict: Verdict) -> str:
    us = verdict.added_us_per_step
    if us is None:
        return "not counted"
    rank = next(rank for rank in verdict.observations if rank.added_us_per_step == us)
    once_ms = rank.added_once_ms or 0.0
    if once_ms >= _ONCE * sum(rank.step_ms):  # so few steps that their share would say little
        return f"{rounded(us, 2)} us per step, {once_ms:.0f} ms once"
    share = us / 1e3 / median(rank.step_ms) if rank.step_ms else 0.0
    return f"{rounded(us, 2)} us per step" + (f" ({share:.1%})" if share >= _TOLD else "")


class Row:
    """Lines beside a label, without blanks behind them."""

    def __init__(
        self, label: str, style: str, *lines: str, width: int = _LABEL, most: int | None = None
    ) -> None:
        self._label, self._style, self._lines = label, style, lines
        self._width, self._most = width, most

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        begin = Text.assemble((f"{self._label:{self._width}.{self._width}} ", self._style))
        room = max(1, options.max_width - self._width - 1)
        for number, line in enumerate(self._lines):
            if self._most:
                line = cut(line, room, 1 if number else self._most)
            for wrapped in _lines_of(Text(line), console, room):
                yield begin + wrapped
                begin = Text(" " * (self._width + 1))
