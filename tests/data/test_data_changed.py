"""Tests that values changed by a source are reported once per column, anywhere in a file."""

import os
import threading

import numpy as np
import pytest
import torch

import flatout
from flatout.data.reading.changed import Changes
from plain_recipe import PLAIN

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

FIRST_ID = 2**24 + 1
ROUNDED = "float32 rounds whole numbers above 16,777,216, such as"
# Text of more rows than the first read of a file covers.
BEGIN = "12116,5.5,08:30\n" * 80_000


def read(pipeline, size=10_000):
    return sum(batch.size for batch in pipeline.batch(size).batches(0))


@pytest.fixture
def written(tmp_path):
    def write(*rows, head="zip,user,time\n", begin=BEGIN):
        path = tmp_path / "a.csv"
        path.write_text(head + begin + "".join(f"{row}\n" for row in rows) * 3)
        return path

    return write


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ("02116,7,09:00", {}),
        ('"02116","7","0, 1"', {}),
        ("02116|7|09:00", {"delimiter": "|"}),
        ("\t02116,7,09:00", {}),
    ],
)
def test_a_code_after_the_first_rows_of_a_file_is_reported_once(written, row, options):
    delimiter = options.get("delimiter", ",")
    path = written(row, head=f"zip{delimiter}user{delimiter}time\n",
                   begin=BEGIN.replace(",", delimiter))  # fmt: skip
    data = flatout.data.csv(path, categories=["time"], **options)
    assert not any("zeros" in note for note in data.notes())
    assert read(data) == 80_003
    (line,) = data.skipped()
    words = "column 'zip': 02116 is read as the number 2116, without its leading zeros"
    assert f"a.csv:80002 (byte {len(BEGIN) + 14:,}): {words}" in line
    assert line in data.notes()
    assert read(data) == 80_003
    assert data.skipped() == []


def test_codes_that_stay_texts_and_fixed_widths_are_no_change(written):
    path = written("02116,007.5,09:00")
    data = flatout.data.csv(path, categories=["zip", "time"])
    assert read(data) == 80_003
    assert data.skipped() == []
    data = flatout.data.csv(written("NA,00,09:00"), unused=["zip", "time"], missing=["NA", "00"],
                            default=1)  # fmt: skip
    assert read(data) == 80_003
    assert data.skipped() == []


@pytest.mark.parametrize("text", [str(FIRST_ID), f"{FIRST_ID}.0", str(2**63 + 1)])
def test_an_id_after_the_first_rows_that_float32_rounds_is_reported(written, text):
    data = flatout.data.csv(written(f"12116,{text},09:00"), unused=["time"])
    assert not any("rounds" in note for note in data.notes())
    assert read(data) == 80_003
    (line,) = data.skipped()
    assert ":80002 (byte " in line
    assert f"column 'user': {ROUNDED} {text.partition('.')[0]}: for ids pass" in line


@pytest.mark.parametrize("text", ["16777217.25", "1.6777217e7", "33554432", "-3.3e30"])
def test_measures_and_numbers_that_float32_holds_are_no_ids(written, text):
    data = flatout.data.csv(written(f"12116,{text},09:00"), unused=["time"])
    assert read(data) == 80_003
    assert data.skipped() == []


def test_a_bad_row_does_not_shift_the_place_of_a_later_id(written):
    path = written("x,1,1", "02116,7,09:00")
    data = flatout.data.csv(path, unused=["time"], on_error="skip")
    assert read(data) == 80_003
    (line,) = data.skipped()
    assert "a.csv:80003 (byte " in line


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_an_id_in_a_later_part_of_a_table_is_named(tmp_path, kind):
    user = pa.array([1.5, 2.5, FIRST_ID, 3.0], pa.float64())
    nested = pa.array([[1.0], [2.0], [3.0], [1.0, FIRST_ID]], pa.list_(pa.float64()))
    table = pa.table({"user": user, "nested": nested, "x": pa.array([1e30, 1.7e7 + 0.3] * 2)})
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=2)
    else:
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table, max_chunksize=2)
    data = getattr(flatout.data, kind)(path)
    assert data.notes() == []
    assert read(data, 2) == 4
    part = "row group" if kind == "parquet" else "record batch"
    user, nested = sorted(data.skipped(), key=lambda line: "nested" in line)
    assert user.startswith(f"{path}: row 2 ({part} 1): column 'user': {ROUNDED} {FIRST_ID}")
    assert nested.startswith(f"{path}: row 3 ({part} 1): column 'nested': {ROUNDED} {FIRST_ID}")
    assert data.notes() == [user, nested]


def test_rounded_columns_of_a_table_read_by_a_schema_are_reported():
    rows = {"user": np.array([1, FIRST_ID])}
    schema = {"format": "table", "columns": [{"name": "user", "dtype": "float32"}]}
    (line,) = flatout.data.table(rows, schema=schema).notes()
    assert line.startswith(f"row 1 of the table: column 'user': {ROUNDED} {FIRST_ID}")
    schema["columns"][0]["dtype"] = "float64"
    assert flatout.data.table(rows, schema=schema).notes() == []
    (line,) = flatout.data.table({"user": np.array([1, 2**53 + 1])}, schema=schema).notes()
    assert f"float64 rounds whole numbers above {2**53:,}, such as {2**53 + 1}" in line


def as_it_is(inputs):
    return inputs


@pytest.mark.slow
def test_findings_of_worker_processes_are_reported_by_the_parent(written):
    data = flatout.data.csv(written("02116,7,09:00"), unused=["time"])
    batches = data.map(as_it_is).batch(20_000).options(processes=1)
    assert sum(batch.size for batch in batches.batches(0)) == 80_003
    batches._program.pool.close()
    (line,) = batches.skipped()
    assert "column 'zip': 02116" in line


def test_changed_values_of_a_pipe_are_reported(tmp_path):
    path = tmp_path / "a.fifo"
    os.mkfifo(path)
    columns = [{"name": "zip", "dtype": "int64"}, {"name": "user", "dtype": "float32"}]
    data = flatout.data.fifo(path, format="csv", schema={"format": "csv", "columns": columns})
    text = f"zip,user\n2116,1.5\n02116,{FIRST_ID}\n"
    writer = threading.Thread(target=path.write_text, args=(text,))
    writer.start()
    assert read(data, 2) == 2
    writer.join()
    rounded, zeros = sorted(data.skipped())
    assert "column 'zip': 02116 is read" in zeros
    assert f"column 'user': {ROUNDED} {FIRST_ID}" in rounded


def test_ranks_report_a_column_once():
    mine, theirs = Changes(), Changes()
    mine.add("a", "a of 0")
    theirs.add("a", "a of 1")
    theirs.add("b", "b of 1")

    def gather(value):
        return [{"a": "a of 0"}, {"a": "a of 1", "b": "b of 1"}]

    assert mine.new_notes(gather) == theirs.new_notes(gather)
    assert sorted(mine.notes()) == sorted(theirs.notes()) == ["a of 0", "b of 1"]
    assert not mine.watches("b", "rounded")
    assert mine.new_notes() == theirs.new_notes() == []


@pytest.mark.slow
def test_a_fit_reports_a_changed_value_once(written, capsys):
    path = written("02116,7,1", begin="12116,5.5,0\n" * 80_000)
    data = flatout.data.csv(path, target="time", stack=True)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
    trainer = flatout.Trainer(model, lr=0.01, recipe=PLAIN)
    trainer.fit(data.batch(20_000), epochs=2)
    said = capsys.readouterr()
    assert (said.out + said.err).count("02116 is read as the number 2116") == 1
