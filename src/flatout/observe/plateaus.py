"""Classification of a metric as loss or score by its name, and of ReduceLROnPlateau's argument."""

from __future__ import annotations

import ast
import re

from flatout.observe.observation import Site
from flatout.observe.origins import function_at, is_at, parsed

# Words in names of losses and of scores. Other words, such as "metric" or "score", are ambiguous.
_LOSSES = {
    "loss", "losses", "error", "mse", "mae", "rmse", "nll", "perplexity", "ppl", "wer", "cer",
    "criterion",
}  # fmt: skip
_SCORES = {
    "acc", "accuracy", "auc", "auroc", "f1", "iou", "miou", "dice", "psnr", "ssim", "precision",
    "recall", "bleu", "reward", "rewards",
}  # fmt: skip
# Words in names of metrics that improve in the opposite direction, or do not measure the model.
_TURNED = {
    "neg", "negative", "minus", "inverse", "gap", "drop", "diff", "difference", "delta", "std",
    "var", "variance",
}  # fmt: skip
_WORD = re.compile(r"[A-Z]?[a-z]+\d?|[A-Z]+\d?")


def given_at(site: Site) -> tuple[str, str]:
    """Return the source of the argument of `step` in a line, and its kind.

    The kind is "loss" or "score", guessed from its name or from the value assigned to it. Both are
    "" where no argument is found.
    """
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
    """Return "loss" or "score" by the words in an expression; "" if unclear, or with a minus."""
    if any(isinstance(node, (ast.USub, ast.Sub)) for node in ast.walk(given)):
        return ""
    return kind_of_name(ast.unparse(given))


def kind_of_name(text: str) -> str:
    """Return "loss" or "score" by the words in a name, such as "val_acc"; "" if unclear."""
    words = _words(text)
    is_loss, is_score = not words.isdisjoint(_LOSSES), not words.isdisjoint(_SCORES)
    if is_loss == is_score or not words.isdisjoint(_TURNED):
        return ""
    return "loss" if is_loss else "score"


def words_of(given: ast.AST) -> set[str]:
    """Return the words in the names of an expression or statement, in lower case."""
    return _words(ast.unparse(given))


def _words(text: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(text)}


def kind_before(given: ast.expr, site: Site) -> str:
    """Return the kind of the values assigned to a name in the function; "" if kinds differ."""
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
