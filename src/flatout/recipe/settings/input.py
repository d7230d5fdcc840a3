"""The section `input`: how batches are made."""

from typing import Literal

from flatout.recipe.parity import Parity, redrawn_if
from flatout.recipe.setting import NotNegative, Section, Switch, Trial, setting


class Input(Section):
    """How batches are made ready."""

    workers: Literal["auto", "thread"] | NotNegative = setting(
        "auto",
        "The makers of the batches of a torch Dataset. With 0, the process makes each batch when "
        "training asks for it. With `thread`, a thread makes batches ahead. Another number is the "
        "number of worker processes. `auto` begins with 0. If training waits for batches, `auto` "
        "keeps the choice that is fastest on the job's own steps. A thread can read ahead of "
        "generators, Keras' PyDatasets and DataLoaders without workers. Processes can make the "
        "batches of a DataLoader without workers on a map-style Dataset. `auto` does not use "
        "processes if samples draw random numbers.",
        plain=0,
        # The order is a function of seed, epoch and counter. Only draws within workers change.
        parity=lambda facts: redrawn_if(facts.draws_random_in_input, Parity.EXACT),
        words="workers={}",
        trial=Trial(
            lambda job: job.cpus if job.workers else max(1, job.cpus // 2),
            lambda job: job.workers is not None,
            others=lambda cpus: [*(2**k for k in range(cpus.bit_length())), cpus],
        ),
        unmeasured=lambda at: (0, "plain, until batches are waited for"),
        written=lambda seen: seen.workers,
        of_input=True,
    )
    pin_memory: Switch = setting(
        "auto",
        "Page-locked batches, which a GPU copies while it computes. `auto` is `on` where one does.",
        plain="off",
        parity=Parity.EXACT,
        words="pinned memory",
        trial=Trial("on", lambda job: job.has_gpu and not job.pins_memory),
        unmeasured=lambda at: (
            ("on", "copies overlap") if at.device.type == "cuda" else ("off", "no GPU")
        ),
        of_input=True,
    )
    on_device: Switch = setting(
        "auto",
        "Arrays in memory are copied to the GPU once, and batches are gathered there; so is a "
        "validation, from its second time on. `auto` is `on` where they take at most 5% of the "
        "GPU's memory and a quarter of what is free. What torch writes into them while training "
        "is seen from the next epoch on; what numpy writes is not.",
        plain="off",
        parity=Parity.EXACT,
        words="data on the device",
        unmeasured=lambda at: ("off", "no GPU"),
    )
    features: Literal["auto", "off", "memory", "disk"] = setting(
        "auto",
        "What frozen leading layers give for a sample is kept, in memory or on the disk, and "
        "computed once: for later epochs, validations, and later runs where it is on the disk. "
        "`auto` keeps it where measured times say that it pays.",
        plain="off",
        # A sample's features were computed in the batch in which the sample occurred first.
        parity=Parity.TOLERANT,
        words="features kept ({})",
    )
