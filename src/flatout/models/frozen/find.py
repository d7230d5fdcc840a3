"""Search for cuts of a model's forward whose first part gives constant results for a sample."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from torch.nn.modules import module as every_module
from torch.utils._pytree import tree_flatten

from flatout.console import first_line
from flatout.models.adapter import adapter_of
from flatout.models.frozen.calls import taking_part
from flatout.models.frozen.cut import Cut
from flatout.models.frozen.form import Form
from flatout.models.frozen.places import Places
from flatout.models.frozen.plan import plan_prefix, plan_rest
from flatout.models.frozen.recording import (
    Event,
    ForwardRecording,
    OutputStructure,
    is_near,
    is_same,
    nothing_random,
    tensors_of,
)
from flatout.models.frozen.stand_in import StandIn, Uncut

# Maximum number of a batch's samples that the search runs on.
_SAMPLES = 4
# Maximum number of modules that are recorded whole because the search cannot follow their forward.
_ATTEMPTS = 8
# Maximum number of kept values whose layers the name of a cut lists.
_NAMED = 3


@dataclass(frozen=True)
class Cuts:
    """The places at which a model may be cut.

    Attributes:
        cuts: the fastest cuts for different reading rates, in the order of rising bytes; with a
            limit on bytes, also the fastest cut within it.
        hindrance: the layer that prevents more freezing, and what to do; "" if there is none.
        at: function that returns this model's cuts at places found by another rank. Cuts that give
            wrong results here are left out.
    """

    cuts: list[Cut] = field(default_factory=list)
    hindrance: str = ""
    at: Callable[[Sequence[Sequence[int]]], list[Cut]] = lambda places: []


def find_cuts(model: Any, inputs: Any, most: float = inf) -> Cuts:
    """Return the places at which `model` may be cut, in its present state and mode.

    A call of the forward is frozen under four conditions. It uses no parameter that is trained. It
    does not act differently in training (dropout, BatchNorm with the batch's statistics). It draws
    no random numbers. Its result for a sample does not depend on the batch's other samples: with
    these samples replaced, the result must stay the same bit for bit. Both parts of each cut were
    run, and their result equals that of the whole forward bit for bit.

    Each branch of the model may be cut at another depth. The time of each call and the bytes of its
    result per sample decide which cuts are useful (`min_cut.py`).

    A module that has hooks, or sets its attributes in forward, is called in each run: no cut leaves
    it out. With a hook on the model itself there are no cuts. Parameters, buffers, random streams
    and attributes stay as they are.

    Args:
        model: a torch module, or a Keras model on torch.
        inputs: inputs of at least two samples, as the model takes them: a tensor, a tuple, or a
            mapping by argument. Dimension 0 is the sample. The caller sets the autocast of the
            training steps.
        most: maximum number of bytes that may be kept per sample.
    """
    if (why := _hook_around(model)) is not None:
        return Cuts(hindrance=why)
    try:
        with _left_alone(model), torch.enable_grad():
            result, dropped = _Search(model, inputs, as_written=True).cuts(most)
            if dropped:
                # If a rewrite rounds differently, the output of the rewritten model is the
                # reference.
                other, _ = _Search(model, inputs, as_written=False).cuts(most)
                result = max(result, other, key=lambda cuts: len(cuts.cuts))
            return result
    except Uncut as error:
        return Cuts(hindrance=str(error))
    except Exception as error:  # the forward may not work on part of a batch
        return Cuts(hindrance=f"forward fails on part of a batch: {first_line(error)}")


class _Search:
    def __init__(self, model: Any, inputs: Any, *, as_written: bool) -> None:
        self.model = model
        self.as_written = as_written
        leaves, self.spec = tree_flatten(inputs)
        sizes = {len(leaf) for leaf in leaves if torch.is_tensor(leaf) and leaf.dim()}
        if len(sizes) != 1 or max(sizes) < 2:
            raise Uncut(
                f"the frozen part is found on a batch of at least two samples, found {sizes}",
                do="give it a larger batch",
            )
        count = min(_SAMPLES, max(sizes)) // 2 * 2
        self.half = count // 2
        self.leaves = [leaf[:count].clone() if torch.is_tensor(leaf) else leaf for leaf in leaves]
        self.parts = adapter_of(model).parts()
        self.opaque: set[str] = set()

    def inputs(self, rows: list[int]) -> Any:
        return self.spec.unflatten(
            [leaf[rows] if torch.is_tensor(leaf) else leaf for leaf in self.leaves]
        )

    def outputs(self, inputs: Any) -> Any:
        return adapter_of(self.model).outputs(inputs, as_written=self.as_written)

    def note(self, rows: list[int]) -> ForwardRecording:
        while True:
            noted = ForwardRecording(self.parts, self.opaque, as_written=self.as_written)
            leaves = self.spec.flatten_up_to(self.inputs(rows))
            made = [noted.take(leaf) if torch.is_tensor(leaf) else leaf for leaf in leaves]
            try:
                with nothing_random(), taking_part(noted, self.parts.items()), noted:
                    given = self.outputs(self.spec.unflatten(made))
            except Exception as error:
                if not noted.failed_in or noted.failed_in in self.opaque:
                    raise Uncut(
                        f"forward cannot be followed: {type(error).__name__}: {error}"
                    ) from error
                self.opaque.add(noted.failed_in)
                if len(self.opaque) > _ATTEMPTS:
                    raise Uncut("forward cannot be followed") from error
                continue
            leaves, spec = tree_flatten(given)
            noted.given = OutputStructure(
                spec,
                [(True, x.number) if isinstance(x, StandIn) else (False, x) for x in leaves],
            )
            return noted

    def cuts(self, most: float) -> tuple[Cuts, int]:
        every = list(range(2 * self.half))
        first, second = every[: self.half], every[self.half :]
        # The first call creates everything that is created only once.
        with nothing_random():
            self.outputs(self.inputs(first))
        attributes = _attributes(self.model)
        self.noted = self.note(every)
        few = self.note(first)
        self.forms = self.find_forms(few)
        self.coupled = self.look_at_rows(few, first, self.half)
        del few
        spent = [event.spent for event in self.noted.events]
        for rows in (first, second):
            again = self.note([*rows, *rows])
            self.coupled = {**self.look_at_rows(again, rows, None), **self.coupled}
            pairs = zip(spent, again.events, strict=True)
            spent = [min(least, event.spent) for least, event in pairs]
            del again
        self.changed = _changed(attributes, _attributes(self.model))
        reasons = self.reasons()
        self.places = Places(self.noted, self.closure(reasons), self.forms, spent)
        places = self.places.best(most)
        cuts = self.cuts_at(places)
        hindrance = self.hindrance(self.places.frozen, reasons)
        if places and not cuts and not hindrance:
            hindrance = "forward in two parts gives other numbers than as a whole"
        return Cuts(cuts, hindrance, self.cuts_at), len(places) - len(cuts)

    def cuts_at(self, places: Sequence[Sequence[int]]) -> list[Cut]:
        result: dict[str, Cut] = {}
        with _left_alone(self.model), torch.enable_grad():
            for place in places:
                cut = self.cut(list(place))
                if cut is not None:
                    cut.name += f" [{cut.calls[:6]}]" if cut.name in result else ""
                    result[cut.name] = cut
        return list(result.values())

    def find_forms(self, few: ForwardRecording) -> dict[int, Form]:
        self.check_alike(few)
        forms = {}
        for number, value in self.noted.values.items():
            form = Form.of(value, 2 * self.half, few.values[number], self.half)
            if form is not None:
                forms[number] = form
        return forms

    def check_alike(self, noted: ForwardRecording) -> None:
        own, others = (
            [(event.path, event.name, event.reads, event.gives()) for event in run.events]
            for run in (self.noted, noted)
        )
        if own != others:
            raise Uncut("forward makes other calls for other samples")

    def look_at_rows(
        self, noted: ForwardRecording, rows: list[int], count: int | None
    ) -> dict[int, str]:
        self.check_alike(noted)
        result = {}
        for index, event in enumerate(self.noted.events):
            for number in event.gives():
                form, own = self.forms.get(number), self.noted.values[number].detach()
                other = noted.values[number].detach()
                if form is None:
                    result[index] = "gives a tensor whose shape follows no rule"
                elif count is None and not _same_rows(form, own, other, rows):
                    result[index] = "gives for a sample what depends on the rest of its batch"
                elif count is not None and not _near(form, own, other, count):
                    result[index] = "gives for a sample what depends on the size of its batch"
        return result

    # -- what is frozen ------------------------------------------------------------------------

    def reasons(self) -> list[str | None]:
        result: list[str | None] = []
        stop = self.noted.stopped_at
        for index, event in enumerate(self.noted.events):
            if stop is not None and index >= stop:
                result.append(self.noted.stopped_why)
            elif event.is_trained:
                result.append("")
            else:
                result.append(event.why or _hooked(event.module) or self.coupled.get(index))
        around = [(call.module, range(call.start, call.stop)) for call in self.noted.calls]
        for module, events in [*around, (self.model, range(len(result)))]:
            why = self.changed.get(id(module), "") or _hooked(module)
            for index in events:
                if why and result[index] is None:
                    result[index] = f"is in {type(module).__name__}, which {why}"
        return result

    def closure(self, reasons: list[str | None]) -> list[int]:
        frozen, chosen = set(self.noted.inputs), []
        for index, event in enumerate(self.noted.events):
            if reasons[index] is None and not event.from_outside and frozen.issuperset(event.reads):
                frozen.update(event.gives())
                chosen.append(index)
        return chosen

    def hindrance(self, chosen: list[int], reasons: list[str | None]) -> str:
        without = self.closure([reason if reason == "" else None for reason in reasons])
        more = [index for index in without if index not in set(chosen)]
        if not any(self.weighs(index) for index in more):
            return ""
        first = next(index for index in more if reasons[index])
        event, why = self.noted.events[first], reasons[first]
        acts = event.why and why == event.why
        do = ": hold it in evaluation (flatout.freeze)" if acts else ""
        return f"{_words(event)} {why}{do}"

    def weighs(self, index: int) -> bool:
        return self.noted.events[index].weighs

    def cut(self, prefix: list[int]) -> Cut | None:
        chosen = set(prefix)
        if not chosen or not chosen <= set(self.places.frozen):
            return None
        kept = self.places.kept(prefix)
        inputs = iter(self.noted.inputs)
        leaves = [(True, next(inputs)) if torch.is_tensor(x) else (False, x) for x in self.leaves]
        cut = Cut(
            self.model,
            self.name(prefix, kept),
            self.tensors(prefix),
            kept,
            self.forms,
            OutputStructure(self.spec, leaves),
            (plan_prefix(self.noted, chosen, kept), plan_rest(self.noted, chosen, kept)),
            self.modules(prefix),
            as_written=self.as_written,
            place=prefix,
            calls=self.calls(prefix, kept),
            around=self.around(prefix),
        )
        few = self.inputs(list(range(max(2, self.half))))
        features = _features_in_both_modes(cut, few)
        if features is None:
            return None
        cut.remember(few, features)
        return cut

    def calls(self, prefix: list[int], kept: list[int]) -> str:
        events = [self.noted.events[index] for index in prefix]
        result = [(e.path, e.name, e.constants, e.reads, e.gives()) for e in events]
        return hashlib.sha256(repr((result, kept)).encode()).hexdigest()[:16]

    def modules(self, prefix: list[int]) -> list[Any]:
        chosen = set(prefix)
        whole = [
            call.module
            for call in self.noted.calls
            if call.stop > call.start and chosen.issuperset(range(call.start, call.stop))
        ]
        leaves = [self.noted.events[index].module for index in prefix]
        return [part for part in [*whole, *leaves] if part is not None]

    def around(self, prefix: list[int]) -> list[Any]:
        chosen = set(prefix)
        calls = [call for call in self.noted.calls if not call.is_leaf]
        whole = [(call.module, set(range(call.start, call.stop))) for call in calls]
        return [self.model, *(part for part, own in whole if own & chosen and own - chosen)]

    def name(self, prefix: list[int], kept: list[int]) -> str:
        places = list(dict.fromkeys(self.where(prefix, number) for number in reversed(kept)))
        if len(places) > _NAMED:
            places = [*places[: _NAMED - 1], f"{len(places) - _NAMED + 1} more"]
        *most, last = places
        return f"behind {', '.join(most)} and {last}" if most else f"behind {last}"

    def where(self, prefix: list[int], number: int) -> str:
        if number in self.noted.inputs:
            several = len(self.noted.inputs) > 1
            return f"input {self.noted.inputs.index(number) + 1}" if several else "the inputs"
        for call in self.noted.calls:
            if call.given is not None and number in call.given.numbers():
                born = [n for e in self.noted.events[call.start : call.stop] for n in e.gives()]
                if number in born:
                    return f"{call.key.name} ({type(call.module).__name__})"
        return next(
            _words(self.noted.events[index])
            for index in prefix
            if number in self.noted.events[index].gives()
        )

    def tensors(self, prefix: list[int]) -> dict[str, torch.Tensor]:
        read = {id(t) for module in self.modules(prefix) for t in tensors_of(module)}
        chosen = set(prefix)
        others = {}
        for item in self.noted.tensors_read:
            if item.at in chosen if item.is_within else item.at <= prefix[-1]:
                read.add(id(item.tensor))
                if not item.is_in_module:
                    others[id(item.tensor)] = item.tensor
        named = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        for name, part in {"": self.model, **self.parts}.items():
            plain = {key: value for key, value in vars(part).items() if torch.is_tensor(value)}
            named |= {f"{name}.{key}".lstrip("."): value for key, value in plain.items()}
        for tensor in named.values():
            others.pop(id(tensor), None)
        named |= {f"read as number {at}": value for at, value in enumerate(others.values())}
        return {name: t for name, t in named.items() if id(t) in read and not t.requires_grad}


def _features_if_it_holds(cut: Cut, inputs: Any) -> list[Any] | None:
    model = cut.model
    with _left_alone(model), torch.no_grad():
        try:
            with nothing_random():
                whole = adapter_of(model).outputs(inputs)
            with nothing_random():
                features = cut.prefix(inputs)
                kept = [x.clone() if torch.is_tensor(x) else x for x in features]
                parts = cut.rest(features)
        except Exception:
            return None
    return kept if _equal(whole, parts) else None


def _features_in_both_modes(cut: Cut, inputs: Any) -> list[Any] | None:
    trained = _features_if_it_holds(cut, inputs)
    if trained is None:
        return None
    parts = [(part, part.training) for part in cut.model.modules()]
    try:
        for part, _ in parts:
            part.training = False
        evaluated = _features_if_it_holds(cut, inputs)
        is_near = evaluated is not None and all(map(_close, evaluated, trained))
        return trained if is_near else None
    finally:
        for part, training in parts:
            part.training = training


def _equal(a: Any, b: Any) -> bool:
    ones, spec = tree_flatten(a)
    others, other = tree_flatten(b)
    return spec == other and all(
        is_same(x, y) if torch.is_tensor(x) else x is y or bool(x == y)
        for x, y in zip(ones, others, strict=True)
    )


def _same_rows(form: Form, own: torch.Tensor, other: torch.Tensor, rows: list[int]) -> bool:
    if form.axis is None:
        return is_same(own, other)
    a, b = form.rows(own), form.rows(other)
    here = slice(rows[0], rows[-1] + 1)  # slices give views
    places = [at for at in range(len(b)) if at not in rows]
    there = slice(places[0], places[-1] + 1)
    return is_same(a[here], b[here]) and _close(a[here], b[there])


def _near(form: Form, own: torch.Tensor, few: torch.Tensor, count: int) -> bool:
    if form.axis is None:
        return is_same(own, few)
    return _close(form.rows(own)[:count], form.rows(few))


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return is_same(a, b) or (a.dtype == b.dtype and is_near(a, b))


def _words(event: Event) -> str:
    if event.module is not None:
        return f"{event.name} ({type(event.module).__name__})"
    where = f" in {event.path[-1].rpartition('#')[0]}" if event.path else ""
    return f"{event.name.removeprefix(':')}{where}"


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _hooked(module: Any) -> str:
    return "has a hook" if any(getattr(module, name, None) for name in _HOOKS) else ""


def _hook_around(model: Any) -> str | None:
    if any(getattr(every_module, f"_global{name}") for name in _HOOKS):
        return "a hook is registered for all modules: it would miss the frozen ones"
    if _hooked(model):
        return f"{type(model).__name__} has its own hook, which expects the model's inputs"
    return None


def _attributes(model: Any) -> dict[int, tuple[Any, dict[str, Any]]]:
    parts = [model, *adapter_of(model).parts().values()]
    return {id(part): (part, dict(vars(part))) for part in parts}


def _changed(before: dict[int, Any], after: dict[int, Any]) -> dict[int, str]:
    result = {}
    for number, (_, own) in after.items():
        old = before[number][1]
        names = [n for n in _changed_names(own, old) if not _equal_words(own.get(n), old.get(n))]
        if names:
            result[number] = f"sets its attribute {names[0]} in forward"
    return result


def _equal_words(a: Any, b: Any) -> bool:
    return isinstance(a, (int, float, str)) and type(a) is type(b) and a == b


_NONE = object()


@contextmanager
def _left_alone(model: Any) -> Iterator[None]:
    attributes = _attributes(model)
    tensors = [(t, t.detach().clone()) for t in adapter_of(model).untrained()]
    try:
        yield
    finally:
        for part, before in attributes.values():
            for name in _changed_names(vars(part), before):
                if name in before:
                    vars(part)[name] = before[name]
                else:
                    del vars(part)[name]
        with torch.no_grad():
            for tensor, value in tensors:
                if not is_same(tensor, value):
                    tensor.copy_(value)


def _changed_names(own: dict[str, Any], before: dict[str, Any]) -> list[str]:
    return [n for n in {**own, **before} if own.get(n, _NONE) is not before.get(n, _NONE)]
