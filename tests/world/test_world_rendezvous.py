"""Nodes that meet: what they agree on, and what each of them hears where they do not."""

import os
import socket
import threading
import time

import pytest
from torch.distributed import TCPStore
from world_ranks import free_port

from flatout.errors import WorldError
from flatout.world.meeting.agreement import facts_here
from flatout.world.meeting.rendezvous import Rendezvous
from flatout.world.network import interface_of, is_here, listener, source_address
from flatout.world.nodes import Nodes

FACTS = {"--devices": "1", "script": "train.py, sha256 12", "torch": "2.13.0"}


def node(rank, port, facts=FACTS, count=2, wait_s=20.0, silent_s=20.0, is_open=False, **more):
    ranks = None if is_open else 1
    where = f"127.0.0.1:{port}"
    nodes = Nodes(count=count, rank=rank, rendezvous=where, ranks=ranks, is_open=is_open)
    made.append(Rendezvous(nodes, facts, wait_s=wait_s, silent_s=silent_s, **more))
    return made[-1]


made = []


@pytest.fixture(autouse=True)
def _no_rank_goes_on():
    yield
    for one in made[::-1]:
        one.shutdown()
    made.clear()


def meet(*nodes):
    """What each node hears: nothing, where they have met."""
    heard = [None] * len(nodes)

    def open_one(index):
        try:
            nodes[index].open()
        except WorldError as error:
            heard[index] = str(error)

    threads = [threading.Thread(target=open_one, args=(index,)) for index in range(len(nodes))]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return heard


def go_on(one):
    """As its agent does while the ranks run."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        one.num_nodes_waiting()
        time.sleep(0.05)


def test_nodes_that_agree_start_their_ranks_together():
    port = free_port()
    nodes = [node(rank, port, last_words_s=0.3) for rank in range(2)]
    assert meet(*nodes) == [None, None]
    found = [None, None]

    def start(rank):
        found[rank] = nodes[rank].next_rendezvous()

    for again in (1, 2):
        assert nodes[0].num_nodes_waiting() == 0
        late = threading.Thread(target=start, args=(1,))
        late.start()
        while not nodes[0].num_nodes_waiting():
            time.sleep(0.01)
        start(0)
        late.join(60)
        assert [one.rank for one in found] == [0, 1]
        assert [one.rounds for one in nodes] == [again, again]
        found[0].store.set("key", str(again))
        assert found[1].store.get("key") == str(again).encode()
    for one in found:  # the ranks reach the store on loopback of their own node
        info = one.bootstrap_store_info
        assert info.master_addr == "127.0.0.1"
        TCPStore(info.master_addr, info.master_port, is_master=False, wait_for_workers=False)
    nodes[1].end("rank 1 has ended with exit code 1")
    with pytest.raises(WorldError, match=r"node 1 \(.*\): rank 1 has ended with exit code 1"):
        go_on(nodes[0])
    nodes[0].end("over")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"script": "train.py, sha256 34"}, "script: train.py, sha256 12 on node 0"),
        ({"torch": "2.12.1"}, "torch: 2.13.0 on node 0"),
        ({"--devices": "4"}, "--devices: 1 on node 0"),
        ({"compute.precision": "bf16"}, "compute.precision: nothing on node 0"),
    ],
)
def test_what_differs_is_named_on_both_nodes(other, words):
    port = free_port()
    heard = meet(node(0, port), node(1, port, {**FACTS, **other}))
    assert heard[0] == heard[1]
    assert "nodes 0 and 1 are not about to run the same" in heard[0]
    assert words in heard[0]
    (value,) = other.values()
    assert f"{value} on node 1 ({socket.gethostname()})" in heard[0]


def test_another_number_of_nodes():
    port = free_port()
    heard = meet(node(0, port, count=2), node(2, port, count=3))
    assert heard[0] == heard[1]
    assert "--nodes: 2 on node 0" in heard[0]
    assert "3 on node 2" in heard[0]


@pytest.mark.parametrize("twice", [1, 2])
def test_two_nodes_with_the_same_number(twice):
    port = free_port()
    heard = meet(node(0, port, count=3), node(twice, port, count=3), node(twice, port, count=3))
    assert len(set(heard)) == 1
    assert f"two nodes say that they are node {twice}: {socket.gethostname()} (process" in heard[0]


def test_a_node_too_many_comes_too_late():
    port = free_port()
    nodes = [node(0, port), node(1, port)]
    assert meet(*nodes) == [None, None]
    (heard,) = meet(node(1, port))
    assert "has begun already, with" in heard
    assert "as node 1" in heard
    for one in nodes[::-1]:
        one.end("over")


def test_a_port_in_use_is_named_with_who_uses_it():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(WorldError, match=rf"port {port} of this node is in use by process \d+"):
            node(0, port).open()
        assert f"process {os.getpid()} of " in listener(port)


@pytest.mark.slow
def test_what_listens_is_no_first_node():
    """A server of something else, which takes connections and says nothing of use."""
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(WorldError, match="is not the first node of this job"),
    ):
        node(1, other.getsockname()[1], silent_s=1.0).open()


def test_who_has_not_come_is_named():
    port = free_port()
    heard = meet(node(0, port, count=3, wait_s=0.5), node(2, port, count=3))
    assert heard[0] == heard[1]
    assert f"node 1 of 3 did not come to 127.0.0.1:{port} within 0 s" in heard[0]
    with pytest.raises(WorldError, match=r"node 0 did not open .* within 0 s \(.*refused"):
        node(1, free_port(), wait_s=0.3).open()


def test_a_silent_node_is_named():
    port = free_port()
    nodes = [node(rank, port, silent_s=1.0) for rank in range(2)]
    assert meet(*nodes) == [None, None]
    nodes[1]._over.set()  # as if it were cut off: it beats no more
    with pytest.raises(WorldError, match=r"node 1 \(.*\) does not answer any more: nothing was"):
        go_on(nodes[0])


def test_the_first_node_says_how_many_ranks_each_has(monkeypatch, capfd):
    quick, port = {"last_words_s": 0.3}, free_port()
    first = node(0, port, facts={**FACTS, "--devices": "2"}, **quick)
    other = node(1, port, facts={**FACTS, "--devices": "auto"}, is_open=True, **quick)
    with monkeypatch.context() as patch:
        patch.setattr("flatout.world.meeting.rendezvous.check_devices", lambda ranks: None)
        assert meet(first, other) == [None, None]
    assert (other.nodes.ranks, other.nodes.is_open) == (2, False)
    assert "2 ranks, as node 0 (" in capfd.readouterr().err
    # A node that has less says so, and the first one hears it.
    port = free_port()
    first = node(0, port, facts={**FACTS, "--devices": "9999"}, **quick)
    other = node(1, port, facts={**FACTS, "--devices": "auto"}, is_open=True, **quick)
    heard = meet(first, other)
    assert heard[0] is None
    assert "9999 ranks were asked for" in heard[1]
    with pytest.raises(WorldError, match=r"node 1 \(.*\): 9999 ranks were asked for"):
        go_on(first)


def test_facts_of_scripts_and_modules(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text("print(1)")
    one = facts_here(str(script), False, 2, {"compute.precision": "bf16"})
    assert one["--devices"] == "2"
    assert facts_here(str(script), False, None, {})["--devices"] == "auto"
    assert one["compute.precision"] == "bf16"
    assert one["script"].startswith("train.py, sha256 ")
    script.write_text("print(2)")
    assert facts_here(str(script), False, 2, {})["script"] != one["script"]
    package = tmp_path / "jobs"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('only looked at, not imported')")
    (package / "__main__.py").write_text("print(3)")
    (package / "train.py").write_text("print(2)")
    monkeypatch.chdir(tmp_path)
    whole, part = (facts_here(name, True, 1, {})["script"] for name in ("jobs", "jobs.train"))
    assert whole.startswith("-m jobs, sha256 ")
    assert not whole.endswith("?")
    assert part.split()[-1] == facts_here(str(script), False, 1, {})["script"].split()[-1]


def test_interfaces():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("127.0.1.1") == "lo"
    assert interface_of(source_address("127.0.0.1", 1)) == "lo"
    assert interface_of("192.0.2.1") is None
    assert is_here("localhost")
    assert not is_here("192.0.2.1")
