"""Records of a Loop with a run folder: its Profile, and lines of the folder's history.

    RUN/profile.json    measurements of this process; during the run, from some time ago.
    RUN/runs.jsonl      two lines for each job that ran here: its begin, and its end.

Rank 0 writes. The other ranks send their records when all ranks communicate anyway: at checkpoints,
and at the end of a fit. There is no thread, and failures to write are ignored.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from time import perf_counter_ns as clock
from typing import Any

import psutil
import torch

from flatout.console import first_line
from flatout.devices import GpuMeter
from flatout.masked import masked, masked_text
from flatout.measure import (
    RUNS,
    Profile,
    RankProfile,
    RanksOnHost,
    Resumed,
    RunState,
    StepTimes,
    Use,
)
from flatout.train import profiled
from flatout.train.history import json_safe
from flatout.train.loop_state import LoopState
from flatout.train.resume.resume import Resume
from flatout.train.signals import Interrupted

# Seconds between successive writes of the Profile. _FIRST_S: between the first writes. _EVERY_S:
# between later writes.
_FIRST_S, _EVERY_S = (2.0, 8.0, 30.0, 120.0), 300.0
_MOST_EPOCHS = 1_000


class RunRecording:
    """Records a prepared Loop, until its end.

    Attributes:
        notes: lines that the user got during training.
        step_times, ranks_on_host: parts of the Profile, once they are measured.
    """

    def __init__(self, loop: LoopState, model: dict[str, Any], sample_bytes: float | None) -> None:
        self._loop = loop
        self._model, self._sample_bytes = model, sample_bytes
        self.notes: list[str] = []
        self.step_times: list[StepTimes] = []
        self.ranks_on_host: list[RanksOnHost] = []
        self._began, self._began_at = time.time(), clock()
        self._startup_s = self._began - psutil.Process().create_time()
        self._first_step = loop.step_count
        self._waited = loop.world.collectives.waited
        self._resumed = None
        if isinstance(loop.resume, Resume):
            self._resumed = Resumed(loop.resume.name, loop.step_count, loop.epoch)
        self._epochs: list[dict[str, Any]] = []
        self._rank_profiles: list[RankProfile] = []
        self._data: dict[str, Any] | None = None
        self._use = Use(_gpu_of(loop.device))
        run = loop.run or ""
        self._folder = Path(run) if "://" not in run and loop.world.is_first else None
        self._writes = 0
        self._write_at = self._began_at + int(_FIRST_S[0] * 1e9)
        self._append_to_history("began")

    @property
    def due(self) -> int:
        """Time on `perf_counter_ns`' clock after which `look` is to be called after a step."""
        return min(self._use.due, self._write_at)

    def look(self) -> None:
        """Measure the resources in use, and write the Profile if enough time has passed."""
        self._use.look()
        if clock() < self._write_at:
            return
        self._writes += 1
        wait = _FIRST_S[self._writes] if self._writes < len(_FIRST_S) else _EVERY_S
        self._write_at = clock() + int(wait * 1e9)
        if self._folder is not None and self._loop.checkpointing.holds:
            with suppress(Exception):  # no failure here may end the job
                self._profile("running", None).write(self._folder)

    def end_epoch(self, figures: Mapping[str, float]) -> None:
        """Keep an epoch's figures, such as `loss`."""
        loop = self._loop
        self._use.look()
        self._epochs.append(
            {
                "epoch": loop.epoch + 1,
                "step": loop.step_count,
                "samples": loop.timeline.samples,
                "at_s": round((clock() - self._began_at) / 1e9, 3),
                **json_safe(figures),
            }
        )
        del self._epochs[:-_MOST_EPOCHS]

    def meet(self) -> None:
        """Gather the records of all ranks; all ranks call it."""
        world = self._loop.world
        if world.size > 1:
            steady = profiled.steady_steps(self._loop)
            own = profiled.rank_profile(self._loop, self._use, self._waited, steady)
            gathered = world.gather(asdict(own), "what ranks record")
            self._rank_profiles = [RankProfile(**item) for item in gathered]

    def close(self, error: BaseException | None) -> None:
        """Write the Profile and how the run ended; without a step, keep the earlier Profile."""
        if self._folder is None or not self._loop.checkpointing.holds:
            return
        try:
            self._use.look()
            self._loop.timeline.settle()
            profile = self._profile(*_ended(error))
            self._append_to_history("ended", profile)
            if self._loop.timeline.steps:
                profile.write(self._folder)
        except Exception as failed:  # no failure here may end the job
            self._loop.say(f"the Profile of the run cannot be written: {first_line(failed)}")

    def _profile(self, state: RunState, error: str | None) -> Profile:
        loop = self._loop
        steady = profiled.steady_steps(loop)
        own = profiled.rank_profile(loop, self._use, self._waited, steady)
        steps, kind, is_over = loop.timeline.steps, profiled.kind_of(loop), state != "running"
        if self._data is None:
            self._data = profiled.data(loop)
        return Profile(
            run=os.path.abspath(loop.run or ""),
            command=masked(sys.argv),
            kind=kind,
            state=state,
            error=error,
            began=round(self._began, 3),
            written=round(time.time(), 3),
            startup_s=round(self._startup_s, 3),
            evaluation_s=round(own.lanes_ms["evaluation"] * steps / 1e3, 3),
            saving_s=round(own.lanes_ms["saving"] * steps / 1e3, 3),
            resumed=self._resumed,
            model=self._model,
            job=profiled.job(loop),
            world=profiled.world(loop),
            versions=profiled.versions(kind),
            network=profiled.network(loop),
            recipe=profiled.recipe(loop),
            data=self._data,
            input={
                "bytes_per_sample": self._sample_bytes,
                **(profiled.input_facts(loop) if is_over else {}),
            },
            communication=profiled.communication(loop),
            steps=profiled.steps(loop, self._first_step, steady, is_over=is_over),
            ranks=[own, *self._rank_profiles[1:]],
            epochs=list(self._epochs),
            notes=[*self.notes, *loop.stepper.notes],
            step_times=self.step_times,
            ranks_on_host=self.ranks_on_host,
        )

    # -- the folder's history ----------------------------------------------------------------

    def _append_to_history(self, event: str, profile: Profile | None = None) -> None:
        if self._folder is None:
            return  # another rank writes
        line: dict[str, Any] = {
            "event": event,
            "id": f"{self._began:.3f}-{os.getpid()}",
            "time": round(time.time(), 3),
        }
        if profile is None:
            line |= {
                "version": 1,
                "command": masked(sys.argv),
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "ranks": self._loop.world.size,
                "model": self._model["name"],
            }
        else:
            rate = profile.steps.samples_per_s
            line |= {
                "state": profile.state,
                "error": profile.error,
                "steps": profile.steps.last - profile.steps.first + 1,
                "last_step": profile.steps.last,
                "samples_per_s": None if rate is None else rate[1],
                "recipe": (profile.recipe or {}).get("summary"),
                "figures": profile.epochs[-1] if profile.epochs else {},
            }
        with suppress(OSError):
            # A single write keeps the line whole while other processes append too.
            file = os.open(self._folder / RUNS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                os.write(file, json.dumps(json_safe(line)).encode() + b"\n")
            finally:
                os.close(file)


def _gpu_of(device: torch.device) -> Any:
    if device.type != "cuda":
        return None
    result = torch.cuda.get_device_properties(device)
    uuid = str(getattr(result, "uuid", ""))
    meter = GpuMeter(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")

    def read() -> tuple[float | None, int | None]:
        busy, used = meter.read()
        if used is None:  # NVML cannot report it, but CUDA can
            free, total = torch.cuda.mem_get_info(device)
            used = total - free
        return busy, used

    return read


def _ended(error: BaseException | None) -> tuple[RunState, str | None]:
    if error is None:
        return "ended", None
    if isinstance(error, Interrupted | KeyboardInterrupt):
        return "interrupted", None
    return "failed", masked_text(first_line(error))
