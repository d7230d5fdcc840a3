"""Input: whatever a user hands over becomes batches in an order that is a function.

Names load lazily, because torch is not needed before the first of them is.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatout.data.batch import Batch
    from flatout.data.conversion.convert import convert
    from flatout.data.files import unpack
    from flatout.data.inspection.inspect import inspect
    from flatout.data.mixture import mix
    from flatout.data.pipeline import Pipeline
    from flatout.data.schema import Column, Schema
    from flatout.data.sealing import seal
    from flatout.data.source import Source, as_source
    from flatout.data.sources.arrays import Arrays, arrays
    from flatout.data.sources.criteo import criteo
    from flatout.data.sources.csv import csv
    from flatout.data.sources.dataset import dataset
    from flatout.data.sources.digits import digits
    from flatout.data.sources.fetch import fetch
    from flatout.data.sources.fifo import fifo
    from flatout.data.sources.hdf5 import hdf5
    from flatout.data.sources.idx import idx, idx_split
    from flatout.data.sources.images import images
    from flatout.data.sources.iterable import iterable
    from flatout.data.sources.libsvm import libsvm
    from flatout.data.sources.npy import npy, npz
    from flatout.data.sources.parquet import arrow, parquet
    from flatout.data.sources.rows import rows
    from flatout.data.sources.table import table
    from flatout.data.sources.tfrecord import tfrecord
    from flatout.data.sources.torch_dataset import torch_dataset

_HOMES = {
    "Arrays": "flatout.data.sources.arrays",
    "Batch": "flatout.data.batch",
    "Column": "flatout.data.schema",
    "Pipeline": "flatout.data.pipeline",
    "Schema": "flatout.data.schema",
    "Source": "flatout.data.source",
    "arrays": "flatout.data.sources.arrays",
    "arrow": "flatout.data.sources.parquet",
    "as_source": "flatout.data.source",
    "convert": "flatout.data.conversion.convert",
    "criteo": "flatout.data.sources.criteo",
    "csv": "flatout.data.sources.csv",
    "dataset": "flatout.data.sources.dataset",
    "digits": "flatout.data.sources.digits",
    "fetch": "flatout.data.sources.fetch",
    "fifo": "flatout.data.sources.fifo",
    "hdf5": "flatout.data.sources.hdf5",
    "idx": "flatout.data.sources.idx",
    "idx_split": "flatout.data.sources.idx",
    "images": "flatout.data.sources.images",
    "inspect": "flatout.data.inspection.inspect",
    "iterable": "flatout.data.sources.iterable",
    "libsvm": "flatout.data.sources.libsvm",
    "mix": "flatout.data.mixture",
    "npy": "flatout.data.sources.npy",
    "npz": "flatout.data.sources.npy",
    "parquet": "flatout.data.sources.parquet",
    "rows": "flatout.data.sources.rows",
    "seal": "flatout.data.sealing",
    "table": "flatout.data.sources.table",
    "tfrecord": "flatout.data.sources.tfrecord",
    "torch_dataset": "flatout.data.sources.torch_dataset",
    "unpack": "flatout.data.files",
}

__all__ = [
    "Arrays",
    "Batch",
    "Column",
    "Pipeline",
    "Schema",
    "Source",
    "arrays",
    "arrow",
    "as_source",
    "convert",
    "criteo",
    "csv",
    "dataset",
    "digits",
    "fetch",
    "fifo",
    "hdf5",
    "idx",
    "idx_split",
    "images",
    "inspect",
    "iterable",
    "libsvm",
    "mix",
    "npy",
    "npz",
    "parquet",
    "rows",
    "seal",
    "table",
    "tfrecord",
    "torch_dataset",
    "unpack",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'flatout.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
