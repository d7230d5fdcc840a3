"""Batches whose inputs have no row for each sample: known for certain, told, or refused."""

from collections import UserDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader

import flatout
from flatout.data.batches.batch import Batch, map_tensors, named_tensors
from flatout.data.batches.jagged_batch import samples_of_items
from flatout.data.batches.tensors import as_batch
from flatout.data.ranked import ranked
from flatout.errors import DataError

IDS = torch.tensor([7, 1, 4, 4, 0, 9, 2])  # of four samples: two, none, four, one
STARTS, ENDS = torch.tensor([0, 2, 2, 6]), torch.tensor([0, 2, 2, 6, 7])
Y = torch.arange(4.0)
DENSE = torch.randn(4, 3)
X, EDGES = torch.randn(7, 3), torch.tensor([[0, 1, 5, 6, 2], [1, 0, 6, 5, 2]])
GRAPHS = torch.tensor([0, 0, 1, 2, 2, 2, 3])


@dataclass(frozen=True)
class Bags:
    ids: torch.Tensor
    offsets: torch.Tensor
    name: str = "bags"


class Pair(NamedTuple):
    ids: torch.Tensor
    offsets: torch.Tensor


class Graph:
    """As PyTorch Geometric's Data: tensors in a store of its own, changed in place by `apply`."""

    def __init__(self, **held):
        self._held = held

    def __copy__(self):
        return Graph(**self._held)

    def __getattr__(self, name):
        try:
            return self.__dict__["_held"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __iter__(self):
        return iter(self._held.items())

    def to_dict(self):
        return dict(self._held)

    def apply(self, function):
        self._held = {name: function(value) for name, value in self._held.items()}
        return self

    def to(self, device):
        return self.apply(lambda value: value.to(device) if torch.is_tensor(value) else value)


TWO_FIELDS = torch.stack([STARTS, torch.tensor([0, 1, 2, 3])])
SURE = {
    "offsets": (IDS, STARTS),
    "int32": (IDS.int(), STARTS.int()),
    "numpy": (IDS.numpy(), STARTS.numpy()),
    "last offset": (IDS, ENDS),
    "by name": {"ids": IDS, "offsets": STARTS},
    "weights": (IDS, STARTS, torch.rand(7)),
    "dense beside them": (DENSE, IDS, STARTS),
    "two fields": ((IDS, STARTS), (IDS[:5], torch.tensor([0, 1, 4, 4]))),
    "lists of fields": (DENSE, [STARTS, STARTS], [IDS, IDS[:6]]),
    "stacked offsets": (DENSE, TWO_FIELDS, [IDS, IDS[:4]]),
    "all stacked": (DENSE, TWO_FIELDS, torch.stack([IDS, IDS])),
    "an empty field": (torch.zeros(0, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)),
    "one id each": (IDS[:4], torch.arange(4)),
    "packed": (torch.randn(7, 2), ENDS),
    "packed with a number": (IDS, ENDS, 4),
    "graphs": (X, EDGES, GRAPHS),
    "graphs with edge attributes": (X, EDGES, torch.rand(5, 2), GRAPHS),
    "pooled sets": (X, GRAPHS),
    "dataclass": Bags(IDS, STARTS),
    "object": Graph(x=X, edge_index=EDGES, batch=GRAPHS),
    "packed sequence": pack_sequence([torch.rand(n, 2) for n in (1, 3)] * 2, enforce_sorted=False),
}


@pytest.mark.parametrize("name", SURE)
def test_what_is_certain_is_taken_as_it_is(name):
    batch = as_batch((SURE[name], Y), "here")
    assert (batch.is_jagged, batch.size, batch.samples) == (True, 4, 4)
    assert batch.rows(0, 4) is batch
    with pytest.raises(DataError, match="no row for each sample"):
        batch.split(2)


def test_targets_of_tokens_and_of_nodes():
    assert as_batch(((IDS, ENDS), torch.rand(7)), "here").size == 7
    batch = as_batch(((X, EDGES), torch.rand(7)), "here")
    assert (batch.is_jagged, batch.size) == (True, 7)
    assert as_batch(((IDS[:5], torch.tensor([0])), torch.rand(1)), "here").size == 1


MISTAKES = {
    "one tensor": IDS,
    "one row more": (X, torch.randn(4, 2)),
    "ids alone": (DENSE, IDS),
    "offsets that fall": (IDS, torch.tensor([0, 3, 2, 6])),
    "offsets that begin later": (IDS, torch.tensor([1, 2, 3, 6])),
    "offsets behind the ids": (IDS, torch.tensor([0, 2, 6, 8])),
    "a column of zeros": (IDS, torch.zeros(4, dtype=torch.int64)),
    "offsets for five": (IDS, torch.tensor([0, 1, 2, 3, 4])),
    "float offsets": (IDS, STARTS.float()),
    "edges to no node": (DENSE, torch.tensor([[0, 1, 2], [1, 2, 4]])),
    "turned round": (DENSE, torch.zeros(2, 4, dtype=torch.int64)),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_lengths_that_merely_differ_are_a_mistake(name):
    with pytest.raises(DataError, match=r"differ in length: . and . samples\n") as caught:
        as_batch((MISTAKES[name], Y), "epoch 0, batch 3")
    assert caught.value.where == "epoch 0, batch 3"
    assert "flatout.data.jagged(inputs, targets)" in caught.value.do
    batch = flatout.data.jagged(MISTAKES[name], Y)
    assert as_batch(batch, "here") is batch
    assert (batch.is_jagged, batch.size) == (True, 4)


def test_what_is_even_is_cut_by_rows():
    even = (IDS[:4], torch.tensor([0, 0, 1, 3])), Y
    assert not as_batch(even, "here").is_jagged
    # Behind a batch that is jagged all are, and behind one that is not, what counts up is a column.
    assert as_batch(even, "here", is_jagged=True).is_jagged
    counting = (IDS[:4], torch.arange(4)), Y
    assert not as_batch(counting, "here", is_jagged=False).is_jagged
    for wrong in ((DENSE, "text"), (DENSE, 3), (DENSE, None)):
        with pytest.raises(DataError, match="expected a tensor or a numpy array"):
            as_batch((wrong, Y), "here")


@pytest.mark.parametrize("name", ["offsets", "last offset", "two fields", "packed", "graphs"])
def test_without_targets_the_numbers_tell_the_samples(name):
    assert as_batch((SURE[name],), "here").size == 4


def test_objects_tell_their_samples_and_targets():
    assert as_batch(SURE["packed sequence"], "here").size == 4
    graph = Graph(x=X, batch=GRAPHS, y=Y, num_graphs=4)
    batch = as_batch(graph, "here")
    assert batch.inputs is graph
    assert batch.targets is Y
    assert as_batch(Graph(x=X, num_graphs=4), "here").size == 4
    assert as_batch((graph, Y[:2], torch.ones(2)), "here").size == 2
    assert flatout.data.jagged(Bags(IDS, STARTS), samples=4).size == 4


@pytest.mark.parametrize(
    ("given", "named", "words"),
    [
        ((IDS,), {}, "nothing tells how many samples"),
        ((IDS, Y), {"samples": 5}, "samples is 5, but the targets have 4 rows"),
        ((IDS, Y, torch.ones(3)), {}, "targets and weight differ in length: 4 and 3"),
        ((IDS, Y[:0]), {}, "the batch is empty"),
        (("text", Y), {}, "expected a tensor or a numpy array, found str"),
    ],
)
def test_what_the_word_refuses(given, named, words):
    with pytest.raises(DataError, match=words):
        flatout.data.jagged(*given, **named)


def test_arrays_in_memory_are_cut_by_rows():
    with pytest.raises(DataError, match="differ in length: 7 and 4") as caught:
        flatout.data.arrays((IDS, STARTS), Y)
    assert "from a DataLoader or as a list" in caught.value.do


@pytest.mark.parametrize("name", ["dataclass", "object", "packed sequence"])
def test_objects_are_copied_with_other_tensors(name):
    given = SURE[name]
    before = [(key, tensor.clone()) for key, tensor in named_tensors("x", given)]
    assert len(before) > 1
    made = map_tensors(lambda tensor: tensor + 1, given)
    assert type(made) is type(given)
    assert made is not given
    for (key, old), (own, new), (_, kept) in zip(
        before, named_tensors("x", made), named_tensors("x", given), strict=True
    ):
        assert key == own
        assert torch.equal(new, old + 1)
        assert torch.equal(kept, old)


def test_what_no_tensor_is_stays():
    given = {"ids": IDS, "longest": 4, "name": "x", "none": None, "pair": Pair(IDS, ENDS)}
    made = map_tensors(lambda tensor: tensor + 1, given)
    assert {k: made[k] for k in ("longest", "name", "none")} == {
        "longest": 4,
        "name": "x",
        "none": None,
    }
    assert [name for name, _ in named_tensors("x", made)] == [
        "x['ids']",
        "x['pair'][0]",
        "x['pair'][1]",
    ]
    assert map_tensors(lambda leaf: 2.0 * leaf, np.float32(3.0)) == 6.0


@pytest.mark.parametrize("marks", [STARTS, ENDS, torch.tensor([0, 0, 2, 2, 2, 2, 3])])
def test_each_item_is_known_by_its_sample(marks):
    found = samples_of_items((DENSE, IDS, marks), 7, 4)
    assert found.tolist() == [0, 0, 2, 2, 2, 2, 3]
    assert samples_of_items((DENSE, IDS), 7, 4) is None
    assert samples_of_items((marks, torch.tensor([0, 1, 1, 1])), 7, 4) is None  # of two fields


def loader(workers=0):
    bags = [(torch.arange(n), torch.tensor(float(n))) for n in (2, 3, 0, 1, 2, 0, 1)]
    return DataLoader(bags, batch_size=2, collate_fn=collate, num_workers=workers)


def collate(samples):
    ids = torch.cat([ids for ids, _ in samples])
    counts = torch.tensor([len(ids) for ids, _ in samples])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)[:-1]])
    return (ids, offsets), torch.stack([y for _, y in samples])


@pytest.mark.parametrize("how", ["loader", "list", "function", "dataset"])
def test_sources_give_such_batches(how):
    source = flatout.data.as_source(
        {"loader": loader(), "list": list(loader()), "function": lambda: iter(loader())}.get(how)
        or flatout.data.dataset(loader().dataset, batch_size=2, shuffle=False, collate=collate)
    )
    for batches in (source.peek(2), list(source.batches(0)), list(source.batches(1, 1))):
        assert all(batch.is_jagged for batch in batches)
    # The third has an empty bag in front, and the last one is a single sample.
    assert [batch.size for batch in source.batches(0)] == [2, 2, 2, 1]


def test_a_stage_may_make_them():
    rows = flatout.data.arrays(torch.arange(12).reshape(6, 2), torch.arange(6.0))

    def flat(x, y):
        return (x.reshape(-1), torch.arange(0, x.numel(), 2)), y

    batches = list(rows.batch(2).map(flat).batches(0))
    assert [(b.is_jagged, b.size, b.indices.tolist()) for b in batches] == [
        (True, 2, [0, 1]),
        (True, 2, [2, 3]),
        (True, 2, [4, 5]),
    ]
    with pytest.raises(DataError, match="2 samples only fill it up"):
        list(rows.batch(4, last="pad").map(flat).batches(0))


def test_a_rank_has_its_own_or_a_copy():
    source = flatout.data.as_source(loader())
    own = list(ranked(source, 1, 2, lambda batch: "own").batches(0))
    assert [(b.size, b.copies, b.whole) for b in own] == [(2, 1, 0)] * 3 + [(1, 1, 0)]
    copies = list(ranked(source, 1, 2, lambda batch: "copy").batches(0))
    assert [(b.is_copy, b.copies, b.whole) for b in copies] == [(True, 2, n) for n in (2, 2, 2, 1)]
    with pytest.raises(DataError, match="would have to be cut"):
        list(ranked(source, 1, 2, lambda batch: "part").batches(0))


def test_it_goes_from_place_to_place():
    batch = as_batch(((Bags(IDS, STARTS), {"longest": 4}), Y), "here")
    there = batch.to(torch.device("meta"))
    assert there.inputs[0].ids.device.type == "meta"
    assert there.inputs[0].name == "bags"
    assert there.inputs[1] == {"longest": 4}
    assert batch.inputs[0].ids is IDS
    assert batch.to(torch.device("cpu")) is batch
    assert isinstance(there, Batch)
    assert there.is_jagged
    assert isinstance(as_batch(SURE["packed sequence"], "here").inputs, PackedSequence)


def test_what_tokenizers_give_is_a_dict():
    batch = as_batch((UserDict(ids=IDS[:4], mask=torch.ones(4)), Y), "here")
    assert type(batch.inputs) is dict
    assert not batch.is_jagged


class Words(nn.Module):
    """Next-token model for samples along the second dimension or along the first one."""

    def __init__(self, *, batch_first):
        super().__init__()
        self.batch_first = batch_first
        self.table, self.last = nn.Embedding(9, 4), nn.Linear(4, 9)
        self.memory = nn.LSTM(4, 4, batch_first=batch_first)

    def forward(self, tokens):
        out = self.last(self.memory(self.table(tokens))[0])
        return out.transpose(1, 2) if self.batch_first else out.flatten(0, 1)


def test_the_advice_for_batches_with_the_time_first_works():
    inputs = torch.randint(0, 9, (7, 4), generator=torch.Generator().manual_seed(0))
    targets = inputs.roll(-1, 0).flatten()
    options = {"optimizer": "sgd", "lr": 0.1, "allow": "exact", "say": lambda line: None}

    def loss(batch, *, batch_first):
        torch.manual_seed(0)
        trainer = flatout.Trainer(Words(batch_first=batch_first), **options)
        return trainer.fit([batch], epochs=2, verbose=0).history["loss"]

    with pytest.raises(DataError) as caught:
        loss((inputs, targets), batch_first=False)
    advice = caught.value.do
    assert "targets.view(7, 4)" in advice
    assert "inputs.transpose(0, 1) and targets.view(7, 4).t()" in advice
    assert "flatout.data.jagged(inputs, targets)" in advice
    turned = loss((inputs.transpose(0, 1), targets.view(7, 4).t()), batch_first=True)
    whole = loss(flatout.data.jagged(inputs, targets), batch_first=False)
    assert turned == pytest.approx(whole)
    # Rows are samples, and only the targets are flattened.
    assert loss((inputs, targets.view(7, 4)), batch_first=True)
