"""Base class of all stages of a pipeline. Each other file of this folder holds one stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import numpy.typing as npt

from flatout.data.augmentation.blend import Blend
from flatout.data.digests.digests import function_digest
from flatout.data.execution.batch_sampler import BatchSampler, Order
from flatout.data.execution.cache import Cached
from flatout.data.execution.samples import Samples, name_of
from flatout.data.reading.block import Block, Numbers
from flatout.data.reading.origins import Stream
from flatout.errors import DataError

P = TypeVar("P")
S = TypeVar("S", bound="Stage")
# A function that makes a stream's blocks of one pass into other blocks. Its arguments are the
# blocks and the number of the pass.
Step: TypeAlias = Callable[[Iterator[Block], int], Iterator[Block]]


class Writable(Generic[P]):
    """Base of classes to which a stage can be added; adding one returns a P."""

    def _with(self, stage: Stage) -> P:
        raise NotImplementedError


@dataclass(frozen=True)
class Options:
    """Resources that a pipeline may use.

    Attributes:
        threads: number of threads that make batches; None chooses one while running.
        processes: number of processes that make batches, in place of threads; None uses processes
            only where the user's Python code slows the threads down.
        depth: number of batches made ahead; None means two for each thread, plus one.
        memory: maximum bytes that a cache may use; None means half of the free memory.
        seed: seed of functions that draw random numbers, where no shuffle has a seed.
    """

    threads: int | None = None
    processes: int | None = None
    depth: int | None = None
    memory: int | None = None
    seed: int = 0


@dataclass
class Plan:
    """The work that the stages have added to a source so far, one stage after the other.

    Attributes:
        origin: the source as the user gave it.
        base: samples of the source, before all stages.
        stages: all stages, including those that have not been applied yet.
        seed: seed of functions that draw random numbers.
        order_seed: seed of the order of rows; None if nothing shuffles.
        options: resources that the pipeline may use.
        say: prints a line for the user.
        numbers: indices of the chosen rows, ascending.
        everywhere: number of rows, of all ranks, before each rank dropped rows of other ranks; None
            if every rank has all rows.
        labels: the class of each row of `numbers` if a stage needs classes; else None.
        samples: the samples after the stages applied so far.
        passed: the stages applied so far.
        batched: whether `batch` is among `passed`.
        blends: blends of the samples of a whole batch, which run before `functions`. Each batch
            gets one of the blends.
        functions: functions that get whole batches.
        steps: for a stream, the functions that its blocks go through.
        runs: names of the steps that run, in their order.
        moved: lines that name stages which run elsewhere than written, and why the result is equal.
        notes: other lines that the user should read.
        caches: the caches of the pipeline.
    """

    origin: Any
    base: Any
    stages: Sequence[Stage]
    seed: int
    order_seed: int | None
    options: Options
    say: Callable[[str], None]
    numbers: Numbers
    everywhere: int | None = None
    labels: npt.NDArray[Any] | None = None
    samples: Samples = field(init=False)
    passed: list[Stage] = field(default_factory=list)
    batched: bool = False
    blends: list[Blend] = field(default_factory=list)
    functions: list[Callable[..., Any]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    caches: list[Cached] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.samples = self.base

    @property
    def may_be_empty(self) -> bool:
        """Whether a rank may have no rows; `Pipeline.agreed` then checks that one has some."""
        return any(getattr(stage, "has_own_rows", False) for stage in self.stages)


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline. A subclass overrides only the methods in which it has an effect.

    Attributes:
        once: whether the stage may be in a pipeline only once.
        by_number: whether the stage needs rows that can be found by index.
    """

    once: ClassVar[bool] = False
    by_number: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """Short name for the user, such as "shuffle" or "batch"."""
        return type(self).__name__.lower()

    def __str__(self) -> str:
        """Return the stage as written, without defaults: "shuffle(seed=1)", "batch(64)"."""
        arguments = []
        for each in fields(self):
            value = getattr(self, each.name)
            if callable(value):
                arguments.append(name_of(value))
            elif each.name in ("size", "times", "where", "fraction"):
                arguments.append(repr(value))
            elif value != each.default:
                arguments.append(f"{each.name}={value!r}")
        return f"{self.name}({', '.join(arguments)})"

    def resume_words(self) -> str | None:
        """Return the text that a resume compares; None if the stage does not change batches."""
        return f"{self.name} {', '.join(f'{name}={value}' for name, value in vars(self).items())}"

    @property
    def chooses(self) -> bool:
        """Whether the stage leaves out some rows."""
        return False

    @property
    def reorders(self) -> bool:
        """Whether the stage changes the order of rows."""
        return False

    @property
    def repeats(self) -> bool:
        """Whether a row may occur several times in an epoch."""
        return False

    def check(self, before: Sequence[Stage], behind: Sequence[Stage]) -> None:
        """Refuse a stage that makes no sense with the stages before and after it."""

    def check_mixed(self) -> None:
        """Refuse a stage that makes no sense after `mix`."""
        if self.chooses:
            raise DataError(f"{self.name} comes after mix", do=f"{self.name} each source before it")

    def check_stream(self, stream: Stream, stages: Sequence[Stage]) -> None:
        """Refuse a stage that cannot process rows which come in sequence."""
        if self.by_number:
            raise DataError(
                f"{self.name} wants rows that can be found by number, and a stream has none",
                do="convert the data to files first: flatout data convert",
            )

    def check_convert(self) -> None:
        """Refuse a stage whose results are no rows that can be written."""

    def choose(self, plan: Plan) -> None:
        """Choose rows. All stages choose before any stage makes samples."""

    def make(self, plan: Plan) -> None:
        """Add the stage's work on each row, or on each whole batch, to the plan."""

    def turn(self, stages: Sequence[Stage]) -> int:
        """Return a sort key: `order` of stages with lower keys is called first; 0: no effect."""
        return 0

    def order(self, order: Order, plan: Plan) -> Order:
        return order

    def share(self, batches: BatchSampler, plan: Plan) -> BatchSampler:
        return batches

    def stream(self, plan: Plan) -> None:
        """Add the stage's work on the rows of a stream to the plan."""

    def counted(self, rows: int | None) -> int | None:
        """Return the number of a stream's rows that are left, or None if it is not known."""
        return rows


@dataclass(frozen=True)
class Function(Stage):
    """A stage with a user's function."""

    function: Callable[..., Any]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise DataError(f"{self.name} wants a function, found {type(self.function).__name__}")

    def resume_words(self) -> str:
        code = function_digest(self.function)[:8]
        return f"{self.name} {name_of(self.function)} (code {code})"


def only(stages: Sequence[Stage], kind: type[S]) -> S | None:
    """Return the first stage of a kind, or None."""
    return next((stage for stage in stages if isinstance(stage, kind)), None)
