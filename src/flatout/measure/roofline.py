"""The least time of a training step on a machine, by its operators' arithmetic and memory traffic.

An operator takes as long as its arithmetic or its memory traffic, whichever is longer, at the best
rates that were measured (machine.py), plus the time to call it. Such a bound orders settings before
they are tried, and shows a job's distance from its machine's limit (Williams et al. 2009,
"Roofline"). It is a model, not a measurement of a setting.

    counts = {"device": "cpu", "threads": 2, "machine": "0123456789ab", "samples": 64,
              "lanes": {"forward": {"matmul": {"calls": 3, "flops": 1e9, "bytes": 2e6,
                                               "cached_bytes": 1e6}}},
              "weights": {"bytes": 4e6, "state_bytes": 8e6, "tensors": 6}}

Bytes are those of fp32. `cached_bytes` is the part of them in operators whose tensors fit in a
cache. `models/operators.py` counts them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

KINDS = (
    "matmul",
    "conv",
    "conv_1x1",
    "conv_depthwise",
    "attention",
    "recurrent",
    "normalization",
    "gather",
    "elementwise",
    "update",
    "casts",
    "dispatch",
)
"""Kinds of operators. All but those with their own arithmetic are bound by memory only."""

# Kinds whose best rate is that of matrix products.
_AS_MATMUL = ("attention", "recurrent")
# Kinds that `compute.fp32_operators` keeps in fp32.
_KEPT_IN_FP32 = ("attention", "conv_depthwise")
# Settings by which these kinds take fewer passes over memory; the bound assumes half as many.
_FEWER_PASSES = {
    "compute.fused_norms": ("normalization", "elementwise"),
    "compute.rewrites": ("elementwise",),
}
# Settings that change a bound.
_KNOWN = (
    "compute.precision",
    "compute.fp32_operators",
    "compute.memory_format",
    "compute.fused_optimizer",
    "compute.compile",
    "compute.capture",
    "compute.cuda_graph",
)
# Largest assumed ratio of an operator's time to its time at the best rates.
_FAR = 5.0


class PossibleSaving(NamedTuple):
    """The possible saving of a setting in a step, alone or with the others.

    Attributes:
        saved_s: seconds by which the bound of a step falls; negative if it rises.
        most_s: maximum seconds that all operators changed by the setting may take.
    """

    saved_s: float
    most_s: float


def bound(
    counts: Mapping[str, Any], rates: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, dict[str, float]]:
    """Return the least seconds of a step by lane ("forward", "backward", "optimizer") and kind.

    Args:
        counts: counts of the step's operators, as in the module's example.
        rates: rates of the machine, from `machine_rates`.
        settings: fields of the Recipe that differ from plain, such as `{"compute.precision":
            "bf16"}`; settings that the model does not know change nothing.
    """
    result = {}
    for lane, kinds in counts["lanes"].items():
        if lane == "optimizer" and _fuses_update(settings):
            kinds = {"update": _fused(counts["weights"])}
        result[lane] = _of_lane(lane, kinds, rates, settings, counts["device"])
    if _precision(settings) != "fp32":
        # Weights are read and written in bf16 before they are used, and their gradients afterwards.
        casts = 1.5 * counts["weights"]["bytes"] / rates["bytes_per_s"]["fp32"]["memory"]
        for lane in ("forward", "backward"):
            result.setdefault(lane, {})["casts"] = casts
    return result


def predicted(
    counts: Mapping[str, Any], rates: Mapping[str, Any], settings: Mapping[str, Any]
) -> float:
    """Return the least seconds of a step under these settings, with the arguments of `bound`.

    The gain that an option promises is `predicted(.., plain) / predicted(.., option)`.
    """
    return sum(sum(kinds.values()) for kinds in bound(counts, rates, settings).values())


def possible_savings(
    counts: Mapping[str, Any], rates: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, PossibleSaving]:
    """Return the possible saving of each option, by field, without options unknown to the model.

    Args:
        options: fields of the Recipe, and the values that may be faster.
    """
    result = {}
    for field, value in options.items():
        if field not in _KNOWN and field not in _FEWER_PASSES:
            continue
        others = {f: v for f, v in options.items() if f != field}
        saved, touched = zip(
            *(_changed(counts, rates, beside, field, value) for beside in ({}, others)), strict=True
        )
        result[field] = PossibleSaving(max(saved), _FAR * max(touched))
    return result


def _changed(
    counts: Mapping[str, Any],
    rates: Mapping[str, Any],
    beside: Mapping[str, Any],
    field: str,
    value: Any,
) -> tuple[float, float]:
    off, on = (
        {
            (lane, kind): s
            for lane, kinds in bound(counts, rates, of).items()
            for kind, s in kinds.items()
        }
        for of in (beside, {**beside, field: value})
    )
    for lane, kind in on:
        if lane != "optimizer" and kind in _FEWER_PASSES.get(field, ()):
            on[lane, kind] /= 2
    touched = sum(seconds for place, seconds in off.items() if on.get(place, 0.0) != seconds)
    return sum(off.values()) - sum(on.values()), touched


def _precision(settings: Mapping[str, Any]) -> str:
    return "fp32" if settings.get("compute.precision", "fp32") == "fp32" else "bf16"


def _fuses_update(settings: Mapping[str, Any]) -> bool:
    return "on" in (settings.get("compute.fused_optimizer"), settings.get("compute.capture"))


def _fused(weights: Mapping[str, float]) -> dict[str, float]:
    moved = 3 * weights["bytes"] + 2 * weights["state_bytes"]
    return {"calls": 1, "flops": 0, "bytes": moved, "cached_bytes": 0}


def _of_lane(
    lane: str,
    kinds: Mapping[str, Mapping[str, float]],
    rates: Mapping[str, Any],
    settings: Mapping[str, Any],
    device: str,
) -> dict[str, float]:
    is_update = lane == "optimizer"
    layout = settings.get("compute.memory_format", "contiguous")
    result = {}
    for kind, of in kinds.items():
        kept = settings.get("compute.fp32_operators") == "on" and kind in _KEPT_IN_FP32
        precision = "fp32" if is_update or kept else _precision(settings)
        flops_per_s = rates["flops_per_s"][f"{precision}/{layout}"]
        bytes_per_s = rates["bytes_per_s"][precision]
        width = 1.0 if precision == "fp32" else 0.5
        far = of["bytes"] - of["cached_bytes"]
        seconds = width * (far / bytes_per_s["memory"] + of["cached_bytes"] / bytes_per_s["cache"])
        rate = flops_per_s.get("matmul" if kind in _AS_MATMUL else kind)
        if rate is not None:
            seconds = max(
                seconds, of["flops"] / rate["backward" if lane == "backward" else "forward"]
            )
        result[kind] = seconds
    calls = sum(of["calls"] for of in kinds.values())
    if settings.get("compute.capture") == "on":
        calls = int(lane == "forward")  # one for the whole step
    elif settings.get("compute.cuda_graph") == "on" and not is_update:
        calls = int(lane == "forward")  # one for both passes
    elif settings.get("compute.compile") == "on" and not is_update:
        calls = 1
    dispatch = calls / rates["nodes_per_s" if lane == "backward" else "calls_per_s"]
    if device != "cpu":
        # The host calls ahead while the device computes, so the longer of the two counts.
        dispatch = max(0.0, dispatch - sum(result.values()))
    return {**result, "dispatch": dispatch}
