"""From the ranks to a verdict: the order, the critical lane, what could not be seen."""

import dataclasses
import json

import pytest

from flatout.devices.inventory import inventory
from flatout.doctor.critical import critical
from flatout.doctor.finding import Finding
from flatout.doctor.judge import _is_tuned, judge
from flatout.observe import Ablation, Call, DeviceTime, Loader, Model, Observation, Optimizer, Site


@pytest.fixture(scope="module")
def machine():
    """This one, as if it had two CPUs, no units for bf16 and no GPU."""
    found = inventory()
    cpus = dataclasses.replace(found.cpus, usable=2, instructions=("avx2",))
    return dataclasses.replace(found, cpus=cpus, cuda=())


def rank(number=0, **lanes):
    of = dict.fromkeys(
        ("input", "copy", "forward", "backward", "sync", "optimizer", "host", "gc", "idle"), 0.0
    )
    return Observation(
        ["train.py", "--epochs", "5"],
        rank=number,
        steps=50,
        step_ms=[sum(lanes.values())] * 50,
        lanes_ms=of | lanes,
        threads=1,
        usable_cpus=2,
        loaders=[
            Loader(
                "DataLoader", Site("train.py", 41), num_workers=0, batches=50, batch_size=8,
                length=100, wait_ms=9.0, lanes_ms={"decode": 7.0, "collate": 1.0},
                hot=[(Site("data.py", 12), 0.9)],
            )
        ],
        optimizers=[Optimizer("torch.optim.adam.Adam", Site("train.py", 60), 50, fused=True)],
        models=[Model("Net", Site("train.py", 50), layers={"Dropout": 1})],
        calls=[Call("item", Site("train.py", 88), 50, 50 * 1e-6, 50)],
        ended="stopped",
        added_us_per_step=3.0,
    )  # fmt: skip


def test_dangers_come_first_then_the_largest_bound_and_notes_last(machine):
    seen = rank(input=250.0, forward=60.0, backward=90.0)
    seen.models[0].evaluated_in_train_mode = Site("train.py", 120)
    seen.page_faults = 20_000.0
    verdict = judge([seen], machine)
    assert [(found.name, found.kind) for found in verdict.findings] == [
        ("eval_missing", "danger"),
        ("starvation", "slow"),
        ("workers_zero", "slow"),
        ("memory_returned", "slow"),
        ("item_each_step", "note"),
    ]
    assert all(found.proven is None for found in verdict.findings)
    assert not {found.name for found in verdict.findings} & {*verdict.passed}
    assert (
        dict(verdict.unknown)["small_files"] == "the files that the loader opens were not observed"
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_check_passes_before_the_first_step(machine, ranks):
    failed = [Observation(["train.py"], rank=n, ended="failed", error="no") for n in range(ranks)]
    verdict = judge(failed, machine)
    assert (verdict.findings, verdict.passed) == ([], [])
    assert dict(verdict.unknown)["tf32_off"] == "no step was observed"


def test_the_critical_lane_has_its_cause_and_the_hot_line(machine):
    found = judge([rank(input=250.0, forward=60.0, backward=90.0)], machine).critical
    assert found.lanes == ("input",)
    assert found.words == "the model waits for input: decoding"
    assert found.where == "data.py:12"
    assert found.share == pytest.approx(250 / 400)
    gpu = rank(input=250.0, forward=60.0)
    gpu.device = "cuda:0"
    assert critical([gpu]).words.startswith("the GPU waits for input")


def test_no_cure_returns_more_than_taking_its_lane_out(machine):
    seen = rank(input=250.0, forward=60.0, backward=90.0)
    seen.page_faults = 20_000.0
    seen.ablations["input"] = Ablation(
        2.5, 2.4, 2.6, floor=0.01, pairs=4, step_ms=400.0, without_ms=160.0, returns_ms=246.0
    )
    verdict = judge([seen], machine)
    costs = {found.name: found.cost_ms for found in verdict.findings}
    assert costs["starvation"] == 246.0
    assert verdict.critical.words.endswith(
        "; without waiting for input a step would take 160 ms instead of 400 ms"
    )

    # The workers wait for something else: the model alone is as slow.
    seen.ablations["input"] = Ablation(1.0, 0.99, 1.01, 0.01, 4, 400.0, 400.0, 4.0)
    verdict = judge([seen], machine)
    kinds = {found.name: (found.kind, found.cost_ms) for found in verdict.findings}
    assert kinds["starvation"] == ("note", 4.0)
    assert verdict.findings[0].name == "memory_returned"
    assert "without" not in verdict.critical.words


def test_forward_and_backward_are_one_cause():
    found = critical([rank(input=40.0, forward=30.0, backward=30.0)])
    assert (found.lanes, found.where) == (("forward", "backward"), "train.py:50")


def on_gpu(busy_ms, **lanes):
    seen = rank(**lanes)
    seen.device = "cuda:0"
    seen.device_time = DeviceTime(5, busy_ms, {"forward": 0.4 * busy_ms, "backward": 0.6 * busy_ms})
    return seen


def test_where_the_gpu_is_the_limit_that_is_said_whatever_the_host_waits_in():
    found = critical([on_gpu(38.0, copy=30.0, forward=4.0, backward=6.0)])
    assert found.lanes == ("backward", "forward")
    assert found.words.startswith("the GPU computes for 95% of a step of 40 ms: it is the limit")
    assert found.share == pytest.approx(0.95)


@pytest.mark.parametrize(
    ("lanes", "words"),
    [
        ({"input": 30.0, "forward": 8.0}, "the GPU waits for input"),
        ({"host": 30.0, "forward": 8.0}, "the GPU waits for Python between the steps"),
        ({"backward": 30.0, "forward": 8.0}, "the GPU waits for the host, which takes longer"),
    ],
)
def test_where_the_gpu_waits_it_is_said_for_what(lanes, words):
    found = critical([on_gpu(5.0, **lanes)])
    assert found.words.startswith(words)
    assert f"it computes for {5 / sum(lanes.values()):.0%} of a step of" in found.words


def test_what_the_host_waits_in_is_worth_nothing_where_the_gpu_is_the_limit(machine):
    seen = on_gpu(39.8, copy=20.0, host=16.0, forward=2.0, backward=2.0)
    seen.loaders[0].pin_memory = False
    seen.calls = [Call("item", Site("train.py", 90), 50, 50 * 15e-3, 50)]
    names = {found.name: found.kind for found in judge([seen], machine).findings}
    assert "memory_not_pinned" not in names
    assert names["item_each_step"] == "note"

    waits = on_gpu(5.0, copy=20.0, host=16.0, forward=2.0, backward=2.0)
    waits.loaders[0].pin_memory = False
    waits.calls = seen.calls
    names = {found.name: found.kind for found in judge([waits], machine).findings}
    assert names["memory_not_pinned"] == names["item_each_step"] == "slow"
    assert "tf32_off" not in names  # nor what makes it compute faster


def test_a_dear_call_between_the_steps_is_named():
    seen = rank(forward=10.0, host=40.0)
    seen.calls.append(Call("log", Site("train.py", 90), 50, 50 * 30e-3, 50))
    found = critical([seen])
    assert "log, 30 ms" in found.words
    assert found.where == "train.py:90"


def test_what_one_step_alone_took_is_told_apart():
    seen = rank(forward=2.0, backward=8.0, host=9.0, gc=1.0)
    seen.steps, seen.step_ms = 150, [6000.0, *[11.0] * 74, 1400.0, *[11.0] * 74]
    found = critical([seen])
    assert found.lanes == ("forward", "backward")
    assert found.words.endswith("; a single step, which is not counted in that, took 1,400 ms")
    assert found.share > 0.8

    habit = rank(forward=2.0, backward=8.0, host=14.0)
    habit.steps, habit.step_ms = 150, [6000.0, *([11.0] * 49 + [700.0]) * 3]
    assert critical([habit]).lanes == ("host",)
    waiting = rank(input=12.0, forward=2.0, backward=8.0, host=1.0)
    waiting.steps, waiting.step_ms = seen.steps, seen.step_ms
    assert "single" not in critical([waiting]).words


def test_the_rank_that_the_others_wait_for_is_named_with_its_slow_lane():
    fast = [rank(at, input=2.0, forward=40.0, backward=40.0, sync=41.0) for at in (0, 1, 2)]
    slow = rank(3, input=41.0, forward=40.0, backward=40.0, sync=2.0)
    found = critical([*fast, slow])
    assert found.rank == 3
    assert found.lanes == ("input",)
    assert found.words.startswith("the other ranks wait for rank 3: the model waits for input")


def test_what_only_some_ranks_show_says_which_and_is_told_once(machine):
    ranks = [rank(at, forward=50.0, backward=50.0) for at in (0, 1, 2)]
    for seen in ranks:
        seen.world_size = 3
    ranks[2].models[0].not_finite = ["0.weight"]
    verdict = judge(ranks[::-1], machine)
    assert [seen.rank for seen in verdict.observations] == [0, 1, 2]
    (danger,) = verdict.dangers
    assert danger.what.endswith("(only rank 2)")
    assert [found.name for found in verdict.findings].count("item_each_step") == 1


def test_what_flatouts_own_jobs_decide_by_measuring_is_not_proposed_to_them(machine):
    seen = rank(forward=50.0, backward=40.0, optimizer=20.0)
    seen.optimizers[0] = Optimizer("torch.optim.adam.Adam", parameters=30, fused=False)
    seen.optimizers[0].dtypes = ["float32"]
    seen.bf16_units = "AMX-bf16"
    seen.models[0].has_convolutions = True
    found = {one.name for one in judge([seen], machine).findings}
    seen.framework = "flatout"
    left = judge([seen], machine)
    assert found - {one.name for one in left.findings} == {
        "channels_first",
        "fp32_slow",
        "optimizer_unfused",
    }


def test_a_script_without_steps_is_judged_by_nothing(machine):
    verdict = judge([Observation(["tool.py"], ended="no steps")], machine)
    assert (verdict.findings, verdict.critical, verdict.steps) == ([], None, 0)
    assert verdict.unknown


def test_one_failed_rank_is_the_end_of_all(machine):
    ranks = [rank(0, forward=1.0), rank(1, forward=1.0)]
    ranks[1].ended, ranks[1].error = "failed", "ValueError: no"
    verdict = judge(ranks, machine)
    assert (verdict.ended, verdict.error) == ("failed", "ValueError: no")


def test_as_plain_data_it_is_json_and_whole(machine):
    verdict = judge([rank(input=25.0, forward=60.0)], machine)
    data = json.loads(json.dumps(verdict.as_dict()))
    assert data["command"] == ["train.py", "--epochs", "5"]
    assert data["critical"]["lanes"] == ["forward", "backward"]
    assert Observation.of(data["observations"][0]) == verdict.observations[0]
    assert data["added_us_per_step"] == 3.0


def test_the_machine_fills_in_only_what_was_not_seen(machine):
    seen = rank(forward=9.0)
    seen.gpus = ["L4"]
    (filled,) = judge([seen], machine).observations
    assert (filled.gpus, filled.machine_cpus, filled.bf16_units) == (["L4"], 2, "")
    assert filled.available_mb > 0


def test_a_job_of_flatout_is_not_told_what_it_measures_itself():
    values = {
        "compute.compile": "on",
        "compute.fused_optimizer": "on",
        "compute.matmul_precision": "high",
        "compute.memory_format": "channels_last",
        "compute.precision": "bf16",
        "compute.rewrites": "on",
        "memory.allocator": "keep",
        "process.threads": 2,
    }
    rest = {"input.workers": 2, "input.pin_memory": "on", "script.garbage": "scheduled"}
    told = {
        field
        for field, value in (values | rest).items()
        if not _is_tuned(Finding("x", "slow", "", "", recipe={field: value}))
    }
    assert told == {*rest}
