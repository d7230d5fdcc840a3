"""What a stage may do. A file beside this one for each stage says what it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import numpy.typing as npt

from flatout.data.block import Block, Numbers
from flatout.data.execution.batch_sampler import BatchSampler, Order
from flatout.data.execution.blend import Blend
from flatout.data.execution.cache import Cached
from flatout.data.execution.digests import function_digest
from flatout.data.execution.samples import Samples, name_of
from flatout.data.origins import Stream
from flatout.errors import DataError

P = TypeVar("P")
S = TypeVar("S", bound="Stage")
# What becomes of the blocks of a stream in a pass of that number.
Step: TypeAlias = Callable[[Iterator[Block], int], Iterator[Block]]


class Writable(Generic[P]):
    """What a stage can be written behind, which gives a P."""

    def _with(self, stage: Stage) -> P:
        raise NotImplementedError


@dataclass(frozen=True)
class Options:
    """What a pipeline may use.

    Attributes:
        threads: that make batches; None finds out while running.
        processes: that make batches, in place of threads; None uses some only where a user's Python
            holds the threads up.
        depth: batches made ahead; None means two a thread and one.
        memory: bytes that a cache may take; None means half of what is free.
        seed: of functions that draw, where no shuffle gives one.
    """

    threads: int | None = None
    processes: int | None = None
    depth: int | None = None
    memory: int | None = None
    seed: int = 0


@dataclass
class Plan:
    """What stages have made of a source so far, one after the other.

    Attributes:
        origin: the source as it was given.
        base: its samples.
        stages: all of them, those to come included.
        seed: of functions that draw.
        order_seed: of orders; None where nothing shuffles.
        options: what may be used.
        say: gets a line for people.
        numbers: the rows that take part, ascending.
        everywhere: how many took part before a rank kept only its own; None where all have all.
        labels: the class of each of `numbers`, where that matters; None elsewhere.
        samples: what the rows have become.
        passed: stages that have been gone through.
        batched: whether `batch` is among them.
        blends: of whole batches' samples, before functions; each batch gets one of them.
        functions: of whole batches.
        steps: of a stream: what becomes of its blocks.
        runs: names of what runs, in their order.
        moved: what runs elsewhere than it was written, and why that is the same.
        notes: what else the user should know.
        caches: the caches in it.
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
        """Whether other ranks may have all rows; then `Pipeline.agreed` sees that one has some."""
        return any(getattr(stage, "has_own_rows", False) for stage in self.stages)


@dataclass(frozen=True)
class Stage:
    """What was written behind a source. A stage says here what differs from doing nothing.

    Attributes:
        once: whether it may stand in a pipeline only once.
        by_number: whether it wants rows that can be found by number.
    """

    once: ClassVar[bool] = False
    by_number: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """Short, for people, such as "shuffle" or "batch"."""
        return type(self).__name__.lower()

    def __str__(self) -> str:
        """As it was written, but for what it leaves open: "shuffle(seed=1)", "batch(64)"."""
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
        """What a resume compares; None where batches hold the same without it."""
        return f"{self.name} {', '.join(f'{name}={value}' for name, value in vars(self).items())}"

    @property
    def chooses(self) -> bool:
        """Whether some rows take no part."""
        return False

    @property
    def reorders(self) -> bool:
        """Whether rows come otherwise than one after the other."""
        return False

    @property
    def repeats(self) -> bool:
        """Whether a row may come several times in an epoch."""
        return False

    def check(self, before: Sequence[Stage], behind: Sequence[Stage]) -> None:
        """Refuse what makes no sense with the stages before and behind it."""

    def check_mixed(self) -> None:
        """Refuse what makes no sense behind `mix`."""
        if self.chooses:
            raise DataError(f"{self.name} comes after mix", do=f"{self.name} each source before it")

    def check_stream(self, stream: Stream, stages: Sequence[Stage]) -> None:
        """Refuse what cannot be done with rows that come one after the other."""
        if self.by_number:
            raise DataError(
                f"{self.name} wants rows that can be found by number, and a stream has none",
                do="convert the data to files first: flatout data convert",
            )

    def check_convert(self) -> None:
        """Refuse what makes no rows that could be written."""

    def choose(self, plan: Plan) -> None:
        """Choose rows: all stages do so before any of them makes something."""

    def make(self, plan: Plan) -> None:
        """Add to what becomes of a row, or of a whole batch."""

    def turn(self, stages: Sequence[Stage]) -> int:
        """When `order` is called, relative to other stages; 0 where it does nothing."""
        return 0

    def order(self, order: Order, plan: Plan) -> Order:
        """Change the order of rows."""
        return order

    def share(self, batches: BatchSampler, plan: Plan) -> BatchSampler:
        """Change which rows form which batch."""
        return batches

    def stream(self, plan: Plan) -> None:
        """Add to what becomes of the rows of a stream."""

    def counted(self, rows: int | None) -> int | None:
        """How many of a stream's rows are left, where that is known."""
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
    """The first stage of a kind; None where there is none."""
    return next((stage for stage in stages if isinstance(stage, kind)), None)
