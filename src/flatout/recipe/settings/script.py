"""The section `script`: changes of a script that was written without Flatout."""

from typing import Literal

from flatout.recipe.parity import Parity, redrawn_if
from flatout.recipe.setting import Section, Steps, Trial, setting


class Script(Section):
    """What is done differently in a script that was written without Flatout."""

    persistent_workers: Literal["as_written", "on"] = setting(
        "as_written",
        "Loader workers stay from one epoch to the next.",
        # Persistent workers continue their random streams; new workers begin with fresh seeds.
        parity=lambda facts: redrawn_if(facts.draws_random_in_input, Parity.EXACT),
        words="workers that stay",
        trial=Trial("on", lambda job: job.restarts_workers),
        of_input=True,
        in_epochs=True,
    )
    cache: Literal["as_written", "memory"] = setting(
        "as_written",
        "`memory` keeps each sample that a dataset has made, where it makes the same one again "
        "and memory has room.",
        # Only samples that are equal each time are kept.
        parity=Parity.EXACT,
        words="samples cached in memory",
        of_input=True,
        in_epochs=True,
        fills=True,
    )
    features: Literal["as_written", "memory", "disk"] = setting(
        "as_written",
        "`memory` keeps what leading frozen layers in eval mode give for each sample, on a CPU, "
        "while memory has room; `disk` keeps it in the cache folder, for later runs as well.",
        # A sample's features were computed in the batch in which the sample occurred first.
        parity=Parity.TOLERANT,
        words="features of frozen layers kept",
        fills=True,
    )
    zero_grad: Literal["as_written", "set_to_none"] = setting(
        "as_written",
        "`set_to_none` drops gradients where the script fills them with zeros.",
        parity=Parity.EXACT,
        words="gradients set to None",
    )
    garbage: Literal["as_written", "scheduled"] = setting(
        "as_written",
        "`scheduled` moves Python's garbage collection, asked for in a step or not, to between "
        "epochs or to where memory grows.",
        parity=Parity.EXACT,
        words="garbage collection scheduled",
        trial=Trial("scheduled", lambda job: True),
    )
    empty_cache: Literal["as_written", "skip"] = setting(
        "as_written",
        "`skip` lets the device's allocator keep its memory in each step.",
        parity=Parity.EXACT,
        words="no empty_cache",
    )
    host_syncs: Literal["as_written", "deferred"] = setting(
        "as_written",
        "`deferred` hands over a number read from a device once it is used, not when it is asked "
        "for.",
        parity=Parity.EXACT,
        words="numbers read when they are used",
    )
    log_every: Steps = setting(
        None,
        "Steps from one line of the training loop's log to the next. `off` (None in code) logs as "
        "written.",
        parity=Parity.EXACT,
        words="a log line every {} steps",
    )
    evaluation: Literal["as_written", "no_grad"] = setting(
        "as_written",
        "`no_grad` evaluates without the graph that only a backward pass needs.",
        parity=Parity.EXACT,
        words="evaluation without gradients",
        in_epochs=True,
        between_steps=True,
    )
    cudnn_benchmark: Literal["as_written", "on"] = setting(
        "as_written",
        "cuDNN tries its kernels out for each shape.",
        # Other kernels round differently.
        parity=Parity.TOLERANT,
        words="cuDNN benchmark",
        trial=Trial("on", lambda job: job.has_gpu and job.has_convolutions),
    )
    unused_parameters: Literal["as_written", "no_search"] = setting(
        "as_written",
        "`no_search`: DistributedDataParallel does not look for parameters without gradients, "
        "where all have one.",
        parity=Parity.EXACT,
        words="no search for unused parameters",
    )
    gradient_sync: Literal["as_written", "last_backward"] = setting(
        "as_written",
        "`last_backward` adds up gradients over the ranks once in each optimizer step, not in "
        "each micro-batch.",
        # The same gradients, summed in another order.
        parity=Parity.TOLERANT,
        words="gradients summed once per step",
    )
