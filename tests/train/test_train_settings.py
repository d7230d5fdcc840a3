import copy

import pytest
import torch
from torch import nn

from flatout.devices import allocator
from flatout.recipe import PLAIN, SETTINGS, Memory, Recipe
from flatout.train.settings import Settings, Switch

CPU = torch.device("cpu")


def convnet(*extra):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3),
        nn.ReLU(),
        *extra,
        nn.Flatten(),
        nn.Linear(36, 3),
    )


def switched(model=None, optimizer=None):
    model = model or convnet()
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.01)
    return Switch(model, optimizer, CPU)


def step(switch, seed=0):
    x = torch.randn(3, 2, 12, 12, generator=torch.Generator().manual_seed(seed))
    with switch.autocast():
        switch.model(x).square().mean().backward()
    switch.optimizers[0].step()
    switch.optimizers[0].zero_grad()


@pytest.fixture(autouse=True)
def _process_as_before():
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


def test_it_knows_what_is():
    switch = switched()
    assert switch.now == Settings(
        matmul_precision=torch.get_float32_matmul_precision(),
        threads=torch.get_num_threads(),
        allocator=allocator.current(),
    )
    step(switch)
    switch.use(switch.now.but(memory_format="channels_last", fused_optimizer="on"))
    # Another one over the same objects, as in a second fit.
    again = switched(switch.model, switch.optimizers[0])
    assert again.now == switch.now
    again.use(again.now.but(memory_format="contiguous", fused_optimizer="off"))
    assert switch.model[0].weight.is_contiguous()
    assert switch.optimizers[0].param_groups[0]["fused"] is None


def test_memory_format_moves_weights_state_and_gradients():
    switch = switched()
    step(switch)
    weight = switch.model[0].weight
    weight.grad = torch.randn_like(weight)
    before = copy.deepcopy([weight.data, weight.grad, *switch.optimizers[0].state[weight].values()])
    switch.use(switch.now.but(memory_format="channels_last"))
    assert switch.model[0].weight is weight
    state = switch.optimizers[0].state[weight]
    for tensor in (weight, weight.grad, state["exp_avg"], state["exp_avg_sq"]):
        assert tensor.is_contiguous(memory_format=torch.channels_last)
    after = [weight.data, weight.grad, *state.values()]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    switch.use(switch.now.but(memory_format="contiguous"))
    assert weight.is_contiguous()
    assert state["exp_avg"].is_contiguous()


def test_a_model_with_convolutions_in_three_dimensions_can_be_channels_last():
    class Video(nn.Module):
        def __init__(self):
            super().__init__()
            self.video, self.image = nn.Conv3d(2, 3, 2), nn.Conv2d(2, 3, 2)
            self.register_buffer("kernel", torch.randn(2, 2, 3, 3))

    switch = switched(Video())
    kernel = switch.model.kernel
    switch.use(switch.now.but(memory_format="channels_last"))
    assert switch.model.image.weight.is_contiguous(memory_format=torch.channels_last)
    assert switch.model.video.weight.is_contiguous()
    assert switch.model.kernel is kernel


def test_fusing():
    switch = switched()
    assert switch.can_fuse(switch.optimizers[0])
    switch.use(switch.now.but(fused_optimizer="on"))
    assert switch.optimizers[0].param_groups[0]["fused"] is True
    assert switch.can_fuse(switch.optimizers[0])
    # A state that was saved unfused, loaded meanwhile, does not make it forget.
    switch.optimizers[0].load_state_dict(torch.optim.Adam(convnet().parameters()).state_dict())
    switch.use(switch.now)
    assert switch.optimizers[0].param_groups[0]["fused"] is True
    switch.use(switch.now.but(fused_optimizer="off"))
    assert switch.optimizers[0].param_groups[0]["fused"] is None


def test_what_has_sparse_gradients_is_not_fused():
    model = nn.Sequential(nn.EmbeddingBag(50, 8, sparse=True), nn.Linear(8, 3))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    switch = Switch(model, optimizers, torch.device("cpu"))
    switch.use(switch.now.but(fused_optimizer="on"))
    assert [o.param_groups[0]["fused"] for o in optimizers] == [None, True]
    model(torch.randint(0, 50, (4, 6))).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.parametrize("options", [{"fused": True}, {"fused": False}, {"foreach": False}])
def test_what_the_user_chose_is_not_switched(options):
    model = convnet()
    switch = switched(model, torch.optim.Adam(model.parameters(), **options))
    chosen = {k: switch.optimizers[0].param_groups[0][k] for k in ("fused", "foreach")}
    assert not switch.can_fuse(switch.optimizers[0])
    for fused in ("on", "off"):
        switch.use(switch.now.but(fused_optimizer=fused))
        assert {k: switch.optimizers[0].param_groups[0][k] for k in chosen} == chosen


def test_rewrites_and_recomputing_are_put_on_and_taken_off():
    switch = switched()
    model = switch.model
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    plain = switch.now
    for change in (
        {"rewrites": "on"},
        {"activation_checkpointing": "on"},
        {"rewrites": "on", "activation_checkpointing": "on"},
        {"rewrites": "on", "activation_checkpointing": "on", "fp32_operators": "on"},
        {"rewrites": "on", "fused_norms": "on"},
        {"rewrites": "off", "activation_checkpointing": "on"},
    ):
        switch.use(plain.but(**change))
        assert "forward" in vars(model)
        assert switch.now == plain.but(**change)
        step(switch)
    switch.release()
    assert {name: vars(m) for name, m in model.named_modules()} == before
    assert switch.now == plain


def test_recomputing_holds_also_where_a_forward_around_it_could_be_rewritten():
    calls = []

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 1)

        def forward(self, x):
            calls.append("block")
            return torch.tanh(self.conv(x))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU())
            self.pool = nn.MaxPool2d(2)
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x):
            x = self.pool(self.stem(x))
            for block in self.blocks:
                x = block(x)
            return x

    for order in (("rewrites", "activation_checkpointing"), ("activation_checkpointing",) * 2):
        switch = switched(Net())
        for name in order:
            switch.use(switch.now.but(**{name: "on"}))
        switch.use(switch.now.but(rewrites="on"))
        calls.clear()
        step(switch)
        assert len(calls) == 4  # each block once in forward and once in backward
        assert "forward" in vars(switch.model)


def test_compiling_keeps_the_layers_below_it():
    switch = switched()
    model = switch.model
    switch.use(switch.now.but(rewrites="on"))
    forward = vars(model)["forward"]
    switch.use(switch.now.but(compile="on"))
    assert model._compiled_call_impl is not None
    assert vars(model)["forward"] is forward
    switch.use(switch.now.but(compile="off"))
    assert model._compiled_call_impl is None
    assert vars(model)["forward"] is forward
    switch.use(switch.now.but(compile="on"))
    switch.use(switch.now.but(rewrites="off"))
    assert model._compiled_call_impl is not None
    assert "forward" not in vars(model)
    switch.release()
    assert model._compiled_call_impl is None


def test_a_model_that_the_user_compiled_stays_compiled():
    switch = switched()
    switch.model.compile(backend="eager")
    own = switch.model._compiled_call_impl
    switch.use(switch.now.but(compile="on"))
    assert switch.model._compiled_call_impl is not own
    switch.release()
    assert switch.model._compiled_call_impl is own


def test_a_change_of_code_that_fails_leaves_a_known_state():
    model = nn.Linear(2, 2)  # nothing to recompute
    switch = switched(model)
    wanted = switch.now.but(precision="bf16", activation_checkpointing="on", rewrites="on")
    with pytest.raises(Exception, match="no blocks of layers"):
        switch.use(wanted)
    assert switch.now == wanted.but(activation_checkpointing="off", rewrites="off")
    switch.use(wanted.but(activation_checkpointing="off"))
    assert switch.now.rewrites == "on"


def test_the_process_is_switched():
    switch = switched()
    torch.set_float32_matmul_precision("high")
    switch = switched(switch.model, switch.optimizers[0])
    switch.use(switch.now.but(matmul_precision="highest", threads=1))
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_num_threads() == 1


def test_autocast():
    switch = switched()
    for precision, dtype in (("fp32", None), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        switch.use(switch.now.but(precision=precision))
        with switch.autocast():
            assert torch.is_autocast_enabled("cpu") is (dtype is not None)
            if dtype is not None:
                assert torch.get_autocast_dtype("cpu") is dtype
    assert not torch.is_autocast_enabled("cpu")


ALL = Settings(
    memory_format="channels_last",
    rewrites="on",
    fused_optimizer="on",
    activation_checkpointing="on",
)


def test_every_setting_gives_the_plain_result_to_rounding_and_there_and_back_is_bitwise():
    plain, mixed, back = (switched(convnet(nn.BatchNorm2d(4))) for _ in range(3))
    keys = list(plain.model.state_dict())
    for number in range(6):
        mixed.use(
            mixed.now.but(**{k: getattr(ALL, k) for k in ("rewrites", "activation_checkpointing")})
            if number % 2
            else ALL.but(threads=mixed.now.threads, allocator=mixed.now.allocator)
        )
        back.use(ALL.but(threads=back.now.threads, allocator=back.now.allocator))
        back.use(plain.now)
        for switch in (plain, mixed, back):
            step(switch, number)
    assert list(mixed.model.state_dict()) == keys
    for name in keys:
        wanted = plain.model.state_dict()[name]
        torch.testing.assert_close(mixed.model.state_dict()[name], wanted, rtol=1e-3, atol=1e-4)
        assert torch.equal(back.model.state_dict()[name], wanted)


def test_a_resolved_recipe_says_all_of_it():
    asked = Recipe(
        compute={
            "precision": "bf16",
            "memory_format": "channels_last",
            "rewrites": "on",
            "fused_optimizer": "on",
            "compile": "off",
            "matmul_precision": "high",
        },
        memory=Memory(activation_checkpointing="on", allocator="keep", micro_batch="whole"),
        process={
            "threads": 1,
            "interop_threads": 1,
            "affinity": "off",
            "flush_denormals": "off",
        },
        input={"workers": 0, "pin_memory": "off", "features": "off"},
        world={"device": "cpu", "reduction": "all_reduce"},
    )
    asked = Recipe().replace({**PLAIN, **asked.named()})
    assert Settings.of(asked.resolve({}, {})) == Settings(
        precision="bf16",
        memory_format="channels_last",
        rewrites="on",
        fused_optimizer="on",
        compile="off",
        matmul_precision="high",
        activation_checkpointing="on",
        allocator="keep",
        threads=1,
    )


LIVE = {field.partition(".")[2]: one for field, one in SETTINGS.items() if one.live is not None}


@pytest.mark.parametrize("name", [n for n, one in LIVE.items() if one.trial and n != "allocator"])
def test_what_a_trial_tries_is_put_on_a_live_model_and_taken_off(name):
    switch = switched()
    plain = switch.now
    value = 1 if name == "threads" else LIVE[name].trial.value
    switch.use(plain.but(**{name: value}))
    assert getattr(switch.now, name) == value
    if LIVE[name].live.now:
        assert LIVE[name].live.now(switch) == value
    switch.use(plain)
    assert switch.now == plain
    if LIVE[name].live.now:
        assert LIVE[name].live.now(switch) == getattr(plain, name)
