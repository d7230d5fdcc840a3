"""Keras files made plain: the real model out of what multi_gpu_model saved, and never code."""

import io
import json
import shlex
import zipfile
from pathlib import Path
from typing import Any

import pytest

keras = pytest.importorskip("keras")
h5py = pytest.importorskip("h5py")

import numpy as np  # noqa: E402
import safetensors.torch  # noqa: E402
import torch  # noqa: E402
from keras import layers  # noqa: E402

from flatout import Trainer  # noqa: E402
from flatout.errors import CheckpointError  # noqa: E402
from flatout.save.export import export  # noqa: E402

X = np.random.default_rng(0).normal(size=(6, 4)).astype("float32")

# -- files as Keras 2.2 on TensorFlow 1 wrote them ------------------------------------------------

UNIFORM = {
    "class_name": "VarianceScaling",
    "config": {"scale": 1.0, "mode": "fan_avg", "distribution": "uniform", "seed": None},
}
ZEROS, ONES = ({"class_name": name, "config": {}} for name in ("Zeros", "Ones"))
# The body of get_slice, marshaled and in base64.
GET_SLICE = ["4wMAAAAAAAAABgAAAAcAAAATAAAAcwQAAAA=\n", None, None]


def old_dense(name: str, units: int, activation: str, **first: Any) -> dict[str, Any]:
    rules = ("kernel_regularizer", "bias_regularizer", "activity_regularizer")
    config = {"name": name, "trainable": True, **first, "units": units, "activation": activation}
    config |= {"use_bias": True, "kernel_initializer": UNIFORM, "bias_initializer": ZEROS}
    config |= dict.fromkeys((*rules, "kernel_constraint", "bias_constraint"))
    return {"class_name": "Dense", "config": config}


def old_norm(name: str) -> dict[str, Any]:
    config = {"name": name, "trainable": True, "axis": -1, "momentum": 0.99, "epsilon": 0.001}
    config |= {"center": True, "scale": True, "beta_initializer": ZEROS, "gamma_initializer": ONES}
    config |= {"moving_mean_initializer": ZEROS, "moving_variance_initializer": ONES}
    rules = ("beta_regularizer", "gamma_regularizer", "beta_constraint", "gamma_constraint")
    return {"class_name": "BatchNormalization", "config": config | dict.fromkeys(rules)}


def old_input(name: str) -> dict[str, Any]:
    config = {"batch_input_shape": [None, 4], "dtype": "float32", "sparse": False, "name": name}
    return {"name": name, "class_name": "InputLayer", "config": config, "inbound_nodes": []}


def called_on(layer: dict[str, Any], *origins: tuple[str, int]) -> dict[str, Any]:
    nodes = [[[name, node, 0, {}]] for name, node in origins]
    return {"name": name_of(layer), **layer, "inbound_nodes": nodes}


def name_of(layer: dict[str, Any]) -> str:
    return "sequential_1" if isinstance(layer["config"], list) else layer["config"]["name"]


def old_model(kind: str) -> dict[str, Any]:
    hidden, head = old_dense("dense_1", 3, "relu"), old_dense("dense_2", 2, "softmax")
    if kind != "Model":
        first = old_dense("dense_1", 3, "relu", batch_input_shape=[None, 4], dtype="float32")
        inside = [first, old_norm("batch_normalization_1"), head]
        config = {"name": "sequential_1", "layers": inside}
        return {"class_name": "Sequential", "config": config if kind == "Sequential" else inside}
    inside = [
        old_input("input_1"),
        called_on(hidden, ("input_1", 0)),
        called_on(old_norm("batch_normalization_1"), ("dense_1", 0)),
        called_on(head, ("batch_normalization_1", 0)),
    ]
    ends = {"input_layers": [["input_1", 0, 0]], "output_layers": [["dense_2", 0, 0]]}
    return {"class_name": "Model", "config": {"name": "model_1", "layers": inside, **ends}}


def old_wrapper(inner: dict[str, Any], parts: int) -> dict[str, Any]:
    name = name_of(inner)
    slices = [
        called_on(
            {
                "class_name": "Lambda",
                "config": {
                    "name": f"lambda_{i + 1}",
                    "trainable": True,
                    "function": GET_SLICE,
                    "function_type": "lambda",
                    "output_shape": [4],
                    "output_shape_type": "raw",
                    "arguments": {"i": i, "parts": parts},
                },
            },
            ("input_9", 0),
        )
        for i in range(parts)
    ]
    join = {
        "class_name": "Concatenate",
        "config": {"name": "dense_9", "trainable": True, "axis": 0},
    }
    held = called_on(inner, *[(f"lambda_{i + 1}", 0) for i in range(parts)])
    joined = called_on(join, *[(name, i + 1) for i in range(parts)])
    joined["inbound_nodes"] = [[origin for (origin,) in joined["inbound_nodes"]]]
    inside = [old_input("input_9"), *slices, held, joined]
    ends = {"input_layers": [["input_9", 0, 0]], "output_layers": [["dense_9", 0, 0]]}
    return {"class_name": "Model", "config": {"name": "model_9", "layers": inside, **ends}}


def old_arrays() -> dict[str, np.ndarray[Any, Any]]:
    draw = np.random.default_rng(1)
    shapes = {
        "dense_1/kernel:0": (4, 3),
        "dense_1/bias:0": (3,),
        "batch_normalization_1/gamma:0": (3,),
        "batch_normalization_1/beta:0": (3,),
        "dense_2/kernel:0": (3, 2),
        "dense_2/bias:0": (2,),
        "batch_normalization_1/moving_mean:0": (3,),
        "batch_normalization_1/moving_variance:0": (3,),
    }
    return {name: draw.uniform(0.5, 1.5, shape).astype("float32") for name, shape in shapes.items()}


def by_hand(w: dict[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    hidden = np.maximum(X @ w["dense_1/kernel:0"] + w["dense_1/bias:0"], 0)
    norm = {name.rpartition("/")[2]: array for name, array in w.items() if "norm" in name}
    hidden = (hidden - norm["moving_mean:0"]) / np.sqrt(norm["moving_variance:0"] + 0.001)
    scores = (hidden * norm["gamma:0"] + norm["beta:0"]) @ w["dense_2/kernel:0"]
    scores = np.exp(scores + w["dense_2/bias:0"])
    return scores / scores.sum(1, keepdims=True)


def write_old(
    path: Path, config: dict[str, Any] | None, layers: dict[str, list[str]]
) -> dict[str, np.ndarray[Any, Any]]:
    """A whole model of Keras 2, or without a config its weights; arrays by name."""
    arrays = old_arrays()
    with h5py.File(path, "w") as file:
        group = file
        if config is not None:
            file.attrs["model_config"] = json.dumps(config).encode()
            file.attrs["training_config"] = json.dumps(
                {"loss": "categorical_crossentropy"}
            ).encode()
            group = file.create_group("model_weights")
            file.create_group("optimizer_weights")["iterations"] = np.int64(7)
        for part in {file, group}:
            part.attrs["keras_version"], part.attrs["backend"] = b"2.2.4", b"tensorflow"
        group.attrs["layer_names"] = [name.encode() for name in layers]
        for layer, names in layers.items():
            own = group.create_group(layer)
            own.attrs["weight_names"] = [name.encode() for name in names]
            for name in names:
                own[name] = arrays[name]
    return arrays


def wrapped(name: str, parts: int) -> dict[str, list[str]]:
    slices = [f"lambda_{i + 1}" for i in range(parts)]
    return {layer: [] for layer in ("input_9", *slices)} | {name: list(old_arrays()), "dense_9": []}


def bare(name: str) -> dict[str, list[str]]:
    first = {"input_1": []} if name == "Model" else {}
    of = ("dense_1", "batch_normalization_1", "dense_2")
    return first | {layer: [n for n in old_arrays() if n.startswith(layer)] for layer in of}


@pytest.mark.parametrize(
    ("kind", "parts"),
    [(kind, parts) for kind in ("Sequential", "list", "Model") for parts in (0, 2)]
    + [("Model", 4)],
)
def test_the_real_model_of_an_old_h5(tmp_path: Path, kind: str, parts: int) -> None:
    inner = old_model(kind)
    name = name_of(inner)
    config = old_wrapper(inner, parts) if parts else inner
    arrays = write_old(tmp_path / "m.h5", config, wrapped(name, parts) if parts else bare(kind))
    done = export(tmp_path / "m.h5")
    assert done.target == str(tmp_path / "m.keras")
    assert done.stripped == (("model_9",) if parts else ())
    assert done.left_out == ("optimizer",)
    assert done.tensors == 8
    plain = keras.saving.load_model(done.target)
    assert [type(layer).__name__ for layer in plain.layers if layer.weights] == [
        "Dense", "BatchNormalization", "Dense"
    ]  # fmt: skip
    np.testing.assert_allclose(plain.predict(X, verbose=0), by_hand(arrays), rtol=1e-5)


# -- files of today's Keras -----------------------------------------------------------------------


def real(seed: int = 0) -> Any:
    keras.utils.set_random_seed(seed)
    x = keras.Input((4,))
    h = layers.BatchNormalization()(layers.Dense(3, name="hidden")(x))
    model = keras.Model(x, layers.Dense(2, name="head")(layers.Dropout(0.5)(h)), name="real")
    for variable in model.weights:
        variable.assign(np.random.default_rng(seed + 5).uniform(0.5, 1.5, variable.shape))
    return model


def as_multi_gpu(model: Any, parts: int = 2) -> Any:
    x = keras.Input((4,))

    slices = [
        layers.Lambda(
            lambda data, i, parts: data[i::parts],
            output_shape=(4,),
            arguments={"i": i, "parts": parts},
        )(x)
        for i in range(parts)
    ]
    return keras.Model(x, layers.Concatenate(axis=0)([model(part) for part in slices]))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("ending", [".keras", ".h5"])
def test_the_real_model_of_a_new_file(tmp_path: Path, ending: str) -> None:
    model = real()
    whole = as_multi_gpu(model)
    whole.compile("adam", "mse")
    for saved, stripped in ((whole, (whole.name,)), (model, ())):
        source = tmp_path / f"m{ending}"
        saved.save(source)
        done = export(source, tmp_path / "plain.keras", overwrite=True)
        assert done.stripped == stripped
        plain = keras.saving.load_model(done.target)
        assert np.array_equal(plain.predict(X, verbose=0), model.predict(X, verbose=0))
        # As weights: under the names that a Trainer takes.
        done = export(source, tmp_path / "plain.safetensors", overwrite=True)
        other = real(1)
        Trainer(other, say=lambda line: None).load(done.target)
        assert np.array_equal(other.predict(X, verbose=0), model.predict(X, verbose=0))


def test_weights_alone(tmp_path: Path) -> None:
    model = real()
    for saved, stripped in ((as_multi_gpu(model), True), (model, False)):
        saved.save_weights(tmp_path / "m.weights.h5")
        done = export(tmp_path / "m.weights.h5", overwrite=True)
        assert done.target == str(tmp_path / "m.safetensors")
        assert bool(done.stripped) == stripped
        found = safetensors.torch.load_file(done.target)
        kernel = model.get_layer("hidden").kernel.value.detach()
        assert len(found) == 8
        assert torch.equal(found["dense/0"], kernel)
        done = export(tmp_path / "m.weights.h5", tmp_path / "plain.weights.h5", overwrite=True)
        other = real(1)
        other.load_weights(done.target)
        assert np.array_equal(other.predict(X, verbose=0), model.predict(X, verbose=0))
    with pytest.raises(CheckpointError, match="holds weights alone"):
        export(tmp_path / "m.weights.h5", tmp_path / "whole.keras")


def test_weights_beside_an_optimizer(tmp_path: Path) -> None:
    model = real()
    model.compile("adam", "mse")
    model.fit(X, model.predict(X, verbose=0), verbose=0)
    model.save_weights(tmp_path / "m.weights.h5")
    done = export(tmp_path / "m.weights.h5")
    assert done.left_out == ("optimizer",)
    found = safetensors.torch.load_file(done.target)
    assert len(found) == 8
    assert not any("optimizer" in name for name in found)
    done = export(tmp_path / "m.weights.h5", tmp_path / "plain.weights.h5")
    with h5py.File(done.target) as file:
        assert "optimizer" not in file
    other = real(1)
    other.load_weights(done.target)
    assert np.array_equal(other.predict(X, verbose=0), model.predict(X, verbose=0))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("ending", [".keras", ".h5", ".weights.h5"])
@pytest.mark.parametrize("parts", [1, 2], ids=["a layer", "multi_gpu"])
def test_the_optimizer_of_a_model_that_is_held_is_left_out(
    tmp_path: Path, ending: str, parts: int
) -> None:
    inner = real()
    outer = as_multi_gpu(inner) if parts > 1 else keras.Sequential([inner, layers.Dense(2)])
    for model in (inner, outer):
        model.compile("adam", "mse")
        model.fit(X, model.predict(X, verbose=0), verbose=0)
    file = tmp_path / f"m{ending}"
    outer.save_weights(file) if ending == ".weights.h5" else outer.save(file)
    done = export(file, tmp_path / "plain.safetensors")
    assert done.left_out == ("optimizer",)
    assert bool(done.stripped) == (parts > 1)
    kept = inner if parts > 1 else outer
    found = safetensors.torch.load_file(done.target).values()
    sums = [weight.sum() for weight in found if weight.is_floating_point()]  # Dropout has a seed
    assert sorted(sums) == sorted(weight.value.detach().sum() for weight in kept.weights)
    if ending == ".weights.h5":
        done = export(file, tmp_path / "plain.weights.h5")
        with h5py.File(done.target) as opened:
            names: list[str] = []
            opened.visit(names.append)
        assert not any("optimizer" in name for name in names)
        expected = kept.predict(X, verbose=0)
        for weight in kept.weights:
            weight.assign(weight * 0)
        kept.load_weights(done.target)
        assert np.array_equal(kept.predict(X, verbose=0), expected)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("ending", [".keras", ".weights.h5"])
def test_a_wrapped_file_loads_as_the_error_advises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.chdir(tmp_path)
    model, other = real(), real(1)
    outer = as_multi_gpu(model)
    file = tmp_path / f"it's mine{ending}"
    outer.save(file) if ending == ".keras" else outer.save_weights(file)
    trainer = Trainer(other, say=lambda line: None)
    before = other.predict(X, verbose=0)
    with pytest.raises(CheckpointError, match="cannot be loaded") as caught:
        trainer.load(file)
    assert np.array_equal(other.predict(X, verbose=0), before)
    flatout, command, source, target = shlex.split(str(caught.value.do).split("`")[1])
    assert (flatout, command) == ("flatout", "export")
    export(source, target)
    trainer.load(target)
    assert np.array_equal(other.predict(X, verbose=0), model.predict(X, verbose=0))
    small = keras.Sequential([keras.Input((4,)), layers.Dense(5)])
    with pytest.raises(CheckpointError) as caught:
        Trainer(small, say=lambda line: None).load(target)
    assert "export" not in str(caught.value.do)


def test_old_weights_alone(tmp_path: Path) -> None:
    for layers_of in (wrapped("sequential_1", 2), bare("Sequential")):
        arrays = write_old(tmp_path / "w.h5", None, layers_of)
        done = export(tmp_path / "w.h5", overwrite=True)
        found = safetensors.torch.load_file(done.target)
        expected = {name.removesuffix(":0"): torch.from_numpy(a) for name, a in arrays.items()}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("ending", [".keras", ".h5"])
@pytest.mark.parametrize("around", [False, True])
def test_code_in_a_file_is_named_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, around: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    x = keras.Input((4,))
    run = layers.Lambda(
        lambda data: [open("ran", "w"), data][1],  # noqa: SIM115
        output_shape=(4,),
        name="bad",
    )
    model = keras.Model(x, real()(run(x)) if around else layers.Dense(2)(run(x)))
    (tmp_path / "ran").unlink(missing_ok=True)
    model.save(tmp_path / f"m{ending}")
    with pytest.raises(CheckpointError, match="layer 'bad' is a Lambda: building it would execute"):
        export(tmp_path / f"m{ending}", tmp_path / "out.keras")
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out.keras").exists()


def changed(source: Path, target: Path, change: Any) -> Path:
    """A .keras file with another description."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name == "config.json":
                config = json.loads(data)
                change(config)
                data = json.dumps(config).encode()
            new.writestr(name, data)
    return target


def of_layer(config: dict[str, Any], **keys: Any) -> None:
    config["config"]["layers"][1].update(keys)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: of_layer(c, module="os", class_name="system"), "'hidden' names os.system"),
        (lambda c: of_layer(c, class_name="TorchModuleWrapper"), "'hidden' is a TorchModuleWrap"),
        (lambda c: of_layer(c, module="keras.utils", class_name="get_file"), "keras.utils.get_fi"),
        (lambda c: of_layer(c, class_name="Densest"), "Keras cannot build the model"),
        (lambda c: c.pop("config"), "description is none of Keras'"),
        (lambda c: c["config"].update(layers=[3]), "description is none of Keras'"),
    ],
)
def test_descriptions_that_lead_elsewhere(tmp_path: Path, change: Any, words: str) -> None:
    real().save(tmp_path / "m.keras")
    bad = changed(tmp_path / "m.keras", tmp_path / "bad.keras", change)
    with pytest.raises(CheckpointError, match=words):
        export(bad, tmp_path / "out.keras")
    assert not (tmp_path / "out.keras").exists()


def test_damaged_and_crafted_files(tmp_path: Path) -> None:
    source = tmp_path / "m.keras"
    real().save(source)
    for name, words in (("cut.keras", "not a .keras file"), ("cut.h5", "not an HDF5 file")):
        (tmp_path / name).write_bytes(source.read_bytes()[:2000])
        with pytest.raises(CheckpointError, match=words):
            export(tmp_path / name)
    with pytest.raises(CheckpointError, match="No such file"):
        export(tmp_path / "none.h5")
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"] = np.zeros(3)
    with pytest.raises(CheckpointError, match="expected a Keras model or its weights, found 'x'"):
        export(tmp_path / "data.h5")
    made = io.BytesIO()
    with h5py.File(made, "w") as file:
        file.create_dataset("layers/dense/vars/0", (1 << 40,), "f4", chunks=(1 << 20,))
    (tmp_path / "large.weights.h5").write_bytes(made.getvalue())
    with pytest.raises(CheckpointError, match="claims to unpack to"):
        export(tmp_path / "large.weights.h5")
    with h5py.File(tmp_path / "link.weights.h5", "w") as file:
        file["layers/dense/vars/0"] = h5py.ExternalLink("data.h5", "/x")
    with pytest.raises(CheckpointError, match="is a link to somewhere else"):
        export(tmp_path / "link.weights.h5")
    with h5py.File(tmp_path / "within.weights.h5", "w") as file:
        file["layers/dense/vars/0"] = np.zeros(3)
        file["layers/again"] = file["layers"]
    assert export(tmp_path / "within.weights.h5").tensors == 1
    with h5py.File(tmp_path / "plain.weights.h5", "w") as file:
        file["layers/dense/vars/0"] = np.zeros(3)
    content = (tmp_path / "plain.weights.h5").read_bytes()
    assert content.count(b"SNOD") > 1  # where a group lists what it holds
    (tmp_path / "broken.weights.h5").write_bytes(content.replace(b"SNOD", b"NONE"))
    with pytest.raises(CheckpointError, match=r"not an HDF5 file, or damaged: .*symbol table"):
        export(tmp_path / "broken.weights.h5")
    content = bytearray(source.read_bytes())
    with zipfile.ZipFile(source) as archive:
        content[archive.getinfo("config.json").header_offset + 6] |= 1
    entry = content.rindex(b"config.json", 0, content.rindex(b"PK\5\6")) - 46
    content[entry + 8] |= 1  # as if encrypted
    (tmp_path / "locked.keras").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"not a \.keras file, or damaged: .*encrypted"):
        export(tmp_path / "locked.keras")
    with pytest.raises(CheckpointError, match="neither a best and a last, nor keys"):
        export(source, prefix="real.")
    with pytest.raises(CheckpointError, match="the target exists"):
        export(source, source)
