"""Each rank holds a part of every parameter, of its gradient and of the optimizer's state.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
torch's `fully_shard` does the work. It gathers the parameters of a block before its forward and its
backward, and frees them after each. Each rank gets the sum of its part of the gradients. As in
ddp.py the gradients are those of loss sums. Their divisor is summed after them, together with the
parameters that any rank has used.

The user's optimizers step the parts as ordinary tensors. They must step each element independently,
so that a part is stepped as in the whole. At the end of a fit the model has its own parameters
again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from flatout.models import own_names, sharded_like, whole
from flatout.strategies.elementwise import check_elementwise, check_laid_out
from flatout.strategies.fsdp.blocks import blocks_of
from flatout.strategies.fsdp.fully_shard import (
    AllGatherOf,
    ReduceScatterOf,
    SharedAllGather,
    SharedReduceScatter,
    add_up_unused,
    take_off,
)
from flatout.strategies.fsdp.memory import Held, expected_words, state_bytes, taken_words
from flatout.strategies.fsdp.refusals import check_gpus, check_layout
from flatout.strategies.reductions.shared import add_in_order
from flatout.strategies.replicas import check_replicas
from flatout.strategies.strategy import Strategy, Sums, Tensors
from flatout.world import Mailbox, World, mailbox_of

# Index after the sums of the first number that says whether a rank has used a parameter.
_USED = 3


class ParameterPart(NamedTuple):
    """A parameter of the model, and this rank's part of it.

    Attributes:
        own: the user's parameter, which has no memory while it is sharded.
        shard: the DTensor in its place in the model.
        part: this rank's part of the shard, which the optimizer steps.
        places: modules and names under which the model holds it.
        block: the module that gathers it.
    """

    own: nn.Parameter
    shard: Any
    part: nn.Parameter
    places: list[tuple[nn.Module, str]]
    block: nn.Module


class Fsdp(Strategy):
    """Shards a model, its gradients and its optimizers' states over the ranks.

    Args:
        model: the model of this rank, the same on all ranks. Until `begin` it stays as it is.
        run: a forward and loss of a few samples that all ranks can call, or None.
        shares: whether ranks of one node may send through shared memory.
        exact: whether gradients are summed in the order of torch's own library.

    Attributes:
        held: bytes that this rank holds; None before the first step.

    Raises:
        ModelError: a part of the model or the optimizers cannot be sharded; the message names an
            alternative.
        WorldError: the ranks' models differ.
    """

    meets_in_compute = True

    def __init__(
        self,
        world: World,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        run: Callable[[], object] | None,
        say: Callable[[str], None],
        *,
        shares: bool = True,
        exact: bool = False,
    ) -> None:
        super().__init__()
        check_gpus(world)
        self._world, self._model, self._optimizers = world, self._modules_of(model), optimizers
        self._run, self._say = run, say
        self._shares = shares
        # A sum of two numbers is the same in every order.
        self._adds_up = world.size == 2 or not exact
        self._mailbox: Mailbox | None = None
        self.across = self._sum_over_parts
        self._parts: list[ParameterPart] = []
        self._known: set[torch.Tensor] = set()
        self._seen: Tensors = ()
        self._used: set[int] = set()
        self._hooks: list[Any] = []
        self._gradient_bytes = 0
        self.held: Held | None = None
        check_layout(self._model)
        self._check_optimizers(optimizers)
        check_replicas(model, world, "at the start")

    def _modules_of(self, model: nn.Module) -> nn.Module:
        return model

    def _check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        known = set(self._model.parameters())
        for optimizer in optimizers:
            check_elementwise("world.strategy=fsdp", optimizer, known)

    # -- laying out --------------------------------------------------------------------------

    def begin(self) -> None:
        """Shard the model and the states, and print the expected memory."""
        blocks = self._blocks()
        places = _places(self._model)
        owners = self._shard([*blocks, self._model])
        device = next(iter(places)).device
        for own, where in places.items():
            module, name = where[0]
            shard = module._parameters[name]
            assert isinstance(shard, DTensor)
            part = nn.Parameter(shard.to_local().detach(), requires_grad=own.requires_grad)
            self._parts.append(ParameterPart(own, shard, part, where, owners[shard]))
        for block in {part.block: None for part in self._parts}:
            self._note_use_within(block)
        # The root's parameters stay whole after its forward, because backward begins at once.
        self._hooks.append(self._model.register_forward_hook(_forget_without_gradients))
        self._step_parts()
        for one in self._parts:
            one.own.data = torch.empty(0, dtype=one.own.dtype, device=device)
        self._known = {p for o in self._optimizers for g in o.param_groups for p in g["params"]}
        self._say(self._expected(self._reserve()))

    def _blocks(self) -> list[nn.Module]:
        run, self._run = self._run, None
        modules = dict(self._model.named_modules())
        names = {module: name for name, module in modules.items()}
        own = None if run is None else [names[b] for b in blocks_of(self._model, run)]
        each = self._world.gather(own, "parts of the model")
        block = next((block for block in each if block is not None), None)
        return blocks_of(self._model, None) if block is None else [modules[n] for n in block]

    def _shard(self, blocks: Sequence[nn.Module]) -> dict[torch.Tensor, nn.Module]:
        channel = self._world.among(range(self._world.size))
        assert channel is not None
        device = next(self._model.parameters()).device
        mesh = DeviceMesh.from_group(channel.channel, device.type)
        if self._shares and self._world.place.nodes == 1 and device.type == "cpu":
            self._mailbox = mailbox_of(channel, self._world.timeout_s)
        owners: dict[torch.Tensor, nn.Module] = {}
        names = {module: name for name, module in self._model.named_modules()}
        for block in blocks:
            fully_shard(block, mesh=mesh)
            assert isinstance(block, FSDPModule)
            # Gradients are sums; they are divided later by the weight of all losses.
            block.set_gradient_divide_factor(1.0)
            block.set_force_sum_reduction_for_comms(True)
            add_up_unused(block)
            name = own_names(self._model, [names[block]])[names[block]] or "the model"
            self._set_comms(block, f"weights of {name}", f"gradients of {name}")
            for parameter in block.parameters():
                owners.setdefault(parameter, block)
        return owners

    def _set_comms(self, block: FSDPModule, weights: str, gradients: str) -> None:
        """Set the collectives of a block: through shared memory if ranks have it, else torch's."""
        world, mailbox = self._world, self._mailbox
        if mailbox is None:
            block.set_custom_all_gather(AllGatherOf(world, weights))
        else:
            block.set_custom_all_gather(SharedAllGather(world, mailbox, weights))
        if mailbox is None or not self._adds_up:
            block.set_custom_reduce_scatter(ReduceScatterOf(world, gradients))
        else:
            block.set_custom_reduce_scatter(SharedReduceScatter(world, mailbox, gradients))

    def _reserve(self) -> int:
        """Give shared memory the size of the largest single message, and return its bytes."""
        if self._mailbox is None:
            return 0
        size, blocks = self._world.size, defaultdict[nn.Module, int](int)
        for part in self._parts:
            rows, nbytes = part.shard.shape[0], part.shard.numel() * part.shard.element_size()
            # torch pads parts to the same number of rows.
            blocks[part.block] += -(-rows // size) * (nbytes // max(1, rows))
        largest = max(blocks.values(), default=0)
        return self._mailbox.reserve(largest * size if self._adds_up else largest)

    def _note_use_within(self, block: nn.Module) -> None:
        waiting = [
            (place, part.places[0]) for place, part in enumerate(self._parts) if part.block is block
        ]

        def watch(*_: Any) -> None:
            for item in list(waiting):
                place, (module, name) = item
                gathered = module._parameters[name]
                assert gathered is not None
                if gathered.requires_grad and not isinstance(gathered, DTensor):
                    note = partial(self._note_use, place)
                    gathered.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
                    waiting.remove(item)

        self._hooks.append(block.register_forward_pre_hook(watch))

    def _note_use(self, place: int, _: torch.Tensor) -> None:
        self._used.add(place)

    def _step_parts(self) -> None:
        parts: dict[Any, ParameterPart] = {part.own: part for part in self._parts}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["params"][:] = [parts[p].part if p in parts else p for p in group["params"]]
            for own in [p for p in optimizer.state if p in parts]:
                state = optimizer.state.pop(own)
                result = parts[own]
                optimizer.state[result.part] = {k: state_part(v, result) for k, v in state.items()}

    # -- around a step -----------------------------------------------------------------------

    def before_step(self, turn: int, parameters: Tensors) -> None:
        """Begin a step, and forget the gradients of other losses.

        Raises:
            ModelError: an optimizer got parameters after sharding.
        """
        if parameters is not self._seen:
            check_laid_out("world.strategy=fsdp", parameters, self._known)
            self._seen = parameters
        self._used.clear()
        for part in self._parts:
            part.shard.grad = None

    @torch.no_grad()
    def finish(self) -> Sums:
        """Sum the losses over ranks. The gradients are summed already."""
        numbers = torch.zeros(
            _USED + len(self._parts), dtype=torch.float64, device=self._parts[0].part.device
        )
        for place, number in enumerate(self._own):
            numbers[place] = number
        used = [float(place in self._used) for place in range(len(self._parts))]
        numbers[_USED:] = torch.tensor(used, dtype=numbers.dtype)
        self._sum(numbers, "sum of the losses")
        # A parameter that this rank has used is used. Other ranks' uses are read only if one is
        # missing.
        if not all(used):
            used = numbers[_USED:].tolist()
        for item, is_used in zip(self._parts, used, strict=True):
            gradient, item.shard.grad = item.shard.grad, None
            # If no rank has a gradient, remove the zeros with which torch filled it.
            item.part.grad = gradient.to_local() if gradient is not None and is_used else None
        if self.held is None:
            grads = (part.part.nbytes for part in self._parts if part.part.grad is not None)
            self._gradient_bytes = sum(grads)
        total, weight, votes = numbers[:_USED]
        return Sums(total, weight, votes)

    def _sum_over_parts(self, numbers: torch.Tensor) -> None:
        self._sum(numbers, "size of the gradients, and whether they are finite")

    def _sum(self, numbers: torch.Tensor, what: str) -> None:
        world = self._world
        if self._mailbox is None or not self._adds_up:
            later = world.sum(numbers, what, later=True)
            assert later is not None
            world.until_done(later)
            return
        with world.within(world.begun(None, what)):
            each = self._mailbox.gather(numbers)
        add_in_order(each, numbers)

    def after_step(self) -> bool:
        """Note that weights have changed; after the first step, print the memory that is used."""
        if self.held is None:
            self.held = self._measured()
            shared = 0 if self._mailbox is None else self._mailbox.nbytes
            self._say(taken_words(self.held, self._world.rank, shared))
        return False

    # -- whole again -------------------------------------------------------------------------

    def weights(self, model: nn.Module, *, kept: bool) -> dict[str, torch.Tensor]:
        """Return all tensors that are saved of the model, whole. All ranks call this."""
        state = model.state_dict()
        own = own_names(model, state)
        result: dict[int, torch.Tensor] = {}  # a parameter with two names is one tensor
        for value in state.values():
            if id(value) not in result:
                result[id(value)] = self._gathered(value, kept=kept)
        return {own[name]: result[id(value)] for name, value in state.items()}

    def state_of(self, optimizer: torch.optim.Optimizer, *, kept: bool) -> dict[str, Any]:
        """Return an optimizer's whole state. All ranks call this."""
        state, owners = optimizer.state_dict(), self._owners(optimizer)
        return {
            **state,
            "state": {
                number: {
                    name: self._gathered(as_shard(value, owners.get(number)), kept=kept)
                    for name, value in values.items()
                }
                for number, values in state["state"].items()
            },
        }

    def part_of(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return the part of an optimizer's whole state that this rank loads."""
        owners = self._owners(optimizer)
        return {
            **state,
            "state": {
                number: {k: state_part(v, owners.get(number)) for k, v in values.items()}
                for number, values in state["state"].items()
            },
        }

    def _owners(self, optimizer: torch.optim.Optimizer) -> dict[int, ParameterPart]:
        parts = {part.part: part for part in self._parts}
        order = [p for group in optimizer.param_groups for p in group["params"]]
        return {number: parts[p] for number, p in enumerate(order) if p in parts}

    def _gathered(self, value: Any, *, kept: bool) -> Any:
        if not isinstance(value, DTensor):
            return value
        with self._world.within(self._world.begun(None, "weights put together")):
            result = whole(value)
        return result if kept else torch.empty(0, dtype=result.dtype)

    def close(self, error: BaseException | None = None) -> None:
        """Restore the model's own parameters, whole. The optimizers keep this rank's states.

        After an error other ranks may be gone, so that nothing can be gathered: the model then
        stays sharded.
        """
        if not self._parts or error is not None:
            return
        for hook in self._hooks:
            hook.remove()
        for one in self._parts:
            one.own.data = self._gathered(one.shard, kept=True)
            one.own.requires_grad_(one.shard.requires_grad)
        for block in {part.block for part in self._parts} | {self._model}:
            take_off(block)
        for one in self._parts:
            for module, name in one.places:
                module._parameters[name] = one.own
        owns: dict[Any, nn.Parameter] = {part.part: part.own for part in self._parts}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["params"][:] = [owns.get(p, p) for p in group["params"]]
            for part in [p for p in optimizer.state if p in owns]:
                optimizer.state[owns[part]] = optimizer.state.pop(part)
        self._parts.clear()
        if self._mailbox is not None:
            self._mailbox.close()
        self.meets_in_compute = False

    # -- memory ------------------------------------------------------------------------------

    def _expected(self, shared: int) -> str:
        trained = {p for o in self._optimizers for g in o.param_groups for p in g["params"]}
        blocks: dict[nn.Module, int] = {self._model: 0}
        for part in self._parts:
            size = part.shard.numel() * part.shard.element_size()
            blocks[part.block] = blocks.get(part.block, 0) + size
        return expected_words(
            self._world.size,
            parameters=sum(part.part.nbytes for part in self._parts),
            gradients=sum(p.nbytes for p in trained if p.requires_grad),
            states=[self._expected_in(optimizer) for optimizer in self._optimizers],
            root=blocks.pop(self._model),
            blocks=list(blocks.values()),
            shared=shared,
        )

    def _measured(self) -> Held:
        return Held(
            sum(part.part.nbytes for part in self._parts),
            self._gradient_bytes,
            sum(value.nbytes for o in self._optimizers for value in self._states_in(o)),
        )

    def _states_in(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        states = [value for state in optimizer.state.values() for value in state.values()]
        return [value for value in states if torch.is_tensor(value)]

    def _expected_in(self, optimizer: torch.optim.Optimizer) -> int | None:
        return state_bytes(optimizer)


def _places(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    result: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                result.setdefault(parameter, []).append((module, name))
    return result


def state_part(value: Any, one: ParameterPart | None) -> Any:
    """Return this rank's part of a parameter's state; a value of another shape stays as it is."""
    if one is None or not torch.is_tensor(value) or not value.dim():
        return value
    if value.shape != one.shard.shape:
        return value
    # A copy, because a view would keep the whole tensor in memory.
    return sharded_like(value, one.shard).to_local().clone()  # type: ignore[attr-defined]


def as_shard(value: Any, one: ParameterPart | None) -> Any:
    """Return a tensor of a parameter's state as a shard of the whole, or other values unchanged."""
    if one is None or not torch.is_tensor(value) or not value.dim():
        return value
    if value.shape != one.part.shape:
        return value
    return DTensor.from_local(
        value,
        one.shard.device_mesh,
        one.shard.placements,
        run_check=False,
        shape=one.shard.shape,
        stride=one.shard.stride(),
    )


def _forget_without_gradients(model: nn.Module, *_: Any) -> None:
    if not torch.is_grad_enabled():
        model.reshard()  # type: ignore[operator]
