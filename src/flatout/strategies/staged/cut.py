"""Cuts of a model into stages, so that the slowest stage takes least time to compute and send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from time import perf_counter_ns as clock
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from flatout.errors import ModelError
from flatout.strategies.staged.chain import Chain

# Runs of each call, of which the fastest counts: the first one allocates memory.
_TIMES = 5
# A call gets no message up to this multiple of a stage's share of the time.
_TOO_LARGE = 1.5


class LayerTimes(NamedTuple):
    """Times and bytes of a forward and backward of a micro-batch.

    Attributes:
        spent: nanoseconds of each call.
        sizes: bytes of each value; None if the value is no tensor.
        torn: cuts that would separate a value from a call that writes into it.
    """

    spent: list[int]
    sizes: Mapping[fx.Node, int | None]
    torn: set[int]


class Cut(NamedTuple):
    """The places where a model is cut.

    Attributes:
        places: the indices of the calls after each cut.
        shares: for each stage, its share of the whole time.
        too_large: the call that takes far more time than a stage should, and its share; or None.
    """

    places: list[int]
    shares: list[float]
    too_large: tuple[int, float] | None = None


def measure(chain: Chain, inputs: Sequence[torch.Tensor]) -> LayerTimes:
    """Time each call of a forward, with its backward. Gradients of weights are discarded."""
    timed = _Timed(chain)
    timed.run(*inputs)
    return LayerTimes([timed.spent[call] for call in chain.calls], timed.sizes, timed.torn)


class _Timed(fx.Interpreter):
    """Runs calls one by one, each several times on copies of its inputs."""

    def __init__(self, chain: Chain) -> None:
        super().__init__(chain.model, graph=chain.graph)
        self._chain = chain
        self.spent: dict[fx.Node, int] = {}
        self.sizes: dict[fx.Node, int | None] = {}
        self.torn: set[int] = set()

    def run_node(self, n: fx.Node) -> Any:
        if not n.op.startswith("call"):
            result = super().run_node(n)
        else:
            result, best = None, None
            for _ in range(_TIMES):
                result, took, copies = self._once(n)
                best = took if best is None else min(best, took)
            assert best is not None
            self.spent[n] = best
            for value in n.all_input_nodes:  # later calls read the values that this one has written
                copy = copies.get(id(self.env[value]))
                if copy is not None and copy._version:
                    self.torn.update(self._chain.between(value, n))
                    self.env[value] = _leaf(copy)
            result = tree_map(_leaf, result)
        self.sizes[n] = result.nbytes if isinstance(result, torch.Tensor) else None
        return result

    def _once(self, n: fx.Node) -> tuple[Any, int, dict[int, torch.Tensor]]:
        leaves: dict[int, torch.Tensor] = {}
        copies: dict[int, torch.Tensor] = {}

        def fresh(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) not in copies:
                leaves[id(value)] = _leaf(value)
                copies[id(value)] = leaves[id(value)].clone()  # a call may write into its inputs
            return copies[id(value)]

        args, kwargs = tree_map(fresh, self.fetch_args_kwargs_from_env(n))
        module = self.module.get_submodule(str(n.target)) if n.op == "call_module" else None
        weights = [] if module is None else list(module.parameters())
        wanted = [t for t in (*leaves.values(), *weights) if t.requires_grad]
        start = clock()
        result = getattr(self, n.op)(n.target, args, kwargs)
        given = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.grad_fn]
        if given and wanted:
            ones = [torch.ones_like(t) for t in given]
            torch.autograd.grad(given, wanted, ones, allow_unused=True)
        return result, clock() - start, copies


def _leaf(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def cut(chain: Chain, measured: LayerTimes, stages: int, ns_per_byte: float) -> Cut:
    """Return the cut whose slowest stage takes least time, including sending and receiving."""
    calls = len(chain.calls)
    sent = {
        place: [measured.sizes.get(value) for value in chain.crossing(place)]
        for place in range(1, calls)
        if place not in measured.torn
    }
    crossing = {p: sum(s for s in sizes if s) for p, sizes in sent.items() if None not in sizes}
    untied = _untied(chain, crossing, stages)
    until = [0]
    for spent in measured.spent:
        until.append(until[-1] + spent)
    # For each value, its gradient is sent back.
    ways = {place: 2 * size * ns_per_byte for place, size in untied.items()}
    places = _best(until, ways, stages)
    ends = [0, *places, calls]
    total = max(1, until[-1])
    shares = [(until[b] - until[a]) / total for a, b in pairwise(ends)]
    return Cut(places, shares, _too_large([spent / total for spent in measured.spent], stages))


def _too_large(shares: Sequence[float], stages: int) -> tuple[int, float] | None:
    largest = max(range(len(shares)), key=shares.__getitem__)
    is_so = shares[largest] * stages > _TOO_LARGE
    return (largest, shares[largest]) if is_so else None


def _untied(chain: Chain, crossing: Mapping[int, int], stages: int) -> dict[int, int]:
    spans = list(chain.spans())
    result = {
        place: size
        for place, size in crossing.items()
        if not any(first < place <= last for _, first, last in spans)
    }
    if len(result) >= stages - 1:
        return result
    shared = [name for name, first, last in spans if first < last]
    if shared and len(crossing) >= stages - 1:
        raise ModelError(
            f"{shared[0]} is read in several places, and one rank has a weight: that leaves "
            f"{len(result)} places to cut the model, and {stages} ranks need {stages - 1}",
            do="give each place its own weight, take fewer ranks, or train with "
            "world.strategy=ddp or fsdp",
        )
    raise ModelError(
        f"the model can be cut in {len(result)} places, and {stages} ranks need {stages - 1}: a "
        "layer that is called as a whole is in one stage",
        do="take fewer ranks, write larger layers as several, or train with world.strategy=ddp or "
        "fsdp",
    )


def _best(until: Sequence[int], ways: Mapping[int, float], stages: int) -> list[int]:
    calls = len(until) - 1
    places = [0, *sorted(ways), calls]

    def cost(a: int, b: int) -> float:
        return until[b] - until[a] + ways.get(a, 0.0) + ways.get(b, 0.0)

    # For each place: the smallest possible cost of the slowest stage, if `stage` stages end there,
    # and the places where these stages begin.
    least: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for stage in range(1, stages + 1):
        ends = [calls] if stage == stages else places[stage:-1]
        following: dict[int, tuple[float, list[int]]] = {}
        for end in ends:
            tried = [
                (max(worst, cost(begin, end)), [*before, begin])
                for begin, (worst, before) in least.items()
                if begin < end
            ]
            if tried:
                following[end] = min(tried, key=lambda value: value[0])
        least = following
    return least[calls][1][1:]
