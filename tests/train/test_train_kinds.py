"""Every kind of model and data trains, tuned or exact, as the plain loop does."""

import copy
import io
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from train_jobs import ALWAYS_TUNED, quiet, same

import flatout
from flatout.devices import allocator
from flatout.errors import ModelError
from flatout.recipe import Compute, Recipe
from flatout.train.loop import Loop

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, EPOCHS, CLASSES = 40, 2, 3
# Compiling takes longer than all tests here.
SHORT = Recipe(compute=Compute(compile="off"))


@dataclass
class Kind:
    """A model, its batches as (inputs, targets), and the loss that compares them.

    `size` is of a batch; 0 where batches differ in shape, so that they come as a list.
    """

    model: nn.Module
    batches: list[tuple[Any, Any]]
    size: int = 8
    loss: Callable[[Any, Any], torch.Tensor] = F.cross_entropy
    optimizer: Any = torch.optim.Adam
    tolerance: float = 0.03  # bf16 may be what was fastest


class Tokens(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8, sparse=sparse)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens).mean(1))


class ByName(nn.Module):
    """Takes whatever it is given by name."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, CLASSES), nn.Linear(4, CLASSES)

    def forward(self, **given: torch.Tensor) -> torch.Tensor:
        return self.left(given["left"]) + self.right(given["right"])


class Two(nn.Module):
    """Two inputs, and a named and a nested output."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, CLASSES), nn.Linear(4, 1)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> dict[str, Any]:
        return {"classes": self.left(left), "more": (self.right(right),)}


def of_two(output: Any, targets: Any) -> torch.Tensor:
    labels, values = targets
    return F.cross_entropy(output["classes"], labels) + F.mse_loss(
        output["more"][0].float()[:, 0], values
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x)[0][:, -1])


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8, dtype=torch.complex64)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x).abs())


class Bytes(nn.Module):
    """Scales its images itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(8, CLASSES),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.float() / 255)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(self.attention(x, x, x, key_padding_mask=hidden)[0][:, 0])


class Mixed(nn.Module):
    """Mixes its inputs by a sparse matrix."""

    def __init__(self, mixing: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("mixing", mixing, persistent=False)
        self.head = nn.Linear(4, CLASSES)
        self.head.register_forward_hook(lambda module, inputs, output: output * mixing.sum())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.sparse.mm(self.mixing, x.T).T)


def mlp(inputs: int = 4, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 16, dtype=dtype), nn.ReLU(), nn.Linear(16, CLASSES, dtype=dtype)
    )


def lazy() -> nn.Sequential:
    return nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.LazyLinear(CLASSES))


def labels(size: int) -> torch.Tensor:
    return torch.randint(0, CLASSES, (size,))


def many(make: Callable[[], Any], size: int) -> list[tuple[Any, Any]]:
    return [(make(), labels(size)) for _ in range(STEPS)]


def hidden() -> torch.Tensor:
    mask = torch.rand(8, 5) < 0.4
    mask[:, 0] = False
    return mask


def _two() -> list[tuple[Any, Any]]:
    return [
        ((torch.randn(8, 4), torch.randn(8, 4)), (labels(8), torch.randn(8))) for _ in range(STEPS)
    ]


def _lengths() -> list[tuple[Any, Any]]:
    return [(torch.randn(8, 2 + 3 * (i % 3), 4), labels(8)) for i in range(STEPS)]


KINDS: dict[str, Callable[[], Kind]] = {
    "tokens": lambda: Kind(Tokens(), many(lambda: torch.randint(0, 20, (8, 6)), 8)),
    "tokens of int32": lambda: Kind(
        Tokens(), many(lambda: torch.randint(0, 20, (8, 6), dtype=torch.int32), 8)
    ),
    "sparse gradients": lambda: Kind(
        Tokens(sparse=True),
        many(lambda: torch.randint(0, 20, (8, 6)), 8),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    ),
    "names": lambda: Kind(
        ByName(), many(lambda: {"left": torch.randn(8, 4), "right": torch.randn(8, 4)}, 8)
    ),
    "two inputs and outputs": lambda: Kind(Two(), _two(), loss=of_two),
    "lengths that change": lambda: Kind(Recurrent(), _lengths(), size=0),
    "batches of one": lambda: Kind(mlp(), many(lambda: torch.randn(1, 4), 1), size=1),
    "batches of three": lambda: Kind(mlp(), many(lambda: torch.randn(3, 4), 3), size=3),
    "float64": lambda: Kind(
        mlp(dtype=torch.float64), many(lambda: torch.randn(8, 4, dtype=torch.float64), 8)
    ),
    "complex": lambda: Kind(Complex(), many(lambda: torch.randn(8, 4, dtype=torch.complex64), 8)),
    "bytes": lambda: Kind(
        Bytes(), many(lambda: torch.randint(0, 256, (8, 3, 9, 9), dtype=torch.uint8), 8)
    ),
    "masks": lambda: Kind(Masked(), many(lambda: (torch.randn(8, 5, 8), hidden()), 8)),
    "sparse buffer": lambda: Kind(
        Mixed(torch.eye(4).to_sparse()), many(lambda: torch.randn(8, 4), 8)
    ),
    "scripted": lambda: Kind(torch.jit.script(mlp()), many(lambda: torch.randn(8, 4), 8)),
    "half-precision weights": lambda: Kind(
        mlp(dtype=torch.bfloat16), many(lambda: torch.randn(8, 4).bfloat16(), 8)
    ),
}


@pytest.fixture(params=KINDS)
def kind(request):
    torch.manual_seed(0)
    return KINDS[request.param]()


@pytest.fixture(autouse=True)
def own_allocator():
    yield
    allocator.default_memory()


# Terms under which all measurements fit into the few steps of a test.
TERMS = replace(ALWAYS_TUNED, most_steps=1, most_pairs=2, searched=1.0)


def tuned_trainer(model: nn.Module, **options: Any) -> flatout.Trainer:
    trainer = flatout.Trainer(model, **options)
    trainer.terms = TERMS
    return trainer


def copied(model: nn.Module) -> nn.Module:
    """A copy that trains: `deepcopy` of a scripted one does not."""
    if not isinstance(model, torch.jit.ScriptModule):
        return copy.deepcopy(model)
    file = io.BytesIO()
    torch.jit.save(model, file)
    file.seek(0)
    return torch.jit.load(file)


def called(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def value_of(kind: Kind, model: nn.Module, inputs: Any, targets: Any) -> torch.Tensor:
    output = called(model, inputs)
    half = torch.is_tensor(output) and output.dtype is torch.bfloat16
    return kind.loss(output.float() if half else output, targets)


def plain(kind: Kind, model: nn.Module) -> list[float]:
    """The loop by hand; returns the mean loss of each epoch."""
    optimizer = kind.optimizer(model.parameters())
    means = []
    for _ in range(EPOCHS):
        losses = []
        for inputs, targets in kind.batches:
            optimizer.zero_grad()
            loss = value_of(kind, model, inputs, targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        means.append(sum(losses) / len(losses))
    return means


def joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], dict):
        return {key: joined([part[key] for part in parts]) for key in parts[0]}
    if isinstance(parts[0], tuple):
        return tuple(map(joined, zip(*parts, strict=True)))
    return torch.cat(parts)


def given(kind: Kind) -> dict[str, Any]:
    if not kind.size:
        return {"x": kind.batches}
    x, y = (joined(list(part)) for part in zip(*kind.batches, strict=True))
    return {"x": (x, y), "batch_size": kind.size}


def fitted(kind: Kind, model: nn.Module, allow: str, said: list[str]) -> flatout.Trainer:
    own = kind.loss if kind.loss is of_two else "cross_entropy"
    trainer = tuned_trainer(
        model, loss=own, optimizer=kind.optimizer, allow=allow, say=said.append, recipe=SHORT
    )
    trainer.fit(**given(kind), shuffle=False, epochs=EPOCHS, progress=False)
    return trainer


def test_exact_is_the_plain_loop_bit_for_bit(kind):
    ours, theirs = kind.model, copied(kind.model)
    said: list[str] = []
    trainer = fitted(kind, ours, "exact", said)
    losses = plain(kind, theirs)
    assert same(ours, theirs)
    assert [logs["loss"] for logs in trainer.history.epochs] == pytest.approx(losses, rel=1e-6)
    assert not [line for line in said if "fail" in line]


def test_tuned_it_is_the_plain_loop_but_for_rounding(kind):
    ours, theirs = kind.model, copied(kind.model)
    said: list[str] = []
    trainer = fitted(kind, ours, "tolerant", said)
    losses = plain(kind, theirs)
    found = [logs["loss"] for logs in trainer.history.epochs]
    assert found == pytest.approx(losses, rel=kind.tolerance)
    assert not [line for line in said if "fail" in line]
    tuning = trainer.history.tuning
    assert tuning["trials"]
    fails = [why for why in tuning["dropped"].values() if "fails" in why]
    # Not every CPU has an LSTM kernel for bf16.
    known = ("does not support sparse gradients", "could not create a primitive descriptor")
    assert not [why for why in fails if not any(words in why for words in known)]


def test_evaluate_and_predict_are_those_of_the_model(kind):
    model = kind.model
    trainer = fitted(kind, model, "exact", [])
    model.eval()
    with torch.no_grad():
        losses = [float(value_of(kind, model, *batch)) for batch in kind.batches]
        outputs = [called(model, inputs) for inputs, _ in kind.batches]
    data = given(kind)
    found = trainer.evaluate(**data)["loss"]
    assert found == pytest.approx(sum(losses) / len(losses), rel=1e-3)
    inputs = data["x"] if not kind.size else data["x"][0]
    predicted = trainer.predict(inputs, batch_size=data.get("batch_size"))
    expected = joined([one if torch.is_tensor(one) else tuple(one.values()) for one in outputs])
    if isinstance(predicted, dict):
        predicted = tuple(predicted.values())
    if not torch.is_tensor(predicted):
        predicted, expected = predicted[0], expected[0]
    assert torch.allclose(predicted, expected.to(predicted.dtype), atol=1e-2)
    assert not predicted.is_inference()


def test_lazy_layers_without_a_shape_are_refused_with_what_to_do():
    trainer = tuned_trainer(lazy(), optimizer="sgd", lr=0.1, say=lambda line: None)
    with pytest.raises(ModelError, match="lazy layer, which has no shape") as caught:
        trainer.fit(torch.randn(16, 4), labels(16), verbose=0)
    assert "call the model once on a batch" in caught.value.do


@pytest.mark.parametrize("allow", ["exact", "tolerant"])
def test_lazy_layers(allow):
    torch.manual_seed(0)
    batches = many(lambda: torch.randn(8, 4), 8)
    ours = lazy()
    ours(batches[0][0])
    kind = Kind(ours, batches)
    theirs = copy.deepcopy(ours)
    losses = plain(kind, theirs)
    trainer = fitted(kind, ours, allow, [])
    tolerance = 1e-6 if allow == "exact" else kind.tolerance
    found = [logs["loss"] for logs in trainer.history.epochs]
    assert found == pytest.approx(losses, rel=tolerance)
    assert allow == "tolerant" or same(ours, theirs)


@pytest.mark.parametrize("allow", ["exact", "tolerant"])
def test_a_backbone_that_thaws_in_mid_run(allow):
    torch.manual_seed(0)
    x, y = torch.randn(8 * STEPS, 4), labels(8 * STEPS)
    ours = mlp()
    ours[0].requires_grad_(False)
    theirs = copy.deepcopy(ours)

    class Thaw(flatout.Callback):
        def on_step(self, state):
            if state.step == STEPS // 2:
                state.trainer.model[0].requires_grad_(True)

    optimizer = torch.optim.Adam(ours.parameters())
    trainer = tuned_trainer(ours, optimizer=optimizer, allow=allow, say=quiet, recipe=SHORT)
    trainer.fit(
        (x, y), batch_size=8, epochs=EPOCHS, shuffle=False, progress=False, callbacks=[Thaw()]
    )
    optimizer = torch.optim.Adam(theirs.parameters())
    for step in range(EPOCHS * STEPS):
        if step == STEPS // 2:
            theirs[0].requires_grad_(True)
        at = slice(8 * (step % STEPS), 8 * (step % STEPS) + 8)
        optimizer.zero_grad()
        F.cross_entropy(theirs(x[at]), y[at]).backward()
        optimizer.step()
    if allow == "exact":
        assert same(ours, theirs)
    else:
        with torch.no_grad():
            assert torch.allclose(ours(x), theirs(x), atol=0.05)


@dataclass
class Output:
    scores: torch.Tensor
    hidden: torch.Tensor


class AsDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 16), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> Output:
        kept = self.first(x).relu()
        return Output(self.second(kept), kept)


@pytest.mark.parametrize("allow", ["exact", "tolerant"])
def test_a_dataclass_and_a_loss_of_ones_own_through_the_loop(allow):
    torch.manual_seed(0)
    batches = many(lambda: torch.randn(8, 4), 8)
    ours = AsDataclass()
    theirs = copy.deepcopy(ours)

    def loss_of(output: Output, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.scores.float(), target) + 0.01 * output.hidden.float().mean()

    loop = Loop(SHORT, allow=allow, say=quiet)
    loop.terms = TERMS
    model, optimizer = ours, torch.optim.Adam(ours.parameters())
    source = flatout.data.Arrays(*(joined(list(part)) for part in zip(*batches, strict=True)))
    source = flatout.data.as_source(source, batch_size=8, shuffle=False)

    def compute(batch):
        return loss_of(model(batch.inputs), batch.targets)

    loop.prepare(model, optimizer, compute=compute, data=source, steps=STEPS)
    for batch in loop.batches(source):
        loop.step(compute, batch)
    found = loop.mean_loss()
    loop.close()
    optimizer = torch.optim.Adam(theirs.parameters())
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = loss_of(theirs(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert found == pytest.approx(sum(losses) / STEPS, rel=0.03)
    assert allow == "tolerant" or same(ours, theirs)


def test_keras_layers_with_seeds_of_their_own_draw_the_same_in_looks():
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "torch":
        pytest.skip("Keras is on another backend")
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(64, "relu"), keras.layers.Dropout(0.5, seed=1)]
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(CLASSES)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    trainer = tuned_trainer(model, say=quiet, recipe=SHORT)
    trainer.fit(torch.randn(STEPS * 8, 4), labels(STEPS * 8), batch_size=8, epochs=2, verbose=0)
    tuning = trainer.history.tuning
    assert tuning["trials"]
    assert not [why for why in tuning["dropped"].values() if "differ" in why]


def test_keras_layers_that_assign_weights_train_the_same_bits():
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "torch":
        pytest.skip("Keras is on another backend")
    x, y = torch.randn(STEPS * 8, 4), labels(STEPS * 8)
    weights = []
    for exact in (False, True):
        keras.utils.set_random_seed(0)
        inner = keras.layers.SpectralNormalization(keras.layers.Dense(16, "relu"))
        model = keras.Sequential([keras.Input((4,)), inner, keras.layers.Dense(CLASSES)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        trainer = tuned_trainer(model, say=quiet, allow="exact") if exact else model
        trainer.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    for theirs, ours in zip(*weights, strict=True):
        assert (theirs == ours).all()


class CallsCompiled(nn.Module):
    """Calls a function that is compiled, which no module tells."""

    def __init__(self, **how):
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, CLASSES)
        self.between = [torch.compile(lambda x: nn.functional.gelu(x) * torch.sigmoid(x), **how)]

    def forward(self, x):
        return self.last(self.between[0](self.first(x)))


def test_functions_of_the_users_own_are_compiled_for_whole_batches_alone():
    sizes = []

    def backend(graph, inputs):
        sizes.extend(len(given) for given in inputs if torch.is_tensor(given))
        return graph.forward

    model = CallsCompiled(backend=backend)
    batches = [(torch.randn(32, 4), labels(32)) for _ in range(60)]
    trainer = tuned_trainer(model, say=quiet, allow="exact")
    trainer.fit(batches, epochs=1, shuffle=False, progress=False)
    assert set(sizes) == {32}
    assert trainer.history.roofline is None  # a roofline would change the rounding


def test_what_another_job_has_compiled_changes_nothing(monkeypatch, tmp_path):
    sizes = SimpleQueue()  # not a list: a trial call restores a list's contents

    def loss(output, target):
        sizes.put(len(output))
        return F.cross_entropy(output, target)

    def passes(allow):
        """Return the sizes of all passes up to the first one of a few samples, and the counts."""
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, CLASSES))
        trainer = tuned_trainer(model, loss=loss, say=quiet, allow=allow)
        batches = [(torch.randn(64, 4), labels(64)) for _ in range(60)]
        counts = trainer.fit(batches, epochs=1, shuffle=False, progress=False).roofline
        passed = [sizes.get() for _ in range(sizes.qsize())]
        return passed[: passed.index(4) + 1] if 4 in passed else [], counts["lanes"].keys()

    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    before = [passes(allow) for allow in ("exact", "tolerant")]
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert [passes(allow) for allow in ("exact", "tolerant")] == before


@pytest.mark.slow  # it compiles
def test_functions_that_are_compiled_train_the_same_bits():
    batches = [(torch.randn(8, 4), labels(8)) for _ in range(60)]
    models = []
    for exact in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        models.append(model := CallsCompiled())
        optimizer = torch.optim.Adam(model.parameters())
        if exact:
            trainer = tuned_trainer(model, optimizer=optimizer, say=quiet, allow="exact")
            trainer.fit(batches, epochs=1, shuffle=False, progress=False)
            continue
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert same(*models)
