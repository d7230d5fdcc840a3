"""script.features: keeps the outputs of leading frozen layers, by sample.

A model's forward is cut after its frozen layers at the point that saves the most time
(`cut_features.py`). If the forward cannot be cut, but the model has one frozen module, the outputs
of that module are kept.

    kept_samples.py   rows by the bytes of samples, in a `NamedStore`
"""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import ref

from flatout.cures.cut_features import CutFeatures
from flatout.cures.dataset_now import DatasetNow
from flatout.cures.kept_samples import FIELD, Keeping, KeptSamples, ModeStore
from flatout.cures.layers import layers_of, tensors_of
from flatout.cures.record import applied, leave, took
from flatout.cures.roots import Call, Cure
from flatout.cures.steps import ScriptSteps
from flatout.data import RowPart, sample_names
from flatout.hooks import is_anything_compiled
from flatout.observe import acts_in_training, frozen_parts


def cure(torch: Any, steps: ScriptSteps) -> Cure:
    """Return the wrapper for calls of root modules."""
    keeping = Keeping(steps.asked[FIELD], DatasetNow())
    keeping.now.watch()
    steps.of_unstepped.append(partial(keep_whole, keeping))
    return partial(keep_features, keeping)


def keep_whole(
    keeping: Keeping,
    module: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    call: Call,
) -> Call:
    """Keep the outputs of a module that no optimizer steps and that the script calls directly.

    Arguments and result are those of `keep_features`.
    """
    import torch

    tensors = list(module.parameters())
    if isinstance(module, torch.jit.ScriptModule) or not tensors:
        return call
    if len({tensor.device for tensor in tensors}) > 1:
        return call
    whole = Features(torch, module, keeping, is_whole=True)
    if not whole.is_frozen():
        return call
    _tell_taken(module, keeping.where)

    def with_features(module: Any, /, *args: Any, **kwargs: Any) -> Any:
        is_open = whole.open()
        try:
            return call(module, *args, **kwargs)
        finally:
            if is_open:
                whole.close()

    return with_features


def keep_features(
    keeping: Keeping,
    module: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    call: Call,
) -> Call:
    """Keep the outputs of the frozen leading layers of a root module."""
    import torch

    name = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        leave(FIELD, f"{name} is compiled: its layers cannot be left out")
        return call
    if all(tensor.requires_grad for tensor in module.parameters()):
        if FIELD not in dict(applied()):  # features of a separately called backbone may be kept
            leave(FIELD, f"no leading layers of {name} are frozen and in eval mode")
        return call
    if len({tensor.device for tensor in module.parameters()}) > 1:
        leave(FIELD, f"{name} lies on several devices")
        return call
    cut = CutFeatures(module, keeping)
    parts: list[Features] = []

    def with_features(module: Any, /, *args: Any, **kwargs: Any) -> Any:
        trains = module.training and torch.is_grad_enabled()
        keeping.now.called(trains)
        if cut.is_open and trains and not is_anything_compiled():
            cut.look(args, kwargs)
            if not cut.is_open and not cut.is_cut and not parts:
                parts.extend(_parts_of(module, keeping, cut.why))
        if cut.is_cut:
            return cut(module, args, kwargs, call)
        opened = [part for part in parts if part.open()]
        try:
            return call(module, *args, **kwargs)
        finally:
            for item in opened:
                item.close()

    return with_features


def _parts_of(module: Any, keeping: Keeping, why: str) -> list[Features]:
    import torch

    name, parts = type(module).__name__, list(frozen_parts(module))
    if len(parts) != 1:
        leave(FIELD, why or f"no leading layers of {name} are frozen and in eval mode")
        return []
    _tell_taken(module, keeping.where)
    return [Features(torch, parts[0], keeping)]


def _tell_taken(module: Any, where: Any) -> None:
    place = "on disk" if where == "disk" else "in memory"
    took(FIELD, f"features of frozen layers of {type(module).__name__} {place}")


class Features(KeptSamples):
    """Outputs of one frozen module, by sample.

    The module's `forward` is replaced only during a call of its root module, so that no copy or
    saved file of the module contains the replacement.

    Args:
        torch: the package torch.
        part: the frozen module.
        keeping: storage place of kept samples, and limits.
        is_whole: True if no optimizer steps the module. Then it counts as frozen without a graph,
            even if its parameters require gradients.
    """

    def __init__(self, torch: Any, part: Any, keeping: Keeping, *, is_whole: bool = False) -> None:
        super().__init__(type(part).__name__, keeping)
        self._torch = torch
        self._is_whole = is_whole
        self._part = ref(part)
        self._state: Any = None
        self._contents: Any = None  # contents of the tensors in `_state`

    def open(self) -> bool:
        """Replace the module's `forward`, unless it is replaced already."""
        part = self._part()
        if self._is_over or part is None or "forward" in vars(part) or is_anything_compiled():
            return False
        part.forward = partial(self._forward, part.forward)
        return True

    def close(self) -> None:
        """Restore the module's `forward`."""
        vars(self._part()).pop("forward", None)

    def _forward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or not self._is_batch(args[0]) or not self.is_frozen():
            return original(*args, **kwargs)
        (batch,) = args
        samples, mode = sample_names(batch), self._mode()
        if self._is_doubted(samples):
            return original(batch)
        kept, given = self._kept.get(mode), None
        if kept is None:
            given = self._computed(original, batch)  # its output shows the form of a row
            kept = None if self._is_over else self._opened(mode, given, len(samples))
            if kept is None:
                return given
        places = self._look(kept, samples)
        again = int((places >= 0).sum())
        if again < len(samples):
            given = self._computed(original, batch) if given is None else given
            if not self._is_over and self._contents.are_same():
                self._keep(kept, samples, [given], again)
            return given
        with self._torch.inference_mode(False), self._torch.no_grad():
            (rows,) = kept.store.get(places)
            rows = rows.to(batch.device, non_blocking=True)
        if given is None and not self._unchecked:
            return rows
        given = self._computed(original, batch) if given is None else given
        self._check([given], [rows])
        return given

    def _computed(self, original: Any, batch: Any) -> Any:
        before = random_states(batch.device)
        given = original(batch)
        if not all(map(self._torch.equal, before, random_states(batch.device))):
            self._end(f"{self._name} draws random numbers")
        return given

    def _is_batch(self, value: Any) -> bool:
        torch, part = self._torch, self._part()
        assert part is not None
        return (
            type(value) is torch.Tensor
            and value.device == next(part.parameters()).device
            and value.layout is torch.strided
            and value.dim() > 1
            and value.numel() > 0
            and not value.requires_grad
        )

    def is_frozen(self) -> bool:
        """Return True if the module is unchanged and frozen; forget its outputs after a change."""
        from flatout.models import Contents

        part: Any = self._part()
        tensors = [*part.parameters(), *part.buffers()]
        may_want = self._is_whole and not self._torch.is_grad_enabled()
        wants = any(tensor.requires_grad for tensor in tensors) and not may_want
        if wants or any(tensor.is_inference() for tensor in tensors):
            return False
        if any(acts_in_training(inner) for inner in part.modules()):
            return False
        state = [(id(tensor), tensor._version, tensor.data_ptr()) for tensor in tensors]
        is_same = self._state == state and self._contents.seem_same()
        if self._state is not None and not is_same:
            self._changed()
            if self._is_over:
                return False
        if not is_same:
            self._state, self._contents = state, Contents(tensors)
        return True

    def _mode(self) -> Any:
        torch = self._torch
        part: Any = self._part()
        kind = next(part.parameters()).device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return kind, dtype, *(inner.training for inner in part.modules())

    def _opened(self, mode: Any, given: Any, samples: int) -> ModeStore | None:
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
        facts = {"layers": layers_of(part)}
        return self._begin(mode, [form], tensors_of(part), facts, given.device)


def random_states(device: Any) -> list[Any]:
    """Return the states of the generators that layers on a device may draw from."""
    import torch

    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states
