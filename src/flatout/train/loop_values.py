"""The values that make up the state of a Loop: requests, progress, and facts about the job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from flatout.data import Source
from flatout.devices import Placement
from flatout.optim import LrRule
from flatout.recipe import Choice, ModelFacts, Parity, Recipe
from flatout.train.evaluate_batch import EvaluateBatch
from flatout.train.graphs.evaluate_graph import EvaluateGraph
from flatout.train.micro_batch import InPieces
from flatout.train.part import Part


@dataclass
class Asked:
    """The arguments of a Loop.

    Attributes:
        recipe: requested settings.
        words: lines about these settings, printed by `prepare`.
        allow: largest permitted difference from the plain job.
        seed: integer that, with epoch and sample index, decides the random order of samples.
        accumulate: number of batches of an optimizer step.
        clip: largest total norm and largest absolute element of the gradients; None for no limit.
        lr_rule: scales a learning rate that was found with another global batch size.
        parts: the user's own Parts.
        resume: True for the latest checkpoint, the name of one, or False.
    """

    recipe: Recipe
    words: list[str]
    allow: Parity
    seed: int
    accumulate: int
    clip: tuple[float | None, float | None]
    lr_rule: LrRule | None
    parts: tuple[Part, ...]
    resume: bool | str


@dataclass
class Progress:
    """The place that training has reached.

    Attributes:
        epoch: number of the current epoch, from 0.
        step_count: optimizer steps done since training began (a resume continues the count).
        step_in_epoch: optimizer steps done in this epoch.
        batch_in_epoch: batches of this epoch that were taken up to the last step.
        planned_epochs: number of epochs of the whole run, where that is known.
        first_step: optimizer steps that an earlier process has made.
        saved: epoch and step of the newest checkpoint.
        is_other_job: whether other parameters train than when settings were decided.
        job_changes: number of times that the set of training parameters has changed.
        reported_tables: the last line about embedding tables.
        reported_overflows: whether skipped fp16 steps were reported.
    """

    epoch: int = 0
    step_count: int = 0
    step_in_epoch: int = 0
    batch_in_epoch: int = 0
    planned_epochs: int | None = None
    first_step: int = 0
    saved: tuple[int, int] | None = None
    is_other_job: bool = False
    job_changes: int = 0
    reported_tables: str = ""
    reported_overflows: bool = False


@dataclass
class FirstBatches:
    """Facts about the first batches of the data.

    Attributes:
        size: samples of the first batch over all ranks; None if unknown.
        samples: indices of the first samples; None if unknown.
        seconds: approximate seconds in which a batch is made.
        are_own: whether each rank reads its own batches, which are not split over ranks.
    """

    size: int | None = None
    samples: list[int] | None = None
    seconds: float = 0.0
    are_own: bool = False


@dataclass(frozen=True)
class Placed:
    """The device of this rank.

    Attributes:
        placement: the device of each module.
        why: reason for the device.
    """

    placement: Placement
    why: str


@dataclass
class Identity:
    """Facts that identify a job, by which a resume compares it with the checkpoint's job.

    Attributes:
        model: facts about the model.
        trainer: a Trainer's facts about its job; None without a Trainer.
        data: facts about the data, if `prepare` was given data and a run folder.
        groups: the optimizers' parameter groups before `prepare` changed them.
        job: all facts, as a checkpoint stores them.
    """

    model: ModelFacts = field(default_factory=ModelFacts)
    trainer: dict[str, list[str]] | None = None
    data: dict[str, Any] | None = None
    groups: list[list[dict[str, Any]]] = field(default_factory=list)
    job: dict[str, Any] = field(default_factory=dict)


@dataclass
class TrainerValues:
    """Values that a Trainer gives to its Loop.

    Attributes:
        metadata: text that is stored with the weights in checkpoints.
        ids: rows of ids, for checkpoints.
        uncounted: makes a context in which metrics do not count batches.
        shows_notes: whether a progress line shows the notes.
        largest_batch: decision on `batch_size="auto"`, as plain data.
    """

    metadata: dict[str, str] = field(default_factory=dict)
    ids: dict[str, Any] | None = None
    uncounted: Callable[[], AbstractContextManager[None]] = nullcontext
    shows_notes: bool = False
    largest_batch: dict[str, Any] | None = None


class Checkpoint(Protocol):
    """A checkpoint that a Loop resumes from; `resume.Resume` implements it.

    Attributes:
        extra: the `extra` argument of the `save` that wrote the checkpoint.
        own: the `own` argument that each rank gave to that `save`.
    """

    extra: Any
    own: list[Any]

    def choices(self, requested: Recipe) -> tuple[dict[str, Choice], Mapping[str, Any]] | None:
        """Return the choices that the checkpoint's run made."""

    def check_data(self, source: Source, first: list[int] | None) -> None:
        """Raise if the data differ from the checkpoint's."""

    def put_back(self, loop: Any) -> None:
        """Restore weights, optimizers, progress and random states."""

    def put_back_source(self, source: Source) -> None:
        """Restore the position in the data."""


@dataclass
class Evaluation:
    """The objects that run evaluations.

    Attributes:
        in_pieces: runs a batch, as several micro-batches if memory runs out.
        batch_size: chooses the number of samples in a batch.
        graph: runs the forward as one compiled graph.
    """

    in_pieces: InPieces
    batch_size: EvaluateBatch
    graph: EvaluateGraph
