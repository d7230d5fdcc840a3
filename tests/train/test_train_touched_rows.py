"""compute.touched_rows: a fit ends as under the dense optimizer, and resumes."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import flatout
from flatout.errors import DataError, FlatoutError, ModelError
from flatout.kernels import joined, table_rows

pytestmark = pytest.mark.skipif(not table_rows.available(), reason="the C extension is absent")


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.ids = nn.Embedding(500, 8)
        self.head = nn.Linear(8 * 4, 1)

    def forward(self, x):
        return self.head(self.ids(x).flatten(1))


def data():
    generator = torch.Generator().manual_seed(1)
    x = (torch.rand(640, 4, generator=generator) ** 3 * 500).long()
    return x, (x.sum(1) % 2).float()[:, None]


def fit(touched_rows, epochs=3, callbacks=(), **given):
    torch.manual_seed(0)
    model = Clicks()
    recipe = flatout.Recipe(compute={"touched_rows": touched_rows, "precision": "fp32"})
    trainer = flatout.Trainer(
        model,
        loss="binary_cross_entropy",
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        recipe=recipe,
        allow="exact",
        clip_norm=0.5,
        **given,
    )
    return model, trainer.fit(*data(), batch_size=32, epochs=epochs, callbacks=callbacks)


@pytest.mark.slow
def test_a_fit_ends_as_under_the_dense_optimizer():
    dense, theirs = fit("off")
    ours, own = fit("on")
    for name, value in dense.state_dict().items():
        assert (ours.state_dict()[name] - value).norm() <= 1e-5 * value.norm(), name
    assert not ours.ids.sparse
    losses = [[epoch["loss"] for epoch in history.epochs] for history in (theirs, own)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("fused", ["off", "on"])
@pytest.mark.parametrize("scale", [1.0, 2000.0])  # large weights let the first steps overflow
def test_a_loss_that_is_scaled_steps_rows_too(scale, fused):
    found = []
    for touched_rows in ("off", "on"):
        recipe = {"touched_rows": touched_rows, "precision": "fp16", "fused_optimizer": fused}
        torch.manual_seed(0)
        model = Clicks()
        with torch.no_grad():
            model.ids.weight *= scale
        trainer = flatout.Trainer(
            model,
            loss="binary_cross_entropy",
            optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
            recipe=flatout.Recipe(compute=recipe),
            allow="exact",
            say=lambda line: None,
        )
        trainer.fit(*data(), batch_size=32, epochs=2, progress=False)
        state = trainer.optimizer.state_dict()["state"]
        found.append((model.state_dict(), int(state[0]["step"]), int(state[1]["step"])))
    (dense, *counts), (ours, *own) = found
    assert own == counts
    for name, value in dense.items():
        assert (ours[name] - value).norm() <= 1e-4 * value.norm(), name


class Reads(flatout.Callback):
    """What a callback finds in the table and its optimizer behind each epoch."""

    def __init__(self):
        self.weights, self.means = [], []

    def on_epoch_end(self, state):
        self.weights.append(state.trainer.model.ids.weight.detach().clone())
        self.means.append(state.trainer.optimizer.state_dict()["state"][0]["exp_avg"].clone())


@pytest.mark.slow
def test_who_looks_at_a_table_between_epochs_finds_it_up_to_date():
    dense, ours = Reads(), Reads()
    fit("off", callbacks=[dense])
    fit("on", callbacks=[ours])
    for name in ("weights", "means"):
        for theirs, own in zip(getattr(dense, name), getattr(ours, name), strict=True):
            assert (own - theirs).norm() <= 1e-5 * theirs.norm(), name


def test_no_epoch_walks_through_a_table(monkeypatch):
    walks, bring = [], table_rows.Steps.bring

    def counted(steps, table, rows):
        walks.append(rows is None)
        bring(steps, table, rows)

    monkeypatch.setattr(table_rows.Steps, "bring", counted)
    fit("on", epochs=5)
    assert len(walks) > 80
    assert sum(walks) <= 1  # at the end


class Roots(nn.Module):
    """The gradient of the root at 0 is infinite."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.ids, self.others = nn.Embedding(500, 8), nn.Embedding(600, 8)
        self.head = nn.Linear(8 * 4, 1)
        with torch.no_grad():
            self.ids.weight[499] = 0.0

    def forward(self, x):
        found = torch.cat([self.others(x[:, :1] + 99), self.ids(x[:, 1:])], 1)
        return self.head(found.abs().sqrt().flatten(1))


@pytest.mark.parametrize("touched_rows", ["on", "off"])
def test_a_row_whose_gradient_is_bad_is_named_with_its_sample_and_nothing_is_written(touched_rows):
    model = Roots()
    x, y = data()
    x[x == 499] = 498
    x[37, 2] = 499
    x[3, 0] = 499  # of the other table
    before = None

    class Before(flatout.Callback):
        def on_step(self, state):
            nonlocal before
            before = {name: value.clone() for name, value in model.state_dict().items()}

    trainer = flatout.Trainer(
        model,
        loss="binary_cross_entropy",
        optimizer=torch.optim.Adam(model.parameters()),
        recipe=flatout.Recipe(compute={"touched_rows": touched_rows, "precision": "fp32"}),
        allow="exact",
    )
    with pytest.raises(FlatoutError, match=r"ids\.weight, row 499, read by sample 37\n"):
        trainer.fit(x, y, batch_size=32, shuffle=False, callbacks=[Before()], progress=False)
    assert before is not None
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("ids", "words"),
    [(-1, "id -1 is not in 0..499"), (500, "id 500 is not in 0..499")],
)
def test_an_id_that_a_table_has_no_row_for_is_named(ids, words):
    x, y = data()
    x[200, 1] = ids
    recipe = flatout.Recipe(compute={"touched_rows": "on"})
    trainer = flatout.Trainer(Clicks(), loss="binary_cross_entropy", recipe=recipe)
    with pytest.raises(FlatoutError, match=words):
        trainer.fit(x, y, batch_size=32, shuffle=False, progress=False)


def test_ids_of_a_float_dtype_are_told_as_such():
    x, y = data()
    recipe = flatout.Recipe(compute={"touched_rows": "on"})
    trainer = flatout.Trainer(Clicks(), loss="binary_cross_entropy", recipe=recipe)
    with pytest.raises(DataError, match=r"table ids .* int64 or int32 ids, found float32") as told:
        trainer.fit(x.float(), y, batch_size=32, progress=False)
    assert told.value.where == "inputs"
    assert "x.long()" in told.value.do


def bf16_fit(setting="split", epochs=4, make=Clicks, resume=False, **given):
    torch.manual_seed(0)
    model = make().bfloat16()
    trainer = flatout.Trainer(
        model,
        loss=lambda outputs, targets: nn.functional.binary_cross_entropy_with_logits(
            outputs.float(), targets
        ),
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-4),
        recipe=flatout.Recipe(compute={"bf16_tables": setting}),
        allow="exact",
        say=lambda line: None,
        **given,
    )
    options = {"batch_size": 32, "epochs": epochs, "progress": False, "resume": resume}
    return trainer, trainer.fit(*data(), **options)


@pytest.mark.slow
def test_small_steps_of_bf16_tables_are_kept_in_lower_halves(tmp_path):
    run = tmp_path / "run"
    # At which steps rows are brought up to date, as for a checkpoint, decides how they are rounded.
    trainer, history = bf16_fit(epochs=4, run=tmp_path / "whole")
    (line,) = [note for note in history.notes if note.startswith("tables: ")]
    assert "bf16, with the lower halves in separate tensors" in line
    weight = trainer.model.ids.weight
    state = trainer.optimizer.state[weight]
    whole = joined(weight.detach(), state["weight_lower_half"])
    plain, _ = bf16_fit("rounded")
    # Steps of 1e-4 are less than half of what bf16 can tell of weights from 0.05 on.
    before = nn.Embedding(500, 8)
    torch.manual_seed(0)
    before.load_state_dict({"weight": Clicks().ids.weight.bfloat16().float()})
    used = torch.unique(data()[0])
    start = before.weight.detach()[used]
    large = start.abs() > 0.1
    assert torch.equal(plain.model.ids.weight.detach().float()[used][large], start[large])
    assert bool((whole[used][large] != start[large]).float().mean() > 0.95)

    bf16_fit(epochs=2, run=run)
    resumed, _ = bf16_fit(epochs=4, run=run, resume=True)
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    for key, value in state.items():
        held = resumed.optimizer.state[resumed.model.ids.weight][key]
        bits = (one.reshape(-1).view(torch.uint8) for one in (value, held))
        assert torch.equal(*bits), key
    # A plain model: the upper halves.
    trainer.save(tmp_path / "model.safetensors")
    saved = load_file(tmp_path / "model.safetensors")["ids.weight"]
    assert saved.dtype is torch.bfloat16
    assert torch.equal(saved, weight.detach())


def test_what_hinders_lower_halves_is_said():
    with pytest.raises(ModelError, match="no embedding table of the model is bfloat16"):
        bf16_fit(make=type("Wide", (Clicks,), {"bfloat16": lambda self: self}))
    with pytest.raises(ModelError, match="ids is stepped whole: max_norm changes rows"):
        bf16_fit(make=type("Normed", (Clicks,), {"bfloat16": normed}))


def normed(model):
    model.ids.max_norm = 1.0
    return nn.Module.bfloat16(model)
