"""Tables of Keras models that are stepped by rows end as under Keras' own dense optimizer."""

import numpy as np
import pytest
import torch

from flatout.kernels import table_rows
from flatout.models import KerasOptimizer, row_tables
from flatout.optim import TouchedRows, Update, steppable_rows, why_dense
from flatout.strategies import sparse_weights

keras = pytest.importorskip("keras")

pytestmark = [
    pytest.mark.skipif(not table_rows.available(), reason="the C extension is absent"),
    pytest.mark.usefixtures("one_thread"),
]

ROWS, STEPS = 200, 150
of = keras.optimizers
OPTIMIZERS = {
    "adam": lambda rate: of.Adam(rate),
    "adam, decay": lambda rate: of.Adam(rate, weight_decay=0.1, clipvalue=5e-3),
    "adam, large epsilon": lambda rate: of.Adam(rate, beta_1=0.95, beta_2=0.99, epsilon=1e-3),
    "adamw": lambda rate: of.AdamW(rate, weight_decay=0.1, global_clipnorm=0.02),
    "sgd": lambda rate: of.SGD(rate, weight_decay=0.1),
    "momentum": lambda rate: of.SGD(rate, momentum=0.9, clipnorm=0.02),
    "nesterov": lambda rate: of.SGD(rate, momentum=0.6, nesterov=True, weight_decay=0.1),
    "rmsprop": lambda rate: of.RMSprop(rate, weight_decay=0.1),
    "rmsprop, momentum": lambda rate: of.RMSprop(rate, momentum=0.6, weight_decay=0.1),
    "adagrad": lambda rate: of.Adagrad(rate, global_clipnorm=0.02),
    "adagrad, decay": lambda rate: of.Adagrad(rate, weight_decay=0.1),
}


def network():
    keras.utils.set_random_seed(0)
    ids = keras.Input((3,), dtype="int64")
    one = keras.layers.Embedding(ROWS, 4, name="one")
    other = keras.layers.Embedding(ROWS, 4, name="other")
    both = keras.layers.Concatenate(axis=1)([one(ids), other(ids), one(ids[:, 1:])])
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(both)))
    model.compile("adam", "mse")
    return model


def job(optimizer, touched=True):
    model = network()
    optimizer.build(model.trainable_variables)
    own = KerasOptimizer(optimizer, model.trainable_variables)
    rows = {}
    if touched:
        modules, _ = row_tables(model)
        assert {module.name for module in modules} == {"one", "other"}
        rows = {o: TouchedRows(o, m) for o, m in steppable_rows([own], modules).items()}
        for one in rows.values():
            one.attach()
        assert rows
    return model, own, rows


def train(model, own, rows, steps=STEPS, seed=3):
    update, generator = Update(own, rows=rows), torch.Generator().manual_seed(seed)
    for _ in range(steps):
        update.begin()
        ids = (torch.rand(8, 3, generator=generator) ** 4 * ROWS).long()
        wanted = torch.rand(8, 1, generator=generator)
        ((model(ids, training=True) - wanted) ** 2).mean().backward()
        for one in rows:
            assert all(p.grad is None or p.grad.is_sparse for p in rows[one].weights)
        update()


def variables_of(model, own):
    return [keras.ops.convert_to_numpy(v) for v in (*model.variables, *own.keras.variables)]


def assert_near(found, wanted, start):
    for ours, dense, before in zip(found, wanted, start, strict=True):
        moved = np.linalg.norm(dense - before)
        assert np.linalg.norm(ours - dense) <= 2e-5 * moved + 1e-6 * np.linalg.norm(dense)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_weights_and_state_are_those_of_the_dense_optimizer(make):
    found = []
    for touched in (False, True):
        schedule = keras.optimizers.schedules.CosineDecay(0.02, STEPS)
        model, own, rows = job(make(schedule), touched)
        start = variables_of(model, own)
        train(model, own, rows)
        found.append(variables_of(model, own))  # what looks at variables finds them up to date
    assert_near(found[1], found[0], start)


def test_ranks_add_up_rows_while_tables_are_stepped_by_them_and_not_before():
    model, own, rows = job(of.Adam(0.01))
    tables = {model.get_layer(name).embeddings.value for name in ("one", "other")}
    train(model, own, rows, 1)  # by now the optimizer's state is watched too
    assert sparse_weights(model) == tables
    rows[own].detach()
    assert sparse_weights(model) == set()


def test_a_state_that_is_loaded_in_between_holds():
    model, own, rows = job(of.AdamW(0.01))
    train(model, own, rows, 20)
    kept = [v.value.clone() for v in (*model.variables, *own.keras.variables)]
    train(model, own, rows, 20, seed=4)
    after = variables_of(model, own)
    train(model, own, rows, 20, seed=5)
    for variable, value in zip((*model.variables, *own.keras.variables), kept, strict=True):
        variable.assign(value)
    train(model, own, rows, 20, seed=4)
    for found, wanted in zip(variables_of(model, own), after, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)


def test_a_model_of_nothing_but_a_table_counts_its_steps():
    found = []
    for touched in (False, True):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((2,), dtype="int64"), keras.layers.Embedding(50, 3)])
        model.compile(of.SGD(0.1, momentum=0.9, clipnorm=0.5), "mse")
        model.optimizer.build(model.trainable_variables)
        own = KerasOptimizer(model.optimizer, model.trainable_variables)
        rows = {own: TouchedRows(own, [model.trainable_variables[0]._value])} if touched else {}
        for one in rows.values():
            one.attach()
        update = Update(own, rows=rows)
        for step in range(30):
            update.begin()
            model(torch.tensor([[step % 7, 40 - step]])).square().sum().backward()
            update()
        assert int(own.keras.iterations) == 30
        found.append(variables_of(model, own))
    assert_near(found[1], found[0], [np.zeros_like(one) for one in found[0]])


def test_a_table_that_something_reads_whole_is_left_to_keras():
    model, own, rows = job(of.Adam(0.01))
    update = Update(own, rows=rows)
    one = model.get_layer("one")
    for ids in torch.arange(12).reshape(4, 1, 3):
        update.begin()
        (model(ids).sum() + keras.ops.sum(keras.ops.square(one.embeddings))).backward()
        update()
    assert own.by_rows == {model.get_layer("other").embeddings.value}
    assert type(one.embeddings.value) is torch.nn.Parameter
    slot = own.slot(one.embeddings.value, "_momentums")
    assert torch.all(slot[-1] != 0)  # a row that no batch has read


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: of.Adam(amsgrad=True), "amsgrad steps all rows"),
        (lambda: of.RMSprop(centered=True), "centered steps all rows"),
        (lambda: of.SGD(use_ema=True), "use_ema steps all rows"),
        (lambda: of.Adam(gradient_accumulation_steps=2), "gradient_accumulation_steps steps all"),
        (lambda: of.Nadam(), "Nadam steps all rows"),
        (lambda: of.LossScaleOptimizer(of.Adam()), "LossScaleOptimizer steps all rows"),
        (lambda: type("Own", (of.Adam,), {})(), "Own steps all rows"),
    ],
)
def test_optimizers_that_step_all_rows_say_so(make, why):
    model = network()
    own = KerasOptimizer(make(), model.trainable_variables)
    assert why in why_dense(own, own.param_groups[0])


class Tied(keras.layers.Layer):
    def __init__(self, table):
        super().__init__(name="tied")
        self.table = table._embeddings

    def call(self, x):
        return keras.ops.matmul(x, keras.ops.transpose(self.table))


def test_tables_that_are_not_read_by_rows_alone_are_named():
    layers = keras.layers
    made = {
        "plain": layers.Embedding(9, 4, mask_zero=True, name="plain"),
        "tied": layers.Embedding(9, 4, name="tied_table"),
        "l2": layers.Embedding(9, 4, embeddings_regularizer="l2", name="l2"),
        "norm": layers.Embedding(9, 4, embeddings_constraint="unit_norm", name="norm"),
        "frozen": layers.Embedding(9, 4, trainable=False, name="frozen"),
        "half": layers.Embedding(9, 4, dtype="bfloat16", name="half"),
        "lora": layers.Embedding(9, 4, lora_rank=2, name="lora"),
        "int8": layers.Embedding(9, 4, name="int8"),
        "both": layers.ReversibleEmbedding(9, 4, name="both"),
    }
    ids = keras.Input((3,), dtype="int64")
    outputs = [layer(ids) for layer in made.values()]
    tied = Tied(made["tied"])(outputs[1])
    model = keras.Model(ids, [*outputs, tied])
    made["int8"].quantize("int8")
    found, others = row_tables(model)
    assert found == [made["plain"]]
    assert others == {
        "tied_table": "tied reads all of it",
        "l2": "its regularizer reads all of it",
        "norm": "its constraint changes all of it after each step",
        "frozen": "it is frozen",
        "half": "it is not float32 on a CPU",
        "lora": "LoRA trains factors beside it",
        "int8": "it is quantized to int8",
        "both": "the call of ReversibleEmbedding is not Keras' own",
    }
