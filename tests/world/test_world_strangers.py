"""Who does not know a job's secret: where it can connect, and what it can do there."""

import json
import os
import socket
import subprocess
import sys
import textwrap

import psutil
import pytest
import torch
from node_pair import TRAIN, Node, both, children, wait_for_step
from two_hosts import ADDRESSES, Hosts, cannot_be_made
from world_ranks import free_port, run

from flatout.measure import usable_cpus
from flatout.save.model_file import load_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(usable_cpus() < 2, reason="two ranks take two CPUs"),
]

# Waits in the middle for all that is to be looked at.
JOB = TRAIN.replace(
    "time.sleep(0.02)",
    "[time.sleep(0.05) for _ in range(1200) if state.step == 7 and not os.path.exists('go')]",
)

# Its arguments: a file that shows that its code has run elsewhere, the agent's process, and ports.
STRANGER = """
    import json, os, pickle, socket, sys
    from datetime import timedelta
    import torch.distributed as dist

    mark, agent, *ports = sys.argv[1:]
    "localhost".encode("idna")  # loaded while it may be
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)

    class Code:
        def __reduce__(self):
            return open, (mark, "w")

    code = pickle.dumps(Code())
    found = {"keys": [], "files": []}
    for port in map(int, ports):
        for said in (b"", code, bytes(8), b"GET / HTTP/1.0\\r\\n\\r\\n", os.urandom(64)):
            with socket.create_connection(("127.0.0.1", port)) as peer:
                peer.sendall(said)
    try:
        store = dist.TCPStore("127.0.0.1", int(ports[0]), is_master=False, wait_for_workers=False,
                              timeout=timedelta(seconds=3))
        found["keys"] = store.list_keys()
        for key in [*found["keys"], *(
            f"{before}{key}"
            for before in ("", "flatout-0/", "flatout-watch-0/", "start-1/", "start-2/")
            for key in ("0", "1", "came", "all", "address-0", "asked", "teller", "blame", "stand/0",
                        "default_pg/0//cpu//0/0", "torchelastic/role_info/0", "ended", "agreed")
        )]:
            store.set(key, code)
    except RuntimeError as error:
        found["refused"] = str(error)
    try:
        found["files"] = os.listdir(f"/proc/{agent}/fd")
    except OSError:
        pass
    print(json.dumps(found))
"""


def listening(pid):
    """Where a process and those below it listen: addresses and ports, the agent's first."""
    found = []
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        for one in process.net_connections("inet"):
            is_open = one.status == psutil.CONN_LISTEN or (
                one.type == socket.SOCK_DGRAM and not one.raddr
            )
            if is_open:
                found.append((one.laddr.ip, one.laddr.port))
    return found


class Said:
    """As a node that `wait_for_step` waits for."""

    def __init__(self, process, folder):
        self.process, self._folder = process, folder

    @property
    def said(self):
        return (self._folder / "said").read_text()


def begin(folder):
    """A job of two ranks on one node."""
    path = folder / "train.py"
    path.write_text(textwrap.dedent(JOB))
    call = "from flatout.cli.main import main; main()"
    with open(folder / "said", "w") as output:
        return subprocess.Popen(
            [sys.executable, "-c", call, "run", "--devices", "2", str(path), "runs", "3"],
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "FLATOUT_CACHE": str(folder / "cache")},
        )


def test_one_node_listens_on_loopback_alone_and_strangers_change_nothing(tmp_path):
    weights = []
    for name in ("alone", "met"):
        folder = tmp_path / name
        folder.mkdir()
        job = begin(folder)
        try:
            said = (folder / "said").read_text
            wait_for_step(folder, 7, [Said(job, folder)])
            ports = listening(job.pid)
            assert ports, said()
            assert {ip for ip, _ in ports} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, ports
            if name == "met":
                meet(tmp_path, job.pid, [port for _, port in ports])
            (folder / "go").touch()
            assert job.wait(120) == 0, said()
        finally:
            job.kill()
            job.wait()
        weights.append(load_model(str(folder / "runs.safetensors")))
    assert not (tmp_path / "ran").exists()
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def meet(folder, agent, ports):
    """Let a stranger do its worst, as another user where that can be had."""
    hidden = {n: v for n, v in os.environ.items() if not n.startswith(("FLATOUT", "PYTHONPATH"))}
    done = subprocess.run(
        [
            *(sys.executable, "-c", textwrap.dedent(STRANGER), str(folder / "ran"), str(agent)),
            *map(str, ports),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=hidden,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # Nothing by which Flatout's ranks meet lies where others could read or write it.
    assert found["keys"] == []
    if os.geteuid() == 0:
        assert found["files"] == []


@pytest.fixture(scope="module")
def hosts():
    why = cannot_be_made()
    if why:
        pytest.skip(why)
    with Hosts() as hosts:
        yield hosts


def on(before, program, *arguments, secret=None):
    """What a program prints that runs on a host."""
    own = {} if secret is None else {"FLATOUT_SECRET": secret}
    return subprocess.run(
        [*before, sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**{n: v for n, v in os.environ.items() if n != "FLATOUT_SECRET"}, **own},
    )


# As TRAIN's two nodes: a store of torch's by the port that all nodes use.
BY_TORCH = """
    import sys
    from datetime import timedelta
    import torch.distributed as dist

    host, port = sys.argv[1], int(sys.argv[2])
    try:
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False,
                              timeout=timedelta(seconds=3))
        print(store.list_keys())
    except RuntimeError as error:
        print("refused")
"""

BY_GATE = """
    import sys
    from flatout.world.meeting.tunnel import entered

    try:
        entered(sys.argv[1], int(sys.argv[2])).close()
        print("let in")
    except Exception as error:
        print(type(error).__name__)
"""


@pytest.mark.root
def test_two_nodes_listen_towards_each_other_and_let_in_who_knows_the_secret(
    tmp_path, hosts, monkeypatch
):
    monkeypatch.setenv("FLATOUT_SECRET", "a long random one")
    port = free_port()
    where = f"{ADDRESSES[0]}:{port}"
    nodes = both(tmp_path, "runs", "2", rendezvous=where, befores=hosts.before, script=JOB)
    try:
        wait_for_step(tmp_path, 7, nodes)
        for node, own, host in zip(nodes, ADDRESSES, hosts.before, strict=True):
            script = (
                "import sys; sys.path.insert(0, sys.argv[1]); "
                "from test_world_strangers import listening; "
                "print(listening(int(sys.argv[2])))"
            )
            done = on(host, script, os.path.dirname(__file__), node.process.pid)
            places = {ip for ip, _ in eval(done.stdout, {})}
            assert "127.0.0.1" in places, done.stderr
            assert places <= {own, f"::ffff:{own}", "127.0.0.1", "::ffff:127.0.0.1"}
        assert on(hosts.before[1], BY_TORCH, ADDRESSES[0], port).stdout == "refused\n"
        assert on(hosts.before[1], BY_GATE, ADDRESSES[0], port).stdout == "Refused\n"
        wrong = on(hosts.before[1], BY_GATE, ADDRESSES[0], port, secret="a long random two")
        assert wrong.stdout == "Refused\n"
        right = on(hosts.before[1], BY_GATE, ADDRESSES[0], port, secret="a long random one")
        assert right.stdout == "let in\n"
        (tmp_path / "go").touch()
        assert [node.end() for node in nodes] == [0, 0], [node.said for node in nodes]
        assert "no FLATOUT_SECRET" not in nodes[0].said
    finally:
        for node in nodes:
            node.process.kill()
            node.process.wait()


def test_a_node_with_another_secret_is_told_so(tmp_path, monkeypatch):
    rendezvous = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("FLATOUT_SECRET", "one")
    first = Node(tmp_path, 0, rendezvous, "runs", "1")
    monkeypatch.setenv("FLATOUT_SECRET", "another")
    other = Node(tmp_path, 1, rendezvous, "runs", "1")
    try:
        assert other.end() not in (0, None)
        assert "do not share a secret" in other.said
        assert "set the same FLATOUT_SECRET" in other.said
        assert first.process.poll() is None
        assert children(first.process.pid) == []
    finally:
        first.process.kill()
        first.process.wait()


JOIN = """
    import os
    import torch
    from flatout.world import join

    os.environ["FLATOUT_SECRET"] = ("one", "another")[int(os.environ["RANK"])]
    try:
        join().sum(torch.ones(1))
    except Exception as error:
        print(error, flush=True)
        os._exit(0)  # gloo's threads may not outlive Python
"""


def test_a_rank_with_another_secret_is_found_out(tmp_path):
    for rank, (out, _) in enumerate(run(JOIN, 2, tmp_path)):
        assert f"rank {1 - rank} of this channel does not know the secret of the job" in out
