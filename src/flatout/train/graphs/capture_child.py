"""Compiles a step in its own process: `python -m flatout.train.graphs.capture_child FOLDER`.

The folder holds `graph.pt`. After a successful compilation the folder also holds `step.pt2`.

The started process is a guard. It starts a second process that compiles, in a process group of its
own, because compilers would outlive that process. The guard pauses and continues the group by
commands on stdin. It kills the group and removes the folder on command, if stdin ends, or if the
process that reads the package is gone.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

from flatout.cache_folder import remove
from flatout.processes import die_with_parent

# Commands to the guard: pause, continue, end.
HOLD, GO_ON, END = b"h", b"g", b"e"
# Options of Inductor. With memory planning, a step's intermediate results share one allocation;
# separate allocations would take a tenth of a small step's time.
OPTIONS = {"memory_planning": True}


def main() -> None:
    """Run as the guard, or compile the graph in the folder that the command line names."""
    folder, parent = Path(sys.argv[1]), int(sys.argv[2])
    if len(sys.argv) == 3:
        _guard(folder, parent)
    else:
        die_with_parent(parent)
        _compile(folder)


def _guard(folder: Path, parent: int) -> None:
    command = [sys.executable, "-P", "-m", "flatout.train.graphs.capture_child", str(folder)]
    worker = subprocess.Popen(
        [*command, str(os.getpid()), "compile"], stdin=subprocess.DEVNULL, process_group=0
    )

    def end_with_it() -> None:
        status = worker.wait()
        os._exit(status if status >= 0 else 128 - status)

    Thread(target=end_with_it, daemon=True).start()
    while os.getppid() == parent:
        if not select.select([0], [], [], 1.0)[0]:
            continue
        data = os.read(0, 1)
        if data not in (HOLD, GO_ON):
            break
        os.killpg(worker.pid, signal.SIGSTOP if data == HOLD else signal.SIGCONT)
    os.killpg(worker.pid, signal.SIGKILL)
    remove(folder)
    os._exit(1)


def _compile(folder: Path) -> None:
    with suppress(OSError):  # if memory runs out, the kernel kills this process, not the training
        Path("/proc/self/oom_score_adj").write_text("1000")
    import torch

    given = torch.load(folder / "graph.pt", weights_only=True)
    os.nice(given["nice"])
    torch.set_num_threads(given["threads"])
    inputs = [
        torch.empty_strided(shape, strides, dtype=dtype).zero_()
        for shape, strides, dtype in given["inputs"]
    ]
    with torch.no_grad():
        exported = torch.export.export(module_of(given["code"], given["constants"]), tuple(inputs))
    torch._inductor.aoti_compile_and_package(
        exported, package_path=str(folder / "step.pt2"), inductor_configs=OPTIONS
    )


def module_of(code: str, constants: dict[str, Any]) -> Any:
    """Return the graph as a module."""
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
