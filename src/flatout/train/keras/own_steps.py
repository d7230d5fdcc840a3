"""A Keras model's own test_step and predict_step, called as Keras calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flatout.data import Batch, Source, differs_by_rank
from flatout.errors import DataError
from flatout.models import as_number, own_method, targets_of
from flatout.train import guard
from flatout.train.evaluate import Watched, evaluating
from flatout.train.loop import Loop


def data_of(batch: Batch) -> Any:
    """Return a batch in the form in which Keras passes it to a step."""
    from keras.utils import pack_x_y_sample_weight

    return pack_x_y_sample_weight(batch.inputs, *targets_of(batch))


def evaluate_as_written(
    model: Any, loop: Loop, source: Source, stopped: Callable[[], bool], watched: Watched
) -> dict[str, float] | None:
    """Return the logs of a model's own test_step over `source`; None if `stopped` returns True.

    Each rank takes all batches whole: Flatout cannot join results of a step that it does not know.
    """
    loop.meet_others()
    guard.check_state(model, "evaluation")
    loop.be_ready(model)
    check_is_common(source, loop, f"{type(model).__name__}.{own_method(model, 'test')}")
    model.make_test_function()
    logs: dict[str, Any] = {}

    def read() -> dict[str, Any]:
        return plain(logs)

    with loop.feed.evaluated(source, source) as batches, evaluating(model):
        for batch in watched(batches, read):
            logs = model.test_function([data_of(loop.ready(batch))])
            if stopped():
                return None
    loop.tell_skipped(source)
    return dict(loop.world.from_first(plain(model._get_metrics_result_or_logs(logs))))


def check_is_common(source: Source, loop: Loop, method: str) -> None:
    """Refuse data that differ by rank, for a method that takes all samples."""
    own_rows = differs_by_rank(source)
    if loop.world.size > 1 and own_rows:
        raise DataError(
            f"{method} is called with whole batches on every rank, and here each rank has its own "
            "samples",
            do="leave shard out and read files, or override compute_loss and compute_metrics in "
            "its place",
        )


def plain(logs: dict[str, Any]) -> dict[str, Any]:
    """Return the logs in one flat dict, with numbers as floats."""
    result: dict[str, Any] = {}
    for name, value in sorted(logs.items()):
        result.update(plain(value) if isinstance(value, dict) else {name: as_number(value)})
    return result
