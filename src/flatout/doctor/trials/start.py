"""One side of a trial: `python -m flatout.doctor.trials.start [-m] script.py args`.

Environment variables are the settings. FLATOUT_SEED: random seed, before the script's own seeding,
which wins. FLATOUT_SET (and FLATOUT_RECIPE): the cures, as for `flatout run`. FLATOUT_EDITS: file
with changes of the script's code, a JSON list of Edits. FLATOUT_LOSSES: file for all losses of a
run outside a trial.

Steps are counted as during observation, with a call of `step_sync.at_step` after each. Evaluation
and saving are not skipped, since the script may need their results. Their files go to the trial's
folder, and their time is reported separately. If a script's length is known, the script is ended
before its last steps. Outside a trial the script simply runs.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

from flatout.doctor.trials import step_sync
from flatout.doctor.trials.recording import Stepping
from flatout.doctor.trials.whole import Whole
from flatout.hooks import skip_our_frames, when_imported
from flatout.observe import (
    Models,
    StepFinder,
    run,
    show_as_python_does,
    watch_backward,
    watch_keras,
    watch_loaders,
    watch_optimizers,
    watch_torch,
)

SEED, EDITS, LOSSES = "FLATOUT_SEED", "FLATOUT_EDITS", "FLATOUT_LOSSES"


def main(command: list[str]) -> None:
    """Run a script, or after -m a module, as one side of a trial."""
    show_as_python_does()
    if SEED in os.environ:
        _seed(int(os.environ[SEED]))
    watch = _stepping()
    _install_cures(watch)
    if EDITS in os.environ:
        from flatout.doctor import edits

        edits.install(edits.load(Path(os.environ[EDITS])))
    # After the cures, so that the script's own losses and batches are recorded.
    _watch(watch)
    run(command)


def _stepping() -> Stepping:
    if LOSSES not in os.environ or os.environ.get("RANK", "0") != "0":
        return Stepping()
    return Whole(Path(os.environ[LOSSES]))


def _seed(seed: int) -> None:
    random.seed(seed)
    when_imported("numpy.random", lambda module: module.seed(seed))
    when_imported("torch", lambda module: module.manual_seed(seed))


def _install_cures(watch: Stepping) -> None:
    if not (os.environ.get("FLATOUT_SET") or os.environ.get("FLATOUT_RECIPE")):
        return
    from flatout import cures
    from flatout.recipe import effective

    cures.install(effective())
    watch.more = lambda: {
        "applied": [name for name, _ in cures.applied()],
        "left": dict(cures.left()),
        "is_full": cures.is_full(),
    }


def _watch(watch: Stepping) -> None:
    steps = StepFinder(watch)

    def hook_torch(torch: Any) -> None:
        watch_optimizers(torch, watch, steps)
        watch_backward(torch, watch, steps)
        watch_torch(torch, watch)
        watch.record.watch_losses(torch)
        Models(torch, watch).search()

    def hook_loaders(module: Any) -> None:
        watch_loaders(module, watch, looks_within=False)
        watch.record.watch_batches(module)

    step_sync.tell_also(lambda: watch.between, watch.told, lambda: watch.lanes.steps)
    when_imported("torch", hook_torch)
    when_imported("torch.utils.data.dataloader", hook_loaders)
    when_imported("torch._dynamo.eval_frame", skip_our_frames)
    when_imported("keras.src.optimizers.base_optimizer", lambda module: watch_keras(module, steps))
    os.register_at_fork(after_in_child=lambda: _leave(watch))


def _leave(watch: Stepping) -> None:
    watch.lanes.thread = 0  # actions of a forked process are not steps of this one


if __name__ == "__main__":
    main(sys.argv[1:])
