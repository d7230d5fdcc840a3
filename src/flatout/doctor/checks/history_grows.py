"""Check for a history of all steps that is copied or traversed again in each step."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at, epoch_steps, kind_of, ms, run_steps
from flatout.doctor.finding import Finding
from flatout.observe import Growing, Observation
from flatout.words import duration

_LOOKED = 18
"""Number of steps after which growth has been measured."""

_SOME = 10_000
"""Number of steps for which the cost is reported if the length of the run is unknown."""

_COPIED, _LARGE = 4e9, 1 << 20
"""_COPIED: bytes per second that one core copies; _LARGE: bytes from which on a copy is timed."""

_OF_NUMBER_S = 3e-8
"""Seconds that numpy takes to convert one number of a Python list."""

_OF_PIECE_S = 3e-7
"""Seconds that torch or numpy takes for each tensor or array that it concatenates."""


@check(hooks=True)
def look(observation: Observation) -> Findings:
    """Report lines whose result grows equally with each step, and so does their time."""
    if observation.steps < _LOOKED:
        raise NoSignal("too few steps were observed to detect growth")
    for history in observation.growing:
        now = _ms_now(observation, history)
        steps, of = _until(observation)
        later = max(now, _ms_after(history, steps))
        mean = (now + later) / 2
        copies = "goes through" if history.is_list else "copies"
        grows = ""
        if steps > history.at and later > now:
            in_all = duration(mean * steps / 1e3)
            grows = f", {ms(later)} after {steps:,.0f} steps{of}, {in_all} in all: quadratic"
        yield Finding(
            kind=kind_of(observation, max(now, mean)),
            what=f"{history.words} {copies} all earlier values in each step: {_told(now)} "
            f"now{grows} ({history.numbers:,} numbers after {history.at} steps, "
            f"{history.more:,} more with each step)",
            do="add up as you go, or read the list once, after the epoch"
            if history.is_list
            else "append to a list, and put it together once, where it is read",
            where=at(history.site),
            cost_ms=max(now, mean),
            is_estimate=True,  # the cost goes on growing
            parity="bit-identical",
        )


def _told(taken: float) -> str:
    return ms(taken) if taken else "almost no time"


def _until(observation: Observation) -> tuple[float, str]:
    epoch, run = epoch_steps(observation), run_steps(observation)
    if epoch:
        return epoch, ", an epoch"
    return (run, ", the whole run") if run else (_SOME, "")


def _ms_after(history: Growing, steps: float) -> float:
    if not history.is_list and history.numbers * history.bytes >= _LARGE:
        return history.ms * steps / history.at
    of_number = _OF_NUMBER_S if history.is_list else history.bytes / _COPIED
    of_step = history.more * of_number + history.pieces * _OF_PIECE_S
    return history.ms + 1e3 * of_step * max(0.0, steps - history.at)


def _ms_now(observation: Observation, growing: Growing) -> float:
    taken = [line.ms for line in observation.lines if line.site == growing.site]
    return max([growing.ms, *taken])
