"""Which rank a process is, from what launchers set."""

import pytest

from flatout.errors import WorldError
from flatout.world.place import ALONE, Place, first_host, place, tasks_per_node

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "host1",
    "MASTER_PORT": "29500",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_NAMESPACE": "2903179265",
}
SLURM = {
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "n[07-08]",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "4711",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
}


def test_without_a_launcher_there_is_one_rank():
    assert place({"HOME": "/root"}) == ALONE
    assert str(ALONE) == "one rank"


def test_one_process_of_torchrun_is_alone():
    assert place({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}) == ALONE


def test_torchrun():
    found = place(TORCHRUN)
    assert found == Place(3, 4, 1, 2, 1, 2, "host1", 29500, "torchrun")
    assert str(found) == "rank 3 of 4, node 1 of 2, started by torchrun"


def test_ranks_by_hand_are_those_of_one_node():
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    assert place(env) == Place(1, 2, 1, 2, 0, 1, "127.0.0.1", 1, "torchrun")


@pytest.mark.parametrize("rank", range(4))
def test_sagemaker_starts_ranks_by_mpirun(rank):
    """What its toolkit hands on by -x; the first host has rank 0."""
    env = {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % 2),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": "1184497665",
        "SM_HOSTS": '["algo-2", "algo-1"]',
        "SM_CURRENT_HOST": "algo-1",  # of the host that called mpirun
    }
    expected = (rank, 4, rank % 2, 2, rank // 2, 2, "algo-1")
    for given in (env, {**env, "SM_MASTER_ADDR": "algo-1", "SM_MASTER_PORT": "7777"}):
        found = place(given)
        assert (found.rank, found.world_size, found.local_rank, found.local_world_size,
                found.node, found.nodes, found.address) == expected  # fmt: skip
    assert place({**env, "MASTER_ADDR": "algo-9"}).address == "algo-9"
    assert place({**env, **TORCHRUN}) == place(TORCHRUN)  # by torchrun, in such a container


def test_open_mpi_on_one_node():
    found = place(MPI)
    assert (found.rank, found.world_size, found.local_rank, found.nodes) == (1, 2, 1, 1)
    assert (found.node, found.address) == (0, "127.0.0.1")
    assert found.port == place({**MPI, "OMPI_COMM_WORLD_RANK": "0"}).port
    assert found.port != place({**MPI, "PMIX_NAMESPACE": "2903179266"}).port


def test_open_mpi_on_two_nodes_needs_the_first_host():
    env = {**MPI, "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}
    with pytest.raises(WorldError, match="-x MASTER_ADDR"):
        place(env)
    found = place({**env, "MASTER_ADDR": "host1"})
    assert (found.node, found.nodes, found.address) == (1, 2, "host1")


def test_mpich():
    env = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    found = place(env)
    assert (found.rank, found.world_size, found.local_rank, found.nodes) == (1, 2, 1, 1)
    assert found.port == place({**env, "PMI_RANK": "0", "MPI_LOCALRANKID": "0"}).port
    with pytest.raises(WorldError, match="-genv MASTER_ADDR"):
        place({**env, "PMI_SIZE": "4"})


def test_slurm():
    found = place(SLURM)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (2, 3, 0, 1)
    assert (found.node, found.nodes, found.address) == (1, 2, "n07")
    assert found.port == place({**SLURM, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}).port


def test_the_batch_script_of_slurm_is_no_rank():
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "4711"}
    assert place(batch) == ALONE


@pytest.mark.parametrize(
    ("text", "counts"), [("2", [2]), ("2(x3),1", [2, 2, 2, 1]), ("1,4(x2)", [1, 4, 4])]
)
def test_ranks_per_node(text, counts):
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["", "2x3", "2(x)", "two"])
def test_what_are_no_ranks_per_node(text):
    with pytest.raises(WorldError, match="such as 2"):
        tasks_per_node(text)


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-4]", "n1"),
        ("n[07-12,20],m1", "n07"),
        ("a-b[2,5]-ib,c", "a-b2-ib"),
    ],
)
def test_first_host(text, host):
    assert first_host(text) == host


@pytest.mark.parametrize("text", ["", "[", "n[x]"])
def test_what_is_no_list_of_hosts(text):
    with pytest.raises(WorldError, match="list of hosts"):
        first_host(text)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({**TORCHRUN, "RANK": "4"}, "rank 4 of 4"),
        ({**TORCHRUN, "RANK": "three"}, "whole number in RANK, found 'three'"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "local rank 2 of 2"),
        ({**TORCHRUN, "GROUP_RANK": "2"}, "node 2 of 2"),
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({**SLURM, "MASTER_ADDR": "a" * 300}, f"in MASTER_ADDR, found '{'a' * 79}\n"),
        *(
            ({**TORCHRUN, "MASTER_ADDR": address}, "name or IP address in MASTER_ADDR, found")
            for address in (
                "a" * 64,
                ".".join(["a" * 63] * 5),
                "a b",
                "http://a",
                "a:29500",
                "a..b",
            )
        ),
        ({**SLURM, "SLURM_NODEID": "5"}, "tells of 2 nodes"),
    ],
)
def test_what_makes_no_sense(env, words):
    with pytest.raises(WorldError, match=words):
        place(env)


@pytest.mark.parametrize(
    "address", ["host1", "host_1.example.", "10.0.0.1", "::1", "fe80::1%eth0", "bücher.example"]
)
def test_an_address_of_the_first_rank_is_taken_as_it_is(address):
    assert place({**TORCHRUN, "MASTER_ADDR": address}).address == address
