"""Compiles a step's graph in a process of its own, behind all others: `python -m` this, FOLDER.

The folder holds `graph.pt`; `step.pt2` is there when the process has ended well.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from flatout.processes import die_with_parent


def main() -> None:
    """Compile what lies in the folder that the command line names."""
    folder, parent = Path(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)
    os.nice(19)
    with suppress(OSError):  # where memory runs out, this process goes and not the training
        Path("/proc/self/oom_score_adj").write_text("1000")
    import torch

    given = torch.load(folder / "graph.pt", weights_only=True)
    torch.set_num_threads(given["threads"])
    inputs = [
        torch.empty_strided(shape, strides, dtype=dtype).zero_()
        for shape, strides, dtype in given["inputs"]
    ]
    with torch.no_grad():
        exported = torch.export.export(module_of(given["code"], given["constants"]), tuple(inputs))
    torch._inductor.aoti_compile_and_package(exported, package_path=str(folder / "step.pt2"))


def module_of(code: str, constants: dict[str, Any]) -> Any:
    """The graph as a module."""
    import torch
    from torch.fx import graph as fx_graph

    names = {name: builtin.obj for name, builtin in fx_graph._custom_builtins.items()}
    exec(code, names)
    module = type("Step", (torch.nn.Module,), {"forward": names["forward"]})()
    for name, value in constants.items():
        module.register_buffer(name, value)
    return module


if __name__ == "__main__":
    main()
