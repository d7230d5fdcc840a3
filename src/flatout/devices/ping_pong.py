"""Finding data that leaves a device and comes back within one step.

Each such trip makes the device wait for the host twice. A TorchDispatchMode sees every operator, so
it sees the copies and what is computed from them on the host; it slows the step down about
threefold, so one step is watched, not all. What Python computes from `.item()` is not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flatout.words import memory_words

if TYPE_CHECKING:
    import torch


class PingPong(NamedTuple):
    """Data that went from a device to the host and back.

    Args:
        device: the device, such as "cuda:0".
        left: `file:line` of the user's code where it left; "the backward pass" where none ran.
        returned: the same, where it came back.
        times: how often in the step.
        bytes: what was copied back, all times together.
    """

    device: str
    left: str
    returned: str
    times: int
    bytes: int

    @property
    def words(self) -> str:
        size = memory_words(self.bytes) if self.bytes >= 2**20 else f"{self.bytes} bytes"
        often = "" if self.times == 1 else f" {self.times} times"
        return (
            f"{size} left {self.device} at {self.left} and came back at {self.returned}{often}"
            f" in one step; keep it on {self.device}"
        )


class _Departure(NamedTuple):
    """Where the data of a host tensor comes from. The storage is kept, so its key stays its own."""

    device: str
    site: str
    storage: torch.UntypedStorage


def find_ping_pong(step: Callable[[], object]) -> list[PingPong]:
    """Runs one step and returns the trips from a device to the host and back, largest first.

    The step is a real one: what it changes (weights, optimizer, random state) stays changed.
    Compiled parts run uncompiled this once.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    trips = _Trips()

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            trips.see(func.overloadpacket.__name__, args, kwargs or {}, out)
            return out

    with _uncompiled(), Watch():  # type: ignore[no-untyped-call]
        step()
    return sorted(trips.all(), key=lambda trip: -trip.bytes)


# In-place operators that do not read their first argument.
_OVERWRITING = ("copy_", "fill_", "zero_")


class _Trips:
    def __init__(self) -> None:
        self._departed: dict[tuple[str, int], _Departure] = {}
        self._found: dict[tuple[str, str, str], tuple[int, int]] = {}

    def see(self, name: str, args: Any, kwargs: dict[str, Any], outputs: Any) -> None:
        inputs = args[1:] if name in _OVERWRITING else args
        read = list(_tensors((inputs, {key: kwargs[key] for key in kwargs if key != "out"})))
        written = list(_tensors(outputs))
        known = [departure for departure in map(self._departure, read) if departure is not None]
        sources = [tensor.device for tensor in read if tensor.device.type != "cpu"]
        for tensor in written:
            if tensor.device.type != "cpu":
                self._arrived(tensor, known)
            elif sources:
                self._note(tensor, str(sources[0]), _site())
            elif known:
                self._note(tensor, known[0].device, known[0].site)
            else:
                # A reused buffer now holds other data.
                self._departed.pop(_key(tensor), None)

    def all(self) -> Iterator[PingPong]:
        for trip, (times, size) in self._found.items():
            yield PingPong(*trip, times, size)

    def _departure(self, tensor: torch.Tensor) -> _Departure | None:
        return self._departed.get(_key(tensor)) if tensor.device.type == "cpu" else None

    def _note(self, tensor: torch.Tensor, device: str, site: str) -> None:
        self._departed[_key(tensor)] = _Departure(device, site, tensor.untyped_storage())

    def _arrived(self, tensor: torch.Tensor, known: list[_Departure]) -> None:
        device = str(tensor.device)
        for departure in known:
            if departure.device == device:
                trip = (device, departure.site, _site())
                times, size = self._found.get(trip, (0, 0))
                self._found[trip] = (times + 1, size + tensor.nbytes)


def _key(tensor: torch.Tensor) -> tuple[str, int]:
    import torch

    storage = tensor.untyped_storage()
    # Only plain tensors have an address; those of tracing tools have a storage without memory.
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) and storage.data_ptr():
        return "memory", storage.data_ptr()
    return "storage", storage._cdata


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    import torch

    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided:  # others, such as sparse ones, have no storage to follow
            yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _site() -> str:
    import torch

    ours = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/", "<frozen ")
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if not frame.f_code.co_filename.startswith(ours):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return "the backward pass"


def _uncompiled() -> Any:
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    import torch

    return torch.compiler.set_stance("force_eager")
