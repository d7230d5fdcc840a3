"""What a ReduceLROnPlateau is stepped with, by the words of the script."""

import pytest

from flatout.observe import Site
from flatout.observe.plateaus import given_at
from observed import observed


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("scheduler.step(val_loss)", "loss"),
        ("scheduler.step(running / n, epoch)", ""),
        ("self.sched.step(metrics=logs['val_accuracy'])", "score"),
        ("scheduler.step(total_loss / len(loader))", "loss"),
        ("scheduler.step(meter.avgAcc)", "score"),
        ("scheduler.step(f1)", "score"),
        ("scheduler.step(-val_acc)", ""),
        ("scheduler.step(1 - val_acc)", ""),
        ("scheduler.step(dice_loss)", ""),
        ("scheduler.step(score)", ""),
        ("scheduler.step(val)", "loss"),  # by what is assigned to it
        ("scheduler.step(other)", ""),  # assigned both
        ("scheduler.step()", ""),
    ],
)
def test_names_tell_a_loss_from_a_score(tmp_path, line, kind):
    file = tmp_path / "script.py"
    file.write_text(
        "val = mean([criterion(model(x), y) for x, y in loader])\n"
        f"other = accuracy()\nother = loss(x)\n{line}\n"
    )
    assert given_at(Site(str(file), 4))[1] == kind


def test_what_it_is_stepped_with_is_seen_though_it_is_gone_at_the_end(tmp_path):
    seen = observed(
        tmp_path,
        """
import torch

def train():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    for step in range(12):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        if step % 5 == 4:
            val_acc = step / 12
            scheduler.step(val_acc)  # here

train()
""",
    )
    (found,) = seen.schedules
    assert (found.mode, found.given, found.given_kind) == ("min", "val_acc", "score")
    assert found.steps == 2
    assert "# here" in found.stepped_at.code
