"""Facts that checks read from an Observation: a value, or NoSignal with the reason."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod
from statistics import median

from flatout.doctor.checks.check import NoSignal
from flatout.doctor.finding import Kind
from flatout.measure import STEP_LANES
from flatout.observe import Call, InLoss, Loader, Model, Monitor, Observation, Site, Table
from flatout.words import rounded

WORTH = 0.02
"""Smallest share of a step that is worth a report: noise of a trial is 1% on a quiet machine."""

HUNGRY = 0.1
"""Share of a step that input may take: even handing over a ready batch costs a few percent."""

EVERY = 0.5
"""Share of steps from which on an event counts as happening in each step."""

MOST = 0.8
"""Minimum share of batches of one size for that size to count as the batch size."""

SLOW_RATE = 2e9
"""FLOP per second below which a step on a CPU mostly calls operators, instead of computing.

One core multiplies matrices at ten times that rate.
"""

WAITS = 0.5
"""Busy share of a step below which a GPU mostly waits for the host."""

_NAMED = 3


def few(names: Sequence[str]) -> str:
    """Return the first few names as text."""
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")


def step_ms(observation: Observation) -> float:
    """Return the median milliseconds of a step."""
    if not observation.step_ms:
        raise NoSignal("no step was observed")
    return median(observation.step_ms)


def lane(observation: Observation, *names: str) -> float:
    """Return the total milliseconds per step of these lanes."""
    parts = [observation.lanes_ms.get(name) for name in names]
    for name, part in zip(names, parts, strict=True):
        if part is None:
            raise NoSignal(f"the time of {name} was not observed")
    return sum(part for part in parts if part is not None)


def whole_ms(observation: Observation) -> float:
    """Return the larger of the median step and the sum of its lanes, in milliseconds.

    The sum is larger if step times are uneven, since lanes are means.
    """
    return max(
        step_ms(observation), sum(observation.lanes_ms.get(name) or 0.0 for name in STEP_LANES)
    )


def share(observation: Observation, cost: float) -> float:
    """Return a cost as a share of a step."""
    return cost / max(whole_ms(observation), 1e-9)


def is_worth(observation: Observation, cost: float | None) -> bool:
    """Return True if a cost is large enough to report; an unknown cost counts as large enough."""
    return cost is None or share(observation, cost) >= WORTH


def kind_of(observation: Observation, cost: float | None) -> Kind:
    """Return the kind of a finding by its cost: "note" if the cost is negligible here."""
    return "slow" if is_worth(observation, cost) else "note"


def calls(observation: Observation, *kinds: str) -> list[Call]:
    """Return the calls of these kinds, in order of decreasing cost."""
    if not observation.steps:
        raise NoSignal("no step was observed")
    result = [call for call in observation.calls if call.kind in kinds and call.count]
    return sorted(result, key=lambda call: -(call.seconds or 0.0))


def is_each_step(observation: Observation, call: Call) -> bool:
    """Return True if a call happens in most of several steps."""
    return observation.steps > 1 and call.steps >= EVERY * observation.steps


def cost_ms(observation: Observation, call: Call) -> float | None:
    """Return the milliseconds per step in these calls; None if not timed."""
    return None if call.seconds is None else 1e3 * call.seconds / max(1, observation.steps)


def training_loaders(observation: Observation) -> list[Loader]:
    """Return the loaders whose batches were trained on."""
    result = [loader for loader in observation.loaders if loader.in_training]
    if not result:
        raise NoSignal("no loader was observed that gave the batches")
    return result


def epoch_steps(observation: Observation) -> float:
    """Return the steps of an epoch of the first training input; 0 if unknown."""
    batches = [
        item.length / item.batch_size
        for item in observation.inputs
        if item.in_training and item.length and item.batch_size
    ]
    return batches[0] / batches_per_step(observation) if batches else 0.0


def run_steps(observation: Observation) -> float:
    """Return the steps of the whole run, from the lengths of its loops; 0 if unknown."""
    if observation.run_steps:
        return observation.run_steps
    turns = [turns for _, turns in observation.epoch_loops]
    return epoch_steps(observation) * prod(turns) if turns else 0.0


def held_out(observation: Observation) -> list[Loader | Table]:
    """Return the inputs that were only evaluated, and whose samples are in one table each."""
    evaluated = [item for item in observation.inputs if not item.in_training]
    known = [item for item in evaluated if item.shared_rows is not None or item.scaling is not None]
    if evaluated and not known:
        raise NoSignal("the samples of training and validation are not held as one table each")
    return known


def in_losses(observation: Observation, kind: str) -> list[InLoss]:
    """Return the observations of this kind in the graphs of losses."""
    if not observation.loss_looks:
        raise NoSignal("no graph of a loss was checked")
    return [item for item in observation.in_losses if item.kind == kind]


def other_mode(monitor: Monitor) -> str:
    """Return the mode that the monitor's metric needs, if that is not its mode; else ""."""
    better = {"loss": "min", "score": "max"}.get(monitor.metric_kind, monitor.mode)
    return better if better != monitor.mode else ""


def in_mode(monitor: Monitor) -> str:
    """Return the monitor's mode in words."""
    told = ", which is the default" if monitor.is_default else ""
    return f'in mode "{monitor.mode}"{told}'


def parity_of_workers(loader: Loader) -> str:
    """Return the parity of other or persistent workers: equal samples if workers draw nothing."""
    return "bit-identical" if loader.worker_hashes == [] else "redrawn"


def models(observation: Observation) -> list[Model]:
    """Return the models that were trained."""
    if not observation.models:
        raise NoSignal("no model was observed")
    return observation.models


def arithmetic_rate(observation: Observation, model: Model) -> float | None:
    """Return the FLOP per second of forward and backward, if layers use each weight once per row.

    These are two FLOP for each weight and row in forward, and four in backward. None for
    convolutions, which use a weight at many positions, and for unknown batch shapes.
    """
    words = model.inputs[0][0] if model.inputs else ""
    shape = [int(size) for size in re.findall(r"\d+", re.split(r"[\])]", words)[0])]
    if model.has_convolutions or not shape or not model.elements:
        return None
    rows = prod(shape if "int" in words else shape[:-1])
    seconds = lane(observation, "forward", "backward") / 1e3
    return 6 * model.elements * rows * batches_per_step(observation) / max(seconds, 1e-9)


def samples_per_call(observation: Observation) -> int | None:
    """Return the usual number of samples in a model call; None if it varies or is unknown."""
    sizes: Counter[int] = Counter()
    for words, count in observation.models[0].inputs if observation.models else ():
        size = re.match(r"\[(\d+)", words)
        if size:
            sizes[int(size[1])] += count
    ((most, count),) = sizes.most_common(1) or [(0, 0)]
    return most if count and count >= MOST * sizes.total() else None


def batches_per_step(observation: Observation) -> float:
    """Return the batches per optimizer step: more than one with gradient accumulation."""
    return max((optimizer.backwards for optimizer in observation.optimizers), default=1.0) or 1.0


def loader_ms(observation: Observation, loader: Loader, *parts: str) -> float:
    """Return the maximum milliseconds per step that `parts` of the loader's work cost.

    The work is divided by the workers, and limited by the wait for input.
    """
    missing = [part for part in parts if part not in loader.lanes_ms]
    if missing:
        raise NoSignal(f"the time of {missing[0]} within the loader was not observed")
    at_once = max(
        1, min(loader.num_workers or 1, observation.usable_cpus or loader.num_workers or 1)
    )
    work = sum(loader.lanes_ms[part] for part in parts) * batches_per_step(observation)
    return min(work / at_once, lane(observation, "input"))


def making_ms(observation: Observation, loader: Loader) -> float:
    """Return the maximum milliseconds per step that caching whole samples can save.

    This is all work of making samples, without collating them into batches.
    """
    parts = [part for part in loader.lanes_ms if part != "collate"]
    return loader_ms(observation, loader, *parts)


_CACHED = 0.5
"""Share of free memory that a cache may take: the job and the page cache need the rest."""


def cached_mb(loader: Loader) -> float | None:
    """Return the megabytes of all samples as the dataset returns them; None if unknown."""
    if loader.length is None or loader.sample_bytes is None:
        return None
    return loader.length * loader.sample_bytes / 2**20


def fits_in_memory(observation: Observation, mb: float | None) -> bool:
    """Return True if a cache of this size leaves enough free memory."""
    return (
        mb is not None
        and observation.available_mb is not None
        and mb <= _CACHED * observation.available_mb
    )


def hot(loader: Loader) -> Site | None:
    """Return the user's line that takes most of the loader's time.

    If unknown, it is the line where the dataset is read or the loader is iterated.
    """
    return loader.hot[0][0] if loader.hot else loader.dataset_site or loader.site


def made(loader: Loader) -> Site | None:
    """Return the user's line in which the loader is made, or else iterated."""
    return loader.made_at or loader.site


def at(site: Site | None) -> str:
    """Return file:line, or "" if there is no site."""
    return "" if site is None else str(site)


def is_gpu(observation: Observation) -> bool:
    """Return True if the model computes on a GPU."""
    return observation.device.startswith("cuda")


def busy_share(observation: Observation) -> float | None:
    """Return the share of a step in which the GPU computes or copies; None if unknown."""
    time = observation.device_time
    if time is None:
        return None
    # Another job on the GPU may lengthen steps, but not the GPU's time for this job.
    steps_ms = [step for step in (whole_ms(observation), time.step_ms) if step]
    return min(1.0, time.busy_ms / max(min(steps_ms, default=0.0), 1e-9))


def compute_ms(observation: Observation, *lanes: str) -> float:
    """Return the milliseconds per step that the device computes for these lanes.

    The lanes are among forward, backward and optimizer. On a CPU the result is their own time. If a
    GPU mostly waits for the host, faster computation saves nothing, and the result is 0.
    """
    time = observation.device_time
    if time is None:
        return lane(observation, *lanes)
    if (busy_share(observation) or 0.0) < WAITS:
        return 0.0
    return sum(time.lanes_ms.get(name, 0.0) for name in lanes)


def returned_ms(observation: Observation, cost: float | None) -> float | None:
    """Return the part of a host's cost that does not overlap with computation of the GPU."""
    busy = busy_share(observation)
    if cost is None or busy is None:
        return cost
    return min(cost, (1 - busy) * whole_ms(observation))


def has_batch_norm(models: Iterable[Model]) -> bool:
    """Return True if a layer computes statistics over the batch."""
    return any(
        "BatchNorm" in name and count for model in models for name, count in model.layers.items()
    )


def ms(value: float) -> str:
    """Return milliseconds as text."""
    return f"{rounded(value, 2)} ms"


def layers_of_two_modes(model: Model) -> str:
    """Return the layers that compute differently in training, and a verb: "Dropout computes"."""
    kinds = [
        kind for kind in ("BatchNorm", "Dropout") if any(kind in layer for layer in model.layers)
    ]
    return f"{' and '.join(kinds) or 'it'} compute{'' if len(kinds) == 2 else 's'}"


def has_peers(observations: Sequence[Observation]) -> bool:
    """Return True if the job has several ranks; raise NoSignal if only one was observed."""
    if len(observations) < 2 <= observations[0].world_size:
        raise NoSignal(
            f"only rank {observations[0].rank} of {observations[0].world_size} was observed"
        )
    return observations[0].world_size > 1


def threads_and_cpus(observations: Sequence[Observation]) -> tuple[list[int], int]:
    """Return torch's threads in each rank, and the CPUs that all ranks share."""
    threads = [rank.threads for rank in observations if rank.threads is not None]
    cpus = observations[0].machine_cpus or max(
        (rank.usable_cpus or 0 for rank in observations), default=0
    )
    if len(threads) < len(observations) or not cpus:
        raise NoSignal("torch's threads, or the CPUs, were not observed")
    return threads, cpus
