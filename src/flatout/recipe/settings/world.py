"""The section `world`: where the job runs."""

from typing import Annotated, Literal

from pydantic import Field

from flatout.recipe.parity import Parity, redrawn_if
from flatout.recipe.setting import Live, NotNegative, Positive, Section, setting

CudaDevice = Annotated[
    str, Field(pattern=r"^cuda:(0|[1-9][0-9]*)$", json_schema_extra={"allowed": "cuda:N"})
]


class World(Section):
    """Where the job runs."""

    device: Literal["auto", "cpu", "cuda"] | CudaDevice = setting(
        "auto",
        "The device that computes. `auto` is a GPU that can be used, else `cpu`.",
        plain="cpu",
        # Each kind of device has its own random streams.
        parity=lambda facts: redrawn_if(facts.draws_from_a_stream, Parity.TOLERANT),
        words="{}",
        unmeasured=lambda at: (str(at.device), "the device found"),
    )
    placement: Literal["soft", "strict"] = setting(
        "soft",
        "When a device cannot be used: `soft` falls back and says so, `strict` stops.",
        parity=Parity.EXACT,
        words="{} placement",
    )
    strategy: Literal["ddp", "fsdp", "staged", "parameter_server", "local_sgd"] = setting(
        "ddp",
        "What several ranks do together: `ddp` makes each step one of all ranks, with the result "
        "of one rank. `fsdp` does so where each rank holds a part of the weights, gradients and "
        "the optimizer's state: less memory, more to send. `staged` does so where each rank has "
        "some layers of the model, through which parts of a batch pass from rank to rank. "
        "`parameter_server` lets some ranks step the weights for all, each its share. "
        "`local_sgd` is for slow links: ranks step alone, each on its part of the batch, and "
        "average weights and the optimizer's state every `sync_every` steps, at the end of an "
        "epoch, and before evaluating and saving.",
        # The same sums, in another order.
        parity=Parity.TOLERANT,
        learns="local_sgd",
        words="{}",
    )
    stages: NotNegative = setting(
        0,
        'Into how many stages `strategy = "staged"` cuts the model. 0 is one for each rank. Of '
        "fewer stages the ranks have several copies, each of which takes its share of a batch: 4 "
        "ranks with `stages = 2` are two copies of two stages, and each stage adds up the "
        "gradients of its copies.",
        # The same sums, in another order.
        parity=Parity.TOLERANT,
        words="{} stages",
    )
    schedule: Literal["1f1b", "gpipe"] = setting(
        "1f1b",
        'In which order `strategy = "staged"` computes: `gpipe` runs the forward of all '
        "micro-batches, then the backward of all; `1f1b` begins a backward as soon as it can, so "
        "that fewer activations are kept.",
        # Gradients of the same micro-batches, in the same order.
        parity=Parity.TOLERANT,
        words="schedule {}",
    )
    micro_batches: Literal["auto"] | NotNegative = setting(
        "auto",
        'Into how many parts `strategy = "staged"` splits a batch, or a copy its share of it. More '
        "of them leave ranks idle for less time, and make each smaller. 0 is four for each stage; "
        "`auto` begins with that, and takes what is measured to be faster on the job's own steps.",
        plain=0,
        parity=lambda facts: redrawn_if(facts.draws_from_a_stream, Parity.TOLERANT),
        words="{} micro-batches",
        live=Live(),
    )
    batch_statistics: Literal["whole", "per_micro_batch"] = setting(
        "whole",
        'Whether `strategy = "staged"` takes models with BatchNorm in training: `whole` refuses '
        "them, `per_micro_batch` lets each micro-batch have its own statistics. Each micro-batch "
        "then needs at least two samples.",
        parity=Parity.LEARNING,
        words="statistics {}",
    )
    servers: Positive = setting(
        1,
        'How many ranks `strategy = "parameter_server"` makes servers, from the first on: each '
        "steps an equal share of the weights, beside its own part of the batches. With "
        "`flatout run --servers` they are processes that compute nothing, and this is how many.",
        # The same sums, in another order.
        parity=Parity.TOLERANT,
        words="{} servers",
    )
    staleness: Literal["sync", "unbounded"] | NotNegative = setting(
        "sync",
        'Whether the servers of `strategy = "parameter_server"` wait: `sync` steps when the '
        "gradients of all ranks are there, with the result of one rank. With a number, each "
        "gradient is its own step, and a rank may be that number of batches ahead of the slowest "
        "rank; `unbounded` sets no bound. The age of a gradient is another number: it counts "
        "gradients of other ranks.",
        parity=Parity.LEARNING,
        words="staleness {}",
    )
    spare_workers: NotNegative = setting(
        0,
        'For how many ranks the server of `strategy = "parameter_server"` with `staleness = '
        '"sync"` does not wait: a step is the mean of the gradients that '
        "come first, and one that comes later is dropped.",
        parity=Parity.LEARNING,
        words="{} spare workers",
    )
    sync_every: Positive = setting(
        32,
        'How many steps `strategy = "local_sgd"` makes between two averages.',
        parity=Parity.LEARNING,
        words="an average every {} steps",
    )
    outer: Literal["average", "nesterov"] = setting(
        "average",
        'What `strategy = "local_sgd"` does with the mean of what the ranks have learned apart: '
        "`average` takes it as it is; `nesterov` takes it as the gradient of an outer SGD with a "
        "rate of 0.7 and Nesterov momentum of 0.9, as DiLoCo does, which suits many steps apart.",
        parity=Parity.LEARNING,
        words="outer {}",
    )
    tables: Literal["replicated", "sharded"] = setting(
        "replicated",
        "Where the rows of embedding tables lie while several ranks train on CPUs: `replicated` on "
        "every rank. `sharded` on one rank each, in blocks that go round the ranks: a rank asks "
        "the owners for the rows that its part of a batch needs and sends them their gradients, "
        "and the owner alone steps a row, as `compute.touched_rows` does, which this turns on. "
        "Before evaluating and saving, at the end of an epoch and of training every rank has all "
        "rows again.",
        parity=Parity.TOLERANT,
        words="{} tables",
    )
    reduction: Literal["auto", "all_reduce", "shared", "ring", "to_one", "hierarchical"] = setting(
        "auto",
        "How several ranks add up their gradients: `all_reduce` as gloo or NCCL does it; `shared` "
        "in memory that the ranks of one node share, which is what `auto` takes where all ranks "
        "compute on one node's CPUs; `ring` passes pieces around; `to_one` sends all to the first "
        "rank and back; `hierarchical` adds up within each node first, then between nodes.",
        plain="all_reduce",
        # The same numbers, summed in another order.
        parity=Parity.TOLERANT,
        words="{} reduction",
    )
    compression: Literal["off", "fp16", "bf16", "powersgd"] = setting(
        "off",
        "What several ranks send in place of whole gradients. `bf16` and `fp16` take half the "
        "bytes of fp32, round each gradient once before the sum and once after it, and add up in "
        "fp32. `powersgd` sends matrices of low rank and makes up for the error in the next "
        "steps: far fewer bytes, but another optimization.",
        # Half precision rounds each gradient, as in compute.precision.
        parity=Parity.TOLERANT,
        learns="powersgd",
        words="gradients as {}",
    )
    powersgd_rank: Positive = setting(
        4,
        'The rank of the matrices that `compression = "powersgd"` sends: a higher one sends more '
        "and errs less.",
        parity=Parity.LEARNING,
        words="PowerSGD of rank {}",
    )
    timeout: Positive = setting(
        600,
        "Seconds that ranks wait for one another in a collective before they end.",
        parity=Parity.EXACT,
        words="{} s for a collective",
    )
    patience: Positive = setting(
        30,
        "Seconds that a rank waits for others in a collective before it says which one is missing "
        "and what that one does.",
        parity=Parity.EXACT,
        words="{} s until missing ranks are named",
    )
