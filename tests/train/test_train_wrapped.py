"""A model in a wrapper (DataParallel, DDP, torch.compile) keeps its own names."""

import math
import sys

import pytest
import safetensors.torch
import torch
from torch import distributed, nn
from train_jobs import data, network, quiet, same, trainer

import flatout
from flatout.errors import CheckpointError, NumbersError
from flatout.models import weights_of
from flatout.recipe import Compute, Recipe, Save
from flatout.save.checkpoint import Checkpoints
from flatout.save.export import export
from flatout.train.callbacks import EarlyStopping

pytestmark = pytest.mark.usefixtures("one_thread")


def compiled(model):
    return torch.compile(model, backend="eager")


class Within(nn.Module):
    """A model that the user wrapped in part."""

    def __init__(self, body):
        super().__init__()
        self.body = nn.DataParallel(body)

    def forward(self, x):
        return self.body(x)


WRAPPERS = {
    "DataParallel": nn.DataParallel,
    "torch.compile": compiled,
    "both": lambda model: compiled(nn.DataParallel(model)),
    "the other way round": lambda model: nn.DataParallel(compiled(model)),
}


@pytest.fixture
def one_rank(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch replaces it for good
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_model_file_has_the_models_own_names(tmp_path, wrap):
    model = network()
    path = trainer(wrap(model)).save(tmp_path / "m.safetensors")
    assert set(safetensors.torch.load_file(path)) == set(model.state_dict())
    other = network(seed=5)
    trainer(wrap(other)).load(path)
    assert same(other, model)
    bare = network(seed=6)
    trainer(bare).load(path)
    assert same(bare, model)


def test_distributed_data_parallel_too(one_rank):
    model = network()
    wrapped = nn.parallel.DistributedDataParallel(model)
    assert list(weights_of(wrapped)) == list(model.state_dict())


def test_a_wrapper_within_a_model():
    own = [f"body.{name}" for name in network().state_dict()]
    assert list(weights_of(Within(network()))) == own
    assert list(weights_of(nn.DataParallel(Within(network())))) == own


def test_a_module_that_is_called_module_is_no_wrapper():
    model = nn.ModuleDict({"module": nn.Linear(2, 2)})
    assert list(weights_of(model)) == ["module.weight", "module.bias"]
    assert list(weights_of(nn.DataParallel(model))) == ["module.weight", "module.bias"]


def test_names_that_would_become_equal_stay():
    wrapper = nn.DataParallel(nn.Linear(2, 2))
    wrapper.weight = nn.Parameter(torch.zeros(1))
    assert list(weights_of(wrapper)) == ["weight", "module.weight", "module.bias"]


@pytest.mark.parametrize("before", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("after", [lambda model: model, compiled], ids=["bare", "compiled"])
def test_a_resume_goes_on_in_another_wrapper_or_in_none(tmp_path, before, after):
    def job(model, run):
        recipe = Recipe(save=Save(every=5), compute=Compute(rewrites="off", compile="off"))
        return flatout.Trainer(
            model, optimizer="adam", lr=1e-2, allow="exact", recipe=recipe, run=run, say=quiet
        )

    def fit(model, run, epochs, **options):
        torch.manual_seed(3)
        stop = EarlyStopping("loss", patience=9)
        job(model, run).fit(
            data(), batch_size=32, epochs=epochs, callbacks=[stop], progress=False, **options
        )

    whole, first, second = network(), network(), network()
    fit(whole, tmp_path / "whole", 2)
    fit(before(first), tmp_path / "parts", 1)
    loaded = Checkpoints(tmp_path / "parts" / "checkpoints").load()
    assert list(loaded.model) == sorted(network().state_dict())
    fit(after(second), tmp_path / "parts", 2, resume=True)
    assert same(second, whole)
    export(tmp_path / "parts", tmp_path / "plain.safetensors")
    assert set(safetensors.torch.load_file(tmp_path / "plain.safetensors")) == set(
        network().state_dict()
    )
    warm = network(seed=8)
    flatout.Trainer(after(warm), optimizer="adam", warm_start=tmp_path / "parts", say=quiet)
    assert same(warm, second)


def test_errors_have_the_models_own_names(tmp_path):
    model = network()
    wrapped = nn.DataParallel(model)
    path = trainer(nn.Linear(3, 3)).save(tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"missing from the checkpoint: 0\.weight"):
        trainer(wrapped).load(path)
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    with pytest.raises(NumbersError, match=r"weight 0\.weight"):
        trainer(wrapped).save(tmp_path / "m.safetensors")
