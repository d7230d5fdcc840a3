"""Parts of batches that ranks claim: together they are the epoch, whichever rank asks how often."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.data import Pipeline, arrays, as_source
from flatout.data.execution.claims import Claims
from flatout.data.ranked import ranked
from flatout.strategies.servers.server import EpochParts

SAMPLES, BATCH, RANKS = 53, 8, 3


def doubled(x, y):
    return 2 * x, y


def sources():
    x, y = torch.arange(SAMPLES * 2.0).view(SAMPLES, 2), torch.arange(SAMPLES)
    yield as_source((x, y), batch_size=BATCH, seed=3)
    yield as_source((x, y), batch_size=BATCH, seed=3, shuffle=False, drop_last=True)
    yield arrays(x, y).shuffle(3).map(doubled).batch(BATCH)
    yield arrays(x, y).shuffle(3).map(doubled).batch(BATCH, last="pad")


def claims_of(handed, first, last, run=1, use=lambda number: None):
    asks = [partial(handed.claim, rank) for rank in range(RANKS)]
    return [Claims(ask, use, RANKS, first, last, run) for ask in asks]


@pytest.mark.parametrize("at", range(4))
def test_ranks_that_claim_parts_take_each_sample_once_in_the_very_batches_of_an_epoch(at):
    source = list(sources())[at]
    parts = [ranked(source, rank, RANKS) for rank in range(RANKS)]
    fixed = [list(part.batches(1)) for part in parts]
    handed = EpochParts(RANKS)
    first = 2  # as after a resume
    handed.open(source.steps - first)
    claims = claims_of(handed, first, source.steps)
    assert all(part.can_claim for part in parts)
    made = [part.claimed(1, own) for part, own in zip(parts, claims, strict=True)]
    taken = [0] * RANKS
    draw = np.random.default_rng(at)
    while asking := [rank for rank in range(RANKS) if made[rank] is not None]:
        # The last rank asks seldom.
        rank = int(draw.choice(asking, p=_shares(asking)))
        batch = next(made[rank], None)
        if batch is None:
            made[rank] = None
            continue
        step, part = claims[rank].take()
        taken[rank] += 1
        wanted = fixed[part][step]
        for name in ("inputs", "targets", "indices"):
            assert getattr(batch, name).equal(getattr(wanted, name)), name
        ours = (batch.start, batch.whole, batch.copies, batch.is_copy, batch.padding)
        assert ours == (wanted.start, wanted.whole, wanted.copies, wanted.is_copy, wanted.padding)
        fixed[part][step] = None
    assert all(one is None for part in fixed for one in part[first:])
    assert sum(taken) == RANKS * (source.steps - first)
    assert taken[-1] < taken[0]
    assert {own.end for own in claims} == {source.steps}


@pytest.mark.parametrize("threads", [None, 2])
@pytest.mark.parametrize("at", range(4))
def test_a_rank_that_claims_all_parts_learns_their_end(at, threads):
    source = list(sources())[at]
    if threads is not None and isinstance(source, Pipeline):
        source = source.options(threads=threads)
    part = ranked(source, 0, RANKS)
    handed = EpochParts(RANKS)
    handed.open(source.steps)
    alone, *_ = claims_of(handed, 0, source.steps)
    for _ in part.claimed(1, alone):
        alone.take()
    assert (alone.used, alone.end) == (RANKS * source.steps, source.steps)


def _shares(asking):
    weights = np.array([1.0 if rank == RANKS - 1 else 8.0 for rank in asking])
    return weights / weights.sum()


@given(st.lists(st.integers(-1, RANKS - 1), max_size=40), st.integers(1, 9), st.integers(1, 3))
def test_a_section_ends_with_a_whole_step_wherever_it_is_closed(asks, batches, run):
    """Who asks; -1 closes it, in the middle of a step too."""
    handed, first = EpochParts(RANKS), 4
    handed.open(-(-batches // run))
    used = []
    claims = claims_of(handed, first, first + batches, run, used.append)
    places = [0] * RANKS
    for rank in [*asks, *[r for r in range(RANKS) for _ in range(3 * batches + 1)]]:
        if rank < 0:
            handed.close()
        elif claims[rank].at(places[rank]) is not None:
            places[rank] += 1
    ends = {own.end for own in claims}
    assert len(ends) == 1
    taken = [own.take() for own, count in zip(claims, places, strict=True) for _ in range(count)]
    steps = range(first, ends.pop())
    assert sorted(taken) == [(step, part) for step in steps for part in range(RANKS)]
    assert len(steps) == batches or len(steps) % run == 0
    assert sorted(set(used)) == list(range(-(-len(steps) // run) * RANKS))


def test_a_rank_claims_few_parts_ahead_where_few_are_left_for_others():
    handed = EpochParts(RANKS)
    handed.open(20)
    [claims, *_] = claims_of(handed, 0, 20)
    claims.at(0)
    assert claims.ahead() == 9
    claims.at(57)
    assert claims.ahead() == 1
