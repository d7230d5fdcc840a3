"""Checkpoints that all ranks write together: each rank writes some files into a shared folder.

    model-00001-of-00002.safetensors    the weights that this rank writes
    model.safetensors.index.json        the file of each weight, in the usual format
    state-00001-of-00002.safetensors    optimizer tensors that this rank writes, and its own state
    state-00001-of-00002.json           all other state, as in a checkpoint of one rank
    manifest.json                       written last, by the first rank, when all files are on disk

All ranks hold equal tensors, so any rank may write any tensor. Weights and optimizer state are
divided so that all ranks write about the same number of bytes. Each tensor is in one file, because
the index names one file per tensor. When a rank's files are on disk, the rank sends their checksums
to the first rank through the ranks' key-value store.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from flatout import unfinished
from flatout.errors import CheckpointError
from flatout.save.storage import Folder, Written
from flatout.world import LostRank, World

_Key = TypeVar("_Key")

_PART = re.compile(r"(model|state)-(\d{5})-of-(\d{5})\.(safetensors|json)")

# Seconds between two checks, by the first rank, whether other ranks have reported.
_LOOK_EVERY_S = 0.01
# Maximum seconds to wait for another rank's report; equal to the timeout of a collective.
_PATIENCE_S = 600.0
# Maximum seconds until a shared file system shows a new file on all nodes.
_SEEN_WITHIN_S = 5.0


class LostPiece(CheckpointError, LostRank):
    """Another rank could not write its files; the other rank raises the cause."""


class Pieces:
    """One rank's interface to checkpoints that all ranks write together.

    Args:
        world: the ranks; every rank must take part in each save.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._store = world.store("pieces")
        self._until = math.inf
        self.is_first = world.is_first

    def agree(self, claim: Callable[[], tuple[str, str]]) -> tuple[str, str]:
        """Return the names of the next checkpoint and its draft folder, from the first rank."""
        names: tuple[str, str] = self._world.by_first(claim)
        return names

    def own(
        self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], bytes | None]:
        """Return the weights and the state tensors that this rank writes, and the index.

        The index is JSON text that names the file of each weight. Only the first rank gets it.
        """
        both = (("model", weights), ("state", state))
        tensors = {(kind, name): t for kind, named in both for name, t in named.items()}
        keys_by_rank = shares(tensors, self._world.size)
        mine = keys_by_rank[self._world.rank]
        return (
            {name: weights[name] for kind, name in mine if kind == "model"},
            {name: state[name] for kind, name in mine if kind == "state"},
            self._index(weights, keys_by_rank) if self.is_first else None,
        )

    def _index(
        self, weights: Mapping[str, Tensor], keys_by_rank: list[list[tuple[str, str]]]
    ) -> bytes:
        file_by_name = {
            name: file_of("model", rank, self._world.size, "safetensors")
            for rank, keys in enumerate(keys_by_rank)
            for kind, name in keys
            if kind == "model"
        }
        total = sum(map(_bytes_of, weights.values()))
        text = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_by_name.items()))}
        return json.dumps(text, indent=1, ensure_ascii=False).encode()

    def file(self, kind: str, ending: str) -> str:
        return file_of(kind, self._world.rank, self._world.size, ending)

    def report(self, mark: str, files: Mapping[str, Written]) -> None:
        """Report to the first rank that this rank's files are on disk."""
        self._store.set(f"{mark}/{self._world.rank}", json.dumps({"files": files}))

    def report_failure(self, mark: str, error: BaseException) -> None:
        """Report to the first rank that this rank's files cannot be written."""
        self._store.set(f"{mark}/{self._world.rank}", json.dumps({"error": str(error)}))

    def collect(self, mark: str) -> dict[str, Written]:
        """Wait, as the first rank, for the reports of all other ranks, and return their files.

        Raises:
            LostPiece: a rank could not write its files, or did not report in time.
        """
        files: dict[str, Written] = {}
        # Wait for all reports before raising a failure, so that no rank is still writing then.
        heard = [(r, self._receive(f"{mark}/{r}", r)) for r in range(1, self._world.size)]
        for rank, message in heard:
            if "error" in message:
                raise LostPiece(
                    f"rank {rank} could not write its part of the checkpoint: {message['error']}"
                )
            files |= {name: Written(*written) for name, written in message["files"].items()}
        return files

    def give_up(self, after_s: float) -> None:
        """Wait at most `after_s` seconds for other ranks, because a rank has ended or failed."""
        self._until = time.monotonic() + after_s

    def _receive(self, key: str, rank: int) -> Any:
        began = time.monotonic()
        while time.monotonic() < min(self._until, began + _PATIENCE_S):
            try:
                if self._store.check([key]):
                    message = json.loads(self._store.get(key))
                    self._store.delete_key(key)
                    return message
            except RuntimeError as error:  # the process that hosts the store has ended
                raise LostPiece(f"rank {rank} cannot be heard any more: {error}") from error
            time.sleep(_LOOK_EVERY_S)
        raise LostPiece(f"rank {rank} did not write its part of the checkpoint")


def shares(tensors: Mapping[_Key, Tensor], ranks: int) -> list[list[_Key]]:
    """Return the keys of the tensors that each rank writes, so that bytes are about equal.

    The largest tensors come first; each goes to the rank with the fewest bytes so far.
    """
    names_by_rank: list[list[_Key]] = [[] for _ in range(ranks)]
    bytes_of = [0] * ranks
    for name in sorted(tensors, key=lambda name: (-_bytes_of(tensors[name]), name)):
        rank = bytes_of.index(min(bytes_of))
        names_by_rank[rank].append(name)
        bytes_of[rank] += _bytes_of(tensors[name])
    return names_by_rank


def file_of(kind: str, rank: int, ranks: int, ending: str) -> str:
    return f"{kind}-{rank + 1:05d}-of-{ranks:05d}.{ending}"


def parts(files: Sequence[str], kind: str, ending: str) -> list[str]:
    matches = map(_PART.fullmatch, sorted(files))
    return [m[0] for m in matches if m is not None and (m[1], m[4]) == (kind, ending)]


def check_shared(folder: Folder, world: World) -> None:
    """Check, before training, that all ranks use the same folder as the first rank.

    Raises:
        CheckpointError: some ranks cannot write into the folder, or do not find the first rank's
            file in it. Every rank raises the error, which names these ranks and their nodes.
    """
    marker = world.from_first(unfinished.new_name() if world.is_first else None)
    problem = ""
    if world.is_first:
        problem = _written(folder, marker)
    world.wait()
    if not problem and not _seen(folder, marker):
        problem = "it does not see what rank 0 has written there"
    if not problem and not world.is_first:
        problem = _written(folder, unfinished.new_name(), remove=True)
    problems = world.gather((world.place.node, problem))
    if world.is_first:
        folder.remove(marker)
    ranks = [f"rank {r} (node {n}): {words}" for r, (n, words) in enumerate(problems) if words]
    if ranks:
        raise CheckpointError(
            "with save.pieces=per_rank every rank writes its part into one folder, and that fails "
            "on\n  " + "\n  ".join(ranks[:5]),
            where=folder.where(),
            do="put run on a path that all nodes share, or set save.pieces=merged",
        )


def _written(folder: Folder, name: str, *, remove: bool = False) -> str:
    try:
        folder.write(name, [b"flatout"])
        if remove:
            folder.remove(name)
    except CheckpointError as error:
        return error.what
    return ""


def _seen(folder: Folder, name: str) -> bool:
    until = time.monotonic() + _SEEN_WITHIN_S
    while name not in folder.list():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
