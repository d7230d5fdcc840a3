"""Methods of a model, a callback or a history are called as Keras' own trainer calls them."""

import inspect

import numpy as np
import pytest
import torch

keras = pytest.importorskip("keras")
from keras import layers  # noqa: E402

import flatout  # noqa: E402
from flatout.errors import DataError, ModelError  # noqa: E402

if keras.backend.backend() != "torch":
    pytest.skip("Keras is on another backend", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("one_thread")

ONE_PASS = {"batch_size": 8, "verbose": 0}
FIT = {**ONE_PASS, "epochs": 2, "shuffle": False}


def quiet(model, **more):
    return flatout.Trainer(model, allow="exact", say=lambda line: None, **more)


def points(count=20):
    random = np.random.default_rng(0)
    return random.normal(size=(count, 5)).astype("float32"), np.arange(count) % 3


def compiled(kind=keras.Model):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((5,))
    hidden = layers.Dense(4, activation="relu")(inputs)
    model = kind(inputs, layers.Dense(3, activation="softmax")(hidden))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def plain(value):
    """Return arguments and logs in a form to compare; tensors by shape and dtype."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, *map(plain, value)
    if torch.is_tensor(value) or isinstance(value, np.ndarray):
        return tuple(value.shape), str(value.dtype)
    return value if isinstance(value, (bool, int, str, type(None))) else type(value).__name__


def is_symbolic(*given):
    """Return whether Keras calls with meta tensors, to learn shapes when it builds a model."""
    tensors = [t for t in keras.tree.flatten(given) if torch.is_tensor(t)]
    return any(t.device.type == "meta" for t in tensors)


def recorder(name, calls):
    """Return a model class whose method of this name records its calls."""

    def method(self, *given, **named):
        if not is_symbolic(given, named):
            calls.append((plain(given), plain(named)))
        return getattr(super(Recorder, self), name)(*given, **named)

    Recorder = type("Recorder", (keras.Model,), {name: method})
    return Recorder


METHODS = (
    "call", "compute_loss", "compute_metrics", "get_metrics_result", "make_predict_function",
    "make_test_function", "make_train_function", "predict_step", "reset_metrics", "test_step",
    "train_step",
)  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_a_method_of_the_users_own_is_called_as_keras_calls_it(name):
    x, y = points()
    calls, figures = {"theirs": [], "ours": []}, {}
    for whose, made in calls.items():
        model = compiled(recorder(name, made))
        theirs = whose == "theirs"
        fitting = model if theirs else quiet(model)
        history = fitting.fit(x, y, validation_data=(x, y), **FIT).history
        named = fitting.evaluate(x, y, return_dict=True, **ONE_PASS)
        listed = fitting.evaluate(x, y, return_dict=False, **ONE_PASS)
        figures[whose] = history, named, listed, fitting.predict(x, **ONE_PASS)
    assert calls["ours"] == calls["theirs"]
    assert calls["ours"]
    for ours, theirs in zip(figures["ours"], figures["theirs"], strict=True):
        compare(ours, theirs)


@pytest.mark.parametrize("name", ["fit", "evaluate", "predict"])
def test_a_whole_verb_of_the_users_own_is_called(name):
    x, y = points()
    calls, results = {"theirs": [], "ours": []}, {}
    for whose, made in calls.items():
        model = compiled(recorder(name, made))
        fitting = model if whose == "theirs" else quiet(model)
        fitting.fit(x, y, validation_data=(x, y), **FIT)
        figures = fitting.evaluate(x, y, return_dict=True, **ONE_PASS)
        results[whose] = figures, fitting.predict(x, **ONE_PASS)
    assert len(calls["ours"]) == len(calls["theirs"])
    for ours, theirs in zip(results["ours"], results["theirs"], strict=True):
        compare(ours, theirs)


def compare(ours, theirs):
    if isinstance(ours, dict):
        assert sorted(ours) == sorted(theirs)
        ours, theirs = ([value[name] for name in sorted(ours)] for value in (ours, theirs))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


class OwnSteps(keras.Model):
    def test_step(self, data):
        x, y = data
        loss = keras.ops.mean(self(x, training=False)) * 100
        return {"loss": loss, "own": keras.ops.sum(y)}

    def predict_step(self, data):
        return keras.ops.argmax(self(data), axis=-1)


def test_results_of_steps_of_the_users_own():
    x, y = points()
    theirs, ours = compiled(OwnSteps), quiet(compiled(OwnSteps))
    arguments = {**FIT, "validation_data": (x, y)}
    compare(ours.fit(x, y, **arguments).history, theirs.fit(x, y, **arguments).history)
    assert ours.evaluate(x, y, batch_size=8)["own"] == y[16:].sum()
    classes = ours.predict(x)
    assert classes.shape == (20,)
    np.testing.assert_array_equal(classes, theirs.predict(x, verbose=0))


def test_a_pipeline_comes_to_steps_of_the_users_own():
    x, y = points()
    trainer = quiet(compiled(OwnSteps))
    source = flatout.data.arrays(x, y).batch(8)
    compare(trainer.evaluate(source), trainer.evaluate(x, y, batch_size=8))


# -- callbacks -------------------------------------------------------------------------------------


class Log(keras.callbacks.Callback):
    """Records each event with its arguments, and may stop the training."""

    def __init__(self, stops=()):
        super().__init__()
        self.events, self.stops = [], stops

    def note(self, name, given, named):
        logs = named.get("logs", given[-1] if given else None)
        numbers = [value for value in given if isinstance(value, int)]
        figures = {k: v for k, v in (logs or {}).items() if k != "outputs"}
        has_logs = isinstance(logs, dict)
        self.events.append((name, numbers, sorted(named), has_logs, sorted(logs or {}), figures))
        if (name, *numbers) in self.stops:
            for verb in ("training", "evaluating", "predicting"):
                setattr(self.model, f"stop_{verb}", True)

    def set_params(self, params):
        super().set_params(params)
        self.events.append(("set_params", [], [], True, sorted(params), params))


for _event in [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]:
    if _event not in ("on_batch_begin", "on_batch_end"):
        setattr(
            Log,
            _event,
            lambda self, *given, _event=_event, **named: self.note(_event, given, named),
        )


def compare_events(ours, theirs):
    assert [event[:5] for event in ours] == [event[:5] for event in theirs]
    for mine, others in zip(ours, theirs, strict=True):
        compare(mine[5], others[5])


@pytest.mark.parametrize(
    "stops", [(), [("on_train_batch_end", 1)], [("on_epoch_end", 0)], [("on_test_batch_end", 0)]]
)
def test_callbacks_of_a_fit_get_what_keras_gives_them(stops):
    x, y = points()
    theirs, ours = Log(stops), Log(stops)
    arguments = {**FIT, "validation_data": (x, y)}
    there = compiled().fit(x, y, callbacks=[theirs], **arguments)
    here = quiet(compiled()).fit(x, y, callbacks=[ours], **arguments)
    compare_events(ours.events, theirs.events)
    compare(here.history, there.history)
    assert here.epoch == there.epoch
    assert dict(here.params) == there.params


class Stream(torch.utils.data.IterableDataset):
    """Batches whose number is unknown before the last batch."""

    def __iter__(self):
        x, y = points()
        return iter([(x[at : at + 8], y[at : at + 8]) for at in (0, 8, 16)])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_callbacks_are_called_only_for_batches_that_come(accumulate):
    loader = torch.utils.data.DataLoader(Stream(), batch_size=None)
    theirs, ours = Log(), Log()
    if accumulate == 1:
        compiled().fit(loader, epochs=2, verbose=0, callbacks=[theirs])
    else:
        x, y = points()
        compiled().fit(x, y, **FIT | {"batch_size": 16}, callbacks=[theirs])
    fitting = quiet(compiled(), accumulate=accumulate)
    fitting.fit(loader, epochs=2, verbose=0, callbacks=[ours])
    assert [event[:3] for event in ours.events[1:]] == [event[:3] for event in theirs.events[1:]]


def test_callbacks_of_an_evaluation_and_a_prediction_get_what_keras_gives_them():
    x, y = points()
    for stops in ((), [("on_test_batch_end", 1), ("on_predict_batch_end", 1)]):
        theirs, ours = Log(stops), Log(stops)
        figures, outputs = [], []
        for fitting, log in ((compiled(), theirs), (quiet(compiled()), ours)):
            named = {"callbacks": [log], **ONE_PASS}
            figures.append(fitting.evaluate(x, y, return_dict=True, **named))
            outputs.append(fitting.predict(x, **named))
        compare_events(ours.events, theirs.events)
        compare(*figures)
        compare(*outputs)


def test_an_evaluation_in_a_callback_is_not_followed_by_those_of_the_fit():
    x, y = points()
    log = Log()

    class Evaluates(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            trainer.evaluate(x, y)
            trainer.predict(x)

    trainer = quiet(compiled())
    trainer.fit(x, y, callbacks=[log, Evaluates()], **FIT)
    assert not [event for event in log.events if "test" in event[0] or "predict" in event[0]]


def test_keras_own_bar_is_shown_where_it_is_asked_for(capsys):
    x, y = points()
    trainer = quiet(compiled())
    trainer.evaluate(x, y)
    assert not capsys.readouterr().out
    trainer.evaluate(x, y, verbose=2)
    assert "accuracy: " in capsys.readouterr().out


def test_a_callback_that_follows_fits_alone_is_refused():
    x, y = points()
    with pytest.raises(ModelError, match="EarlyStopping follows fit"):
        quiet(compiled()).evaluate(x, y, callbacks=[flatout.train.callbacks.EarlyStopping("loss")])
    trainer = flatout.Trainer(torch.nn.Linear(5, 3), say=lambda line: None)
    with pytest.raises(ModelError, match="evaluate and predict take callbacks"):
        trainer.predict(torch.zeros(2, 5), callbacks=[Log()])
    assert trainer.evaluate(torch.zeros(2, 5), torch.zeros(2).long(), return_dict=False)


# -- history and arguments -------------------------------------------------------------------------


def test_a_history_has_what_keras_history_has():
    x, y = points()
    model = compiled()
    options = {**FIT, "initial_epoch": 1, "epochs": 3}
    theirs, ours = model.fit(x, y, **options), quiet(model).fit(x, y, **options)
    assert ours.epoch == theirs.epoch == [1, 2]
    assert dict(ours.params) == theirs.params
    assert ours.model is model
    assert flatout.Trainer(torch.nn.Linear(5, 3), say=print).fit(x, y, epochs=2).epoch == [0, 1]


@pytest.mark.parametrize("verb", ["fit", "evaluate", "predict"])
def test_arguments_are_those_of_keras(verb):
    theirs = inspect.signature(getattr(keras.Model, verb)).parameters.values()
    ours = inspect.signature(getattr(flatout.Trainer, verb)).parameters.values()
    expected = [(p.name, p.kind, p.default) for p in theirs if p.kind is not p.VAR_KEYWORD]
    found = [(p.name, p.kind, p.default) for p in ours if p.kind is not p.KEYWORD_ONLY]
    # The Trainer's default stays a dict of figures.
    assert found == [(n, k, True if n == "return_dict" else d) for n, k, d in expected]


def test_validation_data_may_be_a_list():
    x, y = points()
    options = {**FIT, "validation_data": [x, y]}
    compare(quiet(compiled()).fit(x, y, **options).history, compiled().fit(x, y, **options).history)


@pytest.mark.parametrize("kind", ["<U1", object])
def test_targets_of_text_are_named(kind):
    x, y = points()
    names = np.array(["a", "b", "c"])[y].astype(kind)
    with pytest.raises(DataError, match=r"targets: expected numbers, found dtype") as caught:
        quiet(compiled()).fit(x, names, **FIT)
    assert "encode" in caught.value.do
    names, classes = np.unique(names, return_inverse=True)  # follow the advice
    quiet(compiled()).fit(x, classes, **FIT)


# -- orders ----------------------------------------------------------------------------------------


SEEN = []


class Seen(keras.layers.Layer):
    """Records the first number of each training sample."""

    def call(self, x, training=False):
        if training and not is_symbolic(x):
            SEEN.extend(x[:, 0].tolist())
        return x


def seen_model():
    model = keras.Sequential([keras.Input((1,)), Seen(), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    return model


def order_of_last(trainer, **named):
    """Return the order of samples in the last epoch of a fit."""
    x = np.arange(32, dtype="float32")[:, None]
    trainer.fit(x, x, batch_size=8, verbose=0, **named)
    return tuple(SEEN[-32:])


@pytest.mark.parametrize("keeps", [True, False])
def test_fits_of_one_epoch_in_a_loop_draw_other_orders(keeps):
    found = []
    for _ in range(2):  # the second run of a script repeats the orders
        model = seen_model()
        kept = quiet(model)
        trainers = [kept if keeps else quiet(model) for _ in range(3)]
        found.append([order_of_last(trainer) for trainer in trainers])
    assert found[0] == found[1]
    assert len(set(found[0])) == 3
    assert {tuple(sorted(order)) for order in found[0]} == {tuple(range(32))}


def test_a_fit_from_a_later_epoch_draws_the_orders_of_one_long_fit():
    model = seen_model()
    whole = order_of_last(quiet(model), epochs=2)
    model = seen_model()
    order_of_last(quiet(model))
    assert order_of_last(quiet(model), initial_epoch=1, epochs=2) == whole


def test_a_resume_goes_on_with_the_orders_of_its_fit(tmp_path):
    """Resume the second fit of a model as the first fit of a process."""
    x, y = points()

    def fitted(model, run=None, **named):
        quiet(model, run=run).fit(x, y, batch_size=8, verbose=0, **named)
        return model

    whole = fitted(fitted(compiled()), epochs=2)
    fitted(fitted(compiled()), tmp_path / "run")
    again = fitted(compiled(), tmp_path / "run", epochs=2, resume=True)
    other = fitted(compiled(), epochs=3)
    compare_weights(again, whole)
    with pytest.raises(AssertionError):  # another fit has another order
        compare_weights(other, whole)


def compare_weights(model, other):
    for ours, theirs in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


# -- data ------------------------------------------------------------------------------------------


class Pairs(keras.utils.PyDataset):
    """Batches of eight samples of `points(40)`."""

    def __len__(self):
        return 5

    def __getitem__(self, number):
        return tuple(part[number * 8 : number * 8 + 8] for part in points(40))


def forever():
    while True:
        yield from (Pairs()[number] for number in range(5))


@pytest.mark.parametrize("kind", ["arrays", "PyDataset", "generator", "loader"])
def test_each_validation_of_some_steps_begins_anew(kind):
    x, y = points(40)
    tensors = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
    made = {
        "arrays": lambda: (x, y),
        "PyDataset": Pairs,
        "generator": forever,
        "loader": lambda: torch.utils.data.DataLoader(tensors, 8),
    }[kind]
    histories = []
    for fitting in (compiled(), quiet(compiled())):
        named = {**FIT, "epochs": 3, "validation_data": made(), "validation_steps": 2}
        histories.append(fitting.fit(x, y, **named).history)
    compare(*reversed(histories))


@pytest.mark.parametrize("kind", ["evaluate", "predict"])
def test_steps_limit_an_evaluation_and_a_prediction(kind):
    x, y = points()
    given = (x, y) if kind == "evaluate" else (x,)
    named = {"return_dict": True} if kind == "evaluate" else {}
    found = [
        getattr(fitting, kind)(*given, steps=2, **named, **ONE_PASS)
        for fitting in (quiet(compiled()), compiled())
    ]
    compare(*found)


def test_steps_of_a_source_that_counts_its_own_are_refused():
    x, y = points()
    source = flatout.data.arrays(x, y)
    with pytest.raises(DataError, match="defines itself where a pass ends") as caught:
        quiet(compiled()).fit(x, y, validation_data=source, validation_steps=1, **FIT)
    assert "first, rest = source.split(0.2, by='order')" in caught.value.do
    first, _ = source.split(0.4, by="order")
    figures = quiet(compiled()).evaluate(first)
    compare(figures, compiled().evaluate(x[:8], y[:8], return_dict=True, verbose=0))


def test_a_pipeline_in_batches_validates_a_fit_of_arrays():
    x, y = points()
    source = flatout.data.arrays(x, y).batch(4)
    history = quiet(compiled()).fit(x, y, validation_data=source, **FIT).history
    compare(history, compiled().fit(x, y, validation_data=(x, y), **FIT).history)


@pytest.mark.parametrize("parts", [2, 3])
def test_a_tuple_of_arrays_holds_targets_and_weights(parts):
    x, y = points()
    given = (x, y, np.linspace(0, 1, 20).astype("float32"))[:parts]
    weight = {"sample_weight": given[2]} if parts == 3 else {}
    theirs, ours = compiled(), quiet(compiled())
    compare(ours.fit(given, **FIT).history, theirs.fit(x, y, **weight, **FIT).history)
    figures = ours.evaluate(given, **ONE_PASS)
    compare(figures, theirs.evaluate(x, y, return_dict=True, **weight, **ONE_PASS))


def test_a_tuple_is_the_inputs_of_a_model_of_several():
    x, _ = points()
    inputs = [keras.Input((5,)), keras.Input((5,))]
    total = layers.Dense(1)(layers.Add()(inputs))
    model = keras.Model(inputs, layers.ActivityRegularization(0.1)(total))
    model.compile("sgd")
    assert quiet(model).fit((x, x), **FIT).history["loss"][0] > 0


def tags():
    """Return texts of four words, the class of each word, and a weight for each word."""
    random = np.random.default_rng(0)
    x = random.normal(size=(20, 4, 5)).astype("float32")
    return x, random.integers(0, 3, (20, 4)), random.random((20, 4)).astype("float32")


def tagger(loss):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([layers.Input((4, 5)), layers.Dense(3, activation="softmax")])
    model.compile("sgd", loss, weighted_metrics=["accuracy"])
    return model


WEIGHTS = {0: 1.0, 1: 3.0, 2: 0.5}


@pytest.mark.parametrize("given", ["arrays", "source", "weighted source"])
@pytest.mark.parametrize("kind", ["numbers", "a column", "shares"])
def test_class_weight_of_dense_targets_is_a_weight_of_each_place(kind, given):
    x, y, _ = tags()
    weights = np.vectorize(WEIGHTS.get)(y).astype("float32")
    loss = "sparse_categorical_crossentropy"
    if kind == "a column":
        y = y[..., None]
    elif kind == "shares":
        y, loss = np.eye(3, dtype="float32")[y], "categorical_crossentropy"
    data = (x, y)
    if given != "arrays":
        own = np.linspace(0, 2, 20).astype("float32")
        is_weighted = given == "weighted source"
        data = (flatout.data.arrays(x, y, *[own] * is_weighted),)
        weights = weights * own[:, None] if is_weighted else weights
    there = tagger(loss).fit(x, y, sample_weight=weights, **FIT).history
    compare(quiet(tagger(loss)).fit(*data, class_weight=WEIGHTS, **FIT).history, there)
    quiet(tagger(loss)).fit(*data, class_weight="balanced", **FIT)


def compiled_for_shares(loss):
    model = compiled()
    model.compile("sgd", loss, weighted_metrics=["accuracy"])
    return model


class Words(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.parts = x, y

    def __len__(self):
        return len(self.parts[0]) // FIT["batch_size"]

    def __getitem__(self, at):
        own = slice(at * FIT["batch_size"], (at + 1) * FIT["batch_size"])
        return tuple(part[own] for part in self.parts)


def read_by_keras(given, x, y):
    """Return arguments of fit that give the same batches as arrays."""
    words = Words(x, y)
    if given == "PyDataset":
        return words, {}
    batches = (words[at % len(words)] for at in range(1000))
    return batches, {"steps_per_epoch": len(words)}


@pytest.mark.parametrize("given", ["generator", "PyDataset"])
@pytest.mark.parametrize("kind", ["one class a sample", "a class a place"])
def test_class_weight_of_data_read_by_keras_is_that_of_arrays(kind, given):
    if kind == "a class a place":
        x, y, _ = tags()
        model = tagger
    else:
        x, y = points()
        model = compiled_for_shares
    y = np.eye(3, dtype="float32")[y.astype(int)]
    weights = np.vectorize(WEIGHTS.get)(y.argmax(-1)).astype("float32")
    whole = len(x) // FIT["batch_size"] * FIT["batch_size"]
    x, y, weights = x[:whole], y[:whole], weights[:whole]
    loss = "categorical_crossentropy"
    there = model(loss).fit(x, y, sample_weight=weights, **FIT).history
    batches, steps = read_by_keras(given, x, y)
    options = {key: value for key, value in FIT.items() if key != "batch_size"} | steps
    compare(quiet(model(loss)).fit(batches, class_weight=WEIGHTS, **options).history, there)


def test_class_weight_of_several_targets_is_refused_with_advice():
    x, y = points()
    targets = {"one": y, "two": y}

    class Two(keras.Model):
        def __init__(self):
            super().__init__()
            self.one, self.two = layers.Dense(3), layers.Dense(3)

        def call(self, x):
            return {"one": self.one(x), "two": self.two(x)}

    model = Two()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", {"one": loss, "two": loss})
    batches = ((x[:8], {name: part[:8] for name, part in targets.items()}) for _ in range(9))
    with pytest.raises(ModelError, match="class_weight needs targets that are one array") as caught:
        quiet(model).fit(batches, steps_per_epoch=2, epochs=1, class_weight=WEIGHTS, verbose=0)
    assert "give sample_weight" in caught.value.do


def test_class_weight_and_sample_weight_of_arrays_are_one_weight():
    x, y, weight = tags()
    trainer = quiet(tagger("sparse_categorical_crossentropy"))
    with pytest.raises(DataError, match="at the same time") as caught:
        trainer.fit(x, y, sample_weight=weight, class_weight=WEIGHTS, **FIT)
    assert "multiply them into one sample_weight" in caught.value.do
    trainer.fit(x, y, sample_weight=weight * np.vectorize(WEIGHTS.get)(y), **FIT)


def test_a_weight_of_each_sample_counts_at_each_of_its_places():
    x, y, _ = tags()
    weight = np.linspace(0, 2, 20).astype("float32")
    each = np.repeat(weight[:, None], 4, axis=1)
    loss = "sparse_categorical_crossentropy"
    there = tagger(loss).fit(x, y, sample_weight=each, **FIT).history
    compare(quiet(tagger(loss)).fit(x, y, sample_weight=weight, **FIT).history, there)
    source = flatout.data.arrays(x, y, weight)
    compare(quiet(tagger(loss)).fit(source, **FIT).history, there)


# -- figures that are no numbers -------------------------------------------------------------------


def test_a_nan_in_a_validation_is_named_once_with_its_sample():
    x, y = points()
    bad = x.copy()
    bad[17, 2] = np.nan
    history = quiet(compiled()).fit(x, y, validation_data=(bad, y), **FIT)
    (line,) = [note for note in history.notes if "not finite" in note]
    assert "val_loss" in line
    assert "epoch 1" in line
    assert "inputs: NaN or infinity in sample 17" in line


def test_a_nan_in_an_evaluation_alone_is_named_with_its_sample():
    x, y = points()
    x[17, 2] = np.nan
    said = []
    trainer = flatout.Trainer(compiled(), allow="exact", say=said.append)
    assert np.isnan(trainer.evaluate(x, y, **ONE_PASS)["loss"])
    (line,) = [line for line in said if "not finite" in line]
    assert "loss of this evaluation" in line
    assert "inputs: NaN or infinity in sample 17" in line


def test_a_metric_that_is_nan_for_one_batch_is_named():
    calls = []

    def half_the_time(output, target):
        calls.append(1)
        return output.sum() * (float("nan") if len(calls) == 2 else 0.0)

    x, y = (torch.as_tensor(part) for part in points())
    metrics = {"mine": half_the_time}
    trainer = flatout.Trainer(torch.nn.Linear(5, 3), metrics=metrics, say=lambda line: None)
    history = trainer.fit(x, y, batch_size=8, epochs=2)
    (line,) = [note for note in history.notes if "not finite" in note]
    assert line.startswith("mine of epoch 1 is not finite: one batch")
