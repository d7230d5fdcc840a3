"""The stages that a user writes behind a source of samples."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from flatout.data.execution.batch_sampler import Last, check_batch_size, whole_number
from flatout.data.normalization import Normalization
from flatout.data.stages import (
    Batch,
    Cache,
    Filter,
    Map,
    Normalize,
    Prefetch,
    Repeat,
    Shard,
    Shuffle,
    Split,
    Stage,
)
from flatout.errors import DataError
from flatout.world import place

if TYPE_CHECKING:
    from flatout.data.execution.cache import Where
    from flatout.data.pipeline import Pipeline

_BY_LENGTH_WINDOW = 64


class Staged:
    """What stages can be written behind."""

    def _with(self, stage: Stage) -> Pipeline:
        raise NotImplementedError

    def shuffle(self, seed: int = 0, *, window: int | None = None) -> Pipeline:
        """A new order every epoch, a function of (seed, epoch) alone.

        Args:
            seed: of the orders.
            window: shuffle only among so many neighbors, for streams and for files that do not fit
                in memory; None shuffles all.
        """
        try:
            seed = operator.index(seed)
        except TypeError:
            raise DataError(f"shuffle: expected an int as seed, found {seed!r}") from None
        if window is not None and window < 2:
            raise DataError(f"shuffle: a window has at least 2 rows, found {window}")
        return self._with(Shuffle(seed, window))

    def map(self, function: Callable[..., Any]) -> Pipeline:
        """A function of each sample, or, behind `batch`, of each whole batch.

        It gets what the model would get: `function(inputs)`, `function(inputs, targets)`, or with
        the weight, as tensors; and gives x, (x, y) or (x, y, weight). With a parameter `rng` it
        gets a numpy Generator that depends on (seed, epoch, sample) alone. A function that draws
        from the global generators runs in the thread that iterates.
        """
        return self._with(Map(_callable("map", function)))

    def normalize(
        self, mean: float | Sequence[float] = 0.0, std: float | Sequence[float] = 1.0
    ) -> Pipeline:
        """uint8 images as float32: scaled to 0..1, then `(x - mean) / std`.

        It runs last, wherever it is written, so that caches hold bytes; a Trainer copies bytes to
        its device and normalizes there. What a model was trained with is saved with it.

        Args:
            mean: of pixels from 0 to 1, for each channel or one for all.
            std: their standard deviation, likewise.

        Raises:
            DataError: the numbers make no sense.
        """
        return self._with(Normalize(Normalization.of(mean, std)))

    def filter(self, function: Callable[..., Any]) -> Pipeline:
        """Only the samples for which the function is true; it gets what `map` gives.

        One pass over all samples finds them, so that they can be counted and shuffled.
        """
        return self._with(Filter(_callable("filter", function)))

    def batch(self, size: int, *, last: Last = "keep", by_length: bool | int = False) -> Pipeline:
        """Global batches of `size` samples.

        Args:
            size: samples of a batch, over all ranks.
            last: of a smaller last batch: "keep" it, "drop" it, or "pad" it to `size` with samples
                of its own that weigh nothing.
            by_length: bring rows of about the same length together, among so many batches; True
                means 64. It saves padding and changes the order.
        """
        if last not in ("keep", "drop", "pad"):
            raise DataError(f"last: expected 'keep', 'drop' or 'pad', found {last!r}")
        window = _BY_LENGTH_WINDOW if by_length is True else int(by_length) or None
        return self._with(Batch(check_batch_size(size), last, window))

    def cache(self, where: Where = "auto", *, folder: str | None = None) -> Pipeline:
        """Keep samples as they are here, so that they are read and made once.

        Args:
            where: "memory", "disk", or "auto": memory where it fits, else the disk. The size counts
                decoded; where it does not fit, that is an error with the numbers.
            folder: on the disk, where; None means the cache folder.
        """
        if where not in ("auto", "memory", "disk"):
            raise DataError(f"cache: expected 'auto', 'memory' or 'disk', found {where!r}")
        return self._with(Cache(where, folder))

    def repeat(self, times: int) -> Pipeline:
        """Several passes as one epoch, each in an order of its own.

        Behind `batch` each pass ends with its own last batch, which may be smaller; before it, a
        batch may hold the end of one pass and the beginning of the next.
        """
        return self._with(Repeat(whole_number("repeat: times", times, 1)))

    def split(
        self,
        fraction: float,
        *,
        by: Literal["random", "order"] = "random",
        seed: int = 0,
        stratify: bool = False,
    ) -> tuple[Pipeline, Pipeline]:
        """Two pipelines over different samples, with the same stages.

        Args:
            fraction: of the samples in the first part.
            by: "random", a function of `seed`; or "order": the first part comes before the second,
                as days do.
            seed: of the choice.
            stratify: share out each class alike.

        Raises:
            DataError: the fraction is not between 0 and 1, or stratify goes with by="order".
        """
        if not isinstance(fraction, (int, float)) or not 0 < fraction < 1:
            raise DataError(f"split: expected a fraction between 0 and 1, found {fraction!r}")
        if by not in ("random", "order"):
            raise DataError(f"split: by is 'random' or 'order', found {by!r}")
        if stratify and by == "order":
            raise DataError("split: stratify shares out at random, so it cannot go by order")
        first, second = (
            self._with(Split(fraction, own, by, seed, stratify)) for own in (True, False)
        )
        return first, second

    def prefetch(self, device: str, *, depth: int = 2) -> Pipeline:
        """Copy batches to a device while the ones before are computed on.

        A Trainer does that by itself where it trains on a GPU.

        Args:
            device: as torch names it.
            depth: batches on their way at once; 2 is double buffering.
        """
        _check_device(device)
        return self._with(Prefetch(device, whole_number("prefetch: depth", depth, 1)))

    def shard(
        self,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        by: Literal["batch", "files", "rows"] = "batch",
        presharded: bool = False,
        steps: int | None = None,
    ) -> Pipeline:
        """The part of one rank. All ranks make equally many steps; no sample is lost or repeated.

        A Trainer and a Loop give each rank its share of every batch by themselves. Write it where
        ranks should have samples of their own, or for a loop without either.

        Args:
            rank: from 0. Without rank and world size, those of this process.
            world_size: how many ranks there are.
            by: "batch" gives every rank its share of each global batch, so that the order is the
                same on any number of ranks; "files" and "rows" give it samples of its own, which
                spares reading what others read.
            presharded: the files here are this node's alone already, as ShardedByS3Key leaves them;
                its ranks share them out. With a rank given, they are that rank's alone.
            steps: with `presharded`, batches in an epoch, the same number on every rank. A Trainer
                finds it out: samples of all ranks / batch size, rounded up.

        Raises:
            DataError: it makes no sense.
        """
        if (rank is None) != (world_size is None):
            raise DataError("shard: pass both rank and world_size, or neither")
        if by not in ("batch", "files", "rows"):
            raise DataError(f"shard: by is 'batch', 'files' or 'rows', found {by!r}")
        if steps is not None and not presharded:
            raise DataError("shard: steps= is for presharded=True alone")
        if rank is None or world_size is None:
            here = place()
            beside = (here.local_rank, here.local_world_size)
            return self._with(
                Shard(here.rank, here.world_size, by, presharded, beside, _steps(steps))
            )
        if not 0 <= rank < world_size:
            raise DataError(f"shard: expected a rank from 0 to {world_size - 1}, found {rank}")
        return self._with(Shard(rank, world_size, by, presharded, steps=_steps(steps)))


def _steps(steps: int | None) -> int | None:
    return None if steps is None else whole_number("shard: steps", steps, 1)


def _check_device(device: str) -> None:
    """Refuse what torch has no name for, or cannot use here."""
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError):
        raise DataError(
            f"prefetch: expected a device such as 'cuda' or 'cuda:1', found {device!r}"
        ) from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise DataError("prefetch: there is no CUDA device that this torch can use")


def _callable(stage: str, function: Any) -> Callable[..., Any]:
    if not callable(function):
        raise DataError(f"{stage} wants a function, found {type(function).__name__}")
    return function  # type: ignore[no-any-return]
