"""polars: read whole files as CSV, and take shuffled rows of its arrays.

It reads LibSVM only where all rows have the same number of values, as here: colons become spaces,
and each index and each value is a column.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import input_job

ARGUMENTS = input_job.start()
os.environ["POLARS_MAX_THREADS"] = str(ARGUMENTS.threads)

import polars as pl  # noqa: E402

NUMBERS = [f"number{field}" for field in range(input_job.NUMBERS)]
HASHES = [f"hash{field}" for field in range(input_job.HASHED)]
FIELDS = range(input_job.NUMBERS + input_job.HASHED)
IDS = [f"id{field}" for field in FIELDS]
VALUES = [f"value{field}" for field in FIELDS]
SPACES = bytes.maketrans(b":", b" ")


def libsvm(epoch: int) -> Iterator[input_job.Batch]:
    schema: dict[str, type[pl.DataType]] = {"label": pl.Int64}
    for number, value in zip(IDS, VALUES, strict=True):
        schema |= {number: pl.Int64, value: pl.Float32}
    frames = []
    for path in input_job.files(ARGUMENTS):
        with open(path, "rb") as file:
            text = file.read().translate(SPACES)
        frames.append(
            pl.read_csv(text, separator=" ", has_header=False, schema=schema, quote_char=None)
        )
    frame = pl.concat(frames)
    return shuffled(epoch, frame, IDS, VALUES)


def criteo(epoch: int) -> Iterator[input_job.Batch]:
    schema = {"label": pl.Float32}
    schema |= dict.fromkeys(NUMBERS, pl.Float32) | dict.fromkeys(HASHES, pl.String)
    files = input_job.files(ARGUMENTS)
    read = pl.scan_csv(files, separator="\t", has_header=False, schema=schema, quote_char=None)
    numbers = pl.col(NUMBERS).fill_null(0)
    hashes = pl.col(HASHES).str.to_integer(base=16, dtype=pl.Int64).fill_null(0)
    frame = read.with_columns(numbers, hashes).collect(engine="streaming")
    return shuffled(epoch, frame, NUMBERS, HASHES)


def shuffled(epoch: int, frame: pl.DataFrame, *groups: list[str]) -> Iterator[input_job.Batch]:
    columns = [frame.select(names).to_numpy(order="c") for names in groups]
    return input_job.shuffled(ARGUMENTS, epoch, frame["label"].to_numpy(), *columns)


def main() -> None:
    one_pass = {"libsvm": libsvm, "criteo": criteo}[ARGUMENTS.kind]
    input_job.measure(ARGUMENTS, lambda: one_pass)


if __name__ == "__main__":
    main()
