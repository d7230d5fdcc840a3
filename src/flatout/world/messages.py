"""Messages between ranks other than sums: plain values as JSON and tensors, never as pickle.

A message with a value has 8 bytes with the length of its head, the head as JSON, and the tensors'
bytes. The head holds the value without its tensors, and their names, dtypes and shapes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flatout.errors import CheckpointError, WorldError

if TYPE_CHECKING:
    import torch

_LENGTH = 8


def pack(value: Any, what: str = "") -> torch.Tensor:
    """Return a value as bytes: uint8 of shape (bytes,), on the CPU."""
    import torch

    from flatout.values import flat_bytes, flatten

    try:
        tensors, tree = flatten(value, "value")
    except CheckpointError as error:
        raise WorldError(
            f"ranks exchange plain data and tensors: {error.what.replace('store', 'send')}",
            where=error.where,
            do=error.do,
        ) from error
    rows = [
        [name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()
    ]
    head = json.dumps({"value": tree, "tensors": rows, "what": what}).encode()
    start = bytearray(len(head).to_bytes(_LENGTH, "little") + head)
    parts = [flat_bytes(tensor).cpu() for tensor in tensors.values()]
    return torch.cat([torch.frombuffer(start, dtype=torch.uint8), *parts])


def unpack(message: torch.Tensor, what: str = "") -> Any:
    """Return the value that `pack` took; its tensors are on the CPU.

    Args:
        message: the result of `pack`, shape (bytes,), uint8, on the CPU.
        what: name of the collective that this rank is in.

    Raises:
        WorldError: the bytes are no message, or the message is for another collective.
    """
    import torch

    from flatout.values import unflatten

    try:
        length = int.from_bytes(message[:_LENGTH].numpy().tobytes(), "little")
        at = _LENGTH + length
        if at > len(message):
            raise ValueError(f"a head of {length} bytes")
        head = json.loads(message[_LENGTH:at].numpy().tobytes())
        tensors = {}
        for name, word, shape in head["tensors"]:
            dtype = getattr(torch, word, None)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{word!r} is no dtype")
            tensor = torch.empty(shape, dtype=dtype)
            here = message[at : at + tensor.nbytes]
            tensor.reshape(-1).view(torch.uint8).copy_(here)
            at += tensor.nbytes
            tensors[name] = tensor
        value, there = unflatten(tensors, head["value"]), head["what"]
    except (CheckpointError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise WorldError(
            f"what another rank has sent is no message of Flatout's: {error}",
            do="run the same version of Flatout on all nodes, and see who else reaches their ports",
        ) from error
    if there != what:
        raise WorldError(
            f"ranks are in different collectives: this rank in {what or 'one without a name'!r}, "
            f"another rank in {there or 'one without a name'!r}",
            do="make the script call Flatout in the same order on every rank",
        )
    return value


def gather(value: Any, size: int, channel: Any = None, what: str = "") -> list[Any]:
    import torch
    import torch.distributed as dist

    device = _device(channel)
    own = pack(value, what)
    lengths = torch.zeros(size, dtype=torch.int64, device=device)
    each = [lengths[rank : rank + 1] for rank in range(size)]
    dist.all_gather(each, torch.tensor([len(own)], device=device), group=channel)
    counts = lengths.tolist()
    padded = torch.zeros(max(counts), dtype=torch.uint8, device=device)
    padded[: len(own)] = own
    result = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(result, padded, group=channel)
    return [unpack(item[:count].cpu(), what) for item, count in zip(result, counts, strict=True)]


def exchange(
    note: Sequence[int],
    parts: Sequence[Sequence[torch.Tensor]],
    lengths: Sequence[int] | None = None,
    channel: Any = None,
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Exchange like `World.exchange`, on a channel of torch's; None is that of all ranks."""
    import torch
    import torch.distributed as dist

    own = [joined(part) for part in parts]
    sizes, size = [len(part) for part in own], len(parts)
    notes: list[list[int]] = []
    if lengths is None:
        header = torch.tensor([*note, *sizes])
        result = [torch.empty_like(header) for _ in parts]
        dist.all_gather(result, header, group=channel)
        each = torch.stack(result)
        notes = each[:, :-size].tolist()
        counts = each[:, -size:]
        if not counts.any():
            return notes, [own[0][:0]] * size
        lengths = counts[:, dist.get_rank()].tolist()
    come = torch.empty(sum(lengths), dtype=torch.uint8)
    dist.all_to_all_single(come, torch.cat(own), list(lengths), sizes, group=channel)
    return notes, list(torch.split(come, list(lengths)))


def to_eight(size: int) -> int:
    """Round a number of bytes up to the next multiple of 8."""
    return -(-size // 8) * 8


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of tensors, each of which begins at a multiple of 8."""
    import torch

    pieces = []
    for tensor in tensors:
        # A single number is contiguous with any stride, but some strides allow no view as bytes.
        flat = tensor.as_strided((tensor.numel(),), (1,))
        pieces.append(flat.view(torch.uint8))
        if rest := to_eight(tensor.nbytes) - tensor.nbytes:
            pieces.append(torch.zeros(rest, dtype=torch.uint8))
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)


def from_rank(value: Any, source: int, own: int, what: str = "") -> Any:
    import torch
    import torch.distributed as dist

    device = _device(None)
    is_own = own == source
    message = pack(value, what).to(device) if is_own else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([len(message)], device=device)
    dist.broadcast(length, src=source)
    if not is_own:
        message = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(message, src=source)
    return value if is_own else unpack(message.cpu(), what)


def _device(channel: Any) -> str:
    import torch.distributed as dist

    return "cuda" if dist.get_backend(channel) == "nccl" else "cpu"
