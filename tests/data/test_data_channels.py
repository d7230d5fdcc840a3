"""Channels of a cluster: a path for each rank of a node or one for all, split by node or not."""

import os
import threading

import numpy as np
import pytest

import flatout
from flatout.data.reading.schema import Column, Schema
from flatout.errors import DataError

NODES, LOCAL, ROWS = 2, 2, 103
LIMIT_S = 100
SCHEMA = Schema(
    format="libsvm",
    columns=(
        Column(name="label", dtype="int64", role="target"),
        Column(name="features", dtype="float32", shape=(1,)),
    ),
    options={"base": 1, "features": 1},
)
# By what the rows are split before a rank reads them, and which of them come to it.
CASES = {
    "own paths, split by node": ("rank", lambda node, local: slice(2 * node + local, None, 4)),
    "own paths, the same on all nodes": ("local_rank", lambda node, local: slice(local, None, 2)),
    "one path, split by node": ("node", lambda node, local: slice(node, None, 2)),
    "one path, the same on all nodes": (None, lambda node, local: slice(None)),
}


def ranks(monkeypatch):
    """Each rank of two nodes in turn, as torchrun would have started it."""
    for rank in range(NODES * LOCAL):
        node, local = divmod(rank, LOCAL)
        variables = {
            "RANK": rank,
            "WORLD_SIZE": NODES * LOCAL,
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": LOCAL,
            "GROUP_RANK": node,
            "GROUP_WORLD_SIZE": NODES,
            "MASTER_ADDR": "algo-1",
            "MASTER_PORT": 29500,
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        yield node, local


@pytest.mark.parametrize("case", CASES)
def test_files_each_row_comes_to_one_rank(case, monkeypatch):
    presharded, seen = CASES[case]
    found = []
    for node, local in ranks(monkeypatch):
        rows = np.arange(ROWS)[seen(node, local)]
        data = flatout.data.arrays(rows[:, None].astype(np.float32), rows).batch(8)
        data = data.shard() if presharded is None else data.shard(presharded=presharded, steps=13)
        batches = list(data.batches(0))
        assert len(batches) == 13
        kept = [b.targets if b.weight is None else b.targets[b.weight > 0] for b in batches]
        found += [int(row) for targets in kept for row in targets]
    assert sorted(found) == list(range(ROWS))


@pytest.mark.parametrize("case", CASES)
def test_pipes_each_row_comes_to_one_rank_in_every_epoch(case, monkeypatch, tmp_path):
    """One FIFO for each rank, and a new one for each epoch, as SageMaker's agent makes them."""
    presharded, seen = CASES[case]
    found = {0: [], 1: []}
    for node, local in ranks(monkeypatch):
        channel = tmp_path / f"host-{node}" / f"train-{local}"
        channel.parent.mkdir(exist_ok=True)
        rows = range(ROWS)[seen(node, local)]
        agent = threading.Thread(target=write, args=(channel, rows, 2), daemon=True)
        agent.start()
        data = flatout.data.fifo(
            channel, schema=SCHEMA, rows=len(rows), presharded=presharded, timeout_s=LIMIT_S
        )
        share = data.samples
        for epoch, kept in found.items():
            came = [int(row) for b in data.shuffle(1, window=9).batch(8).batches(epoch)
                    for row in b.targets]  # fmt: skip
            assert len(came) == share
            kept += came
        agent.join(LIMIT_S)
        assert not agent.is_alive()
    for kept in found.values():
        assert sorted(kept) == list(range(ROWS))


def write(channel, rows, passes):
    for number in range(passes):
        os.mkfifo(f"{channel}_{number}")
        with open(f"{channel}_{number}", "w") as pipe:
            pipe.writelines(f"{row} 1:{row}\n" for row in rows)


@pytest.mark.parametrize("wrong", [True, "host", "local"])
def test_what_pipes_cannot_be_split_by(wrong, tmp_path):
    with pytest.raises(DataError, match="'rank', 'local_rank', 'node' or None"):
        flatout.data.fifo(tmp_path / "p", schema=SCHEMA, presharded=wrong)


def test_what_files_cannot_be_split_by(tmp_path):
    rows = flatout.data.arrays(np.zeros((4, 1), np.float32), np.zeros(4, np.int64))
    with pytest.raises(DataError, match="presharded is True, 'node', 'local_rank' or 'rank'"):
        rows.shard(presharded="host")
    with pytest.raises(DataError, match="leave rank and world_size out"):
        rows.shard(0, 2, presharded="node")
    os.mkfifo(tmp_path / "p")
    data = flatout.data.fifo(tmp_path / "p", schema=SCHEMA)
    with pytest.raises(DataError, match=r"fifo\(..., presharded='local_rank'\)"):
        next(data.batch(2).shard(presharded="local_rank").batches(0))
