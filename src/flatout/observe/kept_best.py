"""Weights that a loop of the script keeps when a metric is better than the best so far."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from flatout.observe.observation import Call, Monitor, Site
from flatout.observe.origins import is_at, parsed
from flatout.observe.plateaus import kind_before, kind_of, words_of

# Words of names that mean weights: other objects are copied too, such as a hard sample.
_WEIGHTS = {"model", "net", "network", "weights", "state", "params", "parameters"}
_SMALLER, _LARGER = (ast.Lt, ast.LtE), (ast.Gt, ast.GtE)


def kept_best(calls: Iterable[Call]) -> list[Monitor]:
    """Return the comparisons with a best value under which weights are saved or copied.

    An example is `if val_acc > best_acc: best_acc = val_acc; torch.save(...)`.
    """
    result: dict[Site | None, Monitor] = {}
    for call in calls:
        if call.kind in ("save", "deepcopy"):
            for found in _compared_above(call.site, is_copy=call.kind == "deepcopy"):
                result[found.site] = found
    return list(result.values())


def _compared_above(site: Site, *, is_copy: bool) -> Iterator[Monitor]:
    for node in ast.walk(parsed(site.file) or ast.Module([], [])):
        if not isinstance(node, ast.If):
            continue
        kept = [line for line in node.body if is_at(line, site.line)]
        if not kept or (is_copy and words_of(kept[0]).isdisjoint(_WEIGHTS)):
            continue
        for test in node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]:
            yield from _compared(test, node, Site(site.file, node.lineno))


def _compared(test: ast.expr, branch: ast.If, site: Site) -> Iterator[Monitor]:
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1):
        return
    metric, best, wants_smaller = test.left, test.comparators[0], isinstance(test.ops[0], _SMALLER)
    if not (wants_smaller or isinstance(test.ops[0], _LARGER)):
        return
    if "best" in words_of(metric):
        metric, best, wants_smaller = best, metric, not wants_smaller
    if "best" in words_of(metric) or "best" not in words_of(best):
        return
    replaces = any(
        isinstance(line, ast.Assign)
        and ast.unparse(line.value) == ast.unparse(metric)
        and ast.unparse(best) in map(ast.unparse, line.targets)
        for line in branch.body
    )
    kinds = {kind_of(metric) or kind_before(metric, site), kind_of(best)} - {""}
    if replaces and len(kinds) == 1:
        mode = "min" if wants_smaller else "max"
        yield Monitor("if", ast.unparse(metric), mode, kinds.pop(), "keeps", site=site)
