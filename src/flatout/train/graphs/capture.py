"""Runs steps of a small model as one compiled graph: forward, backward and update.

The graph is traced from the present step (capture_graph.py) and compiled by a child process while
training continues (capture_child.py). A step runs eagerly if its batch has another shape, or if the
model has changed.

Once the graph is compiled, and after every thousand steps from then on, it runs on copies of the
tensors next to an eager step. It is not used if the two differ by more than rounding.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import count
from pathlib import Path
from time import monotonic
from time import perf_counter_ns as clock
from typing import Any

import torch

from flatout import unfinished
from flatout.cache_folder import cache_folder, keep_text, kept_text, kind_folder
from flatout.cache_folder import remove as remove_made
from flatout.console import first_line
from flatout.data import NO_ROWS, Batch
from flatout.measure import fingerprint, usable_cpus
from flatout.optim import scaled
from flatout.recipe import SETTINGS
from flatout.train.compute import ModelCompute
from flatout.train.graphs.capture_child import END, GO_ON, HOLD, OPTIONS
from flatout.train.graphs.capture_graph import (
    STRAY,
    Graph,
    ModuleWatch,
    Unfit,
    places_of,
    shapes_of,
    tensors_of,
    trace,
)
from flatout.train.part import Done
from flatout.train.settings import FIELDS, LIVE
from flatout.train.step import Stepper
from flatout.train.terms import TERMS, Terms
from flatout.words import duration

KIND = "steps"
# Niceness of the child process. BEHIND: if a CPU is left to the child. BESIDE: if the child shares
# all CPUs with this process.
BEHIND, BESIDE = 19, 5
# Seconds that the child has to end on request before it is killed.
_END_S = 1.0
# Number of steps by the graph between two comparisons with an eager step.
_CHECK_EVERY = 1000
# Maximum difference, as a fraction of the change in a step, that counts as rounding. _ROUNDING: for
# losses, buffers and optimizer states. _HALF_ROUNDING: for the same values under autocast.
# _OF_UPDATE: for weights if the optimizer has state, since such an update is a quotient of two
# rounded values.
_ROUNDING, _HALF_ROUNDING, _OF_UPDATE = 0.01, 0.5, 0.5
_EPSILON = 1e-6  # always accepted difference, as a fraction of the values' norm (at least 1)
# Maximum number of graphs that are made in a run, since each change of settings needs a new graph.
_MOST_GRAPHS = 3

# Errors after which steps run without a graph; the run continues.
FAILURES = (Unfit, OSError, RuntimeError)

Tensors = list[torch.Tensor]


class Compiling:
    """A child process that compiles a graph."""

    def __init__(
        self, graph: Graph, digest: str, nice: int = BEHIND, longest_s: float = TERMS.most_compile_s
    ) -> None:
        self._longest_s = longest_s
        self._target = kind_folder(KIND) / f"{digest}.pt2"
        self._folder = self._target.with_name(unfinished.new_name())
        self._folder.mkdir(mode=0o700)
        self._ran_s, self._since = 0.0, monotonic()
        torch.save(
            {
                "code": graph.code,
                "constants": graph.constants,
                "inputs": graph.inputs,
                "threads": torch.get_num_threads(),
                "nice": nice,
            },
            self._folder / "graph.pt",
        )
        variables = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(self._folder / "inductor"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TMPDIR": str(self._folder),
        }
        module = "flatout.train.graphs.capture_child"
        with open(self._folder / "said", "wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(self._folder), str(os.getpid())],
                env=variables,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
            )

    def done(self) -> Path | None:
        """Return the path of the package once it is compiled, else None."""
        status = self._process.poll()
        if status is None:
            if self.seconds > self._longest_s:
                self.close()
                raise Unfit(f"compiling took longer than {duration(self._longest_s)}")
            return None
        try:
            if status:
                raise Unfit(f"compiling failed: {self._last_words(status)}")
            keep_package(self._folder / "step.pt2", self._target.stem)
        except OSError as error:
            raise Unfit(f"compiling failed: {error}") from error
        finally:
            self.close()
        return self._target

    def _last_words(self, status: int) -> str:
        text = (self._folder / "said").read_text(errors="replace")
        errors = re.findall(r"^[\w.]+: .+", text, re.MULTILINE)
        return errors[-1] if errors else f"the process ended with status {status}"

    @property
    def seconds(self) -> float:
        """Seconds since the start, without pauses of the child."""
        return self._ran_s + max(0.0, monotonic() - self._since)

    def hold(self, holds: bool) -> None:
        """Pause the child, or let it continue."""
        self._ran_s, self._since = self.seconds, math.inf if holds else monotonic()
        self._tell(HOLD if holds else GO_ON)

    def _tell(self, what: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # the child has ended
            self._process.stdin.write(what)

    def close(self) -> None:
        """End the child, and remove its files."""
        self._tell(END)
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        remove_made(self._folder)


def loaded(path: Path) -> Callable[[Tensors], Tensors]:
    """Load the function in a package; it takes the graph's inputs."""
    # torch unpacks the package into TMPDIR, and would leave it there if this process were killed.
    folder = kind_folder(KIND) / unfinished.new_name()
    folder.mkdir(mode=0o700)
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)
    try:
        # torch._inductor's loader does the same, after seconds of imports.
        run: Callable[[Tensors], Tensors] = torch._C._aoti.AOTIModelPackageLoader(
            str(path), "model", False, 1, -1
        ).boxed_run
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before
        remove_made(folder)  # the loaded function needs no files
    return run


class Program:
    """A compiled step, bound to the tensors of a run.

    Attributes:
        settings: the settings under which the graph was traced.
        left: number of steps until the next comparison with an eager step.
    """

    def __init__(self, path: Path, graph: Graph, stepper: Stepper, compute: ModelCompute) -> None:
        self._run = loaded(path)
        self._graph, self._stepper, self._compute = graph, stepper, compute
        self.settings = stepper.switch.now.but(capture="on")
        self.bind()
        self._watch = ModuleWatch(compute.modules)
        self._facts = [facts for facts, _ in self._places.groups]
        self._of_batch = graph.inputs[len(self._held) + len(self._groups) :]

    def bind(self) -> None:
        """Collect the tensors of the model and the optimizer, and check that they fit the graph."""
        model, update = self._stepper.switch.model, self._stepper.joint.update
        self._places = places = places_of(model, update)
        self._held = places.tensors()
        if shapes_of(self._held) != self._graph.inputs[: len(self._held)]:
            raise Unfit(
                "the weights or the optimizer's state have other shapes, strides or types than "
                "before"
            )
        if places.alike() != self._graph.alike:
            raise Unfit("the parameters have another number of steps than before")
        self._part, self._optimizer = update.parts[0], update.parts[0].optimizer
        self._state, self._groups = self._optimizer.state, self._optimizer.param_groups
        self._states = len(self._state)
        self._rates = [
            torch.zeros(len(places.kind.rates(group)), dtype=torch.float64)
            for group in self._groups
        ]
        self._known: list[list[float]] = [[] for _ in self._groups]
        self._moved = list(places.parameters.values())
        self._own = [*model.parameters(), *model.buffers()]
        self._lie = [tensor.data_ptr() for tensor in self._own]
        self.left = 0

    def is_current(self) -> bool:
        """Return whether the model and the optimizer's options are those of the graph."""
        facts = self._places.kind.facts
        return (
            self._watch.holds()
            and not self._part.hooked()
            and [facts(group) for group in self._optimizer.param_groups] == self._facts
        )

    def is_bound(self) -> bool:
        """Return whether the model and the optimizer still have the same tensors."""
        optimizer = self._optimizer
        return (
            optimizer.state is self._state
            and optimizer.param_groups is self._groups
            and len(self._state) == self._states
            and [tensor.data_ptr() for tensor in self._own] == self._lie
        )

    def takes(self, batches: Sequence[Batch]) -> bool:
        """Return whether the graph can run on these batches."""
        if len(batches) > 1 or self._stepper.pieces > 1:
            return False
        return self._tensors_of(batches[0]) is not None

    def _tensors_of(self, batch: Batch) -> Tensors | None:
        if batch.padding or batch.copies > 1 or batch.kept is not None or batch.is_jagged:
            return None
        tensors = tensors_of(batch)
        for tensor, (shape, strides, dtype) in zip(tensors, self._of_batch, strict=False):
            if tensor.shape != shape or tensor.stride() != strides or tensor.dtype is not dtype:
                return None
        return tensors if len(tensors) == len(self._of_batch) else None

    def in_a_row(self, step: int) -> Callable[[Batch], tuple[torch.Tensor, Any] | None]:
        """Return a function that makes steps, valid while nothing else changes the model."""
        run, graph, flag = self._run, self._graph, self._places.flag
        held, scale, metrics = self._held, self._stepper.lr_scale, self._compute.metrics
        self._set_rates(step)
        numbers, numbered = count(step + 1), self._rates
        # The weight follows the loss, a number or a tensor; without metrics nothing follows it.
        weight_of_all = graph.behind[0]

        taken = -1

        def make(batch: Batch) -> tuple[torch.Tensor, Any] | None:
            nonlocal taken
            if batch.size == taken:
                tensors = tensors_of(batch)
            elif (result := self._tensors_of(batch)) is not None:
                tensors, taken = result, batch.size
            else:
                return None
            returned = run([*held, *numbered, *tensors])
            if graph.reads_ids and flag.item() == STRAY:
                flag.zero_()
                return None
            self.left -= 1
            if scale is not None:
                self._set_rates(next(numbers))
            if not metrics:
                return returned[0], returned[1] if weight_of_all is ... else weight_of_all
            weight, self._output = graph.restore(returned[1:])
            return returned[0], weight

        return make

    def tell(self) -> None:
        """Mark the weights and the optimizer as changed by steps."""
        # Version counters of the weights show the change.
        torch.autograd.graph.increment_version(self._moved)
        # torch's schedulers check this to see that the optimizer stepped before them.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]

    @torch.no_grad()
    def _set_rates(self, step: int) -> None:
        scale, rates_of = self._stepper.lr_scale, self._places.kind.rates
        with nullcontext() if scale is None else scaled(self._optimizer, scale.at(step - 1)):
            rates = [rates_of(group) for group in self._groups]
        if rates != self._known:
            self._known = rates
            for tensor, own in zip(self._rates, rates, strict=True):
                tensor.copy_(torch.tensor(own, dtype=torch.float64))

    def _inputs(self, tensors: Tensors, batch: Batch, step: int) -> Tensors:
        self._set_rates(step)
        return [*tensors, *self._rates, *tensors_of(batch)]

    def __call__(self, batch: Batch, step: int) -> Done | None:
        """Make a step. Return None, with nothing changed, if an id or label is out of range."""
        start = clock()
        made = self.in_a_row(step)(batch)
        if made is None:
            return None
        self.tell()
        return Done(*made, clock() - start, 0, 0, 0)

    def feed(self, batch: Batch) -> None:
        """Feed the latest step's output to the metrics."""
        if self._compute.metrics:
            self._compute.feed(self._output, batch)
            self._output = None

    @torch.no_grad()
    def rehearse(self, batch: Batch, step: int) -> None:
        """Make a step on copies of the tensors, for `compare`."""
        before = [tensor.clone() for tensor in self._held]
        ours = [tensor.clone() for tensor in self._held]
        loss = self._run(self._inputs(ours, batch, step))[0]
        self._rehearsed = (before, ours, loss)

    def compare(self, wanted: torch.Tensor) -> None:
        """Compare the rehearsed step with the eager step that was made meanwhile."""
        before, ours, loss = self._rehearsed
        del self._rehearsed
        if self._stepper.joint.update.was_bad():
            return
        most = _ROUNDING if self.settings.precision == "fp32" else _HALF_ROUNDING
        sides = self._places.of(before), self._places.of(ours), self._places
        parts = [("the loss", most, [[torch.zeros_like(loss)], [loss], [wanted]])]
        parts.append(("buffers", most, [list(side.others.values()) for side in sides]))
        states = max(map(len, self._places.states.values()))
        for place in range(states):
            columns = [[s[place] for s in side.states.values() if s] for side in sides]
            parts.append(("the optimizer's state", most, columns))
        limit = _OF_UPDATE if states else most
        parts.append(("weights", limit, [list(side.parameters.values()) for side in sides]))
        for what, limit, columns in parts:
            share = _share(*columns)
            if not share <= limit:
                raise Unfit(f"{what} would differ by {share:.0%}: more than rounding")
        self.left = _CHECK_EVERY


class Capture:
    """Makes steps by a compiled graph, once it is compiled.

    Attributes:
        is_asked: whether the user asked for capturing; False where `auto` tries it.
        why: the reason why no step is captured; "" while steps may be captured.
        refused: a batch that the graph is known to refuse.
    """

    def __init__(
        self,
        stepper: Stepper,
        note: Callable[[str], None],
        waits: Callable[[], bool],
        is_asked: bool = True,
        may_lend: bool = True,
        terms: Terms = TERMS,
    ) -> None:
        self._stepper, self._note, self._waits = stepper, note, waits
        self._terms = terms
        self.is_asked, self._may_lend = is_asked, may_lend
        self.why = ""
        self._graph: Graph | None = None
        self._compiling: Compiling | None = None
        self._program: Program | None = None
        self._graphs = 0
        self._is_told = False
        self.refused: Batch | None = None

    def __call__(
        self, eager: Callable[[], Done], compute: Any, batches: Sequence[Batch], step: int
    ) -> Done:
        """Make a step, by the graph if possible."""
        program = self._program
        if program is None:
            done = eager()
            if not self.why:
                with self._giving_up():
                    self._advance(compute, batches, step)
            return done
        if self.is_asked and self._waits():  # trials of other settings are running
            return eager()
        if program.settings != self._stepper.switch.now or not program.is_current():
            self._program = self._graph = None
            return eager()
        if not program.is_bound():
            with self._giving_up():
                program.bind()
            return eager()
        refused, self.refused = self.refused, None
        if batches[0] is refused or not program.takes(batches):
            return eager()
        if program.left > 0:
            captured = None
            with self._giving_up():
                captured = program(batches[0], step)
            if captured is None:
                return eager()
            program.feed(batches[0])
            return captured
        with self._giving_up():
            program.rehearse(batches[0], step)
        done = eager()
        if self._program is None:
            return done
        with self._giving_up():
            program.compare(done.loss)
            if self.is_asked and not self._is_told:
                self._is_told = True
                self._note(f"from step {step + 1:,} on steps run as one compiled graph")
        return done

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except FAILURES as error:
            self.give_up(first_line(error))

    def give_up(self, why: str) -> None:
        """Run steps eagerly from now on, for the given reason."""
        self.close()
        self.why = why
        if self.is_asked:
            self._note(f"compute.capture: steps run eagerly: {why}")

    def at_hand(self) -> Program | None:
        """Return the compiled graph if it can make the next step, else None."""
        program = self._program
        if program is None or program.left <= 0 or self._stepper.pieces > 1:
            return None
        if program.settings != self._stepper.switch.now or not program.is_current():
            return None
        return program if program.is_bound() else None

    def _advance(self, compute: Any, batches: Sequence[Batch], step: int) -> None:
        if self._compiling is not None:
            if step % self._terms.ask_every == 0:
                self._fetch(compute)
        elif not self.is_asked:
            raise Unfit("the model or its settings have changed since it was compiled")
        elif not self._waits():
            self._begin(compute, batches)

    def begin(self, compute: Any, batches: Sequence[Batch]) -> None:
        """Compile the step that was just made; set `why` where that is impossible."""
        with self._giving_up():
            self._begin(compute, batches)

    def is_there(self, compute: Any) -> bool:
        """Return whether the graph is compiled; set `why` where compiling failed."""
        with self._giving_up():
            self._fetch(compute)
        return self._program is not None

    def _fetch(self, compute: Any) -> None:
        if self._compiling is not None and (path := self._compiling.done()) is not None:
            self._compiling = None
            self._lend(False)
            self._load(path, compute)

    def hold(self, holds: bool) -> None:
        """Pause the child, or let it continue."""
        if self._compiling is not None:
            self._compiling.hold(holds)
            self._lend(not holds)

    def _lend(self, lends: bool) -> None:
        threads = self._stepper.switch.now.threads
        if lends_cpu(threads, self._may_lend):
            torch.set_num_threads(threads - 1 if lends else threads)

    @property
    def is_used(self) -> bool:
        """Whether the graph is compiled and used for all steps that it can make."""
        return self._program is not None

    @property
    def compiling(self) -> Compiling | None:
        """The child while it compiles, else None."""
        return self._compiling

    def _begin(self, compute: Any, batches: Sequence[Batch]) -> None:
        if why := self._hindrance(compute, batches):
            raise Unfit(why)
        self._graphs += 1
        stepper, model = self._stepper, self._stepper.switch.model
        update = stepper.joint.update
        places = places_of(model, update)
        self._graph = trace(compute, batches[0], places, update, stepper.switch)
        digest = self._graph.digest(
            fingerprint().digest, torch.__version__, torch.get_num_threads(), OPTIONS
        )
        if (kept := kept_package(digest)) is not None:
            self._load(kept, compute)
        else:
            threads = self._stepper.switch.now.threads
            has_cpu = usable_cpus() > threads or lends_cpu(threads, self._may_lend)
            nice = BEHIND if has_cpu else BESIDE
            self._compiling = Compiling(self._graph, digest, nice, self._terms.most_compile_s)
            self._lend(True)

    def _load(self, path: Path, compute: Any) -> None:
        assert self._graph is not None
        self._program = Program(path, self._graph, self._stepper, compute)

    def _hindrance(self, compute: Any, batches: Sequence[Batch]) -> str:
        stepper, now = self._stepper, self._stepper.switch.now
        if self._graphs >= _MOST_GRAPHS:
            return "settings or the model change again and again"
        if stepper.switch.device.type != "cpu" or not stepper.is_alone:
            return "capturing needs a single rank on a CPU"
        if not isinstance(compute, ModelCompute):
            return "capturing needs a Trainer's loss of one output"
        if compute.hindrance:
            return compute.hindrance
        if len(batches) > 1 or stepper.pieces > 1 or isinstance(stepper.micro_batch, int):
            return "a step is made of several batches or micro-batches"
        if batches[0].kept is not None or batches[0].padding:
            return "the batch holds kept features of frozen layers, or samples that fill it up"
        if batches[0].is_jagged:
            return NO_ROWS
        if stepper.chain.acts_within or stepper.scaler is not None:
            return "Parts within a step (dropout by sample) and fp16's scaled loss are not captured"
        for name, live in LIVE.items():
            if not live.in_graph and getattr(now, name) != SETTINGS[FIELDS[name]].plain:
                return f"{name} is on"
        return ""

    def close(self) -> None:
        """End the child and drop the graph; from now on steps run eagerly."""
        self._program = self._graph = None
        if self._compiling is not None:
            self._compiling.close()
            self._compiling = None
            self._lend(False)


def keep_package(made: Path, digest: str) -> None:
    """Keep a compiled package for later processes, with its checksum."""
    keep_text(KIND, f"{digest}.sum", _checksum(made))
    os.replace(made, kind_folder(KIND) / f"{digest}.pt2")


def kept_package(digest: str) -> Path | None:
    """Return the path of a kept compiled package; None if there is none or it is damaged."""
    path, checksum = cache_folder() / KIND / f"{digest}.pt2", kept_text(KIND, f"{digest}.sum")
    with suppress(OSError):
        if checksum is not None and checksum == _checksum(path):
            return path
    return None


def remove_package(digest: str) -> None:
    """Remove a kept compiled package and its checksum."""
    for ending in ("pt2", "sum"):
        remove_made(cache_folder() / KIND / f"{digest}.{ending}")


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def lends_cpu(threads: int, may_lend: bool) -> bool:
    """Return whether steps run on one thread less while a graph is compiled."""
    return may_lend and threads > 1 and threads >= usable_cpus()


def _share(old: Tensors, new: Tensors, wanted: Tensors) -> float:
    differing, changed, size = (
        math.hypot(*(float((a.double() - b.double()).norm()) for a, b in zip(x, y, strict=True)))
        for x, y in ((new, wanted), (wanted, old), (wanted, [torch.zeros_like(w) for w in wanted]))
    )
    beyond = differing - _EPSILON * max(1.0, size)
    if math.isnan(beyond):
        return beyond
    return 0.0 if beyond <= 0 else beyond / changed if changed else math.inf
