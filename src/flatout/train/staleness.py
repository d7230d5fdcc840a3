"""Staleness of the gradients that parameter servers stepped with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from flatout.words import counted, rounded


def staleness_facts(by_rank: Sequence[Counter[int]]) -> dict[str, Any]:
    """Return the staleness in the form that History stores."""
    together = sum(by_rank, Counter[int]())
    count = together.total()
    return {
        "mean": sum(steps * times for steps, times in together.items()) / count if count else 0.0,
        "most": max(together, default=0),
        "by_rank": [{str(steps): own[steps] for steps in sorted(own)} for own in by_rank],
    }


def late_words(late: Sequence[int]) -> str:
    """Report gradients that were dropped."""
    each = ", ".join(f"{count} of rank {rank}" for rank, count in enumerate(late) if count)
    return f"{counted(sum(late), 'gradient')} came too late for a step and were dropped" + (
        f": {each}" if each else ""
    )


def staleness_words(facts: dict[str, Any], rate: float) -> str:
    """Report the staleness; suggest another learning rate, without setting it.

    Zhang et al., "Staleness-aware Async-SGD for Distributed Deep Learning", 2016, divide the rate
    by the staleness.
    """
    mean = facts["mean"]
    words = (
        f"gradients were {rounded(mean)} steps old on average when a server stepped with them, "
        f"{counted(facts['most'], 'step')} at most"
    )
    if mean <= 1:
        return words
    return (
        f"{words}; if the loss is unsteady, try a learning rate of {rounded(rate / mean)} in place "
        f"of {rounded(rate)}: divided by that age, as staleness-aware SGD does"
    )
