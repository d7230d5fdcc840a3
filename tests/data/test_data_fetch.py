"""Fetching from a real server on this machine, with the faults that real ones have."""

from __future__ import annotations

import hashlib
import http.server
import os
import subprocess
import sys
import threading
from functools import partial

import pytest

import flatout
from flatout.data.sources.arrays.public import _HOMES, fetch
from flatout.errors import DataError

BODIES = {"a.gz": b"first" * 100_000, "b.gz": b"second"}


def md5(body):
    return hashlib.md5(body).hexdigest()


FILES = {name: md5(body) for name, body in BODIES.items()}


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves BODIES, but for what `faults` says of a name."""

    def __init__(self, faults, asked, *arguments):
        self.faults, self.asked = faults, asked
        super().__init__(*arguments)

    def do_GET(self):
        name = self.path.lstrip("/")
        self.asked.append(name)
        fault = self.faults.get(name)
        body = BODIES.get(name)
        if body is None or fault == "absent":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if fault == "cut":
            self.wfile.write(body[: len(body) // 2])
        elif fault == "wrong":
            self.wfile.write(b"x" * len(body))
        else:
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    faults, asked = {}, []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, faults, asked)) as it:
        thread = threading.Thread(target=it.serve_forever)
        thread.start()
        it.faults, it.asked, it.url = faults, asked, f"http://127.0.0.1:{it.server_address[1]}"
        yield it
        it.shutdown()
        thread.join()


def get(server, folder, **more):
    said = []
    arguments = {"url": server.url, "files": FILES, "say": said.append, **more}
    fetch("mine", folder, **arguments)
    return said


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_files_come_whole_and_only_once(server, tmp_path):
    folder = tmp_path / "deep" / "data"
    said = get(server, folder)
    assert contents(folder) == BODIES
    assert said == [
        f"fetching {server.url}/a.gz (500.0 kB)",
        f"fetching {server.url}/b.gz (6 bytes)",
    ]
    assert get(server, folder) == []
    assert server.asked == ["a.gz", "b.gz"]


def test_what_is_there_is_not_fetched(server, tmp_path):
    (tmp_path / "b.gz").write_bytes(BODIES["b.gz"])
    get(server, tmp_path)
    assert contents(tmp_path) == BODIES
    assert server.asked == ["a.gz"]


def test_a_file_of_the_users_is_not_written_over(server, tmp_path):
    (tmp_path / "a.gz").write_bytes(b"my own")
    with pytest.raises(DataError, match=r"a\.gz is there and is another file") as error:
        get(server, tmp_path)
    assert error.value.where == str(tmp_path / "a.gz")
    assert contents(tmp_path) == {"a.gz": b"my own"}
    assert server.asked == []


def test_a_folder_in_the_place_of_a_file(server, tmp_path):
    (tmp_path / "a.gz").mkdir()
    with pytest.raises(DataError, match="cannot be read or written: Is a directory"):
        get(server, tmp_path)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("cut", "ended early|IncompleteRead|failed after"),
        ("wrong", f"expected MD5 {FILES['b.gz']}, found {md5(b'xxxxxx')}"),
        ("absent", "found 404"),
    ],
)
def test_a_fault_is_named_and_leaves_nothing_half(server, tmp_path, fault, words):
    server.faults["b.gz"] = fault
    with pytest.raises(DataError, match=words) as error:
        get(server, tmp_path)
    assert error.value.where == f"{server.url}/b.gz"
    assert error.value.do
    assert list(contents(tmp_path)) == ["a.gz"]
    server.faults.clear()
    get(server, tmp_path)
    assert contents(tmp_path) == BODIES
    assert server.asked.count("a.gz") == 1


def test_a_server_that_is_gone(server, tmp_path):
    server.shutdown()
    server.server_close()
    with pytest.raises(DataError, match=r"failed after 0 bytes: .*refused"):
        get(server, tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(server, tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(DataError, match="cannot be read or written: Permission denied"):
        get(server, tmp_path)


def test_a_folder_that_is_a_file(server, tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(DataError, match="cannot be read or written"):
        get(server, tmp_path / "taken")


def test_a_full_disk(server, tmp_path):
    """In its own process, whose files may hold 100,000 bytes."""
    program = (
        "import resource, signal, sys\n"
        "from flatout.data.sources.arrays.public import fetch\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        f"fetch('mine', {str(tmp_path / 'data')!r}, url={server.url!r}, files={FILES!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "cannot be read or written: File too large" in done.stderr
    assert list((tmp_path / "data").iterdir()) == []


def test_unknown_names_and_no_place(tmp_path):
    with pytest.raises(DataError, match="unknown data set 'cifar'; known: fashion_mnist, mnist"):
        flatout.data.fetch("cifar", tmp_path)
    with pytest.raises(DataError, match="not where they lie"):
        fetch("mine", tmp_path, files=FILES)


def test_a_mirror_is_asked_for_the_published_files(server, tmp_path):
    with pytest.raises(DataError, match="404"):
        fetch("fashion_mnist", tmp_path, url=server.url, say=lambda line: None)
    assert server.asked == ["train-images-idx3-ubyte.gz"]
    assert all(len(home.files) == 4 for home in _HOMES.values())
