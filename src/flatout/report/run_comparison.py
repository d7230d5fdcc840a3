"""Differences between runs: speed, lanes, settings, data, and figures of learning.

    Comparison.from_runs(["runs/monday", "runs/today"]).lines()

Each run is judged against the first one by the time per sample in the steady steps: the ratio of
the medians, with the interval of `measure/series.py`. A run is slower or faster if the whole
interval lies beyond the noise.

Noise is the difference between runs with the first run's settings in its parent folder. With four
or more such runs, noise is the 95% prediction interval for two further runs. With fewer runs it is
6%, by which two processes of the same job may differ (see `baseline.py`), or the difference of
these runs if larger. Noise is never less than the noise within either run.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean
from textwrap import wrap
from typing import Any

import numpy as np

from flatout.errors import FlatoutError
from flatout.measure import (
    LANES,
    PROFILE_FILE,
    Interval,
    Profile,
    ratio_of_medians,
    student_t,
)
from flatout.report.baseline import FEWEST_STEPS, FLOOR, differences, hardware
from flatout.report.run import SeenRun, names_of
from flatout.words import count_words, counted, duration, rounded, size_words

# _MOST_BESIDE: maximum number of runs in the first run's parent folder that are read to measure
# noise. _FEWEST_ALIKE: minimum number of runs with the first run's settings for the prediction
# interval.
_MOST_BESIDE, _FEWEST_ALIKE = 50, 4
_LEAST_NOISE = 0.001
_WIDTH = 80
_LABEL = 10
# Settings that change figures of learning, even if everything else is the same.
_LEARNS = ("loss", "loss_weights", "metrics", "class_weight", "validation data", "seed")


def slower_limit(text: str) -> float:
    """Return the share in words such as "slower=5%"."""
    match = re.fullmatch(r"\s*slower\s*=\s*(\d{1,6}(?:\.\d+)?)\s*%\s*", text)
    if match is None:
        raise FlatoutError(f"--fail-if: expected slower=PERCENT, such as slower=5%; found {text!r}")
    return float(match[1]) / 100


@dataclass(frozen=True)
class Pair:
    """A run and the first run, compared.

    Attributes:
        a, b: the first run, and the run that is compared with the first run.
        a_name, b_name: names of both runs.
        noise: largest distance of the ratio from 1 that noise explains: 0.01 is 1%.
        noise_of: the source of `noise`, in words.
    """

    a: SeenRun
    b: SeenRun
    a_name: str
    b_name: str
    noise: float
    noise_of: str

    @cached_property
    def ratio(self) -> Interval | None:
        if self.why_no_speed:
            return None
        a_ms, b_ms = (
            [ms / (run.batch_size or 1.0) for ms in run.step_ms] for run in (self.a, self.b)
        )
        return ratio_of_medians([a_ms], b_ms)

    @cached_property
    def why_no_speed(self) -> str:
        for name, run in ((self.a_name, self.a), (self.b_name, self.b)):
            if not run.step_ms:
                return f"{name} has left no step times"
            if len(run.step_ms) < FEWEST_STEPS:
                steps = counted(len(run.step_ms), "steady step")
                return f"{name} has {steps}, too few to tell noise from change"
        if (self.a.batch_size is None) != (self.b.batch_size is None):
            return "one of them does not know how many samples a step has"
        a, b = self.a.profile, self.b.profile
        if a and b and a.model["parameters"] != b.model["parameters"]:
            sizes = [_model_words(item) for item in (a, b)]
            return f"other models ({sizes[0]}, {sizes[1]})"
        return ""

    @property
    def is_slower(self) -> bool:
        return self.ratio is not None and self.ratio.low > 1 + self.noise

    @property
    def is_faster(self) -> bool:
        return self.ratio is not None and self.ratio.high < 1 / (1 + self.noise)

    @cached_property
    def verdict(self) -> str:
        if self.ratio is None:
            return f"speed not compared: {self.why_no_speed}"
        noise = f"(noise {_percent(self.noise)})"
        if self.is_slower:
            return f"{_change(self.ratio, 'slower')} {noise}"
        faster = Interval(*(1 / end for end in reversed(self.ratio)))
        if self.is_faster:
            return f"{_change(faster, 'faster')} {noise}"
        words = _change(self.ratio, "slower") if self.ratio.mid >= 1 else _change(faster, "faster")
        return f"as fast, as far as noise lets one see: {words} {noise}"

    @property
    def sentence(self) -> str:
        if self.ratio is None:
            return f"{self.b_name}: {self.verdict}"
        return _sentence_of(self.b_name, self.verdict)

    @cached_property
    def speeds(self) -> str:
        rates = [run.samples_per_s for run in (self.a, self.b)]
        if any(rate is None for rate in rates) or self.ratio is None:
            return ""
        a, b = (count_words(rate.mid) for rate in rates if rate is not None)
        return f"{a} -> {b} samples/s"

    @cached_property
    def lanes(self) -> dict[str, tuple[float, float]]:
        """Lanes that changed, by name (milliseconds of a step before, now), largest change first.

        If batch sizes differ, b's time is scaled to the samples of a's batch. Changes of less than
        1% of a step, or less than noise, are left out.
        """
        if self.a.profile is None or self.b.profile is None or self.why_no_speed:
            return {}
        scale = (self.a.batch_size or 1.0) / (self.b.batch_size or 1.0)
        before = _lanes(self.a.profile)
        now = {lane: scale * ms for lane, ms in _lanes(self.b.profile).items()}
        step = sum(before.values())
        moved = {}
        for lane in before:
            change = now.get(lane, 0.0) - before[lane]
            least = max(0.01 * step, self.noise * max(before[lane], now.get(lane, 0.0)))
            if abs(change) > least:
                moved[lane] = (before[lane], now.get(lane, 0.0))
        return dict(sorted(moved.items(), key=lambda value: -abs(value[1][1] - value[1][0])))

    @cached_property
    def recipe(self) -> list[str]:
        a, b = (_recipe(run) for run in (self.a, self.b))
        return differences(a, b) if a and b else []

    @cached_property
    def job(self) -> list[str]:
        return [] if not self._both else differences(*(_job(item) for item in self._both))

    @cached_property
    def machine(self) -> list[str]:
        return [] if not self._both else differences(*(_machine(item) for item in self._both))

    @cached_property
    def versions(self) -> list[str]:
        return [] if not self._both else differences(*(_versions(item) for item in self._both))

    @cached_property
    def data(self) -> list[str]:
        if not self._both:
            return []
        a, b = (item.data or {} for item in self._both)
        result = []
        for key, noun in (("files", "file"), ("samples", "sample")):
            if a.get(key) is not None and b.get(key) is not None and a[key] != b[key]:
                more = b[key] - a[key]
                result.append(f"{counted(abs(more), noun)} {'more' if more > 0 else 'fewer'}")
        if a.get("bytes") and b.get("bytes") and a["bytes"] != b["bytes"]:
            result.append(f"{size_words(a['bytes'])} -> {size_words(b['bytes'])}")
        if a.get("digest") != b.get("digest") and not result:
            result.append("other content")
        if a.get("newest") and b.get("newest") and b["newest"] > a["newest"]:
            result.append(f"newest file {duration(b['newest'] - a['newest'])} later")
        if a.get("words") != b.get("words"):
            result.append(f"{a.get('words')} -> {b.get('words')}")
        return result

    @cached_property
    def busy(self) -> list[str]:
        runs = ((self.a_name, self.a), (self.b_name, self.b))
        return [f"{name}: {run.other_work}" for name, run in runs if run.other_work]

    @property
    def _both(self) -> tuple[Profile, Profile] | None:
        a, b = self.a.profile, self.b.profile
        return None if a is None or b is None else (a, b)

    @cached_property
    def figures(self) -> dict[str, tuple[float, float]]:
        a, b = self.a.figures, self.b.figures
        return {name: (a[name], b[name]) for name in a if name in b and not self._why_not(name)}

    @cached_property
    def not_comparable(self) -> list[str]:
        result = [f"speed: {self.why_no_speed}"] if self.why_no_speed else []
        whys: dict[str, list[str]] = {}
        for name in dict.fromkeys([*self.a.figures, *self.b.figures]):
            if why := self._why_not(name):
                whys.setdefault(why, []).append(name)
        result += [f"{', '.join(names)}: {why}" for why, names in whys.items()]
        for name, run in ((self.a_name, self.a), (self.b_name, self.b)):
            if run.state_words:
                result.append(f"{name} {run.state_words}")
        if not self._both:
            result.append("Recipe, machine, versions and data: there are not two Profiles")
        return result

    @property
    def rest_not_comparable(self) -> list[str]:
        return [line for line in self.not_comparable if not line.startswith("speed: ")]

    def _why_not(self, name: str) -> str:
        a, b = self.a, self.b
        for called, run, other in ((self.a_name, a, b), (self.b_name, b, a)):
            if name not in run.figures and name in other.figures:
                return f"{called} has none"
        if len(a.epochs) != len(b.epochs):
            return f"other epochs ({len(a.epochs)}, {len(b.epochs)})"
        if self._both is None:
            return "not known whether they are of one job"
        ours, theirs = ({k: item.job.get(k) for k in _LEARNS} for item in self._both)
        is_validated = name.startswith("val_")
        changed = [k for k in _LEARNS if is_validated or k != "validation data"]
        changed = [k for k in changed if ours[k] != theirs[k]]
        if changed:
            return f"other {', '.join(changed)}"
        if is_validated:
            return ""  # the validation data are the same
        digests = [(item.data or {}).get("digest") for item in self._both]
        return "other data" if digests[0] != digests[1] else ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "run": str(self.b.path),
            "state": self.b.state,
            "verdict": self.verdict,
            "ratio": None if self.ratio is None else list(self.ratio),
            "noise": self.noise,
            "noise_of": self.noise_of,
            "slower": self.is_slower,
            "faster": self.is_faster,
            "lanes_ms": {lane: list(pair) for lane, pair in self.lanes.items()},
            "recipe": self.recipe,
            "job": self.job,
            "machine": self.machine,
            "versions": self.versions,
            "data": self.data,
            "busy": self.busy,
            "figures": {name: list(pair) for name, pair in self.figures.items()},
            "not_comparable": self.not_comparable,
        }

    def rows(self) -> list[tuple[str, str]]:
        lanes = [
            f"{lane} {_signed(now - before)} ms ({rounded(before)} -> {rounded(now)})"
            for lane, (before, now) in self.lanes.items()
        ]
        figures = [
            f"{name} {rounded(a, 4)} -> {rounded(b, 4)}"
            for name, (a, b) in self.figures.items()
            if a != b
        ]
        rows = [
            ("busy", self.busy),
            ("lanes", lanes),
            ("Recipe", self.recipe),
            ("job", self.job),
            ("machine", self.machine),
            ("versions", self.versions),
            ("data", self.data),
            ("figures", figures),
        ]
        return [(name, " · ".join(words)) for name, words in rows if words]

    def lines(self) -> list[str]:
        result = [f"{self.b_name} against {self.a_name}"]
        speeds = f"  {self.speeds}" if self.speeds else ""
        result += wrap(
            f"{self.verdict}{speeds}", _WIDTH, initial_indent="  ", subsequent_indent="  "
        )
        rows = self.rows()
        for name, words in rows:
            indent = " " * (_LABEL + 2)
            result += wrap(f"  {name:{_LABEL}}{words}", _WIDTH, subsequent_indent=indent)
        if not rows and self._both:
            result.append("  nothing else differs")
        if self.rest_not_comparable:
            result.append("  not comparable")
            for line in self.rest_not_comparable:
                result += wrap(line, _WIDTH, initial_indent="    ", subsequent_indent="      ")
        return result


@dataclass(frozen=True)
class Comparison:
    """Several runs, each compared with the first.

    Attributes:
        runs: the runs in the given order.
        pairs: a comparison for each run except the first.
    """

    runs: Sequence[SeenRun]
    pairs: Sequence[Pair]

    @classmethod
    def from_runs(cls, paths: Sequence[str | os.PathLike[str]]) -> Comparison:
        """Read and compare runs.

        Raises:
            FlatoutError: a folder is missing or no run's, or one run is named twice.
        """
        runs = [SeenRun.read(path) for path in paths]
        for number, run in enumerate(runs):
            for other in runs[:number]:
                if os.path.samefile(run.path, other.path):
                    raise FlatoutError(
                        "a run was named twice: compared with itself it differs in nothing",
                        where=str(run.path),
                        do="name two runs; flatout runs lists those below a folder",
                    )
        names = names_of(runs)
        noise, noise_of = _noise(runs)
        pairs = [
            Pair(runs[0], run, names[0], name, *_at_least(noise, noise_of, runs[0], run))
            for run, name in zip(runs[1:], names[1:], strict=True)
        ]
        return cls(runs, pairs)

    def lines(self) -> list[str]:
        """Return the text, no wider than 80 columns."""
        result: list[str] = []
        for pair in self.pairs:
            result += [*pair.lines(), ""]
        noises = dict.fromkeys(f"noise: {pair.noise_of}" for pair in self.pairs if pair.ratio)
        for words in noises:
            result += wrap(words, _WIDTH, subsequent_indent="  ")
        for run in self.runs:
            result += run.problems
        return result if result[-1] else result[:-1]

    def as_dict(self) -> dict[str, Any]:
        return {
            "first": str(self.runs[0].path),
            "runs": [pair.as_dict() for pair in self.pairs],
            "problems": [line for run in self.runs for line in run.problems],
        }

    def fails(self, limit: float) -> list[str]:
        """Return a line for each run that is slower than the first by more than a limit.

        Args:
            limit: relative slowdown that the whole interval must exceed.

        Raises:
            FlatoutError: the speed of a run cannot be compared, such as one of another machine.
        """
        result = []
        for pair in self.pairs:
            machine = " · ".join(pair.machine)
            why = pair.why_no_speed or (f"of another machine ({machine})" if machine else "")
            if pair.ratio is None or why:
                raise FlatoutError(
                    f"--fail-if: {pair.b_name} cannot be judged: {why}",
                    do="compare runs of one job and machine, of 40 steps or more",
                )
            if pair.ratio.low > 1 + limit:
                words = _sentence_of(pair.b_name, _change(pair.ratio, "slower"))
                result.append(f"{words}, allowed were {_percent(limit)}")
        return result


def _noise(runs: Sequence[SeenRun]) -> tuple[float, str]:
    first = runs[0]
    if first.profile is None or not first.step_ms:
        return FLOOR, f"{_percent(FLOOR)} is what two processes of the same job may differ by"
    alike = [first, *(run for run in _beside(runs) if _is_alike(first.profile, run))]
    medians = [float(np.median(run.step_ms)) for run in alike]
    spread = max(medians) / min(medians) - 1
    if len(medians) < _FEWEST_ALIKE and spread < FLOOR:
        return FLOOR, (
            f"{_percent(FLOOR)} is what two processes of the same job may differ by; measured "
            f"once there are {_FEWEST_ALIKE} runs with the first one's settings beside it"
        )
    if len(medians) >= _FEWEST_ALIKE:
        deviation = float(np.std(np.log(medians), ddof=1))
        spread = math.expm1(student_t(len(medians) - 1) * deviation * math.sqrt(2))
    beside = f"{counted(len(alike), 'run')} with the first one's settings beside it"
    return max(spread, _LEAST_NOISE), beside


def _at_least(noise: float, noise_of: str, a: SeenRun, b: SeenRun) -> tuple[float, str]:
    own = [run.profile.steps.noise for run in (a, b) if run.profile is not None]
    most = max((item for item in own if item is not None), default=0.0)
    return (most, "what a run has measured of itself (A/A)") if most > noise else (noise, noise_of)


def _beside(runs: Sequence[SeenRun]) -> list[SeenRun]:
    named = [os.path.realpath(run.path) for run in runs]
    folder = Path(named[0]).parent
    files = [
        file
        for file in folder.glob(f"*/{PROFILE_FILE}")
        if os.path.realpath(file.parent) not in named
    ]
    files.sort(key=lambda file: -file.stat().st_mtime)
    result = []
    for file in files[:_MOST_BESIDE]:
        try:
            result.append(SeenRun(file.parent, Profile.read(file)))
        except FlatoutError:  # a profile of another version, or damaged, is skipped
            continue
    return result


def _is_alike(first: Profile, run: SeenRun) -> bool:
    other = run.profile
    if other is None or len(run.step_ms) < FEWEST_STEPS:
        return False
    return all(
        of(first) == of(other)
        for of in (
            _job,
            _machine,
            _versions,
            lambda value: (value.recipe or {}).get("values"),
            lambda value: (value.data or {}).get("digest"),
            lambda value: value.steps.batch_size,
        )
    )


def _lanes(profile: Profile) -> dict[str, float]:
    result = {}
    for lane in LANES:
        result[lane] = mean(
            rank.quantiles_ms[lane][2] if lane in rank.quantiles_ms else rank.lanes_ms.get(lane, 0)
            for rank in profile.ranks
        )
    return result


def _recipe(run: SeenRun) -> dict[str, Any]:
    recipe = run.history.get("recipe") if run.profile is None else run.profile.recipe
    return dict(recipe["values"]) if recipe else {}


def _job(profile: Profile) -> dict[str, Any]:
    model = {f"model {name}": value for name, value in profile.model.items()}
    world = {"ranks": profile.world.get("size"), "hosts": profile.world.get("nodes")}
    sizes = {"batch": profile.steps.batch_size}
    return {"kind": profile.kind, **model, **world, **sizes, **profile.job}


def _machine(profile: Profile) -> dict[str, Any]:
    return hardware(profile.ranks[0].machine)


def _versions(profile: Profile) -> dict[str, Any]:
    machine = profile.ranks[0].machine
    return {**profile.versions, "libc": machine.get("libc")}


def _model_words(profile: Profile) -> str:
    return f"{profile.model['name']} of {count_words(profile.model['parameters'])} parameters"


def _change(ratio: Interval, word: str) -> str:
    if ratio.mid >= 2:
        how = "takes {:.2f} times as long" if word == "slower" else "{:.2f} times as fast"
        return f"{how.format(ratio.mid)} [{ratio.low:.2f},{ratio.high:.2f}]"
    low, mid, high = (100 * (end - 1) for end in ratio)
    digits = 1 if mid < 9.95 else 0
    return f"{mid:.{digits}f}% {word} [{low:.{digits}f},{high:.{digits}f}]"


def _sentence_of(name: str, change: str) -> str:
    return f"{name} {change}" if change.startswith("takes ") else f"{name} is {change}"


def _percent(share: float) -> str:
    return f"{rounded(100 * share, 2)}%"


def _signed(ms: float) -> str:
    return f"{'+' if ms > 0 else '-'}{rounded(abs(ms))}"
