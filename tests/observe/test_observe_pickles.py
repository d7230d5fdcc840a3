"""A script's pickles, copies and attribute lists of its objects are the same without Flatout."""

import json
import os

import pytest

import forked

FLATOUT = ("-c", "from flatout.cli.main import main; main()")
SCRIPT = """
import copy, hashlib, io, json
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __init__(self):
        self.rows = torch.randint(1, 50, (64, 12))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return self.rows[number, :-1], self.rows[number, 1:]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.rnn = nn.Embedding(50, 8), nn.LSTM(8, 8, batch_first=True)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.layers, self.norm = nn.TransformerEncoder(layer, 1), nn.BatchNorm1d(11)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(8, 50)

    def forward(self, ids):
        seen = self.norm(self.drop(self.rnn(self.words(ids))[0]))
        return self.head(self.layers(seen))


def looked(module, args, output):
    pass


def fingerprint(thing):
    saved = []
    for one in (thing, copy.deepcopy(thing)):
        file = io.BytesIO()
        torch.save(one, file)
        assert b"flatout" not in file.getvalue()
        saved.append(hashlib.sha1(file.getvalue()).hexdigest())
    is_module = isinstance(thing, nn.Module)
    parts = [*thing.modules(), *thing.parameters()] if is_module else [thing]
    listed = []
    for part in parts:
        own = vars(part) if hasattr(part, "__dict__") else {}
        sized = {name: value for name, value in own.items() if hasattr(value, "__len__")}
        sizes = {name: len(value) for name, value in sized.items() if name != "_iterator"}
        tensor = part if isinstance(part, torch.Tensor) else None
        hooks = tensor is not None and (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
        listed.append([str(type(part)), sorted(own), sizes, str(hooks)])
    return [saved, hashlib.sha1(json.dumps(listed).encode()).hexdigest()]


torch.manual_seed(0)
data = Rows()
loader = DataLoader(data, 8, shuffle=True)
model, teacher = Model(), Model().requires_grad_(False)
mean = torch.optim.swa_utils.AveragedModel(model)
criterion = nn.CrossEntropyLoss(ignore_index=-100)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 48)
scaler = torch.amp.GradScaler("cpu", enabled=False)
seen = []
for epoch in range(3):
    model.train()
    for x, y in loader:
        with torch.no_grad():
            soft = teacher(x)
        logits = model(x)
        loss = criterion(logits.flatten(0, 1), y.flatten())
        loss = loss + nn.functional.mse_loss(logits, soft)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        mean.update_parameters(model)
        mine = nn.Linear(1, 1)
        mine.register_forward_hook(looked)
        optimizer.register_step_pre_hook(lambda *given: None).remove()
        things = {
            "model": model, "teacher": teacher, "mean": mean, "criterion": criterion,
            "optimizer": optimizer, "its state": optimizer.state_dict(),
            "weights": model.state_dict(), "schedule": schedule, "scaler": scaler,
            "loader": loader, "data": data, "sampler": loader.sampler,
            "batch sampler": loader.batch_sampler, "batch": [x, y], "mine": mine,
            "gradients": [parameter.grad for parameter in model.parameters()],
        }
        if epoch == 0 or len(seen) < 9:
            seen.append({name: fingerprint(thing) for name, thing in things.items()})
with open("seen.json", "w") as file:
    json.dump(seen, file)
"""


def fingerprints(folder, *start):
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    ran = forked.run(start, folder, {**os.environ, "OMP_NUM_THREADS": "1"}, forked.TORCH)
    assert ran.returncode in (0, 3), ran.stderr  # 3: the doctor found a danger
    assert not ran.returncode or "doctor" in start
    return json.loads((folder / "seen.json").read_text())


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return fingerprints(tmp_path_factory.mktemp("plain") / "run", "script.py")


def differing(plain, seen):
    """Return the kinds of objects that differ, each with the first step of a difference."""
    pairs = enumerate(zip(plain, seen, strict=True))
    found = [(name, step) for step, (a, b) in pairs for name in a if a[name] != b[name]]
    return dict(reversed(found))


@pytest.mark.slow
def test_objects_of_an_observed_script_are_as_without(plain, tmp_path):
    start = ("-m", "flatout.observe.start", tmp_path / "observed", "script.py")
    assert not differing(plain, fingerprints(tmp_path / "run", *start))


@pytest.mark.slow
def test_objects_under_the_doctor_are_as_without(plain, tmp_path):
    start = (*FLATOUT, "doctor", "--in-place", "--no-trials", "script.py")
    assert not differing(plain, fingerprints(tmp_path / "run", *start))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("input.workers=1", "script.persistent_workers=on"),
        ("script.cache=memory", "script.zero_grad=set_to_none"),
    ],
    ids=["none", "workers", "cache"],
)
def test_objects_of_a_script_that_is_run_by_a_recipe_are_as_without(plain, tmp_path, settings):
    chosen = [part for setting in settings for part in ("--set", setting)]
    start = (*FLATOUT, "run", *chosen, "script.py")
    assert not differing(plain, fingerprints(tmp_path / "run", *start))
