"""Pings and collectives that are measured for a forecast."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.cli.main import app
from flatout.errors import FlatoutError, WorldError
from flatout.forecast import Network, measure_network, probe
from flatout.forecast.measure_network import measure_here, measure_hosts, sizes_of
from flatout.forecast.probe import LADDER, reductions

sys.path += [str(Path(__file__).parents[1] / name) for name in ("submit", "world")]


class Run:
    def __init__(self, *bytes):
        self.communication = {"buckets": [{"bytes": one, "ready_ms": 1.0} for one in bytes]}


def test_sizes_are_those_of_a_run():
    assert sizes_of(None) == list(LADDER)
    assert (LADDER[0], LADDER[-1]) == (4096, 64 * 2**20)
    assert sizes_of(Run(1_000_000, 26_000_000, 1_000_000, 0)) == [4096, 1_000_000, 26_000_000]
    assert sizes_of(Run()) == list(LADDER)


def test_each_reduction_of_the_house_is_measured_where_it_makes_sense():
    always = ["all_reduce", "ring", "to_one", "bf16", "fp16", "powersgd"]
    assert sorted(reductions(1, 2)) == sorted([*always, "shared"])
    assert sorted(reductions(2, 2)) == sorted(always)
    assert sorted(reductions(2, 4)) == sorted([*always, "hierarchical"])


def test_hosts_of_one_name_are_told_apart():
    assert probe._names([[0, "a"], [0, "a"], [1, "b"]]) == ["a", "b"]
    assert probe._names([[0, "a"], [1, "a"]]) == ["a-0", "a-1"]


def test_ranks_that_fail_say_why():
    with pytest.raises(FlatoutError, match="the ranks have failed") as caught:
        measure_network.network_in([], ["one", "OSError: no way there"])
    assert "no way there" in caught.value.where


def test_nothing_to_measure(monkeypatch, tmp_path):
    monkeypatch.setattr(measure_network, "usable_cpus", lambda: 1)
    with pytest.raises(WorldError, match="one CPU"):
        measure_here([4096], print, 1.0)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WorldError, match="no network to measure"):
        measure_hosts("host1", [4096], print, seconds=1.0)


def check(found, hosts, ranks):
    assert len(found.hosts) == hosts
    assert {(one.op, one.ranks, one.hosts) for one in found.collectives} == {
        ("all_reduce", ranks, hosts)
    }
    assert {one.reduction for one in found.collectives} == set(reductions(hosts, ranks))
    assert min(one.bytes for one in found.collectives) == 4096
    assert all(len(one.seconds) >= 3 and min(one.seconds) > 0 for one in found.collectives)


@pytest.mark.slow
def test_ranks_of_this_host():
    said = []
    found = measure_here([4096, 262_144], said.append, seconds=2.0, ranks=2)
    check(found, 1, 2)
    assert {one.bytes for one in found.collectives} == {4096, 262_144}
    assert found.links == []
    assert said == ["measuring 2 ranks of this host for about 2 s"]


@pytest.mark.slow
def test_two_hosts_by_ssh(tmp_path):
    from ssh_hosts import ADDRESSES, SshHosts, missing

    if why := missing():
        pytest.skip(why)
    (tmp_path / "hosts.txt").write_text("host1\nhost2\n")
    call = "from flatout.cli.main import main; main()"
    with SshHosts(tmp_path) as hosts:
        given = {
            "config": hosts.config,
            "folder": tmp_path / "jobs",
            "rendezvous": f"{ADDRESSES[0]}:29511",
        }
        options = [word for name, one in given.items() for word in ("--option", f"{name}={one}")]
        done = subprocess.run(
            [*hosts.before, sys.executable, "-c", call, "forecast", "--measure", "hosts.txt",
             "--measure-time", "3s", *options],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")},
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = Network.read(tmp_path / "network.json")
    check(found, 2, 2)
    (link,) = found.links
    assert set(link.between) == set(found.hosts)
    assert 0 < link.rtt_s < 1
    assert link.bytes_per_s > 1e6
    lines = done.stdout.splitlines()
    assert (
        lines[-1]
        == "wrote network.json · flatout forecast RUN --hosts 1..16 --network network.json"
    )
    (told,) = [line for line in lines if "round trip" in line]
    assert told.startswith(" - ".join(link.between))
    assert any(line.startswith("4.1 kB: ") and "powersgd" in line for line in lines)


def test_a_run_is_needed_where_nothing_is_measured(capsys):
    with pytest.raises(SystemExit) as ended:
        app(["forecast"])
    assert ended.value.code == 2
    assert "or hosts with --measure" in capsys.readouterr().err.replace("\n", " ")
