"""Cross-validation that trains one model on all folds.

Each fold but the first then begins with weights that were trained on its validation data. This is
detected in the first fold: the stepped model was made before the loop over scikit-learn's splits
began, and nothing that the loop calls resets weights.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import partial
from threading import get_ident
from types import FrameType
from typing import Any

from flatout.hooks import Hook, when_imported, wrap
from flatout.observe.model_facts import unwrapped
from flatout.observe.observation import SharedFolds, Site
from flatout.observe.origins import parsed, users_code
from flatout.observe.sites import users_frame
from flatout.observe.unused_calls import last_name
from flatout.observe.watch import Watch

# Number of steps of each training after which the model is checked.
_AT = 3
# Splits that go forward in time, where continued training may be intended.
_FORWARD = ("TimeSeriesSplit",)
# Words in the names of functions that reset or replace weights.
_RESETS = (
    "reset", "init", "apply", "restore", "load_state", "load_weights", "load_check", "set_weights",
    "copy_", "fill_", "normal_", "uniform_",
)  # fmt: skip


class Folds:
    """Tracker of the loops over scikit-learn's splits.

    Attributes:
        found: a finding for each loop.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.found: list[SharedFolds] = []
        self._hooks: list[Hook] = []
        self._made: set[int] = set()  # ids of models made since the loop began
        self._loop: SharedFolds | None = None
        when_imported("sklearn.model_selection._split", self._hook)
        watch.at_each(_AT, self._look)

    def _hook(self, module: Any) -> None:
        wrap(module._BaseKFold, "split", "observe", self._splitting)

    def _splitting(self, original: Any) -> Any:
        def split(splitter: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
            loop = None
            try:
                for number, fold in enumerate(original(splitter, *args, **kwargs)):
                    is_first = number == 0 and get_ident() == self._watch.lanes.thread
                    if is_first and self._loop is None:
                        begins = partial(self._begins, splitter, sys._getframe(1))
                        self._watch.aside(begins, is_once=True)
                        loop = self._loop
                    yield fold
            finally:
                if loop is not None and loop is self._loop:
                    self._end()

        return split

    def _begins(self, splitter: Any, frame: FrameType | None) -> None:
        torch: Any = sys.modules.get("torch")
        kind, frame = type(splitter).__name__, users_frame(frame)
        if torch is None or frame is None or kind in _FORWARD:
            return
        site = Site(frame.f_code.co_filename, frame.f_lineno)
        loop = _loop_at(site.file, site.line)
        if loop is None or _sets_back(loop, site.file):
            return
        self._loop = SharedFolds(kind, int(splitter.get_n_splits()), "", site)
        # Models that are copied or unpickled get their state by __setstate__, without __init__.
        self._hooks = [
            wrap(torch.nn.Module, name, "observe", self._making)
            for name in ("__init__", "__setstate__")
        ]

    def _making(self, original: Any) -> Any:
        def make(module: Any, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            self._made.add(id(module))

        return make

    def _look(self) -> None:
        loop = self._loop
        if loop is None:
            return
        for model in self._watch.models:
            modules = unwrapped(model.ref())
            if modules and model.is_stepped and id(modules[-1]) not in self._made:
                loop.model = type(modules[-1]).__name__
                self.found.append(loop)
                break
        self._end()

    def _end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._made.clear()
        self._loop = None


def _loop_at(file: str, line: int) -> ast.For | None:
    for node in ast.walk(parsed(file) or ast.Module([], [])):
        if isinstance(node, ast.For) and node.lineno <= line <= (node.iter.end_lineno or line):
            leaves = (ast.Continue, ast.Break, ast.Return)
            is_whole = not any(isinstance(inner, leaves) for inner in _own(node))
            return node if is_whole else None
    return None


def _own(loop: ast.For) -> Iterator[ast.AST]:
    waiting: list[ast.AST] = list(loop.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (ast.For, ast.While, ast.FunctionDef, ast.Lambda)):
            waiting.extend(ast.iter_child_nodes(node))


def _sets_back(loop: ast.For, file: str) -> bool:
    # The loop's own file is searched too, since a notebook's cell is no file in `users_code`.
    trees = [*filter(None, [parsed(file)]), *(tree for _, tree in users_code())]
    functions = {
        node.name: node
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
    waiting: list[ast.AST] = list(loop.body)
    known: set[str] = set()
    while waiting:
        for node in ast.walk(waiting.pop()):
            name = last_name(node) if isinstance(node, ast.Call) else ""
            if name and name not in known:
                known.add(name)
                if name != "__init__" and any(word in name.lower() for word in _RESETS):
                    return True
                if name in functions:
                    waiting.append(functions[name])
    return False
