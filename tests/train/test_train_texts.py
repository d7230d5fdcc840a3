"""A table's texts have the numbers that they had in training, or nothing is computed with them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import flatout
from flatout.errors import DataError

pytest.importorskip("pyarrow")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.city = nn.Embedding(8, 4)
        self.out = nn.Linear(5, 3)

    def forward(self, n, city):
        return self.out(torch.cat([n[:, None], self.city(city)], dim=1))


def _trainer():
    torch.manual_seed(0)
    return flatout.Trainer(Model(), loss="cross_entropy", lr=0.01, say=lambda line: None)


def _write(path, cities, kinds):
    rows = [f"{cities[i % len(cities)]},{i}.5,{kinds[i % len(kinds)]}\n" for i in range(24)]
    path.write_text("city,n,y\n" + "".join(rows))
    return path


def test_texts_that_are_numbered_otherwise_are_refused(tmp_path):
    train = flatout.data.csv(_write(tmp_path / "a.csv", "abcd", ["x", "y", "z"]), target="y")
    path = _write(tmp_path / "b.csv", "bd", ["z", "y"])
    other = flatout.data.csv(path, target="y")
    trainer = _trainer()
    with pytest.raises(DataError, match="texts of column 'city' have other numbers") as caught:
        trainer.fit(train, validation_data=other, epochs=1, progress=False)
    assert "schema=train.schema" in caught.value.do
    same = flatout.data.csv(path, schema=train.schema)
    trainer.fit(train, validation_data=same, epochs=1, progress=False)
    wanted = trainer.evaluate(same)
    trainer.save(tmp_path / "model.safetensors")
    # What travels with the model tells it in another process as well.
    later = _trainer()
    later.load(tmp_path / "model.safetensors")
    assert later.classes == ("x", "y", "z")
    for verb in (later.evaluate, later.predict):
        with pytest.raises(DataError, match="texts of column 'city' have other numbers"):
            verb(other)
    assert later.evaluate(same) == wanted
    row = {"city": "d", "n": 2}
    assert later.predict(flatout.data.table(row, schema=train.schema)).shape == (1, 3)
    with pytest.raises(DataError, match="texts of column 'city' have other numbers"):
        later.predict(flatout.data.table(row))


def test_classes_that_are_texts_get_the_models_numbers(tmp_path):
    train = flatout.data.csv(_write(tmp_path / "a.csv", "ab", ["x", "y", "z"]), target="y")
    fewer = flatout.data.csv(_write(tmp_path / "b.csv", "ab", ["z", "y"]), target="y")
    assert fewer.schema.classes == ["y", "z"]
    trainer = _trainer()
    trainer.fit(train, validation_data=fewer, epochs=1, progress=False)
    by_schema = flatout.data.csv(tmp_path / "b.csv", schema=train.schema)
    assert trainer.evaluate(fewer) == trainer.evaluate(by_schema)
    strange = flatout.data.csv(_write(tmp_path / "c.csv", "ab", ["x", "new"]), target="y")
    with pytest.raises(DataError, match="not trained on: new"):
        trainer.evaluate(strange)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.Embedding(12, 3)

    def forward(self, ids, values):
        return (self.weights(ids) * values[..., None]).sum(1)


def _libsvm(path, lowest):
    rows = [f"{row % 3} {max(lowest, row % 5)}:1 {5 + row % 5}:2\n" for row in range(24)]
    path.write_text("".join(rows))
    return path


def test_indexes_with_another_base_are_refused(tmp_path):
    train = flatout.data.libsvm(_libsvm(tmp_path / "train.svm", 0), layout="fixed")
    path = _libsvm(tmp_path / "other.svm", 1)
    other = flatout.data.libsvm(path, layout="fixed")
    assert (train.schema.options["base"], other.schema.options["base"]) == (0, 1)
    assert "no row has the index 0, so indexes count from 1" in " ".join(other.notes())
    torch.manual_seed(0)
    trainer = flatout.Trainer(Sparse(), loss="cross_entropy", lr=0.01, say=lambda line: None)
    words = "expected the index from which LibSVM counts: 0, as in the data that .* found 1"
    with pytest.raises(DataError, match=words):
        trainer.fit(train, validation_data=other, epochs=1, progress=False)
    trainer.fit(train, epochs=1, progress=False)
    trainer.save(tmp_path / "model.safetensors")
    later = flatout.Trainer(Sparse(), loss="cross_entropy", say=lambda line: None)
    later.load(tmp_path / "model.safetensors")
    for verb in (later.evaluate, later.predict):
        with pytest.raises(DataError, match=words) as caught:
            verb(other)
    assert "schema=train.schema" in caught.value.do
    later.evaluate(flatout.data.libsvm(path, schema=train.schema))
    with pytest.raises(DataError, match=words.replace("data that .*", "first source;")):
        flatout.data.mix(train, other)


class Columns(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.out = nn.Linear(width, 3)

    def forward(self, **columns):
        parts = [value.float().reshape(len(value), -1) for value in columns.values()]
        return self.out(torch.cat(parts, dim=1))


@pytest.mark.parametrize(
    ("header", "stack", "words"),
    [
        ("b,a,y", False, "the columns of the input: a, b, as in .*; found b, a"),
        ("b,a,y", True, "the stacked columns: a, b, as in .*; found b, a"),
        ("a,c,y", False, "the columns of the input: a, b, as in .*; found a, c"),
    ],
)
def test_columns_in_another_order_are_refused(tmp_path, header, stack, words):
    rows = "".join(f"{row},{row + 5},{row % 3}\n" for row in range(24))
    for name, line in (("train", "a,b,y"), ("other", header)):
        (tmp_path / f"{name}.csv").write_text(f"{line}\n{rows}")
    train, other = (
        flatout.data.csv(tmp_path / f"{name}.csv", target="y", stack=stack)
        for name in ("train", "other")
    )
    model = nn.Linear(2, 3) if stack else Columns(2)
    trainer = flatout.Trainer(model, loss="cross_entropy", lr=0.01, say=lambda line: None)
    trainer.fit(train, epochs=1, progress=False)
    with pytest.raises(DataError, match=words):
        trainer.evaluate(other)
    if "c" not in header:
        path = tmp_path / "other.csv"
        trainer.evaluate(flatout.data.csv(path, schema=train.schema))


def test_numbers_where_training_had_texts_are_refused(tmp_path):
    def read(name, cities, kinds):
        return flatout.data.csv(_write(tmp_path / name, cities, kinds), target="y")

    train = read("train.csv", ["1", "2", "x", "y"], ["1", "2", "none"])
    trainer = _trainer()
    trainer.fit(train, epochs=1, progress=False)
    for name, cities, kinds, words in (
        ("a.csv", ["1", "2"], ["none", "1"], r"city \(texts\), n.*found city, n"),
        ("b.csv", ["1", "2", "x", "y"], ["1", "2"], "target 'y': texts.*found numbers"),
    ):
        with pytest.raises(DataError, match=words):
            trainer.evaluate(read(name, cities, kinds))
        trainer.evaluate(flatout.data.csv(tmp_path / name, schema=train.schema))


class Folder(torch.utils.data.Dataset):
    """A Dataset that numbers its classes like torchvision's ImageFolder or Hugging Face."""

    def __init__(self, classes, is_hugging_face=False):
        self.classes = len(classes)
        if is_hugging_face:
            self.features = {"x": SimpleNamespace(), "y": SimpleNamespace(names=sorted(classes))}
        else:
            self.class_to_idx = {name: number for number, name in enumerate(sorted(classes))}

    def __len__(self):
        return 12

    def __getitem__(self, row):
        return torch.full((4,), float(row)), row % self.classes


@pytest.mark.parametrize("is_hugging_face", [False, True])
def test_a_dataset_that_numbers_classes_otherwise_is_refused(is_hugging_face):
    def made(*classes):
        return Folder(classes, is_hugging_face)

    trainer = flatout.Trainer(nn.Linear(4, 3), loss="cross_entropy", say=lambda line: None)
    words = r"the classes of the Dataset.*: 0 cat, 1 dog, 2 owl, .*; found 0 dog, 1 owl"
    other = torch.utils.data.Subset(made("owl", "dog"), range(6))
    for data in (other, torch.utils.data.DataLoader(other, batch_size=3)):
        with pytest.raises(DataError, match=words):
            trainer.fit(made("cat", "dog", "owl"), validation_data=data, epochs=1, progress=False)
    # After training on other classes, the model uses their numbers.
    trainer.fit(made("cat", "dog", "owl"), epochs=1, progress=False)
    trainer.fit(made("dog", "owl"), validation_data=other, epochs=1, progress=False)
