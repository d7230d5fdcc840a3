"""TFRecord and tf.train.Example: as Protocol Buffers read them, and what is wrong with records."""

from __future__ import annotations

import mmap
import pickle
import platform
import struct
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.kernels import example
from flatout.kernels.example import Bad, End, Feature

# The fast way reads this far beyond a record, so that behind the last one the exact way serves.
_TAILS = st.sampled_from([b"", bytes(200), b"\xff" * 200])


def _refused(function, words):
    with pytest.raises(ValueError, match=words):
        function()


# ---- Protocol Buffers, which know the truth ----


def _messages(is_map):
    """The messages of TensorFlow's example.proto. On the wire a map is a list of its entries."""
    protobuf = pytest.importorskip("google.protobuf")
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    assert protobuf
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")

    def message(name, *fields):
        made = file.message_type.add(name=name)
        for number, (field, kind, label) in enumerate(fields, 1):
            is_message = isinstance(kind, str)
            made.field.add(
                name=field,
                number=number,
                label=label,
                type=11 if is_message else kind,
                type_name=kind if is_message else None,
            )
        return made

    one, many = 1, 3
    message("BytesList", ("value", 12, many))
    message("FloatList", ("value", 2, many))
    message("Int64List", ("value", 3, many))
    kinds = [("bytes_list", ".t.BytesList"), ("float_list", ".t.FloatList")]
    kinds.append(("int64_list", ".t.Int64List"))
    feature = message("Feature", *((name, kind, one) for name, kind in kinds))
    feature.oneof_decl.add(name="kind")
    for field in feature.field:
        field.oneof_index = 0
    features = message("Features", ("feature", ".t.Features.FeatureEntry", many))
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = is_map
    entry.field.add(name="key", number=1, label=one, type=9 if is_map else 12)
    entry.field.add(name="value", number=2, label=one, type=11, type_name=".t.Feature")
    message("Example", ("features", ".t.Features", one))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))


@pytest.fixture(scope="module")
def message():
    return _messages(is_map=True)


@pytest.fixture(scope="module")
def entries_message():
    # The parser behind Python drops an entry with an unknown field in it; that of C++ does not.
    return _messages(is_map=False)


def _truth(message, record):
    """Kind and values of each feature, as Protocol Buffers read them."""
    found = {}
    features = message.FromString(record).features.feature
    if hasattr(features, "items"):
        pairs = [(name.encode(), feature) for name, feature in features.items()]
    else:
        pairs = [(entry.key, entry.value) for entry in features]
    for name, feature in pairs:
        kind = feature.WhichOneof("kind")
        found.pop(name, None)
        if kind is not None:
            found[name] = (kind.split("_")[0], list(getattr(feature, kind).value))
    return found


# ---- records written by hand ----


def _varint(value, longer=0):
    """A varint; of `longer` more bytes than it needs."""
    out = bytearray()
    value &= 2**64 - 1
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    for _ in range(longer):
        out[-1] |= 128
        out.append(0)
    return bytes(out)


def _field(number, wire, data):
    return _varint(number << 3 | wire) + data


def _part(number, data, longer=0):
    return _field(number, 2, _varint(len(data), longer) + data)


def _list(kind, values):
    if kind == "int64":
        return _part(3, _part(1, b"".join(map(_varint, values))) if values else b"")
    if kind == "float":
        return _part(2, _part(1, struct.pack(f"<{len(values)}f", *values)) if values else b"")
    return _part(1, b"".join(_part(1, value) for value in values))


def _entry(name, kind, values):
    return _part(1, _part(1, name) + _part(2, _list(kind, values)))


def _record(*entries):
    return _part(1, b"".join(entries))


def _frame(record):
    def crc(data):
        return struct.pack("<I", example.masked_crc32c(data))

    length = struct.pack("<Q", len(record))
    return length + crc(length) + record + crc(record)


def _file(records, tail=b""):
    """The frames of records one after the other, and where the records are in them."""
    ends = np.cumsum([len(record) + 16 for record in records], dtype=np.int64) - 4
    starts = ends - [len(record) for record in records]
    return b"".join(map(_frame, records)) + tail, starts.astype(np.int64), ends


_GOOD = _entry(b"i", "int64", [1, 2])
_I = [Feature(b"i", "int64", 2, True)]

# ---- calls ----

_DTYPES = {"int64": np.int64, "float": np.float32, "bytes": np.uint8}


def _measure(buffer, starts, ends, features, check=True):
    ragged = sum(feature.width is None for feature in features)
    lengths = np.full((ragged, len(starts)), -9, np.int64)
    status, at = np.full(len(starts), 77, np.uint8), np.full(len(starts), -9, np.int64)
    bad = example.measure(
        buffer,
        starts,
        ends,
        example.Plan(features),
        lengths=lengths,
        status=status,
        at=at,
        check=check,
    )
    assert bad == np.count_nonzero(status)
    return bad, lengths, status, at


def _decode(buffer, starts, ends, features, lengths=None, defaults=None, int32=(), check=True):
    """Outputs, status and places; ragged rows have room for `lengths` values."""
    rows, outputs, offsets, which = len(starts), [], [], 0
    for i, feature in enumerate(features):
        dtype = np.int32 if i in int32 else _DTYPES[feature.kind]
        if feature.width is None:
            offsets.append(np.concatenate([[0], np.cumsum(lengths[which])]).astype(np.int64))
            outputs.append(np.full(offsets[-1][-1], 99, dtype))
            which += 1
        else:
            offsets.append(None)
            outputs.append(np.full((rows, feature.width), 99, dtype))
    status, at = np.full(rows, 77, np.uint8), np.full(rows, -9, np.int64)
    bad = example.decode(
        buffer,
        starts,
        ends,
        example.Plan(features),
        outputs=outputs,
        offsets=offsets,
        defaults=[0] * len(features) if defaults is None else defaults,
        status=status,
        at=at,
        check=check,
    )
    assert bad == np.count_nonzero(status)
    return bad, outputs, status, at, offsets


def _one(record, features, **options):
    """Status and place, in the record, of what is wrong with it."""
    for tail in (b"", bytes(200)):
        buffer, starts, ends = _file([record], tail)
        ragged = sum(feature.width is None for feature in features)
        lengths = [[options.get("room", 0)]] * ragged
        _, _, status, at, _ = _decode(
            buffer,
            starts,
            ends,
            features,
            lengths,
            options.get("defaults"),
            options.get("int32", ()),
        )
    return Bad(int(status[0])) if status[0] else None, int(at[0]) - 12


# ---- checksum ----


def test_checksum_of_known_data():
    # RFC 3720, B.4, and the usual check value.
    for data, crc in [
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ]:
        assert example.crc32c(data) == crc


def test_every_way_to_a_checksum_gives_the_same():
    data = np.random.default_rng(0).integers(0, 256, 9000, dtype=np.uint8)
    lengths = [*range(1400), *range(2040, 2060), 4095, 4096, 4097, 8192, 8700]
    for length in lengths:
        start = length % 67  # at all alignments
        part = data[start : start + length]
        found = example._c.crc32c_ways(part, length)
        assert len(set(found.values())) == 1, (length, found)
    assert {"portable", "sse4.2"} <= found.keys() or platform.machine() != "x86_64"
    for value in (0, 1, 2**32 - 1):
        assert len(set(example._c.crc32c_ways(data, value).values())) == 1


@settings(deadline=None)
@given(st.binary(max_size=300), st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_checksum_of_any_data(data, repeats, value):
    data = data * repeats
    middle = len(data) // 3
    whole = example.crc32c(data, value)
    assert example.crc32c(data[middle:], example.crc32c(data[:middle], value)) == whole


@settings(deadline=None)
@given(st.binary(max_size=300), st.integers(1, 70))
def test_checksums_of_blocks(data, block):
    found = example.crc32c_blocks(data, block).tolist()
    assert found == [example.crc32c(data[at : at + block]) for at in range(0, len(data), block)]


def test_blocks_of_no_bytes_are_refused():
    with pytest.raises(ValueError, match="block: expected at least 1 byte"):
        example.crc32c_blocks(b"1234", 0)


def test_checksum_refuses_what_is_no_memory():
    for wrong, error in [("text", TypeError), (np.zeros((4, 4))[:, ::2], ValueError)]:
        with pytest.raises(error):
            example.crc32c(wrong)


# ---- frames ----

_RECORDS = [b"", b"a", b"bc" * 40, bytes(1000)]


def test_scan_finds_the_records_of_any_buffer(tmp_path):
    data, starts, ends = _file(_RECORDS)
    path = tmp_path / "some.tfrecord"
    path.write_bytes(data)
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    for buffer in (data, bytearray(data), np.frombuffer(data, np.uint8), mapped):
        found = example.scan(buffer)
        assert found.starts.tolist() == starts.tolist()
        assert found.ends.tolist() == ends.tolist()
        assert (found.consumed, found.end, found.problem) == (len(data), End.WHOLE, "")
    mapped.close()


@pytest.mark.parametrize("count", [0, 1, 65_535, 65_536, 65_537, 131_073])
def test_scan_takes_more_records_than_fit_at_once(count):
    data, starts, _ = _file([b"x" * (i % 3) for i in range(count)])
    found = example.scan(data)
    assert found.starts.tolist() == starts.tolist()
    assert found.end == End.WHOLE


@settings(deadline=None)
@given(st.lists(st.binary(max_size=30), max_size=6), st.data())
def test_a_stream_is_scanned_in_any_pieces(records, data):
    whole, _, _ = _file(records)
    cuts = data.draw(st.lists(st.integers(0, len(whole)), max_size=5).map(sorted))
    rest, found = b"", []
    for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        buffer, final = rest + whole[begin:end], end == len(whole)
        scanned = example.scan(buffer, final=final)
        assert scanned.problem == ""
        found += [
            buffer[a:b] for a, b in zip(scanned.starts.tolist(), scanned.ends.tolist(), strict=True)
        ]
        rest = buffer[scanned.consumed :]
        assert final <= (rest == b"")
    assert found == records


def test_scan_of_a_file_cut_at_every_byte():
    records = [b"abc", b"", bytes(20)]
    data, starts, _ = _file(records)
    frames = [0, *(np.cumsum([len(r) + 16 for r in records])).tolist()]
    for size in range(len(data)):
        whole = sum(frame <= size for frame in frames) - 1
        for final in (True, False):
            found = example.scan(data[:size], final=final)
            assert found.starts.tolist() == starts[:whole].tolist()
            assert found.consumed == frames[whole]
            left = size - frames[whole]
            assert found.end == (
                End.WHOLE if not left else End.TRUNCATED_HEADER if left < 12 else End.TRUNCATED_DATA
            )
            assert (found.problem != "") == (final and left > 0)
    problem = example.scan(data[:25]).problem
    assert problem == "expected a length and its checksum, 12 bytes; found the end after 6"
    problem = example.scan(data[:50]).problem
    assert problem == (
        "expected a record of 20 bytes and its checksum, 4 bytes; found the end after 3"
    )


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**63 - 16, 2**63 - 15])
def test_scan_refuses_a_length_that_cannot_be(length):
    header = struct.pack("<Q", length)
    data = _frame(b"good") + header + struct.pack("<I", example.masked_crc32c(header)) + bytes(50)
    for final in (True, False):
        found = example.scan(data, final=final)
        assert (len(found.starts), found.consumed) == (1, 20)
        assert found.end == End.LENGTH_TOO_LARGE
        assert found.problem == f"expected a length below 2^63, found {length:,}"


def test_scan_reports_a_record_that_is_too_long_for_the_buffer():
    header = struct.pack("<Q", 2**63 - 17)
    data = header + struct.pack("<I", example.masked_crc32c(header)) + bytes(7)
    found = example.scan(data)
    assert (found.end, found.consumed) == (End.TRUNCATED_DATA, 0)
    assert found.problem == (
        "expected a record of 9,223,372,036,854,775,791 bytes and its checksum, 4 bytes; found "
        "the end after 7"
    )
    assert example.scan(data, final=False).problem == ""


def test_scan_compares_the_checksum_of_each_length():
    data = bytearray(_frame(b"good") + _frame(b"bad"))
    for place in range(20, 32):
        spoiled = data.copy()
        spoiled[place] ^= 1
        found = example.scan(spoiled, final=False)
        assert (found.end, found.consumed, len(found.starts)) == (End.LENGTH_CRC, 20, 1)
        assert found.problem.startswith("expected the checksum 0x")


def test_scan_refuses_wrong_buffers():
    _refused(lambda: example.scan(np.zeros(20, np.uint8)[::2]), "C-contiguous")


@settings(deadline=None)
@given(st.binary(max_size=80))
def test_scan_of_any_bytes(data):
    found = example.scan(data)
    assert found.consumed <= len(data)


# ---- messages that are as they should be ----

_NAMES = [b"", b"a", b"ids", b"values", b"a name that is longer", b"n" * 150]
_INTS = st.one_of(
    st.integers(0, 127),
    st.integers(0, 2**21 - 1),
    st.integers(0, 2**28 - 1),
    st.integers(0, 2**56 - 1),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([-1, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63 - 1, -(2**63)]),
)
# Lists of one range, which the fast ways are for, and of several.
_INT_LISTS = st.one_of(
    st.lists(_INTS, max_size=8),
    st.integers(0, 9).flatmap(
        lambda size: st.lists(st.integers(0, 2 ** (7 * size + 1) - 1), max_size=70)
    ),
)
_FLOATS = st.floats(width=32, allow_nan=False)
_LISTS = {
    "int64": _INT_LISTS,
    "float": st.lists(_FLOATS, max_size=50),
    "bytes": st.lists(st.binary(max_size=40), min_size=1, max_size=1),
}
_KINDS = st.sampled_from(sorted(_LISTS))
_VALUES = _KINDS.flatmap(lambda kind: st.tuples(st.just(kind), _LISTS[kind]))
_UNKNOWN = st.one_of(
    st.builds(lambda n, v: _field(n, 0, _varint(v)), st.integers(4, 2**29 - 1), _INTS),
    st.builds(lambda n, v: _field(n, 1, v), st.integers(4, 30), st.binary(min_size=8, max_size=8)),
    st.builds(_part, st.integers(4, 30), st.binary(max_size=20)),
    st.builds(lambda n, v: _field(n, 5, v), st.integers(4, 30), st.binary(min_size=4, max_size=4)),
    # Known numbers that have another type.
    st.builds(lambda n, v: _field(n, 0, _varint(v)), st.integers(2, 3), _INTS),
)
_SOME_UNKNOWN = st.one_of(st.just(b""), st.just(b""), st.just(b""), _UNKNOWN)


@st.composite
def _any_list(draw, kind=_KINDS):
    """A list in one of the many ways to write it: packed, unpacked, in pieces."""
    kind = draw(kind)
    number = {"bytes": 1, "float": 2, "int64": 3}[kind]
    body = draw(_SOME_UNKNOWN)
    for _ in range(draw(st.integers(0, 3))):
        values = draw(_LISTS[kind])
        if kind == "bytes":
            body += b"".join(_part(1, value) for value in values)
        elif draw(st.booleans()):
            longer = draw(st.integers(0, 2))
            packed = [_varint(v) if kind == "int64" else struct.pack("<f", v) for v in values]
            body += _part(1, b"".join(packed), longer)
        elif kind == "int64":
            body += b"".join(_field(1, 0, _varint(v)) for v in values)
        else:
            body += b"".join(_field(1, 5, struct.pack("<f", v)) for v in values)
        body += draw(_SOME_UNKNOWN)
    return _part(number, body)


@st.composite
def _any_entry(draw):
    """An entry of the map: its parts in any order, some of them twice or not at all."""
    features = st.lists(st.one_of(_any_list(), _any_list(), _UNKNOWN), max_size=3)
    parts = [_part(1, draw(st.sampled_from(_NAMES)))] * draw(st.integers(0, 2))
    for _ in range(draw(st.integers(0, 2))):
        parts.append(_part(2, b"".join(draw(features))))
    parts.append(draw(_SOME_UNKNOWN))
    return _part(1, b"".join(draw(st.permutations(parts))))


@st.composite
def _plain_record(draw):
    """As writers write them: one list of each feature, packed."""
    names = draw(st.lists(st.sampled_from(_NAMES), unique=True, max_size=len(_NAMES)))
    return _record(*(_entry(name, *draw(_VALUES)) for name in names))


@st.composite
def _any_record(draw):
    parts = []
    for _ in range(draw(st.integers(1, 2))):
        entries = draw(st.lists(st.one_of(_any_entry(), _UNKNOWN), max_size=5))
        parts.append(_part(1, b"".join(entries), draw(st.integers(0, 1))))
    return b"".join(parts) + draw(_SOME_UNKNOWN)


@st.composite
def _features(draw):
    names = draw(st.lists(st.sampled_from(_NAMES), unique=True, min_size=1, max_size=6))
    return [
        Feature(
            name,
            draw(_KINDS),
            draw(st.one_of(st.none(), st.none(), st.sampled_from([1, 2, 39]))),
            draw(st.booleans()),
        )
        for name in names
    ]


def _expected(truth, feature):
    """The values of a feature, or what is wrong with it."""
    if feature.name not in truth:
        return Bad.MISSING if feature.required else None
    kind, values = truth[feature.name]
    if kind != feature.kind:
        return Bad.WRONG_KIND
    if kind == "bytes":
        if len(values) > 1:
            return Bad.SEVERAL_VALUES
        values = list(b"".join(values))
    if feature.width is not None and len(values) != feature.width:
        return Bad.WRONG_COUNT
    return values


def _check_against_truth(message, records, features, tail, defaults):
    """Lengths, values, presence and status, as Protocol Buffers have them."""
    buffer, starts, ends = _file(records, tail)
    _, lengths, measured, _ = _measure(buffer, starts, ends, features)
    _, outputs, status, _, offsets = _decode(buffer, starts, ends, features, lengths, defaults)
    # Bad rows have the length 0, which may be the first thing that is wrong with them then.
    assert (measured != 0).tolist() == (status != 0).tolist()
    for row, record in enumerate(records):
        truth = _truth(message, record)
        expected = [_expected(truth, feature) for feature in features]
        bad = next((one for one in expected if isinstance(one, Bad)), 0)
        assert measured[row] == bad
        for i, values in enumerate(expected):
            own = offsets[i]
            found = outputs[i][row] if own is None else outputs[i][own[row] : own[row + 1]]
            if bad:
                values = [0] * len(found)
            elif values is None:
                values = [defaults[i]] * len(found)
            assert found.tolist() == np.array(values, found.dtype).tolist()


def _check_records(message, records, features, tail, data):
    defaults = [data.draw(st.integers(0, 255)) for _ in features]
    _check_against_truth(message, records, features, tail, defaults)


@settings(deadline=None, max_examples=150)
@given(st.lists(_plain_record(), max_size=5), _features(), _TAILS, st.data())
def test_records_as_writers_write_them(message, records, features, tail, data):
    _check_records(message, records, features, tail, data)


@settings(deadline=None, max_examples=200)
@given(st.lists(_any_record(), min_size=1, max_size=4), _features(), _TAILS, st.data())
def test_records_in_any_way_to_write_them(entries_message, records, features, tail, data):
    _check_records(entries_message, records, features, tail, data)


@settings(deadline=None)
@given(st.permutations(_NAMES), st.permutations(_NAMES), _TAILS)
def test_entries_in_any_order(message, first, second, tail):
    kinds = {name: sorted(_LISTS)[i % 3] for i, name in enumerate(_NAMES)}
    lists = {"int64": [1, -2, 300], "float": [0.5], "bytes": [b"x\0y"]}
    records = [
        _record(*(_entry(name, kinds[name], lists[kinds[name]]) for name in order))
        for order in (first, second, first, _NAMES)
    ]
    features = [Feature(name, kinds[name], None, True) for name in _NAMES[1:]]
    _check_against_truth(message, records, features, tail, [0] * len(features))


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 70), st.integers(0, 9), _TAILS)
def test_fixed_rows_of_integers_of_every_size(message, data, width, size, tail):
    integers = st.integers(0, min(2 ** (7 * size + 1) - 1, 2**63 - 1))
    values = [data.draw(st.lists(integers, min_size=width, max_size=width)) for _ in range(3)]
    records = [_record(_entry(b"ids", "int64", row)) for row in values]
    features = [Feature(b"ids", "int64", width, True)]
    _check_against_truth(message, records, features, tail, [0])
    buffer, starts, ends = _file(records, tail)
    _, (narrow,), status, _, _ = _decode(buffer, starts, ends, features, int32=(0,))
    fits = [max(row) < 2**31 for row in values]
    assert (status == 0).tolist() == fits
    assert narrow.tolist() == [
        row if ok else [0] * width for row, ok in zip(values, fits, strict=True)
    ]


def test_records_written_by_protocol_buffers(message):
    records, rng = [], np.random.default_rng(1)
    for _ in range(50):
        made = message()
        made.features.feature["label"].int64_list.value.append(int(rng.integers(2)))
        made.features.feature["ids"].int64_list.value.extend(rng.integers(-5, 10**6, 39).tolist())
        made.features.feature["values"].float_list.value.extend(rng.random(39).tolist())
        made.features.feature["text"].bytes_list.value.append(rng.bytes(int(rng.integers(9))))
        records.append(made.SerializeToString())
    features = [
        Feature(b"values", "float", 39, True),
        Feature(b"text", "bytes", None, True),
        Feature(b"ids", "int64", 39, True),
        Feature(b"label", "int64", 1, True),
    ]
    for tail in (b"", bytes(200)):
        _check_against_truth(message, records, features, tail, [0] * 4)


def test_padded_rows_are_filled_with_the_default():
    records = [
        _record(_entry(b"ids", "int64", list(range(size))), _entry(b"text", "bytes", [b"ab"]))
        for size in (3, 0, 5)
    ]
    records.append(_record())
    features = [Feature(b"ids", "int64", None, False), Feature(b"text", "bytes", None, False)]
    for tail in (b"", bytes(200)):
        buffer, starts, ends = _file(records, tail)
        _, (ids, text), status, _, _ = _decode(
            buffer, starts, ends, features, [[5] * 4, [3] * 4], [-7, 32]
        )
        assert not status.any()
        assert ids.reshape(4, 5).tolist() == [
            [0, 1, 2, -7, -7], [-7] * 5, [0, 1, 2, 3, 4], [-7] * 5
        ]  # fmt: skip
        assert text.tobytes() == b"ab ab ab    "
        _, (ids, _), status, at, _ = _decode(
            buffer, starts, ends, features, [[4] * 4, [3] * 4], [-7, 32]
        )
        assert status.tolist() == [0, 0, Bad.WRONG_COUNT, 0]
        assert ids.reshape(4, 4)[2].tolist() == [0] * 4
        assert starts[2] < at[2] < ends[2]


@pytest.mark.parametrize("size", [1, 4, 19, 20, 21, 39, 40, 41, 64, 100])
def test_rows_with_room_for_more(size):
    for value in (5, 300, 70_000, 2**27, 2**50, -1):
        records = [_record(_entry(b"i", "int64", [value] * size))] * 3
        buffer, starts, ends = _file(records, bytes(200))
        for room in (size, size + 1, size + 5, size + 20, 2 * size):
            for int32 in ((), (0,)) if value < 2**31 else ((),):
                _, (found,), status, _, _ = _decode(
                    buffer,
                    starts,
                    ends,
                    [Feature(b"i", "int64", None, True)],
                    [[room] * 3],
                    [-7],
                    int32=int32,
                )
                assert not status.any()
                row = [value] * size + [-7] * (room - size)
                assert found.reshape(3, room).tolist() == [row] * 3


def test_missing_features_get_their_defaults():
    records = [_record(_entry(b"there", "int64", [5])), _record()]
    features = [
        Feature(b"a", "float", 2, False),
        Feature(b"there", "int64", 1, False),
        Feature(b"b", "bytes", 3, False),
        Feature(b"c", "int64", 1, False),
    ]
    for tail in (b"", bytes(200)):
        buffer, starts, ends = _file(records, tail)
        _, (a, there, b, c), status, _, _ = _decode(
            buffer, starts, ends, features, defaults=[float("nan"), 8, 65, -(2**63)], int32=(1,)
        )
        assert not status.any()
        assert np.isnan(a).all()
        assert there.tolist() == [[5], [8]]
        assert b.tobytes() == b"AAA" * 2
        assert c.tolist() == [[-(2**63)]] * 2


def test_bits_of_floats_stay_as_they_are():
    bits = np.array([0x7F800001, 0xFFC12345, 0x80000000, 1], np.uint32)
    record = _record(_part(1, _part(1, b"f") + _part(2, _part(2, _part(1, bits.tobytes())))))
    buffer, starts, ends = _file([record])
    _, (found,), *_ = _decode(buffer, starts, ends, [Feature(b"f", "float", 4, True)])
    assert found.view(np.uint32).tolist() == [bits.tolist()]


@pytest.mark.parametrize("size", [2**7, 2**14, 2**21, 2**21 + 2**20])
def test_lengths_of_every_size(size):
    for near in (*range(size - 20, size + 2), size + 1000):
        text = np.random.default_rng(near).bytes(near)
        records = [_record(_entry(b"t", "bytes", [text])), _record(_GOOD)]
        buffer, starts, ends = _file(records)
        features = [Feature(b"t", "bytes", None, False)]
        for tail in (b"", bytes(200)) if size < 2**20 else (bytes(200),):
            _, lengths, status, _ = _measure(buffer + tail, starts, ends, features)
            assert (lengths.tolist(), status.any()) == ([[near, 0]], False)
            _, (found,), *_ = _decode(buffer + tail, starts, ends, features, lengths)
            assert found.tobytes() == text


def test_many_features_of_which_some_are_wanted():
    names = [f"feature {i}".encode() for i in range(300)]
    records = [
        _record(*(_entry(name, "int64", [i * row]) for i, name in enumerate(names)))
        for row in range(3)
    ]
    wanted = [290, 3, 4, 299, 0]
    features = [Feature(names[i], "int64", 1, True) for i in wanted]
    features.append(Feature(b"feature", "int64", 1, False))
    buffer, starts, ends = _file(records, bytes(200))
    _, outputs, status, _, _ = _decode(buffer, starts, ends, features, defaults=[9] * 6)
    assert not status.any()
    assert np.hstack(outputs).tolist() == [[i * row for i in wanted] + [9] for row in range(3)]


def test_rows_in_any_order_and_more_than_once():
    records = [_record(_entry(b"i", "int64", [i, -i])) for i in range(40)]
    buffer, starts, ends = _file(records)
    order = np.random.default_rng(0).integers(0, 40, 500)
    _, (found,), *_ = _decode(buffer, starts[order], ends[order], [Feature(b"i", "int64", 2, True)])
    assert found.tolist() == [[i, -i] for i in order.tolist()]


def test_without_checks_only_the_records_are_read():
    record = _record(_entry(b"i", "int64", [7]))
    starts, ends = np.array([0]), np.array([len(record)])
    features = [Feature(b"i", "int64", 1, True)]
    _, (found,), status, _, _ = _decode(record, starts, ends, features, check=False)
    assert (found.tolist(), status.tolist()) == ([[7]], [0])
    _, _, status, at, _ = _decode(record, starts, ends, features)
    assert (status.tolist(), at.tolist()) == ([Bad.OUTSIDE], [0])


def test_no_rows_at_all():
    empty = np.empty(0, np.int64)
    features = [Feature(b"a", "int64", 3, True), Feature(b"b", "float", None, True)]
    bad, outputs, *_ = _decode(b"", empty, empty, features, [[]])
    assert (bad, [len(output) for output in outputs]) == (0, [0, 0])
    assert _measure(b"", empty, empty, features)[0] == 0


# ---- records that are not ----


def _feature_of(body, name=b"i"):
    """A record whose only entry has this Feature, and where that begins in it."""
    head = _part(1, name)
    value = _part(2, body)
    record = _record(_part(1, head + value))
    return record, len(record) - len(body)


def test_both_checksums_are_compared():
    records = [_record(_GOOD)] * 3
    buffer, starts, ends = _file(records, bytes(200))
    frame = len(records[0]) + 16
    for place in range(frame):
        spoiled = bytearray(buffer)
        spoiled[frame + place] ^= 16
        _, (values,), status, at, _ = _decode(bytes(spoiled), starts, ends, _I)
        expected = Bad.LENGTH_CRC if place < 12 else Bad.DATA_CRC
        assert status.tolist() == [0, expected, 0]
        assert at.tolist() == [-9, frame if place < 12 else frame + 12, -9]
        assert values.tolist() == [[1, 2], [0, 0], [1, 2]]
        _, _, measured, _ = _measure(bytes(spoiled), starts, ends, _I)
        assert measured.tolist() == status.tolist()
        if place < 12 or place >= frame - 4:
            _, (values,), status, _, _ = _decode(bytes(spoiled), starts, ends, _I, check=False)
            assert values.tolist() == [[1, 2]] * 3
            assert not status.any()


def test_an_index_of_another_file_is_noticed():
    buffer, starts, ends = _file([_record(_GOOD)] * 2, bytes(200))
    for shift in (-3, 5):
        _, _, status, at, _ = _decode(buffer, starts, ends + np.array([0, shift]), _I)
        assert status.tolist() == [0, Bad.LENGTH_DIFFERS]
        assert at[1] == starts[1] - 12


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(*[st.one_of(st.integers(-30, 100), st.integers(-(2**63), 2**63 - 1))] * 2),
        max_size=5,
    ),
    st.booleans(),
)
def test_ranges_outside_of_the_buffer(ranges, check):
    buffer, _, _ = _file([_record(_GOOD)])
    starts = np.array([start for start, _ in ranges], np.int64)
    ends = np.array([end for _, end in ranges], np.int64)
    _, _, status, at, _ = _decode(buffer, starts, ends, _I, check=check)
    margins = (12, 4) if check else (0, 0)
    for (start, end), code, place in zip(ranges, status.tolist(), at.tolist(), strict=True):
        outside = not margins[0] <= start <= end <= len(buffer) - margins[1]
        assert (code == Bad.OUTSIDE) == outside
        assert not outside or place == start


def test_a_record_cut_at_every_byte():
    names = [b"i", b"f", b"t"]
    record = _record(
        _GOOD, _entry(b"f", "float", [1.0, 2.0]), _entry(b"t", "bytes", [b"xyz"]), _GOOD
    )
    features = [
        *_I,
        Feature(names[1], "float", None, True),
        Feature(names[2], "bytes", 3, True),
    ]
    for size in range(1, len(record)):
        bad, at = _one(record[:size], features, room=2)
        assert bad == Bad.TRUNCATED
        assert at <= size
    # The same within a message: the outer ones are as long as they say.
    inner = _list("int64", [1, 2, 300])
    for size in range(1, len(inner)):
        part, begin = _feature_of(inner[:size])
        bad, at = _one(part, [Feature(b"i", "int64", None, True)], room=3)
        assert bad == Bad.TRUNCATED
        assert begin <= at <= len(part)


@pytest.mark.parametrize(
    ("body", "bad", "at"),
    [
        # A varint without an end, in the list; of eleven bytes; a value that needs all ten.
        (_part(3, _part(1, b"\x05\x80")), Bad.TRUNCATED, 5),
        (_part(3, _part(1, b"\x05" + b"\x80" * 10 + b"\x01")), Bad.VARINT_TOO_LONG, 5),
        (_part(3, _part(1, b"\x05" + b"\xff" * 9 + b"\x7f")), None, None),
        (_part(3, _field(1, 0, b"\x80" * 10 + b"\x01") * 2), Bad.VARINT_TOO_LONG, 3),
        # Tags and lengths.
        (b"\x80\x80\x80\x80\x80\x01", Bad.VARINT_TOO_LONG, 0),
        (b"\x1a\x80\x80\x80\x80\x80\x01", Bad.VARINT_TOO_LONG, 1),
        (b"\xff\xff\xff\xff\x7f", Bad.TAG, 0),
        (b"\x02\x00", Bad.TAG, 0),
        (b"\x23\x24", Bad.TAG, 0),
        (b"\x24", Bad.TAG, 0),
        (b"\x1e", Bad.TAG, 0),
        (b"\x1f", Bad.TAG, 0),
        (b"\x1a\x05\x0a", Bad.TRUNCATED, 1),
        (b"\x25\x00\x00\x00", Bad.TRUNCATED, 1),
        (b"\x21\x00\x00\x00\x00", Bad.TRUNCATED, 1),
        # Kinds and counts.
        (_list("float", [1.0, 2.0]), Bad.WRONG_KIND, -4),
        (_list("bytes", [b"xy"]), Bad.WRONG_KIND, -4),
        (_list("int64", [1, 2]) + _list("float", []), Bad.WRONG_KIND, -4),
        (_list("float", [1.0]) + _list("int64", [1, 2]), None, None),
        (_list("int64", [1]) + _list("int64", [2]), None, None),
        (_list("int64", [1, 2, 3]), Bad.WRONG_COUNT, -4),
        (_list("int64", [1]), Bad.WRONG_COUNT, -4),
        (_list("int64", []), Bad.WRONG_COUNT, -4),
    ],
)
def test_what_is_wrong_with_integers(body, bad, at):
    record, begin = _feature_of(body)
    if at == -4:  # the entry: before the key, of three bytes, and the value's tag and length
        at = -5
    found, place = _one(record, _I)
    assert found == bad
    if bad is not None:
        assert place == begin + at


def test_what_is_wrong_with_floats_and_bytes():
    floats = [Feature(b"i", "float", None, True)]
    record, begin = _feature_of(_part(2, _part(1, bytes(7))))
    assert _one(record, floats, room=2) == (Bad.TRUNCATED, begin + 4)
    texts = [Feature(b"i", "bytes", 2, True)]
    record, begin = _feature_of(_list("bytes", [b"a", b"b"]))
    assert _one(record, texts) == (Bad.SEVERAL_VALUES, begin - 5)
    record, begin = _feature_of(_list("bytes", [b"abc"]))
    assert _one(record, texts) == (Bad.WRONG_COUNT, begin - 5)


@pytest.mark.parametrize(
    "record",
    [b"", _record(), _record(_entry(b"j", "int64", [1, 2])), _feature_of(b"")[0]],
)
def test_a_missing_feature(record):
    assert _one(record, _I) == (Bad.MISSING, 0)
    buffer, starts, ends = _file([record])
    assert _measure(buffer, starts, ends, _I)[2].tolist() == [Bad.MISSING]


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**35, -(2**63), 2**63 - 1])
def test_integers_that_do_not_fit_into_int32(value):
    for width in (2, 30):
        values = [*[1] * (width - 1), value]
        record = _record(_entry(b"i", "int64", values))
        at = len(record) - len(_varint(value))
        features = [Feature(b"i", "int64", width, True)]
        assert _one(record, features, int32=(0,)) == (Bad.INT32_OVERFLOW, at)
        assert _one(record, features)[0] is None


def test_every_fault_has_words():
    assert [bad.value for bad in Bad] == list(range(1, 13))
    assert all(bad.words.startswith("expected ") and "found" in bad.words for bad in Bad)
    assert len(Bad) == Bad.SEVERAL_VALUES


# ---- anything ----


@settings(deadline=None, max_examples=200)
@given(st.lists(st.binary(max_size=60), max_size=4), _features(), _TAILS)
def test_any_bytes(records, features, tail):
    buffer, starts, ends = _file(records, tail)
    lengths = _measure(buffer, starts, ends, features)[1]
    _decode(buffer, starts, ends, features, lengths)


@settings(deadline=None, max_examples=300)
@given(
    st.one_of(_plain_record(), _any_record()),
    _features(),
    _TAILS,
    st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_spoilt_records(entries_message, record, features, tail, changes):
    from google.protobuf.message import DecodeError

    spoiled = bytearray(record)
    for place, byte in changes:
        if spoiled:
            spoiled[place % len(spoiled)] = byte
    records = [record, bytes(spoiled), record]
    buffer, starts, ends = _file(records, tail)
    _, lengths, measured, _ = _measure(buffer, starts, ends, features)
    _, outputs, status, at, offsets = _decode(buffer, starts, ends, features, lengths)
    bad = status != 0
    assert (measured != 0).tolist() == bad.tolist()
    assert ((at >= starts - 12) & (at <= ends))[bad].all()
    if not bad[1]:
        try:
            truth = _truth(entries_message, bytes(spoiled))
        except DecodeError:
            return  # in what no one looks for
        for i, feature in enumerate(features):
            own = offsets[i]
            found = outputs[i][1] if own is None else outputs[i][own[1] : own[2]]
            expected = _expected(truth, feature)
            expected = [0] * len(found) if expected is None else expected
            assert found.tobytes() == np.array(expected, found.dtype).tobytes()


# ---- wrong calls ----


def _call(function, **changes):
    record = _record(_GOOD, _entry(b"f", "float", [1.0]))
    buffer, starts, ends = _file([record] * 2)
    features = [*_I, Feature(b"f", "float", None, True)]
    arguments = {
        "buffer": buffer,
        "starts": starts,
        "ends": ends,
        "spec": example.Plan(features),
        "status": np.zeros(2, np.uint8),
        "at": np.zeros(2, np.int64),
    }
    if function is example.measure:
        arguments["lengths"] = np.zeros((1, 2), np.int64)
    else:
        arguments["outputs"] = [np.zeros((2, 2), np.int64), np.zeros(2, np.float32)]
        arguments["offsets"] = [None, np.array([0, 1, 2])]
        arguments["defaults"] = [0, 0]
    arguments.update(changes)
    first = [arguments.pop(name) for name in ("buffer", "starts", "ends", "spec")]
    return function(*first, **arguments)


_READ_ONLY = np.zeros(2, np.int64)
_READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"starts": np.zeros(2, np.int32)}, "starts"),
        ({"starts": np.zeros(3, np.int64)}, "ends"),
        ({"ends": np.zeros(2, np.float64)}, "ends"),
        ({"status": np.zeros(2, np.int8)}, "status"),
        ({"status": np.zeros(1, np.uint8)}, "status"),
        ({"at": np.zeros(2, np.uint64)}, "at"),
        ({"at": _READ_ONLY}, "at"),
        ({"buffer": np.zeros(40, np.uint8)[::2]}, "buffer"),
    ],
)
def test_wrong_arrays_are_refused(changes, words):
    for function in (example.measure, example.decode):
        _refused(lambda function=function: _call(function, **changes), words)


_IDS, _FLAT, _OFFSETS = np.zeros((2, 2), np.int64), np.zeros(2, np.float32), np.array([0, 1, 2])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"outputs": [_IDS]}, "2 features"),
        ({"offsets": [None]}, "2 features"),
        ({"defaults": [0, 0, 0]}, "2 features"),
        ({"outputs": [_IDS.astype(np.float32), _FLAT]}, r"outputs\[0\]"),
        ({"outputs": [_IDS, _FLAT.astype(np.float64)]}, r"outputs\[1\]"),
        ({"outputs": [np.zeros((3, 2), np.int64), _FLAT]}, r"outputs\[0\]"),
        ({"outputs": [np.zeros((2, 4), np.int64)[:, ::2], _FLAT]}, r"outputs\[0\]"),
        ({"outputs": [_IDS, np.zeros((2, 1), np.float32)]}, r"outputs\[1\]"),
        ({"outputs": [_IDS, np.zeros(1, np.float32)]}, r"offsets\[1\]"),
        ({"offsets": [_OFFSETS, _OFFSETS]}, r"offsets\[0\]"),
        ({"offsets": [None, _OFFSETS[:2]]}, r"offsets\[1\]|offsets"),
        ({"offsets": [None, np.array([0, 2, 1])]}, r"offsets\[1\]"),
        ({"defaults": [0.5, 0]}, r"defaults\[0\]"),
        ({"defaults": [2**63, 0]}, r"defaults\[0\]"),
        ({"defaults": [0, 1e39]}, r"defaults\[1\]"),
        ({"outputs": [_IDS.astype(np.int32), _FLAT], "defaults": [2**31, 0]}, r"defaults\[0\]"),
    ],
)  # fmt: skip
def test_wrong_outputs_are_refused(changes, words):
    _refused(lambda: _call(example.decode, **changes), words)


@pytest.mark.parametrize(
    ("features", "words"),
    [
        ([], "at least one"),
        ([Feature(b"a", "int64", 1, True), Feature(b"a", "float", 1, True)], "the same name"),
        ([Feature(b"a", "int64", 0, True)], "width"),
        ([Feature(b"a", "int64", 2**31, True)], "width"),
    ],
)
def test_wrong_features_are_refused(features, words):
    with pytest.raises(ValueError, match=words):
        example.Plan(features)


def test_a_plan_can_be_pickled():
    spec = pickle.loads(pickle.dumps(example.Plan(_I)))
    assert spec.features == tuple(_I)
    buffer, starts, ends = _file([_record(_GOOD)])
    found = np.zeros((1, 2), np.int64)
    bad = example.decode(
        buffer,
        starts,
        ends,
        spec,
        outputs=[found],
        offsets=[None],
        defaults=[0],
        status=np.zeros(1, np.uint8),
        at=np.zeros(1, np.int64),
    )
    assert (bad, found.tolist()) == (0, [[1, 2]])


def test_several_threads_share_a_plan():
    records = [_record(_entry(b"i", "int64", [i, -i])) for i in range(3000)]
    buffer, starts, ends = _file(records)
    expected = [[i, -i] for i in range(3000)]
    spec, results = example.Plan(_I), []

    def work():
        found = np.zeros((3000, 2), np.int64)
        status, at = np.zeros(3000, np.uint8), np.zeros(3000, np.int64)
        for _ in range(5):
            example.decode(
                buffer,
                starts,
                ends,
                spec,
                outputs=[found],
                offsets=[None],
                defaults=[0],
                status=status,
                at=at,
            )
        results.append(found.tolist())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4


def _runs_beside(call):
    """Whether Python ran on another thread in the middle half of a call."""
    span, ticks = [], []

    def work():
        span.append(time.perf_counter())
        call()
        span.append(time.perf_counter())

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(0.001)
    quarter = (span[1] - span[0]) / 4
    return any(span[0] + quarter < tick < span[1] - quarter for tick in ticks)


def test_other_threads_run_meanwhile():
    buffer, starts, ends = _file([_record(_GOOD, _entry(b"t", "bytes", [bytes(10**6)]))])
    starts, ends = np.repeat(starts, 2000), np.repeat(ends, 2000)
    columns = {"values": np.zeros((20, 10**6), np.int64)}
    data = np.zeros(10**9, np.uint8)
    for call in (
        lambda: _measure(buffer, starts, ends, _I),
        lambda: _decode(buffer, starts, ends, _I),
        lambda: example.crc32c(data),
        lambda: example.encode(columns),
    ):
        assert any(_runs_beside(call) for _ in range(5))


# ---- writing ----


@st.composite
def _columns(draw):
    rows, columns = draw(st.integers(0, 4)), {}
    for name in draw(st.lists(st.text(max_size=8), unique=True, min_size=1, max_size=4)):
        kind = draw(_KINDS)
        if draw(st.booleans()):
            lengths = draw(st.lists(st.integers(0, 40), min_size=rows, max_size=rows))
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
            shape = (int(offsets[-1]),)
        else:
            offsets, shape = None, (rows, *draw(st.sampled_from([(), (1,), (3,), (2, 20)])))
        size = int(np.prod(shape))
        if kind == "int64":
            flat = np.array(draw(st.lists(_INTS, min_size=size, max_size=size)), np.int64)
        elif kind == "float":
            flat = np.array(draw(st.lists(_FLOATS, min_size=size, max_size=size)), np.float32)
        else:
            flat = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
        columns[name] = flat.reshape(shape) if offsets is None else (flat, offsets)
    return rows, columns


def _row_of(column, row):
    if isinstance(column, tuple):
        return column[0][column[1][row] : column[1][row + 1]]
    return column[row].reshape(-1)


@settings(deadline=None, max_examples=100)
@given(_columns())
def test_what_is_written_is_read_by_protocol_buffers(message, case):
    rows, columns = case
    fast, offsets = example.encode(columns)
    found = example.scan(fast)
    assert (found.end, len(found.starts)) == (End.WHOLE, rows)
    assert offsets.tolist() == [*(found.starts - 12).tolist(), len(fast)]
    for row, (start, end) in enumerate(zip(found.starts, found.ends, strict=True)):
        record = fast[start:end].tobytes()
        truth = _truth(message, record)
        assert set(truth) == {name.encode() for name in columns}
        for name, column in columns.items():
            kind, values = truth[name.encode()]
            expected = _row_of(column, row)
            if kind == "bytes":
                assert values == [expected.tobytes()]
            else:
                assert values == expected.tolist()
        assert example.masked_crc32c(record) == int.from_bytes(fast[end : end + 4], "little")


@settings(deadline=None, max_examples=60)
@given(_columns())
def test_what_is_written_is_decoded_again(case):
    _, columns = case
    buffer, offsets = example.encode(columns)
    kinds = {np.dtype(dtype): kind for kind, dtype in _DTYPES.items()}
    features, lengths = [], []
    for name, column in columns.items():
        values, own = column if isinstance(column, tuple) else (column, None)
        width = None if own is not None else int(np.prod(values.shape[1:]))
        features.append(Feature(name.encode(), kinds[values.dtype], width, True))
        if own is not None:
            lengths.append(np.diff(own))
    starts, ends = offsets[:-1] + 12, offsets[1:] - 4
    measured = _measure(buffer, starts, ends, features)[1]
    assert measured.tolist() == [own.tolist() for own in lengths]
    _, outputs, status, _, _ = _decode(buffer, starts, ends, features, lengths)
    assert not status.any()
    for output, column in zip(outputs, columns.values(), strict=True):
        values = column[0] if isinstance(column, tuple) else column
        assert output.tobytes() == values.tobytes()


def test_entries_are_written_in_the_order_of_the_columns():
    a, b = np.array([1, 2]), np.array([0.5, 1.5], np.float32)
    first, second = (
        example.encode(columns)[0].tobytes() for columns in ({"a": a, "b": b}, {"b": b, "a": a})
    )
    entry_a, entry_b = _entry(b"a", "int64", [1]), _entry(b"b", "float", [0.5])
    assert first.startswith(_frame(_record(entry_a, entry_b)))
    assert second.startswith(_frame(_record(entry_b, entry_a)))


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({}, "at least one"),
        ({"a": np.zeros(3, np.int64), "b": np.zeros(2, np.int64)}, "equally many rows"),
        ({"a": np.zeros(3, np.int32)}, "found int32"),
        ({"a": np.zeros(3)}, "found float64"),
        ({"a": np.zeros(3, ">f4")}, "found >f4"),
        ({"a": np.zeros((3, 4), np.int64)[:, ::2]}, "C-contiguous"),
        ({"a": (np.zeros(3, np.int64), np.array([0, 4]))}, "offsets"),
        ({"a": (np.zeros(3, np.int64), np.array([0, 2, 1]))}, "offsets"),
        ({"a": (np.zeros(3, np.int64), np.array([-1, 2]))}, "offsets"),
        ({"a": (np.zeros(3, np.int64), np.array([0, 2], np.int32))}, "offsets"),
        ({"a": (np.zeros(3, np.int64), np.empty(0, np.int64))}, "offsets"),
    ],
)
def test_wrong_columns_are_refused(columns, words):
    _refused(lambda: example.encode(columns), words)


# ---- TensorFlow, where it is ----


@pytest.mark.slow
def test_tensorflow_reads_and_writes_the_same(tmp_path):
    tf = pytest.importorskip("tensorflow")
    rng = np.random.default_rng(3)
    path = str(tmp_path / "a.tfrecord")
    ids, values = rng.integers(-5, 10**6, (200, 39)), rng.random((200, 39), np.float32)
    lengths = rng.integers(0, 9, 200)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    more = rng.integers(0, 2**62, offsets[-1])
    texts = rng.integers(0, 256, (200, 7), np.uint8)
    with tf.io.TFRecordWriter(path) as writer:
        for row in range(200):
            feature = {
                "ids": tf.train.Feature(int64_list=tf.train.Int64List(value=ids[row])),
                "values": tf.train.Feature(float_list=tf.train.FloatList(value=values[row])),
                "more": tf.train.Feature(
                    int64_list=tf.train.Int64List(value=more[offsets[row] : offsets[row + 1]])
                ),
                "text": tf.train.Feature(
                    bytes_list=tf.train.BytesList(value=[texts[row].tobytes()])
                ),
            }
            made = tf.train.Example(features=tf.train.Features(feature=feature))
            writer.write(made.SerializeToString())
    with open(path, "rb") as file:
        theirs = file.read()
    ours, _ = example.encode({"ids": ids, "values": values, "more": (more, offsets), "text": texts})
    features = [
        Feature(b"ids", "int64", 39, True),
        Feature(b"values", "float", 39, True),
        Feature(b"more", "int64", None, True),
        Feature(b"text", "bytes", 7, True),
    ]
    for buffer in (theirs, ours):
        found = example.scan(buffer)
        measured = _measure(buffer, found.starts, found.ends, features)[1]
        assert measured.tolist() == [lengths.tolist()]
        _, outputs, *_ = _decode(buffer, found.starts, found.ends, features, measured)
        for output, expected in zip(outputs, (ids, values, more, texts), strict=True):
            assert output.tobytes() == expected.tobytes()
    written = str(tmp_path / "b.tfrecord")
    with open(written, "wb") as file:
        file.write(ours)
    batch = next(iter(tf.data.TFRecordDataset(written).batch(200)))
    parsed = tf.io.parse_example(
        batch,
        {
            "ids": tf.io.FixedLenFeature([39], tf.int64),
            "values": tf.io.FixedLenFeature([39], tf.float32),
            "more": tf.io.RaggedFeature(tf.int64),
            "text": tf.io.FixedLenFeature([], tf.string),
        },
    )
    assert parsed["ids"].numpy().tolist() == ids.tolist()
    assert parsed["values"].numpy().tobytes() == values.tobytes()
    assert parsed["more"].values.numpy().tolist() == more.tolist()
    assert parsed["more"].row_splits.numpy().tolist() == offsets.tolist()
    assert parsed["text"].numpy().tolist() == [text.tobytes() for text in texts]
