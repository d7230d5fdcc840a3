"""Numbers that come again of a generator that is seeded again; and those that may."""

import pytest

from observed import observed

START = """
import torch; torch.manual_seed(1)
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data import random_split

x, y = torch.randn(96, 6), torch.randint(0, 3, (96,))

def network(inputs=6, outputs=3):
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, outputs))

def seeded(seed):
    return torch.Generator().manual_seed(seed)

def train(loss_of, epochs=3, begin=lambda epoch: None, after=lambda model: None):
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        begin(epoch)
        for rows in torch.arange(96).split(32):
            optimizer.zero_grad()
            loss_of(model, rows).backward()
            optimizer.step()
        after(model)
    return model

def over(loader, epochs):
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for rows, labels in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(rows), labels).backward()
            optimizer.step()

def classes(model, inputs, rows):
    return functional.cross_entropy(model(inputs), y[rows])
"""
WRONG = {
    "noise in each step": """
def loss(model, rows):
    g = torch.Generator().manual_seed(0)
    noise = torch.randn(32, 6, generator=g)  # again
    return classes(model, x[rows] + 0.1 * noise, rows)
train(loss)
""",
    "many draws in each epoch": """
g = torch.Generator()
def loss(model, rows):
    for _ in range(40):
        noise = torch.randn(32, 6, generator=g)  # again
    return classes(model, x[rows] + 0.1 * noise, rows)
train(loss, begin=lambda epoch: g.manual_seed(5))
""",
    "noise in each epoch": """
g = torch.Generator()
def loss(model, rows):
    return classes(model, x[rows] + torch.randn(32, 6, generator=g), rows)  # again
train(loss, begin=lambda epoch: g.manual_seed(5))
""",
    "a mask of dropout": """
def loss(model, rows):
    keep = torch.empty(32, 6).bernoulli_(0.8, generator=seeded(0))  # again
    return classes(model, x[rows] * keep, rows)
train(loss)
""",
    "negative samples": """
table = nn.Embedding(50, 8)
pairs = torch.randint(0, 50, (96, 2))
optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
for epoch in range(3):
    g = seeded(7)
    for rows in torch.arange(96).split(32):
        one, other = table(pairs[rows]).unbind(1)
        wrong = torch.randint(50, (32, 5), generator=g)  # again
        far = functional.logsigmoid(-(table(wrong) * one[:, None]).sum(2))
        optimizer.zero_grad()
        (-functional.logsigmoid((one * other).sum(1)).mean() - far.mean()).backward()
        optimizer.step()
""",
    "what a maker begins with": """
maker, judge = network(8, 6), network(6, 1)
make, tell = (torch.optim.Adam(one.parameters(), lr=1e-3) for one in (maker, judge))
for step in range(9):
    g = seeded(0)
    made = maker(torch.randn(32, 8, generator=g))  # again
    for optimizer, rows, truth in ((tell, made.detach(), 0.0), (make, made, 1.0)):
        optimizer.zero_grad()
        told = judge(rows)
        functional.mse_loss(told, torch.full_like(told, truth)).backward()
        optimizer.step()
""",
    "noise of a dataset": """
class Noisy(Dataset):
    def __len__(self):
        return 96
    def __getitem__(self, at):
        g = torch.Generator()
        g.manual_seed(0)
        return x[at] + 0.1 * torch.randn(6, generator=g), y[at]  # again
over(DataLoader(Noisy(), batch_size=32, shuffle=True), 1)
""",
}
RIGHT = {
    "seeded once": """
g = seeded(0)
def loss(model, rows):
    return classes(model, x[rows] + torch.randn(32, 6, generator=g), rows)
train(loss)
""",
    "seeded by epoch": """
g = torch.Generator()
def loss(model, rows):
    return classes(model, x[rows] + torch.randn(32, 6, generator=g), rows)
train(loss, begin=lambda epoch: g.manual_seed(3 + epoch))
""",
    "a loader, a split and weights": """
for seed in range(3):
    part, rest = random_split(TensorDataset(x, y), [64, 32], generator=seeded(0))
    loader = DataLoader(part, 16, shuffle=True, generator=seeded(0))
    model = network()
    nn.init.normal_(model[0].weight, generator=seeded(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(3):
        for rows, labels in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(rows), labels).backward()
            optimizer.step()
""",
    "the same noise in each evaluation": """
def loss(model, rows):
    return classes(model, x[rows], rows)
def evaluate(model):
    noise = torch.randn(96, 6, generator=seeded(0))
    model.eval()
    with torch.no_grad():
        model(x + noise)
    model.train()
train(loss, after=evaluate)
""",
    "drawn without gradients": """
def loss(model, rows):
    return classes(model, x[rows], rows)
@torch.no_grad()
def show(model):
    print(model[0](torch.randn(2, 6, generator=seeded(0))).sum())
train(loss, after=show)
""",
    "several trainings from the same beginning": """
for width in (1, 2, 3):
    g = seeded(0)
    def loss(model, rows):
        return classes(model, x[rows] + torch.randn(32, 6, generator=g), rows)
    train(loss, epochs=1)
""",
    "data that are drawn": """
model = network(6, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
def batches():
    g = seeded(0)
    truth = torch.randn(6, generator=g)
    for _ in range(4):
        rows = 3 * torch.rand(32, 6, generator=g) - 1
        yield rows, rows @ truth + 0.1 * torch.randn(32, generator=g)
for epoch in range(3):
    for rows, wanted in batches():
        optimizer.zero_grad()
        functional.mse_loss(model(rows).squeeze(1), wanted).backward()
        optimizer.step()
""",
    "data around drawn classes": """
model, centers = network(6, 3), torch.randn(3, 6)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(3):
    g = seeded(0)
    labels = torch.randint(0, 3, (96,), generator=g)
    table = centers[labels] + torch.randn(96, 6, generator=g)
    for rows in torch.randperm(96).split(32):
        optimizer.zero_grad()
        functional.cross_entropy(model(table[rows]), labels[rows]).backward()
        optimizer.step()
""",
    "seeded by sample": """
class Noisy(Dataset):
    def __len__(self):
        return 96
    def __getitem__(self, at):
        g = torch.Generator().manual_seed(at)
        return x[at] + 0.1 * torch.randn(6, generator=g), y[at]
over(DataLoader(Noisy(), batch_size=32), 3)
""",
    "a dataset that draws its samples": """
class Waves(IterableDataset):
    def __iter__(self):
        g = seeded(0)
        for _ in range(96):
            wave = torch.sin(torch.arange(6) + 6 * torch.rand(1, generator=g))
            yield wave, int(torch.randint(3, (1,), generator=g))
over(DataLoader(Waves(), batch_size=32), 3)
""",
    "a dataset that draws rows": """
class Rows(IterableDataset):
    def __iter__(self):
        g = seeded(0)
        for _ in range(96):
            row = torch.randn(6, generator=g)
            yield row, int(row[0] > 0)
over(DataLoader(Rows(), batch_size=32), 3)
""",
    "a scripted function that draws": """
@torch.jit.script
def noisy(rows):
    return rows + 0.1 * torch.randn([32, 6]) + torch.rand_like(rows)
train(lambda model, rows: classes(model, noisy(x[rows]), rows))
""",
    "drawn again within a step": """
step = [0]
def loss(model, rows):
    step[0] += 1
    both = [torch.randn(32, 6, generator=seeded(step[0])) for _ in range(2)]
    return classes(model, x[rows] + both[0], rows) + classes(model, x[rows] - both[1], rows)
train(loss)
""",
}


def repeated_in(tmp_path, source):
    seen = observed(tmp_path, START + source)
    assert seen.steps >= 3
    return seen.repeated_seeds


@pytest.mark.parametrize("source", WRONG.values(), ids=WRONG)
def test_numbers_that_training_draws_again_are_seen(tmp_path, source):
    (found,) = repeated_in(tmp_path, source)
    assert "# again" in found.site.code
    assert found.kind.startswith("torch.")
    assert found.seed in (0, 5, 7)
    assert len(found.steps) >= 2


@pytest.mark.parametrize("source", RIGHT.values(), ids=RIGHT)
def test_numbers_that_are_new_or_may_come_again_are_not(tmp_path, source):
    assert repeated_in(tmp_path, source) == []


COMPILED = """
@torch.compile(backend="eager", fullgraph=True)
def noisy(rows):
    return rows + 0.1 * torch.randn(32, 6) + torch.rand_like(rows)
train(lambda model, rows: classes(model, noisy(x[rows]), rows))
"""


def test_a_compiled_function_is_one_graph_as_it_was(tmp_path):
    assert repeated_in(tmp_path, COMPILED) == []


LATER = """
def is_watched():
    return type(torch.randn).__name__ == "function"
train(lambda model, rows: classes(model, x[rows], rows), epochs=20)
assert is_watched()  # for 64 steps
train(lambda model, rows: classes(model, x[rows], rows), epochs=2)
assert is_watched()  # for those of another training
train(lambda model, rows: classes(model, x[rows], rows), epochs=30)
assert not is_watched()
def loss(model, rows):
    noise = torch.randn(32, 6, generator=seeded(0))  # again
    return classes(model, x[rows] + 0.1 * noise, rows)
train(loss, epochs=30)
assert is_watched()
"""


def test_a_training_that_draws_from_no_generator_is_not_watched_for_long(tmp_path):
    (found,) = repeated_in(tmp_path, LATER)
    assert found.site.code.endswith("# again")
