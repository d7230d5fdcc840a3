import os

import pytest

from flatout.data.reading.schema import Column, Schema, as_schema
from flatout.data.sources.formats import schema_format
from flatout.errors import DataError

CLICKS = Schema(
    format="libsvm",
    columns=(
        Column(name="label", dtype="int64", role="target"),
        Column(name="ids", dtype="int64", ragged=True, lengths="many"),
        Column(name="values", dtype="float32", shape=(39,), default=0.5),
    ),
    options={"base": 1},
)


def test_a_schema_survives_toml(tmp_path):
    path = tmp_path / "schema.toml"
    CLICKS.dump(path)
    assert as_schema(path, "libsvm") == CLICKS
    assert as_schema(str(path), "libsvm") == CLICKS
    assert as_schema(CLICKS, "libsvm") is CLICKS


def test_a_dict_needs_no_format():
    found = as_schema({"columns": [{"name": "x", "dtype": "float32"}]}, "csv")
    assert found.format == "csv"
    assert found["x"].role == "input"


def test_roles_change():
    changed = CLICKS.with_target("values")
    assert [column.name for column in changed.of_role("target")] == ["values"]
    assert changed["label"].role == "input"
    with pytest.raises(DataError, match="no column 'clicks': the columns are ids, label, values"):
        CLICKS.with_roles(clicks="target")


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ([{"name": "x", "dtype": "text"}], "columns.0.dtype.*found 'text'"),
        ([{"name": "x", "dtype": "int64", "shape": [0]}], "sizes in shape must be at least 1"),
        ([{"name": "x", "dtype": "int64", "ragged": True, "shape": [2]}], "so it has no shape"),
        ([{"name": "x", "dtype": "int64", "lengths": "n"}], "has lengths, but is not ragged"),
        ([{"name": "x", "dtype": "int64"}] * 2, "several columns are called 'x'"),
        ([{"name": "x", "dtype": "int64", "kind": 1}], "columns.0.kind"),
        ([], "columns"),
    ],
)
def test_what_makes_no_sense_is_named(columns, words):
    with pytest.raises(DataError, match=words):
        as_schema({"columns": columns}, "csv")


def test_files_that_are_no_schema_are_named(tmp_path):
    broken = tmp_path / "broken.toml"
    broken.write_text("format = ")
    with pytest.raises(DataError, match="no TOML") as caught:
        as_schema(broken, "csv")
    assert str(broken) in str(caught.value)
    with pytest.raises(DataError, match="cannot read the schema"):
        as_schema(tmp_path / "absent.toml", "csv")
    with pytest.raises(DataError, match="expected a schema of csv, found one of libsvm"):
        as_schema(CLICKS, "csv")


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "[" * 5000 + "]" * 5000,
        "x = " + "{x = " * 5000 + "1" + "}" * 5000,
        ".".join("x" * 30_000) + " = 1",
        "[" + ".".join("x" * 30_000) + "]",
        ".".join(['"x"'] * 30_000) + " = 1",
    ],
    ids=range(5),
)
def test_text_that_is_nested_without_end_is_refused_at_once(tmp_path, text):
    (tmp_path / "schema.toml").write_text(text)
    with pytest.raises(DataError, match="not nested so deeply"):
        as_schema(tmp_path / "schema.toml", "csv")
    with pytest.raises(DataError, match="not nested so deeply"):
        schema_format(tmp_path / "schema.toml")


def test_a_schema_that_is_no_file_is_never_waited_for(tmp_path):
    os.mkfifo(tmp_path / "schema.toml")
    with pytest.raises(DataError, match="a schema is a file"):
        as_schema(tmp_path / "schema.toml", "csv")
