"""The cuts of an nn.Sequential alone, in a few lines: what fits are tested with."""

from types import SimpleNamespace

import torch
from torch import nn

from flatout.data import Features
from flatout.models import Contents


class SequentialCut:
    """Behind the first layers of a Sequential."""

    def __init__(self, model, count, inputs):
        self.model, self.count = model, count
        self.name = f"behind {count - 1} ({type(model[count - 1]).__name__})"
        layers = model[:count]
        self.modules = list(layers.modules())
        self.tensors = {**dict(layers.named_parameters()), **dict(layers.named_buffers())}
        self.place, self.calls = list(range(count)), ""
        self.computed = 0
        with torch.no_grad():
            self.bytes_per_sample = self.prefix(inputs[:1])[0].nbytes
        self.contents = Contents(self.tensors.values())
        self._state = self._now()

    def _now(self):
        return [(t._version, t.requires_grad) for t in self.tensors.values()]

    def is_current(self):
        return self._state == self._now()

    def prefix(self, inputs):
        self.computed += len(inputs)
        return Features((self.model[: self.count](inputs),))

    def rest(self, features):
        return self.model[self.count :](features[0])

    def apply(self):
        def call(*args):
            if isinstance(args[0], Features):
                return self.rest(args[0])
            return nn.Module._call_impl(self.model, *args)

        self.model._call_impl = call
        return lambda: vars(self.model).pop("_call_impl")


def find_cuts(model, inputs, most):
    """Behind each frozen layer with fewer bytes than any later one."""
    frozen = 0
    for layer in model:
        if any(p.requires_grad for p in layer.parameters()) or isinstance(layer, nn.Dropout):
            break
        frozen += 1
    found = []
    for count in range(frozen, 0, -1):
        cut = SequentialCut(model, count, inputs)
        if cut.tensors and (not found or cut.bytes_per_sample < found[0].bytes_per_sample):
            found.insert(0, cut)
    return SimpleNamespace(cuts=found, hindrance="", at=lambda places: [])
