"""Scripts whose models see the token that they are to tell, and others."""

import json
import os

import pytest

import forked
from flatout.observe import Observation

START = """
import random, sys
import numpy as np
import torch; torch.manual_seed(0); random.seed(0); np.random.seed(0)
from torch import nn
from torch.nn import functional

class Model(nn.Module):
    def __init__(self, is_causal):
        super().__init__()
        self.is_causal, self.calls, self.kept = is_causal, 0, []
        self.table = nn.Embedding(30, 16)
        self.position = nn.Parameter(torch.randn(16, 16))
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 30)

    def forward(self, ids):
        self.calls += 1
        self.kept.append(random.random() + np.random.rand())
        mask = None
        if self.is_causal:
            mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x = self.table(ids) + self.position[: ids.shape[1]]
        x = self.layer(x, src_mask=mask, is_causal=self.is_causal)
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))

def train(model, steps=12, length=17, parts=1):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(parts):
            ids = torch.randint(3, 30, (8, length))
            told = model(ids[:, :-1])  # here
            loss = functional.cross_entropy(told.flatten(0, 1), ids[:, 1:].flatten())
            (loss / parts).backward()
        optimizer.step()
    return model
"""
END = """
numbers = [p.double().sum().item() for p in (*model.parameters(), *model.buffers())]
numbers += [model.calls, sum(model.kept), torch.rand(()).item(), random.random()]
print([float(number).hex() for number in (*numbers, np.random.rand())])
"""


def run(tmp_path, source, *, observed=True):
    (tmp_path / "script.py").write_text(START + source)
    start = ("-m", "flatout.observe.start", tmp_path / "seen", "script.py")
    command = start if observed else ("script.py",)
    ran = forked.run(command, tmp_path, {**os.environ, "OMP_NUM_THREADS": "1"}, forked.TORCH)
    assert ran.returncode == 0, ran.stderr
    return ran


def seen_in(tmp_path):
    seen = Observation.of(json.loads((tmp_path / "seen" / "rank-0.json").read_text()))
    assert not [note for note in seen.notes if "a look failed" in note]
    return seen.seen_ahead


@pytest.mark.slow
def test_training_goes_on_to_the_bit(tmp_path):
    source = "model = train(Model(False))" + END
    plain = run(tmp_path, source, observed=False)
    observed = run(tmp_path, source)
    assert observed.stdout == plain.stdout
    (found,) = seen_in(tmp_path)
    assert "# here" in found.site.code
    assert (found.kind, found.length, found.targets) == ("__main__.Model", 16, 8 * 14)
    assert (found.layer, found.layer_kind) == ("layer.self_attn", "MultiheadAttention")


@pytest.mark.slow
def test_a_later_training_is_looked_at_too(tmp_path):
    run(tmp_path, "train(Model(True))\ntrain(Model(False), parts=2)\n")
    (found,) = seen_in(tmp_path)
    assert found.change > 1e-3


DDP = """
torch.distributed.init_process_group("gloo", init_method="file://" + os.path.abspath("ranks"),
    rank=0, world_size=1)
model = train(nn.parallel.DistributedDataParallel(Model({is_causal}))).module
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_model_in_ddp_is_inspected_as_without_ddp(tmp_path, is_causal):
    source = "import os" + DDP.format(is_causal=is_causal) + END
    plain = run(tmp_path, source, observed=False)
    (tmp_path / "ranks").unlink()
    assert run(tmp_path, source).stdout == plain.stdout
    found = [(one.kind, one.layer, "# here" in one.site.code) for one in seen_in(tmp_path)]
    assert found == [] if is_causal else [("__main__.Model", "layer.self_attn", True)]


LEFT_ALONE = {
    "causal": "train(Model(True))",
    "two steps": "train(Model(False), 2)",
    "compiled": "train(torch.compile(Model(False), backend='eager'))",
    "two calls": """
model = Model(False)
optimizer = torch.optim.Adam(model.parameters())
for step in range(12):
    ids = torch.randint(3, 30, (8, 17))
    told = (model(ids[:, :-1]) + model(ids[:, :-1])) / 2
    functional.cross_entropy(told.flatten(0, 1), ids[:, 1:].flatten()).backward()
    optimizer.step()
""",
}


@pytest.mark.parametrize("source", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_others_are_left_alone(tmp_path, source):
    run(tmp_path, source)
    assert seen_in(tmp_path) == []


@pytest.mark.slow
def test_where_steps_are_long_it_waits(tmp_path):
    waits = """
from flatout.observe import next_tokens, watch
next_tokens._LONG_NS = 0
watch.Watch.affords = lambda self, ns: self.lanes.steps > {steps}
train(Model(False), 20)
"""
    run(tmp_path, waits.format(steps=20))
    assert seen_in(tmp_path) == []
    run(tmp_path, waits.format(steps=5))
    (found,) = seen_in(tmp_path)
    assert "# here" in found.site.code
