"""Files that a fit writes into its run folder in addition to checkpoints and the Profile.

recipe.toml     settings of the steps.
log.jsonl       a line for each epoch.
history.json    the History, at the end.
"""

from __future__ import annotations

from pathlib import Path

from flatout.errors import FlatoutError
from flatout.recipe import dump
from flatout.train.callbacks import JsonLines
from flatout.train.history import History
from flatout.train.loop_state import LoopState
from flatout.unfinished import remove_abandoned


class RunFiles:
    """Writes into the run folder of a prepared Loop; only the first rank writes."""

    def __init__(self, loop: LoopState) -> None:
        self._loop = loop

    @property
    def path(self) -> Path | None:
        """Folder that this rank writes to; None where it does not write."""
        run = self._loop.run
        return Path(run) if run and "://" not in run and self._loop.world.is_first else None

    def begin(self) -> list[JsonLines]:
        """Write the Recipe, and return the callbacks that write the log."""
        if self.path is None:
            return []
        remove_abandoned(self.path)  # temporary files of a fit that was killed
        self.write_recipe()
        return [JsonLines(self.path / "log.jsonl")]

    def write_recipe(self) -> None:
        """Write the present settings of the steps."""
        if self.path is not None:
            assert self._loop.resolved is not None
            dump(self._loop.resolved, self.path / "recipe.toml")

    def restore_folder(self, history: History) -> None:
        """Create the folder again if it was removed while the job runs, and report it."""
        loop = self._loop
        if loop.run is not None and loop.checkpointing.restore_folder():
            assert loop.resolved is not None
            dump(loop.resolved, Path(loop.run) / "recipe.toml")
            note = (
                f"{loop.run} was removed while this job runs: the folder is created again, with "
                "the files written from now on"
            )
            history.notes.append(note)
            loop.say(note)

    def end(self, history: History) -> None:
        """Write the History for a report."""
        if self.path is None:
            return
        try:
            history.save(self.path / "history.json")
        except FlatoutError as error:  # must not end a finished training
            self._loop.say(str(error))
