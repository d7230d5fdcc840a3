"""Kills of a rank, or of the command, while ranks lay the work out otherwise than `ddp`.

What claims it has the weights of the undisturbed run, bit for bit; stages have them to rounding,
since the model is cut by times that are measured again. Where steps do not wait there are three
ranks, of which the others go on without a worker that is killed; no run is like another, and the
job has to end.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch

from flatout.save.model_file import load_model
from killed.processes import Lost
from killed.ranks import begin, check_checkpoints, finished, killed
from killed.series import Kind, Outcome

EXACT = ("fsdp", "local_sgd", "parameter_server")
ASYNC = ("parameter_server,staleness=4", "parameter_server,spare_workers=1")
ALL = (*EXACT, "staged", *ASYNC)
ROUNDING = 1e-4


def undisturbed(folder: Path, strategy: str) -> dict[str, torch.Tensor]:
    """The weights of a run that nothing kills; of each strategy it is made once."""
    place = folder / f"undisturbed {strategy}"
    if not place.exists():
        place.mkdir()
        finished(place, begin(place, "merged", strategy))
    return load_model(place / "final.safetensors")


def run(
    folder: Path,
    wanted: int,
    draw: random.Random,
    base: Path,
    outcome: Outcome,
    among: Sequence[str] = ALL,
) -> None:
    strategy = draw.choice(among)
    expected = None if strategy in ASYNC else undisturbed(base, strategy)
    victims, count = ("0", "1", "command"), 2
    if strategy in ASYNC:
        victims, count = ("0", "1", "2", "1", "2", "command"), 3
    killed(folder, wanted, draw, outcome, victims, strategy, count)
    found = load_model(folder / "final.safetensors")
    for name, weight in (expected or {}).items():
        bound = ROUNDING if strategy == "staged" else 0.0
        if not torch.allclose(weight, found[name], rtol=0.0, atol=bound):
            raise Lost(f"{strategy}: the weights of {name} are not those of the undisturbed run")
    if any(not weight.isfinite().all() for weight in found.values()):
        raise Lost(f"{strategy}: weights are not finite")
    check_checkpoints(folder)


def run_async(folder: Path, wanted: int, draw: random.Random, base: Path, outcome: Outcome) -> None:
    run(folder, wanted, draw, base, outcome, ASYNC)


STRATEGIES = Kind(
    "strategies",
    "a rank or the command, under other strategies",
    100,
    10,
    lambda folder: folder,
    run,
)
SERVERS = Kind(
    "servers",
    "a worker, a server or the command, where servers do not wait",
    100,
    10,
    lambda folder: folder,
    run_async,
)
