"""The samples come in an order that is a function of seed, epoch and sample number alone."""

import pytest
import torch
from torch.utils.data import Dataset
from train_jobs import data, network, trainer

import flatout
from flatout.data.randomness import order
from flatout.recipe import Recipe

pytestmark = pytest.mark.usefixtures("one_thread")

# `auto` reads samples once more where it compares who makes the batches.
PLAIN = Recipe(input={"workers": 0})


class Numbers(Dataset):
    """Notes which samples are read, in this process."""

    def __init__(self):
        self.x, self.y = data()
        self.read = []

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.read.append(index)
        return self.x[index], self.y[index]


def orders(seed, epochs=3, n=150):
    return [i for epoch in range(epochs) for i in order(n, seed, epoch).tolist()]


@pytest.mark.parametrize("seed", [0, 7])
def test_each_epoch_has_the_order_of_its_number(seed):
    dataset = Numbers()
    trainer(network(), seed=seed, recipe=PLAIN).fit(
        dataset, batch_size=32, epochs=3, progress=False
    )
    # A look at the first batches before, to check them against the model, leaves no trace.
    assert dataset.read == orders(seed)


def test_without_shuffling_it_is_the_order_of_the_data():
    dataset = Numbers()
    trainer(network(), recipe=PLAIN).fit(
        dataset, batch_size=32, epochs=2, shuffle=False, progress=False
    )
    assert dataset.read == [*range(150), *range(150)]


def test_neither_the_random_state_nor_a_validation_moves_it():
    a, b = Numbers(), Numbers()
    torch.manual_seed(1)
    options = {"batch_size": 32, "epochs": 2, "progress": False}
    trainer(network(), recipe=PLAIN).fit(a, **options)
    torch.manual_seed(2)
    trainer(network(), recipe=PLAIN).fit(b, validation_data=data(seed=3), **options)
    assert a.read == b.read


def test_the_order_draws_nothing_from_the_users_generators():
    x, y = data()
    job = trainer(network(dropout=0))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    job.fit((x, y), batch_size=32, epochs=2, validation_data=(x, y), progress=False)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_workers_do_not_change_the_result():
    results = []
    for workers in (0, 2):
        model = network()
        torch.manual_seed(7)
        job = trainer(model, recipe=Recipe(input={"workers": workers}))
        job.fit(Numbers(), batch_size=32, epochs=2, progress=False)
        results.append(torch.cat([p.flatten() for p in model.parameters()]))
    assert torch.equal(*results)


@pytest.mark.parametrize("workers", [0, "auto"])
def test_the_loop_gives_the_same_order(workers):
    dataset = Numbers()
    source = flatout.data.as_source(dataset, batch_size=32, seed=4, workers=workers)
    loop = flatout.Loop(seed=4)
    model = network()
    loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen = []
    for _ in loop.epochs(3):
        for batch in loop.batches(source):
            seen.extend(batch.indices.tolist())
            loop.step(lambda b: model(b.inputs).square().mean(), batch)
    loop.close()
    assert seen == orders(4)
    if workers == 0:
        assert dataset.read == seen
