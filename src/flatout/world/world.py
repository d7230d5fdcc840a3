"""What ranks do together, on torch.distributed. One rank is a World too.

torch is imported when ranks join, so that a command may ask where it stands without it.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from flatout.errors import WorldError
from flatout.world.place import ALONE, Place, place, restarts

if TYPE_CHECKING:
    import torch

# How long a rank waits for the others: to come at the start, and in each collective.
_PATIENCE = timedelta(minutes=10)


class LostRank(WorldError, SystemExit):
    """Another rank has ended, or does not answer; this one leaves with a code of its own."""

    code = 75


class World:
    """The ranks of a job.

    Every rank must call each collective, in the same order.

    Args:
        place: of this rank.

    Attributes:
        rank: of this process, from 0.
        size: how many ranks there are.
        place: with nodes and local ranks.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.rank = place.rank
        self.size = place.world_size

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that prints and writes for all."""
        return self.rank == 0

    def sum(self, tensor: torch.Tensor, *, later: bool = False) -> Any:
        """Add up a tensor of all ranks, in place.

        Args:
            tensor: of the same shape and dtype on every rank.
            later: return something to `wait()` for at once.
        """
        if self.size == 1:
            return None
        import torch.distributed as dist

        with _together(self):
            return dist.all_reduce(tensor, async_op=later)

    def until(self, work: Any) -> None:
        """Wait for what `sum` began."""
        with _together(self):
            work.wait()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank: small things, for they are pickled."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        with _together(self):
            dist.all_gather_object(found, value)
        return found

    def from_first(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        found = [value]
        with _together(self):
            dist.broadcast_object_list(found, src=0)
        return found[0]

    def wait(self) -> None:
        """Until all ranks have come here."""
        self.gather(None)

    def store(self, name: str) -> Any:
        """The ranks' common store of keys and bytes (torch's), on a connection of its own.

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


@contextmanager
def _together(world: World) -> Iterator[None]:
    """Say who is missing in words, where a collective fails."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, WorldError):
            raise
        words = str(error).split("\n")[0].strip()
        raise LostRank(f"another rank has ended or does not answer ({words})") from error


ONE = World(ALONE)
"""A job of one rank."""

_joined: World | None = None


def join(device: str = "cpu") -> World:
    """The World of this process: with the ranks beside it that a launcher has started, if any.

    Args:
        device: "cpu" or "cuda", where tensors lie that ranks add up.

    Raises:
        WorldError: the others do not come, or what the launcher says makes no sense.
    """
    global _joined
    if _joined is not None:
        return _joined
    here = place()
    if here.world_size == 1:
        return ONE
    import torch.distributed as dist

    if not dist.is_initialized():
        _meet(here, device)
        atexit.register(leave)
    _joined = World(here)
    return _joined


def leave() -> None:
    """End this process' part in the World; ranks that go on without it will fail."""
    global _joined
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    _joined = None


def _meet(here: Place, device: str) -> None:
    import torch.distributed as dist

    if here.nodes == 1:
        # Names of hosts often lead to the wrong interface; on one node there is no question.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Where an agent has started the ranks, it keeps the store, also when they start again: what
    # earlier ranks have left in it must not be found.
    agent_keeps_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            here.address,
            here.port,
            here.world_size,
            is_master=here.rank == 0 and not agent_keeps_it,
            timeout=_PATIENCE,
        )
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            store=dist.PrefixStore(f"flatout-{restarts()}", store),  # type: ignore[attr-defined]
            world_size=here.world_size,
            rank=here.rank,
            timeout=_PATIENCE,
        )
    except (RuntimeError, ValueError) as error:
        raise WorldError(
            f"the {here.world_size} ranks did not meet at {here.address}:{here.port}: {error}",
            where=str(here),
            do="see that every node reaches this address, that the port is free, and that as many "
            "ranks were started as the launcher says",
        ) from error
