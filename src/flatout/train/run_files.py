"""What a fit writes into its run folder beside checkpoints and the Profile.

recipe.toml     how the steps run
log.jsonl       a line for each epoch
history.json    the History, at the end
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
    """Writes into the folder of a Loop that was prepared; of several ranks the first does."""

    def __init__(self, loop: LoopState) -> None:
        self._loop = loop

    @property
    def path(self) -> Path | None:
        """Where this rank writes; None where it does not."""
        run = self._loop.run
        return Path(run) if run and "://" not in run and self._loop.world.is_first else None

    def begin(self) -> list[JsonLines]:
        """Write down what runs; returns what keeps the log."""
        if self.path is None:
            return []
        remove_abandoned(self.path)  # of a fit that was killed while it wrote here
        self.write_recipe()
        return [JsonLines(self.path / "log.jsonl")]

    def write_recipe(self) -> None:
        """Write down how the steps run, as it is known now."""
        if self.path is not None:
            assert self._loop.resolved is not None
            dump(self._loop.resolved, self.path / "recipe.toml")

    def restore_folder(self, history: History) -> None:
        """Make the folder again if it was removed while the job runs, and say so."""
        loop = self._loop
        if loop.run is not None and loop.checkpointing.restore_folder():
            assert loop.resolved is not None
            dump(loop.resolved, Path(loop.run) / "recipe.toml")
            note = f"{loop.run} was removed while this job runs: made again, with what follows"
            history.notes.append(note)
            loop.say(note)

    def end(self, history: History) -> None:
        """Leave the figures for a report."""
        if self.path is None:
            return
        try:
            history.save(self.path / "history.json")
        except FlatoutError as error:  # no reason to lose what was trained
            self._loop.say(str(error))
