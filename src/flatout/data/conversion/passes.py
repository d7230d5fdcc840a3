"""One pass over all rows, made by threads and returned in order."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from itertools import pairwise
from typing import NamedTuple, TypeVar

from flatout.data.execution.samples import Costs, Samples
from flatout.data.reading.block import Block, Numbers
from flatout.data.reading.buffers import Buffers
from flatout.data.stores.row_store import row_bytes
from flatout.data.workers.parallel import Ahead, Tuner
from flatout.measure import usable_cpus

T = TypeVar("T")

# Maximum number of rows of a piece.
_MOST_ROWS = 1 << 16


class Piece(NamedTuple):
    """Rows that are made at once.

    Attributes:
        part: index of the output part, such as a shard, that the rows belong to.
        start: position of the first row in the order of all rows.
        stop: position after the last row.
    """

    part: int
    start: int
    stop: int


def pieces_of(sizes: Sequence[int], probe: Block, piece_bytes: int) -> list[Piece]:
    """Split parts of these numbers of rows into pieces of about the same size in each part."""
    most = int(min(max(piece_bytes / row_bytes(probe), 1), _MOST_ROWS))
    pieces, start = [], 0
    for part, size in enumerate(sizes):
        count = -(-size // most)
        cuts = [start + size * i // count for i in range(count + 1)]
        pieces += [Piece(part, a, b) for a, b in pairwise(cuts)]
        start += size
    return pieces


def made(
    samples: Samples, numbers: Numbers, pieces: Sequence[Piece], use: Callable[[Block], T]
) -> Generator[T, None, None]:
    buffers = Buffers()

    def one(at: int) -> T:
        piece = pieces[at]
        return use(samples.make(numbers[piece.start : piece.stop], buffers, 0, Costs()))

    threads = usable_cpus()
    tuner = Tuner(threads, threads=threads, depth=threads + 2)
    with closing(iter(Ahead(one, 0, len(pieces), tuner))) as ahead:
        yield from ahead
