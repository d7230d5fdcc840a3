import pytest
import torch
from torch import nn

from flatout.optim import can_fuse, fuse, unfuse
from flatout.optim.fused import align_state, begins_late, is_fused

KINDS = [
    (torch.optim.Adam, {"lr": 0.01}),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
]


def job(kind, options):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model, kind(model.parameters(), **options)


def step(model, optimizer, seed):
    draw = torch.Generator().manual_seed(seed)
    model(torch.randn(5, 4, generator=draw)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_round_trip(kind, options):
    model, optimizer = job(kind, options)
    plain, stepped = job(kind, options)
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    assert can_fuse(optimizer)
    assert not is_fused(optimizer)
    for number in range(9):
        if number == 3:
            fuse(optimizer)
            assert is_fused(optimizer)
            assert not can_fuse(optimizer)
        if number == 6:
            unfuse(optimizer)
            assert can_fuse(optimizer)
        step(model, optimizer, number)
        step(plain, stepped, number)
    assert groups == [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    kinds = [
        {k: (v.dtype, v.device, v.shape) for k, v in s.items() if torch.is_tensor(v)}
        for s in optimizer.state.values()
    ]
    assert kinds == [
        {k: (v.dtype, v.device, v.shape) for k, v in s.items() if torch.is_tensor(v)}
        for s in stepped.state.values()
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"fused": True},
        {"fused": False},
        {"foreach": True},
        {"foreach": False},
        {"differentiable": True},
        {"capturable": True},
    ],
)
def test_what_the_user_chose_is_respected(options):
    _, optimizer = job(torch.optim.Adam, options)
    assert not can_fuse(optimizer)
    assert not is_fused(optimizer)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (1, torch.float32), (100, torch.float32), (7, torch.float64), (54, torch.float64),
        (16, torch.bfloat16), (54, torch.bfloat16), (7, torch.float16), (100, torch.float16),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_fused_optimizers_give_the_plain_result(kind, options, dtype, size):
    """torch 2.13's fused SGD does not, for half precision on the CPU."""
    found = []
    for fused in (False, True):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(size).to(dtype))
        optimizer = kind([weight], **options)
        # fp16 has no room for Adam's usual epsilon.
        optimizer.param_groups[0]["eps"] = 1e-3
        if fused:
            if not can_fuse(optimizer):
                assert kind is torch.optim.SGD
                assert dtype in (torch.bfloat16, torch.float16)
                return
            fuse(optimizer)
        for number in range(4):
            draw = torch.Generator().manual_seed(number)
            weight.grad = torch.randn(size, generator=draw).to(dtype)
            optimizer.step()
        found.append(weight.detach())
    half = dtype in (torch.bfloat16, torch.float16)
    tolerance = {"rtol": 0.02, "atol": 0.01} if half else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(*found, **tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sgd_of_half_precision_is_fused_where_its_kernel_is_right(dtype):
    weight = nn.Parameter(torch.ones(100, dtype=dtype))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    can = can_fuse(optimizer)
    weight.grad = torch.ones_like(weight)
    fuse(optimizer)
    optimizer.step()
    assert can == bool((weight == 0.5).all())


def test_only_known_classes_are_fused():
    class Mine(torch.optim.Adam):
        pass

    for kind in (Mine, torch.optim.RMSprop):
        assert not can_fuse(job(kind, {"lr": 0.1})[1])


def test_complex_parameters_cannot_be_fused():
    assert not can_fuse(torch.optim.Adam([nn.Parameter(torch.ones(2, dtype=torch.complex64))]))


def test_one_group_that_the_user_chose_for_decides_for_all():
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    groups = [{"params": [first]}, {"params": [second], "foreach": False}]
    assert not can_fuse(torch.optim.Adam(groups))


def test_state_is_laid_out_like_its_parameter():
    weight = nn.Parameter(torch.randn(4, 3, 2, 2))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    before = {k: v.clone() for k, v in optimizer.state[weight].items()}
    weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    align_state(optimizer)
    for name in ("exp_avg", "exp_avg_sq"):
        value = optimizer.state[weight][name]
        assert value.stride() == weight.stride()
        assert torch.equal(value, before[name])
    assert optimizer.state[weight]["step"] == 1


def test_fusing_after_the_memory_format_changed():
    found = []
    for fused in (False, True):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(4, 3, 2, 2))
        optimizer = torch.optim.Adam([weight], lr=0.1)
        for number in range(4):
            if number == 2 and fused:
                weight.data = weight.data.contiguous(memory_format=torch.channels_last)
                fuse(optimizer)
            draw = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(number))
            weight.grad = torch.empty_like(weight).copy_(draw)
            optimizer.step()
        found.append(weight.detach())
    torch.testing.assert_close(*found)


def test_a_momentum_that_begins_late_is_seen():
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([first, second], lr=0.1, momentum=0.9)
    first.grad = torch.ones(2)
    assert not begins_late(optimizer)
    optimizer.step()
    assert not begins_late(optimizer)
    second.grad = torch.ones(2)
    assert begins_late(optimizer)
    optimizer.step()
    assert not begins_late(optimizer)


def test_grad_scaler_knows_whether_the_step_can_be_gated():
    _, optimizer = job(torch.optim.Adam, {"lr": 0.1})
    fuse(optimizer)
    assert optimizer._step_supports_amp_scaling
    unfuse(optimizer)
    assert not optimizer._step_supports_amp_scaling
