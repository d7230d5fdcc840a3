"""Ablation in a running script: the duration of steps when one lane's work is left out.

A lane is a kind of work that steps spend time on, such as waiting for batches. After the ordinary
observation, blocks of steps run in the order A B B A; the B blocks leave out the lane's work. The
ratio of the times of A and B is the maximum speed-up that a cure of this lane can give. Blocks
begin and end at step numbers, not by the clock, so that all ranks change at the same step. The
ranks of one machine agree on these numbers through files in the observer's folder. The first steps
of a block are not counted: the number of batches that loaders prefetch, and two more.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter_ns
from typing import Any

from flatout.atomic_file import atomic_write
from flatout.measure import STEP_LANES, finish_device
from flatout.observe.lanes import EVALUATION, SAVING
from flatout.observe.observation import Ablation, LeftOut, Observation, Site
from flatout.observe.rewriting import Rewriting
from flatout.observe.side_effects import SideEffects, hot_calls, outermost
from flatout.observe.sites import read
from flatout.observe.taken_out import Input, Items, Log, OneCall, Sync, summing
from flatout.observe.watch import Watch
from flatout.world import Place

# _WARM_STEPS: uncounted first steps of a block, in addition to prefetched batches; _FEWEST_STEPS:
# minimum number of counted steps.
_WARM_STEPS, _FEWEST_STEPS = 2, 3
# Shortest and longest time that a block should take, in seconds: _SHORTEST_S and _LONGEST_S.
_SHORTEST_S, _LONGEST_S = 0.1, 1.0
# Maximum number of times that blocks A B B A run for one lane.
_PAIRS = 8
# Maximum number of steps in which calls are checked for side effects.
_WATCHED = 12
# Smallest share of a step's time for which a lane is taken out.
_WORTH = 0.01
# A single rank stops after this multiple of its time budget: evaluations between steps take time
# too.
_OVERDUE = 2.0
# _AHEAD: steps between the plan of rank 0 and the first block; _PATIENCE_S: maximum seconds that
# ranks wait for one another.
_AHEAD, _PATIENCE_S = 4, 20.0
_LANES: dict[str, Callable[[Watch], Any]] = {
    "input": Input,
    "log": Log,
    "item": Items,
    "sync": Sync,
}


@dataclass(frozen=True)
class Planned:
    """Plan of the blocks without one lane.

    Attributes:
        lane: name of the lane, or index of a call among the calls that can be left out.
        dropped, steps: number of uncounted and of counted steps of each block.
        pairs: number of times that blocks A B B A run.
    """

    lane: str
    dropped: int
    steps: int
    pairs: int


@dataclass
class _Blocks:
    """Times of the blocks with and without one lane, as far as they have run."""

    planned: Planned
    lane: Any
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"a": [], "b": []})
    began: int = 0
    between: int = 0


class Ablations:
    """Ablations in this process, after its ordinary observation.

    Attributes:
        notes: lanes and calls that were not taken out, with the reason.
        left_out: calls that were left out of some steps, with step times; filled by `results`.
    """

    def __init__(
        self,
        watch: Watch,
        folder: Path,
        place: Place,
        budget_s: float,
        code: Rewriting | None = None,
    ) -> None:
        self._watch = watch
        self._place = place
        self._budget_s = budget_s
        self._code = code if place.world_size == 1 else None
        self._is_compiled = code is not None and code.is_compiled
        self._effects: SideEffects | None = None
        self._calls: list[list[int]] = []
        self._plan = folder / ".ablations"
        self._ready = [folder / f".ready-{rank}" for rank in range(place.world_size)]
        self._blocks: list[_Blocks] = []
        self._until = math.inf  # deadline for waiting or for the blocks
        self._seen: Observation | None = None
        self.notes: list[str] = []
        self.left_out: list[LeftOut] = []
        if place.rank == 0:
            self._plan.unlink(missing_ok=True)
        self._ready[place.rank].unlink(missing_ok=True)

    def begin(self, observation: Observation) -> None:
        """Begin after the ordinary observation; to be called when a step has ended."""
        self._seen = observation
        if self._place.world_size > self._place.local_world_size:
            self.notes.append("ablations: none where the ranks lie on several machines")
            self._watch.enough()
            return
        self._until = monotonic() + _PATIENCE_S
        self._ready[self._place.rank].touch()
        self._calls = [] if self._code is None else hot_calls(observation, self._code)
        if self._code is not None and self._calls:
            numbers = sorted({number for chain in self._calls for number in chain})
            self._effects = SideEffects(self._watch, self._code, numbers)
            self._watch_calls(self._watch.lanes.steps + _WATCHED)
        else:
            self._wait()

    def _watch_calls(self, until: int) -> None:
        assert self._effects is not None
        if self._effects.is_done or self._watch.lanes.steps >= until:
            self._wait()
        else:
            self._watch.at(self._watch.lanes.steps + 1, lambda: self._watch_calls(until))

    def _wait(self) -> None:
        planned = None
        if self._place.rank:
            planned = _read(self._plan)
        elif all(path.exists() for path in self._ready):
            planned = self._planned()
        if planned is not None:
            self._schedule(*planned)
        elif monotonic() > self._until:
            self.notes.append("ablations: the ranks do not step together")
            self._watch.enough()
        else:
            self._watch.at(self._watch.lanes.steps + 1, self._wait)

    def _planned(self) -> tuple[int, list[Planned]]:
        assert self._seen is not None
        lanes = worth_trying(self._seen, self._watch)
        if self._effects is not None:
            lanes += map(str, outermost(self._calls, self._effects.end()))
        planned = [plan(lane, self._seen, self._budget_s / len(lanes)) for lane in lanes]
        start = self._watch.lanes.steps + _AHEAD
        result = [item for item in planned if item is not None]
        if self._is_compiled:
            self.notes.append("ablations: calls stay in: the script compiles functions")
        if self._effects is not None:
            self.notes += [
                f"ablations: {self._code.calls[n].words} stays in: it changes {what}"
                for n, what in self._effects.changed.items()
                if what and self._code is not None
            ]
        if not any(loader.in_training for loader in self._seen.loaders):
            self.notes.append("ablations: input stays in: its batches come from no DataLoader")
        for lane, item in zip(lanes, planned, strict=True):
            if item is None:
                self.notes.append(f"ablations: steps are too long to try any without {lane}")
        with atomic_write(self._plan) as file:
            file.write(json.dumps([start, [asdict(item) for item in result]]))
        return start, result

    def _schedule(self, start: int, planned: Sequence[Planned]) -> None:
        if start < self._watch.lanes.steps:
            self.notes.append("ablations: the ranks do not step together")
            self._watch.enough()
            return
        if self._place.world_size == 1:
            self._until = monotonic() + _OVERDUE * self._budget_s
        else:
            self._until = math.inf  # all ranks must run the same blocks
        call_at, step = self._watch.at, start
        for item in planned:
            blocks = _Blocks(item, self._lane(item.lane))
            self._blocks.append(blocks)
            for side in item.pairs * "abba":
                call_at(step, blocks.lane.take_out if side == "b" else blocks.lane.put_back)
                call_at(step + item.dropped, partial(self._count_from, blocks))
                step += item.dropped + item.steps
                call_at(step, partial(self._count_to, blocks, side))
            call_at(step, blocks.lane.put_back)
        call_at(step, self._watch.enough)

    def _lane(self, name: str) -> Any:
        if name in _LANES:
            return _LANES[name](self._watch)
        assert self._code is not None
        return OneCall(self._code, int(name))

    def _count_from(self, blocks: _Blocks) -> None:
        finish_device()
        blocks.between = self._between(blocks)
        blocks.began = perf_counter_ns()

    def _count_to(self, blocks: _Blocks, side: str) -> None:
        finish_device()
        took = perf_counter_ns() - blocks.began - (self._between(blocks) - blocks.between)
        blocks.seconds[side].append(took / blocks.planned.steps / 1e9)
        if monotonic() > self._until:
            self._watch.enough()

    def _between(self, blocks: _Blocks) -> int:
        spent = self._watch.lanes.spent
        return spent[EVALUATION] + (spent[SAVING] if blocks.planned.lane in _LANES else 0)

    def put_back(self) -> None:
        """Put every lane back."""
        if self._effects is not None:
            self._effects.end()
        for blocks in self._blocks:
            blocks.lane.put_back()

    def end(self) -> None:
        """Put all lanes and calls back, even if the script ended within a block."""
        self.put_back()
        self._ready[self._place.rank].unlink(missing_ok=True)
        if self._place.rank == 0:
            self._plan.unlink(missing_ok=True)

    def results(self) -> dict[str, Ablation]:
        """Return the results by lane, and fill `left_out`."""
        if self._seen is None:
            return {}
        self.left_out.clear()
        ablations = from_lanes(self._seen)
        for blocks in self._blocks:
            lane = blocks.planned.lane
            result = judged(blocks.seconds["a"], blocks.seconds["b"])
            if result is None:
                self.notes.append(f"ablations: there was no time to try enough without {lane}")
            elif lane in _LANES:
                ablations[lane] = result
            elif self._code is not None:
                call = self._code.calls[int(lane)]
                site = read(Site(call.file, call.call_line))
                self.left_out.append(LeftOut(site, call.words, result, call.line))
        return ablations


def _read(path: Path) -> tuple[int, list[Planned]] | None:
    try:
        start, planned = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return start, [Planned(**item) for item in planned]


def worth_trying(observation: Observation, watch: Watch) -> list[str]:
    """Return the lanes whose removal could shorten steps."""
    trained = [loader for loader in observation.loaders if loader.in_training]
    step_ms = median(observation.step_ms)
    told = sum(call.seconds or 0 for call in observation.calls if call.kind in ("print", "log"))
    result = []
    waits = (observation.lanes_ms.get("input") or 0.0) >= _WORTH * step_ms
    if trained and (waits or any(loader.num_workers for loader in trained)):
        result.append("input")
    if 1e3 * told / observation.steps >= _WORTH * step_ms or Log(watch).has_summaries:
        result.append("log")
    reads = [call for call in observation.calls if call.kind in ("item", "tolist", "cpu")]
    if observation.device.startswith("cuda") and any(
        2 * call.steps > observation.steps for call in reads
    ):
        result.append("item")
    if observation.world_size > 1 and summing(watch):
        result.append("sync")
    return result


def plan(lane: str, observation: Observation, budget_s: float) -> Planned | None:
    """Return the plan of blocks that fits in `budget_s` seconds; None where steps are too long."""
    step_s = usual_step_s(observation)
    queue = 0
    if lane == "input":
        queue = max(
            (loader.num_workers or 0) * (loader.prefetch_factor or 1)
            for loader in observation.loaders
            if loader.in_training
        )
    dropped = queue + _WARM_STEPS
    wanted_s = min(max(budget_s / (4 * _PAIRS), _SHORTEST_S), _LONGEST_S)
    steps = max(math.ceil(wanted_s / step_s) - dropped, queue + 1, _FEWEST_STEPS)
    pairs = min(_PAIRS, int(budget_s / (4 * (dropped + steps) * step_s)))
    if pairs < 2:
        steps = max(queue + 1, _FEWEST_STEPS)
        pairs = min(2, int(budget_s / (4 * (dropped + steps) * step_s)))
    return Planned(lane, dropped, steps, pairs) if pairs >= 2 else None


def usual_step_s(observation: Observation) -> float:
    """Return the usual duration of a step in seconds.

    On a GPU this is the mean, since most steps may only queue work while a few wait for that work.
    """
    usual = median(observation.step_ms)
    if observation.device.startswith("cuda"):
        usual = max(usual, sum(observation.lanes_ms.get(lane) or 0.0 for lane in STEP_LANES))
    return max(usual / 1e3, 1e-6)


def judged(a: Sequence[float], b: Sequence[float]) -> Ablation | None:
    """Compare blocks in the order A B B A, in seconds per step; None for fewer than two A B B A."""
    from flatout.measure import run_trial

    whole = min(len(a), len(b)) // 2
    if whole < 2:
        return None
    of_a, of_b = iter(a), iter(b)
    trial = run_trial(lambda: next(of_a), lambda: next(of_b), max_pairs=whole, min_pairs=whole)
    most = max(trial.high, 1 + trial.floor)
    with_it, without = trial.step_s
    return Ablation(
        ratio=trial.ratio,
        low=trial.low,
        high=trial.high,
        floor=trial.floor,
        pairs=trial.pairs,
        step_ms=1e3 * with_it,
        without_ms=1e3 * without,
        returns_ms=1e3 * with_it * (1 - 1 / most),
    )


def from_lanes(observation: Observation) -> dict[str, Ablation]:
    """Return ablations of evaluation and saving, whose times lie between steps and are known."""
    whole = sum(ms or 0.0 for ms in observation.lanes_ms.values())
    result = {}
    for lane in ("evaluation", "saving"):
        ms = observation.lanes_ms.get(lane) or 0.0
        if whole > ms > _WORTH * whole:
            ratio = whole / (whole - ms)
            result[lane] = Ablation(
                ratio, ratio, ratio, step_ms=whole, without_ms=whole - ms, returns_ms=ms
            )
    return result
