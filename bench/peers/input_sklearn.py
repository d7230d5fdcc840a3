"""scikit-learn: `load_svmlight_file` in a process for each core, and shuffled rows of the arrays.

It holds Python's lock, so threads gain nothing. That all rows have the same number of values is
used as well: they are taken from plain arrays, which is faster than rows of a sparse matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import input_job
import numpy as np
from sklearn.datasets import load_svmlight_file

FIELDS = input_job.NUMBERS + input_job.HASHED


def load(path: str) -> tuple[np.ndarray, ...]:
    matrix, labels = load_svmlight_file(path, dtype=np.float32, zero_based=True)
    ids = matrix.indices.astype(np.int64).reshape(-1, FIELDS)
    return labels.astype(np.int64), ids, matrix.data.reshape(-1, FIELDS)


def main() -> None:
    arguments = input_job.start()
    files = input_job.files(arguments)

    def open_files() -> input_job.Pass:
        pool = ProcessPoolExecutor(arguments.threads) if arguments.threads > 1 else None

        def one_pass(epoch: int) -> Iterator[input_job.Batch]:
            loaded = pool.map(load, files) if pool else map(load, files)
            columns = map(np.concatenate, zip(*loaded, strict=True))
            return input_job.shuffled(arguments, epoch, *columns)

        return one_pass

    input_job.measure(arguments, open_files)


if __name__ == "__main__":
    main()
