"""Copies of in-memory data on the GPU, from which batches are collected there.

A batch that is collected on the host costs host time and a copy in each step.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary, WeakSet

import torch

from flatout.data import ArraySource, Pipeline, Source
from flatout.measure import available_on_gpu
from flatout.recipe import Choice, Parity
from flatout.words import size_words

FIELD = "input.on_device"
# Maximum fraction of GPU memory that copied data may take. _MOST: of the device's memory.
# _MOST_FREE: of the memory that is free for this process before the first step.
_MOST, _MOST_FREE = 0.05, 0.25


def choose(asked: str, source: Source | None, device: torch.device, *, frozen: bool) -> Choice:
    """Decide whether to copy data to the device, with the reason."""

    def off(reason: str) -> Choice:
        return Choice(value="off", reason=reason, parity=Parity.EXACT)

    if device.type != "cuda":
        return off("no GPU")
    arrays = _on_host(source)
    if arrays is None:
        return off("the data are not arrays in the host's memory")
    if frozen:
        return off("features of frozen layers may be kept")
    most, taken = room(device), arrays.data.nbytes
    if asked == "auto" and taken > most:
        result = f"the data take {size_words(taken)}"
        return off(
            f"{result}, but at most {size_words(most)} of the device's memory is used for data"
        )
    return Choice(
        value="on",
        reason=f"{size_words(taken)}, batches are gathered on the device",
        parity=Parity.EXACT,
    )


def room(device: torch.device) -> int:
    """Return the bytes of GPU memory that data may take if the user did not request copies."""
    total = torch.cuda.mem_get_info(device)[1]
    return int(min(_MOST * total, _MOST_FREE * available_on_gpu(device)))


class DeviceData:
    """Copies of arrays on a device, kept as long as their sources exist.

    Attributes:
        notes: lines for the user.
    """

    def __init__(self, device: torch.device, room: int) -> None:
        self._device, self._room = device, room
        self._copies: WeakKeyDictionary[ArraySource, ArraySource] = WeakKeyDictionary()
        self._versions: WeakKeyDictionary[ArraySource, list[int]] = WeakKeyDictionary()
        self._evaluated: WeakSet[ArraySource] = WeakSet()
        self.notes: list[str] = []

    def trained_on(self, source: Source) -> Source:
        """Return the source with its data on the device; other sources are returned unchanged.

        Arrays that torch has written to since the last copy are copied again.
        """
        arrays = _on_host(source)
        return source if arrays is None else self._copy(arrays)

    def evaluated(self, source: Source) -> Source:
        """Return an evaluated source on the device, from its second use on, if there is room."""
        arrays = _on_host(source)
        if arrays is None:
            return source
        is_again = arrays in self._evaluated
        self._evaluated.add(arrays)
        taken = sum(copy.data.nbytes for copy in self._copies.values())
        if arrays in self._copies or (is_again and taken + arrays.data.nbytes <= self._room):
            return self._copy(arrays)
        return source

    def _copy(self, arrays: ArraySource) -> ArraySource:
        versions = arrays.data.versions
        if arrays not in self._copies or self._versions[arrays] != versions:
            self._versions[arrays] = versions
            try:
                self._copies[arrays] = arrays.on(self._device)
            except torch.OutOfMemoryError:
                self._copies[arrays] = arrays
                self.notes.append(
                    f"the data stay on the host: {size_words(arrays.data.nbytes)} more do not fit "
                    f"on {self._device}"
                )
        return self._copies[arrays]


def _on_host(source: Source | None) -> ArraySource | None:
    direct = source.direct if isinstance(source, Pipeline) else source
    if not isinstance(direct, ArraySource) or direct.data.device.type != "cpu":
        return None
    return direct
