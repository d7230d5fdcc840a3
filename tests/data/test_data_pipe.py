import fcntl
import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from flatout.data.sources.pipes.pipe import CAPACITY, Pipe
from flatout.errors import DataError

# For what must come; a test that meets it fails.
LIMIT_S = 100


@pytest.fixture
def fifo(tmp_path):
    os.mkfifo(tmp_path / "p")
    return str(tmp_path / "p")


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
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


@contextmanager
def opened(path, turn=0, **options):
    pipe = Pipe(path, turn, **{"timeout_s": LIMIT_S, **options})
    try:
        pipe.open()
        yield pipe
    finally:
        pipe.close()


def content(pipe):
    room = bytearray(CAPACITY)
    pieces = []
    while count := pipe.read_into(memoryview(room)):
        pieces.append(bytes(room[:count]))
    return b"".join(pieces)


def shell(start, command, *arguments):
    return start("sh", "-c", command, "sh", *arguments)


def test_all_bytes_come_in_large_pieces(fifo, tmp_path, start):
    sent = os.urandom(5_000_000)
    (tmp_path / "sent").write_bytes(sent)
    with opened(fifo) as pipe:
        shell(start, 'exec cat "$1" > "$2"', str(tmp_path / "sent"), fifo)
        room = bytearray(1 << 20)
        sizes, came = [], b""
        while count := pipe.read_into(memoryview(room)):
            sizes.append(count)
            came += room[:count]
        assert came == sent
        assert sizes[0] == 1 << 20  # not what one read gives, but what was asked for
        assert pipe.read_into(memoryview(room)) == 0


def test_few_bytes_do_not_wait_for_many(fifo, start):
    shell(start, 'exec 3> "$1"; printf ab >&3; exec sleep 60', fifo)
    with opened(fifo) as pipe:
        room = bytearray(1 << 20)
        assert pipe.read_into(memoryview(room)) == 2
        assert room[:2] == b"ab"


def test_the_pipe_is_made_larger(fifo):
    with opened(fifo):
        beside = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        size = fcntl.fcntl(beside, fcntl.F_GETPIPE_SZ)
        os.close(beside)
    limit = int(Path("/proc/sys/fs/pipe-max-size").read_text())
    if limit < CAPACITY:
        pytest.skip(f"this machine allows pipes of {limit} bytes")
    assert size == CAPACITY


# -- waiting -------------------------------------------------------------------------------------


def said_and_raised(path, turn=0, before=lambda: None):
    said = []

    def read():
        with opened(path, turn, timeout_s=0.8, say=said.append, first_word_s=0.25) as pipe:
            before()
            content(pipe)

    with pytest.raises(DataError, match=r"nothing came in 0\.8 s; waited for ") as caught:
        read()
    (line,) = said
    waited = re.fullmatch(r"waited \d s so far for (.*)", line)[1]
    assert caught.value.what.endswith(waited)
    return waited


def test_no_writer(fifo):
    assert said_and_raised(fifo) == f"a writer: no one has opened {fifo} to write"
    assert said_and_raised(fifo, 2).endswith("to write again, for pass 3")


def test_a_silent_writer(fifo):
    writers = []
    waited = said_and_raised(
        fifo, before=lambda: writers.append(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
    )
    assert waited == f"the first bytes: {fifo} has a writer, which is silent"

    def write():
        writers.append(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
        os.write(writers[-1], b"1")

    assert said_and_raised(fifo, before=write) == f"more bytes: the writer of {fifo} is silent"
    for writer in writers:
        os.close(writer)


def test_no_fifo(tmp_path):
    channel = str(tmp_path / "train")
    assert said_and_raised(channel, 1) == f"a FIFO {channel} or {channel}_1"


def test_a_writer_that_never_wrote_ends_the_stream(fifo):
    with opened(fifo) as pipe:
        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
        assert content(pipe) == b""


def test_a_writer_that_has_gone_before_the_reader_came(fifo):
    held = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(fifo, os.O_WRONLY)
    os.write(writer, b"early")
    os.close(writer)
    with opened(fifo) as pipe:
        assert content(pipe) == b"early"
    os.close(held)


@pytest.mark.timeout(LIMIT_S)
def test_stopping_wakes_the_reader(fifo):
    with opened(fifo) as pipe:
        timer = threading.Timer(0.1, pipe.stop)
        timer.start()
        with pytest.raises(DataError, match="closed while it was being read"):
            content(pipe)
        timer.join()


def test_what_is_no_pipe(tmp_path):
    (tmp_path / "a.svm").write_text("1 1:1\n")
    for path, words in (
        (tmp_path / "a.svm", "expected a FIFO, found a file"),
        (tmp_path, "expected a FIFO, found a folder"),
        (tmp_path / "nowhere" / "p", "there is no folder"),
        (tmp_path / "a.svm" / "p", "there is no folder"),
    ):
        with pytest.raises(DataError, match=words), opened(str(path)):
            pass


def test_a_pipe_that_may_not_be_read(fifo):
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    os.chmod(fifo, 0)
    with pytest.raises(DataError, match="cannot be opened: Permission denied"), opened(fifo):
        pass


# -- one FIFO for each pass ----------------------------------------------------------------------


def test_each_pass_has_its_own(tmp_path, start):
    channel = str(tmp_path / "train")
    # As in SageMaker: the next one appears once the one before was read to its end.
    shell(
        start,
        'for n in 0 1 2; do mkfifo "$1.part" && mv "$1.part" "$1_$n"; echo pass $n > "$1_$n"; done',
        channel,
    )
    for turn in range(3):
        with opened(channel, turn) as pipe:
            assert content(pipe) == b"pass %d\n" % turn
            assert pipe.name == f"{channel}_{turn}"


def test_a_folder_of_the_same_name_does_not_hide_them(tmp_path, start):
    channel = tmp_path / "train"
    channel.mkdir()
    os.mkfifo(tmp_path / "train_0")
    shell(start, 'echo a > "$1_0"', str(channel))
    with opened(str(channel)) as pipe:
        assert content(pipe) == b"a\n"


# -- one reader ----------------------------------------------------------------------------------

READER = """
import sys
from flatout.data.sources.pipes.pipe import Pipe
from flatout.errors import DataError
pipe = Pipe(sys.argv[1], timeout_s=100)
try:
    pipe.open()
except DataError as error:
    print(error)
    sys.exit(3)
print("open", flush=True)
if sys.argv[2:]:
    sys.stdin.readline()
print(pipe.read_into(memoryview(bytearray(100))))
"""


def reader(start, path, *arguments, **options):
    return start(
        sys.executable, "-c", READER, path, *arguments,
        **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, **options},
    )  # fmt: skip


def test_a_second_process_is_refused(fifo, start):
    first = reader(start, fifo, "wait")
    assert first.stdout.readline() == "open\n"
    second = reader(start, fifo)
    words, _ = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 3
    assert f"the pipe is being read already, by process {first.pid}:" in words
    assert fifo in words
    assert "do: give each worker its own pipe" in words
    with pytest.raises(DataError, match=f"by process {first.pid}:"), opened(fifo):
        pass
    first.kill()  # by pid; the lock goes with the process
    first.wait(LIMIT_S)
    with opened(fifo):
        pass


def test_a_second_reader_in_the_same_process_is_refused(fifo):
    with (
        opened(fifo),
        pytest.raises(DataError, match=rf"process {os.getpid()} \(this one\)"),
        opened(fifo),
    ):
        pass
    with opened(fifo):
        pass


def test_the_lock_is_given_back_at_the_end_of_the_stream(fifo, start):
    with opened(fifo) as pipe:
        shell(start, 'echo a > "$1"', fifo)
        assert content(pipe) == b"a\n"
        with opened(fifo):
            pass


# -- standard input ------------------------------------------------------------------------------

STANDARD_INPUT = """
import sys
from flatout.data.sources.pipes.pipe import Pipe
from flatout.errors import DataError
for turn in range(2):
    pipe = Pipe("-", turn, timeout_s=100)
    try:
        pipe.open()
        while count := pipe.read_into(memoryview(bytearray(1 << 20))):
            print(count, flush=True)
    except DataError as error:
        print(error)
"""


def test_standard_input_can_be_read_once(start):
    process = start(
        sys.executable, "-c", STANDARD_INPUT,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    words, _ = process.communicate(b"x" * 1000, timeout=LIMIT_S)
    assert words.startswith(b"1000\nstandard input can be read once, and it was\n  do: ")


def test_standard_input_may_be_a_file_or_closed(tmp_path, start):
    (tmp_path / "a").write_bytes(b"y" * 2000)
    with open(tmp_path / "a", "rb") as file:
        file.seek(500)
        options = {"stdin": file, "stdout": subprocess.PIPE}
        words, _ = start(sys.executable, "-c", STANDARD_INPUT, **options).communicate(
            timeout=LIMIT_S
        )
    assert words.startswith(b"1500\n")
    process = shell(start, 'exec "$1" -c "$2" <&- > "$3" 2>&1', sys.executable, STANDARD_INPUT,
                    str(tmp_path / "out"))  # fmt: skip
    process.wait(LIMIT_S)
    words = (tmp_path / "out").read_text()
    assert words.startswith("standard input cannot be read: Bad file descriptor")


def test_two_processes_with_the_same_standard_input(start):
    reading, writing = os.pipe()
    first = reader(start, "-", stdin=reading)
    assert first.stdout.readline() == "open\n"
    second = reader(start, "-", stdin=reading)
    words, _ = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 3
    assert f"the pipe is being read already, by process {first.pid}:" in words
    os.write(writing, b"12345")
    os.close(writing)
    os.close(reading)
    assert first.communicate(timeout=LIMIT_S)[0] == "5\n"
