import json
import multiprocessing
import pickle

import numpy as np
import pytest
from data_made_up import MadeUp, same

from flatout.data.conversion.convert import convert
from flatout.data.pipeline import Pipeline
from flatout.data.schema import Schema
from flatout.data.sources.rows import FolderRows, rows
from flatout.errors import DataError


@pytest.fixture
def folder(tmp_path):
    convert(Pipeline(MadeUp(100)), tmp_path / "made.rows")
    return tmp_path / "made.rows"


def batches(pipeline):
    return [batch for epoch in range(2) for batch in pipeline.batches(epoch)]


def test_rows_are_those_that_were_converted(folder):
    for stages in (
        lambda p: p.batch(8),
        lambda p: p.shuffle(seed=1).batch(8),
        lambda p: p.shuffle(seed=1).split(0.7, seed=2)[0].batch(8),
        lambda p: p.shuffle(seed=1).batch(8, by_length=4),
        lambda p: p.shuffle(seed=1).shard(1, 3, by="rows").batch(9),
    ):
        ours, theirs = batches(stages(rows(folder))), batches(stages(Pipeline(MadeUp(100))))
        assert len(ours) == len(theirs)
        assert all(map(same, ours, theirs))


def test_what_is_known_without_reading_rows(folder):
    opened = FolderRows(folder)
    assert (opened.rows, opened.random) == (100, True)
    assert opened.targets().tolist() == [n % 5 for n in range(100)]
    assert opened.lengths().tolist() == [n % 4 for n in range(100)]
    assert rows(folder).labels_range() == (0, 4)
    assert opened.where(7) == f"{folder}: row 7"
    assert opened.describe() == f"row cache {folder}, 5.2 kB, 100 rows"
    assert opened.notes() == []
    opened.verify()


def test_a_class_after_the_other_is_noticed(tmp_path):
    class Sorted(MadeUp):
        def take(self, numbers, buffers):
            block = super().take(numbers, buffers)
            return type(block)({**block.columns, "y": numbers // 50}, numbers)

    convert(Pipeline(Sorted(100)), tmp_path / "made.rows")
    assert any("sorted by class" in note for note in rows(tmp_path / "made.rows").notes())


def test_the_digest_is_that_of_the_bytes_and_the_schema(folder, tmp_path):
    convert(Pipeline(MadeUp(100)), tmp_path / "again.rows")
    convert(Pipeline(MadeUp(100)), tmp_path / "other.rows", shuffle=1)
    first, again, other = (
        FolderRows(tmp_path / f"{name}.rows").digest for name in ("made", "again", "other")
    )
    assert first == again != other
    changed = FolderRows(folder, FolderRows(folder).schema.with_roles(ids="unused"))
    assert changed.digest != first


def test_other_roles(folder):
    schema = rows(folder).schema.with_roles(ids="unused", x="target", y="input")
    (batch,) = rows(folder, schema=schema).batch(100).batches(0)
    assert batch.inputs.tolist() == [n % 5 for n in range(100)]
    assert batch.targets.shape == (100, 3)
    wrong = schema.model_copy(
        update={"columns": (schema["y"].model_copy(update={"dtype": "int32"}),)}
    )
    with pytest.raises(DataError, match=r"a column y int32, but the rows hold .*y int64"):
        rows(folder, schema=wrong)
    absent = Schema(
        format="rows", columns=(schema["y"].model_copy(update={"name": "z"}), schema["x"])
    )
    with pytest.raises(DataError, match="a column z int64"):
        rows(folder, schema=absent)


def _sum(opened, numbers):
    from flatout.data.running.buffers import Buffers

    return float(opened.take(numbers, Buffers()).columns["x"].sum())


def test_another_process_maps_for_itself(folder):
    opened = FolderRows(folder)
    assert _sum(pickle.loads(pickle.dumps(opened)), np.arange(9)) == _sum(opened, np.arange(9))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_sum, (opened, np.arange(9))) == _sum(opened, np.arange(9))


def test_a_folder_that_is_none(tmp_path, folder):
    with pytest.raises(DataError, match="no row cache is here"):
        rows(tmp_path)
    (folder / "rows.bin").write_bytes(b"short")
    with pytest.raises(DataError, match="expected 4,000 bytes, found 5"):
        rows(folder)


def test_the_cache_of_a_pipeline_is_no_data_set(tmp_path):
    list(Pipeline(MadeUp(20)).batch(5).cache("disk", folder=str(tmp_path)).batches(0))
    (cache,) = tmp_path.glob("*/meta.json")
    with pytest.raises(DataError, match="the cache of a pipeline"):
        rows(cache.parent)


def test_damage_within_is_told(folder):
    meta = json.loads((folder / "meta.json").read_text())
    place = next(field["offset"] for field in meta["fields"] if field["ragged"])
    data = bytearray((folder / "rows.bin").read_bytes())
    at = 5 * meta["stride"] + place
    data[at : at + 8] = (2**40).to_bytes(8, "little")
    (folder / "rows.bin").write_bytes(data)
    with pytest.raises(DataError, match="a row points to values that are not there"):
        _sum(FolderRows(folder), np.arange(10))
    with pytest.raises(DataError, match="checksum differs"):
        FolderRows(folder).verify()
    (folder / "meta.json").write_text(json.dumps({**meta, "schema": "format ="}))
    with pytest.raises(DataError, match="no TOML"):
        rows(folder)


@pytest.mark.parametrize("number", [-1, 100])
def test_numbers_beyond_the_rows(folder, number):
    with pytest.raises(IndexError):
        _sum(FolderRows(folder), np.array([number]))
