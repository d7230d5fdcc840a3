"""Which columns of a table hold no numbers. Wants pyarrow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

import pyarrow as pa

from flatout.data.files import Paths, find
from flatout.data.sources.arrow_schema import Wanted, infer_schema
from flatout.data.sources.csv_begin import begin_of, found_types, samples_of, shared_names
from flatout.data.sources.csv_split import MISSING, dialect_of
from flatout.data.sources.table_chunks import ArrowFile, ParquetFile
from flatout.errors import DataError


def text_columns(kind: str, paths: Paths) -> list[str]:
    """The columns that a schema cannot be inferred for, such as those of strings.

    Args:
        kind: "csv", "parquet" or "arrow".
        paths: as `files.find` takes them.
    """
    if kind == "csv":
        types = _csv_types(paths)
    else:
        file = find(paths)[0]
        types = (ParquetFile(file) if kind == "parquet" else ArrowFile(file)).fields
    return [name for name, type in types.items() if not _holds_numbers(name, type)]


def _csv_types(paths: Paths) -> Mapping[str, pa.DataType]:
    files = find(paths)
    is_tsv = all({".tsv", ".tab"} & set(PurePosixPath(file.name).suffixes) for file in files)
    dialect = dialect_of(
        {"delimiter": "\t" if is_tsv else ",", "quote": '"', "missing": list(MISSING)}
    )
    begins = [begin_of(file, dialect) for file in files]
    names = shared_names(begins, dialect, True)
    return found_types(samples_of(begins, True), names, dialect, Wanted())


def _holds_numbers(name: str, type: pa.DataType) -> bool:
    try:
        infer_schema("", {name: type}, Wanted(), {})
    except DataError:
        return False
    return True
