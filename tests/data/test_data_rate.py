import json

import numpy as np
import pytest

import flatout
from flatout.data.inspection.rate import bench
from flatout.errors import DataError
from flatout.measure import usable_cpus
from idx_files import write


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "day.svm"
    path.write_text("".join(f"{n % 2} 1:{n} 3:0.5\n" for n in range(64)))
    return path


def test_a_bench_of_text(text):
    found = bench(text, seconds=0.05)
    assert (found.rows, found.batch_size, found.order, found.index) == (64, 16, "shuffled", "built")
    assert [one.threads for one in found.measured] == sorted({1, usable_cpus()})
    for one in found.measured:
        assert one.rows_per_s > 0
        assert set(one.stages) == {"decode", "batch"}
    assert json.loads(json.dumps(found.as_dict()))["rows"] == 64
    assert "64 rows: opened in" in found.headline()
    assert ", its index built; batches of 16, shuffled" in found.headline()
    assert found.table()[0][2] == "1.00x"
    assert bench(text, seconds=0.05).index == "found"


def test_the_batch_size_is_the_users(text):
    assert bench(text, batch_size=64, seconds=0.05).batch_size == 64
    for size in (0, 65):
        with pytest.raises(DataError, match="batch_size: expected 1 to 64"):
            bench(text, batch_size=size, seconds=0.05)


def test_formats_of_other_kinds(tmp_path, text):
    from pyarrow import parquet, table

    parquet.write_table(table({"a": [1.0] * 20, "y": [0] * 20, "n": ["x"] * 20}), tmp_path / "a.pq")
    found = bench(tmp_path / "a.pq", seconds=0.05)
    assert (found.order, found.index) == ("in their order, being decoded in chunks", "none")
    write(tmp_path / "train-images-idx3-ubyte", np.zeros((6, 2, 2), np.uint8))
    write(tmp_path / "train-labels-idx1-ubyte", np.zeros(6, np.uint8))
    assert bench(tmp_path, "idx", seconds=0.05).rows == 6


def test_bad_rows_are_skipped_and_told(text):
    with text.open("a") as file:
        file.write("nonsense\n")
    found = bench(text, seconds=0.05)
    assert found.rows == 64
    assert "1 bad row skipped" in found.notes[0]


def test_images_of_several_sizes(tmp_path):
    from PIL import Image

    for number in range(8):
        folder = tmp_path / "ab"[number % 2]
        folder.mkdir(exist_ok=True)
        Image.new("RGB", (8 + number, 8)).save(folder / f"{number}.jpg")
    found = bench(tmp_path, seconds=0.05)
    assert found.rows == 8
    assert "3x224x224" in found.describe
    schema = flatout.data.images(tmp_path, size=4).schema
    assert "3x4x4" in bench(tmp_path, schema=schema, seconds=0.05).describe
