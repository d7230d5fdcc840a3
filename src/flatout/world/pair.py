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
    """One end of a channel between two processes, which receives in order of sending.

    Args:
        own: number of this process, 0 or 1, independent of its rank in the channel.
    """

    def __init__(self, channel: Any, own: int) -> None:
        self._channel, self.own = channel, own
        self._peer = 1 - channel.rank()

    def send(self, tensor: torch.Tensor) -> Any:
        """Begin to send a tensor, and return torch's `Work`."""
        return self._channel.send([tensor], self._peer, 0)

    def receive(self, into: torch.Tensor) -> Any:
        """Begin to receive a tensor, and return torch's `Work`."""
        return self._channel.recv([into], self._peer, 0)

    def send_value(self, value: Any) -> None:
        """Send a value, as for `World.gather`."""
        import torch

        message = messages.pack(value)
        self.send(torch.tensor([len(message)])).wait()
        self.send(message).wait()

    def receive_value(self) -> Any:
        """Return the value that the other process sends; its tensors are on the CPU."""
        import torch

        length = torch.zeros(1, dtype=torch.int64)
        self.receive(length).wait()
        message = torch.empty(int(length), dtype=torch.uint8)
        self.receive(message).wait()
        return messages.unpack(message)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of both ends, that of process 0 first. Both call this."""
        if self.own == 0:
            self.send_value(value)
            return [value, self.receive_value()]
        other = self.receive_value()
        self.send_value(value)
        return [other, value]


def open_pair(store: Any, own: int, timeout_s: float) -> Pair:
    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_s)
    result = Pair(dist.ProcessGroupGloo(store, own, 2, timeout), own)
    prove(own, result.gather)
    return result


def send_parts(pairs: Sequence[Pair], value: Any) -> None:
    """Send the number of bytes of a value, and a part of them to each process, all at once."""
    import torch

    message = messages.pack(value)
    length = torch.tensor([len(message)])
    parts = message.tensor_split(len(pairs))
    works = []
    for pair, part in zip(pairs, parts, strict=True):
        works += [pair.send(item) for item in (length, part) if len(item)]
    for work in works:
        work.wait()
