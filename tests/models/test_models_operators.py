"""Which operators a step has, what they compute and what they move."""

import pytest
import torch
from torch import nn

from flatout.models import OperatorCount, weights_counted


def counted(run):
    with OperatorCount() as count:
        run()
    return count.lanes()


def test_products_of_a_linear_layer_by_lane():
    layer, x = nn.Linear(6, 5), torch.randn(4, 6, requires_grad=True)
    lanes = counted(lambda: layer(x).sum().backward())
    assert lanes["forward"]["matmul"]["flops"] == 2 * 4 * 6 * 5
    assert lanes["forward"]["matmul"]["bytes"] == 4 * (5 + 4 * 6 + 6 * 5 + 4 * 5)
    assert lanes["forward"]["matmul"]["cached_bytes"] == lanes["forward"]["matmul"]["bytes"]
    assert lanes["backward"]["matmul"]["flops"] == 2 * lanes["forward"]["matmul"]["flops"]
    assert lanes["backward"]["matmul"]["calls"] == 2
    assert "optimizer" not in lanes


@pytest.mark.parametrize(
    ("kind", "layer", "each"),
    [
        ("conv", nn.Conv2d(4, 6, 3, padding=1, bias=False), 4 * 9),
        ("conv", nn.Conv2d(4, 6, 3, padding=1, groups=2, bias=False), 2 * 9),
        ("conv_1x1", nn.Conv2d(4, 6, 1, bias=False), 4),
        ("conv_depthwise", nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False), 9),
    ],
)
def test_convolutions_by_kind(kind, layer, each):
    x = torch.randn(2, 4, 8, 8)
    lanes = counted(lambda: layer(x).sum().backward())
    flops = 2 * 2 * layer.out_channels * 64 * each
    assert lanes["forward"][kind]["flops"] == flops
    assert lanes["backward"][kind]["flops"] == flops  # of the weights alone: x wants no gradient


def test_a_transposed_convolution():
    layer, x = nn.ConvTranspose2d(8, 4, 2, stride=2, bias=False), torch.randn(2, 8, 5, 5)
    lanes = counted(lambda: layer(x.requires_grad_()).sum().backward())
    assert lanes["forward"]["conv"]["flops"] == 2 * 2 * 8 * 25 * 4 * 4
    assert lanes["backward"]["conv"]["flops"] == 2 * lanes["forward"]["conv"]["flops"]


def test_attention_recurrent_layers_tables_and_norms():
    q = torch.randn(2, 4, 16, 8, requires_grad=True)
    attend = nn.functional.scaled_dot_product_attention
    lanes = counted(lambda: attend(q, q, q).sum().backward())
    assert lanes["forward"]["attention"]["flops"] == 4 * q.numel() * 16
    assert lanes["backward"]["attention"]["flops"] == 2.5 * lanes["forward"]["attention"]["flops"]
    lstm, x = nn.LSTM(3, 5, batch_first=True), torch.randn(2, 7, 3)
    lanes = counted(lambda: lstm(x)[0].sum().backward())
    assert lanes["forward"]["recurrent"]["flops"] == 2 * 2 * 7 * 4 * 5 * (3 + 5)
    table = nn.Embedding(9, 4)
    lanes = counted(lambda: table(torch.arange(5)).sum().backward())
    assert lanes["forward"]["gather"]["calls"] == lanes["backward"]["gather"]["calls"] == 1
    norm = nn.LayerNorm(4)
    lanes = counted(lambda: norm(torch.randn(3, 4)).sum().backward())
    assert {"normalization"} <= set(lanes["forward"]) & set(lanes["backward"])


def test_what_follows_the_last_backward_is_the_optimizers():
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)

    def step():
        for part in x.split(2):
            layer(part).sum().backward()
        optimizer.step()

    lanes = counted(step)
    assert lanes["forward"]["matmul"]["calls"] == 2
    assert set(lanes["optimizer"]) == {"elementwise"}
    held = weights_counted(layer, [optimizer])
    assert held == {"bytes": 4 * 8, "state_bytes": 4 * 8, "tensors": 2}


def test_views_move_nothing_and_bf16_counts_as_fp32():
    x = torch.randn(4, 6)
    assert counted(lambda: x.view(-1).t())["forward"]["elementwise"]["bytes"] == 0
    plain = counted(lambda: x @ x.t())["forward"]

    def under_autocast():
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x.t()

    assert counted(under_autocast)["forward"]["matmul"] == plain["matmul"]


def test_a_step_that_is_counted_computes_the_same_bits():
    def trained(is_counted):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            count = OperatorCount()
            with count if is_counted else torch.enable_grad():
                model(torch.randn(5, 6)).square().mean().backward()
                optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    plain, other = trained(False), trained(True)
    assert all(torch.equal(plain[name], other[name]) for name in plain)
