"""Peers side by side: each in its own process, restarted in turn, compared over the restarts.

Two equal jobs in two processes differ by some percent for as long as the processes live, so one
process a peer proves nothing. A round runs every peer once; the next round runs them in the other
direction, so that a machine that grows slower harms no peer more than another. A peer that is run
twice a round shows what the noise alone makes of a ratio (A/A).
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from math import inf
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

from flatout.measure import Interval, bootstrap_ratio

PEERS = Path(__file__).parent / "peers"


@dataclass
class Progress:
    """Limits from the command line, and the file that keeps results if the bench ends early.

    Attributes:
        ends_at: by time.monotonic(); then no process is started, and a running one is ended.
        is_quick: whether the run has fewer rounds than a full one.
        file: gets a line of JSON after each process, until the results are written.
    """

    ends_at: float = inf
    is_quick: bool = False
    file: Path | None = None

    @property
    def left_s(self) -> float | None:
        """Remaining seconds, for `timeout`; None if there is no limit."""
        return None if self.ends_at == inf else max(0.1, self.ends_at - monotonic())

    def keep(self, line: Mapping[str, Any]) -> None:
        """Add a line to the file."""
        if self.file is not None:
            with self.file.open("a") as file:
                file.write(json.dumps(line) + "\n")


PROGRESS = Progress()
OVER = "not measured: the time of --minutes was over"


@dataclass(frozen=True)
class Peer:
    """A job in its own process.

    Args:
        name: what the table calls it.
        script: a path below `bench/peers` (or an absolute one).
        arguments: of the script, besides `--out`.
        needs: the modules without which it cannot run.
    """

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


@dataclass
class Row:
    """What the restarts of one peer gave.

    Args:
        peer: whose row it is.
        reason: why there is nothing to see, or empty.
        seconds: per step, one number a restart: the median over its timed epochs.
        accuracies: after training, one number a restart of a peer that trains.
        notes: what it said about itself, one text a restart.
        first_seconds: per step of the first pass over the data, with all that is opened and built
            before it, one number a restart of a peer that tells it.
    """

    peer: Peer
    reason: str = ""
    seconds: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    first_seconds: list[float] = field(default_factory=list)

    @property
    def measured(self) -> bool:
        return not self.reason and bool(self.seconds)


class PeerFailed(Exception):
    """A peer's process ended with an error; the text is the last line that it printed."""


def absence(peer: Peer) -> str:
    """Why a peer cannot run here, or an empty text."""
    missing = [module for module in peer.needs if find_spec(module) is None]
    return f"absent: {missing[0]} is not installed" if missing else ""


def run_once(peer: Peer) -> dict[str, Any]:
    """Run a peer's process to its end, in its own folder, and return what it reported.

    Raises:
        PeerFailed: if it ended with an error, or without a report.
        subprocess.TimeoutExpired: the time limit of --minutes was reached.
    """
    with tempfile.TemporaryDirectory(prefix="flatout-bench-") as folder:
        out = Path(folder, "result.json")
        command = [sys.executable, str(PEERS / peer.script), "--out", str(out), *peer.arguments]
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=PROGRESS.left_s,
        )
        if done.returncode or not out.exists():
            said = done.stdout.strip().splitlines() or [f"exit code {done.returncode}"]
            raise PeerFailed(said[-1].strip())
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def end_peers_on_sigterm() -> None:
    """Make SIGTERM an exception, as Ctrl-C is one: the peer that runs is then ended first."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def run_in_turn(
    peers: Sequence[Peer],
    *,
    restarts: int,
    only: Sequence[str] = (),
    tell: Callable[[str], None],
    figure: Callable[[float], str] = lambda seconds: f"{seconds * 1e6:,.0f} us/step",
) -> dict[str, Row]:
    """Run every peer `restarts` times, a round after the other; returns the rows by name.

    After Ctrl-C, or at the time limit of --minutes, return the rows measured until then.

    Args:
        peers: in the order of the table.
        restarts: rounds, and so processes for each peer.
        only: names of the peers to run; none means all.
        tell: gets a line after each process.
        figure: words for its seconds per step.
    """
    rows = {peer.name: Row(peer, reason=absence(peer)) for peer in peers}
    for name, row in rows.items():
        if only and name not in only:
            row.reason = "left out by --only"
    try:
        _run_rounds(rows, restarts, tell, figure)
        reason = ""
    except KeyboardInterrupt:
        reason = "not measured: interrupted"
    except subprocess.TimeoutExpired:
        reason = OVER
    if reason:
        tell(f"{reason.removeprefix('not measured: ')}; the results until then are shown")
    for row in rows.values():
        row.reason = row.reason or ("" if row.seconds else reason)
    return rows


def _run_rounds(
    rows: Mapping[str, Row],
    restarts: int,
    tell: Callable[[str], None],
    figure: Callable[[float], str],
) -> None:
    for turn in range(restarts):
        in_order = list(rows.values())
        for row in in_order if turn % 2 == 0 else reversed(in_order):
            if row.reason:
                continue
            if monotonic() >= PROGRESS.ends_at:
                raise subprocess.TimeoutExpired(row.peer.name, 0)
            try:
                result = run_once(row.peer)
            except PeerFailed as error:
                row.reason = f"failed: {error}"
                tell(f"{turn + 1}/{restarts} {row.peer.name}: {row.reason}")
                continue
            row.seconds.append(median(result["epoch_seconds"]) / result["steps"])
            if "accuracy" in result:
                row.accuracies.append(result["accuracy"])
            if "first_seconds" in result:
                row.first_seconds.append(result["first_seconds"] / result["steps"])
            row.notes.append(result["note"])
            PROGRESS.keep({"peer": row.peer.name, "restart": turn + 1, **result})
            tell(f"{turn + 1}/{restarts} {row.peer.name}: {figure(row.seconds[-1])}")


def ratio(rows: Mapping[str, Row], slower: str, faster: str) -> Interval | str:
    """Time of `slower` / time of `faster` with its interval, or why there is none."""
    for name in (slower, faster):
        if not rows[name].measured:
            return f"{name}: {rows[name].reason}"
        if (least := min(rows[name].seconds)) <= 0:
            return f"{name}: a time of {least:.2g} s is a difference made negative by noise"
    return bootstrap_ratio(rows[slower].seconds, rows[faster].seconds)


def versions(peers: Sequence[Peer]) -> dict[str, str]:
    """The version of each installed module that a peer needs."""
    modules = {module for peer in peers for module in peer.needs}
    installed = packages_distributions()
    return {module: version(installed[module][0]) for module in sorted(modules & installed.keys())}
