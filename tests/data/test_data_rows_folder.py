import json
import multiprocessing
import os
import pickle

import numpy as np
import pytest
from data_made_up import MadeUp, same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flatout.data.conversion.convert import convert
from flatout.data.pipeline import Pipeline
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.schema import Schema
from flatout.data.sources.records.rows import FolderRows, rows
from flatout.data.stores import checksums
from flatout.data.stores.checksums import Checksums, sealed
from flatout.errors import DataError
from flatout.kernels import example


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
    from flatout.data.reading.buffers import Buffers

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


def sealed_again(folder, block=checksums.BLOCK, **changes):
    """Checksums that fit what lies there, as the one who made it wrong would have written them."""
    meta = {**json.loads((folder / "meta.json").read_text()), **changes}
    del meta["checksum"]
    meta["files"] = {name: Checksums.of(folder / name, block).words() for name in meta["files"]}
    (folder / "meta.json").write_text(sealed(meta))


def test_damage_within_is_told(folder):
    meta = json.loads((folder / "meta.json").read_text())
    place = next(field["offset"] for field in meta["fields"] if field["ragged"])
    data = bytearray((folder / "rows.bin").read_bytes())
    at = 5 * meta["stride"] + place
    data[at : at + 8] = (2**40).to_bytes(8, "little")
    (folder / "rows.bin").write_bytes(data)
    with pytest.raises(DataError, match="checksum differs"):
        _sum(FolderRows(folder), np.arange(10))
    with pytest.raises(DataError, match="checksum differs"):
        FolderRows(folder).verify()
    sealed_again(folder)
    with pytest.raises(DataError, match="a row points to values that are not there"):
        _sum(FolderRows(folder), np.arange(10))
    sealed_again(folder, schema="format =")
    with pytest.raises(DataError, match="no TOML"):
        rows(folder)


def flipped(path, at, bit):
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 1 << bit
    path.write_bytes(data)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["rows.bin", "ragged-0.bin", "meta.json"]),
    st.integers(0, 1 << 20),
    st.integers(0, 7),
)
def test_a_flipped_bit_anywhere_is_told(folder, name, at, bit):
    # The seventh bit of a byte of JSON is none of ASCII: the text cannot be read then.
    whole = (folder / name).read_bytes()
    flipped(folder / name, at, bit)
    try:
        with pytest.raises(DataError) as found:
            batches(rows(folder).shuffle(seed=at).batch(8))
        assert name in str(found.value)
        if name != "meta.json":
            assert "block 0, bytes 0 to" in str(found.value)
    finally:
        (folder / name).write_bytes(whole)


@pytest.mark.parametrize("column", ["targets", "lengths"])
def test_what_is_known_before_is_compared_too(folder, column):
    flipped(folder / "rows.bin", 2000, 0)
    with pytest.raises(DataError, match=r"rows\.bin: block 0"):
        getattr(FolderRows(folder), column)()


def test_only_blocks_that_are_read_are_compared_and_each_once(tmp_path, monkeypatch):
    convert(Pipeline(MadeUp(100)), tmp_path / "made.rows")
    sealed_again(tmp_path / "made.rows", block=512)
    source, buffers = FolderRows(tmp_path / "made.rows"), Buffers()
    compared = []
    monkeypatch.setattr(
        checksums,
        "crc32c_blocks",
        lambda data, block: compared.append(len(data)) or example.crc32c_blocks(data, block),
    )
    stride = source._folder.store.layout.stride
    source.take(np.array([1]), buffers)  # its row lies in one block, and its values in another
    assert sum(compared) == 2 * 512
    source.take(np.array([1]), buffers)
    assert sum(compared) == 2 * 512
    source.take(np.arange(100), buffers)
    ragged = (tmp_path / "made.rows" / "ragged-0.bin").stat().st_size
    assert sum(compared) == 100 * stride + ragged
    # A file that was written since is another one.
    flipped(tmp_path / "made.rows" / "rows.bin", 3000, 3)
    other = FolderRows(tmp_path / "made.rows")
    other.take(np.array([1]), buffers)
    with pytest.raises(DataError, match="block 5, bytes 2,560 to 3,071"):
        other.take(np.array([75]), buffers)


@pytest.mark.parametrize("number", [-1, 100])
def test_numbers_beyond_the_rows(folder, number):
    with pytest.raises(IndexError):
        _sum(FolderRows(folder), np.array([number]))


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 10**30},
        {"rows": -1},
        {"rows": "100"},
        {"stride": 0},
        {"stride": 2**63},
        {"fields": []},
        {"fields": "x"},
        {"files": {"../../rows.bin": {}}},
        {"files": {"rows.bin": {"size": 10**30, "block": 1, "crc32c": []}}},
        {"form": [{"tuple": 1}]},
        {"schema": 7},
    ],
)
def test_made_up_meta_is_told(folder, change):
    meta = json.loads((folder / "meta.json").read_text())
    del meta["checksum"]
    (folder / "meta.json").write_text(sealed({**meta, **change}))
    with pytest.raises(DataError):
        FolderRows(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "object"},
        {"dtype": "M8[s]"},
        {"dtype": ">f4"},
        {"offset": -8},
        {"offset": 10**9},
        {"width": 10**9},
        {"shape": [10**9, 10**9, 10**9]},
        {"shape": [-1]},
        {"shape": [2**62, 4]},
        {"ragged": True},
        {"channels_last": True},
        {"name": []},
        {"more": 1},
    ],
)
def test_made_up_columns_are_told(folder, change):
    meta = json.loads((folder / "meta.json").read_text())
    for at, field in enumerate(meta["fields"]):
        if not field["ragged"]:
            fields = [*meta["fields"][:at], {**field, **change}, *meta["fields"][at + 1 :]]
            sealed_again(folder, fields=fields)
            with pytest.raises(DataError):
                FolderRows(folder)


def test_meta_nested_without_end_or_no_file_is_told(folder):
    (folder / "meta.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match="nested too deeply"):
        rows(folder)
    (folder / "meta.json").unlink()
    os.mkfifo(folder / "meta.json")
    with pytest.raises(DataError, match="it is no file"):
        rows(folder)
