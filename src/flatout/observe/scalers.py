"""Scalers of scikit-learn: on which samples each was fitted, and what it has made of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any
from weakref import ref

from flatout.hooks import when_imported, wrap
from flatout.observe.observation import Scaling, Site
from flatout.observe.samples import Samples, row_numbers
from flatout.observe.sites import here
from flatout.observe.watch import Watch

_KINDS = (
    "StandardScaler", "MinMaxScaler", "MaxAbsScaler", "RobustScaler", "QuantileTransformer",
    "PowerTransformer",
)  # fmt: skip
# Larger tables are not looked at, and no more scalers.
_NUMBERS, _SCALERS = 2**24, 32
# Share of the samples that a scaler has made which it was fitted on, if that is no chance.
_MANY = 0.01


class _Fitted:
    """One scaler that was fitted.

    Attributes:
        rows: of what it was fitted on, a number for each sample.
        made: the numbers of the samples that it has made of those.
    """

    def __init__(self, scaler: Any, site: Site | None, rows: list[int]) -> None:
        self.ref = ref(scaler)
        self.kind = type(scaler).__name__
        self.site = site
        self.rows = set(rows)
        self.made: set[int] = set()


class Scalers:
    """Watches fit and transform, before the training begins."""

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
        rows = _numbers(data)
        if rows:
            self._fitted.append(_Fitted(scaler, site, rows))

    def _transforming(self, original: Any) -> Any:
        def transform(scaler: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
            # It may write over what it is given.
            fitted = next((item for item in self._fitted if item.ref() is scaler), None)
            before = None if fitted is None or self._watch.lanes.steps else _numbers(data)
            result = original(scaler, data, *args, **kwargs)
            if fitted is not None and before:
                made = _numbers(result) or []
                pairs = zip(before, made, strict=False)
                fitted.made |= {new for old, new in pairs if old in fitted.rows}
            return result

        return transform

    def of_both(self, trained: Sequence[Samples], held_out: Samples) -> Scaling | None:
        """The scaler that was fitted on samples of the training and of the validation."""
        rows = held_out.rich_rows or []
        for item in self._fitted:
            of_held_out = sum(row in item.made for row in rows)
            of_trained = sum(row in item.made for part in trained for row in part.rich_rows or ())
            if of_trained and of_held_out >= max(1, _MANY * len(rows)):
                return Scaling(item.kind, item.site, len(item.rows), of_held_out)
        return None


def _numbers(data: Any) -> list[int] | None:
    import numpy as np

    data = getattr(data, "values", data)  # of a DataFrame
    if not isinstance(data, np.ndarray) or data.ndim != 2 or data.dtype.kind not in "iufb":
        return None
    if prod(data.shape) > _NUMBERS:
        return None
    return row_numbers(data.astype("float32"), range(len(data)))
