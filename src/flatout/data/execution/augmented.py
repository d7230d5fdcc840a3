"""Images that are changed at random, by numbers that depend on (seed, epoch, sample) alone."""

from __future__ import annotations

from functools import cached_property
from hashlib import blake2b
from time import perf_counter_ns as clock
from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.data.augmentation.augmentation import Augmentation, Pixels
from flatout.data.batches.batch import named_tensors
from flatout.data.batches.form import Form, Tree
from flatout.data.digests.digests import digest_of
from flatout.data.execution.samples import Costs, Decoded, Lender, LentRows, Samples
from flatout.data.execution.turns import Turns, turns_left
from flatout.data.randomness import Draws
from flatout.data.reading.block import Block, Numbers, Values
from flatout.data.reading.buffers import Buffers
from flatout.errors import DataError

# Numbers of channels of an image in memory.
_CHANNELS = (1, 3, 4)
# Index, in a sample's sequence of random numbers, of its view; the augmentation uses other indices.
_VIEW = 2**20


class Augmented:
    """Samples whose images are changed at random. Follows `Samples`."""

    def __init__(
        self, inner: Samples, augmentation: Augmentation, seed: int, place: int = 0
    ) -> None:
        self.inner = inner
        self.augmentation = augmentation
        self.seed, self.place = seed, place
        self.rows, self.random = inner.rows, inner.random
        self.name = f"augment({augmentation})"

    def over(self, inner: Samples) -> Augmented:
        return Augmented(inner, self.augmentation, self.seed, self.place)

    @property
    def probe(self) -> int:
        return self.inner.probe

    @property
    def draws(self) -> bool:
        return self.inner.draws

    @property
    def form(self) -> Form:
        return self.inner.form

    @property
    def digest(self) -> str:
        return digest_of(self.inner.digest, self.name)

    def content(self) -> str | None:
        """Return a digest of the samples before this stage and of `words`."""
        inner = self.inner.content()
        return None if inner is None else digest_of(inner, *self.words)

    @property
    def words(self) -> tuple[str, str]:
        """Texts of settings that decide the results; with fixed views, also of the random draws."""
        if self.augmentation.views is None:
            return self.name, ""
        drawn = "number" if self._row_words is None else "name"
        return self.name, f"{self.seed} {self.place} {drawn}"

    @property
    def draws_by_number(self) -> bool:
        """Whether the possible results of a sample depend on its number."""
        return self.augmentation.views is not None and self._row_words is None

    @cached_property
    def _row_words(self) -> Numbers | None:
        samples: Any = self.inner
        while hasattr(samples, "inner"):
            samples = samples.inner
        keys = samples.source.row_keys() if isinstance(samples, Decoded) else None
        if keys is None:
            return None
        data = b"".join(
            blake2b(key.encode(errors="surrogateescape"), digest_size=8).digest() for key in keys
        )
        return np.frombuffer(data, "<i8").astype(np.int64)

    @property
    def own_variants(self) -> int | None:
        """Number of results of this stage for one image; None if they are not limited.

        `varying.variants` counts all stages together.
        """
        return self.augmentation.variants

    def own_variant(self, numbers: Numbers, epoch: Turns) -> Numbers:
        """Return which result each sample gets in an epoch: int64 of shape (rows,).

        `make` draws the same results.
        """
        if self.augmentation.views is None:
            return self.augmentation.variant(self._draws(numbers, epoch))
        return self._view(numbers, epoch)

    def _view(self, numbers: Numbers, epoch: Turns) -> Numbers:
        assert self.augmentation.views is not None
        draws = Draws(self._known_by(numbers), self.seed, self.place, 0, epoch)
        return draws.below(self.augmentation.views, _VIEW)

    def _draws(self, numbers: Numbers, epoch: Turns) -> Draws:
        if self.augmentation.views is None:
            return Draws(numbers, self.seed, self.place, 0, epoch)
        view = self._view(numbers, epoch)
        return Draws(self._known_by(numbers), self.seed, self.place, 1, view)

    def _known_by(self, numbers: Numbers) -> Numbers:
        return numbers if self._row_words is None else self._row_words[numbers]

    def make(self, numbers: Numbers, buffers: Buffers, epoch: Turns, costs: Costs) -> Block:
        lent = None
        if isinstance(self.inner, Lender):
            lent = self.inner.lend(numbers, buffers, costs, self._is_of_use)
        if lent is None:
            block = self.inner.make(numbers, buffers, epoch, costs)
            lent = LentRows(block, {}, np.arange(len(block)))
        start = clock()
        turns = turns_left(epoch, numbers, lent.block.numbers)
        made = self._apply(lent, turns, buffers)
        costs.add(self.name, clock() - start)
        return made

    def _is_of_use(self, name: str, values: npt.NDArray[Any]) -> bool:
        return name in _columns(self.inner.form.inputs) and _are_pixels(values)

    def apply(self, block: Block, epoch: Turns) -> Block:
        return self._apply(LentRows(block, {}, np.arange(len(block))), epoch, Buffers())

    def _apply(self, lent: LentRows, epoch: Turns, buffers: Buffers) -> Block:
        block = Block({**lent.block.columns, **lent.whole}, lent.block.numbers)
        if not len(block):
            return lent.block
        draws = self._draws(block.numbers, epoch)
        columns = dict(block.columns)
        for name in self._image_columns(block):
            places = lent.places if name in lent.whole else None
            columns[name] = self._changed(columns[name], places, draws, buffers)
        return Block(columns, block.numbers)

    def _image_columns(self, block: Block) -> list[str]:
        form = self.inner.form
        inputs = _columns(form.inputs)
        images = [name for name in inputs if is_image(block.columns[name])]
        if not images:
            columns = ", ".join(f"{name} {_words(block.columns[name])}" for name in inputs)
            raise DataError(
                f"augment: expected images among the inputs, each of shape (channels, height, "
                f"width) or (height, width, channels), found {columns}",
                where=self.where(int(block.numbers[0])),
                do="leave augment out, or give gray images of floats a dimension of one channel",
            )
        if masks := [name for name in _columns(form.targets) if _ndim(block.columns[name]) > 2]:
            raise DataError(
                f"augment: the target {masks[0]} is {_words(block.columns[masks[0]])}, which would "
                "not move with the pixels of its image",
                where=self.where(int(block.numbers[0])),
                do="change both in a map with a function that takes rng",
            )
        return images

    def _changed(
        self, values: Values, places: Numbers | None, draws: Draws, buffers: Buffers
    ) -> npt.NDArray[Any]:
        assert isinstance(values, np.ndarray)
        pixels = as_pixels(values) if places is None else _seen_as_pixels(values)
        _, height, width, channels = pixels.shape
        self.augmentation.check(height, width, channels, pixels.dtype)
        made = self.augmentation(pixels, draws, buffers, places)
        if values.ndim == 3:
            return made[..., 0]
        return made if _has_channels_last(values) else made.transpose(0, 3, 1, 2)

    def where(self, number: int) -> str:
        return self.inner.where(number)


def _columns(tree: Tree) -> list[str]:
    leaves: list[Any] = [leaf for _, leaf in named_tensors("", tree)]
    return list(dict.fromkeys(leaf.column for leaf in leaves))


def is_image(values: Values) -> bool:
    return _ndim(values) == 4 or (_ndim(values) == 3 and values.dtype == np.uint8)  # type: ignore[union-attr]


def as_pixels(values: npt.NDArray[Any]) -> Pixels:
    return np.ascontiguousarray(_seen_as_pixels(values))


def _seen_as_pixels(values: npt.NDArray[Any]) -> Pixels:
    if values.ndim == 3:
        return values[..., np.newaxis]
    return values if _has_channels_last(values) else values.transpose(0, 2, 3, 1)


def _are_pixels(values: npt.NDArray[Any]) -> bool:
    if not is_image(values):
        return False
    pixels = _seen_as_pixels(values)
    return all(
        pixel.flags.c_contiguous and pixels.strides[0] >= pixel.nbytes for pixel in pixels[:1]
    )


def _has_channels_last(values: npt.NDArray[Any]) -> bool:
    return values.shape[3] in _CHANNELS and values.shape[1] not in _CHANNELS


def _ndim(values: Values) -> int:
    return values.ndim if isinstance(values, np.ndarray) else 0


def _words(values: Values) -> str:
    if not isinstance(values, np.ndarray):
        return "of vectors of different lengths"
    return f"{values.dtype} of shape {values.shape[1:]}"
