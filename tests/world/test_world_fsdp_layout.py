"""How a model is laid over ranks by parts: which parts, what is refused, and what it will take."""

import pytest
import torch
from torch import nn

from flatout.errors import ModelError, RecipeError, WorldError
from flatout.optim import Lamb
from flatout.recipe import Recipe
from flatout.strategies import check_reduction, check_settings
from flatout.strategies.elementwise import check_elementwise, check_one_device
from flatout.strategies.fsdp.blocks import blocks_of
from flatout.strategies.fsdp.memory import expected_words, state_bytes
from flatout.strategies.fsdp.refusals import check_gpus, check_layout
from flatout.world import Place, World


class Net(nn.Module):
    """A transformer whose output layer is tied to its table."""

    def __init__(self, how="tied"):
        super().__init__()
        self.how = how
        self.table = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.blocks = nn.ModuleList([layer, nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16))])
        self.out = nn.Linear(16, 50, bias=False)
        if how == "tied":
            self.out.weight = self.table.weight

    def forward(self, x):
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        return x @ self.table.weight.T if self.how == "by hand" else self.out(x)


def names(model, run=True):
    ids = torch.zeros(2, 3, dtype=torch.int64)
    known = {module: name for name, module in model.named_modules()}
    return [known[block] for block in blocks_of(model, (lambda: model(ids)) if run else None)]


def test_parts_are_found_by_size_and_by_what_reads_their_weights():
    layer = ["blocks.0.self_attn", "blocks.0.linear1", "blocks.0.linear2", "blocks.0"]
    feed_forward = ["blocks.1.0", "blocks.1.1"]
    untied = names(Net("untied"))
    assert [name for name in untied if name.startswith("blocks.1")] == feed_forward
    assert {"table", "out"} < set(untied)
    # What is inside of attention is read by attention, which calls none of it.
    assert not any("out_proj" in name for name in untied)
    assert [n for n in untied if n.startswith("blocks.0")] == [n for n in layer if n in untied]
    assert {"blocks.0.self_attn"} <= set(untied)
    for how in ("tied", "by hand"):
        assert "table" not in names(Net(how))
    assert "out" not in names(Net("tied"))
    assert set(names(Net("tied"), run=False)) == {"blocks.0", *feed_forward}


def test_a_weight_that_is_read_outside_of_the_model_is_named():
    model = Net()
    run = lambda: model(torch.zeros(2, 3, dtype=torch.int64)).sum() + model.out.weight.norm()  # noqa: E731
    with pytest.raises(ModelError, match=r"table\.weight is read outside of it"):
        blocks_of(model, run)


def layout(model, make=torch.optim.Adam):
    check_layout(model)
    check_elementwise("fsdp", make(model.parameters(), lr=0.1), set(model.parameters()))


class Scaled(nn.Linear):
    def __init__(self, scale):
        super().__init__(3, 3)
        self.scale = nn.Parameter(scale)


def with_hook():
    layer = nn.Linear(3, 3)
    layer.weight.register_hook(lambda gradient: gradient)
    return layer


def test_what_cannot_be_cut_is_refused_with_what_to_do():
    layout(nn.Linear(3, 3))
    for model, words in (
        (nn.Sequential(nn.Embedding(3, 3, sparse=True)), "0 has sparse gradients"),
        (nn.Sequential(nn.LazyLinear(3)), "0.weight, which has no shape"),
        (Scaled(torch.tensor(1.0)), "scale, which is a single number"),
        (Scaled(torch.ones(3, dtype=torch.float64)), "bias is float32, scale is float64"),
        (with_hook(), "weight, which has hooks"),
        (nn.DataParallel(nn.Linear(3, 3)), "wrapped in DataParallel"),
    ):
        with pytest.raises(ModelError, match=words):
            layout(model)
    with pytest.raises(ModelError, match="Lamb is not known to step each element alone"):
        layout(nn.Linear(3, 3), Lamb)
    with pytest.raises(ModelError, match="trains parameters that are not the model's"):
        check_elementwise("fsdp", torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1), set())


def test_settings_that_do_not_go_with_parts_are_refused_by_name():
    sharded = Recipe(world={"strategy": "fsdp"})
    check_settings(sharded)
    check_settings(sharded.replace({"compute.precision": "bf16", "compute.rewrites": "off"}))
    for field, value in (
        ("compute.compile", "on"),
        ("compute.memory_format", "channels_last"),
        ("compute.precision", "fp16"),
        ("world.compression", "bf16"),
        ("world.reduction", "ring"),
    ):
        with pytest.raises(RecipeError, match=f"{field}={value}|{value}"):
            check_settings(sharded.replace({field: value}))


@pytest.mark.parametrize(
    ("make", "times"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
        (lambda p: torch.optim.AdamW(p, lr=0.1, fused=True), 2),
        (lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True), 3),
    ],
)
def test_what_an_optimizer_will_keep_is_known_before_it_steps(make, times):
    layer = nn.Linear(100, 10)
    layer.bias.requires_grad_(False)
    optimizer = make(layer.parameters())
    assert state_bytes(optimizer) == times * 4000
    assert not optimizer.state


def test_memory_is_told_in_words():
    words = expected_words(
        2,
        parameters=4_000_000,
        gradients=4_000_000,
        states=[8_000_000],
        root=10**6,
        blocks=[2 * 10**6] * 3,
        shared=4 * 10**6,
    )
    assert words == (
        "fsdp: each of 2 ranks will hold 16.0 MB = parameters 4.0 MB + gradients 4.0 MB + "
        "optimizer 8.0 MB; at its peak 10.0 MB more of weights that are whole, in 4 parts, "
        "and 4.0 MB of memory that ranks share, beside the activations"
    )


def test_what_goes_with_no_gpu_of_its_own_is_refused():
    world = World(Place(0, 2, 0, 2))
    check_gpus(world)
    world.shares_gpus = True
    with pytest.raises(WorldError, match="these ranks share a GPU"):
        check_gpus(world)
    for asked in ({"reduction": "ring"}, {"compression": "bf16"}):
        with pytest.raises(WorldError, match="sends from rank to rank, and these share a GPU"):
            check_reduction(Recipe(world=asked).world, world, print)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ModelError, match=r"on one device: 0\.bias is on cpu, 1\.bias is on meta"):
        check_one_device("world.strategy=fsdp", dict(model.named_parameters()))
