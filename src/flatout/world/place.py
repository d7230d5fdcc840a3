"""The rank of this process, from the environment of its launcher.

Known launchers are torchrun (and others that set its variables, such as Kubeflow's PyTorchJob),
Open MPI's and MPICH's mpirun, and SLURM's srun.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile

from flatout.errors import WorldError

# Default port of rank 0: _FIRST_PORT plus a number below _PORTS that differs between jobs on one
# machine.
_FIRST_PORT, _PORTS = 20_000, 10_000


RANK_TRIAL = "FLATOUT_RANK_TRIAL"
"""Set for a job that is only measured: the file for the first rank's steps per second."""

SERVERS = "FLATOUT_SERVERS"
"""Set if processes after the ranks are only servers: their number; for a rank also their place."""

STARTED_BY = "FLATOUT_STARTED_BY"
"""The id of the process that has started the ranks of this node and watches them."""

RANKS_TRIED = "FLATOUT_RANKS_TRIED"
"""Set for the job after such trials: steps per second by number of ranks on this node, as JSON."""


# Without these variables a process does not count as one of several that a cluster has started.
_LAUNCHED = frozenset(
    [
        *("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMI_SIZE"),
        *("PET_NNODES", "SM_HOSTS", "TRAINING_JOB_NAME"),
    ]
)


@dataclass(frozen=True)
class Place:
    """A rank's place in its job. All numbers are from 0.

    Attributes:
        rank: number of this process in the whole job.
        world_size: number of ranks.
        local_rank: number of this process on its node.
        local_world_size: number of ranks on its node.
        node: number of its node.
        nodes: number of nodes.
        address: the address where rank 0 listens.
        port: the port where rank 0 listens.
        launcher: the program that started the ranks, in words.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = 0
    nodes: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    launcher: str = ""

    def __str__(self) -> str:
        if self.world_size == 1:
            return "one rank"
        where = f", node {self.node} of {self.nodes}" if self.nodes > 1 else ""
        return f"rank {self.rank} of {self.world_size}{where}, started by {self.launcher}"


ALONE = Place()


def place(environ: Mapping[str, str] | None = None) -> Place:
    """Return the rank of this process.

    Args:
        environ: the environment; None for that of the process.

    Returns:
        Its place, or `ALONE` if no launcher has set one.

    Raises:
        WorldError: the variables are incomplete, or contradict each other.
    """
    env = os.environ if environ is None else environ
    result = _torchrun(env)
    return launched(env) if result is None else _checked(result)


def launched(environ: Mapping[str, str] | None = None) -> Place:
    """Return the place of a process that mpirun or srun has started, or `ALONE`."""
    env = os.environ if environ is None else environ
    for known in (_open_mpi, _slurm, _mpich):
        result = known(env)
        if result is not None:
            return _checked(result)
    return ALONE


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in _LAUNCHED}


def restarts(environ: Mapping[str, str] | None = None) -> int:
    """Return the number of times that the ranks of this job were started again.

    An agent starts them again after one was killed, and SLURM after a preemption, for example.
    """
    env = os.environ if environ is None else environ
    by_agent = number_in(env, "TORCHELASTIC_RESTART_COUNT", 0)
    return by_agent + number_in(env, "SLURM_RESTART_COUNT", 0)


def _torchrun(env: Mapping[str, str]) -> Place | None:
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return None
    rank, world = number_in(env, "RANK"), number_in(env, "WORLD_SIZE")
    if world == 1:
        return None if rank == 0 else Place(rank, world, launcher="torchrun")
    local = number_in(env, "LOCAL_RANK", rank if "LOCAL_WORLD_SIZE" not in env else None)
    size = number_in(env, "LOCAL_WORLD_SIZE", world if local == rank else None)
    return Place(
        rank=rank,
        world_size=world,
        local_rank=local,
        local_world_size=size,
        node=number_in(env, "GROUP_RANK", rank // size if size else 0),
        nodes=number_in(env, "GROUP_WORLD_SIZE", -(-world // size) if size else 1),
        address=_address_in(env),
        port=number_in(env, "MASTER_PORT"),
        launcher="torchrun",
    )


def _open_mpi(env: Mapping[str, str]) -> Place | None:
    if "OMPI_COMM_WORLD_RANK" not in env:
        return None
    world = number_in(env, "OMPI_COMM_WORLD_SIZE")
    local = number_in(env, "OMPI_COMM_WORLD_LOCAL_SIZE")
    address = _address_in(env, _first_of_sagemaker(env))
    if world > local and not address:
        raise WorldError(
            f"mpirun has started {world} ranks on several nodes, and does not tell where rank 0 is",
            do="name it: mpirun -x MASTER_ADDR=<host of rank 0> ...",
        )
    job = env.get("PMIX_NAMESPACE", "") or env.get("OMPI_MCA_ess_base_jobid", "")
    return Place(
        rank=number_in(env, "OMPI_COMM_WORLD_RANK"),
        world_size=world,
        local_rank=number_in(env, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_world_size=local,
        # Ranks are numbered node after node, unless mpirun was configured otherwise.
        node=number_in(env, "OMPI_COMM_WORLD_RANK") // local if local else 0,
        nodes=-(-world // local) if local else 1,
        address=address or "127.0.0.1",
        port=number_in(env, "MASTER_PORT", _port_of(job)),
        launcher="mpirun",
    )


def _first_of_sagemaker(env: Mapping[str, str]) -> str:
    try:
        return str(env.get("SM_MASTER_ADDR") or min(json.loads(env.get("SM_HOSTS", "[]"))))
    except (ValueError, TypeError):
        return ""


def _slurm(env: Mapping[str, str]) -> Place | None:
    # The batch script itself and a shell of salloc have a job, but are no step of srun.
    if "SLURM_PROCID" not in env or "SLURM_STEP_NUM_TASKS" not in env:
        return None
    if env.get("SLURM_STEP_ID", "").startswith("batch") or "SLURM_STEP_NODELIST" not in env:
        return None
    world = number_in(env, "SLURM_STEP_NUM_TASKS")
    node = number_in(env, "SLURM_NODEID")
    counts = tasks_per_node(_text(env, "SLURM_STEP_TASKS_PER_NODE"))
    if node >= len(counts):
        raise WorldError(
            f"SLURM_NODEID is {node}, but SLURM_STEP_TASKS_PER_NODE tells of {len(counts)} nodes"
        )
    job = env.get("SLURM_JOB_ID", "") + "." + env.get("SLURM_STEP_ID", "")
    return Place(
        rank=number_in(env, "SLURM_PROCID"),
        world_size=world,
        local_rank=number_in(env, "SLURM_LOCALID"),
        local_world_size=counts[node],
        node=node,
        nodes=len(counts),
        address=_address_in(env, first_host(_text(env, "SLURM_STEP_NODELIST"))),
        port=number_in(env, "MASTER_PORT", _port_of(job)),
        launcher="srun",
    )


def _mpich(env: Mapping[str, str]) -> Place | None:
    if "PMI_RANK" not in env and "PMI_SIZE" not in env:
        return None
    world, rank = number_in(env, "PMI_SIZE"), number_in(env, "PMI_RANK")
    if world == 1:
        return None
    local = number_in(env, "MPI_LOCALNRANKS", world)
    if world > local and "MASTER_ADDR" not in env:
        raise WorldError(
            f"mpirun has started {world} ranks on several nodes, and does not tell where rank 0 is",
            do="name it: mpirun -genv MASTER_ADDR <host of rank 0> ...",
        )
    return Place(
        rank=rank,
        world_size=world,
        local_rank=number_in(env, "MPI_LOCALRANKID", rank),
        local_world_size=local,
        node=rank // local if local else 0,
        nodes=-(-world // local) if local else 1,
        address=_address_in(env, "127.0.0.1"),
        # On one node all ranks have the same parent.
        port=number_in(env, "MASTER_PORT", _port_of(str(os.getppid()) if world == local else "")),
        launcher="mpirun",
    )


def tasks_per_node(text: str) -> list[int]:
    """Parse SLURM's short form of ranks per node: "2(x3),1" is [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise WorldError(
                f"expected ranks per node such as 2(x3),1; found {text!r}",
                where="SLURM_STEP_TASKS_PER_NODE",
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(text: str) -> str:
    """Return the first host of SLURM's short form of a list: n07 for "n[07-12,20],m1"."""
    head = "".join(takewhile(lambda letter: letter not in ",[", text))
    inside = re.match(re.escape(head) + r"\[(\d+)[^\]]*\]([^,\[]*)", text)
    if inside is not None:
        return f"{head}{inside[1]}{inside[2]}"
    if not head or text[len(head) :].startswith("["):
        raise WorldError(
            f"expected a list of hosts such as n[1-4]; found {text!r}", where="SLURM_STEP_NODELIST"
        )
    return head


def _port_of(job: str) -> int:
    number = 0
    for letter in job.encode():
        number = (number * 131 + letter) % _PORTS
    return _FIRST_PORT + number


def _checked(place: Place) -> Place:
    wrong = ""
    if place.world_size < 1:
        wrong = f"a world of {place.world_size} ranks"
    elif not 0 <= place.rank < place.world_size:
        wrong = f"rank {place.rank} of {place.world_size}"
    elif not 0 <= place.local_rank < place.local_world_size <= place.world_size:
        wrong = (
            f"local rank {place.local_rank} of {place.local_world_size} on this node, in a world "
            f"of {place.world_size}"
        )
    elif not 0 <= place.node < place.nodes:
        wrong = f"node {place.node} of {place.nodes}"
    if wrong:
        raise WorldError(
            f"expected ranks and nodes counted from 0; found {wrong}",
            where=f"the variables that {place.launcher} sets",
            do="start the ranks with flatout run --devices N, torchrun, mpirun or srun",
        )
    return place


def _text(env: Mapping[str, str], name: str) -> str:
    if not env.get(name):
        raise WorldError(
            f"expected the environment variable {name} beside those of other ranks' launchers; it "
            "is not set",
            do="start the ranks with flatout run --devices N, torchrun, mpirun or srun",
        )
    return env[name]


def _address_in(env: Mapping[str, str], default: str | None = None) -> str:
    if default is not None and not env.get("MASTER_ADDR"):
        return default
    address = _text(env, "MASTER_ADDR")
    if not is_host(address):
        raise WorldError(
            f"expected a host's name or IP address in MASTER_ADDR, found {address!r:.80}",
            do="set MASTER_ADDR to the host of rank 0, and its port as MASTER_PORT",
        )
    return address


def is_host(text: str) -> bool:
    """Return True if a text can be a host's name or IP address.

    A name has at most 253 letters, and at most 63 between two dots. With one colon it has a port.
    """
    try:
        is_short = 0 < len(text.encode("idna")) <= 253
    except UnicodeError:
        return False
    return is_short and bool(re.fullmatch(r"[\w.:%-]+", text)) and text.count(":") != 1


def number_in(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    if default is not None and not env.get(name):
        return default
    text = _text(env, name)
    try:
        return int(text)
    except ValueError:
        raise WorldError(f"expected a whole number in {name}, found {text!r}") from None
