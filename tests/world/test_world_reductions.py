"""Each reduction gives the sum on every rank, the same bits on all, and models train with it."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from world_ranks import run

from flatout.errors import WorldError
from flatout.recipe import World as Asked
from flatout.strategies.reductions import Flat, check_reduction
from flatout.strategies.reductions.power_sgd import PowerSgd
from flatout.world import ALONE, Group, World

KINDS = ("all_reduce", "shared", "ring", "to_one", "hierarchical", "fp16", "bf16", "nodes-bf16")
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
# One number, fewer numbers than ranks, a length that no number of ranks divides, and a long one.
LENGTHS = (1, 2, 10_007)
SCALES = (1.0, 1e7, 1e-9)
STEPS = 40
TRAINED = ("all_reduce", "shared", "ring", "to_one", "fp16", "bf16", "powersgd")


def numbers(length, rank, dtype=torch.float64, scale=1.0):
    """Of very different sizes, as gradients are."""
    draws = torch.Generator().manual_seed(1000 * length + rank)
    values, share = torch.randn(2, length, generator=draws).double()
    return (values * share * share * scale).to(dtype)


def gradient(rank, step):
    """A large matrix with a few strong directions, a vector, and a small matrix."""
    draws = torch.Generator().manual_seed(10_000 * rank + step)
    strong = torch.Generator().manual_seed(1)
    left, right = torch.randn(60, 3, generator=strong), torch.randn(3, 40, generator=strong)
    matrix = left @ right + torch.randn(60, 40, generator=draws)
    return torch.cat([matrix.view(-1), torch.randn(60 + 12, generator=draws)])


SHAPES = [(60, 40), (60, 1), (3, 4)]
WEIGHTS = [1.0, 0.25, 2.0]  # what steps weigh

JOB = '''
    import os, sys
    from dataclasses import replace
    from itertools import product
    from pathlib import Path

    sys.path.insert(0, "TESTS")
    import numpy as np
    import torch
    from torch import nn

    import flatout
    from flatout.recipe import World as Asked
    from flatout.strategies.reductions import Flat, reduction_of
    from flatout.world import World, join
    from test_world_reductions import (
        DTYPES, KINDS, LENGTHS, SCALES, SHAPES, STEPS, TRAINED, WEIGHTS, gradient, numbers
    )

    folder, size = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    world = join()
    rank = world.rank
    # As on two nodes: all but the last rank on the first of them.
    nodes = World(replace(world.place, nodes=2, node=int(rank == size - 1)))

    def made(kind):
        if kind in ("fp16", "bf16", "powersgd"):
            return reduction_of(Asked(compression=kind), world, cpu)
        if kind in ("nodes-bf16", "nodes-powersgd"):
            asked = Asked(reduction="hierarchical", compression=kind[6:])
            return reduction_of(asked, nodes, cpu)
        return reduction_of(Asked(reduction=kind), world if kind == "shared" else nodes, cpu)

    cpu = torch.device("cpu")
    found = {}
    for kind in KINDS:
        beside = made(kind).started(cpu)
        broken = torch.ones(50)
        broken[7] = float("nan") if rank == 0 else 1
        broken[9] = float("inf") if rank == size - 1 else 1
        given = {(kind, "broken"): broken, (kind, "none"): torch.empty(0)}
        for dtype, length, scale in product(DTYPES, LENGTHS, SCALES):
            given[kind, dtype, length, scale] = numbers(length, rank, dtype, scale)
        flats = {}
        for number, (key, values) in enumerate(given.items()):
            flats[key] = Flat(beside.memory(number, len(values), values.dtype), number)
            flats[key].values.copy_(values)
        # All at once: the thread has to keep their order.
        under_way = {key: beside.begin(flat) for key, flat in flats.items()}
        for key, work in under_way.items():
            work.wait()
            found[key] = flats[key].values.clone()
        beside.close()

    def powersgd(kind):
        """Gradients, what was applied, and this rank's error, of each step."""
        reduction, steps = made(kind), []
        for step in range(STEPS):
            reduction.weight = WEIGHTS[step % 3]
            values = gradient(rank, step) * reduction.weight
            if step == 5 and rank == size - 1:
                values[3] = float("inf")
            reduction.add_up(Flat(values, 0, SHAPES))
            kept = reduction.state_dict()
            error = kept["0"]["error"].clone() if kept else torch.zeros_like(values)
            steps.append((values, error))
            if step == 20:  # go on from what would be saved
                states = world.gather(reduction.state_dict())
                reduction = made(kind)
                reduction.load_state_dicts(states)
        return steps

    for kind in ("powersgd", "nodes-powersgd"):
        found[kind] = powersgd(kind)
    exact = made("powersgd")
    thin = torch.randn(60, 2, generator=torch.Generator().manual_seed(rank))
    thin = (thin @ torch.ones(2, 40)).view(-1)
    exact.add_up(Flat(thin, 0, SHAPES[:1]))
    found["thin"] = thin

    # -- training --------------------------------------------------------------------------------

    rng = np.random.default_rng(1)
    x = rng.normal(size=(64, 3, 8, 8)).astype(np.float32)
    y = rng.integers(0, 5, 64)
    x[np.arange(64), 0, 0, y] += 3

    class Model(nn.Module):
        """Which parameters are used depends on the samples, so on the rank."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Conv2d(3, 32, 3, padding=1)
            self.second = nn.Conv2d(32, 32, 3, stride=2, bias=False)
            self.norm = nn.BatchNorm2d(32)
            self.out, self.other = nn.Linear(288, 5), nn.Linear(288, 5)
            self.never = nn.Linear(5, 5)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            hidden = torch.relu(self.norm(self.second(torch.relu(self.first(x))))).flatten(1)
            out = self.out(hidden) * self.scale
            rows = x[:, 0, 4, 4] > 1
            if rows.any():
                out = out.masked_scatter(rows[:, None], out[rows] + self.other(hidden[rows]))
            return out

    def train(kind, epochs=2, half=False, **given):
        compressed = kind in ("fp16", "bf16", "powersgd")
        asked = {"compute.memory_format": "channels_last", "process.threads": 1, "save.every": 3}
        asked["world.compression" if compressed else "world.reduction"] = kind
        model = Model().bfloat16() if half else Model()
        trainer = flatout.Trainer(
            model, lr=0.002, allow="exact", recipe=flatout.Recipe().replace(asked),
            say=lambda line: None, run=given.get("run"), accumulate=given.get("accumulate", 1),
        )
        data = (torch.tensor(x).bfloat16() if half else x, y)
        history = trainer.fit(data, batch_size=15, epochs=epochs, progress=False,
                              resume="run" in given)
        weights = {k: v.clone() for k, v in trainer.model.state_dict().items()}
        return weights, [epoch["loss"] for epoch in history.epochs]

    for kind in TRAINED:
        found["trained", kind] = train(kind, epochs=8 if kind == "powersgd" else 2)
    found["trained", "accumulated"] = train("ring", accumulate=2)
    found["trained", "accumulated plain"] = train("all_reduce", accumulate=2)
    found["trained", "half"] = train("bf16", half=True)
    found["trained", "half plain"] = train("all_reduce", half=True)
    found["undisturbed"] = train("powersgd", epochs=3)
    train("powersgd", epochs=1, run=folder / f"run{size}")
    found["resumed"] = train("powersgd", epochs=3, run=folder / f"run{size}")
    torch.save(found, folder / f"reduced-{size}-{rank}.pt")
'''


@pytest.fixture(
    scope="module",
    params=[
        2,
        pytest.param(3, marks=pytest.mark.slow),
        pytest.param(4, marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
def found(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reductions")
    size = request.param
    run(JOB.replace("TESTS", __file__.rpartition("/")[0]), size, folder)
    return [torch.load(folder / f"reduced-{size}-{rank}.pt") for rank in range(size)]


def assert_same_bits(found, key):
    for theirs in found[1:]:
        torch.testing.assert_close(theirs[key], found[0][key], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_sum_to_rounding_and_the_same_bits(found, kind):
    size = len(found)
    for dtype, length, scale in product(DTYPES, LENGTHS, SCALES):
        parts = torch.stack([numbers(length, rank, dtype, scale) for rank in range(size)]).double()
        total, sizes = parts.sum(0), parts.abs().sum(0)
        # Each addition rounds in the gradients' own dtype, each way of 16 bits once more.
        bound = size * torch.finfo(dtype).eps * sizes
        if kind.endswith("16"):
            bound += torch.finfo(torch.float32).eps * size * sizes
            one = 2.0**-11 if kind == "fp16" else 2.0**-8
            bound += 2.1 * one * sizes + sizes.max() * (2.0**-38 if kind == "fp16" else 0)
        error = (found[0][kind, dtype, length, scale].double() - total).abs()
        assert (error <= bound).all(), (dtype, length, scale)
        assert_same_bits(found, (kind, dtype, length, scale))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_reaches_all_ranks(found, kind):
    for rank in found:
        broken = rank[kind, "broken"]
        assert broken[7].isnan()
        assert broken[9] == float("inf")
        fine = [i for i in range(50) if i not in (7, 9)]
        assert (broken[fine] == len(found)).all()
        assert not rank[kind, "none"].numel()


@pytest.mark.parametrize("kind", ["powersgd", "nodes-powersgd"])
def test_powersgd_loses_nothing(found, kind):
    size = len(found)
    carried = torch.zeros(2472, dtype=torch.float64)
    for step in range(STEPS):
        weight = WEIGHTS[step % 3]
        # In means: what was applied and what is carried on are what came and was carried before.
        came = sum(gradient(rank, step).double() for rank in range(size))
        applied = found[0][kind][step][0].double() / weight
        if step == 5:
            assert applied[:2400].isnan().all()
            assert (found[-1][kind][step][1].isfinite()).all()
            continue
        kept = sum(rank[kind][step][1].double() for rank in found) / weight
        torch.testing.assert_close(applied + kept, came + carried, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(applied[2400:], came[2400:], rtol=1e-5, atol=1e-5)
        carried = kept
    for theirs in found[1:]:
        for mine, other in zip(found[0][kind], theirs[kind], strict=True):
            torch.testing.assert_close(mine[0], other[0], rtol=0, atol=0, equal_nan=True)


def test_powersgd_applies_all_of_a_steady_gradient_in_time(found):
    """The errors stay as large as they are, so their share of what was applied goes to nothing."""
    first, last = (
        torch.stack([found[0]["powersgd"][step][1] for step in range(*part)]).norm(dim=1).max()
        for part in ((8, 20), (28, 40))
    )
    assert last < 2 * first


def test_powersgd_is_exact_where_the_rank_suffices(found):
    size = len(found)
    thin = [torch.randn(60, 2, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    torch.testing.assert_close(
        found[0]["thin"].view(60, 40), sum(thin) @ torch.ones(2, 40), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("kind", [*TRAINED, "accumulated", "half", "half plain"])
def test_training_ends_with_the_same_bits_on_all_ranks(found, kind):
    for rank in found[1:]:
        torch.testing.assert_close(
            rank["trained", kind][0], found[0]["trained", kind][0], rtol=0, atol=0
        )


@pytest.mark.parametrize(
    ("kind", "plain", "close"),
    [
        ("shared", "all_reduce", {"rtol": 1e-3, "atol": 1e-5}),
        ("ring", "all_reduce", {"rtol": 1e-3, "atol": 1e-5}),
        ("to_one", "all_reduce", {"rtol": 1e-3, "atol": 1e-5}),
        ("accumulated", "accumulated plain", {"rtol": 1e-3, "atol": 1e-5}),
        ("fp16", "all_reduce", {"rtol": 2e-2, "atol": 2e-2}),
        ("bf16", "all_reduce", {"rtol": 2e-2, "atol": 2e-2}),
        ("half", "half plain", {"rtol": 5e-2, "atol": 5e-2}),
    ],
)
def test_training_is_that_of_plain_sums(found, kind, plain, close):
    own, theirs = found[0]["trained", kind], found[0]["trained", plain]
    assert own[1] == pytest.approx(theirs[1], rel=close["rtol"], abs=close["atol"])
    torch.testing.assert_close(own[0], theirs[0], **close)


def test_training_with_powersgd_learns(found):
    losses = found[0]["trained", "powersgd"][1]
    assert losses[-1] < losses[0] / 3


def test_a_resume_with_powersgd_is_bitwise(found):
    for rank in found:
        assert rank["resumed"][1] == rank["undisturbed"][1]
        torch.testing.assert_close(rank["resumed"][0], rank["undisturbed"][0], rtol=0, atol=0)


def test_errors_of_more_ranks_or_fewer_add_up_to_the_same():
    def loaded(states, own, size):
        reduction = PowerSgd(Group(tuple(range(size)), own, None), 2)
        reduction.load_state_dicts(states)
        return reduction.state_dict()["0"]["error"]

    states = [{"0": {"error": torch.full((5,), 10.0**rank), "factors": []}} for rank in range(3)]
    assert loaded(states, 0, 1)[0] == 111
    assert [loaded(states, own, 2)[0] for own in (0, 1)] == [101, 10]
    assert [loaded(states, own, 4)[0] for own in range(4)] == [1, 10, 100, 0]


def test_a_layout_that_differs_starts_over():
    reduction = PowerSgd(Group((0,), 0, None), 2)
    values = torch.randn(600)
    kept = reduction._kept_of(Flat(values, 0, [(30, 20)], "as it was"))
    kept.error.fill_(1)
    for layout, rank, there in (("as it was", 2, 1), ("another", 2, 0), ("as it was", 3, 0)):
        again = PowerSgd(Group((0,), 0, None), rank)
        again.load_state_dicts([reduction.state_dict()])
        assert (again._kept_of(Flat(values, 0, [(30, 20)], layout)).error == there).all()


# -- words before training -----------------------------------------------------------------------


def said(asked, size=2, nodes=1):
    lines = []
    here = replace(ALONE, world_size=size, local_world_size=-(-size // nodes), nodes=nodes)
    check_reduction(asked, World(here), lines.append)
    return lines


def test_a_compression_that_does_not_go_with_the_reduction():
    for reduction in ("ring", "shared"):
        with pytest.raises(WorldError, match=f"reduction={reduction} cannot be had with it"):
            said(Asked(reduction=reduction, compression="bf16"))


def test_what_changes_nothing_is_said():
    assert said(Asked(reduction="hierarchical"))[0].startswith("there is one node")
    assert said(Asked(reduction="hierarchical"), size=4, nodes=2) == []
    assert said(Asked(reduction="shared"), size=4, nodes=2)[0].startswith("there are several nodes")
    assert said(Asked(reduction="shared")) == []
    assert said(Asked(compression="powersgd"), size=1)[0].startswith("one rank has no gradients")
    with pytest.raises(WorldError, match="strategy=local_sgd sends none"):
        said(Asked(strategy="local_sgd", compression="powersgd"))
    assert said(Asked(strategy="local_sgd"), size=1) == [
        "there is one rank: strategy=local_sgd changes nothing"
    ]
    assert said(Asked(), size=1) == said(Asked(), size=3) == []
