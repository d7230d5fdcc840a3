"""Tables stepped by the rows that a batch has used end as under their dense optimizer."""

import copy
import io

import numpy as np
import pytest
import torch
from torch import nn

from flatout.kernels import joined, table_rows
from flatout.models import TableParameter, row_tables
from flatout.optim import TouchedRows, Update, steppable_rows

pytestmark = pytest.mark.skipif(not table_rows.available(), reason="the C extension is absent")

ROWS, STEPS = 300, 400
OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adam, decay": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=1e-3),
    "adam, large eps": lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-3, betas=(0.95, 0.99)),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=1e-3),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(
        p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-3
    ),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "rmsprop, momentum": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=1e-2),
}


class Tables(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Embedding(ROWS, 8, padding_idx=0)
        self.bag = nn.EmbeddingBag(ROWS, 8, mode="mean")
        self.head = nn.Linear(8, 1)

    def forward(self, ids):
        return self.head(self.one(ids).sum(1) + self.bag(ids))


def job(make):
    torch.manual_seed(0)
    model = Tables()
    return model, make(model.parameters())


def batches(steps=STEPS, seed=3):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = (torch.rand(16, 3, generator=generator) ** 4 * ROWS).long()
        yield ids, torch.rand(16, 1, generator=generator)


def train(model, optimizer, rows, steps=STEPS, clip=None, scheduler=None, seed=3):
    update = Update(optimizer, clip_norm=clip, rows=rows)
    for ids, wanted in batches(steps, seed):
        update.begin()
        ((model(ids) - wanted) ** 2).mean().backward()
        update()
        if scheduler is not None:
            scheduler.step()


def attached(model, optimizer, modules=None):
    modules = modules or row_tables(model)[0]
    (rows,) = (TouchedRows(o, m) for o, m in steppable_rows([optimizer], modules).items())
    rows.attach()
    return {optimizer: rows}


def assert_near(ours, dense, start):
    for name, value in dense.state_dict().items():
        moved = (value - start[name]).norm()
        assert (ours.state_dict()[name] - value).norm() <= 2e-5 * moved + 1e-6 * value.norm(), name


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, pytest.param(0.05, marks=pytest.mark.slow)])
def test_the_result_is_that_of_the_dense_optimizer(make, clip):
    compare(make, clip)


def compare(make, clip):
    found = []
    for touched in (False, True):
        model, optimizer = job(make)
        start = copy.deepcopy(model.state_dict())
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        rows = attached(model, optimizer) if touched else {}
        train(model, optimizer, rows, clip=clip, scheduler=schedule)
        for one in rows.values():
            one.detach()
        found.append((model, optimizer))
    (dense, theirs), (ours, own) = found
    assert_near(ours, dense, start)
    assert type(ours.one.weight) is nn.Parameter
    for parameter, state in theirs.state.items():
        name = next(name for name, one in dense.named_parameters() if one is parameter)
        held = own.state[ours.get_parameter(name)]
        assert held.keys() == state.keys()
        for key, value in state.items():
            torch.testing.assert_close(held[key], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_rates_that_change_after_a_state_was_loaded_hold_for_rows_too(make):
    """Change a rate after load_state_dict, which replaces the parameter groups."""
    found = []
    for touched in (False, True):
        model, optimizer = job(make)
        start = copy.deepcopy(model.state_dict())
        rows = attached(model, optimizer) if touched else {}
        train(model, optimizer, rows, 20)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.param_groups[0]["lr"] /= 10
        train(model, optimizer, rows, 20, seed=4)
        for one in rows.values():
            one.detach()
        found.append(model)
    dense, ours = found
    assert_near(ours, dense, start)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_rows_of_bf16_halves_are_stepped_as_their_float32_numbers(make):
    step_halves(make)


def step_halves(make):
    torch.manual_seed(0)
    table = nn.Embedding(ROWS, 8, dtype=torch.bfloat16)
    start = table.weight.detach().clone()
    master = nn.Parameter(start.float())
    dense, optimizer = make([master]), make(table.parameters())
    modules, _ = row_tables(table, split=True)
    rows = attached(table, optimizer, modules)
    draw = torch.Generator().manual_seed(5)
    for step in range(60):
        ids = torch.randperm(ROWS // (1 + step % 3), generator=draw)[:20]
        wanted = torch.randn(20, 8, generator=draw).bfloat16()
        # The gradients do not depend on the weights: these are not pulled towards one another.
        update = Update(optimizer, clip_value=1.0, rows=rows)
        update.begin()
        (table(ids) * wanted).sum().backward()
        update()
        master.grad = torch.zeros_like(master)
        master.grad[ids] = wanted.float().clamp(-1, 1)
        dense.step()
        if step == 30:  # torch casts what it loads to the dtype of the weight
            saved = copy.deepcopy(optimizer.state_dict())
            for one in rows.values():
                one.detach()
            optimizer = make(table.parameters())
            optimizer.load_state_dict(saved)
            rows = attached(table, optimizer, modules)
    for one in rows.values():
        one.detach()
    found = joined(table.weight.detach(), optimizer.state[table.weight]["weight_lower_half"])
    moved = (master - start.float()).norm()
    assert (found - master).norm() <= 2e-5 * moved + 1e-6 * master.norm()
    # The weight is the upper half of it: what torch's own step would round away is kept.
    assert torch.equal((found.view(torch.int32) >> 16).short(), table.weight.view(torch.int16))


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_rows_that_miss_few_steps_differ_by_the_last_bit(make):
    found = []
    for touched in (False, True):
        torch.manual_seed(0)
        model = nn.Embedding(40, 8)
        optimizer = make(model.parameters())
        update = Update(optimizer, rows=attached(model, optimizer) if touched else {})
        for step in range(12):
            update.begin()
            ids = torch.arange(40)[step % 3 :: 3]
            (model(ids) * torch.sin(torch.arange(8.0) + step)).square().sum().backward()
            update()
        found.append(model.state_dict()["weight"])
    assert (found[1] - found[0]).norm() <= 1e-7 * found[0].norm()


def test_rows_are_brought_up_to_date_for_a_state_dict_and_read_so_in_between():
    model, optimizer = job(OPTIMIZERS["adam"])
    dense, theirs = job(OPTIMIZERS["adam"])
    rows = attached(model, optimizer)
    train(model, optimizer, rows, 50)
    train(dense, theirs, {}, 50)
    # A row that was used in the beginning moves on; it is read as if it had been stepped.
    ids = torch.arange(ROWS).reshape(-1, 3)
    torch.testing.assert_close(model(ids), dense(ids), rtol=1e-4, atol=1e-6)
    train(model, optimizer, rows, 50, seed=4)
    train(dense, theirs, {}, 50, seed=4)
    assert_near(model, dense, job(OPTIMIZERS["adam"])[0].state_dict())


@pytest.mark.slow
def test_what_reads_a_whole_table_finds_it_up_to_date():
    model, optimizer = job(OPTIMIZERS["adam"])
    dense, theirs = job(OPTIMIZERS["adam"])
    rows = attached(model, optimizer)
    for turn in range(3):
        train(model, optimizer, rows, 20, seed=turn)
        train(dense, theirs, {}, 20, seed=turn)
        wanted = dense.one.weight.detach()
        copied, saved = copy.deepcopy(model), io.BytesIO()
        torch.save(model, saved)
        loaded = torch.load(io.BytesIO(saved.getvalue()), weights_only=False)
        for weight in (copied.one.weight, loaded.one.weight):
            assert type(weight) is nn.Parameter
            torch.testing.assert_close(weight.detach(), wanted, rtol=1e-4, atol=1e-5)
        read = [
            lambda w: w.data,
            lambda w: torch._foreach_mul([w.detach(), w], 1.0)[1].detach(),
            lambda w: torch.from_numpy(w.detach().numpy()),
        ]
        train(model, optimizer, rows, 20, seed=turn + 5)
        train(dense, theirs, {}, 20, seed=turn + 5)
        torch.testing.assert_close(
            read[turn](model.one.weight), dense.one.weight.data, rtol=1e-4, atol=1e-5
        )
        with torch.no_grad():
            model.one.weight[7] = 1.0
            dense.one.weight[7] = 1.0
    assert type(model.one.weight) is not nn.Parameter


def test_a_state_that_is_loaded_in_between_holds():
    model, optimizer = job(OPTIMIZERS["adam"])
    rows = attached(model, optimizer)
    train(model, optimizer, rows, 30)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, rows, 30, seed=4)
    after = copy.deepcopy(model.state_dict())
    train(model, optimizer, rows, 30, seed=5)
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    train(model, optimizer, rows, 30, seed=4)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, after[name], rtol=1e-5, atol=1e-6)


def test_a_table_that_something_reads_whole_is_left_to_its_optimizer():
    model, optimizer = job(OPTIMIZERS["adam"])
    rows = attached(model, optimizer)
    update = Update(optimizer, rows=rows)
    for ids, wanted in batches(5):
        update.begin()
        (((model(ids) - wanted) ** 2).mean() + model.one.weight.norm()).backward()
        update()
    assert type(model.one.weight) is nn.Parameter
    assert type(model.bag.weight) is not nn.Parameter
    assert optimizer.state[model.one.weight]["step"] == 5


def test_tables_that_are_not_read_by_rows_alone_are_named():
    model = Tables()
    model.tied = nn.Linear(8, ROWS)
    model.tied.weight = model.one.weight
    model.limited = nn.Embedding(5, 2, max_norm=1.0)
    model.patched = nn.Embedding(5, 2)
    model.patched.forward = lambda ids: model.patched.weight[ids]
    model.halved = nn.Embedding(5, 2, dtype=torch.bfloat16)
    model.scaled = nn.utils.parametrizations.weight_norm(nn.Embedding(5, 2))
    model.frozen = nn.Embedding(5, 2).requires_grad_(False)
    model.hooked, model.after = nn.Embedding(5, 2), nn.EmbeddingBag(5, 2)
    model.hooked.weight.register_hook(lambda gradient: gradient * 2)
    model.after.weight.register_post_accumulate_grad_hook(print)
    found, others = row_tables(model)
    assert found == [model.bag, model.patched]
    assert others["one"] == "tied reads all of it"
    assert others["hooked"] == others["after"] == "a hook reads its gradient"
    named = {"limited", "halved", "scaled", "frozen"}
    assert set(others) == {"one", "hooked", "after", *named}


def test_rows_with_bad_numbers_are_held_back():
    model, optimizer = job(OPTIMIZERS["adam"])
    rows = attached(model, optimizer)
    train(model, optimizer, rows, 10)
    before = copy.deepcopy(model.state_dict())
    update = Update(optimizer, rows=rows)
    (model(torch.tensor([[1, 2, 3]])) * float("nan")).sum().backward()
    update()
    assert update.was_bad()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


BAGS = {
    "sum": {"mode": "sum"},
    "mean, padding": {"mode": "mean", "padding_idx": 3},
    "max": {"mode": "max"},
    "max, padding": {"mode": "max", "padding_idx": 3},
    "by frequency": {"mode": "sum", "scale_grad_by_freq": True},
    "last offset": {"mode": "sum", "include_last_offset": True},
}


class Wrapped(nn.Embedding):
    """An embedding whose forward is the user's."""

    def forward(self, input):
        return 2 * super().forward(input % self.num_embeddings)


class Ways(nn.Module):
    """A table that is read by ids in each way that there is."""

    def __init__(self, options):
        super().__init__()
        self.bag = nn.EmbeddingBag(40, 4, **options)
        self.one = Wrapped(40, 4, padding_idx=3, scale_grad_by_freq=True)
        self.one.weight = self.bag.weight
        self.weights = nn.Parameter(torch.rand(24))

    def forward(self, ids):
        last = self.bag.include_last_offset
        offsets = torch.tensor([0, 2, 2, 9, 16, *([24] if last else [])])
        rows = self.bag(ids.reshape(-1), offsets)
        rows = torch.cat([rows, self.bag(ids.reshape(-1).int(), offsets.int())])
        if self.bag.mode == "sum" and not self.bag.scale_grad_by_freq:
            rows = torch.cat([rows, self.bag(ids.reshape(-1), offsets, self.weights)])
        if not last:
            rows = torch.cat([rows, self.bag(ids)])
        weight = self.bag.weight
        indexed = [weight[ids], weight[ids - 40, :], weight.index_select(0, ids[:, 0])]
        found = [rows, self.one(input=ids + 40), *indexed, torch.index_select(weight, 0, ids[0])]
        return sum(one.square().sum() for one in found)[None, None]


@pytest.mark.parametrize("options", BAGS.values(), ids=BAGS)
def test_a_table_is_read_in_every_way_as_by_torch(options):
    compare_ways(options, OPTIMIZERS["adam"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adam"])
def test_so_it_is_by_every_optimizer(name):
    for kind in ("mean, padding", "max, padding", "last offset"):
        compare_ways(BAGS[kind], OPTIMIZERS[name], steps=6)


def compare_ways(options, make, steps=12):
    found = []
    for touched in (False, True):
        torch.manual_seed(0)
        model = Ways(options)
        start = copy.deepcopy(model.state_dict())
        optimizer = make(model.parameters())
        rows = attached(model, optimizer) if touched else {}
        update = Update(optimizer, clip_value=0.5, rows=rows)
        for step in range(steps):
            update.begin()
            for part in range(2):  # two micro-batches
                generator = torch.Generator().manual_seed(10 * step + part)
                ids = (torch.rand(8, 3, generator=generator) ** 2 * 40).long()
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(ids).sum()
                loss.backward()
            update()
        assert type(model.bag.weight) is (TableParameter if touched else nn.Parameter)
        found.append(model)
    dense, ours = found
    assert_near(ours, dense, start)
    for name, value in dense.named_parameters():
        torch.testing.assert_close(dict(ours.named_parameters())[name], value)


def test_a_gradient_that_is_differentiated_itself_is_that_of_torch():
    found = []
    for touched in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(40, 4, padding_idx=3), nn.Tanh(), nn.Linear(4, 1))
        optimizer = OPTIMIZERS["adam"](model.parameters())
        update = Update(optimizer, rows=attached(model, optimizer) if touched else {})
        for step in range(6):
            update.begin()
            loss = model(torch.tensor([[1, 3, 5], [5, step + 7, 2]])).square().sum()
            (gradient,) = torch.autograd.grad(loss, model[0].weight, create_graph=True)
            (loss + gradient.square().sum()).backward()
            update()
        found.append(model.state_dict())
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value)


def test_the_gradient_of_a_table_has_the_rows_that_were_read_and_no_others():
    model, optimizer = job(OPTIMIZERS["adam"])
    attached(model, optimizer)
    model(torch.tensor([[7, 5, 7], [0, 5, 9]])).sum().backward()
    gradient = model.one.weight.grad
    assert gradient.is_sparse
    assert gradient._indices().tolist() == [[5, 7, 9]]  # 0 is padding
    assert model.bag.weight.grad._indices().tolist() == [[0, 5, 7, 9]]


@pytest.mark.parametrize("ids", [[[1, 300, 0]], [[1, -1, 0]], [[0.5, 1, 2]]])
def test_ids_that_no_row_has_are_refused_as_by_torch(ids):
    model, optimizer = job(OPTIMIZERS["adam"])
    attached(model, optimizer)
    with pytest.raises((IndexError, RuntimeError), match=r"index out of range|indices"):
        model(torch.tensor(ids))


def test_an_array_that_is_filled_again_between_reads_is_read_as_it_is_then():
    model, optimizer = job(OPTIMIZERS["adam"])
    attached(model, optimizer)
    ids = np.zeros((2, 3), dtype=np.int64)
    found = []
    for first in (1, 7):
        ids[:] = np.arange(first, first + 6).reshape(2, 3)
        found.append(model.bag(torch.from_numpy(ids)).detach())
    wanted = model.bag.weight.detach()[7:13].reshape(2, 3, -1).mean(1)
    torch.testing.assert_close(found[1], wanted)
