"""Reads the files that a run left in its folder, even if it was killed.

    SeenRun.read("runs/today").state        "ended", "killed", ...

    profile.json   measurements          history.json   figures that a fit saves at its end
    log.jsonl      figures by step       runs.jsonl     begin and end of each job in this folder

A killed run has left some of these files. Existing files are read, and damaged files are reported.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from flatout.errors import FlatoutError
from flatout.measure import (
    PROFILE_FILE,
    RUNS,
    Interval,
    Profile,
    RankProfile,
    mean_use,
    median_of,
)

_FILES = (PROFILE_FILE, "history.json", "log.jsonl", RUNS, "recipe.toml", "checkpoints")
_MOST_BYTES = 256 << 20
# Maximum number of a log's latest steps from which the speed of a run is computed, as in a Profile.
_MOST_STEPS = 2_000
# Smallest share of a machine's CPUs taken by other work that is reported.
_OTHERS = 0.2
# Figures of an epoch that are not learning curves.
_NO_CURVES = {"epoch", "step", "samples", "seconds", "samples_per_s", "lr", "time", "kind", "at_s"}


@dataclass(frozen=True)
class Life:
    began: Mapping[str, Any]
    ended: Mapping[str, Any] | None

    @property
    def state(self) -> str:
        """ "running", "ended", "interrupted", "failed", or "killed"; "running?" on another host."""
        if self.ended is not None:
            return str(self.ended.get("state"))
        if self.began.get("host") != socket.gethostname():
            return "running?"
        return "running" if _lives(self.began) else "killed"


@dataclass(frozen=True)
class Curve:
    """A figure over the course of training.

    Attributes:
        name: name of the figure.
        points: points of the curve in order, each as (samples trained on, seconds of training,
            value).
    """

    name: str
    points: list[tuple[float, float, float]]


@dataclass(frozen=True)
class SeenRun:
    """A run folder."""

    path: Path
    profile: Profile | None
    history: dict[str, Any] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> SeenRun:
        folder = Path(path)
        if os.path.isfile(folder) and folder.name == PROFILE_FILE:
            folder = folder.parent
        if not os.path.isdir(folder):
            raise FlatoutError(
                "expected the folder of a run, found none",
                where=str(path),
                do="name what was given as Trainer(..., run=...) or Loop(run=...); "
                "flatout runs lists those below a folder",
            )
        if not any((folder / name).exists() for name in _FILES):
            raise FlatoutError(
                "the folder holds nothing of a run",
                where=str(path),
                do="name what was given as Trainer(..., run=...) or Loop(run=...); "
                "flatout runs lists those below a folder",
            )
        problems: list[str] = []
        return cls(
            path=folder,
            profile=_profile(folder, problems),
            history=_history(folder, problems),
            log=_lines(folder / "log.jsonl", problems),
            lives=lives_of(folder, problems),
            problems=problems,
        )

    @property
    def name(self) -> str:
        return str(self.path)

    @cached_property
    def state(self) -> str:
        if self.lives:
            return self.lives[-1].state
        if self.profile is not None:
            return "killed" if self.profile.state == "running" else self.profile.state
        return "ended" if self.history else "unknown"

    @property
    def state_words(self) -> str:
        profile = self.profile
        if self.state in ("killed", "running", "running?"):
            what = {"killed": "was killed", "running": "is running"}.get(
                self.state, "runs on another host, or was killed there"
            )
            if profile is None or profile.state != "running":
                return f"{what} before it wrote a Profile; {self._left}"
            logged = max((line.get("step") or 0 for line in self.log), default=0)
            log = f", its log as of step {logged:,}" if logged > profile.steps.last else ""
            return f"{what}; its Profile is as of step {profile.steps.last:,}{log}"
        if profile is None:
            return f"has no Profile; {self._left}"
        if self.state == "failed":
            return f"failed at step {profile.steps.last:,}: {profile.error or 'without a message'}"
        if self.state == "interrupted":
            return f"was interrupted at step {profile.steps.last:,}"
        return ""

    @property
    def _left(self) -> str:
        result = [name for name, item in (("log", self.log), ("history", self.history)) if item]
        return f"there is its {' and its '.join(result)}" if result else "it came to no step"

    @cached_property
    def step_ms(self) -> list[float]:
        if self.profile is not None:
            return self.profile.steps.step_ms
        size = self.batch_size
        rates = [line.get("samples_per_s") for line in self._steps]
        if not size:
            return []
        steady = rates[len(rates) // 10 :][-_MOST_STEPS:]
        return [1e3 * size / rate for rate in steady if isinstance(rate, float) and rate > 0]

    @property
    def batch_size(self) -> float | None:
        if self.profile is not None:
            return self.profile.steps.batch_size
        result = self.history.get("batch_size")
        return float(result) if isinstance(result, int | float) else None

    @cached_property
    def samples_per_s(self) -> Interval | None:
        known = None if self.profile is None else self.profile.steps.samples_per_s
        if known is not None:
            return Interval(*known)
        if not self.step_ms or not self.batch_size:
            return None
        low, mid, high = (1e3 * self.batch_size / ms for ms in median_of(self.step_ms))
        return Interval(high, mid, low)

    @cached_property
    def other_work(self) -> str:
        if self.profile is None:
            return ""
        hosts: dict[str, list[RankProfile]] = {}
        for rank in self.profile.ranks:
            hosts.setdefault(rank.host, []).append(rank)
        words = {host: _other_work(ranks) for host, ranks in hosts.items()}
        named = [
            f"{host}: {work}" if len(hosts) > 1 else work for host, work in words.items() if work
        ]
        return "; ".join(named)

    @property
    def _steps(self) -> list[dict[str, Any]]:
        return [line for line in self.log if line.get("kind") == "step"]

    @cached_property
    def epochs(self) -> list[dict[str, Any]]:
        logged = [line for line in self.log if line.get("kind") == "epoch"]
        return logged or ([] if self.profile is None else self.profile.epochs)

    @property
    def figures(self) -> dict[str, float]:
        return _numbers(self.epochs[-1]) if self.epochs else {}

    @cached_property
    def curves(self) -> list[Curve]:
        size = self.batch_size or 1.0
        by_steps = len(self._steps) > len(self.epochs)
        result: dict[str, list[tuple[float, float, float]]] = {}
        if self.log:
            for line, seconds in zip(self.log, self._seconds, strict=True):
                at = size * float(line.get("step") or 0)
                is_epoch = line.get("kind") == "epoch"
                for name, value in _numbers(line).items():
                    # The losses of steps and of epochs are two figures with one name.
                    if name != "loss" or is_epoch != by_steps:
                        result.setdefault(name, []).append((at, seconds, value))
        else:
            for epoch in self.epochs:
                for name, value in _numbers(epoch).items():
                    point = (float(epoch["samples"]), float(epoch["at_s"]), value)
                    result.setdefault(name, []).append(point)
        return [Curve(name, points) for name, points in result.items()]

    @cached_property
    def _seconds(self) -> list[float]:
        times = [float(line.get("time") or 0.0) for line in self.log]
        begins = sorted(float(life.began.get("time") or 0.0) for life in self.lives)
        if not times:
            return []
        first = next((at for at in begins if at <= times[0]), times[0])
        seconds = [times[0] - first]
        for before, after in pairwise(times):
            begun = max((at for at in begins if before < at <= after), default=before)
            seconds.append(seconds[-1] + max(0.0, after - begun))
        return seconds


def _other_work(ranks: Sequence[RankProfile]) -> str:
    first = ranks[0]
    cpus, used = first.machine.get("cpus_total"), mean_use(first.use)
    # If the job may not use all CPUs, work on other CPUs does not slow the job down.
    if "machine" not in used or not cpus:
        return ""
    if sum(rank.machine.get("cpus") or 0 for rank in ranks) < cpus:
        return ""
    other = used["machine"] * cpus - sum(mean_use(rank.use).get("cpus", 0.0) for rank in ranks)
    return f"other work kept {other:.1f} of {cpus} CPUs busy" if other >= _OTHERS * cpus else ""


def lives_of(folder: Path, problems: list[str] | None = None) -> list[Life]:
    began: dict[str, Mapping[str, Any]] = {}
    lives: dict[str, Mapping[str, Any]] = {}
    for line in _lines(folder / RUNS, [] if problems is None else problems):
        kind, key = line.get("event"), str(line.get("id"))
        if kind == "began":
            began[key] = line
        elif kind == "ended":
            lives[key] = line
    return [Life(line, lives.get(key)) for key, line in began.items()]


def _profile(folder: Path, problems: list[str]) -> Profile | None:
    if not (folder / PROFILE_FILE).exists():
        return None
    try:
        return Profile.read(folder)
    except FlatoutError as error:
        problems.append(str(error))
        return None


def _history(folder: Path, problems: list[str]) -> dict[str, Any]:
    file = folder / "history.json"
    try:
        data = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{file} cannot be read: {error}")
        return {}
    return data if isinstance(data, dict) else {}


def _lines(file: Path, problems: list[str]) -> list[dict[str, Any]]:
    try:
        if not file.is_file():
            return []
        if file.stat().st_size > _MOST_BYTES:
            problems.append(f"{file} is larger than {_MOST_BYTES >> 20} MB, and was not read")
            return []
        text = file.read_text(errors="replace")
    except OSError as error:
        problems.append(f"{file} cannot be read: {error.strerror}")
        return []
    result, bad = [], 0
    for row in text.splitlines():
        try:
            line = json.loads(row)
        except (ValueError, RecursionError):
            bad += 1
            continue
        if isinstance(line, dict):
            result.append(line)
    if bad > (not text.endswith("\n")):
        problems.append(f"{file}: lines that are no JSON were left out ({bad:,})")
    return result


def _numbers(figures: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in figures.items()
        if name not in _NO_CURVES and isinstance(value, int | float)
    }


def _lives(began: Mapping[str, Any]) -> bool:
    try:
        process = psutil.Process(int(began["pid"]))
        started = float(process.create_time())
        return started <= float(began["time"]) and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, KeyError, TypeError, ValueError, OverflowError):
        return False


def names_of(runs: Sequence[SeenRun]) -> list[str]:
    paths = [os.path.abspath(run.path) for run in runs]
    if len(paths) == 1:
        return [Path(paths[0]).name]
    common = os.path.commonpath(paths)
    if common in paths:
        common = os.path.dirname(common)
    return [os.path.relpath(path, common) for path in paths]
