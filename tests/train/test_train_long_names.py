"""Tests of a fit with names of 300 letters, which no file system accepts."""

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import flatout
from flatout.errors import CheckpointError

LONG = "n" * 300

pytestmark = pytest.mark.usefixtures("one_thread")


class Rows(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.full((4,), float(index)), index % 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module(LONG, nn.Linear(4, 2))

    def forward(self, x):
        return getattr(self, LONG)(x)


def share(output, target):
    return (output.argmax(1) == target).float().mean()


def as_they_are(x, y):
    return x, y


for thing in (Rows, Model, share, as_they_are):
    thing.__name__ = thing.__qualname__ = LONG


def trainer(model, **options):
    return flatout.Trainer(model, loss="cross_entropy", say=lambda line: None, **options)


def test_names_of_classes_and_functions_become_no_names_of_files(tmp_path):
    pipeline = flatout.data.torch_dataset(Rows()).map(as_they_are).cache("disk").batch(8)
    for number, data in enumerate((Rows(), pipeline)):
        run = tmp_path / f"run{number}"
        first = trainer(Model(), metrics=[share], run=run)
        first.fit(data, epochs=1, validation_data=Rows(), progress=False)
        again = trainer(Model(), metrics=[share], run=run)
        again.fit(data, epochs=2, validation_data=Rows(), progress=False, resume=True)
        assert len(again.history.epochs) == 2
        assert f"val_{LONG}" in again.history.epochs[-1]
    again.save(tmp_path / "model.safetensors")
    loaded = trainer(Model())
    loaded.load(tmp_path / "model.safetensors")
    assert torch.equal(
        loaded.model.state_dict()[f"{LONG}.weight"], getattr(again.model, LONG).weight
    )


@pytest.mark.parametrize("run", [LONG, f"below/{LONG}", "/".join([LONG[:200]] * 30)])
def test_a_run_folder_whose_name_is_too_long_is_refused_in_words(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    job = trainer(nn.Linear(4, 2), run=run)
    with pytest.raises(CheckpointError, match="File name too long"):
        job.fit(Rows(), epochs=1, progress=False)


@pytest.mark.parametrize("verb", ["save", "load"])
@pytest.mark.parametrize("ending", [".safetensors", ".pt"])
def test_a_file_whose_name_is_too_long_is_refused_in_words(tmp_path, verb, ending):
    with pytest.raises(CheckpointError, match=r"File name too long|there is no such file"):
        getattr(trainer(nn.Linear(4, 2)), verb)(tmp_path / f"{LONG}{ending}")
