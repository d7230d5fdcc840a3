"""Two hosts with a network between them: found without help, and cut."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from node_pair import both, wait_for_step
from two_hosts import ADDRESSES, Hosts, cannot_be_made
from world_ranks import free_port, run_file

from flatout.measure import usable_cpus
from flatout.save.model_file import load_model

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(usable_cpus() < 2, reason="two hosts take two CPUs"),
]


@pytest.fixture(scope="module")
def hosts():
    why = cannot_be_made()
    if why:
        pytest.skip(why)
    with Hosts() as hosts:
        yield hosts


def begin(hosts, folder, epochs, *options):
    return both(
        folder,
        "runs",
        epochs,
        options=options,
        rendezvous=f"{ADDRESSES[0]}:{free_port()}",
        befores=hosts.before,
    )


@pytest.mark.long  # tests of `flatout submit ssh` have the same
def test_two_hosts_give_what_one_rank_gives(tmp_path, hosts):
    nodes = begin(hosts, tmp_path, "2")
    assert [node.end() for node in nodes] == [0, 0], [node.said for node in nodes]
    script = Path(__file__).with_name("small_job.py")
    run_file(script, 1, tmp_path, tmp_path / "alone.safetensors")
    together, alone = (
        load_model(str(tmp_path / f"{name}.safetensors")) for name in ("runs", "alone")
    )
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=2e-6)


def test_a_server_has_a_host_of_its_own_and_is_started_again_where_it_was_killed(tmp_path, hosts):
    asked = ("--devices", "2", "--servers", "1", "--set", "world.strategy=parameter_server")
    nodes = begin(hosts, tmp_path, "2", *asked)
    wait_for_step(tmp_path, 10, nodes)
    [server] = nodes[1].ranks()
    os.kill(server, signal.SIGKILL)
    said = [(node.end(), node.said) for node in nodes]
    assert [code for code, _ in said] == [0, 0], said
    assert "servers: 1 on nodes of their own" in nodes[0].said
    assert (
        f"rank 2 (process {server}) was killed by SIGKILL; all ranks start again" in nodes[1].said
    )
    script = Path(__file__).with_name("small_job.py")
    run_file(script, 1, tmp_path, tmp_path / "alone.safetensors")
    together, alone = (
        load_model(str(tmp_path / f"{name}.safetensors")) for name in ("runs", "alone")
    )
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=2e-6)


def test_a_stop_signal_for_a_servers_host_alone_stops_the_job_with_a_checkpoint(tmp_path, hosts):
    asked = ("--devices", "2", "--servers", "1", "--set", "world.strategy=parameter_server")
    nodes = begin(hosts, tmp_path, "100", *asked)
    wait_for_step(tmp_path, 7, nodes)
    nodes[1].process.send_signal(signal.SIGTERM)
    said = [(node.end(), node.said) for node in nodes]
    assert [code for code, _ in said] == [143, 143], said
    assert "SIGTERM step" in nodes[0].said
    assert len(list((tmp_path / "runs" / "checkpoints").iterdir())) > 0


@pytest.mark.long
def test_a_short_cut_does_no_harm(tmp_path, hosts):
    nodes = begin(hosts, tmp_path, "4")
    wait_for_step(tmp_path, 10, nodes)
    hosts.cut()
    time.sleep(3)
    hosts.mend()
    assert [node.end() for node in nodes] == [0, 0], [node.said for node in nodes]
    assert "start again" not in nodes[0].said + nodes[1].said


@pytest.mark.long
def test_a_cut_network_ends_both_sides_with_words(tmp_path, hosts):
    nodes = begin(hosts, tmp_path, "100", "--set", "world.timeout=10")
    wait_for_step(tmp_path, 10, nodes)
    ranks = [pid for node in nodes for pid in node.ranks()]
    assert len(ranks) == 2
    hosts.cut()
    try:  # each within its patience, far less than gloo's own
        assert all(node.end() not in (0, None) for node in nodes), [node.said for node in nodes]
    finally:
        hosts.mend()
    assert "node 1 (" in nodes[0].said
    assert f"at {ADDRESSES[0]}:" in nodes[1].said
    for node in nodes:
        assert "does not answer any more" in node.said, node.said
