"""What a search tries beside what the checks found."""

from flatout.doctor.finding import Finding
from flatout.doctor.judge import Verdict
from flatout.doctor.proving.cure import cures_of
from flatout.doctor.search import is_searched, widened
from flatout.observe import Loader, Model, Observation, Optimizer
from flatout.recipe import Parity, Recipe

FOUND = Finding("slow", "w", "d", name="workers_zero", recipe={"input.workers": 3})


def seen(**other):
    known = {
        "steps": 100,
        "threads": 2,
        "usable_cpus": 4,
        "bf16_units": "AMX-bf16",
        "loaders": [Loader("DataLoader", num_workers=0)],
        "optimizers": [Optimizer("torch.optim.adam.Adam", dtypes=["torch.float32"])],
        "models": [Model("Net", has_convolutions=True)],
    }
    return Observation(["train.py"], **{**known, **other})


def searched(observation, *findings):
    verdict = widened(Verdict([observation], {}, None, list(findings), [], []))
    return {
        f: v for one in verdict.findings if is_searched(one.name) for f, v in one.recipe.items()
    }


MATTERS = {
    "input.workers": 2,
    "compute.precision": "bf16",
    "compute.memory_format": "channels_last",
    "memory.allocator": "keep",
    "process.threads": 4,
    "compute.fused_optimizer": "on",
    "script.garbage": "scheduled",
    "compute.compile": "on",
}
ON_GPU = {"input.pin_memory", "script.cudnn_benchmark"}
NO_CURE = {"compute.fp32_operators", "compute.fused_norms", "compute.cuda_graph"}


def test_all_that_could_matter_is_tried_and_a_recipe_takes_it():
    tried = searched(seen())
    assert {field: tried.get(field) for field in MATTERS} == MATTERS
    assert not (ON_GPU | NO_CURE | {"script.persistent_workers"}) & {*tried}
    assert next(iter(tried)) == "input.workers"  # waiting for the input costs the most
    Recipe().replace(tried)


def test_what_a_check_found_is_tried_once_and_first():
    verdict = widened(Verdict([seen()], {}, None, [FOUND], [], []))
    cures = cures_of(verdict, Parity.REDRAWN)
    assert cures[0].recipe["input.workers"] == 3
    assert "compute.compile" in cures[-1].recipe  # it takes longest
    assert len([cure for cure in cures if "input.workers" in cure.recipe]) == 1


def test_what_the_script_has_already_is_left_out():
    fast = seen(
        threads=4,
        usable_cpus=1,
        loaders=[],
        optimizers=[Optimizer("torch.optim.adam.Adam", fused=True, dtypes=["torch.bfloat16"])],
        models=[Model("Net", is_compiled=True)],
    )
    left = searched(fast)
    assert {field for field in MATTERS if field in left} == {"memory.allocator", "script.garbage"}
    assert not (ON_GPU | NO_CURE) & {*left}
    on_gpu = searched(seen(device="cuda:0", loaders=[Loader("DataLoader", num_workers=4)]))
    assert ON_GPU | {"script.persistent_workers"} <= {*on_gpu}
    assert not {"memory.allocator", "process.threads"} & {*on_gpu}
