"""What Flatout's pipeline adds to each batch of data in memory, in small batches.

The same rows are gathered by hand and by the pipeline, pass after pass in turn. What is reported as
the time of a pass is the difference.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from itertools import count

import input_job
import torch

import flatout

ROWS, COLUMNS, BATCH = 32_768, 8, 32


def seconds(batches: Iterable[object]) -> float:
    begin = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - begin


def measure(by_hand: Callable[[int], float], by_pipeline: Callable[[int], float], least: float):
    """Differences of a pass each, for at least so many seconds after one of warm-up."""
    by_hand(0), by_pipeline(0)
    differences, begin = [], time.perf_counter()
    for epoch in count(1):
        differences.append(by_pipeline(epoch) - by_hand(epoch))
        if time.perf_counter() - begin >= least and epoch >= input_job.PASSES:
            return differences
    raise AssertionError


def main() -> None:
    arguments = input_job.start()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    inputs, labels = torch.randn(ROWS, COLUMNS), torch.randint(0, 2, (ROWS,))
    pipeline = flatout.data.arrays(inputs, labels).shuffle(seed=1).batch(BATCH)

    def by_pipeline(epoch: int) -> float:
        return seconds(pipeline.batches(epoch))

    def by_hand(epoch: int) -> float:
        rows = [batch.indices for batch in pipeline.batches(epoch)]
        return seconds((inputs.index_select(0, at), labels.index_select(0, at)) for at in rows)

    result = {
        "epoch_seconds": measure(by_hand, by_pipeline, arguments.seconds),
        "steps": ROWS / BATCH,
        "note": "",
    }
    arguments.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
