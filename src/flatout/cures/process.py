"""What holds for the whole process: threads, affinity, denormals, allocator, torch's switches."""

from __future__ import annotations

from typing import Any

from flatout.cures.record import leave, took, words_of
from flatout.devices import allocator
from flatout.devices import process as settings
from flatout.recipe import Recipe


def set_up(torch: Any, recipe: Recipe, asked: dict[str, Any]) -> None:
    """Applies, as a Loop does, what the Recipe asks of the process; torch has just been loaded."""
    of_process = {field: value for field, value in asked.items() if field.startswith("process.")}
    late = settings.apply(recipe.process) if of_process else []
    for field, value in of_process.items():
        reason = next((words for words in late if words.startswith(field)), "")
        if reason:
            leave(field, reason)
        else:
            took(field, words_of(field, value))
    if "memory.allocator" in asked:
        _keep_memory()
    if "compute.matmul_precision" in asked:
        torch.set_float32_matmul_precision(asked["compute.matmul_precision"])
        took("compute.matmul_precision", words_of("", asked["compute.matmul_precision"]))
    if "script.cudnn_benchmark" in asked:
        if torch.backends.cudnn.is_available():
            torch.backends.cudnn.benchmark = True
            took("script.cudnn_benchmark", "cuDNN benchmark")
        else:
            leave("script.cudnn_benchmark", "there is no cuDNN here")


def _keep_memory() -> None:
    if allocator.current() == "keep" or allocator.keep_memory():
        took("memory.allocator", "allocator=keep")
    else:
        leave("memory.allocator", "glibc's allocator does not serve this process")
