"""Makes steps as graphs of operators, if so set: compiled graphs on a CPU, or CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from flatout.data import Batch
from flatout.measure import DeviceLanes
from flatout.train.part import Done, Part, Step
from flatout.train.step import Stepper


class MakesCudaGraphs(Protocol):
    """Makes steps as CUDA graphs; `cuda_graph.py` implements it."""

    @property
    def why(self) -> str:
        """Reason why no step is recorded under the present settings; "" while one may be."""

    def __call__(
        self, eager: Callable[[], Done], compute: Any, batches: Sequence[Batch], step: int
    ) -> Done:
        """Make a step, by a graph if it was recorded."""

    def objection(self, compute: Any, batches: Sequence[Batch]) -> str:
        """Return the reason why a graph cannot make a step; "" if none is known."""


class MakesGraphs(Protocol):
    """Makes steps as one compiled graph; `capture.py` implements it.

    Attributes:
        is_asked: whether the user requested capturing; False where `auto` tries it.
        why: the reason why no step is captured; "" while steps may be captured.
    """

    is_asked: bool
    why: str

    def __call__(
        self, eager: Callable[[], Done], compute: Any, batches: Sequence[Batch], step: int
    ) -> Done:
        """Make a step, by the graph if possible."""

    @property
    def is_used(self) -> bool:
        """Whether the graph is compiled and used."""

    @property
    def compiling(self) -> object | None:
        """The compilation that is under way; None if there is none."""

    def give_up(self, why: str) -> None:
        """Make all steps from here on eagerly."""

    def close(self) -> None:
        """End the compilation."""


class Graphs(Part):
    """Makes steps of all optimizers together as graphs.

    Attributes:
        compiled: makes steps as one compiled graph; None without one.
        cuda: makes steps as CUDA graphs; None without them.
    """

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self.compiled: MakesGraphs | None = None
        self.cuda: MakesCudaGraphs | None = None

    def around_step(self, step: Step, run: Callable[[Step], Done]) -> Done:
        """Make the step by a graph if the settings say so, else by `run`."""
        now = self._stepper.switch.now
        if now.capture == "on" and self.compiled is not None:
            makes: MakesGraphs | MakesCudaGraphs | None = self.compiled
        else:
            makes = self.cuda if now.cuda_graph == "on" else None
        if makes is None or step.turn is not self._stepper.joint:
            return run(step)
        return makes(partial(run, step), step.compute, step.batches, step.number)


def graphs_of(stepper: Stepper) -> Graphs:
    """Return the Graphs of a job's steps, or new ones without a maker of graphs."""
    return stepper.chain.find(Graphs) or Graphs(stepper)


class DeviceTimes(Part):
    """Begins the times of a step on a device that runs asynchronously."""

    def __init__(self, lanes: DeviceLanes) -> None:
        self._lanes = lanes

    def around_step(self, step: Step, run: Callable[[Step], Done]) -> Done:
        """Make the step; its times begin here, so that trials of settings do not count."""
        self._lanes.begin()
        return run(step)
