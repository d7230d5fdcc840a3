"""Check for text that is parsed in Python, line by line, in each epoch."""

from __future__ import annotations

import linecache
import re

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import HUNGRY, lane, ms, share, training_loaders
from flatout.doctor.finding import Finding
from flatout.observe import Loader, Observation, Site

_PARSES = re.compile(
    r"\.(r?split|strip|partition|splitlines)\(|json\.loads|csv\.|literal_eval"
    r"|strptime|loadtxt|genfromtxt|fromstring|read_csv"
)
"""Calls in lines that parse text."""

_NUMBERS = re.compile(r"(?<!\.)\b(float|int)\(")
"""Calls that convert text, or another number, to a number."""

_TEXT = re.compile(_PARSES.pattern + r"|\.readlines?\(|[\"']rt?[\"']|json\.load|DictReader")
"""Pattern of code which shows that calls of float or int in the file may convert text."""

_MUCH = 0.3
"""Share of the loader's time from which on parsing is reported."""


@check(lane="input")
def look(observation: Observation) -> Findings:
    """Report lines that parse text for much of a loader's time while the step waits for it."""
    for loader in training_loaders(observation):
        wait = lane(observation, "input")
        if share(observation, wait) < HUNGRY:
            continue
        if not loader.hot:
            raise NoSignal("the lines that take the loader's time were not observed")
        parsing = [(site, part) for site, part in loader.hot if _parses(site)]
        if sum(part for _, part in parsing) >= _MUCH:
            yield _finding(loader, parsing, wait)


def _parses(site: Site) -> bool:
    if _NUMBERS.search(site.code):
        lines = linecache.getlines(site.file)
        return not lines or any(map(_TEXT.search, lines))
    return bool(_PARSES.search(site.code))


def _finding(loader: Loader, parsing: list[tuple[Site, float]], wait: float) -> Finding:
    part = min(1.0, sum(part for _, part in parsing))
    # Samples of an iterable dataset are cached only in the process that trains.
    is_kept = not (loader.is_iterable and loader.num_workers)
    return Finding(
        kind="slow",
        what=f"text is parsed in Python, in each epoch again: {part:.0%} of the loader's time, "
        f"{ms(part * wait)} per step",
        do="parse it once, into arrays: flatout data convert, numpy.save, or a Parquet file",
        where=str(parsing[0][0]),
        cost_ms=wait if is_kept else part * wait,
        parity="bit-identical",
        recipe={"script.cache": "memory"} if is_kept else {},
    )
