"""Keeps the features (activations) of a script's model at a cut after its frozen layers.

The model is called with features instead of the batch, and runs only the layers after the cut.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np

from flatout.cures.kept_samples import FIELD, Keeping, KeptSamples, ModeStore
from flatout.cures.layers import words_of
from flatout.cures.record import leave, took
from flatout.cures.roots import Call
from flatout.data import Features, RowPart, joined_rows, sample_names
from flatout.observe import unwrapped
from flatout.words import size_words

if TYPE_CHECKING:
    from flatout.models import Cut

# Number of samples that are timed on a CPU.
_MEASURED = 4
# Number of searches, one after each change of the frozen layers, after which no cut is searched any
# more.
_LOOKS = 4


class CutFeatures(KeptSamples):
    """Features that the frozen part of a root module has computed, by sample.

    Attributes:
        is_open: True if the next call must search a cut.
        why: reason why there is no cut, in words; "" if nothing is frozen.
    """

    def __init__(self, root: Any, keeping: Keeping) -> None:
        model = unwrapped(root)[-1]
        super().__init__(type(model).__name__, keeping)
        self._model = ref(model)
        self.is_open, self.why = True, ""
        self._cut: Cut | None = None
        self._device = next(model.parameters()).device
        self._form: Any = None  # form of the inputs for which the forward is cut
        self._looked = 0

    @property
    def is_cut(self) -> bool:
        """True if the forward is cut."""
        return self._cut is not None

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Search for the best cut, within a call of the root in training."""
        import torch

        from flatout.models import autocast_now, find_cuts
        from flatout.train import snapshot
        from flatout.train.parts.features import costs as feature_costs

        self._looked += 1
        self.is_open = False
        inputs = _inputs_of(args, kwargs)
        if inputs is None:
            self.why = f"{self._name} is not called with a single batch of tensors"
            return
        model: Any = self._model()
        if (hooked := _hooked(model)) is not None:
            self.why = f"{hooked or self._name} has a hook, which would run for a trial too"
            return
        dataset = self._keeping.now.dataset
        samples = 1 if dataset is None or dataset.samples is None else max(1, dataset.samples)
        with snapshot.untouched(model), torch.no_grad():
            result = find_cuts(model, inputs, feature_costs.room(self._keeping.where) / samples)
            self.why = result.hindrance
            cut = self._best(result.cuts, inputs, samples) if result.cuts else None
        if cut is None:
            return
        self._cut, self._form = cut, (_form_of(args, kwargs), autocast_now(self._device.type))
        place = "on disk" if self._keeping.where == "disk" else "in memory"
        each = f"{size_words(cut.bytes_per_sample)} a sample"
        took(FIELD, f"features kept {cut.name} of {self._name} {place}, {each}")
        if self.why:
            leave(FIELD, f"more could be kept: {self.why}")

    def _best(self, cuts: list[Cut], inputs: Any, samples: int) -> Cut | None:
        from flatout.train.parts.features import choice as frozen_choice
        from flatout.train.parts.features import costs as costs

        where = self._keeping.where
        # A GPU takes about as long for a few samples as for a batch.
        few = _rows(inputs, slice(_MEASURED)) if self._device.type == "cpu" else inputs
        count = len(_leaves(few)[0])
        naming_s, _ = costs.timed(partial(sample_names, *_leaves(few)), self._device)
        options, rest_s = [], 0.0
        for cut in cuts:
            prefix_s, features = costs.timed(partial(cut.prefix, few), self._device)
            cut.rest(features)
            rest_s, _ = costs.timed(partial(cut.rest, features), self._device)
            whole = samples * cut.bytes_per_sample
            read_s = cut.bytes_per_sample / costs.read_rate(where, whole, self._device)
            options.append(
                frozen_choice.FeatureOption(
                    cut.name,
                    saved_s=prefix_s / count,
                    bytes=cut.bytes_per_sample,
                    variants=1,
                    read_s=read_s + naming_s / count,
                    room=costs.room(where),
                )
            )
        # Backward takes about twice as long as forward, so all takes about three times as long.
        plain_s = max(option.saved_s for option in options) + 3 * rest_s / count
        choice = frozen_choice.choose(options, samples, None, plain_s)
        if choice.kept is None:
            self.why = choice.why.removeprefix("nothing kept: ")
            return None
        name = choice.kept.name
        return next(cut for cut in cuts if cut.name == name)

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call
    ) -> Any:
        """Call the root with kept features of its batch, or keep them."""
        cut, inputs = self._cut, self._inputs_of(args, kwargs)
        if cut is None or inputs is None or not self._is_current(cut):
            return call(module, *args, **kwargs)
        names = sample_names(*_leaves(inputs))
        if self._is_doubted(names):
            return call(module, *args, **kwargs)
        features = self._features(cut, inputs, names)
        if self._is_over:
            self._cut = None
            return call(module, *args, **kwargs)
        undo = cut.apply()
        try:
            return call(module, features)
        finally:
            undo()

    def _inputs_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from flatout.hooks import is_anything_compiled
        from flatout.models import autocast_now

        if self._is_over or is_anything_compiled():
            return None
        inputs, autocast = _inputs_of(args, kwargs), autocast_now(self._device.type)
        return inputs if self._form == (_form_of(args, kwargs), autocast) else None

    def _is_current(self, cut: Cut) -> bool:
        if cut.is_current() and cut.contents.seem_same():
            return True
        self._cut, self.is_open = None, self._looked < _LOOKS
        self._changed()
        self.is_open &= not self._is_over
        return False

    def _features(self, cut: Cut, inputs: Any, names: list[bytes]) -> Features:
        import torch

        kept, made = self._opened(cut, inputs)
        places = self._look(kept, names)
        there = places >= 0
        is_checked = self._unchecked > 0 and bool(there.any())
        if made is None and (is_checked or not there.any()):
            made = _computed(cut, inputs)
        rows = []
        if there.any():
            with torch.inference_mode(False), torch.no_grad():
                rows = [
                    item.to(self._device, non_blocking=True)
                    for item in kept.store.get(places[there])
                ]
        if there.all() and made is None:
            return Features(rows)
        missing = torch.from_numpy(np.flatnonzero(~there)).to(self._device)
        if made is None:
            new = _computed(cut, _rows(inputs, missing))
        else:
            new = Features(item[missing] for item in made)
            if is_checked:
                at = torch.from_numpy(np.flatnonzero(there)).to(self._device)
                self._check([item[at] for item in made], rows)
        if len(missing) and not self._is_over and cut.contents.are_same():
            again = len(names) - len(missing)
            self._keep(kept, [names[at] for at in missing.tolist()], new, again)
        if made is not None:
            return made
        pairs = zip(rows, new, strict=True)
        return Features(joined_rows(row, item, there) for row, item in pairs)

    def _opened(self, cut: Cut, inputs: Any) -> tuple[ModeStore, Features | None]:
        if (kept := self._kept.get("")) is not None:
            return kept, None
        made = _computed(cut, inputs)
        parts = [RowPart(tuple(item.shape[1:]), item.dtype) for item in made]
        words = [words_of(module, ("forward", "train")) for module in cut.modules]
        facts = {
            "cut": [cut.name, cut.calls],
            "layers": words,
            "autocast": repr(self._form[1]),
            "device": self._device.type,
        }
        return self._begin("", parts, cut.tensors, facts, self._device), made


def _hooked(model: Any) -> str | None:
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return str(name)
    return None


def _computed(cut: Cut, inputs: Any) -> Features:
    import torch

    count = len(_leaves(inputs)[0])
    if count == 1:
        # A single sample often uses other kernels than a batch, with other rounding.
        device = _leaves(inputs)[0].device
        inputs = _rows(inputs, torch.zeros(2, dtype=torch.int64, device=device))
    with torch.no_grad():
        return Features(part[:count] for part in cut.prefix(inputs))


def _inputs_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    import torch

    if args and kwargs:
        return None
    leaves = [*args, *kwargs.values()]
    is_batch = bool(leaves) and all(
        type(leave) is torch.Tensor
        and leave.layout is torch.strided
        and leave.dim() > 0
        and leave.numel() > 0
        and not leave.requires_grad
        for leave in leaves
    )
    if not is_batch or len({(len(leave), leave.device) for leave in leaves}) > 1:
        return None
    return kwargs or (args if len(args) > 1 else args[0])


def _form_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    named = [*enumerate(args), *kwargs.items()]
    return [(name, item.device, item.dtype, tuple(item.shape[1:])) for name, item in named]


def _leaves(inputs: Any) -> list[Any]:
    if isinstance(inputs, dict):
        return list(inputs.values())
    return list(inputs) if isinstance(inputs, tuple) else [inputs]


def _rows(inputs: Any, at: Any) -> Any:
    if isinstance(inputs, dict):
        return {name: value[at] for name, value in inputs.items()}
    return tuple(item[at] for item in inputs) if isinstance(inputs, tuple) else inputs[at]
