"""Lists and deques that grow with each step, and lines that copy or read them whole in each step.

A copy of a list in Python calls nothing that can be hooked. Therefore variables of the script's
frames are inspected in some steps, and then the code: the body of the stepping loop, and functions
in which the step is called.
"""

from __future__ import annotations

import ast
import sys
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from types import FrameType
from typing import Any

from flatout.observe.counted_steps import LOOPS, path_to
from flatout.observe.graphs import users_frames
from flatout.observe.kept_graphs import values_of
from flatout.observe.observation import Growing, Site
from flatout.observe.origins import parsed
from flatout.observe.watch import Watch

_LOOKS = range(9, 19)
# _EVEN: largest deviation of a step's growth from the mean, as a share; _LISTS: maximum number of
# lists that are inspected.
_EVEN, _LISTS = 0.5, 200
_COPIES = ("list", "tuple", "deque", "set")
_READS = ("sum", "sorted", "max", "min", "fmean", "mean", "stdev", "median")
_EACH_ROUND = (ast.With, ast.AsyncWith, ast.Try)


class CopiedLists:
    """Inspection of lists in some steps.

    Attributes:
        histories: lines that copy or read a whole list that grows evenly with each step.
    """

    def __init__(self, watch: Watch) -> None:
        self._renew()
        for step in _LOOKS:
            watch.at(step, self._look)
        watch.at(_LOOKS[-1], self._close)
        self._watch = watch
        watch.on_renewal.append(self._renew)

    def _renew(self) -> None:
        self.histories: list[Growing] = []
        self._sizes: dict[tuple[Any, str], list[int]] = {}

    def _look(self) -> None:
        for frame in users_frames(sys._getframe()):
            for path, value, _ in values_of(frame):
                key = frame.f_code, path
                if _grows(value) and (key in self._sizes or len(self._sizes) < _LISTS):
                    self._sizes.setdefault(key, []).append(len(value))

    def _close(self) -> None:
        sizes, self._sizes = self._sizes, {}
        for frame in users_frames(sys._getframe()):
            tree = parsed(frame.f_code.co_filename)
            block, is_loop = (None, False) if tree is None else _each_step(tree, frame)
            for (code, path), counts in sizes.items():
                more = _evenly_more(counts)
                if block is not None and code is frame.f_code and more:
                    self._tell(frame, block, path, counts[-1], more)
            if is_loop:
                return  # outer loops run once in an epoch

    def _tell(
        self, frame: FrameType, block: list[ast.stmt], path: str, size: int, more: int
    ) -> None:
        for node, words, is_read in _taken_whole(block, path):
            site = Site(frame.f_code.co_filename, node.lineno)
            if all(item.site != site for item in self.histories):
                at = self._watch.lanes.steps
                grown = Growing(words, site, size, more, 0.0, at, is_list=is_read)
                self.histories.append(grown)


def _grows(value: Any) -> bool:
    return type(value) is list or (type(value) is deque and value.maxlen is None)


def _evenly_more(counts: list[int]) -> int:
    apart = [after - before for before, after in pairwise(counts)]
    mean = sum(apart) / max(1, len(apart))
    is_even = all(abs(item - mean) <= _EVEN * mean for item in apart)
    return round(mean) if len(counts) == len(_LOOKS) and mean > 0 and is_even else 0


def _each_step(tree: ast.Module, frame: FrameType) -> tuple[list[ast.stmt], bool]:
    around = path_to(tree, frame.f_lineno)
    for node in reversed(around):
        if isinstance(node, LOOPS):
            return node.body, True
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return node.body, False
    return [], False


def _taken_whole(block: list[ast.stmt], path: str) -> Iterator[tuple[ast.expr, str, bool]]:
    for statement in block:
        if isinstance(statement, _EACH_ROUND):
            yield from _taken_whole(statement.body, path)
        elif not isinstance(statement, (ast.If, *LOOPS, ast.FunctionDef, ast.ClassDef)):
            for node in _evaluated(statement):
                taken = _takes(node, path)
                if taken:
                    yield node, ast.unparse(node), taken == "reads"


def _evaluated(node: ast.AST) -> Iterator[ast.expr]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Lambda, ast.IfExp, ast.BoolOp)):
            continue
        if isinstance(child, ast.expr):
            yield child
        yield from _evaluated(child)


def _takes(node: ast.expr, path: str) -> str:
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        part = node.slice
        is_whole = part.lower is None and part.upper is None and part.step is None
        is_read = isinstance(node.ctx, ast.Load)
        return "copies" if is_whole and is_read and ast.unparse(node.value) == path else ""
    if not isinstance(node, ast.Call):
        return ""
    name = ast.unparse(node.func)
    if name == f"{path}.copy" and not node.args:
        return "copies"
    if len(node.args) != 1 or ast.unparse(node.args[0]) != path:
        return ""
    if name in _COPIES:
        return "copies"
    return "reads" if name.rpartition(".")[2] in _READS else ""
