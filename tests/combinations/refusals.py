"""Combinations that the documentation says are refused, with the words of the refusals."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

PIPELINES = ("files", "mapped", "cache", "batch_map", "fifo")
SERVERS = ("parameter_server", "async")


def compiled(model: str) -> bool:
    """Return whether the model is a compiled Keras model."""
    return model.startswith("keras") and model != "keras_plain"


# Words of an error, and the rule for combinations that may be refused with this error.
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
    """Return the words of all refusals that the known values of axes already decide."""
    words = []
    for word, is_refused in REFUSED.items():
        with suppress(KeyError):  # an axis has no value yet
            if is_refused(known):
                words.append(word)
    return words
