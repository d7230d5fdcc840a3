"""What comparing a row cache with its checksums takes of the first pass over it.

The same first pass is made with and without the comparison, in turn: once where the rows lie on the
disk, and once where the system has them in memory.
"""

from __future__ import annotations

import gc
import json
import os
import time
from statistics import median

import input_job

ARGUMENTS = input_job.start()
os.environ["FLATOUT_CACHE"] = str(ARGUMENTS.out.parent / "cache")

import numpy as np  # noqa: E402
import torch  # noqa: E402

import flatout  # noqa: E402
from flatout.data.conversion.convert import convert  # noqa: E402
from flatout.data.stores import checksums  # noqa: E402

ROWS, BATCH, PAIRS = 1_000_000, 4096, 5
FIELDS = input_job.NUMBERS + input_job.HASHED
COMPARE = checksums.Verified.check


def make_rows() -> str:
    """A row cache of click-through rows, 480 MB."""
    draws = np.random.default_rng(0)
    columns = {
        "y": draws.integers(0, 2, ROWS),
        "ids": draws.integers(0, 1 << 20, (ROWS, FIELDS)),
        "values": draws.random((ROWS, FIELDS), dtype=np.float32),
    }
    packed = ARGUMENTS.out.parent / "made.npz"
    np.savez(packed, **columns)
    source = flatout.data.npz(str(packed), ["ids", "values"])
    convert(source, ARGUMENTS.out.parent / "made.rows")
    packed.unlink()
    return str(ARGUMENTS.out.parent / "made.rows")


def leave_to_the_disk(folder: str) -> None:
    """Make the system forget what it has in memory of the rows; nothing may map them."""
    gc.collect()
    file = os.open(os.path.join(folder, "rows.bin"), os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def first_pass(folder: str, *, compare: bool, from_disk: bool) -> float:
    """Seconds of a first pass, as a run's own: no block was compared before."""
    checksums.Verified.check = COMPARE if compare else _nothing  # type: ignore[method-assign]
    if from_disk:
        leave_to_the_disk(folder)
    begin = time.perf_counter()
    pipeline = flatout.data.rows(folder).shuffle(seed=1).batch(BATCH)
    for _ in pipeline.options(threads=ARGUMENTS.threads).batches(0):
        pass
    return time.perf_counter() - begin


def _nothing(*arguments: object) -> None:
    """In place of the comparison."""


def share(folder: str, *, from_disk: bool) -> dict[str, float]:
    """Of the pass with the comparison, what it takes; the median over pairs, and all of them."""
    first_pass(folder, compare=True, from_disk=from_disk)
    with_it, without = [], []
    for pair in range(PAIRS):
        for compare in (True, False) if pair % 2 else (False, True):
            seconds = first_pass(folder, compare=compare, from_disk=from_disk)
            (with_it if compare else without).append(seconds)
    size = os.stat(os.path.join(folder, "rows.bin")).st_size
    return {
        "share": 1 - median(without) / median(with_it),
        "gb_per_s": size / median(without) / 1e9,
        "pairs": PAIRS,
    }


def main() -> None:
    torch.set_num_threads(ARGUMENTS.threads)
    folder = make_rows()
    result = {
        "disk": share(folder, from_disk=True),
        "memory": share(folder, from_disk=False),
    }
    ARGUMENTS.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
