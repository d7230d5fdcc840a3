"""What a user may write behind a source, stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from flatout.data.execution.batch_sampler import Last
from flatout.data.execution.samples import name_of
from flatout.data.normalization import Normalization

if TYPE_CHECKING:
    from flatout.data.execution.cache import Where


@dataclass(frozen=True)
class Shuffle:
    """A new order every epoch; within a window of rows where `window` says so."""

    seed: int
    window: int | None = None


@dataclass(frozen=True)
class Map:
    """A user's function: of one sample before `Batch`, of a whole batch behind it."""

    function: Callable[..., Any]


@dataclass(frozen=True)
class Filter:
    """Only the samples for which a user's function is true."""

    function: Callable[..., Any]


@dataclass(frozen=True)
class Batch:
    """Global batches of `size` samples."""

    size: int
    last: Last = "keep"
    window: int | None = None  # of batches within which rows of equal length come together


@dataclass(frozen=True)
class Cache:
    """Samples are kept as they are here."""

    where: Where
    folder: str | None = None


@dataclass(frozen=True)
class Repeat:
    """Several passes as one epoch."""

    times: int


@dataclass(frozen=True)
class Split:
    """One of the two parts of the samples."""

    fraction: float
    first: bool
    by: Literal["random", "order"]
    seed: int
    stratify: bool


@dataclass(frozen=True)
class Prefetch:
    """Batches are copied to a device ahead of need."""

    device: str
    depth: int


@dataclass(frozen=True)
class Normalize:
    """uint8 inputs become float32, when all else is done."""

    normalization: Normalization


@dataclass(frozen=True)
class Shard:
    """A rank's part.

    Attributes:
        rank: from 0.
        world_size: how many ranks there are.
        by: what is shared out.
        presharded: what is here belongs to this node alone.
        beside: with `presharded`, which of how many ranks of this node this is.
        steps: with `presharded`, batches in an epoch; None until the ranks have agreed.
    """

    rank: int
    world_size: int
    by: Literal["batch", "files", "rows"] = "batch"
    presharded: bool = False
    beside: tuple[int, int] = (0, 1)
    steps: int | None = None

    @property
    def has_own_rows(self) -> bool:
        """Whether ranks have rows of their own, rather than parts of the same batches."""
        return self.presharded or self.by != "batch"


Stage: TypeAlias = (
    Shuffle | Map | Filter | Batch | Cache | Repeat | Split | Shard | Prefetch | Normalize
)


def passes(stages: Sequence[Stage]) -> int:
    """Passes of an epoch that each end with a last batch of their own.

    As written: `batch(n).repeat(k)` repeats batches, `repeat(k).batch(n)` repeats samples, so that
    a batch may hold the end of one pass and the beginning of the next.
    """
    in_batches = False
    for stage in stages:
        if isinstance(stage, Repeat):
            return stage.times if in_batches else 1
        in_batches = in_batches or isinstance(stage, Batch)
    return 1


def samples_times(stages: Sequence[Stage]) -> int:
    """How often each sample comes between two borders of passes."""
    times = next((stage.times for stage in stages if isinstance(stage, Repeat)), 1)
    return times // passes(stages)


def words(stage: Stage) -> str:
    """Short, for people, such as "shuffle" or "batch"."""
    return type(stage).__name__.lower()


def call(stage: Stage) -> str:
    """As it was written, but for what it leaves open: "shuffle(seed=1)", "batch(64)"."""
    told = []
    for field in fields(stage):
        value = getattr(stage, field.name)
        if callable(value):
            told.append(name_of(value))
        elif field.name in ("size", "times", "where", "fraction"):
            told.append(repr(value))
        elif value != field.default:
            told.append(f"{field.name}={value!r}")
    return f"{words(stage)}({', '.join(told)})"
