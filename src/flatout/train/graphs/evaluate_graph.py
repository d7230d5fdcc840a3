"""Runs the forward of an evaluation as one compiled graph, where that is measured faster.

Within `EvaluateGraph.over` the model's calls are timed. If compiling would save time in the
remaining calls, the forward is traced (forward_graph.py) and compiled by a child process, as steps
are (capture.py). Once the graph is compiled, it is compared with an eager call. It is then timed
against eager calls in the order A B B A, on the evaluation's own batches. Only the samples of the
comparison are computed twice. The result is kept next to the package, for later processes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves

from flatout.cache_folder import keep_text, kept_text
from flatout.console import first_line
from flatout.measure import TrialResult, available_bytes, fingerprint, quadruples, usable_cpus
from flatout.models import OperatorTimes, uncompiled
from flatout.train.evaluate_batch import are_close
from flatout.train.graphs.capture import (
    BEHIND,
    BESIDE,
    FAILURES,
    KIND,
    Compiling,
    kept_package,
    lends_cpu,
    loaded,
    remove_package,
)
from flatout.train.graphs.capture_child import OPTIONS
from flatout.train.graphs.capture_graph import PLAIN_TYPES, Graph, Tensors, Unfit, shapes_of
from flatout.train.graphs.compile_pauses import CompilePauses
from flatout.train.graphs.forward_graph import Attributes, held_by, trace_forward
from flatout.words import duration

# _WORTH_S: minimum seconds of eager calls before compiling is considered. _FEW: minimum number of
# eager calls before compiling is considered.
_WORTH_S, _FEW = 0.5, 4
# Minimum expected seconds of remaining forward calls for which the forward is traced.
_LEAST_S = 10.0
# _COMPILE_S: estimated seconds of a compilation. _SLOWED: fraction of these seconds that calls lose
# meanwhile if a CPU is left for the child. _SAVED: fraction of the time outside kernels that a
# graph is expected to save.
_COMPILE_S, _SLOWED, _SAVED = 25.0, 0.05, 0.25
# The expected saving in seconds must be at least this multiple of the cost.
_REPAID = 2.0
# _MOST_FORMS: maximum number of forms of calls (tensors of the same shapes) that are distinguished.
# _MOST_GRAPHS: maximum number of forms that are traced.
_MOST_FORMS, _MOST_GRAPHS = 16, 4
# Seconds between two polls of the child.
_ASK_S = 0.25
# _CHECK_EVERY: number of calls by the graph between two comparisons with an eager call.
# _CHECK_AGAIN: number of calls by the graph after which a new evaluation begins with a comparison.
_CHECK_EVERY, _CHECK_AGAIN = 1000, 16
# _BLOCK_S: seconds of a trial's block. _LEAST_GAIN: minimum gain that counts, as a fraction of the
# time. _UNCLEAR: if the upper bound of a lost trial's ratio reaches this value, a later process
# repeats the trial.
_BLOCK_S, _LEAST_GAIN, _UNCLEAR = 0.05, 0.02, 1.05
# Maximum fraction of the free memory for the second copy of the weights, which the child holds.
_SHARE = 0.25

# Tree spec of a call whose only argument is a tensor.
_OF_ONE = tree_flatten(((None,), {}))[1]

Call = Callable[[], Any]


class EvaluateGraph:
    """Runs a model's calls within evaluations by compiled graphs, once these are compiled.

    Attributes:
        passes_left: number of similar evaluations that are planned after the present evaluation;
            None if unknown. Then the remaining calls are expected to take at least the time of the
            calls until now.
        is_asked: whether graphs are compiled even if that saves no time.
        may_lend: whether calls may run on one thread less while a graph is compiled.
        graphs: number of traced graphs.
    """

    def __init__(
        self,
        tell: Callable[[str], None],
        may_begin: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.tell, self.may_begin, self.clock = tell, may_begin, clock
        self.passes_left: int | None = None
        self.is_asked = False
        self.may_lend = True
        self.graphs = 0
        self._model: nn.Module | None = None
        self._forms: list[_Form] = []
        self._samples: int | None = None
        self._seen = 0
        self._context: tuple[Any, int] = (None, torch.get_num_threads())
        self._is_within = self._is_lent = False

    @contextmanager
    def over(self, model: nn.Module, samples: int | None) -> Iterator[None]:
        """Let compiled graphs make the model's calls within this context."""
        if model is not self._model:
            self.close()
            self._model, self._forms = model, []
        half = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        self._context = (half, torch.get_num_threads())
        self._samples, self._seen = samples, 0
        self._is_within = True
        self._forms = [form for form in self._forms if form.resume(self._context)]
        self.lend()
        model._compiled_call_impl = self._call
        try:
            yield
        finally:
            model._compiled_call_impl = None
            for form in self._forms:
                form.hold(True)
            self._is_within = False
            self.lend()

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        assert self._model is not None

        def call() -> Any:
            return self._model._call_impl(*args, **kwargs)  # type: ignore[union-attr]

        if len(args) == 1 and not kwargs and torch.is_tensor(args[0]):
            leaves, spec = [*args], _OF_ONE
        else:
            leaves, spec = tree_flatten((args, kwargs))
        form = self._form_of(leaves, spec)
        if form is None:
            return call()
        self._seen += form.samples
        if self.may_begin():  # else input sizes are being compared
            form.seen += form.samples
        return form(leaves, call)

    def _form_of(self, leaves: list[Any], spec: Any) -> _Form | None:
        parts: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                parts.append((tuple(leaf.shape), leaf.stride(), leaf.dtype))
            elif isinstance(leaf, PLAIN_TYPES):
                parts.append((type(leaf), leaf))
            else:
                return None
        key = (*self._context, parts, spec)
        for form in self._forms:
            if form.key == key:
                return form
        if len(self._forms) >= _MOST_FORMS:
            return None
        assert self._model is not None
        self._forms.append(_Form(self, self._model, key, leaves, spec))
        return self._forms[-1]

    def left_s(self, form: _Form) -> float:
        """Return the seconds that the remaining calls of a form will take at the present speed.

        Of the remaining samples, the same fraction as until now is expected to have this form.
        """
        if self._samples is None or not form.samples:
            return form.spent_s
        left = max(0, self._samples - self._seen) + (self.passes_left or 0) * self._samples
        share = form.seen / sum(form.seen for form in self._forms)
        known = share * left / form.samples * form.spent_s / form.calls
        return known if self.passes_left is not None else max(known, form.spent_s)

    def is_free(self) -> bool:
        """Return whether a compilation may start now."""
        return self.may_begin() and not any(form.is_compiling for form in self._forms)

    def lend(self) -> None:
        """Leave a CPU to a compiling child, or take it back: OpenMP threads that wait spin."""
        threads = self._context[1]
        lends = self.lends and any(form.is_beside for form in self._forms)
        if self._is_lent != (self._is_within and lends):
            self._is_lent = not self._is_lent
            torch.set_num_threads(threads - 1 if self._is_lent else threads)

    @property
    def lends(self) -> bool:
        """Whether calls run on one thread less while a child compiles."""
        return lends_cpu(self._context[1], self.may_lend)

    def records(self) -> list[dict[str, Any]]:
        """Return the outcome of each form of calls that took longer than a moment, as plain data.

        Each record has `samples` of a call, `seconds` of the eager calls, and `chosen` ("a" eager,
        "b" the graph). `why` is the reason why the graph is not used, and `is_open` is True while
        the graph may still come. `compile_s` is the seconds of compiling. `lost_s` is the seconds
        lost to tracing and to slowed calls. Figures of a trial are included if it was made.
        """
        return [form.record() for form in self._forms if form.spent_s >= _WORTH_S]

    def close(self) -> None:
        """End all compilations; they may begin again."""
        for form in self._forms:
            form.close()


class _Form:
    """Calls whose tensors have the same shapes.

    Attributes:
        key: context, shapes and argument structure that the calls share.
        samples: number of samples of a call.
        seen: samples of all calls, except those made while input sizes were compared.
        calls, spent_s: number of eager calls, and their total seconds.
        why: the reason why all further calls stay eager; "" while a graph may still be used.
    """

    def __init__(
        self, owner: EvaluateGraph, model: nn.Module, key: Any, leaves: list[Any], spec: Any
    ) -> None:
        self._owner, self._model, self.key, self._spec = owner, model, key, spec
        sizes = [len(leaf) for leaf in leaves if torch.is_tensor(leaf) and leaf.dim()]
        self.samples = sizes[0] if sizes else 0
        self.seen, self.calls, self.spent_s = 0, 0, 0.0
        self.why = self._waits = ""
        self._judge_at, self._is_due = _WORTH_S, False
        self._made: _TracedForward | None = None
        self._compiling: Compiling | None = None
        self._spells, self._ask_at = CompilePauses(), 0.0
        self._compile_s = self._traced_s = self._may_lose_s = 0.0
        self._program: _Program | None = None
        self._trial: _Trial | None = None
        self._result: dict[str, Any] = {}
        self._left = 0

    def __call__(self, leaves: list[Any], call: Call) -> Any:
        if self._program is None:
            return call() if self.why else self._eager(leaves, call)
        if self._left <= 0:
            return self._compared(leaves, call)
        self._left -= 1
        if self._trial is not None:
            return self._measured(leaves, call)
        output = self._by_graph(leaves)
        return call() if output is ... else output

    def _eager(self, leaves: list[Any], call: Call) -> Any:
        """Make an eager call, and do the next step towards a compiled graph."""
        if self._is_due:
            return self._looked_at(leaves, call)
        began = self._owner.clock()
        output = call()
        took = self._owner.clock() - began
        if self._compiling is not None:
            self._wait(took)
            return output
        self.calls += 1
        self.spent_s += took
        if self.spent_s >= self._judge_at and self.calls >= _FEW and self._owner.is_free():
            self._judge_at = 2 * self.spent_s
            left_s = self._owner.left_s(self)
            self._is_due = self._owner.is_asked or left_s >= _LEAST_S
            if not self._is_due:
                self._waits = (
                    f"about {duration(left_s)} of forward passes are left, too short to "
                    "repay compiling"
                )
        return output

    def _looked_at(self, leaves: list[Any], call: Call) -> Any:
        """Make a call while timing its kernels; trace it, and compile it if that may save time."""
        self._is_due = False
        before, times = Attributes(self._model), OperatorTimes()  # type: ignore[no-untyped-call]
        began = self._owner.clock()
        with times:
            output = call()
        kernels = times.kernels_s / max(1e-9, self._owner.clock() - began)
        with self._giving_up():
            if not before.hold():
                raise Unfit("forward changes an attribute of a module")
            if self._made is None:
                self._trace(leaves, before)
            self._get(kernels)
        return output

    def _trace(self, leaves: list[Any], attributes: Attributes) -> None:
        if self._owner.graphs >= _MOST_GRAPHS:
            raise Unfit("shapes, settings or the model change again and again")
        self._owner.graphs += 1
        began = self._owner.clock()
        with uncompiled(self._model):
            graph = trace_forward(self._model, leaves, self._spec)
        facts = (fingerprint().digest, torch.__version__, torch.get_num_threads(), OPTIONS)
        versions = [tensor._version for tensor in graph.constants.values()]
        self._made = _TracedForward(graph, graph.digest("forward", *facts), attributes, versions)
        self._traced_s = self._owner.clock() - began

    def _get(self, kernels: float) -> None:
        """Load the package of an earlier process, or start compiling a package."""
        assert self._made is not None
        known = self._made.answer()
        if known is not None and known["chosen"] == "a":
            self._result = known
            raise Unfit(f"an earlier run measured the compiled graph {known['ratio']:.2f}x as fast")
        if (package := kept_package(self._made.digest)) is not None:
            self._result = known or {}
            self._load(package)
            return
        self._waits = "" if self._owner.is_asked else self._objection(kernels)
        if self._waits:
            return
        has_cpu = usable_cpus() > torch.get_num_threads() or self._owner.lends
        self._compiling = self._made.compiled(behind=has_cpu)
        self._owner.lend()

    def _objection(self, kernels: float) -> str:
        left_s = self._owner.left_s(self)
        saved_s = _SAVED * max(0.0, 1.0 - kernels) * left_s
        threads = torch.get_num_threads()
        slowed = _SLOWED if usable_cpus() > threads else 1 / threads
        self._may_lose_s = saved_s / _REPAID
        if saved_s >= _REPAID * slowed * _COMPILE_S:
            return ""
        return (
            f"about {duration(left_s)} of forward passes are left, {kernels:.0%} of that in "
            "kernels that a compiled graph would call too: too short to repay compiling"
        )

    def _wait(self, took: float) -> None:
        assert self._compiling is not None
        is_over, now = self._spells.count(took), self._owner.clock()
        if not is_over and now < self._ask_at:  # limits the cost of polling for short calls
            return
        self._ask_at = now + _ASK_S
        with self._giving_up():
            self._compile_s = self._compiling.seconds
            path = self._compiling.done()
            if path is not None:
                self._compiling = None
                self._owner.lend()
                self._load(path)
            elif self._spells.cost_s > self._may_lose_s and not self._owner.is_asked:
                raise Unfit(
                    f"compiling cost the evaluation {duration(self._spells.cost_s)}: too much"
                )
            elif is_over:
                self._spells.is_alone = not self._spells.is_alone
                self._compiling.hold(self._spells.is_alone)
                self._owner.lend()

    def _load(self, path: Path) -> None:
        assert self._made is not None
        self._program = _Program(path, self._made.graph, self._model)
        self._left = 0

    # -- calls by the graph ------------------------------------------------------------------

    def _by_graph(self, leaves: list[Any]) -> Any:
        assert self._program is not None
        with self._giving_up():
            return self._program(leaves)
        return ...

    def _compared(self, leaves: list[Any], call: Call) -> Any:
        """Make a call eagerly and by the graph, and compare the outputs."""
        ours, wanted = self._by_graph(leaves), call()
        if self._program is None or ours is ...:
            return wanted
        parts = zip(tree_leaves(ours), tree_leaves(wanted), strict=False)
        if tree_flatten(ours)[1] != tree_flatten(wanted)[1] or not all(
            are_close(a, b) if torch.is_tensor(a) else a == b for a, b in parts
        ):
            self._give_up("outputs would differ by more than rounding")
            return wanted
        self._left = _CHECK_EVERY
        if not self._result and self._trial is None:
            self._trial = _Trial()
        return wanted

    def _measured(self, leaves: list[Any], call: Call) -> Any:
        assert self._trial is not None
        began = self._owner.clock()
        output = call() if self._trial.side == "a" else self._by_graph(leaves)
        if output is ...:
            return call()
        result = self._trial.count(self._owner.clock() - began)
        if result is not None:
            self._trial = None
            self._settle(result)
        return output

    def _settle(self, result: TrialResult) -> None:
        assert self._made is not None
        chosen = "b" if result.wins else "a"
        self._result = {**result.figures, "chosen": chosen}
        if result.wins or result.high < _UNCLEAR:
            self._made.keep(self._result)
        if not result.wins:
            remove_package(self._made.digest)
            self._give_up(f"the compiled graph was measured {result.words} as fast")
            return
        how = (
            f"compiled in {duration(self._compile_s)} while evaluation went on"
            if self._compile_s
            else "from the cache"
        )
        self._owner.tell(
            f"evaluation: {self.samples:,} samples at a time run as one compiled graph: measured "
            f"{result.words} as fast; {how}; result: rounding"
        )

    # -- between evaluations -----------------------------------------------------------------

    def resume(self, context: tuple[Any, int]) -> bool:
        is_current = self._made is None or self._made.is_current()
        if self.key[: len(context)] != context or not is_current:
            self.close()
            return False
        if self._left <= _CHECK_EVERY - _CHECK_AGAIN:
            self._left = 0
        if self._program is not None:
            with self._giving_up():
                self._program.bind()
        self.hold(False)
        return True

    def hold(self, holds: bool) -> None:
        if self._compiling is not None:
            self._compiling.hold(holds or self._spells.is_alone)

    @property
    def is_compiling(self) -> bool:
        return self._compiling is not None

    @property
    def is_beside(self) -> bool:
        return self.is_compiling and not self._spells.is_alone

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except FAILURES as error:
            self._give_up(first_line(error))

    def _give_up(self, why: str) -> None:
        self.why, self._program, self._trial = why, None, None
        self.close()
        if self._owner.is_asked:
            self._owner.tell(f"compute.capture: evaluation runs eagerly: {why}")

    def close(self) -> None:
        if self._compiling is not None:
            self._compiling.close()
            self._compiling = None
            self._owner.lend()

    def record(self) -> dict[str, Any]:
        is_used = self._program is not None and self._trial is None
        return {
            "samples": self.samples,
            "seconds": self.spent_s,
            "compile_s": self._compile_s,
            "lost_s": self._traced_s + max(0.0, self._spells.cost_s),
            "is_open": not is_used and not self.why,
            "why": ""
            if is_used
            else self.why or self._waits or "it was not compiled before the evaluation ended",
            **self._result,
            "chosen": "b" if is_used else "a",
        }


@dataclass(frozen=True)
class _TracedForward:
    """A traced forward.

    Attributes:
        digest: name of the compiled package in the cache.
        attributes: attributes of the model's modules at the time of tracing.
        versions: version counters of the graph's constants at the time of tracing.
    """

    graph: Graph
    digest: str
    attributes: Attributes
    versions: list[int]

    def is_current(self) -> bool:
        now = [tensor._version for tensor in self.graph.constants.values()]
        return now == self.versions and self.attributes.hold()

    def answer(self) -> dict[str, Any] | None:
        try:
            data = json.loads(kept_text(KIND, f"{self.digest}.json") or "")
            return data if data["chosen"] in ("a", "b") and data["ratio"] > 0 else None
        except (ValueError, KeyError, TypeError):
            return None

    def keep(self, found: dict[str, Any]) -> None:
        """Keep a trial's result for later processes; failure to write only costs them a trial."""
        with suppress(OSError):
            keep_text(KIND, f"{self.digest}.json", json.dumps(found))

    def compiled(self, *, behind: bool) -> Compiling:
        size = sum(math.prod(shape) * dtype.itemsize for shape, _, dtype in self.graph.inputs)
        if size > _SHARE * available_bytes():
            raise Unfit("a second copy of the weights would take too much of the free memory")
        return Compiling(self.graph, self.digest, BEHIND if behind else BESIDE)


class _Program:
    """A compiled forward, bound to the tensors of a model."""

    def __init__(self, path: Path, graph: Graph, model: nn.Module) -> None:
        self._run, self._graph, self._model = loaded(path), graph, model
        self.bind()

    def bind(self) -> None:
        """Collect the model's weights and buffers, and check their shapes."""
        self._held = list(held_by(self._model).values())
        if shapes_of(self._held) != self._graph.inputs[: len(self._held)]:
            raise Unfit("the weights have other shapes, strides or types than before")

    def __call__(self, leaves: list[Any]) -> Any:
        tensors: Tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        returned = self._run([*self._held, *tensors])
        if not self._graph.reads_ids:
            return self._graph.restore(returned)
        return ... if returned[0].item() else self._graph.restore(returned[1:])


class _Trial:
    """Blocks of eager calls (a) and calls by the graph (b), in the order A B B A.

    Attributes:
        side: "a" if eager calls make the present block, "b" if the graph makes it.
    """

    def __init__(self) -> None:
        self._blocks: Generator[str, float, TrialResult] = quadruples("a", "b", floor=_LEAST_GAIN)
        self.side = next(self._blocks)
        self._took, self._count = 0.0, 0

    def count(self, seconds: float) -> TrialResult | None:
        self._took += seconds
        self._count += 1
        if self._took < _BLOCK_S:
            return None
        each, self._took, self._count = self._took / self._count, 0.0, 0
        try:
            self.side = self._blocks.send(each)
        except StopIteration as end:
            result: TrialResult = end.value
            return result
        return None
