"""Tests of click-through models on a GPU: tables stepped whole, days of ids, files, scripts."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import flatout
from flatout.data import Ids
from flatout.data.reading.schema import Column, Schema
from flatout.errors import DataError, ModelError, NumbersError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(60),
]

ROWS, FIELDS = 400, 3


def drawn(seed, samples=24):
    generator = torch.Generator().manual_seed(seed)
    ids = (torch.rand(samples, FIELDS, generator=generator) ** 4 * ROWS).long()
    return ids, torch.rand(samples, 1, generator=generator)


# -- a Trainer -----------------------------------------------------------------------------------


class DeepFM(nn.Module):
    def __init__(self, rows=20, width=4):
        super().__init__()
        self.first, self.factors = nn.Embedding(rows, 1), nn.Embedding(rows, width)
        nn.init.normal_(self.factors.weight, std=0.1)
        nn.init.zeros_(self.first.weight)
        self.deep = nn.Sequential(
            nn.Linear(FIELDS * width, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1)
        )

    def forward(self, ids, values):
        scaled = self.factors(ids) * values[..., None]
        pairs = (scaled.sum(1) ** 2 - (scaled**2).sum(1)).sum(1) / 2
        first = (self.first(ids)[..., 0] * values).sum(1)
        return first + pairs + self.deep(scaled.flatten(1)).squeeze(1)


def clicks(samples=640):
    ids, _ = drawn(1, samples)
    return (ids, torch.ones(samples, FIELDS)), (ids.sum(1) % 2).float()


def fit(touched_rows, model=None, data=None, callbacks=(), save=None, **given):
    torch.manual_seed(0)
    model = model or DeepFM(ROWS)
    compute = {"touched_rows": touched_rows, "precision": "fp32", **given.pop("compute", {})}
    trainer = flatout.Trainer(
        model,
        loss="binary_cross_entropy",
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        recipe=flatout.Recipe(compute=compute, save=save or {}),
        allow="exact",
        say=lambda line: None,
        **given,
    )
    again = {"resume": True} if "run" in given else {}
    history = trainer.fit(
        *(data or clicks()),
        batch_size=32,
        epochs=2,
        callbacks=callbacks,
        progress=False,
        **again,
    )
    return trainer, history


def near(ours, dense, share):
    for name, value in dense.model.state_dict().items():
        assert (ours.model.state_dict()[name] - value).norm() <= share * value.norm() + 1e-7, name


def test_tables_are_stepped_whole_also_where_rows_are_asked_for(device):
    dense, _ = fit("off")
    asked, history = fit("on")
    (words,) = (note for note in history.notes if note.startswith("tables: "))
    assert "on a GPU a dense step is faster" in words or device.type == "cpu"
    near(asked, dense, 1e-5)


def test_lower_halves_of_bf16_tables_are_refused(device):
    if device.type == "cpu":
        pytest.skip("a CPU steps tables by rows")
    model = DeepFM(ROWS).bfloat16()
    with pytest.raises(ModelError, match="a dense step is faster"):
        fit("on", model, compute={"bf16_tables": "split", "precision": "bf16"})


class Crash(flatout.Callback):
    def __init__(self, at):
        self.at = at

    def on_step(self, state):
        if state.step == self.at:
            raise RuntimeError("crash")


def test_a_run_that_crashed_goes_on_as_if_it_had_not(tmp_path, device):
    whole, _ = fit("on")
    given = {"run": tmp_path / "run", "save": {"every": 10}}
    with pytest.raises(RuntimeError, match="crash"):
        fit("on", callbacks=[Crash(25)], **given)
    again, _ = fit("on", callbacks=[Crash(0)], **given)
    near(again, whole, 1e-5)


def test_an_id_that_no_row_has_is_named_where_validation_reads_it(device):
    (ids, values), wanted = clicks(64)
    ids = ids.clone()
    ids[30, 1] = ROWS
    torch.manual_seed(0)
    model = DeepFM(ROWS)
    trainer = flatout.Trainer(
        model,
        loss="binary_cross_entropy",
        recipe=flatout.Recipe(compute={"touched_rows": "on"}),
        allow="exact",
        say=lambda line: None,
    )
    given = {"batch_size": 32, "epochs": 2, "progress": False}
    with pytest.raises(DataError, match=f"id {ROWS} is not in"):
        trainer.fit(*clicks(), validation_data=((ids, values), wanted), **given)
    assert torch.ones(3, device=device).sum() == 3


def test_a_nan_in_the_data_is_named_and_nothing_is_written(device):
    (ids, values), wanted = clicks()
    values = values.clone()
    values[70, 1] = float("nan")
    torch.manual_seed(0)
    model = DeepFM(ROWS)
    with pytest.raises(NumbersError, match="70"):
        fit("on", model, ((ids, values), wanted))
    assert all(bool(value.isfinite().all()) for value in model.state_dict().values())


SCHEMA = Schema(
    format="libsvm",
    columns=(
        Column(name="label", dtype="float32", role="target"),
        Column(name="ids", dtype="int64", shape=(FIELDS,), ids=(Ids(),)),
        Column(name="values", dtype="float32", shape=(FIELDS,)),
    ),
    options={"base": 0},
)


def ids_of(day, samples=240):
    """Some that days before have had, and some that are new, far apart."""
    draw = np.random.default_rng(day)
    ids = draw.integers(20 * day, 60 + 20 * day, (samples, FIELDS)) * 1_000_003
    return ids + np.arange(FIELDS) * 10**12


def day_of(folder, day, samples=240):
    """A log of a day, as LibSVM, read as (training, validation)."""
    ids = ids_of(day, samples)
    labels = (ids // 1_000_003).sum(1) % 3 == 0
    path = folder / f"day-{day}.svm"
    path.write_text(
        "".join(
            f"{int(label)} {' '.join(f'{id}:1' for id in row)}\n"
            for label, row in zip(labels, ids, strict=True)
        )
    )
    train, held_out = flatout.data.libsvm(path, schema=SCHEMA).split(0.75, by="order")
    return train.shuffle(seed=1).batch(32), held_out.batch(64)


def train_days(folder, touched_rows):
    """Two days, the second after a warm start by raw ids."""
    for day in range(2):
        torch.manual_seed(day)
        trainer = flatout.Trainer(
            DeepFM(),
            loss="binary_cross_entropy",
            optimizer="adam",
            lr=0.02,
            metrics=["auc"],
            recipe=flatout.Recipe(compute={"touched_rows": touched_rows, "precision": "fp32"}),
            allow="exact",
            run=folder / touched_rows / str(day),
            warm_start=folder / touched_rows / str(day - 1) if day else None,
            say=lambda line: None,
        )
        train, held_out = day_of(folder, day)
        history = trainer.fit(train, validation_data=held_out, epochs=2, progress=False)
    return trainer, history


def test_days_of_logs_with_a_warm_start_by_raw_ids_served_on_a_cpu(tmp_path, device):
    dense, theirs = train_days(tmp_path, "off")
    ours, own = train_days(tmp_path, "on")
    near(ours, dense, 1e-3)
    assert any("before training" in note for note in own.notes)
    aucs = [history.epochs[-1]["val_auc"] for history in (theirs, own)]
    assert aucs[0] == pytest.approx(aucs[1], abs=2e-3)
    expected = ours.predict(day_of(tmp_path, 1)[1])
    weights = load_file(ours.save(tmp_path / "model.safetensors"))
    served = DeepFM(len(weights["first.weight"]))
    served.load_state_dict(weights)
    with safe_open(tmp_path / "model.ids.safetensors", "pt") as file:
        unknown = json.loads(file.metadata()["ids"])["columns"]["ids"]["firsts"][0]
        known, rows = file.get_tensor("ids.ids"), file.get_tensor("ids.rows")
    ids = torch.from_numpy(ids_of(1)[180:])
    at = torch.searchsorted(known, ids).clamp(max=len(known) - 1)
    logits = served(torch.where(known[at] == ids, rows[at], unknown), torch.ones(ids.shape))
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)


SCRIPT = """
import json, torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.bag = nn.Embedding(3000, 4), nn.EmbeddingBag(1500, 4, mode="sum")
        self.head = nn.Linear(4, 1)

    def forward(self, ids):
        return self.head(self.one(ids).sum(1) + self.bag(ids % 1500))

model = Model().to(device)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
generator = torch.Generator().manual_seed(1)
losses = []
for step in range(40):
    ids = (torch.rand(16, 3, generator=generator) ** 3 * 3000).long().to(device)
    optimizer.zero_grad()
    loss = (model(ids) - (ids % 7).float().mean(1, keepdim=True)).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
sums = {name: value.double().abs().sum().item() for name, value in model.state_dict().items()}
print(json.dumps({"losses": losses, "sums": sums}))
"""


def test_a_script_s_tables_are_left_to_its_optimizer(tmp_path, device):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    both = []
    for asked in ("off", "on"):
        program = "from flatout.cli.main import main; main()"
        command = [sys.executable, "-c", program, "run", "--set"]
        done = subprocess.run(
            [*command, f"compute.touched_rows={asked}", str(path)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "FLATOUT_CACHE": str(tmp_path / "cache")},
            timeout=50,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        both.append((json.loads(done.stdout.splitlines()[-1]), done.stderr))
    (plain, _), (cured, told) = both
    assert ("applied: touched_rows" in told) is not torch.cuda.is_available(), told
    assert cured["losses"] == pytest.approx(plain["losses"], rel=1e-3, abs=1e-5)
    assert cured["sums"] == pytest.approx(plain["sums"], rel=1e-4)


def test_a_keras_table_is_stepped_whole(device):
    keras = pytest.importorskip("keras")
    both = []
    for touched_rows in ("off", "on"):
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Embedding(ROWS, 8), keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((FIELDS,), dtype="int64"), *layers])
        model.compile(
            keras.optimizers.Adam(1e-2, global_clipnorm=0.5),
            keras.losses.BinaryCrossentropy(from_logits=True),
        )
        recipe = flatout.Recipe(compute={"touched_rows": touched_rows, "precision": "fp32"})
        trainer = flatout.Trainer(model, recipe=recipe, say=lambda line: None, allow="exact")
        (ids, _), wanted = clicks()
        history = trainer.fit(
            ids.numpy(), wanted.numpy()[:, None], batch_size=32, epochs=2, verbose=0
        )
        is_by_rows = any("touched rows only" in note for note in history.notes)
        assert is_by_rows is (touched_rows == "on" and device.type == "cpu"), history.notes
        both.append([np.asarray(one) for one in model.get_weights()])
    for wanted, ours in zip(*both, strict=True):
        assert np.linalg.norm(ours - wanted) <= 2e-5 * np.linalg.norm(wanted)


OUTSIDE = """
import torch, flatout
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.ids, self.head = nn.Embedding(50, 4), nn.Linear(12, 1)

    def forward(self, ids):
        return self.head(self.ids(ids).flatten(1))

ids = torch.randint(0, 50, (640, 3))
ids[500, 1] = 50
trainer = flatout.Trainer(Model(), loss="mse", say=lambda line: None)
trainer.fit(ids, torch.rand(640, 1), batch_size=32, epochs=1, shuffle=False, progress=False)
"""


def test_an_id_that_torch_finds_on_the_device_is_told_in_words(tmp_path, device):
    done = subprocess.run(
        [sys.executable, "-c", OUTSIDE],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "FLATOUT_CACHE": str(tmp_path / "cache")},
        timeout=50,
        check=False,
    )
    assert done.returncode == 1
    said = "DataError: a kernel on the GPU found an index" if device.type == "cuda" else "DataError"
    assert said in done.stderr, done.stderr
    assert "ids" in done.stderr


@pytest.mark.parametrize("verb", ["evaluate", "predict", "worst"])
def test_an_id_is_named_where_nothing_trains(verb, device):
    ids = torch.randint(0, 50, (640, 3))
    ids[500, 1] = 50
    model = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(12, 1))
    trainer = flatout.Trainer(model, loss="mse", say=lambda line: None)
    data = (ids,) if verb == "predict" else (ids, torch.rand(640, 1))
    with pytest.raises(DataError, match="id 50 is not in") as error:
        getattr(trainer, verb)(*data)
    assert "sample 500" in str(error.value)
    assert torch.ones(3, device=device).sum() == 3
