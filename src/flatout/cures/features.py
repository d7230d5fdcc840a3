"""script.features: what leading frozen layers give for a sample is kept, and given again.

A sample is known by its bytes, as a BLAKE2b digest of 16 bytes: who made the batch, and in
which order, is not asked. Before anything kept is given, some batches of it are computed as well:
layers for which a sample depends on the rest of its batch are left alone. Rows are kept in a
`NamedStore`, in memory or on the disk, where other processes and the script's next run find them.
A dataset that gives more samples than it has, of which none comes again, changes them at random:
nothing of it is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any
from weakref import ref

from flatout.cures.dataset_now import DatasetNow
from flatout.cures.record import leave, took
from flatout.cures.roots import Call, Cure
from flatout.cures.steps import Steps
from flatout.data import NamedStore, RowPart, code_digest, feature_key, is_library
from flatout.hooks import is_anything_compiled
from flatout.observe import acts_in_training, frozen_parts

FIELD = "script.features"
# So many batches are computed though all of them is kept.
_CHECKED = 4
# They may differ by so much of the largest number: other batches round otherwise.
_SAME = {"float32": 1e-4, "float64": 1e-8}
_SAME_IN_HALF = 2e-2
# Of how samples are named.
_DIGESTS = 1
# A dataset that has given so many more new samples than it has changes them at random. Batches that
# a loader gave ahead may be counted as another dataset's.
_TOO_MANY, _AHEAD = 1.25, 64
# After so many changes of the weights with no sample that came again between them.
_CHANGES = 3


def cure(torch: Any, steps: Steps) -> Cure:
    """What is put around the calls of root modules."""
    now = DatasetNow()
    now.watch()
    return partial(keep_features, steps.asked[FIELD], now)


def keep_features(
    where: Any,
    now: DatasetNow,
    module: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    call: Call,
) -> Call:
    """Keeps what the frozen leading layers of a root module give.

    Args:
        where: "memory" or "disk".
        now: has the dataset of the latest batch.
        module: the root.
        args: of its first call.
        kwargs: likewise.
        call: what is put in place of.
    """
    import torch

    name = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        leave(FIELD, f"{name} is compiled: its layers cannot be left out")
        return call
    parts = list(frozen_parts(module))
    if not parts:
        leave(FIELD, f"no leading layers of {name} are frozen and in eval mode")
        return call
    if any(tensor.device.type != "cpu" for tensor in module.parameters()):
        leave(FIELD, "on a device, asking which samples these are would make the host wait")
        return call
    kept = [Features(torch, part, where, now) for part in parts]

    def with_features(module: Any, /, *args: Any, **kwargs: Any) -> Any:
        opened = [one for one in kept if one.open()]
        try:
            return call(module, *args, **kwargs)
        finally:
            for one in opened:
                one.close()

    place = "on disk" if where == "disk" else "in memory"
    took(FIELD, f"features of {len(parts)} frozen layers of {name} {place}")
    return with_features


@dataclass
class _Kept:
    """A store of what a module gives in one mode.

    Attributes:
        store: has rows of one part.
        part: what it holds of a sample.
        has_come_again: whether it had a sample when that came.
    """

    store: NamedStore
    part: RowPart
    has_come_again: bool = False


@dataclass
class _Given:
    """What came of a dataset: samples that were new, and those that were kept."""

    new: int = 0
    again: int = 0


class Features:
    """What one frozen module has given, by sample.

    Its `forward` is another one only while its root module is called: no one copies or saves it.
    """

    def __init__(self, torch: Any, part: Any, where: Any, now: DatasetNow) -> None:
        self._torch = torch
        self._part = ref(part)
        self._where = where
        self._now = now
        self._given: dict[int, _Given] = {}  # by dataset
        self._name = type(part).__name__
        self._is_over = False
        self._state: Any = None
        self._kept: dict[Any, _Kept] = {}  # by mode
        self._changes = 0
        self._unchecked = _CHECKED

    def _forget(self) -> None:
        """Let go of what it gave; on the disk it stays."""
        for kept in self._kept.values():
            kept.store.close()
        self._kept = {}
        self._given = {}
        self._unchecked = _CHECKED

    def open(self) -> bool:
        """Puts itself in the way, unless someone else is there."""
        part = self._part()
        if self._is_over or part is None or "forward" in vars(part) or is_anything_compiled():
            return False
        part.forward = partial(self._forward, part.forward)
        return True

    def close(self) -> None:
        """Goes out of the way."""
        vars(self._part()).pop("forward", None)

    def _forward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or not self._is_batch(args[0]) or not self._is_frozen():
            return original(*args, **kwargs)
        (batch,) = args
        samples, mode = digests(batch), self._mode()
        kept, given = self._kept.get(mode), None
        if kept is None:
            given = original(batch)  # only now is known what a row holds
            kept = self._begin(mode, given, len(samples))
            if kept is None:
                return given
        places = kept.store.places(samples)
        again = int((places >= 0).sum())
        kept.has_come_again |= again > 0
        if again < len(samples):
            given = original(batch) if given is None else given
            if not self._is_random(kept, len(samples) - again, again):
                self._keep(kept, samples, given)
            return given
        with self._torch.inference_mode(False), self._torch.no_grad():
            (rows,) = kept.store.get(places)
        if given is None and not self._unchecked:
            return rows
        given = original(batch) if given is None else given
        self._check(given, rows)
        return given

    def _is_batch(self, value: Any) -> bool:
        torch = self._torch
        return (
            type(value) is torch.Tensor
            and value.device.type == "cpu"
            and value.layout is torch.strided
            and value.dim() > 1
            and value.numel() > 0
            and not value.requires_grad
        )

    def _is_frozen(self) -> bool:
        """Whether it is what it was; forgets what it gave where it has changed since."""
        part: Any = self._part()
        tensors = [*part.parameters(), *part.buffers()]
        if any(tensor.requires_grad or tensor.is_inference() for tensor in tensors):
            return False
        if any(acts_in_training(inner) for inner in part.modules()):
            return False
        state = [(id(tensor), tensor._version) for tensor in tensors]
        if self._state not in (None, state):
            has_come_again = any(kept.has_come_again for kept in self._kept.values())
            self._changes = 0 if has_come_again else self._changes + 1
            self._forget()
            if self._changes == _CHANGES:
                self._end(f"the weights of {self._name} change while it trains")
                return False
        self._state = state
        return True

    def _mode(self) -> Any:
        """What the same module gives other features under."""
        torch = self._torch
        part: Any = self._part()
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        return dtype, *(inner.training for inner in part.modules())

    def _begin(self, mode: Any, given: Any, samples: int) -> _Kept | None:
        """Opens the rows of a mode, of which these are the first."""
        if type(given) is not self._torch.Tensor or given.shape[:1] != (samples,):
            self._end(f"{self._name} gives something else than a row for each sample")
            return None
        last = self._torch.channels_last
        is_last = given.dim() == 4 and given.is_contiguous(memory_format=last)
        form = RowPart(
            tuple(given.shape[1:]),
            given.dtype,
            channels_last=is_last and not given.is_contiguous(),
        )
        part: Any = self._part()
        facts = {"mode": repr(mode), "layers": _layers_of(part), "digests": _DIGESTS}
        store = NamedStore.open(feature_key(_tensors_of(part), facts), [form], self._where)
        store.say = lambda line: leave(FIELD, line.removeprefix("features: "))
        self._kept[mode] = _Kept(store, form)
        return self._kept[mode]

    def _keep(self, kept: _Kept, samples: list[bytes], given: Any) -> None:
        if given.shape[1:] != kept.part.shape or given.dtype != kept.part.dtype:
            return  # of another form than the first ones
        store = kept.store
        store.put(samples, [given])
        if store.is_full and not kept.has_come_again:
            why = f"none of {store.kept:,} samples came again in {self._name}"
            store.discard()
            self._end(why)

    def _is_random(self, kept: _Kept, new: int, again: int) -> bool:
        """Whether the samples' dataset has given more than it has, and none of them again."""
        dataset = self._now.dataset
        if dataset is None:
            return False
        # An item of a dataset may be several samples, so that the first pass has more of them.
        is_later = dataset.passes > 1
        seen = self._given.setdefault(dataset.identity, _Given())
        seen.new, seen.again = seen.new + new, seen.again + again
        if seen.again or not is_later or seen.new <= _TOO_MANY * dataset.samples + _AHEAD:
            return False
        why = (
            f"{dataset.name} changes its {dataset.samples:,} samples at random: none came again "
            f"in {self._name}"
        )
        if len(self._given) > 1:  # there is another one, such as that of a validation
            leave(FIELD, why)
            return True
        kept.store.discard()
        self._end(why)
        return True

    def _check(self, given: Any, kept: Any) -> None:
        self._unchecked = max(0, self._unchecked - 1)
        name = str(given.dtype).removeprefix("torch.")
        largest = float(given.abs().max())
        apart = float((given.double() - kept.double()).abs().max())
        if not apart <= _SAME.get(name, _SAME_IN_HALF) * largest:
            self._end(f"what {self._name} gives for a sample depends on the rest of its batch")

    def _end(self, why: str) -> None:
        leave(FIELD, why)
        self._is_over = True
        self._forget()


def _tensors_of(part: Any) -> dict[str, Any]:
    """Parameters and buffers of a module, and tensors that are plain attributes, by name."""
    import torch

    found = {**dict(part.named_parameters()), **dict(part.named_buffers())}
    for path, inner in part.named_modules():
        for name, value in vars(inner).items():
            if isinstance(value, torch.Tensor):
                found[f"{path}.{name}"] = value
    return found


def _layers_of(part: Any) -> dict[str, list[str]]:
    """What a module computes apart from its tensors: code, attributes and hooks, by layer."""
    from torch import nn

    found, common = {}, vars(nn.Module()).keys()
    for path, inner in part.named_modules():
        kind = type(inner)
        own = {name: value for name, value in vars(inner).items() if name not in common}
        if inner is part:
            own.pop("forward", None)  # ours
        hooks = [*inner._forward_pre_hooks.values(), *inner._forward_hooks.values()]
        words = [f"{kind.__module__}.{kind.__qualname__}", repr(getattr(inner, "code", ""))]
        words += [] if is_library(kind) else [code_digest(kind)]
        found[path] = [*words, code_digest([own, hooks if inner is not part else []])]
    return found


def digests(batch: Any) -> list[bytes]:
    """One for each row of a batch on the CPU, by its bytes, shape and dtype."""
    import torch

    rows = batch.detach().contiguous().reshape(len(batch), -1).view(torch.uint8).numpy()
    form = blake2b(repr((batch.dtype, tuple(batch.shape[1:]))).encode(), digest_size=16)
    found = []
    for row in rows:
        one = form.copy()
        one.update(row)
        found.append(one.digest())
    return found
