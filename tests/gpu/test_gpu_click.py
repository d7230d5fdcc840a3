"""Click-through models on a GPU: tables stepped by rows, days of ids, files, scripts."""

import copy
import functools
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
from flatout.data.schema import Column, Schema
from flatout.errors import DataError, NumbersError
from flatout.kernels import joined, table_rows
from flatout.models import row_tables
from flatout.optim import TouchedRows, Update, steppable_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(60),
    pytest.mark.skipif(not table_rows.available(), reason="the C extension is absent"),
]

ROWS, FIELDS = 400, 3
OPTIMIZERS = {
    "adam": functools.partial(torch.optim.Adam, lr=1e-2),
    "adam, decay": functools.partial(torch.optim.Adam, lr=1e-2, weight_decay=1e-3),
    "adam, fused": functools.partial(torch.optim.Adam, lr=1e-2, fused=True),
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, weight_decay=1e-3),
    "nesterov": functools.partial(
        torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-3
    ),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=1e-3),
    "rmsprop, momentum": functools.partial(torch.optim.RMSprop, lr=1e-3, momentum=0.9),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.1, lr_decay=1e-2, weight_decay=1e-4),
}


class Fields(nn.Module):
    """Tables of several widths, read in several ways, one of them by two layers."""

    def __init__(self):
        super().__init__()
        self.padded = nn.Embedding(ROWS, 8, padding_idx=0)
        self.narrow = nn.Embedding(ROWS, 1)
        self.wide = nn.Embedding(2 * ROWS, 20, scale_grad_by_freq=True)
        self.bag = nn.EmbeddingBag(ROWS, 8, mode="mean", padding_idx=5)
        self.same = nn.Embedding(ROWS, 8)
        self.same.weight = self.bag.weight
        self.head = nn.Linear(37, 1)

    def forward(self, ids):
        same = self.same(ids.int()).sum(1)
        parts = [self.padded(ids).sum(1), self.narrow(ids).sum(1), self.wide(2 * ids).sum(1)]
        return self.head(torch.cat([*parts, self.bag(ids) + same], 1))


def attached(model, optimizer):
    modules, _ = row_tables(model, split=True)
    (rows,) = (TouchedRows(o, m) for o, m in steppable_rows([optimizer], modules).items())
    rows.attach()
    return {optimizer: rows}


def drawn(seed, samples=24):
    generator = torch.Generator().manual_seed(seed)
    ids = (torch.rand(samples, FIELDS, generator=generator) ** 4 * ROWS).long()
    return ids, torch.rand(samples, 1, generator=generator)


def trained(make, device, *, rows, steps=60, clip=0.05, parts=2):
    """A model after some steps, each of several batches, under a schedule."""
    torch.manual_seed(0)
    model = Fields().to(device)
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * steps)
    own = attached(model, optimizer) if rows else {}
    update = Update(optimizer, clip_norm=clip, rows=own)
    for step in range(steps):
        update.begin()
        for part in range(parts):
            ids, wanted = (one.to(device) for one in drawn(parts * step + part))
            (model(ids) - wanted).square().mean().backward()
        update()
        schedule.step()
    for one in own.values():
        one.detach()
    return model, optimizer


def assert_near(ours, dense, share=2e-5):
    torch.manual_seed(0)
    start = Fields().state_dict()
    for name, value in dense.state_dict().items():
        moved = (value.cpu() - start[name]).norm()
        off = (ours.state_dict()[name] - value).norm()
        assert off <= share * moved + 1e-6 * value.norm(), name


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_several_tables_end_as_under_the_dense_optimizer(make, device):
    dense, theirs = trained(make, device, rows=False)
    ours, own = trained(make, device, rows=True)
    assert_near(ours, dense)
    names = {parameter: name for name, parameter in dense.named_parameters()}
    for parameter, state in theirs.state.items():
        held = own.state[ours.get_parameter(names[parameter])]
        for key, value in state.items():
            torch.testing.assert_close(held[key], value, rtol=1e-4, atol=5e-6)


@pytest.mark.parametrize("name", ["adam", "nesterov"])
def test_rows_that_were_left_alone_for_long_are_where_the_dense_optimizer_has_them(name, device):
    both = []
    for rows in (False, True):
        torch.manual_seed(0)
        model = nn.Embedding(ROWS, 8).to(device)
        optimizer = OPTIMIZERS[name](model.parameters())
        own = attached(model, optimizer) if rows else {}
        update = Update(optimizer, rows=own)
        for step in range(500):
            update.begin()
            ids = torch.arange(ROWS // 2, device=device) if step < 3 else torch.tensor([7])
            model(ids.to(device)).sin().sum().backward()
            update()
        read = model(torch.arange(ROWS, device=device)).detach()
        for one in own.values():
            one.detach()
        both.append((read, model.weight.detach()))
    (wanted, last), (read, ours) = both
    torch.testing.assert_close(read, wanted, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(ours, last, rtol=2e-5, atol=2e-6)


def test_the_result_has_the_same_bits_twice(device):
    first, second = (trained(OPTIMIZERS["adam"], device, rows=True, steps=20)[0] for _ in range(2))
    for name, value in first.state_dict().items():
        if name != "head.weight":  # torch's own, of a GPU's matrix products
            assert torch.equal(value, second.state_dict()[name]), name


BAGS = {
    "sum": {"mode": "sum"},
    "mean, padding": {"mode": "mean", "padding_idx": 3},
    "max": {"mode": "max"},
    "max, padding": {"mode": "max", "padding_idx": 3},
    "by frequency": {"mode": "sum", "scale_grad_by_freq": True},
    "last offset": {"mode": "sum", "include_last_offset": True},
}


class Bags(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.bag = nn.EmbeddingBag(40, 4, **options)
        self.weights = nn.Parameter(torch.rand(24))

    def forward(self, ids):
        last = self.bag.include_last_offset
        offsets = torch.tensor([0, 2, 2, 9, 16, *([24] if last else [])], device=ids.device)
        rows = [self.bag(ids.reshape(-1), offsets), self.bag(ids.reshape(-1).int(), offsets.int())]
        if self.bag.mode == "sum" and not self.bag.scale_grad_by_freq:
            rows.append(self.bag(ids.reshape(-1), offsets, self.weights))
        if not last:
            rows.append(self.bag(ids))
        return torch.cat(rows).square().sum()


@pytest.mark.parametrize("options", BAGS.values(), ids=BAGS)
def test_bags_are_read_and_stepped_as_by_torch(options, device):
    both = []
    for rows in (False, True):
        torch.manual_seed(0)
        model = Bags(options).to(device)
        optimizer = OPTIMIZERS["adam"](model.parameters())
        update = Update(optimizer, rows=attached(model, optimizer) if rows else {})
        for step in range(8):
            update.begin()
            generator = torch.Generator().manual_seed(step)
            ids = (torch.rand(8, 3, generator=generator) ** 2 * 40).long().to(device)
            model(ids).backward()
            update()
        both.append({name: one.detach().clone() for name, one in model.named_parameters()})
    for name, value in both[0].items():
        torch.testing.assert_close(both[1][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["adam", "adamw", "nesterov", "rmsprop, momentum", "adagrad"])
def test_halves_of_bf16_are_stepped_as_their_float32_numbers(name, device):
    torch.manual_seed(0)
    table = nn.Embedding(ROWS, 8, dtype=torch.bfloat16, device=device)
    start = table.weight.detach().clone()
    master = nn.Parameter(start.float())
    dense, optimizer = OPTIMIZERS[name]([master]), OPTIMIZERS[name](table.parameters())
    rows = attached(table, optimizer)
    update = Update(optimizer, rows=rows)
    for step in range(60):
        draw = torch.Generator().manual_seed(step)
        ids = torch.randperm(ROWS // (1 + step % 3), generator=draw)[:20].to(device)
        wanted = torch.randn(20, 8, generator=draw).bfloat16().to(device)
        update.begin()
        (table(ids) * wanted).sum().backward()
        update()
        master.grad = torch.zeros_like(master)
        master.grad[ids] = wanted.float()
        dense.step()
    for one in rows.values():
        one.detach()
    stepped = joined(table.weight.detach(), optimizer.state[table.weight]["weight_lower_half"])
    moved = (master - start.float()).norm()
    assert (stepped - master).norm() <= 2e-5 * moved + 1e-6 * master.norm()


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


def fit(touched_rows, model=None, data=None, make="adam", callbacks=(), save=None, **given):
    torch.manual_seed(0)
    model = model or DeepFM(ROWS)
    compute = {"touched_rows": touched_rows, "precision": "fp32", **given.pop("compute", {})}
    trainer = flatout.Trainer(
        model,
        loss="binary_cross_entropy",
        optimizer=OPTIMIZERS[make](model.parameters()),
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


@pytest.mark.parametrize(
    ("make", "given", "share"),
    [
        ("adam", {"clip_norm": 0.5}, 2e-5),
        ("adam, fused", {"clip_value": 0.01, "accumulate": 2}, 2e-5),
        ("adamw", {"compute": {"precision": "bf16"}}, 2e-2),
        ("adam", {"compute": {"precision": "fp16"}}, 2e-2),
        ("adam", {"compute": {"precision": "fp16", "fused_optimizer": "on"}}, 2e-2),
    ],
    ids=["clip", "accumulated, fused", "bf16", "fp16", "fp16, fused"],
)
def test_a_fit_ends_as_under_the_dense_optimizer(make, given, share, device):
    dense, theirs = fit("off", make=make, **copy.deepcopy(given))
    ours, own = fit("on", make=make, **copy.deepcopy(given))
    assert next(ours.model.parameters()).device.type == device.type
    near(ours, dense, share)
    losses = [[epoch["loss"] for epoch in history.epochs] for history in (theirs, own)]
    assert losses[0] == pytest.approx(losses[1], rel=10 * share)
    counts = [[int(one["step"]) for one in t.optimizer.state.values()] for t in (dense, ours)]
    assert counts[0] == counts[1]


def test_tables_of_bf16_are_split(device):
    torch.manual_seed(0)
    model = DeepFM(ROWS)
    model.first.bfloat16()
    model.factors.bfloat16()
    ours, _ = fit("on", model, compute={"bf16_tables": "split", "precision": "bf16"})
    assert ours.model.factors.weight.dtype is torch.bfloat16
    held = ours.optimizer.state_dict()["state"]
    assert any("weight_lower_half" in one for one in held.values())
    dense, _ = fit("off", compute={"precision": "bf16"})
    near(ours, dense, 0.15)


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


@pytest.mark.parametrize("id", [ROWS, -1, 2**40])
def test_an_id_that_no_row_has_is_named_and_the_device_goes_on(id, device):
    (ids, values), wanted = clicks()
    ids = ids.clone()
    ids[70, 1] = id
    with pytest.raises(DataError, match=rf"id {id} is not in 0\.\.{ROWS - 1}.*") as error:
        fit("on", data=((ids, values), wanted))
    assert "sample 70" in str(error.value)
    assert torch.ones(3, device=device).sum() == 3


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


def test_a_script_is_stepped_by_rows_with_the_same_result(tmp_path, device):
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
    assert "applied: touched_rows" in told, told
    assert cured["losses"] == pytest.approx(plain["losses"], rel=1e-3, abs=1e-5)
    assert cured["sums"] == pytest.approx(plain["sums"], rel=1e-4)


def test_a_keras_table_is_stepped_by_rows(device):
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
        assert is_by_rows is (touched_rows == "on"), history.notes
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
