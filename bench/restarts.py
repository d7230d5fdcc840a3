"""Peers side by side: each in its own process, restarted in turn, compared over the restarts.

Two equal jobs in two processes differ by some percent for as long as the processes live, so one
process a peer proves nothing. A round runs every peer once; the next round runs them in the other
direction, so that a machine that grows slower harms no peer more than another. A peer that is run
twice a round shows what the noise alone makes of a ratio (A/A).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import partial
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from math import inf
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any, TypeVar

import psutil

from flatout.measure import Interval, bootstrap_ratio

PEERS = Path(__file__).parent / "peers"
T, U = TypeVar("T"), TypeVar("U")


@dataclass
class Progress:
    """The limits from the command line, and measurements that are not yet written as results.

    Attributes:
        ends_at: the time by time.monotonic() at which the running part is ended. No other part
            begins after it.
        is_quick: True if the run has fewer rounds than a full run.
        file: the file that gets a line of JSON after each process and part, until the results are
            written.
        kept: the lines of JSON in `file`.
        over: the reason why no further part begins, or an empty text.
        failures: a text for each part that failed.
        code: the exit code of the bench, unless its keys make it 1.
    """

    ends_at: float = inf
    is_quick: bool = False
    file: Path | None = None
    kept: list[dict[str, Any]] = field(default_factory=list)
    over: str = ""
    failures: list[str] = field(default_factory=list)
    code: int = 0

    def keep(self, **line: Any) -> None:
        """Remember a line, and add it to the file."""
        self.kept.append(line)
        if self.file is not None:
            with self.file.open("a") as file:
                file.write(json.dumps(line, default=plain) + "\n")

    @property
    def reason(self) -> str:
        """Why results are missing, or an empty text."""
        return "; ".join([*([self.over] if self.over else ()), *self.failures])


def plain(value: Any) -> Any:
    """Return a dataclass as a dict, and any other object that JSON does not support as text."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


PROGRESS = Progress()
# The reason and the exit code of an early end, by signal. The user requested the time limit, so its
# exit code is 0.
ENDS = {
    signal.SIGALRM: ("the time of --minutes was over", 0),
    signal.SIGINT: ("interrupted", 130),
    signal.SIGTERM: ("ended by SIGTERM", 143),
}


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
    """The error of a peer whose process failed or was ended. The text is its last printed line."""


def run_part(part: Callable[[], T]) -> T:
    """Run a part of a bench until it ends, or Ctrl-C, SIGTERM or the limit of --minutes ends it.

    An early end also ends all processes that the bench has started. No part begins after it.

    Raises:
        PeerFailed: the part was ended, or did not begin.
    """
    if PROGRESS.over:
        raise PeerFailed(PROGRESS.over)
    try:
        _PARTS.append(part)
        with ended_by_signals():
            return part()
    except KeyboardInterrupt:
        if not PROGRESS.over:  # a handler of the part itself has raised the error
            PROGRESS.over, PROGRESS.code = ENDS[signal.SIGINT]
        tell(f"{PROGRESS.over}; the results until then are shown")
        raise PeerFailed(PROGRESS.over) from None
    finally:
        _PARTS.pop()


_PARTS: list[object] = []  # the running part, and the parts around it


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let a signal of `ENDS` within the block end the running part and prevent further parts."""
    before = {number: signal.getsignal(number) for number in ENDS}
    try:
        for number in ENDS:
            signal.signal(number, _end_bench)
        _set_timer()
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
        if before[signal.SIGALRM] is _end_bench:
            _set_timer()


def _set_timer() -> None:
    if PROGRESS.ends_at < inf and not PROGRESS.over:
        signal.setitimer(signal.ITIMER_REAL, max(1e-3, PROGRESS.ends_at - monotonic()))


def _end_bench(number: int, frame: object) -> None:
    PROGRESS.over, PROGRESS.code = ENDS[signal.Signals(number)]
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            # The resource tracker of multiprocessing ends by itself, and must not be killed before.
            if not any("resource_tracker" in word for word in process.cmdline()):
                process.kill()
    if _PARTS:
        raise KeyboardInterrupt


def each(units: Iterable[U], measure: Callable[[U], T]) -> list[T]:
    """Measure one unit after the other, and return the results.

    Each result is kept in `PROGRESS` at once. A failed unit does not affect other units. After
    Ctrl-C, SIGTERM or the time limit, return the results up to that moment.
    """
    found: list[T] = []
    with ended_by_signals():
        for unit in units:
            if PROGRESS.over:
                break
            try:
                found.append(run_part(partial(measure, unit)))
                PROGRESS.keep(part=str(unit), found=found[-1])
            except (Exception, SystemExit) as error:
                if PROGRESS.over:
                    break
                if not isinstance(error, (PeerFailed, SystemExit)):
                    traceback.print_exc()
                PROGRESS.failures.append(f"{unit} failed: {error}")
                tell(PROGRESS.failures[-1])
    return found


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# -- processes -----------------------------------------------------------------------------------


def start(
    command: Sequence[str],
    folder: Path | str,
    variables: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[str]:
    """Start a process in a session of its own."""
    if PROGRESS.over:
        raise PeerFailed(PROGRESS.over)
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **(variables or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        pass_fds=pass_fds,
    )


def end(process: subprocess.Popen[str]) -> None:
    """End a process of `start`, and the other processes of its session."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_to_end(
    command: Sequence[str],
    folder: Path | str,
    timeout_s: float | None = None,
    variables: Mapping[str, str] | None = None,
) -> tuple[str, str, int | None]:
    """Run a command to its end, and return its output and exit code, or None at a timeout."""
    process = start(command, folder, variables)
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return "", "", None
    finally:
        end(process)
    return out, err, process.returncode


def report_of(
    command: Sequence[str], folder: Path | str, variables: Mapping[str, str] | None = None
) -> str:
    """Run a command to its end as a part of its own, and return its output.

    Raises:
        PeerFailed: the command failed, or Ctrl-C, SIGTERM or the time limit ended it.
    """
    out, err, code = run_part(lambda: run_to_end(command, folder, variables=variables))
    if code:
        said = (out + err).strip().splitlines() or [f"exit code {code}"]
        raise PeerFailed(said[-1].strip())
    return out


# -- peers ---------------------------------------------------------------------------------------


def absence(peer: Peer) -> str:
    """Why a peer cannot run here, or an empty text."""
    missing = [module for module in peer.needs if find_spec(module) is None]
    return f"absent: {missing[0]} is not installed" if missing else ""


def run_once(peer: Peer) -> dict[str, Any]:
    """Run a peer's process to its end, in its own folder, and return its report.

    Raises:
        PeerFailed: the process failed or printed no report, or Ctrl-C, SIGTERM or the time limit
            ended it.
    """
    with tempfile.TemporaryDirectory(prefix="flatout-bench-") as folder:
        out = Path(folder, "result.json")
        command = [sys.executable, str(PEERS / peer.script), "--out", str(out), *peer.arguments]
        said = report_of(command, folder).strip().splitlines() or ["the process printed no report"]
        if not out.exists():
            raise PeerFailed(said[-1].strip())
        result: dict[str, Any] = json.loads(out.read_text())
        PROGRESS.keep(peer=peer.name, arguments=peer.arguments, **result)
        return result


def run_in_turn(
    peers: Sequence[Peer],
    *,
    restarts: int,
    only: Sequence[str] = (),
    tell: Callable[[str], None],
    figure: Callable[[float], str] = lambda seconds: f"{seconds * 1e6:,.0f} us/step",
) -> dict[str, Row]:
    """Run every peer `restarts` times, one round after another, and return the rows by name.

    After Ctrl-C, SIGTERM or the time limit of --minutes, return the rows up to that moment.

    Args:
        peers: in the order of the table.
        restarts: the number of rounds, each with one process for every peer.
        only: names of the peers to run; an empty list means all.
        tell: called with a line after each process.
        figure: words for its seconds per step.
    """
    rows = {peer.name: Row(peer, reason=absence(peer)) for peer in peers}
    for name, row in rows.items():
        if only and name not in only:
            row.reason = "left out by --only"
    with ended_by_signals():
        _run_rounds(rows, restarts, tell, figure)
    for row in rows.values():
        row.reason = row.reason or ("" if row.seconds else PROGRESS.over)
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
            try:
                result = run_once(row.peer)
            except PeerFailed as error:
                if PROGRESS.over:
                    return
                row.reason = f"failed: {error}"
                tell(f"{turn + 1}/{restarts} {row.peer.name}: {row.reason}")
                continue
            row.seconds.append(median(result["epoch_seconds"]) / result["steps"])
            if "accuracy" in result:
                row.accuracies.append(result["accuracy"])
            if "first_seconds" in result:
                row.first_seconds.append(result["first_seconds"] / result["steps"])
            row.notes.append(result["note"])
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
