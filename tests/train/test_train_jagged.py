"""Training on batches whose inputs have no row for each sample gives what a plain loop gives."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader
from train_jobs import StopAt, figures, quiet, same, same_state, saving, trainer

import flatout
from flatout.errors import DataError, NumbersError, OutOfMemory
from flatout.recipe import Compute, Memory, Recipe

pytestmark = pytest.mark.usefixtures("one_thread")

FIELDS, ROWS, SAMPLES, BATCH = 3, 40, 70, 16


class Clicks(nn.Module):
    """As DLRM: numbers, and a bag of ids for each field."""

    def __init__(self, rows=ROWS, **bags):
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, 4, **bags) for _ in range(FIELDS))
        self.bottom = nn.Linear(5, 4)
        self.top = nn.Linear(4 * (FIELDS + 1), 1)

    def forward(self, numbers, offsets, ids):
        found = [bag(own, at) for bag, own, at in zip(self.tables, ids, offsets, strict=True)]
        return self.top(torch.cat([self.bottom(numbers), *found], 1))[:, 0]


def samples(count=SAMPLES, rows=ROWS):
    draw = torch.Generator().manual_seed(1)
    for _ in range(count):
        numbers = torch.randn(5, generator=draw)
        sizes = torch.randint(0, 4, (FIELDS,), generator=draw).tolist()
        ids = [torch.randint(0, rows, (size,), generator=draw) for size in sizes]
        yield numbers, ids, (numbers.sum() + sum(map(len, ids)) > 4).float()


def collate(rows, *, last=False, stacked=True):
    """What DLRM's own loaders give, with the inputs in one tuple."""
    fields = list(zip(*[ids for _, ids, _ in rows], strict=True))
    counts = [torch.tensor([0, *map(len, field)]).cumsum(0) for field in fields]
    offsets = [of_field if last else of_field[:-1] for of_field in counts]
    ids = [torch.cat(field) for field in fields]
    inputs = torch.stack([n for n, *_ in rows]), torch.stack(offsets) if stacked else offsets, ids
    return inputs, torch.stack([y for *_, y in rows])


def loader(collate_fn=collate, rows=None, **options):
    options = {"shuffle": True, "generator": torch.Generator().manual_seed(3)} | options
    return DataLoader(rows or list(samples()), BATCH, collate_fn=collate_fn, **options)


def plain(model, optimizer, batches, epochs=2, loss=F.binary_cross_entropy_with_logits, every=1):
    """The loop that a user would write; the mean loss of each epoch."""
    means = []
    for _ in range(epochs):
        total = count = 0
        taken = list(batches)
        for start in range(0, len(taken), every):
            part = taken[start : start + every]
            optimizer.zero_grad()
            of_step = sum(len(y) for _, y in part)
            for inputs, y in part:
                value = loss(model(*inputs), y)
                (value if every == 1 else value * len(y) / of_step).backward()
                total, count = total + value.item() * len(y), count + len(y)
            optimizer.step()
        means.append(total / count)
    return means


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2)


@pytest.mark.parametrize(
    "form", [{}, {"stacked": False}, {"last": True}, {"last": True, "stacked": False}], ids=str
)
def test_ids_with_offsets_train_as_in_a_plain_loop(form):
    def made(rows):
        return collate(rows, **form)

    bags = {"mode": "sum", "include_last_offset": form.get("last", False)}
    ours, theirs = Clicks(**bags), Clicks(**bags)
    optimizer = adam(theirs)
    means = plain(theirs, optimizer, loader(made))
    job = trainer(ours, loss="binary_cross_entropy", optimizer=adam(ours), metrics=["auc"])
    history = job.fit(loader(made), epochs=2, progress=False, validation_data=loader(made))
    assert same(ours, theirs)
    assert same_state(job.optimizer, optimizer)
    assert [epoch["loss"] for epoch in history.epochs] == pytest.approx(means, rel=1e-6)
    assert history.timeline.samples == 2 * SAMPLES
    # The same samples, some batches at a time or all at once.
    rows = list(samples())
    inputs, y = made(rows)
    with torch.no_grad():
        output = theirs(*inputs)
    logs = job.evaluate(loader(made, rows, shuffle=False))
    assert logs["loss"] == pytest.approx(
        F.binary_cross_entropy_with_logits(output, y).item(), rel=1e-6
    )
    assert 0.5 < logs["auc"] <= 1
    torch.testing.assert_close(job.predict(loader(made, rows, shuffle=False)), output)
    alone = [(batch[0],) for batch in loader(made, rows, shuffle=False)]  # no targets
    torch.testing.assert_close(job.predict(iter(alone)), output)


def test_batches_are_accumulated_whole():
    ours, theirs = Clicks(), Clicks()
    plain(theirs, adam(theirs), loader(), every=3)
    job = trainer(ours, loss="binary_cross_entropy", optimizer=adam(ours), accumulate=3)
    history = job.fit(loader(), epochs=2, progress=False)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-5, atol=1e-7)
    assert history.timeline.steps == 4


def test_tables_are_stepped_by_rows():
    dense, by_rows = Clicks(mode="sum"), Clicks(mode="sum")
    for model, asked in ((dense, "off"), (by_rows, "on")):
        recipe = Recipe(compute=Compute(touched_rows=asked, precision="fp32"))
        job = trainer(model, loss="binary_cross_entropy", optimizer=adam(model), recipe=recipe)
        job.fit(loader(), epochs=3, progress=False)
    for name, value in dense.state_dict().items():
        assert (by_rows.state_dict()[name] - value).norm() <= 1e-5 * value.norm(), name


def test_a_loop_of_ones_own_takes_them():
    ours, theirs = Clicks(), Clicks()
    plain(theirs, adam(theirs), loader())
    source, optimizer = flatout.data.as_source(loader()), adam(ours)

    def compute(batch):
        assert batch.is_jagged
        return F.binary_cross_entropy_with_logits(ours(*batch.inputs), batch.targets)

    loop = flatout.Loop(allow="exact", say=quiet)
    loop.prepare(ours, optimizer, compute=compute, data=source, steps=10)
    for _ in loop.epochs(2):
        for batch in loop.batches(source):
            loop.step(compute, batch)
    loop.close()
    assert same(ours, theirs)


def test_a_resume_in_the_middle_of_an_epoch(tmp_path):
    def fit(model, run, **options):
        job = trainer(
            model, loss="binary_cross_entropy", optimizer=adam(model), run=run, recipe=saving(2)
        )
        return job.fit(loader(), epochs=2, progress=False, **options)

    whole = Clicks()
    wanted = fit(whole, tmp_path / "whole", callbacks=[StopAt(0, quiet)])
    cut = StopAt(7, lambda state: state.stop("enough"))
    fit(Clicks(), tmp_path / "cut", callbacks=[cut])
    ours = Clicks()
    found = fit(ours, tmp_path / "cut", resume=True, callbacks=[StopAt(0, quiet)])
    assert same(ours, whole)
    assert figures(found)[-1] == figures(wanted)[-1]


def test_weights_and_class_weights():
    ours, theirs = Clicks(), Clicks()

    def weighed(rows):
        inputs, y = collate(rows)
        return inputs, y, 1 + y * 2

    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for inputs, y, weight in loader(weighed):
        optimizer.zero_grad()
        weight = weight * torch.where(y > 0, 0.5, 1.0)
        losses = F.binary_cross_entropy_with_logits(theirs(*inputs), y, reduction="none")
        ((losses * weight).sum() / weight.sum()).backward()
        optimizer.step()
    job = trainer(
        ours,
        loss="binary_cross_entropy",
        optimizer=torch.optim.SGD(ours.parameters(), lr=0.1),
    )
    job.fit(loader(weighed), epochs=1, progress=False, class_weight={1: 0.5})
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-5, atol=1e-7)


def test_settings_are_tried_on_them():
    """With `auto`, and validation and evaluation that may be joined or compiled."""
    model = Clicks()
    job = flatout.Trainer(model, loss="binary_cross_entropy", optimizer=adam(model), say=quiet)
    history = job.fit(loader(), epochs=3, progress=False, validation_data=loader())
    assert history.epochs[-1]["loss"] < history.epochs[0]["loss"]
    choices = history.recipe.choices
    assert choices["compute.capture"].value == "off"


# -- other forms ---------------------------------------------------------------------------------


class Convolution(nn.Module):
    """Sums over a node's neighbors; of graphs one output each, or one of each node."""

    def __init__(self, pooled):
        super().__init__()
        torch.manual_seed(0)
        self.own, self.others, self.pooled = nn.Linear(4, 8), nn.Linear(4, 8), pooled
        self.last = nn.Linear(8, 3)

    def forward(self, x, edges, graph=None):
        around = torch.zeros_like(x).index_add_(0, edges[1], x[edges[0]])
        hidden = torch.relu(self.own(x) + self.others(around))
        if self.pooled:
            graphs = int(graph.max()) + 1
            hidden = hidden.new_zeros(graphs, 8).index_add_(0, graph, hidden)
        return self.last(hidden)


def graphs(count=6):
    """Batches of graphs of 3 to 6 nodes: x, edges, of which graph a node is; and labels."""
    draw = torch.Generator().manual_seed(2)
    for _ in range(count):
        sizes = torch.randint(3, 7, (5,), generator=draw)
        nodes, graph = int(sizes.sum()), torch.arange(5).repeat_interleave(sizes)
        edges = torch.randint(0, nodes, (2, 3 * nodes), generator=draw)
        yield torch.randn(nodes, 4, generator=draw), edges, graph


@dataclass
class Nodes:
    x: torch.Tensor
    edges: torch.Tensor
    graph: torch.Tensor
    kind: str = "molecules"


class OnNodes(Convolution):
    def forward(self, nodes):
        assert nodes.kind == "molecules"
        return super().forward(nodes.x, nodes.edges, nodes.graph)


@pytest.mark.parametrize("targets", ["graphs", "nodes"])
@pytest.mark.parametrize("kind", ["tuple", "dataclass", "jagged"])
def test_graphs_train_as_in_a_plain_loop(kind, targets):
    pooled = targets == "graphs"
    given = [(parts, torch.arange(5 if pooled else len(parts[0])) % 3) for parts in graphs()]
    theirs = Convolution(pooled)
    plain(theirs, adam(theirs), given, loss=F.cross_entropy)
    if kind == "dataclass":
        ours, data = OnNodes(pooled), [(Nodes(*parts), y) for parts, y in given]
    elif kind == "jagged":
        ours, data = Convolution(pooled), [flatout.data.jagged(*pair) for pair in given]
    else:
        ours, data = Convolution(pooled), given
    job = trainer(ours, loss="cross_entropy", optimizer=adam(ours), metrics=["accuracy"])
    job.fit(data, epochs=2, progress=False)
    assert same(ours, theirs)
    assert len(job.predict(data)) == sum(len(y) for _, y in given)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.read, self.last = nn.GRU(4, 8), nn.Linear(8, 3)

    def forward(self, sequences):
        return self.last(self.read(sequences)[1][0])


def test_packed_sequences_train_as_in_a_plain_loop():
    draw = torch.Generator().manual_seed(2)
    given = []
    for _ in range(5):
        lengths = torch.randint(1, 6, (4,), generator=draw).tolist()
        rows = [torch.randn(length, 4, generator=draw) for length in lengths]
        given.append((pack_sequence(rows, enforce_sorted=False), torch.arange(4) % 3))
    theirs, ours = Packed(), Packed()
    plain(theirs, adam(theirs), [((rows,), y) for rows, y in given], loss=F.cross_entropy)
    job = trainer(ours, loss="cross_entropy", optimizer=adam(ours))
    job.fit(given, epochs=2, progress=False)
    assert same(ours, theirs)
    assert job.predict(given).shape == (20, 3)


# -- what goes wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize("sample", [5, 60], ids=["first batch", "later step"])
def test_an_id_outside_of_its_table_is_named(sample):
    rows = list(samples())
    rows[sample][1][1] = torch.tensor([3, ROWS, 4])
    model = Clicks()
    job = trainer(model, loss="binary_cross_entropy", optimizer=adam(model))
    with pytest.raises(
        DataError, match=rf"id {ROWS} is not in 0\.\.{ROWS - 1}.* tables\.1"
    ) as caught:
        job.fit(loader(rows=rows, shuffle=False), epochs=1, progress=False)
    place = sum(len(ids[1]) for _, ids, _ in rows[sample - sample % BATCH : sample]) + 1
    row = sample % BATCH
    assert caught.value.where == f"inputs[2][1], place {place}, row {row} of the batch"


class Tokens(nn.Module):
    """Means over sequences that lie behind one another."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.last = nn.Embedding(30, 4), nn.Linear(4, 2)

    def forward(self, tokens, cu_seqlens, scale):
        sums = self.words(tokens).cumsum(0)
        sums = torch.cat([sums.new_zeros(1, 4), sums])[cu_seqlens]
        return self.last((sums[1:] - sums[:-1]) * scale[:, None])


def sequences(spoilt=None, token=7):
    tokens = torch.arange(12) % 30
    tokens[8] = token
    scale = torch.ones(3)
    if spoilt is not None:
        scale[spoilt] = torch.nan
    return (tokens, torch.tensor([0, 4, 7, 12]), scale), torch.tensor([0, 1, 0])


def test_bad_samples_of_packed_tokens_are_named():
    model = Tokens()
    job = trainer(model, loss="cross_entropy", optimizer=adam(model))
    with pytest.raises(NumbersError, match="NaN or infinity in row 1 of the batch"):
        job.fit([sequences(), sequences(spoilt=1)], epochs=1, progress=False)
    with pytest.raises(DataError, match=r"id 99 is not in 0\.\.29") as caught:
        job.fit([sequences(), sequences(token=99)], epochs=1, progress=False)
    assert caught.value.where == "inputs[0], place 8, row 2 of the batch"


def test_a_node_that_is_not_finite_is_named_by_its_graph():
    (x, edges, graph), *_ = graphs()
    x[int((graph < 3).sum())] = torch.inf  # the first node of graph 3
    model = Convolution(True)
    job = trainer(model, loss="cross_entropy", optimizer=adam(model))
    data = [((x, edges, graph), torch.arange(5) % 3)]
    with pytest.raises(NumbersError, match=r"inputs\[0\]: NaN or infinity in row 3 of the batch"):
        job.fit(data, epochs=1, progress=False)


def test_what_would_cut_them_says_what_to_do():
    model = Clicks()

    def fit(**recipe):
        recipe = Recipe(**recipe)
        job = trainer(model, loss="binary_cross_entropy", optimizer=adam(model), recipe=recipe)
        job.fit(loader(), epochs=1, progress=False)

    with pytest.raises(
        DataError, match="micro_batch=4 requires splitting a batch of 16 samples"
    ) as caught:
        fit(memory=Memory(micro_batch=4))
    assert "smaller batches, with accumulate=N" in caught.value.do
    fit(memory=Memory(micro_batch=BATCH))
    with pytest.raises(DataError, match="dropout = by_sample needs a sample's row in the batch"):
        fit(compute=Compute(dropout="by_sample"))


def test_memory_that_runs_out_cannot_be_helped_by_a_split(monkeypatch):
    model = Clicks()
    job = trainer(model, loss="binary_cross_entropy", optimizer=adam(model))
    job.fit(loader(), epochs=1, progress=False)

    def full(*_):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(model.top, "forward", full)
    with pytest.raises(OutOfMemory, match="cannot be split") as caught:
        job.fit(loader(), epochs=1, progress=False)
    assert "smaller batches" in caught.value.do
    with pytest.raises(OutOfMemory, match="of 16 samples, which cannot be split"):
        job.evaluate(loader())


def test_lengths_that_differ_by_mistake_are_refused_before_the_first_step():
    def short(rows):
        (numbers, *_), y = collate(rows)
        return numbers, y[:-1]

    model = nn.Linear(5, 1)
    job = trainer(model, loss="mse", optimizer=adam(model))
    with pytest.raises(DataError, match="inputs and targets differ in length: 16 and 15") as caught:
        job.fit(loader(short), epochs=1, progress=False)
    assert "flatout.data.jagged(inputs, targets)" in caught.value.do
