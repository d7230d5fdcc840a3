"""Flatout's own pipelines, with as many threads as there are cores.

The files' bytes stay in memory from pass to pass where they fit, as Flatout has it by default.
"""

from __future__ import annotations

import os

import input_job

ARGUMENTS = input_job.start()
# Every process builds its own index and cache, as on a machine that has never seen the files.
os.environ["FLATOUT_CACHE"] = str(ARGUMENTS.out.parent / "cache")

from collections.abc import Iterator  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402

import flatout  # noqa: E402
import flatout.data.pipeline  # noqa: E402  (no pass pays for the import)

FIELDS = input_job.NUMBERS + input_job.HASHED
CLICKS = {
    "columns": [
        {"name": "label", "dtype": "int64", "role": "target"},
        {"name": "ids", "dtype": "int64", "shape": [FIELDS]},
        {"name": "values", "dtype": "float32", "shape": [FIELDS]},
    ]
}


def source() -> Any:
    """Samples, not yet shuffled or in batches."""
    if ARGUMENTS.kind == "jpeg":
        return flatout.data.images(
            input_job.folder(ARGUMENTS),
            size=input_job.PIXELS,
            classes=input_job.CLASSES,
            reduced=True,
        )
    if ARGUMENTS.kind == "memory":
        return flatout.data.arrays(*input_job.memory(ARGUMENTS))
    files = input_job.files(ARGUMENTS)
    if ARGUMENTS.kind == "criteo":
        return flatout.data.criteo(files)
    rows = getattr(flatout.data, ARGUMENTS.kind)(files, schema=CLICKS)
    return rows.cache("disk") if ARGUMENTS.form == "cached" else rows


def open_files() -> input_job.Pass:
    size = input_job.BATCH[ARGUMENTS.kind]
    pipeline = source().shuffle(seed=1).batch(size).options(threads=ARGUMENTS.threads)

    def one_pass(epoch: int) -> Iterator[input_job.Batch]:
        for batch in pipeline.batches(epoch):
            inputs = batch.inputs
            yield batch.targets, *(inputs.values() if isinstance(inputs, dict) else (inputs,))

    return one_pass


def main() -> None:
    torch.set_num_threads(ARGUMENTS.threads)
    input_job.measure(ARGUMENTS, open_files)


if __name__ == "__main__":
    main()
