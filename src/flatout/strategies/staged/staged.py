"""Pipeline parallelism: each rank has some layers of the model, and passes micro-batches on.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019;
Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019 (1F1B).
torch.distributed.pipelining does the work. Every rank gets each batch whole. The first rank's stage
takes the inputs. The last rank has the outputs and computes the loss, as a sum that is divided by
the weight of the whole batch. So the result is that of one rank, to rounding. If there are more
ranks than stages, the model is on them in several copies, each of which takes its share of every
batch. The gradients of a stage are summed over its copies.

    chain.py    the forward as a sequence of calls;  cut.py: the places of cuts
    shapes.py   values that cross;  pipe.py: torch's stages and schedules
    copies.py   the ranks of each stage and copy

A rank keeps the weights of its own stage. Other weights have no memory on it until the fit ends.
The optimizers step the rank's weights, each parameter as a whole.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count, pairwise
from time import perf_counter_ns as clock
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from flatout.data import Batch
from flatout.errors import ModelError
from flatout.models import is_batch_coupled
from flatout.strategies.elementwise import check_laid_out
from flatout.strategies.replicas import check_replicas
from flatout.strategies.staged.chain import Chain, Stage
from flatout.strategies.staged.copies import Copies, micro_batches
from flatout.strategies.staged.cut import Cut, cut, measure
from flatout.strategies.staged.pipe import Clock, OwnStage, ScheduleRun, Within
from flatout.strategies.staged.refusals import check_stage_count, check_stages, too_few_samples
from flatout.strategies.staged.shapes import Shape, shape_of, shapes, unlike_form
from flatout.strategies.strategy import Strategy, Sums, Tensors
from flatout.world import World

# _PROBE: values of a message that is sent to measure the time of a byte. _PROBES: number of these
# messages.
_PROBE, _PROBES = 1 << 18, 3
# Maximum number of forms of batches whose schedules are kept.
_READY = 16

Compute = Callable[[Batch], Any]


class StagedOptions(NamedTuple):
    """The settings of the strategy."""

    stages: int
    schedule: str
    per_micro_batch: bool


class _Taken(BaseException):
    """The arguments with which a compute function calls the model."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self.args, self.kwargs = args, kwargs


class Staged(Strategy):
    """Distributes the layers of a model over the ranks."""

    meets_in_compute = takes_whole_batches = True

    def __init__(
        self,
        world: World,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        first: tuple[Compute, Batch],
        asked: StagedOptions,
        say: Callable[[str], None],
        within: Within = nullcontext,
    ) -> None:
        super().__init__()
        check_stage_count(asked.stages, world.size)
        check_stages(model, optimizers, per_micro_batch=asked.per_micro_batch)
        check_replicas(model, world, "at the start")
        self._world, self._model, self._optimizers = world, model, optimizers
        self._asked, self._say, self._within = asked, say, within
        self._chain = Chain(model)
        # Statistics over a micro-batch need at least two samples.
        self._least = 2 if asked.per_micro_batch and is_batch_coupled(model) else 1
        self._copies = Copies(world, asked.stages or world.size)
        self._turn = 1
        self._clock = Clock(world)
        compute, batch = first
        self._first, self._size = self._inputs(compute, batch), batch.size
        self.across = self._sum_over_stages
        self.shares: list[float] = []
        self._stages: list[fx.GraphModule] = []
        # The stage of each weight, by name, and of parameters by the user's own object. In the
        # first copy it is also the rank's number.
        self._owners: dict[str, int] = {}
        self._owner_of: dict[torch.Tensor, int] = {}
        # The user's parameters whose memory is on another rank.
        self._elsewhere: dict[str, nn.Parameter] = {}
        # All parameters of each optimizer, by group.
        self._orders: list[list[list[nn.Parameter]]] = []
        self._seen: Tensors = ()
        self._runs: dict[Any, tuple[ScheduleRun, list[Shape]]] = {}
        # The model's output for the loss of a micro-batch, while the loss is computed.
        self._output: list[Any] | None = None

    # -- distributing the layers -------------------------------------------------------------------

    def begin(self) -> None:
        """Cut the model at the places that measure best, and leave each rank its stage."""
        rate = self._rate()
        places, self.shares, too_large = self._world.by_first(
            partial(self._find_cut, rate), "cut of the model into stages"
        )
        self._first = []
        spans: list[Stage] = list(pairwise([0, *places, len(self._chain.calls)]))
        self._find_owners(spans)
        self._move_states()
        self._keep_own()
        graphs = [self._chain.stage(span) for span in spans]
        self._stages = [fx.GraphModule(self._model, graph) for graph in graphs]
        self._model.forward = MethodType(self._forward, self._model)
        self.layout = self._words(spans)
        if too_large is not None:
            self._warn_of_one_layer(*too_large)

    def _warn_of_one_layer(self, call: int, share: float) -> None:
        self._say(
            f"layer {self._chain.words((call, call + 1))} takes {share:.0%} of the time and is in "
            f"one stage, so a step in {self._copies.stages} stages takes at least that: write it "
            "as several layers, take fewer stages, or train with world.strategy=ddp or fsdp"
        )

    def _words(self, spans: Sequence[Stage]) -> str:
        count, idle = self._count(self._own_size), self._copies.stages - 1
        names = " | ".join(map(self._chain.words, spans))
        shares = " | ".join(f"{share:.0%}" for share in self.shares)
        bubble = idle / (count + idle)
        return (
            f"staged{self._copies.words}: {names} ({shares} of the time), "
            f"{count} micro-batches, bubble {bubble:.0%}"
        )

    @property
    def _own_size(self) -> int:
        return -(-self._size // self._copies.count)

    def _rate(self) -> float:
        probe, best = torch.zeros(_PROBE), float("inf")
        for _ in range(_PROBES):
            start = clock()
            self._world.gather_tensors(probe, "how fast ranks send", by_message=True)
            best = min(best, clock() - start)
        return best / (self._world.size - 1) / probe.nbytes

    def _find_cut(self, ns_per_byte: float) -> tuple[Any, ...]:
        chain = self._chain
        rows = -(-self._own_size // self._count(self._own_size))
        piece = [t[:rows] for t in self._first]
        buffers = {name: value.clone() for name, value in self._model.named_buffers()}
        with torch.random.fork_rng(devices=[]):
            with self._within():
                result = cut(chain, measure(chain, piece), self._copies.stages, ns_per_byte)
            with torch.no_grad():
                self._check_same(result, piece, buffers)
                self._put_back(buffers)
        return tuple(result)

    def _put_back(self, buffers: Mapping[str, torch.Tensor]) -> None:
        for name, value in self._model.named_buffers():
            value.copy_(buffers[name])

    def _check_same(
        self, cut: Cut, piece: list[torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> None:
        chain, outputs = self._chain, []
        for staged in (False, True):
            self._put_back(buffers)
            torch.manual_seed(0)
            if not staged:
                outputs.append(self._model(*piece))
                continue
            values = tuple(piece)
            for span in pairwise([0, *cut.places, len(chain.calls)]):
                values = fx.GraphModule(self._model, chain.stage(span))(*values)
                values = tuple(value.clone() for value in values)
            outputs.append(chain.put_together(values))
        try:
            torch.testing.assert_close(*outputs, rtol=0, atol=0, equal_nan=True)
        except AssertionError as error:
            raise ModelError(
                "the stages of the model do not give what the model gives: "
                f"{str(error).splitlines()[0]}",
                do="write the forward without views that are written into later, or train with "
                "world.strategy=ddp or fsdp",
            ) from error

    def _find_owners(self, spans: Sequence[Stage]) -> None:
        readers = {
            id(tensor): stage
            for stage, span in enumerate(spans)
            for call in self._chain.calls[slice(*span)]
            for _, tensor in self._chain.weights_read(call)
        }
        named = (
            *self._model.named_parameters(remove_duplicate=False),
            *self._model.named_buffers(remove_duplicate=False),
        )
        self._owners = {name: readers.get(id(tensor), 0) for name, tensor in named}
        self._owner_of = {p: self._owners[name] for name, p in self._model.named_parameters()}
        self._orders = [[list(g["params"]) for g in o.param_groups] for o in self._optimizers]

    def _move_states(self) -> None:
        for optimizer, order in zip(self._optimizers, self._orders, strict=True):
            parameters = [p for group in order for p in group]
            have = self._world.gather(
                [bool(optimizer.state.get(p)) for p in parameters], "states of the optimizer"
            )
            for number, parameter in enumerate(parameters):
                owner = self._owner_of[parameter]
                holders = [rank for rank, known in enumerate(have) if known[number]]
                if holders and not set(self._copies.ranks_of(owner)) <= set(holders):
                    state = optimizer.state.get(parameter)
                    state = self._world.from_rank(
                        None if state is None else dict(state), holders[0], "a moved state"
                    )
                    optimizer.state[parameter] = state
                if owner != self._copies.stage:
                    optimizer.state.pop(parameter, None)

    def _keep_own(self) -> None:
        own_stage, owner_of = self._copies.stage, self._owner_of
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["params"][:] = [p for p in group["params"] if owner_of[p] == own_stage]
        stand_ins: dict[nn.Parameter, nn.Parameter] = {}
        for name, own in list(self._model.named_parameters(remove_duplicate=False)):
            if owner_of[own] == own_stage:
                continue
            if own not in stand_ins:
                empty = torch.empty_like(own, device="meta")
                stand_ins[own] = nn.Parameter(empty, requires_grad=own.requires_grad)
            self._elsewhere[name] = own
            _put(self._model, name, stand_ins[own])
        for own in stand_ins:
            own.grad = None
            own.data = torch.empty(0, dtype=own.dtype)

    # -- a batch through the stages ------------------------------------------------------------

    def _count(self, samples: int) -> int:
        return micro_batches(self.micro_batches, self._copies.stages, samples, self._least)

    def _inputs(self, compute: Compute, batch: Batch) -> list[torch.Tensor]:
        model, before = self._model, vars(self._model).get("forward")

        def take(*args: Any, **kwargs: Any) -> Any:
            raise _Taken(args, kwargs)

        model.forward = take
        try:
            compute(batch)
        except _Taken as taken:
            return self._in_order(taken.args, taken.kwargs)
        finally:
            if before is None:
                del model.forward
            else:
                model.forward = before
        raise ModelError(
            "forward and loss of a batch do not call the model",
            do="train with world.strategy=ddp or fsdp",
        )

    def _in_order(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        written = inspect.signature(type(self._model).forward)
        given = written.bind(self._model, *args, **kwargs).arguments
        inputs = list(given.values())[1:]
        rows = {len(item) if torch.is_tensor(item) and item.dim() else None for item in inputs}
        if len(rows) != 1 or None in rows or len(inputs) != len(self._chain.inputs):
            raise ModelError(
                "world.strategy=staged splits what the model takes into micro-batches, which is to "
                "be tensors with a row for each sample",
                do="give the model such tensors, or train with world.strategy=ddp or fsdp",
            )
        return inputs

    def _run(
        self, inputs: list[torch.Tensor], within: Within, *, trains: bool
    ) -> tuple[ScheduleRun, list[Shape]]:
        training = tuple(p.requires_grad for p in self._model.parameters()) if trains else ()
        modes = tuple(module.training for module in self._model.modules())
        with within():
            casts = torch.is_autocast_enabled("cpu")
        forms = tuple((tuple(t.shape), t.dtype) for t in inputs)
        key = (self.micro_batches, trains, casts, training, modes, forms)
        if key not in self._runs:
            if len(self._runs) >= _READY:
                self._runs.pop(next(iter(self._runs)))
            self._runs[key] = self._made(inputs, within, trains=trains)
        return self._runs[key]

    def _made(
        self, inputs: list[torch.Tensor], within: Within, *, trains: bool
    ) -> tuple[ScheduleRun, list[Shape]]:
        size = len(inputs[0])
        count = self._count(size)
        own = [shape_of(item) for item in inputs]
        with torch.set_grad_enabled(trains), within():
            sizes = {-(-size // count), size // count}
            known = {rows: self._crossing(own, rows) for rows in sizes}
            whole = [] if trains else self._crossing(own, size)[-1]
        rows = [len(part) for part in torch.arange(size).tensor_split(count)]
        place = self._copies.stage
        stage = OwnStage(
            self._stages[place],
            place,
            self._copies.stages,
            self._copies.pipeline,
            [known[n][place] for n in rows],
            [known[n][place + 1] for n in rows],
            self._clock,
            within,
        )
        return ScheduleRun(self._world, stage, count, self._asked.schedule, trains=trains), whole

    def _crossing(self, inputs: Sequence[Shape], rows: int) -> list[list[Shape]]:
        given = [item._replace(size=(rows, *item.size[1:])) for item in inputs]
        return [given, *shapes(self._stages, given)]

    def pass_on(
        self, compute: Compute, batch: Batch, loss: Callable[[Batch], torch.Tensor]
    ) -> tuple[int, int]:
        """Run forward and backward of a batch; the last rank calls the loss."""
        self._chain.check_constants()
        clock, copies, what = self._clock, self._copies, "micro-batches of a step"
        clock.forward = clock.backward = 0
        # Metrics of a rank count the samples whose outputs it has.
        own = batch.rows(*copies.shares(batch.size)[copies.number])
        own = own._replace(is_copy=not copies.is_last_stage)
        if not own.size:
            self._pass_by(what)
            return 0, 0
        if own.size < self._least:
            raise too_few_samples(batch.size, copies.count)
        inputs = self._inputs(compute, own)
        run, _ = self._run(inputs, self._within, trains=True)
        pieces = own.split(self._count(own.size))

        def loss_of(values: tuple[torch.Tensor, ...], number: int) -> torch.Tensor:
            self._output = [self._chain.put_together(values)]
            try:
                result = loss(pieces[number])
                if self._output:
                    raise ModelError("forward and loss of a batch do not call the model")
                return result
            finally:
                self._output = None

        run(inputs, loss_of, what)
        return clock.forward, clock.backward

    def _forward(self, _: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._output is not None:
            if not self._output:
                raise ModelError(
                    "world.strategy=staged runs the model once for each micro-batch, and its loss "
                    "calls it once more",
                    do="call the model once, or train with world.strategy=ddp or fsdp",
                )
            return self._output.pop()
        inputs = self._in_order(args, kwargs)
        differentiates = torch.is_grad_enabled()
        with torch.no_grad():
            values = self._evaluated(inputs)
        # for a caller that searches for a NaN; the rank that has it first reports it
        if differentiates:
            is_last = self._world.rank == self._world.size - 1
            values = [v if is_last else v.nan_to_num() for v in values]
            values = [v.requires_grad_(v.is_floating_point()) for v in values]
        return self._chain.put_together(values)

    def _evaluated(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        copies, what = self._copies, "micro-batches of an evaluation"
        shares = copies.shares(len(inputs[0]))
        first, stop = shares[copies.number]
        result: Sequence[torch.Tensor] | None = None
        if first < stop:
            own = [value[first:stop] for value in inputs]
            run, gives = self._run(own, nullcontext, trains=False)
            result = run(own, None, what)
            if result is not None:
                _check_rows(result, gives, stop - first, is_all=copies.count == 1)
        else:
            self._pass_by(what)
        parts = []
        for copy, (first, stop) in enumerate(shares):
            if first < stop:
                if result is not None and copy == copies.number:
                    values = list(result)
                else:
                    values = self._room_for(inputs, stop - first)
                for value in values:
                    self._world.broadcast(value, copies.last_rank(copy), "outputs of the model")
                parts.append(values)
        return [item[0] if len(item) == 1 else torch.cat(item) for item in zip(*parts, strict=True)]

    def _pass_by(self, what: str) -> None:
        with self._world.within(self._world.begun(None, what)):
            pass

    def _room_for(self, inputs: list[torch.Tensor], rows: int) -> list[torch.Tensor]:
        _, gives = self._run([value[:rows] for value in inputs], nullcontext, trains=False)
        return [item.like("cpu") for item in gives]

    # -- around a step -----------------------------------------------------------------------

    def before_step(self, turn: int, parameters: Tensors) -> None:
        self._turn = turn
        if parameters is not self._seen:
            check_laid_out("world.strategy=staged", parameters, self._owner_of.keys())
            self._seen = parameters

    def finish(self) -> Sums:
        """Sum losses and votes over ranks, and gradients over the copies of this stage."""
        if self._copies.count > 1:
            self._copies.sum_gradients(self._turn, self._seen)
            if self._asked.per_micro_batch:
                self._copies.average_statistics(self._model.modules())
        numbers = torch.tensor([float(number) for number in self._own], dtype=torch.float64)
        self._world.sum(numbers, "sum of the losses")
        total, weight, votes = numbers
        return Sums(total, weight, votes)

    def _sum_over_stages(self, numbers: torch.Tensor) -> None:
        self._world.sum(numbers, "size of the gradients, and whether they are finite")
        numbers /= self._copies.count  # all copies have added the same number

    # -- whole again -------------------------------------------------------------------------

    def weights(self, model: nn.Module, *, kept: bool) -> dict[str, torch.Tensor]:
        """Return all tensors that are saved of the model, whole. All ranks call this."""
        state = model.state_dict()
        result: dict[int, torch.Tensor] = {}  # a weight with two names is one tensor
        for name, value in state.items():
            if id(value) not in result:
                result[id(value)] = self._fetched(value, self._owners[name], kept=kept)
        return {name: result[id(value)] for name, value in state.items()}

    def _fetched(self, value: torch.Tensor, owner: int, *, kept: bool) -> torch.Tensor:
        is_mine = owner == self._world.rank
        result = (
            value.detach().contiguous() if is_mine else torch.empty(value.shape, dtype=value.dtype)
        )
        self._world.broadcast(result, owner, "weights put together")
        return result if kept else torch.empty(0, dtype=result.dtype)

    def check_alike(self, model: nn.Module, world: World, when: str) -> None:
        if self._copies.count > 1:
            check_replicas(model, world, when, every=self._copies.stages)

    def state_of(self, optimizer: torch.optim.Optimizer, *, kept: bool) -> dict[str, Any]:
        order, states, groups, numbers = self._order_of(optimizer), {}, [], count()
        own = optimizer.state_dict()
        for group, parameters in zip(own["param_groups"], order, strict=True):
            groups.append({**group, "params": [next(numbers) for _ in parameters]})
        for number, parameter in enumerate(p for group in order for p in group):
            state = optimizer.state.get(parameter)
            state = self._world.from_rank(
                None if state is None else dict(state),
                self._owner_of[parameter],
                "states of the optimizer",
            )
            if state and kept:
                states[number] = state
        return {**own, "state": states, "param_groups": groups}

    def part_of(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        groups, mine = [], set()
        order = self._order_of(optimizer)
        for group, parameters in zip(state["param_groups"], order, strict=True):
            kept = [
                number
                for number, parameter in zip(group["params"], parameters, strict=True)
                if self._owner_of[parameter] == self._copies.stage
            ]
            mine.update(kept)
            groups.append({**group, "params": kept})
        states = {number: value for number, value in state["state"].items() if number in mine}
        return {**state, "state": states, "param_groups": groups}

    def _order_of(self, optimizer: torch.optim.Optimizer) -> list[list[nn.Parameter]]:
        return next(
            o for item, o in zip(self._optimizers, self._orders, strict=True) if item is optimizer
        )

    def close(self, error: BaseException | None = None) -> None:
        """Restore the model's weights, whole. The optimizers keep this rank's states.

        After an error other ranks may be gone, so that no weights can be restored: the model then
        stays as it is.
        """
        self._copies.close()
        if not self._stages or error is not None:
            return
        del self._model.forward
        for name, value in list(self._model.named_parameters()):
            result = self._fetched(value, self._owners[name], kept=True)
            if name in self._elsewhere:
                self._elsewhere[name].data = result
                self._elsewhere[name].requires_grad_(value.requires_grad)
        for name, buffer in self._model.named_buffers():
            buffer.copy_(self._fetched(buffer, self._owners[name], kept=True))
        for name, own in self._elsewhere.items():
            _put(self._model, name, own)
        for optimizer, order in zip(self._optimizers, self._orders, strict=True):
            for group, parameters in zip(optimizer.param_groups, order, strict=True):
                group["params"][:] = parameters
        self._stages.clear()
        self._runs.clear()
        self.meets_in_compute = self.takes_whole_batches = False


def _check_rows(
    outputs: Sequence[torch.Tensor], gives: Sequence[Shape], rows: int, *, is_all: bool
) -> None:
    for value, shape in zip(outputs, gives, strict=True):
        if value.dtype != shape.dtype:
            raise unlike_form(shape_of(value), shape)
        if tuple(value.shape) != shape.size or not (is_all or shape.size[:1] == (rows,)):
            raise ModelError(
                f"the model gives {tuple(value.shape)} for {rows} samples in parts, and "
                f"{shape.size} for all of them",
                do="let it give a row for each sample, or train with world.strategy=ddp",
            )


def _put(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, last = name.rpartition(".")
    model.get_submodule(path)._parameters[last] = parameter
