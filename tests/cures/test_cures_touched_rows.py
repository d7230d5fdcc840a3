"""Tables of scripts are stepped by touched rows, and everything ends as it does without."""

import json

import pytest

from flatout.kernels import table_rows

pytestmark = pytest.mark.skipif(not table_rows.available(), reason="the C extension is absent")

TRAINING = """
import copy, json, sys, torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2000, 4) * 0.1)

    def forward(self, ids):
        return F.embedding(ids, self.weight)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.own = nn.Embedding(3000, 4), Own()
        self.bag = nn.EmbeddingBag(1500, 4, mode="sum")
        self.small, self.tied = nn.Embedding(10, 4), nn.Embedding(1200, 4)
        self.hooked = nn.Embedding(1100, 4)
        self.hooked.weight.register_hook(lambda g: torch.cat([g[:500] * 0, g[500:]]))
        self.head = nn.Linear(4, 1)

    def forward(self, ids):
        found = self.one(ids).sum(1) + self.own(ids % 2000).sum(1) + self.bag(ids % 1500)
        found = found + self.small(ids % 10).sum(1) + self.tied(ids % 1200).sum(1)
        found = found + self.hooked(ids % 1100).sum(1) + self.own.weight[ids[:, 0] % 2000]
        return self.head(found) + (found @ self.tied.weight[:4]).mean(1, keepdim=True)

model = Model()
averaged = copy.deepcopy(model)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5)
losses = []
for step in range(60):
    ids = (torch.rand(16, 3) ** 3 * 3000).long()
    optimizer.zero_grad()
    loss = (model(ids) - (ids % 7).float().mean(1, keepdim=True)).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
    if step % 5 == 0:
        with torch.no_grad():
            for mean, weight in zip(averaged.parameters(), model.parameters()):
                mean.lerp_(weight, 0.1)
    if step == 30:
        best = copy.deepcopy(model)
    if sys.argv[1:] == ["second"] and step == 20:
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5)

def sums(model):
    return {name: value.double().abs().sum().item() for name, value in model.state_dict().items()}

moments = optimizer.state_dict()["state"]
print(json.dumps({"losses": losses, "last": sums(model), "averaged": sums(averaged),
                  "best": sums(best), "classes": [type(p).__name__ for p in best.parameters()],
                  "moments": [one["exp_avg"].abs().sum().item() for one in moments.values()]}))
"""


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    path = tmp_path_factory.mktemp("training") / "train.py"
    path.write_text(TRAINING)
    return path


@pytest.mark.parametrize("arguments", [(), ("second",)])
def test_weights_moments_copies_and_averages_are_those_of_the_dense_step(
    scripts, training, arguments
):
    plain = scripts.run(training, arguments=arguments)
    cured = scripts.run(training, "compute.touched_rows=on", arguments=arguments)
    assert cured.code == plain.code == 0, cured.err
    wanted, found = json.loads(plain.out), json.loads(cured.out)
    assert set(found["classes"]) == {"Parameter"}
    for part in ("last", "averaged", "best"):
        assert found[part] == pytest.approx(wanted[part], rel=1e-4)
    for part in ("losses", "moments"):
        assert found[part] == pytest.approx(wanted[part], rel=1e-3, abs=1e-6)
    assert cured.applied == {"compute.touched_rows": "3 tables of 6,500 rows, touched rows only"}
    told = cured.left.get("compute.touched_rows", "")
    assert ("several optimizers step a table" in told) is bool(arguments)
    assert arguments or "a hook reads the gradient of a table of 1,100" in told
