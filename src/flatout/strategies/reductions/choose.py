"""Selection of the reduction that a Recipe asks for."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flatout.errors import WorldError
from flatout.recipe import World as Asked
from flatout.strategies.reductions.collectives import AllReduce, Hierarchical, Ring, ToOne
from flatout.strategies.reductions.halves import Halves
from flatout.strategies.reductions.power_sgd import PowerSgd
from flatout.strategies.reductions.reduction import Reduction
from flatout.strategies.reductions.shared import Shared
from flatout.world import Group, World, barrier_of


def check_reduction(asked: Asked, world: World, say: Callable[[str], None]) -> None:
    """Warn before training of choices that make no sense.

    Raises:
        WorldError: a compression that does not work with the reduction or the strategy.
    """
    if asked.compression != "off" and asked.reduction in ("shared", "ring", "to_one"):
        raise WorldError(
            f"compression={asked.compression} adds up in its own way, so "
            f"reduction={asked.reduction} cannot be had with it",
            do="leave world.reduction=auto, or take hierarchical, which compresses between nodes; "
            "or set world.compression=off",
        )
    if asked.compression == "powersgd" and asked.strategy == "local_sgd":
        raise WorldError(
            "compression=powersgd makes up for its errors in the next step's gradients, and "
            "strategy=local_sgd sends none",
            do="take world.compression=bf16, or average more rarely: world.sync_every",
        )
    if world.shares_gpus and (asked.reduction == "ring" or asked.compression in ("fp16", "bf16")):
        raise WorldError(
            f"reduction={asked.reduction} with compression={asked.compression} sends from rank to "
            "rank, and these share a GPU, where NCCL refuses that and gloo cannot",
            do="give each rank its own GPU, or leave out both settings",
        )
    if world.size == 1:
        if asked.compression != "off" or asked.reduction not in ("auto", "all_reduce"):
            say("one rank has no gradients to add up: reduction and compression change nothing")
        if asked.strategy != "ddp":
            say(f"there is one rank: strategy={asked.strategy} changes nothing")
    elif asked.reduction == "shared" and world.place.nodes > 1:
        say(
            "there are several nodes, which share no memory: reduction=shared does what all_reduce "
            "does; hierarchical adds up within each node first"
        )
    elif asked.reduction == "hierarchical" and world.place.nodes == 1:
        say("there is one node, so reduction=hierarchical does what all_reduce does")


def reduction_of(
    asked: Asked, world: World, device: torch.device, *, exact: bool = False
) -> Reduction:
    """Return the reduction that the Recipe asks for. All ranks call this at the same time.

    Args:
        exact: for `auto`, sum in the library's own order.
    """
    whole = world.among(range(world.size))
    assert whole is not None
    # A sum of two numbers is the same in every order.
    wanted = asked.reduction == "shared" or (
        asked.reduction == "auto" and asked.compression == "off" and (world.size == 2 or not exact)
    )
    if wanted and world.place.nodes == 1 and device.type == "cpu":
        barrier = barrier_of(whole, world.timeout_s)
        if barrier is not None:
            return Shared(whole, barrier)
    if asked.reduction == "ring":
        return Ring(whole)
    if asked.reduction == "to_one":
        return ToOne(whole)
    if asked.reduction == "hierarchical" and world.place.nodes > 1:
        result = world.gather(world.place.node)
        nodes = [[r for r, n in enumerate(result) if n == node] for node in dict.fromkeys(result)]
        node = world.among(*nodes)
        firsts = world.among([ranks[0] for ranks in nodes])
        assert node is not None
        between = _among(asked, firsts) if firsts is not None else None
        return Hierarchical(node, between, carries=asked.compression == "powersgd")
    return _among(asked, whole)


def reduction_among(group: Group, world: World) -> Reduction:
    """Return a reduction among some ranks: in shared memory if they have it, else the library's.

    All ranks call this at the same time, each for its own group.
    """
    barrier = barrier_of(group, world.timeout_s) if world.place.nodes == 1 else None
    return AllReduce(group) if barrier is None else Shared(group, barrier)


def _among(asked: Asked, group: Group) -> Reduction:
    match asked.compression:
        case "fp16":
            return Halves(group, torch.float16)
        case "bf16":
            return Halves(group, torch.bfloat16)
        case "powersgd":
            return PowerSgd(group, asked.powersgd_rank)
    return AllReduce(group)
