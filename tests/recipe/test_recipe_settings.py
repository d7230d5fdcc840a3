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
    ("world.fetch_ahead", "off", "on", NOTHING, Parity.EXACT),
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
    ("world.fragments", 1, 4, NOTHING, Parity.LEARNING),
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


def those(fact):
    return {field for field, one in SETTINGS.items() if getattr(one, fact)}


def test_what_measurement_may_decide_defaults_to_auto():
    assert {field: PLAIN.get(field) for field in FIELDS if Recipe().get(field) == "auto"} == {
        "compute.precision": "fp32",
        "compute.fp32_operators": "off",
        "compute.memory_format": "contiguous",
        "compute.rewrites": "off",
        "compute.fused_norms": "off",
        "compute.fused_optimizer": "off",
        "compute.touched_rows": "off",
        "compute.compile": "off",
        "compute.capture": "off",
        "compute.cuda_graph": "off",
        "compute.cudnn_benchmark": "off",
        "compute.matmul_precision": "highest",
        "memory.micro_batch": "whole",
        "memory.allocator": "default",
        "process.threads": None,
        "input.workers": 0,
        "input.pin_memory": "off",
        "input.on_device": "off",
        "input.features": "off",
        "world.device": "cpu",
        "world.micro_batches": 0,
        "world.reduction": "all_reduce",
    }


def test_plain_covers_all_but_the_threads():
    assert set(FIELDS) - set(PLAIN) == {"process.threads"}


def test_what_is_no_auto_is_plain_as_it_is():
    for field in FIELDS:
        if Recipe().get(field) != "auto":
            assert PLAIN[field] == Recipe().get(field)


def test_which_settings_a_live_model_is_switched_to():
    assert those("live") == {
        "compute.precision",
        "compute.fp32_operators",
        "compute.memory_format",
        "compute.rewrites",
        "compute.fused_norms",
        "compute.fused_optimizer",
        "compute.touched_rows",
        "compute.compile",
        "compute.capture",
        "compute.cuda_graph",
        "compute.cudnn_benchmark",
        "compute.matmul_precision",
        "memory.activation_checkpointing",
        "memory.allocator",
        "process.threads",
        "world.micro_batches",
    }
    layers = [field for field in those("live") if SETTINGS[field].live.layer]
    assert sorted(layers, key=lambda field: SETTINGS[field].live.layer) == [
        "memory.activation_checkpointing",
        "compute.rewrites",
        "compute.fused_norms",
        "compute.fp32_operators",
        "compute.compile",
        "compute.touched_rows",
    ]
    live = {field: SETTINGS[field].live for field in those("live")}
    assert {f: one.switches for f, one in live.items() if one.switches != "step"} == {
        "compute.memory_format": "seldom",
        "compute.compile": "once",
        "compute.capture": "once",
        "compute.cudnn_benchmark": "seldom",
        "memory.allocator": "once",
        "process.threads": "seldom",
    }
    assert {f for f, one in live.items() if not one.in_passes} == {
        "compute.cuda_graph",
        "compute.cudnn_benchmark",
        "compute.fused_optimizer",
        "memory.allocator",
        "process.threads",
    }
    assert {f for f, one in live.items() if one.in_features} == {
        "compute.precision",
        "compute.fp32_operators",
        "compute.memory_format",
        "compute.fused_norms",
    }
    assert {f for f, one in live.items() if not one.in_graph} == {
        "compute.fused_norms",
        "compute.touched_rows",
        "compute.compile",
        "memory.activation_checkpointing",
    }


def test_which_settings_auto_tries_before_the_first_step():
    assert {field for field in those("trial") if SETTINGS[field].trial.why} == {
        "compute.precision",
        "compute.fp32_operators",
        "compute.memory_format",
        "compute.rewrites",
        "compute.fused_norms",
        "compute.fused_optimizer",
        "compute.touched_rows",
        "compute.cuda_graph",
        "compute.cudnn_benchmark",
        "compute.matmul_precision",
        "memory.allocator",
    }


def test_which_settings_take_hold_in_a_script():
    assert those("cure") == {
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
        "compute.touched_rows",
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
    }
    assert sorted(those("around"), key=lambda field: SETTINGS[field].around) == [
        "script.features",
        "compute.rewrites",
        "compute.compile",
        "compute.memory_format",
        "compute.precision",
        "script.evaluation",
    ]
    assert those("cures_plain") == {"compute.precision", "input.workers"}


def test_what_trials_are_told_of_settings():
    assert those("of_input") == {
        "input.workers",
        "input.pin_memory",
        "script.persistent_workers",
        "script.cache",
    }
    assert those("in_epochs") == {
        "script.persistent_workers",
        "script.cache",
        "script.evaluation",
    }
    assert those("fills") == {"script.cache", "script.features"}
    assert those("between_steps") == {"script.evaluation", "save.asynchronous"}


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("compute.precision", "fp32", "fp32"),
        ("compute.rewrites", "on", "rewrites"),
        ("compute.rewrites", "off", "compute.rewrites=off"),
        ("memory.allocator", "default", "memory.allocator=default"),
        ("process.threads", 1, "1 thread"),
        ("process.threads", 4, "4 threads"),
        ("save.asynchronous", False, "waits for each checkpoint"),
        ("save.asynchronous", True, "save.asynchronous=true"),
        ("script.log_every", 50, "a log line every 50 steps"),
    ],
)
def test_a_setting_in_words(field, value, words):
    assert phrase(field, value) == words
