"""Rows of tables on a GPU, by Triton and by torch, are those of the C extension."""

import copy

import pytest
import torch
from torch import nn

from flatout.kernels import Change, Read, Steps, Table, sum_tables, table_rows, triton_rows
from flatout.optim.adapter import rules_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(60),
    pytest.mark.skipif(not table_rows.available(), reason="the C extension is absent"),
]

OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adam, decay": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=1e-3),
    "nesterov": lambda p: torch.optim.SGD(
        p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-3
    ),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "rmsprop, momentum": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=1e-2),
}
SHAPES = [(12, 5), (7, 8), (9, 1), (5, 5), (40, 300)]


def tables_of(make, device, dtype):
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, dtype=dtype).to(device)) for shape in SHAPES]
    rules = [rule for _, rule in rules_of(make(weights), weights)]
    tables = []
    for weight, rule in zip(weights, rules, strict=True):
        first, second = rule.state()
        last = torch.zeros(len(weight), dtype=torch.int32, device=device)
        tables.append(
            Table(weight.detach(), first, second, last, rule.epsilon, copy.copy(rule.lower()))
        )
    return tables, rules[0]


def reads(step, device):
    """Of each table ids, several of the same row, and gradients."""
    draw = torch.Generator().manual_seed(step)
    made = []
    for rows, width in SHAPES:
        ids = (torch.rand(60, generator=draw) ** 2 * rows).long()
        made.append(Read(ids.to(device), torch.randn(60, width, generator=draw).to(device), rows))
    return made


def stepped(make, device, dtype, steps=40):
    """The tables after some steps; in some of them, few tables are read."""
    tables, rule = tables_of(make, device, dtype)
    made, bad = Steps(rule.name, 0, 100), torch.zeros(1, dtype=torch.int64, device=device)
    on_cpu = torch.device(device).type == "cpu"
    for step in range(steps):
        read = reads(step, device)
        used = list(zip(tables, read, strict=True))[: 1 if 10 <= step < 20 else len(tables)]
        for table, one in used:
            if on_cpu:
                made.bring(table, table_rows.group(one.ids, one.size).rows)
            else:
                ids = one.ids.int() if step % 2 else one.ids
                assert torch.equal(made.bring_ids(table, ids, bad), one.ids)
        if on_cpu:
            groups = [table_rows.group(one.ids, one.size) for _, one in used]
            summed = [
                (group.rows, table_rows.sum_rows(one.values, group))
                for group, (_, one) in zip(groups, used, strict=True)
            ]
        else:
            summed, is_bad = sum_tables([one for _, one in used], bad)
            assert not is_bad
        made.write(rule.step(made.now + 1))
        made.apply([Change(t, *one) for (t, _), one in zip(used, summed, strict=True)])
        made.advance()
    for table in tables:
        made.bring(table, None)
    return tables


@pytest.mark.parametrize("by", ["triton", "operators"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_rows_end_as_by_the_c_extension(make, dtype, by, device, monkeypatch):
    if by == "operators":
        monkeypatch.setattr(triton_rows, "kernels_for", lambda device: None)
    elif triton_rows.kernels_for(device) is None:
        pytest.skip("no Triton")
    wanted, ours = stepped(make, "cpu", dtype), stepped(make, device, dtype)
    for theirs, own in zip(wanted, ours, strict=True):
        assert torch.equal(own.last.cpu(), theirs.last)
        tensors = zip(theirs[:3], own[:3], strict=True)
        near = {"rtol": 1e-2, "atol": 1e-6} if dtype is torch.bfloat16 else {}
        for one, other in tensors:
            if one is not None:
                torch.testing.assert_close(other.cpu(), one, **near or {"rtol": 1e-4, "atol": 1e-5})


@pytest.mark.parametrize("by", ["triton", "operators"])
def test_an_id_that_no_row_has_is_told_and_its_place_filled(by, device, monkeypatch):
    if by == "operators":
        monkeypatch.setattr(triton_rows, "kernels_for", lambda device: None)
    tables, rule = tables_of(OPTIMIZERS["adam"], device, torch.float32)
    made, bad = Steps(rule.name, 0, 100), torch.zeros(1, dtype=torch.int64, device=device)
    if device.type == "cpu":
        pytest.skip("a CPU tells it at once")
    ids = torch.tensor([3, 2**40, -1, 3], device=device)
    assert made.bring_ids(tables[0], ids, bad).tolist() == [3, 11, 0, 3]
    assert bad.item() == 1


def test_a_row_that_nearly_all_samples_have_is_summed_in_the_same_order_twice(device):
    ids = torch.zeros(20_000, dtype=torch.int64, device=device)
    ids[::7] = 3
    values = torch.randn(20_000, 32, generator=torch.Generator().manual_seed(0)).to(device)
    bad = torch.zeros(1, dtype=torch.int64, device=device)
    both = [sum_tables([Read(ids, values, 5), Read(ids, values[:, :3], 5)], bad) for _ in range(2)]
    ((rows, sums), (_, narrow)), _ = both[0]
    assert rows.tolist() == [0, 3]
    assert torch.equal(sums, both[1][0][0][1])
    wanted = torch.stack([values[ids == row].double().sum(0) for row in (0, 3)])
    torch.testing.assert_close(sums.double(), wanted, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(narrow, sums[:, :3])
