import io
import os
import struct

import numpy as np
import pytest
from data_recordio import write_recordio
from hypothesis import given
from hypothesis import strategies as st

from flatout.data.reading.decoder import Split, split_lines
from flatout.data.sources.pipes.framing import pieces, rows_within, split_recordio
from flatout.data.sources.pipes.pipe import Pipe
from flatout.errors import DataError

MAGIC = struct.pack("<I", 0xCED7230A)


def recordio(records):
    file = io.BytesIO()
    write_recordio(file, records)
    return file.getvalue()


def array(content):
    return np.frombuffer(content, np.uint8).copy()


def found(content, final=True):
    buffer = array(content)
    split = split_recordio(buffer, final)
    pairs = zip(split.starts, split.ends, strict=True)
    return [buffer[start:end].tobytes() for start, end in pairs], split


def lines(buffer, final):
    return split_lines(buffer, final, comment=b"#", white=b" ")


def read(content, split, text, **limits):
    """The records of a real pipe, which holds all of `content`, and where each stands."""
    reading, writing = os.pipe()
    try:
        os.write(writing, content)
        os.close(writing)
        pipe = Pipe(f"/dev/fd/{reading}", timeout_s=100)
        pipe.open()
        try:
            for piece in pieces(pipe, split, text=text, **limits):
                for start, end in zip(piece.starts.tolist(), piece.ends.tolist(), strict=True):
                    record = piece.buffer[start:end].tobytes()
                    yield record, piece.where("p", start, text)
        finally:
            pipe.close()
    finally:
        os.close(reading)


# -- RecordIO ------------------------------------------------------------------------------------


def test_recordio_is_written_byte_for_byte():
    assert recordio([b"abcde", b""]) == MAGIC + b"\5\0\0\0abcde\0\0\0" + MAGIC + b"\0\0\0\0"
    first, last = struct.pack("<I", 1 << 29 | 4), struct.pack("<I", 3 << 29 | 1)
    assert recordio([b"abcd" + MAGIC + b"e"]) == MAGIC + first + b"abcd" + MAGIC + last + b"e\0\0\0"


pieces_with_magic = st.lists(st.sampled_from([MAGIC, b"abcd", b"e", b"\0", MAGIC[:2]]), max_size=9)


@given(st.lists(st.one_of(st.binary(max_size=20), pieces_with_magic.map(b"".join)), max_size=8))
def test_what_is_written_is_read(records):
    content = recordio(records)
    again, split = found(content)
    assert again == records
    assert split.consumed == len(content)
    assert split.problem == ""
    # A reader that looks for records from anywhere finds heads only: no data look like one.
    heads = [at for at in range(0, len(content), 4) if content[at : at + 4] == MAGIC]
    at = 0
    for head in heads:
        assert head == at
        at += 8 + (int.from_bytes(content[at + 4 : at + 8], "little") % (1 << 29) + 3) // 4 * 4


@given(st.lists(pieces_with_magic.map(b"".join), min_size=1, max_size=5), st.data())
def test_a_part_of_a_stream_gives_its_whole_records(records, data):
    content = recordio(records)
    cut = data.draw(st.integers(0, len(content) - 1))
    again, split = found(content[:cut], final=False)
    assert again == records[: len(again)]
    assert split.consumed == len(recordio(again))
    assert split.problem == ""
    _, split = found(content[:cut])
    assert bool(split.problem) == (split.consumed < cut)


def test_a_cut_record_says_how_much_is_missing():
    content = recordio([b"first", b"x" * 100])
    for size, expected, left in ((len(content) - 1, 108, 107), (16 + 5, 8, 5)):
        _, split = found(content[:size])
        assert split.consumed == 16
        assert f"expected at least {expected} bytes, found {left}" in split.problem


def test_what_is_no_recordio_is_named():
    again, split = found(recordio([b"good"]) + b"nonsense", final=False)
    assert again == [b"good"]
    assert split.consumed == 12
    assert "expected RecordIO's magic number ced7230a, found 736e6f6e" in split.problem


def head(flag, size):
    return MAGIC + struct.pack("<I", flag << 29 | size)


@pytest.mark.parametrize(
    ("content", "at", "words"),
    [
        (head(3, 0), 0, "expected a record's begin, found a RecordIO head with flag 3"),
        (head(5, 0), 0, "expected a record's begin, found a RecordIO head with flag 5"),
        (head(1, 0) + head(0, 0), 8, "expected another part of a record, found .* flag 0"),
    ],
)
def test_parts_out_of_turn_are_errors(content, at, words):
    _, split = found(content)
    assert split.consumed == at
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(split.problem)


def test_rows_within_records():
    content = array(recordio([b"a\nb", b"", b"c\n\nd\n"]))
    split = rows_within(content, split_recordio(content, True), lines)
    pairs = zip(split.starts, split.ends, strict=True)
    assert [content[start:end].tobytes() for start, end in pairs] == [b"a", b"b", b"c", b"d"]

    def refuse(buffer, final):
        assert final
        bad = buffer.tobytes().find(b"!")
        return Split(*lines(buffer[: max(bad, 0)], True)[:2], max(bad, 0), "a mark" * (bad >= 0))

    content = array(recordio([b"a", b"b!"]))
    split = rows_within(content, split_recordio(content, True), refuse)
    assert split.problem == "in a RecordIO record: a mark"
    assert split.consumed == 12 + 8 + 1


# -- streams -------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from(["a", "bb 1:2", "", "# no", " ", "c\r"]), max_size=12))
def test_lines_and_where_they_stand(rows):
    content = "".join(f"{row}\n" for row in rows).encode()
    expected, byte = [], 0
    for line, row in enumerate(rows, start=1):
        if row.strip() and not row.startswith("#"):
            expected.append((row.rstrip("\r").encode(), f"p:{line} (byte {byte})"))
        byte += len(row) + 1
    assert list(read(content, lines, True)) == expected


def test_records_across_pieces():
    rows = [b"%d" % number * (number % 50 + 1) for number in range(300)]
    content = b"".join(row + b"\n" for row in rows)
    assert len(content) < 1 << 16
    again = list(read(content, lines, True, room_bytes=64))
    assert [row for row, _ in again] == rows
    places = np.cumsum([0] + [len(row) + 1 for row in rows])
    assert [place for _, place in again] == [
        f"p:{line} (byte {at:,})" for line, at in enumerate(places[:-1], start=1)
    ]
    wrapped = [place for _, place in read(recordio(rows), split_recordio, False, room_bytes=64)]
    assert wrapped[1] == f"p: byte {8 + 4 + 8}"


def test_a_stream_that_ends_within_a_record():
    with pytest.raises(DataError) as caught:
        list(read(b"1 1:2\n0 1:", lines, True))
    assert "ends within a record, of which 4 bytes came: expected a newline" in caught.value.what
    assert caught.value.where.endswith(":2 (byte 6)")
    with pytest.raises(DataError, match=r"of which 11 bytes came: .*at least 16 bytes, found 11"):
        list(read(recordio([b"abcd", b"abcdef"])[:23], split_recordio, False))


def test_rows_before_the_damage_come_first():
    rows = read(recordio([b"one", b"two"]) + b"nonsense", split_recordio, False)
    assert [next(rows)[0], next(rows)[0]] == [b"one", b"two"]
    with pytest.raises(DataError, match=r"magic number") as caught:
        next(rows)
    assert caught.value.where.endswith(": byte 24")


@pytest.mark.parametrize("over", [0, 1])
def test_the_longest_record(over):
    content = b"short\n" + b"x" * (10_000 + over) + b"\nshort\n"
    rows = read(content, lines, True, longest=10_000)
    if over:
        with pytest.raises(DataError, match="at most 10,000 bytes, found a longer") as caught:
            list(rows)
        assert caught.value.where.endswith(":2 (byte 6)")
    else:
        assert [len(row) for row, _ in rows] == [5, 10_000, 5]
