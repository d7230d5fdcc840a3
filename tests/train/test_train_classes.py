"""A model knows its classes by name: in fit, evaluate and predict, in its files and runs."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from train_jobs import quiet

import flatout
from flatout.errors import CheckpointError, DataError
from flatout.recipe import Compute, Memory, Process, Recipe
from flatout.save.export import export
from flatout.train.callbacks import BestCheckpoint

Image = pytest.importorskip("PIL.Image")

SHADES = {"blue": 30, "green": 120, "red": 220, "white": 255}
PLAIN = Recipe(
    compute=Compute(
        precision="fp32",
        memory_format="contiguous",
        rewrites="off",
        fused_optimizer="off",
        matmul_precision="highest",
    ),
    memory=Memory(micro_batch="whole"),
    process=Process(threads=1),
)
ALL = ("blue", "green", "red")


def folders(root, names, each=6):
    for name in names:
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(each):
            shade = np.full((4, 4, 3), min(255, SHADES[name] + number), np.uint8)
            Image.fromarray(shade).save(root / name / f"{number}.png")
    return root


@pytest.fixture
def train(tmp_path):
    return flatout.data.images(folders(tmp_path / "train", ALL)).shuffle(seed=1).batch(6)


def fresh(classes=3, **arguments):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, classes))
    options = {"lr": 0.05, "metrics": ["accuracy"], "say": quiet, "recipe": PLAIN, **arguments}
    return flatout.Trainer(model, **options)


def fitted(train, **arguments):
    job = fresh(**arguments)
    job.fit(train, epochs=25, progress=False)
    return job


def test_validation_folders_get_the_numbers_of_training(train, tmp_path):
    lines = []
    job = fresh(say=lines.append)
    val = flatout.data.images(folders(tmp_path / "val", ["red"]))
    assert val.classes == ("red",)  # by itself, red would be number 0
    history = job.fit(train, validation_data=val, epochs=25, progress=False)
    assert history.epochs[-1]["val_accuracy"] == 1
    assert job.evaluate(val)["accuracy"] == 1
    assert job.classes == ALL
    assert history.classes == list(ALL)
    assert history.as_dict()["classes"] == list(ALL)
    assert [line for line in lines if "validation:" in line] == [
        "input: validation: classes have the model's numbers, 0 to 2; without 'blue', 'green'"
    ]
    other = flatout.data.images(folders(tmp_path / "val", ["red"]), classes=["red", "blue"])
    assert job.evaluate(other)["accuracy"] == 1


def test_unknown_classes_are_named_before_the_first_step(train, tmp_path):
    odd = flatout.data.images(folders(tmp_path / "odd", ["red", "white"]))
    job = fresh(4)
    before = job.model[1].weight.detach().clone()
    with pytest.raises(DataError, match=r"white \(6\)"):
        job.fit(train, validation_data=odd, progress=False)
    assert torch.equal(before, job.model[1].weight)
    assert job.classes is None
    job.fit(train, epochs=1, progress=False)
    for ask in (job.evaluate, job.predict):
        with pytest.raises(DataError, match=r"white \(6\)"):
            ask(odd)
    assert job.predict(flatout.data.images(tmp_path / "odd", labels=False)).shape == (12, 4)
    with pytest.raises(DataError, match=r"trainer\.classes = None"):
        job.fit(odd, epochs=1, progress=False)
    job.classes = None
    job.fit(odd, epochs=1, progress=False)
    assert job.classes == ("red", "white")


def test_names_travel_with_the_file_the_checkpoint_and_the_export(train, tmp_path):
    run = tmp_path / "run"
    job = fitted(train, run=str(run))
    job.save(tmp_path / "model.safetensors")
    job.save(tmp_path / "model.pt")
    plain = torch.load(tmp_path / "model.pt", weights_only=True, mmap=True)
    assert all(torch.equal(plain[k], tensor) for k, tensor in job.model.state_dict().items())
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["flatout.signature"])["classes"] == list(ALL)
    export(run, tmp_path / "exported.safetensors")
    (newest,) = sorted(run.glob("checkpoints/*"))[-1:]
    val = flatout.data.images(folders(tmp_path / "val", ["red", "green"]))
    files = ("model.safetensors", "model.pt", "exported.safetensors")
    for path in (*(tmp_path / name for name in files), newest / "model.safetensors"):
        loaded = fresh()
        loaded.load(path)
        assert loaded.classes == ALL
        assert loaded.evaluate(val)["accuracy"] == 1
        output = loaded.predict(str(tmp_path / "val" / "red" / "0.png"))
        assert loaded.classes[output[0].argmax()] == "red"
    for source in (run, newest, tmp_path / "model.safetensors", tmp_path / "model.pt"):
        assert fresh(warm_start=str(source)).classes == ALL
    # A file that says nothing of classes leaves those that are known.
    bare = tmp_path / "bare.safetensors"
    flatout.Trainer(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 3))).save(bare)
    job.load(bare)
    assert job.classes == ALL


def test_a_resume_with_other_classes_is_refused(train, tmp_path):
    run = str(tmp_path / "run")
    fresh(run=run).fit(train, epochs=1, progress=False)
    swapped = flatout.data.images(tmp_path / "train", classes=["red", "green", "blue"])
    with pytest.raises(
        CheckpointError, match=r"(?s)classes.*'blue', 'green', 'red'.*'red', 'green', 'blue'"
    ):
        fresh(run=run).fit(swapped.shuffle(seed=1).batch(6), epochs=2, resume=True, progress=False)
    again = fresh(run=run)
    again.fit(train, epochs=2, resume=True, progress=False)
    assert again.classes == ALL


def test_a_damaged_record_of_classes_is_an_error(tmp_path):
    from flatout.save.model_file import save_model

    job = fresh()
    for text in ("{", "[]", '{"classes": "abc"}', '{"classes": ["a", "a"]}', '{"images": 3}',
                 '{"mean": [0], "std": [-1]}', '{"mean": [0]}', '{"classes": [1]}'):  # fmt: skip
        save_model(tmp_path / "m.safetensors", job.model.state_dict(), {"flatout.signature": text})
        with pytest.raises(CheckpointError, match="cannot be read"):
            job.load(tmp_path / "m.safetensors")


def test_classes_of_arrays_are_named_by_hand(tmp_path):
    x, y = torch.randn(12, 48), torch.arange(12) % 3
    job = fresh()
    job.classes = ["a", "b", "c"]
    job.fit((x, y), epochs=1, progress=False)
    job.save(tmp_path / "m.safetensors")
    loaded = fresh()
    loaded.load(tmp_path / "m.safetensors")
    assert loaded.classes == ("a", "b", "c")
    with pytest.raises(DataError, match="different names"):
        job.classes = ["a", "a"]


def test_the_best_checkpoint_keeps_names_as_well(train, tmp_path):
    job = fresh(run=str(tmp_path / "run"))
    job.fit(train, epochs=2, progress=False, callbacks=[BestCheckpoint("loss")])
    assert fresh(warm_start=str(tmp_path / "run")).classes == ALL
