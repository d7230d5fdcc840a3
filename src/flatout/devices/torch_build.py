"""The build of the installed torch, read from its files, because an import would take seconds."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class TorchBuild:
    version: str | None
    cuda: str | None
    hip: str | None


def read_torch_build() -> TorchBuild:
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return TorchBuild(None, None, None)
    path = Path(spec.submodule_search_locations[0]) / "version.py"
    facts = _constants(path.read_text()) if path.is_file() else {}
    return TorchBuild(facts.get("__version__"), facts.get("cuda"), facts.get("hip"))


def _constants(source: str) -> dict[str, str]:
    result: dict[str, str] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            result |= dict.fromkeys(names, node.value.value)
    return result


def driver_fits(torch_cuda: str, driver_cuda: tuple[int, int]) -> bool:
    """Return whether a driver that offers `driver_cuda` runs a torch built with `torch_cuda`.

    Within a major version any driver does (CUDA's minor version compatibility, since CUDA 11), and
    a newer driver runs older builds.
    """
    return driver_cuda[0] >= int(torch_cuda.split(".")[0])
