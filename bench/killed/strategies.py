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
from killed.ranks import APART, begin, check_checkpoints, finished, killed
from killed.series import Kind, Outcome

EXACT = ("fsdp", "local_sgd", "parameter_server")
ASYNC = ("parameter_server,staleness=4", "parameter_server,spare_workers=1")
ALL = (*EXACT, "staged", *ASYNC)
IN_COPIES = "staged,stages=2"
SERVED = f"parameter_server{APART}"
ROUNDING = 1e-4


def undisturbed(folder: Path, strategy: str, count: int) -> dict[str, torch.Tensor]:
    """The weights of a run that nothing kills; of each strategy it is made once."""
    place = folder / f"undisturbed {strategy}"
    if not place.exists():
        place.mkdir()
        finished(place, begin(place, "merged", strategy, count))
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
    victims, count = ("0", "1", "command"), 2
    if strategy in ASYNC:
        victims, count = ("0", "1", "2", "1", "2", "command"), 3
    elif strategy == IN_COPIES:
        victims, count = ("0", "1", "2", "3", "command"), 4
    elif strategy == SERVED:
        victims = ("0", "1", "2", "2", "command")
    expected = None if strategy in ASYNC else undisturbed(base, strategy, count)
    killed(folder, wanted, draw, outcome, victims, strategy, count)
    found = load_model(folder / "final.safetensors")
    for name, weight in (expected or {}).items():
        bound = ROUNDING if strategy in ("staged", IN_COPIES) else 0.0
        if not torch.allclose(weight, found[name], rtol=0.0, atol=bound):
            raise Lost(f"{strategy}: the weights of {name} are not those of the undisturbed run")
    if any(not weight.isfinite().all() for weight in found.values()):
        raise Lost(f"{strategy}: weights are not finite")
    check_checkpoints(folder)


def run_async(folder: Path, wanted: int, draw: random.Random, base: Path, outcome: Outcome) -> None:
    run(folder, wanted, draw, base, outcome, ASYNC)


def run_copies(
    folder: Path, wanted: int, draw: random.Random, base: Path, outcome: Outcome
) -> None:
    run(folder, wanted, draw, base, outcome, [IN_COPIES])


def run_served(
    folder: Path, wanted: int, draw: random.Random, base: Path, outcome: Outcome
) -> None:
    run(folder, wanted, draw, base, outcome, [SERVED])


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
COPIES = Kind(
    "copies",
    "a rank of four that have two copies in stages, or the command",
    50,
    10,
    lambda folder: folder,
    run_copies,
)
APART_SERVERS = Kind(
    "apart",
    "a rank, a server that computes nothing, or the command",
    50,
    10,
    lambda folder: folder,
    run_served,
)
