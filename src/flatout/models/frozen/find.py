"""Where a model's forward may be cut: what is before gives the same for a sample each time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from flatout.models.frozen.calls import call_with, parts_of, taking_part
from flatout.models.frozen.cut import Cut, forward_of
from flatout.models.frozen.form import Form
from flatout.models.frozen.plan import plan_prefix, plan_rest
from flatout.models.frozen.recording import (
    Event,
    Given,
    Recording,
    nothing_random,
    store_of,
    tensors_of,
)
from flatout.models.frozen.stand_in import StandIn, Uncut

# So many samples of a batch are looked at.
_SAMPLES = 4
# In other places of a batch, and in smaller ones, results may differ by so much of the largest.
_SAME = {torch.float64: 1e-8, torch.float32: 1e-4}
_SAME_IN_HALF = 2e-2
# So many modules may be found that cannot be looked into.
_ATTEMPTS = 8


@dataclass(frozen=True)
class Cuts:
    """Where a model may be cut.

    Attributes:
        cuts: from the input to the last legal place. One is left out where a later one keeps no
            more bytes.
        hindrance: which layer keeps more from being frozen, and what to do; "" if none does.
    """

    cuts: list[Cut] = field(default_factory=list)
    hindrance: str = ""


def find_cuts(model: Any, inputs: Any) -> Cuts:
    """The places at which `model` may be cut, in the state and mode that it is in.

    A part of the forward is frozen if no parameter in it is trained, nothing in it acts in training
    (dropout, BatchNorm with the batch's statistics), nothing draws random numbers, and what it
    gives for a sample does not depend on the batch's other samples, which is tried out: with others
    in their place the numbers must stay the same bit for bit. Each cut's two parts were run, and
    gave what the whole forward gives, bit for bit.

    Parameters, buffers, random streams and the modules' plain attributes stay as they are.

    Args:
        model: a torch module, or a Keras model on torch.
        inputs: of a batch of at least two samples, as the model takes them: a tensor, a tuple, or
            a mapping by argument. Its first dimension is the samples'. Called in the autocast of
            the training steps.
    """
    try:
        with _left_alone(model), torch.enable_grad():
            return _Search(model, inputs).cuts()
    except Uncut as error:
        return Cuts(hindrance=str(error))


class _Search:
    def __init__(self, model: Any, inputs: Any) -> None:
        self.model = model
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
        self.parts = parts_of(model)
        self.opaque: set[str] = set()

    def inputs(self, rows: list[int]) -> Any:
        """Those of some of the samples."""
        return self.spec.unflatten(
            [leaf[rows] if torch.is_tensor(leaf) else leaf for leaf in self.leaves]
        )

    def note(self, rows: list[int]) -> Recording:
        """A forward of these samples."""
        while True:
            noted = Recording(self.parts, self.opaque)
            leaves = self.spec.flatten_up_to(self.inputs(rows))
            made = [noted.take(leaf) if torch.is_tensor(leaf) else leaf for leaf in leaves]
            try:
                with nothing_random(), taking_part(noted, self.parts.items()), noted:
                    given = call_with(self.model, self.spec.unflatten(made), forward_of(self.model))
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
            noted.given = Given(
                spec,
                [(True, x.number) if isinstance(x, StandIn) else (False, x) for x in leaves],
            )
            return noted

    def cuts(self) -> Cuts:
        every = list(range(2 * self.half))
        first, second = every[: self.half], every[self.half :]
        self.noted = self.note(every)
        self.others = [
            (self.note([*first, *first]), first),
            (self.note([*second, *second]), second),
        ]
        self.few = self.note(first)
        self.check_all_alike()
        self.forms = self.find_forms()
        reasons = self.reasons()
        chosen = self.closure(reasons)
        cuts = [cut for place in self.places(chosen) if (cut := self.cut(place)) is not None]
        return Cuts(cuts, self.hindrance(chosen, reasons))

    def check_all_alike(self) -> None:
        """That each of the runs made the same calls."""
        own = [(event.path, event.name, event.reads) for event in self.noted.events]
        for noted in (self.few, *(other for other, _ in self.others)):
            if [(event.path, event.name, event.reads) for event in noted.events] != own:
                raise Uncut("forward makes other calls for other samples")

    def find_forms(self) -> dict[int, Form]:
        forms = {}
        for number, value in self.noted.values.items():
            form = Form.of(value, 2 * self.half, self.few.values[number], self.half)
            if form is not None:
                forms[number] = form
        return forms

    # -- what is frozen ------------------------------------------------------------------------

    def reasons(self) -> list[str | None]:
        """For each event why it is not frozen: "" if something in it is trained; None if it may be.

        What it is given is not asked here.
        """
        found: list[str | None] = []
        stop = self.noted.stopped_at
        for index, event in enumerate(self.noted.events):
            if stop is not None and index >= stop:
                found.append(self.noted.stopped_why)
            elif event.is_trained:
                found.append("")
            else:
                found.append(event.why or _hooked(event) or self.coupled(event) or None)
        return found

    def coupled(self, event: Event) -> str:
        """Why its results are not a sample's own; "" if they are."""
        for number in event.gives():
            form = self.forms.get(number)
            if form is None:
                return "gives a tensor whose shape follows no rule"
            own = self.noted.values[number]
            for other, rows in self.others:
                if not _same_rows(form, own, other.values[number], rows):
                    return "gives for a sample what depends on the rest of its batch"
            if not _near(form, own, self.few.values[number], self.half):
                return "gives for a sample what depends on the size of its batch"
        return ""

    def closure(self, reasons: list[str | None]) -> list[int]:
        """The events that are frozen, with all that they are given."""
        frozen, chosen = set(self.noted.inputs), []
        for index, event in enumerate(self.noted.events):
            if reasons[index] is None and not event.from_outside and frozen.issuperset(event.reads):
                frozen.update(event.gives())
                chosen.append(index)
        return chosen

    def hindrance(self, chosen: list[int], reasons: list[str | None]) -> str:
        """What else would be frozen but for one layer."""
        without = self.closure([reason if reason == "" else None for reason in reasons])
        more = [index for index in without if index not in set(chosen)]
        if not any(self.weighs(index) for index in more):
            return ""
        first = next(index for index in more if reasons[index])
        event = self.noted.events[first]
        return f"{_words(event)} {reasons[first]}: hold it in evaluation (flatout.freeze)"

    def weighs(self, index: int) -> bool:
        """Whether an event has weights of its own."""
        module = self.noted.events[index].module
        return module is not None and any(True for _ in module.parameters())

    # -- places --------------------------------------------------------------------------------

    def places(self, chosen: list[int]) -> list[tuple[list[int], list[int]]]:
        """Each sensible prefix, with the values that are kept of it."""
        assert self.noted.given is not None
        until: dict[int, float] = {}
        order = {index: at for at, index in enumerate(chosen, 1)}
        for index, event in enumerate(self.noted.events):
            for number in event.reads:
                until[number] = max(until.get(number, 0), order.get(index, float("inf")))
        until |= dict.fromkeys(self.noted.given.numbers(), float("inf"))
        found, least = [], float("inf")
        for at in range(len(chosen), 0, -1):
            prefix = chosen[:at]
            born = [*self.noted.inputs, *(n for i in prefix for n in self.noted.events[i].gives())]
            kept = [n for n in dict.fromkeys(born) if until.get(n, 0) > at]
            total = self.total(kept)
            if total is None or total >= least or not any(map(self.weighs, prefix)):
                continue
            if self.is_legal(set(prefix), kept):
                least = total
                found.append((prefix, kept))
        return found[::-1]

    def total(self, kept: list[int]) -> int | None:
        """Bytes of a sample; None where a value has no rows."""
        forms = [self.forms.get(number) for number in kept]
        if any(form is None or form.axis is None for form in forms):
            return None
        return sum(form.bytes_per_sample for form in forms if form is not None)

    def is_legal(self, prefix: set[int], kept: list[int]) -> bool:
        """Whether nothing that is kept is written by another part than its reader expects."""
        stores: dict[int, float] = {}
        for number in kept:
            store = store_of(self.noted.values[number])
            for index, event in enumerate(self.noted.events):
                if index not in prefix and number in event.reads:
                    stores[store] = min(stores.get(store, float("inf")), index)
        for index, event in enumerate(self.noted.events):
            for store in event.stores & stores.keys():
                if index not in prefix or index > stores[store]:
                    return False
        return True

    def cut(self, place: tuple[list[int], list[int]]) -> Cut | None:
        """The cut at a place; None if its two parts do not give what the whole gives."""
        prefix, kept = place
        chosen = set(prefix)
        inputs = iter(self.noted.inputs)
        leaves = [(True, next(inputs)) if torch.is_tensor(x) else (False, x) for x in self.leaves]
        cut = Cut(
            self.model,
            self.name(prefix, kept),
            self.tensors(prefix),
            kept,
            self.forms,
            Given(self.spec, leaves),
            (plan_prefix(self.noted, chosen, kept), plan_rest(self.noted, chosen, kept)),
            [part for i in prefix if (part := self.noted.events[i].module) is not None],
        )
        every = self.inputs(list(range(2 * self.half)))
        return cut if holds(cut, every) else None

    def name(self, prefix: list[int], kept: list[int]) -> str:
        """Where it is, in words."""
        latest = kept[-1]
        more = f" and {len(kept) - 1} more" if len(kept) > 1 else ""
        for call in self.noted.calls:
            if call.given is not None and latest in call.given.numbers():
                born = [n for e in self.noted.events[call.start : call.stop] for n in e.gives()]
                if latest in born:
                    return f"behind {call.key.name} ({type(call.module).__name__}){more}"
        for index in prefix:
            if latest in self.noted.events[index].gives():
                return f"behind {_words(self.noted.events[index])}{more}"
        return "at the inputs"

    def tensors(self, prefix: list[int]) -> dict[str, torch.Tensor]:
        """What the prefix reads of the model."""
        modules = [self.noted.events[index].module for index in prefix]
        read = {id(t) for module in modules if module is not None for t in tensors_of(module)}
        read |= {i for i, (at, _) in self.noted.tensors_read.items() if at <= prefix[-1]}
        named = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return {name: t for name, t in named.items() if id(t) in read and not t.requires_grad}


def holds(cut: Cut, inputs: Any) -> bool:
    """Whether a cut's two parts give for this batch what the whole model gives, bit for bit."""
    model = cut.model
    with _left_alone(model), torch.no_grad():
        try:
            with nothing_random():
                whole = call_with(model, inputs, forward_of(model))
            with nothing_random():
                parts = cut.rest(cut.prefix(inputs))
        except Exception:
            return False
    return _equal(whole, parts)


def _equal(a: Any, b: Any) -> bool:
    ones, spec = tree_flatten(a)
    others, other = tree_flatten(b)
    return spec == other and all(
        _same(x, y) if torch.is_tensor(x) else x is y or bool(x == y)
        for x, y in zip(ones, others, strict=True)
    )


def _same(a: Any, b: Any) -> bool:
    """Bit for bit."""
    if type(a) is not type(b) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_bits(a), _bits(b))


def _bits(value: torch.Tensor) -> torch.Tensor:
    value = value.detach().contiguous()
    return value.reshape(-1).view(torch.uint8) if value.numel() else value


def _same_rows(form: Form, own: torch.Tensor, other: torch.Tensor, rows: list[int]) -> bool:
    """Whether the samples that both batches have in the same places have the same results."""
    if form.axis is None:
        return _same(own.detach(), other.detach())
    a, b = form.rows(own.detach()), form.rows(other.detach())
    if not _same(a[rows], b[rows]):
        return False
    places = [at for at in range(len(b)) if at not in rows]
    return _close(a[rows], b[places])


def _near(form: Form, own: torch.Tensor, few: torch.Tensor, count: int) -> bool:
    if form.axis is None:
        return _same(own.detach(), few.detach())
    return _close(form.rows(own.detach())[:count], form.rows(few.detach()))


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    a, b = a.double(), b.double()
    apart = float((a - b).abs().max()) if a.numel() else 0.0
    share = _SAME.get(own, _SAME_IN_HALF) if (own := a.dtype) else 0.0
    return apart <= share * float(a.abs().max())


def _words(event: Event) -> str:
    if event.module is not None:
        return f"{event.name} ({type(event.module).__name__})"
    where = f" in {event.path[-1].rpartition('#')[0]}" if event.path else ""
    return f"{event.name.removeprefix(':')}{where}"


def _hooked(event: Event) -> str:
    module = event.module
    if module is None or not isinstance(module, nn.Module):
        return ""
    own = any(
        (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
    )
    return "has a hook" if own else ""


@contextmanager
def _left_alone(model: Any) -> Iterator[None]:
    """Afterwards the model's tensors and plain attributes are as they were before."""
    tensors = [(t, t._version, t.detach().clone()) for t in model.buffers()]
    tensors += [
        (p, p._version, p.detach().clone())
        for p in model.parameters()
        if not p.requires_grad and hasattr(model, "_flatten_layers")
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, version, value in tensors:
                if tensor._version != version:
                    tensor.copy_(value)
