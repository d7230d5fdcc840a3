"""compute.touched_rows: a fit ends as under the dense optimizer, and resumes."""

import pytest
import torch
from torch import nn

import flatout
from flatout.kernels import table_rows

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


def fit(touched_rows, epochs=3, **given):
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
    return model, trainer.fit(*data(), batch_size=32, epochs=epochs)


def test_a_fit_ends_as_under_the_dense_optimizer():
    dense, theirs = fit("off")
    ours, own = fit("on")
    for name, value in dense.state_dict().items():
        assert (ours.state_dict()[name] - value).norm() <= 1e-5 * value.norm(), name
    assert not ours.ids.sparse
    losses = [[epoch["loss"] for epoch in history.epochs] for history in (theirs, own)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
