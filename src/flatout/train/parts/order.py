"""Order of the Parts around a step, the outermost first, with the reason for each position."""

from __future__ import annotations

from torch import nn

from flatout.train.feed import KeepsFeatures
from flatout.train.graphs.graphs import DeviceTimes, Graphs
from flatout.train.loop_state import LoopState
from flatout.train.part import Part
from flatout.train.parts.explain_errors import ExplainErrors, IdChecks
from flatout.train.parts.features.features import FrozenFeatures
from flatout.train.parts.first_step import FirstStepChecks, TrainingMode
from flatout.train.parts.monitor import Monitor
from flatout.train.parts.numbers import NumbersGuard
from flatout.train.parts.other_job import OtherJob
from flatout.train.parts.rounding_watch import RoundingWatch
from flatout.train.parts.table_rows import TableRows
from flatout.train.sample_dropout import DropoutBySample
from flatout.train.stragglers import Pace
from flatout.train.tuning.tuner import Tuner

REASONS: dict[type[Part], str] = {
    Pace: "the last to act after a step: a rank's own time includes all other Parts",
    Monitor: "records a step when all other Parts have acted",
    NumbersGuard: "a step whose numbers are bad is not counted or recorded",
    ExplainErrors: "errors of all Parts that follow are explained",
    OtherJob: "decides settings before any Part uses them",
    TrainingMode: "reports the mode before the step changes anything",
    RoundingWatch: "may change settings, so it acts before they are tried",
    FirstStepChecks: "wraps the loss for whichever settings are tried",
    IdChecks: "checks the ids of a step once, whichever settings are tried",
    Tuner: "makes a step again if a setting fails, with all Parts that follow",
    Part: "the user's Parts: within the tuning, so that their time counts",
    DeviceTimes: "times one attempt at a step, without the tuning",
    Graphs: "a graph stands for the whole step below",
    TableRows: "rows must be here before a forward reads them",
    DropoutBySample: "innermost: acts on each micro-batch",
}
ORDER = tuple(REASONS)


def features_of(loop: LoopState, model: nn.Module) -> KeepsFeatures | None:
    """Return the object that replaces inputs before the steps; None for a job without one."""
    return FrozenFeatures(loop, model)
