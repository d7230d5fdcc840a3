"""What could make a script faster though no check found it: settings that only a trial can judge.

    prove(widened(verdict), what, budget_s=600)

looks for the best Recipe over all of them and what the checks found: each setting alone, then
beside those that win, then all together, measured anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from flatout.doctor.finding import Finding
from flatout.doctor.judge import Verdict
from flatout.observe import Observation

_FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


_MARK = "search "


def is_searched(name: str) -> bool:
    """Whether a finding of this name is none of a check's."""
    return name.startswith(_MARK)


def widened(verdict: Verdict) -> Verdict:
    """The verdict with a finding for each setting that could matter, behind those of the checks."""
    known = {field for one in verdict.findings if one.kind == "slow" for field in one.recipe}
    more = [
        Finding(
            name=f"{_MARK}{field}",
            kind="slow",
            what="no check found this",
            do="see what a trial says",
            recipe={field: value},
        )
        for field, value in _settings(verdict.observations[0])
        if field not in known
    ]
    return replace(verdict, findings=[*verdict.findings, *more])


def _settings(seen: Observation) -> Iterator[tuple[str, Any]]:
    """Fields of a Recipe with a value that this script does not have yet, and could take."""
    for field, value, could_matter in _POSSIBLE:
        if could_matter(seen):
            yield field, value(seen)


def _cpus(seen: Observation) -> int:
    return seen.usable_cpus or 1


def _is_on_cpu(seen: Observation) -> bool:
    return seen.device.startswith("cpu")


def _workers(seen: Observation) -> int | None:
    """Of the loader that is trained on; None where there is none."""
    found = [one.num_workers for one in seen.loaders if one.in_training]
    return found[0] if found else None


def _more_workers(seen: Observation) -> int:
    return max(1, _cpus(seen) // 2) if not _workers(seen) else _cpus(seen)


def _could_use_bf16(seen: Observation) -> bool:
    is_fp32 = not any(model.autocast for model in seen.models)
    return is_fp32 and bool(seen.bf16_units) and _is_all_fp32(seen)


def _is_all_fp32(seen: Observation) -> bool:
    return all("32" in dtype for one in seen.optimizers for dtype in one.dtypes)


def _has_convolutions(seen: Observation) -> bool:
    return any(one.has_convolutions and not one.is_channels_last for one in seen.models)


def _could_fuse(seen: Observation) -> bool:
    return any(not one.fused and one.kind.split(".")[-1] in _FUSED for one in seen.optimizers)


def _restarts_workers(seen: Observation) -> bool:
    return any(one.num_workers and not one.persistent_workers for one in seen.loaders)


_POSSIBLE: tuple[
    tuple[str, Callable[[Observation], Any], Callable[[Observation], bool]],
    ...,
] = (
    ("input.workers", _more_workers, lambda seen: _workers(seen) is not None),
    ("compute.precision", lambda seen: "bf16", _could_use_bf16),
    ("compute.memory_format", lambda seen: "channels_last", _has_convolutions),
    ("memory.allocator", lambda seen: "keep", _is_on_cpu),
    (
        "process.threads",
        lambda seen: _cpus(seen) if seen.threads != _cpus(seen) else max(1, _cpus(seen) // 2),
        lambda seen: _is_on_cpu(seen) and seen.threads is not None and _cpus(seen) > 1,
    ),
    ("compute.fused_optimizer", lambda seen: "on", _could_fuse),
    ("compute.rewrites", lambda seen: "on", lambda seen: any(m.pool_after for m in seen.models)),
    (
        "input.pin_memory",
        lambda seen: "on",
        lambda seen: seen.device.startswith("cuda") and any(not x.pin_memory for x in seen.loaders),
    ),
    ("script.persistent_workers", lambda seen: "on", _restarts_workers),
    ("script.garbage", lambda seen: "scheduled", lambda seen: True),
    (
        "script.cudnn_benchmark",
        lambda seen: "on",
        lambda seen: seen.device.startswith("cuda") and _has_convolutions(seen),
    ),
    (
        "compute.compile",
        lambda seen: "on",
        lambda seen: seen.framework == "torch" and not any(m.is_compiled for m in seen.models),
    ),
)
"""A field, the value to try, and whether it could matter; in the order in which they are tried."""
