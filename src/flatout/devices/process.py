"""The process' settings, at run time and in the environment of a process to be started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.devices import allocator, threads

if TYPE_CHECKING:
    from flatout.recipe import Process, Recipe


def apply(process: Process) -> list[str]:
    """Apply a Recipe's process section; settings at their default stay as they are.

    The CPUs are set first, then the threads that run on them, then denormals, because their test
    starts the threads.

    Returns:
        A sentence for each setting that is too late in this process.

    Raises:
        DeviceError: the affinity names CPUs that this process cannot have, or far more threads are
            requested than it can use.
    """
    _check(process)
    late = []
    if process.affinity == "off":
        threads.reset_affinity()
    elif process.affinity != "per_rank":
        threads.set_affinity(process.affinity)
    if process.threads != "auto":
        threads.set_threads(process.threads)
    if process.interop_threads != "default" and not threads.set_interop_threads(
        process.interop_threads
    ):
        late.append(
            f"process.interop_threads = {process.interop_threads} comes too late in this process: "
            "set it before the first parallel operation"
        )
    if process.flush_denormals != "default" and not threads.flush_denormals(
        process.flush_denormals == "on"
    ):
        late.append(
            f"process.flush_denormals = {process.flush_denormals} holds only in threads that start "
            "from now on: set it before the first parallel operation"
        )
    return late


def _check(process: Process) -> None:
    for name in ("threads", "interop_threads"):
        count = getattr(process, name)
        if isinstance(count, int):
            threads.check_count(f"process.{name}", count)


def environment(recipe: Recipe) -> dict[str, str]:
    """Return the variables that a process needs from its start to run by a Recipe.

    CPU numbers are not among them: GOMP_CPU_AFFINITY would bind the main thread to a single CPU,
    and with it every loader worker that it forks. `threads.set_affinity` before the start is
    inherited instead. KMP variables would do nothing, as torch's wheels load libgomp.
    """
    _check(recipe.process)
    variables: dict[str, str] = {}
    if recipe.memory.allocator == "keep":
        variables |= allocator.environment()
    if recipe.process.threads != "auto":
        variables["OMP_NUM_THREADS"] = str(recipe.process.threads)
    return variables


def at_start(recipe: Recipe) -> dict[str, str]:
    """Return the Recipe's values, by field, that a process adopts at its start, whatever it runs.

    The rest waits for a Trainer or a Loop.
    """
    taken = {}
    if recipe.memory.allocator == "keep" and allocator.supported():
        taken["memory.allocator"] = "keep"
    if recipe.process.threads != "auto":
        taken["process.threads"] = str(recipe.process.threads)
    if isinstance(recipe.process.affinity, tuple):
        taken["process.affinity"] = ",".join(map(str, recipe.process.affinity))
    return taken
