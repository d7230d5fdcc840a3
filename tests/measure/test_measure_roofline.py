"""What bounds a step, on made-up counts and rates; and that rates are measured once."""

import json
import sys

import pytest
import torch

from flatout.measure import bound, known_rates, machine_rates, possible_savings, predicted
from flatout.measure.roofline import KINDS


def rate(value):
    return {"forward": value, "backward": value / 2}


RATES = {
    "flops_per_s": {
        f"{precision}/{layout}": {
            "matmul": rate(factor * 100.0),
            "conv": rate(factor * 10.0 * (2 if layout == "channels_last" else 1)),
            "conv_1x1": rate(factor * 10.0),
            "conv_depthwise": rate(factor * 1.0),
        }
        for precision, factor in (("fp32", 1), ("bf16", 4))
        for layout in ("contiguous", "channels_last")
    },
    "bytes_per_s": {
        "fp32": {"memory": 10.0, "cache": 100.0},
        "bf16": {"memory": 10.0, "cache": 100.0},
    },
    "calls_per_s": 1.0,
    "nodes_per_s": 1 / 3,
    "spread": 1.1,
}


def of(calls=0, flops=0, moved=0, cached=0):
    return {"calls": calls, "flops": flops, "bytes": moved, "cached_bytes": cached}


def counts(device="cpu", weights=0, **lanes):
    held = {"bytes": weights, "state_bytes": 2 * weights, "tensors": 1}
    return {"device": device, "lanes": lanes, "weights": held}


def test_an_operator_takes_its_arithmetic_or_its_traffic_whichever_is_longer():
    found = bound(counts(forward={"conv": of(flops=40, moved=10)}), RATES, {})
    assert found == {"forward": {"conv": 4.0, "dispatch": 0.0}}
    found = bound(counts(forward={"conv": of(flops=40, moved=100)}), RATES, {})
    assert found["forward"]["conv"] == 10.0


def test_what_a_cache_holds_moves_at_its_rate():
    found = bound(counts(forward={"elementwise": of(moved=110, cached=100)}), RATES, {})
    assert found["forward"]["elementwise"] == pytest.approx(2.0)


def test_a_call_takes_longer_in_backward():
    kinds = {"elementwise": of(calls=2)}
    found = bound(counts(forward=kinds, backward=kinds, optimizer=kinds), RATES, {})
    assert [found[lane]["dispatch"] for lane in found] == [2.0, 6.0, 2.0]


def test_on_a_gpu_calls_show_only_beyond_what_the_device_computes():
    lane = {"matmul": of(calls=3, flops=200)}
    assert bound(counts("cuda", forward=lane), RATES, {})["forward"]["dispatch"] == 1.0
    assert bound(counts("cpu", forward=lane), RATES, {})["forward"]["dispatch"] == 3.0


def test_bf16_and_channels_last_take_their_own_rates_and_the_casts_of_the_weights():
    lanes = counts(weights=20, forward={"conv": of(flops=80)})
    assert predicted(lanes, RATES, {}) == 8.0
    assert predicted(lanes, RATES, {"compute.memory_format": "channels_last"}) == 4.0
    both = {"compute.precision": "bf16", "compute.memory_format": "channels_last"}
    found = bound(lanes, RATES, both)
    assert found["forward"] == {"conv": 1.0, "dispatch": 0.0, "casts": 3.0}
    assert found["backward"] == {"casts": 3.0}


def test_attention_and_recurrent_layers_are_matrix_products():
    lane = {"attention": of(flops=100), "recurrent": of(flops=100)}
    found = bound(counts(backward=lane), RATES, {})["backward"]
    assert found["attention"] == found["recurrent"] == 2.0


def test_a_fused_update_reads_and_writes_each_weight_once_in_fp32():
    lanes = counts(weights=10, optimizer={"elementwise": of(calls=40, moved=1000)})
    plain = bound(lanes, RATES, {"compute.precision": "bf16"})["optimizer"]
    assert plain == {"elementwise": 100.0, "dispatch": 40.0}
    fused = bound(lanes, RATES, {"compute.fused_optimizer": "on"})["optimizer"]
    assert fused == {"update": 7.0, "dispatch": 1.0}


def test_what_a_roofline_knows_nothing_of_changes_nothing():
    lanes = counts(forward={"matmul": of(calls=1, flops=100)})
    assert predicted(lanes, RATES, {"memory.allocator": "keep", "process.threads": 1}) == 2.0
    assert predicted(lanes, RATES, {"compute.compile": "on"}) == 2.0


def test_what_stays_in_fp32_takes_the_rates_of_fp32():
    lanes = counts(forward={"conv_depthwise": of(flops=8), "matmul": of(flops=800)})
    half = {"compute.precision": "bf16", "compute.fp32_operators": "on"}
    found = bound(lanes, RATES, half)["forward"]
    assert (found["conv_depthwise"], found["matmul"]) == (8.0, 2.0)


def test_a_captured_step_is_called_once_and_updates_in_one_pass():
    kinds = {"elementwise": of(calls=2)}
    lanes = counts(weights=8, forward=kinds, backward=kinds, optimizer=kinds)
    found = bound(lanes, RATES, {"compute.capture": "on"})
    fused = bound(lanes, RATES, {"compute.fused_optimizer": "on"})
    assert [found[lane]["dispatch"] for lane in found] == [1.0, 0.0, 0.0]
    assert found["optimizer"]["update"] == fused["optimizer"]["update"]


def test_an_option_promises_what_it_saves_alone_or_beside_the_others():
    lanes = counts(
        forward={"conv": of(flops=40), "conv_depthwise": of(flops=4)},
        backward={"elementwise": of(moved=10)},
        optimizer={"elementwise": of(calls=6, moved=20)},
    )
    slow = {**RATES["flops_per_s"]["bf16/contiguous"], "conv_depthwise": rate(0.5)}
    rates = {**RATES, "flops_per_s": {**RATES["flops_per_s"], "bf16/contiguous": slow}}
    options = {
        "compute.precision": "bf16",
        "compute.fp32_operators": "on",
        "compute.fused_norms": "on",
        "compute.fused_optimizer": "on",
        "process.threads": 1,
    }
    found = possible_savings(lanes, rates, options)
    assert set(found) == set(options) - {"process.threads"}
    saved = {field.partition(".")[2]: promise.saved_s for field, promise in found.items()}
    # Beside fp32_operators: 3 of 4 s of the convolution, and half of the traffic of 1 s.
    assert saved["precision"] == pytest.approx(3.5)
    assert saved["fp32_operators"] == pytest.approx(4.0)
    assert saved["fused_norms"] == pytest.approx(0.5)
    assert saved["fused_optimizer"] == pytest.approx(7.0)  # of 6 calls and 2 s one call is left
    assert found["compute.fused_norms"].most_s == pytest.approx(5.0)
    assert found["compute.fused_optimizer"].most_s == pytest.approx(40.0)


def test_rates_are_measured_once_for_a_machine(monkeypatch, tmp_path):
    module = sys.modules["flatout.measure.machine"]
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path))
    asked = []
    monkeypatch.setattr(module, "_measured", lambda device: asked.append(device) or RATES)
    assert known_rates("cpu", 1) is None
    assert machine_rates("cpu", 1) == RATES
    assert machine_rates("cpu", 1) == known_rates("cpu", 1) == RATES
    assert asked == ["cpu"]
    assert machine_rates("cpu", 2) == RATES
    assert len(asked) == 2
    (file, *_) = (tmp_path / "roofline").glob("*-cpu-1.json")
    for damaged in ("{", json.dumps([1]), json.dumps({"seconds": 1})):
        file.write_text(damaged)
        assert known_rates("cpu", 1) is None
    assert machine_rates("cpu", 1) == RATES
    assert len(asked) == 3


def test_measured_rates_have_each_kind_and_lane():
    module = sys.modules["flatout.measure.machine"]
    before = torch.get_rng_state()
    rates = module._measured("cpu", rate_s=0.0)
    assert torch.equal(torch.get_rng_state(), before)
    assert set(rates["flops_per_s"]) == set(RATES["flops_per_s"])
    for kinds in rates["flops_per_s"].values():
        assert set(kinds) == {"matmul", "conv", "conv_1x1", "conv_depthwise"} <= set(KINDS)
        assert all(value > 0 for of in kinds.values() for value in of.values())
    assert all(value > 0 for of in rates["bytes_per_s"].values() for value in of.values())
    assert min(rates["calls_per_s"], rates["nodes_per_s"]) > 0
    assert rates["spread"] >= 1


@pytest.mark.parametrize(("device", "slowest"), [("cuda", 1_000.0), ("cpu", 0.5)])
def test_what_loading_a_kernel_takes_on_a_gpu_is_no_rate(device, slowest, monkeypatch):
    module = sys.modules["flatout.measure.machine"]
    now, loaded = [0.0], set()

    def probes(_device):
        for name in "abc":

            def run(name=name):
                now[0] += 0.001 if name in loaded else 2.0
                loaded.add(name)

            yield [("calls_per_s", name)], lambda best, run=run: 1 / best(run)

    monkeypatch.setattr(module, "_probes", probes)
    monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    monkeypatch.setattr(module, "finish_device", lambda: None)
    rates = module._measured(device)
    assert min(rates["calls_per_s"].values()) == pytest.approx(slowest)
    assert (rates["spread"] <= module.ROUGH) == (device == "cuda")
    assert rates["seconds"] > 6


def test_measuring_ends_in_time_and_rates_measured_once_are_rough(monkeypatch, tmp_path):
    module = sys.modules["flatout.measure.machine"]
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path))
    runs = []
    best = module._Round.best
    monkeypatch.setattr(module._Round, "best", lambda *given: runs.append(1) or best(*given))
    rates = module._measured("cpu", longest_s=-1.0)
    assert len(runs) == 2 + 12 * 2 + 4 + 2  # each once
    assert set(rates["flops_per_s"]) == set(RATES["flops_per_s"])
    assert rates["spread"] > module.ROUGH
    for measured in (rates, RATES):
        monkeypatch.setattr(module, "_measured", lambda device, measured=measured: measured)
        assert machine_rates("cpu", 1)["spread"] == measured["spread"]


def test_rough_rates_are_measured_again_and_the_better_ones_kept(monkeypatch, tmp_path):
    module = sys.modules["flatout.measure.machine"]
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path))
    found = [{**RATES, "calls_per_s": 5.0, "spread": 2.0}, {**RATES, "calls_per_s": 4.0}]
    monkeypatch.setattr(module, "_measured", lambda device: found.pop(0))
    assert machine_rates("cpu", 1)["spread"] == 2.0
    again = machine_rates("cpu", 1)
    assert (again["calls_per_s"], again["spread"]) == (5.0, 1.1)
    assert machine_rates("cpu", 1) == again  # and no third time
