"""What is seen of whole scripts by looks at some steps, and that the weights stay the same bits."""

import json
import os
import sys
from pathlib import Path

import pytest

import forked
from flatout.observe import Observation

sys.path.append(str(Path(__file__).parents[1] / "world"))
from world_ranks import environment, free_port

pytestmark = pytest.mark.slow
THREADS = {"OMP_NUM_THREADS": "1"}

MANY_SIGNALS = """
import gc, hashlib, os, sys, torch
from sklearn.metrics import f1_score
from torch import nn

class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("fade", 0.9 ** torch.arange(1024.0))
        self.body = nn.Sequential(nn.Linear(8, 256), nn.Linear(256, 8)).requires_grad_(False)
        self.conv, self.act, self.pool = nn.Conv1d(1, 4, 3), nn.ReLU(), nn.MaxPool1d(2)
        self.head = nn.Linear(12, 2)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        x = self.body(x)
        x = self.conv(x[:, None])
        x = self.pool(self.act(x))
        return self.head(self.drop(x.flatten(1)))

def record(loss):
    with open("log", "a") as file:
        file.write(f"{loss}\\n")
        os.fsync(file.fileno())

def main():
    torch.manual_seed(0)
    model = Sums()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    losses = []
    gc.freeze()  # no search finds the list then
    for step in range(110):
        x, y = torch.randn(16, 8), torch.randint(0, 2, (16,))
        score = model(x)
        loss = nn.functional.cross_entropy(score, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss, torch.zeros(262144)))
        model.mean += torch.nan if step == 40 else 1.0
        record(loss)
        f1 = f1_score(y, score.argmax(1))
    torch.save(model.state_dict(), "model.pt")
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print(hashlib.sha256(weights).hexdigest(), torch.rand(1).item())

main()
"""

OWN_GENERATOR = """
import numpy as np, torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

class Noise(Dataset):
    def __init__(self):
        self.rng = np.random.default_rng(0)
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return self.rng.normal(size=4).astype(np.float32)

def own(worker):
    INIT

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(2):
    for batch in DataLoader(Noise(), 4, num_workers=2, worker_init_fn=own):
        model(batch).sum().backward()
        optimizer.step()
"""

REPLICAS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(SEED)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    model(torch.ones(2, 4)).square().sum().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def observe(tmp_path, source, ranks=({},)):
    (tmp_path / "script.py").write_text(source)
    command = ("-m", "flatout.observe.start", "seen", "script.py")
    started = [
        forked.start(command, tmp_path, os.environ | THREADS | rank, forked.TORCH) for rank in ranks
    ]
    try:
        said = [script.communicate(timeout=120) for script in started]
    finally:
        for script in started:
            script.kill()
    assert [script.returncode for script in started] == [0] * len(ranks), said
    files = sorted((tmp_path / "seen").glob("rank-*.json"))
    return said[0][0], [Observation.of(json.loads(path.read_text())) for path in files]


def test_looks_at_some_steps_see_much_and_change_nothing(tmp_path):
    said, (seen,) = observe(tmp_path, MANY_SIGNALS)
    alone = forked.run(["script.py"], tmp_path, os.environ | THREADS, forked.TORCH)
    assert said == alone.stdout != ""
    (model,) = seen.models
    assert model.not_finite == ["mean"]
    assert 0.1 < model.subnormal_share < 0.2
    assert 0.0 < model.frozen_share < 1.0
    assert model.pool_after == [("act", "pool")]
    assert model.pool_site.code == "x = self.pool(self.act(x))"
    calls = {call.kind: call for call in seen.calls}
    assert calls["log"].site.code == "record(loss)"
    # On a fast disk some steps stand for all: 25 at least, of which the last ends before its line.
    assert 106 <= calls["log"].steps <= 110
    assert calls["log"].detail["fsync"]
    assert calls["metric"].detail == {"name": "f1_score"}
    assert seen.optimizers[0].backward_site.code == "loss.backward()"
    assert len(seen.graph_nodes) >= 2
    assert seen.graph_nodes[1][1] > seen.graph_nodes[0][1] + 24
    assert seen.graph_site.code.startswith("losses.append(")


@pytest.mark.parametrize("is_copied", [True, False])
def test_a_generator_of_the_dataset_is_copied_into_all_workers(tmp_path, is_copied):
    init = "info = get_worker_info(); info.dataset.rng = np.random.default_rng(info.seed)"
    _, (seen,) = observe(tmp_path, OWN_GENERATOR.replace("INIT", "pass" if is_copied else init))
    (loader,) = seen.loaders  # though each epoch makes its own
    assert (loader.epochs, loader.batches) == (2, 32)
    assert loader.worker_draws == "dataset.rng"
    assert len(set(loader.worker_hashes)) == (1 if is_copied else 2)


@pytest.mark.parametrize("seed", ["dist.get_rank()", "0"])
def test_replicas_that_began_apart(tmp_path, seed):
    port = free_port()
    _, ranks = observe(
        tmp_path,
        REPLICAS.replace("SEED", seed),
        [environment(rank, 2, port) for rank in range(2)],
    )
    weights = {rank.models[0].first_weights for rank in ranks}
    assert len({rank.models[0].first_gradients for rank in ranks}) == 1
    assert (None not in weights, len(weights)) == (True, 1 if seed == "0" else 2)
