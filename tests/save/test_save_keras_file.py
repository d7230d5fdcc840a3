"""Keras' own files of models and weights, with text beside them."""

from pathlib import Path

import pytest

keras = pytest.importorskip("keras")
h5py = pytest.importorskip("h5py")

import numpy as np  # noqa: E402
from keras import layers  # noqa: E402

from flatout.errors import CheckpointError  # noqa: E402
from flatout.save.keras_file import load_keras, save_keras, text_in_hdf5  # noqa: E402


def test_only_text_is_taken_from_an_hdf5_file(tmp_path):
    file = tmp_path / "a.weights.h5"
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["secret"] = "not for all"
    with h5py.File(file, "w") as made:
        made["flatout.note"] = "grün"
        made["flatout.number"] = 3
        made["flatout.many"] = ["a", "b"]
        made["flatout.group/flatout.text"] = "within"
        made["flatout.nowhere"] = h5py.SoftLink("/nothing")
        made["flatout.elsewhere"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "secret")
        made["another"] = "not ours"
    with h5py.File(file) as opened:
        assert text_in_hdf5(opened) == {"flatout.note": "grün"}


def test_damaged_text_beside_kerass_weights_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    file = tmp_path / "m.keras"
    save_keras(model, file, {"flatout.note": "some words"})
    file.write_bytes(file.read_bytes().replace(b"some words", b"same words"))
    before = [w.copy() for w in model.get_weights()]
    model.set_weights([w + 1 for w in before])
    with pytest.raises(CheckpointError, match=r"damaged: Bad CRC-32 .*flatout\.json"):
        load_keras(model, file)
    for now, then in zip(model.get_weights(), before, strict=True):
        assert np.array_equal(now, then + 1)
