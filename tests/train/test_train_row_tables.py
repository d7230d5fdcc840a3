"""Which tables `auto` steps by rows, what it says of them, and that results are the dense ones."""

import pytest
import torch
from torch import nn

import flatout
from flatout.data import Batch
from flatout.kernels import table_rows
from flatout.train.row_tables import Tables

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


def fit(model, recipe=None, allow="tolerant", x=None):
    said = []
    trainer = flatout.Trainer(
        model,
        loss="binary_cross_entropy",
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        recipe=flatout.Recipe(compute={"precision": "fp32", **(recipe or {})}),
        allow=allow,
        say=said.append,
    )
    history = trainer.fit(*(x or data()), batch_size=16, epochs=2, progress=False)
    return history, trainer.resolved.compute.touched_rows, said


def test_large_tables_are_stepped_by_rows_and_end_as_under_the_dense_optimizer():
    dense = Clicks()
    fit(dense, {"touched_rows": "off"})
    largest = []
    ours = Clicks()
    ours.ids.weight.register_hook(
        lambda g: largest.append(g._values().numel() if g.is_sparse else ROWS)
    )
    history, chosen, said = fit(ours)
    assert chosen == "on"
    assert max(largest) <= 16 * 2 * WIDTH  # not even while `auto` looked
    for name, value in dense.state_dict().items():
        assert (ours.state_dict()[name] - value).norm() <= 1e-5 * value.norm(), name
    line = f"tables: 1 of {ROWS:,} rows · touched rows only, dense Adam's result (rounding)"
    assert line in history.notes
    assert line in said
    assert line in " ".join(history.explain().split())
    assert history.recipe.choices["compute.touched_rows"].reason == (
        "a batch reads at most 32 of 300,000 rows"
    )


def test_tables_stay_as_they_are_where_rounding_is_not_allowed_or_nothing_is_gained():
    assert fit(Clicks(), allow="exact")[1] == "off"
    history, chosen, _ = fit(Clicks(50), x=data(50))
    assert chosen == "off"
    assert not any(note.startswith("tables:") for note in history.notes)


def test_large_tables_that_cannot_be_stepped_by_rows_are_named():
    history, chosen, _ = fit(Clicks(max_norm=1.0))
    assert chosen == "off"
    assert history.notes[0] == (
        "tables: stepped whole: ids (max_norm changes rows where they are read)"
    )


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
