"""The terms of the model against what follows by hand, and calibration against a known truth."""

from dataclasses import replace

import numpy as np
import pytest

from flatout.forecast import collectives
from flatout.forecast.calibrate import calibrate, total_seconds
from flatout.forecast.collectives import Link, exposed
from flatout.forecast.forecast import Spreading
from flatout.forecast.job import (
    Bucket,
    Job,
    Prior,
    ReductionTime,
    Shape,
    Spread,
    StepTime,
    cut,
    expected_maximum,
    normal_maximum,
)
from flatout.forecast.step import LINK_ERROR, MachineDraws, sending, step_terms

LINK = Link(np.array([1e-4]), np.array([1e-9]), np.array([1e-10]))
MB = 1e6


def known(**changes):
    """A machine without any uncertainty, in one draw."""
    values = {
        "seconds": 1.0, "fixed": 0.2, "contention": 0.1, "power": 0.5, "spread": 0.02,
        "hidden": 1.0, "rtt": 2e-4, "nic": 1e9, "summing": 1e10, "inside": 1e10,
        "input": np.inf, "total_input": np.inf,
    } | changes  # fmt: skip
    return MachineDraws(**{name: np.array([value]) for name, value in values.items()})


def test_collectives_move_what_they_must():
    # 4 ranks: 6 turns, 2 * 3/4 of the bytes on each link, 3/4 added up.
    ring = collectives.ring(100 * MB, 4, LINK)
    assert ring[0] == pytest.approx(6 * 1e-4 + 0.15 + 0.0075)
    # Half the bytes, on a rank each host: as a ring of half, and the packing.
    halves = collectives.halves(100 * MB, 4, 4, LINK)
    assert halves[0] == pytest.approx(6e-4 + 0.075 + 0.03)
    # Two ranks on each host send twice as much to the owners of pieces elsewhere.
    crowded = collectives.halves(100 * MB, 4, 2, LINK)
    assert crowded[0] == pytest.approx(6e-4 + 0.05 * (2 * 0.5 + 0.75) + 0.03)
    assert collectives.all_gather(100 * MB, 4, LINK)[0] == pytest.approx(3e-4 + 0.075)
    assert collectives.power_sgd(100 * MB, 4, 4, LINK)[0] < 0.3 * ring[0]
    for one in (collectives.ring, collectives.to_one, collectives.shared):
        assert one(100 * MB, 1, LINK)[0] == 0
    # Two children at once, and then the child of one of them.
    turns = [collectives.broadcast_turns(ranks) for ranks in (1, 2, 3, 4, 5, 8, 16)]
    assert turns == [0, 1, 2, 3, 4, 6, 10]
    # 3/4 added up in a ring, gathered on one, and a tree; four owners have less each.
    for owners, moved in ((1, 0.75 * 2 + 3), (4, 0.75 * 1.25 + 0.75)):
        served = collectives.reduce_and_broadcast(100 * MB, 4, owners, LINK)
        assert served[0] == pytest.approx(8e-4 + 0.1 * moved + 0.0075)
    one = collectives.reduce_and_broadcast(100 * MB, 4, 1, LINK)
    assert collectives.to_one(100 * MB, 4, LINK)[0] == one[0]


def test_the_fullest_server_explains_a_published_collapse():
    """p2.xlarge of parameter_servers_2017.toml: 64 and 128 hosts of one link agree to 1%."""
    free = Link(np.zeros(1), np.ones(1), np.zeros(1))
    seconds = {64: 64 * 64 / 996.32, 128: 128 * 64 / 1077.59}
    rates = [
        collectives.fullest_server(95 * MB, hosts, 1, hosts, 8.2 * MB, free)[0] / took
        for hosts, took in seconds.items()
    ]
    assert rates[0] == pytest.approx(rates[1], rel=0.01)
    # Of equal shares no server is fuller than the others, and the link is no limit.
    even = collectives.fullest_server(95 * MB, 64, 1, 64, 0.0, free)[0]
    assert even < 0.35 * rates[0] * seconds[64]
    # A server on each of two hosts is what a ring sends; ranks of one host need no network.
    assert collectives.fullest_server(95 * MB, 2, 1, 2, 0.0, free)[0] == pytest.approx(95 * MB)
    assert collectives.fullest_server(95 * MB, 4, 4, 1, 0.0, free)[0] == 0


def test_buckets_wait_for_those_before_them():
    backward, hidden = np.array([1.0]), np.array([1.0])
    takes = [np.array([0.3]), np.array([0.2]), np.array([0.1])]
    # 0.3 to 0.6, 0.6 to 0.8, and the last one when it is ready, at the end.
    assert exposed(takes, [0.3, 0.5, 1.0], backward, hidden)[0] == pytest.approx(0.1)
    # 0.8 to 1.1, then one after the other.
    assert exposed(takes, [0.8, 0.9, 1.0], backward, hidden)[0] == pytest.approx(0.4)
    # Nothing is hidden where sending begins at the end.
    assert exposed(takes, [0.3, 0.5, 1.0], backward, 0 * hidden)[0] == pytest.approx(0.6)
    buckets = cut(102 * MB)
    assert sum(bucket.bytes for bucket in buckets) == pytest.approx(102 * MB)
    assert [bucket.ready for bucket in buckets] == [0.25, 0.5, 0.75, 1.0]


def test_the_slowest_of_ranks_is_the_bootstraps_limit():
    steps = np.random.default_rng(0).lognormal(0, 0.1, 500)
    drawn = np.random.default_rng(1).choice(steps, (20_000, 8)).max(axis=1).mean()
    assert expected_maximum(steps, 8) == pytest.approx(drawn, rel=0.005)
    assert expected_maximum(steps, 1) == pytest.approx(steps.mean())
    assert expected_maximum(steps, 10**6) == pytest.approx(steps.max())
    normal = np.random.default_rng(2).standard_normal((20_000, 16)).max(axis=1).mean()
    assert normal_maximum(16) == pytest.approx(normal, rel=0.01)
    assert Spread(steps).excess(8) == pytest.approx(drawn / steps.mean() - 1, abs=0.01)


def test_a_step_is_the_sum_of_its_terms():
    job = Job(buckets=(Bucket(100 * MB, 0.5), Bucket(100 * MB, 1.0)), batch=64, backward=0.5)
    alone = step_terms(job, Shape(1, 1, 64), known())
    assert alone["compute"][0] == 1.0
    assert alone["shared host"][0] == alone["stragglers"][0] == alone["gradient sync"][0] == 0
    # A fifth of a step stays when the batch is halved.
    assert step_terms(job, Shape(1, 1, 32), known())["compute"][0] == pytest.approx(0.6)
    four = step_terms(job, Shape(1, 4, 64), known())
    assert four["shared host"][0] == pytest.approx(0.1 * 3**0.5)
    hosts = step_terms(job, Shape(4, 1, 64), known())
    takes = 6 * 1e-4 + 0.15 + 0.0075
    # The first bucket is sent while the second is made, so the second alone is waited for.
    assert hosts["gradient sync"][0] == pytest.approx(takes)
    assert hosts["stragglers"][0] == pytest.approx(0.02 * normal_maximum(4))
    limited = step_terms(job, Shape(4, 1, 64), known(input=32.0))
    assert sum(limited.values())[0] == pytest.approx(2.0)
    total = step_terms(job, Shape(4, 1, 64), known(total_input=64.0))
    assert sum(total.values())[0] == pytest.approx(4.0)


def test_a_ring_through_all_ranks_leaves_each_host_once():
    """All bytes pass a host's link, but most hops stay within hosts."""
    draws = known(rtt=2e-3, nic=1e9, summing=1e15, inside=1e12, hidden=0.0)
    gathered = Job(buckets=(Bucket(1.0, 1.0),), batch=64, strategy="fsdp")
    hops = 31 * (28 * 1e-4 + 4 * 1e-3) / 32
    found = step_terms(gathered, Shape(4, 8, 64), draws)["gradient sync"][0]
    assert found == pytest.approx(3 * hops, rel=1e-3)  # twice gathered, once scattered
    summed = Job(buckets=(Bucket(100 * MB, 1.0),), batch=64, reduction="nccl")
    hops = 2 * 7 * (6 * 1e-4 + 2 * 1e-3) / 8
    found = step_terms(summed, Shape(2, 4, 64), draws)["gradient sync"][0]
    assert found == pytest.approx(hops + 2 * 7 / 8 * 0.1, rel=1e-3)


def test_links_are_less_certain_at_more_ranks_than_were_timed():
    one = known(nic=1e8, summing=1e15, rtt=1e-9, hidden=0.0).take(np.zeros(4000, int))
    job, shape = Job(buckets=cut(400 * MB), batch=64), Shape(4, 1, 64)
    spread = [
        float(np.std(np.log(step_terms(job, shape, one, growth=growth)["gradient sync"])))
        for growth in (1.0, 2.0, 4.0)
    ]
    assert spread == pytest.approx([0.0, LINK_ERROR, 2 * LINK_ERROR], abs=0.01)
    # Hidden sending at the timed ranks may exceed the sending that backward hides at other sizes.
    hidden = replace(one, hidden=0 * one.hidden + 1, nic=0 * one.nic + 1.2e9)
    syncs = [step_terms(job, shape, hidden, growth=n)["gradient sync"] for n in (1.0, 4.0)]
    assert np.quantile(syncs[1], 0.95) > 3 * syncs[0][0]


@pytest.mark.parametrize(
    ("changes", "is_faster"),
    [
        ({"compression": "bf16"}, True),
        ({"compression": "powersgd"}, True),
        ({"strategy": "local_sgd", "sync_every": 32}, True),
        ({"reduction": "to_one"}, False),
        ({"strategy": "fsdp"}, False),
        ({"row_bytes": 1e6}, False),
        ({"strategy": "parameter_server", "served": "reduced"}, False),
        ({"strategy": "parameter_server", "served": "towers", "servers": 4}, True),
        ({"strategy": "parameter_server", "served": "apart", "servers": 2}, False),
        ({"strategy": "local_sgd", "averaged": 40e9}, False),
    ],
)
def test_what_is_sent_decides_how_long_it_takes(changes, is_faster):
    job = Job(buckets=cut(400 * MB), batch=64)
    draws, shape = known(nic=1e8, summing=1e11), Shape(4, 1, 64)
    plain, other = (
        step_terms(one, shape, draws)["gradient sync"][0] for one in (job, replace(job, **changes))
    )
    assert bool(other < plain) is is_faster


def test_servers_on_hosts_of_their_own_are_as_fast_as_the_fullest_link():
    """n hosts, k more: n / k of the bytes on a server's link, and once all of them on a rank's."""
    draws = known(nic=1e8, summing=1e12, rtt=2e-6, inside=1e12)
    job = Job(buckets=cut(100 * MB), batch=64, strategy="parameter_server", served="towers")
    for servers, per_host, seconds in ((4, 1, 1.0), (2, 1, 2.0), (8, 2, 1.0), (2, 2, 2.0)):
        made = replace(job, servers=servers)
        found = step_terms(made, Shape(4, per_host, 64), draws)["gradient sync"][0]
        assert found == pytest.approx(seconds, rel=0.01)
    # Where no one waits, each of a host's ranks sends its own.
    each = replace(job, servers=4, served="apart")
    found = step_terms(each, Shape(4, 2, 64), draws)["gradient sync"][0]
    assert found == pytest.approx(2.0, rel=0.01)


def test_rows_of_replicated_tables_go_from_each_rank_to_all():
    job = Job(buckets=(), batch=64, row_bytes=1e5, tables="replicated")
    draws = known(nic=1e8, rtt=2e-5)
    two, four, sharded = (
        step_terms(one, Shape(hosts, 1, 64), draws)["gradient sync"][0]
        for one, hosts in ((job, 2), (job, 4), (replace(job, tables="sharded"), 4))
    )
    assert two == pytest.approx(64 * 1e5 / 1e8, rel=0.01)
    assert four == pytest.approx(3 * two, rel=0.01)
    assert sharded == pytest.approx(2.1 * 0.75 * 64 * 1e5 / 1e8, rel=0.01)


def test_ranks_that_step_alone_wait_at_averages_alone():
    job = Job(buckets=cut(400 * MB), batch=64, strategy="local_sgd", sync_every=16)
    draws, shape = known(nic=1e8, summing=1e11), Shape(4, 1, 64)
    each = step_terms(replace(job, strategy="ddp"), shape, draws)
    apart = step_terms(job, shape, draws)
    assert apart["stragglers"][0] == pytest.approx(each["stragglers"][0] / 4)
    takes = collectives.ring(400 * MB, 4, Link(draws.rtt / 2, 1 / draws.nic, 1 / draws.summing))
    assert apart["gradient sync"][0] == pytest.approx(takes[0] / 16)


def test_calibration_finds_what_timed_steps_tell():
    job = Job(buckets=cut(200 * MB), batch=64)
    truth = known(nic=6e8, hidden=0.4, fixed=0.3, spread=0.01)
    shapes = [Shape(1, 1, 64), Shape(1, 1, 16), Shape(2, 1, 64)]
    rows = [
        StepTime(shape, float(sum(step_terms(job, shape, truth).values())[0]), 0.01)
        for shape in shapes
    ]
    prior = Prior(nic=(1e8, 1e9))
    wanted = [StepTime(shape, 1.0) for shape in (Shape(4, 1, 64), Shape(2, 1, 16))]
    found = calibrate(job, prior, rows)
    for row in wanted:
        exact = float(sum(step_terms(job, row.shape, truth).values())[0])
        after = Spreading.of(total_seconds(job, row, found), 0.9)
        before = Spreading.of(total_seconds(job, row, calibrate(job, prior, rows[:1])), 0.9)
        assert after.low < exact < after.high
        assert after.high / after.low < 0.7 * before.high / before.low + 0.3
    # A reduction that was timed alone says how fast the network is.
    sent = ReductionTime(Shape(2, 1, 64), "all_reduce", 2e7, 0.0, 0.03)
    sent = replace(sent, seconds=float(sending(job, sent, truth)[0]))
    told = calibrate(job, prior, rows[:1], [sent])
    rates = np.quantile(told.nic, (0.05, 0.95))
    assert rates[0] < 6e8 < rates[1]
    assert np.ptp(rates) < 0.5 * np.ptp(
        np.quantile(calibrate(job, prior, rows[:1]).nic, (0.05, 0.95))
    )


@pytest.mark.parametrize("wrong", [0.7, 1.5])
def test_timed_steps_are_reproduced_even_if_the_model_is_wrong(wrong):
    job = Job(buckets=cut(100e6), batch=64)
    prior = Prior(nic=(1e8, 1e9), rtt=(1e-4, 2e-4), inside=(1e10, 2e10))
    rows = [
        StepTime(Shape(hosts, 1, 64), seconds * factor, 0.015)
        for hosts, seconds, factor in ((1, 0.2, 1.0), (2, 0.4, 1.0), (4, 0.5, wrong))
    ]
    draws = calibrate(job, prior, rows)
    for row in rows:
        assert np.median(total_seconds(job, row, draws)) == pytest.approx(row.seconds, rel=1e-6)
    # Larger numbers of ranks keep the correction of the last row.
    plain = replace(draws, corrections=())
    eight = StepTime(Shape(8, 1, 64), 1.0, 0.015)
    moved = np.median(total_seconds(job, eight, draws) / total_seconds(job, eight, plain))
    assert moved == pytest.approx(draws.correction(4))


def test_many_reductions_alone_do_not_outweigh_the_steps():
    """Though the model is a fifth off in each of them."""
    job, machines = Job(buckets=cut(200 * MB), batch=64), known(nic=6e8)
    shape, rng = Shape(2, 1, 64), np.random.default_rng(0)
    sent = []
    for bytes in np.geomspace(1e5, 1e8, 30):
        one = ReductionTime(shape, "ring", float(bytes), 1.0, 0.03)
        took = float(sending(job, one, machines)[0] * np.exp(rng.normal(0, 0.2)))
        sent.append(replace(one, seconds=took))
    rows = [
        StepTime(one, float(sum(step_terms(job, one, machines).values())[0]), 0.01)
        for one in (Shape(1, 1, 64), shape)
    ]
    found = calibrate(job, Prior(nic=(1e8, 4e9)), rows, sent)
    for row in rows:
        low, high = np.quantile(total_seconds(job, row, found), (0.05, 0.95))
        assert low < row.seconds < high
        assert high / low < 1.06


def test_calibration_is_the_same_each_time():
    job, rows = (
        Job(buckets=cut(1e8), batch=64),
        [StepTime(Shape(1, 1, 64), 0.5), StepTime(Shape(1, 2, 64), 0.6)],
    )
    one, other = (calibrate(job, Prior(), rows) for _ in range(2))
    assert np.array_equal(one.seconds, other.seconds)


def test_intervals_are_widened_on_a_logarithmic_scale():
    found = Spreading(90.0, 100.0, 110.0).widened(2)
    assert found.low == pytest.approx(81)
    assert found.high == pytest.approx(121)
