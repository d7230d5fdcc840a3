"""From a finding to the changes of the user's code that cure it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flatout.doctor.edits import (
    arguments,
    evaluation,
    loops,
    metrics,
    models,
    removed,
    tensors,
    workers,
)
from flatout.doctor.edits.code import Unsure
from flatout.doctor.edits.place import Place
from flatout.doctor.edits.source import Source, by_file
from flatout.doctor.finding import Edit, Finding
from flatout.errors import FlatoutError
from flatout.observe import Observation

_EDITS: dict[str, Callable[[Place], list[Edit]]] = {
    "advanced_indexing": tensors.index_select,
    "channels_first": models.channels_last,
    "empty_cache": removed.empty_cache,
    "eval_missing": evaluation.eval_first,
    "evaluate_with_grad": evaluation.no_grad,
    "fp32_slow": models.autocast,
    "garbage_each_step": removed.collect,
    "item_each_step": tensors.read_later,
    "last_batch_ragged": arguments.drop_last,
    "log_each_step": loops.tell_less,
    "memory_not_pinned": arguments.pin,
    "metric_slow": metrics.after_loop,
    "optimizer_unfused": arguments.fuse,
    "retained_graph": tensors.detach,
    "sampler_missing": loops.share_samples,
    "saved_wrapped": models.save_bare,
    "set_epoch_missing": loops.set_epoch,
    "threads_too_many": arguments.threads,
    "train_not_restored": loops.train_again,
    "unused_parameters_search": arguments.no_search,
    "worker_seeds_equal": workers.seed_each,
    "workers_restarted": arguments.stay,
    "workers_too_many": arguments.workers,
    "workers_zero": arguments.workers,
    "zero_grad_zeros": arguments.forget_gradients,
}
"""By the name of the finding."""

WRITTEN = frozenset(_EDITS)
"""Findings whose cure can often be written down as a change of code."""


def propose(finding: Finding, seen: Observation) -> tuple[Edit, ...]:
    """Returns the edits that cure a finding; none where one cannot be written with certainty.

    Args:
        finding: with its line of the user's code, which is read as it is now.
        seen: the rank in which it was found.
    """
    how = _EDITS.get(finding.name)
    if how is None:
        return ()
    try:
        edits = tuple(how(Place.of(finding, seen)))
        for file, some in by_file(edits).items():
            Source.read(file).with_edits(some)  # it is Python still
    except (Unsure, FlatoutError):
        return ()
    return edits


def with_edits(finding: Finding, ranks: Sequence[Observation]) -> Finding:
    """The finding with the edits that cure it, by what the first of these ranks showed of it."""
    found = (edits for seen in ranks if (edits := propose(finding, seen)))
    return replace(finding, edits=finding.edits or next(found, ()))


def with_recipe(
    finding: Finding, recipe: Mapping[str, Any], ranks: Sequence[Observation]
) -> Finding:
    """The finding with other values in its Recipe, and with the edits that say them."""
    if recipe == finding.recipe:
        return finding
    return with_edits(replace(finding, recipe=dict(recipe), edits=()), ranks)
