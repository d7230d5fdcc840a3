import bz2
import gzip
import os
from pathlib import Path

import numpy as np
import pytest
from data_made_up import MadeUp, same

import flatout
import idx_files
from flatout.data.conversion.convert import convert
from flatout.data.pipeline import Pipeline
from flatout.data.sources.formats import FORMATS, format_of, guess, open_files
from flatout.errors import DataError

CRITEO = "\t".join(["1", *["", "-2"] + ["7"] * 11, *["68fd1e64"] * 25, ""]) + "\n"


@pytest.fixture
def files(tmp_path):
    """A file or folder of every format, with a name that says nothing."""
    import h5py
    from PIL import Image
    from pyarrow import feather, parquet, table

    (tmp_path / "libsvm").write_text("# hello\n1 3:4 5:6\n-1 qid:2 1:0.5e-3 # why\n0\n")
    (tmp_path / "criteo").write_text(CRITEO * 3)
    (tmp_path / "csv").write_text("a,label\n1,0\n2,1\n")
    convert(Pipeline(MadeUp(3)), tmp_path / "made.tfrecord")
    (tmp_path / "made-00000-of-00001.tfrecord").rename(tmp_path / "tfrecord")
    parquet.write_table(table({"a": [1, 2], "label": [0, 1]}), tmp_path / "parquet")
    feather.write_feather(table({"a": [1, 2]}), str(tmp_path / "arrow"))
    (tmp_path / "folder" / "cat").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(tmp_path / "folder" / "cat" / "a.jpg")
    Image.new("RGB", (4, 4)).save(tmp_path / "images", "PNG")
    np.save(tmp_path / "npy.npy", np.ones((2, 3)))
    np.savez(tmp_path / "npz.npz", x=np.ones((2, 3)), y=np.arange(2))
    idx_files.write(tmp_path / "idx", np.zeros((3, 2, 2), np.uint8))
    with h5py.File(tmp_path / "hdf5", "w") as file:
        file["x"], file["y"] = np.ones((2, 3)), np.arange(2)
    convert(Pipeline(MadeUp(3)), tmp_path / "rows", to="rows")
    for name in ("npy.npy", "npz.npz"):
        (tmp_path / name).rename(tmp_path / name[:3])
    return tmp_path


@pytest.mark.parametrize("kind", FORMATS)
def test_the_first_bytes_tell(files, kind):
    assert guess(files / kind) == kind


@pytest.mark.parametrize("kind", ["libsvm", "criteo", "csv", "tfrecord"])
@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress])
def test_packed_files_are_looked_into(files, kind, pack):
    (files / "packed").write_bytes(pack((files / kind).read_bytes()))
    assert guess(files / "packed") == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.svm", "libsvm"),
        ("a.SVM.gz", "libsvm"),
        ("logs/*.libsvm", "libsvm"),
        ("day.tfrecord-00003-of-00012", "tfrecord"),
        ("day.tfrecords", "tfrecord"),
        ("a.csv.zst", "csv"),
        ("a.parquet", "parquet"),
        ("a.feather", "arrow"),
        ("a.jpeg", "images"),
        ("a.h5", "hdf5"),
        ("a.npz", "npz"),
        ("train-images-idx3-ubyte.gz", "idx"),
    ],
)
def test_names_tell_without_a_look(tmp_path, name, kind, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = Path(name.replace("*", "a"))
    shown.parent.mkdir(exist_ok=True)
    shown.write_bytes(b"")
    assert guess(name) == kind


def test_a_tsv_is_looked_into(tmp_path):
    (tmp_path / "a.tsv").write_text(CRITEO)
    assert guess(tmp_path / "a.tsv") == "criteo"
    (tmp_path / "b.tsv").write_text("a\tb\n1\t2\n")
    assert guess(tmp_path / "b.tsv") == "csv"


def test_folders(files):
    assert guess(files / "folder") == "images"
    assert guess(files / "folder" / "cat") == "images"
    flat = files / "flat"
    flat.mkdir()
    (files / "libsvm").rename(flat / "day.svm")
    (flat / "_notes").write_text("not looked at")
    assert guess(flat) == "libsvm"
    assert guess([flat, flat / "day.svm"]) == "libsvm"


def test_one_bad_line_does_not_hide_the_format(tmp_path):
    (tmp_path / "a").write_text("1 2:3\n0 2:x\n1 4:5\n")
    assert guess(tmp_path / "a") == "libsvm"


@pytest.mark.parametrize(
    "begin",
    [
        *(b"", b"\0" * 40, b"some words\nand more\n", b"\xff\xfe\x01", b"\n\n"),
        b"\xafD\xd1,\x1e\x0eh",  # bytes at random, with a comma among them
    ],
)
def test_what_is_no_format_is_none(begin):
    assert format_of(begin) is None


def test_what_cannot_be_told_is_said(tmp_path, files):
    (tmp_path / "words").write_text("some words\n")
    with pytest.raises(DataError, match=r"no format that is known begins like this: b'some words"):
        guess(tmp_path / "words")
    (tmp_path / "nothing").write_bytes(b"")
    with pytest.raises(DataError, match="the file is empty"):
        guess(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"different formats: .*libsvm is libsvm, .*csv is csv"):
        guess([files / "libsvm", files / "csv"])
    with pytest.raises(DataError, match="empty list"):
        guess([])
    with pytest.raises(DataError, match="there is no file"):
        guess(tmp_path / "absent")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="a pipe does not say"):
        guess(tmp_path / "pipe")


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_opens(files, kind):
    paths = files / ("folder" if kind == "images" else kind)
    if kind == "idx":
        idx_files.write(files / "labels", np.zeros(3, np.uint8))
        paths = [files / "idx", files / "labels"]
    opened = open_files(paths, kind)
    assert opened.batch(2).samples > 0
    if kind in ("idx", "npy", "npz", "hdf5"):
        with pytest.raises(DataError, match="say themselves what they hold"):
            open_files(paths, kind, schema={"columns": []})
        return
    schema = opened.schema
    again = open_files(paths, schema=schema)
    ours, theirs = (list(one.batch(2).batches(0)) for one in (again, opened))
    assert all(map(same, ours, theirs))
    schema.dump(files / "schema.toml")
    assert open_files(paths, schema=files / "schema.toml").schema == schema


def test_the_usual_target_of_a_table_is_taken(files):
    for kind in ("csv", "parquet"):
        assert [c.name for c in open_files(files / kind).schema.of_role("target")] == ["label"]


@pytest.mark.parametrize("kind", ["csv", "parquet", "arrow"])
def test_columns_of_text_can_be_left_out(tmp_path, kind):
    from pyarrow import feather, parquet, table

    names = [f"Anna {i}" for i in range(40)]
    held = {"name": names, "y": [0, 1] * 20, "a": [1.5, 2.5] * 20}
    if kind == "csv":
        lines = zip(*held.values(), strict=True)
        text = "".join(f"{name},{y},{a}\n" for name, y, a in lines)
        (tmp_path / "a").write_text("name,y,a\n" + text)
    elif kind == "parquet":
        parquet.write_table(table(held), tmp_path / "a")
    else:
        feather.write_feather(table(held), str(tmp_path / "a"))
    with pytest.raises(DataError, match="'name' holds 40 different texts in 40 rows") as caught:
        open_files(tmp_path / "a")
    assert "unused=['name']" in caught.value.do
    opened = open_files(tmp_path / "a", without_text=True)
    assert [(c.name, c.role) for c in opened.schema.columns] == [("y", "target"), ("a", "input")]
    batch = next(iter(opened.batch(2).batches(0)))
    assert batch.inputs.tolist() == [1.5, 2.5]
    assert "columns of text left out: name" in opened.origin.notes()
    again = open_files(tmp_path / "a", schema=opened.schema)
    assert "columns of text left out: name" in again.origin.notes()


def test_rows_are_skipped_where_the_format_can(files):
    (files / "libsvm").write_text("1 2:3\n0 2:x\n1 4:5\n")
    opened = open_files(files / "libsvm", on_error="skip", max_errors=1)
    assert opened.batch(1).samples == 2
    with pytest.raises(DataError, match=r"a|max_errors is 0"):
        open_files(files / "libsvm", on_error="skip", max_errors=0).batch(1).samples  # noqa: B018
    with pytest.raises(DataError, match="rows of parquet cannot be skipped"):
        open_files(files / "parquet", on_error="skip")
    with pytest.raises(DataError, match="expected one of the formats"):
        open_files(files / "parquet", "excel")
    with pytest.raises(DataError, match="expected one folder of rows, found 2"):
        open_files([files / "rows", files / "rows"])


def test_a_schema_that_cannot_be_read(files):
    with pytest.raises(DataError, match="cannot read the schema: No such file"):
        open_files(files / "csv", schema=files / "absent.toml")
    (files / "bad.toml").write_text("format =")
    with pytest.raises(DataError, match="the schema is no TOML"):
        open_files(files / "csv", schema=files / "bad.toml")


def test_what_was_opened_trains(files):
    assert (
        flatout.data.csv(files / "csv", target="label").schema == open_files(files / "csv").schema
    )
