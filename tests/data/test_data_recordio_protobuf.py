import io

import numpy as np
import pytest
from data_recordio import write_recordio
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.data.reading.block import Ragged
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.decoder import Encoded
from flatout.data.reading.error_policy import ErrorPolicy
from flatout.data.reading.schema import Schema
from flatout.data.sources.pipes.recordio_protobuf import RecordioDecoder, read_record
from flatout.errors import DataError

descriptor_pb2 = pytest.importorskip("google.protobuf.descriptor_pb2")


def message_types():
    """SageMaker's messages, as protobuf itself knows them."""
    from google.protobuf import descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="record.proto", package="made", syntax="proto2")
    field = descriptor_pb2.FieldDescriptorProto

    def add(message, name, number, type, repeated=False, packed=False, oneof=None, of=""):
        label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
        one = message.field.add(name=name, number=number, label=label, type=type)
        if packed:
            one.options.packed = True
        if of:
            one.type_name = f".made.{of}"
        if oneof is not None:
            one.oneof_index = oneof

    for name, type in (
        ("Float32Tensor", field.TYPE_FLOAT),
        ("Float64Tensor", field.TYPE_DOUBLE),
        ("Int32Tensor", field.TYPE_INT32),
    ):
        tensor = file.message_type.add(name=name)
        add(tensor, "values", 1, type, repeated=True, packed=True)
        add(tensor, "keys", 2, field.TYPE_UINT64, repeated=True, packed=True)
        add(tensor, "shape", 3, field.TYPE_UINT64, repeated=True, packed=True)
    blob = file.message_type.add(name="Bytes")
    add(blob, "value", 1, field.TYPE_BYTES, repeated=True)
    add(blob, "content_type", 2, field.TYPE_STRING)
    value = file.message_type.add(name="Value")
    value.oneof_decl.add(name="value")
    kinds = (("float32_tensor", 2), ("float64_tensor", 3), ("int32_tensor", 7), ("bytes", 9))
    for (name, number), of in zip(
        kinds, ("Float32Tensor", "Float64Tensor", "Int32Tensor", "Bytes"), strict=True
    ):
        add(value, name, number, field.TYPE_MESSAGE, oneof=0, of=of)
    record = file.message_type.add(name="Record")
    for name, number in (("features", 1), ("label", 2)):
        entry = record.nested_type.add(name=f"{name.capitalize()}Entry")
        entry.options.map_entry = True
        add(entry, "key", 1, field.TYPE_STRING)
        add(entry, "value", 2, field.TYPE_MESSAGE, of="Value")
        of = f"Record.{name.capitalize()}Entry"
        add(record, name, number, field.TYPE_MESSAGE, repeated=True, of=of)
    add(record, "uid", 3, field.TYPE_STRING)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("made.Record"))


Record = message_types()


def record(features=(), label=()):
    """A Record of {name: (kind, values[, keys[, shape]])}, as protobuf writes it."""
    made = Record(uid="a")
    for target, given_values in ((made.features, features), (made.label, label)):
        for name, (kind, values, *rest) in dict(given_values).items():
            if kind == "bytes":
                target[name].bytes.value.append(values)
                target[name].bytes.content_type = "image/png"
                continue
            tensor = getattr(target[name], f"{kind}_tensor")
            tensor.SetInParent()
            for place, numbers in zip(("values", "keys", "shape"), (values, *rest), strict=False):
                getattr(tensor, place).extend(numbers)
    return made.SerializeToString()


def decode(records, *columns, on_error="fail"):
    file = io.BytesIO()
    write_recordio(file, records)
    schema = Schema.model_validate({"format": "recordio", "columns": columns})
    decoder = RecordioDecoder(schema)
    buffer = np.frombuffer(file.getvalue(), np.uint8)
    starts, ends, consumed, problem = decoder.split(buffer, True)
    assert (consumed, problem) == (len(buffer), "")
    numbers = np.arange(len(starts)) + 100
    faults = ErrorPolicy(on_error)
    rows = Encoded(buffer, starts, ends, numbers, lambda row, byte: f"{row} {byte}")
    block = decoder.decode(rows, None, Buffers(), faults)
    return block, faults


LABEL = {"name": "label", "dtype": "int64", "role": "target"}


def test_rows_as_sagemakers_own_tools_write_them():
    rows = [
        record({"values": ("float32", [0.5 * n, 1.5])}, {"values": ("float32", [n])})
        for n in range(3)
    ]
    block, _ = decode(rows, LABEL, {"name": "values", "dtype": "float32", "shape": (2,)})
    assert block.columns["label"].tolist() == [0, 1, 2]
    assert block.columns["label"].dtype == np.int64
    assert block.columns["values"].tolist() == [[0, 1.5], [0.5, 1.5], [1, 1.5]]
    assert block.numbers.tolist() == [100, 101, 102]


def test_sparse_rows_become_dense_or_stay_as_they_are():
    rows = [
        record({"values": ("float64", [2.5, 3.5], [7, 300], [1000])}),
        record({"values": ("float64", [], [], [1000])}),
        record({"values": ("float64", [1.0], [999], [1000])}),
    ]
    block, _ = decode(rows, {"name": "values", "dtype": "float32", "shape": (1000,)})
    dense = block.columns["values"]
    assert dense.shape == (3, 1000)
    assert [(int(r), int(c), float(dense[r, c])) for r, c in np.argwhere(dense)] == [
        (0, 7, 2.5), (0, 300, 3.5), (2, 999, 1.0),
    ]  # fmt: skip
    block, _ = decode(
        rows,
        {"name": "values", "dtype": "float32", "ragged": True},
        {"name": "values.keys", "dtype": "int64", "ragged": True},
    )
    assert block.columns["values"].values.tolist() == [2.5, 3.5, 1.0]
    assert block.columns["values.keys"].values.tolist() == [7, 300, 999]
    assert block.columns["values.keys"].offsets.tolist() == [0, 2, 2, 3]


def test_bytes_other_labels_and_defaults():
    rows = [
        record({"picture": ("bytes", b"\x89PNG")}, {"weight": ("float64", [0.1])}),
        record({"picture": ("bytes", b"")}, {"weight": ("float64", [2])}),
        record({}, {"weight": ("int32", [-3])}),
    ]
    block, _ = decode(
        rows,
        {"name": "picture", "dtype": "uint8", "ragged": True, "default": 0},
        {"name": "label.weight", "dtype": "float64", "role": "weight"},
        {"name": "label", "dtype": "int64", "role": "target", "default": -1},
        {"name": "none", "dtype": "float32", "shape": (2, 2), "default": 0.5},
    )
    assert block.columns["picture"].values.tobytes() == b"\x89PNG"
    assert block.columns["picture"].offsets.tolist() == [0, 4, 4, 4]
    assert block.columns["label.weight"].tolist() == [0.1, 2, -3]
    assert block.columns["label"].tolist() == [-1] * 3
    assert block.columns["none"].tolist() == [[[0.5, 0.5], [0.5, 0.5]]] * 3


FIVE = {"name": "values", "dtype": "float32", "shape": (5,)}


@pytest.mark.parametrize(
    ("bad", "column", "words"),
    [
        (record({"x": ("int32", [1])}), FIVE, "expected feature 'values', found 'x'"),
        (record(), LABEL, "expected label 'values', found none"),
        (record({"values": ("int32", [1, 2])}), FIVE, "'values': expected 5 values, found 2"),
        (
            record({"values": ("int32", [1] * 5, [], [2, 2])}),
            FIVE,
            "expected 4 values by its shape, found 5",
        ),
        (record({"values": ("int32", [1, 2], [3], [5])}), FIVE, "2 values have 1 keys"),
        (record({"values": ("int32", [1], [5])}), FIVE, "expected keys from 0 to 4, found 5"),
        (record({"values": ("int32", [1], [2**64 - 1])}), FIVE, f"found {2**64 - 1}"),
        (record({"values": ("int32", [1], [2], [6])}), FIVE, "a tensor of 5 values, found 6"),
        (record({}, {"values": ("float32", [1.5])}), LABEL, "expected int64, found 1.5"),
        (record({}, {"values": ("float32", [float("nan")])}), LABEL, "expected int64, found nan"),
        (record({"values": ("float64", [1e300] * 5)}), FIVE, "expected float32, found 1e+300"),
        (b"\x0b\1", FIVE, "no Record: wire type 3"),
        (b"\x0a\x7f\1", FIVE, "no Record: a field wants 127 bytes, and 1 are left"),
        (b"\x0a", FIVE, "no Record: it ends within a number"),
        (b"\xff" * 12, FIVE, "no Record: a varint of more than ten bytes"),
        (b"\x08\1", FIVE, "no Record: expected a message, found a number"),
        (b"\x0a\x09\x12\7\x12\5\x0a\3abc", FIVE, "no Record: expected packed float32 values"),
        (b"\x0a\x09\x12\7\x3a\5\x0a\3\1\1\x80", FIVE, "packed values end within one"),
    ],
)
def test_a_bad_record_says_what_is_wrong(bad, column, words):
    good = {"values": ("float32", [1, 2, 3, 4, 5])}
    whole = record(good, {"values": ("int32", [4])})
    with pytest.raises(DataError) as caught:
        decode([whole, bad], column)
    assert words in caught.value.what
    assert caught.value.where == f"1 {(8 + len(whole) + 3) // 4 * 4 + 8}"
    block, faults = decode([whole, bad, whole], column, on_error="skip")
    assert faults.count == 1
    assert block.numbers.tolist() == [100, 102]
    assert len(block.columns[column["name"]]) == 2


numbers = st.one_of(
    st.tuples(st.just("int32"), st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6)),
    st.tuples(st.just("float32"), st.lists(st.floats(width=32, allow_nan=False), max_size=6)),
    st.tuples(st.just("float64"), st.lists(st.floats(allow_nan=False), max_size=6)),
)
naturals = st.lists(st.integers(0, 2**63 - 1), max_size=4)
tensors = st.tuples(numbers, naturals, naturals).map(lambda t: (*t[0], t[1], t[2]))


@given(st.dictionaries(st.text(max_size=3), tensors, max_size=3))
def test_what_protobuf_writes_is_read(features):
    found = read_record(record(features, {"values": ("bytes", b"abc")}))
    assert found[2]["values"].values.tobytes() == b"abc"
    assert set(found[1]) == set(features)
    for name, (kind, values, keys, shape) in features.items():
        tensor = found[1][name]
        assert tensor.kind == kind
        assert tensor.values.tolist() == np.array(values, kind).tolist()
        assert (tensor.keys.tolist(), tensor.shape.tolist()) == (keys, shape)


@settings(max_examples=300)
@given(st.binary(max_size=40), st.integers(0, 60), st.booleans())
def test_nothing_but_its_own_error_comes_of_any_bytes(noise, at, append):
    whole = record({"values": ("float32", [1, 2, 3, 4, 5], [1, 2])}, {"values": ("int32", [4])})
    bad = whole[:at] + noise + (whole[at:] if append else b"")
    block, faults = decode([bad], FIVE, LABEL, on_error="skip")
    assert len(block) + faults.count == 1
    assert not isinstance(block.columns["values"], Ragged)
