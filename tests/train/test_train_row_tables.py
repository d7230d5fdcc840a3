"""Which tables `auto` steps by rows, what it says of them, and that results are the dense ones."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.functional import binary_cross_entropy_with_logits

import flatout
from flatout.data import Batch
from flatout.kernels import table_rows
from flatout.train.explanation import Explanation
from flatout.train.tables.row_tables import Tables

pytestmark = pytest.mark.skipif(not table_rows.available(), reason="the C extension is absent")

ROWS, WIDTH = 300_000, 8


class Clicks(nn.Module):
    def __init__(self, rows=ROWS, **options):
        super().__init__()
        torch.manual_seed(0)
        self.ids = nn.Embedding(rows, WIDTH, **options)
        self.head = nn.Linear(2 * WIDTH, 1)

    def forward(self, x):
        return self.head(self.ids(x).flatten(1))


def data(rows=ROWS):
    generator = torch.Generator().manual_seed(1)
    x = (torch.rand(160, 2, generator=generator) ** 4 * rows).long()
    return x, (x.sum(1) % 2).float()[:, None]


def fit(
    model, recipe=None, allow="tolerant", x=None, loss="binary_cross_entropy", kind=torch.optim.Adam
):
    said = []
    trainer = flatout.Trainer(
        model,
        loss=loss,
        optimizer=kind(model.parameters(), lr=1e-3),
        recipe=flatout.Recipe(compute={"precision": "fp32", **(recipe or {})}),
        allow=allow,
        say=said.append,
    )
    history = trainer.fit(*(x or data()), batch_size=16, epochs=2, progress=False)
    return history, trainer.resolved.compute.touched_rows, said


@pytest.mark.slow
def test_large_tables_are_stepped_by_rows_and_end_as_under_the_dense_optimizer():
    dense = Clicks()
    fit(dense, {"touched_rows": "off"})
    largest = []
    ours = Clicks()
    node = get_gradient_edge(ours.ids.weight).node
    node.register_prehook(
        lambda grads: largest.extend(g._values().numel() if g.is_sparse else ROWS for g in grads)
    )
    history, chosen, said = fit(ours)
    assert chosen == "on"
    assert 0 < max(largest) <= 16 * 2 * WIDTH  # not even while `auto` looked
    for name, value in dense.state_dict().items():
        assert (ours.state_dict()[name] - value).norm() <= 1e-5 * value.norm(), name
    line = f"tables: 1 of {ROWS:,} rows · touched rows only, dense Adam's result (rounding)"
    assert line in history.notes
    assert line in said
    assert line in " ".join(history.explain().split())
    assert history.recipe.choices["compute.touched_rows"].reason == (
        "a batch reads at most 32 of 300,000 rows"
    )


@pytest.mark.slow
def test_tables_stay_as_they_are_where_rounding_is_not_allowed_or_nothing_is_gained():
    assert fit(Clicks(), allow="exact")[1] == "off"
    history, chosen, _ = fit(Clicks(50), x=data(50))
    assert chosen == "off"
    assert not any(note.startswith("tables:") for note in history.notes)


@pytest.mark.slow
def test_large_tables_that_cannot_be_stepped_by_rows_are_named():
    history, chosen, _ = fit(Clicks(max_norm=1.0))
    assert chosen == "off"
    assert history.notes[0] == (
        "tables: stepped whole: ids (max_norm changes rows where they are read)"
    )


def half_of(gradient):
    """What freezes the second half of a table's rows, as a hook."""
    return torch.cat([gradient[: ROWS // 2], torch.zeros_like(gradient[ROWS // 2 :])])


def halved(optimizer, args, kwargs):
    weight = optimizer.param_groups[0]["params"][0]
    weight.grad = half_of(weight.grad)


def with_hook(parameters, lr):
    optimizer = torch.optim.Adam(parameters, lr=lr)
    optimizer.register_step_pre_hook(halved)
    return optimizer


def patched(parameters, lr):
    optimizer = torch.optim.Adam(parameters, lr=lr)
    step = optimizer.step
    optimizer.step = lambda: (halved(optimizer, (), {}), step())
    return optimizer


@pytest.mark.slow
@pytest.mark.parametrize("kind", [None, with_hook, patched])
def test_code_of_the_user_gets_gradients_of_all_rows(kind):
    model, why = Clicks(), "code around Adam's step may read its gradient"
    start = model.ids.weight.detach().clone()
    if kind is None:
        model.ids.weight.register_hook(half_of)
        why = "a hook reads its gradient"
    history, chosen, _ = fit(model, kind=kind or torch.optim.Adam)
    assert chosen == "off"
    assert history.notes[0] == f"tables: stepped whole: ids ({why})"
    moved = (model.ids.weight != start).any(1)
    assert moved[: ROWS // 2].any()
    assert not moved[ROWS // 2 :].any()


def tables_of(**sizes):
    model = nn.ModuleDict({name: nn.Embedding(rows, 4) for name, rows in sizes.items()})
    return Tables.of(model, [torch.optim.Adam(model.parameters())])


def test_what_is_tried_depends_on_the_ids_of_a_batch():
    many, few = (Batch(torch.zeros(n, 2), None, None, None, n) for n in (10_000, 100))
    tables = tables_of(users=30_000)
    assert not tables.outgrow(many)
    assert tables.outgrow(few)
    assert not tables.outgrow(few, surely=True)
    assert tables_of(users=600_000).outgrow(few, surely=True)
    columns = tables_of(**{f"column_{i}": 5_000 for i in range(8)})
    inputs = {"numbers": torch.zeros(1000, 13), "ids": torch.zeros(1000, 8, dtype=torch.int64)}
    batch = Batch(inputs, None, None, None, 1000)
    assert columns.outgrow(batch)
    assert not columns.outgrow(batch, surely=True)


def test_small_tables_beside_large_ones_are_left_to_the_optimizer():
    tables = tables_of(users=100_000, week=7, day=31)
    assert tables.names == {"users": 100_000}
    assert tables.words == (
        "tables: 1 of 100,000 rows · touched rows only, dense Adam's result (rounding) · "
        "stepped whole: 2 tables (small)"
    )
    model = nn.Embedding(7, 2)
    assert Tables.of(model, [torch.optim.SparseAdam(model.parameters())]).whole == {
        "": "SparseAdam steps all rows"
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("penalty", "kind", "why"),
    [
        (
            lambda w: 1e-5 * w.square().sum(),
            partial(torch.optim.Adam, weight_decay=1e-5),
            "the loss reads all of it, as L2 does; Adam with weight_decay=3e-05 instead steps it "
            "by rows",
        ),
        (
            lambda w: 1e-5 * w.square().sum(),
            torch.optim.AdamW,
            "the loss reads all of it, as L2 does",
        ),
        (lambda w: 1e-5 * w.abs().sum(), torch.optim.Adam, "something reads all of it"),
    ],
    ids=["adam", "adamw", "l1"],
)
def test_l2_that_the_loss_has_of_a_whole_table_is_offered_as_decay(penalty, kind, why):
    model = Clicks(5000)

    def loss(outputs, targets):
        return binary_cross_entropy_with_logits(outputs, targets) + penalty(model.ids.weight)

    history, _, said = fit(model, {"touched_rows": "on"}, x=data(5000), loss=loss, kind=kind)
    line = f"tables: stepped whole: ids ({why})"
    assert line in said
    assert [note for note in history.notes if note.startswith("tables: ")][-1] == line
    explained = " ".join(" ".join(Explanation(history.as_dict(), None).lines("#", ".")).split())
    assert line in explained
    assert "result (rounding)" not in explained


def test_decay_as_it_is_offered_gives_the_weights_of_l2_in_the_loss():
    penalized, decayed = Clicks(5000), Clicks(5000)

    def loss(outputs, targets):
        square = penalized.ids.weight.square().sum()
        return binary_cross_entropy_with_logits(outputs, targets) + 1e-4 * square

    def decay(parameters, lr):
        table, *others = parameters
        groups = [{"params": [table], "weight_decay": 2e-4}, {"params": others}]
        return torch.optim.Adam(groups, lr=lr)

    fit(penalized, {"touched_rows": "on"}, x=data(5000), loss=loss)
    history, _, _ = fit(decayed, {"touched_rows": "on"}, x=data(5000), kind=decay)
    assert history.notes[0].startswith("tables: 1 of 5,000 rows · touched rows only")
    for name, value in penalized.state_dict().items():
        assert (decayed.state_dict()[name] - value).norm() <= 1e-5 * value.norm(), name
