"""Ranks without which a job can continue: the ranks name them, and their agent drops them.

This works if workers need not wait for each other. An agent restarts such a rank alone. The rank
then waits until the others take it back, and all meet as at the start. Their messages, a few words
in all, go through the job's store. Other launchers do not know them, and end all ranks.

    may-end             ranks that may be dropped, as JSON;
    times               number of times that ranks were taken back;
    dropped-TIMES-RANK  set if that rank was dropped since then
    back-TIMES-RANK     set if that rank waits to be taken back
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

from flatout.world.network import LOOPBACK
from flatout.world.place import STARTED_BY, Place, place, restarts
from flatout.world.stores import connect, connect_to, files_of, part_of

COMES_BACK = "FLATOUT_COMES_BACK"
"""Set for a rank that was restarted alone."""

_STORE_S, _LOOK_EVERY_S = 10.0, 0.05

_said: set[int] = set()
_times = 0
_finished_fits = 0


def may_end(ranks: Collection[int]) -> None:
    """Let the job continue without these ranks if they are killed from now on.

    All ranks call this.
    """
    if set(ranks) == _said or STARTED_BY not in os.environ:
        return
    _said.clear()
    _said.update(ranks)
    if place().rank == 0:
        with suppress(RuntimeError):
            _store().set("may-end", json.dumps([*ranks]))


def is_dropped(rank: int, patience_s: float) -> bool:
    until = monotonic() + patience_s * (rank in _said)
    while not (result := _is_any("dropped", [rank])) and monotonic() < until:
        sleep(_LOOK_EVERY_S)
    return result


def is_any_dropped() -> bool:
    return _is_any("dropped", _said)


def are_back(ranks: Collection[int]) -> bool:
    """Return True if all dropped ranks wait to be taken back."""
    return bool(ranks) and all(_is_any("back", [rank]) for rank in ranks)


def comes_back() -> bool:
    """Return True if this rank was restarted alone."""
    return COMES_BACK in os.environ


def finished_fits() -> int:
    """Return the number of fits that this process has finished.

    A rank that was restarted alone begins its script again, so it can rejoin the first fit only.
    """
    return _finished_fits


def count_finished_fit() -> None:
    """Count a fit that has ended without an error."""
    global _finished_fits
    _finished_fits += 1


def register_return(rank: int) -> str:
    """Wait, as a restarted rank, to be taken back, and return the name of the meeting."""
    global _times
    store = _store()
    _times = int(store.add("times", 0))
    store.set(f"back-{_times}-{rank}", "")
    return meeting()


def meeting() -> str:
    return f"again-{_times}"


def have_met() -> None:
    global _times
    _times += 1
    if place().rank == 0:
        _store().add("times", 1)


def times() -> int:
    return _times


def come_to(times: int) -> None:
    """Set, on a server that is no rank, the number of times that ranks were taken back."""
    global _times
    _times = times


def _is_any(what: str, ranks: Collection[int]) -> bool:
    if not _said:
        return False
    with suppress(RuntimeError):
        store = _store()
        return any(store.check([f"{what}-{_times}-{rank}"]) for rank in ranks)
    return False


def drops(rank: int, agents: Any) -> bool:
    """Return, in an agent, True if the job continues without a rank that was killed."""
    with suppress(RuntimeError):
        if agents.check(["may-end"]) and rank in json.loads(agents.get("may-end")):
            times = agents.add("times", 0)
            agents.delete_key(f"back-{times}-{rank}")
            agents.set(f"dropped-{times}-{rank}", "")
            return True
    return False


def times_of(agents: Any) -> int:
    return int(agents.add("times", 0))


def store_of_agent(port: int, nodes: int, rounds: int) -> Any:
    timeout = timedelta(seconds=_STORE_S)
    here = Place(nodes=nodes, port=port)
    has_files = files_of(here) is not None
    store = connect(here, timeout) if has_files else connect_to(LOOPBACK, port, timeout)
    return _under(store, {**os.environ, "TORCHELASTIC_RESTART_COUNT": str(rounds - 1)})


def _store() -> Any:
    return _under(connect(place(), timedelta(seconds=_STORE_S)))


def _under(store: Any, environ: Mapping[str, str] | None = None) -> Any:
    return part_of(store, f"flatout-dropped-{restarts(environ)}")
