"""What holds a script back, or endangers its result: a file per check.

A check is a function of an Observation that gives its Findings. Where the signal that it needs
could not be had, it raises NoSignal with the reason: it does not guess.
"""

from flatout.doctor.checks import (
    activation_before_pool,
    advanced_indexing,
    channels_first,
    cudnn_benchmark,
    data_parallel,
    decode_each_epoch,
    empty_cache,
    eval_missing,
    evaluate_with_grad,
    fp32_slow,
    frozen_recomputed,
    garbage_each_step,
    gpu_unused,
    item_each_step,
    last_batch_ragged,
    log_each_step,
    map_per_sample,
    memory_not_pinned,
    memory_returned,
    metric_slow,
    nan_in_buffers,
    no_sync_missing,
    optimiser_unfused,
    retained_graph,
    sampler_missing,
    saved_wrapped,
    set_epoch_missing,
    small_files,
    starvation,
    threads_too_few,
    threads_too_many,
    train_not_restored,
    unused_parameters_search,
    worker_seeds_equal,
    workers_restarted,
    workers_too_many,
    workers_zero,
    zero_grad_zeros,
)
from flatout.doctor.checks.check import Check, NoSignal, RankCheck

CHECKS: tuple[Check, ...] = (
    eval_missing.CHECK,
    train_not_restored.CHECK,
    nan_in_buffers.CHECK,
    set_epoch_missing.CHECK,
    worker_seeds_equal.CHECK,
    last_batch_ragged.CHECK,
    starvation.CHECK,
    workers_zero.CHECK,
    workers_too_many.CHECK,
    workers_restarted.CHECK,
    decode_each_epoch.CHECK,
    map_per_sample.CHECK,
    small_files.CHECK,
    advanced_indexing.CHECK,
    memory_not_pinned.CHECK,
    gpu_unused.CHECK,
    fp32_slow.CHECK,
    channels_first.CHECK,
    cudnn_benchmark.CHECK,
    frozen_recomputed.CHECK,
    activation_before_pool.CHECK,
    memory_returned.CHECK,
    optimiser_unfused.CHECK,
    zero_grad_zeros.CHECK,
    item_each_step.CHECK,
    log_each_step.CHECK,
    metric_slow.CHECK,
    empty_cache.CHECK,
    garbage_each_step.CHECK,
    retained_graph.CHECK,
    evaluate_with_grad.CHECK,
    data_parallel.CHECK,
    unused_parameters_search.CHECK,
    no_sync_missing.CHECK,
    saved_wrapped.CHECK,
)
"""In the order in which they are told when nothing else decides."""

RANK_CHECKS: tuple[RankCheck, ...] = (
    sampler_missing.CHECK,
    threads_too_many.CHECK,
    threads_too_few.CHECK,
)
"""Those that need to see all ranks of a machine, one rank included."""

__all__ = ["CHECKS", "RANK_CHECKS", "Check", "NoSignal", "RankCheck"]
