import io
import itertools
import os
import pickle
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from data_recordio import write_recordio

import flatout
from flatout.data import Pipeline
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.schema import Column, Schema
from flatout.data.sources.pipes.fifo import FifoStream
from flatout.errors import DataError
from flatout.kernels import example

# For what must come; a test that meets it fails.
LIMIT_S = 100
ROWS = 700

LIBSVM = Schema(
    format="libsvm",
    columns=(
        Column(name="label", dtype="int64", role="target"),
        Column(name="features", dtype="float32", shape=(3,)),
    ),
    options={"base": 1, "features": 3},
)
RAGGED = Schema(
    format="libsvm",
    columns=(
        Column(name="label", dtype="int64", role="target"),
        Column(name="ids", dtype="int64", ragged=True),
        Column(name="values", dtype="float32", ragged=True),
    ),
    options={"base": 1, "features": 1000},
)
CSV = Schema(
    format="csv",
    columns=(
        Column(name="y", dtype="int64", role="target"),
        Column(name="b", dtype="float32"),
    ),
)
TFRECORD = Schema(
    format="tfrecord",
    columns=(
        Column(name="label", dtype="int64", role="target"),
        Column(name="x", dtype="float32", shape=(2,)),
        Column(name="tokens", dtype="int64", ragged=True),
    ),
)


def libsvm_rows(first=0, count=ROWS):
    return [f"{n % 3} 1:{n} {'2:0.5 ' * (n % 2)}3:-1e2\n" for n in range(first, first + count)]


def csv_rows():
    return ["b,a,y\n", *(f"{n}.5,text,{n % 4}\n" for n in range(ROWS))]


def criteo_rows():
    integers, categories = "\t".join(map(str, range(13))), "\t".join(f"{n:x}" for n in range(26))
    return [f"{n % 2}\t{integers}\t{categories}\n" for n in range(ROWS)]


def examples():
    """TFRecord frames of an Example each."""
    offsets = np.concatenate([[0], np.cumsum(np.arange(ROWS) % 4)])
    columns = {
        "label": np.arange(ROWS) % 3,
        "x": np.arange(2 * ROWS, dtype=np.float32).reshape(ROWS, 2),
        "tokens": (np.arange(offsets[-1]), offsets),
    }
    content, ends = example.encode(columns)
    return [bytes(content[a:b]) for a, b in itertools.pairwise(ends.tolist())]


def recordio(records):
    file = io.BytesIO()
    write_recordio(file, records)
    return file.getvalue()


@pytest.fixture
def start():
    """Starts processes, and ends by their pid those that are left."""
    started = []

    def run(*command, **options):
        process = subprocess.Popen(command, **options)
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait(LIMIT_S)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


# Writes a file to a pipe: path, pipe, bytes at a time, seconds between, bytes to write; with fewer
# than all it tells that they are written, and waits.
WRITER = """
import os, sys, time
path, pipe, size, pause, count = sys.argv[1:]
content = open(path, "rb").read()
part = content[: int(count)]
with open(pipe, "wb", buffering=0) as file:
    for at in range(0, len(part), int(size)):
        file.write(part[at : at + int(size)])
        time.sleep(float(pause))
    if len(part) < len(content):
        print("written", flush=True)
        time.sleep(60)
"""


@pytest.fixture
def write(tmp_path, start):
    """Writes to a FIFO, from another process."""
    names = map(str, itertools.count())

    def begin(content, fifo, size=1 << 16, pause=0.0, count=2**40):
        path = tmp_path / f"sent-{next(names)}"
        path.write_bytes(content if isinstance(content, bytes) else "".join(content).encode())
        arguments = (path, fifo, size, pause, count)
        return start(
            sys.executable, "-S", "-c", WRITER, *map(str, arguments),
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    return begin


@pytest.fixture
def made(tmp_path):
    """Makes FIFOs."""

    def make(name="p"):
        os.mkfifo(tmp_path / name)
        return str(tmp_path / name)

    return make


def read(path, schema=LIBSVM, **options):
    return flatout.data.fifo(
        path, **{"format": schema.format, "schema": schema, "timeout_s": LIMIT_S, **options}
    )


def columns(pipeline, epoch=0):
    """The inputs and targets of an epoch as bytes, and the rows' numbers."""
    batches = list(pipeline.batch(64).batches(epoch))
    inputs = batches[0].inputs
    names = list(inputs) if isinstance(inputs, dict) else [None]
    found = [
        [(b.inputs if name is None else b.inputs[name]).numpy().tobytes() for b in batches]
        for name in names
    ]
    targets = [batch.targets.numpy().tobytes() for batch in batches]
    return found, targets, [n for batch in batches for n in batch.indices.tolist()]


def features(batches):
    """The first input of each row, which tells the row."""
    return [int(n) for batch in batches for n in batch.inputs[:, 0]]


# -- the same rows as from a file ----------------------------------------------------------------

FORMATS = {
    "dense": (LIBSVM, "".join(libsvm_rows()).encode()),
    "ragged": (RAGGED, "".join(["# begin\n", *libsvm_rows(), "\n"]).encode()),
    "csv": (CSV, "".join(csv_rows()).encode()),
    "criteo": (None, "".join(criteo_rows()).encode()),
    "tfrecord": (TFRECORD, b"".join(examples())),
}


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_those_of_a_file(name, made, write, tmp_path):
    schema, content = FORMATS[name]
    format = "criteo" if schema is None else schema.format
    if format == "csv":
        pytest.importorskip("pyarrow")
    (tmp_path / "file").write_bytes(content)
    expected = columns(getattr(flatout.data, format)(tmp_path / "file", schema=schema))
    fifo = made()
    data = read(fifo, schema or flatout.data.criteo(tmp_path / "file").schema)
    for epoch, size in enumerate((1 << 16, 777)):
        write(content, fifo, size)
        assert columns(data, epoch) == expected
    assert not data.seekable
    assert not data.counted


@pytest.mark.parametrize("name", ["dense", "tfrecord"])
def test_a_byte_at_a_time(name, made, write):
    schema, content = FORMATS[name]
    content = "".join(libsvm_rows(0, 20)).encode() if name == "dense" else content[:1500]
    if name == "tfrecord":
        content = content[: int(example.scan(content, final=False).consumed)]
    fifo = made()
    data = read(fifo, schema)
    write(content, fifo)
    expected = columns(data)
    write(content, fifo, size=1, pause=0.0005)
    assert columns(data, 1) == expected


def test_criteo_goes_without_a_schema(made, write):
    fifo = made()
    write(criteo_rows(), fifo)
    data = flatout.data.fifo(fifo, format="criteo", rows=ROWS, timeout_s=LIMIT_S).batch(100)
    assert data.steps == 7
    batches = list(data.batches(0))
    assert batches[0].inputs["categories"][0].tolist() == list(range(26))
    assert "Criteo rows of " in data.describe()
    assert ", 700 a pass" in data.describe()


def test_rows_of_blocks_are_bounded_by_memory(made, write):
    fifo = made()
    write(libsvm_rows(), fifo)
    stream = FifoStream([fifo], LIBSVM, timeout_s=LIMIT_S, block_bytes=20 * 50)  # 20 bytes a row
    sizes = [len(block) for block in stream.blocks(0, Buffers())]
    assert max(sizes) == 50
    assert sum(sizes) == ROWS


# -- writers that die ----------------------------------------------------------------------------


def kill_when_written(process):
    """Kill -9 by pid, once the writer has written its part."""

    def kill():
        assert process.stdout.readline() == b"written\n"
        process.kill()

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


@pytest.mark.parametrize("name", ["dense", "tfrecord", "recordio", "csv"])
def test_a_writer_killed_within_a_record(name, made, write):
    rows = {
        "dense": [row.encode() for row in libsvm_rows()],
        "tfrecord": examples(),
        "recordio": [recordio([row.encode()]) for row in libsvm_rows()],
        "csv": [row.encode() for row in csv_rows()],
    }[name]
    schema = FORMATS.get(name, (LIBSVM,))[0]
    whole, row = sum(map(len, rows[:300])), rows[300]
    fifo = made()
    data = read(fifo, schema, wrap="recordio" if name == "recordio" else None, on_error="skip")
    killer = kill_when_written(write(b"".join(rows), fifo, count=whole + len(row) - 3))
    with pytest.raises(DataError) as caught:
        list(data.batch(32).batches(0))
    killer.join(LIMIT_S)
    came = f"the stream ends within a record, of which {len(row) - 3} bytes came: "
    expected = {
        "tfrecord": "",
        "recordio": f"expected at least {len(row)} bytes, found {len(row) - 3}",
    }.get(name, "expected a newline at the end of the row")
    assert came in caught.value.what
    assert expected in caught.value.what
    place = f"byte {whole:,}"
    text = f"{fifo}:301 ({place})"
    assert caught.value.where == (text if name in ("dense", "csv") else f"{fifo}: {place}")


def test_a_writer_killed_between_records_is_told_by_the_number_of_rows(made, write):
    rows, fifo = libsvm_rows(), made()
    whole = sum(map(len, rows[:300]))
    killer = kill_when_written(write(rows, fifo, count=whole))
    with pytest.raises(DataError, match="expected 700 rows in a pass, found 300: the writer has"):
        list(read(fifo, rows=ROWS).batch(32).batches(0))
    killer.join(LIMIT_S)
    killer = kill_when_written(write(rows, fifo, count=whole))
    assert features(read(fifo).batch(32).batches(0)) == list(range(300))
    killer.join(LIMIT_S)


def test_more_rows_than_were_said(made, write):
    fifo = made()
    write(libsvm_rows(), fifo)
    with pytest.raises(DataError, match="expected 699 rows in a pass, found more"):
        list(read(fifo, rows=ROWS - 1).batch(32).batches(0))


def test_a_stream_without_rows(made, write):
    fifo = made()
    write("# nothing\n\n", fifo)
    with pytest.raises(DataError, match="expected rows, found the end of the stream") as caught:
        list(read(fifo).batch(32).batches(0))
    assert caught.value.where == fifo


# -- bad rows ------------------------------------------------------------------------------------


def test_bad_rows_are_named_or_counted_in_each_pass(made, write):
    rows, fifo = ["# comment\n", *libsvm_rows()], made()
    rows[500] = "1 x:1\n"
    place = sum(map(len, rows[:500]))
    write(rows, fifo, size=1000)
    with pytest.raises(DataError) as caught:
        list(read(fifo).batch(32).batches(0))
    assert caught.value.where.startswith(f"{fifo}:501 (byte {place + 2:,}")
    data = read(fifo, on_error="skip", max_errors=1, rows=ROWS)
    for epoch in range(2):
        write(rows, fifo)
        batches = list(data.batch(32).batches(epoch))
        assert features(batches) == [n for n in range(ROWS) if n != 499]
        assert [n for b in batches for n in b.indices.tolist()] == list(range(ROWS - 1))
        (note,) = data.notes()
        assert note.startswith(f"1 bad row skipped: {fifo}:501 ")
    rows[501] = "1 y:1\n"
    write(rows, fifo)
    with pytest.raises(DataError, match="2 rows are bad, and max_errors is 1"):
        list(data.batch(32).batches(2))


def test_a_line_without_end_takes_no_memory(made, start):
    fifo = made()
    process = start("sh", "-c", 'echo "1 1:1"; exec tr "\\0" 1 < /dev/zero', stdout=subprocess.PIPE)
    copy = start("sh", "-c", 'exec cat > "$1"', "sh", fifo, stdin=process.stdout)
    data = read(fifo, max_record_bytes=3 << 20)
    with pytest.raises(DataError, match="a record of at most 3,145,728 bytes, found a longer") as e:
        list(data.batch(32).batches(0))
    assert e.value.where == f"{fifo}:2 (byte 6)"
    copy.wait(LIMIT_S)  # no one reads any more


def test_a_long_line_below_the_limit(made, write):
    values = " ".join(f"{n}:{n % 7}" for n in range(1, 500_001))
    schema = RAGGED.model_copy(update={"options": {"base": 1, "features": 500_000}})
    fifo = made()
    write(["1 1:5\n", f"0 {values}\n", "1 2:6\n"], fifo)
    short, long, last = read(fifo, schema).batch(1).batches(0)
    assert (short.inputs["values"].tolist(), last.inputs["values"].tolist()) == ([[5]], [[6]])
    assert torch.equal(long.inputs["ids"][0], torch.arange(500_000))


# -- several pipes -------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_the_order_of_several_pipes_is_that_of_turns(slow, made, write):
    fifos = [made(f"p{n}") for n in range(3)]
    counts = (95, 40, 130)
    expected = []
    turns = [[range(1000 * n, 1000 * n + c)[at : at + 10] for at in range(0, 140, 10)]
             for n, c in enumerate(counts)]  # fmt: skip
    for round_of_turns in zip(*turns, strict=True):
        expected += [n for turn in round_of_turns for n in turn]
    for n, (fifo, count) in enumerate(zip(fifos, counts, strict=True)):
        pause = 0.01 if n == slow else 0
        write(libsvm_rows(1000 * n, count), fifo, size=100, pause=pause)
    stream = FifoStream(fifos, LIBSVM, rows=sum(counts), timeout_s=LIMIT_S, turn=10)
    batches = list(Pipeline(stream).batch(32).batches(0))
    assert features(batches) == expected
    assert [n for b in batches for n in b.indices.tolist()] == list(range(sum(counts)))


def test_a_writer_that_dies_beside_others(made, write):
    fifos = [made("a"), made("b")]
    write(libsvm_rows(), fifos[0])
    write("".join(libsvm_rows())[:-5], fifos[1])
    with pytest.raises(DataError, match="the stream ends within a record") as caught:
        list(read(fifos).batch(32).batches(0))
    assert caught.value.where.startswith(f"{fifos[1]}:700 ")
    for fifo in fifos:  # both are free again
        write(libsvm_rows(), fifo)
    assert len(features(read(fifos).batch(32).batches(0))) == 2 * ROWS


# -- passes --------------------------------------------------------------------------------------

# As SageMaker's agent: each pass has a FIFO, which appears when the one before was read.
AGENT = """
import os, sys
path, channel, passes = sys.argv[1:]
content = open(path, "rb").read()
for n in range(int(passes)):
    os.mkfifo(f"{channel}_{n}")
    with open(f"{channel}_{n}", "wb", buffering=0) as file:
        view = memoryview(content)
        while view:
            view = view[file.write(view):]
"""


def agent(start, tmp_path, content, passes, channel):
    (tmp_path / f"sent-{channel}").write_bytes(content)
    arguments = (tmp_path / f"sent-{channel}", tmp_path / channel, passes)
    return start(sys.executable, "-S", "-c", AGENT, *map(str, arguments))


@pytest.mark.slow
def test_a_sagemaker_channel_trains(tmp_path, start):
    rows = [f"{n % 2} 1:{n % 2} 2:{1 - n % 2} 3:0.5\n" for n in range(256)]
    sender = agent(start, tmp_path, "".join(rows).encode(), 3, "train")
    train = read(tmp_path / "train", rows=256).shuffle(seed=1, window=64).batch(32)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    trainer = flatout.Trainer(model, loss="cross_entropy", lr=0.5)
    history = trainer.fit(train, epochs=3)
    assert sender.wait(LIMIT_S) == 0
    losses = history.history["loss"]
    assert len(losses) == 3
    assert losses[2] < losses[0]


def test_a_resume_reads_what_comes_before(tmp_path, start):
    agent(start, tmp_path, "".join(libsvm_rows()).encode(), 2, "train")
    data = read(tmp_path / "train").batch(100)
    assert features(data.batches(0)) == list(range(ROWS))
    assert features(data.batches(1, 4)) == list(range(400, ROWS))


def test_a_pass_that_is_left_early_frees_the_pipe(made, write):
    fifo = made()
    data = read(fifo).batch(100)
    first = write(libsvm_rows() * 2000, fifo)
    for batch in data.batches(0):
        assert features([batch]) == list(range(100))
        break
    assert first.wait(LIMIT_S) != 0  # it was told that no one reads any more
    write(libsvm_rows(), fifo)
    assert features(data.batches(1)) == list(range(ROWS))


def test_a_pass_that_was_left_with_its_writer_in_the_middle_is_followed_by_none(made, write):
    """What that writer still writes would come as rows of the next pass."""
    fifo = made()
    data = read(fifo).batch(100)
    write(libsvm_rows() * 2000, fifo)
    batches = data.batches(0)
    next(batches)
    data.origin.leave()
    batches.close()
    write(libsvm_rows(), fifo)
    with pytest.raises(DataError, match="pass 1 was left before its end") as failed:
        next(data.batches(1))
    assert str(fifo) in str(failed.value)


def test_closing_ends_a_pass_that_waits(made):
    stream = FifoStream([made("a"), made("b")], LIBSVM, timeout_s=LIMIT_S)
    timer = threading.Timer(0.2, stream.close)
    timer.start()
    with pytest.raises(DataError, match="closed while it was being read"):
        list(stream.blocks(0, Buffers()))
    timer.join()


@pytest.mark.parametrize("name", FORMATS)
def test_ranks_share_out_the_rows_that_come_to_all_of_them(name, made, write, monkeypatch):
    schema, content = FORMATS[name]
    options = {"schema": schema, "format": "criteo" if schema is None else schema.format}
    fifo = made()

    def samples(size, **more):
        write(content, fifo, size)
        data = flatout.data.fifo(fifo, timeout_s=LIMIT_S, **options, **more)
        return [tuple(map(listed, b[:2])) for b in data.batch(1).batches(0)]

    def listed(values):
        return (
            {k: v.tolist() for k, v in values.items()}
            if isinstance(values, dict)
            else values.tolist()
        )

    whole = samples(1 << 16)
    for rank in range(3):
        variables = {"RANK": rank, "WORLD_SIZE": 3, "MASTER_ADDR": "host1", "MASTER_PORT": 1}
        for variable, value in variables.items():
            monkeypatch.setenv(variable, str(value))
        assert samples(4096 + rank, presharded=None) == whole[rank::3]


def test_streams_go_to_other_processes(made, write):
    fifo = made()
    stream = FifoStream([fifo], LIBSVM, timeout_s=LIMIT_S)
    twin = pickle.loads(pickle.dumps(stream))
    assert twin.digest == stream.digest
    assert twin.digest != FifoStream([fifo], RAGGED).digest
    write(libsvm_rows(), fifo)
    assert sum(len(block) for block in twin.blocks(0, Buffers())) == ROWS


STANDARD_INPUT = """
import sys
import flatout
schema = flatout.data.Schema.model_validate_json(sys.argv[1])
data = flatout.data.fifo(sys.stdin, schema=schema, timeout_s=100).batch(100)
print(sum(batch.size for batch in data.batches(0)), data.describe())
try:
    next(data.batches(1))
except flatout.errors.DataError as error:
    print(error)
"""


@pytest.mark.slow
def test_standard_input(start):
    process = start(
        sys.executable, "-c", STANDARD_INPUT, LIBSVM.model_dump_json(),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    words, _ = process.communicate("".join(libsvm_rows()), timeout=60)
    first, second, *_ = words.splitlines()
    assert first == "700 LibSVM rows of standard input, in the given order"
    assert second == "standard input can be read once, and it was"


# -- RecordIO ------------------------------------------------------------------------------------

payloads = {
    "example": (TFRECORD, [frame[12:-4] for frame in examples()]),
    "tfrecord": (TFRECORD, [b"".join(examples()[n : n + 300]) for n in range(0, ROWS, 300)]),
    "dense": (LIBSVM, ["".join(libsvm_rows(n, 350)).encode().strip() for n in (0, 350)]),
    "csv": (CSV, ["".join(["b,a,y\n", *csv_rows()[n : n + 350]]).encode() for n in (1, 351)]),
}


@pytest.mark.parametrize("name", payloads)
def test_rows_within_recordio(name, made, write, tmp_path):
    schema, records = payloads[name]
    if schema.format == "csv":
        pytest.importorskip("pyarrow")
    (tmp_path / "file").write_bytes(FORMATS["tfrecord" if name == "example" else name][1])
    expected = columns(getattr(flatout.data, schema.format)(tmp_path / "file", schema=schema))
    fifo = made()
    data = read(fifo, schema, wrap="recordio")
    assert "in RecordIO" in data.describe()
    for epoch, size in enumerate((1 << 16, 501)):
        write(recordio(records), fifo, size)
        assert columns(data, epoch) == expected


@pytest.mark.parametrize("framed", [False, True])
def test_examples_in_several_parts_and_empty_records(framed, made, write):
    magic = np.frombuffer(struct.pack("<I", 0xCED7230A), "<f4")
    offsets = np.concatenate([[0], np.cumsum(np.arange(20))])
    values = {
        "tokens": (np.arange(offsets[-1]) % 100, offsets),  # first, so that x begins anywhere
        "x": np.repeat(magic, 40).reshape(20, 2),
        "label": np.arange(20),
    }
    content, ends = example.encode(values)
    frames = [bytes(content[a:b]) for a, b in itertools.pairwise(ends.tolist())]
    records = [b"".join(frames)] if framed else [frame[12:-4] for frame in frames]
    sent = recordio([b"", *records, b""])
    # Data never hold the magic number at a multiple of four: these are heads of first parts.
    heads = [at for at in range(0, len(sent), 4) if sent[at : at + 4] == magic.tobytes()]
    assert any(sent[at + 7] >> 5 == 1 for at in heads)
    fifo = made()
    write(sent, fifo, size=100)
    batches = list(read(fifo, TFRECORD, wrap="recordio", rows=20).batch(7).batches(0))
    assert torch.cat([batch.targets for batch in batches]).tolist() == list(range(20))
    for batch in batches:
        assert (batch.inputs["x"].numpy() == magic[0]).all()
        assert batch.inputs["tokens"].shape[1] == int(batch.targets.max())


def test_a_bad_checksum_within_recordio(made, write):
    frames = examples()
    frames[5] = frames[5][:-1] + bytes([frames[5][-1] ^ 1])
    fifo = made()
    write(recordio([b"".join(frames)]), fifo)
    data = read(fifo, TFRECORD, wrap="recordio", on_error="skip")
    assert sum(batch.size for batch in data.batch(64).batches(0)) == ROWS - 1
    assert len(data.notes()) == 1


def test_sagemakers_records(made, write):
    def field(number, content):
        return bytes([number << 3 | 2, len(content)]) + content

    def value(numbers):
        return field(2, field(2, field(1, np.array(numbers, "<f4").tobytes())))

    records = [
        field(1, field(1, b"values") + value([n, 0.5])) + field(2, field(1, b"values") + value([1]))
        for n in range(ROWS)
    ]
    schema = {
        "columns": [
            {"name": "label", "dtype": "int64", "role": "target"},
            {"name": "values", "dtype": "float32", "shape": [2]},
        ]
    }
    fifo = made()
    write(recordio(records), fifo)
    data = flatout.data.fifo(fifo, format="recordio", schema=schema, timeout_s=LIMIT_S)
    batches = list(data.batch(64).batches(0))
    assert features(batches) == list(range(ROWS))
    assert set(torch.cat([batch.targets for batch in batches]).tolist()) == {1}


# -- what is asked for ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "a stream of LibSVM wants a schema"),
        ({"format": "parquet"}, "format: expected one of libsvm, .*, found 'parquet'"),
        ({"format": "tfrecord", "schema": LIBSVM}, "a schema of tfrecord, found one of libsvm"),
        ({"format": "recordio", "schema": {}, "wrap": "recordio"}, "'recordio' around recordio"),
        ({"schema": LIBSVM, "wrap": "gzip"}, "wrap: expected None, or 'recordio' around"),
        ({"schema": LIBSVM, "rows": 0}, "rows: expected a number above 0, found 0"),
        ({"schema": LIBSVM, "timeout_s": -1}, "timeout_s: expected a number above 0, found -1"),
        ({"schema": LIBSVM, "max_record_bytes": 1.5}, "max_record_bytes: .* found 1.5"),
        ({"schema": LIBSVM, "on_error": "raise"}, "on_error: expected 'fail' or 'skip'"),
        ({"schema": {"columns": [{"name": "x", "dtype": "int64"}]}}, "the columns of LibSVM are"),
        ({"path": ["a", "b", "a"], "schema": LIBSVM}, "expected pipes that differ"),
        ({"path": [], "schema": LIBSVM}, "expected pipes that differ"),
        ({"path": 3, "schema": LIBSVM}, 'expected a path, "-" or sys.stdin, found int'),
    ],
)
def test_what_makes_no_sense_is_said_before_anything_is_opened(options, words):
    with pytest.raises(DataError, match=words):
        flatout.data.fifo(**{"path": "p", **options})
