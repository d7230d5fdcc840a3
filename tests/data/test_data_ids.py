"""Ids that are rows of a table: the ladder, growing, merging, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from flatout import data
from flatout.data import IdMap, Ids
from flatout.data.ids import counting
from flatout.data.reading.schema import Column, Schema
from flatout.errors import DataError
from flatout.kernels.ids import IdNumbers, hash_ids
from flatout.save import save_ids

ONE = np.zeros(1, np.int64)


def column(*ids, width=3, ragged=False):
    shape = {"ragged": True} if ragged else {"shape": (width,)}
    return Column(name="ids", dtype="int64", ids=ids, **shape)


def counts(ids, of):
    found = counting.IdCounts(of)
    found.add(np.asarray(ids))
    return found.items()


def grow(map, of, ids):
    return map.grown(of, counts(ids, of))


def rows(map, ids):
    ids = np.asarray(ids)
    out = np.empty_like(ids)
    assert map.rows_of(ids, out) == -1
    return out.tolist()


def written(tmp_path, days):
    """LibSVM files of rows of three ids each."""
    for name, ids in days.items():
        lines = [f"{n % 2} " + " ".join(f"{i}:1" for i in row) for n, row in enumerate(ids)]
        (tmp_path / f"{name}.svm").write_text("\n".join(lines) + "\n")
    return tmp_path


def schema(*ids, **more):
    label = Column(name="label", dtype="float32", role="target")
    values = Column(name="values", dtype="float32", shape=(3,))
    columns = (label, column(*ids), values)
    return Schema(format="libsvm", columns=columns, options={"base": 0, **more})


def test_the_ladder():
    of = column(Ids(buckets=1, admit=2))
    map, growth = grow(IdMap.empty(of), of, [[7, 7, 9], [-5, 9, 9], [2**62, 8, 8]])
    # Row 0 is no id's, row 1 is for those without one; then the ids seen most often, by id.
    assert rows(map, [[9, 7, 8], [-5, 2**62, 123]]) == [[2, 3, 4], [1, 1, 1]]
    assert (growth.new, growth.gone, growth.waiting, map.size) == (3, 0, 2, 5)
    map, growth = grow(map, of, [[-5, 10, 10]])
    assert rows(map, [[9, 7, 8], [-5, 10, 1]]) == [[2, 3, 4], [5, 6, 1]]
    assert growth.old_rows.tolist() == growth.new_rows.tolist() == [0, 3, 4, 2, 1]


def test_hashed_ids_and_how_many_collide():
    of = column(Ids(vocabulary="none", buckets=4))
    ids = np.arange(12).reshape(4, 3)
    map, growth = grow(IdMap.empty(of), of, ids)
    expected = 1 + (hash_ids(ids.reshape(-1), 0) % np.uint64(4)).astype(np.int64)
    assert rows(map, ids) == expected.reshape(4, 3).tolist()
    assert (growth.hashed, growth.collide) == (12, 12 - len(set(expected)))
    assert map.size == 5


def test_places_are_fields_of_their_own():
    of = column(Ids(places=(1,), vocabulary="none", buckets=5), Ids(by_place=True, buckets=1))
    map, _ = grow(IdMap.empty(of), of, [[1, 1, 1], [1, 2, 2]])
    found = rows(map, [[1, 1, 1], [2, 2, 2]])
    assert found[0][0] != found[0][2]  # the same number in two fields is two ids
    assert 1 <= found[0][1] <= 5
    assert found[1][0] == 6  # unknown there
    assert found[1][2] == 10
    assert map.size == 11


def test_forgotten_ids_leave_their_rows_to_new_ones():
    of = column(Ids(forget=2))
    map, _ = grow(IdMap.empty(of), of, [[1, 2, 3]])
    map, growth = grow(map, of, [[1, 1, 1]])
    assert growth.gone == 0
    map, growth = grow(map, of, [[1, 4, 5]])  # 2 and 3 were not seen in two trainings
    assert (growth.new, growth.gone, map.size) == (2, 2, 5)
    assert rows(map, [[1, 4, 5]]) == [[2, 3, 4]]
    assert growth.new_rows.tolist() == [0, 2, 1]


def test_the_ids_seen_most_often_keep_their_rows():
    of = column(Ids(most=2))
    map, growth = grow(IdMap.empty(of), of, [[1, 1, 1], [2, 2, 3]])
    assert (growth.new, growth.waiting) == (2, 1)
    map, growth = grow(map, of, [[3, 3, 3]])  # now 1 three times, 2 twice, 3 four times
    assert rows(map, [[1, 2, 3]]) == [[2, 1, 3]]
    assert (growth.new, growth.gone, map.size) == (1, 1, 4)


def test_a_fixed_vocabulary():
    of = column(Ids(vocabulary="fixed"))
    map, _ = grow(IdMap.empty(of), of, [[1, 2, 3]])
    map, growth = grow(map, of, [[1, 2, 4]])
    assert growth.new == 0
    assert rows(map, [[3, 4, 5]]) == [[4, 1, 1]]


def test_other_buckets_move_the_rows():
    before = column(Ids(buckets=1))
    map, _ = grow(IdMap.empty(before), before, [[1, 2, 3]])
    after = column(Ids(buckets=10))
    map, growth = grow(map, after, [[1, 2, 4]])
    assert rows(map, [[1, 2, 3]]) == [[11, 12, 13]]
    moves = dict(zip(growth.old_rows.tolist(), growth.new_rows.tolist(), strict=True))
    assert moves == {0: 0, 2: 11, 3: 12, 4: 13}


def test_the_same_map_in_any_order_of_parts():
    of = column(Ids(admit=2, most=40))
    ids = np.random.default_rng(0).integers(0, 60, (200, 3))
    whole, _ = grow(IdMap.empty(of), of, ids)
    parts = counting.IdCounts(of)
    for part in (ids[150:], ids[:40], ids[40:150]):
        parts.merge(counts(part, of))
    again, _ = IdMap.empty(of).grown(of, parts.items())
    assert again.digest == whole.digest


def test_two_days_are_merged():
    of = column(Ids())
    first, _ = grow(IdMap.empty(of), of, [[1, 2, 3]])
    second, _ = grow(IdMap.empty(of), of, [[3, 5, 5]])
    both = first.merged(second)
    assert rows(both, [[1, 2, 3], [5, 5, 9]]) == [[2, 3, 4], [5, 5, 1]]
    assert both.counts.tolist() == [1, 1, 2, 2]
    with pytest.raises(DataError, match="merged where their schema is the same"):
        first.merged(IdMap.empty(column(Ids(buckets=2))))


def test_as_data():
    of = column(Ids(admit=2))
    map, _ = grow(IdMap.empty(of), of, [[1, 2, 2]])
    header, arrays = map.as_data()
    header = json.loads(json.dumps(header))
    assert IdMap.of_data("ids", header, arrays).digest == map.digest
    with pytest.raises(DataError, match=r"format 9, and this version of Flatout reads up to 1"):
        IdMap.of_data("ids", {**header, "format": 9}, arrays)
    with pytest.raises(DataError, match="cannot be read"):
        IdMap.of_data("ids", header, {**arrays, "rows": arrays["rows"][:1]})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "float32"}, "its dtype is int64"),
        ({"role": "unused"}, "role input"),
        ({"shape": (2, 2)}, "vectors or numbers"),
        ({"ids": [{"places": [5]}, {}]}, "place 5"),
        ({"ids": [{"places": [0]}, {"places": [0]}, {}]}, "place 0"),
        ({"ids": [{}, {}]}, "expected one entry of ids without places"),
        ({"ids": [{"vocabulary": "none", "buckets": 0}]}, "wants buckets"),
        ({"ids": [{"admit": 0}]}, "greater than or equal to 1"),
        ({"shape": (), "ragged": True, "ids": [{"by_place": True}]}, "places are no fields"),
    ],
)
def test_a_schema_that_makes_no_sense(change, words):
    given = {"name": "ids", "dtype": "int64", "shape": (3,), "ids": [{}]}
    with pytest.raises(DataError, match=words):
        data.as_schema({"columns": [{**given, **change}]}, "libsvm")


def test_a_schema_comes_back_from_toml(tmp_path):
    stated = schema().with_ids(ids=[Ids(places=(0,), buckets=7), Ids(admit=3)])
    stated.dump(tmp_path / "schema.toml")
    assert Schema.load(tmp_path / "schema.toml") == stated
    with pytest.raises(DataError, match="no column 'idz'"):
        schema().with_ids(idz=Ids())


def test_batches_have_rows_in_any_way_to_read_them(tmp_path):
    ids = np.random.default_rng(1).integers(0, 10**9, (60, 3))
    ids.sort()
    files = written(tmp_path, {"day": ids})
    stated = schema(Ids(admit=1))
    source = data.libsvm(files / "day.svm", schema=stated)
    (of,) = source.id_columns
    found = source.count_ids([of])
    map, _ = IdMap.empty(of).grown(of, found["ids"].items())
    shuffled = source.with_ids({"ids": map}).shuffle(seed=3).batch(16)
    one, two = (
        [batch.inputs["ids"] for batch in shuffled.options(threads=n).batches(0)] for n in (1, 2)
    )
    assert all((a == b).all() for a, b in zip(one, two, strict=True))
    kept = shuffled.with_stages([s for s in shuffled.stages if type(s).__name__ != "Shuffle"])
    whole = np.concatenate([batch.inputs["ids"].numpy() for batch in kept.batches(0)])
    assert whole.tolist() == rows(map, ids)
    ranks = [source.count_ids([of], rank, 3)["ids"] for rank in range(3)]
    for other in ranks[1:]:
        ranks[0].merge(other.items())
    assert IdMap.empty(of).grown(of, ranks[0].items())[0].digest == map.digest
    assert source.with_ids({"ids": map}).digest != source.digest
    train, held_out = source.split(0.5, by="order")
    of_train = train.count_ids([of])["ids"].items()
    assert set(of_train.ids) == set(ids[:30].reshape(-1))
    assert set(data.mix(train, held_out).count_ids([of])["ids"].items().ids) == set(ids.reshape(-1))


def test_ids_are_counted_as_they_stand_in_text(tmp_path):
    ids = [[1, 7, 90], [7, 8, 90]]
    files = written(tmp_path, {"day": ids})
    plain = data.libsvm(files / "day.svm", layout="fixed").schema
    assert plain.options["base"] == 1  # in which LibSVM counts where ids are places
    source = data.libsvm(files / "day.svm", schema=plain.with_ids(ids=Ids()))
    (of,) = source.id_columns
    assert source.count_ids([of])["ids"].items().ids.tolist() == [1, 7, 8, 90]
    data.convert(source, tmp_path / "day.rows", progress=False)
    assert data.rows(tmp_path / "day.rows").count_ids([of])["ids"].items().ids[-1] == 90


def test_an_id_without_a_row_is_named(tmp_path):
    files = written(tmp_path, {"one": [[1, 2, 3]], "two": [[1, 2, 3], [1, 2, 77]]})
    stated = schema(Ids(buckets=0), features=5)
    (of,) = data.libsvm(files / "one.svm", schema=stated).id_columns
    map, _ = grow(IdMap.empty(of), of, [[1, 2, 3]])
    source = data.libsvm(files / "two.svm", schema=stated).with_ids({"ids": map}).batch(2)
    with pytest.raises(DataError, match="id 77 in column 'ids', place 2, has no row") as error:
        list(source.batches(0))
    assert error.value.where.endswith("two.svm:2 (byte 14)")
    assert "buckets = 1" in error.value.do


def test_columns_that_are_not_there():
    table = data.table({"ids": np.arange(4), "y": np.zeros(4)}, target="y")
    map = IdMap.empty(Column(name="site", dtype="int64", ids=(Ids(),)))
    with pytest.raises(DataError, match="maps the ids of column 'site', and these data have no"):
        table.with_ids({"site": map})
    floats = data.table({"site": np.zeros(4), "y": np.zeros(4)}, target="y")
    with pytest.raises(DataError, match="are int64, and here it is float32"):
        floats.with_ids({"site": map})


def test_other_fields_are_refused():
    of = column(Ids(by_place=True))
    map, _ = grow(IdMap.empty(of), of, [[1, 2, 3]])
    with pytest.raises(DataError, match="are of 3 fields in rows of 3, and the schema states 1"):
        grow(map, column(Ids()), [[1, 2, 3]])


def test_more_ids_than_memory_are_refused(monkeypatch):
    monkeypatch.setattr(counting, "available_bytes", lambda: 1 << 20)
    found = counting.IdCounts(column(Ids()))
    found.add(np.arange(900))
    with pytest.raises(DataError, match=r"900 different ids so far.*1\.0 MB are free"):
        found.add(np.arange(90_000))


def test_a_stream_is_not_counted(tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe")
    label = Column(name="label", dtype="float32", role="target")
    for one, refused in ((Ids(), True), (Ids(vocabulary="none", buckets=9), False)):
        values = Column(name="values", dtype="float32", shape=(3,))
        stated = Schema(format="libsvm", columns=(label, column(one), values))
        source = data.fifo(tmp_path / "pipe", schema=stated)
        if refused:
            with pytest.raises(DataError, match="a stream cannot be read twice"):
                source.count_ids(source.id_columns)
        else:
            assert source.count_ids(source.id_columns) is None


def test_ragged_rows_and_an_empty_map():
    of = column(Ids(), ragged=True)
    assert counts([5, 5, 6], of).numbers.tolist() == [2, 1]
    map = IdMap.empty(of)
    assert rows(map, [1, 2]) == [1, 1]
    assert IdNumbers().items().ids.tolist() == []


@pytest.mark.parametrize(
    "ladder",
    [
        [Ids()],
        [Ids(places=(1,), vocabulary="none", buckets=7), Ids(by_place=True, buckets=3, admit=2)],
        [Ids(vocabulary="none", buckets=99_991)],
    ],
    ids=["one field", "fields", "hashed"],
)
def test_the_page_on_serving_gives_the_same_rows(tmp_path, ladder):
    page = (Path(__file__).parents[2] / "docs" / "data" / "serve_ids.md").read_text()
    title = 'python title="rows_of.py"'
    code = page.split(title)[1].split("```")[0]
    names = {}
    exec(code, names)
    draw = np.random.default_rng(0)
    ids, new = draw.integers(-(2**63), 2**63 - 1, (2, 200, 3))
    ids[:, 0] %= 50
    of = column(*ladder)
    map, _ = grow(IdMap.empty(of), of, ids)
    header, arrays = map.as_data()
    tensors = {f"ids.{name}": torch.from_numpy(array) for name, array in arrays.items()}
    save_ids(tmp_path / "model.safetensors", {"columns": {"ids": header}}, tensors)
    rows_of = names["RowsOf"](tmp_path / "model.ids.safetensors", "ids")
    asked = np.concatenate([ids, new])
    assert rows_of(torch.from_numpy(asked)).tolist() == rows(map, asked)
