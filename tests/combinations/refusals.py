"""What the pages say is refused: which combinations, and by which words."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

PIPELINES = ("files", "mapped", "cache", "batch_map", "fifo")
SERVERS = ("parameter_server", "async")


def compiled(model: str) -> bool:
    """Whether it is a compiled Keras model."""
    return model.startswith("keras") and model != "keras_plain"


# By the words of the error, the combinations of which any may be refused by it.
REFUSED: dict[str, Any] = {
    "has its own train_step": lambda c: c["model"] == "keras_train" and c["ranks"] > 1,
    "own train_step, so Keras' own loop reads": lambda c: (
        c["model"] == "keras_train"
        and c["ranks"] == 1
        and (c["data"] in PIPELINES or c["validation"] == "pipeline")
    ),
    "cuts the forward of torch modules": lambda c: (
        c["strategy"] == "staged" and c["model"].startswith("keras")
    ),
    "KerasOptimizer is not known to step": lambda c: (
        c["strategy"] in SERVERS and compiled(c["model"])
    ),
    "averages the state of torch's optimizers": lambda c: (
        c["strategy"] == "local_sgd" and compiled(c["model"])
    ),
    "compute.touched_rows=on cannot be had": lambda c: (
        c["kept"] == "tables" and c["strategy"] in ("fsdp", "staged", *SERVERS)
    ),
    "staged every rank reads the same batches": lambda c: (
        c["strategy"] == "staged" and c["data"] == "fifo"
    ),
    "ModelCheckpoint": lambda c: (
        c["strategy"] == "fsdp" and compiled(c["model"]) and c["callbacks"] == "checkpoint"
    ),
}


def refusals(known: Mapping[str, Any]) -> list[str]:
    """The words by which a combination may be refused; of an unfinished one those that are sure."""
    words = []
    for word, is_refused in REFUSED.items():
        with suppress(KeyError):  # of an axis that has no value yet
            if is_refused(known):
                words.append(word)
    return words
