"""Explanation of a collective that does not end: the missing rank, and its activity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flatout.world.hangs.collective_log import APART, named

# _STACKS: maximum number of missing ranks whose stacks are printed. _RANKS: maximum number of
# ranks that are listed.
_STACKS = 4
_RANKS = 8


@dataclass
class RankStatus:
    """The state of a rank, as it reports it, or as far as other ranks know.

    Attributes:
        begun: number of collectives that it has come to.
        waiting: the number of the one that it is in, or None.
        recent: number, purpose and step of each of the latest.
        process: a description of its process.
        state: the result of another rank's inspection if the rank did not answer, else "".
        stack: the lines of its main thread's stack, if known.
        passed: number of points passed at which ranks may ask together.
    """

    begun: int = 0
    waiting: int | None = None
    recent: list[tuple[int, str, int]] = field(default_factory=list)
    process: str = ""
    state: str = ""
    stack: list[str] = field(default_factory=list)
    passed: int = 0

    def at(self, number: int) -> str | None:
        """Return the purpose of the collective of this number on this rank, without the step."""
        return next((what for call, what, _ in self.recent if call == number), None)

    def name(self, number: int) -> str:
        return next(
            (named(what, step) for call, what, step in self.recent if call == number),
            f"collective {number}",
        )


@dataclass(frozen=True)
class Hang:
    """The facts about a collective that does not end.

    Attributes:
        lines: a description.
        blame: the same in half a sentence.
        culprits: the ranks that the others wait for; empty if unknown.
    """

    lines: list[str]
    blame: str
    culprits: tuple[int, ...]


def explain(number: int, rank: int, stands: Mapping[int, RankStatus], seconds: float) -> Hang:
    name = stands[rank].name(number)
    waited = f"rank {rank} has waited {seconds:.0f} s in {name}"
    if number == APART:
        return _explain_apart(rank, stands, seconds)
    late = [value for value, stand in stands.items() if stand.begun < number]
    # A rank that itself waits for another one is not the cause.
    missing = [item for item in late if stands[item].waiting is None or stands[item].state] or late
    if missing:
        blame = f"{_ranks(missing)} did not come to {name}"
        return _with_stacks(f"{waited} for {_ranks(missing)}", blame, missing, stands)
    silent = [value for value, stand in stands.items() if stand.state]
    if silent:
        blame = f"{_ranks(silent)} did not answer in {name}"
        return _with_stacks(f"{waited}, and {_ranks(silent)} did not answer", blame, silent, stands)
    own = stands[rank].at(number)
    others = [value for value, stand in stands.items() if stand.at(number) not in (own, None)]
    if others:
        theirs = stands[others[0]].name(number)
        first = (
            f"{waited}, while {_ranks(others)} came to another collective: {theirs}. Every rank "
            "must call the same ones, in the same order"
        )
        blame = f"rank {rank} was in {name}, rank {others[0]} in {theirs}"
        return _with_stacks(first, blame, [rank, *others], stands)
    # Ranks of a pipeline are in one collective while they compute and pass on results.
    busy = [
        value for value, stand in stands.items() if (stand.begun, stand.waiting) == (number, None)
    ]
    if busy:
        blame = f"{_ranks(busy)} did not go on in {name}"
        return _with_stacks(f"{waited} for what {_ranks(busy)} is to give", blame, busy, stands)
    first = f"{waited}; all ranks have come to it and answer: look at the network between them"
    return Hang([first], f"{name} did not end, though all ranks had come to it", ())


def _explain_apart(rank: int, stands: Mapping[int, RankStatus], seconds: float) -> Hang:
    late = [value for value, stand in stands.items() if stand.waiting is None or stand.state]
    waited = f"rank {rank} has waited {seconds:.0f} s for steps of other ranks"
    if not late:
        return Hang([f"{waited}, and all of them wait"], "all ranks waited for one another", ())
    blame = f"{_ranks(late)} made no step, and the other ranks may not be further ahead"
    return _with_stacks(f"{waited}: no step came from {_ranks(late)}", blame, late, stands)


def _with_stacks(
    first: str, blame: str, culprits: Sequence[int], stands: Mapping[int, RankStatus]
) -> Hang:
    lines = [first]
    for rank in culprits[:_STACKS]:
        lines += _about(rank, stands[rank])
    return Hang(lines, blame, tuple(culprits))


def _about(rank: int, stand: RankStatus) -> list[str]:
    who = f"rank {rank}" + (f" ({stand.process})" if stand.process else "")
    if stand.waiting is not None and not stand.state:
        does = f"waits in {stand.name(stand.waiting)}"
    elif stand.begun:
        does = f"was last in {stand.name(stand.begun)}"
    else:
        does = "has not been in a collective yet"
    lines = [f"  {who} {stand.state + '; when it last told, it ' if stand.state else ''}{does}"]
    if stand.stack:
        lines += ["  its Python stack:", *(f"  {line}" for line in stand.stack)]
    return lines


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:_RANKS]))
    return f"ranks {shown}" + (f" and {len(ranks) - _RANKS} more" if len(ranks) > _RANKS else "")
