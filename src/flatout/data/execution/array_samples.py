"""Samples that are in memory already, for the stages that want more than batches of them."""

from __future__ import annotations

from time import perf_counter_ns as clock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.data.batch import map_tensors, named_tensors
from flatout.data.block import Block, Numbers, Values
from flatout.data.execution.buffers import Buffers
from flatout.data.execution.digests import digest_of, tensors_name
from flatout.data.execution.samples import Costs
from flatout.data.form import Form, Leaf
from flatout.data.sources.arrays import Arrays
from flatout.errors import DataError
from flatout.kernels import gather_rows


class ArraySamples:
    """Rows of `Arrays`. Follows `flatout.data.execution.samples.Samples`."""

    random = True
    name = "gather"
    draws = False

    def __init__(self, data: Arrays) -> None:
        self.data = data
        self.first = 0
        self.rows = data.samples
        self._columns: dict[str, Tensor] = {}
        trees = {"inputs": data.inputs, "targets": data.targets, "weight": data.weight}
        for name, tree in trees.items():
            self._columns.update(named_tensors(name, tree))
        # The tensors in the order in which their names come, so that each finds its own again.
        names = iter(list(self._columns))
        self.form = Form(
            *(map_tensors(lambda _: Leaf(next(names)), tree) for tree in trees.values())
        )
        self._scaled = data.scale is not None or data.shift is not None

    @property
    def digest(self) -> str:
        """The data's own."""
        return self.data.digest

    @property
    def probe(self) -> int:
        """The first that takes part."""
        return self.first

    def content(self) -> str | None:
        """Over all bytes of the data."""
        return digest_of(self.digest, tensors_name(self._columns))

    def make(self, numbers: Numbers, buffers: Buffers, epoch: int, costs: Costs) -> Block:
        """These rows, in this order."""
        start = clock()
        self._check()
        columns = {n: self._take(n, t, numbers, buffers) for n, t in self._columns.items()}
        costs.add(self.name, clock() - start)
        return Block(columns, numbers)

    def _check(self) -> None:
        if self.data.device.type != "cpu":
            raise DataError(
                f"the data are on {self.data.device}: only shuffle, split and batch work there",
                do="hand over data that are on the CPU",
            )
        for name, tensor in self._columns.items():
            if tensor.dtype == torch.bfloat16:
                raise DataError(
                    f"{name}: numpy has no bfloat16, so only shuffle, split and batch take it",
                    do="hand over float32; the model's own precision is up to the Recipe",
                )

    def _take(self, name: str, tensor: Tensor, numbers: Numbers, buffers: Buffers) -> Values:
        array: Any = tensor.detach().numpy()
        if self._scaled and tensor.dtype == torch.uint8 and name.startswith("inputs"):
            out = buffers.empty((len(numbers), *array.shape[1:]), np.float32)
            return gather_rows(array, numbers, out, self.data.scale, self.data.shift)
        if not array.flags.c_contiguous:
            return np.take(array, numbers, axis=0)
        out = buffers.empty((len(numbers), *array.shape[1:]), array.dtype)
        return gather_rows(array, np.ascontiguousarray(numbers), out)

    def where(self, number: int) -> str:
        """Its number is all there is."""
        return f"sample {number:,}"
