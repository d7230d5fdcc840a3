"""Steps as a trace for ui.perfetto.dev and chrome://tracing.

    Path("trace.json").write_text(json.dumps(trace(observations)))

The format is the JSON object of the Trace Event Format (Google, "Trace Event Format"). Each rank is
a process, and each step a complete event ("X") with its lanes as complete events within it.
Resident memory is a counter ("C"), and names are metadata events ("M"). Times are in microseconds.

An Observation of a script has the duration of each step, but only the means of lanes. So each step
is drawn with its own length, and with the lanes one after another in their mean shares. A Timeline
has the begin and end of each lane of each step. `otherData` of the trace names the source.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from flatout.measure import LANES, STEP_LANES, Timeline
from flatout.observe import Observation
from flatout.report.observed import observed

MOST_STEPS = 5_000
"""Maximum number of latest steps drawn for each rank: viewers open larger files slowly."""

# Lanes between two steps, which no step's own length includes.
_BETWEEN = ("evaluation", "saving")
_STEPS, _REST = 1, 2

_Event = dict[str, Any]


def trace(
    observations: Iterable[Observation | Mapping[str, Any]], *, most_steps: int = MOST_STEPS
) -> dict[str, Any]:
    ranks = observed(observations)
    events = [event for rank in ranks for event in _observed(rank, most_steps)]
    notes = [
        "Lanes are means over all steps: within a step their order is that of LANES and their "
        "length their mean share of it. A gap at a step's end is time that no lane accounts for.",
        "Each rank begins at time 0. Evaluation and saving are drawn after the last step, each as "
        "one slice of all its time.",
        "A rank without the lengths of its steps is drawn with steps of mean length.",
    ]
    command = shlex.join(ranks[0].command) if ranks else ""
    return _file(events, notes, command=command, most_steps=most_steps)


def trace_timelines(
    timelines: Mapping[int, Timeline], *, most_steps: int = MOST_STEPS
) -> dict[str, Any]:
    rows = {rank: value.rows()[-most_steps:].tolist() for rank, value in timelines.items()}
    zero = min((of[0][0] for of in rows.values() if of), default=0)
    events: list[_Event] = []
    for rank, steps in rows.items():
        events += _names(rank, f"rank {rank}", "")
        number = timelines[rank].steps - len(steps)
        for start, *lanes in steps:
            of = dict(zip(STEP_LANES, lanes, strict=True))
            events += _step(rank, number, start - zero, sum(lanes), of)
            number += 1
    notes = [
        "Lanes were recorded in each step. The time of a garbage collection lies in the lane that "
        "it interrupted.",
        "Ranks of different machines have their own clocks.",
    ]
    return _file(events, notes, most_steps=most_steps)


def _observed(observation: Observation, most_steps: int) -> Iterator[_Event]:
    yield from _names(
        observation.rank,
        f"rank {observation.rank}",
        f"{observation.framework} on {observation.device}",
    )
    lanes = {
        name: ms
        for name, ms in observation.lanes_ms.items()
        if ms is not None and 0 < ms < math.inf
    }
    within = {name: ms for name, ms in lanes.items() if name not in _BETWEEN}
    order = [name for name in dict.fromkeys([*LANES, *within]) if name in within]
    lengths = [ms for ms in observation.step_ms if 0 < ms < math.inf]
    lengths = lengths or [sum(within.values())] * (observation.steps if within else 0)
    if not lengths:
        return
    # Lanes that were not measured leave a gap: the other lanes are not stretched over it.
    whole = max(sum(within.values()), sum(lengths) / len(lengths))
    lengths = lengths[-most_steps:]
    # If there are many steps, an Observation has only the durations of the latest steps.
    first = max(0, observation.steps - len(lengths))
    starts = [0, *accumulate(round(ms * 1e6) for ms in lengths)]
    for at, ms in enumerate(lengths):
        of = {name: int(ms * 1e6 * within[name] / whole) for name in order}
        yield from _step(observation.rank, first + at, starts[at], starts[at + 1] - starts[at], of)
    for step, mb in zip(observation.memory_at, observation.memory_mb, strict=False):
        if step >= first:
            at = starts[min(step - first, len(starts) - 1)]
            yield _event("C", observation.rank, "resident memory", at, args={"MB": mb})
    end = starts[-1]
    if any(name in lanes for name in _BETWEEN):
        yield _named(observation.rank, "thread_name", _REST, "beside the steps, all together")
    for name in _BETWEEN:
        if name in lanes:
            length = round(lanes[name] * 1e6 * observation.steps)
            yield _event("X", observation.rank, name, end, tid=_REST, dur=length / 1e3, cat="lane")
            end += length


def _step(
    rank: int, number: int, start: int, length: int, lanes: Mapping[str, int]
) -> list[_Event]:
    took = length / 1e3
    of_step = {"step": number}
    events = [_event("X", rank, f"step {number}", start, dur=took, cat="step", args=of_step)]
    for name, ns in lanes.items():
        if ns > 0:
            events.append(_event("X", rank, name, start, dur=ns / 1e3, cat="lane", args=of_step))
        start += ns
    return events


def _names(rank: int, name: str, labels: str) -> Iterator[_Event]:
    yield _named(rank, "process_name", 0, name)
    if labels:
        yield _event("M", rank, "process_labels", args={"labels": labels}, tid=0)
    yield _event("M", rank, "process_sort_index", args={"sort_index": rank}, tid=0)
    yield _named(rank, "thread_name", _STEPS, "steps")


def _named(rank: int, what: str, tid: int, name: str) -> _Event:
    return _event("M", rank, what, tid=tid, args={"name": name})


def _event(
    ph: str, rank: int, name: str, start_ns: int = 0, *, tid: int = _STEPS, **more: Any
) -> _Event:
    return {"ph": ph, "name": name, "pid": rank, "tid": tid, "ts": start_ns / 1e3, **more}


def _file(events: list[_Event], notes: list[str], **more: Any) -> dict[str, Any]:
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"source": "flatout", "notes": " ".join(notes), **more},
    }
