"""What parameter servers have of the weights, and how they answer workers."""

import math
from threading import Event, Thread

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flatout.errors import ModelError, RecipeError, WorldError
from flatout.optim import Lamb
from flatout.recipe import Recipe
from flatout.strategies import check_settings
from flatout.strategies.servers.backup_workers import SpareServer
from flatout.strategies.servers.layout import (
    Layout,
    layout_of,
    numbers_of,
    part_of_state,
    whole_state,
)
from flatout.strategies.servers.parameter_server import times_words
from flatout.strategies.servers.refusals import check_served, check_spare
from flatout.strategies.servers.server import Server
from flatout.strategies.servers.share import Push, describe, rates_of, share_of
from flatout.train.staleness import late_words, staleness_facts, staleness_words


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(lambda sizes: sum(sizes) >= 4),
    st.integers(1, 4),
    st.lists(st.integers(0, 2), min_size=8, max_size=8),
)
def test_servers_have_equal_shares_and_together_all(sizes, servers, kinds):
    layout = Layout([torch.zeros(size) for size in sizes], servers, kinds[: len(sizes)])
    lengths = [layout.range(s).stop - layout.range(s).start for s in range(servers)]
    assert max(lengths) - min(lengths) <= 1
    assert sum(lengths) == layout.length == sum(sizes)
    for number, size in enumerate(sizes):
        pieces = [layout.piece(number, server) for server in range(servers)]
        assert [n for piece in pieces for n in range(size)[piece]] == list(range(size))
    flat = torch.arange(layout.length)
    for server in range(servers):
        own = flat[layout.range(server)]
        together = torch.cat([*layout.pieces(own, server), own[:0]])
        assert together.equal(own)


def test_each_parameter_group_is_shared_out_evenly():
    """No server has more of a group whose update takes longer, nor more bytes."""
    sizes = [40_000, 300, 90_000, 7, 20_000, 50_000]
    weights = [nn.Parameter(torch.zeros(size)) for size in sizes]
    groups = [{"params": weights[:3], "weight_decay": 0.1}, {"params": weights[3:]}]
    weights[4].requires_grad_(False)  # it is never stepped
    layout = layout_of(torch.optim.Adam(groups), 3)
    lengths = torch.tensor([layout.lengths(server) for server in range(3)])
    for kind in ([0, 1, 2], [3, 5], [4]):
        each = lengths[:, kind].sum(dim=1)
        assert each.max() - each.min() <= 1


def test_a_state_is_cut_in_the_order_of_its_weights_memory():
    whole = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    layout = Layout([torch.zeros(5), whole], 3)
    state = {"step": torch.tensor(3.0), "moment": torch.randn(4, 3, 2, 2)}
    pieces = [layout.piece(1, server) for server in range(3)]
    parts = [{k: part_of_state(v, whole, piece) for k, v in state.items()} for piece in pieces]
    assert [len(part["moment"]) for part in parts] == [p.stop - p.start for p in pieces]
    found = whole_state(whole, list(zip(pieces, parts, strict=True)))
    assert found["moment"].equal(state["moment"])
    assert found["step"] == 3
    assert found["moment"].stride() == whole.stride()


def own_share(optimizer, layout, server, most=None):
    """A server's share, with the weights of now."""
    described = describe(optimizer, layout, server)
    share = share_of(described, layout.parameters[0].dtype, most)
    share.values.copy_(layout.weights(server))
    return share


def push(optimizer, used=(True, True), *, stop=False, clock=1, weight=1.0):
    rates = [rate for group in optimizer.param_groups for rate in rates_of(group)]
    return Push(0, clock, weight, stop, rates, list(used))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.AdamW(p, 0.01, betas=(0.8, 0.9), amsgrad=True, fused=True),
        lambda p: torch.optim.Adagrad(p, 0.01, initial_accumulator_value=0.1),
        lambda p: torch.optim.RMSprop([{"params": list(p), "lr": 0.02}], momentum=0.5),
    ],
)
def test_two_servers_step_as_the_optimizer_itself(make):
    """With schedules of rate and momentum, an unused weight, and states from before."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(4))]
    optimizer = make(weights)
    gradients = [[torch.randn_like(w) for w in weights] for _ in range(5)]

    def by_itself(step):
        for n, weight in enumerate(weights):
            weight.grad = gradients[step][n] if n or step != 3 else None
        optimizer.step()

    by_itself(0)
    layout = Layout(weights, 2)
    servers = []
    for server in range(2):
        servers.append(Server([own_share(optimizer, layout, server)], 1, None, 60.0))
    into = torch.zeros(layout.length)
    for step in range(1, 5):
        group = optimizer.param_groups[0]
        group["lr"] *= 0.9
        if "betas" in group:
            group["betas"] = (group["betas"][0] - 0.1, group["betas"][1])
        told = push(optimizer, (step != 3, True))
        flat = torch.cat([g.reshape(-1) for g in gradients[step]])
        for number, server in enumerate(servers):
            own = layout.range(number)
            assert server.push(0, told, flat[own], into[own]) == 0
        by_itself(step)
        found = [torch.zeros_like(weight) for weight in weights]
        for server in range(2):
            for number, place in enumerate(layout.pieces(into[layout.range(server)], server)):
                numbers_of(found[number])[layout.piece(number, server)] = place
        torch.testing.assert_close(found, [w.detach() for w in weights], rtol=1e-6, atol=1e-6)
    states = [server.shares[0].states() for server in servers]
    for number, weight in enumerate(weights):
        pieces = [
            (layout.piece(number, n), state[number])
            for n, state in enumerate(states)
            if number in state
        ]
        for name, value in whole_state(weight, pieces).items():
            torch.testing.assert_close(
                value, optimizer.state[weight][name].float(), check_dtype=False
            )


@pytest.mark.parametrize(("changes", "most"), [(3, 100), (12, 100), (3, 4), (3, 1)])
def test_joined_and_cut_parts_are_stepped_like_whole_parts(changes, most):
    """While it changes which weights have gradients, and where states are asked for on the way."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(size)) for size in (3, 1, 4, 1, 5)]
    groups = [{"params": weights[:3]}, {"params": weights[3:], "weight_decay": 0.1}]
    optimizer = torch.optim.Adam(groups, lr=0.01)
    layout = Layout(weights, 1)
    share = own_share(optimizer, layout, 0, most)
    for step in range(24):
        kind = step * changes // 24
        if step == 1:
            sizes = [p.numel() for g in share._optimizer.param_groups for p in g["params"]]
            assert max(sizes) <= most
        used = [(number + kind) % (kind + 2) > 0 for number in range(5)]
        gradient = torch.randn(14)
        for weight, piece, is_used in zip(
            weights, gradient.split([3, 1, 4, 1, 5]), used, strict=True
        ):
            weight.grad = piece if is_used else None
        optimizer.step()
        told = push(optimizer, used)
        if step % 2:
            share.step(0, told, gradient)
        else:  # piece by piece
            for place, piece in share.pieces(told.rates, told.used):
                share.step_piece(piece, gradient[place])
        if step % 5 == 4:
            share.states()
    torch.testing.assert_close(share.values, torch.cat([w.detach() for w in weights]))
    for number, state in share.states().items():
        torch.testing.assert_close(state, dict(optimizer.state[weights[number]]))


def one_weight(workers, staleness=None, make=Server):
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], 1.0)
    share = own_share(optimizer, Layout([weight], 1), 0)
    return make([share], workers, staleness, 60.0), push(optimizer, [True])


def test_a_gradient_is_as_old_as_the_steps_since_its_weights_were_read():
    server, told = one_weight(3, None)
    into = torch.zeros(1)
    for worker in (0, 0, 1, 2, 0):
        server.push(worker, told, torch.ones(1), into)
    assert [dict(one) for one in server.stale] == [{0: 2, 2: 1}, {2: 1}, {3: 1}]
    assert into == -5
    server.push(1, told._replace(used=[]), torch.ones(1), into)  # it had no samples
    assert into == -5
    facts = staleness_facts(server.stale)
    assert facts == {
        "mean": 1.4, "most": 3, "by_rank": [{"0": 2, "2": 1}, {"2": 1}, {"3": 1}],
    }  # fmt: skip
    assert "1.4 steps old on average" in staleness_words(facts, 0.7)
    assert "a learning rate of 0.5 in place of 0.7" in staleness_words(facts, 0.7)
    assert "rate" not in staleness_words(staleness_facts([]), 0.7)
    assert late_words([0, 2, 1]).endswith("3 gradients came too late for a step and were dropped: "
                                          "2 of rank 1, 1 of rank 2")  # fmt: skip


def test_a_worker_that_is_too_far_ahead_waits_for_the_slowest():
    server, told = one_weight(3, 2)
    server.leave(2)  # it has no step left
    into = [torch.zeros(1), torch.zeros(1)]
    for clock in (1, 2):
        server.push(0, told._replace(clock=clock), torch.ones(1), into[0])
    answered = Event()

    def third():
        server.push(0, told._replace(clock=3), torch.ones(1), into[0])
        answered.set()

    ahead = Thread(target=third)
    ahead.start()
    while server.shares[0].version < 3:  # it has stepped, and waits
        pass
    assert not answered.is_set()
    server.push(1, told, torch.ones(1), into[1])
    ahead.join()
    assert answered.is_set()
    assert into[0] == into[1] == -4


def test_a_step_is_the_mean_of_the_first_gradients_and_later_ones_are_dropped():
    server, told = one_weight(4, 1, SpareServer)
    into = torch.zeros(4, 1)

    def begin(worker, gradient, weight):
        pushed = told._replace(weight=weight)
        arguments = (worker, pushed, torch.full((1,), gradient), into[worker])
        thread = Thread(target=server.push, args=arguments)
        thread.start()
        return thread

    def wait(threads):
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()

    first = [begin(0, 1.0, 1.0), begin(1, 2.0, 2.0)]
    assert server.shares[0].version == 0
    wait([*first, begin(2, 4.0, 1.0)])
    assert into.flatten().tolist() == [-2.25, -2.25, -2.25, 0]  # over the samples of three
    wait([begin(3, 100.0, 1.0)])
    assert into[3] == -2.25
    assert server.late == [0, 0, 0, 1]
    # Of those that have samples left, all are needed then.
    second = [begin(3, 1.0, 1.0), begin(0, 3.0, 1.0)]
    server.leave(1)
    assert server.shares[0].version == 1
    server.leave(2)
    wait(second)
    assert into[0] == into[3] == -4.25
    assert server.late == [0, 0, 0, 1]


def test_workers_stop_after_the_same_number_of_steps():
    server, told = one_weight(2, None)
    into = torch.zeros(1)
    for clock in (1, 2, 3):
        assert server.push(0, told._replace(clock=clock), torch.ones(1), into) == 0
    assert server.push(1, told._replace(wants_to_stop=True), torch.ones(1), into) == 4
    for clock in (2, 3, 4):
        assert server.push(1, told._replace(clock=clock), torch.ones(1), into) == 4
    assert server.push(0, told._replace(clock=4), torch.ones(1), into) == 4


def test_what_servers_cannot_step_is_refused_with_what_to_do():
    def served(model, make=torch.optim.Adam, servers=1, ranks=2):
        check_served(model, [make(model.parameters(), lr=0.1)], servers, ranks)

    served(nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last))
    with pytest.raises(ModelError, match=r"Lamb is not known to step each element alone"):
        served(nn.Linear(3, 3), Lamb)
    with pytest.raises(ModelError, match="one dtype, found float32 and float64"):
        served(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).double()]))
    with pytest.raises(ModelError, match=r"0\.weight, which has no shape"):
        served(nn.Sequential(nn.LazyLinear(3)))
    strided = nn.Linear(3, 3)
    strided.weight = nn.Parameter(torch.zeros(6, 6)[::2, ::2])
    with pytest.raises(ModelError, match="weight, which has gaps in its memory"):
        served(strided)
    with pytest.raises(WorldError, match=r"servers=3, .* of which there are 2"):
        served(nn.Linear(3, 3), servers=3)
    with pytest.raises(WorldError, match=r"servers=3, and an optimizer has 2 numbers"):
        served(nn.Linear(1, 1), servers=3, ranks=4)
    check_spare(0, 3, 3)
    check_spare(2, 1, 3)
    with pytest.raises(WorldError, match="spare_workers=3 of 3 ranks"):
        check_spare(3, 1, 3)
    with pytest.raises(WorldError, match="servers=2: each server might find other"):
        check_spare(1, 2, 3)


def test_how_long_servers_update_is_said():
    server, told = one_weight(1)
    assert times_words([server.shares[0].update_ms()]) == ""
    server.push(0, told, torch.ones(1), torch.zeros(1))
    assert server.shares[0].update_ms() > 0
    assert times_words([1.24, 1.31, 1.2]).endswith(
        "an update takes each of 3 servers 1.2 to 1.31 ms"
    )
    assert times_words([2.0]).endswith("an update takes a server 2 ms")


def test_settings_that_do_not_go_with_servers_are_refused_by_name():
    check_settings(Recipe(world={"strategy": "parameter_server", "staleness": 4}))
    with pytest.raises(RecipeError, match="staleness=4 is about parameter servers"):
        check_settings(Recipe(world={"staleness": 4}))
    with pytest.raises(RecipeError, match=r"servers=2 is about parameter servers, .*fsdp"):
        check_settings(Recipe(world={"strategy": "fsdp", "servers": 2}))
    check_settings(Recipe(world={"strategy": "parameter_server", "spare_workers": 1}))
    for world in ({}, {"strategy": "parameter_server", "staleness": 4}):
        with pytest.raises(RecipeError, match="spare_workers=1 is about servers that wait"):
            check_settings(Recipe(world={**world, "spare_workers": 1}))
    for field, value in (
        ("compute.memory_format", "channels_last"),
        ("compute.precision", "fp16"),
        ("world.compression", "bf16"),
        ("world.tables", "sharded"),
    ):
        recipe = Recipe(world={"strategy": "parameter_server"}).replace({field: value})
        with pytest.raises(RecipeError, match=f"{field}={value}|{value}"):
            check_settings(recipe)


def test_servers_that_compute_nothing_want_a_strategy_that_has_some(monkeypatch):
    monkeypatch.setenv("FLATOUT_SERVERS", "2 apart")
    check_settings(Recipe(world={"strategy": "parameter_server", "servers": 2}))
    with pytest.raises(RecipeError, match=r"--servers 2 has started servers, .*ddp has none"):
        check_settings(Recipe())


def test_rates_of_a_group_are_what_schedules_change():
    group = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1, momentum=0.9).param_groups[0]
    assert rates_of(group) == [0.1, 0.9]
    rate, none = rates_of({"lr": torch.tensor(0.5)})
    assert rate == 0.5
    assert math.isnan(none)


def test_numbers_of_a_tensor_are_as_they_lie_in_memory():
    tensor = torch.arange(12).view(3, 4).t()
    assert numbers_of(tensor).tolist() == list(range(12))
