"""Hypothesis strategies for Recipes: any value of any field, any Recipe, any resolved one."""

from hypothesis import strategies as st

from flatout.recipe import FIELDS, PLAIN, Choice, Parity, Recipe
from flatout.recipe.recipe import of_fields

switch = st.sampled_from(["on", "off"])
positive = st.integers(1, 10_000)
cpus = st.lists(st.integers(0, 255), min_size=1, unique=True).map(lambda one: tuple(sorted(one)))

CONCRETE = {
    "compute.precision": st.sampled_from(["fp32", "bf16", "fp16"]),
    "compute.memory_format": st.sampled_from(["contiguous", "channels_last"]),
    "compute.rewrites": switch,
    "compute.fused_optimizer": switch,
    "compute.compile": switch,
    "compute.matmul_precision": st.sampled_from(["highest", "high", "medium"]),
    "compute.dropout": st.sampled_from(["torch", "by_sample"]),
    "compute.deterministic": st.booleans(),
    "memory.micro_batch": st.just("whole") | positive,
    "memory.activation_checkpointing": switch,
    "memory.allocator": st.sampled_from(["default", "keep"]),
    "process.threads": positive,
    "process.interop_threads": st.just("default") | positive,
    "process.affinity": st.sampled_from(("per_rank", "off")) | cpus,
    "process.flush_denormals": st.just("default") | switch,
    "input.workers": st.integers(0, 64) | st.just("thread"),
    "input.pin_memory": switch,
    "world.device": st.sampled_from(["cpu", "cuda"]) | st.integers(0, 15).map("cuda:{}".format),
    "world.placement": st.sampled_from(["soft", "strict"]),
    "world.reduction": st.sampled_from(["all_reduce", "ring", "to_one", "hierarchical"]),
    "world.compression": st.sampled_from(["off", "fp16", "bf16", "powersgd"]),
    "world.powersgd_rank": positive,
    "world.timeout": positive,
    "world.patience": positive,
    "save.every": st.none() | positive,
    "save.keep_last": positive,
    "save.asynchronous": st.booleans(),
    "save.pieces": st.sampled_from(["merged", "per_rank"]),
    "script.persistent_workers": st.sampled_from(["as_written", "on"]),
    "script.cache": st.sampled_from(["as_written", "memory"]),
    "script.features": st.sampled_from(["as_written", "memory"]),
    "script.zero_grad": st.sampled_from(["as_written", "set_to_none"]),
    "script.garbage": st.sampled_from(["as_written", "scheduled"]),
    "script.empty_cache": st.sampled_from(["as_written", "skip"]),
    "script.host_syncs": st.sampled_from(["as_written", "deferred"]),
    "script.log_every": st.none() | positive,
    "script.evaluation": st.sampled_from(["as_written", "no_grad"]),
    "script.cudnn_benchmark": st.sampled_from(["as_written", "on"]),
    "script.gradient_sync": st.sampled_from(["as_written", "last_backward"]),
    "script.unused_parameters": st.sampled_from(["as_written", "no_search"]),
}

TAKES_AUTO = [field for field in FIELDS if Recipe().get(field) == "auto"]

REQUESTED = {
    field: st.just("auto") | values if field in TAKES_AUTO else values
    for field, values in CONCRETE.items()
}

named_fields = st.fixed_dictionaries({}, optional=REQUESTED)
recipes = named_fields.map(of_fields)

# Surrogates are no UTF-8, so no TOML text can hold them.
texts = st.text(st.characters(codec="utf-8"), max_size=20)
numbers = st.floats(allow_nan=False, allow_infinity=False)
leaves = texts | st.booleans() | st.integers() | numbers
machines = st.dictionaries(
    texts,
    st.recursive(
        leaves | st.none(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=8,
    ),
    max_size=5,
)


@st.composite
def resolved_recipes(draw):
    recipe = draw(recipes)
    choices = {}
    for field in FIELDS:
        if recipe.get(field) == "auto" or draw(st.booleans()):
            choices[field] = Choice(
                value=draw(CONCRETE[field]),
                reason=draw(texts),
                parity=draw(st.sampled_from(Parity)),
                ratio=draw(st.none() | numbers),
                low=draw(st.none() | numbers),
                high=draw(st.none() | numbers),
                floor=draw(st.none() | numbers),
            )
    return recipe.resolve(choices, draw(machines))


def plain_choices(**changed):
    """A Choice for each field that takes auto: what plain PyTorch does, but for `changed`."""
    values = {**PLAIN, "process.threads": 4, **changed}
    return {
        field: Choice(value=values[field], reason="measured", parity=Parity.EXACT)
        for field in TAKES_AUTO
    }
