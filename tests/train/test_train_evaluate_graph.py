"""An evaluation's forward as one compiled graph: the same outputs, and never at a pass's cost."""

import hashlib
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from train_jobs import CLASSES, Interpreted, quiet

import flatout
from flatout.cache_folder import keep_text, kept_text
from flatout.errors import DataError
from flatout.train import explanation as explanation_module
from flatout.train.evaluate_batch import EvaluateBatch
from flatout.train.graphs import capture, capture_child, evaluate_graph
from flatout.train.graphs.capture_graph import Unfit
from flatout.train.graphs.evaluate_graph import EvaluateGraph
from flatout.train.graphs.forward_graph import Attributes

pytestmark = pytest.mark.usefixtures("one_thread")

WORDS, SAMPLES, BATCH = 30, 600, 16


class Clock:
    """Seconds that pass where a model computes."""

    def __init__(self):
        self.now, self.as_ever, self.by_graph = 0.0, 0.1, 0.05

    def __call__(self):
        return self.now

    def tick(self, *inputs):
        """A call is made, unless it is traced."""
        if all(type(one) is torch.Tensor for one in inputs):
            self.now += self.as_ever


class Timed(nn.Module):
    """A model whose calls take as long as a clock says."""

    def __init__(self, inner, clock):
        super().__init__()
        self.inner, self.tick = inner, clock.tick

    def forward(self, *args, **kwargs):
        self.tick(*args, *kwargs.values())
        return self.inner(*args, **kwargs)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def compiled(monkeypatch, clock):
    """Calls of graphs, whose operators are run one by one in place of compiled code."""

    def load(number):
        graph = Interpreted.graphs[number]
        module = capture_child.module_of(graph.code, graph.constants)

        def run(inputs):
            clock.now += clock.by_graph
            calls.append(len(inputs[-1]))
            return module(*inputs)

        return run

    calls = []
    monkeypatch.setattr(Interpreted, "graphs", [])
    monkeypatch.setattr(Interpreted, "hold", lambda self, holds: None, raising=False)
    monkeypatch.setattr(Interpreted, "seconds", 7.0, raising=False)
    monkeypatch.setattr(evaluate_graph, "Compiling", Interpreted)
    monkeypatch.setattr(evaluate_graph, "loaded", load)
    monkeypatch.setattr(evaluate_graph, "usable_cpus", lambda: 2)
    # The rest is told by the clock of the test: on a busy machine kernels take longer than that.
    monkeypatch.setattr(evaluate_graph.OperatorTimes, "kernels_s", 0.0)
    monkeypatch.setattr(explanation_module, "machine_rates", lambda *machine: None)
    return calls


def job(inner, clock, asked="on", *, said=None, precision="fp32", **options):
    say = quiet if said is None else said.append
    off = ("compile", "rewrites", "fused_norms", "fused_optimizer", "fp32_operators")
    recipe = flatout.Recipe(
        compute={
            "capture": asked,
            **dict.fromkeys(off, "off"),
            "precision": precision,
            "matmul_precision": "highest",
            "memory_format": "contiguous",
        },
        memory={"allocator": "default"},
    )
    trainer = flatout.Trainer(Timed(inner, clock), recipe=recipe, say=say, **options)
    by_clock(trainer, clock)
    return trainer


def by_clock(trainer, clock):
    loop = trainer.loop
    loop.evaluation.graph = EvaluateGraph(loop.tell, loop._may_compile, clock)
    loop.evaluation.batch_size = EvaluateBatch(loop.tell, lambda: 0.0)


class Clocked(flatout.Callback):
    """A fit makes its own Loop."""

    def on_fit_start(self, state):
        by_clock(state.trainer, state.trainer.model.tick.__self__)


def fitted(trainer, x, y, epochs, **options):
    return trainer.fit(
        x[:64], y[:64], batch_size=32, epochs=epochs, progress=False, callbacks=[Clocked()],
        validation_data=(x, y), validation_batch_size=BATCH, **options,
    )  # fmt: skip


def record(trainer):
    (found,) = [r for r in trainer.loop.evaluated["graphs"] if r["samples"] == BATCH]
    return found


# -- models --------------------------------------------------------------------------------------


def mlp():
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, CLASSES))


def resnet():
    """Statistics are those of a model that was trained."""
    norm = nn.BatchNorm2d(4)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), norm

        def forward(self, x):
            return F.relu(getattr(resnet, "sign", 1) * self.norm(self.first(x)) + x, inplace=True)

    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES)]
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Block(), *head)


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Gpt(nn.Module):
    """Words of a sentence, and a causal mask."""

    def __init__(self):
        super().__init__()
        self.words, self.place = nn.Embedding(WORDS, 8), nn.Parameter(torch.randn(5, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, 0.1, "gelu", batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = self.block(self.words(x) + self.place, src_mask=mask, is_causal=True)
        return self.head(x[:, -1])


class Table(nn.Module):
    """Numbers and ids by name; the outputs by name as well."""

    def __init__(self):
        super().__init__()
        self.ids, self.body = nn.Embedding(WORDS, 4), nn.Linear(7, CLASSES)

    def forward(self, numbers, ids):
        x = torch.cat([numbers, self.ids(ids)], 1)
        return self.body(x)


FAMILIES = {
    "mlp": (mlp, lambda n: torch.randn(n, 12)),
    "resnet": (resnet, lambda n: torch.randn(n, 3, 6, 6)),
    "lstm": (Lstm, lambda n: torch.randn(n, 5, 6)),
    "gpt": (Gpt, lambda n: torch.randint(0, WORDS, (n, 5))),
    "table": (
        Table,
        lambda n: {"numbers": torch.randn(n, 3), "ids": torch.randint(0, WORDS, (n,))},
    ),
}


def made(name):
    torch.manual_seed(0)
    model, inputs = FAMILIES[name]
    return model(), inputs(SAMPLES), torch.randint(0, CLASSES, (SAMPLES,))


def by_hand(model, x):
    model.eval()
    with torch.no_grad():
        return model(**x) if isinstance(x, dict) else model(x)


# -- the same results ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_loss_and_metrics_are_those_of_a_loop_by_hand(name, clock, compiled):
    model, x, y = made(name)
    trainer = job(model, clock, metrics=["accuracy"])
    predicted = trainer.predict(x, batch_size=BATCH)
    assert set(compiled) == {BATCH}  # the last batch, of 8, runs eagerly
    measured = len(compiled)
    found = trainer.evaluate(x, y, batch_size=BATCH)
    assert len(compiled) - measured == SAMPLES // BATCH
    wanted = by_hand(model, x)
    assert torch.allclose(predicted, wanted, atol=1e-5)
    assert found["loss"] == pytest.approx(float(F.cross_entropy(wanted, y)), rel=1e-5)
    assert found["accuracy"] == pytest.approx(float((wanted.argmax(1) == y).float().mean()))
    assert len(Interpreted.graphs) == 1
    assert record(trainer)["chosen"] == "b"


def test_several_outputs_by_name(clock, compiled):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(12, CLASSES)

        def forward(self, x):
            output = self.inner(x)
            return {"each": output, "most": output.argmax(1), "none": None}

    torch.manual_seed(0)
    x, model = torch.randn(SAMPLES, 12), Two()
    predicted = job(model, clock).predict(x, batch_size=BATCH)
    wanted = by_hand(model, x)
    assert compiled
    assert torch.allclose(predicted["each"], wanted["each"], atol=1e-5)
    assert torch.equal(predicted["most"], wanted["most"])
    assert predicted["none"] is None


def test_weights_that_change_between_passes_are_read(clock, compiled, monkeypatch):
    model, x, _ = made("resnet")
    x = x[: SAMPLES // BATCH * BATCH]
    trainer = job(model, clock)
    trainer.predict(x, batch_size=BATCH)

    def changed(change, graphs=1, uses=BATCH // 2):
        before = len(compiled)
        with torch.no_grad():
            change()
        predicted = trainer.predict(x, batch_size=BATCH)
        assert len(compiled) - before >= uses
        assert len(Interpreted.graphs) == graphs
        assert torch.allclose(predicted, by_hand(model, x), atol=1e-5)

    changed(lambda: model[0].weight.mul_(-2))
    changed(lambda: model[1].norm.running_mean.add_(1))
    changed(lambda: setattr(model[0].weight, "data", torch.randn_like(model[0].weight)))
    changed(lambda: model.load_state_dict(resnet().state_dict()))
    # Another parameter, or a number that the code reads, makes another graph.
    changed(lambda: setattr(model[0], "weight", nn.Parameter(model[0].weight * 3)), graphs=2)
    changed(lambda: setattr(model[1].norm, "eps", 0.5), graphs=3)
    # What the code reads from elsewhere is seen where a pass begins, and the graph is not used.
    trainer.predict(x, batch_size=BATCH)
    changed(lambda: monkeypatch.setattr(resnet, "sign", -1, raising=False), graphs=3, uses=1)


def test_a_tensor_that_is_no_buffer_is_followed(clock, compiled):
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * scales["all"]

    torch.manual_seed(0)
    scales, model, x = {"all": torch.ones(CLASSES)}, Scaled(12, CLASSES), torch.randn(SAMPLES, 12)
    trainer = job(model, clock)
    trainer.predict(x, batch_size=BATCH)
    scales["all"].mul_(2)
    before = len(compiled)
    predicted = trainer.predict(x, batch_size=BATCH)
    assert torch.allclose(predicted, by_hand(model, x), atol=1e-5)
    assert len(compiled) > before
    assert len(Interpreted.graphs) == 2


def test_validation_of_a_fit_reads_the_weights_of_each_epoch(clock, compiled):
    def fit(asked):
        model, x, y = made("mlp")
        trainer = job(model, clock, asked, metrics=["accuracy"], optimizer="sgd")
        return fitted(trainer, x, y, 4)

    plain = fit("off")
    assert not compiled
    history = fit("on")
    assert compiled
    for a, b in zip(history.history["val_loss"], plain.history["val_loss"], strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    assert len(set(history.history["val_loss"])) == 4


def test_an_id_in_no_table_is_named(clock, compiled):
    def predict(asked):
        model, x, _ = made("gpt")
        x[-BATCH * 3, 0] = WORDS + 5
        with pytest.raises(DataError) as raised:
            job(model, clock, asked).predict(x, batch_size=BATCH)
        return str(raised.value)

    assert predict("on") == predict("off")
    assert compiled


def test_bf16_is_compared_with_bf16(clock, compiled):
    model, x, y = made("mlp")
    trainer = job(model, clock, precision="bf16")
    history = fitted(trainer, x, y, 2)
    assert compiled
    assert "bfloat16" in Interpreted.graphs[0].code
    predicted = trainer.predict(x, batch_size=BATCH)
    assert torch.allclose(predicted, by_hand(model, x), atol=0.05)
    assert history.evaluation["graphs"][0]["chosen"] == "b"


# -- where nothing is gained, or it cannot be ----------------------------------------------------


def test_what_is_not_faster_is_not_kept_and_not_compiled_again(clock, compiled, tmp_path):
    clock.by_graph = clock.as_ever
    model, x, _ = made("mlp")
    first, said = job(model, clock), []
    first.predict(x, batch_size=BATCH)
    before = len(compiled)
    first.predict(x, batch_size=BATCH)
    assert len(compiled) == before
    assert "as fast" in record(first)["why"]
    later = job(model, clock, said=said)
    later.predict(x, batch_size=BATCH)
    assert len(compiled) == before
    assert len(Interpreted.graphs) == 1
    assert record(later)["why"] == "an earlier run measured the compiled graph 1.00x as fast"
    (line,) = [line for line in said if "compute.capture" in line]
    assert line.endswith(
        "evaluation runs eagerly: an earlier run measured the compiled graph 1.00x as fast"
    )


def test_an_answer_serves_later_processes(clock, compiled, tmp_path, monkeypatch):
    """The package is there, and is used without measuring where that is known to be faster."""
    model, x, _ = made("mlp")
    said = []
    job(model, clock, said=said).predict(x, batch_size=BATCH)
    (line,) = [line for line in said if "one compiled graph" in line]
    assert "2.00x" in line
    assert "compiled in 7" in line
    (answer,) = Path(os.environ["FLATOUT_CACHE"], "steps").glob("*.json")
    assert json.loads(kept_text("steps", answer.name))["chosen"] == "b"
    answer.with_suffix(".pt2").touch()
    keep_text("steps", f"{answer.stem}.sum", hashlib.sha256(b"").hexdigest())
    run = evaluate_graph.loaded
    monkeypatch.setattr(evaluate_graph, "loaded", lambda path: run(0))
    compiled.clear()
    later = job(model, clock)
    predicted = later.predict(x, batch_size=BATCH)
    assert len(Interpreted.graphs) == 1
    assert len(compiled) == SAMPLES // BATCH - 6
    assert torch.allclose(predicted, by_hand(model, x), atol=1e-5)
    # A damaged answer is measured again.
    answer.write_text("{")
    job(model, clock).predict(x, batch_size=BATCH)
    assert json.loads(kept_text("steps", answer.name))["chosen"] == "b"


def test_auto_compiles_where_what_is_left_repays_it(clock, compiled, monkeypatch):
    """Known of a pass; of a fit with all validations; else as long again as it has lasted."""
    model, x, _ = made("mlp")
    short = job(model, clock, "auto")
    short.predict(x, batch_size=BATCH)  # 3.8 s
    assert not Interpreted.graphs
    assert "too short to repay compiling" in record(short)["why"]
    for _ in range(20):
        short.predict(x, batch_size=BATCH)
    assert len(Interpreted.graphs) == 1
    clock.as_ever, clock.by_graph = 4.0, 2.0
    job(model, clock, "auto").predict(x, batch_size=BATCH)
    assert len(Interpreted.graphs) == 2
    # Nearly all of it is a product: what a compiler may save is too little.
    monkeypatch.setattr(evaluate_graph.OperatorTimes, "kernels_s", 3.9)
    lean = job(model, clock, "auto")
    lean.predict(x, batch_size=BATCH)
    assert len(Interpreted.graphs) == 2
    assert "98% of that in kernels" in record(lean)["why"]


def test_planned_validations_count(clock, compiled):
    model, x, y = made("mlp")

    def fit(epochs, **options):
        trainer = job(model, clock, "auto", optimizer="sgd")
        return fitted(trainer, x, y, epochs, **options)

    history = fit(2)
    assert not Interpreted.graphs
    assert "too short to repay compiling" in history.explain()
    fit(200, validation_freq=100)
    assert not Interpreted.graphs
    history = fit(30)
    assert len(Interpreted.graphs) == 1
    of = {graph["samples"]: graph["chosen"] for graph in history.evaluation["graphs"]}
    assert of == {BATCH: "b", SAMPLES % BATCH: "a"}
    told = " ".join(history.explain().split())
    assert f"forward pass of {BATCH} samples as one compiled graph: 2.00x [2.00,2.00]" in told
    assert any("run as one compiled graph" in note for note in history.notes)


class Fails(Interpreted):
    """A child that does not come to its end."""

    def done(self):
        raise Unfit("compiling failed: no compiler")


def raising(*given):
    raise RuntimeError("it was built elsewhere")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"Compiling": Fails}, "compiling failed: no compiler"),
        ({"Compiling": raising}, "it was built elsewhere"),
        ({"loaded": raising}, "it was built elsewhere"),
        ({"loaded": lambda path: raising}, "it was built elsewhere"),
        ({"loaded": lambda path: lambda inputs: [torch.ones(BATCH, CLASSES)]}, "would differ"),
        ({"loaded": lambda path: lambda inputs: [torch.ones(3)]}, "would differ"),
    ],
)  # fmt: skip
def test_what_fails_costs_nothing(change, why, clock, compiled, monkeypatch):
    for name, value in change.items():
        monkeypatch.setattr(evaluate_graph, name, value)
    model, x, _ = made("mlp")
    trainer, said = job(model, clock), []
    trainer.loop.evaluation.graph.tell = said.append
    predicted = trainer.predict(x, batch_size=BATCH)
    assert torch.equal(predicted, by_hand(model, x))
    assert clock.now == pytest.approx((SAMPLES // BATCH + 1) * clock.as_ever)
    assert why in record(trainer)["why"]
    assert len(said) == 1


def test_a_child_that_costs_the_pass_too_much_is_ended(clock, compiled, monkeypatch):
    class Slow(Interpreted):
        def __init__(self, *given):
            super().__init__(*given)
            clock.as_ever = 40.0

        def done(self):
            return None

        def hold(self, holds):
            clock.as_ever = 4.0 if holds else 40.0

        def close(self):
            clock.as_ever = 4.0

    clock.as_ever = 4.0
    monkeypatch.setattr(evaluate_graph, "Compiling", Slow)
    model, x, _ = made("mlp")
    trainer = job(model, clock, "auto")
    trainer.predict(x, batch_size=BATCH)
    assert "too much" in record(trainer)["why"]
    assert record(trainer)["lost_s"] == pytest.approx(36.0)


class Counts(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Keeps(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.seen = []

    def forward(self, x):
        self.seen.append(x.mean())
        return super().forward(x)


class Decides(nn.Linear):
    def forward(self, x):
        return super().forward(x if x.sum() > 0 else -x)


class Draws(nn.Linear):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.1, training=True)


class Moves(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += 1
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Counts, "changes an attribute"),
        (Keeps, "changes an attribute"),
        (Moves, "changes a weight, a buffer or its input"),
        (Decides, "cannot be traced"),
        (Draws, "draws random numbers"),
    ],
)
def test_what_a_graph_would_not_do_is_told(kind, why, clock, compiled):
    torch.manual_seed(0)
    model, x = kind(12, CLASSES), torch.randn(SAMPLES, 12)
    trainer = job(model, clock)
    trainer.predict(x, batch_size=BATCH)
    assert why in record(trainer)["why"]
    assert not Interpreted.graphs
    if kind is Keeps:
        assert all(type(one) is torch.Tensor for one in model.seen)
        assert len(model.seen) == SAMPLES // BATCH + 1


def test_hooks_are_called(clock, compiled):
    model, x, _ = made("mlp")
    calls = []
    model[0].register_forward_hook(lambda *given: calls.append(1))
    trainer = job(model, clock)
    trainer.predict(x, batch_size=BATCH)
    assert len(calls) == SAMPLES // BATCH + 1
    assert "has hooks" in record(trainer)["why"]
    # So are those that come when the graph is there.
    model, x, _ = made("mlp")
    trainer = job(model, clock)
    trainer.predict(x, batch_size=BATCH)
    calls.clear()
    model[0].register_forward_hook(lambda *given: calls.append(1))
    trainer.predict(x, batch_size=BATCH)
    assert len(calls) == SAMPLES // BATCH + 1


@pytest.mark.parametrize("case", ["off", "exact", "compiled"])
def test_as_ever_where_it_is_not_wanted(case, clock, compiled):
    model, x, _ = made("mlp")
    options = {"allow": "exact"} if case == "exact" else {}
    trainer = job(model, clock, "off" if case == "off" else "on", **options)
    if case == "compiled":
        trainer.model.compile()
    trainer.predict(x, batch_size=BATCH)
    assert trainer.loop.evaluation.graph.records() == []
    assert not Interpreted.graphs


def test_calls_of_many_shapes_run_as_ever(clock, compiled):
    torch.manual_seed(0)
    model = Lstm()
    lengths = [4 + at % 40 for at in range(120)]
    batches = [torch.randn(BATCH, length, 6) for length in lengths]
    labels = torch.zeros(BATCH, dtype=torch.long)
    trainer = job(model, clock)
    for _ in range(8):
        predicted = trainer.predict(lambda: ((batch, labels) for batch in batches))
    wanted = torch.cat([by_hand(model, batch) for batch in batches])
    assert torch.allclose(predicted, wanted, atol=1e-5)
    assert len(Interpreted.graphs) == evaluate_graph._MOST_GRAPHS
    assert len(trainer.loop.evaluation.graph._forms) == evaluate_graph._MOST_FORMS


@pytest.mark.parametrize(("asked", "lent", "nice"), [("auto", 1, 19), (2, 2, 5)])
def test_a_child_has_a_cpu_within_passes_alone(asked, lent, nice, clock, compiled, monkeypatch):
    class Told(Interpreted):
        def __init__(self, graph, digest, nice):
            super().__init__(graph, digest, nice)
            told.append(nice)

        def done(self):
            threads.add((told[-1] is True, torch.get_num_threads()))

        def hold(self, holds):
            told.append(holds)

        def close(self):
            told.append("end")

    told, threads = [], set()
    for module in (evaluate_graph, capture):
        monkeypatch.setattr(module, "usable_cpus", lambda: 2)
    monkeypatch.setattr(evaluate_graph, "Compiling", Told)
    model, x, _ = made("mlp")
    torch.set_num_threads(2)
    try:
        trainer = job(model, clock)
        trainer.loop.asked.recipe = trainer.loop.asked.recipe.replace({"process.threads": asked})
        for _ in range(2):
            trainer.predict(x, batch_size=BATCH)
            assert told[-1] is True
            assert torch.get_num_threads() == 2
        trainer.loop.close()
    finally:
        torch.set_num_threads(1)
    # It is held up for short spells within a pass, too.
    assert threads == {(False, lent), (True, 2)}
    assert (told[0], told[-1]) == (nice, "end")


def test_attributes_tell_of_what_is_put_in_them():
    model = nn.Sequential(nn.Linear(2, 2))
    model.seen, model.by_name, model.kinds = [], {}, set()
    model.config = SimpleNamespace(scale=2.0, sizes=[1, 2], deep=SimpleNamespace(eps=1e-5))
    for change in (
        lambda: model.seen.append(1),
        lambda: model.by_name.update(a=1),
        lambda: model.kinds.add(1),
        lambda: setattr(model.config, "scale", 3.0),
        lambda: model.config.sizes.append(3),
        lambda: setattr(model.config.deep, "eps", 1e-4),
        lambda: model.config.__dict__.update(more=1),
        lambda: model[0].register_forward_hook(print),
        lambda: setattr(model[0], "more", 1),
        lambda: model[0].register_buffer("mean", torch.zeros(2)),
    ):
        before = Attributes(model)
        with torch.no_grad():
            model[0].weight.zero_()
        assert before.hold()
        change()
        assert not before.hold()


@pytest.mark.slow
@pytest.mark.timeout(660)
def test_compiled_code_gives_the_same():
    """By the child and its compiler, until the graph is there and measured."""
    model, x, _ = made("table")
    x = {name: column.repeat(40, *[1] * (column.dim() - 1)) for name, column in x.items()}
    recipe = flatout.Recipe(compute={"capture": "on"})
    trainer = flatout.Trainer(model, recipe=recipe, say=quiet)
    wanted, ends = by_hand(model, x), time.monotonic() + 600  # a busy machine compiles long
    while time.monotonic() < ends:
        assert torch.allclose(trainer.predict(x, batch_size=BATCH), wanted, atol=1e-5)
        graphs = (trainer.loop.evaluated or {"graphs": []})["graphs"]
        # Batches of another size may be faster, and what is compiled is for these.
        settled = [one for one in graphs if not one["is_open"]]
        if settled:
            break
    (found,) = settled
    assert found["compile_s"] > 0
    assert found["ratio"] > 0
    assert found["chosen"] == "b" or "as fast" in found["why"]
