"""`%load_ext flatout`: diagnosis of the training in a notebook's cells.

%flatout          the verdict on all cells since the last verdict
%flatout reset    discards the observations since then
%%flatout         runs this cell alone under observation, and prints the verdict on it
"""

from __future__ import annotations

import ast
import atexit
import sys
from functools import cache
from types import FrameType
from typing import Any

from flatout.devices import Inventory, inventory
from flatout.doctor.judge import judge
from flatout.observe import Cells
from flatout.report.first_look import FirstLookReport

_WIDTH = 100
_NAME = "flatout"
_loaded: _Extension | None = None
_cells: Cells | None = None  # one per process, since hooks are set once


def load_ipython_extension(ipython: Any) -> None:
    global _loaded, _cells
    if _cells is None:
        _cells = Cells(lambda file: _cell_of(ipython, file))
        atexit.register(_cells.rest)
    else:
        _cells.wake()
    _loaded = _Extension(ipython, _cells)
    print("flatout observes what these cells train; %flatout tells what holds it back")


def unload_ipython_extension(ipython: Any) -> None:
    global _loaded
    if _loaded is not None:
        _loaded.unload()
        _loaded = None


class _Extension:
    def __init__(self, ipython: Any, cells: Cells) -> None:
        self._ipython = ipython
        self._cells = cells
        self._depth = 1  # the cell that loads the extension; some magics run cells within cells
        ipython.events.register("pre_run_cell", self._begin)
        ipython.events.register("post_run_cell", self._end)
        ipython.register_magic_function(self.magic, "line_cell", _NAME)

    def unload(self) -> None:
        self._ipython.events.unregister("pre_run_cell", self._begin)
        self._ipython.events.unregister("post_run_cell", self._end)
        for kind in ("line", "cell"):
            del self._ipython.magics_manager.magics[kind][_NAME]
        self._cells.rest()

    def _begin(self, info: Any) -> None:
        self._depth += 1
        self._cells.begin()

    def _end(self, result: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if not self._depth:
            self._cells.end(failed=not result.success)

    def magic(self, line: str, cell: str | None = None) -> Any:
        from IPython.core.error import UsageError

        asked = line.strip()
        if asked not in ("", "reset") or (asked and cell is not None):
            raise UsageError(f"%flatout takes nothing, or reset; found {asked!r}")
        if asked:
            self._cells.forget()
            return None
        if cell is None:
            self._report()
            return None
        self._cells.forget()
        try:
            return _run(self._ipython, cell)
        finally:
            self._report()

    def _report(self) -> None:
        from flatout.terminal import Console

        result, seconds = self._cells.look()
        result.ended = "done" if result.steps else "no steps"
        verdict = judge([result], _machine())
        report = FirstLookReport(verdict, _machine(), seconds, [], is_last=False)
        console = Console(
            file=sys.stdout, width=_WIDTH, highlight=False, markup=False, force_jupyter=False
        )
        console.print(report)


@cache
def _machine() -> Inventory:
    return inventory()


def _cell_of(ipython: Any, file: str) -> str:
    label = ipython.compile.format_code_name(file)
    return file if label is None else f"cell {label[1].removeprefix('In[').removesuffix(']')}"


def _number_here(ipython: Any) -> int:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        cell = _cell_of(ipython, frame.f_code.co_filename).removeprefix("cell ")
        if cell.isdecimal():
            return int(cell)
        frame = frame.f_back
    return int(ipython.execution_count)


def _run(ipython: Any, body: str) -> Any:
    source = "\n" + ipython.transform_cell(body)
    name = ipython.compile.cache(source, _number_here(ipython))
    tree = ipython.transform_ast(ipython.compile.ast_parse(source, filename=name))
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(ipython.compile(tree, name, "exec"), ipython.user_ns)
    if last is None:
        return None
    return eval(ipython.compile(ast.Expression(last.value), name, "eval"), ipython.user_ns)
