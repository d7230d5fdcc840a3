"""Keras models on several ranks: what is refused, and which callbacks run where."""

import numpy as np
import pytest

keras = pytest.importorskip("keras")
from keras import layers  # noqa: E402

import flatout  # noqa: E402
from flatout.errors import ModelError  # noqa: E402
from flatout.models.keras.callbacks import on_rank, reads_batches  # noqa: E402
from flatout.train.ranks import check_ranks  # noqa: E402
from flatout.world import Place, World  # noqa: E402

if keras.backend.backend() != "torch":
    pytest.skip("Keras is on another backend", allow_module_level=True)

FIRST, SECOND = World(Place(0, 2, 0, 2)), World(Place(1, 2, 1, 2))

# -- refusals --------------------------------------------------------------------------------------


class Centerd(layers.BatchNormalization):
    def _moments(self, inputs, mask):
        mean, variance = super()._moments(inputs, mask)
        return mean, variance * 0 + 1


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (Centerd(name="mine"), r"mine \(Centerd\) is a BatchNormalization with its own code"),
        (layers.LSTM(2, stateful=True, name="kept"), r"kept \(LSTM\) is stateful"),
    ],
)
def test_layers_that_cannot_be_joined_are_named(layer, words):
    inner = keras.Sequential([layers.Input((4, 3), batch_size=2), layer])
    model = keras.Sequential([layers.Input((4, 3), batch_size=2), inner])
    with pytest.raises(ModelError, match=words):
        check_ranks(model, None, SECOND)


def test_layers_of_keras_are_joined():
    made = [layers.BatchNormalization(), layers.UnitNormalization(), layers.LSTM(2)]
    check_ranks(keras.Sequential([layers.Input((4, 3)), *made]), None, SECOND)


class OwnStep(keras.Sequential):
    def train_step(self, data):
        return {}


def test_a_train_step_of_ones_own_runs_on_one_rank(monkeypatch):
    model = OwnStep([layers.Input((3,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ModelError, match="OwnStep has its own train_step"):
        flatout.Trainer(model)


# -- callbacks -------------------------------------------------------------------------------------


class Own(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        pass


def test_writers_write_on_the_first_rank_alone(tmp_path):
    callbacks = keras.callbacks
    stop = callbacks.EarlyStopping(verbose=1)
    backup = callbacks.BackupAndRestore(tmp_path / "backup")
    given = [
        stop,
        callbacks.ModelCheckpoint(tmp_path / "best.keras"),
        callbacks.CSVLogger(tmp_path / "log.csv"),
        backup,
        Own(),
    ]
    assert on_rank(given, FIRST) == given
    own = on_rank(given, SECOND)
    assert own[0] is stop
    assert stop.verbose == 0
    assert own[2] is given[-1]
    assert len(own) == 3


def test_a_backup_is_restored_on_every_rank(tmp_path):
    def made():
        model = keras.Sequential([layers.Input((3,)), layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    first, second = made(), made()
    folder = str(tmp_path / "backup")
    backup = keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
    backup.set_model(first)
    backup.on_train_begin()
    backup.on_epoch_end(4)
    (restoring,) = on_rank([keras.callbacks.BackupAndRestore(folder)], SECOND)
    restoring.set_model(second)
    restoring.on_train_begin()
    assert second._initial_epoch == 5
    np.testing.assert_array_equal(second.get_weights()[0], first.get_weights()[0])
    restoring.on_epoch_end(9)
    restoring.on_train_end()
    assert (tmp_path / "backup").exists()


def test_logs_of_a_batch_are_read_together_where_one_rank_may_read_them(tmp_path):
    callbacks = keras.callbacks
    assert not reads_batches(callbacks.EarlyStopping())
    assert not reads_batches(callbacks.TerminateOnNaN())  # on every rank, each time
    assert not reads_batches(callbacks.ModelCheckpoint(tmp_path / "best.keras"))
    assert reads_batches(callbacks.ModelCheckpoint(tmp_path / "best.keras", save_freq=3))
    assert reads_batches(callbacks.LambdaCallback(on_train_batch_end=print))
    assert reads_batches(Own())
