"""bench/strategies.py: its keys."""

import json

import pytest

import strategies
from restarts import PEERS, Row


def rows_of(notes, **seconds):
    rows = {peer.name: Row(peer, "left out") for peer in strategies.peers_of(1, 128)}
    for name, times in seconds.items():
        row = rows[name.replace("_", "-")]
        row.reason, row.seconds = "", list(times)
        row.notes = [json.dumps(notes)] * len(times)
    return {key.name: key for key in strategies.keys_of(rows)}


def test_each_strategy_is_compared_with_its_own():
    assert all((PEERS / peer.script).is_file() for peer in strategies.peers_of(1, 128))
    found = rows_of(
        {"held": 51, "whole": 100},
        torch_fsdp=[12, 12],
        torch_fsdp_bound=[10, 10],
        flatout_fsdp=[9, 9],
    )
    assert found["fsdp_vs_torch"].value == pytest.approx(0.9)
    assert found["fsdp_memory"].value == pytest.approx(0.51)
    assert found["staged_efficiency"].found == "flatout-one-rank: left out"
    assert found["staged_efficiency"].met is False


def test_stages_are_compared_with_the_ideal_of_their_schedule():
    # 8 micro-batches: one through both stages, seven more through the slowest.
    found = rows_of({"shares": [0.6, 0.4]}, flatout_one_rank=[80.0], flatout_staged=[57.8])
    assert strategies.ideal(80.0, [0.6, 0.4], 8) == pytest.approx(10 + 7 * 6)
    assert found["staged_efficiency"].value == pytest.approx(52 / 57.8, rel=1e-3)
    assert found["staged_efficiency"].note == "stages of 60% | 40%"
    assert found["fsdp_memory"].found == "flatout-fsdp: left out"


def test_ways_of_uneven_ranks_are_compared_with_waiting_for_all():
    found = rows_of(
        {"epochs": 7, "staleness": 3.0, "late": [0, 0, 0, 9]},
        uneven_sync=[10.0, 10.0],
        uneven_async=[5.0, 5.0],
        uneven_spare=[6.0, 6.0],
    )
    assert found["async_with_straggler"].value == pytest.approx(0.5)
    assert found["async_with_straggler"].met is True
    assert found["spare_workers_with_straggler"].value == pytest.approx(0.6)
    assert found["spare_workers_with_straggler"].note.endswith(
        "late gradients by rank: [0, 0, 0, 9]"
    )
    assert set(strategies.NEEDS) == set(found)
    names = {peer.name for peer in strategies.peers_of(1, 128)}
    assert names == {peer for needed in strategies.NEEDS.values() for peer in needed}
