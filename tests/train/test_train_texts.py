"""A table's texts have the numbers that they had in training, or nothing is computed with them."""

from __future__ import annotations

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
