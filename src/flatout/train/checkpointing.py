"""The run folder of a job: writing its checkpoints, and finding the newest."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import chain, count
from typing import Any

from flatout.console import first_line
from flatout.errors import CheckpointError
from flatout.recipe import Save
from flatout.save import (
    Checkpoints,
    Folder,
    InUse,
    LoadedCheckpoint,
    LostPiece,
    Pieces,
    check_shared,
)
from flatout.world import LostRank, World

# Seconds that the first rank waits for the other ranks' parts of a checkpoint after an error.
_LAST_PIECES_S = 5.0


class Checkpointing:
    """The checkpoints in a run folder, written by the first rank, or by all ranks as shards."""

    def __init__(self, run: str, world: World, asked: Save) -> None:
        self.run = run
        self._folder = f"{run}/checkpoints"
        self._world = world
        self._asked = asked
        self._in_pieces = asked.pieces == "per_rank" and world.size > 1
        self._in_use: InUse | None = None

    @property
    def keeps(self) -> bool:
        """Whether this rank writes weights."""
        return self._in_pieces or self._world.is_first

    @cached_property
    def checkpoints(self) -> Checkpoints:
        """Object that writes and reads the checkpoints."""
        return Checkpoints(
            self._folder,
            keep_last=self._asked.keep_last,
            keep_best=1,
            asynchronous=self._asked.asynchronous,
            pieces=Pieces(self._world) if self._in_pieces else None,
        )

    def begin(self) -> None:
        """Check at the start that checkpoints can be written, and mark the folder as in use."""
        if self._in_pieces:
            check_shared(Folder(self._folder), self._world)
        else:
            self._world.by_first(self.checkpoints.check_writable)
        if "://" not in self.run:
            self._world.by_first(self._take)

    def _check_is_free(self) -> None:
        # A job that still runs here owns its checkpoints: they must not be removed.
        if os.path.isdir(self.run):
            InUse(self.run).release()

    def _take(self) -> None:
        self._in_use = InUse(self.run)

    def restore_folder(self) -> bool:
        """Create the folder again if it was removed while this job runs; return whether it was."""
        if self._in_use is None or not self._in_use.is_gone:
            return False
        self._in_use.release()
        self._in_use = None
        self._in_use = InUse(self.run)
        return True

    @property
    def holds(self) -> bool:
        """Whether this process alone uses the local folder, as far as it can know."""
        return self._in_use is not None and not self._in_use.is_gone

    def next_path(self, step: int) -> str:
        """Return the path that a checkpoint of this step would have."""
        folder, name = Folder(self._folder), f"step-{step:09d}"
        names = chain([name], (f"{name}.{again}" for again in count(1)))
        free = self._world.by_first(lambda: next(n for n in names if not folder.exists(n)))
        return f"{self._folder}/{free}"

    def write(
        self,
        step: int,
        weights: Mapping[str, Any],
        state: Any,
        own: Any,
        *,
        meta: dict[str, str],
        score: float | None,
        metadata: dict[str, str],
    ) -> str:
        """Write a checkpoint on all ranks together, and return its path."""
        result = (step, weights, state, meta, score)
        if self._in_pieces:
            self._on_all(self.checkpoints.wait)
            save = self.checkpoints.save
            name = self._on_all(lambda: save(*result, [own], ["optimizers"], metadata))
            return f"{self._folder}/{name}"
        by_rank = self._world.gather(own)
        name = self._world.by_first(
            lambda: self.checkpoints.save(*result, by_rank, metadata=metadata), "saving"
        )
        return f"{self._folder}/{name}"

    def wait(self) -> None:
        """Wait until the last checkpoint is written; all ranks call it."""
        if self._in_pieces:
            self._on_all(self.checkpoints.wait)
        else:
            self._world.by_first(self.checkpoints.wait, "the last checkpoint")

    def _on_all(self, do: Callable[[], Any]) -> Any:
        result, words = None, None
        failed: Exception | None = None
        try:
            result = do()
        except LostPiece as error:
            failed = error
        except LostRank:
            raise  # no rank is left to exchange results with
        except Exception as error:
            failed, words = error, first_line(error)
        outcomes = self._world.gather(
            (failed is not None, words), "each rank's part of a checkpoint"
        )
        if failed is not None:
            raise failed
        causes = [f"rank {r}: {why}" for r, (_, why) in enumerate(outcomes) if why is not None]
        if any(fails for fails, _ in outcomes):
            raise LostPiece("; ".join(["not every rank could write its part", *causes]))
        return result

    def find(self, resume: bool | str) -> LoadedCheckpoint | None:
        """Return the checkpoint to resume from; None where there is none."""
        self._world.by_first(self._check_is_free)
        if isinstance(resume, str):
            return self._load(resume)
        # One rank searches, so that all ranks get the same result.
        name = self._world.by_first(self.checkpoints.latest)
        if name is None:
            return None
        if not resume:
            raise CheckpointError(
                f"the run folder has checkpoints of an earlier fit, the newest is {name}",
                where=self._folder,
                do="continue it with resume=True, choose another run folder, or delete this one",
            )
        return self._load(name)

    def _load(self, name: str) -> LoadedCheckpoint:
        sees = Folder(self._folder).exists(name)
        if all(self._world.gather(sees)):
            return self.checkpoints.load(name)
        loaded = self.checkpoints.load(name) if self._world.is_first else None
        return LoadedCheckpoint(**self._world.from_first(None if loaded is None else vars(loaded)))

    def close(self, error: BaseException | None = None) -> None:
        """Wait for the last checkpoint while it can still be written, and release the folder."""
        try:
            if "checkpoints" in vars(self):
                if error is not None:
                    self.checkpoints.give_up(0 if isinstance(error, LostRank) else _LAST_PIECES_S)
                self.checkpoints.wait()
        finally:
            if self._in_use is not None:
                self._in_use.release()


def no_run_folder() -> CheckpointError:
    """Return the error for a missing run folder."""
    return CheckpointError("there is no run folder", do="give Loop or Trainer run='runs/name'")
