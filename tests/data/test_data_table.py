"""Tables in memory, and the schema that makes one row of them what training has seen."""

from __future__ import annotations

import datetime
import pickle

import numpy as np
import pytest
import torch

import flatout.data
from flatout.data.pipeline import Pipeline
from flatout.errors import DataError

pa = pytest.importorskip("pyarrow")
from flatout.data.sources.arrow.table import TableRows  # noqa: E402

COLUMNS = {"city": ["Ulm", "Bonn", "Ulm"], "size": [1.5, 2.5, 3.5], "y": [0, 1, 0]}


def _all(pipeline):
    (whole,) = list(pipeline.batch(1000).batches(0))
    return whole


def _frame(kind):
    if kind == "dict":
        return COLUMNS
    if kind == "rows":
        return [dict(zip(COLUMNS, row, strict=True)) for row in zip(*COLUMNS.values(), strict=True)]
    if kind == "arrow":
        return pa.table(COLUMNS)
    return pytest.importorskip(kind).DataFrame(COLUMNS)


@pytest.mark.parametrize("kind", ["dict", "rows", "arrow", "polars", "pandas"])
def test_any_table_reads_as_a_file_of_it_does(tmp_path, kind):
    lines = "".join(f"{c},{s},{y}\n" for c, s, y in zip(*COLUMNS.values(), strict=True))
    (tmp_path / "a.csv").write_text("city,size,y\n" + lines)
    file = flatout.data.csv(tmp_path / "a.csv", target="y")
    table = flatout.data.table(_frame(kind), target="y")
    ours, theirs = _all(table), _all(file)
    assert ours.inputs["city"].tolist() == theirs.inputs["city"].tolist() == [2, 1, 2]
    assert torch.equal(ours.inputs["size"], theirs.inputs["size"])
    assert ours.inputs["size"].dtype == torch.float32
    assert torch.equal(ours.targets, theirs.targets)
    assert table.schema.embedding_rows == file.schema.embedding_rows
    by_schema = flatout.data.table(_frame(kind), schema=file.schema)
    assert torch.equal(_all(by_schema).inputs["city"], theirs.inputs["city"])
    other = pickle.loads(pickle.dumps(table.origin))
    assert other.digest == table.origin.digest
    assert flatout.data.table({"n": [1, 2]}).digest != flatout.data.table({"n": [1, 3]}).digest


def test_rows_come_by_number(tmp_path):
    numbers = np.arange(500)
    table = flatout.data.table({"n": numbers, "y": numbers % 2}, target="y")
    for batch in table.shuffle(seed=1).batch(64).batches(0):
        assert batch.inputs.tolist() == batch.indices.tolist()


def test_a_table_that_differs_in_one_value_has_a_cache_and_a_digest_of_its_own():
    numbers, other = np.arange(1_000), np.arange(1_000)
    other[501] = -7
    for values in (numbers, other):
        table = flatout.data.table({"n": values, "text": ["a", None] * 500})
        assert _all(table.cache("disk")).inputs["n"].tolist() == values.tolist()
    tables = [flatout.data.table({"n": values}) for values in (numbers, other)]
    assert tables[0].digest != tables[1].digest
    assert flatout.data.table({"n": numbers}).digest == tables[0].digest
    # A missing value is another one than what may stand behind it.
    missing = [pa.array([1, 0, 3], mask=np.array(mask, bool)) for mask in ([0, 1, 0], [0, 0, 1])]
    found = {flatout.data.table({"n": part}, default=0).digest for part in missing}
    assert len(found) == 2
    large = [
        TableRows(pa.table({"n": values}), tables[0].schema, digest_bytes=800)
        for values in (numbers, other)
    ]
    assert large[0].digest == large[1].digest
    caches = [Pipeline(rows).cache("disk") for rows in large]
    assert [_all(one).inputs[501].item() for one in caches] == [501, -7]


def test_one_row_to_predict(tmp_path):
    (tmp_path / "a.csv").write_text(
        "city;size;day;ok;y\nUlm;1,5;2026-01-01;true;no\nBonn;2;2026-01-02;false;yes\n"
    )
    trained = flatout.data.csv(tmp_path / "a.csv", target="y", stack=True)
    trained.schema.dump(tmp_path / "schema.toml")
    row = {"city": "Ulm", "size": 1.5, "day": datetime.date(2026, 1, 1), "ok": True}
    for day in (row["day"], "2026-01-01", "2026-01-01 00:00:00"):
        found = flatout.data.table({**row, "day": day}, schema=tmp_path / "schema.toml")
        one = _all(found)
        first = _all(trained)
        assert one.inputs["inputs"].tolist() == first.inputs["inputs"][:1].tolist()
        assert one.inputs["city"].tolist() == [2]
        assert one.targets is None
    schema = flatout.data.Schema.load(tmp_path / "schema.toml")
    assert schema.classes == ["no", "yes"]
    for city in ("Rome", None):
        assert _all(flatout.data.table({**row, "city": city}, schema=schema)).inputs["city"] == 0
    with pytest.raises(DataError, match="expected inputs float32 x3, found string"):
        flatout.data.table({**row, "size": "large"}, schema=schema)
    with pytest.raises(DataError, match="expected a column 'size', found city, day, ok"):
        flatout.data.table({k: v for k, v in row.items() if k != "size"}, schema=schema)
    with pytest.raises(
        DataError, match="'day': expected a date as 'ISO 8601', found 'soon'"
    ) as caught:
        _all(flatout.data.table({**row, "day": "soon"}, schema=schema))
    assert caught.value.where == "row 0 of the table"


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([1, 2], "expected a table, found list"),
        ("a.csv", "expected a table, found str"),
        ({"a": [1], "b": [1, 2]}, "these rows are no table"),
        ({"a": [1, "x"]}, "these rows are no table"),
        ({"a": []}, "expected columns of numbers|holds no rows"),
    ],
)
def test_what_is_no_table(rows, match):
    with pytest.raises(DataError, match=match):
        flatout.data.table(rows)


def test_an_empty_text_among_numbers_is_a_missing_value(tmp_path):
    columns = {"day": ["01.02.2020", ""], "x": [1.5, ""], "y": ["", 2], "n": ["", ""]}
    (tmp_path / "a.csv").write_text("day,x,y,n\n01.02.2020,1.5,,\n,,2,\n9.9.2020,,1,3\n")
    options = {"target": "y", "dates": {"day": "%d.%m.%Y"}, "default": -1}
    pipeline = flatout.data.csv(tmp_path / "a.csv", **options)
    wanted = _all(pipeline)
    for rows in (columns, [{name: values[i] for name, values in columns.items()} for i in (0, 1)]):
        found = _all(flatout.data.table(rows, schema=pipeline.schema))
        assert found.targets.tolist() == wanted.targets.tolist()[:2] == [-1, 2]
        for name, values in found.inputs.items():
            assert values.tolist() == wanted.inputs[name].tolist()[:2]
    with pytest.raises(DataError, match="a missing value, and there is no default") as caught:
        _all(flatout.data.table({"x": [1.5, ""]}))
    assert caught.value.where == "row 1 of the table"
    pd = pytest.importorskip("pandas")
    empty = pd.DataFrame({"day": ["01.02.2020"], "x": [""], "y": [1], "n": [""]})
    found = _all(flatout.data.table(empty, schema=pipeline.schema))
    assert (found.inputs["x"].tolist(), found.inputs["n"].tolist()) == ([-1], [-1])


def test_a_key_that_a_sample_lacks_is_named_with_its_row():
    rows = flatout.data.table([{"a": number, "b": 1} for number in range(6)])

    def without(inputs):
        return {"a": inputs["a"]} if inputs["a"] == 4 else inputs

    with pytest.raises(DataError, match="expected 'a', 'b', as in the first one; found") as caught:
        list(rows.map(without).batch(6).batches(0))
    assert caught.value.where == "row 4 of the table"
