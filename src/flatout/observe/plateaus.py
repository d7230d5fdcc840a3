"""Whether what a ReduceLROnPlateau is given, or a metric, is a loss or a score: by its name."""

from __future__ import annotations

import ast
import re

from flatout.observe.observation import Site
from flatout.observe.origins import function_at, is_at, parsed

# Words of names. What is in neither, such as "metric" or "score", says nothing.
_LOSSES = {
    "loss", "losses", "error", "mse", "mae", "rmse", "nll", "perplexity", "ppl", "wer", "cer",
    "criterion",
}  # fmt: skip
_SCORES = {
    "acc", "accuracy", "auc", "auroc", "f1", "iou", "miou", "dice", "psnr", "ssim", "precision",
    "recall", "bleu", "reward", "rewards",
}  # fmt: skip
# Of what gets better the other way round, or is no measure of how good the model is.
_TURNED = {
    "neg", "negative", "minus", "inverse", "gap", "drop", "diff", "difference", "delta", "std",
    "var", "variance",
}  # fmt: skip
_WORD = re.compile(r"[A-Z]?[a-z]+\d?|[A-Z]+\d?")


def given_at(site: Site) -> tuple[str, str]:
    """What `step` is called with in a line, as it is written, and "loss" or "score" as far as its
    name, or what was assigned to it, tells; "" elsewhere."""
    tree = parsed(site.file)
    for call in ast.walk(tree) if tree is not None else ():
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
            continue
        if not is_at(call, site.line) or call.func.attr != "step":
            continue
        given = [*call.args, *(item.value for item in call.keywords if item.arg == "metrics")]
        if given:
            return ast.unparse(given[0]), kind_of(given[0]) or kind_before(given[0], site)
    return "", ""


def kind_of(given: ast.expr) -> str:
    """By the words in an expression; one that turns its sign says nothing."""
    if any(isinstance(node, (ast.USub, ast.Sub)) for node in ast.walk(given)):
        return ""
    return kind_of_name(ast.unparse(given))


def kind_of_name(text: str) -> str:
    """ "loss" or "score" by the words in a name, as of "val_acc"; "" where they say neither."""
    words = _words(text)
    is_loss, is_score = not words.isdisjoint(_LOSSES), not words.isdisjoint(_SCORES)
    if is_loss == is_score or not words.isdisjoint(_TURNED):
        return ""
    return "loss" if is_loss else "score"


def words_of(given: ast.AST) -> set[str]:
    """The words in the names of some code, in small letters."""
    return _words(ast.unparse(given))


def _words(text: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(text)}


def kind_before(given: ast.expr, site: Site) -> str:
    """By what is assigned to a name in the same function, where all such lines agree."""
    function = function_at(site.file, site.line)
    if not isinstance(given, ast.Name) or function is None:
        return ""
    kinds = {
        kind_of(node.value)
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == given.id for target in node.targets)
    }
    return kinds.pop() if len(kinds) == 1 else ""
