import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flatout.models.trace import trace


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.blocks = nn.ModuleList([nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)])
        self.tail = nn.Sequential(nn.ReLU(), nn.Conv2d(4, 2, 1))
        self.head = nn.Linear(2, 3)
        self.size = 2
        self.scale = 0.5
        self.seen = []
        self.extra = torch.ones(1)
        self.register_buffer("shift", torch.zeros(1))
        self.gain = nn.Parameter(torch.ones(1))


class Straight(Net):
    def forward(self, x):
        """Everything that is allowed."""
        x = F.max_pool2d(F.relu(self.conv(x)), self.size)
        for block in self.blocks:
            x = block(x)
        x = self.blocks[0](x)
        x += self.shift
        batch, _ = x.shape[0], x.shape[1]
        x = self.finish(x * self.gain.abs(), batch)
        return F.dropout(x, 0.2, self.training) * math.sqrt(4)

    def finish(self, x, batch):
        x = torch.flatten(self.tail(x).mean((2, 3)), 1)
        return self.head(x.reshape(batch, -1))


def test_a_straight_forward_is_traced_and_computes_the_same():
    torch.manual_seed(0)
    model = Straight()
    traced = trace(model)
    assert traced is not None
    assert traced.constants == {"size": 2, "training": True}
    assert traced.inlined == [model.tail]
    x = torch.randn(5, 1, 9, 9)
    torch.manual_seed(1)
    written = model(x)
    torch.manual_seed(1)
    assert torch.equal(torch.fx.GraphModule(model, traced.graph)(x), written)


class DefaultArgument(Net):
    def forward(self, x, mask=None):
        return self.conv(x)


class ManyArguments(Net):
    def forward(self, *x):
        return self.conv(x[0])


class Branch(Net):
    def forward(self, x):
        if self.scale > 0:
            x = x + 1
        return self.conv(x)


class BranchOnValues(Net):
    def forward(self, x):
        return self.conv(x) if x.sum() > 0 else x


class ShortCircuit(Net):
    def forward(self, x):
        return self.conv(x * (self.scale or 1))


class While(Net):
    def forward(self, x):
        while self.scale > 1:
            x = x / 2
        return self.conv(x)


class NoGrad(Net):
    def forward(self, x):
        with torch.no_grad():
            x = self.conv(x)
        return x * 2


class Decorated(Net):
    @torch.no_grad()
    def forward(self, x):
        return self.conv(x)


class DecoratedMethod(Net):
    def forward(self, x):
        return self.prepared(x)

    @torch.no_grad()
    def prepared(self, x):
        return self.conv(x)


class WritesToSelf(Net):
    def forward(self, x):
        self.scale = 2.0
        return self.conv(x)


class CountsInABuffer(Net):
    def forward(self, x):
        self.shift += 1
        return self.conv(x)


class Remembers(Net):
    def forward(self, x):
        self.seen.append(x.shape)
        return self.conv(x)


class RemembersElsewhere(Net):
    def forward(self, x):
        return self.noted(x)

    def noted(self, x):
        self.seen.append(x.shape)
        return self.conv(x)


class ReadsAList(Net):
    def forward(self, x):
        return self.conv(x) * len(self.seen)


class ReadsAPlainTensor(Net):
    def forward(self, x):
        return self.conv(x) * self.extra


class ReadsAnAttributeOfAPart(Net):
    def forward(self, x):
        return F.conv2d(x, self.conv.weight, groups=self.conv.groups)


class ReadsAProperty(Net):
    @property
    def factor(self):
        self.seen.append(1)
        return 2

    def forward(self, x):
        return self.conv(x) * self.factor


def helper(x):
    return x + 1


class CallsAFunction(Net):
    def forward(self, x):
        return self.conv(helper(x))


class CallsALocal(Net):
    def forward(self, x):
        layer = self.conv
        return layer(x)


class CallsAFunctionByALocalName(Net):
    def forward(self, x):
        function = helper
        return self.conv(function(x))


class CallsAPartsMethod(Net):
    def forward(self, x):
        return self.conv.extra_repr() and self.conv(x)


class Draws(Net):
    def forward(self, x):
        return self.conv(x) * torch.rand(1).item()


class Constant(Net):
    def forward(self, x):
        return self.conv(x) * torch.ones(1)


class Prints(Net):
    def forward(self, x):
        print(x.shape)
        return self.conv(x)


class Recurses(Net):
    def forward(self, x):
        return self.forward(x)


@pytest.mark.parametrize(
    "kind",
    [
        DefaultArgument,
        ManyArguments,
        Branch,
        BranchOnValues,
        ShortCircuit,
        While,
        NoGrad,
        Decorated,
        DecoratedMethod,
        WritesToSelf,
        CountsInABuffer,
        Remembers,
        RemembersElsewhere,
        ReadsAList,
        ReadsAPlainTensor,
        ReadsAnAttributeOfAPart,
        ReadsAProperty,
        CallsAFunction,
        CallsALocal,
        CallsAFunctionByALocalName,
        CallsAPartsMethod,
        Draws,
        Constant,
        Prints,
        Recurses,
    ],
)
def test_what_a_graph_would_not_hold_is_not_traced(kind, capsys):
    model = kind()
    attributes = {name: vars(model)[name] for name in vars(model)}
    values = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    assert trace(model) is None
    assert vars(model) == attributes
    assert model.seen == []
    assert capsys.readouterr().out == ""
    assert torch.equal(torch.get_rng_state(), random)
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name])


def test_code_without_a_source_is_not_traced():
    names = {"nn": nn}
    exec(
        "class Made(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.conv = nn.Conv2d(1, 1, 1)\n"
        "    def forward(self, x):\n"
        "        return self.conv(x)\n",
        names,
    )
    assert trace(names["Made"]()) is None


def test_a_replaced_forward_is_not_traced():
    model = Straight()
    model.forward = lambda x: x
    assert trace(model) is None


def test_a_hooked_part_is_called_as_a_module():
    model = Straight()
    model.tail.register_forward_hook(lambda *_: None)
    traced = trace(model)
    assert traced is not None
    assert traced.inlined == []
    assert "tail" in [node.target for node in traced.graph.nodes]


class WritesIntoAnAlias(Net):
    def forward(self, x):
        y = x
        x += self.shift + 1.0
        return x * y


def test_a_sum_in_place_writes_into_its_tensor():
    """Under torch.fx alone `y` would keep its old values."""
    model = WritesIntoAnAlias()
    traced = trace(model)
    x = torch.randn(3)
    again = x.clone()
    result = torch.fx.GraphModule(model, traced.graph)(again)
    assert torch.equal(result, (x + 1) * (x + 1))
    assert torch.equal(again, x + 1)


class MultipliesInPlace(Net):
    def forward(self, x):
        x *= self.shift
        return x


def test_other_writing_operators_are_not_traced():
    assert trace(MultipliesInPlace()) is None
