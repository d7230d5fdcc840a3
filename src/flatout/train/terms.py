"""The clocks, the facts of the machine and the limits that `auto` uses.

A Loop holds them and passes them on with the Budget of a search. Users have no reason to change
them. A test of a Loop or a Trainer replaces clocks, facts of the machine and limits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any

import torch

from flatout.measure import fingerprint, known_rates, machine_rates
from flatout.train.part import Lanes


def is_ampere(device: torch.device) -> bool:
    """Return True if a GPU has units for TF32 and bf16."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _has_bf16_units(device: torch.device) -> bool:
    if device.type == "cuda":
        return is_ampere(device)
    instructions = fingerprint().as_dict().get("instructions", ())
    return any(name in instructions for name in ("amx_bf16", "avx512_bf16", "bf16"))


def _starts_cold(device: torch.device) -> bool:
    """Return True for a GPU, whose first use of kernels takes up to a second to load them."""
    return device.type != "cpu"


def _input_s(lanes: Lanes) -> tuple[float, float]:
    _, fetched, copied, _ = lanes
    return fetched / 1e9, copied / 1e9


@dataclass(frozen=True)
class Terms:
    """The clocks, the facts of the machine and the limits of a trial of settings.

    Attributes:
        clock: returns seconds of wall time.
        cpu_clock: returns seconds of CPU time of this process.
        input_s: returns, from the times of a step by lane, the seconds of waiting for its batches
            and the seconds of copying them to the device.
        has_bf16_units: returns True for a device with units for bf16.
        starts_cold: returns True if the time of a first pass on a device does not predict the next
            pass.
        known_rates: returns the best rates of this machine, or None if they were not measured.
        machine_rates: measures the best rates of this machine, which takes seconds.
        may_fork: True if a child of this process may try settings that ended an earlier run.
        longest_s: maximum seconds of tuning before the first step.
        before_share: maximum time of tuning before the first step, as a fraction of the run's time.
        fewest_steps: minimum number of steps of a run that is tuned.
        few_far_slower: ratio of a few samples' time with an option to their plain time, from which
            the option is not tried on whole batches.
        least_frozen_s: minimum forward seconds of a first epoch for which frozen layers are
            examined.
        short_share: maximum fraction of a short run's time that tuning may take.
        fixed_s: seconds of a longer run that tuning may take in addition to a fraction of its time.
        block_s: the approximate seconds of a block of steps.
        most_steps: maximum number of steps in a block.
        most_pairs: maximum number of rounds of four blocks (A B B A) in a trial. Blocks without a
            difference cost nothing, so the trial continues until noise cannot hide a relevant
            difference.
        searched: fraction of the run after which the search ends, since a later result would be
            used for too few steps.
        sure_s: seconds that a run of unknown length must have lasted before it is tuned.
        noise: relative difference of blocks under equal settings above which a result is not
            cached.
        compile_s: maximum seconds of a compilation, and seconds added for each module of the model.
        calls: fraction of a step's time that a few samples take if most of the time is call
            overhead.
        trace_s: the approximate seconds that training waits for the tracing of a step.
        capture_s: the approximate seconds of compiling a step in a child process.
        ask_every: number of steps between two checks whether that child is done.
        most_compile_s: maximum seconds of a compilation in that child.
        worth_s: seconds that an evaluation must last before another batch size is tried in it.
        visit_s: seconds for which steps of the same batch size are timed without a break, after a
            fit.
        ranks_s: seconds for which steps of simultaneous ranks are timed after a fit.
        slow_share: time of a Keras metric, as a fraction of the rest of the step, above which the
            metric is slow.
        slow_bytes: maximum bytes that are kept before a slow metric is updated with many batches.
        spells_s: seconds for which a compiling child runs, and seconds for which it is then paused.
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
    most_compile_s: float = 600.0
    worth_s: float = 0.2
    visit_s: float = 0.15
    ranks_s: float = 1.5
    slow_share: float = 0.5
    slow_bytes: int = 64 << 20
    spells_s: tuple[float, float] = (1.5, 0.25)


TERMS = Terms()
