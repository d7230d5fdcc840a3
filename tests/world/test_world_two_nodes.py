"""Two nodes on one machine, as in two terminals: the same result, and no one left hanging."""

import os
import signal
import time

import pytest
import torch
from node_pair import TRAIN, alive, both, wait_for, wait_for_step
from world_ranks import run

from flatout.measure import usable_cpus
from flatout.save.model_file import load_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(usable_cpus() < 2, reason="two nodes take two CPUs"),
]

ALONE = """
    import sys
    import numpy as np, torch, flatout

    rng = np.random.default_rng(1)
    x = rng.normal(size=(200, 20)).astype(np.float32)
    y = rng.integers(0, 5, 200)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 5))
    trainer = flatout.Trainer(model, lr=0.01, allow="exact")
    trainer.fit((x, y), batch_size=10, epochs=2)
    trainer.save(sys.argv[1] + "/alone.safetensors")
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    nodes = both(folder, "runs", "2")
    assert [node.end() for node in nodes] == [0, 0], [node.said for node in nodes]
    assert "rank 0 of 2, node 0 of 2" in nodes[0].said
    assert "rank 1 of 2, node 1 of 2" in nodes[1].said
    return load_model(str(folder / "runs.safetensors"))


def same(weights, path):
    found = load_model(str(path))
    return all(torch.equal(found[name], weights[name]) for name in weights)


def test_two_nodes_give_what_one_rank_gives(tmp_path, undisturbed):
    run(ALONE, 1, tmp_path)
    alone = load_model(str(tmp_path / "alone.safetensors"))
    torch.testing.assert_close(undisturbed, alone, rtol=1e-4, atol=2e-6)


@pytest.mark.long
def test_the_first_node_measures_how_many_ranks_are_fastest(tmp_path):
    nodes = both(tmp_path, "runs", "2", options=("--devices", "auto"))
    assert [node.end() for node in nodes] == [0, 0], [node.said for node in nodes]
    assert "<- chosen" in nodes[0].said
    assert "as node 0 (" in nodes[1].said
    sizes = {int(line.split()[3].rstrip(",")) for line in nodes[0].said.splitlines()
             if line.startswith("rank 0 of ")}  # fmt: skip
    assert sizes <= {2, 4}


def test_after_a_rank_was_killed_all_start_again_on_both_nodes(tmp_path, undisturbed):
    nodes = both(tmp_path, "runs", "2")
    wait_for_step(tmp_path, 17, nodes)
    (rank,) = nodes[1].ranks()
    os.kill(rank, signal.SIGKILL)
    assert [one.end() for one in nodes] == [0, 0], [one.said for one in nodes]
    assert f"rank 1 (process {rank}) was killed by SIGKILL; all ranks start" in nodes[1].said
    assert "resumed step" in nodes[0].said
    assert same(undisturbed, tmp_path / "runs.safetensors")


@pytest.mark.long
def test_a_rank_that_is_killed_when_the_other_node_is_done(tmp_path, undisturbed):
    late = """
    if os.environ["RANK"] + os.environ["TORCHELASTIC_RESTART_COUNT"] == "00":
        open("late", "w").close()
        time.sleep(100)
    """
    nodes = both(tmp_path, "runs", "2", script=TRAIN + late)
    (other,) = wait_for(nodes[1].ranks)
    wait_for(lambda: (tmp_path / "late").exists() and not alive(other))
    (rank,) = nodes[0].ranks()
    os.kill(rank, signal.SIGKILL)
    assert [one.end() for one in nodes] == [0, 0], [one.said for one in nodes]
    assert same(undisturbed, tmp_path / "runs.safetensors")


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.long
def test_after_an_agent_was_killed_both_nodes_end(tmp_path, undisturbed, node):
    nodes = both(tmp_path, "runs", "2")
    wait_for_step(tmp_path, 17, nodes)
    ranks = [pid for one in nodes for pid in one.ranks()]
    nodes[node].process.kill()
    other = nodes[1 - node]
    assert other.end() not in (0, None)
    assert f"node {node} (" in other.said
    time.sleep(0.5)
    assert not [pid for pid in ranks if alive(pid)]
    if node == 0:  # once is enough
        again = both(tmp_path, "runs", "2", "resume")
        assert [one.end() for one in again] == [0, 0], [one.said for one in again]
        assert same(undisturbed, tmp_path / "runs.safetensors")


def test_a_stop_signal_to_one_node_stops_both_after_the_same_step(tmp_path):
    nodes = both(tmp_path, "runs", "2")
    wait_for_step(tmp_path, 12, nodes)
    nodes[1].process.send_signal(signal.SIGTERM)
    assert [node.end() for node in nodes] == [143, 143], [node.said for node in nodes]
    assert (nodes[0].said + nodes[1].said).count("-> checkpoint") == 1
