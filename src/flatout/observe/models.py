"""Calls of the outermost modules, each classified as training or as evaluation."""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any
from weakref import ref

from flatout.hooks import SEARCH_STEPS, ModuleCalls
from flatout.kernels import Called
from flatout.models import is_layer, moving_norms, not_stepped, two_mode_layers
from flatout.observe.inside import Inside
from flatout.observe.lanes import AFTER, FORWARD, HOST, Lanes
from flatout.observe.model_facts import broken_of, describe, kept_of, unwrapped
from flatout.observe.numbers import Numbers
from flatout.observe.observation import Model, Site
from flatout.observe.padding import Padding
from flatout.observe.pools import look_at_pools
from flatout.observe.replicas import look_at_replica, number_of, random_bytes
from flatout.observe.sites import here, is_users, line_of
from flatout.observe.watch import Watch

# _SHAPES: maximum number of different input shapes that are recorded. _FIRST_CALLS: number of a
# model's first calls whose input is always inspected. _VARIED_CALLS: this number where input shapes
# vary. _SHARE: a later call is inspected once the number of calls has grown by 1/_SHARE. An
# inspection takes as long as a tenth of a very short step.
_SHAPES, _FIRST_CALLS, _VARIED_CALLS, _SHARE = 64, 32, 256, 8
# _SHOWN: number of a model's first training calls whose batches are passed to `watch.on_batch`;
# _EVALUATIONS: number of first evaluation calls whose batches are passed.
_SHOWN, _EVALUATIONS = 16, 8
# Number of a model's first training calls that are compared with the previous call.
_REPEATS = 32
# Number of steps before all models are described again, since they may be gone at the end. Each
# further interval is twice as long.
_AGAIN = 8
# Maximum number of calls of a model that may be a submodule of another model under construction.
_BUILDING = 2
# Minimum number of steps before a model can count as acting: it is then called in train mode
# without gradients in most steps.
_ACTS_AFTER = 8
_ACTING = 1 << 1  # bit of `opened`: train mode without gradients
# Lanes that end when a model is called.
_BEFORE_FORWARD = frozenset((HOST, AFTER))

Mode = tuple[bool, bool]  # whether in train mode, whether with gradients


class SeenModel(Called):
    """An observed outermost module."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.ref: ref[Any] = ref(module)
        self._innermost: ref[Any] = ref(unwrapped(module)[-1])
        self.has_parameters = next(module.parameters(), None) is not None
        self.facts = Model(f"{type(module).__module__}.{type(module).__qualname__}")
        self.facts.is_told = is_layer(module)
        self.is_stepped = self.was_described = False
        self.alone_ms: float | None = None  # ms per step, if nothing trains the model
        self.tensors: set[int] = set()
        self.with_gradient: set[str] = set()
        self.kept: list[tuple[str, Any]] = []  # parameters to read after the module is gone
        self.due = self.padding_due = 1
        self.padding = Padding()
        self.inner = self.evaluations = 0
        self.shapes: Counter[tuple[Any, Any]] = Counter()
        self.site: Site | None = None
        self.later_site: Site | None = None  # line of the first call after `ask_site`
        self._is_asked = False
        self._last: tuple[Any, list[ref[Any]]] | None = None
        self._open: dict[Mode, Site | None] = {}
        # Latest call without gradients and of unknown purpose: train mode, code object and line.
        self._caller: tuple[bool, CodeType | None, int] | None = None
        self._evaluated: dict[Mode, Site | None] = {}
        self._evaluated_in: set[int] = set()
        self._trained: dict[Mode, Site | None] = {}
        self._first_numbers: dict[str, int] = {}
        self._gradients: dict[str, int] = {}

    def in_training(self, module: Any, kwargs: dict[str, Any]) -> bool:
        """Return whether the layers compute as in training in a call with these arguments.

        The mode of a Keras model's module has no meaning: `predict` leaves it in evaluation. If a
        call without `training=` reaches layers that compute otherwise in training, they evaluate.
        """
        if not self.facts.is_told:
            # A script may switch only the mode of the model inside a DistributedDataParallel.
            innermost = self._innermost()
            return bool((module if innermost is None else innermost).training)
        told = kwargs.get("training")
        return not two_mode_layers(module) if told is None else bool(told)

    def look_at_repeat(self, torch: Any, lanes: Lanes, given: list[Any]) -> None:
        """Count the call as repeated if inputs, weights and random state have not changed."""
        tensors = [item for item in given if torch.is_tensor(item)]
        is_known = len(tensors) == len(given) > 0
        state = hash(random_bytes(torch))
        now = (lanes.steps, lanes.backwards, state, [tensor._version for tensor in tensors])
        last, self._last = (
            self._last,
            (now, [ref(tensor) for tensor in tensors]) if is_known else None,
        )
        self.facts.repeats_of += 1
        if is_known and last is not None and last[0] == now and len(last[1]) == len(tensors):
            is_same = all(a() is b for a, b in zip(last[1], tensors, strict=True))
            self.facts.repeats += is_same

    def moved(self, module: Any, names: list[str]) -> set[str]:
        """Return the names of the parameters that have changed since the first call of `moved`."""
        wanted = set(names)
        now = {name: number_of([t]) for name, t in module.named_parameters() if name in wanted}
        self._first_numbers = now | self._first_numbers
        return {name for name, number in now.items() if number != self._first_numbers[name]}

    def fresh(self, module: Any, names: set[str]) -> set[str]:
        """Return the names of the parameters whose gradient has changed since the last call."""
        now = {
            name: number_of([tensor.grad])
            for name, tensor in module.named_parameters()
            if name in names
        }
        before, self._gradients = self._gradients, now
        return {name for name, number in now.items() if before.get(name, number) != number}

    def frozen_norms(self, module: Any) -> list[str]:
        """Return the names of frozen BatchNorms whose running statistics still move.

        A BatchNorm is left out if the script itself changes its weights, as in a moving average of
        another model.
        """
        own = {
            f"{norm}.{name}".removeprefix("."): norm
            for norm in moving_norms(module)
            for name, _ in module.get_submodule(norm).named_parameters(recurse=False)
        }
        moved = {own[name] for name in self.moved(module, list(own))} if own else set()
        return [norm for norm in dict.fromkeys(own.values()) if norm not in moved]

    def ask_site(self) -> None:
        """Make the next model call record its line: a later training may have other lines."""
        self._is_asked, self.due = True, 0

    def is_called(self) -> None:
        """Record the line of the current call if none is known, or after `ask_site`."""
        if self.site is None:
            self.site = here(3)
        if self._is_asked:
            self._is_asked, self.later_site = False, here(3)

    def is_evaluated_in_most(self, steps: int) -> bool:
        """Return whether calls in most of `steps` steps were classified as evaluation."""
        return 2 * len(self._evaluated_in) > steps

    def was_not_evaluated(self) -> None:
        """Withdraw the classification of all calls so far as evaluation."""
        self._evaluated.clear()
        self._evaluated_in.clear()

    def is_open(self, mode: Mode) -> bool:
        """Return whether the model was called in this mode for a purpose that is still unknown."""
        return mode in self._open

    def evaluates(self, mode: Mode) -> None:
        """Record a call without gradients or in eval mode, whose purpose is still unknown."""
        is_known = mode in self._evaluated and mode in self._trained
        self._open[mode] = None if is_known else here(3)
        in_training, has_grad = mode
        self.opened |= 1 << in_training + 2 * has_grad
        self._caller = None if has_grad else (in_training, *_line_of_users(sys._getframe(3)))

    def was_evaluated(self, step: int) -> None:
        """Classify the open calls as an evaluation after step `step`."""
        if self.opened & self.is_part and self.code is not None:
            mode = self.is_part > 1, False
            self._open.setdefault(mode, Site(self.code.co_filename, self.line))
        self.is_part = 0  # the next open call records its line again
        self._evaluated = self._open | self._evaluated
        self._evaluated_in.add(step)
        self._end()

    def was_trained(self) -> None:
        """Classify the open calls as training, since a backward pass followed."""
        self._trained = self._open | self._trained
        if self._caller is not None and self.evaluations >= _EVALUATIONS:
            in_training, self.code, self.line = self._caller
            self.is_part = 0 if self.code is None else 1 << in_training
        self._end()

    def _end(self) -> None:
        self._open = {}
        self._caller = None
        self.goes_on = self.opened = 0

    @property
    def evaluated_at(self) -> Site | None:
        """User's line that called the model to evaluate; None without an evaluation."""
        return next((site for site in self._evaluated.values() if site is not None), None)

    def is_evaluated(self, steps: int) -> bool:
        """Return whether the model was called to evaluate during `steps` steps.

        Evaluation calls in most steps are a part of the step, such as calls of a target network.
        """
        return len(self._evaluated_in) > 0 and not self.is_evaluated_in_most(max(2, steps))

    def is_part_of(self, other: SeenModel) -> bool:
        """Return whether this model is a submodule, called only while Keras built `other`."""
        return self.calls <= _BUILDING < other.calls and self.tensors <= other.tensors

    def result(self, steps: int) -> Model:
        """Return the facts about the model after `steps` steps."""
        facts = self.facts
        facts.site = self.site
        facts.inputs = [
            (f"{list(shape)}, {dtype}".replace("torch.", ""), count)
            for (shape, dtype), count in self.shapes.most_common(_SHAPES)
        ]
        facts.padding_share = self.padding.share
        facts.lengths = len(self.padding.lengths)
        if self.is_evaluated(steps):
            facts.evaluated_in_train_mode = self._evaluated.get((True, False))
            facts.evaluated_with_grad = self._evaluated.get((False, True))
            apart = {after - before for before, after in pairwise(sorted(self._evaluated_in))}
            facts.evaluated_every = apart.pop() if len(apart) == 1 else None
        facts.trained_in_eval_mode = self._trained.get((False, True))
        if facts.evaluated_in_train_mode and not changes_in_training(facts):
            facts.evaluated_in_train_mode = None
        return facts


def _share(module: Any, some: set[str], of: set[str]) -> float:
    sizes = {name: tensor.numel() for name, tensor in module.named_parameters() if name in of}
    return float(sum(sizes.get(name, 0) for name in some) / max(1, sum(sizes.values())))


def changes_in_training(facts: Model) -> bool:
    """Return whether the output depends on train mode, as with dropout or BatchNorm."""
    return any(
        "Dropout" in layer or "BatchNorm" in layer or "DropPath" in layer for layer in facts.layers
    )


def _line_of_users(frame: FrameType) -> tuple[CodeType | None, int]:
    code = frame.f_code
    return (code, line_of(frame)) if is_users(code.co_filename) else (None, 0)


class Models:
    """Hooks on the calls of all modules at first, later only of the outermost modules' classes."""

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._torch = torch
        self._watch = watch
        self._numbers = Numbers(torch, watch)
        Inside(torch, watch)
        self._known: dict[int, SeenModel] = {}
        self._calls = ModuleCalls(torch, "observe", self._watched, watch.quick.hooks.append)
        watch.on_renewal.append(self._known.clear)
        watch.at(_AGAIN, self._describe_again)

    def _describe_again(self) -> None:
        self.describe(whole=False)
        self._watch.at(2 * self._watch.lanes.steps, self._describe_again, is_once=True)

    def search(self) -> None:
        """Observe every module for some steps, now and whenever an optimizer is new."""
        if self.search not in self._watch.on_new_optimizer:
            self._watch.on_new_optimizer.append(self.search)
            self._watch.with_gradients.append(self.look_at_gradients)
            self._watch.on_training.append(self._begin_again)
        self._calls.search()
        steps = self._watch.lanes.steps
        self._watch.at(steps + 1, lambda: self.describe(whole=False))
        self._watch.at(steps + SEARCH_STEPS, self._narrow)

    def _narrow(self) -> None:
        classes = {type(m) for value in self._known.values() for m in unwrapped(value.ref())}
        if not self._calls.narrow(classes):
            return
        watched = tuple(self._calls.classes)
        for value in self._known.values():
            module = value.ref()
            if module is not None:
                value.inner = sum(isinstance(item, watched) for item in module.modules()) - 1

    def watch_class(self, owner: Any) -> None:
        """Observe the models of this class."""
        self._calls.watch(owner)

    def _watched(self, original: Any) -> Any:
        lanes, enter_model, known = self._watch.lanes, self._watch.lanes.enter_model, self._known
        is_traced = self._torch.compiler.is_dynamo_compiling
        is_grad_enabled = self._torch.is_grad_enabled

        def call(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            if is_traced() or (current := enter_model()) < 0:
                return original(module, *args, **kwargs)
            try:
                known_model = known.get(id(module))
                if known_model is None or known_model.ref() is not module:
                    known_model = self._meet(module)
                is_act = False
                if known_model.has_parameters:
                    known_model.calls += 1
                    in_training = known_model.in_training(module, kwargs)
                    is_trained = in_training and is_grad_enabled()
                    if not is_trained or known_model.calls >= known_model.due or lanes.is_open:
                        self._look(known_model, in_training, args, kwargs)
                    if current in _BEFORE_FORWARD:
                        is_act = known_model.acts and not is_grad_enabled()
                        lanes.switch(FORWARD)
                        if not lanes.steps:
                            lanes.begin_training()
                result = original(module, *args, **kwargs)
                if is_act:
                    lanes.switch(current)  # the host's time continues
                return result
            finally:
                lanes.is_inside = False

        return self._watch.quick.call(original, call, known, is_grad_enabled)

    def _meet(self, module: Any) -> SeenModel:
        known_model = self._known[id(module)] = SeenModel(module)
        self._watch.models.append(known_model)
        return known_model

    def _look(self, model: SeenModel, in_training: bool, args: Any, kwargs: dict[str, Any]) -> None:
        lanes = self._watch.lanes
        has_grad = self._torch.is_grad_enabled()
        mode = (in_training, has_grad)
        model.is_called()
        if mode == (True, True):
            is_open = lanes.evaluations and model in lanes.evaluations
            if is_open and not (self._trains_on_loader() or self._acts(model)):
                lanes.judge()
        elif lanes.is_open and model.is_open(mode) and model.evaluations >= _EVALUATIONS:
            if not has_grad:
                model.goes_on |= 1 << in_training  # one more call of an evaluation or episode
                return
        else:
            if not lanes.evaluations:
                self._numbers.before_evaluation()
            lanes.begin_evaluation(model)
            model.evaluates(mode)
            if not has_grad and model.evaluations < _EVALUATIONS:
                model.evaluations += 1
                self._show(model, args, kwargs, is_trained=False)
        if has_grad and model.calls >= model.due and not self._torch.compiler.is_compiling():
            batch = args[0] if args else next(iter(kwargs.values()), None)
            known = len(model.shapes)
            self._watch.aside(lambda: self._look_at_input(model, batch))
            if mode == (True, True) and model.calls <= _SHOWN:
                self._show(model, args, kwargs, is_trained=True)
            if mode == (True, True) and model.calls <= _REPEATS:
                given = [*args, *kwargs.values()]
                repeat = partial(model.look_at_repeat, self._torch, lanes, given)
                self._watch.aside(repeat, is_once=True)
            is_new = len(model.shapes) > known
            is_next = model.calls < (_VARIED_CALLS if is_new else _FIRST_CALLS)
            model.due = model.calls + (1 if is_next else model.calls // _SHARE)

    def _acts(self, model: SeenModel) -> bool:
        steps = self._watch.lanes.steps
        if model.opened != _ACTING:
            return False
        if not model.acts and steps >= _ACTS_AFTER and model.is_evaluated_in_most(steps):
            model.acts = True
            for other in self._watch.models:  # such as a target network of this model
                if other.is_evaluated_in_most(steps):
                    other.was_not_evaluated()
        return model.acts

    def _show(
        self, model: SeenModel, args: Any, kwargs: dict[str, Any], *, is_trained: bool
    ) -> None:
        batch = args[0] if args else next(iter(kwargs.values()), None)
        if getattr(batch, "is_meta", False):
            return  # a meta tensor without numbers, by which Keras infers shapes
        watch = self._watch
        looks = [partial(look, model, batch, is_trained) for look in watch.on_batch]
        watch.aside(*looks, is_once=True)

    def _trains_on_loader(self) -> bool:
        lanes = self._watch.lanes
        if lanes.loader is None:
            return False
        return lanes.loader.in_training or not lanes.steps

    def _look_at_input(self, model: SeenModel, batch: Any) -> None:
        if isinstance(batch, self._torch.Tensor):
            if len(model.shapes) < _SHAPES:
                model.shapes[batch.shape, batch.dtype] += 1
            if model.calls >= model.padding_due:
                model.padding.look(batch)
                model.padding_due = model.calls + max(1, model.calls // 2)
        if model.calls == 1 or model.calls >= _FIRST_CALLS:
            for device in ("cuda", "cpu"):
                if self._torch.is_autocast_enabled(device):
                    dtype = self._torch.get_autocast_dtype(device)
                    model.facts.autocast = str(dtype).removeprefix("torch.")

    def look_at_gradients(self) -> None:
        """Record the parameters and embedding rows with a gradient, before an optimizer steps."""
        for model in self._watch.models:
            module = model.ref()
            if module is None or not model.has_parameters or not self._is_trained_here(module):
                continue
            if not self._watch.lanes.steps:
                look_at_replica(module, model.facts)
            model.facts.moving_norms = model.frozen_norms(module)
            model.with_gradient |= self._with_gradient(model, module)
            trained = [tensor for tensor in module.parameters() if tensor.requires_grad]
            unused = any(tensor.grad is None for tensor in trained)
            model.facts.unused_parameters = bool(model.facts.unused_parameters) or unused
        embedding = self._torch.nn.Embedding
        tables = {
            id(inner.weight): inner.weight
            for model in self._watch.models
            if (module := model.ref()) is not None
            for inner in module.modules()
            if isinstance(inner, embedding)
        }
        if tables:
            for optimizer in self._watch.optimizers:
                optimizer.look_at_tables(list(tables.values()))

    def _begin_again(self) -> None:
        for model in self._watch.models:
            model.with_gradient.clear()

    def _with_gradient(self, model: SeenModel, module: Any) -> set[str]:
        having = {name for name, tensor in module.named_parameters() if tensor.grad is not None}
        if not self._watch.began:
            return having
        stepped = {id(item) for seen in self._watch.optimizers for item in seen.tensors()}
        missed = having.intersection(not_stepped(module, stepped))
        return having - missed | model.fresh(module, missed)

    def _is_trained_here(self, module: Any) -> bool:
        return any(tensor.grad is not None for tensor in module.parameters())

    def describe(self, *, whole: bool) -> None:
        """Describe all models, in the stepping thread; with `whole` also check all numbers."""
        stepped = {
            id(tensor) for optimizer in self._watch.optimizers for tensor in optimizer.tensors()
        }
        for model in self._watch.models:
            module = model.ref()
            if module is None and whole and model.kept:
                model.facts.not_finite = model.facts.not_finite or broken_of(model.kept)
            if module is not None and model.has_parameters:
                describe(module, model.facts, whole=whole)
                if not model.was_described:
                    model.was_described = True
                    model.kept = kept_of(module)
                    look_at_pools(module, model.facts)
                if model.facts.moving_norms:
                    model.facts.moving_norms = model.frozen_norms(module)
                model.tensors = {id(tensor) for tensor in module.parameters() if not tensor.is_meta}
                model.is_stepped |= not model.tensors.isdisjoint(stepped)
                # The gradients of an earlier training were recorded before.
                is_told = self._watch.began and not model.with_gradient
                if not (is_told or model.tensors.isdisjoint(stepped)):
                    missed = not_stepped(module, stepped)
                    having = [name for name in missed if name in model.with_gradient]
                    moved = model.moved(module, having)
                    model.facts.not_stepped = [name for name in having if name not in moved]
                    model.facts.moved = [name for name in having if name in moved]
                    model.facts.moved_share = _share(module, moved, model.with_gradient)
                    trained = [n for n, t in module.named_parameters() if t.requires_grad]
                    model.facts.misses_first = missed == trained[: len(missed)]
