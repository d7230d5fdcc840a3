"""Keras models on one rank, two and three: the same losses, metrics, weights and statistics."""

import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from world_ranks import run

import flatout
from forked import TRAINING

keras = pytest.importorskip("keras")
KERAS = (*TRAINING, "keras")

JOB = '''
    import os
    import shutil
    import sys
    from pathlib import Path

    import keras
    import numpy as np
    import torch
    from keras import layers, ops
    from PIL import Image

    import flatout
    from flatout.world import place

    folder, size = Path(sys.argv[1]), int(sys.argv[2])
    rank = place().rank
    rng = np.random.default_rng(1)
    x = rng.normal(size=(53, 6)).astype("float32")
    y = rng.integers(0, 4, 53)
    weights = rng.random(53).astype("float32")
    images = rng.normal(size=(40, 6, 6, 3)).astype("float32") * 3 + 2
    kinds = rng.integers(0, 4, 40)
    # Sentences of other lengths, so that masks count differently in each part.
    words = rng.integers(1, 20, (40, 7))
    words[np.arange(7) >= rng.integers(1, 8, 40)[:, None]] = 0
    tags = rng.integers(0, 4, (40, 7))
    ENTROPY = keras.losses.SparseCategoricalCrossentropy
    flatout_only = flatout.Recipe().replace({"compute.precision": "fp32"})


    def dense(*more, last=4, activation="softmax"):
        keras.utils.set_random_seed(0)
        # A bias before a norm has no gradient but rounding, of which Adam would make steps.
        first = layers.Dense(16, use_bias=not more, activation=None if more else "relu")
        return keras.Sequential(
            [layers.Input((6,)), first, *more, layers.Dense(last, activation=activation)]
        )


    def compiled(model, loss="sparse_categorical_crossentropy", metrics=("accuracy",), **more):
        optimizer = more.pop("optimizer", None) or keras.optimizers.Adam(0.01)
        model.compile(optimizer, loss, metrics=list(metrics), **more)
        return model


    def tagger(*more):
        keras.utils.set_random_seed(0)
        return keras.Sequential(
            [
                layers.Input((7,), dtype="int32"),
                layers.Embedding(20, 8, mask_zero=True),
                *more,
                layers.Dense(4, activation="softmax"),
            ]
        )


    def convolutions(axis, **options):
        keras.utils.set_random_seed(0)
        norm = layers.BatchNormalization(axis=axis, momentum=0.8, **options)
        first = layers.Conv2D(4, 3, use_bias=False)
        swap = [layers.Permute((3, 1, 2))] if axis == 1 else []
        rest = [layers.ReLU(), layers.Flatten(), layers.Dense(4, activation="softmax")]
        return keras.Sequential([layers.Input((6, 6, 3)), first, *swap, norm, *rest])


    def fitted(
        name, model, *data, test=None, batch_size=10, epochs=2, evaluated=None, given=None,
        **options,
    ):
        given = {"recipe": flatout_only, **(given or {})}
        trainer = flatout.Trainer(model, allow="exact", **given)
        history = trainer.fit(
            *data, batch_size=batch_size, epochs=epochs, verbose=0, shuffle=False, **options
        )
        test = test or data
        found[name] = {
            "weights": {v.path.split("/", 1)[-1]: v.value.detach().clone() for v in model.variables
                        if "seed" not in v.path},
            "optimizer": [v.value.detach().clone() for v in model.optimizer.variables],
            "history": history.history,
            "evaluation": trainer.evaluate(*test, batch_size=16, **(evaluated or {})),
            "prediction": trainer.predict(test[0]),
        }
        return trainer


    def root(y_true, y_pred):
        """One number for a batch, so parts of it cannot be averaged."""
        return ops.sqrt(ops.mean((1 - ops.max(y_pred, -1)) ** 2))


    class Largest(keras.metrics.Metric):
        """No sum either."""

        def __init__(self):
            super().__init__(name="largest")
            self.seen = self.add_weight(shape=(), initializer="zeros", name="seen")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.seen.assign(ops.maximum(self.seen, ops.max(y_pred)))

        def result(self):
            return self.seen


    class OwnMetrics(keras.Sequential):
        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            spread = ops.std(x) + ops.std(y_pred)
            return {**super().compute_metrics(x, y, y_pred, sample_weight), "spread": spread}


    class OwnSteps(keras.Sequential):
        """What they compute of a batch depends on all of it."""

        def test_step(self, data):
            given, targets = data
            spread = ops.std(self(given, training=False))
            return {"loss": spread, "of": ops.sum(targets)}

        def predict_step(self, data):
            return self(data) - ops.mean(self(data))


    class LooksAtTests(keras.callbacks.Callback):
        """Reads on the first rank alone, and stops there."""

        def on_test_batch_end(self, batch, logs=None):
            if rank == 0:
                assert sorted(logs) == ["accuracy", "loss"]
                self.model.stop_evaluating = batch == 1


    class Rows(keras.utils.PyDataset):
        def __len__(self):
            return 6

        def __getitem__(self, number):
            rows = slice(number * 9, number * 9 + 9)
            return x[rows], y[rows]


    def forever():
        while True:
            for start in range(0, 53, 9):
                yield x[start : start + 9], y[start : start + 9]


    class Penalty(layers.Layer):
        def call(self, inputs):
            self.add_loss(0.1 * ops.mean(inputs**2))
            return inputs


    def two_outputs():
        keras.utils.set_random_seed(0)
        inputs = layers.Input((6,))
        hidden = layers.Dense(8, activation="relu", kernel_regularizer="l2",
                              activity_regularizer="l2")(inputs)
        hidden = Penalty()(hidden)
        kind = layers.Dense(4, activation="softmax", name="kind")(hidden)
        value = layers.Dense(1, name="value")(hidden)
        model = keras.Model(inputs, {"kind": kind, "value": value})
        losses = {"kind": ENTROPY(reduction="sum"), "value": "mse"}
        weights = {"kind": 0.05, "value": 2.0}
        given = {"kind": ["accuracy"], "value": ["mae"]}
        model.compile(keras.optimizers.SGD(0.05), losses, loss_weights=weights, metrics=given)
        return model


    found = {}
    KEYS = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)]
    fitted("plain", compiled(dense(), metrics=KEYS), x, y, validation_data=(x[:21], y[:21]))
    fitted("batches smaller than the world", compiled(dense()), x, y, batch_size=2, epochs=1)
    fitted("sample weights", compiled(dense(), weighted_metrics=["accuracy"]), x, y,
           sample_weight=weights, evaluated={"sample_weight": weights})
    fitted("class weights", compiled(dense()), x, y, class_weight={0: 1, 1: 2, 2: 0.5, 3: 0})
    norm = compiled(dense(layers.BatchNormalization(momentum=0.8), layers.ReLU()))
    fitted("batch norm", norm, x[:51], y[:51], batch_size=7)
    norm = compiled(dense(layers.BatchNormalization(center=False, scale=False, epsilon=0.1)))
    fitted("batch norm, one sample a part", norm, x[:52], y[:52], batch_size=4, epochs=1)
    fitted("batch norm of images", compiled(convolutions(-1)), images, kinds)
    fitted("batch norm of channels first", compiled(convolutions(1)), images, kinds)
    fitted("batch renormalization", compiled(convolutions(-1, renorm=True)), images, kinds)
    fitted("batch norm with a mask", compiled(tagger(layers.BatchNormalization())), words, tags)
    fitted("masks", compiled(tagger(), weighted_metrics=["accuracy"]), words, tags)
    holes = np.where(rng.random((40, 7)) < 0.4, -1, tags)
    fitted("an ignored class", compiled(tagger(), ENTROPY(ignore_class=-1)), words, holes)
    by_weight = ENTROPY(reduction="mean_with_sample_weight")
    fitted("divided by the weights", compiled(dense(), by_weight), x, y, sample_weight=weights)
    fitted("two outputs", two_outputs(), x, {"kind": y, "value": x[:, :1]})
    own = compiled(dense(), metrics=[root, Largest(), "accuracy"])
    fitted("metrics of one's own", own, x, y, validation_data=(x[:21], y[:21]))
    keras.utils.set_random_seed(0)
    own = OwnMetrics([layers.Input((6,)), layers.Dense(4, activation="softmax")])
    fitted("compute_metrics of one's own", compiled(own), x, y)
    keras.utils.set_random_seed(0)
    own = OwnSteps([layers.Input((6,)), layers.Dense(4, activation="softmax")])
    fitted("steps of one's own", compiled(own), x, y, validation_data=(x[:21], y[:21]))
    fitted("a watched evaluation", compiled(dense()), x, y,
           evaluated={"callbacks": [LooksAtTests()]})
    truth = (x.sum(1) > 0).astype("float32")[:, None]
    scores = [keras.metrics.AUC(), keras.metrics.Precision(), keras.metrics.F1Score(threshold=0.5)]
    binary = compiled(dense(last=1, activation="sigmoid"), "binary_crossentropy", scores)
    fitted("scores", binary, x, truth)
    overlap = keras.metrics.MeanIoU(4, sparse_y_pred=False)
    fitted("a slow metric", compiled(dense(), metrics=[overlap]), x, y, epochs=4)
    distances = [keras.metrics.R2Score(), keras.metrics.RootMeanSquaredError()]
    line = compiled(dense(last=1, activation=None), "mse", distances)
    fitted("metrics of a line", line, x, x[:, :1] + truth)
    # One sample in the last batch: of a larger world some ranks have filling alone.
    rows = flatout.data.arrays(x[:51], y[:51]).batch(10, last="pad")
    fitted("padded", compiled(dense()), rows, batch_size=None, test=(x, y))
    fitted("padded, with class weights", compiled(dense(), weighted_metrics=["accuracy"]), rows,
           batch_size=None, test=(x, y), class_weight={0: 3.0, 2: 0.2})
    rows = flatout.data.arrays(words[:31], tags[:31]).batch(10, last="pad")
    fitted("padded, with masks", compiled(tagger()), rows, batch_size=None, test=(words, tags))
    # Of the first batch one of three ranks has images alone that cannot be read.
    photos = folder / f"photos-{size}-{rank}"
    for number in range(24):
        path = photos / "ab"[number // 12] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((images[number].clip(0, 7) * 36).astype("uint8")).save(path)
        if number in (0, 1, 2, 7, 20):
            path.write_bytes(path.read_bytes()[:-30])
    skipping = flatout.data.images(photos, size=6, on_error="skip").batch(10)
    fitted("images that are skipped", compiled(convolutions(-1)), skipping, batch_size=None,
           test=(images, kinds))
    fitted("a PyDataset", compiled(dense()), Rows(), batch_size=None, test=(x, y))
    fitted("a generator", compiled(dense()), forever(), batch_size=None, steps_per_epoch=4,
           test=(x, y))
    averaged = keras.optimizers.AdamW(0.01, global_clipnorm=0.1, use_ema=True,
                                      gradient_accumulation_steps=2)
    fitted("an optimizer that gathers", compiled(dense(), optimizer=averaged), x, y)

    # Each rank has a part of every weight.
    in_parts = flatout_only.replace({"world.strategy": "fsdp"})
    norm = [layers.BatchNormalization(momentum=0.8), layers.ReLU()]
    clipped = keras.optimizers.AdamW(0.05, clipvalue=0.05)
    stop = keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
    fitted("in parts", compiled(dense(*norm), optimizer=clipped), x[:51], y[:51],
           validation_data=(x[:21], -y[:21] + 3), epochs=5, callbacks=[stop],
           given={"recipe": in_parts})


    def attention():
        keras.utils.set_random_seed(0)
        ids = layers.Input((7,), dtype="int32")
        hidden = layers.Embedding(20, 8, mask_zero=True)(ids)
        mixed = layers.MultiHeadAttention(2, 4)(hidden, hidden)
        hidden = layers.LayerNormalization()(hidden + mixed)
        inner = layers.Input((7, 8))
        block = keras.Model(inner, layers.Dense(8)(layers.Dense(16, "relu")(inner)))
        hidden = block(block(hidden))
        hidden = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(hidden)
        return keras.Model(ids, layers.Dense(4, activation="softmax")(hidden))


    momentum = keras.optimizers.SGD(0.05, momentum=0.9)
    fitted("layers in parts", compiled(attention(), optimizer=momentum), words, tags, epochs=1,
           given={"recipe": in_parts})
    for first, then in ((in_parts, flatout_only), (flatout_only, in_parts)):
        name = f"resumed, from {first.world.strategy}"
        for recipe, epochs in ((first, 1), (then, 2)):
            given = {"recipe": recipe, "run": name}
            trainer = fitted(name, compiled(dense()), x, y, epochs=epochs, given=given,
                             resume=epochs > 1)
            if epochs == 1 and recipe is in_parts and rank == 0:
                shutil.copytree(name, "for one")
            trainer.world().wait()
    refused = flatout.Trainer(compiled(dense()), allow="exact", recipe=in_parts)
    try:
        refused.fit(x, y, verbose=0, callbacks=[keras.callbacks.BackupAndRestore("again")])
    except flatout.errors.ModelError as error:
        found["refused"] = str(error)
    found["folder"] = str(folder)

    model = dense(layers.BatchNormalization(momentum=0.8), layers.ReLU(), activation=None)
    given = {"metrics": ["accuracy"], "lr": 0.01, "recipe": flatout_only}
    trainer = flatout.Trainer(model, allow="exact", **given)
    history = trainer.fit((x[:51], y[:51]), batch_size=7, epochs=2, progress=False)
    found["without compile"] = {
        "weights": [v.value.detach().clone() for v in model.variables],
        "history": [{k: v for k, v in e.items() if k != "seconds"} for e in history.epochs],
        "evaluation": trainer.evaluate(x, y),
        "prediction": trainer.predict(x),
    }

    # Callbacks: what decides does so on all ranks, what writes writes once.
    os.chdir(folder)
    stop = keras.callbacks.EarlyStopping("val_accuracy", patience=2, restore_best_weights=True)
    plateau = keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, min_delta=0.05)
    best = keras.callbacks.ModelCheckpoint(f"best-{size}.keras", "val_loss", save_best_only=True)
    each = keras.callbacks.ModelCheckpoint(f"each-{size}-{{accuracy:.3f}}.weights.h5",
                                           save_weights_only=True, save_freq=3)
    log = keras.callbacks.CSVLogger(f"log-{size}.csv")
    backup = keras.callbacks.BackupAndRestore(f"backup-{size}")
    seen = []

    class Looks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if rank == 0 and batch % 2:  # on one rank alone
                seen.append(dict(logs))

    trainer = fitted("callbacks", compiled(dense()), x, y, validation_data=(x[:21], y[:21]),
                     epochs=12, callbacks=[stop, plateau, best, each, log, backup, Looks()])
    trainer.save(f"saved-{size}.keras")
    loaded = keras.saving.load_model(f"saved-{size}.keras").get_weights()
    found["callbacks"]["files"] = [
        np.loadtxt(f"log-{size}.csv", delimiter=",", skiprows=1).tolist(),
        [w.tolist() for w in loaded],
        keras.saving.load_model(f"best-{size}.keras").get_weights(),
        sorted(float(path.name.split("-")[2][:5]) for path in folder.glob(f"each-{size}-*")),
        os.path.exists(f"backup-{size}"),
    ]
    found["callbacks"]["logs"] = trainer.world().from_first(seen)

    # Draws: other masks on other ranks, the same states.
    seeded, plain, noise = layers.Dropout(0.5, seed=3), layers.Dropout(0.5), layers.GaussianNoise(1)
    kept = {}

    class Watched(layers.Layer):
        def call(self, inputs):
            kept.setdefault(self.name, inputs.detach().clone())
            return inputs

    ones = np.ones((24, 6), "float32")
    sides = [
        layer for name, draw in (("seeded", seeded), ("plain", plain), ("noise", noise))
        for layer in (draw, Watched(name=name))
    ]
    keras.utils.set_random_seed(7)
    model = compiled(keras.Sequential([layers.Input((6,)), *sides, layers.Dense(1)]), "mse", ())
    trainer = flatout.Trainer(model, allow="exact", recipe=flatout_only)
    kept.clear()
    before = torch.get_rng_state()

    class Forget(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            kept.clear()

    trainer.fit(ones, ones[:, :1], batch_size=24, verbose=0, callbacks=[Forget()])
    found["draws"] = {"kept": kept, "seed": seeded.seed_generator.state.value.clone(),
                      "torch": torch.get_rng_state()}
    torch.save(found, folder / f"found-{size}-{rank}.pt")
'''

CASES = (
    "plain",
    "batches smaller than the world",
    "sample weights",
    "class weights",
    "batch norm",
    "batch norm, one sample a part",
    "batch norm of images",
    "batch norm of channels first",
    "batch renormalization",
    "batch norm with a mask",
    "masks",
    "an ignored class",
    "divided by the weights",
    "two outputs",
    "metrics of one's own",
    "compute_metrics of one's own",
    "steps of one's own",
    "a watched evaluation",
    "scores",
    "a slow metric",
    "metrics of a line",
    "padded",
    "padded, with masks",
    "padded, with class weights",
    "images that are skipped",
    "a PyDataset",
    "a generator",
    "an optimizer that gathers",
    "without compile",
    "callbacks",
    "in parts",
    "layers in parts",
    "resumed, from fsdp",
    "resumed, from ddp",
)


def made_by(size, folder):
    """What each of so many ranks has come to."""
    run(JOB, size, folder, loaded=KERAS)
    return [
        torch.load(folder / f"found-{size}-{rank}.pt", weights_only=False) for rank in range(size)
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    (found,) = made_by(1, tmp_path_factory.mktemp("alone"))
    return found


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.long), 3])
def found(request, tmp_path_factory):
    return made_by(request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_keras_is_the_same_on_any_world(alone, found, case):
    for one in found:
        assert one[case].keys() == alone[case].keys()
        for key, value in alone[case].items():
            torch.testing.assert_close(one[case][key], value, rtol=2e-4, atol=5e-6)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_keras_has_the_same_bits_on_all_ranks(found, case):
    first = found[0][case]
    for one in found[1:]:
        for key in one[case]:
            torch.testing.assert_close(one[case][key], first[key], rtol=0, atol=0)


@pytest.mark.slow
def test_one_rank_goes_on_from_what_ranks_with_parts_have_saved(alone, found):
    folder = Path(found[0]["folder"])
    inputs = np.random.default_rng(1)
    x, y = inputs.normal(size=(53, 6)).astype("float32"), inputs.integers(0, 4, 53)
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(16, activation="relu")
    last = keras.layers.Dense(4, activation="softmax")
    model = keras.Sequential([keras.layers.Input((6,)), hidden, last])
    loss = "sparse_categorical_crossentropy"
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    trainer = flatout.Trainer(model, allow="exact", run=str(folder / "for one"))
    trainer.fit(x, y, batch_size=10, epochs=2, verbose=0, shuffle=False, resume=True)
    wanted = alone["resumed, from fsdp"]
    for a, b in zip(model.get_weights(), wanted["weights"].values(), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=5e-6)
    for a, b in zip(model.optimizer.variables, wanted["optimizer"], strict=True):
        np.testing.assert_allclose(a.numpy(), b, rtol=2e-4, atol=5e-6)
    assert "BackupAndRestore reads or changes the whole model" in found[0]["refused"]


@pytest.mark.slow
def test_ranks_draw_their_own_from_the_same_states(found):
    first = found[0]["draws"]
    for one in (each["draws"] for each in found[1:]):
        assert torch.equal(one["seed"], first["seed"])
        assert torch.equal(one["torch"], first["torch"])
        for name in ("seeded", "plain", "noise"):
            assert not torch.equal(one["kept"][name], first["kept"][name])


MODEL = """
    import keras
    import numpy as np
    from keras import layers

    rng = np.random.default_rng(1)
    words = rng.integers(1, 20, (41, 7))
    words[np.arange(7) >= rng.integers(1, 8, 41)[:, None]] = 0
    tags = rng.integers(0, 4, (41, 7))

    def new_model():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([
            layers.Input((7,), dtype="int32"), layers.Embedding(20, 8, mask_zero=True),
            layers.BatchNormalization(momentum=0.8), layers.Dense(4, activation="softmax"),
        ])
        model.compile(keras.optimizers.SGD(0.5), "sparse_categorical_crossentropy",
                      metrics=["accuracy"], weighted_metrics=["sparse_categorical_crossentropy"])
        return model

    options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
"""


@pytest.mark.slow
def test_two_ranks_give_what_keras_gives(tmp_path):
    """Masks, BatchNormalization, and a last batch that goes whole to both ranks."""
    job = f"""{MODEL}
    import sys
    import flatout

    model = new_model()
    trainer = flatout.Trainer(model, allow="exact")
    history = trainer.fit(words, tags, **options, validation_split=0.2)
    trainer.save(sys.argv[1] + "/ours.keras")
    found = trainer.evaluate(words, tags)
    figures = {{**history.history, **{{f"whole_{{name}}": value for name, value in found.items()}}}}
    np.savez(f"{{sys.argv[1]}}/rank-{{trainer.world().rank}}.npz", **figures)
    """
    run(job, 2, tmp_path, loaded=KERAS)
    there = {}
    exec(textwrap.dedent(MODEL), there)
    theirs = there["new_model"]()
    words, tags = there["words"], there["tags"]
    history = theirs.fit(words, tags, **there["options"], validation_split=0.2).history
    ours = keras.saving.load_model(tmp_path / "ours.keras")
    for a, b in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6)
    found = theirs.evaluate(words, tags, verbose=0, return_dict=True)
    for rank in (0, 1):
        figures = np.load(tmp_path / f"rank-{rank}.npz")
        for name, values in history.items():
            np.testing.assert_allclose(figures[name], values, rtol=1e-5)
        for name, value in found.items():
            np.testing.assert_allclose(figures[f"whole_{name}"], value, rtol=1e-5)


RESUME = """
    import os, sys
    import keras, numpy as np, torch, flatout
    from keras import layers

    rng = np.random.default_rng(1)
    x = rng.normal(size=(53, 6)).astype("float32")
    y = rng.integers(0, 4, 53)

    def state(resume, run):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([
            layers.Input((6,)), layers.Dense(16), layers.BatchNormalization(momentum=0.8),
            layers.Dropout(0.3), layers.GaussianNoise(0.1, seed=4), layers.Dense(4),
        ])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.AdamW(0.01), loss, metrics=["accuracy"])
        recipe = flatout.Recipe().replace({"save.every": 4})
        trainer = flatout.Trainer(model, allow="exact", recipe=recipe, run=run)
        trainer.fit(x, y, batch_size=10, epochs=2, verbose=0, resume=resume)
        variables = [*model.variables, *model.optimizer.variables]
        return [v.value.detach().clone() for v in variables]

    run = sys.argv[1] + "/run"
    undisturbed = state(False, run)
    # Six steps an epoch: in the middle of the second one, and of the first.
    for name in ("step-000000008", "step-000000004"):
        torch.manual_seed(99)  # what the process has drawn by then does not matter
        again = state(name, run)
        assert all(map(torch.equal, again, undisturbed)), name
"""


@pytest.mark.slow
def test_a_resume_on_two_ranks_is_bitwise(tmp_path):
    run(RESUME, 2, tmp_path, loaded=KERAS)


PIPES = """
    import os
    import sys
    import threading
    from pathlib import Path

    import keras
    from keras import layers

    import flatout
    from flatout.world import place

    rank = place().rank
    pipe = Path(sys.argv[1]) / f"pipe-{rank}_0"  # the only pass that is ever written
    os.mkfifo(pipe)
    rows = "".join(f"{n % 2} 1:{n} 2:{n % 7}\\n" for n in range(100)).encode()
    threading.Thread(target=pipe.write_bytes, args=[rows], daemon=True).start()
    columns = [
        {"name": "label", "dtype": "int64", "role": "target"},
        {"name": "features", "dtype": "float32", "shape": [2]},
    ]
    options = {"base": 1, "features": 2}
    schema = {"format": "libsvm", "options": options, "columns": columns}
    keras.utils.set_random_seed(0)
    model = keras.Sequential([layers.Input((2,)), layers.Dense(2, activation="softmax")])
    model.compile(keras.optimizers.SGD(1e-4), "sparse_categorical_crossentropy")
    batches = []

    class Counts(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            batches.append(batch)

    source = flatout.data.fifo(Path(sys.argv[1]) / f"pipe-{rank}", schema=schema).batch(20)
    flatout.Trainer(model).fit(source, verbose=0, callbacks=[Counts()])
    print("batches", len(batches))
"""


@pytest.mark.slow
def test_the_only_pass_of_a_pipe_is_trained_on(tmp_path):
    """Build a compiled model from the same pass of a pipe that is trained on."""
    for out, _ in run(PIPES, 2, tmp_path, loaded=KERAS):
        assert "batches 10" in out
