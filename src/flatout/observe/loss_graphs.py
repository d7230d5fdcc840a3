"""Graphs of losses, inspected for mistakes when backward is called, in a few steps.

The nodes of a graph give their operators, shapes and saved tensors. Where a mistake is found, torch
records the lines of the next step's nodes, by its anomaly mode without the search for NaN.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import ref

from flatout.hooks import is_anything_compiled
from flatout.observe.counted_steps import is_counted
from flatout.observe.cut_terms import cut_terms, line_that_makes
from flatout.observe.graph_nodes import children, first_child, node_of
from flatout.observe.later_backwards import LaterBackwards
from flatout.observe.observation import InLoss, Site
from flatout.observe.padded_targets import padding_in
from flatout.observe.quick import AFTER_STEPS
from flatout.observe.single_scores import single_scores
from flatout.observe.sites import here, is_users
from flatout.observe.watch import Watch

# _FROM: step after which the hook for the first steps is gone; _UNTIL: last inspected step;
# _ASKED_AFTER: steps after which unregistered parameters are searched; _NAMED: maximum number of
# names of such parameters that are recorded.
_FROM, _UNTIL = AFTER_STEPS, AFTER_STEPS + 4
_ASKED_AFTER = (4, 20)
_NAMED = 20
# Maximum number of nodes of a graph that are inspected.
_NODES = 20_000
# Operators that only reshape or select, so that a row keeps its values.
_VIEWS = frozenset(
    f"{name}Backward0"
    for name in (
        "Alias", "Clone", "Index", "MaskedSelect", "Permute", "ReshapeAlias", "Select", "Slice",
        "Squeeze", "T", "ToCopy", "Transpose", "UnsafeView", "Unsqueeze", "View",
    )
) | {"SqueezeBackward1", "SqueezeBackward2", "SqueezeBackward3"}  # fmt: skip
_SHAPED = frozenset(("UnsqueezeBackward0", "ViewBackward0", "IndexBackward0"))
_ACTIVATIONS = {
    "LogSoftmaxBackward0": "log_softmax",
    "SoftmaxBackward0": "softmax",
    "SigmoidBackward0": "sigmoid",
}
# Losses by node: the name, and the activations that the loss applies itself or that contradict the
# loss.
_LOSSES = {
    "LogSoftmaxBackward0": ("cross_entropy", ("softmax", "sigmoid", "log_softmax")),
    "NllLossBackward0": ("nll_loss", ("softmax", "sigmoid")),
    "NllLoss2DBackward0": ("nll_loss", ("softmax", "sigmoid")),
    "BinaryCrossEntropyWithLogitsBackward0": (
        "binary_cross_entropy_with_logits",
        ("sigmoid", "softmax"),
    ),
}
# Activations that bound scores, although a loss takes any number.
_BOUNDED = {"ReluBackward0": "ReLU", "TanhBackward0": "tanh"}
_NLL = ("NllLossBackward0", "NllLoss2DBackward0")
_LAYERS = ("AddmmBackward0", "MmBackward0", "ConvolutionBackward0", "LinearBackward0")
_DISTANCES = ("MseLossBackward0", "SmoothL1LossBackward0", "HuberLossBackward0")
_REDUCED = (
    *_NLL,
    *_DISTANCES,
    "BinaryCrossEntropyWithLogitsBackward0",
    "BinaryCrossEntropyBackward0",
)
_MEANS, _SUMS = 1, 2  # torch's codes of the reductions "mean" and "sum"
# Keys of `detail` whose values are summed over several graphs.
_ADDED = ("hidden", "of", "padded")
_FILE = re.compile(r'File "(.*)", line (\d+)')


class _Sign(NamedTuple):
    kind: str
    node: Any
    detail: dict[str, Any]


class _Reduced(NamedTuple):
    """A loss on which backward was called: its batch, its reduction, and the line."""

    batch: Any
    how: Any
    site: Site | None


class LossGraphs:
    """Inspection of the graphs that backward is called on.

    Attributes:
        looks: number of inspected graphs.
        signs: evidence of mistakes, by kind and by the functions involved.
        reached: parameters that a loss has reached, by the parameter's id.
    """

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._torch = torch
        self._watch = watch
        self._later = LaterBackwards(torch, watch, self._look)
        self._noted: tuple[bool, bool] | None = None
        self._renew()
        watch.before_backward.append(self._look)
        watch.with_gradients.append(self._before_step)
        watch.before_clipping.append(self._before_clipping)
        watch.on_renewal.append(self._renew)
        watch.on_training.append(self._begin_again)
        for step in _ASKED_AFTER:
            watch.at_each(step, self._find_unregistered)
        watch.at_each(_FROM, self._later.open)
        watch.at_each(_UNTIL, self._close)

    def _close(self) -> None:
        self._later.close()
        self._end_noting()

    def _renew(self) -> None:
        self.looks = 0
        self.signs: dict[tuple[str, str], InLoss] = {}
        self.reached: dict[int, ref[Any]] = {}
        self._reduced: list[_Reduced] = []
        self._changes: int | None = None
        self._made: list[ref[Any]] = []  # tensors that ended terms of losses
        self._close()

    def _begin_again(self) -> None:
        self.reached.clear()
        self._reduced.clear()
        self._changes = None

    def _look(self, tensors: Any) -> None:
        roots = [tensors] if isinstance(tensors, self._torch.Tensor) else list(tensors)
        try:
            nodes = [node_of(root) for root in roots]
            findings = [item for node in nodes if node for item in self._findings(node)]
            self._note_reduction(nodes[0])
            has_new = sum(self._keep(item) for item in findings) > 0
            self.looks += 1
        except (RuntimeError, NotImplementedError) as error:
            # Saved tensors that were freed, or tensors without shapes: the script goes on.
            self._watch.notes[f"losses: the graph of one could not be read ({error})"] = None
            has_new = False
        if self._noted is not None:
            self._end_noting()
        elif has_new and not is_anything_compiled():
            torch = self._torch
            self._noted = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
            self._note_lines(True, self._noted[0] and self._noted[1])

    def _end_noting(self) -> None:
        if self._noted is not None:
            self._note_lines(*self._noted)
            self._noted = None

    def _note_lines(self, mode: bool, check_nan: bool) -> None:
        self._torch.set_anomaly_enabled(mode, check_nan)

    def _keep(self, value: _Sign) -> bool:
        key = value.kind, repr({name: value.detail.get(name) for name in ("outer", "inner")})
        fact = self.signs.get(key)
        if fact is None:
            fact = self.signs[key] = InLoss(value.kind)
        fact.count += 1
        fact.steps = max(fact.steps, self._watch.lanes.steps + 1)
        before, fact.detail = fact.detail, dict(value.detail)
        for name in _ADDED:
            if name in before:
                fact.detail[name] += before[name]
        if fact.site is None and (site := _site_of(value.node)) is not None:
            fact.site = line_that_makes(site) if value.kind == "cut" else site
        return fact.site is None

    def _note_reduction(self, node: Any) -> None:
        batch: Any = sum(loader.batches for loader in self._watch.loaders if loader.in_training)
        if node is not None and node is self._watch.scaled:
            node = first_child(node)  # the scaler later divides by its own factor
        how = node and _reduction(node)
        self._reduced.append(_Reduced(batch or self._watch.rows, how, here()))

    def _first_gradient(self) -> Any:
        return next(
            (t.grad for s in self._watch.optimizers for t in s.tensors() if _is_dense(t)), None
        )

    def _before_clipping(self) -> None:
        gradient = self._first_gradient()
        if self._changes is None and gradient is not None:
            self._changes = gradient._version

    def _before_step(self) -> None:
        several, self._reduced = self._reduced, []
        changes, self._changes = self._changes, None
        gradient = self._first_gradient()
        if len(several) < 2 or gradient is None:
            return
        means: tuple[str, ...] = ("mean",)
        if not _are_of_several_batches([item.batch for item in several]):
            # These batches are made on demand, so that their rows are in no table.
            sites, step = {item.site for item in several}, here()
            backward = sites.pop()
            if sites or backward is None or step is None or not is_counted(backward, step):
                return
            means = ("mean", "own mean")
        # Each accumulation changes a gradient once: a further change may have been the division.
        is_whole = (gradient._version if changes is None else changes) < len(several)
        if is_whole and all(item.how in means for item in several):
            fact = self.signs.setdefault(("undivided", ""), InLoss("undivided"))
            fact.count += 1
            fact.detail = {"backwards": len(several)}

    def _findings(self, root: Any) -> Iterator[_Sign]:
        yield from self._cut(root)
        for node, detail in single_scores(root):
            yield _Sign("single", node, detail)
        has_labels = False
        for node, parent in _nodes(root):
            name = node.name()
            if name == "torch::autograd::AccumulateGrad":
                variable = node.variable
                if isinstance(variable, self._torch.nn.Parameter):
                    self.reached.setdefault(id(variable), ref(variable))
                continue
            if name in _LOSSES:
                yield from _twice(node, name, parent)
            if name in _NLL and not has_labels:
                has_labels = True
                padding = padding_in(node)
                if padding is not None:
                    yield _Sign("padding", node, padding)
            if name in _DISTANCES or name == "SubBackward0":
                yield from _pairs(self._torch, node, name, parent)
            if name == "NanToNumBackward0":
                hidden = int((~node._saved_self.isfinite()).sum())
                if hidden:
                    yield _Sign("nan", node, {"hidden": hidden, "of": node._saved_self.numel()})

    def _cut(self, root: Any) -> Iterator[_Sign]:
        optimizers = self._watch.optimizers  # complete only after they have stepped
        trained = {id(tensor) for optimizer in optimizers for tensor in optimizer.tensors()}
        terms = list(cut_terms(self._torch, root, trained)) if trained else []
        known = {id(item) for reference in self._made if (item := reference()) is not None}
        had = bool(self._made)
        for node, tensors in terms:
            if had and known.isdisjoint(map(id, tensors)):
                yield _Sign("cut", node, {"shape": list(tensors[0].shape)})
            self._made += [ref(tensor) for tensor in tensors if id(tensor) not in known]

    def _find_unregistered(self) -> None:
        # `is not None`, since a compiled module may have a `__len__` that raises.
        models = [(model, model.ref()) for model in self._watch.models]
        modules = [(item, module) for item, module in models if module is not None]
        known = {id(parameter) for _, module in modules for parameter in module.parameters()}
        known |= {
            id(tensor) for optimizer in self._watch.optimizers for tensor in optimizer.tensors()
        }
        alive = [item for reference in self.reached.values() if (item := reference()) is not None]
        missed = {id(item) for item in alive if id(item) not in known and item.requires_grad}
        for seen, module in modules:
            held = _held_in_lists(module, missed) if missed else []
            if held or not self._watch.began:  # findings of an earlier training are kept
                seen.facts.unregistered = held


def _held_in_lists(model: Any, wanted: set[int]) -> list[str]:
    result = []
    for prefix, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute.startswith("_") or not isinstance(value, (list, tuple, dict)):
                continue
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                path = f"{prefix}.{attribute}[{key!r}]".lstrip(".")
                if id(item) in wanted:
                    result.append(f"{path} {list(item.shape)}")
                elif hasattr(item, "named_parameters"):
                    named = [(n, t) for n, t in item.named_parameters() if id(t) in wanted]
                    result += [f"{path}.{name} {list(tensor.shape)}" for name, tensor in named]
    return result[:_NAMED]


def _nodes(root: Any) -> Iterator[tuple[Any, Any]]:
    known = {root}
    todo = [(root, None)]
    while todo and len(known) < _NODES:
        node, parent = todo.pop()
        yield node, parent
        for child in children(node):
            if child is not None and child not in known:
                known.add(child)
                todo.append((child, node))


def _is_dense(tensor: Any) -> bool:
    return tensor.grad is not None and not tensor.grad.is_sparse


def _are_of_several_batches(batches: list[Any]) -> bool:
    different = set(batches)
    if len(different) < len(batches) or None in different:
        return False
    # Losses of several tables may be intended, such as of labeled and unlabeled samples.
    return len({batch[0] for batch in different if isinstance(batch, tuple)}) < 2


def _reduction(node: Any) -> str:
    while node is not None:
        name = node.name()
        if name in _REDUCED:
            return {_MEANS: "mean", _SUMS: "sum"}.get(node._saved_reduction, "")
        if name in ("DivBackward0", "MulBackward0"):
            return "divided"
        if name in ("MeanBackward0", "MeanBackward1"):
            return "own mean"
        if name not in _VIEWS and name != "AddBackward0":
            return ""
        node = first_child(node)
    return ""


def _input(node: Any) -> Any:
    child = first_child(node)
    while child is not None and child.name() in _VIEWS:
        child = first_child(child)
    return child


def _twice(node: Any, name: str, parent: Any) -> Iterator[_Sign]:
    outer, own = _LOSSES[name]
    inner = _input(node)
    if inner is None:
        return
    if name == "LogSoftmaxBackward0" and (parent is None or parent.name() not in _NLL):
        outer = "log_softmax"
    activation = _ACTIVATIONS.get(inner.name(), "")
    if activation in own:
        yield _Sign("twice", node, {"outer": outer, "inner": activation})
    elif name in _NLL and inner.name() in _LAYERS:
        yield _Sign("twice", node, {"outer": outer, "inner": "a layer"})
    elif inner.name() in _BOUNDED and outer in (
        "cross_entropy",
        "binary_cross_entropy_with_logits",
    ):
        yield _Sign("bounded", node, {"outer": outer, "by": _BOUNDED[inner.name()]})


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in node._input_metadata[0].shape)


def _pairs(torch: Any, node: Any, name: str, parent: Any) -> Iterator[_Sign]:
    tracked = [child for child in children(node) if child is not None]
    full = tuple(node._saved_self.shape) if name in _DISTANCES else _shape(node)
    if len(full) != 2 or full[0] != full[1] or full[0] < 2 or len(tracked) not in (1, 2):
        return
    rows = full[0]
    shape, source = _unexpanded(tracked[0])
    if len(tracked) == 2:  # both depend on parameters: reshaping means that pairs are intended
        others, other = _unexpanded(tracked[1])
        is_plain = not any(item is not None and item.name() in _SHAPED for item in (source, other))
        if is_plain and {shape, others} == {(rows, 1), (rows,)}:
            yield _Sign("pairs", node, {"output": list(shape), "target": list(others)})
        return
    if shape not in ((rows, 1), (rows,)):
        return
    target = (rows,) if shape == (rows, 1) else (rows, 1)
    if name in _DISTANCES:
        strides = node._saved_target.stride()
        is_broadcast = strides[0 if shape == (rows, 1) else 1] == 0
    else:
        explicit = source is not None and source.name() in _SHAPED
        is_broadcast = not explicit and _is_outer(torch, parent, shape)
    if is_broadcast:
        yield _Sign("pairs", node, {"output": list(shape), "target": list(target)})


def _unexpanded(node: Any) -> tuple[tuple[int, ...], Any]:
    if node.name() != "ExpandBackward0":
        return _shape(node), node
    return tuple(int(size) for size in node._saved_self_sym_sizes), first_child(node)


def _is_outer(torch: Any, parent: Any, shape: tuple[int, ...]) -> bool:
    saved = getattr(parent, "_saved_self", None) if parent is not None else None
    if saved is None or saved.dim() != 2 or saved.shape[0] != saved.shape[1]:
        return False
    apart = saved - saved[:1]
    return bool(torch.allclose(apart, apart[:, :1].expand_as(apart), rtol=1e-3, atol=1e-4))


def _site_of(node: Any) -> Site | None:
    for item in reversed(node.metadata.get("traceback_", ())):
        for file, line in reversed(_FILE.findall(item)):
            if is_users(file):
                return Site(file, int(line))
    return None
