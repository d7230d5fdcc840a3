"""Renders the list of checks from the checks and from the page of each.

python docs/checks_index.py > docs/checks/index.md
python docs/checks_index.py --check      # exit 1 when docs/checks/index.md is out of date
"""

from __future__ import annotations

from pathlib import Path

from generated import print_or_check

from flatout.doctor.checks import CHECKS, RANK_CHECKS

PAGE = Path(__file__).with_name("checks") / "index.md"
KINDS = ("danger", "slow", "note")

HEAD = """\
# Checks

<!-- Made from the checks and their pages by docs/checks_index.py. -->

The checks of `flatout doctor train.py`. Each finding has a page, under the finding's name in
`--json`. Each check runs on each rank of your script. A check that lacks its input says so and does
not guess.

- **danger**: the job may fail or learn something wrong. A danger is reported whatever time it
  costs.
- **slow**: the finding costs time. Its bound is the most time that the cure can save; `~` marks an
  estimate.
- **note**: good to know. A slow finding that takes less than 2% of a step is a note too, and
  nothing is changed for it.

The result of a cure has one of four names: *bit-identical*, *rounding*, *redrawn* (the same
distribution, other random draws), *changes learning*. A cure that changes learning is applied only
if you ask for it.

A cure by Recipe acts on the [unchanged script](../cures.md). Where the last column says yes,
`flatout doctor --diff` often writes the [change of code](../doctor_changes.md).

"""

TABLE = """\
| check | what it finds | kind | cure by Recipe | result of the cure | `--diff` |
|---|---|---|---|---|---|
"""

FOOT = """
Most checks have a script in `bench/corpus` with the mistake, and a patch that corrects the script.
Factors of CPU time on these pages were measured on these pairs, with one thread on a busy machine
with AMX, so they are rough.

## The code on these pages

Each block of code runs after these lines:

```python title="before all"
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
x, y = torch.randn(256, 16), torch.randint(0, 4, (256,))
data = TensorDataset(x, y)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
cross_entropy = nn.functional.cross_entropy


def step(x, y):
    optimizer.zero_grad()
    loss = cross_entropy(model(x.to(device)), y.to(device))
    loss.backward()
    optimizer.step()
    return loss.detach()
```

Where a page says bit-identical, a test checks that both versions of its code train the model to the
same bits. Another test runs the code of the other pages.
"""


def page() -> str:
    """Return the whole list as Markdown."""
    diffs = {check.name: check.edit is not None for check in (*CHECKS, *RANK_CHECKS)}
    rows = sorted((row(name, diff) for name, diff in diffs.items()), key=place)
    return HEAD + TABLE + "".join(rows) + FOOT


def place(line: str) -> tuple[int, str]:
    """Return where a line stands: dangers first, notes last, then by name."""
    return KINDS.index(line.split(" | ")[2]), line


def row(name: str, diff: bool) -> str:
    """Return a check's line: the first sentence of its page, and the page's row of facts."""
    _, text, table, *_ = PAGE.with_name(f"{name}.md").read_text(encoding="utf-8").split("\n\n")
    sentence = text.replace("\n", " ").partition(". ")[0].removesuffix(".")
    return (
        f"| [{name}]({name}.md) | {sentence} {table.splitlines()[2]} {'yes |' if diff else '|'}\n"
    )


if __name__ == "__main__":
    raise SystemExit(print_or_check(PAGE, page()))
