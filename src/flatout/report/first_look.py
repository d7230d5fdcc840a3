"""Report of `flatout doctor script.py`: the time of a step by lane, and cures to try.

console.print(FirstLookReport(verdict, machine, look.seconds, ["train.py"]), crop=False)
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from textwrap import wrap

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from flatout.devices import Inventory, at_start
from flatout.doctor import Finding, Verdict
from flatout.observe import Ablation, Line, ModuleTime, Observation
from flatout.recipe import Recipe
from flatout.report.lane_bars import BETWEEN, STEP, rank_bars
from flatout.words import clock, counted, rounded

MOST_LINES = 20
"""Maximum number of lines of a first look on a screen; --verbose has no limit."""

_LABEL = 10
"""Number of columns of the labels on the left."""
_WORTH = 0.03
"""Smallest share of a step that is listed."""
_GENERAL = ("channels_first", "cudnn_benchmark", "fp32_slow", "tf32_off")
"""Checks of settings that are the same for any script."""
_GROWS = ("retained_graph",)
"""Checks of problems that cost more the longer a script runs, and little in a first look."""
_PROPOSALS, _LINES, _MODULES, _CALLS, _THREADS = 3, 4, 2, 2, 2
"""Maximum number of listed cures, lines of the script, modules, left-out calls and threads."""
_FEW = 3
"""Lines about the script's code, including their heading, that have priority over cures to try."""
_BUSY = 0.1
"""Smallest share of time that another thread must be busy to be listed."""
_RANKS, _FEW_RANKS = 4, 2
"""Maximum number of ranks whose lanes are shown: _RANKS, or _FEW_RANKS if there is little room."""
_FOUND = 6
"""Minimum number of lines for the findings: with fewer lines, the head is shortened."""
_LONG_PATH = 28
"""Maximum number of columns for a path in another folder; of longer paths only the end is shown."""
_SMALL, _ONCE = 0.001, 0.05
"""_SMALL: share of a step from which the overhead of observation is shown. _ONCE: the same for the
one-time overhead, as a share of all steps."""


_LACKS = {
    "files": "native code and programs that it starts can write to your files",
    "signals": "it can signal your other processes",
    "orphans": "a program that it starts can outlive a trial that is killed",
    "network": "native code and programs that it starts can reach other machines",
    "ranks": "native code and programs that it starts can reach other machines, as its ranks do",
}


@dataclass(frozen=True)
class FirstLookReport:
    """A verdict before any trial.

    Attributes:
        seconds: seconds that the first look took.
        what: the script and its arguments, as the user gave them.
        is_last: True if no trials follow, so that the next commands are shown here.
        cures: number of findings whose cures trials could prove.
        held: the containment: "overlay", "landlock" or "python"; "" in place.
        lacks: actions of the script that nothing contains here, as in trials.process.Process.
        uncontained: why the script was not contained; "" if it was, or ran in place on request.
        verbose: True if all findings are shown in full, with the checks that had no signal.
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

        def wrapped(parts: Iterable[Text]) -> list[Text]:
            return [line for part in parts for line in _wrapped(part, console, width)]

        head, tail = wrapped(self._head(width)), wrapped(self._where_written())
        if self.is_last:
            tail += what_next(self.verdict.findings, self.what, self.cures)
        if self.verbose:
            middle = self._where_it_goes(width) + self._dangers(width)
            middle += [*self._in_full(width), *wrapped(self._checks())]
        else:
            # A terminal wraps the commands, which may have any length.
            over = sum((line.cell_len - 1) // width for line in tail if line.no_wrap)
            left = MOST_LINES - len(tail) - over
            if left - len(head) < _FOUND:
                head = wrapped(self._head(width, is_short=True))
            middle = self._middle(left - len(head), width)
        yield from (*head, *middle, *tail)

    def _middle(self, left: int, width: int) -> list[Text]:
        code = self._where_it_goes(width, _LINES)
        few = min(len(code), _FEW)
        for lines in (3, 2, 1):
            dangers, proposals = self._dangers(width, lines), self._proposals(width, lines)
            if few + len(dangers) + len(proposals) <= left:
                break
        room = max(1, left - few)
        if len(dangers) > room - min(1, len(proposals)):
            shown = max(0, room - 1 - min(1, len(proposals)))
            more = f"{len(dangers) - shown} more of the dangers: --verbose"
            dangers = [*dangers[:shown], *Row("", "bold", more).lines(width)]
        if len(proposals) > room - len(dangers):
            proposals = proposals[: room - len(dangers)]
            if len(proposals) == 1:
                proposals = [Text(f"{len(self._worth())} could be tried: --verbose", style="bold")]
        left -= len(dangers) + len(proposals)
        notes = self._notes(width)[:1] if left > few else []
        code = code[: max(0, left - len(notes))]
        # A heading without lines below it is left out.
        return [*(code if len(code) > 1 else ()), *dangers, *proposals, *notes]

    def _head(self, width: int, *, is_short: bool = False) -> Iterator[Text]:
        yield Text(header(self.verdict, self.machine))
        yield Text(self._heading(), style="bold")
        ranks = self.verdict.observations
        for note in dict.fromkeys(rank.became for rank in ranks if rank.became):
            yield Text(note)
        shown = _FEW_RANKS if is_short else _RANKS
        for rank in ranks[:shown]:
            yield from rank_bars(rank, len(ranks) > 1, width)
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

    def _lapse(self, width: int) -> Iterator[Text]:
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

    def _critical_rank(self) -> Observation | None:
        critical = self.verdict.critical
        ranks = [rank for rank in self.verdict.observations if rank.lines]
        chosen = [rank for rank in ranks if critical is not None and rank.rank == critical.rank]
        return next(iter([*chosen, *ranks]), None)

    def _lines(self) -> list[Line]:
        rank = self._critical_rank()
        return [] if rank is None else [x for x in rank.lines if x.ms >= _WORTH * _whole_ms(rank)]

    def _backwards(self) -> list[ModuleTime]:
        rank = self._critical_rank()
        if rank is None:
            return []
        worth = [
            module for module in rank.modules if module.backward_ms >= _WORTH * _whole_ms(rank)
        ]
        return sorted(worth, key=lambda module: -module.backward_ms)

    def _where_it_goes(self, width: int, most: int | None = None) -> list[Text]:
        explained, room = self.verdict.explained, width - _LABEL - 1
        lines = [line for line in self._lines() if not _is_shown_by_lanes(line)]
        modules = self._backwards()[: most and _MODULES]
        if explained is None or not (lines or modules):
            return []
        rows = [(line.ms, _line_words(line, room)) for line in lines]
        rows += [(module.backward_ms, _module_words(module)) for module in modules]
        result = [Text(f"WHERE IT GOES; {explained:.0%} explained", style="bold")]
        for ms, words in sorted(rows, key=lambda row: -row[0])[:most]:
            result += Row(f"{rounded(ms, 2)} ms", "bold cyan", words, most=1).lines(width)
        threads = [thread for rank in self.verdict.observations for thread in rank.other_threads]
        for thread in [thread for thread in threads if thread.busy >= _BUSY][:_THREADS]:
            of = f", thread {thread.name}"
            words = cut(f"{short(str(thread.site))} {thread.site.code}", room - len(of)) + of
            result += Row(f"{thread.share:.0%}", "bold cyan", words).lines(width)
        return result

    def _dangers(self, width: int, most: int | None = None) -> list[Text]:
        return [
            line
            for danger in self.verdict.dangers
            for line in _finding("DANGER", "bold red", danger, most).lines(width)
        ]

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

    def _proposals(self, width: int, lines: int) -> list[Text]:
        worth = self._worth()
        once = {finding.name: finding for finding in reversed(worth) if finding.name in _GENERAL}
        # One setting for several models is one cure to try.
        shown = [one for one in worth if once.get(one.name, one) is one][:_PROPOSALS]
        if not shown:
            return []
        hidden = len(self._slow()) - len(shown)
        result = [Text(could_be_tried(shown, hidden), style="bold")]
        for finding in shown:
            result += _finding(_bound(finding), "bold yellow", finding, lines).lines(width)
        return result

    def _notes(self, width: int) -> list[Text]:
        return [
            line
            for note in self.verdict.findings
            if note.kind == "note" and note.parity == "changes learning"
            for line in _finding("NOTE", "bold", note, 1).lines(width)
        ]

    def _in_full(self, width: int) -> Iterator[Text]:
        slow = self._slow()
        if slow:
            yield Text("")
            yield Text(could_be_tried(slow, 0), style="bold")
        for finding in slow:
            yield from _finding(_bound(finding), "bold yellow", finding).lines(width)
        for note in (finding for finding in self.verdict.findings if finding.kind == "note"):
            place = f"{short(note.where)} " if note.where else ""
            cost = "" if note.cost_ms is None else "too little to matter here: "
            yield from Row("left alone", "bold", f"{cost}{place}{note.what}").lines(width)

    def _checks(self) -> Iterator[Text]:
        if not self.verdict.steps:
            return
        yield Text("")
        passed, unknown = len(self.verdict.passed), self.verdict.unknown
        yield Text(f"{passed} checks found nothing; {len(unknown)} had no signal")
        reasons: dict[str, list[str]] = {}
        for name, reason in unknown:
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            yield Text(f"  {', '.join(names)}: {reason}", style="dim")
        for note in dict.fromkeys(n for rank in self.verdict.observations for n in rank.notes):
            yield Text(f"  {note}", style="dim")

    def _where_written(self) -> Iterator[Text]:
        if self.uncontained:
            reason = f"it could not be contained ({self.uncontained}): what it wrote, it wrote"
            yield Text(f"  {reason}", style="dim")
        elif self.held == "python":
            words = "it ran in a scratch copy, as far as Python itself writes files"
            yield Text(f"  {words}", style="dim")
        if self.lacks:
            yield Text(f"  {not_contained(self.lacks)}", style="dim")


def _wrapped(text: Text, console: Console, width: int) -> Iterator[Text]:
    for line in [text] if text.no_wrap else text.wrap(console, width):
        line.rstrip()
        yield line


def cut(text: str, width: int, lines: int = 1) -> str:
    if len(wrap(text, width, break_on_hyphens=False)) <= lines:
        return text
    shown = wrap(text, width, max_lines=lines, placeholder="...", break_on_hyphens=False)
    return " ".join(shown)


def could_be_tried(slow: Sequence[Finding], hidden: int) -> str:
    words = "COULD BE TRIED; at most this much per step"
    if any(finding.is_estimate and finding.cost_ms is not None for finding in slow):
        words += " (~: an estimate)"
    return words + (f"; {hidden} more: --verbose" if hidden else "")


def _finding(label: str, style: str, finding: Finding, most: int | None = None) -> Row:
    place = f"{short(finding.where)} " if finding.where else ""
    of = f"  [{finding.parity}]" if finding.parity and finding.kind == "slow" else ""
    lines = [f"{place}{finding.what}", f"do: {finding.do}{of}"]
    return Row(label, style, *lines[: 1 if most == 1 else 2], most=most and max(1, most - 1))


def _is_shown_by_lanes(line: Line) -> bool:
    most = max(line.lanes_ms, key=lambda lane: line.lanes_ms[lane], default="")
    is_whole = not line.within or line.trainer
    return most in ("backward", "optimizer") and not line.growth and bool(is_whole)


def _module_words(one: ModuleTime) -> str:
    by = f", by {one.operator}" if one.operator else ""
    return f"backward {'of ' if one.kind else ''}{one.words}{by}"


def _line_words(line: Line, width: int) -> str:
    words = f"{short(str(line.site))} {line.words}".rstrip()
    more: list[tuple[str, ...]] = []  # details, each with shorter words for the same
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


# Print these with `crop=False`: the terminal wraps them, so that each is copied as one line.
def commands(lines: Sequence[str]) -> Iterator[Text]:
    for number, line in enumerate(lines):
        start = "     " if number else "next "
        yield Text(f"{start} {line}", no_wrap=True, overflow="ignore")


def header(verdict: Verdict, machine: Inventory) -> str:
    version = (machine.torch.version or "absent").partition("+")[0]
    device = verdict.observations[0].device if verdict.observations else "cpu"
    words = "CPU only"
    if device.startswith("cuda"):
        number = int(device.partition(":")[2] or 0)
        gpu = machine.cuda[number] if number < len(machine.cuda) else None
        size = f" {gpu.memory_total / 2**30:.0f} GB" if gpu and gpu.memory_total else ""
        words = f"{gpu.name}{size}" if gpu else device
    elif machine.cuda:
        words = f"computes on the CPU beside {machine.cuda[0].name}"
    cpus = machine.cpus
    limit = " (cgroup)" if cpus.quota is not None else ""
    ranks = len(verdict.observations)
    return f"torch {version} · {words} · {cpus.usable} of {cpus.present} CPUs{limit}" + (
        f" · {ranks} ranks" if ranks > 1 else ""
    )


def at_once(findings: Sequence[Finding]) -> Iterator[tuple[str, object]]:
    for finding in findings:
        if finding.kind != "slow":
            continue
        yield from ((f, v) for f, v in finding.recipe.items() if at_start(Recipe().replace({f: v})))


def short(where: str) -> str:
    """Return file:line relative to the current folder if that is shorter.

    Of a long path in another folder, only the end is returned.
    """
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
    shown = [
        f"{name} {rounded(ms, 2)}" for name, ms in parts.items() if ms >= _SMALL * time.busy_ms
    ]
    yield Text(f"GPU busy {rounded(time.busy_ms, 2)} ms a step: {', '.join(shown)}")


def _taken_out(ranks: Sequence[Observation], *, is_full: bool) -> Iterator[Text]:
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


def _left_out(ranks: Sequence[Observation], width: int, most: int | None) -> Iterator[Text]:
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
    if once_ms >= _ONCE * sum(rank.step_ms):  # too few steps for a meaningful share
        return f"{rounded(us, 2)} us per step, {once_ms:.0f} ms once"
    share = us / 1e3 / median(rank.step_ms) if rank.step_ms else 0.0
    return f"{rounded(us, 2)} us per step" + (f" ({share:.1%})" if share >= _SMALL else "")


class Row:
    """Lines to the right of a label, without trailing blanks."""

    def __init__(
        self, label: str, style: str, *texts: str, width: int = _LABEL, most: int | None = None
    ) -> None:
        self._label, self._style, self._texts = label, style, texts
        self._width, self._most = width, most

    def lines(self, width: int) -> list[Text]:
        begin = Text.assemble((f"{self._label:{self._width}.{self._width}} ", self._style))
        room = max(1, width - self._width - 1)
        result: list[Text] = []
        for number, text in enumerate(self._texts):
            if self._most:
                text = cut(text, room, 1 if number else self._most)
            for line in wrap(text, room, break_on_hyphens=False) or [""]:
                result.append(begin + Text(line))
                begin = Text(" " * (self._width + 1))
        return result

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.lines(options.max_width)


def not_contained(lacks: Sequence[str]) -> str:
    return f"Not contained here: {'; '.join(_LACKS[lack] for lack in lacks)}"
