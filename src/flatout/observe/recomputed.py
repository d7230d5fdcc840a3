"""Activation checkpointing: what forward leaves out, and what keeping that would take."""

from __future__ import annotations

from threading import get_ident
from typing import Any

from flatout.hooks import Hook, is_anything_compiled, wrap
from flatout.observe.observation import Recomputed
from flatout.observe.sites import here
from flatout.observe.watch import Watch

# Looked at in these steps.
_FROM, _UNTIL = 2, 5


class Recomputing:
    """Watches torch.utils.checkpoint in a few steps.

    Attributes:
        facts: None where nothing is recomputed.
    """

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._torch = torch
        self._watch = watch
        self._hooks: list[Hook] = []
        self._renew()
        watch.at(_FROM, self._open)
        watch.at(_UNTIL, self._close)
        watch.on_renewal.append(self._renew)

    def _renew(self) -> None:
        self.facts: Recomputed | None = None
        self._bytes = 0
        self._known: set[int] = set()
        self._end()

    def _open(self) -> None:
        if is_anything_compiled():
            return  # something is compiled, and would be compiled again
        module = self._torch.utils.checkpoint
        self._hooks = [
            wrap(module._checkpoint_hook, "__init__", "observe", self._begins),
            wrap(module.CheckpointFunction, "backward", "observe", self._recomputes),
        ]
        self._known = {
            parameter.data_ptr()
            for seen in self._watch.models
            if (model := seen.ref()) is not None
            for parameter in model.parameters()
        }

    def _end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _close(self) -> None:
        self._end()
        if self.facts is not None:
            self.facts.mb = self._bytes / (_UNTIL - _FROM) / 2**20

    def _note(self) -> None:
        if self.facts is None:
            self.facts = Recomputed(here(2))
        self.facts.calls += 1

    def _counted(self, tensor: Any) -> None:
        if self._torch.is_tensor(tensor) and tensor.data_ptr() not in self._known:
            self._bytes += tensor.nbytes

    def _begins(self, original: Any) -> Any:
        """A part of forward begins: what it would keep passes a hook that drops it."""

        def init(hook: Any, *args: Any, **kwargs: Any) -> None:
            original(hook, *args, **kwargs)
            if get_ident() != self._watch.lanes.thread:
                return
            self._note()
            drop = hook.pack_hook

            def pack(tensor: Any) -> Any:
                self._counted(tensor)
                return drop(tensor)

            hook.pack_hook = pack

        return init

    def _recomputes(self, original: Any) -> Any:
        """The older way: forward is run again, and keeps what it needs."""

        def backward(*args: Any) -> Any:
            self._note()

            def pack(tensor: Any) -> Any:
                self._counted(tensor)
                return tensor

            with self._torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                return original(*args)

        return backward
