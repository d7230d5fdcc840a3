"""What a training may do wrong without a word: all that looks for it, in a few steps."""

from __future__ import annotations

from typing import Any

from flatout.observe.clipping import Clipping
from flatout.observe.gradients import Gradients
from flatout.observe.loss_graphs import LossGraphs
from flatout.observe.observation import Observation
from flatout.observe.record import read_sites
from flatout.observe.schedules import Schedules
from flatout.observe.switches import Switches
from flatout.observe.watch import Watch


class Mistakes:
    """Looks at losses, gradients, clipping, schedulers and switches."""

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._switches = Switches(torch, watch)  # first: what the others switch is none of those
        self._graphs = LossGraphs(torch, watch)
        Gradients(torch, watch)
        self._schedules = Schedules(torch.optim.lr_scheduler, watch)
        Clipping(torch, watch)

    def watch_schedules(self) -> None:
        """Sees again where schedulers are stepped."""
        self._schedules.watch()

    def fill(self, seen: Observation) -> None:
        """Puts what was seen into an Observation; in the thread that steps."""
        if not seen.steps:
            return
        seen.loss_looks = self._graphs.looks
        seen.in_losses = list(self._graphs.found.values())
        seen.schedules = self._schedules.results()
        seen.switched_on = self._switches.on
        read_sites([*seen.in_losses, *seen.schedules])
