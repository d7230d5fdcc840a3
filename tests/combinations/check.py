"""Comparison of the results of a case's ranks with the result of the plain loop."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from combinations.axes import Case
from combinations.inputs import EPOCHS, HELD_OUT, batch_size

# Largest differences of results, as shares of the largest number: in fp32, where sums are made in
# another order, and in bf16.
ROUNDING, BF16 = 1e-4, 5e-2


def faults(case: Case, plain: dict[str, Any], *ranks: dict[str, Any]) -> list[str]:
    """Return the faults of a case, one line each."""
    errors = [(n, one) for n, one in enumerate(ranks) if "error" in one]
    if errors:
        # Other ranks report only that they lost the failed rank.
        number, first = min(errors, key=lambda one: one[1]["error"].startswith("LostRank"))
        words = f"rank {number}: {first['error']}"
        if not first["named"]:
            return [f"bare error: {words}\n{first['trace']}"]
        if first["begun"]:
            return [f"refused after the first step: {words}"]
        if len(errors) < len(ranks) and not case.refused_by:
            words += f"; not by rank {min(set(range(len(ranks))) - {n for n, _ in errors})}"
        is_wanted = "error" in plain or any(one in words for one in case.refused_by)
        return [] if is_wanted else [f"refused: {words}"]
    if "error" in plain:
        return [f"trained, although the plain loop fails: {plain['error']}"]
    if case.refused_by:
        return [f"not refused: {case.refused_by}"]
    for number, one in enumerate(ranks):
        lines = [f"rank {number}: {line}" for line in differences(case, plain, one)]
        if lines:
            return lines
    return [
        f"rank {number}: {line}"
        for number, one in enumerate(ranks)
        for line in (*calls_of(case, plain, one), *events_of(case, plain, one))
    ]


def differences(case: Case, plain: dict[str, Any], found: dict[str, Any]) -> Iterator[str]:
    yield from compared_figures(case, plain, found)
    if is_comparable(case):
        yield from compared_weights(case, plain, found)
        yield from far("evaluate", found["evaluate"], plain["evaluate"], bound(case))
        yield from far("predict", found["predict"], plain["predict"], bound(case))
    if "own" in found:
        own = found["own"]
        limit = BF16 if case.precision == "bf16" else 1e-5
        yield from far("evaluate of these weights", found["evaluate"], own["evaluate"], limit)
        yield from far("predict of these weights", found["predict"], own["predict"], limit)
        if found["val_loss"] and case.callbacks != "early":
            last = found["val_loss"][-1]
            yield from far("val_loss of these weights", last, own["evaluate"], limit)


def compared_figures(case: Case, plain: dict[str, Any], found: dict[str, Any]) -> Iterator[str]:
    for name in ("loss", "val_loss", "rates"):
        wanted, values = plain[name], found[name]
        if name == "rates" and case.resume != "none":
            wanted = wanted[2:]  # only epochs after the resume
        if len(wanted) != len(values):
            yield f"{name} of {len(wanted)} epochs wanted, found {values}"
            continue
        if not is_comparable(case) and name != "rates":
            if not all(map(math.isfinite, values)):
                yield f"{name} is not finite: {values}"
            continue
        yield from far(name, values, wanted, bound(case))


def compared_weights(case: Case, plain: dict[str, Any], found: dict[str, Any]) -> Iterator[str]:
    wanted, weights = plain["weights"], found["weights"]
    if list(wanted) != list(weights):
        yield f"expected weights named {list(wanted)}, found {list(weights)}"
        return
    if is_bitwise(case):
        other = [name for name in wanted if not torch.equal(wanted[name], weights[name])]
        if other:
            largest = max(float((wanted[n] - weights[n]).abs().max()) for n in other)
            yield f"weights differ in bits, by {largest:.2g} at most: {', '.join(other)}"
        return
    for name, value in weights.items():
        yield from far(f"weight {name}", value, wanted[name], bound(case))


def is_comparable(case: Case) -> bool:
    """Return whether several ranks learn the same as one rank."""
    if case.strategy == "local_sgd":  # equal if all ranks have equal parts of each batch
        equal = case.last == "whole" and case.weights == "none" and case.accumulate == 1
        return equal and case.model != "conv"
    if case.strategy == "staged" and case.model == "conv":
        return False  # BatchNorm uses a micro-batch
    if case.model == "keras" and case.accumulate > 1:
        return False  # BatchNorm uses a larger batch in the plain loop
    return case.strategy != "async"


def is_bitwise(case: Case) -> bool:
    """Return whether the plain loop makes the same sums in the same order."""
    plainly = (case.ranks, case.precision, case.accumulate) == (1, "fp32", 1)
    return plainly and case.kept != "tables"


def bound(case: Case) -> float:
    return BF16 if case.precision == "bf16" else ROUNDING


def far(name: str, found: Any, wanted: Any, limit: float) -> Iterator[str]:
    """Yield a line if numbers differ by more than `limit`, as a share of the largest number."""
    if isinstance(wanted, dict):
        if not isinstance(found, dict) or set(found) != set(wanted):
            yield f"{name}: wanted {list(wanted)}, found {found}"
            return
        for key, value in wanted.items():
            yield from far(f"{name} {key}", found[key], value, limit)
        return
    first, second = (torch.as_tensor(one, dtype=torch.float64) for one in (found, wanted))
    if first.shape != second.shape:
        yield f"{name}: shape {tuple(first.shape)}, wanted {tuple(second.shape)}"
    elif first.numel():
        largest = max(float(second.abs().max()), 1e-3)
        off = float((first - second).abs().max()) / largest
        if not off <= limit:
            words = f"found {short(found)}, wanted {short(wanted)}"
            yield f"{name} differs by {off:.2g} of the largest number: {words}"


def short(value: Any) -> str:
    flat = torch.as_tensor(value).flatten()[:6].tolist()
    return str([round(one, 6) for one in flat])


def calls_of(case: Case, plain: dict[str, Any], found: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each user function with too many or too few calls.

    Each rank may call functions for the first samples a few more times before training.
    """
    if case.resume != "none":
        return
    calls, epochs = found["calls"], len(found["loss"])
    samples = 48 if case.last == "whole" else 43
    size = batch_size(case)
    batches = -(-samples // size)
    least, most = {}, {}
    if not case.is_compiled:
        most |= {"getitem": samples * epochs + 5 * size, "passes": epochs + 1}
        most["held_out"] = HELD_OUT * epochs + 10 + 5
        if case.strategy != "staged" and case.functions == "own":
            most["loss"] = epochs * (batches + 5) + 10
            least["loss"] = epochs * batches
    # If ranks do not wait for each other, a fast rank takes parts of slow ranks.
    passes = epochs + (epochs if case.strategy == "async" else 1)
    if case.kept != "features":  # keeping features calls maps to measure them
        # For a frozen body, maps are called to measure whether keeping features would pay.
        measured = 128 if case.frozen == "body" else 0
        most["map"] = samples + 96 if case.data == "cache" else samples * passes + 144
        most["map"] += measured
    if case.model == "keras_own" and (case.ranks, case.accumulate) == (1, 1):
        for name in ("test_step", "predict_step", "compute_loss", "compute_metrics"):
            least[name] = plain["calls"].get(name, 0)
            most[name] = least[name] + 4
    for name, limit in most.items():
        if calls[name] > limit:
            yield f"{name} was called {calls[name]} times, expected at most {limit}"
    for name, limit in least.items():
        if calls[name] < limit:
            yield f"{name} was called {calls[name]} times, in a plain loop {limit} times"


def events_of(case: Case, plain: dict[str, Any], found: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each difference in the events of callbacks."""
    if case.resume != "none":
        return
    if not case.is_compiled:
        if case.callbacks == "own":
            yield from own_events(case, found)
        return
    if found["names"] != plain["names"]:
        yield f"history has {found['names']}, Keras' history has {plain['names']}"
    if case.accumulate > 1:
        return
    wanted, events = plain["events"], found["events"]
    names, theirs = ([one[:2] for one in each] for each in (events, wanted))
    if names != theirs:
        place = next(
            (n for n, pair in enumerate(zip(names, theirs, strict=False)) if pair[0] != pair[1]), -1
        )
        words = f"event {place} is {names[place]}, in Keras {theirs[place]}"
        yield f"callbacks got {len(names)} events, from Keras {len(theirs)}; {words}"
        return
    for event, other in zip(events, wanted, strict=True):
        if set(event[2]) != set(other[2]):
            yield f"logs of {event[:2]} have {sorted(event[2])}, in Keras {sorted(other[2])}"
            return
        yield from far(f"logs of {event[:2]}", event[2], other[2], bound(case))


def own_events(case: Case, found: dict[str, Any]) -> Iterator[str]:
    steps = -(-(48 if case.last == "whole" else 43) // batch_size(case))
    wanted = {
        "fit_start": 1,
        "epoch_start": EPOCHS,
        "step": EPOCHS * -(-steps // case.accumulate),
        "evaluate_end": 0 if case.validation == "none" else EPOCHS,
        "epoch_end": EPOCHS,
        "fit_end": 1,
    }
    counted = Counter(found["events"])
    if case.strategy == "async":  # a fast rank takes parts of slow ranks
        counted["step"] = wanted["step"]
    for name, times in wanted.items():
        if counted[name] != times:
            yield f"on_{name} was called {counted[name]} times, wanted {times}"
