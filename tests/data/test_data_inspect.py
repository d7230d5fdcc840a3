import gzip
import json
import re
from itertools import pairwise

import numpy as np
import pytest
from data_made_up import MadeUp
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import dump_svmlight_file

import flatout
import idx_files
from flatout.data.conversion.convert import convert
from flatout.data.inspection.column_counts import ColumnCounts, count, percentiles
from flatout.data.inspection.inspect import inspect
from flatout.data.pipeline import Pipeline
from flatout.data.reading.block import Block, Ragged, offsets_of
from flatout.data.reading.schema import as_schema
from flatout.errors import DataError


def clicks(path, rows=200, seed=0, features=3000, clicked=0.1):
    rng = np.random.default_rng(seed)
    with open(path, "w") as file:
        for row in range(rows):
            ids = np.sort(rng.choice(features, 39 if row else 41, replace=False)) + 1
            file.write(f"{int(row < clicked * rows)} {' '.join(f'{i}:1' for i in ids)}\n")
        file.write(f"0 {features}:1\n")
    return path


def test_click_logs(tmp_path):
    for day in range(3):
        clicks(tmp_path / f"{day}.svm", seed=day)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.svm"))
    report = inspect(tmp_path / "*.svm")
    assert (report.format, report.files, report.bytes) == ("libsvm", 3, size)
    assert (report.rows, report.looked_at, report.packed) == (603, 603, 0)
    assert report.classes == {"0": 543, "1": 60}
    assert (report.values_a_row, report.max_id) == ((1, 41), 3000)
    label, ids, values = report.columns
    assert (label.low, label.high, label.role) == (0, 1, "target")
    assert (ids.kind, ids.low, ids.high) == ("int64 ragged", 1, 3000)
    assert ids.lengths == {0: 1, 50: 39, 90: 39, 99: 39, 100: 41}
    assert values.range == "1 … 1"
    words = f"{size / 1e3:.1f} kB" if size < 9e5 else f"{size / 1e6:.1f} MB"
    assert report.headline() == (
        f"3 files {words} 603 rows · label 10.0% · 1 to 41 fields · max id 3,000"
    )
    assert (report.bad_rows, report.bad_line()) == (0, "")


def test_bad_rows_are_counted_and_the_first_are_named(tmp_path):
    path = clicks(tmp_path / "a.svm")
    lines = path.read_text().splitlines()
    for number in range(20, 140):  # more than max_errors of a source
        lines[number] = "1 12:1 7:1"
    path.write_text("\n".join(lines) + "\n")
    report = inspect(path)
    assert (report.rows, report.bad_rows) == (81, 120)
    assert report.bad_line().startswith("120 bad rows: ")
    assert "a.svm:21 (byte" in report.bad
    assert "expected indices that ascend" in report.bad
    assert report.bad.endswith("…")


def test_no_row_is_good(tmp_path):
    (tmp_path / "a.tsv").write_text("x\ty\n" * 3)
    with pytest.raises(DataError, match="the files hold no rows"):
        inspect(tmp_path / "a.tsv", "criteo")


def test_packed_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = clicks(tmp_path / "a.svm").read_bytes()
    (tmp_path / "b.svm.gz").write_bytes(gzip.compress(data))
    report = inspect(["a.svm", "b.svm.gz"])
    packed = (tmp_path / "b.svm.gz").stat().st_size
    assert (report.files, report.packed) == (2, 1)
    assert (report.bytes, report.unpacked_bytes) == (len(data) + packed, 2 * len(data))
    assert "(unpacked " in report.headline()


def test_the_schema_reads_the_files(tmp_path):
    report = inspect(clicks(tmp_path / "a.svm"))
    report.write_schema(tmp_path / "schema.toml")
    source = flatout.data.libsvm(tmp_path / "a.svm", schema=tmp_path / "schema.toml")
    assert source.schema == report.schema == as_schema(tmp_path / "schema.toml", "libsvm")
    with pytest.raises(DataError, match="the schema cannot be written: No such file"):
        report.write_schema(tmp_path / "absent" / "schema.toml")


def test_plain_data_is_json(tmp_path):
    report = inspect(clicks(tmp_path / "a.svm"))
    words = json.loads(json.dumps(report.as_dict()))
    assert words["schema"]["format"] == "libsvm"
    assert str(report).splitlines()[0] == report.headline()


def test_tables_with_text_and_classes(tmp_path):
    (tmp_path / "a.csv").write_text(
        "name,size,class\n" + "".join(f"Bonn {i},{i / 4},{i % 8}\n" for i in range(80))
    )
    report = inspect(tmp_path / "a.csv")
    assert report.notes == ["columns of text left out: name"]
    assert [(c.name, c.role) for c in report.columns] == [("size", "input"), ("class", "target")]
    assert report.classes == {str(i): 10 for i in range(8)}
    assert "8 classes (0 12.5% … 7 12.50%)" in report.headline()
    assert "1 input column" in report.headline()


def test_a_target_that_is_a_number(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n" + "".join(f"{i},{i / 8}\n" for i in range(5)))
    report = inspect(tmp_path / "a.csv")
    assert (report.classes, report.target_mean) == (None, 0.25)
    assert "y 0.25 in the mean" in report.headline()


def test_bad_values_of_parquet_end_the_look_but_not_the_report(tmp_path):
    from pyarrow import parquet, table

    held = table({"x": [1.0, 2.0, None, 4.0] * 500, "y": [0, 1, 0, 1] * 500})
    parquet.write_table(held.slice(0, 2), tmp_path / "a.parquet")
    parquet.write_table(held, tmp_path / "b.parquet")
    report = inspect([tmp_path / "a.parquet", tmp_path / "b.parquet"])
    assert (report.rows, report.bad_rows) == (2002, 1)
    assert "missing value" in report.bad_line()
    assert "b.parquet: row 2" in report.bad_line()
    assert report.schema is not None


def test_images(tmp_path):
    from PIL import Image

    for number in range(30):
        folder = tmp_path / "pets" / "abc"[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8 + number % 2)).save(folder / f"{number}.png")
    (tmp_path / "pets" / "a" / "empty.jpg").write_bytes(b"")
    report = inspect(tmp_path / "pets")
    assert (report.files, report.rows, report.bad_rows) == (30, 30, 1)
    assert report.classes == {"a": 10, "b": 10, "c": 10}
    assert "empty.jpg" in report.bad_line()
    assert any("2 sizes of images, 8x8 to 9x8" in note for note in report.notes)
    assert report.schema is not None
    assert report.schema["image"].shape == (3, 224, 224)
    assert any("sorted by class" in note for note in report.notes)
    for path in (tmp_path / "pets").glob("*/*[13579].png"):
        path.unlink()
    (tmp_path / "pets" / "a" / "empty.jpg").unlink()
    same = inspect(tmp_path / "pets")
    assert same.schema["image"].shape == (3, 8, 8)
    assert "all images are 8x8" in same.notes


def test_images_without_classes(tmp_path):
    from PIL import Image

    for number in range(3):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{number}.png")
    report = inspect(tmp_path, "images")
    # The folder that is named holds the images itself.
    assert (report.rows, report.classes, report.target) == (3, None, None)


def test_rows_and_arrays(tmp_path):
    done = convert(Pipeline(MadeUp(100)), tmp_path / "a.rows")
    report = inspect(done.files[0])
    assert (report.format, report.rows, report.max_id) == ("rows", 100, 99)
    assert report.classes == {str(n): 20 for n in range(5)}
    idx_files.write(tmp_path / "train-images-idx3-ubyte", np.zeros((6, 2, 2), np.uint8))
    idx_files.write(tmp_path / "train-labels-idx1-ubyte", np.arange(6, dtype=np.uint8) % 2)
    arrays = inspect(tmp_path, "idx")
    assert (arrays.rows, arrays.classes, arrays.schema) == (6, {"0": 3, "1": 3}, None)
    with pytest.raises(DataError, match="no schema"):
        arrays.write_schema(tmp_path / "schema.toml")


def test_sorted_classes_want_a_shuffle(tmp_path):
    x, y = np.random.default_rng(0).random((40, 3)), np.arange(40) // 20
    dump_svmlight_file(x, y, str(tmp_path / "a.svm"))
    assert "sorted by class" in inspect(tmp_path / "a.svm").notes[-1]
    dump_svmlight_file(x, y[::-1].copy(), str(tmp_path / "b.svm"))
    assert "sorted by class" in inspect(tmp_path / "b.svm").notes[-1]
    dump_svmlight_file(x, np.arange(40) % 2, str(tmp_path / "c.svm"))
    assert "sorted by class" not in str(inspect(tmp_path / "c.svm"))


def test_many_small_files_want_to_be_one(tmp_path):
    for number in range(20):
        clicks(tmp_path / f"{number}.svm", rows=3, features=50)
    assert any(note.startswith("20 files of ") for note in inspect(tmp_path).notes)


# ---- counting ----


@given(
    labels=st.lists(st.integers(-2, 3), min_size=1, max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=4),
)
def test_blocks_count_as_one(labels, cuts):
    labels = np.array(labels)
    lengths = np.abs(labels)
    edges = sorted({0, len(labels), *(cut for cut in cuts if cut < len(labels))})
    tally = ColumnCounts()
    for start, stop in pairwise(edges):
        own = lengths[start:stop]
        block = Block(
            {
                "y": labels[start:stop],
                "x": Ragged(np.repeat(labels[start:stop], own), offsets_of(own)),
            },
            np.arange(start, stop),
        )
        tally.add(count(block, "y"))
    found, counts = np.unique(labels, return_counts=True)
    assert tally.classes == dict(zip(found.tolist(), counts.tolist(), strict=True))
    changes = int((np.diff(labels) != 0).sum())
    is_sorted = len(found) > 1 and changes == len(found) - 1 and len(labels) > len(found)
    assert tally.sorted_by_class == is_sorted
    assert (tally.columns["y"].low, tally.columns["y"].high) == (labels.min(), labels.max())
    inside = labels[lengths > 0]
    if len(inside):
        assert (tally.columns["x"].low, tally.columns["x"].high) == (inside.min(), inside.max())
    spread = percentiles(tally.columns["x"].lengths)
    for share, size in spread.items():
        assert size == np.percentile(lengths, share, method="inverted_cdf")


def test_large_integers_keep_their_digits():
    values = np.array([2**53 + 1, 5])
    part = count(Block({"y": values}, np.arange(2)), None).columns["y"]
    assert part.high == 2**53 + 1


def test_nan_is_no_value_and_no_class():
    block = Block({"y": np.array([np.nan, 1.0, 0.0])}, np.arange(3))
    tally = ColumnCounts()
    tally.add(count(block, "y"))
    assert (tally.columns["y"].low, tally.columns["y"].high, tally.classes) == (0, 1, None)


def test_too_many_labels_are_no_classes():
    tally = ColumnCounts()
    tally.add(count(Block({"y": np.arange(20_000)}, np.arange(20_000)), "y"))
    assert tally.classes is None
    assert tally.mean == 9999.5


def test_bad_rows_that_are_alike_are_told_once(tmp_path):
    lines = ["a,b", *(f"{i},{i}.5" for i in range(3000)), "1,oops", "x,2", "2,more"]
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    said = inspect(tmp_path / "a.csv", progress=False).bad_line()
    assert said.count("column 'b': expected float32, found 'oops'") == 1
    assert said.count("expected float32") == 1
    assert re.search(r"a.csv:3003 .*'a': .*, \S*a.csv:3002 .*'oops'.* \(and alike \S*:3004 ", said)


def test_one_row_and_dates_that_are_left_out(tmp_path):
    (tmp_path / "one.csv").write_text("a,b\n1,2\n")
    one = str(inspect(tmp_path / "one.csv", progress=False))
    assert "bytes 1 row " in one
    assert "1 rows" not in one
    days = [f"{1 + i % 28:02}.02.2024,{i}" for i in range(60)]
    (tmp_path / "days.csv").write_text("\n".join(["day,x", *days]) + "\n")
    found = inspect(tmp_path / "days.csv", progress=False)
    assert found.notes[0] == "columns of text left out: day"
    assert "--date day=%d.%m.%Y" in found.notes[1]
    again = inspect(tmp_path / "days.csv", progress=False, dates={"day": "%d.%m.%Y"})
    assert "day" in {column.name for column in again.columns}
    assert not any("--date" in note for note in again.notes)
