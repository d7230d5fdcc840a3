"""Calls before and after forward of single modules, for a few steps, without a trace in them.

A hook that torch keeps in a module is pickled, copied, counted and compiled with the module, and
changes the number of each later hook. So these hooks are kept outside of modules, by the modules'
ids, and run around `Module._call_impl`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from weakref import ref

from flatout.hooks.wrapping import Hook, wrap


@dataclass(eq=False)
class PassingHook:
    call: Callable[..., Any]
    with_kwargs: bool
    of: list[ref[PassingHook]]

    def remove(self) -> None:
        self.of[:] = [other for other in self.of if other() not in (self, None)]
        _tidy()


@dataclass(eq=False)
class _Hooked:
    module: ref[Any]
    before: list[ref[PassingHook]] = field(default_factory=list)
    after: list[ref[PassingHook]] = field(default_factory=list)


_hooked: dict[int, _Hooked] = {}
_around_calls: list[Hook] = []
_own_numbers = count(-1, -1)


def before_forward(
    module: Any, call: Callable[..., Any], *, with_kwargs: bool = False
) -> PassingHook:
    """Call `call(module, args)` before each forward.

    With `with_kwargs`, call `call(module, args, kwargs)`.
    """
    return _added(module, call, with_kwargs, "before")


def after_forward(
    module: Any, call: Callable[..., Any], *, with_kwargs: bool = False
) -> PassingHook:
    """Call `call(module, args, output)` after each forward.

    With `with_kwargs`, call `call(module, args, kwargs, output)`.
    """
    return _added(module, call, with_kwargs, "after")


def unnumbered(handle: Any) -> Any:
    """Give a hook in torch one of Flatout's own negative numbers, and return the handle.

    So a later hook of the script gets the same number as without Flatout.
    """
    counter = sys.modules["torch.utils.hooks"].RemovableHandle
    if counter.next_id == handle.id + 1:
        hooks, own = handle.hooks_dict_ref(), next(_own_numbers)
        hooks[own] = hooks.pop(handle.id)
        counter.next_id, handle.id = handle.id, own
    return handle


def _added(module: Any, call: Callable[..., Any], with_kwargs: bool, when: str) -> PassingHook:
    found = _hooked.get(id(module))
    if found is None or found.module() is not module:
        found = _hooked[id(module)] = _Hooked(ref(module))
    calls: list[ref[PassingHook]] = getattr(found, when)
    hook = PassingHook(call, with_kwargs, calls)
    calls.append(ref(hook))
    if not _around_calls:
        owner = sys.modules["torch"].nn.Module
        _around_calls.append(wrap(owner, "_call_impl", "observe", _around))
    return hook


def _tidy() -> None:
    for key, found in list(_hooked.items()):
        if found.module() is None or not _alive(found.before + found.after):
            del _hooked[key]
    if not _hooked and _around_calls and _around_calls[0].remove():
        _around_calls.clear()


def _alive(hooks: list[ref[PassingHook]]) -> list[PassingHook]:
    return [hook for one in hooks if (hook := one()) is not None]


def _around(inner: Any) -> Any:
    def _call_impl(module: Any, *args: Any, **kwargs: Any) -> Any:
        found = _hooked.get(id(module))
        if found is None or found.module() is not module:
            return inner(module, *args, **kwargs)
        for hook in _alive(found.before):
            given = (args, kwargs) if hook.with_kwargs else (args,)
            hook.call(module, *given)
        output = inner(module, *args, **kwargs)
        for hook in _alive(found.after):
            given = (args, kwargs) if hook.with_kwargs else (args,)
            hook.call(module, *given, output)
        return output

    return _call_impl
