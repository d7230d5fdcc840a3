"""Tests that whole numbers of LibSVM and Criteo rounded by float32 are reported once."""

import os
import threading

import pytest

import flatout

ROUNDED = "float32 rounds whole numbers above 16,777,216, such as 16777217"
LARGE, MEASURE = "16777217", "16777217.5"


def lines_of(pipeline):
    found = []
    for epoch in range(2):
        assert sum(batch.size for batch in pipeline.batch(100).batches(epoch)) > 0
        found += pipeline.skipped()
    return found


@pytest.mark.parametrize("layout", ["dense", "fixed", "ragged"])
@pytest.mark.parametrize(
    ("row", "column"),
    [
        (f"1 1:2 2:{LARGE}", "values"),
        (f"1 1:-{LARGE} 2:1 # 3:{MEASURE}", "values"),
        (f"1 1:1e8 2:{LARGE}", "values"),
        (f"{LARGE} 1:1 2:1", "label"),
        ("1 1:16777216 2:33554432", ""),
        (f"1 1:2 2:{MEASURE}", ""),
    ],
)
def test_a_number_of_libsvm_that_is_rounded_is_named_once(tmp_path, layout, row, column):
    path = tmp_path / "a.svm"
    path.write_text("0.5 1:1 2:0\n" * 300 + f"{row}\n" * 2 + "0.5 1:1 2:0\n" * 300)
    found = lines_of(flatout.data.libsvm(path, layout=layout))
    if not column:
        assert found == []
        return
    (line,) = found
    name = "features" if column == "values" and layout == "dense" else column
    sign = "-" if "-" in row else ""
    assert line.startswith(f"{path}:301 ")
    assert f"{name!r}: {ROUNDED.replace(LARGE, sign + LARGE)}: an id has to be read" in line


def test_the_rounded_label_is_whole_where_the_schema_says_float64(tmp_path):
    path = tmp_path / "a.svm"
    path.write_text(f"{LARGE} 1:1\n0.5 1:2\n")
    schema = flatout.data.libsvm(path).schema
    columns = tuple(
        column.model_copy(update={"dtype": "float64"}) if column.name == "label" else column
        for column in schema.columns
    )
    exact = flatout.data.libsvm(path, schema=schema.model_copy(update={"columns": columns}))
    assert next(exact.batch(2).batches(0)).targets.tolist() == [float(LARGE), 0.5]
    assert exact.skipped() == []


def criteo_row(integer):
    return "\t".join(["1", *["3"] * 12, integer, *["0000000a"] * 26]) + "\n"


@pytest.mark.parametrize(("integer", "is_named"), [(LARGE, True), ("33554432", False), ("", False)])
def test_an_integer_of_criteo_that_is_rounded_is_named_once(tmp_path, integer, is_named):
    path = tmp_path / "a.tsv"
    path.write_text(criteo_row("5") * 300 + criteo_row(integer) * 2)
    found = lines_of(flatout.data.criteo(path))
    assert len(found) == is_named
    assert all(f"{path}:301 " in line and f"'integers': {ROUNDED}" in line for line in found)


def test_a_rounded_number_in_a_pipe_is_named(tmp_path):
    path, schema = tmp_path / "a.fifo", tmp_path / "a.svm"
    schema.write_text("0.5 1:1\n1 1:2\n")
    os.mkfifo(path)
    pipe = flatout.data.fifo(path, format="libsvm", schema=flatout.data.libsvm(schema).schema)
    text = f"0.5 1:1\n1 1:{LARGE}\n"
    writer = threading.Thread(target=path.write_text, args=(text,))
    writer.start()
    assert sum(batch.size for batch in pipe.batch(2).batches(0)) == 2
    writer.join(10)
    (line,) = pipe.skipped()
    assert ROUNDED in line
