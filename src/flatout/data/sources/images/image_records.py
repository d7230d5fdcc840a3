"""Image files in TFRecord shards, as `flatout data convert` packs them."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.data.reading.block import Numbers, offsets_of
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.decoder import Encoded, Survey
from flatout.data.reading.error_policy import ErrorPolicy
from flatout.data.reading.files import File, Paths, find
from flatout.data.reading.indexed import IndexedRows
from flatout.data.reading.schema import Column, Schema, as_schema
from flatout.data.sources.images.image_files import HEADER, Content
from flatout.data.sources.images.image_header import Damaged, header_of
from flatout.data.sources.records.tfrecord import FeatureKind, TfrecordDecoder, features_of
from flatout.errors import DataError

# Bytes of records that are surveyed together.
_PIECE = 16 << 20
# Names that `flatout data convert` gives to shards.
_SHARD = re.compile(r"(?P<stem>.+?)-\d{5,}(-of-\d{5,})?(?P<suffix>\.[a-z]+)")
# Maximum class number.
_MOST_CLASSES = 1 << 20


class ImageRecords:
    """Images by index. Follows `flatout.data.sources.images.image_rows.Images`.

    A record is an Example of `image` (the bytes of an image file), `label` (one int64) and,
    optionally, `path` (the bytes of the file's path, for messages). All headers are read once, and
    kept in the files' index.
    """

    def __init__(
        self, paths: Paths, labeled: bool, classes: tuple[str, ...] | None, policy: ErrorPolicy
    ) -> None:
        files = find(paths)
        _check_features(files[0], labeled)
        decoder = _ImageDecoder(_schema(labeled))
        self._records = IndexedRows(files, decoder, policy, "TFRecord")
        known = self._records.index.lengths
        self.headers = np.empty(self._records.rows, HEADER)
        for name in HEADER.names or ():
            self.headers[name] = known[name]
        self.labels = known["label"] if labeled else None
        self.classes: tuple[str, ...] = ()
        if self.labels is not None:
            written = _names_beside(files)
            if classes is None or written is None or not set(written) <= set(classes):
                self.classes = self._classes(self.labels, classes or written)
            else:
                self._classes(self.labels, written)
                self.classes = classes
                self.labels = np.array([classes.index(name) for name in written])[self.labels]

    def _classes(
        self, labels: npt.NDArray[np.int64], given: tuple[str, ...] | None
    ) -> tuple[str, ...]:
        most = _MOST_CLASSES if given is None else len(given)
        strange = np.flatnonzero((labels < 0) | (labels >= most))
        if len(strange):
            raise DataError(
                f"label: expected the number of a class, 0 to {most - 1:,}; found "
                f"{labels[strange[0]]:,}",
                where=self.where(int(strange[0])),
                do="number classes from 0, and let classes= name each of them",
            )
        return given or tuple(map(str, range(int(labels.max()) + 1)))

    @property
    def files(self) -> Sequence[File]:
        return self._records.files

    @property
    def digest(self) -> str:
        return self._records.digest

    def contents(self, numbers: Numbers, buffers: Buffers) -> Content:
        """Read all these images; return a function from the position in `numbers` to the bytes."""
        return _each(self._records.take(numbers, buffers).columns["image"])

    def where(self, number: int) -> str:
        place = self._records.where(number)
        with suppress(DataError):
            block = self._records.take(np.array([number], np.int64), Buffers())
            place += _in_brackets(_each(block.columns["path"])(0))
        return place

    def notes(self) -> list[str]:
        return self._records.notes()


class _ImageDecoder(TfrecordDecoder):
    """Decoder of image records.

    Its survey also returns headers and labels, as lengths, so that the index keeps them.
    """

    def survey(self, rows: Encoded, policy: ErrorPolicy) -> Survey:
        survey = super().survey(rows, policy)
        buffer, starts, ends, _, where = rows
        good = np.zeros(len(starts), np.bool_)
        headers = np.zeros(len(starts), HEADER)
        labels = np.zeros(len(starts), np.int64)
        whole, buffers = np.flatnonzero(survey.good), Buffers()
        pieces = offsets_of(ends - starts)[whole] // _PIECE
        for part in np.split(whole, np.flatnonzero(np.diff(pieces)) + 1):
            lengths = {name: counts[part] for name, counts in survey.lengths.items()}
            own = Encoded(
                buffer, starts[part], ends[part], part,
                lambda row, byte, part=part: where(int(part[row]), byte),  # type: ignore[misc]
            )  # fmt: skip
            block = self.decode(own, lengths, buffers, policy)
            image, path = _each(block.columns["image"]), _each(block.columns["path"])
            for place, row in enumerate(block.numbers.tolist()):
                try:
                    headers[row] = header_of(image(place))
                    good[row] = True
                except Damaged as error:
                    at = where(row, int(starts[row])) + _in_brackets(path(place))
                    policy.bad(str(error), at)
            if "label" in block.columns:
                labels[block.numbers] = block.columns["label"]
        known = {name: headers[name].astype(np.int64) for name in HEADER.names or ()}
        return Survey(good, {**survey.lengths, **known, "label": labels}, {})


def _names_beside(files: Sequence[File]) -> tuple[str, ...] | None:
    beside: dict[str, str] = {}
    for file in files:
        match = _SHARD.fullmatch(os.path.basename(file.path))
        if match is None:
            return None
        name = f"_{match['stem']}{match['suffix']}.toml"
        beside.setdefault(os.path.join(os.path.dirname(file.path), name), file.name)
    result: dict[tuple[str, ...], str] = {}
    for path, first in beside.items():
        if not os.path.exists(path):
            return None
        names = as_schema(path, "tfrecord").options.get("classes")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            return None
        result.setdefault(tuple(names), first)
    if len(result) > 1:
        (a, first), (b, second) = list(result.items())[:2]
        raise DataError(
            f"the shards number different classes: {', '.join(a)} in {first}, {', '.join(b)} in "
            f"{second}",
            do="read them one by one, and join them with flatout.data.mix",
        )
    return next(iter(result))


def _schema(labeled: bool) -> Schema:
    columns = [Column(name="image", dtype="uint8", ragged=True)]
    if labeled:
        columns.append(Column(name="label", dtype="int64", role="target"))
    columns.append(Column(name="path", dtype="uint8", ragged=True, role="unused", default=0))
    return Schema(format="image_records", columns=tuple(columns))


def _each(column: Any) -> Callable[[int], memoryview]:
    values, offsets = memoryview(column.values), column.offsets.tolist()
    return lambda row: values[offsets[row] : offsets[row + 1]]


def _in_brackets(path: memoryview) -> str:
    return f" ({bytes(path).decode(errors='replace')})" if len(path) else ""


def _check_features(file: File, labeled: bool) -> None:
    features = _first_features(file)
    if features is None:
        return
    wanted = {"image": "bytes", **({"label": "int64"} if labeled else {})}
    if any(name not in features or features[name].kind != kind for name, kind in wanted.items()):
        listed = [", ".join(f"{name} ({kind})" for name, kind in wanted.items())]
        listed += [", ".join(f"{name} ({value.kind})" for name, value in sorted(features.items()))]
        raise DataError(
            f"expected records with the features {listed[0]}; found {listed[1] or 'none'}",
            where=file.name,
            do="flatout data convert makes such files from folders of images; without classes, "
            "pass labels=False",
        )


def _first_features(file: File) -> dict[str, FeatureKind] | None:
    try:
        with open(file.path, "rb") as opened:
            (length,) = struct.unpack("<Q4x", opened.read(12))
            return features_of(opened.read(length)) if length < file.size else None
    except (OSError, struct.error, IndexError, ValueError):
        return None
