"""Detectors of silent mistakes in a training, which run in a few steps."""

from __future__ import annotations

from typing import Any

from flatout.observe.batch_axis import BatchAxis
from flatout.observe.checkpointed import Checkpointed
from flatout.observe.clipping import Clipping
from flatout.observe.copied_lists import CopiedLists
from flatout.observe.equal_views import Views
from flatout.observe.first_update import FirstUpdate
from flatout.observe.folds import Folds
from flatout.observe.functional import Functional
from flatout.observe.gradients import Gradients
from flatout.observe.growing import GrowingHistories
from flatout.observe.held_out import compare, compare_classes, sets_of
from flatout.observe.held_out_nodes import NodeLosses
from flatout.observe.kept_best import kept_best
from flatout.observe.kept_graphs import KeptLosses
from flatout.observe.labels import Labels
from flatout.observe.leaked_targets import LeakedTargets
from flatout.observe.loss_graphs import LossGraphs
from flatout.observe.monitors import Monitors
from flatout.observe.next_tokens import NextTokens
from flatout.observe.observation import Observation
from flatout.observe.record import read_sites
from flatout.observe.recurrent import Recurrent
from flatout.observe.remade import Remade
from flatout.observe.repeated_draws import RepeatedDraws
from flatout.observe.repeated_seeds import RepeatedSeeds
from flatout.observe.scalers import Scalers
from flatout.observe.schedules import Schedules
from flatout.observe.sites import read
from flatout.observe.skipped import SkippedSteps
from flatout.observe.state_loads import StateLoads
from flatout.observe.step_gradients import StepGradients
from flatout.observe.still_targets import StillTargets
from flatout.observe.switches import Switches
from flatout.observe.tables import Tables
from flatout.observe.teachers import Teachers
from flatout.observe.unfrozen import NeverFrozen
from flatout.observe.unused_gradients import GradientUse
from flatout.observe.watch import Watch


class Mistakes:
    """Detectors of mistakes in losses, gradients, clipping, schedulers, switches and samples."""

    def __init__(self, torch: Any, watch: Watch, scalers: Scalers, seeds: RepeatedSeeds) -> None:
        self._watch = watch
        self._scalers = scalers
        self._seeds = seeds
        seeds.hook_torch(torch)
        self._draws = RepeatedDraws(torch, watch)
        self._switches = Switches(torch, watch)  # first, before other detectors change switches
        self._graphs = LossGraphs(torch, watch)
        self._labels = Labels(torch, watch)
        Gradients(torch, watch)
        StepGradients(torch, watch)
        FirstUpdate(watch)
        self._uses = GradientUse(torch, watch)
        self._teachers = Teachers(torch, watch, self._uses)
        self._still = StillTargets(torch, watch, self._uses)
        self._views = Views(torch, watch)
        self._kept = KeptLosses(torch, watch)
        self._schedules = Schedules(torch.optim.lr_scheduler, watch)
        self._monitors = Monitors(watch, self._schedules)
        Clipping(torch, watch)
        self._tables = Tables(torch, watch)
        self._remade = Remade(torch, watch, self._tables)
        self._leaked = LeakedTargets(torch, watch)
        self._next = NextTokens(torch, watch)
        self._recurrent = Recurrent(torch, watch)
        self._batch_axis = BatchAxis(torch, watch)
        self._never_frozen = NeverFrozen(watch)
        self._state_loads = StateLoads(torch, watch)
        self._folds = Folds(watch)
        self._node_losses = NodeLosses(torch, watch)
        self._functional = Functional(torch, watch)
        self._growing = GrowingHistories(torch, watch)
        self._copied = CopiedLists(watch)
        self._checkpointed = Checkpointed(torch, watch)
        self._skipped = SkippedSteps(torch, watch)

    def fill(self, observation: Observation) -> None:
        """Add all findings to an Observation; to be called in the stepping thread.

        Each kind of finding is added separately: if one kind fails, a note is added, and all other
            kinds are kept.
        """
        if not observation.steps:
            return
        for fill in (
            self._fill_losses,
            self._fill_schedules,
            self._fill_modes,
            self._fill_growing,
            self._fill_gradients,
            self._fill_kept_graphs,
            self._fill_seeds,
            self._fill_teachers,
            self._fill_remade,
            self._fill_equal_views,
            self._fill_still_targets,
            self._fill_leaked_targets,
            self._fill_seen_ahead,
            self._compare,
            self._tables.fill,
            _read_sites,
        ):
            self._watch.attempt(fill, observation)

    def _fill_losses(self, observation: Observation) -> None:
        observation.loss_looks = self._graphs.looks
        signs = [*self._graphs.signs.values(), *self._labels.results()]
        observation.in_losses = [*signs, *self._skipped.lines, *self._functional.lines]

    def _fill_schedules(self, observation: Observation) -> None:
        observation.schedules = self._schedules.results()
        observation.monitors = [*self._monitors.found, *kept_best(observation.calls)]

    def _fill_modes(self, observation: Observation) -> None:
        observation.switched_on = self._switches.on
        observation.cells = self._recurrent.cells
        observation.over_batch = self._batch_axis.layers
        observation.softmaxes = list(self._functional.softmaxes.values())
        observation.unfrozen = self._never_frozen.found
        observation.state_loads = self._state_loads.found
        observation.shared_folds = self._folds.found
        observation.held_out_nodes = self._node_losses.found
        observation.dropouts = [read(site) for site in self._functional.dropouts]
        observation.checkpointed_mb = self._checkpointed.mb

    def _fill_growing(self, observation: Observation) -> None:
        told = {item.site for item in self._growing.histories}
        copied = [item for item in self._copied.histories if item.site not in told]
        observation.growing = [*self._growing.histories, *copied]

    def _fill_gradients(self, observation: Observation) -> None:
        observation.gradient_uses = self._uses.looks
        observation.unused_gradients = self._uses.results()

    def _fill_kept_graphs(self, observation: Observation) -> None:
        observation.kept_graphs = self._kept.found

    def _fill_seeds(self, observation: Observation) -> None:
        observation.repeated_seeds = [*self._seeds.results(), *self._draws.results()]

    def _fill_teachers(self, observation: Observation) -> None:
        observation.teachers = self._teachers.results()

    def _fill_remade(self, observation: Observation) -> None:
        observation.remade = self._remade.results()

    def _fill_leaked_targets(self, observation: Observation) -> None:
        observation.leaked_targets = self._leaked.found

    def _fill_seen_ahead(self, observation: Observation) -> None:
        observation.seen_ahead = self._next.found

    def _fill_still_targets(self, observation: Observation) -> None:
        observation.still_targets = self._still.results()

    def _fill_equal_views(self, observation: Observation) -> None:
        observation.equal_views = self._views.found

    def _compare(self, observation: Observation) -> None:
        compare(list(sets_of(self._watch.loaders, self._tables.results())), self._scalers)
        compare_classes(self._watch.loaders)


def _read_sites(observation: Observation) -> None:
    scalings = [item.scaling for item in observation.inputs if item.scaling]
    read_sites(
        [
            *observation.in_losses,
            *observation.schedules,
            *observation.monitors,
            *observation.tables,
            *observation.growing,
            *observation.cells,
            *observation.over_batch,
            *observation.softmaxes,
            *observation.unfrozen,
            *observation.state_loads,
            *observation.shared_folds,
            *observation.held_out_nodes,
            *observation.unused_gradients,
            *observation.kept_graphs,
            *(observation.repeated_seeds or ()),
            *observation.teachers,
            *observation.remade,
            *observation.equal_views,
            *observation.still_targets,
            *observation.leaked_targets,
            *observation.seen_ahead,
            *scalings,
        ]
    )
