import os
import socket
from dataclasses import replace
from datetime import timedelta

import psutil
import pytest
from world_ranks import run

from flatout.errors import WorldError
from flatout.world.network import is_here, listen, listening_address, reached_at
from flatout.world.place import Place, place
from flatout.world.stores import Board, _address, files_of, open_store, own_files

HERE = Place(0, 2, 0, 2, address="127.0.0.1", port=29_500, launcher="flatout")
SOON = timedelta(seconds=5)


def test_ranks_of_an_agent_meet_in_its_memory(monkeypatch):
    with own_files(HERE.port) as told:
        monkeypatch.setenv("FLATOUT_STORE", told["FLATOUT_STORE"])
        one, other = (
            open_store(replace(HERE, rank=rank, local_rank=rank), SOON) for rank in (0, 1)
        )
        one.set("a", "1")
        assert other.get("a") == b"1"
        # A job that is started within this one, or on several nodes, is another one.
        assert files_of(replace(HERE, port=29_501)) is None
        assert files_of(replace(HERE, nodes=2, world_size=4)) is None
        path = files_of(HERE).store
        assert os.path.exists(path)
    assert not os.path.exists(path)


def test_the_first_rank_without_an_agent_listens_on_loopback_alone(monkeypatch):
    with listen("127.0.0.1") as free:
        port = free.getsockname()[1]
    here = replace(HERE, address="localhost", port=port)
    first = open_store(here, SOON)
    other = open_store(replace(here, rank=1, local_rank=1), SOON)
    first.set("a", "1")
    assert other.get("a") == b"1"
    listening = [one.laddr for one in psutil.Process().net_connections() if one.status == "LISTEN"]
    assert {one.ip for one in listening if one.port == port} == {"127.0.0.1"}


def test_a_board_keeps_the_latest_of_each_rank(tmp_path):
    path = tmp_path / "board"
    path.touch()
    one, other = Board(str(path)), Board(str(path))
    assert other.read(0) is None
    one.write(3, "three")
    one.write(0, "a" * 5_000)
    one.write(0, "zero")
    one.write(0, "b" * (1 << 20))  # too long
    assert [other.read(rank) for rank in range(4)] == ["zero", None, None, "three"]
    os.pwrite(os.open(path, os.O_RDWR), b"Z", 8)  # half written
    assert other.read(0) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.7"])
def test_loopback_stays_loopback(host):
    assert listening_address(host).startswith("127.0.0.")


def test_a_first_rank_on_another_node_is_not_looked_for_on_this_one(monkeypatch):
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.9", "MASTER_PORT": "29500"}
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(WorldError, match="nothing tells how many ranks each node has"):
        open_store(place(env), SOON)
    assert _address(place({**env, "MASTER_ADDR": "localhost"})) == "127.0.0.1"
    assert _address(place({**env, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})) == "192.0.2.9"


def test_an_address_of_this_node_is_taken():
    own = [
        one.address
        for ones in psutil.net_if_addrs().values()
        for one in ones
        if one.family.name == "AF_INET" and not one.address.startswith("127.")
    ]
    for address in own:
        assert listening_address(address) == address


def test_a_name_that_leads_to_loopback_does_not(monkeypatch):
    """As many a host has it in /etc/hosts."""
    found = [(2, 1, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr("flatout.world.network.socket.getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr("flatout.world.network.source_address", lambda *_: "10.0.0.7")
    assert listening_address("node1") == "10.0.0.7"
    # So the other ranks of that host must not go by the name either.
    assert is_here("node1")
    assert reached_at("node1") == "10.0.0.7"
    here = replace(HERE, nodes=2, world_size=4, address="node1")
    assert [_address(replace(here, rank=rank)) for rank in (0, 1)] == ["10.0.0.7"] * 2

    found[:] = [(2, 1, 6, "", ("192.0.2.9", 0))]
    assert not is_here("node1")
    assert reached_at("node1") == "node1"  # as another node knows it

    def none_knows(*_, **__):
        raise socket.gaierror("not known yet")

    monkeypatch.setattr("flatout.world.network.socket.getaddrinfo", none_knows)
    assert listening_address("node1") == "10.0.0.7"
    assert reached_at("node1") == "node1"

    def ipv6_only(host, port):
        if ":" not in host:
            raise OSError("no way there")
        return "2001:db8:7::7"

    monkeypatch.setattr("flatout.world.network.source_address", ipv6_only)
    assert listening_address("node1") == "2001:db8:7::7"

    def no_way(*_):
        raise OSError("no way there")

    monkeypatch.setattr("flatout.world.network.source_address", no_way)
    with pytest.raises(OSError, match="node1 is no address of this node"):
        listening_address("node1")


@pytest.mark.slow
def test_an_interface_that_the_user_has_named_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    job = """
        import os
        from flatout.world import join
        join()
        print(os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"])
    """
    assert [out.split() for out, _ in run(job, 2, tmp_path)] == [["lo", "ib0"]] * 2
