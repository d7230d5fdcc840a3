"""The models of examples/click_through.py: the same weights from every format, and from Criteo."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

import flatout
from flatout.data import Ids
from flatout.recipe import Compute, Process, Recipe

ROOT = Path(__file__).parents[2]
AGARICUS = ROOT.parent / "shared" / "data" / "agaricus" / "agaricus_train.libsvm"
RECIPE = Recipe(
    compute=Compute(
        precision="fp32", fused_optimizer="off", compile="off", capture="off", touched_rows="on"
    ),
    process=Process(threads=1),
)


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("click", ROOT / "examples" / "click_through.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def opened(folder, kind, name, stated):
    """A day as it was converted to a format."""
    if kind == "libsvm":
        return flatout.data.libsvm(folder / f"{name}.svm", schema=stated)
    if kind == "rows":
        return flatout.data.rows(folder / f"{name}.rows")
    shards = str(folder / f"{name}*.tfrecord")
    return flatout.data.tfrecord(shards, schema=folder / f"_{name}.tfrecord.toml")


def trained(module, model, days, numbers, before=None):
    """Weights by name after some days, each going on from the one before."""
    for run, rows in days:
        torch.manual_seed(0)
        fields = rows.schema["ids"].shape[0]
        trainer = flatout.Trainer(
            module.MODELS[model](module.Libsvm(fields, numbers)),
            loss="binary_cross_entropy",
            lr=0.01,
            recipe=RECIPE,
            allow="exact",
            run=run,
            warm_start=before,
            say=lambda line: None,
        )
        trainer.fit(rows.shuffle(seed=1).batch(256), epochs=1, progress=False)
        before = run
    assert trainer.resolved.compute.touched_rows == "on"
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def same_from_all(module, tmp_path, model, names, numbers):
    stated = flatout.data.libsvm(tmp_path / f"{names[0]}.svm", layout="fixed").schema
    stated = stated.with_ids(ids=Ids(admit=2))
    found = {}
    for kind in ("libsvm", "tfrecord", "rows"):
        for name in names if kind != "libsvm" else ():
            text = flatout.data.libsvm(tmp_path / f"{name}.svm", schema=stated)
            flatout.data.convert(text, tmp_path / f"{name}.{kind}", progress=False)
        days = [(tmp_path / kind / name, opened(tmp_path, kind, name, stated)) for name in names]
        found[kind] = trained(module, model, days, numbers)
    text = found.pop("libsvm")
    for kind, weights in found.items():
        assert weights.keys() == text.keys()
        assert all(torch.equal(weights[name], value) for name, value in text.items()), kind


@pytest.mark.slow
@pytest.mark.skipif(not AGARICUS.exists(), reason="../shared/data is not beside the project")
def test_agaricus_trains_to_the_same_weights_from_every_format(example, tmp_path):
    (tmp_path / "agaricus.svm").write_bytes(AGARICUS.read_bytes())
    same_from_all(example, tmp_path, "deepfm", ["agaricus"], numbers=0)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deepfm", "wide_deep", "dlrm"])
def test_the_days_of_the_example_train_to_the_same_weights_from_every_format(
    example, tmp_path, model
):
    for number in range(2):
        example.write_day(tmp_path / f"day{number}.svm", number, 2000)
    same_from_all(example, tmp_path, model, ["day0", "day1"], numbers=example.NUMBERS)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deepfm", "wide_deep", "dlrm"])
def test_criteo_days_are_trained_one_after_the_other(example, tmp_path, model):
    before = schema = None
    for number in range(2):
        day, draw = tmp_path / f"day{number}.tsv", np.random.default_rng(number)
        with day.open("w") as file:
            for _ in range(3000):
                integers = map(str, draw.integers(0, 50, 13))
                categories = (f"{100 * place + n + 5 * number:08x}"
                              for place, n in enumerate(draw.integers(0, 30, 26)))  # fmt: skip
                file.write("\t".join([str(draw.integers(0, 2)), *integers, *categories]) + "\n")
        schema = schema or example.schema_of(day)
        before = example.train_day(model, 0, day, schema, before, 1, tmp_path)
    assert (tmp_path / f"{model}.safetensors").exists()
    assert (tmp_path / f"{model}.ids.safetensors").exists()
