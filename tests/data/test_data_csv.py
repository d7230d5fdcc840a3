from __future__ import annotations

import csv as python_csv
import gzip
import io
import subprocess
import sys
import textwrap
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flatout.data
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.error_policy import ErrorPolicy
from flatout.data.reading.files import find
from flatout.data.sources.csv import csv_text
from flatout.errors import DataError

pytest.importorskip("pyarrow")

from flatout.data.reading.indexed import IndexedRows, Reading
from flatout.data.sources.arrow.arrow_schema import ColumnOptions
from flatout.data.sources.csv.csv_rows import csv_rows


def _write(path, text):
    path.write_bytes(textwrap.dedent(text).encode() if isinstance(text, str) else text)
    return path


def _all(pipeline, batch=100):
    """The only batch of a small source."""
    (whole,) = list(pipeline.batch(batch).batches(0))
    return whole


def _rows(path, on_error="fail", max_errors=100, schema=None, wanted=None, **given):
    return csv_rows(
        find(path),
        wanted or ColumnOptions(),
        ErrorPolicy(on_error, max_errors),
        schema=schema,
        **given,
    )


def _take(rows, numbers=None):
    return rows.take(np.arange(rows.rows) if numbers is None else np.array(numbers), Buffers())


# ---- what comes out ----


def test_columns_by_name_and_their_dtypes(tmp_path):
    path = _write(
        tmp_path / "a.csv",
        """\
        age,height,member,y
        31,1.5,true,0
        -4,2,false,1
        """,
    )
    batch = _all(flatout.data.csv(path, target="y"))
    assert {name: tensor.dtype for name, tensor in batch.inputs.items()} == {
        "age": torch.int64,
        "height": torch.float32,
        "member": torch.bool,
    }
    assert batch.inputs["age"].tolist() == [31, -4]
    assert batch.inputs["height"].tolist() == [1.5, 2]
    assert batch.inputs["member"].tolist() == [True, False]
    assert batch.targets.dtype == torch.int64
    assert batch.targets.tolist() == [0, 1]


def test_stacked_inputs_are_one_tensor(tmp_path):
    path = _write(tmp_path / "a.csv", "a,y,b,c\n1,0,2.5,true\n3,1,4.5,false\n")
    pipeline = flatout.data.csv(path, target="y", stack=True)
    batch = _all(pipeline)
    assert batch.inputs.dtype == torch.float32
    assert batch.inputs.tolist() == [[1, 2.5, 1], [3, 4.5, 0]]
    assert pipeline.schema["inputs"].shape == (3,)
    assert pipeline.schema.options["stack"] == ["a", "b", "c"]
    again = _all(flatout.data.csv(path, schema=pipeline.schema))
    assert torch.equal(again.inputs, batch.inputs)


def test_inputs_alone_and_weights(tmp_path):
    path = _write(tmp_path / "a.csv", "a,b,w\n1,2,0.5\n3,4,1\n")
    batch = _all(flatout.data.csv(path, inputs="b", weight="w"))
    assert batch.inputs.tolist() == [2, 4]
    assert batch.targets is None
    assert batch.weight.tolist() == [0.5, 1]


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz"])
def test_tabs_and_packed_files_are_recognized(tmp_path, name):
    content = b"a\tb\n1\t\n2\t5\n"
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    batch = _all(flatout.data.csv(tmp_path / name, default=-1))
    assert batch.inputs["b"].tolist() == [-1, 5]


def test_header_by_the_user_or_by_number(tmp_path):
    path = _write(tmp_path / "a.csv", "1,2\n3,4\n")
    assert _all(flatout.data.csv(path, header=False)).inputs["f1"].tolist() == [2, 4]
    batch = _all(flatout.data.csv(path, header=["a", "b"], inputs=["b"]))
    assert batch.inputs.tolist() == [2, 4]
    with pytest.raises(DataError, match="header names 1 columns, found 2"):
        flatout.data.csv(path, header=["a"])


@pytest.mark.parametrize("header", [True, False])
def test_a_byte_order_mark_is_no_part_of_a_name_or_value(tmp_path, header):
    path = _write(
        tmp_path / "a.csv", b"\xef\xbb\xbf" + (b"a,b\n" if header else b"") + b"1,2\n3,4\n"
    )
    batch = _all(flatout.data.csv(path, header=header))
    assert [tensor.tolist() for tensor in batch.inputs.values()] == [[1, 3], [2, 4]]


def test_the_index_that_pandas_writes_is_left_out(tmp_path):
    path = _write(tmp_path / "a.csv", ",a,b\n0,5,6\n1,7,8\n")
    pipeline = flatout.data.csv(path)
    assert list(_all(pipeline).inputs) == ["a", "b"]
    assert pipeline.schema["Unnamed: 0"].role == "unused"
    assert _all(flatout.data.csv(path, inputs="Unnamed: 0")).inputs.tolist() == [0, 1]


def test_line_ends_blank_lines_and_a_last_line_without_newline(tmp_path):
    for text in (b"a,b\r\n1,2\r\n\r\n3,4", b"\n\na,b\n1,2\n\n\n3,4\n\n", b"a,b\n1,2\n3,4"):
        rows = _rows(_write(tmp_path / "a.csv", text))
        for order in ([0, 1], [1, 0]):
            block = _take(rows, order)
            assert block.columns["a"].tolist() == [1 + 2 * i for i in order]
        assert rows.rows == 2


def test_several_files_follow_each_other(tmp_path):
    _write(tmp_path / "a.csv", "a,b\n1,2\n3,4\n")
    _write(tmp_path / "b.csv", 'a,"b"\n')
    _write(tmp_path / "c.csv", "a,b\n5,6")
    batch = _all(flatout.data.csv(tmp_path / "*.csv", target="b"))
    assert batch.inputs.tolist() == [1, 3, 5]
    assert batch.targets.tolist() == [2, 4, 6]


def test_types_come_from_the_last_file_as_well(tmp_path):
    _write(tmp_path / "a.csv", "a,b\n1,\n3,\n")
    _write(tmp_path / "b.csv", "a,b\n1.5,6")
    batch = _all(flatout.data.csv(tmp_path / "*.csv", default={"b": 9}))
    assert batch.inputs["a"].tolist() == [1, 3, 1.5]
    assert batch.inputs["b"].tolist() == [9, 9, 6]


def test_a_schema_as_toml_reads_the_same(tmp_path):
    path = _write(tmp_path / "a.csv", "a;b;c;y\n1;-;x;0\n;4.5;y;1\n")
    arguments = {
        "target": "y",
        "delimiter": ";",
        "missing": ["", "-"],
        "default": 7,
        "categories": {"c": ["y", "x"]},
        "stack": True,
    }
    first = flatout.data.csv(path, **arguments)
    first.schema.dump(tmp_path / "schema.toml")
    second = flatout.data.csv(path, schema=tmp_path / "schema.toml")
    assert second.schema == first.schema
    for batch in (_all(first), _all(second)):
        assert batch.inputs["inputs"].tolist() == [[1, 7], [7, 4.5]]
        assert batch.inputs["c"].tolist() == [1, 0]
        assert batch.targets.tolist() == [0, 1]


def test_a_schema_with_other_dtypes_and_roles_beside_it(tmp_path):
    path = _write(tmp_path / "a.csv", "a,b,c\n1,2,0.1\n3,4,0.2\n")
    columns = [
        {"name": "a", "dtype": "uint8"},
        {"name": "b", "dtype": "float16", "role": "target"},
        {"name": "c", "dtype": "float64"},
    ]
    batch = _all(flatout.data.csv(path, schema={"columns": columns}))
    assert batch.inputs["a"].dtype == torch.uint8
    assert batch.inputs["c"].tolist() == [0.1, 0.2]
    assert batch.targets.dtype == torch.float16
    batch = _all(flatout.data.csv(path, schema={"columns": columns}, target="a", inputs="c"))
    assert batch.inputs.dtype == torch.float64
    assert batch.targets.tolist() == [1, 3]
    with pytest.raises(DataError, match="found a schema as well"):
        flatout.data.csv(path, schema={"columns": columns}, default=0)


# ---- rows and quotes ----


def _by_python(text, delimiter=","):
    found = list(python_csv.reader(io.StringIO(text, newline=""), delimiter=delimiter))
    return [row for row in found if row]


_FIELD = st.text(st.sampled_from('ab"\n\r,; '), max_size=6)


@pytest.mark.slow
@given(
    st.lists(st.lists(_FIELD, min_size=2, max_size=3), min_size=1, max_size=12),
    st.sampled_from([python_csv.QUOTE_ALL, python_csv.QUOTE_MINIMAL]),
    st.sampled_from(["\n", "\r\n"]),
    st.integers(1, 40),
    st.data(),
)
@settings(deadline=None, max_examples=300)
def test_rows_are_cut_where_python_cuts_them(table, quoting, newline, window, data):
    if quoting == python_csv.QUOTE_MINIMAL:  # which leaves carriage returns without quotes
        table = [[field.replace("\r", "") for field in row] for row in table]
    out = io.StringIO(newline="")
    writer = python_csv.writer(out, quoting=quoting, lineterminator=newline)
    writer.writerows(table)
    text = out.getvalue()
    content = text.encode()
    dialect = csv_text.Dialect()
    whole = csv_text.split_rows(np.frombuffer(content, np.uint8), True, dialect, window)
    pieces = [content[a:b].decode() for a, b in zip(whole.starts, whole.ends, strict=True)]
    assert [_by_python(piece)[0] for piece in pieces] == table
    assert not whole.problem
    assert whole.consumed == len(content)
    # Cut the bytes at any place. The rest begins at `consumed`.
    cut = data.draw(st.integers(0, len(content)))
    first = csv_text.split_rows(np.frombuffer(content[:cut], np.uint8), False, dialect, window)
    rest = content[first.consumed :]
    then = csv_text.split_rows(np.frombuffer(rest, np.uint8), True, dialect, window)
    starts = [*first.starts, *(then.starts + first.consumed)]
    assert starts == whole.starts.tolist()
    assert [*first.ends, *(then.ends + first.consumed)] == whole.ends.tolist()


@given(st.text(st.sampled_from('ab"\n,'), max_size=60))
@settings(deadline=None, max_examples=400)
def test_stray_quotes_mean_nothing_to_us_and_to_python(text):
    found = csv_text.split_rows(np.frombuffer(text.encode(), np.uint8), True, csv_text.Dialect())
    rows = [text[a:b] for a, b in zip(found.starts, found.ends, strict=True)]
    if found.problem:
        assert _by_python(text)[: len(rows)] == [_by_python(row)[0] for row in rows]
    else:
        assert _by_python(text) == [_by_python(row)[0] for row in rows]


def test_quoted_newlines_and_stray_quotes_through_pyarrow(tmp_path):
    texts = ["plain", 'a "stray" one', "two\nlines", 'say ""hi""', "x, y", '5" pipe']
    content = 'text,n\nplain,0\na "stray" one,1\n"two\nlines",2\n"say """"hi""""",3\n"x, y",4\n'
    content += '5" pipe,5\n'
    path = _write(tmp_path / "a.csv", content)
    rows = _rows(path, wanted=ColumnOptions(categories={"text": texts}))
    assert rows.rows == 6
    for order in ([0, 1, 2, 3, 4, 5], [5, 2, 0, 3]):
        block = _take(rows, order)
        assert block.columns["text"].tolist() == order
        assert block.columns["n"].tolist() == order


def test_quotes_without_a_meaning(tmp_path):
    path = _write(tmp_path / "a.csv", 'a,t\n1,"x\n2,y"\n')
    wanted = ColumnOptions(categories={"t": ['"x', 'y"']})
    assert _take(_rows(path, wanted=wanted, quote="")).columns["t"].tolist() == [0, 1]


def test_a_quote_that_is_never_closed_is_named_and_never_skipped(tmp_path):
    path = _write(tmp_path / "a.csv", 'a,b\n1,2\n3,"4\n5,6\n7,8\n')
    with pytest.raises(DataError, match="never closed") as caught:
        _rows(path, "skip")
    assert "a.csv: byte 8" in caught.value.where


def test_a_row_longer_than_what_is_looked_at_to_infer(tmp_path):
    long = "x" * (3 << 20)
    path = _write(tmp_path / "a.csv", f"a,t\n1,\n2,{long}\n3,\n")
    assert _take(_rows(path, wanted=ColumnOptions(unused=["t"]))).columns["a"].tolist() == [1, 2, 3]


# ---- what bad input gets ----


def _fails(path, match, where, **given):
    rows = _rows(path, **given)
    for order in (None, np.arange(rows.rows)[::-1]):
        with pytest.raises(DataError, match=match) as caught:
            _take(rows, order)
        assert where in caught.value.where
        assert 'on_error="skip"' in caught.value.do
    return rows


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ("7", "expected 2 fields, found 1"),
        ("7,8,9", "expected 2 fields, found 3"),
        ("7,abc", "column 'b': expected int64, found 'abc'"),
        ("7,", "column 'b': expected int64, found a missing value"),
        ("NA,1", "column 'a': expected float32, found a missing value"),
        ("nan,1", "column 'a': expected a finite float32, found nan"),
        ("-inf,1", "column 'a': expected a finite float32, found -inf"),
        ("1e99,1", "column 'a': expected a finite float32, found inf"),
    ],
)
def test_a_bad_row_is_named_or_skipped(tmp_path, row, match):
    good = [f"{i}.5,{i}" for i in range(30)]
    text = "\n".join(["a,b", *good[:20], "", row, *good[20:], ""])
    path = _write(tmp_path / "a.csv", text)
    _fails(path, match, "a.csv:23")
    rows = _rows(path, "skip")
    assert rows.rows == 30
    for order in (np.arange(30), np.arange(30)[::-1]):
        assert _take(rows, order).columns["b"].tolist() == order.tolist()
    (note,) = [note for note in rows.notes() if "skipped" in note]
    assert note.startswith("1 bad row skipped: ")
    assert "a.csv:23" in note


def test_a_number_that_the_first_rows_did_not_foretell(tmp_path):
    rows = "1.5,2\n" * 300_000
    for text in ("8.5", "99999999999999999999"):
        path = _write(tmp_path / "a.csv", f"a,b\n{rows}1.5,{text}\n")
        with pytest.raises(
            DataError, match=f"column 'b': expected int64, found '{text}'"
        ) as caught:
            _take(_rows(path), [5, 300_000, 7])
        assert "a.csv:300002" in caught.value.where


def test_nan_passes_where_it_may(tmp_path):
    path = _write(tmp_path / "a.csv", "a,b\n1.5,1\nnan,2\n-inf,3\n")
    found = _all(flatout.data.csv(path, allow_nan=True)).inputs["a"].tolist()
    assert found[0] == 1.5
    assert np.isnan(found[1])
    assert found[2] == -np.inf


def test_too_many_bad_rows(tmp_path):
    path = _write(tmp_path / "a.csv", "a,b\n" + "1,2\n" * 50 + "x,y\n1\n" * 3)
    rows = _rows(path, "skip", max_errors=6)
    assert rows.rows == 50
    assert "6 bad rows skipped" in rows.notes()[0]
    with pytest.raises(DataError, match="max_errors is 5"):
        _rows(path, "skip", max_errors=5)


def test_the_schemas_default_fills_what_is_missing(tmp_path):
    path = _write(tmp_path / "a.csv", "a,b,c\n1,NA,true\n,2,\n")
    columns = [
        {"name": "a", "dtype": "int32", "default": -7},
        {"name": "b", "dtype": "float32", "default": 0.5},
        {"name": "c", "dtype": "bool", "default": 1},
    ]
    block = _take(_rows(path, schema={"columns": columns}))
    assert block.columns["a"].tolist() == [1, -7]
    assert block.columns["b"].tolist() == [0.5, 2]
    assert block.columns["c"].tolist() == [True, True]
    columns[0]["default"] = 0.5
    with pytest.raises(DataError, match=r"expected a default that is int32, found 0\.5"):
        _rows(path, schema={"columns": columns})


def test_a_carriage_return_inside_a_row(tmp_path):
    path = _write(tmp_path / "a.csv", b"a\n" + b"1\n" * 10 + b"2\r3\n" + b"4\n" * 10)
    _fails(path, "carriage return", "a.csv:12")
    assert _rows(path, "skip").rows == 20


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b"a,b\n", "no rows besides their header"),
        (b"a,b", "no rows besides their header"),
        ("a,b\n1,2\n".encode("utf-16-le"), "found bytes of 0"),
        (b"a,\xff\n1,2\n", "expected text in UTF-8, found the byte 0xff"),
        (b"a,b\r1,2\r", "carriage returns alone"),
        (b"a,a\n1,2\n", "several columns are called 'a'"),
        (b"a,b\n1,2,3\n4,5,6\n", "expected rows of 2 fields, found none"),
        (b"a,b\n1,\n", "'b' \\(missing values alone\\)"),
        (b"x" * (2 << 20), "first row does not end"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, content, match):
    path = _write(tmp_path / "a.csv", content)
    with pytest.raises(DataError, match=match):
        flatout.data.csv(path)


def test_columns_that_are_not_there(tmp_path):
    path = _write(tmp_path / "a.csv", "a,b\n1,2\n")
    for arguments in (
        {"target": "z"},
        {"inputs": ["a", "z"]},
        {"unused": ["z"]},
        {"default": {"z": 0}},
        {"categories": {"z": ["1"]}},
    ):
        with pytest.raises(DataError, match="no column 'z': the columns are a, b"):
            flatout.data.csv(path, **arguments)
    with pytest.raises(DataError, match="'a' is named twice"):
        flatout.data.csv(path, target="a", inputs="a")
    with pytest.raises(DataError, match="expected a column 'z', found a, b"):
        flatout.data.csv(path, schema={"columns": [{"name": "z", "dtype": "int64"}]})


def test_files_with_different_columns(tmp_path):
    _write(tmp_path / "a.csv", "a,b\n1,2\n")
    _write(tmp_path / "b.csv", "a,c\n3,4\n")
    with pytest.raises(DataError, match=r"expected the columns of .*: a, b; found a, c") as caught:
        flatout.data.csv(tmp_path / "*.csv")
    assert caught.value.where.endswith("b.csv")


def test_options_that_make_no_sense(tmp_path):
    path = _write(tmp_path / "a.csv", "a,t\n1,x\n")
    schema = {"columns": [{"name": "a", "dtype": "int64"}], "options": {"delimeter": ";"}}
    with pytest.raises(DataError, match="csv has no option 'delimeter'"):
        flatout.data.csv(path, schema=schema)
    schema["options"] = {"missing": "NA"}
    with pytest.raises(DataError, match="missing: expected a list of texts, found 'NA'"):
        flatout.data.csv(path, schema=schema)
    for categories in ([1, 2], [], ["x", "x"], ["x", None]):
        with pytest.raises(DataError, match="categories of column 't': expected"):
            flatout.data.csv(path, categories={"t": categories})
    assert _all(flatout.data.csv(path, unused="t", missing="-")).inputs.tolist() == [1]


def test_rows_like_the_header_stay_wherever_pieces_of_the_file_begin(tmp_path, monkeypatch):
    path = _write(tmp_path / "a.csv", "a,b\n" * 301)
    assert _rows(path).rows == 300
    for piece in (100, 3):
        rows = partial(IndexedRows, budget=0, reading=Reading(piece=piece))
        monkeypatch.setattr("flatout.data.sources.csv.csv_rows.IndexedRows", rows)
        monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / f"pieces of {piece}"))
        assert _rows(path).rows == 300


def test_lines_of_carriage_returns_are_blank(tmp_path):
    path = _write(tmp_path / "a.csv", b"a,b\r\r\n1,2\r\r\n\r\r\n3,4\r\n")
    rows = _rows(path)
    assert rows.rows == 2
    assert _take(rows, [1, 0]).columns["b"].tolist() == [4, 2]


@pytest.mark.parametrize("options", [{"delimiter": ",,"}, {"delimiter": "\n"}, {"quote": "ab"}])
def test_signs_that_are_none(tmp_path, options):
    path = _write(tmp_path / "a.csv", "a,b\n1,2\n")
    with pytest.raises(DataError, match=r"expected (one|an ASCII) character"):
        flatout.data.csv(path, **options)


def test_two_signs_are_not_the_same(tmp_path):
    path = _write(tmp_path / "a.csv", "a,b\n1,2\n")
    for options in ({"quote": ","}, {"delimiter": ";", "quote": ";"}, {"decimal": ","}):
        with pytest.raises(DataError, match="expected two signs"):
            flatout.data.csv(path, **options)
    assert flatout.data.csv(path, quote=";").batch(1).peek(1)[0].inputs["b"].tolist() == [2]


@pytest.mark.slow
def test_without_pyarrow_it_says_what_to_install(tmp_path):
    path = _write(tmp_path / "a.csv", "a,b\n1,2\n")
    code = f"""
import sys
sys.modules["pyarrow"] = None
import flatout.data
from flatout.errors import DataError
for read in (flatout.data.csv, flatout.data.parquet, flatout.data.arrow):
    try:
        read({str(path)!r})
    except DataError as error:
        assert "pyarrow" in error.what, error
        assert error.do == "pip install 'flatout[tables]'", error.do
    else:
        raise SystemExit("it read without pyarrow")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
