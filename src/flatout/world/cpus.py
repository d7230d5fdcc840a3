"""The CPUs of one rank among those of its node."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.devices import given_affinity, set_affinity, set_threads
from flatout.recipe import Process
from flatout.world.world import World


def own_cpus(cpus: Sequence[int], rank: int, ranks: int) -> list[int]:
    """Return a rank's part of some CPUs: disjoint, of about equal size; of too few, one CPU each.

    Args:
        cpus: the CPUs of the node, in order, so that neighbors share caches.
    """
    if ranks > len(cpus):
        return [cpus[rank % len(cpus)]]
    return list(cpus[len(cpus) * rank // ranks : len(cpus) * (rank + 1) // ranks])


def share_cpus(world: World, process: Process) -> None:
    """Bind this rank to its part of the node's CPUs, with equally many threads, by default.

    Ranks that their launcher has bound to CPUs of their own keep them.
    """
    here = world.place
    # All ranks must decide the same, and nodes may have different numbers of ranks.
    if world.size == here.nodes or process.affinity != "per_rank":
        return
    mine = sorted(given_affinity())
    beside = [cpus for node, cpus in world.gather((here.node, mine)) if node == here.node]
    if all(cpus == mine for cpus in beside):
        mine = own_cpus(mine, here.local_rank, here.local_world_size)
        set_affinity(mine)
    if process.threads == "auto":
        set_threads(len(mine))
