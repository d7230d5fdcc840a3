"""input.workers, input.pin_memory and script.persistent_workers: how DataLoaders make batches."""

from __future__ import annotations

import ast
import inspect
import multiprocessing
import pickle
import sys
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from flatout.cures.record import is_on, leave, took
from flatout.cures.steps import ScriptSteps, caller
from flatout.data import Attributes
from flatout.devices import read_shm
from flatout.hooks import wrap
from flatout.observe import is_users
from flatout.words import memory_words

WORKERS, PIN, PERSISTENT = "input.workers", "input.pin_memory", "script.persistent_workers"
# Minimum bytes of shared memory, through which workers send batches. Containers often have 64 MB,
# and a batch that does not fit ends the process.
_SHARED_LEAST = 100 * 2**20


class Loaders:
    """Sets up DataLoaders as the Recipe asks, if that gives the same batches."""

    def __init__(self, torch: Any, steps: ScriptSteps) -> None:
        self._torch = torch
        self._asked = steps.asked
        self._staying: WeakValueDictionary[int, Any] = WeakValueDictionary()
        # Loaders whose workers a cure keeps alive, with the attributes of their dataset at the
        # start.
        self._unchanged: WeakKeyDictionary[Any, Attributes | None] = WeakKeyDictionary()
        self._as_written: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
        owner = sys.modules["torch.utils.data.dataloader"].DataLoader
        wrap(owner, "__init__", "cures", self._set_up)
        wrap(owner, "_get_iterator", "cures", self._started)
        wrap(owner, "__iter__", "cures", self._iterated)
        wrap(owner, "__reduce_ex__", "cures", self._reduced)

    def _set_up(self, original: Any) -> Any:
        signature = inspect.signature(original)

        def init(loader: Any, *args: Any, **kwargs: Any) -> None:
            if not is_on():
                original(loader, *args, **kwargs)
                return
            try:
                given = signature.bind(loader, *args, **kwargs)
            except TypeError:  # torch's own error message is better
                original(loader, *args, **kwargs)
                return
            written = dict(given.arguments)
            given.apply_defaults()
            changes = self._changes(given.arguments)
            original(**{**written, **changes})
            if changes:
                self._as_written[loader] = _written_attributes(given.arguments)
            if changes.get("persistent_workers") or self._is_remade(given.arguments):
                self._unchanged[loader] = None
                with suppress(TypeError):  # such as a list, which has no weak reference
                    self._staying[id(loader.dataset)] = loader.dataset

        return init

    def _is_remade(self, given: dict[str, Any]) -> bool:
        is_known = id(given["dataset"]) in self._staying
        return is_known and bool(given["persistent_workers"]) and not is_users(caller()[0])

    def _changes(self, given: dict[str, Any]) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        before = given["num_workers"]
        workers = self._asked.get(WORKERS, before)
        if workers != before:
            reason = self._against_workers(given, workers)
            if reason:
                leave(WORKERS, reason)
                workers = before
        if WORKERS in self._asked and workers == self._asked[WORKERS]:
            took(WORKERS, f"workers={workers}")
        if workers != before:
            changes["num_workers"] = workers
        if not workers:
            changes |= _without_workers(given)
        is_raised = workers > before == 0
        if workers and not given["persistent_workers"] and (is_raised or PERSISTENT in self._asked):
            changes["persistent_workers"] = True
            took(PERSISTENT, "workers stay")
        elif PERSISTENT in self._asked:
            words = "workers stay already" if workers else "the loader has no workers"
            leave(PERSISTENT, words)
        if PIN in self._asked:
            self._pin(given, changes)
        return changes

    def _against_workers(self, given: dict[str, Any], workers: int | str) -> str:
        if not isinstance(workers, int):
            return f"{workers} is for a Trainer or a Loop"
        if isinstance(given["dataset"], self._torch.utils.data.IterableDataset):
            return "the samples of an IterableDataset depend on the number of workers"
        if not workers:
            return ""
        shm = read_shm()
        if shm is None or shm.free < _SHARED_LEAST:
            free = memory_words(0 if shm is None else shm.free)
            return f"/dev/shm has {free}, too small for batches from workers"
        context = given["multiprocessing_context"]
        method = context if isinstance(context, str) else multiprocessing.get_start_method()
        if method != "fork" and not _is_guarded():
            return f"workers start by {method}, and the script has no `if __name__` around its run"
        return ""

    def _pin(self, given: dict[str, Any], changes: dict[str, Any]) -> None:
        if not self._torch.cuda.is_available():
            leave(PIN, "there is no GPU to copy to")
            return
        changes["pin_memory"] = True
        took(PIN, "pinned memory")

    def _started(self, original: Any) -> Any:
        torch = self._torch

        def start(loader: Any) -> Any:
            if loader not in self._unchanged:
                return original(loader)
            generator = loader.generator or torch.default_generator
            state = generator.get_state()
            try:
                iterator = original(loader)
            except (AttributeError, TypeError, pickle.PicklingError) as error:
                leave(WORKERS, f"the dataset cannot be sent to workers: {error}")
            else:
                self._unchanged[loader] = Attributes(loader.dataset, loader.collate_fn)
                return iterator
            generator.set_state(state)
            del self._unchanged[loader]
            loader.__dict__ |= {
                "num_workers": 0,
                "prefetch_factor": None,
                "persistent_workers": False,
            }
            return original(loader)

        return start

    def _iterated(self, original: Any) -> Any:
        torch = self._torch

        def iterate(loader: Any) -> Any:
            before = self._unchanged.get(loader)
            if before is not None and loader._iterator is not None:
                changed = before.changed(loader.dataset, loader.collate_fn)
                if changed:
                    leave(
                        PERSISTENT,
                        f"{changed} is different in each epoch: new workers see the change",
                    )
                    loader._iterator = None
                else:
                    # New workers would draw their seeds here. An equal draw keeps the order that
                    # the sampler draws next.
                    draw = torch.empty((), dtype=torch.int64)
                    draw.random_(generator=loader.generator)
            return original(loader)

        return iterate

    def _reduced(self, original: Any) -> Any:
        """Wrap `__reduce_ex__`: a copy or pickle has the loader's own arguments, without cures."""

        def reduce_ex(loader: Any, protocol: Any) -> Any:
            written = self._as_written.get(loader)
            made = original(loader, protocol)
            if written is None or len(made) < 3 or not isinstance(made[2], dict):
                return made
            state = {name: written.get(name, value) for name, value in made[2].items()}
            return (*made[:2], state, *made[3:])

        return reduce_ex


def _written_attributes(given: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes that torch sets from these arguments and that a cure may change."""
    context, ahead = given["multiprocessing_context"], given["prefetch_factor"]
    result = {name: given[name] for name in ("num_workers", "persistent_workers", "pin_memory")}
    # The default of torch.
    result["prefetch_factor"] = 2 if given["num_workers"] and ahead is None else ahead
    is_name = isinstance(context, str)
    method = multiprocessing.get_context(context) if is_name else context
    result["_DataLoader__multiprocessing_context"] = method
    return result if given["persistent_workers"] else result | {"_iterator": None}


def _without_workers(given: dict[str, Any]) -> dict[str, Any]:
    plain = {"prefetch_factor": None, "persistent_workers": False, "multiprocessing_context": None}
    return {name: value for name, value in plain.items() if given[name] != value}


def _is_guarded() -> bool:
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is None:
        return False
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, ValueError, SyntaxError):
        return False
    return any(
        isinstance(node, ast.If)
        and any(isinstance(n, ast.Name) and n.id == "__name__" for n in ast.walk(node.test))
        for node in tree.body
    )
