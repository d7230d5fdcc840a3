"""Checks whether a job got worse: compares a new verdict with a stored baseline.

    Baseline.from_verdict(verdict, fingerprint().as_dict()).write("baseline.json")
    compared = compare(Baseline.read("baseline.json"), verdict, fingerprint().as_dict())
    sys.exit(compared.exit_code)

The check fails on a new danger, and on steps that take longer than noise explains. Steps are judged
by the ratio of their medians, new over stored: above 1 means slower.

**The interval** is a bootstrap of blocks of steps, as `measure/series.py` explains.

**The floor.** Two processes that run the same job differ permanently, which the steps within one
process cannot show: 1 to 6% were measured. So a slowdown counts only if the whole interval lies
above 1 + floor, with a floor of 6%.

Times of another machine are not compared. Other versions of software are compared: a slowdown by a
new torch should be found, and is reported with the version.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from flatout.atomic_file import atomic_write, private
from flatout.errors import FlatoutError
from flatout.measure import Interval, plain, ratio_of_medians, value_words
from flatout.observe import Observation
from flatout.report.observed import observed
from flatout.report.trial_table import step_ratio, trials_of
from flatout.words import rounded

FLOOR = 0.06
FEWEST_STEPS = 30
"""Minimum number of steps for a reliable interval."""

_MOST_STEPS = 2_000
_MOST_WARM_UP = 10
SOFTWARE = ("torch", "python", "libc")


@dataclass(frozen=True)
class BaselineRun:
    """Steps of one run of a job."""

    step_ms: list[float]
    lanes_ms: dict[str, float]
    ranks: int
    device: str


@dataclass(frozen=True)
class Baseline:
    """Stored facts of a verdict, with which later verdicts are compared.

    Attributes:
        command: the script and its arguments.
        machine: the machine's fingerprint, as plain data.
        dangers: known dangers, each as (name of the check, file name).
        run: steps of the run.
        proven: [low, mid, high] of the speed-up of a step by proven cures; None if there are none.
    """

    command: str
    machine: dict[str, Any]
    dangers: list[tuple[str, str]]
    run: BaselineRun
    version: int = 1
    proven: tuple[float, float, float] | None = None

    @classmethod
    def from_verdict(cls, verdict: Mapping[str, Any], machine: Mapping[str, Any]) -> Baseline:
        """Make a baseline from a verdict as plain data (see `flatout.report.page`) and a machine.

        Args:
            verdict: the verdict as plain data.
            machine: the machine's fingerprint.

        Raises:
            FlatoutError: the script failed, or too few steps were observed.
        """
        ranks = observed(verdict.get("observations"))
        why = _unfit(ranks)
        if why:
            raise FlatoutError(
                f"no baseline can be made of this: {why}",
                do=f"let the doctor see at least {FEWEST_STEPS + _MOST_WARM_UP} steps",
            )
        command = verdict.get("command") or (ranks[0].command if ranks else "")
        return cls(
            command=command if isinstance(command, str) else " ".join(map(str, command)),
            machine=dict(machine),
            dangers=sorted(_dangers(verdict)),
            run=_run(ranks),
            proven=step_ratio(trials_of(verdict.get("prescription") or {})),
        )

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the baseline as JSON; the file is replaced atomically."""
        try:
            with atomic_write(path, opener=private) as file:
                file.write(json.dumps(asdict(self)) + "\n")
        except OSError as error:
            raise FlatoutError(
                f"cannot write the baseline: {error.strerror}", where=str(path)
            ) from error

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Baseline:
        """Read a file that `write` wrote.

        Raises:
            FlatoutError: the file is missing, or `write` did not write it.
        """
        try:
            result = TypeAdapter(cls).validate_json(Path(path).read_bytes())
        except OSError as error:
            raise FlatoutError(
                f"cannot read the baseline: {error.strerror}", where=str(path)
            ) from error
        except ValidationError as error:
            raise FlatoutError(
                f"expected a baseline, found something else ({error.errors()[0]['msg']})",
                where=str(path),
                do="write it again",
            ) from error
        if result.version != 1 or not result.run.step_ms:
            raise FlatoutError(
                "the baseline holds no steps that this version can read", where=str(path)
            )
        return result


@dataclass(frozen=True)
class Compared:
    """Result of the comparison of a new verdict with a baseline.

    Attributes:
        new_dangers: descriptions of the dangers that the baseline does not have.
        ratio: ratio of median step times, new over stored, with its 95% interval; None if times
            were not compared.
        not_compared: why times were not compared; "" if times were compared.
        broken: why the new run cannot be used at all; "" if the run can be used.
        grew: milliseconds per step (before, now) by lane, the largest growth first.
        software: descriptions of changed software versions; empty if all are equal.
        proven: [low, mid, high] of the speed-up by proven cures, from the baseline; None without
            one.
    """

    new_dangers: list[str]
    ratio: Interval | None
    not_compared: str = ""
    broken: str = ""
    grew: dict[str, tuple[float, float]] = field(default_factory=dict)
    software: list[str] = field(default_factory=list)
    proven: tuple[float, float, float] | None = None

    @property
    def slower(self) -> bool:
        return self.ratio is not None and self.ratio.low > 1 + FLOOR

    @property
    def faster(self) -> bool:
        return self.ratio is not None and self.ratio.high < 1 - FLOOR

    @property
    def exit_code(self) -> int:
        return 3 if self.new_dangers or self.slower or self.broken else 0

    def describe(self) -> list[str]:
        lines = [f"NEW DANGER  {new_danger}" for new_danger in self.new_dangers]
        if self.broken:
            lines.append(f"FAILED  {self.broken}")
        if self.not_compared:
            lines.append(f"times were not compared: {self.not_compared}")
        if self.ratio is not None:
            low, middle, high = self.ratio
            figures = f"{middle:.2f} times as long [{low:.2f}, {high:.2f}], noise ±{FLOOR:.0%}"
            if self.slower:
                lines.append(f"SLOWER  a step takes {figures}")
            elif self.faster:
                lines.append(f"faster: a step takes {figures}; consider a new baseline")
            else:
                lines.append(f"as fast as before, as far as noise lets one see: {figures}")
            if self.proven is not None and not self.faster:
                proven = f"{self.proven[1]:.2f} times as fast"
                lines.append(f"not in use: what was proven for the baseline makes a step {proven}")
        if self.slower:
            lines += [
                f"  {lane} grew from {rounded(before)} to {rounded(now)} ms per step"
                for lane, (before, now) in self.grew.items()
            ]
            lines += [f"  may be the cause: {item}" for item in self.software]
        return lines

    def as_dict(self) -> dict[str, Any]:
        own = {**asdict(self), "ratio": None if self.ratio is None else list(self.ratio)}
        return {**own, "slower": self.slower, "faster": self.faster, "exit_code": self.exit_code}


def compare(
    baseline: Baseline,
    verdict: Mapping[str, Any],
    machine: Mapping[str, Any],
) -> Compared:
    ranks = observed(verdict.get("observations"))
    new_dangers = _new_dangers(baseline, verdict)
    broken = _broken(ranks)
    why = broken or _incomparable(baseline, ranks, machine)
    if why:
        return Compared(new_dangers, None, "" if broken else why, broken)
    new = _run(ranks)
    return Compared(
        new_dangers,
        ratio_of_medians([baseline.run.step_ms], new.step_ms),
        grew=_growth(baseline.run, new),
        software=differences(
            *({name: of.get(name) for name in SOFTWARE} for of in (baseline.machine, machine))
        ),
        proven=baseline.proven,
    )


def _run(ranks: Sequence[Observation]) -> BaselineRun:
    lanes: dict[str, list[float]] = {}
    for rank in ranks:
        for name, ms in rank.lanes_ms.items():
            if ms is not None:
                lanes.setdefault(name, []).append(ms)
    # Ranks wait for each other, so the slowest rank's steps are the job's.
    slowest = max(
        (_steady(rank.step_ms) for rank in ranks), key=lambda steps: float(np.median(steps))
    )
    return BaselineRun(
        step_ms=[float(f"{ms:.5g}") for ms in slowest[-_MOST_STEPS:]],
        lanes_ms={name: mean(of) for name, of in lanes.items()},
        ranks=len(ranks),
        device=ranks[0].device,
    )


def _steady(step_ms: Sequence[float]) -> list[float]:
    warm_up = min(_MOST_WARM_UP, len(step_ms) // 10)
    return [ms for ms in step_ms[warm_up:] if 0 < ms < math.inf]


def _broken(ranks: Sequence[Observation]) -> str:
    for rank in ranks:
        if rank.ended == "failed":
            last = rank.error.strip().splitlines()[-1:] or ["it left no message"]
            return f"the script failed: {last[0].strip()}"
    if not any(_steady(rank.step_ms) for rank in ranks):
        return "no training step was seen"
    return ""


def _unfit(ranks: Sequence[Observation]) -> str:
    fewest = min((len(_steady(rank.step_ms)) for rank in ranks), default=0)
    few = f"{fewest} steps after the warm-up are too few to tell noise from change"
    return _broken(ranks) or (few if fewest < FEWEST_STEPS else "")


def _incomparable(
    baseline: Baseline, ranks: Sequence[Observation], machine: Mapping[str, Any]
) -> str:
    other = differences(hardware(baseline.machine), hardware(machine))
    if other:
        return f"the baseline is of another machine ({'; '.join(other)})"
    kept = baseline.run
    if kept.ranks != len(ranks):
        return f"{len(ranks)} ranks now, {kept.ranks} in the baseline"
    if kept.device.partition(":")[0] != ranks[0].device.partition(":")[0]:
        return f"on {ranks[0].device} now, on {kept.device} in the baseline"
    return _unfit(ranks)


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} {_short(value_words(a.get(name)))} -> {_short(value_words(b.get(name)))}"
        for name in dict.fromkeys([*a, *b])
        if plain(a.get(name)) != plain(b.get(name))
    ]


def hardware(machine: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in machine.items() if name not in SOFTWARE}


def _short(words: str) -> str:
    return words if len(words) <= 60 else f"{words[:59]}…"


def _danger(finding: Mapping[str, Any]) -> tuple[str, str]:
    # Not the line, which changes with every edit above it. Not the folder, which differs in CI.
    file, _, line = str(finding.get("where") or "").rpartition(":")
    return str(finding["name"]), Path(file if line.isdecimal() else "").name


def _dangers(verdict: Mapping[str, Any]) -> list[tuple[str, str]]:
    findings = verdict.get("findings") or []
    return [_danger(item) for item in findings if item["kind"] == "danger"]


def _new_dangers(baseline: Baseline, verdict: Mapping[str, Any]) -> list[str]:
    known, new = Counter(baseline.dangers), []
    for item in verdict.get("findings") or []:
        if item["kind"] != "danger":
            continue
        if known[_danger(item)] > 0:
            known[_danger(item)] -= 1
        else:
            new.append(f"{item.get('where') or item['name']}: {item['what']}")
    return new


def _growth(kept: BaselineRun, new: BaselineRun) -> dict[str, tuple[float, float]]:
    least = 0.01 * float(np.median(new.step_ms))
    grown = {
        lane: (kept.lanes_ms[lane], ms)
        for lane, ms in new.lanes_ms.items()
        if lane in kept.lanes_ms and ms - kept.lanes_ms[lane] > least
    }
    return dict(sorted(grown.items(), key=lambda value: value[1][0] - value[1][1]))
