"""Starts the ranks of a job on this node, by torch.distributed's elastic agent.

The agent starts and watches the ranks. If one was killed, it starts all ranks again, unless the
others can continue without it. A rank that ends by its own error is not restarted, because the
error would come again.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import (
    DefaultLogsSpecs,
    LogsSpecs,
    SignalException,
    SubprocessContext,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import get_subprocess_handler

from flatout.console import say
from flatout.errors import WorldError
from flatout.processes import not_ignored
from flatout.world import secret
from flatout.world.dropped import COMES_BACK, drops, store_of_agent, times_of
from flatout.world.meeting.rendezvous import Rendezvous
from flatout.world.network import INTERFACES
from flatout.world.nodes import Nodes
from flatout.world.place import STARTED_BY
from flatout.world.stores import own_files
from flatout.world.world import TIMEOUT_S, LostRank

# Maximum seconds that nodes wait for each other at the start.
WAIT_S = 900.0
# Seconds without a sign of another node after which the job ends; less if the timeout of
# collectives is shorter.
_SILENT_S = 60.0
# Seconds between the agent's checks of its ranks.
_LOOK_EVERY_S = 0.1
# Seconds that ranks have to end. _LAST_WORDS_S: to write the last checkpoint after a stop signal.
# _OTHERS_S: after another rank has failed. _SOON_S: after they have lost it. _LAST_BREATH_S: after
# it was killed.
_LAST_WORDS_S, _OTHERS_S, _SOON_S, _LAST_BREATH_S = 120, 30, 5, 1

_OF_TORCH = "TORCHELASTIC_SIGNALS_TO_HANDLE"
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
# Exit codes of ranks that have only lost another rank.
_LEFT = (LostRank.code, -signal.SIGTERM)

Failures = Mapping[int, ProcessFailure]


def launch(
    command: Sequence[str],
    nodes: Nodes,
    restarts: int,
    facts: Mapping[str, str],
    *,
    wait_s: float = WAIT_S,
    timeout_s: float = TIMEOUT_S,
) -> int:
    """Run a command as the ranks of this node, until all have ended."""
    rendezvous = Rendezvous(nodes, facts, wait_s=wait_s, silent_s=min(timeout_s, _SILENT_S))
    try:
        result = run_ranks(command, rendezvous, restarts)
    except SignalException as stop:
        return 128 + int(stop.sigval)
    return _exit_code(result.failures, rendezvous.silent()) if result.is_failed() else 0


def run_ranks(
    command: Sequence[str],
    rendezvous: Rendezvous,
    restarts: int,
    logs: LogsSpecs | None = None,
) -> RunResult:
    """Meet the other nodes, then run a command as the ranks of this one until all have ended.

    Args:
        logs: destination of the ranks' output; None for that of this process.

    Raises:
        WorldError: the nodes do not meet, or lose each other.
        SignalException: a stop signal came; the ranks got it too, and have ended.
    """
    os.environ[STARTED_BY] = str(os.getpid())
    with _quiet(), _stop_signals(), ExitStack() as held:
        rendezvous.open()
        held.enter_context(_variables_for_ranks(rendezvous))
        spec = WorkerSpec(
            role="flatout",
            local_world_size=rendezvous.nodes.here,
            entrypoint=command[0],
            # torch replaces ${local_rank} in arguments; these are passed to the script unchanged
            args=tuple(argument.replace("$", "$$") for argument in command[1:]),
            rdzv_handler=rendezvous,
            max_restarts=restarts,
            monitor_interval=_LOOK_EVERY_S,
        )
        agent = _Agent(spec, rendezvous, logs or DefaultLogsSpecs(log_dir=os.devnull))
        try:
            result: RunResult = agent.run()
        except WorldError as error:
            rendezvous.end(error.what)
            raise
        except BaseException as error:
            agent.kill()  # ends what is left if a second signal has cut the end short
            rendezvous.end(f"was stopped ({error})")
            raise
        if result.is_failed():
            rendezvous.end(_ended(*first_failure(result.failures)))
        rendezvous.shutdown()
        return result


@contextmanager
def _variables_for_ranks(rendezvous: Rendezvous) -> Iterator[None]:
    interface = rendezvous.interface()
    given = {} if interface is None else dict.fromkeys(INTERFACES, interface)
    with ExitStack() as held:
        own: dict[str, str] = {}
        if rendezvous.nodes.count == 1:
            given |= {secret.VARIABLE: secret.new_secret()}
            own = held.enter_context(own_files(rendezvous.store_port))
        before = {name: os.environ.get(name) for name in (*given, *own)}
        os.environ.update({n: value for n, value in given.items() if not before[n]} | own)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


@contextmanager
def _quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def _stop_signals() -> Iterator[None]:
    def stop(signum: int, frame: object) -> None:
        raise SignalException(f"signal {signum}", sigval=signal.Signals(signum))

    if threading.current_thread() is not threading.main_thread():
        yield  # Python allows no handlers in this thread
        return
    heeded = not_ignored(*_STOPS, signal.SIGQUIT)
    # Torch's agent sets handlers too, even for signals that this process ignores.
    asked = os.environ.get(_OF_TORCH)
    os.environ[_OF_TORCH] = ",".join(n.name for n in heeded if n != signal.SIGUSR1)
    before = {signum: signal.signal(signum, stop) for signum in heeded}
    try:
        yield
    finally:
        os.environ.pop(_OF_TORCH)
        if asked is not None:
            os.environ[_OF_TORCH] = asked
        for signum, handler in before.items():
            signal.signal(signum, handler)


class _Agent(LocalElasticAgent):
    """Restarts ranks only if one was killed, not if its own error ended it.

    All nodes count the starts equally, on whichever node the killed rank was.
    """

    def __init__(self, spec: WorkerSpec, rendezvous: Rendezvous, logs: LogsSpecs) -> None:
        super().__init__(spec, logs_specs=logs)
        self._shutdown_timeout = _LAST_WORDS_S
        self._nodes = rendezvous
        # Ranks of this node that this agent has ended, because another rank has failed.
        self._ended_here: set[int] = set()
        # Ranks of this node that were killed, and without which the others continue.
        self._dropped: set[int] = set()
        # _started: ranks that were restarted alone, and the number of times that ranks had been
        # taken back before. _more: number of further restarts.
        self._started: dict[int, int] = {}
        self._more = spec.max_restarts
        self._has_stopped = False

    def kill(self) -> None:
        self._shutdown(signal.SIGKILL, _SOON_S)

    def _shutdown(
        self,
        death_sig: signal.Signals = signal.SIGTERM,
        timeout: int | None = None,
        **_: object,
    ) -> None:
        # Agents of torch 2.11 and 2.12 have no option for this wait.
        if self._pcontext is not None:
            self._pcontext.close(death_sig, self._shutdown_timeout if timeout is None else timeout)
        super()._shutdown(death_sig)

    def _invoke_run(self, role: str = "default") -> RunResult:
        try:
            result: RunResult = super()._invoke_run(role)
            return result
        except SignalException as stop:
            self._nodes.report_stop(int(stop.sigval))
            raise
        except WorldError:
            # Ranks that have lost another node cannot agree on a last checkpoint.
            self._shutdown_timeout = _SOON_S
            raise

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        self._ended_here, self._dropped, self._started = set(), set(), {}
        self._remaining_restarts = worker_group.spec.max_restarts - self._nodes.rounds + 1

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._take_stop()
        if not self._is_over():
            return RunResult(WorkerState.HEALTHY)
        result: RunResult = self._without_dropped(super()._monitor_workers(worker_group))
        if result.state == WorkerState.SUCCEEDED and not self._nodes.finished():
            return RunResult(WorkerState.HEALTHY)  # another node may request a restart of all
        if not result.is_failed():
            return result
        self._note_own_kills(result)
        killed = [rank for rank, failure in result.failures.items() if _was_killed(failure)]
        if killed and self._remaining_restarts > 0:
            words = _ended(killed[0], result.failures[killed[0]])
            say(f"{words}; all ranks start again ({self._remaining_restarts} times at most)")
        elif not killed and not self._lost_one_that_waits(result):
            again = self._another_node_starts_again(result)
            self._remaining_restarts = self._remaining_restarts if again else 0
        return result

    def _take_stop(self) -> None:
        ranks, signum = self._pcontext, self._nodes.stop
        if signum and not self._has_stopped and isinstance(ranks, SubprocessContext):
            self._has_stopped = True
            ranks.subprocess_handlers[0].proc.send_signal(signum)

    def _lost_one_that_waits(self, result: RunResult) -> bool:
        if any(failure.exitcode not in _LEFT for failure in result.failures.values()):
            return False
        return bool(self._waiting())

    def _without_dropped(self, result: RunResult) -> RunResult:
        here = {self._global(local) for local in self._dropped}
        others = {rank: failure for rank, failure in result.failures.items() if rank not in here}
        if not here or (others and all(value.exitcode in _LEFT for value in others.values())):
            return result
        if others:
            return RunResult(WorkerState.FAILED, failures=others)
        if not result.is_failed():
            return result
        ranks = [worker.global_rank for worker in self._worker_group.workers]
        return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))

    def _global(self, local_rank: int) -> int:
        return int(self._worker_group.workers[local_rank].global_rank)

    def _note_own_kills(self, result: RunResult) -> None:
        first = [
            failure
            for failure in result.failures.values()
            if failure.local_rank not in self._ended_here
        ]
        for rank, failure in result.failures.items():
            if failure.local_rank in self._ended_here and _was_killed(failure):
                failure.exitcode = -signal.SIGTERM
                if all(other.exitcode in _LEFT for other in first):
                    say(
                        f"rank {rank} (process {failure.pid}) hung, "
                        "and did not end on SIGTERM either"
                    )

    def _another_node_starts_again(self, result: RunResult) -> bool:
        if any(failure.exitcode not in _LEFT for failure in result.failures.values()):
            return False
        until = time.monotonic() + _LAST_WORDS_S / 4
        while self._nodes.nodes.count > 1 and time.monotonic() < until:
            if self._nodes.num_nodes_waiting() > 0:
                return True
            if self._nodes.silent():
                break
            time.sleep(_LOOK_EVERY_S)
        return False

    def _is_over(self) -> bool:
        ranks = self._pcontext
        if not isinstance(ranks, SubprocessContext):
            return True
        codes = {rank: value.proc.poll() for rank, value in ranks.subprocess_handlers.items()}
        running = {rank for rank, code in codes.items() if code is None}
        self._drop(codes, ranks)
        if not any(code for rank, code in codes.items() if rank not in self._dropped):
            self._end_who_waits(running, ranks)
        codes = {rank: value.proc.poll() for rank, value in ranks.subprocess_handlers.items()}
        running = {rank for rank, code in codes.items() if code is None}
        failed = [code for rank, code in codes.items() if code and rank not in self._dropped]
        if failed and running:
            self._ended_here = running
            # After a kill the current step of the other ranks is lost, so no rank may delay the
            # restart.
            killed, lost = any(map(_is_kill, failed)), all(code in _LEFT for code in failed)
            patience = _LAST_BREATH_S if killed else _SOON_S if lost else _OTHERS_S
            ranks.close(signal.SIGTERM, timeout=patience)
        return bool(failed) or not running

    def _drop(self, codes: Mapping[int, int | None], ranks: SubprocessContext) -> None:
        killed = [n for n, code in codes.items() if code and _is_kill(code)]
        killed = [local for local in killed if local not in self._dropped]
        if not killed or self._ended_here:
            return
        pids, nodes = ranks.pids(), self._nodes
        for local in killed:
            rank = self._global(local)
            try:
                store = store_of_agent(nodes.store_port, nodes.nodes.count, nodes.rounds)
            except RuntimeError:
                return
            if not drops(rank, store):
                continue
            self._dropped.add(local)
            self._started.pop(local, None)
            words = f"rank {rank} (process {pids[local]}) was killed by "
            words += f"{signal.Signals(-(codes[local] or 0)).name}; the others go on"
            others = {n for n, code in codes.items() if code is None} - self._waiting()
            if others and self._more > 0:
                self._start_again(local, ranks)
                self._started[local] = times_of(store)
                words += f", and it starts again ({self._more} times at most)"
                self._more -= 1
            say(words)

    def _start_again(self, local: int, ranks: SubprocessContext) -> None:
        handler = get_subprocess_handler(
            entrypoint=str(ranks.entrypoint),
            args=ranks.args[local],
            env={**ranks.envs[local], COMES_BACK: "1"},
            stdout=ranks.stdouts[local],
            stderr=ranks.stderrs[local],
            local_rank_id=local,
        )
        ranks.subprocess_handlers[local] = handler
        self._worker_group.workers[local].id = handler.proc.pid
        self._dropped.discard(local)

    def _waiting(self) -> set[int]:
        if not self._started:
            return set()
        nodes = self._nodes
        try:
            store = store_of_agent(nodes.store_port, nodes.nodes.count, nodes.rounds)
            times = times_of(store)
        except RuntimeError:
            return set()
        return {local for local, before in self._started.items() if times == before}

    def _end_who_waits(self, running: set[int], ranks: SubprocessContext) -> None:
        if not running or running - {*self._started}:
            return
        waiting = self._waiting() & running
        if waiting == running:
            for local in waiting:
                ranks.subprocess_handlers[local].close(signal.SIGKILL)
                ranks.subprocess_handlers[local].proc.wait()
            self._dropped |= waiting


def _was_killed(failure: ProcessFailure) -> bool:
    return _is_kill(failure.exitcode)


def _is_kill(code: int) -> bool:
    return code < 0 and -code not in (signal.SIGTERM, signal.SIGINT)


def first_failure(failures: Failures) -> tuple[int, ProcessFailure]:
    """Return the rank that failed first, and its failure, not one that only lost another rank."""
    culprits = {
        rank: failure for rank, failure in failures.items() if failure.exitcode not in _LEFT
    }
    among = culprits or failures

    def order(rank: int) -> tuple[bool, bool, int, int]:
        failure = among[rank]
        # A failure that the agent caused itself says least.
        return (
            not _was_killed(failure),
            failure.exitcode == -signal.SIGTERM,
            failure.timestamp,
            rank,
        )

    rank = min(among, key=order)
    return rank, among[rank]


def _exit_code(failures: Failures, silent: str) -> int:
    rank, failure = first_failure(failures)
    elsewhere = f"; {silent}" if silent and failure.exitcode in _LEFT else ""
    say(f"{_ended(rank, failure)}; all ranks have ended{elsewhere}")
    code = int(failure.exitcode)
    return code if code > 0 else 128 - code


def _ended(rank: int, failure: ProcessFailure) -> str:
    code = int(failure.exitcode)
    if code == LostRank.code:
        how = "has lost another rank"
    elif code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    elif code - 128 in _STOPS:
        how = f"was stopped by {signal.Signals(code - 128).name}"
    else:
        how = f"has ended with exit code {code}"
    return f"rank {rank} (process {failure.pid}) {how}"
