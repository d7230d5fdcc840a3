"""Cures that change nothing of the result: the weights are equal bit for bit."""

import json

import pytest

TRAINING = """
import gc, hashlib, json, logging, sys, numpy as np, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Made(Dataset):
    made = 0
    def __init__(self, n):
        self.n = n
    def __len__(self):
        return self.n
    def __getitem__(self, i):
        Made.made += 1
        rng = np.random.default_rng(i)
        image = rng.standard_normal((9, 9, 2)).astype(np.float32)
        return torch.from_numpy(image.transpose(2, 0, 1)), int(rng.integers(3))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(36, 3)
        self.rarely = nn.Parameter(torch.ones(3))
    def forward(self, x):
        x = self.pool(self.relu(self.first(x)))
        return self.last(self.drop(x.flatten(1)))

def main():
    torch.manual_seed(0)
    data = Made(44)
    train = DataLoader(data, batch_size=8, shuffle=True)
    test = DataLoader(data, batch_size=16)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    tested = []
    for epoch in range(4):
        model.train()
        for step, (x, y) in enumerate(train):
            optimizer.zero_grad(set_to_none=False)
            output = model(x)
            if step == 1:
                output = output + model.rarely
            loss = nn.functional.cross_entropy(output, y)
            loss.backward()
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
            optimizer.step()
            gc.collect(0)
            print("step", step, loss.item())
            logging.getLogger("train").info("step")
        model.eval()
        tested += [nn.functional.cross_entropy(model(x), y).item() for x, y in test]
        print("epoch", epoch)
    weights = b"".join(v.detach().contiguous().numpy().tobytes() for v in
                       [*model.state_dict().values(), *optimizer.state_dict()["state"][4].values()])
    print(json.dumps({
        "weights": hashlib.sha256(weights).hexdigest(),
        "tested": tested,
        "made": Made.made,
        "workers": [train.num_workers, train.persistent_workers],
        "gc": gc.isenabled(),
    }))

if __name__ == "__main__":
    main()
"""

EXACT = {
    "input.workers=2": "input.workers",
    "script.zero_grad=set_to_none": "script.zero_grad",
    "script.garbage=scheduled": "script.garbage",
    "script.log_every=5": "script.log_every",
    "script.evaluation=no_grad": "script.evaluation",
    "script.cache=memory": "script.cache",
    "compute.rewrites=on": "compute.rewrites",
    "memory.allocator=keep": "memory.allocator",
}


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    path = tmp_path_factory.mktemp("training") / "train.py"
    path.write_text(TRAINING)
    return path


@pytest.fixture(scope="module")
def plain(scripts, training):
    done = scripts.run(training)
    assert done.code == 0, done.err
    assert done.err == ""
    return result(done)


def result(done):
    return json.loads(done.out.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("setting", EXACT)
def test_a_cure_leaves_the_result_as_it_is(scripts, training, plain, setting):
    done = scripts.run(training, setting)
    assert done.code == 0, done.err
    assert done.applied.get(EXACT[setting])
    assert done.left == {}
    found = result(done)
    assert found["weights"] == plain["weights"]
    assert found["tested"] == plain["tested"]


def test_all_of_them_together_too(scripts, training, plain):
    done = scripts.run(training, *EXACT)
    assert set(EXACT.values()) <= set(done.applied)
    found = result(done)
    assert (found["weights"], found["tested"]) == (plain["weights"], plain["tested"])
    assert found["workers"] == [2, True]
    assert found["made"] < 44  # by this process, to try the samples out; the rest by workers
    assert not found["gc"]


def test_each_sample_is_made_once_and_twice_at_first(scripts, training, plain):
    found = result(scripts.run(training, "script.cache=memory"))
    assert plain["made"] == 44 * 8
    assert found["made"] == 44 + 2 * 16


STREAM = """
class Made(IterableDataset):
    made = 0
    def __iter__(self):
        for i in range(43):
            Made.made += 1
            rng = np.random.default_rng(i)
            image = rng.standard_normal((9, 9, 2)).astype(np.float32)
            yield torch.from_numpy(image.transpose(2, 0, 1)), int(rng.integers(3))
"""


@pytest.mark.parametrize("ends", ["", "            if step == 3:\n                break\n"])
def test_a_stream_is_made_twice_and_then_given_from_memory(scripts, tmp_path, ends):
    begins, _, rest = TRAINING.partition("class Made")
    _, _, rest = rest.partition("class Net")
    source = begins.replace("Dataset", "IterableDataset") + STREAM + "\nclass Net" + rest
    source = source.replace("Made(44)", "Made()").replace(", shuffle=True", "")
    source = source.replace('            print("step"', ends + '            print("step"')
    # Trained on and evaluated alike: each epoch comes past the samples twice.
    path = tmp_path / "train.py"
    path.write_text(source)
    plain, cured = scripts.run(path), scripts.run(path, "script.cache=memory")
    assert plain.code == cured.code == 0, cured.err
    assert cured.left == {}, cured.err
    assert (
        cured.applied.get("script.cache") == "samples of Made in memory, once two epochs were alike"
    )
    assert cured.left == {}
    whole = 43 if not ends else 4 * 8
    assert result(plain)["made"] == 4 * (whole + 43)
    assert result(cured)["made"] == whole + 43 + (43 if ends else 0)
    assert (result(cured)["weights"], result(cured)["tested"]) == (
        result(plain)["weights"],
        result(plain)["tested"],
    )


def test_only_each_nth_step_is_told_and_what_is_left_out_is_counted(scripts, training):
    done = scripts.run(training, "script.log_every=5")
    steps = [line for line in done.out.splitlines() if line.startswith("step")]
    # The first step's line comes before it is known that each step has one.
    assert [int(line.split()[1]) for line in steps] == [0, 4, 3, 2, 1]
    assert done.out.count("epoch") == 4
    assert "19 lines of the script's log left out" in done.err
