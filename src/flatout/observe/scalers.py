"""Scalers of scikit-learn: the samples that each was fitted on, and the results."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any
from weakref import ref

from flatout.hooks import when_imported, wrap
from flatout.observe.chance import RICH, bits_of
from flatout.observe.observation import Scaling, Site
from flatout.observe.samples import Samples, numbers_in
from flatout.observe.sites import here
from flatout.observe.watch import Watch

_KINDS = (
    "StandardScaler", "MinMaxScaler", "MaxAbsScaler", "RobustScaler", "QuantileTransformer",
    "PowerTransformer",
)  # fmt: skip
# _NUMBERS: maximum number of values of a table; _SCALERS: maximum number of recorded scalers.
_NUMBERS, _SCALERS = 2**24, 32
# Smallest share of the samples that a scaler was fitted on, where samples are not equal by chance.
_MANY = 0.01
# Smallest share of the samples that a scaler was fitted on, where samples may be equal by chance.
_MOST = 0.9


class _Fitted:
    """A scaler that was fitted.

    Attributes:
        rows: hashes of the samples that the scaler was fitted on.
        made: hashes of its outputs for these samples.
        is_rich: whether no two samples are equal by chance.
        is_used: whether the scaler was used during training.
    """

    def __init__(self, scaler: Any, site: Site | None, rows: list[int], is_rich: bool) -> None:
        self.ref = ref(scaler)
        self.kind = type(scaler).__name__
        self.site = site
        self.rows = set(rows)
        self.made: set[int] = set()
        self.is_rich = is_rich
        self.is_used = False


class Scalers:
    """Record of fit and transform, before the training begins."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._fitted: list[_Fitted] = []
        when_imported("sklearn.preprocessing._data", self._hook)
        watch.on_renewal.append(self._fitted.clear)

    def _hook(self, module: Any) -> None:
        for name in _KINDS:
            owner = getattr(module, name, None)
            if owner is not None:
                wrap(owner, "fit", "observe", self._fitting)
                wrap(owner, "transform", "observe", self._transforming)

    def _fitting(self, original: Any) -> Any:
        def fit(scaler: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(scaler, data, *args, **kwargs)
            if not self._watch.lanes.steps and len(self._fitted) < _SCALERS:
                site = here(1)
                self._watch.aside(lambda: self._note(scaler, site, data))
            return result

        return fit

    def _note(self, scaler: Any, site: Site | None, data: Any) -> None:
        self._fitted[:] = [item for item in self._fitted if item.ref() is not scaler]
        table = _table(data)
        if table is not None and len(table):
            is_rich = bits_of(table) >= RICH
            self._fitted.append(_Fitted(scaler, site, numbers_in(table), is_rich))

    def _transforming(self, original: Any) -> Any:
        def transform(scaler: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
            # The input is hashed before, since transform may overwrite it.
            fitted = next((item for item in self._fitted if item.ref() is scaler), None)
            before = None if fitted is None or self._watch.lanes.steps else _table(data)
            numbers = [] if before is None else numbers_in(before)
            result = original(scaler, data, *args, **kwargs)
            if fitted is not None and self._watch.lanes.steps:
                fitted.is_used = True
            after = _table(result) if numbers else None
            if fitted is not None and after is not None:
                made = numbers_in(after)
                pairs = zip(numbers, made, strict=False)
                fitted.made |= {new for old, new in pairs if old in fitted.rows}
            return result

        return transform

    def of_both(self, trained: Sequence[Samples], held_out: Samples) -> Scaling | None:
        """Return the scaler that was fitted on samples of both training and validation."""
        of_training = {row for part in trained for row in part.rows or ()}
        others = [row for row in held_out.rows or () if row not in of_training]
        for item in self._fitted:
            # Outputs made before training, or inputs that are scaled during training.
            for known in (item.made, item.rows if item.is_used else set()):
                of_others = sum(row in known for row in others)
                least = _MANY if item.is_rich else _MOST
                if of_others >= max(1, least * len(others)) and len(of_training & known) >= max(
                    1, least * len(of_training)
                ):
                    return Scaling(item.kind, item.site, len(item.rows), of_others)
        return None


def _table(data: Any) -> Any:
    import numpy as np

    data = getattr(data, "values", data)  # a DataFrame has `values`
    if not isinstance(data, np.ndarray) or data.ndim != 2 or data.dtype.kind not in "iufb":
        return None
    return None if prod(data.shape) > _NUMBERS else data.astype("float32")
