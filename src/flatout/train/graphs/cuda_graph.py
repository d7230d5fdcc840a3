"""Steps as CUDA graphs: a single launch in place of a launch for each kernel.

A graph is recorded from a real step: the same kernels on the same numbers, with the random numbers
that the step would have drawn. Each batch is copied to the graph's input tensors. For a small model
with a fused optimizer at constant rates the graph includes the update (cuda_graph_update.py). For
other models it ends with the gradients, and the rest of the step runs as usual: clipping, the check
for NaN, and the optimizer at its rates.

A replay runs no Python code. So before recording, the step is made once and undone. That run
detects waits for the GPU and random numbers of the CPU, and the graph is compared with its results.
If the model has changed, a step is made without the graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from operator import is_
from pathlib import Path
from time import perf_counter_ns as clock
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_map_only

from flatout.console import first_line
from flatout.data import NO_ROWS, Batch, randomness, tensors_in
from flatout.models import KerasJob
from flatout.train.compute import ModelCompute
from flatout.train.gradients import difference
from flatout.train.graphs.capture_graph import (
    ModuleWatch,
    Unfit,
    check_model,
    tensors_of,
)
from flatout.train.graphs.cuda_graph_update import RecordedUpdate, rates_of
from flatout.train.graphs.function_watch import FunctionWatch
from flatout.train.losses.loss_value import mean_of_value
from flatout.train.losses.losses import Value
from flatout.train.part import Done
from flatout.train.settings import Settings
from flatout.train.snapshot import untouched
from flatout.train.step import Stepper

# _MOST_GRAPHS: maximum number of graphs, which are kept by shapes and settings; the least recently
# used graph is dropped. _MOST_SHAPES: maximum number of batch shapes with graphs; batches of
# further shapes run without a graph.
_MOST_GRAPHS = _MOST_SHAPES = 8
# Number of changes of the model after which its steps are not recorded again.
_MOST_CHANGES = 3
# Maximum difference of gradients, as a fraction of their norm, that counts as rounding by another
# order of sums.
_ROUNDING = 0.01
_FAILURES = (Unfit, RuntimeError)

_Key = tuple[Settings, tuple[Any, ...]]


class CudaGraphs:
    """Makes steps by recorded graphs, if the settings ask for that."""

    def __init__(self, stepper: Stepper, note: Callable[[str], None], is_asked: bool) -> None:
        self._stepper, self._note, self._is_asked = stepper, note, is_asked
        self._whys: dict[Settings, str] = {}
        self._graphs: dict[_Key, Recorded] = {}
        # Shapes of earlier batches: a last batch whose shape comes once is not worth a graph.
        self._seen: set[tuple[Any, ...]] = set()
        self._shapes: set[tuple[Any, ...]] = set()
        self._latest: Settings | None = None
        self._changes = 0
        self._place: _Place | None = None
        # Rates are taken to be constant until they have changed.
        self._rates: list[dict[str, Any]] | None = None
        self._rates_move = False

    @property
    def why(self) -> str:
        """Reason why no step is recorded under the present settings; "" while one may be."""
        return self._whys.get(self._stepper.switch.now, "")

    def __call__(
        self, eager: Callable[[], Done], compute: Any, batches: Sequence[Batch], step: int
    ) -> Done:
        """Make a step, by a graph if it was recorded."""
        # A first step may be watched, and its operators counted.
        is_watched = hasattr(compute, "__wrapped__") or _get_current_dispatch_mode() is not None
        if self.why or is_watched:
            return eager()
        key = (self._stepper.switch.now, shape_of(batches))
        recorded = self._graphs.pop(key, None)
        if recorded is not None and recorded.is_current(compute):
            self._graphs[key] = recorded  # keeps the dict in the order of use
            self._latest = key[0]
            return recorded.step(batches[0], step)
        if recorded is not None and key[0] == self._latest and not self._moved_rates():
            self._changes += 1
        self._latest = key[0]
        done = eager()
        with self._giving_up():
            if self._changes > _MOST_CHANGES:
                self._graphs.clear()
                raise Unfit("the model changes again and again")
            if self._is_worth(key[1]):
                self._record(key, compute, batches)
        return done

    def _moved_rates(self) -> bool:
        return self._rates is not None and self._rates != rates_of(self._stepper)

    def _is_worth(self, shape: tuple[Any, ...]) -> bool:
        if shape in self._shapes:
            return True
        is_worth = not self._seen or shape in self._seen
        if len(self._shapes) == _MOST_SHAPES:
            return False
        self._seen.add(shape)
        if is_worth:
            self._shapes.add(shape)
        return is_worth

    def _record(self, key: _Key, compute: Any, batches: Sequence[Batch]) -> None:
        if why := self.objection(compute, batches):
            raise Unfit(why)
        while len(self._graphs) >= _MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        self._place = self._place or _Place(self._stepper.switch.device)
        rates = rates_of(self._stepper)
        self._rates_move |= self._rates is not None and rates != self._rates
        self._rates = rates
        moves = self._rates_move or self._stepper.lr_scale is not None
        update = None if moves else RecordedUpdate.of(self._stepper.joint.update)
        self._graphs[key] = Recorded(self._stepper, compute, batches[0], self._place, update)

    def objection(self, compute: Any, batches: Sequence[Batch]) -> str:
        """Return the reason why a graph cannot make this step; "" if none is known."""
        stepper, now = self._stepper, self._stepper.switch.now
        if stepper.switch.device.type != "cuda" or not stepper.is_alone:
            return "a CUDA graph needs a single rank on a CUDA device"
        of_step = computed(compute, stepper.switch.model)
        if of_step is None:
            return "a CUDA graph needs a Trainer's loss of one output, or a function of a Loop"
        if len(batches) > 1 or stepper.pieces > 1 or isinstance(stepper.micro_batch, int):
            return "a step is made of several batches or micro-batches"
        if any(batch.kept is not None or batch.padding for batch in batches):
            return "the batch holds kept features of frozen layers, or samples that fill it up"
        if any(batch.is_jagged for batch in batches):
            return NO_ROWS
        if stepper.chain.acts_within or stepper.scaler is not None:
            return "Parts within a step (dropout by sample) and fp16's scaled loss are not recorded"
        for name, value in {"activation_checkpointing": "off", "touched_rows": "off"}.items():
            if getattr(now, name) != value:
                return f"{name} is on"
        try:
            watches_of(stepper, of_step)
        except Unfit as unfit:
            return str(unfit)
        return ""

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except _FAILURES as error:
            why = self._whys[self._stepper.switch.now] = first_line(error)
            if self._is_asked and list(self._whys.values()).count(why) == 1:
                self._note(f"compute.cuda_graph: steps run without a graph: {why}")

    def close(self) -> None:
        """Release the graphs and their memory."""
        self._graphs.clear()
        self._place = None


def shape_of(batches: Sequence[Batch]) -> tuple[Any, ...]:
    """Return shapes, strides and dtypes of the tensors, on which a graph depends."""
    return tuple(
        (*tensor.shape, *tensor.stride(), tensor.dtype)
        for batch in batches
        for tensor in tensors_of(batch)
    )


class OwnCompute:
    """The user's function as the compute of a Loop: forward and loss of a batch."""

    metrics = ()

    def __init__(self, own: Callable[[Batch], Value], model: nn.Module) -> None:
        self.own, self.modules = own, list(model.modules())

    def traced(self, batch: Batch) -> tuple[Value, Any]:
        """Return the loss, and None as the output."""
        return self.own(batch), None

    def feed(self, output: Any, batch: Batch) -> None:
        """Do nothing, since the user's function has no metrics."""


Computed: TypeAlias = ModelCompute | KerasJob | OwnCompute


def computed(compute: Any, model: nn.Module) -> Computed | None:
    """Return an object for forward and loss of a step; None for unknown kinds of compute."""
    if isinstance(compute, ModelCompute):
        return compute
    if isinstance(compute, FunctionType):
        return OwnCompute(compute, model)
    job = getattr(compute, "__self__", None)
    return job if isinstance(job, KerasJob) else None


def watches_of(stepper: Stepper, compute: Computed) -> list[ModuleWatch | FunctionWatch]:
    """Return watches that detect a change in the code of a step."""
    model, parameters = stepper.switch.model, stepper.joint.update.parameters
    check_model(model, compiled=stepper.switch.now.compile == "on")
    check_containers(model)
    own = {p for p in model.parameters() if p.requires_grad}
    if not own <= set(parameters):
        raise Unfit("the optimizer's parameters are not the trained parameters of the model")
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in own):
        raise Unfit("a parameter has hooks")
    if (loss := compute.own) is None:
        return [ModuleWatch(compute.modules)]
    try:
        of_loss = FunctionWatch(loss)
    except ValueError as error:
        name = getattr(loss, "__name__", type(loss).__name__)
        raise Unfit(f"function {name}: {error}") from error
    return [ModuleWatch([*compute.modules, *of_loss.modules]), of_loss]


def check_containers(model: nn.Module) -> None:
    """Refuse a model that keeps tensors in lists or dicts: a replacement would go unnoticed."""
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for name, module in model.named_modules():
        for value in vars(module).values():
            if isinstance(value, list | tuple | dict) and any(
                id(tensor) not in own for tensor in tensors_in(value)
            ):
                which = f"{name or 'the model'} ({type(module).__name__})"
                raise Unfit(f"{which} keeps a tensor in a {type(value).__name__}")


class _Place:
    """The stream and memory pool of all graphs, which never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()


class Recorded:
    """A graph of the steps on batches of one shape."""

    def __init__(
        self,
        stepper: Stepper,
        compute: Any,
        batch: Batch,
        place: _Place,
        update: RecordedUpdate | None,
    ) -> None:
        self._update = update
        model = stepper.switch.model
        of_step = computed(compute, model)
        assert of_step is not None
        self._stepper, self._given, self._compute = stepper, compute, of_step
        self._watches = watches_of(stepper, of_step)
        self._own = [*model.parameters(), *model.buffers()]
        self._lie = [tensor.data_ptr() for tensor in self._own]
        self._parameters = list(stepper.joint.update.parameters)
        self._gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._moved = [*model.buffers(), *([] if update is None else self._parameters)]
        self._batch = batch.with_tensors(torch.clone)._replace(indices=None)
        self._inputs = tensors_of(self._batch)
        self._graph = torch.cuda.CUDAGraph()
        here = torch.cuda.current_stream(stepper.switch.device)
        place.stream.wait_stream(here)
        try:
            kept = nullcontext() if update is None else update.put_back()
            with torch.cuda.stream(place.stream), kept:
                wanted = self._rehearsed()
                self._record(place)
                self._compare(wanted)
        finally:
            here.wait_stream(place.stream)
            stepper.joint.update.forget()

    def _passes(self) -> tuple[torch.Tensor, torch.Tensor | float, Any]:
        switch = self._stepper.switch
        with switch.autocast():
            value, output = self._compute.traced(self._batch)
        loss, weight = mean_of_value(value, self._batch.size)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach(), weight, tree_map_only(torch.Tensor, torch.Tensor.detach, output)

    def _rehearsed(self) -> list[torch.Tensor | None]:
        with untouched(self._stepper.switch.model, self._given), _waits() as waits:
            before = randomness.random_state()
            loss = self._passes()[0]
            if self._update is not None:
                self._update.rehearse()
            draws = not randomness.same_state(before, randomness.random_state())
        if waits:
            raise Unfit(f"{waits[0]} waits for the GPU")
        if draws:
            raise Unfit("the step draws random numbers on the CPU")
        return [loss, *self._taken()]

    def _taken(self) -> list[torch.Tensor | None]:
        gradients = [p.grad for p in self._parameters]
        self._stepper.joint.update.forget()
        return gradients

    def _record(self, place: _Place) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # the graph has its own memory pool
        # Other threads may continue to copy batches to the device.
        self._graph.capture_begin(pool=place.pool, capture_error_mode="thread_local")
        try:
            self._loss, self._weight, self._output = self._passes()
            if self._update is not None:
                self._update.make()
        except BaseException:
            with suppress(RuntimeError):
                self._graph.capture_end()
            _end_recording()
            raise
        self._graph.capture_end()
        self._gradients = [
            (p, g) for p, g in zip(self._parameters, self._taken(), strict=True) if g is not None
        ]

    def _compare(self, wanted: list[torch.Tensor | None]) -> None:
        share = 0.0
        with untouched(self._stepper.switch.model, self._given):
            self._graph.replay()
            if self._update is not None:  # before the weights are restored
                share = self._update.share()
        if self._update is not None:
            if not share <= _ROUNDING:
                raise Unfit(f"weights would differ by {share:.0%}: more than rounding")
            return
        gradients = dict(self._gradients)
        share = difference(wanted, [self._loss, *map(gradients.get, self._parameters)])
        if not share <= _ROUNDING:
            raise Unfit(f"gradients would differ by {share:.0%}: more than rounding")

    def is_current(self, compute: Any) -> bool:
        """Return whether the step is still the one that was recorded."""
        return (
            compute == self._given  # not `is`: each access makes a new method object
            and all(watch.holds() for watch in self._watches)
            and _are_same(self._parameters, self._stepper.joint.update.parameters)
            and (self._update is None or self._update.is_current())
            and [tensor.data_ptr() for tensor in self._own] == self._lie
        )

    def _fed(self) -> Any:
        if isinstance(self._compute, KerasJob):
            return self._output
        return tree_map_only(torch.Tensor, torch.Tensor.clone, self._output)

    def step(self, batch: Batch, number: int) -> Done:
        """Make a step on a batch of the graph's shape."""
        self._stepper.joint.update.begin()
        start = clock()
        if isinstance(self._compute, KerasJob):
            self._compute.step_begins()
        torch._foreach_copy_(self._inputs, tensors_of(batch))
        self._graph.replay()
        self._stepper.mark("forward")
        torch.autograd.graph.increment_version(self._moved)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        # The next replay overwrites these tensors.
        loss, weight = self._loss.clone(), self._weight
        weight = weight.clone() if torch.is_tensor(weight) else weight
        if self._compute.metrics:
            self._compute.feed(self._fed(), batch)
        if self._update is not None:
            self._update.tell()
            self._stepper.mark("optimizer")
            return Done(loss, weight, clock() - start, 0, 0, 0)
        return self._stepper.finish((loss, weight, clock() - start, 0, 0), number)


def _are_same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


@contextmanager
def _waits() -> Iterator[list[str]]:
    lines: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lines
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for warning in caught:
        words = str(warning.message)
        if "synchronizing CUDA operation" in words:
            lines.append(f"{Path(warning.filename).name}:{warning.lineno}")
        elif "Synchronization debug mode" not in words:  # torch's note that it may miss some waits
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )


def _end_recording() -> None:
    graph = torch.cuda.CUDAGraph()
    with suppress(RuntimeError):
        graph.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, device="cuda")
        graph.capture_end()
