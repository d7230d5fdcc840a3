"""Parameters that the script means to freeze but does not, by attributes that torch ignores.

A parameter silently accepts a misspelt attribute such as `require_grad`. A module accepts
`requires_grad`, which its parameters do not read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from flatout.observe.observation import Site, Unfrozen
from flatout.observe.origins import users_code
from flatout.observe.watch import Watch

# Steps of each training after which models are inspected.
_AT = 3
_TORCHS = "requires_grad"
_MISSPELT = frozenset(
    (
        "require_grad", "require_grads", "requires_grads", "required_grad", "requiers_grad",
        "requires_gard", "requires_grd", "requires_Grad", "requiresGrad", "requires_gradient",
        "requires_gradients", "require_gradient", "require_gradients", "requiresgrad",
        "requiregrad",
    )
)  # fmt: skip
# Maximum number of names of parameters that are recorded.
_NAMED = 8


class NeverFrozen:
    """Inspection of the trained models, once in each training.

    Attributes:
        found: a finding for each attribute and kind of owner.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.found: list[Unfrozen] = []
        watch.at_each(_AT, self._look)
        watch.on_renewal.append(self.found.clear)

    def _look(self) -> None:
        stepped = {
            id(tensor)
            for optimizer in self._watch.stepping()
            for tensor in optimizer.tensors()
            if tensor.requires_grad
        }
        for model in self._watch.models:
            module: Any = model.ref()
            if module is None or not model.is_stepped or model.facts.is_told:
                continue
            for item in [*_misspelt(module, stepped), *_of_modules(module, stepped)]:
                if not any((item.name, item.kind) == (old.name, old.kind) for old in self.found):
                    self.found.append(item)


def _misspelt(module: Any, stepped: set[int]) -> Iterator[Unfrozen]:
    named: dict[str, dict[str, Any]] = {}
    for path, tensor in module.named_parameters():
        for name in _set_to_false(tensor):
            named.setdefault(name, {})[path] = tensor
    for path, inner in module.named_modules():
        for name in _set_to_false(inner):
            if not hasattr(type(inner), name):
                named.setdefault(name, {}).update(_own(path, inner))
    for name, some in sorted(named.items()):
        training = {path: tensor for path, tensor in some.items() if id(tensor) in stepped}
        if training:
            yield _told(name, "", training, _line_that_sets(name))


def _set_to_false(owner: Any) -> list[str]:
    attributes = getattr(owner, "__dict__", {})
    return [name for name in _MISSPELT & attributes.keys() if attributes[name] is False]


def _own(path: str, inner: Any) -> dict[str, Any]:
    return {f"{path}.{name}" if path else name: one for name, one in inner.named_parameters()}


def _of_modules(module: Any, stepped: set[int]) -> Iterator[Unfrozen]:
    for path, inner in module.named_modules():
        if vars(inner).get(_TORCHS) is not False or hasattr(type(inner), _TORCHS):
            continue
        own = _own(path, inner)
        # If any of these parameters does not train, the script has frozen it in another way.
        if own and all(id(tensor) in stepped for tensor in own.values()):
            site = _line_that_sets(_TORCHS)
            if site is not None:
                yield _told(_TORCHS, type(inner).__name__, own, site)


def _told(name: str, kind: str, training: dict[str, Any], site: Site | None) -> Unfrozen:
    elements = sum(int(tensor.numel()) for tensor in training.values())
    return Unfrozen(name, kind, site, len(training), elements, list(training)[:_NAMED])


def _line_that_sets(name: str) -> Site | None:
    for file, tree in users_code():
        looped = _looped(tree) if name == _TORCHS else {"self"}
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)):
                continue
            for target in node.targets if node.value.value is False else ():
                if isinstance(target, ast.Attribute) and target.attr == name:
                    owner = target.value
                    if not (isinstance(owner, ast.Name) and owner.id in looped):
                        return Site(file, node.lineno)
    return None


def _looped(tree: ast.Module) -> set[str]:
    names = {"self"}
    for node in ast.walk(tree):
        if isinstance(node, (ast.For, ast.comprehension)) and "parameters" in ast.unparse(
            node.iter
        ):
            names |= {item.id for item in ast.walk(node.target) if isinstance(item, ast.Name)}
    return names
