"""Dropout keyed by sample: the dropped elements depend only on seed, step, layer and sample.

They are the same on any number of ranks, in any micro-batches, with or without accumulation, in any
memory format, and after a resume. torch's own dropout draws from a random stream instead, so that
its result depends on all earlier draws of the process.

While a step runs, three things are replaced: torch's dropout functions (which modules and functions
of `torch.nn.functional` call), attention that drops weights, and recurrent layers that drop between
their layers. Outside of a step nothing is replaced.

A checkpointed block runs twice and must drop the same elements twice. torch replays its random
generator in the second run, so each call of dropout draws a number from this generator. A number
that was drawn before identifies the same call.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import _VF, nn
from torch.nn.modules.dropout import _DropoutNd

from flatout.errors import ModelError
from flatout.kernels import Draw, keep
from flatout.kernels.dropout import dropout
from flatout.models.torch_compile import is_compiled

_NAMES = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
_TORCHS = {name: getattr(_VF, name) for item in _NAMES for name in (item, f"{item}_")}
_RECURRENT = {name: getattr(_VF, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")}
_ATTENTION = F.scaled_dot_product_attention
# Absolute value of SELU's limit for large negative inputs (Klambauer et al., "Self-Normalizing
# Neural Networks", 2017).
_ALPHA = 1.7580993408473766


class _DropoutCall(NamedTuple):
    """A call of dropout during `look`: the layer's index and the input."""

    site: int
    given: torch.Tensor


class Layout(NamedTuple):
    """The position of samples in a tensor.

    Attributes:
        axis: the dimension of the samples.
        is_last: whether the dimension is divided by other indices first, so that the sample is the
            index that changes fastest.
    """

    axis: int
    is_last: bool = False


# The default: dimension 0, with the rows of a sample next to each other.
_FIRST = Layout(0)
# No part of the tensor belongs to a single sample: all samples share the same mask.
_SHARED = Layout(-1)
# Samples in the smaller of the two runs of `look`.
_FEW = 2


class SampleDropout:
    """Keys dropout in a model's steps by sample (see above), until `close`.

    Modules, parameters and the keys of the state dict stay the same.

    Args:
        model: the user's own model.
        seed: the job's seed.

    Raises:
        ModelError: the model is compiled.

    Attributes:
        has_calls: whether `look` has found active dropout.
        layouts: the position of samples in the input of each dropout layer, by the layer's index.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.has_calls = False
        self._seed = seed
        self._marked: list[tuple[str, nn.Module]] = []
        self.layouts: dict[int, Layout] = {}
        self._looking: list[_DropoutCall] | None = None
        self._step = self._start = self._size = self._site = self._thread = 0
        self._calls: Counter[int] = Counter()
        self._known: dict[tuple[int, int], int] = {}
        self._functions = {name: _function(self, name) for name in _TORCHS}
        self._functions |= {name: _recurrent(self, name) for name in _RECURRENT}
        for name, module in model.named_modules():
            _refuse(name, module)
            if isinstance(module, (_DropoutNd, nn.MultiheadAttention, nn.RNNBase)):
                self._mark(name, module)

    def _mark(self, name: str, module: nn.Module) -> None:
        if "forward" in vars(module):
            return  # replaced by other code: calls count as calls of the surrounding code
        self._marked.append((f"{name} ({type(module).__name__})", module))
        module.forward = MethodType(_forward(self, len(self._marked)), module)

    def close(self) -> None:
        """Restore the layers' own forward."""
        for _, module in self._marked:
            vars(module).pop("forward", None)

    # -- the position of samples -------------------------------------------------------------------

    def look(self, run: Callable[[int], object]) -> None:
        """Find the position of samples in each layer's input, from two runs on a few samples.

        Args:
            run: runs a forward of the given number of samples and leaves no trace. A larger number
                adds samples at the end.

        Raises:
            ModelError: a layer's input is not divided among samples.
        """
        calls = []
        for count in (_FEW, _FEW + 1):
            self._looking = []
            try:
                with self._replacing():
                    run(count)
            except ModelError:
                raise
            except Exception:
                return  # the first real step will report the error
            finally:
                result, self._looking = self._looking, None
            calls.append(result)
        self.has_calls = bool(calls[0])
        for a, b in zip(*calls, strict=False):
            if a.site == b.site:
                self._place(a.site, _layout(a.given, b.given), a.given.shape)

    def _place(self, site: int, layout: Layout | None, shape: torch.Size) -> None:
        if layout is None or self.layouts.setdefault(site, layout) != layout:
            raise self._cannot(site, shape)

    def _cannot(self, site: int, shape: Sequence[int]) -> ModelError:
        return self.refusal(
            site,
            f"is given a tensor of shape {tuple(shape)}, in which samples cannot be told apart",
            "use its own layer for each shape, with the samples in one dimension",
        )

    def refusal(self, site: int, why: str, do: str) -> ModelError:
        """Return the error for a layer that cannot be keyed by sample."""
        name = self._marked[site - 1][0] if site else "a dropout in a written forward"
        return ModelError(
            f"dropout by sample: {name} {why}", do=f"{do}, or leave Compute(dropout='torch')"
        )

    # -- in a step -----------------------------------------------------------------------------

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Within this context, let dropout draw its masks for the optimizer step of this number."""
        self._step = number
        with self._replacing():
            try:
                yield
            finally:
                self._size = 0
                self._known.clear()

    def at(self, start: int, size: int) -> None:
        """Set the samples of the next forward.

        Args:
            start: index of the first sample among all samples of the step, of all ranks.
            size: number of samples.
        """
        self._start, self._size = start, size
        self._calls.clear()
        self._known.clear()

    @contextmanager
    def _replacing(self) -> Iterator[None]:
        self._thread = threading.get_ident()
        torchs = vars(_VF)
        torchs.update(self._functions)
        F.scaled_dot_product_attention = self._attention
        try:
            yield
        finally:
            F.scaled_dot_product_attention = _ATTENTION
            for name in self._functions:
                del torchs[name]

    def _is_ours(self) -> bool:
        if not self._size and self._looking is None:
            return False
        mine = threading.get_ident() == self._thread
        return mine or torch._C._current_graph_task_id() != -1

    def _draw(self, shape: Sequence[int]) -> Draw:
        if torch.compiler.is_compiling():
            raise ModelError(
                "dropout by sample does not reach into compiled code",
                do="set Compute(compile='off') and train the model itself, or leave "
                "Compute(dropout='torch')",
            )
        site = self._site
        # An id of the call and the layer that is unique in this forward.
        number = self._call(site) * (len(self._marked) + 1) + site
        layout = self.layouts.get(site, _FIRST)
        if layout == _SHARED:
            return Draw(self._seed, self._step, number, 0, 1)
        if len(shape) <= layout.axis or shape[layout.axis] % self._size:
            raise self._cannot(site, shape)
        outer = math.prod(shape[: layout.axis])
        if layout.is_last:
            outer *= shape[layout.axis] // self._size
        return Draw(self._seed, self._step, number, self._start, self._size, outer)

    def _call(self, site: int) -> int:
        ticket = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        known = self._known.get((site, ticket))
        if known is None:
            known = self._known[site, ticket] = self._calls[site]
            self._calls[site] += 1
        return known

    def _drop(self, name: str, x: torch.Tensor, p: float) -> torch.Tensor:
        if self._looking is not None:
            self._looking.append(_DropoutCall(self._site, x.detach().clone()))
            return x
        in_place, kind = name.endswith("_"), name.rstrip("_")
        if kind == "dropout":
            return _Dropped.apply(x, p, self._draw(x.shape), in_place)  # type: ignore[no-any-return, no-untyped-call]
        shape = x.shape[:2] if kind.startswith("feature") else x.shape
        kept = keep(shape, p, self._draw(shape), x.device).to(x.dtype)
        kept = kept.view(*shape, *[1] * (x.dim() - len(shape)))
        multiply, add = (x.mul_, torch.Tensor.add_) if in_place else (x.mul, torch.Tensor.add)
        if kind == "feature_dropout":
            return multiply(kept / (1 - p))
        scale = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p))
        below = _ALPHA * scale
        return add(multiply(kept * scale), (kept - 1) * below + below * p)

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        given: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        if not 0 < dropout_p < 1 or not self._is_ours():
            return _ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, **given)
        if self._looking is not None:
            # Dropout acts on a tensor of this shape; the values do not matter here.
            weights = query.new_zeros(*query.shape[:-1], key.shape[-2])
            self._looking.append(_DropoutCall(self._site, weights))
            return _ATTENTION(query, key, value, attn_mask, 0.0, is_causal, **given)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = query.new_zeros(attn_mask.shape).masked_fill_(~attn_mask, -math.inf)
        # The values have width 0 because only the weights are needed.
        _, weights = torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value[..., :0], attn_mask, 0.0, is_causal, **given
        )
        if enable_gqa:
            value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
        kept = _Dropped.apply(weights, dropout_p, self._draw(weights.shape), False)  # type: ignore[no-untyped-call]
        return kept @ value  # type: ignore[no-any-return]


def _function(draws: SampleDropout, name: str) -> Callable[..., torch.Tensor]:
    def function(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        features = name.startswith("feature")
        plain = not train or not 0 < p < 1 or not x.numel()
        wrong = not (x.is_floating_point() or x.is_complex()) or (features and x.dim() < 2)
        if plain or wrong or not draws._is_ours():
            return _TORCHS[name](x, p, train)  # type: ignore[no-any-return]
        return draws._drop(name, x, p)

    return function


def _recurrent(draws: SampleDropout, name: str) -> Callable[..., Any]:
    run = _RECURRENT[name]

    def function(x: torch.Tensor, state: Any, weights: Any, *options: Any) -> Any:
        # for a packed sequence it is the state, and weights come next
        is_packed = not isinstance(weights, list)
        bias, layers, p, train, *ways = options[is_packed:]
        if not train or not 0 < p < 1 or layers == 1 or not draws._is_ours():
            return run(x, state, weights, *options)
        if is_packed:
            raise draws.refusal(
                draws._site,
                "drops between its layers, in packed sequences, where samples have no place",
                "give it padded sequences",
            )
        result = torch.is_tensor(state)
        # (directions of each layer, samples, features) of each kind of state
        begins = [kind.chunk(layers) for kind in ([state] if result else state)]
        ends = []
        each = len(weights) // layers
        for layer in range(layers):
            begin = [kind[layer] for kind in begins]
            own = weights[layer * each : (layer + 1) * each]
            x, *end = run(x, begin[0] if result else begin, own, bias, 1, 0.0, train, *ways)
            ends.append(end)
            if layer + 1 < layers:
                x = draws._drop("dropout", x, p)
        return x, *(torch.cat(kind) for kind in zip(*ends, strict=True))

    return function


def _forward(draws: SampleDropout, site: int) -> Callable[..., Any]:
    # The name `forward` lets a pickled model find the forward of its class again.
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before, draws._site = draws._site, site
        try:
            return type(self).forward(self, *args, **kwargs)
        finally:
            draws._site = before

    return forward


class _Dropped(torch.autograd.Function):
    """Dropout that keeps nothing for backward, which draws again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, p: float, draw: Draw, in_place: bool) -> torch.Tensor:
        ctx.given = p, draw
        if not in_place:
            return dropout(x, p, draw)
        ctx.mark_dirty(x)
        return dropout(x, p, draw, out=x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _Dropped.apply(gradients[0], *ctx.given, False), None, None, None  # type: ignore[no-untyped-call]


def _layout(a: torch.Tensor, b: torch.Tensor) -> Layout | None:
    if a.shape == b.shape:
        return _SHARED
    differ = [axis for axis, (m, n) in enumerate(zip(a.shape, b.shape, strict=False)) if m != n]
    if a.dim() != b.dim() or len(differ) != 1:
        return None
    axis = differ[0]
    each, rest = divmod(a.shape[axis], _FEW)
    if rest or b.shape[axis] != each * (_FEW + 1):
        return None
    if each == 1:
        return Layout(axis)
    # The second run has an additional last sample. The correct layout is the layout under which the
    # values of the other samples agree in both runs.
    first = _distance(_cut(a, axis, _FEW, each), _cut(b, axis, _FEW + 1, each), axis)
    last = _distance(_cut(a, axis, each, _FEW), _cut(b, axis, each, _FEW + 1), axis + 1)
    return Layout(axis, is_last=last < first)


def _cut(tensor: torch.Tensor, axis: int, *sizes: int) -> torch.Tensor:
    return tensor.reshape(*tensor.shape[:axis], *sizes, *tensor.shape[axis + 1 :])


def _distance(a: torch.Tensor, b: torch.Tensor, axis: int) -> float:
    return float((a - b.narrow(axis, 0, a.shape[axis])).abs().double().sum())


def _refuse(name: str, module: nn.Module) -> None:
    if is_compiled(module):
        raise ModelError(
            "dropout by sample does not reach into compiled code",
            where=name or type(module).__name__,
            do="train the model itself, or leave Compute(dropout='torch')",
        )
