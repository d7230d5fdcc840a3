"""The process' settings, at run time and in the environment of a process to be started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.devices import allocator, threads

if TYPE_CHECKING:
    from flatout.recipe import Process, Recipe


def apply(process: Process) -> dict[str, str]:
    """Applies what a Recipe's process section says and returns what became of it, in words.

    `auto` leaves a setting alone. The CPUs come first, then the threads that run on them, then
    denormals, since trying those out starts the threads.

    Returns:
        For each setting that is not `auto`, by dotted name, what holds now.

    Raises:
        DeviceError: the affinity names CPUs that this process cannot have.
    """
    done = {}
    if process.affinity == "off":
        threads.reset_affinity()
        done["process.affinity"] = "off"
    elif process.affinity != "auto":
        threads.set_affinity(process.affinity)
        done["process.affinity"] = f"CPUs {', '.join(map(str, process.affinity))}"
    if process.threads != "auto":
        before = threads.set_threads(process.threads)
        done["process.threads"] = f"{process.threads}, before {before}"
    if process.interop_threads != "auto":
        in_time = threads.set_interop_threads(process.interop_threads)
        late = "unchanged: too late in this process"
        done["process.interop_threads"] = str(process.interop_threads) if in_time else late
    if process.flush_denormals != "auto":
        everywhere = threads.flush_denormals(process.flush_denormals == "on")
        late = "" if everywhere else ", but not in threads that ran before"
        done["process.flush_denormals"] = f"{process.flush_denormals}{late}"
    return done


def environment(recipe: Recipe) -> dict[str, str]:
    """Returns the variables that a process needs from its start to run by a Recipe.

    CPU numbers are not among them: GOMP_CPU_AFFINITY would bind the main thread to a single CPU,
    and with it every loader worker that it forks. `threads.set_affinity` before the start is
    inherited instead. KMP variables would do nothing, as torch's wheels load libgomp.
    """
    variables: dict[str, str] = {}
    if recipe.memory.allocator == "keep":
        variables |= allocator.environment()
    if recipe.process.threads != "auto":
        variables["OMP_NUM_THREADS"] = str(recipe.process.threads)
    return variables


def at_start(recipe: Recipe) -> dict[str, str]:
    """Returns what of a Recipe a process takes up at its start, whatever it runs: field to value.

    The rest waits for a Trainer or a Loop in it.
    """
    taken = {}
    if recipe.memory.allocator == "keep" and allocator.supported():
        taken["memory.allocator"] = "keep"
    if recipe.process.threads != "auto":
        taken["process.threads"] = str(recipe.process.threads)
    if isinstance(recipe.process.affinity, tuple):
        taken["process.affinity"] = ",".join(map(str, recipe.process.affinity))
    return taken
