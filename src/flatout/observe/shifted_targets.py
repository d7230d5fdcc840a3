"""Targets that are the model's input tokens shifted by one, found in the graph of a loss.

Values show which output of the model is compared with which token: the log-probabilities that the
loss has saved match this output, and not the model's next output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from flatout.observe.graph_nodes import nearest_nodes
from flatout.observe.padding import most_common
from flatout.observe.saved import saved_number

# Maximum number of nodes of a graph that are searched.
_NODES = 256
_NLL = ("NllLossBackward0", "NllLoss2DBackward0")
_LOSSES = (*_NLL, "GatherBackward0")
# _TOKENS: minimum number of tokens of a sequence; _TARGETS: minimum number of compared targets;
# _VALUES: minimum number of different targets; _ROWS: maximum number of samples in which a token is
# chosen.
_TOKENS, _TARGETS, _VALUES, _ROWS = 4, 32, 4, 64
# Smallest share of tokens that differ from the token before: otherwise a shift cannot be detected.
_DIFFERING = 0.25
# _COMPARED: number of outputs that are compared with the outputs in the loss; _NEARER: largest
# distance to the loss's values, as a share of the distance between neighboring outputs.
_COMPARED, _NEARER = 8, 0.1

Path = tuple[Any, ...]


@dataclass
class Place:
    """A token of a batch, and the output of the model that is to predict it.

    Attributes:
        given: arguments of the model's call, without graphs.
        path: keys and indices that lead to the tokens in `given`.
        tokens: the tokens, as [samples, tokens].
        is_first: whether the first dimension of the model's input is the samples.
        row, at: index of the sample, and position of the output that is to predict the token `at +
            1`.
        other: a token that can replace the token `at + 1`.
        output: index of the tensor in the model's output, and the order of its dimensions.
        shape: number of samples, of outputs per sample, and of classes.
        targets: number of targets that were compared with the tokens.
    """

    given: dict[str, Any]
    path: Path
    tokens: Any
    is_first: bool
    row: int
    at: int
    other: int
    output: tuple[int, str]
    shape: tuple[int, int, int]
    targets: int

    def given_with(self, torch: Any, token: int) -> dict[str, Any]:
        """Return the arguments of the model's call with this token replaced."""
        tokens = self.tokens.clone()
        tokens[self.row, self.at + 1] = token
        plain = tokens if self.is_first else tokens.t().contiguous()
        return dict(_with(self.given, self.path, plain))

    @property
    def token(self) -> int:
        """The token that can be replaced."""
        return int(self.tokens[self.row, self.at + 1])


class _Told(NamedTuple):
    """Targets of a loss, and the log-probabilities that the loss compares with these targets."""

    targets: Any
    logarithms: Any
    ignored: int | None


class _Shift(NamedTuple):
    """Match of targets and tokens, both as [samples, positions]; `places` are target indices."""

    path: Path
    tokens: Any
    is_first: bool
    targets: Any
    places: Any
    counts: Any


def place_in(torch: Any, module: Any, given: dict[str, Any], gave: Any, root: Any) -> Place | None:
    """Return a replaceable token of the model's input that the model is to predict."""
    nodes = nearest_nodes(root, _NODES, lambda node: node.name() in _LOSSES)
    losses = [node for node in nodes if node.name() in _LOSSES]
    told = _told_by(losses[0]) if len(losses) == 1 else None
    kept = plain(torch, given)
    if told is None or kept is None:
        return None
    shifts = [
        shift
        for path, tensor in tensors_in(torch, kept)
        if not _is_label(path)
        for shift in _shifts(torch, path, tensor, told)
    ]
    if len({shift.path for shift in shifts}) != 1:
        return None  # one of several inputs may belong to an encoder, which may see all tokens
    outputs = [tensor for _, tensor in tensors_in(torch, gave)]
    for shift in shifts:
        rows, length = (int(size) for size in shift.tokens.shape)
        for size in dict.fromkeys((length, int(shift.targets.shape[1]))):
            shape = rows, size, int(told.logarithms.shape[1])
            for number, output in enumerate(outputs):
                for name, view in as_rows(output.detach(), shape):
                    if _is_compared(torch, view, shift, told):
                        return _chosen(module, kept, shift, (number, name), shape)
    return None


def _told_by(node: Any) -> _Told | None:
    if node.name() in _NLL:
        targets, logarithms = node._saved_target, node._saved_self
        if logarithms.dim() == 4:
            logarithms = logarithms.permute(0, 2, 3, 1)
        ignored = saved_number(node, "ignore_index")
    else:
        targets, logarithms = node._saved_index, node._saved_self
        if targets.dim() != logarithms.dim() or targets.shape[-1] != 1:
            return None
        ignored = None
    logarithms = logarithms.reshape(-1, logarithms.shape[-1])
    targets = targets.reshape(-1)
    return _Told(targets, logarithms, ignored) if len(logarithms) == len(targets) else None


def _shifts(torch: Any, path: Path, tensor: Any, told: _Told) -> Iterator[_Shift]:
    if tensor.dim() != 2 or tensor.dtype not in (torch.int64, torch.int32):
        return
    number = torch.arange(len(told.targets), device=told.targets.device)
    for is_first in (True, False):
        tokens = tensor if is_first else tensor.t()
        rows, length = (int(size) for size in tokens.shape)
        if length < _TOKENS:
            continue
        for size in (length, length - 1):
            if rows * size != len(told.targets):
                continue
            for by_row in (True, False):
                shape = (rows, size) if by_row else (size, rows)
                both = [item.view(shape) for item in (told.targets, number)]
                targets, places = both if by_row else [item.t() for item in both]
                counts = _counts(tokens, targets, told.ignored)
                if counts is not None:
                    yield _Shift(path, tokens.clone(), is_first, targets, places, counts)


def _counts(tokens: Any, targets: Any, ignored: int | None) -> Any:
    size = targets.shape[1]
    following = tokens[:, 1 : size + 1]
    targets = targets[:, : following.shape[1]]
    # Padding may stand where the last target of a row is an end-of-sequence token.
    filling = (tokens == tokens[:, -1:]).flip(1).int().cummin(1).values.flip(1).bool()
    counts = (targets != (-1 if ignored is None else ignored)) & ~filling[:, 1 : size + 1]
    told = targets[counts]
    if len(told) < _TARGETS or not bool((told == following[counts]).all()):
        return None
    differs = (following != tokens[:, : following.shape[1]])[counts]
    is_one = float(differs.float().mean()) >= _DIFFERING
    return counts if is_one and len(told.unique()) >= _VALUES else None


def _is_compared(torch: Any, output: Any, shift: _Shift, told: _Told) -> bool:
    with torch.no_grad():
        at = shift.counts[:, :-1].nonzero()
        at = at[:: max(1, len(at) // _COMPARED)][:_COMPARED]
        if not len(at):
            return False
        rows, places = at.t()
        saved = told.logarithms[shift.places[rows, places]]
        own = output[rows, places].to(saved.dtype).log_softmax(1)
        neighbors = output[rows, places + 1].to(saved.dtype).log_softmax(1)
        apart = (saved - own).abs().max(1).values
        others = (saved - neighbors).abs().max(1).values
        return bool(apart.max() < _NEARER * others.median())


def _chosen(
    module: Any, given: dict[str, Any], shift: _Shift, output: tuple[int, str], shape: Any
) -> Place | None:
    tokens, counts = shift.tokens[:_ROWS].cpu(), shift.counts[:_ROWS].cpu()
    marks = _marks(module, tokens)
    following = tokens[:, 1 : counts.shape[1] + 1]
    usable = counts.clone()
    for mark in marks:
        usable &= following != mark
    usable[:, -1] = False  # the chosen token must not be the last
    values = following[usable].unique()
    if len(values) < _VALUES:
        return None
    found = usable.nonzero()
    middle = (found[:, 1] - tokens.shape[1] // 2).abs().argmin()
    row, at = (int(item) for item in found[middle])
    token = int(tokens[row, at + 1])
    others = values[values != token]
    other = int(others[len(others) // 2])
    targets = int(shift.counts.sum())
    return Place(
        given, shift.path, shift.tokens, shift.is_first, row, at, other, output, shape, targets
    )


def _marks(module: Any, tokens: Any) -> set[int]:
    marks = {int(most_common(tokens[:, at].numpy())) for at in (0, -1)}
    for first, second in ((0, 1), (-1, -2)):
        marks |= {int(item) for item in tokens[tokens[:, first] == tokens[:, second], first]}
    indices = [getattr(inner, "padding_idx", None) for inner in module.modules()]
    return marks | {index for index in indices if isinstance(index, int)}


def _is_label(path: Path) -> bool:
    return any(isinstance(key, str) and ("label" in key or "target" in key) for key in path)


def as_rows(output: Any, shape: tuple[int, int, int]) -> Iterator[tuple[str, Any]]:
    """Yield an output as [samples, positions, classes], for each order that its shape allows."""
    rows, length, classes = shape
    size = tuple(output.shape)
    if not output.is_floating_point():
        return
    if size == (rows, length, classes):
        yield "rows", output
    if size == (length, rows, classes):
        yield "places", output.transpose(0, 1)
    if size == (rows, classes, length):
        yield "classes", output.transpose(1, 2)
    if size == (rows * length, classes):
        yield "flat rows", output.reshape(rows, length, classes)
        yield "flat places", output.reshape(length, rows, classes).transpose(0, 1)


# -- inputs and outputs of a model -----------------------------------------------------------------


def plain(torch: Any, value: Any) -> Any:
    """Return the value without graphs; None for types other than tensors, numbers and strings."""
    try:
        return _plain(torch, value)
    except TypeError:
        return None


def _plain(torch: Any, value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_meta:
        return value.detach()
    if type(value) in (tuple, list):
        return type(value)(_plain(torch, item) for item in value)
    if type(value) is dict:
        return {key: _plain(torch, item) for key, item in value.items()}
    raise TypeError


def tensors_in(torch: Any, value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Return the tensors in nested containers, each with its path."""
    if torch.is_tensor(value):
        yield path, value
    elif isinstance(value, (tuple, list)):
        for at, item in enumerate(value):
            yield from tensors_in(torch, item, (*path, at))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(torch, item, (*path, key))


def _with(value: Any, path: Path, new: Any) -> Any:
    if not path:
        return new
    first, *rest = path
    if isinstance(value, dict):
        return {**value, first: _with(value[first], tuple(rest), new)}
    items = list(value)
    items[first] = _with(items[first], tuple(rest), new)
    return type(value)(items)
