"""`initial_epoch`, `verbose` and `load_best` for torch models, as Keras users know them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from train_jobs import data, network, same, saving, trainer

import flatout
from flatout.data.randomness import order
from flatout.errors import CheckpointError, ModelError
from flatout.train.callbacks import BestCheckpoint

pytestmark = pytest.mark.usefixtures("one_thread")

X, Y = data()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_initial_epoch_goes_on_with_the_order_of_the_samples():
    ours, theirs = network(norm=False, dropout=0.0), network(norm=False, dropout=0.0)
    job = trainer(ours, optimizer=sgd(ours))
    history = job.fit(X, Y, batch_size=32, epochs=5, initial_epoch=3)
    assert len(history.epochs) == 2
    optimizer = sgd(theirs)
    for epoch in (3, 4):
        for at in torch.from_numpy(order(len(X), 0, epoch)).split(32):
            optimizer.zero_grad()
            F.cross_entropy(theirs(X[at]), Y[at]).backward()
            optimizer.step()
    assert same(ours, theirs)
    assert job.fit(X, Y, batch_size=32, epochs=3, initial_epoch=3).epochs == []
    for wrong in (-1, 1.5, True):
        with pytest.raises(ModelError, match="initial_epoch is the number of an epoch"):
            job.fit(X, Y, initial_epoch=wrong)


def test_a_resume_wins_over_initial_epoch(tmp_path):
    def job():
        return trainer(network(), run=tmp_path).fit(
            X, Y, batch_size=32, epochs=3, initial_epoch=1, resume=True
        )

    assert len(job().epochs) == 2
    assert len(job().epochs) == 2  # all were done


def test_verbose_is_progress_in_keras_words(capfd):
    shown = {}
    for verbose in (0, 1, 2, "auto"):
        trainer(network()).fit(X, Y, batch_size=32, epochs=2, verbose=verbose)
        shown[verbose] = capfd.readouterr().err
    assert shown[0] == ""
    assert all(shown[verbose].count("epoch ") == 2 for verbose in (1, 2, "auto"))
    trainer(network()).fit(X, Y, batch_size=32, verbose=1, progress=False)
    assert capfd.readouterr().err == ""
    with pytest.raises(ModelError, match="verbose is 0, 1, 2 or 'auto', found 3"):
        trainer(network()).fit(X, Y, verbose=3)


class Worsens(flatout.Callback):
    """Keeps the weights of the first epoch, and spoils the model then."""

    def on_epoch_end(self, state):
        if state.epoch == 0:
            self.best = {k: v.clone() for k, v in state.trainer.model.state_dict().items()}

    def on_epoch_start(self, state):
        if state.epoch == 1:
            with torch.no_grad():
                state.trainer.model[-1].weight.mul_(-20)


def test_the_best_weights_of_a_run(tmp_path):
    model, spoil = network(), Worsens()
    slow = torch.optim.SGD(model.parameters(), lr=1e-4)
    job = trainer(model, optimizer=slow, run=tmp_path / "run", recipe=saving())
    with pytest.raises(CheckpointError):
        job.load_best()
    job.fit(
        X, Y, batch_size=32, epochs=2, validation_data=(X, Y),
        callbacks=[spoil, BestCheckpoint("val_loss")],
    )  # fmt: skip
    assert not torch.equal(model[-1].weight, spoil.best["4.weight"])
    assert "val_loss" in job.load_best()
    assert all(torch.equal(v, spoil.best[k]) for k, v in model.state_dict().items())
    other = network(seed=4)
    trainer(other).load_best(tmp_path / "run")
    assert same(other, model)
    with pytest.raises(CheckpointError, match="another model"):
        trainer(nn.Linear(12, 3)).load_best(tmp_path / "run")
    with pytest.raises(CheckpointError, match="no run folder"):
        trainer(network()).load_best()


@pytest.mark.slow
def test_an_uncompiled_keras_model_takes_the_same_words():
    keras = pytest.importorskip("keras")
    keras.utils.set_random_seed(0)
    x = keras.Input((12,))
    hidden = keras.layers.Dense(8)(x)
    ends = {"kind": keras.layers.Dense(3)(hidden), "size": keras.layers.Dense(1)(hidden)}
    job = trainer(
        keras.Model(x, ends), loss={"kind": "cross_entropy", "size": "mse"}, optimizer="sgd", lr=0.1
    )
    targets = {"kind": Y.numpy(), "size": X[:, :1].double().numpy()}  # float64 is cast
    history = job.fit(
        X.double().numpy(), targets, batch_size=32, epochs=3, initial_epoch=1,
        class_weight={"kind": {1: 2.0}}, validation_split=0.2, verbose=0,
    )  # fmt: skip
    assert len(history.epochs) == 2
    assert history.history["kind_loss"][1] < history.history["kind_loss"][0]
    assert {"val_loss", "val_kind_loss", "val_size_loss"} <= set(history.epochs[0])


def test_validation_freq_and_steps_of_an_epoch():
    given = {"batch_size": 32, "epochs": 4, "validation_data": (X, Y), "verbose": 0}
    for every, validated in ((2, [1, 3]), ([1, 4], [0, 3])):
        epochs = trainer(network()).fit(X, Y, validation_freq=every, **given).epochs
        assert [n for n, logs in enumerate(epochs) if "val_loss" in logs] == validated
    history = trainer(network()).fit(X, Y, batch_size=32, steps_per_epoch=2, epochs=3, verbose=0)
    assert history.timeline.steps == 6
