"""Checkpoints of a run. Each checkpoint is a folder that is complete or absent.

    step-000000120/
        model.safetensors    the module's own keys; loads with safetensors alone
        state.safetensors    the tensors of everything else
        state.json           everything else, without its tensors
        manifest.json        sizes and checksums of the files above

If all ranks write together, each rank writes its own files in place of the first three: see
`pieces.py`.

On a local disk the folder is written under a temporary name and then renamed. In an object store
the manifest is written last. If a step is saved again, the new folder is `step-000000120.1`, and
the older folder is removed when the new one is complete. Code in a checkpoint is never executed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from flatout import __version__, unfinished
from flatout.errors import CheckpointError, RecipeError
from flatout.save import manifest as manifests
from flatout.save.manifest import MANIFEST, Manifest
from flatout.save.model_file import INDEX, MODEL, check, decode, encode, metadata_of
from flatout.save.pieces import LostPiece, Pieces, parts
from flatout.save.snapshot import Snapshot
from flatout.save.storage import Chunk, Folder, Written
from flatout.values import flatten, unflatten

# Files of a checkpoint that one rank writes: tensors and JSON of all state except the weights.
_TENSORS = "state.safetensors"
_TREE = "state.json"
_NAME = re.compile(r"step-(\d{9,})(?:\.(\d+))?")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint in memory: all tensors on the CPU.

    Attributes:
        name: name of the checkpoint's folder.
        step: number of steps done when the checkpoint was saved.
        model: the module's `state_dict`.
        state: argument `state` of `save`.
        meta: argument `meta` of `save`, with the entries `model_digest`, `torch`, `flatout` and
            `time` (UTC) added.
        score: argument `score` of `save`; None if it was None or not finite.
        own: argument `own` of `save`: one value for each rank.
        metadata: argument `metadata` of `save`.
    """

    name: str
    step: int
    model: dict[str, Any]
    state: Any
    meta: dict[str, Any]
    score: float | None
    own: list[Any] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)


class _Content(NamedTuple):
    """Content of the files that one rank writes.

    Attributes:
        weights: model tensors, by name.
        tensors: all other tensors, by name.
        trees: JSON values of all other state, by name.
        weight_map: JSON text that names the file of each weight; None if not written.
        metadata: texts for the metadata of the model file.
    """

    weights: dict[str, Tensor]
    tensors: dict[str, Tensor]
    trees: dict[str, Any]
    weight_map: bytes | None = None
    metadata: Mapping[str, str] | None = None


class Checkpoints:
    """The checkpoints in a folder.

    One rank saves the whole checkpoint, or with `pieces` all ranks save it together. Several runs
    may write to one folder: a writer only deletes checkpoints that it saved, or that existed when
    it started.

    Args:
        url: path or fsspec URL of the folder; the first write creates it.
        keep_last: number of newest checkpoints to keep, at least 1.
        keep_best: number of checkpoints with the best scores to keep in addition to the newest.
        mode: "min" if the lowest score is best, "max" if the highest score is best.
        asynchronous: whether `save` returns once the tensors are copied to CPU memory, and a
            thread writes the copy. The next save waits for that thread. The memory of the copy is
            reused by later saves.
        pieces: interface to the other ranks, if all ranks write; None if one rank writes all.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        keep_last: int = 3,
        keep_best: int = 0,
        mode: Literal["min", "max"] = "min",
        asynchronous: bool = True,
        pieces: Pieces | None = None,
    ) -> None:
        if keep_last < 1 or keep_best < 0 or mode not in ("min", "max"):
            raise RecipeError(
                "keep_last takes 1 or more, keep_best 0 or more, mode 'min' or 'max'; "
                f"found {keep_last}, {keep_best}, {mode!r}"
            )
        self.asynchronous = asynchronous
        self._keep_last, self._keep_best, self._mode = keep_last, keep_best, mode
        self._folder = Folder(url)
        self._pieces = pieces
        self._at_start = self._remove_abandoned()
        self._mine: list[str] | None = None  # oldest first; None before the first save
        self._scores: dict[str, float | None] = {}
        self._model_copy, self._state_copy = Snapshot(), Snapshot()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def check_writable(self) -> None:
        """Write and remove a test file; raise `CheckpointError` if the folder is not writable."""
        name = unfinished.new_name()
        self._folder.write(name, [b"flatout"])
        self._folder.remove(name)

    def save(
        self,
        step: int,
        model: Mapping[str, Any],
        state: Any = None,
        meta: Mapping[str, Any] | None = None,
        score: float | None = None,
        own: Sequence[Any] = (),
        replicated: Sequence[str] = (),
        metadata: Mapping[str, str] | None = None,
    ) -> str:
        """Save a checkpoint and return its name.

        An asynchronous save is complete only after `wait`.

        Args:
            step: number of steps done, 0 or more.
            model: the module's `state_dict()`.
            state: any value that `flatout.values.tree.flatten` accepts. With pieces this is a dict,
                and the first rank's dict is stored.
            meta: plain values to store in the manifest, by name.
            score: value that `keep_best` compares; a value that is not finite counts as None.
            own: state that differs between ranks: one value for each rank, or with pieces only
                this rank's value.
            replicated: keys of `state` whose values are equal on every rank; the ranks divide the
                writing of these values.
            metadata: texts to store in the model file, by name. An export copies them.

        Raises:
            CheckpointError: this save, or the asynchronous save before it, failed. Checkpoints
                that were complete before still exist.
        """
        self.wait()
        if step < 0:
            raise CheckpointError(f"a step is 0 or more, found {step}")
        described = Manifest(
            step=int(step),
            files={},
            score=float(score) if score is not None and math.isfinite(score) else None,
            meta={**(meta or {}), **_provenance(model)},
        )
        manifests.dump(described)  # so that invalid `meta` raises here, not in the thread
        if self._pieces is None:
            content = _all_of(model, state, own)
        else:
            content = _part_of(self._pieces, model, state, own, replicated)
        content = content._replace(metadata=metadata)
        if self.asynchronous:
            content = content._replace(
                weights=self._model_copy.copy(content.weights),
                tensors=self._state_copy.copy(content.tensors),
            )
        name, mark = self._claim_together(described.step)
        job = (name, mark, described, content)
        if self.asynchronous:
            # Not a daemon thread: Python then waits at its exit until the checkpoint is written.
            self._thread = threading.Thread(
                target=self._write_in_thread, args=job, name=f"flatout-save-{step}"
            )
            self._thread.start()
        else:
            self._write(*job)
        return name

    def wait(self) -> None:
        """Wait until the asynchronous save has ended.

        Raises:
            CheckpointError: the asynchronous save failed.
        """
        self._join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def give_up(self, after_s: float) -> None:
        """Wait at most `after_s` seconds for other ranks' files: a rank has ended or failed."""
        if self._pieces is not None:
            self._pieces.give_up(after_s)

    def latest(self) -> str | None:
        """Return the name of the newest complete checkpoint (highest step), or None without one.

        Only manifests and file sizes are checked here; `load` checks every byte. A newer checkpoint
        that is damaged is skipped, with a warning in the log.
        """
        self._join()
        for name in self._candidates():
            if self._manifest_if_whole(name) is not None:
                return name
        return None

    def best(self) -> str | None:
        """Return the name of the complete checkpoint with the best score, or None without a score.

        Of equal scores, the newest checkpoint counts.
        """
        self._join()
        scores = {}
        for name in self._candidates():
            manifest = self._manifest_if_whole(name)
            if manifest is not None:
                scores[name] = manifest.score
        return next(iter(self._best_first(scores)), None)

    def score(self, name: str) -> float | None:
        """Return the score of a complete checkpoint, or None if it has no score."""
        return manifests.read(self._folder.child(name)).score

    def load(self, name: str | None = None) -> LoadedCheckpoint:
        """Read a checkpoint, by default the newest, and check all its bytes.

        Raises:
            CheckpointError: the checkpoint does not exist or is damaged. If damaged, the error
                names the file, the difference, and the newest complete checkpoint before it.
        """
        self._join()
        names = self._candidates()
        if not names:
            raise CheckpointError("there is no checkpoint", where=self._folder.where())
        name = name or names[0]
        if name not in names:
            listed = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
            raise CheckpointError(
                f"there is no checkpoint {name!r}", where=self._folder.where(), do=f"load {listed}"
            )
        try:
            return _read(self._folder.child(name), name)
        except CheckpointError as error:
            older = names[names.index(name) + 1 :]
            whole = next((n for n in older if self._manifest_if_whole(n) is not None), None)
            do = f"load the previous one: {whole}" if whole else "no older one is whole; start over"
            do = f"{error.do}, or {do}" if error.do else do
            raise CheckpointError(error.what, where=error.where, do=do) from error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write_in_thread(self, *args: Any) -> None:
        try:
            self._write(*args)
        except BaseException as error:
            self._error = error
            if not isinstance(error, LostPiece):  # the other rank reports its own error
                _log.error("saving failed: %s", error)

    def _claim_together(self, step: int) -> tuple[str, str]:
        if self._pieces is None:
            return self._claim(step)
        return self._pieces.agree(lambda: self._claim(step))

    def _claim(self, step: int) -> tuple[str, str]:
        mark = unfinished.new_name()
        for name in _names(step):
            folder = self._folder.child(name)
            if self._folder.renames:
                if self._folder.make_folder(name):
                    break
            elif not folder.list():
                folder.write(mark, [b"being written"])
                if folder.list() == [mark]:
                    break
                folder.remove(mark)  # another writer took the same name at the same moment
        return name, mark

    def _write(self, name: str, mark: str, manifest: Manifest, content: _Content) -> None:
        folder = self._folder.child(mark if self._folder.renames else name)
        if self._pieces is not None and not self._pieces.is_first:
            self._write_part(folder, name, mark, content, self._pieces)
            return
        try:
            files = self._write_all(folder, name, mark, content)
            folder.write(MANIFEST, [manifests.dump(replace(manifest, files=files))])
            if self._folder.renames:
                names = itertools.chain([name], _names(manifest.step))
                name = next(n for n in names if self._folder.rename_folder(mark, n))
        except BaseException:
            with suppress(CheckpointError):
                self._remove(mark if self._folder.renames else name)
            self._folder.remove_if_empty(name)
            raise
        if not self._folder.renames:
            with suppress(CheckpointError):  # a mark that stays in a complete folder does no harm
                folder.remove(mark)
        self._keep(name, manifest.score)

    def _write_all(
        self, folder: Folder, name: str, mark: str, content: _Content
    ) -> dict[str, Written]:
        if self._pieces is None:
            return self._write_content(folder, name, content)
        try:
            files = self._write_content(folder, name, content)
        except Exception:
            # The caller removes the folder. Wait for the other ranks first: a rank that still
            # writes would fail because of the missing folder.
            with suppress(LostPiece):
                self._pieces.collect(mark)
            raise
        return files | self._pieces.collect(mark)

    def _write_part(
        self, folder: Folder, name: str, mark: str, content: _Content, pieces: Pieces
    ) -> None:
        try:
            pieces.report(mark, self._write_content(folder, name, content))
        except BaseException as error:
            pieces.report_failure(mark, error)
            raise

    def _write_content(self, folder: Folder, name: str, content: _Content) -> dict[str, Written]:
        model, tensors, tree = MODEL, _TENSORS, _TREE
        if self._pieces is not None:
            model = self._pieces.file("model", "safetensors")
            tensors = self._pieces.file("state", "safetensors")
            tree = self._pieces.file("state", "json")
        files: dict[str, list[Chunk]] = {
            model: encode(
                content.weights, content.metadata, where=self._folder.where(f"{name}/{model}")
            ),
            tensors: encode(content.tensors, where=self._folder.where(f"{name}/{tensors}")),
            tree: [json.dumps(content.trees, ensure_ascii=False, allow_nan=False).encode()],
        }
        if content.weight_map is not None:
            files[INDEX] = [content.weight_map]
        return {file: folder.write(file, chunks) for file, chunks in files.items()}

    def _keep(self, saved: str, score: float | None) -> None:
        if self._manifest_if_whole(saved) is None:
            raise CheckpointError(
                "the checkpoint was written but is not whole", where=self._folder.where(saved)
            )
        if self._mine is None:
            self._mine = []
            for name in sorted(self._at_start, key=_order):
                manifest = self._manifest_if_whole(name)
                if manifest is not None:
                    self._mine.append(name)
                    self._scores[name] = manifest.score
        self._scores[saved] = score
        replaced = {name for name in self._mine if _order(name)[0] == _order(saved)[0]}
        current = [name for name in self._mine if name not in replaced] + [saved]
        best = self._best_first({name: self._scores[name] for name in reversed(current)})
        kept = {*current[-self._keep_last :], *best[: self._keep_best]}
        for name in self._mine:
            if name not in kept:
                try:
                    self._remove(name)
                except CheckpointError as error:
                    _log.warning("an old checkpoint could not be deleted: %s", error)
        self._mine = [name for name in current if name in kept]

    def _best_first(self, scores: dict[str, float | None]) -> list[str]:
        sign = 1 if self._mode == "min" else -1
        scored = [(sign * score, name) for name, score in scores.items() if score is not None]
        return [name for _, name in sorted(scored, key=lambda pair: pair[0])]

    def _remove(self, name: str) -> None:
        if self._folder.renames:
            unfinished_name = unfinished.new_name()
            if self._folder.exists(name) and self._folder.rename_folder(name, unfinished_name):
                self._folder.remove(unfinished_name)
        else:
            self._folder.child(name).remove(MANIFEST)
            self._folder.remove(name)

    def _remove_abandoned(self) -> list[str]:
        self._folder.remove_abandoned()
        names = [name for name in self._folder.list() if _NAME.fullmatch(name)]
        for name in names:
            # The empty folder only reserves the name; a writer that is running does not need it.
            self._folder.remove_if_empty(name)
            if not self._folder.renames:
                inside = self._folder.child(name).list()
                if MANIFEST not in inside and any(map(unfinished.is_abandoned, inside)):
                    with suppress(CheckpointError):
                        self._folder.remove(name)
        return names

    def _candidates(self) -> list[str]:
        names = [name for name in self._folder.list() if _NAME.fullmatch(name)]
        return [
            name
            for name in sorted(names, key=_order, reverse=True)
            if self._folder.exists(f"{name}/{MANIFEST}")
        ]

    def _manifest_if_whole(self, name: str) -> Manifest | None:
        folder = self._folder.child(name)
        try:
            manifest = manifests.read(folder)
            manifests.check_sizes(folder, manifest)
        except CheckpointError as error:
            if folder.exists(MANIFEST):
                _log.warning("passing over a damaged checkpoint: %s", error)
            return None
        return manifest


def read_weights(folder: Folder) -> tuple[dict[str, Tensor], str, dict[str, str]]:
    manifest = manifests.read(folder)
    where = folder.where(INDEX if INDEX in manifest.files else MODEL)
    tensors, metadata = _weights(folder, manifest)
    return tensors, where, metadata


def read_state(folder: Folder) -> Any:
    return _state(*_state_files(folder, manifests.read(folder)))[0]


def is_checkpoint(name: str) -> bool:
    """Return whether a folder's name has the form of a checkpoint's name."""
    return _NAME.fullmatch(name) is not None


def _all_of(model: Mapping[str, Any], state: Any, own: Sequence[Any]) -> _Content:
    weights, extra = _without_extra(model)
    tensors, tree = flatten(state)
    extra_tensors, extra_tree = flatten(extra, "model")
    own_tensors, own_tree = flatten(list(own), "own")
    trees = {"state": tree, "model": extra_tree, "own": own_tree}
    return _Content(weights, tensors | extra_tensors | own_tensors, trees)


def _part_of(
    pieces: Pieces,
    model: Mapping[str, Any],
    state: Mapping[str, Any],
    own: Sequence[Any],
    replicated: Sequence[str],
) -> _Content:
    weights, extra = _without_extra(model)
    tensors, common_tree = flatten({key: state[key] for key in replicated})
    own_weights, own_state, index = pieces.own(weights, tensors)
    own_tensors, own_tree = flatten(list(own), "own")
    if not pieces.is_first:
        return _Content(own_weights, own_state | own_tensors, {"own": own_tree})
    rest = {key: value for key, value in state.items() if key not in replicated}
    content = _all_of(extra, rest, own)
    trees = {**content.trees, "replicated": common_tree}
    return _Content(own_weights, own_state | content.tensors, trees, index)


def _without_extra(model: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    weights = {key: value for key, value in model.items() if isinstance(value, Tensor)}
    return weights, {key: value for key, value in model.items() if key not in weights}


def _read(folder: Folder, name: str) -> LoadedCheckpoint:
    manifest = manifests.read(folder)
    by_rank, trees = _state_files(folder, manifest)
    state, tensors = _state(by_rank, trees)
    own = [unflatten(part, tree["own"]) for part, tree in zip(by_rank, trees, strict=True)]
    weights, metadata = _weights(folder, manifest)
    return LoadedCheckpoint(
        name=name,
        step=manifest.step,
        model={**weights, **unflatten(tensors, trees[0]["model"])},
        state=state,
        meta=manifest.meta,
        score=manifest.score,
        own=[item for of_rank in own for item in of_rank],
        metadata=metadata,
    )


def _state_files(
    folder: Folder, manifest: Manifest
) -> tuple[list[dict[str, Tensor]], list[dict[str, Any]]]:
    by_rank = [
        decode(manifests.read_file(folder, manifest, file), folder.where(file))
        for file in _files(manifest, "state", _TENSORS)
    ]
    trees = [
        json.loads(manifests.read_file(folder, manifest, file))
        for file in _files(manifest, "state", _TREE)
    ]
    return by_rank, trees


def _state(
    by_rank: list[dict[str, Tensor]], trees: list[dict[str, Any]]
) -> tuple[Any, dict[str, Tensor]]:
    tensors = {name: tensor for part in by_rank for name, tensor in part.items()}
    state = unflatten(tensors, trees[0]["state"])
    if "replicated" in trees[0]:
        state |= unflatten(tensors, trees[0]["replicated"])
    return state, tensors


def _weights(folder: Folder, manifest: Manifest) -> tuple[dict[str, Tensor], dict[str, str]]:
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for file in _files(manifest, "model", MODEL):
        data, where = _model_bytes(folder, manifest, file), folder.where(file)
        tensors |= decode(data, where)
        metadata |= metadata_of(data, where)
    return dict(sorted(tensors.items())), metadata


def _files(manifest: Manifest, kind: str, whole: str) -> list[str]:
    return parts(list(manifest.files), kind, whole.rpartition(".")[2]) or [whole]


def _model_bytes(folder: Folder, manifest: Manifest, file: str) -> bytes:
    try:
        return manifests.read_file(folder, manifest, file)
    except CheckpointError:
        # The checksums in the model file show which tensor is damaged.
        check(folder.read(file), folder.where(file))
        raise


def _provenance(model: Mapping[str, Any]) -> dict[str, str]:
    weights = {key: value for key, value in model.items() if isinstance(value, Tensor)}
    described = sorted((key, str(t.dtype), list(t.shape)) for key, t in weights.items())
    return {
        "model_digest": hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16],
        "torch": str(torch.__version__),
        "flatout": __version__,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _name(step: int, again: int = 0) -> str:
    return f"step-{step:09d}" + (f".{again}" if again else "")


def _names(step: int) -> Iterator[str]:
    return (_name(step, again) for again in itertools.count())


def _order(name: str) -> tuple[int, int]:
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)
