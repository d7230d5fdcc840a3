"""What `inspect` tells of ids, field by field."""

import json
from collections import Counter

import numpy as np
import pytest

from flatout.data.inspection.inspect import inspect
from flatout.errors import DataError


def day(path, first, rows=3000):
    """Rows of one number and of ids: few, skewed, hardly any twice, half of them once."""
    draw = np.random.default_rng(first)
    few = draw.integers(0, 5, rows)
    skewed = 100 + first + (draw.random(rows) ** 4 * 300).astype(int)
    alone = 10**6 + first * rows + np.arange(rows)
    half = 10**9 + np.concatenate([np.arange(500, 1200), np.arange(rows - 700) % 400])
    ids = np.stack([np.full(rows, 1), 2 + few, skewed, alone, half], axis=1)
    with path.open("w") as file:
        for row in ids.tolist():
            file.write(f"1 1:0.5 {' '.join(f'{one}:1' for one in row[1:])}\n")
    return ids


def test_ids_are_told_field_by_field_against_another_day(tmp_path):
    before, ids = (day(tmp_path / f"{n}.svm", 40 * n) for n in (0, 1))
    report = inspect(tmp_path / "1.svm", against=tmp_path / "0.svm")
    names = [f"ids[{place}]" for place in range(5)]
    assert [one.name for one in report.fields] == names
    for place, one in enumerate(report.fields):
        counts = Counter(ids[:, place].tolist())
        old = set(before[:, place].tolist())
        new = [id for id in counts if id not in old]
        assert (one.values, one.ids) == (3000, len(counts))
        assert one.once == sum(number == 1 for number in counts.values())
        assert counts[one.top] == max(counts.values()) == round(one.top_share * 3000)
        most = sorted(counts.values(), reverse=True)
        assert sum(most[: one.half]) >= 1500 > sum(most[: one.half - 1])
        assert one.unknown_ids == len(new)
        assert one.unknown_share == pytest.approx(sum(counts[id] for id in new) / 3000)
    assert [one.todo for one in report.fields] == [
        "constant",
        "a row for each",
        "a row for each",
        'hash, few ids come again: vocabulary = "none", buckets = 1024',
        "admit = 2: 400 rows, 23.3% of the values unknown",
    ]
    alone = report.fields[3]
    assert (alone.unknown_ids, alone.unknown_share) == (3000, 1.0)
    plain = json.loads(json.dumps(report.as_dict()))["fields"]
    assert plain[3]["ids"] == 3000
    assert "ids[3]  3,000  100%" in str(report)


def test_without_another_day_nothing_is_unknown(tmp_path):
    day(tmp_path / "0.svm", 0)
    report = inspect(tmp_path / "0.svm")
    assert {one.unknown_ids for one in report.fields} == {None}


def test_rows_of_different_lengths_are_one_field(tmp_path):
    path = tmp_path / "ragged.svm"
    path.write_text("1 7:1 30000001:1\n0 7:1\n1 9:1 11:1 12:1\n")
    (field,) = inspect(path).fields
    assert (field.name, field.values, field.ids, field.top, field.once) == ("ids", 6, 5, 7, 4)


@pytest.mark.parametrize(
    ("text", "words"), [("", "expected a column 'site'"), (",name", "no column site int64, but")]
)
def test_another_day_with_other_columns_is_refused(tmp_path, text, words):
    values = text.replace("name", "x")
    (tmp_path / "a.csv").write_text(f"site,label{text}\n1,0{values}\n2,1{values}\n")
    (tmp_path / "b.csv").write_text(f"page,label{text}\n1,0{values}\n2,1{values}\n")
    given = {"target": "label", **({"categories": ["name"]} if text else {})}
    with pytest.raises(DataError, match=words):
        inspect(tmp_path / "a.csv", against=tmp_path / "b.csv", **given)


def test_texts_are_counted_but_not_compared_by_number(tmp_path):
    (tmp_path / "a.csv").write_text("site,label\nx,0\ny,1\nx,1\n")
    (tmp_path / "b.csv").write_text("site,label\nz,0\nx,1\nz,1\n")
    given = {"target": "label", "categories": ["site"]}
    (field,) = inspect(tmp_path / "a.csv", against=tmp_path / "b.csv", **given).fields
    assert (field.name, field.ids, field.unknown_ids) == ("site", 2, None)
