import struct

import numpy as np
import pytest

import flatout
from flatout.data.reading.error_policy import ErrorPolicy
from flatout.data.sources.records.tfrecord import infer_schema
from flatout.errors import DataError
from flatout.kernels import example

ROWS = 60
IDS = np.random.default_rng(0).integers(0, 10**6, (ROWS, 5))
VALUES = np.random.default_rng(1).random((ROWS, 5)).astype(np.float32)
LABELS = np.arange(ROWS) % 3
OFFSETS = np.concatenate([[0], np.cumsum(np.arange(ROWS) % 4)])
TOKENS = np.arange(OFFSETS[-1])


def encoded(**columns):
    content, offsets = example.encode(columns)
    return bytes(content), offsets


@pytest.fixture
def path(tmp_path):
    columns = {"label": LABELS, "ids": IDS, "values": VALUES, "tokens": (TOKENS, OFFSETS)}
    content, _ = encoded(**columns)
    (tmp_path / "a.tfrecord").write_bytes(content)
    return tmp_path / "a.tfrecord"


def test_a_schema_is_inferred_and_rows_come_in_any_order(path):
    data = flatout.data.tfrecord(path)
    words = [column.words for column in data.schema.columns]
    expected = ["ids int64 x5", "label int64", "tokens int64 ragged", "values float32 x5"]
    assert words == expected
    assert data.schema["label"].role == "target"
    for batch in data.shuffle(seed=1).batch(16).batches(0):
        at = batch.indices.numpy()
        assert (batch.inputs["ids"].numpy() == IDS[at]).all()
        assert (batch.inputs["values"].numpy() == VALUES[at]).all()
        assert (batch.targets.numpy() == LABELS[at]).all()
        assert (batch.inputs["tokens_lengths"].numpy() == at % 4).all()
        for row, number in enumerate(at):
            found = batch.inputs["tokens"][row, : number % 4].tolist()
            assert found == TOKENS[OFFSETS[number] : OFFSETS[number + 1]].tolist()


def test_a_schema_chooses_and_fills(path):
    columns = [
        {"name": "label", "dtype": "int32", "role": "target"},
        {"name": "values", "dtype": "float32", "shape": [5]},
        {"name": "clicks", "dtype": "int64", "default": -1},
    ]
    (batch,) = flatout.data.tfrecord(path, schema={"columns": columns}).batch(ROWS).batches(0)
    assert batch.inputs["clicks"].tolist() == [-1] * ROWS
    assert str(batch.targets.dtype) == "torch.int32"
    columns[2].pop("default")
    missing = flatout.data.tfrecord(path, schema={"columns": columns}).batch(4)
    with pytest.raises(DataError, match=r"a.tfrecord: byte \d+") as caught:
        list(missing.batches(0))
    assert "expected a feature 'clicks', found ids, label, tokens" in caught.value.what
    columns[2].update(dtype="bool")
    with pytest.raises(DataError, match="column 'clicks': Examples hold"):
        flatout.data.tfrecord(path, schema={"columns": columns})


def test_another_target(path):
    data = flatout.data.tfrecord(path, target="ids")
    assert [column.name for column in data.schema.of_role("target")] == ["ids"]


def test_damage_is_named_by_byte(path):
    content = bytearray(path.read_bytes())
    (length,) = struct.unpack_from("<Q", content)
    content[16 + length + 12 + 20] ^= 1  # in the data of the second record
    path.write_bytes(content)
    schema = {"columns": [{"name": "label", "dtype": "int64", "role": "target"},
                          {"name": "ids", "dtype": "int64", "shape": [5]}]}  # fmt: skip
    data = flatout.data.tfrecord(path, schema=schema).batch(4)
    with pytest.raises(DataError, match=r"byte"):
        list(data.batches(0))
    skipping = flatout.data.tfrecord(path, schema=schema, on_error="skip").batch(4)
    assert skipping.samples == ROWS - 1
    assert "1 bad row skipped" in skipping.notes()[0]
    unchecked = flatout.data.tfrecord(path, schema=schema, check=False).batch(4)
    assert unchecked.samples == ROWS


@pytest.mark.parametrize("cut", [1, 5, 13, 40])
def test_a_file_that_ends_early_is_named(path, cut):
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(DataError, match=r"a\.tfrecord: byte"):
        list(flatout.data.tfrecord(path).batch(4).batches(0))


def test_a_length_beyond_all_bounds_is_named(path):
    head = struct.pack("<Q", 2**63)
    bad = head + struct.pack("<I", example.masked_crc32c(head)) + b"x" * 50
    path.write_bytes(path.read_bytes() + bad)
    with pytest.raises(DataError, match=r"a\.tfrecord: byte"):
        list(flatout.data.tfrecord(path).batch(4).batches(0))


def test_what_is_no_tfrecord_is_named(tmp_path):
    (tmp_path / "a.tfrecord").write_bytes(b"1 1:0.5 2:0.25\n" * 20)
    with pytest.raises(DataError, match=r"a\.tfrecord: byte 0"):
        flatout.data.tfrecord(tmp_path / "a.tfrecord")


def inferred(*records, on_error="fail"):
    placed = [(100 * number, record) for number, record in enumerate(records)]
    return infer_schema(placed, "a.tfrecord", ErrorPolicy(on_error))


def test_records_that_are_no_examples_are_named():
    with pytest.raises(DataError, match=r"is no tf.train.Example(.|\n)*a\.tfrecord: byte 100"):
        inferred(b"", b"\xff\xff")
    with pytest.raises(DataError, match="hold no features"):
        inferred(b"", b"")


def test_a_damaged_name_of_a_feature_takes_no_memory():
    number = b"\x08" + b"\xff" * 5 + b"\x1f"  # a varint of 2**40 or so where the name should be
    record = b"\x0a\x09\x0a\x07" + number
    with pytest.raises(DataError, match="expected a message, found a number") as caught:
        inferred(b"", b"", record)
    assert caught.value.where == "a.tfrecord: byte 200"


def test_what_is_no_example_is_skipped_where_bad_rows_are(path):
    broken = b"\x0a\x03\x0a\x7f\x01"
    head = struct.pack("<Q", len(broken))
    crcs = [struct.pack("<I", example.masked_crc32c(part)) for part in (head, broken)]
    path.write_bytes(head + crcs[0] + broken + crcs[1] + path.read_bytes())
    with pytest.raises(DataError, match=r"no tf.train.Example(.|\n)*a\.tfrecord: byte 12"):
        flatout.data.tfrecord(path)
    rows = list(flatout.data.tfrecord(path, on_error="skip").batch(ROWS).batches(0))
    assert rows[0].targets.tolist() == LABELS.tolist()


def test_bytes_are_inferred_as_ragged():
    bytes_, _ = encoded(image=(np.frombuffer(b"abcd", np.uint8), np.array([0, 4])))
    assert inferred(bytes_[12:-4])["image"].words == "image uint8 ragged"


def _framed(*records):
    parts = []
    for record in records:
        head = struct.pack("<Q", len(record))
        crcs = [struct.pack("<I", example.masked_crc32c(part)) for part in (head, record)]
        parts += [head, crcs[0], record, crcs[1]]
    return b"".join(parts)


def test_a_feature_that_a_record_lacks_is_named_unless_there_is_a_default(tmp_path):
    path = tmp_path / "a.tfrecord"
    whole, _ = encoded(a=np.ones((1, 2), np.int64), b=np.ones((1, 1), np.float32))
    without, _ = encoded(a=np.ones((1, 2), np.int64))
    path.write_bytes(whole + without)
    with pytest.raises(DataError, match="expected a feature 'b', found a") as caught:
        list(flatout.data.tfrecord(path).batch(2).batches(0))
    assert caught.value.where == f"{path}: byte {len(whole) + 12}"
    assert "default={'b': 0}" in caught.value.do
    for default in ({"b": -1}, -1, -1.0):
        (batch,) = flatout.data.tfrecord(path, default=default).batch(2).batches(0)
        assert batch.inputs["b"].tolist() == [1, -1]
    (batch,) = flatout.data.tfrecord(path, on_error="skip").batch(2).batches(0)
    assert batch.inputs["b"].tolist() == [1]
    with pytest.raises(DataError, match="default: no column 'c': the columns are a, b"):
        flatout.data.tfrecord(path, default={"c": 0})


def test_a_feature_of_other_lengths_that_a_record_lacks_is_named_too(tmp_path):
    path = tmp_path / "a.tfrecord"
    parts = [np.arange(3), np.arange(5)]
    records = [
        encoded(t=(part, np.array([0, len(part)])), y=np.ones((1, 1), np.int64))[0]
        for part in parts
    ]
    path.write_bytes(b"".join(records) + encoded(y=np.ones((1, 1), np.int64))[0])
    with pytest.raises(DataError, match="expected a feature 't', found y"):
        list(flatout.data.tfrecord(path).batch(3).batches(0))
    (batch,) = flatout.data.tfrecord(path, default={"t": 0}).batch(3).batches(0)
    assert batch.inputs["t_lengths"].tolist() == [3, 5, 0]


def test_a_feature_without_a_name_is_an_error(tmp_path):
    path = tmp_path / "a.tfrecord"
    # Example {features: {feature: {key: "", value: {int64_list: {value: 5}}}}}
    path.write_bytes(_framed(bytes.fromhex("0a0b0a090a0012051a030a0105")))
    with pytest.raises(DataError, match="expected a name for each feature, found an") as error:
        flatout.data.tfrecord(path)
    assert error.value.where == f"{path}: byte 12"
