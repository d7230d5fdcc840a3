"""The sections of a Recipe: plain data, one class for what one room applies.

A field that measurement may decide takes `"auto"`, which is its default. Sections are frozen; an
unknown name or a value that a field does not take raises RecipeError.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from flatout.recipe.refusal import PlainData, unknown

Value = str | int | bool | None | tuple[int, ...]
"""What a field of a Recipe can hold."""


def _switch_word(value: Any) -> Any:
    return ("on" if value else "off") if isinstance(value, bool) else value


def _truth(value: Any) -> Any:
    return {"on": True, "off": False}.get(value, value) if isinstance(value, str) else value


def _off_is_none(value: Any) -> Any:
    return None if isinstance(value, str) and value == "off" else value


def _one_is_a_list(value: Any) -> Any:
    return (value,) if isinstance(value, int) and not isinstance(value, bool) else value


def _as_a_set(cpus: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(set(cpus)))


Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch_word)]
OnOff = Annotated[Literal["on", "off"], BeforeValidator(_switch_word)]
Flag = Annotated[bool, BeforeValidator(_truth)]
Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
Steps = Annotated[
    Positive | None,
    BeforeValidator(_off_is_none),
    Field(json_schema_extra={"allowed": "off or a whole number above 0"}),
]
CpuList = Annotated[
    tuple[NotNegative, ...],
    # TOML has lists and the operating system gives sets; the CPU numbers inside stay strict.
    Field(strict=False, min_length=1, json_schema_extra={"allowed": "a list of CPU numbers"}),
    AfterValidator(_as_a_set),
]
CudaDevice = Annotated[
    str, Field(pattern=r"^cuda:(0|[1-9][0-9]*)$", json_schema_extra={"allowed": "cuda:N"})
]


class Section(PlainData):
    """Base of the sections: no value is converted in silence, so `"4"` is no number."""

    model_config = ConfigDict(strict=True)


class Compute(Section):
    """How the arithmetic of a step runs."""

    title: ClassVar[str] = "compute"

    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto",
        description="The number format of the heavy operators under autocast. Weights and the "
        "optimizer stay in fp32. fp16 scales the loss and skips a step whose gradients overflow.",
    )
    memory_format: Literal["auto", "contiguous", "channels_last"] = Field(
        default="auto",
        description="The layout of image tensors: NCHW, or NHWC with the same shape.",
    )
    rewrites: Switch = Field(
        default="auto",
        description="Rewrites of the model's graph that give equal values, such as a ReLU moved "
        "behind max-pooling.",
    )
    fused_optimizer: Switch = Field(
        default="auto", description="One pass over each parameter for the optimizer's whole update."
    )
    compile: Switch = Field(
        default="auto", description="torch.compile, for runs long enough to repay the compilation."
    )
    matmul_precision: Literal["auto", "highest", "high", "medium"] = Field(
        default="auto",
        description="How precisely fp32 matrix products are computed "
        "(torch.set_float32_matmul_precision).",
    )
    dropout: Literal["torch", "by_sample"] = Field(
        default="torch",
        description="What decides which elements dropout drops. `torch`: torch's own stream of "
        "random numbers, one on each rank. `by_sample`: seed, step, layer and sample alone, so "
        "that they are the same on any number of ranks, in any micro-batches and memory format, "
        "and after a resume; not with `compile`.",
    )
    deterministic: Flag = Field(
        default=False, description="Only operators that give the same bits on every run."
    )


class Memory(Section):
    """How a step's memory is used."""

    title: ClassVar[str] = "memory"

    micro_batch: Literal["auto", "whole"] | Positive = Field(
        default="auto",
        description="How many samples go through the model at once. A batch is computed in parts "
        "of this size and updates the weights once; the global batch stays the same. `auto` is "
        "`whole`, and parts where memory does not suffice.",
    )
    activation_checkpointing: OnOff = Field(
        default="off",
        description="Compute activations again in the backward pass rather than keep them: less "
        "memory, more time.",
    )
    allocator: Literal["auto", "default", "keep"] = Field(
        default="auto",
        description="`keep` tells the C allocator not to hand memory back to the system after "
        "each step, which saves page faults.",
    )


class Process(Section):
    """How the process uses the processor."""

    title: ClassVar[str] = "process"

    threads: Literal["auto"] | Positive = Field(
        default="auto", description="Threads inside one operator (torch.set_num_threads)."
    )
    interop_threads: Literal["default"] | Positive = Field(
        default="default",
        description="Threads that run operators side by side (torch.set_num_interop_threads). "
        "`default` leaves torch's own number.",
    )
    affinity: Literal["per_rank", "off"] | Annotated[CpuList, BeforeValidator(_one_is_a_list)] = (
        Field(
            default="per_rank",
            description="The CPUs that the process is bound to. `per_rank` gives each of several "
            "ranks on a node CPUs of its own, and leaves one rank alone as it is; `off` takes back "
            "what was bound.",
        )
    )
    flush_denormals: Annotated[Literal["default", "on", "off"], BeforeValidator(_switch_word)] = (
        Field(
            default="default",
            description="Treat numbers too small for full precision as zero; CPUs are slow on "
            "them. `default` leaves it as the process has it: torch begins with `off`.",
        )
    )


class Input(Section):
    """How batches are made ready."""

    title: ClassVar[str] = "input"

    workers: Literal["auto", "thread"] | NotNegative = Field(
        default="auto",
        description="Who makes the batches of a torch Dataset: 0 the process itself when they are "
        "asked for, `thread` a thread of it ahead of need, a number so many worker processes. "
        "`auto` begins with 0 and, where batches are waited for, keeps what is measured faster on "
        "the job's own steps. Generators, Keras' PyDatasets and DataLoaders without workers can be "
        "read ahead by a thread.",
    )
    pin_memory: Switch = Field(
        default="auto",
        description="Page-locked batches, which a GPU copies while it computes. `auto` is `on` "
        "where one does.",
    )


class World(Section):
    """Where the job runs."""

    title: ClassVar[str] = "world"

    device: Literal["auto", "cpu", "cuda"] | CudaDevice = Field(
        default="auto",
        description="The device that computes. `auto` is a GPU that can be used, else `cpu`.",
    )
    placement: Literal["soft", "strict"] = Field(
        default="soft",
        description="When a device cannot be used: `soft` falls back and says so, `strict` stops.",
    )
    reduction: Literal["auto", "all_reduce", "shared", "ring", "to_one", "hierarchical"] = Field(
        default="auto",
        description="How several ranks add up their gradients: `all_reduce` as gloo or NCCL does "
        "it; `shared` in memory that the ranks of one node share, which is what `auto` takes where "
        "all ranks compute on one node's CPUs; `ring` passes pieces around; `to_one` sends all to "
        "the first rank and back; `hierarchical` adds up within each node first, then between "
        "nodes.",
    )
    compression: Literal["off", "fp16", "bf16", "powersgd"] = Field(
        default="off",
        description="What several ranks send in place of whole gradients. `bf16` and `fp16` take "
        "half the bytes of fp32, round each gradient once before the sum and once after it, and "
        "add up in fp32. `powersgd` sends matrices of low rank and makes up for the error in the "
        "next steps: far fewer bytes, but another optimization.",
    )
    powersgd_rank: Positive = Field(
        default=4,
        description='The rank of the matrices that `compression = "powersgd"` sends: a higher '
        "one sends more and errs less.",
    )
    timeout: Positive = Field(
        default=600,
        description="Seconds that ranks wait for one another in a collective before they end.",
    )
    patience: Positive = Field(
        default=30,
        description="Seconds that a rank waits for others in a collective before it says which one "
        "is missing and what that one does.",
    )


class Save(Section):
    """When checkpoints are written."""

    title: ClassVar[str] = "save"

    every: Steps = Field(
        default=None,
        description="Steps between checkpoints. `off` (None in code) writes none on the way.",
    )
    keep_last: Positive = Field(default=3, description="How many of the newest checkpoints stay.")
    asynchronous: Flag = Field(
        default=True, description="Write while training goes on; off waits for each checkpoint."
    )
    pieces: Literal["merged", "per_rank"] = Field(
        default="merged",
        description="With several ranks: the first writes each checkpoint, or every rank its part "
        "of it into the same folder, which all nodes must share.",
    )


class Script(Section):
    """What is done differently in a script that was written without Flatout."""

    title: ClassVar[str] = "script"

    persistent_workers: Literal["as_written", "on"] = Field(
        default="as_written", description="Loader workers stay from one epoch to the next."
    )
    cache: Literal["as_written", "memory"] = Field(
        default="as_written",
        description="`memory` keeps each sample that a dataset has made, where it makes the same "
        "one again and memory has room.",
    )
    features: Literal["as_written", "memory"] = Field(
        default="as_written",
        description="`memory` keeps what leading frozen layers in eval mode give for each sample, "
        "on a CPU, while memory has room.",
    )
    zero_grad: Literal["as_written", "set_to_none"] = Field(
        default="as_written",
        description="`set_to_none` drops gradients where the script fills them with zeros.",
    )
    garbage: Literal["as_written", "scheduled"] = Field(
        default="as_written",
        description="`scheduled` moves Python's garbage collection, asked for in a step or not, "
        "to between epochs or to where memory grows.",
    )
    empty_cache: Literal["as_written", "skip"] = Field(
        default="as_written",
        description="`skip` lets the device's allocator keep its memory in each step.",
    )
    host_syncs: Literal["as_written", "deferred"] = Field(
        default="as_written",
        description="`deferred` hands over a number read from a device once it is used, not when "
        "it is asked for.",
    )
    log_every: Steps = Field(
        default=None,
        description="Steps from one line of the training loop's log to the next. `off` (None in "
        "code) logs as written.",
    )
    evaluation: Literal["as_written", "no_grad"] = Field(
        default="as_written",
        description="`no_grad` evaluates without the graph that only a backward pass needs.",
    )
    cudnn_benchmark: Literal["as_written", "on"] = Field(
        default="as_written", description="cuDNN tries its kernels out for each shape."
    )
    gradient_sync: Literal["as_written", "last_backward"] = Field(
        default="as_written",
        description="`last_backward` adds up gradients over the ranks once in each optimizer step, "
        "not in each micro-batch.",
    )
    unused_parameters: Literal["as_written", "no_search"] = Field(
        default="as_written",
        description="`no_search`: DistributedDataParallel does not look for parameters without "
        "gradients, where all have one.",
    )


SECTIONS: dict[str, type[Section]] = {
    section.title: section for section in (Compute, Memory, Process, Input, World, Save, Script)
}

FIELDS = tuple(
    f"{title}.{name}" for title, section in SECTIONS.items() for name in section.model_fields
)
"""Every field's dotted name, in reading order."""

Section.known = FIELDS

PLAIN: dict[str, Value] = {
    "compute.precision": "fp32",
    "compute.memory_format": "contiguous",
    "compute.rewrites": "off",
    "compute.fused_optimizer": "off",
    "compute.compile": "off",
    "compute.matmul_precision": "highest",
    "compute.dropout": "torch",
    "compute.deterministic": False,
    "memory.micro_batch": "whole",
    "memory.activation_checkpointing": "off",
    "memory.allocator": "default",
    "process.interop_threads": "default",
    "process.affinity": "per_rank",
    "process.flush_denormals": "default",
    "input.workers": 0,
    "input.pin_memory": "off",
    "world.device": "cpu",
    "world.placement": "soft",
    "world.reduction": "all_reduce",
    "world.compression": "off",
    "world.powersgd_rank": 4,
    "world.timeout": 600,
    "world.patience": 30,
    "save.every": None,
    "save.keep_last": 3,
    "save.asynchronous": True,
    "save.pieces": "merged",
    "script.persistent_workers": "as_written",
    "script.cache": "as_written",
    "script.features": "as_written",
    "script.zero_grad": "as_written",
    "script.garbage": "as_written",
    "script.empty_cache": "as_written",
    "script.host_syncs": "as_written",
    "script.log_every": None,
    "script.evaluation": "as_written",
    "script.cudnn_benchmark": "as_written",
    "script.gradient_sync": "as_written",
    "script.unused_parameters": "as_written",
}
"""What a plain PyTorch script does. The threads are missing: they depend on the machine."""


def split(field: str) -> tuple[str, str]:
    """Return the section and the name in it of a dotted field.

    Raises:
        RecipeError: no field has this name.
    """
    section, dot, name = field.partition(".")
    if field in FIELDS:
        return section, name
    if dot and section in SECTIONS:
        raise unknown(field, FIELDS, f"{section} takes", SECTIONS[section].model_fields)
    raise unknown(field, FIELDS, "the sections are", SECTIONS)
