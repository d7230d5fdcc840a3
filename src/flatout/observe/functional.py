"""Misused functions of torch.nn.functional, recorded in the first steps of each training.

`dropout` drops unless `training=` is passed. `kl_div` expects log-probabilities. A softmax over the
first dimension sums over the samples.
"""

from __future__ import annotations

import sys
from threading import get_ident
from typing import Any

from flatout.hooks import Hook, is_anything_compiled, wrap
from flatout.observe.batch_axis import leads_with_samples
from flatout.observe.observation import InLoss, OverBatch, Site
from flatout.observe.sites import here, is_users
from flatout.observe.watch import Watch

# Steps of each training between which functions are hooked: _FROM and _UNTIL.
_FROM, _UNTIL = 1, 5
# Largest value of a log-probability, for rounding.
_ROUNDING = 1e-3
_DROPOUTS = (
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
)  # fmt: skip


class Functional:
    """Record of misused functions, from some steps.

    Attributes:
        dropouts: lines where a module's forward calls dropout without `training=`.
        softmaxes: softmaxes over the samples of a batch, by line.
    """

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._torch = torch
        self._watch = watch
        self._hooks: list[Hook] = []
        self._renew()
        watch.at_each(_FROM, self._open)
        watch.at_each(_UNTIL, self._end)
        watch.on_renewal.append(self._renew)

    def _renew(self) -> None:
        self.dropouts: list[Site] = []
        self._divergences: dict[str, InLoss] = {}
        self.softmaxes: dict[Site, OverBatch] = {}
        self._end()

    @property
    def lines(self) -> list[InLoss]:
        """Findings: losses whose input is not of the form that they expect."""
        return list(self._divergences.values())

    def _open(self) -> None:
        if is_anything_compiled():
            return  # replaced functions would make torch.compile compile again
        functional = self._torch.nn.functional
        for name in _DROPOUTS:
            self._hooks.append(wrap(functional, name, "observe", self._dropping))
        self._hooks.append(wrap(functional, "kl_div", "observe", self._diverging))
        for name in ("softmax", "log_softmax"):  # torch.nn.functional calls the tensor's methods
            for owner in (self._torch, self._torch.Tensor):
                self._hooks.append(wrap(owner, name, "observe", self._summing, name))

    def _end(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _dropping(self, original: Any) -> Any:
        lanes, is_traced = self._watch.lanes, self._torch.compiler.is_dynamo_compiling

        # `training` is the third argument.
        def dropout(*args: Any, **kwargs: Any) -> Any:
            is_told = len(args) > 2 or "training" in kwargs
            if not is_told and not is_traced() and get_ident() == lanes.thread:
                self._note_dropout(sys._getframe(1))
            return original(*args, **kwargs)

        return dropout

    def _note_dropout(self, frame: Any) -> None:
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if not isinstance(owner, self._torch.nn.Module) or not is_users(code.co_filename):
            return
        site = Site(code.co_filename, frame.f_lineno)
        if site not in self.dropouts:
            self.dropouts.append(site)

    def _diverging(self, original: Any) -> Any:
        lanes, is_traced = self._watch.lanes, self._torch.compiler.is_dynamo_compiling

        def kl_div(input: Any, *args: Any, **kwargs: Any) -> Any:
            is_open = not is_traced() and get_ident() == lanes.thread
            if is_open and self._torch.is_tensor(input) and input.requires_grad:
                site = here(1)
                self._watch.aside(lambda: self._look_at(input.detach(), site))
            return original(input, *args, **kwargs)

        return kl_div

    def _look_at(self, given: Any, site: Site | None) -> None:
        if given.numel() == 0 or float(given.max()) <= _ROUNDING:
            return
        sums = given.sum(-1)
        is_whole = float(given.min()) >= 0 and bool(((sums - 1).abs() < _ROUNDING).all())
        inner = "softmax" if is_whole else "a layer"
        fact = self._divergences.setdefault(inner, InLoss("twice", site))
        fact.detail = {"outer": "kl_div", "inner": inner}
        fact.count += 1
        fact.steps = self._watch.lanes.steps + 1

    def _summing(self, original: Any, name: str) -> Any:
        lanes, is_traced = self._watch.lanes, self._torch.compiler.is_dynamo_compiling

        def softmax(*args: Any, **kwargs: Any) -> Any:
            if not is_traced() and get_ident() == lanes.thread:
                given: Any = args[0] if args else kwargs.get("input")
                dim = args[1] if len(args) > 1 else kwargs.get("dim")
                if self._torch.is_tensor(given) and given.requires_grad and given.dim() > 1:
                    site = here(1) if dim in (0, -given.dim()) else None
                    if site is not None and leads_with_samples(self._watch, given.shape):
                        shape = [int(size) for size in given.shape]
                        fact = self.softmaxes.setdefault(site, OverBatch(name, site, shape))
                        fact.count += 1
            return original(*args, **kwargs)

        return softmax
