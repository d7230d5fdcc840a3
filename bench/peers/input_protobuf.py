"""protobuf's C parser (upb), record by record, in a process for each core; no checksum is compared.

The files are cut into records in Python, shuffled, and parsed batch by batch.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator

import input_job
import numpy as np

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

from tensorflow.core.example.example_pb2 import Example

FIELDS = input_job.NUMBERS + input_job.HASHED


def records_of(path: str) -> list[bytes]:
    """Each is a length of 8 bytes, its checksum of 4, the message, and its checksum of 4."""
    with open(path, "rb") as file:
        data = file.read()
    found, at = [], 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 8], "little")
        found.append(data[at + 12 : at + 12 + length])
        at += length + 16
    return found


def parse(records: list[bytes]) -> input_job.Batch:
    labels = np.empty(len(records), np.int64)
    ids = np.empty((len(records), FIELDS), np.int64)
    values = np.empty((len(records), FIELDS), np.float32)
    for row, record in enumerate(records):
        feature = Example.FromString(record).features.feature
        labels[row] = feature["label"].int64_list.value[0]
        ids[row] = feature["ids"].int64_list.value
        values[row] = feature["values"].float_list.value
    return labels, ids, values


def main() -> None:
    arguments = input_job.start()
    files = input_job.files(arguments)
    size = input_job.BATCH[arguments.kind]

    def open_files() -> input_job.Pass:
        # Forked before TensorFlow does anything: its threads would not come along.
        pool = (
            multiprocessing.get_context("fork").Pool(arguments.threads)
            if arguments.threads > 1
            else None
        )

        def one_pass(epoch: int) -> Iterator[input_job.Batch]:
            records = [record for path in files for record in records_of(path)]
            order = np.random.default_rng(epoch).permutation(len(records)).tolist()
            batches = (
                [records[row] for row in order[begin : begin + size]]
                for begin in range(0, len(order), size)
            )
            return pool.imap_unordered(parse, batches) if pool else map(parse, batches)

        return one_pass

    input_job.measure(arguments, open_files)


if __name__ == "__main__":
    main()
