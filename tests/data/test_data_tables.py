"""Tables as users have them: encodings, delimiters, signs, texts, dates, missing values."""

from __future__ import annotations

import csv
import io

import numpy as np
import pytest
import torch

import flatout.data
from flatout.data.conversion.convert import convert
from flatout.data.inspection.inspect import inspect
from flatout.data.reading.schema import as_schema
from flatout.errors import DataError

pytest.importorskip("pyarrow")

CITIES = ["Köln", "München", "Ulm"]


def _write(path, text, encoding="utf-8"):
    path.write_bytes(text.encode(encoding))
    return path


def _all(pipeline):
    (whole,) = list(pipeline.batch(10_000).batches(0))
    return whole


def _german(rows=40):
    lines = [f"{CITIES[i % 3]};{i},25;{'ja' if i % 2 else 'nein'}" for i in range(rows)]
    return "\n".join(["Stadt;Fläche;verkauft", *lines, ""])


# ---- encodings ----


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1", "utf-16-le", "utf-8"])
def test_another_encoding_gives_the_same(tmp_path, encoding):
    plain = _all(flatout.data.csv(_write(tmp_path / "a.csv", _german()), target="verkauft"))
    path = _write(tmp_path / "b.csv", _german(), encoding)
    pipeline = flatout.data.csv(path, target="verkauft", encoding=encoding)
    found = _all(pipeline)
    assert {name: tensor.tolist() for name, tensor in found.inputs.items()} == {
        name: tensor.tolist() for name, tensor in plain.inputs.items()
    }
    assert pipeline.schema.options["categories"]["Stadt"] == CITIES
    pipeline.schema.dump(tmp_path / "schema.toml")
    again = flatout.data.csv(path, schema=tmp_path / "schema.toml")
    assert torch.equal(_all(again).inputs["Stadt"], found.inputs["Stadt"])


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_a_byte_order_mark_says_the_encoding(tmp_path, encoding):
    pipeline = flatout.data.csv(_write(tmp_path / "a.csv", _german(), encoding), target="verkauft")
    assert list(pipeline.schema.embedding_rows) == ["Stadt"]
    said = any("which the byte order mark tells" in note for note in pipeline.notes())
    assert said == (encoding != "utf-8-sig")


def test_what_is_no_utf8_is_named_with_line_and_byte_or_skipped(tmp_path):
    content = b"city,n\n" + b"Bonn,1\n" * 20 + b"M\xfcnchen,2\n" + b"Bonn,1\n" * 20
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    at = f"a.csv:22 (byte {content.index(0xFC)})"
    for given in ({}, {"categories": {"city": ["Bonn"]}}, {"categories": ["city"]}):
        with pytest.raises(DataError, match=r"found the byte 0xfc .*reads it as 'M") as caught:
            _all(flatout.data.csv(path, **given))
        assert at in caught.value.where
        skipping = flatout.data.csv(path, on_error="skip", **given)
        assert _all(skipping).size == 40
        assert at in skipping.notes()[0]
    unused = _all(flatout.data.csv(path, unused="city"))
    assert unused.size == 41  # what is not used need not be text
    path.write_bytes("Fläche,n\n1,2\n".encode("cp1252"))
    with pytest.raises(DataError, match="found the byte 0xe4") as caught:
        flatout.data.csv(path, on_error="skip")
    assert "a.csv:1 (byte 2)" in caught.value.where
    assert "encoding='cp1252'" in caught.value.do


def test_an_encoding_that_is_none_or_not_the_files(tmp_path):
    path = _write(tmp_path / "a.csv", "a,b\n1,x\n2,\xfc\n3,x\n")
    with pytest.raises(DataError, match="expected one that Python knows, found 'utf9'"):
        flatout.data.csv(path, encoding="utf9")
    with pytest.raises(DataError, match="expected one that Python knows, found 'zlib'"):
        flatout.data.csv(path, encoding="zlib")
    _write(tmp_path / "a.csv", "a,b\n1,x\n2,y\n3,\u4e2dx\n", "utf-16")
    (tmp_path / "a.csv").write_bytes((tmp_path / "a.csv").read_bytes()[:-9] + b"\x00\xd8x\0")
    with pytest.raises(DataError, match="expected text in utf-16") as caught:
        flatout.data.csv(path)
    assert "a.csv:4 (byte " in caught.value.where
    odd = b"a,b\n" + b"1,x\n" * 70_000 + b"2,\x81\n"
    path.write_bytes(odd)
    with pytest.raises(DataError, match="expected text in cp1252, found the bytes 81") as caught:
        flatout.data.csv(path, encoding="cp1252")
    assert f"a.csv:70002 (byte {len(odd) - 2:,})" in caught.value.where


# ---- delimiter, decimal sign, header ----


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("decimal", [".", ","])
@pytest.mark.parametrize("has_header", [True, False])
def test_how_a_file_is_written_is_found_out(tmp_path, delimiter, decimal, has_header):
    if (delimiter, decimal) == (",", ","):
        pytest.skip("that is no CSV")
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter)
    numbers = [(i + 1) / 4 for i in range(50)]
    if has_header:
        writer.writerow(["size", "note", "n"])
    for number in numbers:
        note = f"a{delimiter} b;\n{'xy'[int(number) % 2]}, c"
        writer.writerow([str(number).replace(".", decimal), note, int(number)])
    pipeline = flatout.data.csv(_write(tmp_path / "a.csv", out.getvalue()))
    names = ["size", "note", "n"] if has_header else ["f0", "f1", "f2"]
    assert [column.name for column in pipeline.schema.columns] == names
    batch = _all(pipeline)
    assert batch.inputs[names[0]].tolist() == numbers
    assert batch.inputs[names[1]].tolist() == [1 + int(number) % 2 for number in numbers]
    assert any("first row looks like the others" in note for note in pipeline.notes()) != has_header
    again = flatout.data.csv(tmp_path / "a.csv", schema=pipeline.schema)
    assert torch.equal(_all(again).inputs[names[0]], batch.inputs[names[0]])


@pytest.mark.parametrize(
    ("text", "header"),
    [
        ("a,b\n1,2\n", True),
        ("a,b\nx,y\n", True),
        ("5.1,3.5,x\n4.9,3.0,x\n", False),
        ("x,1\ny,2\n", False),
        ("2020-01-01,1\n2020-01-02,2\n", False),
        ("0,1,2\n0.5,0.1,0.2\n", True),  # as pandas calls columns without names
        ("city,2019,2020\nUlm,5,6\n", True),  # a column a year
        ("1,NA\n2,3\n", False),
        ("day,5\n2020-01-01,6\n", True),
        ("7,8\n", True),  # a row alone says nothing
    ],
)
def test_a_first_row_of_numbers_above_numbers_is_data(tmp_path, text, header):
    path = _write(tmp_path / "a.csv", text * 1)
    if text == "7,8\n":
        with pytest.raises(DataError, match="no rows besides their header"):
            flatout.data.csv(path)
        return
    assert flatout.data.csv(path, default=0, skip_text=True).schema.options["header"] is header


# ---- texts ----


def test_texts_are_learned_once_and_numbered_the_same_ever_after(tmp_path):
    train = _write(tmp_path / "a.csv", "city,n,y\nUlm,1,no\nBonn,2,yes\n,3,no\nUlm,4,yes\n")
    pipeline = flatout.data.csv(train, target="y")
    batch = _all(pipeline)
    assert batch.inputs["city"].tolist() == [2, 1, 0, 2]
    assert batch.targets.tolist() == [0, 1, 0, 1]
    assert pipeline.schema.embedding_rows == {"city": 3}
    assert pipeline.schema.classes == ["no", "yes"]
    assert pipeline.notes()[0] == "categories by their texts, 0 for unknown ones: city 2"
    pipeline.schema.dump(tmp_path / "schema.toml")
    later = _write(tmp_path / "b.csv", "city,n,y\nRome,1,yes\nBonn,2,no\n")
    other = flatout.data.csv(later, schema=tmp_path / "schema.toml")
    assert _all(other).inputs["city"].tolist() == [0, 1]
    assert _all(other).targets.tolist() == [1, 0]
    _write(tmp_path / "b.csv", "city,n,y\nRome,1,maybe\n")
    with pytest.raises(DataError, match="'y': expected one of 2 categories, found 'maybe'"):
        _all(flatout.data.csv(later, schema=tmp_path / "schema.toml"))


def test_learned_texts_leave_the_digest_to_the_schema(tmp_path):
    path = tmp_path / "a.csv"
    lines = [f"{('red', 'green')[i % 2]},{'' if i % 5 == 0 else i},{-i}" for i in range(100)]
    path.write_text("color,x,z\n" + "\n".join(lines))
    for fill in (7, -1):
        filled = flatout.data.csv(path, unused="z", default={"x": fill}).cache("disk")
        assert _all(filled).inputs["x"][::5].tolist() == [fill] * 20
    other = flatout.data.csv(path, inputs=["color", "z"]).cache("disk")
    assert _all(other).inputs["z"].tolist() == [-i for i in range(100)]


@pytest.mark.parametrize("names", [[f"u{i}" for i in range(900)], list(range(900))])
def test_many_categories_have_the_same_numbers_in_small_batches(names):
    draw = np.random.default_rng(0).permutation(900)
    rows = {
        "user": [names[i] for i in draw] + [None],
        "closed": [names[i] for i in draw] + names[:1],
    }
    table = flatout.data.table(rows, categories={"user": None, "closed": names})
    (whole,) = table.batch(901).batches(0)
    small = list(table.batch(7).batches(0))
    for name in rows:
        parts = torch.cat([batch.inputs[name] for batch in small])
        assert torch.equal(parts, whole.inputs[name])
    assert whole.inputs["closed"].tolist() == [*draw.tolist(), 0]
    order = {name: number for number, name in enumerate(sorted(names), 1)}
    assert whole.inputs["user"].tolist() == [order[name] for name in rows["user"][:-1]] + [0]
    strange = flatout.data.table({**rows, "closed": rows["user"]}, schema=table.schema)
    with pytest.raises(DataError, match="column 'closed': expected int64, found a missing"):
        list(strange.batch(7).batches(0))
    other = {"user": names[:1], "closed": ["no" if names[0] == "u0" else -1]}
    with pytest.raises(DataError, match="expected one of 900 categories"):
        list(flatout.data.table(other, schema=table.schema).batch(1).batches(0))


def test_quotes_in_a_text_that_is_no_utf8(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"c,x\n" + b"a,1\n" * 50 + b'"a ""b"" \xff",2\n')
    with pytest.raises(DataError, match=r"found the byte 0xff") as told:
        flatout.data.csv(path)
    assert told.value.where.endswith("a.csv:52 (byte 213)")


def test_texts_of_all_rows_and_files_are_learned_whatever_the_order(tmp_path):
    names = [f"k{i % 60}" for i in range(80_000)]  # more than are looked at together
    _write(tmp_path / "a.csv", "k\n" + "\n".join(names[:40_000]))
    _write(tmp_path / "b.csv", "k\n" + "\n".join([*names[40_000:], "last"]))
    pipeline = flatout.data.csv(tmp_path / "*.csv", categories="k")
    assert pipeline.schema.options["categories"]["k"] == sorted({*names, "last"})
    seen = list(pipeline.shuffle(seed=1).batch(10_000).batches(0))
    codes = torch.cat([batch.inputs for batch in seen])
    order = torch.cat([batch.indices for batch in seen]).argsort()
    known = sorted({*names, "last"})
    assert [known[code - 1] for code in codes[order].tolist()] == [*names, "last"]
    # Found in the cache, and learned again once a file has changed.
    again = flatout.data.csv(tmp_path / "*.csv", categories="k")
    assert again.schema == pipeline.schema
    _write(tmp_path / "b.csv", "k\nnew")
    assert "new" in flatout.data.csv(tmp_path / "*.csv", categories="k").schema.options[
        "categories"]["k"]  # fmt: skip


def test_texts_that_come_again_late_in_a_file_are_categories(tmp_path):
    users = [f"user {i % 60_000}" for i in range(130_000)]
    path = _write(tmp_path / "a.csv", "user,n\n" + "".join(f"{u},1\n" for u in users))
    first = (1 << 20) / len("user 12345,1\n")
    assert 60_000 < first < 100_000  # what is looked at first shows most of them once
    assert flatout.data.csv(path).schema.embedding_rows == {"user": 60_001}


def test_digits_that_name_things_are_kept_as_they_are_written(tmp_path):
    path = _write(tmp_path / "a.csv", "zip,n\n01234,1\n1234,2\n01234,3\n")
    pipeline = flatout.data.csv(path, categories=["zip"])
    assert pipeline.schema.options["categories"]["zip"] == ["01234", "1234"]
    assert _all(pipeline).inputs["zip"].tolist() == [1, 2, 1]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([f"C-{i}" for i in range(50)], "50 different texts in 50 rows"),
        (['"1,234.50"', '"2,000.00"'] * 20, "'1,234.50', which look like numbers or dates"),
        (["01.02.2020", "03.02.2020"] * 20, "look like numbers or dates"),
    ],
)
def test_texts_that_are_no_categories_want_a_word(tmp_path, values, words):
    rows = "".join(f"{value},{i}\n" for i, value in enumerate(values))
    path = _write(tmp_path / "a.csv", "t,n\n" + rows)
    with pytest.raises(DataError, match=f"column 't' holds .*{words}") as caught:
        flatout.data.csv(path)
    assert "unused=['t']" in caught.value.do
    assert _all(flatout.data.csv(path, unused="t")).inputs.tolist() == list(range(len(values)))
    left = flatout.data.csv(path, skip_text=True)
    assert [column.name for column in left.schema.columns] == ["n"]
    assert left.notes()[0] == "columns of text left out: t"
    assert flatout.data.csv(path, categories="t").schema.embedding_rows["t"] == 1 + len(set(values))


def test_texts_that_are_asked_for_are_not_left_out(tmp_path):
    rows = "".join(f"name {i},{i}\n" for i in range(100))
    path = _write(tmp_path / "a.csv", "id,x\n" + rows)
    assert flatout.data.csv(path, skip_text=True).schema.options["left_out"] == ["id"]
    for roles in ({"target": "id"}, {"inputs": ["id", "x"]}):
        with pytest.raises(DataError, match="column 'id' holds 100 different texts in 100 rows"):
            flatout.data.csv(path, skip_text=True, **roles)


def test_stacked_columns_have_defaults_of_their_own(tmp_path):
    path = _write(tmp_path / "a.csv", "a,b,y\n1,,0\n,2,1\n")
    pipeline = flatout.data.csv(path, target="y", stack=True, default={"a": 5, "b": -0.5})
    assert _all(pipeline).inputs.tolist() == [[1, -0.5], [5, 2]]
    pipeline.schema.dump(tmp_path / "schema.toml")
    again = flatout.data.csv(path, schema=tmp_path / "schema.toml")
    assert torch.equal(_all(again).inputs, _all(pipeline).inputs)
    row = flatout.data.table({"a": None, "b": 1}, schema=pipeline.schema)
    assert _all(row).inputs.tolist() == [[5, 1]]
    with pytest.raises(DataError, match="column 'b': expected float32, found a missing value"):
        _all(flatout.data.csv(path, target="y", stack=True, default={"a": 5}))


# ---- dates and missing values ----


def test_dates_become_days(tmp_path):
    path = _write(
        tmp_path / "a.csv",
        "day,at,zone,time,de\n"
        "1970-01-02,1970-01-03 06:00:00,1970-01-02T02:00:00+02:00,18:00:00,31.12.1970\n"
        ",1969-12-31 00:00:00.5,1970-01-02T00:00:00Z,00:00:00,01.01.1970\n",
    )
    pipeline = flatout.data.csv(path, dates={"de": "%d.%m.%Y"}, default={"day": -1})
    found = {name: days.tolist() for name, days in _all(pipeline).inputs.items()}
    half_a_second = float(np.float32(-1 + 0.5 / 86_400))
    assert found == {
        "day": [1, -1], "at": [2.25, half_a_second], "zone": [1, 1], "time": [0.75, 0],
        "de": [364, 0],
    }  # fmt: skip
    pipeline.schema.dump(tmp_path / "schema.toml")
    again = _all(flatout.data.csv(path, schema=tmp_path / "schema.toml"))
    assert {name: days.tolist() for name, days in again.inputs.items()} == found
    _write(path, path.read_text() + "1970-01-02,1970-01-03,1970-01-02T00:00Z,18:00:00,12.31.1970\n")
    with pytest.raises(DataError, match=r"'de': expected a date as '%d.%m.%Y', found '12\.31"):
        _all(flatout.data.csv(path, schema=tmp_path / "schema.toml"))
    _write(path, path.read_text().replace("12.31.1970", "1.1.1970").replace("1970-01-03,", "x,"))
    with pytest.raises(DataError, match="'at': expected a date as 'ISO 8601', found 'x'") as caught:
        _all(flatout.data.csv(path, schema=tmp_path / "schema.toml"))
    assert "a.csv:4" in caught.value.where


def test_what_may_stand_for_a_missing_value_is_told(tmp_path):
    lines = "".join(f"{i},{i}\n" for i in range(40))
    path = _write(tmp_path / "a.csv", "a,b\n?,1\n" + lines)
    with pytest.raises(DataError, match=r"expected int64, found '\?' \(missing=\['\?', ...\]"):
        _all(flatout.data.csv(path))
    assert _all(flatout.data.csv(path, missing="?", default=-1)).inputs["a"].tolist()[0] == -1
    with pytest.raises(DataError, match=r"no default for it \(default={'a': 0}\)"):
        _all(flatout.data.csv(path, missing="?"))


# ---- inspect and convert ----


def test_what_inspect_found_is_what_convert_writes(tmp_path):
    lines = "".join(f"C-{i},{CITIES[i % 3]},{i}.5,{'no' if i % 2 else 'yes'}\n" for i in range(50))
    path = _write(tmp_path / "a.csv", "id,city,n,label\n" + lines)
    report = inspect(path)
    assert "columns of text left out: id" in report.notes
    assert report.classes == {"no": 25, "yes": 25}
    report.write_schema(tmp_path / "schema.toml")
    for to in ("rows", "tfrecord", "parquet"):
        done = convert(path, tmp_path / f"a.{to}", schema=tmp_path / "schema.toml")
        assert "columns of text left out: id" in done.notes
        assert "columns of text left out: id" in str(done)
    schema = as_schema(tmp_path / "schema.toml", "csv")
    less = schema.model_copy(update={"columns": schema.columns[1:]})
    done = convert(path, tmp_path / "less.rows", schema=less)
    assert "columns that the schema does not name, left out: city" in done.notes
    with pytest.raises(DataError, match="column 'id' holds 50 different texts"):
        convert(path, tmp_path / "b.rows")
    done = convert(path, tmp_path / "b.rows", options={"unused": ["id"], "target": "n"})
    assert flatout.data.rows(tmp_path / "b.rows").schema.options["categories"]["city"] == CITIES
    with pytest.raises(DataError, match="csv has no option 'delimeter'"):
        inspect(path, delimeter=";")


def test_where_no_text_is_utf8_the_encoding_is_named(tmp_path):
    rows = "".join(f"Zürich{i % 3},{i},{i % 2}\n" for i in range(200))
    (tmp_path / "a.csv").write_bytes(b"town,n,y\n" + rows.encode("latin-1"))
    with pytest.raises(DataError, match=r"found the byte 0xfc .*encoding="):
        flatout.data.csv(tmp_path / "a.csv", target="y")
    with pytest.raises(DataError, match="encoding= if its texts"):
        flatout.data.csv(tmp_path / "a.csv", target="y", on_error="skip")
    assert flatout.data.csv(tmp_path / "a.csv", target="y", encoding="latin-1").samples == 200


# ---- whole numbers ----


def _only(pipeline, size=1000):
    return next(iter(pipeline.batch(size).batches(0)))


def test_whole_numbers_beyond_int64_are_no_floats(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("user,y\n" + "".join(f"{2**63 + row},{row % 2}\n" for row in range(100)))
    words = f"column 'user' holds whole numbers beyond int64, such as {2**63 + 99}"
    with pytest.raises(DataError, match=words) as caught:
        flatout.data.csv(path, target="y")
    assert "unused=['user']; or number the texts: categories=['user']" in caught.value.do
    batch = _only(flatout.data.csv(path, target="y", categories=["user"]))
    assert batch.inputs.tolist() == list(range(1, 101))
    with pytest.raises(DataError, match="these rows are no table"):
        flatout.data.table({"user": [2**64], "y": [0]})


def test_errors_for_a_late_large_number_or_fraction_advise_how_to_read_it(tmp_path):
    path = tmp_path / "a.csv"
    rows = "1234567,0\n" * 120_000
    for text, words, change in (
        ("1.5", "{'a': 'float32'}", lambda s: {"schema": s.with_dtypes({"a": "float32"})}),
        (str(2**63), "categories=['a']", lambda s: {"categories": ["a"], "target": "y"}),
    ):
        path.write_text(f"a,y\n{rows}{text},1\n")
        data = flatout.data.csv(path, target="y")
        with pytest.raises(DataError, match=f"expected int64, found '{text}'") as caught:
            list(data.batch(10_000).batches(0))
        assert words in caught.value.do
        again = flatout.data.csv(path, **change(data.schema))
        last = list(again.batch(10_000).batches(0))[-1].inputs[-1]
        assert last == (1.5 if "." in text else 2)


def test_lost_leading_zeros_are_named(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("zip,size,y\n" + "02116,7,0\n93418,8,1\n" * 40)
    data = flatout.data.csv(path, target="y")
    words = "column 'zip': 02116 is read as the number 2116, without its leading zeros"
    assert [words in note for note in data.notes()] == [True]
    assert "categories=['zip']" in data.notes()[0]
    kept = flatout.data.csv(path, target="y", categories=["zip"])
    assert kept.schema.options["categories"] == {"zip": ["02116", "93418"]}
    assert not any("leading" in note for note in kept.notes())
    assert not flatout.data.csv(path, target="y", unused=["zip"]).notes()


@pytest.mark.parametrize("kind", ["csv", "csv with a gap", "table", "parquet"])
def test_whole_numbers_that_float32_rounds_are_named(tmp_path, kind):
    pq = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    first = 2**24 + 1
    table = pa.table({"user": pa.array([first, 3.0] * 4, pa.float64()), "y": [0, 1] * 4})
    if kind == "table":
        data = flatout.data.table(table, target="y")
    elif kind == "parquet":
        pq.write_table(table, tmp_path / "a.parquet")
        data = flatout.data.parquet(tmp_path / "a.parquet", target="y")
    else:
        text = "user,y\n" + f"{first}{'.0' * (kind != 'csv')},0\n3,1\n" * 4
        (tmp_path / "a.csv").write_text(text)
        data = flatout.data.csv(tmp_path / "a.csv", target="y", stack=kind == "csv")
    words = f"column 'user': float32 rounds whole numbers above 16,777,216, such as {first}"
    assert [words in note for note in data.notes()] == [True]
    assert _only(data).inputs.max() == 2**24
    if kind == "csv":  # read as int64, the numbers are exact
        data = flatout.data.csv(tmp_path / "a.csv", target="y")
        assert not data.notes()
        assert _only(data).inputs.max() == first


# ---- damage ----


@pytest.mark.parametrize("bad", [b"\xff\xfe\n", b"\xe9t\xe9,3\n", b"\xff,1,2,3,4\n"])
@pytest.mark.parametrize("before", [0, 30, 300_000])
def test_a_row_that_is_no_utf8_and_has_other_fields_is_named_or_skipped(
    tmp_path, capfd, bad, before
):
    path = tmp_path / "a.csv"
    rows = [b"a,1,0\n", b"b,2,1\n", b"c,3,0\n"]
    path.write_bytes(b"t,n,y\n" + b"".join(rows) * (before // 3) + bad + b"".join(rows) * 10)
    data = flatout.data.csv(path, target="y")
    with pytest.raises(DataError, match=r"expected 3 fields, found \d") as caught:
        list(data.batch(10_000).batches(0))
    assert f":{before + 2} (byte " in caught.value.where
    data = flatout.data.csv(path, target="y", on_error="skip")
    assert sum(batch.size for batch in data.batch(10_000).batches(0)) == before + 30
    assert data.schema.options["categories"] == {"t": ["a", "b", "c"]}
    assert "ignored" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "source", ["csv", "libsvm", "tfrecord", "npy", "npz", "images", "idx", "parquet", "rows"]
)
def test_an_invalid_file_name_is_named_in_the_error(source):
    with pytest.raises(DataError, match=r"x{300}"):
        getattr(flatout.data, source)("x" * 300)
