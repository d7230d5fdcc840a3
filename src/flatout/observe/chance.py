"""Estimate of the probability that equal samples in training and validation are a coincidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import log2
from typing import Any

RICH = 48.0
"""Minimum number of bits that distinguish samples; with fewer, equal samples may be chance."""

# Maximum number of samples whose bits are counted.
_ASKED = 1024
# _COLUMNS: maximum number of columns for which dependencies are searched; _OFTEN: share of
# different numbers in a column above which the column determines any other column by chance.
_COLUMNS, _OFTEN = 16, 0.75
# For samples of few bits: _FEWEST: minimum number of equal samples that are no coincidence;
# _MORE_BITS: bits that samples must have in addition to the logarithm of the number of pairs;
# _MORE_OFTEN: minimum ratio of equal samples to those expected from the rate within training or
# validation alone.
_FEWEST, _MORE_BITS, _MORE_OFTEN = 5, 6.0, 2.5


def bits_of(rows: Any) -> float:
    """Return an upper limit of the bits that distinguish rows, from the values of each column.

    If the limit is small, columns that follow from another column, such as a month from a day, are
    not counted.
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
    """Return whether `shared` validation samples equal training samples more often than by chance.

    Chance is estimated from the bits of a sample, and from the rate of equal samples within one
    part.
    """
    pairs = len(trained) * len(held_out)
    if shared < _FEWEST or bits < log2(pairs) + _MORE_BITS:
        return False
    often = max(_equal_pairs(trained), _equal_pairs(held_out))
    return shared > _MORE_OFTEN * often * pairs


def _equal_pairs(rows: Sequence[int]) -> float:
    equal = sum(count * (count - 1) // 2 for count in Counter(rows).values())
    return (equal + 1) / max(1, len(rows) * (len(rows) - 1) // 2)
