"""What is known of each setting. A new one has its facts here, and a row in EXPECTED."""

import pytest

from flatout.recipe import FIELDS, PLAIN, SETTINGS, ModelFacts, Parity, Recipe, of_change, phrase

NOTHING = ModelFacts()
DRAWS = ModelFacts(draws_random=True)
KEYED = ModelFacts(draws_random=True, draws_by_sample=True)
COUPLED = ModelFacts(batch_coupled=True)

EXPECTED = [
    ("compute.precision", "fp32", "bf16", DRAWS, Parity.TOLERANT),
    (
        "compute.precision",
        "fp32",
        "bf16",
        ModelFacts(draws_random=True, device="cuda:0"),
        Parity.REDRAWN,
    ),
    ("compute.precision", "fp32", "bf16", ModelFacts(device="cuda:0"), Parity.TOLERANT),
    ("compute.fp32_operators", "off", "on", DRAWS, Parity.TOLERANT),
    ("compute.memory_format", "contiguous", "channels_last", NOTHING, Parity.TOLERANT),
    ("compute.memory_format", "contiguous", "channels_last", DRAWS, Parity.REDRAWN),
    (
        "compute.memory_format",
        "contiguous",
        "channels_last",
        ModelFacts(draws_random=True, draws_by_layout=False),
        Parity.TOLERANT,
    ),
    ("compute.rewrites", "off", "on", DRAWS, Parity.EXACT),
    ("compute.fused_norms", "off", "on", COUPLED, Parity.TOLERANT),
    ("compute.fused_optimizer", "off", "on", NOTHING, Parity.TOLERANT),
    ("compute.touched_rows", "off", "on", NOTHING, Parity.TOLERANT),
    ("compute.bf16_tables", "rounded", "split", NOTHING, Parity.LEARNING),
    ("compute.compile", "off", "on", NOTHING, Parity.TOLERANT),
    ("compute.compile", "off", "on", DRAWS, Parity.REDRAWN),
    ("compute.capture", "off", "on", COUPLED, Parity.TOLERANT),
    ("compute.cuda_graph", "off", "on", DRAWS, Parity.EXACT),
    ("compute.cudnn_benchmark", "off", "on", NOTHING, Parity.TOLERANT),
    ("compute.matmul_precision", "highest", "high", NOTHING, Parity.TOLERANT),
    ("compute.deterministic", False, True, NOTHING, Parity.TOLERANT),
    ("memory.micro_batch", "whole", 8, NOTHING, Parity.TOLERANT),
    ("memory.micro_batch", "whole", 8, DRAWS, Parity.REDRAWN),
    ("memory.micro_batch", 8, 4, ModelFacts(True, True), Parity.LEARNING),
    ("memory.activation_checkpointing", "off", "on", DRAWS, Parity.EXACT),
    ("memory.activation_checkpointing", "off", "on", COUPLED, Parity.EXACT),
    ("memory.allocator", "default", "keep", NOTHING, Parity.EXACT),
    ("process.threads", 1, 2, NOTHING, Parity.TOLERANT),
    ("process.interop_threads", 1, 2, NOTHING, Parity.EXACT),
    ("process.affinity", "off", (0, 1), NOTHING, Parity.EXACT),
    ("process.flush_denormals", "off", "on", NOTHING, Parity.TOLERANT),
    ("input.workers", 0, 4, DRAWS, Parity.EXACT),
    ("input.workers", 0, 4, ModelFacts(draws_random_in_input=True), Parity.REDRAWN),
    ("input.pin_memory", "off", "on", NOTHING, Parity.EXACT),
    ("input.on_device", "off", "on", NOTHING, Parity.EXACT),
    ("input.features", "off", "disk", NOTHING, Parity.TOLERANT),
    ("world.device", "cpu", "cuda", NOTHING, Parity.TOLERANT),
    ("world.device", "cpu", "cuda", DRAWS, Parity.REDRAWN),
    ("world.device", "cpu", "cuda", KEYED, Parity.TOLERANT),
    ("compute.memory_format", "contiguous", "channels_last", KEYED, Parity.TOLERANT),
    ("memory.micro_batch", "whole", 8, KEYED, Parity.TOLERANT),
    ("compute.dropout", "torch", "by_sample", NOTHING, Parity.EXACT),
    ("compute.dropout", "torch", "by_sample", DRAWS, Parity.REDRAWN),
    ("compute.dropout", "torch", "by_sample", KEYED, Parity.REDRAWN),
    ("world.placement", "soft", "strict", NOTHING, Parity.EXACT),
    ("world.strategy", "ddp", "fsdp", NOTHING, Parity.TOLERANT),
    ("world.strategy", "ddp", "staged", NOTHING, Parity.TOLERANT),
    ("world.stages", 0, 2, NOTHING, Parity.TOLERANT),
    ("world.strategy", "ddp", "local_sgd", NOTHING, Parity.LEARNING),
    ("world.schedule", "1f1b", "gpipe", NOTHING, Parity.TOLERANT),
    ("world.micro_batches", 0, 8, NOTHING, Parity.TOLERANT),
    ("world.micro_batches", 0, 8, DRAWS, Parity.REDRAWN),
    ("world.batch_statistics", "whole", "per_micro_batch", NOTHING, Parity.LEARNING),
    ("world.servers", 1, 2, NOTHING, Parity.TOLERANT),
    ("world.staleness", "sync", 4, NOTHING, Parity.LEARNING),
    ("world.spare_workers", 0, 1, NOTHING, Parity.LEARNING),
    ("world.sync_every", 32, 64, NOTHING, Parity.LEARNING),
    ("world.outer", "average", "nesterov", NOTHING, Parity.LEARNING),
    ("world.tables", "replicated", "sharded", NOTHING, Parity.TOLERANT),
    ("world.reduction", "all_reduce", "ring", NOTHING, Parity.TOLERANT),
    ("world.compression", "off", "bf16", NOTHING, Parity.TOLERANT),
    ("world.compression", "off", "powersgd", NOTHING, Parity.LEARNING),
    ("world.compression", "powersgd", "fp16", NOTHING, Parity.LEARNING),
    ("world.powersgd_rank", 4, 2, NOTHING, Parity.LEARNING),
    ("world.timeout", 600, 60, NOTHING, Parity.EXACT),
    ("world.patience", 30, 60, NOTHING, Parity.EXACT),
    ("save.every", None, 5, NOTHING, Parity.EXACT),
    ("save.keep_last", 3, 5, NOTHING, Parity.EXACT),
    ("save.asynchronous", True, False, NOTHING, Parity.EXACT),
    ("save.pieces", "merged", "per_rank", NOTHING, Parity.EXACT),
    ("script.persistent_workers", "as_written", "on", DRAWS, Parity.EXACT),
    (
        "script.persistent_workers",
        "as_written",
        "on",
        ModelFacts(draws_random_in_input=True),
        Parity.REDRAWN,
    ),
    ("script.cache", "as_written", "memory", DRAWS, Parity.EXACT),
    ("script.features", "as_written", "memory", NOTHING, Parity.TOLERANT),
    ("script.zero_grad", "as_written", "set_to_none", NOTHING, Parity.EXACT),
    ("script.garbage", "as_written", "scheduled", NOTHING, Parity.EXACT),
    ("script.empty_cache", "as_written", "skip", NOTHING, Parity.EXACT),
    ("script.host_syncs", "as_written", "deferred", NOTHING, Parity.EXACT),
    ("script.log_every", None, 50, NOTHING, Parity.EXACT),
    ("script.evaluation", "as_written", "no_grad", NOTHING, Parity.EXACT),
    ("script.cudnn_benchmark", "as_written", "on", NOTHING, Parity.TOLERANT),
    ("script.gradient_sync", "as_written", "last_backward", NOTHING, Parity.TOLERANT),
    ("script.unused_parameters", "as_written", "no_search", NOTHING, Parity.EXACT),
]


@pytest.mark.parametrize(("field", "before", "after", "facts", "expected"), EXPECTED)
def test_a_change_is_judged_for_the_model(field, before, after, facts, expected):
    assert of_change(field, before, after, facts) is expected


def test_every_field_is_judged():
    assert {case[0] for case in EXPECTED} == set(FIELDS)


def known(field):
    """What is known of a setting beside its schema, plain value, parity and wording."""
    one, live = SETTINGS[field], SETTINGS[field].live
    facts = []
    if Recipe().get(field) == "auto":
        facts.append(f"auto {PLAIN.get(field)}")
    if live is not None:
        layer = f" layer {live.layer}" if live.layer else ""
        facts.append(f"live {live.switches}{layer}")
        facts += ["not in passes"] * (not live.in_passes) + ["in features"] * live.in_features
        facts += ["not in graph"] * (not live.in_graph)
    if one.trial is not None:
        facts.append("tried" if one.trial.why else "searched")
    names = ("of_input", "in_epochs", "fills", "between_steps")
    return ", ".join([*facts, *(name for name in names if getattr(one, name))])


KNOWN = {
    "compute.precision": "auto fp32, live step, in features, tried",
    "compute.fp32_operators": "auto off, live step layer 4, in features, tried",
    "compute.memory_format": "auto contiguous, live seldom, in features, tried",
    "compute.rewrites": "auto off, live step layer 2, tried",
    "compute.fused_norms": "auto off, live step layer 3, in features, not in graph, tried",
    "compute.fused_optimizer": "auto off, live step, not in passes, tried",
    "compute.touched_rows": "auto off, live step layer 6, not in graph, tried",
    "compute.compile": "auto off, live once layer 5, not in graph, searched",
    "compute.capture": "auto off, live once",
    "compute.cuda_graph": "auto off, live step, not in passes, tried",
    "compute.cudnn_benchmark": "auto off, live seldom, not in passes, tried",
    "compute.matmul_precision": "auto highest, live step, tried",
    "memory.micro_batch": "auto whole",
    "memory.activation_checkpointing": "live step layer 1, not in graph",
    "memory.allocator": "auto default, live once, not in passes, tried",
    "process.threads": "auto None, live seldom, not in passes, searched",
    "input.workers": "auto 0, searched, of_input",
    "input.pin_memory": "auto off, searched, of_input",
    "input.on_device": "auto off",
    "input.features": "auto off",
    "world.device": "auto cpu",
    "world.micro_batches": "auto 0, live step",
    "world.reduction": "auto all_reduce",
    "save.asynchronous": "between_steps",
    "script.persistent_workers": "searched, of_input, in_epochs",
    "script.cache": "of_input, in_epochs, fills",
    "script.features": "fills",
    "script.garbage": "searched",
    "script.evaluation": "in_epochs, between_steps",
    "script.cudnn_benchmark": "searched",
}


def test_what_is_known_of_each_setting():
    assert {field: facts for field in FIELDS if (facts := known(field))} == KNOWN


def test_plain_covers_all_but_the_threads():
    assert set(FIELDS) - set(PLAIN) == {"process.threads"}


def test_what_is_no_auto_is_plain_as_it_is():
    for field in FIELDS:
        if Recipe().get(field) != "auto":
            assert PLAIN[field] == Recipe().get(field)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("compute.precision", "fp32", "fp32"),
        ("compute.rewrites", "on", "rewrites"),
        ("compute.rewrites", "off", "compute.rewrites=off"),
        ("memory.allocator", "default", "memory.allocator=default"),
        ("process.threads", 1, "1 thread"),
        ("process.threads", "1", "1 thread"),
        ("process.threads", 4, "4 threads"),
        ("save.asynchronous", False, "waits for each checkpoint"),
        ("save.asynchronous", True, "save.asynchronous=true"),
        ("script.log_every", 50, "a log line every 50 steps"),
    ],
)
def test_a_setting_in_words(field, value, words):
    assert phrase(field, value) == words
