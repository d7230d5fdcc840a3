"""Rules by row: the same from dense gradients, sparse ones and tables read by rows."""

import copy

import pytest
import torch
from torch import nn

import flatout
from flatout.kernels import table_rows
from flatout.optim import Ftrl, LazyAdam, RowwiseAdagrad

RULES = {
    "lazy_adam": lambda p: LazyAdam(p, lr=1e-2),
    "rowwise_adagrad": lambda p: RowwiseAdagrad(p, lr=0.1, initial_accumulator_value=0.01),
    "ftrl": lambda p: Ftrl(p, lr=0.1, l1=1e-3, l2=1e-2),
}
ROWS = 60


class Clicks(nn.Module):
    def __init__(self, sparse=False):
        super().__init__()
        torch.manual_seed(0)
        self.ids = nn.Embedding(ROWS, 4, sparse=sparse)
        self.head = nn.Linear(4, 1)

    def forward(self, ids):
        return self.head(self.ids(ids).sum(1))


def data():
    generator = torch.Generator().manual_seed(1)
    ids = (torch.rand(160, 3, generator=generator) ** 3 * (ROWS - 5)).long()
    return ids, (ids.sum(1) % 2).float()[:, None]


def by_hand(make, sparse):
    model = Clicks(sparse)
    optimizer = make(model.parameters())
    for ids, wanted in zip(*(one.split(16) for one in data()), strict=True):
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(ids), wanted).backward()
        optimizer.step()
    return model, optimizer


def fitted(make, touched_rows, epochs=1, said=None, **given):
    model = Clicks()
    trainer = flatout.Trainer(
        model,
        loss="binary_cross_entropy",
        optimizer=make(model.parameters()),
        recipe=flatout.Recipe(compute={"touched_rows": touched_rows, "precision": "fp32"}),
        allow="exact",
        say=lambda line: None,
        **given,
    )
    history = trainer.fit(
        *data(), batch_size=16, shuffle=False, epochs=epochs, progress=False,
        resume="run" in given,
    )  # fmt: skip
    if said is not None:
        said.extend(history.notes)
    return model


def assert_same(found, wanted):
    for name, value in wanted.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("make", RULES.values(), ids=RULES)
def test_dense_and_sparse_gradients_and_touched_rows_give_the_same(make):
    dense, _ = by_hand(make, sparse=False)
    start = Clicks().state_dict()["ids.weight"]
    assert_same(by_hand(make, sparse=True)[0], dense)
    assert torch.equal(dense.ids.weight[-5:], start[-5:])  # which no batch has used
    assert not torch.equal(dense.ids.weight[:5], start[:5])
    assert_same(fitted(make, "off"), dense)
    if table_rows.available():
        said = []
        assert_same(fitted(make, "on", said=said), dense)
        name = type(make([nn.Parameter(torch.zeros(1))])).__name__
        assert f"tables: 1 of 60 rows · touched rows only, as {name} does" in said


@pytest.mark.slow
def test_a_resume_ends_in_the_same_bits(tmp_path):
    for name, make in RULES.items():
        whole = fitted(make, "on", epochs=2)
        fitted(make, "on", run=tmp_path / name)
        halves = fitted(make, "on", epochs=2, run=tmp_path / name)
        for key, value in whole.state_dict().items():
            assert torch.equal(halves.state_dict()[key], value), (name, key)


def test_lazy_adam_is_torchs_sparse_adam():
    model = nn.Embedding(ROWS, 4, sparse=True)
    other = copy.deepcopy(model)
    ours, theirs = LazyAdam(model.parameters()), torch.optim.SparseAdam(list(other.parameters()))
    for ids in data()[0].split(16):
        for one, optimizer in ((model, ours), (other, theirs)):
            optimizer.zero_grad()
            one(ids).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(model.weight, other.weight)


def test_rowwise_adagrad_has_one_sum_for_a_row():
    weight = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    optimizer = RowwiseAdagrad([weight], lr=0.5)
    for _ in range(2):
        weight.grad = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        optimizer.step()
    assert optimizer.state[weight]["sum"].tolist() == [[25.0], [0.0]]
    step = torch.tensor([3.0, 4.0]) * 0.5 * (12.5**-0.5 + 25**-0.5)
    torch.testing.assert_close(weight[0].detach(), torch.tensor([1.0, 2.0]) - step)
    assert weight[1].tolist() == [3.0, 4.0]


def test_ftrl_is_that_of_the_paper_and_its_l1_gives_zeros():
    rate, beta, l1, l2 = 0.3, 1.0, 0.8, 0.1
    weight = nn.Parameter(torch.zeros(2))
    optimizer = Ftrl([weight], lr=rate, beta=beta, l1=l1, l2=l2)
    w, z, n = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]
    for gradient in ([1.0, 0.2], [-0.4, 0.1], [2.0, 0.3]):
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        for i, g in enumerate(gradient):
            sigma = ((n[i] + g * g) ** 0.5 - n[i] ** 0.5) / rate
            z[i], n[i] = z[i] + g - sigma * w[i], n[i] + g * g
            shrunk = 0.0 if abs(z[i]) <= l1 else z[i] - (l1 if z[i] > 0 else -l1)
            w[i] = -shrunk / ((beta + n[i] ** 0.5) / rate + l2)
    torch.testing.assert_close(weight.detach(), torch.tensor(w))
    assert w[0] != 0
    assert weight[1] == 0


@pytest.mark.parametrize(("kind", "bad"), [(LazyAdam, -1), (RowwiseAdagrad, -1), (Ftrl, 0)])
def test_bad_options_are_refused(kind, bad):
    with pytest.raises(flatout.errors.FlatoutError, match=f"found lr={bad}"):
        kind([nn.Parameter(torch.zeros(1))], lr=bad)


@pytest.mark.parametrize("name", RULES)
def test_they_have_names(name):
    trainer = flatout.Trainer(Clicks(), loss="binary_cross_entropy", optimizer=name, lr=0.05)
    assert type(trainer.optimizer).__name__.lower() == name.replace("_", "")
    assert trainer.optimizer.param_groups[0]["lr"] == 0.05
