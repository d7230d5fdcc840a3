"""Names of classes: the same class has the same number, whatever folders there are."""

import pickle

import numpy as np
import pytest
from data_photographs import encoded, write

import flatout
from flatout.errors import DataError

COLORS = {"blue": 40, "green": 120, "red": 200, "white": 250}


def folders(root, names, each=2):
    for name in names:
        for number in range(each):
            shade = np.full((6, 6, 3), COLORS.get(name, 7) + number, np.uint8)
            write(root / name / f"{number}.png", encoded(shade, "PNG"))
    return root


def numbers(pipeline):
    """The class of each image, by its shade."""
    found = {}
    for batch in pipeline.batch(8).batches(0):
        for image, target in zip(batch.inputs, batch.targets, strict=True):
            shade = int(image[0, 0, 0]) // 10 * 10
            found[next(name for name, own in COLORS.items() if own == shade)] = int(target)
    return found


@pytest.fixture
def few(tmp_path):
    return flatout.data.images(folders(tmp_path / "few", ["red", "blue"]))


def test_fewer_folders_get_the_numbers_of_more(few):
    names = ("white", "red", "green", "blue")
    assert few.classes == ("blue", "red")
    assert numbers(few) == {"blue": 0, "red": 1}
    again = few.with_classes(names)
    assert again.classes == names
    assert again.schema.options["classes"] == list(names)
    assert numbers(again) == {"blue": 3, "red": 1}
    assert again.labels_range() == (1, 3)
    assert again.digest != few.digest
    assert few.with_classes(names) is again
    assert few.with_classes(("blue", "red")) is few


def test_the_numbers_hold_through_stages_caches_and_processes(few):
    names = ("red", "blue")
    seen = []
    staged = few.shuffle(seed=1).filter(lambda x, y: seen.append(int(y)) or True).cache("memory")
    for pipeline in (staged, few.split(0.5, by="order")[0].cache("disk"), few.repeat(2)):
        found = numbers(pipeline.with_classes(names))
        assert found.items() <= {"red": 0, "blue": 1}.items()
    assert sorted(seen[-4:]) == [0, 0, 1, 1]
    sent = pickle.loads(pickle.dumps(few.with_classes(names).origin))
    assert sent.targets().tolist() == [1, 1, 0, 0]


def test_a_class_that_is_not_known_is_named_with_what_to_do(tmp_path):
    odd = flatout.data.images(folders(tmp_path / "odd", ["red", "green", "white"]))
    with pytest.raises(DataError, match=r"green \(2\), white \(2\)(.|\n)*'red'") as error:
        odd.with_classes(("red",))
    assert "labels=False" in error.value.do
    # A folder without an image adds no class that anything belongs to.
    (tmp_path / "odd" / "aaa").mkdir()
    empty = flatout.data.images(tmp_path / "odd")
    assert empty.classes == ("aaa", "green", "red", "white")
    assert numbers(empty.with_classes(("green", "red", "white")))["green"] == 0


def test_a_split_by_class_is_not_drawn_again(few):
    part, _ = few.split(0.5, stratify=True)
    with pytest.raises(DataError, match=r"(?s)stratify.*schema=train.schema"):
        part.with_classes(("red", "blue"))


def test_numbers_alone_are_no_names(tmp_path):
    flatout.data.convert(str(folders(tmp_path / "few", ["red", "blue"])), tmp_path / "a.tfrecord")
    shards = flatout.data.images(tmp_path / "a-00000-of-00001.tfrecord", classes=["0", "1"])
    assert shards.classes is None
    assert shards.with_classes(("x", "y")) is shards
    assert flatout.data.arrays(np.zeros((3, 2))).shuffle().classes is None


def test_sources_that_are_mixed_have_one_number_for_a_class(tmp_path):
    all_three = flatout.data.images(folders(tmp_path / "a", ["blue", "green", "red"]))
    two = flatout.data.images(folders(tmp_path / "b", ["green", "red"]))
    for mixed in (flatout.data.mix(all_three, two), flatout.data.mix(two, all_three)):
        assert mixed.classes == ("blue", "green", "red")
        assert numbers(mixed) == {"blue": 0, "green": 1, "red": 2}
        assert numbers(mixed.with_classes(("red", "green", "blue")))["blue"] == 2
    other = flatout.data.images(folders(tmp_path / "c", ["red", "white"]))
    with pytest.raises(DataError, match=r"(?s)different classes.*classes=\['green', 'red', 'whi"):
        flatout.data.mix(two, other)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_texts_that_are_mixed_have_one_number(tmp_path, kind):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    csv = pytest.importorskip("pyarrow.csv")
    paths = []
    for colors in (["red", "green"], ["blue", "green"]):
        table = pa.table({"color": colors * 4, "x": range(8)})
        paths.append(tmp_path / f"{colors[0]}.{kind}")
        (csv.write_csv if kind == "csv" else pq.write_table)(table, paths[-1])
    read = getattr(flatout.data, kind)
    first = read(paths[0])
    with pytest.raises(DataError, match="texts of column 'color' have other numbers"):
        flatout.data.mix(first, read(paths[1]))
    mixed = flatout.data.mix(first, read(paths[1], schema=first.schema))
    found = [batch.inputs["color"] for batch in mixed.batch(4).batches(0)]
    assert sorted(np.concatenate(found).tolist()) == [0] * 4 + [1] * 8 + [2] * 4


def test_what_was_mixed_and_converted_has_its_names(tmp_path):
    pytest.importorskip("pyarrow")
    sources = []
    for labels in (["a", "c"], ["a", "b", "c"]):
        rows = [{"color": ("red", "tan")[i % 2], "y": labels[i % len(labels)]} for i in range(12)]
        sources.append(flatout.data.table(rows, target="y"))
    mixed = flatout.data.mix(*sources)
    flatout.data.convert(mixed, tmp_path / "a.rows")
    found = flatout.data.rows(tmp_path / "a.rows")
    assert found.classes == mixed.classes == ("a", "b", "c")
    assert found.meanings == mixed.meanings
    assert found.schema.embedding_rows == {"color": 3}
    targets = [next(one.batch(24).batches(0)).targets.tolist() for one in (found, mixed)]
    assert targets[0] == targets[1]


def test_numbers_that_are_categories_have_names_and_a_missing_target_has_none():
    pytest.importorskip("pyarrow")
    rows = {"x": [0, 1, 2, 3], "y": [10, None, 20, 10]}
    for fill in (-1, 99):
        read = flatout.data.table(rows, target="y", categories="y", default={"y": fill})
        assert read.classes == ("10", "20")
        for names in (("10", "20"), ("20", "10")):
            (batch,) = read.with_classes(names).batch(4).batches(0)
            want = [names.index("10"), fill, names.index("20"), names.index("10")]
            assert batch.targets.tolist() == want


@pytest.mark.parametrize(
    "names",
    [("train", "val"), ("Training", "test", "dev"), ("train",), ("Validation",), ("test", "val")],
)
def test_parts_of_the_data_are_no_classes(tmp_path, names):
    for name in names:
        folders(tmp_path / "root" / name, ["red", "blue"])
    root = str(tmp_path / "root")
    with pytest.raises(DataError, match="parts of the data") as error:
        flatout.data.images(root)
    assert all(f'images("{root}/{name}")' in error.value.do for name in names)
    with pytest.raises(DataError, match=f"{root}/{names[0]}"):
        flatout.data.inspect(root)
    with pytest.raises(DataError, match=f"{root}/{names[0]}"):
        flatout.data.convert(root, tmp_path / "x.tfrecord")
    assert flatout.data.images(root, classes=sorted(names)).classes == tuple(sorted(names))
    assert flatout.data.images(root, labels=False).samples == 4 * len(names)
    assert flatout.data.images(f"{root}/{names[0]}").classes == ("blue", "red")


def test_classes_may_be_called_like_parts(tmp_path):
    root = folders(tmp_path / "vehicles", ["bus", "train", "tram"])
    assert flatout.data.images(root).classes == ("bus", "train", "tram")
    root = folders(tmp_path / "parts", ["red"])
    for name in ("train", "test"):
        folders(root / name, ["red", "blue"])
    with pytest.raises(DataError, match="parts of the data"):
        flatout.data.images(root)
    with pytest.raises(DataError, match="one level further down"):
        flatout.data.images(f"{folders(tmp_path / 'flat', ['train', 'val'])}/*/*.png")
