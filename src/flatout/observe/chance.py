"""Whether samples of a training and a validation may be equal by chance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import log2
from typing import Any

RICH = 48.0
"""Samples that fewer bits tell apart may be equal by chance."""

# So many samples show by how many bits they differ.
_ASKED = 1024
# Of so few columns those that follow from another one are told; this share of different numbers in
# a column says nothing of what follows from it.
_COLUMNS, _OFTEN = 16, 0.75
# Of samples of few bits so many are equal at least, if they are no chance; their columns tell more
# pairs apart than there are, by so many bits; and so many times as many are equal as in one part.
_FEWEST, _MORE_BITS, _MORE_OFTEN = 5, 6.0, 2.5


def bits_of(rows: Any) -> float:
    """At most so many bits tell rows of an array apart, by the different values of each column.

    Where these are few, columns that follow from another one, such as a month from a day, count
    no more.
    """
    some = rows[:_ASKED]
    different = [len({*column.tolist()}) for column in some.T]
    bits = [log2(max(1, many)) for many in different]
    if sum(bits) >= RICH or len(bits) > _COLUMNS:
        return sum(bits)
    counted: list[int] = []
    for at in sorted(range(len(bits)), key=lambda at: -different[at]):
        if not any(_follows(some[:, at], some[:, by], different[by]) for by in counted):
            counted.append(at)
    return sum(bits[at] for at in counted)


def _follows(column: Any, by: Any, different: int) -> bool:
    if different > _OFTEN * len(by):
        return False
    return len({*zip(by.tolist(), column.tolist(), strict=True)}) == different


def is_no_chance(shared: int, trained: Sequence[int], held_out: Sequence[int], bits: float) -> bool:
    """Whether so many samples of a validation are also trained on as no chance makes.

    That is what as many bits leave to chance, and as often as samples of one part are equal among
    themselves.
    """
    pairs = len(trained) * len(held_out)
    if shared < _FEWEST or bits < log2(pairs) + _MORE_BITS:
        return False
    often = max(_equal_pairs(trained), _equal_pairs(held_out))
    return shared > _MORE_OFTEN * often * pairs


def _equal_pairs(rows: Sequence[int]) -> float:
    equal = sum(count * (count - 1) // 2 for count in Counter(rows).values())
    return (equal + 1) / max(1, len(rows) * (len(rows) - 1) // 2)
