"""Kills of a rank, a server or the command, while ranks lay the work out otherwise than `ddp`.

What claims it has the weights of the undisturbed run, bit for bit; stages have them to rounding,
since the model is cut by times that are measured again. Where steps do not wait the others go on
without a worker that is killed; no run is like another, and the job has to end.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch

from flatout.save.model_file import load_model
from killed.processes import Lost
from killed.ranks import APART, begin, check_checkpoints, finished, killed
from killed.series import Kind, Outcome

ROUNDING = 1e-4


@dataclass(frozen=True)
class Layout:
    """How ranks lay the work out.

    Attributes:
        settings: a strategy, and further settings of `world` behind it.
        victims: what is killed: ranks, servers of their own behind them, or the command.
        ranks: how many compute.
        bound: how far weights may be from those of the undisturbed run; None where they may differ.
    """

    settings: str
    victims: tuple[str, ...] = ("0", "1", "command")
    ranks: int = 2
    bound: float | None = 0.0

    def undisturbed(self, folder: Path) -> dict[str, torch.Tensor]:
        """The weights of a run that nothing kills."""
        if self.bound is None:
            return {}
        place = folder / "undisturbed"
        place.mkdir()
        finished(place, begin(place, "merged", self.settings, self.ranks))
        return load_model(place / "final.safetensors")

    def run(
        self,
        folder: Path,
        wanted: int,
        draw: random.Random,
        expected: dict[str, torch.Tensor],
        outcome: Outcome,
    ) -> None:
        """A series."""
        killed(folder, wanted, draw, outcome, self.victims, self.settings, self.ranks)
        found = load_model(folder / "final.safetensors")
        for name, weight in expected.items():
            if not torch.allclose(weight, found[name], rtol=0.0, atol=self.bound or 0.0):
                raise Lost(f"the weights of {name} are not those of the undisturbed run")
        if any(not weight.isfinite().all() for weight in found.values()):
            raise Lost("weights are not finite")
        check_checkpoints(folder)


def kind(name: str, what: str, layout: Layout) -> Kind:
    return Kind(name, what, 40, 6, layout.undisturbed, layout.run)


FOUR = ("0", "1", "2", "3", "command")
# The first of three is a server too.
WORKERS = ("0", "1", "2", "1", "2", "command")
SERVER = ("0", "1", "2", "2", "command")

STRATEGIES = [
    kind("fsdp", "`fsdp`: a rank of two, or the command", Layout("fsdp")),
    kind("staged", "`staged`: likewise", Layout("staged", bound=ROUNDING)),
    kind(
        "copies",
        "`staged` in two copies: a rank of four, or the command",
        Layout("staged,stages=2", FOUR, 4, ROUNDING),
    ),
    kind("local_sgd", "`local_sgd`: a rank of two, or the command", Layout("local_sgd")),
    kind("servers", "`parameter_server`, sync: likewise", Layout("parameter_server")),
    kind(
        "async",
        "`parameter_server`, staleness 4: a server, one of two workers, or the command",
        Layout("parameter_server,staleness=4", WORKERS, 3, None),
    ),
    kind(
        "spare",
        "`parameter_server`, a spare worker: likewise",
        Layout("parameter_server,spare_workers=1", WORKERS, 3, None),
    ),
    kind(
        "apart",
        "`--servers`, sync: a rank of two, a server that computes nothing, or the command",
        Layout(f"parameter_server{APART}", SERVER),
    ),
    kind(
        "apart_async",
        "`--servers`, staleness 4: likewise",
        Layout(f"parameter_server,staleness=4{APART}", SERVER, 2, None),
    ),
]
