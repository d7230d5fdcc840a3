"""Each check finds its pitfall, nothing in the job without it, and says where it cannot see."""

import copy
from dataclasses import dataclass, replace

import pytest

from flatout.doctor.checks import (
    CHECKS,
    RANK_CHECKS,
    NoSignal,
    denormals,
    garbage_each_step,
)
from flatout.observe import (
    Ablation,
    Backbone,
    Call,
    Cell,
    EqualViews,
    Growing,
    HeldOutNodes,
    InLoss,
    KeptGraphs,
    Lapse,
    LeakedTarget,
    LeftOut,
    Line,
    Loader,
    Model,
    Monitor,
    Observation,
    Optimizer,
    OverBatch,
    RemadeOptimizer,
    RepeatedSeed,
    Scaling,
    Schedule,
    SeenAhead,
    SharedFolds,
    Site,
    StateLoad,
    StillTarget,
    Teacher,
    Unfrozen,
    UnusedGradients,
)
from flatout.recipe import Parity, Recipe

HERE = Site("train.py", 7, "the line")
STEPS = 100


def healthy(**changes):
    """A job on a CPU in which nothing is wrong: 10 ms a step."""
    seen = Observation(
        command=["train.py"],
        threads=2,
        usable_cpus=2,
        machine_cpus=2,
        lines=[Line(HERE, 0.1)],
        gpus=[],
        bf16_units="",
        available_mb=8000.0,
        cudnn_benchmark=False,
        openmp=["libgomp.so.1"],
        gpu_memory_mb={},
        shm_free_mb=8000.0,
        steps=STEPS,
        step_ms=[10.0] * STEPS,
        lanes_ms={
            "input": 0.1, "copy": 0.0, "forward": 4.0, "backward": 5.5, "sync": 0.0,
            "optimizer": 0.3, "host": 0.1, "evaluation": 0.0, "saving": 0.0, "gc": 0.0, "idle": 0.0,
        },
        memory_mb=[500.0 + (at % 2) for at in range(20)],
        memory_at=list(range(0, STEPS, 5)),
        page_faults=10.0,
        runnable=0.9,
        job_mb=[500.0 + (at % 2) for at in range(20)],
        job_at=list(range(0, STEPS, 5)),
        swapped_mb=0.0,
        loaders=[
            Loader(
                "torch.utils.data.dataloader.DataLoader", HERE, length=1024, batch_size=64,
                num_workers=2, persistent_workers=True, pin_memory=False, drop_last=False,
                shuffles=True, is_distributed=False, epochs=3, first_ms=[80.0, 1.0, 1.0],
                wait_ms=0.1, batches=STEPS, sample_bytes=1000, hashes=[1, 2, 3],
                worker_hashes=[4, 5], opens_per_sample=0.0, open_files=[],
                lanes_ms={"read": 1.0, "decode": 1.0, "transform": 1.0, "collate": 1.0},
            )
        ],
        optimizers=[
            Optimizer(
                "torch.optim.adam.Adam", HERE, STEPS, fused=True, dtypes=["float32"],
                kept_gradients=(0, 3), gradient_looks=7, options={"lr": 1e-3},
            )
        ],
        models=[
            Model(
                "__main__.Net", HERE, elements=2_000_000, layers={"Linear": 2},
                unused_parameters=False,
                inputs=[("[64, 32] float32", STEPS)], frozen_share=0.0,
                subnormal_share=0.0, repeats_of=32,
            )
        ],
        loss_looks=8,
        in_losses=[InLoss("labels", HERE, 8, 8, {"batches": 8, "of_one": 0, "alone": []})],
        switched_on=[],
        repeated_seeds=[],
    )  # fmt: skip
    for name, value in changes.items():
        setattr(seen, name, value)
    return seen


def job(*, lanes=None, loader=None, model=None, optimizer=None, calls=(), **changes):
    """A healthy job but for these fields of its parts."""
    seen = healthy(**changes)
    seen.lanes_ms |= lanes or {}
    seen.calls = list(calls)
    given = ((seen.loaders, loader), (seen.models, model), (seen.optimizers, optimizer))
    for parts, fields in given:
        for name, value in (fields or {}).items():
            setattr(parts[0], name, value)
    return seen


def call(kind, ms_per_step, steps=STEPS, **detail):
    return Call(kind, HERE, STEPS, ms_per_step * STEPS / 1e3, steps, detail)


def often(kind, times, ms_per_step, **detail):
    """As `call`, so many times in each step."""
    return replace(call(kind, ms_per_step, **detail), count=times * STEPS)


def starving(**changes):
    loader = changes.pop("loader", {})
    return job(lanes={"input": 6.0, "forward": 1.5, "backward": 2.0}, loader=loader, **changes)


def gpu_job(**changes):
    return job(device="cuda:0", gpus=["L4"], **changes)


@dataclass
class Row:
    """A job with the pitfall, one without, and one of which it cannot be told.

    Each may be several ranks. `cost` is the bound in ms per step; `kind` the finding's.
    """

    sick: object
    clean: object
    blind: object = None
    kind: str = "slow"
    cost: object = None
    where: str = "train.py:7"


COSINE = Schedule("CosineAnnealingLR", HERE, HERE, first_after=1)
PLATEAU = Schedule("ReduceLROnPlateau", HERE, HERE, steps=3, mode="min")
STOPPING = Monitor("EarlyStopping", "val_acc", "min", "score", "stops", True, HERE)
UNUSED = UnusedGradients("zeroed", "Generator", HERE, HERE, HERE, parameters=6, share=0.25, count=2)
TEACHER = Teacher("__main__.Large", HERE, {"Dropout": 2, "BatchNorm2d": 9}, moved=9, dropped=0.5)
LEAKED = LeakedTarget(14, 1.0, 512, 488, [8, 2], HERE)
STILL = StillTarget("__main__.Values", HERE, 2000)
AHEAD = SeenAhead("__main__.Writer", HERE, 5, 32, 992, 0.3, "layers.0", "Attention")
VIEWS = EqualViews("__main__.Encoder", HERE, 64, 4)
REMADE = RemadeOptimizer(
    "torch.optim.adam.Adam", HERE, 6, times=4, until=800, each=200, memory=1000
)
ADAM = {"kind": "torch.optim.adamw.AdamW"}


def without(ms):
    """What a step of 10 ms takes without a call of so many."""
    ratio = 10.0 / (10.0 - ms)
    return Ablation(ratio, ratio - 0.01, ratio + 0.01, 0.02, 4, 10.0, 10.0 - ms, ms)


def with_lapse(*, steps_schedules, in_lapse=0):
    """The epochs of a time-lapse, with a scheduler that was not stepped before it."""
    lapse = Lapse(5.0, 12, 2, ["validation"], steps_schedules=steps_schedules)
    return job(schedules=[replace(COSINE, in_lapse=in_lapse)], lapse=lapse, loader={"epochs": 1})


def test_a_schedule_that_a_time_lapse_may_not_come_to_is_no_finding():
    check = next(one for one in CHECKS if one.name == "schedule_misplaced")
    assert [one.kind for one in check.look(with_lapse(steps_schedules=False))] == ["danger"]
    assert not check.look(with_lapse(steps_schedules=True))
    assert not check.look(with_lapse(steps_schedules=False, in_lapse=2))


@pytest.mark.parametrize(
    ("kind", "site", "found"),
    [
        ("StepLR", None, ("danger", "scheduler.step() at")),
        ("ReduceLROnPlateau", HERE, ("danger", "scheduler.step(loss) at")),
        ("ReduceLROnPlateau", None, ("note", "scheduler.step(loss) at")),  # waits for evaluations
    ],
)
def test_a_schedule_that_is_never_stepped_is_named(kind, site, found):
    seen = job(schedules=[Schedule(kind, HERE)], loader={"epochs": 3}, evaluation_site=site)
    (finding,) = look_of("schedule_misplaced")(seen)
    assert finding.kind == found[0]
    assert finding.do.startswith(found[1])
    assert f"3 epochs have begun, and {kind} was never stepped" in finding.what


def in_loss(kind, **detail):
    """Found in the graphs of the first steps."""
    return {"loss_looks": 8, "in_losses": [InLoss(kind, HERE, 8, 8, detail)]}


def of_classes(**changes):
    """Labels of ten classes, of which validation has some."""
    runs = {"label_runs": (8, 8, 800, 100), "length": 200}
    return evaluating(losses=in_loss("labels", classes=10), **runs | changes)


def evaluating(*, losses=None, **changes):
    """With a second loader, of the validation."""
    seen = job(**(losses or {}))
    seen.loaders.append(replace(seen.loaders[0], in_training=False, **changes))
    return seen


NO_LOSS = {"loss_looks": 0, "in_losses": []}
NO_STEPS = {"steps": 0, "step_ms": []}
PINNED = {"in_training": True, "pin_memory": True}
MADE = Site(HERE.file, HERE.line, "weights = torch.ones(10).to(device)")
ON_CPU = {"devices": ["cpu"]}
TABLE = {"layers": {"Embedding": 1}}
SHAPES = {"inputs": [("[64, 31] float32", 40), ("[64, 32] float32", 30), ("[64, 33] float32", 30)]}
KMP = {"KMP_AFFINITY": "compact", "KMP_INIT_AT_FORK": "FALSE"}
CONV = {"has_convolutions": True, "layers": {"Conv2d": 2}}
PARTS = {"read": 1.0, "decode": 8.0, "transform": 1.0, "collate": 1.0}

READS_ONE = {
    "num_workers": 1,
    "open_files": [("a", 2**24)],
    "lanes_ms": {"read": 9.0, "decode": 0.0, "transform": 1.0, "collate": 1.0},
}
# A sample of 25 KB, and 64 of them a step.
KEPT = {"sample_bytes": 25_000, "dataset_site": HERE}
GROWING = {"job_mb": [500.0 + 8 * at for at in range(20)]}
OF_16384 = {"inputs": [("[16384, 32], float32", STEPS)]}


def on_gpu_with(held, peak, failures=0):
    return gpu_job(
        device_held_mb=held,
        device_peak_mb=peak,
        device_total_mb=24_000.0,
        device_failures=failures,
    )


def piped(*stages, **changes):
    return {"is_iterable": True, "stages": list(stages)} | changes


def with_rate(words, rates, **optimizer):
    """A rank of two whose optimizer is made with this rate."""
    site = Site("train.py", 7, f"optimizer = torch.optim.SGD(net.parameters(), lr={words})")
    made = Call("optimizer", site, 1, 0.0, 1)
    return job(world_size=2, calls=[made], optimizer={"rates": rates} | optimizer)


ROWS = {
    "starvation": Row(starving(), job(), job(lanes={"input": None}), cost=6.0),
    "workers_zero": Row(
        starving(loader={"num_workers": 0}),
        job(loader={"num_workers": 0}),
        starving(loader={"num_workers": 0}, usable_cpus=None),
        cost=3.0,  # two CPUs can share the work of one
    ),
    "workers_too_many": Row(
        job(loader={"num_workers": 16}, runnable=6.0),
        job(loader={"num_workers": 16}, runnable=0.5),
        job(loader={"num_workers": 16}, runnable=None),
    ),
    "workers_restarted": Row(
        job(loader={"persistent_workers": False, "first_ms": [80.0, 90.1, 110.1]}),
        job(loader={"persistent_workers": True, "first_ms": [80.0, 90.1, 110.1]}),
        job(loader={"persistent_workers": False, "first_ms": [80.0]}),
        cost=2.0,
    ),
    "decode_each_epoch": Row(
        starving(loader={"lanes_ms": PARTS}),
        starving(loader={"lanes_ms": PARTS, "sample_bytes": 10 * 2**20}),
        starving(loader={"lanes_ms": PARTS}, available_mb=None),
        cost=5.0,  # 10 ms of two workers, without putting batches together
    ),
    "map_per_sample": Row(
        starving(loader={"lanes_ms": {"read": 1.0, "transform": 30.0}}),
        starving(loader={"lanes_ms": {"read": 30.0, "transform": 1.0}}),
        starving(loader={"lanes_ms": {}}),
        cost=6.0,  # never more than the wait for input
    ),
    "small_files": Row(
        starving(loader={"opens_per_sample": 1.0, "lanes_ms": {"read": 8.0}}),
        starving(loader={"opens_per_sample": 0.01, "lanes_ms": {"read": 8.0}}),
        starving(loader={"opens_per_sample": None}),
        cost=4.0,
    ),
    "pipeline_order": Row(
        job(loader=piped("IterableWrapper", "Batcher", "Shuffler", "Collator")),
        job(loader=piped("IterableWrapper", "Shuffler", "Batcher", "Collator")),
        job(loader={"is_iterable": True}),
        kind="danger",
    ),
    "one_reader": Row(
        starving(loader=READS_ONE),
        starving(loader=READS_ONE | {"open_files": [("a", 2**24), ("b", 2**24)]}),
        starving(loader=READS_ONE | {"open_files": None}),
        cost=3.0,  # two CPUs can share it
    ),
    "cache_too_large": Row(
        job(loader=KEPT | {"length": 10**6}, **GROWING),
        job(loader=KEPT, **GROWING),  # all 1024 fit
        job(loader=KEPT | {"length": 10**6}, job_mb=[500.0], job_at=[1]),
        kind="danger",
    ),
    "batch_memory": Row(
        on_gpu_with(held=100.0, peak=1100.0),
        on_gpu_with(held=100.0, peak=21100.0),
        gpu_job(),
        kind="note",
    ),
    "batch_too_small": Row(
        job(model={"elements": 1000}),
        job(model={"elements": 100_000}),
        job(model={"has_convolutions": True}),
        kind="note",
    ),
    "batch_very_large": Row(
        job(model=OF_16384, loader={"length": 10**6}),
        job(model=OF_16384, loader={"length": 10**7}),
        job(model=OF_16384, loader={"length": None}),
        kind="note",
    ),
    "rate_scaled": Row(
        with_rate("0.1 * world_size", [(1, 0.2), (20, 0.2)]),
        with_rate("0.1 * world_size", [(1, 0.1), (20, 0.2)]),
        with_rate("lr", [(1, 0.2), (20, 0.2)]),
        kind="note",
    ),
    "memory_not_pinned": Row(
        gpu_job(lanes={"copy": 2.0}),
        gpu_job(lanes={"copy": 2.0}, loader={"pin_memory": True}),
        gpu_job(lanes={"copy": None}),
        cost=2.0,
    ),
    "copy_blocks": Row(
        gpu_job(calls=[call("to_device", 2.0, pinned=True)], loader=PINNED),
        gpu_job(
            calls=[call("to_device", 2.0, pinned=True, non_blocking=True)],
            loader=PINNED,
        ),
        gpu_job(**NO_STEPS),
        cost=2.0,
    ),
    "made_on_host": Row(
        gpu_job(calls=[replace(call("to_device", 2.0), site=MADE)]),
        gpu_job(calls=[call("to_device", 2.0)]),
        gpu_job(**NO_STEPS),
        cost=2.0,
    ),
    "tf32_off": Row(
        gpu_job(matmul_precision="highest", bf16_units="GPU"),
        gpu_job(matmul_precision="high", bf16_units="GPU"),
        gpu_job(bf16_units="GPU"),
        cost=9.5 * 7 / 8,
    ),
    "retained_graph": Row(
        job(memory_mb=[500.0 + 10 * at for at in range(20)], graph_nodes=[(24, 200), (96, 900)],
            graph_site=HERE),
        job(memory_mb=[500.0] * 5 + [700.0] * 15),
        job(memory_mb=[500.0 + 10 * at for at in range(20)]),
    ),
    "item_each_step": Row(
        job(calls=[call("item", 1.0)]), job(calls=[call("item", 1.0, steps=3)]), job(**NO_STEPS),
        cost=1.0,
    ),
    "log_each_step": Row(
        job(calls=[call("print", 1.0)]), job(calls=[call("log", 1.0, steps=3)]), job(**NO_STEPS),
        cost=1.0,
    ),
    "call_each_step": Row(
        job(left_out=[LeftOut(HERE, "tracker.log", without(2.0))], lines=[Line(HERE, 2.0)]),
        job(left_out=[LeftOut(HERE, "tracker.log", without(0.1))], lines=[Line(HERE, 2.0)]),
        job(lines=[]),
        cost=2.0,
    ),
    "empty_cache": Row(
        gpu_job(calls=[call("empty_cache", 1.0)]),
        gpu_job(calls=[call("empty_cache", 1.0, steps=2)]),
        job(**NO_STEPS),
        cost=10.5,
    ),
    "zero_grad_zeros": Row(
        job(calls=[call("zero_grad", 0.1, set_to_none=False)]),
        job(calls=[call("zero_grad", 0.1, set_to_none=True)]),
        job(**NO_STEPS),
        cost=0.4,
    ),
    "fp32_slow": Row(
        job(bf16_units="AMX-bf16", model={"elements": 6_000_000}),
        job(bf16_units="AMX-bf16", model={"autocast": "bfloat16"}),
        job(bf16_units=None),
        cost=9.5 * 15 / 16,
    ),
    "bf16_useless": Row(
        job(model={"autocast": "bfloat16", "elements": 697}),
        job(model={"autocast": "bfloat16", "elements": 6_000_000}),
        job(model={"autocast": "bfloat16", "elements": 697, "inputs": []}),
        cost=9.5,
    ),
    "text_parse": Row(
        starving(loader={"hot": [(Site("train.py", 7, "a = line.split(',')"), 0.5)]}),
        starving(loader={"hot": [(Site("train.py", 7, "a = np.load(path)"), 0.5)]}),
        starving(),
        cost=6.0,  # samples that are kept are not read either
    ),
    "table_dense": Row(
        job(model=TABLE, optimizer={**ON_CPU, "sparse_share": 0.01}, lanes={"optimizer": 3.0}),
        job(model=TABLE, optimizer={**ON_CPU, "sparse_share": 0.9}, lanes={"optimizer": 3.0}),
        job(model=TABLE),
        cost=8.5 * 0.99,
    ),
    "last_batch_ragged": Row(
        job(loader={"length": 1025}, model={"layers": {"BatchNorm2d": 1}}),
        job(loader={"length": 1025, "drop_last": True}, model={"layers": {"BatchNorm2d": 1}}),
        job(loader={"length": None}, model={"layers": {"BatchNorm2d": 1}}),
        kind="danger",
    ),
    "data_parallel": Row(
        gpu_job(model={"wrapper": "DataParallel"}),
        gpu_job(model={"wrapper": "DistributedDataParallel"}),
        gpu_job(models=[]),
    ),
    "set_epoch_missing": Row(
        job(loader={"hashes": [9, 9, 9]}),
        job(loader={"hashes": [9, 9, 9], "shuffles": False}),
        job(loader={"hashes": [9]}),
        kind="danger",
    ),
    "unused_parameters_search": Row(
        job(model={"wrapper_options": {"find_unused_parameters": True}}),
        job(
            model={"wrapper_options": {"find_unused_parameters": True}, "unused_parameters": True}
        ),
        job(
            model={"wrapper_options": {"find_unused_parameters": True}, "unused_parameters": None}
        ),
    ),
    "no_sync_missing": Row(
        job(
            model={"wrapper": "DistributedDataParallel"},
            optimizer={"backwards": 4.0},
            lanes={"sync": 4.0},
        ),
        job(
            model={"wrapper": "DistributedDataParallel"},
            optimizer={"backwards": 4.0},
            lanes={"sync": 4.0},
            calls=[call("no_sync", 0.0)],
        ),
        job(models=[]),
        cost=3.0,
    ),
    "cudnn_benchmark": Row(
        gpu_job(model=CONV),
        gpu_job(model=CONV | {"inputs": [("a", 30), ("b", 70)]}),
        gpu_job(model=CONV, cudnn_benchmark=None),
        cost=9.5,
    ),
    "saved_wrapped": Row(
        job(model={"is_compiled": True}, saved=[{"keys": ["_orig_mod.0.weight"]}]),
        job(model={"is_compiled": True}, saved=[{"keys": ["0.weight"]}]),
        job(models=[]),
        kind="note",
        where="",
    ),
    "evaluate_with_grad": Row(
        job(model={"evaluated_with_grad": HERE}, lanes={"evaluation": 3.0}),
        job(lanes={"evaluation": 3.0}),
        job(models=[]),
        cost=3.0,
    ),
    "worker_seeds_equal": Row(
        job(loader={"worker_hashes": [4, 4]}),
        job(loader={"worker_hashes": [4], "num_workers": 1}),
        job(loader={"worker_hashes": None}),
        kind="danger",
    ),
    "garbage_each_step": Row(
        job(calls=[call("gc", 2.0, generation=2)], lanes={"gc": 2.0}),
        job(calls=[call("gc", 0.1, generation=0)], lanes={"gc": 0.1}),
        job(lanes={"gc": None}),
        cost=2.0,
    ),
    "channels_first": Row(
        job(model=CONV),
        job(model=CONV | {"is_channels_last": True}),
        job(model=CONV, lanes={"forward": None}),
        cost=9.5,
    ),
    "memory_returned": Row(
        job(page_faults=2000.0), job(page_faults=20.0), job(page_faults=None), cost=2.0, where=""
    ),
    "activation_before_pool": Row(
        job(model={"pool_after": [("relu1", "pool1")]}), job(),
        job(model={"pool_after": [("relu1", "pool1")]}, lanes={"forward": None}),
        cost=9.5,
    ),
    "optimizer_unfused": Row(
        job(optimizer={"fused": None}, lanes={"optimizer": 2.0}),
        job(optimizer={"fused": None, "kind": "torch.optim.lbfgs.LBFGS"}, lanes={"optimizer": 2.0}),
        job(optimizer={"fused": None}, lanes={"optimizer": None}),
        cost=2.0,
    ),
    "advanced_indexing": Row(
        job(calls=[call("index", 3.0)]), job(calls=[call("index", 3.0, steps=1)]), job(**NO_STEPS),
        cost=3.0,
    ),
    "gpu_unused": Row(job(gpus=["L4"]), gpu_job(), job(gpus=None)),
    "eval_missing": Row(
        job(model={"evaluated_in_train_mode": HERE, "layers": {"Dropout": 1}}), job(),
        job(models=[]), kind="danger",
    ),
    "train_not_restored": Row(
        job(model={"trained_in_eval_mode": HERE, "layers": {"Dropout": 1}}), job(),
        job(models=[]), kind="danger",
    ),
    "nan_in_buffers": Row(
        job(model={"not_finite": ["1.running_mean"]}), job(), job(models=[]), kind="danger"
    ),
    "frozen_norm_moves": Row(
        job(model={"moving_norms": ["layer1.0.bn1"]}), job(), job(models=[]), kind="danger"
    ),
    "optimizer_misses": Row(
        job(model={"not_stepped": ["fc.weight", "fc.bias"]}), job(), job(models=[]), kind="danger"
    ),
    "activation_twice": Row(
        job(**in_loss("twice", outer="cross_entropy", inner="softmax")), job(), job(**NO_LOSS),
        kind="danger",
    ),
    "scores_bounded": Row(
        job(**in_loss("bounded", outer="cross_entropy", by="ReLU")), job(), job(**NO_LOSS),
        kind="danger",
    ),
    "softmax_of_one": Row(
        job(**in_loss("single", outer="softmax", shape=[32, 1])), job(), job(**NO_LOSS),
        kind="danger",
    ),
    "loss_term_cut": Row(
        job(**in_loss("cut", shape=[64])), job(), job(**NO_LOSS), kind="danger"
    ),
    "loss_broadcast": Row(
        job(**in_loss("pairs", output=[64, 1], target=[64])), job(), job(**NO_LOSS),
        kind="danger",
    ),
    "nan_hidden": Row(
        job(**in_loss("nan", hidden=3, of=64)), job(), job(**NO_LOSS), kind="danger"
    ),
    "labels_sorted": Row(
        job(**in_loss("labels", batches=8, of_one=7, alone=[0, 1], classes=10)),
        job(**in_loss("labels", batches=8, of_one=8, alone=[0], classes=10)),
        job(**NO_LOSS),
        kind="danger",
    ),
    "padding_in_loss": Row(
        job(**in_loss("padding", value=0, padded=40, of=100, is_ended=True)),
        job(**in_loss("padding", value=0, padded=9, of=100, is_ended=True)),
        job(**NO_LOSS),
        kind="danger",
    ),
    "accumulation_undivided": Row(
        job(**in_loss("undivided", backwards=4), optimizer={"kind": "torch.optim.sgd.SGD"}),
        job(optimizer={"kind": "torch.optim.sgd.SGD"}),
        job(**NO_LOSS),
        kind="danger",
    ),
    "zero_grad_missing": Row(
        job(optimizer={"kept_gradients": (3, 3)}), job(optimizer={"kept_gradients": (1, 3)}),
        job(optimizer={"kept_gradients": None}),
        kind="danger",
    ),
    "parameters_unreached": Row(
        job(optimizer={"gradient_looks": 7, "cut": ["body.weight"]}),
        job(optimizer={"gradient_looks": 7}),
        job(optimizer={"gradient_looks": 2, "cut": ["body.weight"]}),
        kind="danger",
    ),
    "gradients_discarded": Row(
        job(optimizer={"discarded": (6, 8), "discarded_site": HERE}), job(), job(optimizers=[]),
        kind="danger",
    ),
    "layers_in_list": Row(
        job(model={"unregistered": ["layers[0].weight [64, 64]"]}), job(), job(models=[]),
        kind="danger",
    ),
    "clip_useless": Row(
        job(calls=[call("clip", 0.0, limit=1.0, norm=9.0, is_late=True, scale=1.0)]),
        job(calls=[call("clip", 0.0, limit=1.0, norm=9.0, is_late=False, scale=1.0)]),
        job(
            calls=[call("clip", 0.0, limit=1.0, norm=9.0, is_late=True, scale=1.0)],
            optimizer={"backwards": 0.0},
        ),
        kind="danger",
    ),
    "plateau_reversed": Row(
        job(schedules=[replace(PLATEAU, given="val_acc", given_kind="score")]),
        job(schedules=[replace(PLATEAU, given="val_loss", given_kind="loss")]),
        job(**NO_STEPS),
        kind="danger",
    ),
    "monitor_reversed": Row(
        job(monitors=[STOPPING]),
        job(monitors=[replace(STOPPING, mode="max")]),
        job(**NO_STEPS),
        kind="danger",
    ),
    "schedule_misplaced": Row(
        job(schedules=[replace(COSINE, steps=STEPS, ends_after=12)]),
        job(schedules=[replace(COSINE, steps=STEPS, ends_after=900)]),
        job(**NO_STEPS),
        kind="danger",
    ),
    "validation_overlaps": Row(
        evaluating(shared_rows=(20, 200)), evaluating(shared_rows=(0, 200)), evaluating(),
        kind="danger",
    ),
    "normalization_leaks": Row(
        evaluating(shared_rows=(0, 200), scaling=Scaling("StandardScaler", HERE, 1000, 200)),
        evaluating(shared_rows=(0, 200)),
        evaluating(),
        kind="danger",
    ),
    "freeze_without_effect": Row(
        job(unfrozen=[Unfrozen("require_grad", "", HERE, 2, 72, ["encoder.weight"])]),
        job(),
        job(models=[]),
        kind="danger",
    ),
    "softmax_over_batch": Row(
        job(softmaxes=[OverBatch("softmax", HERE, [64, 10], 4)]),
        job(softmaxes=[OverBatch("softmax", HERE, [64, 10], 1)]),
        job(models=[]),
        kind="danger",
    ),
    "classes_unseen": Row(
        of_classes(unseen_classes=([8, 9], 180)),
        of_classes(),
        job(**NO_LOSS),
        kind="danger",
    ),
    "held_out_in_loss": Row(
        job(loss_looks=8, held_out_nodes=[HeldOutNodes("data.test_mask", 1000, 2708, HERE)]),
        job(loss_looks=8),
        job(**NO_LOSS),
        kind="danger",
    ),
    "folds_share_model": Row(
        job(shared_folds=[SharedFolds("KFold", 5, "Net", HERE)]),
        job(),
        job(models=[]),
        kind="danger",
    ),
    "load_without_effect": Row(
        job(state_loads=[StateLoad("own", "ResNet", 62, HERE, HERE, 340)]),
        job(),
        job(models=[]),
        kind="danger",
    ),
    "batch_first_missing": Row(
        job(over_batch=[OverBatch("LSTM", HERE, [32, 40, 16], 3)] * 2), job(), job(models=[]),
        kind="danger",
    ),
    "seed_repeated": Row(
        job(repeated_seeds=[RepeatedSeed("numpy.random.default_rng", HERE, [0, 10, 20])]),
        job(),
        job(repeated_seeds=None),
        kind="danger",
    ),
    "recurrent_by_step": Row(
        job(cells=[Cell("LSTMCell", HERE, 20, 2.0)]), job(), job(models=[]), cost=4.75
    ),
    "gradients_unused": Row(
        job(gradient_uses=6, unused_gradients=[UNUSED]),
        job(gradient_uses=6, unused_gradients=[replace(UNUSED, share=0.001)]),
        job(optimizers=[Optimizer("torch.optim.adam.Adam", HERE)] * 2),
        cost=1.375,
    ),
    "teacher_in_train_mode": Row(
        job(teachers=[TEACHER]),
        job(),
        job(steps=4),
        kind="danger",
    ),
    "next_token_seen": Row(
        job(seen_ahead=[AHEAD]),
        job(),
        job(steps=2),
        kind="danger",
    ),
    "target_in_input": Row(
        job(leaked_targets=[LEAKED]),
        job(),
        job(loss_looks=0),
        kind="danger",
    ),
    "target_never_moves": Row(
        job(steps=2000, still_targets=[STILL]),
        job(steps=2000),
        job(steps=2000, still_targets=[STILL], ended="stopped"),
        kind="danger",
    ),
    "views_equal": Row(
        job(equal_views=[VIEWS]),
        job(),
        job(steps=4),
        kind="danger",
    ),
    "optimizer_remade": Row(
        job(remade=[REMADE]),
        job(remade=[replace(REMADE, each=1000, until=4000)]),
        job(optimizers=[]),
        kind="danger",
    ),
    "copied_whole": Row(
        job(lines=[Line(HERE, 1.0, words="copy.deepcopy")]),
        job(lines=[Line(HERE, 0.01, words="copy.deepcopy"), Line(HERE, 1.0, words="torch.cat")]),
        job(lines=[]),
        cost=1.0,
    ),
    "history_grows": Row(
        job(growing=[Growing("torch.cat", HERE, 5000, 100, 1.0, 18)]), job(), job(steps=9),
        cost=1.0,
    ),
    "optimizer_extreme": Row(
        job(optimizer={"options": {"lr": 3.0}} | ADAM),
        job(optimizer={"options": {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999}} | ADAM),
        job(optimizer={"options": {}} | ADAM),
        kind="danger",
    ),
    "debugging_left_on": Row(
        job(switched_on=["detect_anomaly"], calls=[call("switch", 0.0, name="detect_anomaly")]),
        job(),
        job(switched_on=None),
        cost=9.5,
    ),
    "checkpointing_needless": Row(
        job(calls=[call("checkpoint", 3.0)], checkpointed_mb=200.0),
        job(calls=[call("checkpoint", 3.0)], checkpointed_mb=20_000.0),
        job(calls=[call("checkpoint", 3.0)]),
        cost=3.0,
    ),
    "saved_each_step": Row(
        job(calls=[call("save", 3.0)]), job(calls=[call("save", 3.0, steps=3)]), job(**NO_STEPS),
        cost=3.0,
    ),
    "workers_repeat": Row(
        job(loader={"is_iterable": True, "worker_batches": [7, 7, 8]}),
        job(loader={"is_iterable": True, "worker_batches": [7, 8, 9]}),
        job(loader={"is_iterable": True, "worker_batches": [7, 7]}),
        kind="danger",
    ),
    "called_twice": Row(
        job(model={"repeats": 16, "repeats_of": 32}), job(),
        job(model={"repeats": 1, "repeats_of": 2}),
        cost=2.0,
    ),
    "metric_slow": Row(
        job(calls=[call("metric", 3.0, name="roc_auc_score")]), job(calls=[call("metric", 0.1)]),
        job(**NO_STEPS), cost=3.0,
    ),
    "denormals": Row(
        job(model={"subnormal_share": 0.15}),
        gpu_job(model={"subnormal_share": 0.15}),
        job(model={"subnormal_share": None}),
        cost=9.8,
    ),
    "padding_waste": Row(
        job(model={"padding_share": 0.6, "lengths": 9}),
        job(model={"padding_share": 0.1, "lengths": 9}),
        job(model={"inputs": []}),
        cost=9.5 * (1 - 0.4**2),  # where it is attention
    ),
    "frozen_recomputed": Row(
        job(model={"frozen_share": 0.75}), job(), job(model={"frozen_share": None}), cost=3.0
    ),
    "host_round_trip": Row(
        gpu_job(calls=[call("round_trip", 2.0)]),
        gpu_job(calls=[call("cpu", 2.0)]),
        gpu_job(calls=[call("round_trip", 2.0)], **NO_STEPS),
        cost=2.0,
    ),
    "shm_too_small": Row(
        job(loader={"prefetch_factor": 2, "batch_bytes": 40 * 2**20}, shm_free_mb=64.0),
        job(loader={"prefetch_factor": 2, "batch_bytes": 10 * 2**20}, shm_free_mb=64.0),
        job(loader={"prefetch_factor": 2, "batch_bytes": 40 * 2**20}, shm_free_mb=None),
        kind="danger",
    ),
    "shapes_recompile": Row(
        job(compiles=[(2, 2, 0.5), (100, 8, 1.48)], model=SHAPES),
        job(compiles=[(2, 1, 0.5), (100, 2, 1.48)], model=SHAPES),
        job(compiles=[(2, 2, 0.5), (100, 8, 1.48)], models=[]),
        cost=10.0,
    ),
    "openmp_settings_inert": Row(
        job(openmp_settings=KMP, calls=[call("setenv", 0.0, name="KMP_AFFINITY")]),
        job(openmp_settings=KMP, openmp=["libgomp.so.1", "libiomp5.so"]),
        job(openmp_settings=KMP, openmp=None),
        kind="note",
    ),
    "contexts_unused": Row(
        gpu_job(gpu_memory_mb={"a": 900.0, "b": 0.0}, calls=[call("device_count", 0.1)]),
        gpu_job(gpu_memory_mb={"a": 900.0}, calls=[call("device_count", 0.1)]),
        job(gpu_memory_mb=None, calls=[call("device_count", 0.1)]),
        kind="note",
    ),
}  # fmt: skip


def ranks(count, *changes, **same):
    """Several ranks; `changes` of a loader are each rank's own."""
    own = changes or ({},) * count
    return [job(rank=at, world_size=count, loader=own[at], **same) for at in range(count)]


def replicas(*numbers):
    """Ranks with these numbers for first weights and gradients."""
    found = ranks(len(numbers))
    for rank, (weights, gradients) in zip(found, numbers, strict=True):
        rank.models[0].first_weights, rank.models[0].first_gradients = weights, gradients
    return found


def of_sizes(*sizes, wrapper="DistributedDataParallel"):
    """Ranks whose models get so many samples at once."""
    found = ranks(len(sizes), model={"wrapper": wrapper})
    for rank, size in zip(found, sizes, strict=True):
        rank.models[0].inputs = [(f"[{size}, 32], float32", STEPS), ("[1, 32], float32", 2)]
    return found


def each(*own):
    """Ranks with these fields, each its own."""
    found = ranks(len(own))
    for rank, fields in zip(found, own, strict=True):
        rank.lanes_ms |= fields.pop("lanes", {})
        for name, value in fields.items():
            setattr(rank, name, value)
    return found


def saving(ms_per_step, size, own=False, **changes):
    """A job that saves such a file in each step."""
    files = [
        {"path": f"/a/{at * own}.pt", "step": at, "keys": ["w"], "bytes": size, "is_there": True}
        for at in range(1, 20)
    ]
    return job(saved=files, calls=[call("save", ms_per_step)], **changes)


def test_writing_much_is_told_however_little_time_it_takes_and_a_full_disk_is_a_danger():
    look = look_of("saved_each_step")
    (found,) = look(saving(0.05, 40_000))  # each 10 ms
    assert (found.kind, found.cost_ms, found.takes) == ("slow", 0.05, "14 GB/h")
    assert "14.4 GB an hour" in found.what
    (little,) = look(saving(0.05, 1000))
    assert (little.kind, little.takes) == ("note", "")
    kept = {"run_steps": 50_000, "disk_free_mb": 1000.0}
    (full,) = look(saving(0.05, 40_000, own=True, **kept))
    assert full.kind == "danger"
    assert "50,000 steps write 2.0 GB, and 1.0 GB are free" in full.what
    assert look(saving(0.05, 40_000, **kept))[0].kind == "slow"  # the same file again
    assert look(saving(0.05, 40_000, own=True, **kept | {"disk_free_mb": 5e4}))[0].kind == "slow"
    gone = saving(0.05, 40_000, own=True, **kept)
    gone.saved[3]["is_there"] = False
    assert look(gone)[0].kind == "slow"


def test_a_history_is_told_by_what_it_takes_at_the_end_of_the_run():
    look = look_of("history_grows")
    cheap = Growing("torch.cat", HERE, 18 * 640, 640, 0.01, 18, bytes=4)

    def found(history=cheap, **changes):
        (one,) = look(job(growing=[history], **changes))
        return one

    stream = {"loader": {"length": None}}
    unknown = found(**stream)
    assert unknown.kind == "slow"
    assert "0.1 ms now, 6.4 ms after 10,000 steps, 32.5s in all: quadratic" in unknown.what
    assert unknown.cost_ms == pytest.approx(3.25, rel=0.01)
    assert unknown.is_estimate
    longer = found(run_steps=20_000, **stream)
    assert " after 20,000 steps, the whole run, " in longer.what
    assert found(loader={"length": 64 * 5000}).what.count("after 5,000 steps, an epoch") == 1
    assert found().kind == "note"  # epochs of 16 steps
    assert found(replace(cheap, more=1, numbers=18), **stream).kind == "note"
    read = found(Growing("numpy.mean", HERE, 18, 1, 0.01, 18, is_list=True), **stream)
    assert "goes through all" in read.what
    assert "0.31 ms after 10,000 steps" in read.what
    copied = found(Growing("list(errors)", HERE, 4608, 256, 0.0, 18), **stream)
    assert "list(errors) copies" in copied.what
    assert "5.1 ms after 10,000 steps" in copied.what
    stacked = found(Growing("torch.stack", HERE, 18, 1, 0.01, 18, bytes=4, pieces=1), **stream)
    assert "3 ms after 10,000 steps" in stacked.what
    # What is large already takes in proportion.
    large = found(Growing("torch.cat", HERE, 2**20, 2**20 // 18, 0.5, 18), **stream)
    assert large.cost_ms == pytest.approx(139, rel=0.01)


def test_copies_are_told_by_their_own_time_where_they_come_often():
    look = look_of("copied_whole")
    often = Call("deepcopy", HERE, count=90, seconds=0.5, steps=90)
    (found,) = look(job(calls=[often], lines=[Line(HERE, 1.0, words="copy.deepcopy")], steps=100))
    assert "is called in 90 of 100 steps and takes 5 ms of a step" in found.what
    assert found.cost_ms == pytest.approx(5.0)
    assert look(job(calls=[replace(often, count=4, steps=4)], steps=100)) == []  # of epochs
    assert look(job(calls=[replace(often, seconds=1e-4)], steps=100)) == []


def test_what_runs_before_pooling_is_bounded_by_its_own_time():
    look = look_of("activation_before_pool")
    (found,) = look(job(model={"pool_after": [("relu1", "pool1")], "pool_ms": 1.5}))
    assert found.cost_ms == 1.5
    assert look(job(model={"pool_after": [("relu1", "pool1")], "pool_ms": 0.1})) == []


def saves(*files):
    """Ranks that each wrote such a file in step 9."""
    common = {"step": 9, "keys": ["0.weight"]}
    return each(*({"saved": [common | one], "calls": [call("save", 1.0)]} for one in files))


def stepping(*sizes):
    """Ranks whose optimizers step so many MiB."""
    return each(
        *({"optimizers": [Optimizer("a.Adam", HERE, local_bytes=mib << 20)]} for mib in sizes)
    )


EVALUATING = {"lanes": {"evaluation": 5.0}, "evaluation_site": HERE}
STALLED = {"lanes": {"backward": 10.5}}

RANK_ROWS = {
    "saved_by_all": Row(
        saves({"path": "/a/m.pt", "contents": 1}, {"path": "/a/m.pt", "contents": 1}),
        saves({"path": "/a/m-0.pt", "contents": 1}, {"path": "/a/m-1.pt", "contents": 2}),
        ranks(2),
        kind="danger",
    ),
    "one_rank_works": Row(
        each(EVALUATING | {}, STALLED | {}),
        each(EVALUATING | {}, EVALUATING | {}),
        each({"lanes": {"evaluation": None}}, {}),
        cost=5.0,
    ),
    "shards_uneven": Row(stepping(24, 1), stepping(13, 12), ranks(2), kind="note"),
    "gpu_memory_uneven": Row(
        each({"gpu_memory_mb": {"a": 9000.0}}, {"gpu_memory_mb": {"a": 2000.0, "b": 4000.0}}),
        each({"gpu_memory_mb": {"a": 5000.0}}, {"gpu_memory_mb": {"b": 4000.0}}),
        ranks(2),
        kind="note",
        where="",
    ),
    "batch_uneven": Row(of_sizes(4, 3), of_sizes(4, 4), of_sizes(4, 3, wrapper=""), kind="note"),
    "collectives_each_step": Row(
        ranks(2, calls=[often("collective", 20, 2.0, name="all_reduce", bytes=4000)]),
        ranks(2, calls=[often("collective", 20, 2.0, name="all_reduce", bytes=2 << 20)]),
        ranks(2)[:1],
        cost=1.9,
    ),
    "shards_overlap": Row(
        ranks(
            2, {"taken": [*range(40)], "hashes": [1]}, {"taken": [*range(30, 70)], "hashes": [2]}
        ),
        ranks(2, {"taken": [*range(40)], "hashes": [4]}, {"taken": [*range(40, 80)]}),
        ranks(2, {"taken": None}, {"taken": None}),
        kind="danger",
    ),
    "shards_missing": Row(
        ranks(2, *({"parts": [(at, 4)] * 2, "parts_of": 800} for at in range(2))),
        ranks(2, *({"parts": [(at, 2)] * 2, "parts_of": 800} for at in range(2))),
        ranks(2, {"parts": None}, {"parts": [None]}),
        kind="danger",
    ),
    "sampler_missing": Row(
        ranks(2, {"hashes": [1, 2]}, {"hashes": [1, 2]}),
        ranks(2, {"hashes": [1, 2]}, {"hashes": [3, 4]}),
        ranks(2, {"hashes": None}, {"hashes": None}),
        kind="danger",
    ),
    "replicas_differ": Row(
        replicas((1, 5), (2, 5)),
        replicas((1, 5), (2, 6)),  # of two jobs, or averaged later
        ranks(2),
        kind="danger",
    ),
    "threads_too_many": Row(ranks(2), ranks(2, threads=1), ranks(2, threads=None), where=""),
    "threads_too_few": Row(
        ranks(2, threads=1, machine_cpus=16),
        ranks(2, threads=8, machine_cpus=16),
        ranks(2, threads=None),
        where="",
        cost=8.575,
    ),
}

TABLE = [
    pytest.param(check, row, id=check.name)
    for checks, rows in ((CHECKS, ROWS), (RANK_CHECKS, RANK_ROWS))
    for check in checks
    for row in [rows[check.name]]
]


def test_garbage_of_a_late_import_is_none_of_each_step():
    late = Call("gc", HERE, 161, 0.2, 1, {"generation": 0})
    seen = job(calls=[late], lanes={"gc": 2.0})
    assert garbage_each_step.look(seen) == []
    by_itself = [replace(late, site=Site("train.py", line)) for line in (7, 8, 9)]
    (found,) = garbage_each_step.look(job(calls=by_itself, lanes={"gc": 2.0}))
    assert found.is_estimate  # its pauses are no bound of what the cure gives back


ESTIMATES = {
    "garbage_each_step", "memory_returned", "retained_graph", "shapes_recompile",
    "checkpointing_needless", "collectives_each_step", "no_sync_missing", "one_reader",
    "zero_grad_zeros", "workers_restarted", "host_round_trip",
    "fp32_slow", "workers_zero", "gradients_unused", "history_grows", "tf32_off",
}  # fmt: skip


def test_a_figure_that_a_cure_can_exceed_is_called_an_estimate():
    found = {check.name: check.look(row.sick)[0] for check, row in (p.values for p in TABLE)}
    assert {name for name, one in found.items() if one.is_estimate} == ESTIMATES
    (on_gpu,) = look_of("workers_zero")(gpu_job(lanes={"input": 6.0}, loader={"num_workers": 0}))
    assert not on_gpu.is_estimate


def test_keeping_samples_returns_all_of_their_making():
    parts = {"read": 2.0, "decode": 3.0, "transform": 4.0, "collate": 3.0}
    of_one = starving(loader={"lanes_ms": parts, "num_workers": 1})
    for name in ("decode_each_epoch", "map_per_sample"):
        (found,) = look_of(name)(of_one)
        assert (found.cost_ms, found.recipe) == (6.0, {"script.cache": "memory"})
    drawn = {"lanes_ms": parts, "num_workers": 1, "sample_bytes": None}
    (found,) = look_of("map_per_sample")(starving(loader=drawn))
    assert (found.cost_ms, found.recipe) == (4.0, {})


def test_no_row_is_without_its_check_and_no_name_is_taken_twice():
    names = [check.name for check in (*CHECKS, *RANK_CHECKS)]
    assert sorted(names) == sorted({*ROWS, *RANK_ROWS})


@pytest.mark.parametrize(("check", "row"), TABLE)
def test_the_pitfall_is_found_with_its_bound_and_its_cure(check, row):
    (found,) = check.look(row.sick)
    assert found.name == check.name
    assert found.kind == row.kind
    assert found.where == row.where
    assert found.cost_ms == (None if row.cost is None else pytest.approx(row.cost))
    assert found.what
    assert found.do
    assert found.parity in [parity.words for parity in Parity]
    assert found.proven is None
    Recipe().replace(found.recipe)  # refuses what is no field, or no value of it


@pytest.mark.parametrize(("check", "row"), TABLE)
def test_nothing_is_found_in_the_job_without_it(check, row):
    assert check.look(row.clean) == []


@pytest.mark.parametrize(("check", "row"), TABLE)
def test_without_its_signal_a_check_says_so(check, row):
    with pytest.raises(NoSignal, match=r"[a-z ]{10,}"):
        check.look(row.blind)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_healthy_job_has_none_of_them(check):
    assert check.look(healthy()) == []


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_an_empty_observation_ends_no_check_otherwise_than_told(check):
    for seen in (Observation(["train.py"]), Observation(["train.py"], steps=1, step_ms=[1.0])):
        try:
            assert check.look(seen) == []
        except NoSignal:
            continue


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_no_check_changes_what_it_looks_at(check):
    seen = ROWS[check.name].sick
    before = copy.deepcopy(seen)
    check.look(seen)
    assert seen == before


def test_what_is_below_noise_is_noted_and_left_alone():
    named = {check.name: check.look for check in CHECKS}
    (item,) = named["item_each_step"](job(calls=[call("item", 0.01)]))
    quick = job(optimizer={"fused": False}, lanes={"optimizer": 0.1})
    (unfused,) = named["optimizer_unfused"](quick)
    assert (item.kind, unfused.kind) == ("note", "note")


def test_an_unfused_optimizer_costs_its_own_steps_alone():
    named = {check.name: check.look for check in CHECKS}
    zeroed = call("zero_grad", 0.5)
    seen = job(
        lanes={"optimizer": 2.5}, optimizer={"fused": False, "step_share": 0.25}, calls=[zeroed]
    )
    (found,) = named["optimizer_unfused"](seen)
    assert found.cost_ms == pytest.approx(0.5)


def test_small_numbers_in_moments_alone_cost_no_more_than_the_optimizer():
    (found,) = denormals.look(job(lanes={"optimizer": 1.5}, optimizer={"subnormal_share": 0.2}))
    assert found.cost_ms == 1.5
    assert found.what.startswith("up to 20% of the numbers in a tensor of the optimizer are")
    both = job(model={"subnormal_share": 0.1}, optimizer={"subnormal_share": 0.2})
    (found,) = denormals.look(both)
    assert "of the model are" in found.what
    assert denormals.look(gpu_job(optimizer={"subnormal_share": 0.2})) == []
    assert denormals.look(job(optimizer={"subnormal_share": None})) == []


def test_bf16_is_not_proposed_where_calling_operators_takes_the_time():
    look = next(check.look for check in CHECKS if check.name == "fp32_slow")
    assert look(job(bf16_units="AMX-bf16", model={"elements": 697})) == []
    assert look(job(bf16_units="AMX-bf16", model={"elements": 6_000_000}))


def test_parsed_samples_of_a_stream_are_kept_in_the_process_that_trains():
    look = next(check.look for check in CHECKS if check.name == "text_parse")

    def recipe(**loader):
        parts = {"hot": [(Site("train.py", 7, "a = line.split(',')"), 0.5)]}
        return look(starving(loader=parts | loader))[0].recipe

    assert recipe(num_workers=2) == recipe(num_workers=0, is_iterable=True)
    assert recipe(num_workers=0, is_iterable=True) == {"script.cache": "memory"}
    assert recipe(num_workers=2, is_iterable=True) == {}


def test_samples_of_small_files_are_kept_where_they_fit():
    look = next(check.look for check in CHECKS if check.name == "small_files")

    def recipe(**loader):
        parts = {"opens_per_sample": 1.0, "lanes_ms": {"read": 8.0}}
        return look(starving(loader=parts | loader))[0].recipe

    assert recipe() == {"script.cache": "memory"}
    assert recipe(sample_bytes=10 * 2**20) == recipe(sample_bytes=None) == {}
    assert recipe(is_iterable=True) == {}


def test_bf16_can_return_what_is_arithmetic_and_no_more():
    look = next(check.look for check in CHECKS if check.name == "fp32_slow")

    def most(**model):
        return look(job(bf16_units="AMX-bf16", threads=2, usable_cpus=2, model=model))[0].cost_ms

    # 64 rows of 1,000,000 weights are 0.384 GFLOP: 3.84 ms at what two cores reach.
    assert most(elements=1_000_000) == pytest.approx(3.84 * 15 / 16)
    assert most(elements=9_000_000) == pytest.approx(9.5 * 15 / 16)
    assert most(elements=1_000_000, has_convolutions=True) == pytest.approx(9.5 * 15 / 16)


def test_one_thread_that_the_script_sets_is_too_few_where_any_cpu_is_left():
    look = rank_check("threads_too_few")
    alone = {"threads": 1, "calls": [call("threads", 0.0)], "loader": {"num_workers": 0}}
    alone |= {"runnable": 0.5}  # one of two CPUs
    (found,) = look([job(**alone)])
    assert (found.kind, found.cost_ms, found.where) == ("slow", pytest.approx(4.9), "train.py:7")
    assert "1 thread of the 2 " in found.what
    assert look([job(threads=1, loader={"num_workers": 0})]) == []  # half of them, by the user
    assert look([job(**alone | {"loader": {"num_workers": 2}})]) == []
    assert look([job(**alone | {"runnable": 1.0})]) == []  # processes of its own
    # Of each core one, by the script.
    assert look([job(**alone | {"threads": 8, "machine_cpus": 16})]) == []
    (small,) = look([job(**alone, model={"elements": 500})])
    assert (small.kind, small.cost_ms) == ("note", None)


def test_ranks_with_cpus_of_their_own_are_no_crowd():
    named = {check.name: check.look for check in RANK_CHECKS}
    assert named["threads_too_many"](ranks(2, threads=4, usable_cpus=4, machine_cpus=8)) == []
    assert named["threads_too_many"](ranks(2, threads=8, usable_cpus=8, machine_cpus=8))


def test_a_shard_of_one_sample_is_seen_though_the_whole_divides():
    look = next(check.look for check in CHECKS if check.name == "last_batch_ragged")
    layers = {"layers": {"BatchNorm1d": 1}}
    shard = {"length": 130, "is_distributed": True}
    assert look(job(loader=shard, model=layers, world_size=2))  # 65 = 64 + 1
    assert look(job(loader=shard, model=layers)) == []


def rank_check(name):
    return next(check.look for check in RANK_CHECKS if check.name == name)


def test_files_of_ranks_with_the_same_tensors_are_noted():
    alike = saves({"path": "/a/0.pt", "contents": 1}, {"path": "/a/1.pt", "contents": 1})
    (found,) = rank_check("saved_by_all")(alike)
    assert (found.kind, found.where) == ("note", "train.py:7")
    # In another step it may be another rank's turn.
    alike[1].saved[0]["step"] = 10
    assert rank_check("saved_by_all")(alike) == []
    unknown = saves({"path": "/a/0.pt", "contents": None}, {"path": "/a/1.pt", "contents": None})
    assert rank_check("saved_by_all")(unknown) == []


def test_a_rank_that_works_longer_is_left_alone_where_no_rank_waits_for_it():
    assert rank_check("one_rank_works")(each(EVALUATING | {}, {})) == []


def test_who_waits_at_a_barrier_is_not_the_one_that_works():
    saving = {"lanes": {"saving": 4.0}, "calls": [call("save", 4.0)]}
    (found,) = rank_check("one_rank_works")(each(saving, {"lanes": {"host": 4.1}}))
    assert "rank 0" in found.what
    assert "saving" in found.what
    assert found.where == "train.py:7"


def test_logging_counts_by_its_calls():
    logging = {"lanes": {"host": 4.1}, "calls": [call("log", 4.0)]}
    (found,) = rank_check("one_rank_works")(each({"lanes": {"host": 4.1}}, logging))
    assert "rank 1" in found.what
    assert found.cost_ms == pytest.approx(4.0)


def test_no_more_batches_are_on_their_way_than_an_epoch_has():
    look = next(check.look for check in CHECKS if check.name == "shm_too_small")
    large = {"prefetch_factor": 50, "batch_bytes": 10 * 2**20, "length": 192}  # three batches
    assert look(job(loader=large, shm_free_mb=64.0)) == []
    assert look(job(loader=large | {"length": None}, shm_free_mb=64.0))
    threads = large | {"prefetch_factor": None, "length": None}  # Keras' own workers
    assert look(job(loader=threads, shm_free_mb=64.0)) == []


def test_parts_of_a_small_model_may_be_uneven():
    assert rank_check("shards_uneven")(stepping(3, 1)) == []


def test_shapes_of_another_model_than_the_compiled_one_say_nothing():
    look = next(check.look for check in CHECKS if check.name == "shapes_recompile")
    seen = job(compiles=[(2, 2, 0.5), (100, 8, 1.48)], model=SHAPES)
    assert look(seen)
    seen.models.append(Model("__main__.Other", HERE, is_compiled=True, inputs=[("[4, 4]", 100)]))
    assert look(seen) == []


def look_of(name):
    return next(check.look for check in (*CHECKS, *RANK_CHECKS) if check.name == name)


@pytest.mark.parametrize(
    ("detail", "recipe"),
    [
        ({}, {"script.log_every": 50}),
        ({"logged": True}, {"script.log_every": 50}),
        ({"logged": True, "fsync": True}, {"script.log_every": 50}),
        ({"fsync": True}, {}),
    ],
)
def test_what_a_script_writes_itself_is_left_out_by_no_recipe(detail, recipe):
    (found,) = look_of("log_each_step")(job(calls=[call("log", 1.0, **detail)]))
    assert found.recipe == recipe


def test_what_a_log_line_shows_is_computed_in_the_same_line():
    (found,) = look_of("log_each_step")(job(lanes={"host": 5.0}, calls=[call("log", 1.0)]))
    assert (found.kind, found.cost_ms) == ("slow", 5.0)
    (found,) = look_of("log_each_step")(job(lanes={"host": 5.0}, calls=[call("log", 0.01)]))
    assert (found.kind, found.cost_ms) == ("note", pytest.approx(0.01))


@pytest.mark.parametrize(
    ("code", "by", "is_validation"),
    [
        ("return d.log_prob(action)", "__bool__", True),
        ("d = Normal(mean, std)", "__bool__", True),
        ("if loss > best:", "__bool__", False),
        ("total += dist.log_prob(x).item()", "item", False),
    ],
)
def test_values_that_distributions_check_are_told_from_those_the_script_reads(
    code, by, is_validation
):
    made = replace(often("item", 3, 1.0, by=by), site=Site("ppo.py", 7, code))
    (found,) = look_of("item_each_step")(job(calls=[made]))
    assert ("validate_args" in found.do) == is_validation


def test_dropout_that_is_not_told_endangers_what_is_evaluated():
    (found,) = look_of("eval_missing")(job(dropouts=[HERE], evaluation_site=HERE))
    assert (found.kind, "still drops values" in found.what) == ("danger", True)
    (found,) = look_of("eval_missing")(job(dropouts=[HERE]))
    assert found.kind == "note"


def test_an_optimizer_without_any_gradient_does_nothing():
    idle = {"steps_without": (8, 8), "gradient_looks": 0}
    (found,) = look_of("parameters_unreached")(job(optimizer=idle))
    assert (found.kind, "they stay as they are" in found.what) == ("danger", True)
    for now_and_then in ({"steps_without": (7, 8)}, {"steps_without": (3, 3)}):
        seen = job(optimizer=now_and_then | {"gradient_looks": 7})
        assert not look_of("parameters_unreached")(seen)


def test_padding_without_a_token_before_it_may_be_meant():
    for is_ended, kind in ((True, "danger"), (False, "note")):
        padding = in_loss("padding", value=3, padded=40, of=100, is_ended=is_ended)
        (found,) = look_of("padding_in_loss")(job(**padding))
        assert (found.kind, found.do) == (kind, "ignore_index=3 in the loss")


def test_a_divergence_takes_logarithms():
    for inner in ("softmax", "a layer"):
        given = in_loss("twice", outer="kl_div", inner=inner)
        (found,) = look_of("activation_twice")(job(**given))
        assert "expects log-probabilities" in found.what
        assert found.do.startswith("log_softmax")


def test_what_keras_is_told_is_said_in_its_words():
    told = {"is_told": True, "layers": {"Dropout": 1}}
    (found,) = look_of("train_not_restored")(job(model=told | {"trained_in_eval_mode": HERE}))
    assert "without training=True: Dropout computes" in found.what
    (found,) = look_of("eval_missing")(job(model=told | {"evaluated_in_train_mode": HERE}))
    assert "with training=True: Dropout computes" in found.what
    softmax = in_loss("twice", outer="cross_entropy", inner="softmax")
    (found,) = look_of("activation_twice")(job(framework="keras", **softmax))
    assert "from_logits=False" in found.do
    ordered = {"is_in_order": True, "label_runs": (2, 2, 400, 200)}
    (found,) = look_of("labels_sorted")(job(framework="keras", loader=ordered))
    assert found.do == "shuffle=True in fit()"


@pytest.mark.parametrize(
    ("unseen", "is_told"),
    [
        (([8, 9], 180), True),
        (([9], 20), True),
        (([8, 9], 19), False),  # rare ones, by chance
        (([10, 11], 200), False),  # which the model has no outputs for
    ],
)
def test_classes_that_training_lacks_are_those_that_the_model_tells(unseen, is_told):
    found = look_of("classes_unseen")(of_classes(unseen_classes=unseen))
    assert bool(found) == is_told
    many = f"{unseen[1]} of the 200 samples"
    assert all(many in one.what for one in found)


def test_a_tensor_that_is_made_float_is_no_text():
    for code, is_text in (("return float(row[1])", True), ("return image.float() / 255", False)):
        hot = [(Site("data.py", 12, code), 0.9)]
        assert bool(look_of("text_parse")(starving(loader={"hot": hot}))) == is_text


@pytest.mark.parametrize(
    ("source", "is_text"),
    [
        ("rows = list(csv.reader(file))", True),
        ("lines = open(path).readlines()", True),
        ("frame = frame.sort_values('churn')", False),
    ],
)
def test_numbers_are_made_of_text_where_the_file_reads_some(tmp_path, source, is_text):
    path = tmp_path / "data.py"
    path.write_text(f"{source}\nlabel = int(row[name])\n")
    hot = [(Site(str(path), 2, "label = int(row[name])"), 0.9)]
    assert bool(look_of("text_parse")(starving(loader={"hot": hot}))) == is_text


def test_a_line_in_memory_that_is_no_sample_is_no_cache():
    look = look_of("cache_too_large")
    many = {"length": 10**6}
    assert look(job(loader=KEPT | many | {"sample_bytes": 1000}, **GROWING)) == []
    assert look(job(loader=KEPT | many, job_mb=[500.0] * 5 + [700.0] * 15)) == []
    # Images that become larger three times take as much more each time.
    larger = [500.0 + 38 * (at // 5) for at in range(20)]
    assert look(job(loader=KEPT | many, job_mb=larger)) == []
    assert look(job(loader=KEPT | many | {"kept_per_sample": 1.0}, job_mb=larger))
    # Without workers it is this process alone that keeps them.
    alone = KEPT | many | {"num_workers": 0}
    assert look(job(loader=alone, own_mb=GROWING["job_mb"]))
    assert look(job(loader=alone, own_mb=[500.0] * 20, **GROWING)) == []
    # Holes in the heap take several times what is kept, where something is.
    holes = GROWING["job_mb"][0]
    holes = [holes + 5 * (mb - holes) for mb in GROWING["job_mb"]]
    assert look(job(loader=alone, own_mb=holes)) == []
    assert look(job(loader=alone | {"kept_per_sample": 0.1}, own_mb=holes)) == []
    assert look(job(loader=alone | {"kept_per_sample": 1.0}, own_mb=holes))
    stairs = [mb + 25 * (-1) ** n for n, mb in enumerate(GROWING["job_mb"])]
    assert look(job(loader=alone, own_mb=stairs)) == []
    assert look(job(loader=alone | {"kept_per_sample": 1.0}, own_mb=stairs))
    # 60,000 samples of 25 KB fit once, and not in each of eight workers.
    workers = KEPT | {"length": 60_000, "num_workers": 8, "persistent_workers": True}
    assert look(job(loader=workers, **GROWING))
    assert look(job(loader=workers | {"persistent_workers": False}, **GROWING)) == []


def test_memory_that_ran_out_is_a_danger_with_its_line():
    look = look_of("batch_memory")
    error = (
        'Traceback (most recent call last):\n  File "/home/me/net.py", line 5, in forward\n'
        "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.\n"
    )
    (found,) = look(job(ended="failed", error=error))
    assert (found.kind, found.where) == ("danger", "/home/me/net.py:5")
    assert "tried to allocate 9 bytes" in found.what
    assert look(job(ended="failed", error="ValueError: no such file\n")) == []
    (skipped,) = look(on_gpu_with(held=100.0, peak=21100.0, failures=3))
    assert skipped.kind == "danger"


def test_swap_is_beyond_memory_and_no_count_of_it_is_no_zero():
    look = look_of("batch_memory")
    (found,) = look(job(swapped_mb=900.0, major_faults=12.0))
    assert (found.kind, found.parity) == ("slow", "rounding")
    assert "900 MB" in found.what
    with pytest.raises(NoSignal, match="swap"):
        look(job(swapped_mb=None))


def epochs_with_last(ms):
    """Five epochs of 20 steps, the last of each with 20 samples of 64."""
    steps = ([10.0] * 19 + [ms]) * 5
    return job(step_ms=steps, loader={"length": 19 * 64 + 20, "epochs": 5})


def test_a_generator_that_draws_in_train_mode_is_a_note():
    layers = {"BatchNorm1d": 1}
    gan = job(model={"evaluated_in_train_mode": HERE, "layers": layers})
    gan.loaders[0].in_training = True
    (found,) = look_of("eval_missing")(gan)
    assert found.kind == "danger"
    gan.models.append(replace(gan.models[0], evaluated_in_train_mode=None))
    gan.optimizers.append(gan.optimizers[0])
    (found,) = look_of("eval_missing")(gan)
    assert (found.kind, found.what.partition(":")[0]) == ("note", "draws samples without eval()")
    gan.loaders.append(replace(gan.loaders[0], in_training=False))
    (found,) = look_of("eval_missing")(gan)
    assert found.kind == "danger"


def test_the_last_batch_tells_whether_a_step_depends_on_its_samples():
    look = look_of("batch_too_small")
    (found,) = look(epochs_with_last(9.5))
    assert "20 samples" in found.what
    assert look(epochs_with_last(4.0)) == []
    broken_off = epochs_with_last(9.5)
    broken_off.loaders[0].epochs = 9
    assert look(broken_off) == []  # steps are not in epochs: told by its FLOP


def test_steps_that_wait_for_a_cpu_do_not_make_a_batch_small():
    look = look_of("batch_too_small")
    small = {"elements": 2000}  # 81 MFLOP/s at 10 ms
    assert look(job(model=small))
    assert look(job(model=small, step_ms=[10.0] * 90 + [1.0] * 10)) == []


def test_what_input_takes_grows_with_the_batch():
    assert look_of("batch_too_small")(starving(model={"elements": 1000})) == []


def test_large_batches_are_those_that_were_never_tried():
    from flatout.optim import tried

    look = look_of("batch_very_large")
    sick = ROWS["batch_very_large"].sick
    for told in tried.GOYAL[1:]:
        assert f"{told:,}" in look(sick)[0].what
    layerwise = copy.deepcopy(sick)
    layerwise.optimizers[0].kind = "flatout.optim.lars.Lars"
    assert look(layerwise) == []
    layerwise.optimizers[0].backwards = 4.0
    assert f"{tried.LARS.batch:,}" in look(layerwise)[0].what
    assert tried.LARS[1:] == tried.LAMB[1:]


def test_dataparallel_needs_a_batch_for_all_its_gpus():
    look = look_of("batch_uneven")

    def of(devices, size):
        wrapped = {"wrapper": "DataParallel", "wrapper_options": {"devices": devices}}
        return [gpu_job(model=wrapped | {"inputs": [(f"[{size}, 3], float32", STEPS)]})]

    (found,) = look(of(4, 10))
    assert "3, 3, 3, 1" in found.what
    (found,) = look(of(4, 2))
    assert "1, 1, 0, 0" in found.what
    assert look(of(4, 64)) == []
    assert look(of(0, 64)) == []


@pytest.mark.parametrize(
    "words", ["dist.get_world_size() * base", "1e-3 * int(os.environ['WORLD_SIZE'])", "a * n_gpus"]
)
def test_a_rate_that_is_multiplied_by_the_ranks_is_known_by_its_line(words):
    look = look_of("rate_scaled")
    whole = [(1, 0.2), (20, 0.2)]
    assert look(with_rate(words, whole))
    assert look(with_rate(words, whole, first_target=0.4)) == []  # a scheduler that begins lower
    assert look(with_rate(words, whole, first_target=0.2))  # one that only lowers it
    assert look(with_rate(f"math.sqrt({words})", whole)) == []


def test_where_the_rate_comes_from_elsewhere_nothing_is_said_of_it():
    look = look_of("rate_scaled")
    whole = [(1, 0.2), (20, 0.2)]
    assert look(with_rate("0.1", whole)) == []
    seen = with_rate("0.1 * world_size", whole)
    seen.calls[0].site = Site("train.py", 7, "optimizer = torch.optim.SGD(")
    with pytest.raises(NoSignal, match="one line"):
        look(seen)
    seen.calls[0].site = Site("train.py", 7, "return SGD(net.parameters(), **options)")
    with pytest.raises(NoSignal, match="elsewhere"):
        look(seen)
    seen.calls[0].site = Site("train.py", 7, "return SGD(net.parameters(), 0.1 * ranks)")
    assert look(seen)
    seen.world_size = 1
    assert look(seen) == []


def test_only_an_order_that_is_wrong_for_certain_is_told():
    look = look_of("pipeline_order")
    for stages in (
        ("IterableWrapper", "Shuffler", "Batcher", "Shuffler"),  # of both kinds
        ("IterableWrapper", "Batcher", "UnBatcher", "Shuffler", "Batcher"),
        ("IterableWrapper", "Batcher", "Mapper"),
    ):
        assert look(job(loader=piped(*stages))) == []
    late = piped("IterableWrapper", "Mapper", "ShardingFilter", "Batcher")
    (found,) = look(job(loader=late))
    assert (found.kind, found.parity) == ("slow", "bit-identical")
    assert "2 workers" in found.what
    assert look(job(loader=late | {"num_workers": 0})) == []


def test_a_second_reader_needs_a_second_cpu():
    assert look_of("one_reader")(starving(loader=READS_ONE, usable_cpus=1)) == []


def test_a_backbone_that_the_script_calls_by_itself_is_told():
    look = look_of("frozen_recomputed")
    backbone = Backbone("torchvision.models.resnet.ResNet", HERE, 6.0)
    (found,) = look(job(backbones=[backbone], model={"frozen_share": None}))
    assert "ResNet, which nothing trains, is called by itself in each step" in found.what
    assert (found.cost_ms, found.where) == (6.0, "train.py:7")
    assert found.recipe == {"script.features": "memory"}
    assert look(job(backbones=[replace(backbone, ms=0.001)])) == []


def test_gradients_of_another_optimizer_are_a_danger_once_they_are_added():
    look = look_of("gradients_unused")
    (found,) = look(job(gradient_uses=6, unused_gradients=[replace(UNUSED, fate="added")]))
    assert (found.kind, found.parity, found.where) == ("danger", "changes learning", "train.py:7")
    teacher = replace(UNUSED, fate="kept", model="Teacher")
    (found,) = look(job(gradient_uses=6, unused_gradients=[teacher]))
    assert "no_grad" in found.do
    (through,) = look(job(gradient_uses=6, unused_gradients=[replace(teacher, passes_on=True)]))
    assert "requires_grad_(False)" in through.do
    assert through.cost_ms == found.cost_ms / 2


def test_a_teacher_in_train_mode_is_told_by_what_was_seen_of_it():
    (found,) = look_of("teacher_in_train_mode")(job(teachers=[TEACHER]))
    assert "Large is called in each step and never trained, but in train mode" in found.what
    assert (
        "9 BatchNorm2d, 2 Dropout; the first dropout has set 50% of its numbers to zero"
        in found.what
    )
    assert "the running statistics of 9 have changed" in found.what


def test_an_optimizer_that_is_made_again_is_told_with_what_its_averages_span():
    look = look_of("optimizer_remade")
    (found,) = look(job(remade=[REMADE]))
    assert "Adam is made again every 200 steps, 4 times in 800 steps, for the same 6" in found.what
    assert "though they should span about 1,000 steps" in found.what
    (found,) = look(job(remade=[replace(REMADE, each=1)]))
    assert "made again every step" in found.what


def test_a_target_in_the_input_is_told_with_its_place():
    look = look_of("target_in_input")
    (found,) = look(job(leaked_targets=[LEAKED]))
    assert "input[:, 7, 0] is the target: so in all 512 samples" in found.what
    assert "with 488 different values" in found.what
    (found,) = look(job(leaked_targets=[replace(LEAKED, factor=0.25, shape=[16])]))
    assert "input[:, 14] is the target in other units, by a factor of 0.25: so" in found.what


def test_a_target_that_never_moves_needs_a_whole_run_or_many_steps():
    look = look_of("target_never_moves")
    (found,) = look(job(steps=2000, still_targets=[STILL]))
    assert "Values, a copy of the model that is trained" in found.what
    assert "has not moved in 2,000 steps" in found.what
    assert look(job(steps=20_000, still_targets=[STILL], ended="stopped"))
    with pytest.raises(NoSignal, match="19,999 steps were observed"):
        look(job(steps=19_999, still_targets=[STILL], ended="stopped"))
    with pytest.raises(NoSignal):
        look(job(steps=199, still_targets=[STILL]))


def test_what_loads_nothing_is_told_with_the_names_or_the_steps():
    look, taken = look_of("load_without_effect"), Site("train.py", 3, "best = model.state_dict()")
    load = StateLoad("own", "ResNet", 62, HERE, taken, 1340)
    (found,) = look(job(state_loads=[load]))
    assert found.where == "train.py:3"
    assert "loaded (line 7) 1,340 steps later, it holds the 62 parameters of ResNet" in found.what
    (found,) = look(job(state_loads=[replace(load, steps=0)]))
    assert "(line 7) after other weights were loaded, it holds" in found.what
    (found,) = look(job(state_loads=[replace(load, kind="kept")]))
    assert found.what.endswith("what is loaded later (line 7) are the last weights")
    names = {"given": ["module.fc.weight", "module.fc.bias"], "wanted": ["fc.weight"]}
    other = replace(load, kind="unmatched", taken_at=None, **names)
    (found,) = look(job(state_loads=[other]))
    assert found.where == "train.py:7"
    assert "has module.fc.weight, module.fc.bias, the model has fc.weight" in found.what
    (found,) = look(job(state_loads=[replace(other, given=[])]))
    assert "it is empty, the model has" in found.what


def test_what_freezes_nothing_is_told_in_the_words_of_the_script():
    look = look_of("freeze_without_effect")
    misspelt = Unfrozen("require_grad", "", HERE, 2, 72, ["encoder.weight", "encoder.bias"])
    (found,) = look(job(unfrozen=[misspelt]))
    assert "require_grad = False freezes nothing, as torch's name is requires_grad" in found.what
    (found,) = look(job(unfrozen=[replace(misspelt, name="requires_grad", kind="ResNet")]))
    assert "requires_grad = False on a module (ResNet) changes nothing: 2 parameters" in found.what


def test_what_is_indexed_within_a_model_is_no_batch():
    look = look_of("advanced_indexing")
    (batch,) = look(job(calls=[call("index", 3.0, rows=[[7, 4, 7, 11]])]))
    assert "picks each batch" in batch.what
    (other,) = look(job(calls=[call("index", 3.0, rows=[])]))
    assert "where it picks whole rows" in other.what
    assert "flatout.data" not in other.do


def test_samples_that_are_run_over_are_told_with_how_they_are_known():
    look = look_of("batch_first_missing")
    (drawn,) = look(job(over_batch=[OverBatch("GRU", HERE, [32, 40, 16], 3)]))
    assert "its 32 samples, in the order that the loader has drawn, not over" in drawn.what
    (told,) = look(job(over_batch=[OverBatch("GRU", HERE, [32, 40, 16], by_targets=True)]))
    assert "its 32 samples, not over their 40 places, along which each target is" in told.what


def test_a_token_that_is_seen_is_told_with_the_output_and_the_layer():
    look = look_of("next_token_seen")
    (found,) = look(job(seen_ahead=[AHEAD]))
    assert "Writer's output at position 5 of 32 changes when token 6 does" in found.what
    assert "it begins in layers.0 (Attention); all 992 targets" in found.what
    (found,) = look(job(seen_ahead=[replace(AHEAD, layer="")]))
    assert "begins" not in found.what


def test_equal_views_are_told_with_how_they_came():
    look = look_of("views_equal")
    (found,) = look(job(equal_views=[VIEWS]))
    assert "two calls of Encoder in a step get the same 64 pictures bitwise" in found.what
    (found,) = look(job(equal_views=[replace(VIEWS, is_batch=True)]))
    assert "both halves of Encoder's batch get the same 64 pictures" in found.what


def test_a_name_that_keeps_graphs_is_told_before_memory_shows_it():
    look = look_of("retained_graph")
    kept = KeptGraphs("losses", HERE, is_list=True, steps=17, nodes=340)
    (found,) = look(job(kept_graphs=[kept], memory_mb=[500.0] * 20))
    assert "losses keeps 17 tensors with their graphs: 340 nodes, 20 more with each" in found.what
    (both,) = look(replace(ROWS["retained_graph"].sick, kept_graphs=[kept]))
    assert "memory grows by 2 MB with each step" in both.what
    # Layers that are unfrozen at some steps take more from there on, and graphs have more nodes.
    jumps = [500.0 + 60 * (at // 5) for at in range(20)]
    assert look(replace(ROWS["retained_graph"].sick, memory_mb=jumps)) == []
    once = [(24, 200), (48, 500), (96, 500)]
    assert look(replace(ROWS["retained_graph"].sick, graph_nodes=once)) == []
    (total,) = look(job(kept_graphs=[replace(kept, name="total", is_list=False)]))
    assert "total is a sum that keeps the graphs of 17 steps" in total.what


@pytest.mark.parametrize(
    ("made_for", "loops", "kinds"),
    [
        (40, [], ["note"]),  # ends within the first epoch, as a short run does
        (5, [(HERE, 5)], ["danger"]),
        (5, [(HERE, 3)], ["note"]),
    ],
)
def test_a_schedule_of_as_many_steps_as_epochs_is_no_short_run(made_for, loops, kinds):
    schedule = replace(COSINE, steps=10, ends_after=14, made_for=made_for)
    seen = job(steps=10, schedules=[schedule], epoch_loops=loops)
    assert [one.kind for one in look_of("schedule_misplaced")(seen)] == kinds


@pytest.mark.parametrize(
    ("made_for", "loops", "kinds"),
    [
        (12, [], ["danger"]),  # 3 epochs of 4 steps of the optimizer
        (48, [], []),  # 3 epochs of 16 batches
        (16, [(HERE, 4)], ["danger"]),
        (16, [(HERE, 1), (HERE, 3)], ["note"]),
        (None, [], ["note"]),
    ],
)
def test_a_schedule_of_micro_batches_is_held_against_what_it_was_made_for(made_for, loops, kinds):
    schedule = replace(COSINE, steps=4 * STEPS, made_for=made_for, first_after=0)
    seen = job(schedules=[schedule], optimizer={"backwards": 4.0}, epoch_loops=loops)
    assert [one.kind for one in look_of("schedule_misplaced")(seen)] == kinds


@pytest.mark.parametrize(
    ("changes", "turns", "kinds"),
    [
        ({"steps": 6}, 10, ["danger"]),
        ({"steps": 0, "in_lapse": 2}, 10, ["danger"]),
        ({"steps": 6, "made_for": 170}, 10, ["danger"]),  # the last batch of each is no whole one
        ({"steps": STEPS}, 10, []),
        ({"steps": 12}, 10, []),  # oftener than once an epoch
        ({"steps": 6}, 5, []),  # made for another loop
        ({"steps": 6, "made_for": 10}, 10, []),
        ({"steps": 6, "made_for": None}, 10, []),
    ],
)
def test_a_schedule_of_all_steps_is_not_stepped_once_an_epoch(changes, turns, kinds):
    schedule = replace(COSINE, **{"made_for": 160, **changes})
    seen = job(schedules=[schedule], loader={"epochs": 7}, epoch_loops=[(HERE, turns)])
    found = look_of("schedule_misplaced")(seen)
    assert [one.kind for one in found] == kinds
    assert all(" steps, 10 epochs of 1" in one.what and "6% of" in one.what for one in found)


def test_a_single_score_now_and_then_is_no_mistake():
    seen = job(**in_loss("single", outer="log_softmax", shape=[32, 1]))
    (found,) = look_of("softmax_of_one")(seen)
    assert "log_softmax of [32, 1]" in found.what
    assert "gives 0" in found.what
    seen.loss_looks = 10
    assert look_of("softmax_of_one")(seen) == []


def test_a_plateau_is_told_with_its_mode_and_what_it_gets():
    look = look_of("plateau_reversed")
    (found,) = look(job(schedules=[replace(PLATEAU, given="val_acc", given_kind="score")]))
    assert 'mode "min", which is the default, and stepped with val_acc, a score' in found.what
    down = replace(PLATEAU, mode="max", given="val_loss", given_kind="loss")
    (found,) = look(job(schedules=[down]))
    assert 'mode "max", and stepped with val_loss, a loss' in found.what
    assert look(job(schedules=[replace(down, given="metric", given_kind="")])) == []
    lowers = replace(STOPPING, kind="ReduceLROnPlateau", acts="lowers")
    (found,) = look(job(monitors=[lowers, STOPPING]))
    assert "and looks at val_acc, a score" in found.what


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, ("once the score no longer falls", '(..., mode="max")')),
        ({"acts": "keeps"}, ("keeps the weights with the smallest score", '(..., mode="max")')),
        (
            {"mode": "max", "metric": "val_loss", "metric_kind": "loss"},
            ("no longer rises", '"min")'),
        ),
        ({"kind": "Seq2SeqTrainingArguments", "acts": "keeps"}, ("", "greater_is_better=True")),
        ({"kind": "if", "acts": "keeps"}, ("is the smallest so far", "reverse the comparison")),
        ({"metric": "val_metric", "metric_kind": ""}, ()),
        ({"acts": "lowers"}, ()),
    ],
)
def test_a_monitor_is_told_with_what_it_does(changes, says):
    found = look_of("monitor_reversed")(job(monitors=[replace(STOPPING, **changes)]))
    assert len(found) == bool(says)
    for one in found:
        assert says[0] in one.what
        assert one.do.endswith(says[1])
        assert ("the default" in one.what) == (changes.get("kind") != "if")


def test_validation_that_is_a_part_of_training_is_not_how_well_training_fits():
    look = look_of("validation_overlaps")
    assert [one.kind for one in look(evaluating(shared_rows=(200, 200)))] == ["note"]
    (found,) = look(evaluating(shared_rows=(200, 200), length=200))
    assert found.kind == "danger"
    again = evaluating(shared_rows=(200, 200), length=200)
    again.loaders.append(copy.copy(again.loaders[1]))  # as Keras makes one for each epoch
    assert {one.kind for one in look(again)} == {"danger"}
    again.loaders.append(replace(again.loaders[1], length=100, shared_rows=(0, 100)))
    assert look(again) == []
    (moved,) = look(evaluating(shared_rows=(0, 200), shared_windows=150))
    assert (moved.kind, "150 of the 200 samples" in moved.what) == ("danger", True)
    assert look(evaluating(shared_rows=(0, 200), shared_windows=10)) == []  # where two parts meet
    (files,) = look(evaluating(shared_rows=(20, 200), shared_files=True))
    assert "read from the same files" in files.what


def test_ranks_that_read_the_same_stream_are_told():
    look = look_of("sampler_missing")
    stream = {"hashes": None, "is_iterable": True, "worker_batches": [5, 6]}
    (found,) = look(ranks(2, stream, stream))
    assert "world_size" in found.do
    assert look(ranks(2, stream, stream | {"worker_batches": [7, 8]})) == []
    with pytest.raises(NoSignal):  # all batches are equal
        look(ranks(2, *[stream | {"worker_batches": [5, 5]}] * 2))


def test_samples_that_a_rank_draws_twice_are_no_shards():
    look = look_of("shards_overlap")
    drawn = [*range(40), 3]
    other = {"taken": [*range(30, 70)], "hashes": [4]}
    assert look(ranks(2, {"taken": drawn}, other)) == []
    assert look(ranks(2, {"taken": drawn[:-1]}, other))
    alike = {"taken": [*range(40)], "hashes": [1, 2]}
    assert look(ranks(2, alike, alike)) == []


def test_parts_of_a_dataset_that_no_one_takes():
    look = look_of("shards_missing")

    def found(*parts, lengths=(800, 800), **more):
        return look(
            ranks(
                len(parts),
                *({"parts": of, "parts_of": lengths[at % 2], **more}
                  for at, of in enumerate(parts)),
            )
        )  # fmt: skip

    (one,) = found([(0, 4)], [(1, 4)])
    assert "each 4-th of 800 samples" in one.what
    assert "50% of the samples are never" in one.what
    # Parts that change from epoch to epoch, samples that are thinned out, files of each rank's own.
    assert found([(0, 4), (2, 4)], [(1, 4), (3, 4), None]) == []
    assert found([(0, 4)], [(2, 4)]) == []
    assert found([(0, 4)], [(1, 4)], lengths=(800, 700)) == []
    assert found([(0, 1)], [(0, 1)]) == found([(0, 4)], [(0, 1)]) == []
    streams = {"is_iterable": True, "num_workers": 2}
    (one,) = found([(0, 4), (1, 4)], [(1, 4), (2, 4)], **streams)
    assert "2 ranks of 2 workers take" in one.what
    assert "and others several times" in one.what
    (one,) = found([(0, 3), (1, 3)], **streams)
    assert one.what.startswith("2 workers take each 3-th")
    assert found([(0, 2), (1, 2)], **streams) == []
    with pytest.raises(NoSignal):
        found([(0, 3), None], **streams)


@pytest.mark.parametrize(
    ("blocks", "many"),
    [
        (((0, 101), (101, 101)), 2),  # of 404
        (((101, 101), (0, 101)), 2),
        (((0, 202), (202, 202)), 0),
        (((0, 160), (160, 160)), 0),  # the rest is held out
        (((0, 101), (202, 101)), 0),
    ],
)
def test_blocks_of_a_dataset_that_no_one_takes_are_a_note(blocks, many):
    given = [{"parts": [(0, 1)], "parts_of": 404, "block": (*block, 404)} for block in blocks]
    found = look_of("shards_missing")(ranks(2, *given))
    assert [one.kind for one in found] == ["note"] * bool(many)
    assert all(f"{many} more such blocks" in one.what for one in found)


def test_one_small_sum_of_each_step_is_named_and_the_sum_of_all_gradients_is_not():
    look = look_of("collectives_each_step")
    shown, ten = call("collective", 0.5, name="all_reduce", bytes=4), {"elements": 10_000}
    (found,) = look(ranks(2, calls=[shown], optimizer=ten))
    assert (found.cost_ms, "4 bytes" in found.what) == (0.5, True)
    flat = call("collective", 0.5, name="all_reduce", bytes=40_000)
    assert look(ranks(2, calls=[flat], optimizer=ten)) == []
    slower = ranks(2, calls=[shown], optimizer=ten)
    slower[0].calls = [replace(shown, seconds=4 * shown.seconds)]
    assert look(slower)[0].cost_ms == 0.5  # the rest is the wait for the other rank


def test_on_a_gpu_what_checkpointing_saves_is_held_against_its_own_memory():
    look = look_of("checkpointing_needless")
    of = {"calls": [call("checkpoint", 3.0)], "checkpointed_mb": 4000.0, "device_total_mb": 9000.0}
    assert look(gpu_job(**of, device_peak_mb=3000.0))
    assert look(gpu_job(**of, device_peak_mb=4000.0)) == []
    with pytest.raises(NoSignal):
        look(gpu_job(**of))


def test_a_first_step_as_large_as_the_weights_is_a_danger():
    look, options = look_of("optimizer_extreme"), {"options": {"lr": 0.3}} | ADAM
    (found,) = look(job(optimizer=options | {"first_change": (6, 3.2)}))
    assert "6 matrices by 3.2 times" in found.what
    assert look(job(optimizer=options | {"first_change": (6, 0.4)})) == []


def test_rates_of_keras_are_held_against_the_same_limits():
    look = look_of("optimizer_extreme")

    def of(name, **options):
        kind = f"keras.src.backend.torch.optimizers.torch_{name.lower()}.{name}"
        return [one.what for one in look(job(optimizer={"kind": kind, "options": options}))]

    assert of("Adam", lr=1e-3, beta1=0.9, beta2=0.999) == []
    (what,) = of("Nadam", lr=3.0)
    assert what.startswith("Nadam with a rate of 3")
    (what,) = of("SGD", lr=200.0)
    assert what == "SGD with a rate of 200"
    (what,) = of("Adam", lr=1e-3, beta1=0.999, beta2=0.9)
    assert what.startswith("betas (0.999, 0.9)")
    assert of("Lion", lr=1e-4, beta1=0.99, beta2=0.9) == []


def test_what_undivided_means_change_beside_adams_steps_is_said():
    look, undivided = look_of("accumulation_undivided"), in_loss("undivided", backwards=4)
    clipped = undivided | {"calls": [call("clip", 0.0)]}
    words = {
        "but for its eps": job(**undivided, optimizer=ADAM),
        "clipped as if at 1/4": job(**clipped, optimizer=ADAM),
        "decay counts 1/4": job(
            **undivided,
            optimizer={"kind": "torch.optim.adam.Adam", "options": {"weight_decay": 0.1}},
        ),
    }
    for part, seen in words.items():
        (found,) = look(seen)
        assert (found.kind, part in found.what) == ("note", True), found.what


def test_steps_that_are_left_out_for_nan_are_a_danger_unless_they_are_rare():
    look = look_of("nan_hidden")

    def skipping(count, of):
        return job(loss_looks=8, in_losses=[InLoss("skipped", HERE, count, 99, {"of": of})])

    (found,) = look(skipping(7, 90))
    assert "7 of 90 losses" in found.what
    assert look(skipping(1, 20)) == look(skipping(7, 900)) == []


def test_gradients_of_a_moving_average_are_for_nothing_and_no_danger():
    (found,) = look_of("optimizer_misses")(job(model={"moved": ["key.weight"], "moved_share": 0.5}))
    assert (found.kind, "moving average" in found.what, found.cost_ms) == ("slow", True, 2.75)


def test_float64_costs_half_of_the_computing_and_deterministic_algorithms_are_a_note():
    look = look_of("debugging_left_on")
    (double,) = look(job(switched_on=["float64"], calls=[call("switch", 0.0, name="float64")]))
    assert (double.kind, double.cost_ms, double.is_estimate) == ("slow", 4.75, True)
    (noted,) = look(job(switched_on=["deterministic_algorithms"]))
    assert (noted.kind, noted.cost_ms) == ("note", None)


def test_a_seed_that_comes_again_is_told_once():
    look = look_of("seed_repeated")
    order = RepeatedSeed("torch.randperm", HERE, [0, 10])
    (found,) = look(job(repeated_seeds=[order]))
    assert found.what.startswith("torch.randperm gave the same order each time, after 0, 10 steps")
    seeds = [order, *(RepeatedSeed(f"{name}.seed", HERE, [0, 10]) for name in ("numpy", "torch"))]
    (found,) = look(job(repeated_seeds=seeds))
    assert found.what.startswith("numpy.seed begins with the same seed each time")
    assert "the same holds for torch.seed (" in found.what
    # A loader's order is told by another check; noise is not.
    noise = RepeatedSeed("torch.randn", HERE, [0, 1, 2, 3], seed=7)
    (found,) = look(job(repeated_seeds=[order, noise], loader={"hashes": [1, 1]}))
    assert found.what.startswith(
        "torch.randn draws the same numbers each time, from a torch.Generator that is seeded with "
        "7 again, after 0, 1, 2, ... steps"
    )
    assert not list(look(job(repeated_seeds=[order], loader={"hashes": [1, 1]})))
    assert list(look(job(repeated_seeds=[order], loaders=[])))


def test_labels_that_lie_sorted_in_a_column_are_told_with_its_name():
    detail = {"batches": 8, "of_one": 8, "alone": [0], "classes": 3}
    lies = in_loss("labels", **detail, lies=["table['grade']", 3, 900])
    (found,) = look_of("labels_sorted")(job(**lies))
    assert "the 900 labels in table['grade'] lie sorted by their 3 classes" in found.what
