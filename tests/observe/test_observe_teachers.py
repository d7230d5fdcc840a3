"""Models that are called in each step, never trained, and in train mode; and those that may be."""

import pytest

from observed import observed

START = """
import copy, torch; torch.manual_seed(0)
from torch import nn
rows, classes = torch.randn(32, 8), torch.randint(0, 4, (32,))

class Large(nn.Sequential):
    pass

def large():
    return Large(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))

def train(loss, *optimizers):
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()

def adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-3)

student = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
"""

TAUGHT = """
loaded, detached, teacher = large(), large(), large()
before = adam(teacher)
for step in range(20):
    train(nn.functional.cross_entropy(teacher(rows), classes), before)
optimizer = adam(student)
for step in range(20):
    with torch.no_grad():
        targets = teacher(rows)  # first
        targets = targets + loaded(rows)  # second
    targets = targets + detached(rows).detach()  # third
    train((student(rows) - targets).square().mean(), optimizer)
"""

RIGHT = """
calm, plain = large().eval(), nn.Sequential(nn.Linear(8, 4))
critic = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
slight = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.0))
online, later = large(), large()
target, average = copy.deepcopy(online), copy.deepcopy(online)
made = adam(later)  # which steps once the others are done
first, second, third = adam(student), adam(critic), adam(online)
for step in range(24):
    with torch.no_grad():
        targets = calm(rows) + plain(rows) + slight(rows) + later(rows)
        targets = targets + target(rows) + average(rows)
    made_up = student(rows)
    train(critic(made_up.detach()).square().mean(), second)
    train((online(rows) - targets).square().mean(), third)
    train((made_up - targets).square().mean() - critic(made_up).mean(), first)
    for mine, theirs in zip(average.parameters(), online.parameters()):
        mine.data.lerp_(theirs.data, 0.01)
    if step % 20 == 19:
        target.load_state_dict(online.state_dict())
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "del loaded, detached, teacher, before\n"])
def test_a_teacher_in_train_mode_is_seen_with_what_its_layers_do(tmp_path, end):
    """Also where it is gone at the end."""
    source = START + TAUGHT + end
    teachers = observed(tmp_path, source).teachers
    lines = [source[: source.index(f"# {name}")].count("\n") + 1 for name in ("first", "second")]
    lines.append(source[: source.index("# third")].count("\n") + 1)
    assert sorted(item.site.line for item in teachers) == lines
    for item in teachers:
        assert item.kind == "__main__.Large"
        assert item.layers == {"BatchNorm1d": 1, "Dropout": 1}
        assert item.moved == 1
        assert 0.3 < item.dropped < 0.7


@pytest.mark.slow
def test_what_is_trained_or_follows_what_is_trained_is_no_teacher(tmp_path):
    assert observed(tmp_path, START + RIGHT).teachers == []
