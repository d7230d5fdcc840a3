"""From a Recipe to the hooks of its cures."""

from __future__ import annotations

import atexit
from typing import Any

from flatout.cures import record
from flatout.cures.steps import Steps
from flatout.hooks.compiling import skip_our_frames
from flatout.hooks.importing import when_imported
from flatout.recipe import FIELDS, PLAIN, Recipe

TESTED = ("2.11", "2.12", "2.13")
"""Versions of torch that the cures were tested with."""

CURES = (
    "compute.precision",
    "compute.memory_format",
    "compute.rewrites",
    "compute.fused_optimizer",
    "compute.compile",
    "compute.matmul_precision",
    "memory.allocator",
    "process.threads",
    "process.interop_threads",
    "process.affinity",
    "process.flush_denormals",
    "input.workers",
    "input.pin_memory",
    "script.persistent_workers",
    "script.cache",
    "script.features",
    "script.zero_grad",
    "script.garbage",
    "script.empty_cache",
    "script.host_syncs",
    "script.log_every",
    "script.evaluation",
    "script.cudnn_benchmark",
    "script.gradient_sync",
    "script.unused_parameters",
)
"""Fields of a Recipe that can take hold in a script written without Flatout."""

# Values that plain PyTorch has too, but that a script may have written otherwise.
_AGAINST_WRITTEN = {"compute.precision": "fp32", "input.workers": 0}


def wanted(recipe: Recipe) -> dict[str, Any]:
    """What a Recipe asks of a script written without Flatout: value by dotted name.

    A field that is `auto`, or as in plain PyTorch, leaves the script as written. `fp32` and no
    workers are changes where they are named, but not in a Recipe that names every field, as a
    resolved one does: there they say that nothing was chosen.
    """
    named = recipe.named()
    is_whole = set(FIELDS) - {"process.threads"} <= set(named)
    found = {}
    for field in CURES:
        value = named.get(field, "auto")
        is_plain = value == PLAIN.get(field, "auto")
        if is_plain and not is_whole and field in _AGAINST_WRITTEN:
            is_plain = value != _AGAINST_WRITTEN[field]
        if field in named and value != "auto" and not is_plain:
            found[field] = value
    return found


def in_words(asked: dict[str, Any]) -> list[str]:
    """Each cure as users see it: `workers=2`, `bf16`, `channels_last`."""
    return [record.words_of(field, value) for field, value in asked.items()]


def install(recipe: Recipe) -> list[str]:
    """Hooks the cures that this Recipe names into this process, before the script runs.

    Torch is not imported for that. To be called once.

    Returns:
        What takes hold where its conditions do, in words.
    """
    asked = wanted(recipe)
    record.begin(asked)
    if not asked:
        return []
    when_imported("torch", lambda torch: _hook(torch, recipe, asked))
    when_imported("torch._dynamo.eval_frame", skip_our_frames)
    when_imported("flatout.train.loop", _stand_down)
    return in_words(asked)


def is_tested(version: str) -> bool:
    """Whether the cures were tested with this version of torch."""
    return ".".join(version.split(".")[:2]) in TESTED


def _stand_down(module: Any) -> None:
    record.stand_down(
        "the script trains with Flatout's Trainer or Loop, which take the Recipe themselves: "
        "nothing else in it is changed"
    )


def _hook(torch: Any, recipe: Recipe, asked: dict[str, Any]) -> None:
    if not is_tested(str(torch.__version__)):
        record.stand_down(
            f"nothing is changed: torch {torch.__version__} was not tested with that, only "
            f"{', '.join(TESTED)}"
        )
        return
    from flatout.cures.process import set_up

    steps = Steps()
    set_up(torch, steps, recipe, asked)
    steps.watch(torch)
    atexit.register(record.tell_unmet)
    _hook_models(torch, steps, asked)
    _hook_input(torch, asked)
    _hook_loop(torch, steps, asked)
    _hook_ranks(torch, steps, asked)


def _hook_models(torch: Any, steps: Steps, asked: dict[str, Any]) -> None:
    """Cures of the outermost modules, the innermost first."""
    from flatout.cures import compile, evaluation, features, memory_format, precision, rewrites
    from flatout.cures.roots import Cure, Roots

    cures: list[Cure] = []
    if features.FIELD in asked:
        cures.append(features.keep_features)
    if rewrites.FIELD in asked:
        cures.append(rewrites.rewritten)
    if compile.FIELD in asked:
        cures.append(compile.compiled)
    if memory_format.FIELD in asked:
        cures.append(memory_format.channels_last(steps))
    match asked.get(precision.FIELD):
        case "bf16":
            cures.append(precision.in_bf16)
        case "fp32":
            precision.without_autocast(torch)
        case "fp16":
            record.leave(precision.FIELD, "it needs the loss scaled, which a script does itself")
    if evaluation.FIELD in asked:
        cures.append(evaluation.without_graph(torch, steps))
    if cures:
        Roots(torch, steps, cures)


def _hook_input(torch: Any, asked: dict[str, Any]) -> None:
    from flatout.cures import cache
    from flatout.cures.loaders import PERSISTENT, PIN, WORKERS, Loaders

    fields = {field: asked[field] for field in (WORKERS, PIN, PERSISTENT) if field in asked}
    if fields:
        Loaders(torch, fields)
    if cache.FIELD in asked:
        cache.keep_samples(torch)


def _hook_loop(torch: Any, steps: Steps, asked: dict[str, Any]) -> None:
    """What the script calls in each step."""
    from flatout.cures import empty_cache, fused, garbage, host_syncs, log_every, zero_grad

    if fused.FIELD in asked:
        fused.fuse_steps(steps)
    if zero_grad.FIELD in asked:
        zero_grad.drop_gradients(torch, steps)
    if garbage.FIELD in asked:
        garbage.Garbage(torch, steps)
    if empty_cache.FIELD in asked:
        empty_cache.skip_empty_cache(torch, steps)
    if host_syncs.FIELD in asked:
        host_syncs.defer(torch, steps)
    if log_every.FIELD in asked:
        log_every.Log(steps, asked[log_every.FIELD])


def _hook_ranks(torch: Any, steps: Steps, asked: dict[str, Any]) -> None:
    from flatout.cures import ddp

    if ddp.SEARCH in asked:
        ddp.Search(torch, steps)
    if ddp.SYNC in asked:
        ddp.Accumulation(torch, steps)
