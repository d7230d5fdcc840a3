"""The number of this node and the count of nodes, from the command or a cluster's variables.

Kubeflow's trainer sets PET_NNODES and similar variables. SageMaker's toolkits set SM_HOSTS; in
containers without them, SageMaker's agent has written the same to a file. srun or mpirun may have
started one process on each of several nodes. If the command then has a number of ranks per node,
their variables give the nodes; otherwise each such process is a rank itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flatout.errors import RecipeError, WorldError
from flatout.words import counted
from flatout.world.place import is_host, launched, number_in

SERVED = "parameter_server"
"""The strategy that uses servers."""

_PORT = 29500
# https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html
_RESOURCES = Path("/opt/ml/input/config/resourceconfig.json")


@dataclass(frozen=True)
class Nodes:
    """The nodes on which the ranks of a job are started.

    Attributes:
        count: number of nodes.
        rank: number of this node, from 0.
        rendezvous: "host:port" where the nodes meet, on the first node; "" on one node alone.
        ranks: number of ranks on each node; None if not given.
        is_open: whether the first node measures the number of ranks and sends it.
        origin: the source of these values, in words.
        servers: number of servers that compute nothing: on the ranks' node, or one on each of the
            last nodes.
    """

    count: int = 1
    rank: int = 0
    rendezvous: str = ""
    ranks: int | None = None
    origin: str = ""
    is_open: bool = False
    servers: int = 0

    @property
    def is_world(self) -> bool:
        """True if there are several ranks."""
        return self.count > 1 or (self.ranks or 1) > 1

    @property
    def computing(self) -> int:
        """Number of nodes whose ranks compute."""
        return self.count - self.servers if self.count > 1 else 1

    @property
    def here(self) -> int:
        """Number of processes that this node starts."""
        if self.rank >= self.computing:
            return 1
        return (self.ranks or 1) + (self.servers if self.count == 1 else 0)

    def __str__(self) -> str:
        if self.rank >= self.computing:
            return f"a server alone on this node, node {self.rank} of {self.count}"
        ranks = f"{self.ranks or 1} ranks on this node"
        if self.servers and self.count == 1:
            ranks += f", and {counted(self.servers, 'server')}"
        return f"{ranks}, node {self.rank} of {self.count}" if self.count > 1 else ranks


def asked_for(
    ranks: int | None,
    count: int | None,
    rank: int | None,
    rendezvous: str | None,
    servers: int = 0,
) -> Nodes:
    """Return the nodes that a command asks for, completed by a cluster's variables.

    Raises:
        WorldError: the numbers make no sense, or there are fewer devices than ranks.
    """
    found = nodes()
    if (ranks is not None or servers) and count is None and found.count == 1:
        found = launched_nodes() or found
    found = Nodes(
        count=found.count if count is None else count,
        rank=found.rank if rank is None else rank,
        rendezvous=found.rendezvous if rendezvous is None else rendezvous,
        ranks=found.ranks if ranks is None else ranks,
        origin=found.origin or "--nodes, --node-rank",
        servers=servers,
    )
    if found.count > 1 and rank is None and count is not None:
        raise WorldError(
            f"--nodes {count}, but not which of them this is", do="pass --node-rank, from 0"
        )
    checked(found)
    if found.rank < found.computing:
        check_devices(found.ranks or 1)
    return found


def check_devices(ranks: int, device: str | None = None) -> None:
    """Refuse more ranks than devices: ranks that share a device are slower than fewer ranks.

    Args:
        device: the requested world.device; None for that of `flatout run`. For the CPU, or one GPU
            by number that ranks share, CPUs count.

    Raises:
        WorldError: there are fewer GPUs or, without GPUs, fewer CPUs.
    """
    if ranks == 1:
        return
    have, kind = devices_here(device)
    if ranks <= have:
        return
    gpus, otherwise = kind == "GPU", ""
    if gpus:
        otherwise = (
            ", or --set world.device=cpu to train on its CPUs; world.device=cuda:0 lets ranks "
            "share a GPU, which is slower"
        )
    raise WorldError(
        f"{ranks} ranks were asked for, but this node has {counted(have, kind)}"
        + ("" if gpus or has_gpus() else " and no GPU"),
        do=f"pass --devices {have} or less{otherwise}",
    )


def devices_here(device: str | None = None) -> tuple[int, str]:
    """Return the number of ranks with a device each on this node, and its kind: "GPU" or "CPU"."""
    from flatout.measure import usable_cpus

    if (device_asked() if device is None else device) in ("auto", "cuda") and has_gpus():
        from flatout.devices import inventory

        return len(inventory().cuda), "GPU"
    return usable_cpus(), "CPU"


def has_gpus() -> bool:
    from flatout.devices import inventory

    return bool(inventory().cuda)


def device_asked() -> str:
    """Return the world.device that was passed to `flatout run`, or "auto"."""
    if not (os.environ.get("FLATOUT_RECIPE") or os.environ.get("FLATOUT_SET")):
        return "auto"
    from flatout.recipe import effective

    return effective().world.device


def nodes(environ: Mapping[str, str] | None = None, resources: Path = _RESOURCES) -> Nodes:
    """Return the nodes that a cluster has set, or this node alone if it has set none.

    A process that torchrun or mpirun has started in its container is already a rank.
    """
    env = os.environ if environ is None else environ
    if "LOCAL_RANK" in env or "OMPI_COMM_WORLD_RANK" in env:
        return Nodes()
    if "PET_NNODES" in env:
        return checked(_kubeflow(env))
    if "SM_HOSTS" in env:
        return checked(_sagemaker(env))
    if "TRAINING_JOB_NAME" in env and resources.is_file():
        return checked(_sagemaker(_resources(resources)))
    return Nodes()


def launched_nodes(environ: Mapping[str, str] | None = None) -> Nodes | None:
    """Return the nodes on each of which srun or mpirun has started one process, or None."""
    place = launched(environ)
    if place.nodes == 1 or place.nodes != place.world_size:
        return None
    return checked(
        Nodes(
            count=place.nodes,
            rank=place.node,
            rendezvous=f"{place.address}:{place.port}",
            origin=f"the variables of {place.launcher}",
        )
    )


def _kubeflow(env: Mapping[str, str]) -> Nodes:
    count = number_in(env, "PET_NNODES", 1)
    each = env.get("PET_NPROC_PER_NODE", "")
    address = env.get("PET_MASTER_ADDR", "")
    if count > 1 and not address:
        raise WorldError(f"PET_NNODES is {count}, but PET_MASTER_ADDR is not set")
    port = number_in(env, "PET_MASTER_PORT", _PORT)
    return Nodes(
        count=count,
        rank=number_in(env, "PET_NODE_RANK", 0),
        rendezvous=f"{address}:{port}" if count > 1 else "",
        ranks=int(each) if each.isdecimal() else None,
        origin="PET_NNODES",
    )


def _sagemaker(env: Mapping[str, str]) -> Nodes:
    try:
        hosts = sorted(json.loads(env["SM_HOSTS"]))
    except (ValueError, TypeError):
        raise WorldError(
            f"expected a JSON list of hosts, found {env['SM_HOSTS']!r}", where="SM_HOSTS"
        ) from None
    own = env.get("SM_CURRENT_HOST", "")
    if own not in hosts:
        raise WorldError(f"SM_CURRENT_HOST is {own!r}, which is none of SM_HOSTS: {hosts}")
    gpus, port = number_in(env, "SM_NUM_GPUS", 0), number_in(env, "SM_MASTER_PORT", _PORT)
    return Nodes(
        count=len(hosts),
        rank=hosts.index(own),
        rendezvous=f"{hosts[0]}:{port}" if len(hosts) > 1 else "",
        ranks=gpus or None,
        origin="SM_HOSTS",
    )


def _resources(file: Path) -> dict[str, str]:
    try:
        resources = json.loads(file.read_text())
        hosts, own = resources["hosts"], resources["current_host"]
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise WorldError(
            f"expected the hosts of a SageMaker job, with hosts and current_host; found {error!r}",
            where=str(file),
        ) from None
    return {"SM_HOSTS": json.dumps(hosts), "SM_CURRENT_HOST": str(own)}


def is_port(text: str) -> bool:
    """Return whether a text is a port: a whole number from 1 to 65535, in ASCII digits."""
    return text.isascii() and text.isdecimal() and 0 < int(text) < 65536


def checked(found: Nodes) -> Nodes:
    if found.count < 1 or not 0 <= found.rank < found.count:
        raise WorldError(
            f"expected a node from 0 to {max(0, found.count - 1)}, found node {found.rank} of "
            f"{found.count}",
            where=found.origin,
        )
    host, colon, port = found.rendezvous.rpartition(":")
    if found.count > 1 and not (is_host(host) and colon and is_port(port)):
        raise WorldError(
            f"expected the first node's host and a port, such as host1:29500, for {found.count} "
            f"nodes to meet; found {found.rendezvous!r}",
            do="pass --rendezvous host1:29500, the same on every node",
        )
    if found.servers:
        check_servers(found)
    return found


def check_servers(found: Nodes) -> None:
    """Refuse servers that leave too few ranks."""
    servers, ranks = found.servers, found.computing * (found.ranks or 1)
    if found.computing < 1:
        raise WorldError(
            f"--servers {servers} is a node for each server, and of {counted(found.count, 'node')} "
            "one at least must compute",
            do=f"take {found.count - 1} at most, or more nodes; with --set world.servers={servers} "
            "ranks that compute are servers as well",
        )
    if ranks == 1:
        raise WorldError(
            f"--servers {servers} leaves one rank that computes, and servers step for several",
            do="pass --devices 2 or more, take more nodes, or leave --servers out",
        )
    if servers > ranks:
        raise WorldError(
            f"--servers {servers} for {ranks} ranks that compute: more servers than ranks",
            do=f"take {ranks} at most",
        )


def check_servers_set(servers: int, settings: Sequence[str]) -> None:
    """Refuse `--servers` with settings that contradict it, before anything starts.

    If the settings name no strategy, the script may.

    Raises:
        RecipeError: a setting contradicts `--servers`, or is not valid.
    """
    from flatout.recipe import Recipe, apply

    named = apply(Recipe(), settings).named()
    strategy = named.get("world.strategy", SERVED)
    count = named.get("world.servers", servers)
    if count != servers:
        raise RecipeError(
            f"--servers {servers} and --set world.servers={count} say unlike numbers",
            do="leave one of them out",
        )
    if strategy != SERVED:
        raise RecipeError(
            f"--servers {servers} expects world.strategy={SERVED}; found --set "
            f"world.strategy={strategy}, which has no servers",
            do=f"pass --set world.strategy={SERVED}, or leave --servers out",
        )
