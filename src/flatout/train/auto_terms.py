"""By which clocks `auto` measures, which facts of the machine it goes by, and its limits.

A Loop has them and hands them down with the Budget of a search. Users have no reason to change
them: a test of a Loop or a Trainer gives it clocks, a machine and limits of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any

import torch

from flatout.measure import fingerprint, known_rates, machine_rates

Lanes = tuple[int, int, int, int]
"""When a step began, and its times of fetching, copying and waiting, in ns."""


def is_ampere(device: torch.device) -> bool:
    """Whether a GPU has units for TF32 and bf16."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _has_bf16_units(device: torch.device) -> bool:
    if device.type == "cuda":
        return is_ampere(device)
    instructions = fingerprint().as_dict().get("instructions", ())
    return any(name in instructions for name in ("amx_bf16", "avx512_bf16", "bf16"))


def _starts_cold(device: torch.device) -> bool:
    """A GPU loads kernels at their first use, and chooses among them, for up to a second."""
    return device.type != "cpu"


def _input_s(lanes: Lanes) -> tuple[float, float]:
    _, fetched, copied, _ = lanes
    return fetched / 1e9, copied / 1e9


@dataclass(frozen=True)
class Terms:
    """On which terms settings are tried.

    Attributes:
        clock: returns seconds.
        cpu_clock: returns seconds of CPU time of this process.
        input_s: of a step's lanes, seconds for which it waited for its batches, and in which these
            were brought to the device.
        has_bf16_units: whether a device has units for bf16.
        starts_cold: whether a first pass on a device says nothing of the next.
        known_rates: the best rates of this machine, if they were measured.
        machine_rates: measures them, which takes seconds.
        may_fork: whether a child of this process may try what has ended an earlier run.
        longest_s: what the time before the first step takes at most.
        before_share: likewise, as a share of the run.
        fewest_steps: a run of fewer is over before anything is known.
        few_far_slower: an option that is this many times slower on a few samples is not tried on
            whole batches.
        least_frozen_s: a first epoch whose forward is over sooner is not looked at.
        short_share: of a short run, tuning may cost this share.
        fixed_s: of a longer one, it may cost this many seconds beside a share.
        block_s: about how long a block of steps lasts.
        most_steps: the most steps of a block.
        most_pairs: the most quadruples of blocks in a trial. Where no difference shows they cost
            nothing, and a difference that noise could hide is looked for until the floor is low.
        searched: searching ends after this share of the run: what is found later pays for too few
            steps.
        sure_s: a run of unknown length that ends sooner is not tuned.
        noise: A/A noise above which an answer holds for this run only.
        compile_s: how long a compilation may take, and how long for each module of the model.
        calls: the share of a step that a few samples take where calls are what takes long.
        trace_s: about what tracing a step takes, which training waits for.
        capture_s: about what compiling a step beside the run takes.
        ask_every: how many steps apart that child is asked whether it is done.
        worth_s: how long an evaluation lasts before another size of batches is tried in it.
        visit_s: after a fit, how long steps of one size are timed at a time.
        ranks_s: after a fit, how long steps of ranks beside each other are timed.
        slow_share: a Keras metric is slow that takes more than this share of the rest of a step.
        slow_bytes: what is kept for it before it is updated with many batches.
        spells_s: seconds in turn for which a child that compiles runs and is held up.
    """

    clock: Callable[[], float] = perf_counter
    cpu_clock: Callable[[], float] = process_time
    input_s: Callable[[Lanes], tuple[float, float]] = _input_s
    has_bf16_units: Callable[[torch.device], bool] = _has_bf16_units
    starts_cold: Callable[[torch.device], bool] = _starts_cold
    known_rates: Callable[[str, int], Mapping[str, Any] | None] = known_rates
    machine_rates: Callable[[str, int], Any] = machine_rates
    may_fork: bool = True
    longest_s: float = 6.0
    before_share: float = 0.05
    fewest_steps: int = 40
    few_far_slower: float = 4.0
    least_frozen_s: float = 1.0
    short_share: float = 0.036
    fixed_s: float = 0.3
    block_s: float = 0.04
    most_steps: int = 200
    most_pairs: int = 16
    searched: float = 0.5
    sure_s: float = 1.0
    noise: float = 0.2
    compile_s: tuple[float, float] = (30.0, 1.0)
    calls: float = 0.4
    trace_s: float = 1.0
    capture_s: float = 40.0
    ask_every: int = 20
    worth_s: float = 0.2
    visit_s: float = 0.15
    ranks_s: float = 1.5
    slow_share: float = 0.5
    slow_bytes: int = 64 << 20
    spells_s: tuple[float, float] = (1.5, 0.25)


TERMS = Terms()
