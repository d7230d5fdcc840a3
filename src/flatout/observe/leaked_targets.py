"""Whether a column of what the model gets is the target that its loss compares with.

The samples of the first steps are compared with the targets of the loss that follows, where one
model is called to be trained, once, and has one target a sample. What enters losses that save their
targets is seen: squared and absolute-like distances, and those of classes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flatout.observe.graph_nodes import nearest_nodes
from flatout.observe.later_backwards import LaterBackwards
from flatout.observe.observation import LeakedTarget, Site
from flatout.observe.quick import AFTER_STEPS
from flatout.observe.sites import here
from flatout.observe.watch import Watch

# Steps in which the hook for the first ones is gone, and the one in which it is decided.
_FROM, _UNTIL = AFTER_STEPS, AFTER_STEPS + 4
# Samples that are compared, columns of each, and nodes of a graph that are looked at.
_SAMPLES, _COLUMNS, _NODES = 512, 4096, 256
_FEWEST_SAMPLES, _FEWEST_COLUMNS = 32, 4
_LOSSES = (
    "NllLossBackward0",
    "MseLossBackward0",
    "SmoothL1LossBackward0",
    "HuberLossBackward0",
    "BinaryCrossEntropyBackward0",
    "BinaryCrossEntropyWithLogitsBackward0",
)
# How unlikely it has to be by chance, as a logarithm.
_CHANCE = 25.0
# A column of other units follows the target up to rounding, in terms of its deviation. No other
# may be as near as this: the windows of a ramp would be.
_ROUNDING, _NEAR = 1e-4, 0.95
# In this share of the samples or more, beyond chance, another one agrees too, as where a series
# stands still.
_STANDS_STILL = 0.5


class LeakedTargets:
    """Compares samples with targets, in the first steps of each training.

    Args:
        torch: the module.
        watch: what says when.
    """

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._torch = torch
        self._watch = watch
        self._later = LaterBackwards(torch, watch, self._look, is_once=True)
        self._found: list[LeakedTarget] = []
        self._begin()
        watch.on_batch.append(self._called)
        watch.before_backward.append(self._look)
        watch.at_each(_FROM, self._later.open)
        watch.at_each(_UNTIL, self._decide)
        watch.on_renewal.append(self._renew)
        watch.on_training.append(self._begin_again)

    def _renew(self) -> None:
        self._later.close()
        self._found.clear()
        self._begin()

    def _begin_again(self) -> None:
        """Another training."""
        self._decide()
        self._is_over = False

    def _begin(self) -> None:
        self._calls: list[tuple[Any, Site | None]] = []  # since the last backward pass
        self._rows: list[Any] = []
        self._targets: list[Any] = []
        self._shape: tuple[int, ...] = ()
        self._site: Site | None = None
        self._is_over = False

    @property
    def found(self) -> list[LeakedTarget]:
        """What was seen, also where the script has ended before it was decided."""
        self._decide()
        return self._found

    def _called(self, model: Any, batch: Any, is_trained: bool) -> None:
        """A model is called."""
        if is_trained and not self._is_over and len(self._calls) < 2:
            self._calls.append((batch, here()))

    def _look(self, tensors: Any) -> None:
        """Backward is about to be called on these."""
        calls, self._calls = self._calls, []
        roots = [tensors] if self._torch.is_tensor(tensors) else list(tensors)
        if self._is_over or len(calls) != 1 or len(roots) != 1 or roots[0].grad_fn is None:
            return
        batch, site = calls[0]
        if not self._is_comparable(batch):
            return
        try:
            target = _target_under(roots[0].grad_fn)
        except (RuntimeError, NotImplementedError):
            return  # numbers that were freed, or tensors of a kind without them
        if target is None or target.numel() != len(batch):
            return
        if self._shape not in ((), tuple(batch.shape[1:])):
            return
        self._shape, self._site = tuple(batch.shape[1:]), self._site or site
        self._rows.append(_flat(batch))
        self._targets.append(_flat(target).reshape(-1))
        if sum(map(len, self._targets)) >= _SAMPLES:
            self._decide()

    def _is_comparable(self, batch: Any) -> bool:
        """Whether it is a table of numbers, or windows of a series, of which a column can be more
        than the target alone."""
        if not self._torch.is_tensor(batch) or batch.dim() not in (2, 3) or not len(batch):
            return False
        is_plain = batch.dtype in (self._torch.float32, self._torch.float64)
        columns = batch.numel() // len(batch)
        return is_plain and not batch.is_meta and _FEWEST_COLUMNS <= columns <= _COLUMNS

    def _decide(self) -> None:
        """Enough was seen, or no more will come: of this training."""
        self._later.close()
        rows, targets = self._rows, self._targets
        shape, site = self._shape, self._site
        self._begin()
        self._is_over = True
        if not targets:
            return
        import numpy

        found = leaking_column(numpy.concatenate(rows), numpy.concatenate(targets), shape)
        if found is not None and not any(item.site == site for item in self._found):
            self._found.append(replace(found, site=site, shape=list(shape)))


def _flat(tensor: Any) -> Any:
    """As rows of numbers in float64."""
    plain = tensor.detach()[:_SAMPLES]
    return plain.reshape(len(plain), -1).double().cpu().numpy()


def _has_target(node: Any) -> bool:
    """Whether it is that of a loss which saves its target."""
    return node.name() in _LOSSES


def _target_under(root: Any) -> Any:
    """The target of the loss, where there is one loss alone that has any; None elsewhere."""
    nodes = nearest_nodes(root, _NODES, _has_target)
    found = [node._saved_target for node in nodes if _has_target(node)]
    return found[0] if len(found) == 1 and not found[0].requires_grad else None


def leaking_column(rows: Any, target: Any, shape: tuple[int, ...]) -> LeakedTarget | None:
    """The column that is the target, or follows it in other units.

    Args:
        rows: of numbers, one a sample.
        target: one number a sample.
        shape: of a sample; of several dimensions for the windows of a series.

    Returns:
        None without one, and where that may be chance or the nature of the data.
    """
    import numpy

    samples, columns = rows.shape
    values, counts = numpy.unique(target, return_counts=True)
    if samples < _FEWEST_SAMPLES or len(values) < 2 or not numpy.isfinite(target).all():
        return None
    commonest = float(counts.max()) / samples
    if -samples * numpy.log(commonest) < _CHANCE + numpy.log(columns):
        return None
    agrees = (rows == target[:, None]).mean(0)
    copies = agrees == 1
    if copies.any():
        others = rows[:, ~copies]
        at = int(numpy.flatnonzero(copies)[0])
        chance = float((counts / samples) @ (counts / samples))
        still = (agrees[~copies].max(initial=0) - chance) / (1 - chance)
        if still >= _STANDS_STILL or (
            _is_like_series(others, target, values) and not _is_last(copies, shape)
        ):
            return None
        return LeakedTarget(at, 1.0, samples, len(values))
    return _in_other_units(rows, target, len(values))


def _is_like_series(others: Any, target: Any, values: Any) -> bool:
    """Whether another column has the target's values too, as those of windows do; or, where it
    has few of them, tells which it is, as in a series that comes again and again."""
    import numpy

    if len(values) <= len(target) // 4:  # any column may have these
        return any(_tells(column, target) for column in others.T)
    return any(numpy.isin(target, column).mean() > _STANDS_STILL for column in others.T)


def _tells(column: Any, target: Any) -> bool:
    """Whether each value of a column comes with one value of the target alone, and often."""
    import numpy

    values = numpy.unique(column)
    pairs = numpy.unique(numpy.stack([column, target]), axis=1).shape[1]
    return 1 < len(values) <= len(target) // 4 and pairs == len(values)


def _is_last(copies: Any, shape: tuple[int, ...]) -> bool:
    """Whether it is the last step of windows: what is to be foretold lies within them."""
    if len(shape) == 1:
        return bool(copies[-1])
    places = copies.reshape(shape)
    return bool(places[-1].any() or places[:, -1].any())


def _in_other_units(rows: Any, target: Any, values: int) -> LeakedTarget | None:
    """The one column of which the target is a multiple, with something added."""
    import numpy

    apart = rows - rows.mean(0)
    wanted = target - target.mean()
    with numpy.errstate(divide="ignore", invalid="ignore"):
        slopes = (apart * wanted[:, None]).sum(0) / (apart**2).sum(0)
        missed = abs(apart * slopes - wanted[:, None]).max(0) / wanted.std()
        like = abs(slopes) * apart.std(0) / wanted.std()  # the correlation
    follows = missed < _ROUNDING
    if follows.sum() != 1 or bool((numpy.nan_to_num(like[~follows]) > _NEAR).any()):
        return None
    at = int(numpy.flatnonzero(follows)[0])
    return LeakedTarget(at, float(slopes[at]), len(target), values)
