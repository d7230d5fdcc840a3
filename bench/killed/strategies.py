"""Kills of a rank of two, or of the command, while ranks lay the work out otherwise than `ddp`.

What claims it has the weights of the undisturbed run, bit for bit; stages have them to rounding,
since the model is cut by times that are measured again. Where steps do not wait no run is like
another, and the job has to end.
"""

from __future__ import annotations

import random
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


def run(folder: Path, wanted: int, draw: random.Random, base: Path, outcome: Outcome) -> None:
    strategy = draw.choice(ALL)
    expected = None if strategy in ASYNC else undisturbed(base, strategy)
    killed(folder, wanted, draw, outcome, ("0", "1", "command"), strategy)
    found = load_model(folder / "final.safetensors")
    for name, weight in (expected or {}).items():
        bound = ROUNDING if strategy == "staged" else 0.0
        if not torch.allclose(weight, found[name], rtol=0.0, atol=bound):
            raise Lost(f"{strategy}: the weights of {name} are not those of the undisturbed run")
    if any(not weight.isfinite().all() for weight in found.values()):
        raise Lost(f"{strategy}: weights are not finite")
    check_checkpoints(folder)


STRATEGIES = Kind(
    "strategies",
    "two ranks or their command, under other strategies",
    100,
    10,
    lambda folder: folder,
    run,
)
