"""Files that are damaged, cut off or changed, full disks, and processes that end too early."""

import gzip
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

import flatout
from flatout.data.stores import row_folder
from flatout.data.stores.row_folder import Filling, RowFolder
from flatout.data.stores.row_store import layout_of
from flatout.errors import DataError
from flatout.kernels import example


def text(path, rows=2000):
    path.write_text("".join(f"{i % 2} 1:{i} 2:{i % 7}\n" for i in range(rows)))
    return path


def ids(pipeline):
    return sorted(int(row[0]) for batch in pipeline.batches(0) for row in batch.inputs)


def run(script, *arguments, **variables):
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        timeout=120,
        check=False,
    )


# -- packed files ---


def test_frames_of_zstandard_one_behind_the_other(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    content = text(tmp_path / "rows.svm").read_bytes()
    packed = zstandard.compress(content[:9000]) + zstandard.compress(content[9000:])
    (tmp_path / "rows.svm.zst").write_bytes(packed)
    assert len(ids(flatout.data.libsvm(tmp_path / "rows.svm.zst").batch(100))) == 2000


@pytest.mark.parametrize("kept", [0.5, 0.99])
def test_a_frame_that_is_cut_off_loses_no_row_silently(tmp_path, kept):
    zstandard = pytest.importorskip("zstandard")
    packed = zstandard.compress(text(tmp_path / "rows.svm").read_bytes())
    (tmp_path / "rows.svm.zst").write_bytes(packed[: int(kept * len(packed))])
    with pytest.raises(DataError, match="the packed file ends early"):
        flatout.data.libsvm(tmp_path / "rows.svm.zst")


def test_packed_bytes_that_are_damaged(tmp_path):
    packed = bytearray(gzip.compress(text(tmp_path / "rows.svm").read_bytes()))
    packed[len(packed) // 3] ^= 0xFF
    (tmp_path / "rows.svm.gz").write_bytes(packed)
    with pytest.raises(DataError, match=r"rows\.svm\.gz"):
        flatout.data.libsvm(tmp_path / "rows.svm.gz")


def test_standard_input_is_no_file():
    with pytest.raises(DataError, match="'-' is standard input"):
        flatout.data.libsvm("-")


# -- files that change ---


def test_a_conversion_notices_a_change_in_the_middle(tmp_path):
    source = text(tmp_path / "rows.svm", 30_000)
    flatout.data.convert(source, tmp_path / "out.tfrecord")
    content = bytearray(source.read_bytes())
    at = content.index(b"\n", len(content) // 2) + 1
    content[at] ^= 1
    source.write_bytes(content)
    os.utime(source, ns=(0, 1))
    with pytest.raises(DataError, match="its source was another, or has changed since"):
        flatout.data.convert(source, tmp_path / "out.tfrecord")


def test_a_file_that_is_rewritten_in_place_is_noticed_at_once(tmp_path):
    from flatout.data.reading.buffers import Buffers
    from flatout.data.reading.error_policy import ErrorPolicy
    from flatout.data.reading.files import find
    from flatout.data.reading.indexed import IndexedRows
    from flatout.data.sources.records.libsvm import LibsvmDecoder

    source = text(tmp_path / "rows.svm")
    decoder = LibsvmDecoder(flatout.data.libsvm(source).schema)
    rows = IndexedRows(find(source), decoder, ErrorPolicy(), "LibSVM", budget=0)
    rows.take(np.arange(5), Buffers())
    with open(source, "r+b") as file:
        file.write(b"1")
    os.utime(source, ns=(0, 1))
    with pytest.raises(DataError, match="has changed"):
        rows.take(np.arange(5), Buffers())


def test_more_files_than_may_be_open(tmp_path):
    for number in range(120):
        text(tmp_path / f"{number:03}.svm", 3)
    script = """
import resource, sys
import numpy as np
from flatout.data.reading.error_policy import ErrorPolicy
from flatout.data.reading.files import find
from flatout.data.reading.indexed import IndexedRows
from flatout.data.reading.buffers import Buffers
from flatout.data.sources.records.libsvm import LibsvmDecoder
import flatout
schema = flatout.data.libsvm(sys.argv[1] + "/000.svm").schema
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
rows = IndexedRows(find(sys.argv[1]), LibsvmDecoder(schema), ErrorPolicy(), "LibSVM", budget=0)
print(len(rows.take(np.arange(rows.rows), Buffers())))
"""
    done = run(script, tmp_path, FLATOUT_CACHE=str(tmp_path / "cache"))
    assert done.stdout.strip() == "360", done.stderr


# -- row folders ---


def folder_of(path, rows=3000):
    flatout.data.convert(text(path / "rows.svm", rows), path / "out.rows")
    return path / "out.rows"


def test_a_row_folder_that_shrinks_while_it_is_read(tmp_path):
    script = """
import os, sys
import flatout
batches = flatout.data.rows(sys.argv[1]).batch(500).options(threads=1, depth=1).batches(0)
next(batches)
os.truncate(sys.argv[1] + "/rows.bin", 100)
try:
    list(batches)
except flatout.errors.DataError as error:
    print(error)
"""
    done = run(script, folder_of(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "has changed while it was being read" in done.stdout


@pytest.mark.parametrize(
    "damage",
    [
        lambda meta: [],
        lambda meta: {k: v for k, v in meta.items() if k != "files"},
        lambda meta: {k: v for k, v in meta.items() if k != "fields"},
        lambda meta: {k: v for k, v in meta.items() if k != "form"},
        lambda meta: {**meta, "rows": meta["rows"] + 1},
        lambda meta: {**meta, "rows": -1},
        lambda meta: {**meta, "stride": "wide"},
        lambda meta: {**meta, "fields": [{**meta["fields"][0], "dtype": "float31"}]},
    ],
)
def test_a_damaged_description_of_rows(tmp_path, damage):
    folder = folder_of(tmp_path)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(damage(meta)))
    with pytest.raises(DataError, match="damaged"):
        RowFolder(folder)


def test_a_folder_whose_maker_was_killed_at_the_end_is_made_again(tmp_path, monkeypatch):
    columns = {"x": np.arange(50, dtype=np.int64)}

    def begin():
        return Filling(tmp_path / "kept", layout_of(columns), 50, "some")

    filling = begin()
    filling.put(np.arange(50), columns)
    for name in ("rename", "replace"):  # the process ends here

        def killed(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(row_folder.os, name, killed)
            with pytest.raises(KeyboardInterrupt):
                filling.finish(None, {})
        filling.close()
        filling = begin()
        assert not filling.filled.any()
        filling.put(np.arange(50), columns)
    assert filling.finish(None, {}) == tmp_path / "kept"
    filling.close()
    assert sorted(os.listdir(tmp_path / "kept")) == ["lock", "meta.json", "rows.bin"]
    RowFolder(tmp_path / "kept").verify()


# -- caches ---


def test_a_disk_without_room_is_said_and_kills_nothing(tmp_path):
    script = """
import resource, sys, signal
import numpy as np, flatout
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
data = flatout.data.arrays(np.zeros((4000, 64), np.float32)).map(lambda x: x + 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    list(data.cache("disk").batch(100).batches(0))
except flatout.errors.DataError as error:
    print(error)
"""
    done = run(script, FLATOUT_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "the cache cannot be written" in done.stdout


def test_a_cache_folder_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    data = flatout.data.arrays(np.zeros((40, 6), np.float32)).map(lambda x: x + 1)
    assert len(list(data.cache().batch(10).batches(0))) == 4, "memory has room"
    with pytest.raises(DataError, match="the cache cannot be written"):
        data.cache("disk").batch(10).peek(1)


def test_a_damaged_index_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    source = text(tmp_path / "rows.svm")
    whole = ids(flatout.data.libsvm(source).batch(100))
    for number, path in enumerate(sorted(Path(tmp_path / "cache" / "index").glob("[!.]*"))):
        if number % 2:
            path.write_bytes(b"PK\x03\x04" + bytes(100))
        else:
            with open(path, "wb") as file:
                np.save(file, np.arange(10))
    assert ids(flatout.data.libsvm(source).batch(100)) == whole


# -- TFRecord without a schema ---


def records(path, rows=20):
    frames, offsets = example.encode(
        {"x": np.arange(rows * 2, dtype=np.float32).reshape(rows, 2), "label": np.arange(rows)}
    )
    path.write_bytes(frames.tobytes())
    return path, offsets


def test_a_bad_record_among_those_that_tell_the_features(tmp_path):
    path, offsets = records(tmp_path / "a.tfrecord")
    content = bytearray(path.read_bytes())
    content[int(offsets[5]) + 15] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"checksum of the record(.|\n)*a\.tfrecord: byte"):
        flatout.data.tfrecord(path)
    data = flatout.data.tfrecord(path, on_error="skip")
    assert sum(batch.size for batch in data.batch(5).batches(0)) == 19


def test_an_empty_file_before_good_ones(tmp_path):
    (tmp_path / "a.tfrecord").write_bytes(b"")
    records(tmp_path / "b.tfrecord")
    data = flatout.data.tfrecord([tmp_path / "a.tfrecord", tmp_path / "b.tfrecord"])
    assert sum(batch.size for batch in data.batch(5).batches(0)) == 20
    with pytest.raises(DataError, match="no records"):
        flatout.data.tfrecord(tmp_path / "a.tfrecord")
