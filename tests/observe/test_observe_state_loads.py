"""State dicts that are loaded and change nothing; and such as are copied, or have other uses."""

import pytest

from flatout.observe import Site
from flatout.observe.kept_states import loaded_later
from observed import observed

START = """
import copy, io, torch; torch.manual_seed(0)
from torch import nn

def make():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

def steps(model, many=6):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    for step in range(many):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.item()

model, other, best = make(), make(), float("inf")
"""
WRONG = {
    "other names": (
        """
state = {f"module.{name}": one for name, one in other.state_dict().items()}
model.load_state_dict(state, strict=False)  # here
for loss in steps(model): pass
""",
        ("unmatched", 0, ["module.0.weight", "module.0.bias", "module.1.weight"]),
    ),
    "names that a filter has taken": (
        """
state = {name: one for name, one in other.state_dict().items() if "body" in name}
model.load_state_dict(state, strict=False)  # here
for loss in steps(model): pass
""",
        ("unmatched", 0, []),
    ),
    "the best is put back": (
        """
for loss in steps(model):
    if loss < best:
        best = loss
        state = model.state_dict()  # taken
model.load_state_dict(state)  # here
""",
        ("own", None, []),
    ),
    "the first is put back, of a shallow copy": (
        """
state = dict(model.state_dict())  # taken
for fold in range(2):
    model.load_state_dict(state)  # here
    for loss in steps(model): pass
""",
        ("own", 6, []),
    ),
    "moved to the CPU": (
        """
for step, loss in enumerate(steps(model)):
    if loss < best:
        best, state = loss, {name: one.cpu() for name, one in model.state_dict().items()}  # taken
model.load_state_dict(state)  # here
""",
        ("own", None, []),
    ),
    "weights of an average are swapped in": (
        """
for loss in steps(model): pass
before = model.state_dict()  # taken
model.load_state_dict(other.state_dict())
model.load_state_dict(before)  # here
""",
        ("own", 0, []),
    ),
    "the best is kept, to be put back when all is over": (
        """
class Best:
    def __init__(self):
        self.loss, self.state = float("inf"), None
    def __call__(self, loss):
        if loss < self.loss:
            self.loss = loss
            self.state = {"model": model.state_dict()}  # taken
kept = Best()
for loss in steps(model):
    kept(loss)
if model is None:
    model.load_state_dict(kept.state["model"])  # here
""",
        ("kept", 1, []),
    ),
}
RIGHT = {
    "a deep copy": """
for loss in steps(model):
    if loss < best:
        best, state = loss, copy.deepcopy(model.state_dict())
model.load_state_dict(state)
""",
    "clones": """
for loss in steps(model):
    if loss < best:
        best, state = loss, {name: one.clone() for name, one in model.state_dict().items()}
model.load_state_dict(state)
""",
    "saved at once": """
for loss in steps(model):
    if loss < best:
        best, file = loss, io.BytesIO()
        state = model.state_dict()
        torch.save(state, file)
file.seek(0)
model.load_state_dict(torch.load(file))
""",
    "a target network": """
for loss in steps(model):
    state = model.state_dict()
    other.load_state_dict(state)
""",
    "a name that a file is read into": """
for loss in steps(model):
    if loss < best:
        best, file = loss, io.BytesIO()
        checkpoint = {"model": model.state_dict(), "loss": loss}
        torch.save(checkpoint, file)
file.seek(0)
checkpoint = torch.load(file)
model.load_state_dict(checkpoint["model"])
""",
    "a copy of the model": """
for loss in steps(model):
    if loss < best:
        best, kept = loss, copy.deepcopy(model)
        state = kept.state_dict()
model.load_state_dict(state)
""",
    "changed in place": """
for loss in steps(model):
    state = model.state_dict()
    for tensor in state.values():
        tensor.mul_(0.9)
    model.load_state_dict(state)
""",
    "the names of the second try": """
state = {f"module.{name}": one for name, one in other.state_dict().items()}
missing = model.load_state_dict(state, strict=False).missing_keys
if missing:
    model.load_state_dict({name.removeprefix("module."): one for name, one in state.items()})
for loss in steps(model): pass
""",
    "a part": """
state = {name: one for name, one in other.state_dict().items() if name.startswith("0.")}
model.load_state_dict(state, strict=False)
for loss in steps(model): pass
""",
    "read alone": """
state = model.state_dict()
for loss in steps(model):
    print(len(state))
""",
}


@pytest.mark.parametrize("case", WRONG)
def test_a_load_that_changes_nothing_is_told_with_its_lines(tmp_path, case):
    script, (kind, steps, given) = WRONG[case]
    (found,) = observed(tmp_path, START + script).state_loads
    assert (found.kind, found.model, found.parameters) == (kind, "Sequential", 4)
    assert found.given == given
    assert found.wanted == (["0.weight", "0.bias", "1.weight"] if kind == "unmatched" else [])
    assert found.site.code.endswith("# here")
    assert (found.taken_at is not None) == (kind != "unmatched")
    if found.taken_at is not None:
        assert found.taken_at.code.endswith("# taken")
    assert found.steps == steps or (steps is None and 0 < found.steps < 6)


@pytest.mark.parametrize("case", RIGHT)
def test_copies_and_other_uses_are_left_alone(tmp_path, case):
    assert observed(tmp_path, START + RIGHT[case]).state_loads == []


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("if a > best:\n    HERE\nm.load_state_dict(best)\n", True),
        ("if a > best:\n    HERE\nm.load_state_dict(best['model'])\n", True),
        ("if a > best or not i:\n    if x:\n        HERE\nm.load_state_dict(best)\n", True),
        ("if a > b:\n    b, best = a, m.state_dict()\nm.load_state_dict(best)\n", True),
        ("best = None\nif a > best:\n    HERE\nm.load_state_dict(best)\n", True),
        ("best: dict = {}\nif a > best:\n    HERE\nm.load_state_dict(best)\n", True),
        ("best, a = m.state_dict(), -1\nif a > b:\n    HERE\nm.load_state_dict(best)\n", True),
        ("if a > b:\n    HERE\nbest = torch.load('f')\nm.load_state_dict(best)\n", False),
        ("if a > b:\n    HERE\nfor best in files:\n    m.load_state_dict(best)\n", False),
        ("with open('f') as best:\n  if a > b:\n    HERE\nm.load_state_dict(best)\n", False),
        ("if a == best:\n    HERE\nm.load_state_dict(best)\n", False),
        ("if i % 5:\n    HERE\nm.load_state_dict(best)\n", False),
        ("if a > best:\n    HERE\n    m.load_state_dict(best)\n", False),
        ("if a > best:\n    HERE\nm.load_state_dict(other)\n", False),
        ("if a > best:\n    HERE\ndef f(best):\n    pass\n", False),
        ("def f():\n    if a > best:\n        HERE\nm.load_state_dict(best)\n", False),
    ],
)
def test_what_is_kept_for_later_is_known_by_its_name(tmp_path, source, is_found):
    file = tmp_path / "script.py"
    file.write_text(source.replace("HERE", "best = m.state_dict()"))
    lines = file.read_text().splitlines()
    line = max(number for number, code in enumerate(lines, 1) if "state_dict()" in code)
    found = loaded_later(Site(str(file), line))
    assert (found is not None) == is_found
    assert not is_found or "load_state_dict" in lines[found.line - 1]
