"""The action at each call of a forward that is computed only partly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from flatout.models.frozen.calls import Key, is_transparent
from flatout.models.frozen.recording import Call, Event, ForwardRecording, OutputStructure, store_of


@dataclass(frozen=True)
class Step:
    """The action at a call.

    Attributes:
        kind: `enter` the call; `do` it, and record its output; or only `give` that output.
        given: structure of the call's output; None where the call has no recorded output.
        writes: for each stand-in that the call writes into: its index among the call's stand-in
            arguments, and the id of its new value.
        is_last: whether no kept value is made after this call.
    """

    kind: str
    given: OutputStructure | None = None
    writes: tuple[tuple[int, int], ...] = ()
    is_last: bool = False


@dataclass(frozen=True)
class Plan:
    """Steps by call, and the modules whose calls have a step."""

    steps: dict[Key, Step]
    parts: dict[str, Any]


def plan_prefix(noted: ForwardRecording, chosen: Collection[int], kept: Collection[int]) -> Plan:
    """Return a plan that computes the chosen events, and nothing else."""
    return _plan(noted, chosen, kept, "do", "give")


def plan_rest(noted: ForwardRecording, chosen: Collection[int], kept: Collection[int]) -> Plan:
    """Return a plan that computes all events except the chosen ones, from kept values."""
    return _plan(noted, chosen, kept, "give", "")


def _plan(
    noted: ForwardRecording,
    chosen: Collection[int],
    kept: Collection[int],
    inside: str,
    behind: str,
) -> Plan:
    steps: dict[Key, Step] = {}
    last = max(chosen)
    keys = _keys(noted, chosen, goes_on=bool(behind))
    for index, event in enumerate(noted.events):
        kind = inside if index in chosen else behind
        if kind and index in keys:
            ends = inside == "do" and index == last
            steps[keys[index]] = Step(kind, event.given, tuple(event.writes), ends)
    parts, hidden_until = {}, 0
    for call in noted.calls:
        events = range(call.start, call.stop)
        if call.stop > call.start and call.stop <= hidden_until:
            continue  # within a call that is taken as a whole
        parts[call.key.name] = call.module
        if call.is_leaf:
            continue
        if _is_whole(noted, call, chosen, kept):
            steps[call.key] = Step(inside, call.given, is_last=inside == "do" and last in events)
            if not is_transparent(call.module):
                hidden_until = call.stop
        elif behind and not any(index in chosen for index in events) and call.given is not None:
            steps[call.key] = Step(behind, call.given)
        else:
            steps[call.key] = Step("enter")
    return Plan(steps, parts)


def _keys(noted: ForwardRecording, chosen: Collection[int], *, goes_on: bool) -> dict[int, Key]:
    reached, counts, keys = set(noted.inputs), Counter[tuple[Any, str]](), dict[int, Key]()
    for index, event in enumerate(noted.events):
        is_reached = not event.from_outside and not reached.isdisjoint(event.reads)
        if event.key is not None:
            keys[index] = event.key
        elif is_reached:
            keys[index] = Key(event.path, event.name, counts[event.path, event.name])
            counts[event.path, event.name] += 1
        if (is_reached or event.key is not None) and (goes_on or index in chosen):
            reached.update(event.gives())
    return keys


def _is_whole(
    noted: ForwardRecording, call: Call, chosen: Collection[int], kept: Collection[int]
) -> bool:
    events = [noted.events[index] for index in range(call.start, call.stop)]
    if not events or call.given is None:
        return False
    if not all(index in chosen for index in range(call.start, call.stop)):
        return False
    born = {number for event in events for number in event.gives()}
    if not (born & set(kept)) <= set(call.given.numbers()):
        return False
    return not _writes_outside(noted, events, born)


def _writes_outside(noted: ForwardRecording, events: list[Event], born: set[int]) -> bool:
    outside = {number for event in events for number in event.reads} - born
    stores = {store_of(noted.values[number]) for number in outside}
    return any(not stores.isdisjoint(event.stores) for event in events)
