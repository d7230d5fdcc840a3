"""One trial of two scripts by itself, as the doctor makes several in a row."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from flatout.doctor.trials.pair import Against, Pair
from flatout.doctor.trials.process import Command, Process
from flatout.doctor.trials.schedule import Schedule
from flatout.doctor.trials.scratch import scratch


def run_pair(
    a: Command,
    b: Command,
    *,
    budget_s: float = 60.0,
    max_pairs: int = 8,
    block_s: float = 1.0,
    passes: Sequence[Path] = (),
    is_redirected: bool | None = None,
    started: Callable[[str, Process], None] = lambda side, process: None,
) -> Pair:
    """Measures the steps of A against those of B once, in the current folder.

    Whatever a script does, both are gone afterwards, and its files are as they were.

    Args:
        a, passes, is_redirected, started: as of Against.
        b: the same script with a cure.
        budget_s: seconds for everything, from the first start on.
        max_pairs, block_s: as of Schedule.

    Raises:
        FlatoutError: a process cannot be started at all.
    """
    began = time.monotonic()
    until = began + budget_s
    with scratch() as folder:
        one = Against(a, folder, until, passes=passes, is_redirected=is_redirected, started=started)
        with closing(one) as against:
            terms = Schedule(max_pairs=max_pairs, block_s=block_s)
            pair = against.measure(b, terms, budget_s=until - time.monotonic())
    pair.seconds = time.monotonic() - began
    return pair
