"""Input columns of a model that contain the target of its loss.

The samples of the first steps are compared with the targets of the loss that follows. The model
must be the only one, called once per backward pass, with one target per sample (loss_targets.py).

A column is reported if its numbers equal the target, or identify the class. A column in other units
is reported only if factor and offset are not round: in synthetic data the target often is 2 * x + 1
by design.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flatout.hooks import after_forward, is_anything_compiled
from flatout.observe.later_backwards import LaterBackwards
from flatout.observe.loss_targets import target_under
from flatout.observe.models import SeenModel
from flatout.observe.observation import LeakedTarget, Site
from flatout.observe.quick import AFTER_STEPS
from flatout.observe.sites import here
from flatout.observe.watch import Watch

# _FROM: step after which the hook for the first steps is gone; _UNTIL: step of the decision.
_FROM, _UNTIL = AFTER_STEPS, AFTER_STEPS + 4
# _SAMPLES: maximum number of compared samples; _COLUMNS: maximum number of compared columns of a
# sample. _FEWEST_SAMPLES, _FEWEST_COLUMNS: minimum number of samples and columns; _FEWEST_OTHERS: a
# comparison in other units needs more columns than this.
_SAMPLES, _COLUMNS = 512, 4096
_FEWEST_SAMPLES, _FEWEST_COLUMNS, _FEWEST_OTHERS = 32, 2, 3
# _PICTURES: number of dimensions of a batch of images; _NUMBERS: maximum number of values of an
# image; _KEPT: maximum number of columns kept that match the target in the first batch; about the
# same number of other columns is kept; _ALIKE: smallest correlation with the target that counts as
# a match; _MOST: largest share of matching columns, since an image that shows the target itself has
# more.
_PICTURES, _NUMBERS, _KEPT, _ALIKE, _MOST = 4, 2**18, 64, 0.999, 0.1
_AT_ONCE = 2**23  # maximum number of values of a batch that are compared
# Smallest negative logarithm of the probability that a match is a coincidence.
_CHANCE = 25.0
# _ROUNDING: largest deviation of a column in other units, relative to the target's standard
# deviation; _NEAR: largest correlation of any other column, since windows of a ramp all correlate.
_ROUNDING, _NEAR = 1e-4, 0.95
# _DIGITS: maximum number of digits of a round factor or offset; _ROUND: relative tolerance for
# rounding.
_DIGITS, _ROUND = 3, 2e-5
# Largest share of samples, beyond chance, in which another column may equal the target too, as
# where a series is constant.
_STANDS_STILL = 0.5


class LeakedTargets:
    """Comparison of input columns with targets, in the first steps of each training."""

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._torch = torch
        self._watch = watch
        self._later = LaterBackwards(torch, watch, self._look)
        self._found: list[LeakedTarget] = []
        self._handles: dict[int, Any] = {}  # hooks on models, by id
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
        self._decide()
        self._is_over = False

    def _begin(self) -> None:
        self._calls: list[tuple[Any, Site | None]] = []  # calls since the last backward pass
        self._rows: list[Any] = []
        self._targets: list[Any] = []
        self._are_classes = False
        self._kept: Any = None  # compared columns of images
        self._output: Any = None
        self._unhook()
        self._shape: tuple[int, ...] = ()
        self._site: Site | None = None
        self._is_over = False

    @property
    def found(self) -> list[LeakedTarget]:
        """Findings so far, even if the script ended before the decision."""
        self._decide()
        return self._found

    def _called(self, model: SeenModel, batch: Any, is_trained: bool) -> None:
        if is_trained and not self._is_over and len(self._calls) < 2:
            self._calls.append((batch, here()))
            module: Any = model.ref()
            if module is not None and id(module) not in self._handles and self._is_plain(model):
                self._handles[id(module)] = after_forward(module, self._gives)

    def _is_plain(self, model: SeenModel) -> bool:
        module: Any = model.ref()
        is_compiled = isinstance(module, self._torch.jit.ScriptModule) or (
            hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        )
        return not (model.facts.is_told or is_compiled or is_anything_compiled())

    def _gives(self, module: Any, args: Any, output: Any) -> None:
        is_one = self._torch.is_tensor(output) and output.grad_fn is not None
        self._output = output if is_one else None

    def _unhook(self) -> None:
        while self._handles:
            self._handles.popitem()[1].remove()

    def _look(self, tensors: Any) -> None:
        calls, self._calls = self._calls, []
        output, self._output = self._output, None
        roots = [tensors] if self._torch.is_tensor(tensors) else list(tensors)
        if self._is_over or len(calls) != 1 or len(roots) != 1 or roots[0].grad_fn is None:
            return
        batch, site = calls[0]
        if not self._is_comparable(batch):
            return
        try:
            target = target_under(self._torch, roots[0].grad_fn, output)
        except (RuntimeError, NotImplementedError):
            return  # saved tensors were freed, or this node has none
        if target is None or target.values.numel() != len(batch):
            return
        if self._shape not in ((), tuple(batch.shape[1:])):
            return
        flat = batch.detach().reshape(len(batch), -1)
        flat = flat[: max(_FEWEST_SAMPLES, _AT_ONCE // flat.shape[1])]
        values = target.as_column_of(self._torch, flat).detach().reshape(-1)[: len(flat)]
        if batch.dim() == _PICTURES:
            flat = self._of_pictures(flat, values)
            if flat is None:
                return
        self._shape, self._site = tuple(batch.shape[1:]), self._site or site
        self._are_classes = target.are_classes
        self._rows.append(_flat(flat))
        self._targets.append(_flat(values).reshape(-1))
        if sum(map(len, self._targets)) >= _SAMPLES:
            self._decide()

    def _of_pictures(self, flat: Any, target: Any) -> Any:
        if self._kept is None:
            apart, wanted = flat - flat.mean(0), (target - target.double().mean()).to(flat)
            norms = apart.norm(dim=0) * wanted.norm()
            like = (apart * wanted[:, None]).sum(0).abs() / norms.clamp(min=1e-30)
            alike = (like > _ALIKE).nonzero().reshape(-1)
            if not bool(wanted.any()):
                return None  # a batch of a single class
            if not 0 < len(alike) <= min(_KEPT, _MOST * flat.shape[1]):
                self._is_over = True  # no column matches, or the image shows the target itself
                return None
            step = max(1, flat.shape[1] // _KEPT)
            some = self._torch.arange(0, flat.shape[1], step, device=flat.device)
            self._kept = self._torch.cat([alike, some]).unique()
        return flat[:, self._kept]

    def _is_comparable(self, batch: Any) -> bool:
        is_known = self._torch.is_tensor(batch) and batch.dim() in (2, 3, _PICTURES)
        if not is_known or not len(batch):
            return False
        is_plain = batch.dtype in (self._torch.float32, self._torch.float64)
        columns = batch.numel() // len(batch)
        most = _NUMBERS if batch.dim() == _PICTURES else _COLUMNS
        return is_plain and not batch.is_meta and _FEWEST_COLUMNS <= columns <= most

    def _decide(self) -> None:
        self._later.close()
        rows, targets = self._rows, self._targets
        shape, site, kept = self._shape, self._site, self._kept
        are_classes = self._are_classes
        self._begin()
        self._is_over = True
        if not targets:
            return
        import numpy

        both = numpy.concatenate(rows), numpy.concatenate(targets)
        found = leaking_column(*both, shape, are_classes=are_classes)
        if found is not None and not any(item.site == site for item in self._found):
            column = found.column if kept is None else int(kept[found.column])
            self._found.append(replace(found, column=column, site=site, shape=list(shape)))


def _flat(tensor: Any) -> Any:
    plain = tensor.detach()[:_SAMPLES]
    return plain.reshape(len(plain), -1).double().cpu().numpy()


def leaking_column(
    rows: Any, target: Any, shape: tuple[int, ...], *, are_classes: bool = False
) -> LeakedTarget | None:
    """Return the column that equals the target, or follows it in other units; None without one."""
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
    found = _in_other_units(rows, target, len(values), is_picture=len(shape) == _PICTURES - 1)
    is_class = are_classes and len(values) <= len(target) // 4
    return None if found is None or not (is_class or _is_of_data(found, rows, target)) else found


def _is_like_series(others: Any, target: Any, values: Any) -> bool:
    import numpy

    if len(values) <= len(target) // 4:  # few values, which any column may contain
        return any(_tells(column, target) for column in others.T)
    return any(numpy.isin(target, column).mean() > _STANDS_STILL for column in others.T)


def _tells(column: Any, target: Any) -> bool:
    import numpy

    values = numpy.unique(column)
    pairs = numpy.unique(numpy.stack([column, target]), axis=1).shape[1]
    return 1 < len(values) <= len(target) // 4 and pairs == len(values)


def _is_last(copies: Any, shape: tuple[int, ...]) -> bool:
    if len(shape) != 2:
        return len(shape) == 1 and bool(copies[-1])
    places = copies.reshape(shape)
    return bool(places[-1].any() or places[:, -1].any())


def _in_other_units(
    rows: Any, target: Any, values: int, *, is_picture: bool
) -> LeakedTarget | None:
    import numpy

    if rows.shape[1] <= _FEWEST_OTHERS:
        return None
    apart = rows - rows.mean(0)
    wanted = target - target.mean()
    with numpy.errstate(divide="ignore", invalid="ignore"):
        slopes = (apart * wanted[:, None]).sum(0) / (apart**2).sum(0)
        missed = abs(apart * slopes - wanted[:, None]).max(0) / wanted.std()
        like = abs(slopes) * apart.std(0) / wanted.std()  # the correlation
    follows = missed < _ROUNDING
    is_some = follows.any() and (is_picture or follows.sum() == 1)
    if not is_some or bool((numpy.nan_to_num(like[~follows]) > _NEAR).any()):
        return None
    at = int(numpy.flatnonzero(follows)[0])
    return LeakedTarget(at, float(slopes[at]), len(target), values)


def _is_of_data(found: LeakedTarget, rows: Any, target: Any) -> bool:
    added = float(target.mean() - found.factor * rows[:, found.column].mean())
    off = _ROUND * float(target.std())
    return not (
        abs(found.factor - float(f"{found.factor:.{_DIGITS - 1}e}")) <= _ROUND * abs(found.factor)
        and abs(added - float(f"{added:.{_DIGITS - 1}e}")) <= off
    )
