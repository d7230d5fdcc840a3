import json
import os
from pathlib import Path

import numpy as np
import pytest
from data_made_up import MadeUp, same

import flatout
from flatout.data.conversion.convert import convert
from flatout.data.conversion.job import job_of
from flatout.data.inspection import rate
from flatout.data.inspection.rate import bench, opening_s, row_cache_of, rows_per_s
from flatout.data.pipeline import Pipeline
from flatout.data.sources import idx
from flatout.data.sources.rows import rows
from flatout.errors import DataError
from flatout.measure import usable_cpus


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "day.svm"
    path.write_text("".join(f"{n % 2} 1:{n} 3:0.5\n" for n in range(64)))
    return path


def test_a_row_cache_of_a_sample():
    source = MadeUp(100)
    job = job_of(Pipeline(source), None, None)
    source.taken.clear()
    with row_cache_of(job, seconds=60, making_rows=8) as sample:
        assert sample.rows == 100
        assert sorted(source.taken) == list(range(100))
        (batch,) = rows(sample.folder).batch(100).batches(0)
        assert sorted(batch.inputs["x"][:, 0].tolist()) == list(range(100))
        place = sample.folder.parent
    assert not place.exists()
    with row_cache_of(job, seconds=0, making_rows=8) as sample:
        assert 8 <= sample.rows < 100


def test_rows_that_cost_more_out_of_order_come_from_the_begin():
    job = job_of(Pipeline(MadeUp(100, random=False)), None, None)
    with row_cache_of(job) as sample:
        (batch,) = rows(sample.folder).batch(100).batches(0)
        assert batch.inputs["x"][:, 0].tolist() == list(range(100))


class Clock:
    """It goes on by a hundredth of a second with each look."""

    now = 0.0

    def perf_counter(self):
        self.now += 0.01
        return self.now


def test_the_rate_of_rows(monkeypatch):
    monkeypatch.setattr(rate, "time", Clock())
    job = job_of(Pipeline(MadeUp(100)), None, None)
    source = job.origin
    source.taken.clear()
    found = rows_per_s(job.samples, job.numbers, 32, 0.035)
    # The first batch does not count; there are four more, with the 100th row at an epoch's end.
    assert found == pytest.approx((32 + 32 + 4 + 32) / 0.04)
    assert source.taken == [n % 100 for n in range(132)]


def test_opening(text, monkeypatch):
    monkeypatch.setattr(rate, "time", Clock())
    assert opening_s([str(text)] * 3) == pytest.approx(0.01)


def test_a_bench_of_text(text):
    found = bench(text, seconds=0.05)
    assert (found.rows, found.batch_size, found.order, found.index) == (64, 16, "shuffled", "built")
    assert [(one.what, one.threads) for one in found.measured] == [
        (what, threads)
        for what in ("these files", "a row cache")
        for threads in sorted({1, usable_cpus()})
    ]
    assert found.sample_rows == 64
    for one in found.measured:
        assert one.rows_per_s > 0
        assert set(one.stages) == {"decode", "batch"}
    assert json.loads(json.dumps(found.as_dict()))["rows"] == 64
    assert "64 rows: opened in" in found.headline()
    assert ", its index built; batches of 16, shuffled" in found.headline()
    assert found.table()[0][3] == "1.00x"
    assert bench(text, seconds=0.05).index == "found"
    folder = Path(os.environ["FLATOUT_CACHE"])
    assert not list(folder.glob("sample-*"))


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
    folder = convert(text, tmp_path / "a.rows").files[0]
    assert {one.what for one in bench(folder, seconds=0.05).measured} == {"these files"}
    idx.write(tmp_path / "train-images-idx3-ubyte", np.zeros((6, 2, 2), np.uint8))
    idx.write(tmp_path / "train-labels-idx1-ubyte", np.zeros(6, np.uint8))
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


def test_what_is_measured_is_what_trains(text):
    source = flatout.data.libsvm(text)
    with row_cache_of(job_of(source, None, None)) as sample:
        first = {int(b.inputs[0, 0]): b for b in rows(sample.folder).batch(1).batches(0)}
        for batch in source.batch(1).batches(0):
            own = first[int(batch.inputs[0, 0])]
            assert same(own._replace(indices=None), batch._replace(indices=None))
