import json
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from data_made_up import MadeUp, same
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import dump_svmlight_file

import flatout
from flatout.data.conversion import convert as verb
from flatout.data.conversion.convert import convert
from flatout.data.conversion.job import balanced
from flatout.data.mixture import mix
from flatout.data.pipeline import Pipeline
from flatout.data.randomness import order
from flatout.data.reading.block import Block, Ragged, offsets_of
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.schema import Column, Schema
from flatout.data.sources.records.rows import rows
from flatout.errors import DataError
from flatout.kernels.example import crc32c

READERS = {
    "tfrecord": lambda done: flatout.data.tfrecord(done.files, schema=done.schema),
    "parquet": lambda done: flatout.data.parquet(done.files, schema=done.schema),
    "rows": lambda done: rows(done.files[0]),
}


def read(done):
    return READERS[done.to](done)


def batches(pipeline, size=16):
    return list(pipeline.batch(size).batches(0))


def agree(ours, theirs):
    return len(ours) == len(theirs) and all(map(same, ours, theirs))


def contents(folder):
    """Bytes of all files below, by name, without locks."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file() and "lock" not in path.name
    }


def svm(path, rows=200, features=50, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.random((rows, features)) * (rng.random((rows, features)) < 0.2)
    dump_svmlight_file(x, rng.integers(0, 2, rows), str(path), zero_based=False)
    return path


class Held:
    """Rows of a block in memory."""

    random = True
    digest = "held"

    def __init__(self, columns, schema):
        self.columns, self.schema = columns, schema
        first = next(iter(columns.values()))
        self.rows = len(first.offsets) - 1 if isinstance(first, Ragged) else len(first)

    def take(self, numbers, buffers):
        from flatout.data.reading.block import take_values

        columns = {name: take_values(values, numbers) for name, values in self.columns.items()}
        return Block(columns, numbers)

    def targets(self):
        return None

    def lengths(self):
        return None

    def where(self, number):
        return f"held:{number}"

    def describe(self):
        return "held"

    def notes(self):
        return []


# ---- what comes back ----


@pytest.mark.parametrize("to", ["tfrecord", "parquet", "rows"])
@pytest.mark.parametrize("layout", ["dense", "fixed", "ragged"])
def test_libsvm_comes_back_as_it_was(tmp_path, to, layout):
    source = flatout.data.libsvm(svm(tmp_path / "a.svm"), layout=layout)
    done = convert(source, tmp_path / f"out/a.{to}")
    assert (done.rows, done.found, done.to) == (200, 0, to)
    assert agree(batches(read(done)), batches(source))
    if to != "rows":
        assert read(done).schema.dumps() == Path(done.schema).read_text()


@pytest.mark.parametrize("to", ["tfrecord", "parquet", "rows"])
def test_paths_of_other_formats(tmp_path, to):
    (tmp_path / "a.csv").write_text(
        "size,label,w\n" + "".join(f"{i / 8},{i % 3},{i}\n" for i in range(40))
    )
    categories = "\t".join(f"{i:08x}" for i in range(26))
    (tmp_path / "b.tsv").write_text(
        "".join("\t".join([str(i % 2), *["7"] * 13]) + f"\t{categories}\n" for i in range(30))
    )
    table = convert(tmp_path / "a.csv", tmp_path / f"a.{to}")
    assert agree(
        batches(read(table)), batches(flatout.data.csv(tmp_path / "a.csv", target="label"))
    )
    clicks = convert(tmp_path / "b.tsv", tmp_path / f"b.{to}")
    assert agree(batches(read(clicks)), batches(flatout.data.criteo(tmp_path / "b.tsv")))
    again = convert(table.files[0], tmp_path / f"c.{to}", schema=table.schema)
    assert agree(batches(read(again)), batches(read(table)))


EVERY = {
    "bool": np.array([True, False, True]),
    "uint8": np.arange(3, dtype=np.uint8),
    "int8": np.array([-1, 0, 1], np.int8),
    "int16": np.array([-300, 0, 300], np.int16),
    "int32": np.array([-(2**31), 0, 2**31 - 1], np.int32),
    "int64": np.array([-(2**63), 0, 2**63 - 1]),
    "float16": np.array([0.1, -0.0, 65504], np.float16),
    "float32": np.array([0.1, np.nan, -np.inf], np.float32),
    "float64": np.array([0.1, 1e300, -0.0]),
}


@pytest.mark.parametrize("to", ["tfrecord", "parquet", "rows"])
@pytest.mark.parametrize("dtype", EVERY)
@pytest.mark.parametrize("form", ["number", "matrix", "ragged"])
def test_every_dtype_and_shape(tmp_path, to, dtype, form):
    values = EVERY[dtype]
    column = Column(name="x", dtype=dtype, ragged=form == "ragged")
    if form == "matrix":
        values = np.stack([values, values[::-1]] * 3).reshape(3, 2, 3)
        column = Column(name="x", dtype=dtype, shape=(2, 3))
    elif form == "ragged":
        values = Ragged(values, np.array([0, 2, 2, 3]))
    source = Pipeline(Held({"x": values}, Schema(format="held", columns=(column,))))
    if to == "tfrecord" and dtype == "float64":
        with pytest.raises(DataError, match="float64 would lose digits"):
            convert(source, tmp_path / f"a.{to}")
        return
    done = convert(source, tmp_path / f"a.{to}")
    reading = read(done)
    if to == "parquet":  # NaN is asked for
        reading = flatout.data.parquet(done.files, schema=done.schema, allow_nan=True)
    (ours,), (theirs,) = batches(reading), batches(source)
    if to == "tfrecord" and dtype in ("bool", "int8", "int16", "float16"):
        assert torch.equal(ours.inputs, theirs.inputs.to(ours.inputs.dtype))
        assert ours.inputs.dtype in (torch.int64, torch.float32)
    elif to == "tfrecord" and dtype == "uint8" and form == "number":
        assert ours.inputs.tolist() == theirs.inputs.tolist()
    else:
        assert ours.inputs.dtype == theirs.inputs.dtype
        assert ours.inputs.numpy().tobytes() == theirs.inputs.numpy().tobytes()


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=40),
    shards=st.integers(1, 5),
    seed=st.integers(0, 9),
    to=st.sampled_from(["tfrecord", "parquet", "rows"]),
)
def test_ragged_rows_in_any_order_and_any_shards(tmp_path_factory, lengths, shards, seed, to):
    ids = Ragged(np.arange(sum(lengths)), offsets_of(lengths))
    schema = Schema(
        format="held",
        columns=(
            Column(name="ids", dtype="int64", ragged=True, pad=-1, lengths="n"),
            Column(name="y", dtype="float32", role="target"),
            Column(name="w", dtype="float32", role="weight"),
        ),
    )
    numbers = np.arange(len(lengths), dtype=np.float32)
    source = Pipeline(Held({"ids": ids, "y": numbers, "w": numbers + 1}, schema))
    folder = tmp_path_factory.mktemp("any")
    given = {} if to == "rows" else {"shards": min(shards, len(lengths))}
    done = convert(source, folder / f"a.{to}", shuffle=seed, **given)
    ours = [batch[:3] for batch in batches(read(done))]
    theirs = [batch[:3] for batch in batches(source.shuffle(seed=seed))]
    for one, other in zip(ours, theirs, strict=True):
        assert one[0]["ids"].tolist() == other[0]["ids"].tolist()
        assert one[0]["n"].tolist() == other[0]["n"].tolist()
        assert one[1].tolist() == other[1].tolist()
        assert one[2].tolist() == other[2].tolist()


def test_a_pipeline_is_written_as_its_stages_make_it(tmp_path):
    def double(inputs, target):
        return (inputs["x"] * 2, inputs["ids"]), target

    def is_even(inputs, target):
        return bool(target % 2 == 0)

    made = Pipeline(MadeUp(90)).filter(is_even).map(double).shuffle(seed=4)
    train, _ = made.split(0.5, seed=1)
    done = convert(train, tmp_path / "a.tfrecord", shards=2)
    (ours,), (theirs,) = batches(read(done), 100), batches(train, 100)
    assert ours.inputs["inputs[0]"].tolist() == theirs.inputs[0].tolist()
    assert ours.inputs["inputs[1]"].tolist() == theirs.inputs[1].tolist()
    assert ours.targets.tolist() == theirs.targets.tolist()
    two = mix(Pipeline(MadeUp(30)), Pipeline(MadeUp(20)), seed=3)
    mixed = convert(two, tmp_path / "b.rows")
    assert agree([b._replace(indices=None) for b in batches(rows(mixed.files[0]))],
                 [b._replace(indices=None) for b in batches(two)])  # fmt: skip


def test_arrays_and_datasets(tmp_path):
    x, y = torch.randn(20, 4), torch.arange(20)
    for number, source in enumerate(
        (
            flatout.data.arrays(x, y).shuffle(seed=1),
            flatout.data.torch_dataset(torch.utils.data.TensorDataset(x, y)).shuffle(seed=1),
        )
    ):
        done = convert(source, tmp_path / f"{number}.tfrecord")
        (batch,) = batches(flatout.data.tfrecord(done.files), 20)
        wanted = torch.from_numpy(order(20, 1, 0))
        assert torch.equal(batch.inputs, x[wanted])
        assert torch.equal(batch.targets, y[wanted])


def test_functions_that_draw_give_the_same_again(tmp_path):
    def noisy(inputs, target):
        return inputs["x"] + torch.randn(3), target

    first, second = (
        convert(Pipeline(MadeUp(50)).map(noisy), tmp_path / f"{n}.rows") for n in range(2)
    )
    assert agree(batches(rows(first.files[0])), batches(rows(second.files[0])))


def test_vectors_that_are_equally_long_by_chance(tmp_path):
    def late(inputs, target):
        return torch.ones(3 if target < 300 else 4), target

    def early(inputs, target):
        return torch.ones(3 if 0 < target < 300 else 4), target

    # Rows that cost more out of their order: only the first are looked at.
    source = Pipeline(MadeUp(400, classes=400, random=False))
    with pytest.raises(DataError, match=r"(?s)expected inputs float32 x3, found float32.*made up:"):
        convert(source.map(late), tmp_path / "a.tfrecord")
    done = convert(source.map(early), tmp_path / "b.tfrecord")
    assert agree(batches(read(done)), batches(source.map(early)))


# ---- shards ----


def test_shards_are_even_named_and_in_the_manifest(tmp_path):
    source = flatout.data.libsvm(svm(tmp_path / "a.svm", rows=101))
    done = convert(source, tmp_path / "out" / "day.tfrecord", shards=7)
    names = [Path(file).name for file in done.files]
    assert names == [f"day-{i:05}-of-00007.tfrecord" for i in range(7)]
    manifest = json.loads((tmp_path / "out" / "_day.tfrecord.json").read_text())
    assert manifest["complete"] is True
    counts = [shard["rows"] for shard in manifest["shards"]]
    assert sum(counts) == 101
    assert max(counts) - min(counts) == 1
    for shard, file in zip(manifest["shards"], done.files, strict=True):
        data = Path(file).read_bytes()
        assert (shard["bytes"], shard["crc32c"]) == (len(data), f"{crc32c(data):08x}")
        assert flatout.data.tfrecord(file).samples == shard["rows"]
    # Who reads the folder reads the shards alone.
    assert flatout.data.tfrecord(tmp_path / "out").samples == 101
    assert sorted(os.listdir(tmp_path / "out"))[:2] == ["_day.tfrecord.json", "_day.tfrecord.toml"]


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ({"rows_per_shard": 30}, 7),
        ({"rows_per_shard": 1000}, 1),
        ({"shard_bytes": 10_000}, None),
        ({}, 1),
    ],
)
def test_how_many_shards(tmp_path, sizes, count):
    done = convert(svm(tmp_path / "a.svm"), tmp_path / "a.tfrecord", **sizes)
    if count is None:
        found = [os.path.getsize(file) for file in done.files]
        assert max(found) < 12_000
        assert min(found) > 8_000
    else:
        assert len(done.files) == count


@pytest.mark.parametrize("to", ["tfrecord", "parquet", "rows"])
def test_the_same_data_give_the_same_bytes_with_any_number_of_threads(tmp_path, to, monkeypatch):
    source, ids = tmp_path / "a.svm", [f"{number}:0.5" for number in range(2, 3000)]
    lines = [f"{row % 2} 1:{row} {' '.join(ids[: 2000 + 3 * row])}\n" for row in range(300)]
    source.write_text("".join(lines))  # as rows they are three pieces
    for threads in (1, 5):
        monkeypatch.setattr("flatout.data.conversion.job.usable_cpus", lambda count=threads: count)
        given = {} if to == "rows" else {"shards": 3}
        pipeline = flatout.data.libsvm(source, layout="ragged")
        convert(pipeline, tmp_path / f"{threads}/a.{to}", shuffle=1, **given)
    assert contents(tmp_path / "1") == contents(tmp_path / "5")


def test_many_small_files_become_few(tmp_path):
    for number in range(12):
        svm(tmp_path / f"in-{number:02}.svm", rows=5, seed=number)
    schema = flatout.data.libsvm(tmp_path / "in-*.svm").schema
    done = convert(str(tmp_path / "in-*.svm"), tmp_path / "all.tfrecord", shards=2, schema=schema)
    assert (done.rows, len(done.files)) == (60, 2)
    source = flatout.data.libsvm(tmp_path / "in-*.svm", schema=schema)
    assert agree(batches(read(done)), batches(source))


# ---- order ----


def test_shuffle_is_that_of_the_pipeline(tmp_path):
    source = Pipeline(MadeUp(100))
    done = convert(source, tmp_path / "a.tfrecord", shuffle=7, shards=3)
    (batch,) = batches(read(done), 100)
    assert batch.inputs["x"][:, 0].long().tolist() == order(100, 7, 0).tolist()
    with pytest.raises(DataError, match="shuffles already"):
        convert(source.shuffle(seed=1), tmp_path / "b.tfrecord", shuffle=7)


@pytest.mark.parametrize("shuffle", [None, 5])
def test_spread_classes(tmp_path, shuffle):
    class Skewed(MadeUp):
        def take(self, numbers, buffers):
            block = super().take(numbers, buffers)
            return Block({**block.columns, "y": (numbers >= 900).astype(np.int64)}, numbers)

    source = Pipeline(Skewed(1000))
    done = convert(source, tmp_path / "a.tfrecord", balance="spread", shuffle=shuffle, shards=5)
    for file in done.files:
        (batch,) = batches(flatout.data.tfrecord(file, schema=done.schema), 200)
        assert int(batch.targets.sum()) == 20
        gaps = np.diff(np.flatnonzero(batch.targets.numpy()))
        assert set(gaps.tolist()) <= {9, 10, 11}
    (whole,) = batches(read(done), 1000)
    numbers = whole.inputs["x"][:, 0].long().numpy()
    assert sorted(numbers.tolist()) == list(range(1000))
    rare = numbers[numbers >= 900]
    assert (np.diff(rare) > 0).all() == (shuffle is None)


@pytest.mark.parametrize("to", ["tfrecord", "rows"])
@pytest.mark.parametrize(("sampling", "each"), [("over", 90), ("under", 10)])
def test_equally_many_rows_of_each_class(tmp_path, to, sampling, each):
    class Skewed(MadeUp):
        def take(self, numbers, buffers):
            block = super().take(numbers, buffers)
            return Block({**block.columns, "y": (numbers >= 90).astype(np.int64)}, numbers)

    given = {"balance": "class", "sampling": sampling, "shuffle": 3}
    given |= {"shards": 5} if to == "tfrecord" else {}
    done, again = (
        convert(Pipeline(Skewed(100)), tmp_path / name / f"a.{to}", **given) for name in "ab"
    )
    (whole,) = batches(read(done), 200)
    assert np.bincount(whole.targets).tolist() == [each, each]
    (other,) = batches(read(again), 200)
    assert same(whole.inputs["x"], other.inputs["x"])
    times = np.bincount(whole.inputs["x"][:, 0].long(), minlength=100)
    assert times[90:].tolist() == [each // 10] * 10
    assert set(times[:90].tolist()) == ({1} if sampling == "over" else {0, 1})
    assert f"2 classes x {each} rows an epoch" in str(done)
    if to == "tfrecord":
        for file in done.files:
            (batch,) = batches(flatout.data.tfrecord(file, schema=done.schema), 200)
            assert int(batch.targets.sum()) * 2 == batch.size


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60))
def test_every_stretch_holds_the_classes_evenly(labels):
    labels = np.array(labels)
    turn = balanced(labels)
    assert sorted(turn.tolist()) == list(range(len(labels)))
    for label in set(labels.tolist()):
        seen = np.cumsum(labels[turn] == label)
        share = (labels == label).mean()
        # Each class counts off by less than half a row, and one of another class.
        assert np.abs(seen - share * np.arange(1, len(labels) + 1)).max() <= len(set(labels)) / 2


def test_only_whole_numbers_are_classes(tmp_path):
    columns = (Column(name="x", dtype="float32", role="target"), Column(name="y", dtype="int64"))
    values = {"x": np.ones(4, np.float32), "y": np.arange(4)}
    source = Pipeline(Held(values, Schema(format="held", columns=columns)))
    with pytest.raises(DataError, match="whole numbers as targets, found 'x' of dtype float32"):
        convert(source, tmp_path / "a.tfrecord", balance="class")
    unlabeled = Schema(format="held", columns=columns[1:])
    with pytest.raises(DataError, match="one target a sample; found none"):
        convert(
            Pipeline(Held({"y": np.arange(4)}, unlabeled)), tmp_path / "a.rows", balance="class"
        )


# ---- images ----


def pictures(folder, count=6):
    from PIL import Image

    rng = np.random.default_rng(0)
    for number in range(count):
        kind = folder / ("cat" if number % 2 else "dog")
        kind.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 255, (8 + number, 9, 3), np.uint8)
        Image.fromarray(pixels).save(kind / f"{number}.jpg")
    return folder


def test_images_are_packed_as_they_are(tmp_path):
    folder = pictures(tmp_path / "pets")
    done = convert(folder, tmp_path / "pets.tfrecord", shards=2)
    schema = Schema.model_validate(__import__("tomllib").loads(Path(done.schema).read_text()))
    assert schema.options["classes"] == ["cat", "dog"]
    source = flatout.data.tfrecord(done.files, schema=schema)
    block = source.origin.take(np.arange(6), Buffers())
    image, path = block.columns["image"], block.columns["path"]
    for row in range(6):
        name = path.values[path.offsets[row] : path.offsets[row + 1]].tobytes().decode()
        data = image.values[image.offsets[row] : image.offsets[row + 1]].tobytes()
        assert data == (folder / name).read_bytes()
        assert schema.options["classes"][int(block.columns["label"][row])] == Path(name).parent.name


def test_images_without_classes_have_no_label(tmp_path):
    folder = pictures(tmp_path / "pets") / "cat"
    done = convert(folder, tmp_path / "pets.tfrecord")
    assert [c.name for c in read(done).schema.columns] == ["image", "path"]
    (folder / "more").mkdir()
    (folder / "1.jpg").rename(folder / "more" / "1.jpg")
    with pytest.raises(DataError, match=r"3\.jpg is in no class folder"):
        convert(folder, tmp_path / "b.tfrecord", format="images")


def test_bad_images_are_skipped_and_told(tmp_path):
    folder = pictures(tmp_path / "pets")
    (folder / "cat" / "empty.jpg").write_bytes(b"")
    with pytest.raises(DataError, match="empty"):
        convert(folder, tmp_path / "a.tfrecord")
    done = convert(folder, tmp_path / "a.tfrecord", on_error="skip")
    assert done.rows == 6
    assert "1 bad row skipped" in done.notes[0]
    assert "empty.jpg" in done.notes[0]


def test_decoded_images_go_to_a_row_cache(tmp_path):
    folder = pictures(tmp_path / "pets")
    source = flatout.data.images(folder, size=8)
    done = convert(source, tmp_path / "pets.rows")
    assert agree(batches(rows(done.files[0])), batches(source))
    assert rows(done.files[0]).schema.options == {"classes": ["cat", "dog"]}
    again = convert(folder, tmp_path / "again.rows", schema=source.schema)
    assert agree(batches(rows(again.files[0])), batches(source))


# ---- going on ----


def marks(files):
    return {file: (os.stat(file).st_ino, os.stat(file).st_mtime_ns) for file in files}


@pytest.mark.parametrize("to", ["tfrecord", "parquet"])
def test_shards_that_are_good_stay_and_others_are_written_again(tmp_path, to):
    source = svm(tmp_path / "a.svm")
    first = convert(source, tmp_path / f"out/a.{to}", shards=5)
    wanted, before = contents(tmp_path / "out"), marks(first.files)
    os.unlink(first.files[1])
    with open(first.files[3], "r+b") as file:
        file.seek(40)
        byte = file.read(1)
        file.seek(40)
        file.write(bytes([byte[0] ^ 1]))
    (tmp_path / "out" / f".a-00004-of-00005.{to}.part").write_bytes(b"what a kill has left")
    again = convert(source, tmp_path / f"out/a.{to}", shards=5)
    assert (again.rows, again.found) == (200, 120)
    assert contents(tmp_path / "out") == wanted
    after = marks(first.files)
    assert [at for at, file in enumerate(first.files) if before[file] != after[file]] == [1, 3]
    assert convert(source, tmp_path / f"out/a.{to}", shards=5).found == 200


@pytest.mark.parametrize("to", ["tfrecord", "rows"])
def test_other_settings_and_other_data_are_refused_unless_overwritten(tmp_path, to):
    source, target = svm(tmp_path / "a.svm"), tmp_path / f"out/a.{to}"
    given = {} if to == "rows" else {"shards": 5}
    convert(source, target, **given)
    wanted = contents(tmp_path / "out")
    with pytest.raises(DataError, match=r"is here already: shuffle was None, now 3"):
        convert(source, target, shuffle=3, **given)
    if to == "tfrecord":
        with pytest.raises(DataError, match=r"shards was 5, now 4"):
            convert(source, target, shards=4)
    svm(tmp_path / "a.svm", seed=1)
    with pytest.raises(DataError, match="its source was another, or has changed since"):
        convert(source, target, **given)
    assert contents(tmp_path / "out") == wanted
    done = convert(source, target, overwrite=True, **({} if to == "rows" else {"shards": 2}))
    assert agree(batches(read(done)), batches(flatout.data.libsvm(source)))
    visible = {name for name in os.listdir(tmp_path / "out") if "lock" not in name}
    if to == "rows":
        assert visible == {"a.rows"}
    else:
        assert visible == {"_a.tfrecord.json", "_a.tfrecord.toml"} | {
            f"a-0000{i}-of-00002.tfrecord" for i in range(2)
        }


def test_shards_of_somebody_else_are_left_alone(tmp_path):
    (tmp_path / "a-00000-of-00002.tfrecord").write_bytes(b"mine")
    with pytest.raises(DataError, match="no manifest tells how it was made"):
        convert(svm(tmp_path / "a.svm"), tmp_path / "a.tfrecord")
    assert (tmp_path / "a-00000-of-00002.tfrecord").read_bytes() == b"mine"
    (tmp_path / "_b.tfrecord.json").write_text("{")
    with pytest.raises(DataError, match="the manifest cannot be read"):
        convert(tmp_path / "a.svm", tmp_path / "b.tfrecord")
    assert convert(tmp_path / "a.svm", tmp_path / "b.tfrecord", overwrite=True).rows == 200
    (tmp_path / "c.rows").mkdir()
    with pytest.raises(DataError, match="something else is here already"):
        convert(tmp_path / "a.svm", tmp_path / "c.rows")
    for name in ("c.rows", "d.rows.part"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "rows.bin").write_bytes(b"mine")
        with pytest.raises(DataError, match="Flatout has"):
            convert(tmp_path / "a.svm", tmp_path / name[:6], overwrite=True)
        assert (tmp_path / name / "rows.bin").read_bytes() == b"mine"


def test_a_folder_next_to_an_overwritten_target_stays(tmp_path):
    (tmp_path / ".a.rows.old").mkdir()
    (tmp_path / ".a.rows.old" / "mine").write_bytes(b"mine")
    source = svm(tmp_path / "a.svm")
    for shuffle in (None, 3, 4):
        convert(source, tmp_path / "a.rows", overwrite=True, shuffle=shuffle)
    assert (tmp_path / ".a.rows.old" / "mine").read_bytes() == b"mine"
    names = sorted(name for name in os.listdir(tmp_path) if "lock" not in name)
    assert names == [".a.rows.old", "a.rows", "a.svm"]


def test_a_damaged_row_cache_is_made_again(tmp_path):
    source = svm(tmp_path / "a.svm")
    convert(source, tmp_path / "a.rows")
    path = tmp_path / "a.rows" / "rows.bin"
    data = bytearray(path.read_bytes())
    data[77] ^= 4
    path.write_bytes(data)
    assert convert(source, tmp_path / "a.rows").found == 0
    assert agree(batches(rows(tmp_path / "a.rows")), batches(flatout.data.libsvm(source)))


def test_two_processes_do_not_write_the_same_shards(tmp_path):
    from flatout.data.conversion.shards import ShardFiles

    source = svm(tmp_path / "a.svm")
    with (
        ShardFiles(tmp_path, "a", ".tfrecord", 1).locked(),
        pytest.raises(DataError, match="another"),
    ):
        convert(source, tmp_path / "a.tfrecord")
    convert(source, tmp_path / "a.tfrecord")


DRIVER = """
import json, os, signal, sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import flatout.data.conversion.convert as verb
from data_made_up import MadeUp
from flatout.data.conversion import shards
from flatout.data.pipeline import Pipeline

folder, to, moments = Path(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])

class Slow(MadeUp):
    def take(self, numbers, buffers):
        time.sleep(0.00025 * len(numbers))
        return super().take(numbers, buffers)

def note(words):
    number = os.open(folder / "reported", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(number, (words + "\\n").encode())
    os.close(number)

def run(target):
    given = {} if to == "rows" else {"shards": 6}
    return verb.convert(
        Pipeline(Slow(600)), target, balance="class", shuffle=1, progress=False, **given
    )

save = shards.Manifest.save
def saves(self, path):
    save(self, path)
    note(json.dumps([shard._asdict() for shard in self.shards]))

run(folder / "whole" / f"a.{to}")
started = 0
for moment in moments:
    child = os.fork()
    if child == 0:
        shards.Manifest.save = saves
        run(folder / "killed" / f"a.{to}")
        os._exit(0)
    time.sleep(moment)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    reported = [json.loads(line) for line in (folder / "reported").read_text().splitlines()] if (
        folder / "reported").exists() else []
    print(json.dumps({"killed": os.WIFSIGNALED(status), "reported": reported[-1:]}), flush=True)
done = run(folder / "killed" / f"a.{to}")
print(json.dumps({"found": done.found}))
"""


def driven(tmp_path, to, moments):
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(Path(__file__).parent), tmp_path, to,
         json.dumps(moments)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


# One after the other, each going on where the last one was killed.
MOMENTS = [0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.05, 0.04, 0.03]


@pytest.mark.parametrize("to", ["tfrecord", pytest.param("parquet", marks=pytest.mark.slow)])
def test_a_kill_loses_no_shard_that_was_reported(tmp_path, to):
    *kills, end = driven(tmp_path, to, MOMENTS)
    assert sum(kill["killed"] for kill in kills) >= 5
    last = kills[-1]["reported"]
    reported = last[0] if last else []
    assert end["found"] >= sum(shard["rows"] for shard in reported)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


STEPS = """
import json, os, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import flatout.data.conversion.convert as verb
from data_made_up import COLUMNS, MadeUp
from flatout.data.conversion import shards
from flatout.data.pipeline import Pipeline

folder, to = Path(sys.argv[2]), sys.argv[3]
ragged, overwrites = json.loads(sys.argv[4]), json.loads(sys.argv[5])
columns = COLUMNS if ragged else COLUMNS[::2]

def run(target, shuffle=1):
    given = {} if to == "rows" else {"shards": 3}
    source = Pipeline(MadeUp(60, columns=columns))
    given |= {"shuffle": shuffle, "overwrite": overwrites}
    return verb.convert(source, target, progress=False, **given)

def dies_at(step):
    seen = iter(range(step))
    def dying(call):
        def called(*given, **named):
            if next(seen, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*given, **named)
        return called
    for name in ("replace", "rename", "unlink", "fsync", "truncate", "posix_fallocate"):
        setattr(os, name, dying(getattr(os, name)))

def files(target):
    return {path.name: path.read_bytes() for path in sorted(target.parent.rglob("*"))
            if path.is_file() and path.name != "lock"}

run(folder / "whole" / f"a.{to}")
step, before, again = 0, 0, True
while again:
    target = folder / f"{step}" / f"a.{to}"
    if overwrites:
        run(target, shuffle=2)
    child = os.fork()
    if child == 0:
        dies_at(step)
        run(target)
        os._exit(0)
    again = os.WIFSIGNALED(os.waitpid(child, 0)[1])
    left = {name for name in (os.listdir(target.parent) if target.parent.exists() else ())
            if name[0] not in "._" and not name.endswith(".part")}
    assert left <= {path.name for path in (folder / "whole").iterdir()}, left
    found = run(target).found
    assert found >= before or to == "rows" or overwrites, (step, found, before)
    before = found
    assert files(folder / "whole" / "a") == files(target), step
    assert sorted(os.listdir(target.parent)) == sorted(os.listdir(folder / "whole")), step
    step += 1
print(step)
"""


@pytest.mark.parametrize("overwrites", [False, True])
@pytest.mark.parametrize(("to", "ragged"), [("tfrecord", True), ("rows", False)])
def test_a_kill_at_every_step(tmp_path, to, ragged, overwrites):
    given = [json.dumps(ragged), json.dumps(overwrites)]
    done = subprocess.run(
        [sys.executable, "-c", STEPS, str(Path(__file__).parent), tmp_path, to, *given],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 8


# ---- full disks ----


@pytest.fixture
def small_files():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("to", ["tfrecord", "parquet"])
def test_a_shard_that_cannot_be_written_leaves_the_others(tmp_path, to, small_files):
    lengths = np.where(np.arange(100) < 75, 1, 2000)
    ids = Ragged(np.random.default_rng(0).integers(0, 2**60, lengths.sum()), offsets_of(lengths))
    schema = Schema(format="held", columns=(Column(name="ids", dtype="int64", ragged=True),))
    source = Pipeline(Held({"ids": ids}, schema))
    source.schema  # noqa: B018
    small_files(100_000)
    with pytest.raises(DataError, match="File too large; 3 of 4 shards are done and stay"):
        convert(source, tmp_path / f"out/a.{to}", shards=4)
    names = set(os.listdir(tmp_path / "out"))
    assert {f"a-0000{i}-of-00004.{to}" for i in range(3)} < names
    assert not any("00003" in name for name in names)
    small_files(resource.RLIM_INFINITY)
    done = convert(source, tmp_path / f"out/a.{to}", shards=4)
    assert done.found == 75
    assert agree(batches(read(done)), batches(source))


def test_a_row_cache_that_cannot_be_written(tmp_path, small_files):
    source = flatout.data.libsvm(svm(tmp_path / "a.svm"))
    source.batch(1).samples  # noqa: B018
    small_files(10_000)
    with pytest.raises(DataError, match="cannot be written: File too large"):
        convert(source, tmp_path / "a.rows")
    small_files(resource.RLIM_INFINITY)
    assert convert(source, tmp_path / "a.rows").rows == 200


def test_what_does_not_fit_is_refused_before_it_is_begun(tmp_path, monkeypatch):
    class Usage:
        free = 1000

    monkeypatch.setattr(verb.shutil, "disk_usage", lambda path: Usage())
    with pytest.raises(
        DataError, match=r"about 5\d\.\d kB are to be written, but 1\.0 kB are free"
    ):
        convert(svm(tmp_path / "a.svm"), tmp_path / "out/a.tfrecord")
    assert not list((tmp_path / "out").glob("a-*"))


@pytest.mark.root
@pytest.mark.parametrize(
    ("to", "layout", "when"),
    [
        ("tfrecord", "dense", "a-00002-of-00010.tfrecord"),
        ("rows", "dense", "."),
    ],
)
def test_a_disk_that_becomes_full(tmp_path, to, layout, when):
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=True)
    try:
        source = flatout.data.libsvm(svm(tmp_path / "a.svm", rows=2000), layout=layout)
        given = {} if to == "rows" else {"shards": 10}

        free_to_take = threading.Lock()

        def fill(inputs, target):
            # Someone else takes the room once it runs.
            if (disk / when).exists() and free_to_take.acquire(blocking=False):
                free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize
                (disk / "other").write_bytes(bytes(free - 60_000))
            return inputs, target

        with pytest.raises(DataError, match="the disk is full"):
            convert(source.map(fill), disk / f"a.{to}", **given)
        (disk / "other").write_bytes(b"")
        done = convert(source.map(fill), disk / f"a.{to}", **given)
        assert done.rows == 2000
        assert done.found > 0 or to == "rows"
        assert agree(batches(read(done)), batches(source.map(lambda x, y: (x, y))))
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


# ---- streams ----


class Coming:
    """A stream of made-up rows, in blocks of 7."""

    digest = "coming"

    def __init__(self, rows, fails_at=None):
        self.inner = MadeUp(rows)
        self.schema, self.rows, self.fails_at = self.inner.schema, None, fails_at

    def blocks(self, epoch, buffers):
        for start in range(0, self.inner.rows, 7):
            if self.fails_at is not None and start >= self.fails_at:
                raise DataError("the writer has gone")
            yield self.inner.take(np.arange(start, min(start + 7, self.inner.rows)), buffers)

    def describe(self):
        return "a stream"

    def notes(self):
        return ["nothing was skipped"]


@pytest.mark.parametrize("sizes", [{"rows_per_shard": 10}, {"shard_bytes": 500}, {}])
@pytest.mark.parametrize("to", ["tfrecord", "parquet"])
def test_a_stream_is_written_as_it_comes(tmp_path, to, sizes):
    done = convert(Pipeline(Coming(45)), tmp_path / f"a.{to}", **sizes)
    assert done.rows == 45
    assert [Path(file).name for file in done.files][:1] == [f"a-00000.{to}"]
    assert len(done.files) == {"rows_per_shard": 5, "shard_bytes": len(done.files)}.get(
        next(iter(sizes), ""), 1
    )
    if "shard_bytes" in sizes:
        assert len(done.files) > 1
    assert done.notes == ["nothing was skipped"]
    assert agree(batches(read(done)), batches(Pipeline(MadeUp(45))))
    with pytest.raises(DataError, match="a stream cannot be gone on with"):
        convert(Pipeline(Coming(45)), tmp_path / f"a.{to}", **sizes)
    assert convert(Pipeline(Coming(20)), tmp_path / f"a.{to}", overwrite=True).rows == 20


def test_a_stream_that_ends_badly_leaves_what_came(tmp_path):
    with pytest.raises(DataError, match="the writer has gone"):
        convert(Pipeline(Coming(45, fails_at=28)), tmp_path / "a.tfrecord", rows_per_shard=10)
    manifest = json.loads((tmp_path / "_a.tfrecord.json").read_text())
    assert not manifest["complete"]
    assert [shard["rows"] for shard in manifest["shards"]] == [10, 10]


@pytest.mark.parametrize(
    ("change", "given", "words"),
    [
        (lambda p: p.map(lambda x, y: x), {}, "without stages"),
        (lambda p: p, {"shuffle": 1}, "come once"),
        (lambda p: p, {"to": "rows"}, "come once"),
        (lambda p: p, {"shards": 2}, "the number of rows"),
    ],
)
def test_what_a_stream_cannot(tmp_path, change, given, words):
    with pytest.raises(DataError, match=words):
        convert(change(Pipeline(Coming(5))), tmp_path / "a.tfrecord", **given)


# ---- wrong arguments ----


@pytest.mark.parametrize(
    ("target", "given", "words"),
    [
        ("a.txt", {}, "expected one of the formats tfrecord, parquet, rows; found txt"),
        ("a.tfrecord", {"shards": 0}, "shards: expected an int of at least 1"),
        ("a.tfrecord", {"shards": 2, "rows_per_shard": 5}, "at most one of"),
        ("a.tfrecord", {"shards": 201}, "201 shards are more than there are rows: 200"),
        ("a.rows", {"shards": 2}, "a row cache is one folder"),
        ("a.tfrecord", {"balance": "rows"}, "balance: expected 'class'"),
        ("a.tfrecord", {"balance": "class", "sampling": "both"}, "sampling: expected 'over'"),
        ("a.tfrecord", {"sampling": "under"}, "is for balance='class'"),
        ("folder.tfrecord", {}, "the target is a folder"),
    ],
)
def test_arguments_that_make_no_sense(tmp_path, target, given, words):
    (tmp_path / "folder.tfrecord").mkdir()
    with pytest.raises(DataError, match=words):
        convert(svm(tmp_path / "a.svm"), tmp_path / target, **given)


def test_batches_are_no_rows(tmp_path):
    with pytest.raises(DataError, match="convert writes rows, and batch makes batches"):
        convert(Pipeline(MadeUp(9)).batch(3), tmp_path / "a.rows")
    with pytest.raises(DataError, match="has its schema already"):
        convert(Pipeline(MadeUp(9)), tmp_path / "a.rows", format="csv")


def test_bad_rows(tmp_path):
    path = svm(tmp_path / "a.svm", rows=20)
    lines = path.read_text().splitlines()
    lines[4] = "1 7:x"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"a\.svm:5"):
        convert(path, tmp_path / "a.tfrecord")
    done = convert(path, tmp_path / "a.tfrecord", on_error="skip")
    assert done.rows == 19
    assert "a.svm:5" in done.notes[0]
    folder = convert(path, tmp_path / "a.rows", on_error="skip")
    assert rows(folder.files[0]).notes()[0] == f"when it was converted: {done.notes[0]}"


@pytest.mark.parametrize(
    "change",
    [
        {"shards": [{"file": "../x", "rows": 1, "bytes": 1, "crc32c": "0"}]},
        {"shards": [{"file": "/etc/passwd", "rows": 1, "bytes": 1, "crc32c": "0"}]},
        {"shards": [{"file": "x", "rows": "1", "bytes": 1, "crc32c": "0"}]},
        {"shards": [{"file": "x", "rows": -1, "bytes": 1, "crc32c": "0"}]},
        {"shards": [{"file": 7, "rows": 1, "bytes": 1, "crc32c": "0"}]},
        {"shards": 7},
        {"settings": []},
        {"schema": None},
        {"notes": [7]},
        {"more": 7},
    ],
)
def test_a_made_up_manifest_is_told(tmp_path, change):
    convert(Pipeline(MadeUp(20)), tmp_path / "made.tfrecord")
    manifest = tmp_path / "_made.tfrecord.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **change}))
    with pytest.raises(DataError, match="the manifest cannot be read"):
        convert(Pipeline(MadeUp(20)), tmp_path / "made.tfrecord")


def test_a_manifest_nested_without_end_or_no_file_is_told(tmp_path):
    convert(Pipeline(MadeUp(20)), tmp_path / "made.tfrecord")
    manifest = tmp_path / "_made.tfrecord.json"
    manifest.write_text("[" * 100_000)
    with pytest.raises(DataError, match="the manifest cannot be read"):
        convert(Pipeline(MadeUp(20)), tmp_path / "made.tfrecord")
    manifest.unlink()
    os.mkfifo(manifest)
    with pytest.raises(DataError, match="it is no file"):
        convert(Pipeline(MadeUp(20)), tmp_path / "made.tfrecord")
