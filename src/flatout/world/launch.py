"""Starting the ranks of a job on this node, by torch.distributed's elastic agent.

The agent starts the ranks, watches them, and starts all of them again where one was killed. A rank
that ends by an error of its own is no reason to try again: the error would come again.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Mapping, Sequence

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import (
    DefaultLogsSpecs,
    SignalException,
    SubprocessContext,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from flatout.errors import WorldError
from flatout.world.nodes import Nodes
from flatout.world.start import STARTED_BY
from flatout.world.world import LostRank

# How often the agent looks after its ranks.
_LOOK_EVERY_S = 0.1
# What ranks may take to write their last checkpoint after a stop signal.
_LAST_WORDS_S = 120
# What the others may take to leave after one was killed.
_LAST_BREATH_S = 1
# How long nodes wait for one another at the start.
_PATIENCE_S = 900

Failures = Mapping[int, ProcessFailure]


def launch(command: Sequence[str], nodes: Nodes, restarts: int) -> int:
    """Run a command as the ranks of this node, until all have ended.

    Args:
        command: the interpreter, the script and its arguments.
        nodes: which node this is, where they meet, and how many ranks it has.
        restarts: how often all ranks are started again after one was killed.

    Returns:
        The exit code: 0, that of the first rank that failed, or 128 + the signal.

    Raises:
        WorldError: the nodes do not meet.
    """
    # In this process the agent alone logs, and what it says is said below, in plain words.
    logging.disable(logging.CRITICAL)
    os.environ[STARTED_BY] = str(os.getpid())
    meeting = RendezvousParameters(
        backend="c10d",
        endpoint=nodes.rendezvous or "127.0.0.1:0",
        run_id=f"flatout-{nodes.rendezvous}" if nodes.count > 1 else uuid.uuid4().hex,
        min_nodes=nodes.count,
        max_nodes=nodes.count,
        local_addr=None if nodes.count > 1 else "127.0.0.1",
        join_timeout=_PATIENCE_S,
        is_host=nodes.rank == 0,
    )
    try:
        handler = get_rendezvous_handler(meeting)
        agent = _Agent(
            WorkerSpec(
                role="flatout",
                local_world_size=nodes.ranks or 1,
                entrypoint=command[0],
                args=tuple(command[1:]),
                rdzv_handler=handler,
                max_restarts=restarts,
                monitor_interval=_LOOK_EVERY_S,
                master_addr=None,
                master_port=None,
                local_addr=None if nodes.count > 1 else "127.0.0.1",
            ),
            logs_specs=DefaultLogsSpecs(),
            shutdown_timeout=_LAST_WORDS_S,
        )
        result = _run(agent)
    except (RendezvousError, OSError) as error:
        raise WorldError(
            f"the {nodes.count} nodes did not meet at {meeting.endpoint}: {error}",
            where=f"node {nodes.rank}, {socket.gethostname()}",
            do="start every node with the same --nodes and --rendezvous, and its own --node-rank; "
            "see that the port is free on the first node, and reached from the others",
        ) from error
    except SignalException as stop:
        return 128 + int(stop.sigval)
    handler.shutdown()
    return _told(result.failures) if result.is_failed() else 0


def _run(agent: _Agent) -> RunResult:
    """Until the end, or a stop signal, which the ranks get as well."""

    def stop(signum: int, frame: object) -> None:
        raise SignalException(f"signal {signum}", sigval=signal.Signals(signum))

    before = {
        signum: signal.signal(signum, stop)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    }
    try:
        result: RunResult = agent.run()
        return result
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class _Agent(LocalElasticAgent):
    """Starts ranks again only where one was killed, not where its own error ended it."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._end_those_of_a_killed_rank()
        result: RunResult = super()._monitor_workers(worker_group)
        if not result.is_failed():
            return result
        killed = [rank for rank, one in result.failures.items() if _was_killed(one)]
        if not killed:
            self._remaining_restarts = 0
        elif self._remaining_restarts > 0:
            words = _ended(killed[0], result.failures[killed[0]])
            _say(f"{words}; all ranks start again ({self._remaining_restarts} times at most)")
        return result

    def _end_those_of_a_killed_rank(self) -> None:
        """What the others are at is lost, so that none may make all wait for its end."""
        ranks = self._pcontext
        if not isinstance(ranks, SubprocessContext):
            return
        if any(_is_kill(one.proc.poll() or 0) for one in ranks.subprocess_handlers.values()):
            ranks.close(signal.SIGTERM, timeout=_LAST_BREATH_S)


def _was_killed(failure: ProcessFailure) -> bool:
    """By a signal that is not the agent's own, which ends ranks where another one has failed."""
    return _is_kill(failure.exitcode)


def _is_kill(code: int) -> bool:
    return code < 0 and -code not in (signal.SIGTERM, signal.SIGINT)


def _told(failures: Failures) -> int:
    """Say which rank failed first; the exit code for all."""
    # Ranks that only lost another one leave with a code of their own.
    culprits = {
        r: f for r, f in failures.items() if f.exitcode not in (LostRank.code, -signal.SIGTERM)
    }
    among = culprits or failures
    rank = min(among, key=lambda one: (not _was_killed(among[one]), among[one].timestamp, one))
    code = int(among[rank].exitcode)
    _say(f"{_ended(rank, among[rank])}; all ranks have ended")
    return code if code > 0 else 128 - code


def _ended(rank: int, failure: ProcessFailure) -> str:
    if failure.exitcode < 0:
        how = f"was killed by {signal.Signals(-failure.exitcode).name}"
    else:
        how = f"has ended with exit code {failure.exitcode}"
    return f"rank {rank} (process {failure.pid}) {how}"


def _say(line: str) -> None:
    print(f"flatout: {line}", file=sys.stderr, flush=True)
