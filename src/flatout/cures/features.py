"""script.features=memory: what leading frozen layers give for a sample is kept, and given again.

A sample is known by its bytes, as a BLAKE2b digest of 16 bytes: who made the batch, and in
which order, is not asked. Before anything kept is given, some batches of it are computed as well:
layers for which a sample depends on the rest of its batch are left alone.
"""

from __future__ import annotations

from functools import partial
from hashlib import blake2b
from typing import Any
from weakref import ref

from flatout.cures.record import leave, took
from flatout.cures.roots import Call, Cure
from flatout.cures.steps import Steps
from flatout.hooks import is_anything_compiled
from flatout.measure import available_bytes
from flatout.observe import acts_in_training, frozen_parts
from flatout.world.place import place

FIELD = "script.features"
# So many batches are computed though all of them is kept.
_CHECKED = 4
# They may differ by so much of the largest number: other batches round otherwise.
_SAME = {"float32": 1e-4, "float64": 1e-8}
_SAME_IN_HALF = 2e-2
# Of the memory that is free, what the ranks of a machine may take together.
_SHARE = 0.25
_FIRST_ROWS = 256


def cure(torch: Any, steps: Steps) -> Cure:
    """What is put around the calls of root modules."""
    return keep_features


def keep_features(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> Call:
    """Keeps what the frozen leading layers of a root module give."""
    import torch

    name = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        leave(FIELD, f"{name} is compiled: its layers cannot be left out")
        return call
    parts = list(frozen_parts(module))
    if not parts:
        leave(FIELD, f"no leading layers of {name} are frozen and in eval mode")
        return call
    if any(tensor.device.type != "cpu" for tensor in module.parameters()):
        leave(FIELD, "on a device, asking which samples these are would make the host wait")
        return call
    kept = [Features(torch, part) for part in parts]

    def with_features(module: Any, /, *args: Any, **kwargs: Any) -> Any:
        opened = [one for one in kept if one.open()]
        try:
            return call(module, *args, **kwargs)
        finally:
            for one in opened:
                one.close()

    took(FIELD, f"features of {len(parts)} frozen layers of {name} in memory")
    return with_features


class Features:
    """What one frozen module has given, by sample.

    Its `forward` is another one only while its root module is called: no one copies or saves it.
    """

    def __init__(self, torch: Any, part: Any) -> None:
        self._torch = torch
        self._part = ref(part)
        self._name = type(part).__name__
        self._is_over = False
        self._state: Any = None
        self._forget()

    def _forget(self) -> None:
        self._places: dict[bytes, int] = {}
        self._rows: Any = None
        self._most = 0
        self._unchecked = _CHECKED
        self._has_come_again = False

    def open(self) -> bool:
        """Puts itself in the way, unless someone else is there."""
        part = self._part()
        if self._is_over or part is None or "forward" in vars(part) or is_anything_compiled():
            return False
        part.forward = partial(self._forward, part.forward)
        return True

    def close(self) -> None:
        """Goes out of the way."""
        vars(self._part()).pop("forward", None)

    def _forward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or not self._is_batch(args[0]) or not self._is_frozen():
            return original(*args, **kwargs)
        (batch,) = args
        samples = digests(batch)
        places = [self._places.get(sample, -1) for sample in samples]
        if -1 in places:
            given = original(batch)
            self._keep(samples, places, given)
            return given
        self._has_come_again = True
        with self._torch.inference_mode(False), self._torch.no_grad():
            kept = self._rows.index_select(0, self._torch.tensor(places))
        if not self._unchecked:
            return kept
        given = original(batch)
        self._check(given, kept)
        return given

    def _is_batch(self, value: Any) -> bool:
        torch = self._torch
        return (
            type(value) is torch.Tensor
            and value.device.type == "cpu"
            and value.layout is torch.strided
            and value.dim() > 1
            and value.numel() > 0
            and not value.requires_grad
        )

    def _is_frozen(self) -> bool:
        """Whether it is what it was; forgets what it gave where it has changed since."""
        part: Any = self._part()
        tensors = [*part.parameters(), *part.buffers()]
        if any(tensor.requires_grad or tensor.is_inference() for tensor in tensors):
            return False
        if any(acts_in_training(inner) for inner in part.modules()):
            return False
        autocast = self._torch.is_autocast_enabled("cpu")
        dtype = self._torch.get_autocast_dtype("cpu") if autocast else None
        state = [dtype, [(id(tensor), tensor._version) for tensor in tensors]]
        if state != self._state:
            self._state = state
            self._forget()
        return True

    def _keep(self, samples: list[bytes], places: list[int], given: Any) -> None:
        torch = self._torch
        if type(given) is not torch.Tensor or given.shape[:1] != (len(samples),):
            self._end(f"{self._name} gives something else than a row for each sample")
            return
        if self._rows is None:
            bytes_each = max(1, given[0].nbytes)
            room = available_bytes() * _SHARE / max(1, place().local_world_size)
            self._most = int(room) // bytes_each
            self._rows = self._room_for(given, min(_FIRST_ROWS, self._most))
        if given.shape[1:] != self._rows.shape[1:] or given.dtype != self._rows.dtype:
            return  # of another form than the first ones
        new = {sample: at for at, sample in enumerate(samples) if places[at] < 0}
        room = self._most - len(self._places)
        if room < len(new):
            self._fill_up()
        new = dict(list(new.items())[: max(0, room)])
        if not new or self._is_over:
            return
        begin = len(self._places)
        while begin + len(new) > len(self._rows):
            rows = self._room_for(given, min(2 * len(self._rows), self._most))
            rows[:begin] = self._rows[:begin]
            self._rows = rows
        with torch.inference_mode(False), torch.no_grad():
            rows = given.detach().index_select(0, torch.tensor(list(new.values())))
            self._rows[begin : begin + len(new)] = rows
        self._places |= {sample: begin + at for at, sample in enumerate(new)}

    def _room_for(self, given: Any, count: int) -> Any:
        with self._torch.inference_mode(False):
            return self._torch.empty((count, *given.shape[1:]), dtype=given.dtype)

    def _fill_up(self) -> None:
        if self._has_come_again:
            leave(FIELD, f"memory has room for {self._most:,} samples of {self._name}")
        else:
            self._end(f"none of {len(self._places):,} samples came again in {self._name}")

    def _check(self, given: Any, kept: Any) -> None:
        self._unchecked -= 1
        name = str(given.dtype).removeprefix("torch.")
        largest = float(given.abs().max())
        apart = float((given.double() - kept.double()).abs().max())
        if not apart <= _SAME.get(name, _SAME_IN_HALF) * largest:
            self._end(f"what {self._name} gives for a sample depends on the rest of its batch")

    def _end(self, why: str) -> None:
        leave(FIELD, why)
        self._is_over = True
        self._forget()


def digests(batch: Any) -> list[bytes]:
    """One for each row of a batch on the CPU, by its bytes, shape and dtype."""
    import torch

    rows = batch.detach().contiguous().reshape(len(batch), -1).view(torch.uint8).numpy()
    form = blake2b(repr((batch.dtype, tuple(batch.shape[1:]))).encode(), digest_size=16)
    found = []
    for row in rows:
        one = form.copy()
        one.update(row)
        found.append(one.digest())
    return found
