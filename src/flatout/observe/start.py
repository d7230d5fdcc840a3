"""Observe a script: `python -m flatout.observe.start FOLDER [options] [-m] script.py args`.

    --steps N       end the script after N steps;
    --seconds S     end the script S seconds after its first step;
    --ablate S      instead of ending the script then, take lanes out of its steps for S seconds:
                    the training result is no longer that of the script;
    --lapse S       if the first epoch takes longer than the observation, spend the last S seconds
                    on epochs that end early;
    --opened FILE   write the names of the files that the script opens to FILE.

The script runs unchanged otherwise. The observation of this rank is in FOLDER/rank-R.json, as an
Observation. The file is written once a second while the script runs ("running"), and at its end.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import threading
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType

from flatout.console import say
from flatout.hooks import skip_our_frames, when_imported
from flatout.masked import masked
from flatout.observe.ablation import Ablations
from flatout.observe.backward import watch_backward
from flatout.observe.collectives import watch_collectives
from flatout.observe.compiles import Compiles
from flatout.observe.copies import watch_copies
from flatout.observe.cost import Ran, added, hooks_ran
from flatout.observe.device_memory import DeviceMemory
from flatout.observe.device_time import DeviceSteps
from flatout.observe.exit_hooks import watch_exits
from flatout.observe.graphs import Graphs
from flatout.observe.keras import watch_keras
from flatout.observe.lapse import TimeLapse, with_lapse
from flatout.observe.line_sampler import LineSampler
from flatout.observe.loaders import watch_loaders
from flatout.observe.loops import Loops
from flatout.observe.meters import Meters
from flatout.observe.metrics import MetricHooks
from flatout.observe.mistakes import Mistakes
from flatout.observe.models import Models
from flatout.observe.module_times import ModuleTimes
from flatout.observe.observation import BECAME, Observation, Site
from flatout.observe.opened import note_opened
from flatout.observe.optimizers import StepFinder, watch_optimizers
from flatout.observe.other_threads import OtherThreads
from flatout.observe.outputs import watch_garbage, watch_outputs, watch_torch
from flatout.observe.parallel import watch_parallel
from flatout.observe.record import observation
from flatout.observe.repeated_seeds import RepeatedSeeds
from flatout.observe.rewriting import Rewriting
from flatout.observe.run_script import compiled, run, show_as_python_does, traceback_of
from flatout.observe.scalers import Scalers
from flatout.observe.sites import read
from flatout.observe.tensors import IndexWindow, watch_tensors
from flatout.observe.watch import FAILED, FIRST_STEPS, Watch
from flatout.observe.within_loader import watch_workers
from flatout.observe.writing import Writer, write
from flatout.world import place

# Maximum seconds that other threads of an ended script may still run before the process ends.
_GRACE_S = 5.0
# Share of the observed seconds by which the observation ends earlier, where a time-lapse reveals
# more.
_EARLIER = 0.3


@dataclass(frozen=True)
class Asked:
    """Options of the command line, and the command to run."""

    folder: Path
    steps: int | None
    seconds: float | None
    ablate: float | None
    command: list[str]
    opened: Path | None = None
    lapse: float | None = None


def parse(arguments: list[str]) -> Asked:
    """Parse our own options; everything from the script's name on belongs to the script."""
    parser = argparse.ArgumentParser(prog="python -m flatout.observe.start", allow_abbrev=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--ablate", type=float)
    parser.add_argument("--lapse", type=float)
    parser.add_argument("--opened", type=Path)
    parser.add_argument("-m", dest="is_module", action="store_true")
    parser.add_argument("script")
    own = _up_to_script(arguments)
    asked = parser.parse_args(arguments[:own])
    command = [*(["-m"] if asked.is_module else []), asked.script, *arguments[own:]]
    limits = asked.steps, asked.seconds, asked.ablate
    return Asked(asked.folder, *limits, command, asked.opened, asked.lapse)


def _up_to_script(arguments: list[str]) -> int:
    names = 0
    count = 0
    while count < len(arguments) and names < 2:
        if arguments[count] in ("--steps", "--seconds", "--ablate", "--lapse", "--opened"):
            count += 1
        elif not arguments[count].startswith("-"):
            names += 1
        count += 1
    return count


class Observer:
    """Observation of this process."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._place = place()
        self._pid = os.getpid()
        self._is_finished = False
        self._path = asked.folder.absolute() / f"rank-{self._place.rank}.json"
        seconds = asked.seconds
        if seconds is not None and asked.lapse:  # the rest is added without a time-lapse
            seconds *= 1 - _EARLIER
        self.watch = Watch(asked.steps, seconds)
        self.watch.on_enough_again = self._leave
        self._steps = StepFinder(self.watch)
        self._models: Models | None = None
        self._graphs: Graphs | None = None
        self._mistakes: Mistakes | None = None
        self._device: DeviceMemory | None = None
        self._modules: ModuleTimes | None = None
        self._meters = Meters(self.watch)
        self._compiles = Compiles(self.watch)
        self._lines = LineSampler(self.watch)
        self._threads = OtherThreads(self.watch)
        self._scalers = Scalers(self.watch)
        self._seeds = RepeatedSeeds(self.watch)
        watch_copies(self.watch)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._workers = self._path.with_name(f".workers-{self._place.rank}")
        self._workers.mkdir(exist_ok=True)
        self._observed: Observation | None = None
        self._profiled: DeviceSteps | None = None
        self._ablations: Ablations | None = None
        self._lapse: TimeLapse | None = None
        self._loops = Loops(self.watch.lanes)
        self._first_ran: Ran | None = None
        self._compiled: Callable[[bytes, str], CodeType] = compiled
        code = self._rewriting(asked.command) if asked.lapse or asked.ablate else None
        self._code = code
        if asked.lapse and code is not None:
            self._lapse = TimeLapse(self.watch, self._loops, code, asked.lapse)
            self.watch.then = self._look_further
        if asked.ablate:
            where = self._path.parent, self._place
            self._ablations = Ablations(self.watch, *where, asked.ablate, code)
            self.watch.then = self._look_further if asked.lapse else self._ablate
        self._hook()
        self.begin_writing()

    def _rewriting(self, command: list[str]) -> Rewriting:
        rewriting = Rewriting(command)
        rewriting.install(self._loops.around)
        self._compiled = rewriting.code
        return rewriting

    def begin_writing(self) -> None:
        """Begin to write the observation at regular intervals."""
        self._writer = Writer(self._path, self._look_early, self._live, self._place)

    def _note_first(self) -> None:
        self._first_ran = hooks_ran(self.watch)

    def _hook(self) -> None:
        watch, steps = self.watch, self._steps
        watch.at(FIRST_STEPS, self._note_first)
        when_imported("torch", self._hook_torch)
        when_imported("torch.utils.data.dataloader", lambda module: watch_loaders(module, watch))
        when_imported(
            "torch.utils.data._utils.worker",
            lambda module: watch_workers(module, self._workers),
        )
        when_imported("torch._dynamo.eval_frame", skip_our_frames)
        when_imported(
            "keras.src.optimizers.base_optimizer",
            lambda module: watch_keras(module, steps),
        )
        watch_outputs(watch)
        MetricHooks(watch)
        watch_garbage(watch)
        watch_exits(self._ends, self._becomes)
        os.register_at_fork(after_in_child=self._in_child)

    def _hook_torch(self, torch: object) -> None:
        watch_optimizers(torch, self.watch, self._steps)
        watch_backward(torch, self.watch, self._steps)
        watch_tensors(torch, self.watch)
        watch_torch(torch, self.watch)
        watch_parallel(torch, self.watch)
        watch_collectives(torch, self.watch)
        IndexWindow(torch, self.watch)
        self._graphs = Graphs(torch, self.watch, self._meters)
        self._mistakes = Mistakes(torch, self.watch, self._scalers, self._seeds)
        self._models = Models(torch, self.watch)
        self._device = DeviceMemory(torch, self.watch)
        self._modules = ModuleTimes(torch, self.watch)
        self._models.search()
        if self._asked.ablate:
            self._profiled = DeviceSteps(torch, self.watch)

    def _in_child(self) -> None:
        self.watch.lanes.thread = 0  # a forked process is not this rank, so no thread is observed

    def _look_early(self) -> bool:
        if any((loader.facts.num_workers or 0) > 1 for loader in self.watch.loaders):
            self._meters.look_at_job()
        return bool(self.watch.lanes.steps)

    def _live(self) -> Observation:
        self._meters.look_at_job()
        return self._seen(is_live=True)

    def _seen(self, *, is_live: bool) -> Observation:
        result = observation(
            self.watch,
            self._meters,
            masked(self._asked.command),
            self._place,
            self._workers,
            is_live=is_live,
        )
        result.compiles = self._compiles.so_far()
        if self._graphs is not None:
            result.graph_nodes = list(self._graphs.nodes)
            result.graph_site = self._graphs.site and read(self._graphs.site)
        if self._device is not None:
            self.watch.attempt(self._device.fill, result)
        if self._mistakes is not None and not is_live:
            self._mistakes.fill(result)
        if self._code is not None and not is_live:
            self.watch.attempt(self._fill_loops, self._code, result)
        self._add_notes(result)
        return result

    def _add_notes(self, result: Observation) -> None:
        failed = [note for note in self.watch.notes if note.startswith(FAILED)]
        result.notes += [note for note in failed if note not in result.notes]

    def _fill_loops(self, code: Rewriting, result: Observation) -> None:
        result.epoch_loops = [
            (read(Site(*code.loops[number])), turns) for number, turns in self._loops.epochs_of()
        ]
        result.run_steps = self._loops.steps_of_run()

    def _fill_modules(self, modules: ModuleTimes, result: Observation) -> None:
        result.modules = modules.results(result)
        for model in result.models:
            model.pool_ms = modules.ms_of(model.pool_parts, result)

    def _ends(self, is_well: bool) -> None:
        self.finish("done" if is_well else "failed")

    def _becomes(self, program: str) -> None:
        if os.getpid() != self._pid or self._is_finished:
            return
        notes = self.watch.notes
        if program:
            notes[f"{BECAME} ({program}), and what that does is not watched"] = None
            write(self._path, self._seen(is_live=True))
        else:
            for note in [note for note in notes if note.startswith(BECAME)]:
                del notes[note]

    def so_far(self) -> Observation:
        """Return all that was observed until now; to be called between steps."""
        if self._models is not None and self.watch.lanes.steps:
            self.watch.attempt(partial(self._models.describe, whole=True))
        observed = self._seen(is_live=False)
        if observed.steps:
            self.watch.attempt(self._lines.fill, observed)
            self.watch.attempt(self._threads.fill, observed)
            if self._modules is not None:
                self.watch.attempt(self._fill_modules, self._modules, observed)
            self._add_notes(observed)
            aside_s = self._writer.cpu_seconds + self._lines.seconds + self._threads.seconds
            first_s = self._writer.first_seconds
            # Measuring the overhead takes long on a busy machine, and the process may be ended.
            write(self._path, observed)
            observed.added_us_per_step, observed.added_once_ms = added(
                self.watch, aside_s, first_s, self._first_ran
            )
        return observed

    def forget(self) -> None:
        """Discard all that was observed, and begin again."""
        self.watch.renew()
        self._first_ran = None
        self._writer.cpu_seconds = self._writer.first_seconds = 0.0

    def stop_writing(self) -> None:
        """Stop the regular writing, and remove the data for `flatout top`."""
        self._writer.stop()

    def _look_further(self) -> None:
        assert self._lapse is not None
        assert self._asked.seconds is not None
        why_not = self._lapse.why_not()
        if self._place.world_size > 1 and why_not is None:
            why_not = "none where several ranks would have to end their epochs together"
        if why_not is None:
            self._ablate()
            return
        if why_not:
            self.watch.notes[f"time-lapse: {why_not}"] = None
        self._lapse = None
        self.watch.then = self._ablate if self._ablations is not None else None
        self.watch.go_on(_EARLIER * self._asked.seconds)

    def _ablate(self) -> None:
        thread = self.watch.lanes.thread
        self._observed = deepcopy(self._whole("stopped"))
        self.watch.lanes.thread = thread
        write(self._path, self._observed)
        if self._profiled is None:
            self._take_out()
        else:
            self._profiled.begin(self._observed, self._take_out)

    def _take_out(self) -> None:
        assert self._observed is not None
        if self._lapse is not None:
            self.watch.then = self._begin_lapse
        if self._ablations is not None:
            self._ablations.begin(self._observed)
        else:
            self.watch.enough()

    def _begin_lapse(self) -> None:
        assert self._lapse is not None
        if self._ablations is not None:
            self._ablations.put_back()
        self._lapse.begin()

    def finish(self, ended: str, error: str = "") -> None:
        """Write the final observation: how the script ended, and its error."""
        if os.getpid() != self._pid or self._is_finished:
            return
        self._is_finished = True
        if self._observed is None:
            observed = self._whole(ended, error)
            if self._ablations is not None and observed.steps:
                observed.notes.append("ablations: the script ended before anything was taken out")
            if self._asked.seconds and not self._asked.lapse and observed.ended == "stopped":
                observed.notes.append("time-lapse: none where what the script writes is kept")
        else:
            observed = self._with_what_followed(self._observed, error)
        write(self._path, observed)
        shutil.rmtree(self._workers, ignore_errors=True)
        if observed.added_us_per_step is not None:
            say(
                f"observed {observed.steps} steps; "
                f"added {observed.added_us_per_step:.1f} us per step, "
                f"{observed.added_once_ms or 0.0:.0f} ms once"
            )

    def _with_what_followed(self, observation: Observation, error: str) -> Observation:
        lanes = self.watch.lanes
        lanes.end()
        lanes.thread = 0
        if self._profiled is not None:
            self._profiled.end()
        if self._ablations is not None:
            self._ablations.end()
            observation.ablations = self._ablations.results()
            observation.left_out = self._ablations.left_out
            observation.notes += self._ablations.notes
        in_lapse = self._lapse is not None and self._lapse.has_begun
        if error:
            last = error.strip().splitlines()[-1]
            what = "in a time-lapse" if in_lapse else "ablations: with a lane taken out"
            observation.notes.append(f"{what} the script has failed: {last}")
        if in_lapse:
            assert self._lapse is not None
            self._lapse.end()
            later = self._seen(is_live=False)
            observation = with_lapse(observation, later, self._lapse.result(observation, later))
            self._add_notes(observation)
        return observation

    def _whole(self, ended: str, error: str = "") -> Observation:
        self.stop_writing()
        self._lines.stop()
        self._threads.stop()
        lanes = self.watch.lanes
        lanes.end()
        lanes.thread = 0
        observed = self.so_far()
        observed.ended = "no steps" if ended == "done" and not observed.steps else ended
        observed.error = error
        return observed

    def _leave(self) -> None:
        if self._is_finished:  # the process is about to end
            return
        self.finish("stopped")
        end_workers()
        _flush()
        os._exit(0)

    def observe(self) -> int:
        """Run the script; return the exit code if the observation ended it."""
        try:
            run(self._asked.command, self._compiled)
        except BaseException as error:
            if self.watch.is_enough:
                return self._stopped()
            is_fine = isinstance(error, SystemExit) and error.code in (None, 0)
            words = "" if is_fine else traceback_of(error)
            if self._observed is not None:  # the observation itself was complete
                return self._stopped("" if isinstance(error, KeyboardInterrupt) else words)
            self.finish("done" if is_fine else "failed", words)
            raise
        if self.watch.is_enough:
            return self._stopped()
        self.finish("done")
        return 0

    def _stopped(self, error: str = "") -> int:
        self.finish("stopped", error)
        end_workers()
        _end_anyway()
        return 0


def end_workers() -> None:
    """End the processes that the script has started through multiprocessing."""
    children = multiprocessing.active_children()
    for child in children:
        child.terminate()
    for child in children:
        child.join(timeout=1)
        if child.is_alive():
            child.kill()


def _end_anyway() -> None:
    def end() -> None:
        _flush()
        os._exit(0)

    timer = threading.Timer(_GRACE_S, end)
    timer.daemon = True
    timer.start()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue


def main(arguments: list[str]) -> int:
    """Observe a script, and return the exit code."""
    asked = parse(arguments)
    show_as_python_does()
    if asked.opened is not None:
        note_opened(asked.opened)
    return Observer(asked).observe()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
