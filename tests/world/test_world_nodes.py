"""Which node this is: from the command, or what a cluster has set."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from flatout.errors import WorldError
from flatout.world import place, servers
from flatout.world.choose import candidates
from flatout.world.cpus import own_cpus
from flatout.world.nodes import (
    Nodes,
    asked_for,
    check_devices,
    checked,
    launched_nodes,
    nodes,
)
from flatout.world.world import _gpus

KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "4",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
SAGEMAKER = {
    "SM_HOSTS": json.dumps(["algo-2", "algo-1"]),
    "SM_CURRENT_HOST": "algo-2",
    "SM_NUM_GPUS": "8",
}


def test_one_node_alone():
    assert nodes({}) == Nodes()
    assert not Nodes().is_world
    assert str(Nodes(ranks=2)) == "2 ranks on this node"


def test_kubeflow():
    found = nodes(KUBEFLOW)
    assert (found.count, found.rank, found.ranks) == (2, 1, 4)
    assert found.rendezvous == "job-node-0-0.job:29400"
    assert str(found) == "4 ranks on this node, node 1 of 2"
    assert nodes({**KUBEFLOW, "PET_NPROC_PER_NODE": "auto"}).ranks is None
    with pytest.raises(WorldError, match="PET_MASTER_ADDR is not set"):
        nodes({"PET_NNODES": "2"})


def test_sagemaker():
    found = nodes(SAGEMAKER)
    assert (found.count, found.rank, found.ranks) == (2, 1, 8)
    assert found.rendezvous == "algo-1:29500"
    assert nodes({**SAGEMAKER, "SM_MASTER_PORT": "7777"}).rendezvous == "algo-1:7777"
    assert nodes({**SAGEMAKER, "SM_NUM_GPUS": "0"}).ranks is None
    with pytest.raises(WorldError, match="none of SM_HOSTS"):
        nodes({**SAGEMAKER, "SM_CURRENT_HOST": "algo-9"})
    with pytest.raises(WorldError, match="a JSON list"):
        nodes({**SAGEMAKER, "SM_HOSTS": "algo-1"})


def test_hosts_of_a_sagemaker_container_without_its_toolkit_are_found(tmp_path):
    """Its agent has written the hosts into a file."""
    file = tmp_path / "resourceconfig.json"
    env = {"TRAINING_JOB_NAME": "job"}
    assert nodes(env, file) == Nodes()
    said = {"current_host": "algo-2", "hosts": ["algo-1", "algo-2", "algo-10"]}
    file.write_text(json.dumps({**said, "network_interface_name": "eth0"}))
    found = nodes(env, file)
    assert (found.count, found.rank, found.ranks) == (3, 2, None)
    assert found.rendezvous == "algo-1:29500"
    assert nodes({}, file) == Nodes()  # the file may exist on machines outside of SageMaker
    for wrong in ("{}", "[]", "{", '{"hosts": 3, "current_host": "algo-1"}'):
        file.write_text(wrong)
        with pytest.raises(WorldError, match="expected"):
            nodes(env, file)


@pytest.mark.parametrize("launcher", ["LOCAL_RANK", "OMPI_COMM_WORLD_RANK"])
def test_a_rank_starts_no_others(launcher):
    """Of torchrun or mpirun in a container, whose variables are still those of its node."""
    for env in (SAGEMAKER, KUBEFLOW):
        assert nodes({**env, launcher: "1"}) == Nodes()


@pytest.mark.parametrize(
    "wrong",
    [
        Nodes(count=2, rank=2, rendezvous="host1:29500"),
        Nodes(count=2, rank=-1, rendezvous="host1:29500"),
        Nodes(count=2, rank=0, rendezvous="host1"),
        Nodes(count=2, rank=0, rendezvous=":29500"),
        Nodes(count=2, rank=0, rendezvous="host1:99999"),
        Nodes(count=2, rank=0),
    ],
)
def test_what_makes_no_sense(wrong):
    with pytest.raises(WorldError, match="expected"):
        checked(wrong)


def test_a_command_says_which_node_it_is():
    with pytest.raises(WorldError, match="pass --node-rank"):
        asked_for(1, 2, None, "host1:29500")
    found = asked_for(None, 2, 1, "host1:29500")
    assert (found.count, found.rank, found.ranks) == (2, 1, None)
    assert found.is_world


SRUN = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "n[07-08]",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "4711",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "MASTER_ADDR": "host1",
    "MASTER_PORT": "29500",
}


def test_one_process_of_srun_or_mpirun_on_each_node(monkeypatch):
    first, second = launched_nodes(SRUN), launched_nodes({**SRUN, "SLURM_NODEID": "0",
                                                          "SLURM_PROCID": "0"})  # fmt: skip
    assert (first.count, first.rank, second.rank) == (2, 1, 0)
    assert first.rendezvous == second.rendezvous
    assert first.rendezvous.startswith("n07:")
    assert launched_nodes(MPIRUN).rendezvous == "host1:29500"
    # Several processes on a node are ranks themselves.
    of_two = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    assert launched_nodes({**SRUN, **of_two, "SLURM_PROCID": "2"}) is None
    assert launched_nodes({}) is None
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    assert asked_for(1, None, None, None).count == 2
    # Without a number of ranks each task is one.
    assert asked_for(None, None, None, None).count == 1


def test_cpus_are_shared_out():
    cpus = [0, 1, 2, 3, 8, 9, 10]
    parts = [own_cpus(cpus, rank, 3) for rank in range(3)]
    assert [cpu for part in parts for cpu in part] == cpus
    assert {len(part) for part in parts} == {2, 3}
    assert [own_cpus([4, 5], rank, 3) for rank in range(3)] == [[4], [5], [4]]


@pytest.mark.parametrize(
    ("device", "refused"),
    [
        ("auto", "3 ranks were asked for, but this node has 1 GPU"),
        ("cuda", "3 ranks were asked for, but this node has 1 GPU"),
        ("cpu", "3 ranks were asked for, but this node has 2 CPUs"),
        ("cuda:0", "3 ranks were asked for, but this node has 2 CPUs"),
    ],
)
def test_ranks_have_gpus_unless_told_otherwise(device, refused, monkeypatch):
    monkeypatch.setattr("flatout.devices.inventory", lambda: SimpleNamespace(cuda=("a GPU",)))
    monkeypatch.setattr("flatout.measure.usable_cpus", lambda: 2)
    monkeypatch.setenv("FLATOUT_SET", json.dumps([f"world.device={device}"]))
    with pytest.raises(WorldError) as error:
        check_devices(3)
    assert error.value.what == refused
    assert ("world.device=cpu" in error.value.do) == ("GPU" in refused)
    if "CPU" in refused:
        check_devices(2)
    assert candidates() == ([1, 2] if device == "cpu" else [1])


def test_channels_know_which_ranks_have_one_gpu(monkeypatch):
    def given(device):
        return SimpleNamespace(uuid=f"uuid of {device}")

    def gpus(*devices):
        store = dist.HashStore()
        for rank, device in enumerate(devices[1:], 1):
            store.set(f"gpu-{rank}", str(given(device).uuid) if device != "cpu" else "")
        return _gpus(store, 0, len(devices), devices[0])

    monkeypatch.setattr("torch.cuda.get_device_properties", given)
    assert gpus("cpu", "cpu") == []
    assert gpus("cuda:0", "cuda:1") == ["uuid of cuda:0", "uuid of cuda:1"]
    assert len({*gpus("cuda:0", "cuda:0", "cuda:1")}) == 2
    with pytest.raises(WorldError, match="rank 1 runs on a CPU, and rank 0 on a GPU"):
        gpus("cuda:0", "cpu", "cuda:1")


@pytest.mark.parametrize(
    ("ranks", "count", "servers", "says"),
    [
        (1, 1, 1, "leaves one rank that computes"),
        (1, 2, 1, "leaves one rank that computes"),
        (2, 1, 3, "more servers than ranks"),
        (1, 4, 4, "of 4 nodes one at least must compute"),
        (1, 5, 3, "take 2 at most"),
    ],
)
def test_servers_that_leave_too_few_ranks_are_refused(ranks, count, servers, says):
    with pytest.raises(WorldError) as refused:
        checked(Nodes(count=count, ranks=ranks, servers=servers, rendezvous="host1:29500"))
    assert says in str(refused.value)


def test_servers_are_beside_the_ranks_of_one_node_or_on_the_last_of_several():
    one = checked(Nodes(ranks=4, servers=2))
    assert (one.here, str(one)) == (6, "4 ranks on this node, and 2 servers")
    four = [Nodes(4, rank, "host1:29500", ranks=2, servers=2) for rank in range(4)]
    assert [checked(node).here for node in four] == [2, 2, 1, 1]
    assert [str(node) for node in four[1:3]] == [
        "2 ranks on this node, node 1 of 4",
        "a server alone on this node, node 2 of 4",
    ]


def test_a_process_behind_the_ranks_is_a_server(monkeypatch):
    """Ranks are told of those alone that compute."""
    monkeypatch.setenv("FLATOUT_SERVERS", "2")
    for nodes_, local, world, expected in ((1, 5, 5, (3, 3, 1)), (4, 2, 6, (4, 2, 2))):
        env = {
            "RANK": "1",
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": str(local),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": str(nodes_),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "FLATOUT_SERVERS": "2",
        }
        there = place(env)
        assert servers.number_of(there) is None
        assert servers.number_of(replace(there, rank=world - 1)) == 1
        servers.become_rank(there, env)
        found = place(env)
        assert (found.world_size, found.local_world_size, found.nodes) == expected
        monkeypatch.setenv("FLATOUT_SERVERS", env["FLATOUT_SERVERS"])
        assert servers.apart() == (2, nodes_ == 1)
        monkeypatch.setenv("FLATOUT_SERVERS", "2")
