"""The collectives of a job's ranks, on torch.distributed. One rank is a World too.

torch is imported when ranks join, so that a command may ask where it stands without it.
"""

from __future__ import annotations

import atexit
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from time import perf_counter_ns as clock
from typing import TYPE_CHECKING, Any, NamedTuple

from flatout import errors
from flatout.errors import FlatoutError, WorldError
from flatout.world import dropped, gloo_threads, messages
from flatout.world.barrier import Group
from flatout.world.collective_log import APART, CollectiveLog, Waiting
from flatout.world.network import INTERFACES, interface_of, source_address
from flatout.world.place import ALONE, Place, place, restarts
from flatout.world.secret import check_channel
from flatout.world.stores import connect, open_store
from flatout.world.watch import RankWatch

if TYPE_CHECKING:
    import torch

    from flatout.world.mailbox import Mailbox

# How long a rank waits for the others to come at the start.
_PATIENCE = timedelta(minutes=10)
# How long one that comes back waits until they take it back: its agent ends it where they do not.
_RETURNING = timedelta(days=30)

TIMEOUT_S = 600
"""The time limit of a collective in seconds, where no one sets another."""

HANG_S = 30
"""After how long in a collective it says who is missing, in seconds, if no one says."""


class LostRank(WorldError, SystemExit):
    """Another rank has ended, or does not answer; this one leaves with its own code.

    Args:
        what: happened.
        is_told: whether the other one has been named: it has nothing to say itself.
    """

    code = 75

    def __init__(self, what: str, *, is_told: bool = False) -> None:
        super().__init__(what)
        self.is_told = is_told


class PendingCollective(NamedTuple):
    """A collective that has begun: `World.until` waits for its end.

    Attributes:
        work: torch's.
        number: of the collective on this rank.
    """

    work: Any
    number: int

    def wait(self) -> None:
        """Wait in a thread beside the rank's own, of which no one takes note."""
        self.work.wait()


_shares_gpus = False  # in the channel that is open


class World:
    """The ranks of a job.

    Every rank must call each collective, in the same order. Each takes words for what it is for:
    they are told where a rank does not come to it.

    Args:
        place: of this rank.
        timeout_s: how long a collective may take, in seconds.
        device: where tensors lie that ranks add up, such as "cpu" or "cuda:0".

    Attributes:
        rank: of this process, from 0.
        size: how many ranks there are.
        ids: of each rank the number by which it was started.
        place: with nodes and local ranks, as they were started.
        collectives: the collectives so far.
        shares_gpus: whether two ranks have one GPU: then gloo adds up, for NCCL refuses that.
    """

    def __init__(self, place: Place, timeout_s: float = TIMEOUT_S, *, device: str = "cpu") -> None:
        self.place, self.device = place, device
        self.timeout_s = timeout_s
        self.collectives = CollectiveLog()
        self.rank = place.rank
        self.size = place.world_size
        self.ids = tuple(range(place.world_size))
        self.shares_gpus = _shares_gpus

    @property
    def is_first(self) -> bool:
        """True if this rank is the one that prints and writes for all."""
        return self.rank == 0

    def sum(
        self, tensor: torch.Tensor, what: str = "", *, later: bool = False
    ) -> PendingCollective | None:
        """Add up a tensor of all ranks, in place.

        Args:
            tensor: of the same shape and dtype on every rank.
            what: it is for.
            later: return something to wait for with `until`, at once.
        """
        if self.size == 1:
            return None
        import torch.distributed as dist

        number = self.collectives.begin(what)
        with _together(self, number):
            work = dist.all_reduce(tensor, async_op=later)
        return PendingCollective(work, number) if later else None

    def begun(self, work: Any, what: str) -> PendingCollective:
        """Take note of what all ranks have begun together, to wait for it with `until`.

        Args:
            work: has a `wait()`.
            what: it is for.
        """
        return PendingCollective(work, self.collectives.begin(what))

    def until(self, later: PendingCollective) -> None:
        """Wait for what was begun."""
        with _together(self, later.number):
            later.work.wait()

    def until_done(self, later: PendingCollective) -> None:
        """Wait for what was begun, on the host too: NCCL lets the GPU alone wait.

        So a rank that does not come is named, and waiting for it counts as such.
        """
        with _together(self, later.number):
            later.work.wait()
            if self.device.startswith("cuda"):
                import torch

                torch.cuda.current_stream(self.device).synchronize()

    def within(self, later: PendingCollective) -> AbstractContextManager[None]:
        """Mark the block as part of a collective: on a GPU reading a sum is what waits."""
        return _together(self, later.number)

    @contextmanager
    def waiting_apart(self) -> Iterator[None]:
        """Mark a wait of a rank that steps apart; the wait is no collective.

        If the wait is too long, the ranks that do not go on are named, as in a collective.

        Raises:
            LostRank: a channel failed within the block; the error names the rank at fault if known.
        """
        log = self.collectives
        outer = log.waiting
        log.waiting = outer or Waiting(APART, clock())
        try:
            yield
        except RuntimeError as error:
            log.is_lost = True
            blame = "" if _watch is None else _watch.blame()
            if not blame or isinstance(error, LostRank):
                raise
            raise LostRank(f"{blame} ({error})", is_told=True) from error
        finally:
            log.waiting = outer

    def gather(self, value: Any, what: str = "") -> list[Any]:
        """Every rank's value, by rank; its tensors come back on the CPU.

        Args:
            value: plain data, numpy arrays and tensors, as `flatout.values.tree.flatten` takes.
            what: it is for.

        Raises:
            WorldError: the value holds something else.
        """
        if self.size == 1:
            return [value]
        with _together(self, self.collectives.begin(what)):
            return messages.gather(value, self.size, what=what)

    def gather_tensors(
        self, tensor: torch.Tensor, what: str = "", *, by_message: bool = False
    ) -> list[torch.Tensor]:
        """Every rank's tensor, by rank, in one collective.

        Args:
            tensor: contiguous, of the same shape and dtype on every rank, where ranks add up.
            what: it is for.
            by_message: as ranks send, even where they share memory.
        """
        if self.size == 1:
            return [tensor]
        import torch
        import torch.distributed as dist

        mailbox = self._mailbox() if tensor.is_cpu and not by_message else None
        with _together(self, self.collectives.begin(what)):
            if mailbox is not None:
                return [one.clone() for one in mailbox.gather(tensor)]
            gathered = [torch.empty_like(tensor) for _ in range(self.size)]
            dist.all_gather(gathered, tensor)
        return gathered

    def exchange(
        self,
        note: Sequence[int],
        parts: Sequence[Sequence[torch.Tensor]],
        what: str = "",
        *,
        lengths: Sequence[int] | None = None,
    ) -> tuple[list[list[int]], list[torch.Tensor]]:
        """Tell all ranks some numbers, and send tensors to each.

        In what comes each tensor begins at a multiple of 8 bytes.

        Args:
            note: of the same length on every rank.
            parts: by rank, on the CPU, contiguous; those for this rank too.
            what: it is for.
            lengths: of what each rank sends to this one, in bytes, where all ranks know theirs.
                Then notes need not come: None is told of them.

        Returns:
            every rank's note, and the bytes that it has sent to this one, by rank: uint8 of shape
            (bytes,), to be read before the next exchange.
        """
        if self.size == 1:
            return [list(note)], [messages.joined(parts[0])]
        mailbox = self._mailbox()
        with _together(self, self.collectives.begin(what)):
            if mailbox is not None:
                return mailbox.exchange(note, parts)
            return messages.exchange(note, parts, lengths)

    def _mailbox(self) -> Mailbox | None:
        if "mailbox" not in _shared:
            _shared["mailbox"] = None
            group = self.among(range(self.size)) if self.place.nodes == 1 else None
            if group is not None:
                from flatout.world.mailbox import mailbox_of

                with _together(self, self.collectives.begin("memory that ranks share")):
                    _shared["mailbox"] = mailbox_of(group, self.timeout_s)
        return _shared["mailbox"]

    def from_first(self, value: Any, what: str = "") -> Any:
        """Rank 0's value, on every rank; of the others it is not looked at.

        Args:
            value: as `gather` takes it.
            what: it is for.

        Raises:
            WorldError: on rank 0, the value holds something else.
        """
        return self.from_rank(value, 0, what)

    def from_rank(self, value: Any, source: int, what: str = "") -> Any:
        """One rank's value, on every rank; of the others it is not looked at.

        Args:
            value: as `gather` takes it.
            source: the rank that has it.
            what: it is for.

        Raises:
            WorldError: on that rank, the value holds something else.
        """
        if self.size == 1:
            return value
        with _together(self, self.collectives.begin(what)):
            return messages.from_rank(value, source, self.rank, what)

    def broadcast(self, tensor: torch.Tensor, source: int, what: str = "") -> None:
        """Write one rank's tensor into that of every rank.

        Args:
            tensor: contiguous, of the same shape and dtype on every rank, where ranks add up.
            source: the rank that has it.
            what: it is for.
        """
        if self.size == 1:
            return
        import torch.distributed as dist

        with _together(self, self.collectives.begin(what)):
            dist.broadcast(tensor, src=source)

    def by_first(self, do: Callable[[], Any], what: str = "") -> Any:
        """Return the result of `do` on rank 0, on every rank; where it raises there, all ranks do.

        Args:
            do: what only rank 0 runs, and gives something as `gather` takes it.
            what: it is for.
        """
        result = failed = None
        try:
            result = do() if self.is_first else None
        except Exception as error:
            failed = error
        failure, result = self.from_first([_error_parts(failed), result], what)
        if failed is not None:
            raise failed
        if failure is not None:
            kind, words, where, advice = failure
            raise getattr(errors, kind, FlatoutError)(words, where=where, do=advice)
        return result

    def wait(self, what: str = "") -> None:
        """Until all ranks have come here."""
        self.gather(None, what)

    def count_points(self) -> None:
        """Let all ranks count the points of `all_ask` from the same number on; all call it."""
        counts = self.gather(self.collectives.passed, "points passed")
        self.collectives.passed = max(counts)

    def all_ask(self, asks: bool) -> bool:
        """Return True if all ranks ask for the same at a point that each of them passes.

        All call it at the same points. There is no collective: one that does not ask goes on at
        once, and one that does waits until all do, or until the watch of another tells that it has
        gone on, which takes a tenth of `patience_s`, and 5 seconds at most.

        Args:
            asks: whether this rank does.

        Returns:
            the same to all that ask; False to the others.
        """
        if self.size == 1:
            return asks
        all_do = asks and _watch is not None and _watch.all_ask()
        self.collectives.passed += 1
        return all_do

    def among(self, *parts: Sequence[int], user: str = "") -> Group | None:
        """Its own channel for each part of the ranks; that of this rank's part, if any.

        All ranks call it, with the same parts. It is made once, for each user by itself: what two
        threads do on one channel would get mixed up.
        """
        sets = tuple(tuple(part) for part in parts)
        known = (user, sets)
        if known not in _groups:
            import torch.distributed as dist

            number = self.collectives.begin("channels among parts of the ranks")
            timeout = timedelta(seconds=self.timeout_s)
            with _together(self, number):
                made = [dist.new_group(list(part), timeout=timeout) for part in sets]
                own = [pair for pair in zip(sets, made, strict=True) if self.rank in pair[0]]
                for part, one in own:  # which may number its ranks in another order
                    check_channel(one.rank(), len(part), one)
            _groups[known] = next((Group(p, p.index(self.rank), one) for p, one in own), None)
        return _groups[known]

    def go_on_with(self, ids: Sequence[int]) -> None:
        """Leave out ranks that have ended; channels among parts of the ranks end, too.

        Those that stay call it, where an agent keeps the store. They keep their order.

        Args:
            ids: of those that stay, as in `ids`.
        """
        own = self.ids[self.rank]
        _close_channels()
        if _watch is not None:
            _watch.watch_only(ids)
        self.ids = tuple(ids)
        self.rank, self.size = self.ids.index(own), len(self.ids)
        if self.size == 1:
            return
        timeout = timedelta(seconds=self.timeout_s)
        with _together(self, self.collectives.begin("channel of the ranks that go on")):
            name = f"{dropped.meeting()}-with-{'-'.join(map(str, ids))}"
            store = _store_of(connect(self.place, timeout), name)
            _open_channel(store, self.rank, self.size, self.device, timeout)

    def take_back(self) -> None:
        """Meet all ranks that were started, also those that were left out, which wait for it."""
        _close_channels()
        self.ids = tuple(range(self.place.world_size))
        self.rank, self.size = self.place.rank, self.place.world_size
        self.collectives.restart()
        if _watch is not None:
            _watch.watch_only(self.ids)
        _meet(self.place, self.device, timedelta(seconds=self.timeout_s), dropped.meeting())
        dropped.have_met()

    def store(self, name: str) -> Any:
        """The ranks' common store of keys and bytes (torch's), on its own connection.

        So a thread may use it while others use theirs.

        Args:
            name: what the keys are for; other names have other keys.
        """
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store

        return dist.PrefixStore(name, _get_default_store().clone())  # type: ignore[attr-defined]

    def part(self, count: int) -> tuple[int, int]:
        """Which of `count` things in order are this rank's: from the first to before the second."""
        return count * self.rank // self.size, count * (self.rank + 1) // self.size

    def __str__(self) -> str:
        return str(self.place)


def _error_parts(error: Exception | None) -> list[str | None] | None:
    if error is None:
        return None
    if isinstance(error, FlatoutError):
        return [type(error).__name__, error.what, error.where, error.do]
    return ["", f"{type(error).__name__}: {error}", "rank 0", None]


@contextmanager
def _together(world: World, number: int) -> Iterator[None]:
    log = world.collectives
    outer, began = log.waiting, clock()
    log.waiting = Waiting(number, began)
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, WorldError):
            raise
        log.is_lost = True
        # Without the place in gloo's source, and its advice.
        words = re.sub(r"^\[[^\]]*\] *", "", str(error).split("\n")[0]).split(". ")[0].strip()
        blame = "" if _watch is None else _watch.blame()
        raise LostRank(
            f"{blame or 'another rank has ended or does not answer'} ({words})", is_told=bool(blame)
        ) from error
    finally:
        log.waiting = outer
        if outer is None:
            log.waited += clock() - began


ONE = World(ALONE)
"""A job of one rank."""

_joined: World | None = None
_groups: dict[tuple[str, tuple[tuple[int, ...], ...]], Group | None] = {}
_watch: RankWatch | None = None
_shared: dict[str, Mailbox | None] = {}  # once it was looked for


def join(device: str = "cpu", timeout_s: float = TIMEOUT_S, patience_s: float = HANG_S) -> World:
    """The World of this process: with the ranks beside it that a launcher has started, if any.

    Args:
        device: where tensors lie that ranks add up, such as "cpu" or "cuda:0", which is the
            current one.
        timeout_s: how long a collective may take, in seconds.
        patience_s: after how long in one a rank says who is missing, in seconds.

    Raises:
        WorldError: the others do not come, or what the launcher says makes no sense.
    """
    global _joined, _watch
    if _joined is not None:
        return _joined
    here = place()
    if here.world_size == 1:
        return ONE
    import torch.distributed as dist

    if not dist.is_initialized():
        timeout = timedelta(seconds=timeout_s)
        if dropped.comes_back():
            _meet(here, device, timeout, dropped.register_return(here.rank), _RETURNING)
            dropped.have_met()
        else:
            _meet(here, device, timeout)
        atexit.register(leave)
    _joined = World(here, timeout_s, device=device)
    _watch = RankWatch(here, _joined.collectives, patience_s)
    _watch.start()
    atexit.register(_watch.stop)
    return _joined


def is_first_to_fail() -> bool:
    """Return True if no other rank is known to have failed before this one."""
    return _watch is None or _watch.is_first_to_fail()


def leave() -> None:
    """End this process' part in the World; ranks that go on without it will fail."""
    global _joined, _watch
    if _watch is not None:
        _watch.stop()
        _watch = None
    _close_channels()
    _joined = None


def _close_channels() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
        gloo_threads.wait_until_idle()
    _groups.clear()
    for mailbox in filter(None, _shared.values()):
        mailbox.close()
    _shared.clear()


def _open_channel(store: Any, rank: int, size: int, device: str, timeout: timedelta) -> None:
    global _shares_gpus
    import torch.distributed as dist

    gpus = _gpus(store, rank, size, device)
    _shares_gpus = len({*gpus}) < len(gpus)
    # gloo by itself takes CUDA's tensors, too.
    backend = "cpu:gloo,cuda:nccl" if gpus and not _shares_gpus else "gloo"
    dist.init_process_group(backend, store=store, world_size=size, rank=rank, timeout=timeout)
    check_channel(rank, size)


def _gpus(store: Any, rank: int, size: int, device: str) -> list[str]:
    own = ""
    if device.startswith("cuda"):
        import torch

        own = str(torch.cuda.get_device_properties(device).uuid)
    store.set(f"gpu-{rank}", own)
    each = [one.decode() for one in store.multi_get([f"gpu-{n}" for n in range(size)])]
    if any(each) and not all(each):
        other = next(n for n, gpu in enumerate(each) if gpu)
        raise WorldError(
            f"rank {each.index('')} runs on a CPU, and rank {other} on a GPU",
            do="--set world.device=cpu, or see why there is no GPU: flatout doctor on that node",
        )
    return each if any(each) else []


def _store_of(store: Any, name: str = "") -> Any:
    import torch.distributed as dist

    prefix = "-".join(("flatout", str(restarts()), *([name] if name else [])))
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


def _meet(
    here: Place, device: str, timeout: timedelta, again: str = "", patience: timedelta = _PATIENCE
) -> None:
    try:
        store = _store_of(open_store(here, _PATIENCE), again)
        _all_here(store, here, patience)
        if INTERFACES[0] not in os.environ and (name := _interface(store, here)):
            for variable in INTERFACES:
                os.environ.setdefault(variable, name)  # NCCL may have its own network
        _open_channel(store, here.rank, here.world_size, device, timeout)
    except (RuntimeError, ValueError, OSError) as error:
        if isinstance(error, WorldError):
            raise
        raise WorldError(
            f"the {here.world_size} ranks did not meet at {here.address}:{here.port}: {error}",
            where=str(here),
            do="see that every node reaches this address, that the port is free, and that as many "
            "ranks were started as the launcher says",
        ) from error


def _all_here(store: Any, here: Place, patience: timedelta) -> None:
    """Wait for the slowest rank: from then on the timeout of collectives holds."""
    if store.add("came", 1) == here.world_size:
        store.set("all", "")
    store.wait(["all"], patience)


def _interface(store: Any, here: Place) -> str | None:
    if here.nodes == 1:
        return "lo"
    own = source_address(here.address, here.port)
    if here.local_rank == 0:
        store.set(f"address-{here.node}", own)
    if here.node == 0:
        own = source_address(store.get("address-1").decode(), here.port)
    return interface_of(own)
