"""How a model is cut into stages: which calls, where, and what is refused."""

from itertools import pairwise

import pytest
import torch
from torch import fx, nn

from flatout.errors import ModelError, RecipeError
from flatout.optim import Lamb
from flatout.recipe import Recipe
from flatout.strategies import check_settings
from flatout.strategies.staged.chain import Chain
from flatout.strategies.staged.copies import micro_batches, others_to_try
from flatout.strategies.staged.cut import LayerTimes, cut, measure
from flatout.strategies.staged.refusals import check_stage_count, check_stages
from flatout.strategies.staged.shapes import shape_of, shapes


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.relu, self.down = nn.Linear(4, 9), nn.ReLU(inplace=True), nn.Linear(9, 4)

    def forward(self, x):
        return x + self.down(self.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.blocks = nn.Sequential(Block(), Block())
        self.scale = nn.Parameter(torch.full((1,), 2.0))
        self.out = nn.Linear(4, 7, bias=False)
        if tied:
            self.out.weight = self.table.weight

    def forward(self, ids, shift):
        x = self.table(ids) + shift
        return {"logits": self.out(self.blocks(x) * self.scale), "first": x}


IDS, SHIFT = torch.arange(6) % 7, torch.randn(6, 4)


def stages_of(chain, places):
    ends = [0, *places, len(chain.calls)]
    return [fx.GraphModule(chain.model, chain.stage(span)) for span in pairwise(ends)]


def test_stages_one_behind_the_other_are_the_model():
    model = Net()
    chain = Chain(model)
    assert [str(call.target) for call in chain.calls if call.op == "call_module"] == [
        "table",
        *(f"blocks.{n}.{name}" for n in (0, 1) for name in ("up", "relu", "down")),
        "out",
    ]
    wanted = model(IDS, SHIFT)
    measured = measure(chain, [IDS, SHIFT])
    assert all(spent > 0 for spent in measured.spent)
    assert model.out.weight.grad is None
    # ReLU writes into what the layer before it has given.
    torn = [i + 1 for i, call in enumerate(chain.calls) if str(call.target).endswith("up")]
    assert sorted(measured.torn) == torn
    for place in range(1, len(chain.calls)):
        if place in measured.torn:
            continue
        values = (IDS, SHIFT)
        made = stages_of(chain, [place])
        forms = shapes(made, [shape_of(value) for value in values])
        for stage, form in zip(made, forms, strict=True):
            values = stage(*values)
            assert [shape_of(value) for value in values] == form
        found = chain.put_together(values)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_the_cut_is_where_the_slowest_stage_is_least():
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(6)))
    chain = Chain(model)
    sizes = dict.fromkeys([*chain.inputs, *chain.calls], 10)
    measured = LayerTimes([1, 1, 1, 5, 1, 3], sizes, set())
    assert cut(chain, measured, 2, 0.0) == ([4], [8 / 12, 4 / 12], None)
    assert cut(chain, measured, 3, 0.0) == ([3, 4], [3 / 12, 5 / 12, 4 / 12], None)
    # One layer takes most of the time, whatever shares a stage with it.
    large = measured._replace(spent=[1, 1, 1, 16, 1, 1])
    assert cut(chain, large, 2, 0.0) == ([3], [3 / 21, 18 / 21], (3, 16 / 21))
    # What it takes to send counts: one value is smaller than the others.
    sizes[chain.calls[2]] = 1
    assert cut(chain, measured, 2, 1.0).places == [3]
    assert chain.words((0, 3)) == "0-2"


def test_weights_of_several_places_stay_together():
    tied = Chain(Net(tied=True))
    measured = measure(tied, [IDS, SHIFT])
    with pytest.raises(ModelError, match=r"table\.weight is read in several places"):
        cut(tied, measured, 2, 0.0)
    single = Chain(nn.Sequential(nn.LSTM(4, 4)))
    measured = measure(single, [torch.randn(2, 3, 4)])
    with pytest.raises(ModelError, match="can be cut in 0 places, and 2 ranks need 1"):
        cut(single, measured, 2, 0.0)


class Branches(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.layer = how, nn.Linear(4, 4)

    def forward(self, x):
        if self.how == "twice":
            x = self.layer(x)
        return self.layer(x)


class Drops(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x, 0.5, self.training)


class Factor(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor, self.layers = 2.0, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x):
        return self.layers(x) * self.factor


def test_a_forward_that_is_no_straight_line_is_refused_or_called_as_a_whole():
    for model in (Branches("once"), Drops()):
        with pytest.raises(ModelError, match=r"straight line.*\n.*layout\.py, line \d+\n  do"):
            Chain(model)
        inside = Chain(nn.Sequential(nn.Linear(4, 4), model))
        assert [call.target for call in inside.calls] == ["0", "1"]
    model = Factor()
    chain = Chain(model)
    chain.check_constants()
    model.factor = 3.0
    with pytest.raises(ModelError, match=r"Factor\.factor was 2\.0"):
        chain.check_constants()


def refuse(model, make=torch.optim.Adam, per_micro_batch=False):
    optimizers = [make(model.parameters(), lr=0.1)]
    check_stages(model, optimizers, per_micro_batch=per_micro_batch)


def test_what_cannot_be_laid_out_is_refused_with_what_to_do():
    refuse(nn.Linear(3, 3), Lamb)
    refuse(nn.BatchNorm1d(3), per_micro_batch=True)
    refuse(nn.BatchNorm1d(3).eval())
    hooked = nn.Linear(3, 3)
    hooked.weight.register_hook(lambda gradient: gradient)
    for model, words in (
        (
            nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)),
            r"layer 1 \(BatchNorm1d\) takes its statistics over the whole",
        ),
        (nn.Sequential(nn.Embedding(3, 3, sparse=True)), "0 has sparse gradients"),
        (nn.Sequential(nn.LazyLinear(3)), "0.weight, which has no shape"),
        (hooked, "weight, which has hooks"),
    ):
        with pytest.raises(ModelError, match=words):
            refuse(model)

    class Own(torch.optim.SGD):
        pass

    with pytest.raises(ModelError, match="Own is not known to step each weight by itself"):
        refuse(nn.Linear(3, 3), Own)
    other = torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)
    with pytest.raises(ModelError, match="trains parameters that are not the model's"):
        check_stages(nn.Linear(3, 3), [other], per_micro_batch=False)


def test_stages_of_which_ranks_are_no_multiple_are_refused_with_those_that_can_be():
    for stages, ranks in ((0, 3), (2, 4), (4, 4), (3, 6)):
        check_stage_count(stages, ranks)
    for stages, ranks, words in (
        (3, 4, r"4 ranks cannot have 3 stages in whole copies[\s\S]*world.stages=2 or 4 with 4"),
        (8, 4, "cannot have 8"),
        (2, 3, "set world.stages=3 with 3 ranks"),
        (1, 6, r"one stage is not cut[\s\S]*world.stages=2, 3 or 6 .*strategy=ddp"),
    ):
        with pytest.raises(RecipeError, match=words):
            check_stage_count(stages, ranks)
    with pytest.raises(RecipeError, match=r"world\.stages=2 is about ranks that have some layers"):
        check_settings(Recipe(world={"stages": 2}))


@pytest.mark.parametrize(
    ("stages", "rows", "usual", "others"),
    [
        (2, 128, 8, ([16, 32], [4])),
        (4, 128, 16, ([32, 64], [8])),
        (2, 20, 8, ([16], [4])),
        (2, 5, 5, ([], [])),
        (2, 1, 1, ([], [])),
    ],
)
def test_micro_batches_are_four_for_each_stage_and_never_empty(stages, rows, usual, others):
    assert micro_batches(0, stages, rows) == usual
    assert micro_batches(3, stages, rows) == min(3, rows)
    assert others_to_try(stages, rows) == others


def test_settings_that_do_not_go_with_stages_are_refused_by_name():
    staged = Recipe(world={"strategy": "staged"})
    check_settings(staged)
    check_settings(staged.replace({"compute.precision": "bf16", "compute.rewrites": "off"}))
    for field, value in (
        ("compute.compile", "on"),
        ("compute.precision", "fp16"),
        ("compute.dropout", "by_sample"),
        ("memory.micro_batch", 4),
        ("memory.activation_checkpointing", "on"),
        ("world.compression", "bf16"),
        ("world.tables", "sharded"),
    ):
        with pytest.raises(RecipeError, match=f"{field}={value}|{field} is|{value}"):
            check_settings(staged.replace({field: value}))
