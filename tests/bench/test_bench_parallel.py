"""bench/parallel.py: its keys, and two nodes with a slow link that are gone afterwards."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import parallel
from restarts import PEERS, Row
from two_nodes import ADDRESSES, on_node, two_nodes, why_not

BENCH = Path(__file__).parents[2] / "bench"
DATA = Path(__file__).parents[3] / "shared" / "data" / "mnist"


def rows_of(**seconds):
    peers = parallel.compression_peers(Path(), 0.1, ("a", "b"))
    rows = {peer.name: Row(peer, "needs --data") for peer in peers}
    for name, times in seconds.items():
        row = rows[name.replace("_", "-")]
        row.reason, row.seconds = "", list(times)
    return rows


def test_every_peer_starts_a_script_that_is_there():
    for peer in parallel.compression_peers(Path(), 0.1, ("a", "b")):
        assert (PEERS / peer.script).is_file()
        assert (PEERS / peer.arguments[peer.arguments.index("--script") + 1]).is_file()


def test_the_best_compression_is_compared_with_plain_ddp():
    rows = rows_of(
        plain_ddp=[10, 10], flatout_bf16=[6, 6], flatout_powersgd=[4, 4], flatout_2x2_to_one=[9]
    )
    found = {key.name: key for key in parallel.compression_keys(rows)}
    assert found["compressed_time_to_loss"].value == pytest.approx(0.4)
    assert found["compressed_time_to_loss"].met is True
    assert found["compressed_time_to_loss"].note == "with powersgd, the best of 2"
    assert found["to_one_time_to_loss"].found == "plain-ddp-2x2: needs --data"


def test_without_any_compression_the_key_is_not_met():
    key = parallel.compression_keys(rows_of(plain_ddp=[10]))[0]
    assert key.found == "no compression ran"
    assert key.met is False


def needs_nodes():
    reason = why_not()
    if reason:
        pytest.skip(reason)


@pytest.mark.root
def test_two_nodes_are_linked_slow_and_gone_afterwards():
    needs_nodes()
    with two_nodes(100) as names:
        for name, other in zip(names, reversed(ADDRESSES), strict=True):
            done = subprocess.run([*on_node(name), "ip", "-4", "route", "get", other])
            assert done.returncode == 0
            shaped = subprocess.run(
                ["tc", "-n", name, "qdisc"], capture_output=True, text=True, check=True
            )
            assert "tbf" in shaped.stdout
            assert "100Mbit" in shaped.stdout
        there = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
        assert all(name in there for name in names)
    gone = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
    assert not any(name in gone for name in names)


@pytest.mark.root
@pytest.mark.long
def test_ranks_on_two_nodes_train_until_the_loss(tmp_path):
    needs_nodes()
    if not DATA.is_dir():
        pytest.skip("the MNIST files are not there")
    command = [sys.executable, str(BENCH / "parallel.py"), "--restarts", "1", "--json"]
    chosen = ["plain-ddp", "flatout-bf16", "flatout-powersgd"]
    done = subprocess.run(
        [*command, "--data", str(DATA), "--loss", "2.0", "--only", *chosen],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rows = {row["name"]: row for row in found["rows"]}
    assert {rows[name]["reason"] for name in chosen} == {""}
    assert found["keys"]["compressed_time_to_loss"] > 0
    # The first steps of plain sums and of those in 16 bits are alike.
    assert rows["plain-ddp"]["notes"][0].split()[0] == rows["flatout-bf16"]["notes"][0].split()[0]
    assert not list(tmp_path.iterdir())
