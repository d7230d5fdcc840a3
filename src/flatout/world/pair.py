"""A channel between two processes, which need not be ranks of one World."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from flatout.world import messages
from flatout.world.secret import prove

if TYPE_CHECKING:
    import torch


class Pair:
    """One end of it: what is sent comes in order.

    Args:
        channel: torch's process group of two.
        own: which of the two this process is, 0 or 1; the channel may number them otherwise.
    """

    def __init__(self, channel: Any, own: int) -> None:
        self._channel, self.own = channel, own
        self._peer = 1 - channel.rank()

    def send(self, tensor: torch.Tensor) -> Any:
        """Begin to send a tensor; torch's `Work`."""
        return self._channel.send([tensor], self._peer, 0)

    def receive(self, into: torch.Tensor) -> Any:
        """Begin to receive one; likewise."""
        return self._channel.recv([into], self._peer, 0)

    def tell(self, value: Any) -> None:
        """Send a value, as `World.gather` takes it."""
        import torch

        message = messages.pack(value)
        self.send(torch.tensor([len(message)])).wait()
        self.send(message).wait()

    def hear(self) -> Any:
        """The value that the other one tells; its tensors lie on the CPU."""
        import torch

        length = torch.zeros(1, dtype=torch.int64)
        self.receive(length).wait()
        message = torch.empty(int(length), dtype=torch.uint8)
        self.receive(message).wait()
        return messages.unpack(message)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of both ends, which both call it: that of 0 first."""
        if self.own == 0:
            self.tell(value)
            return [value, self.hear()]
        other = self.hear()
        self.tell(value)
        return [other, value]


def open_pair(store: Any, own: int, timeout_s: float) -> Pair:
    """Meet another process at a store."""
    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_s)
    result = Pair(dist.ProcessGroupGloo(store, own, 2, timeout), own)
    prove(own, result.gather)
    return result


def tell_parts(pairs: Sequence[Pair], value: Any) -> None:
    """Tell several others how many bytes a value has, and each its part of them, all at once."""
    import torch

    message = messages.pack(value)
    length = torch.tensor([len(message)])
    parts = message.tensor_split(len(pairs))
    works = []
    for pair, part in zip(pairs, parts, strict=True):
        works += [pair.send(item) for item in (length, part) if len(item)]
    for work in works:
        work.wait()
