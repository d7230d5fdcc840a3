"""One model for all folds of a cross-validation; and loops that set its weights back in each."""

import pytest

from observed import observed

START = """
import copy, torch; torch.manual_seed(0)
from torch import nn
from sklearn.model_selection import GroupKFold, KFold, StratifiedKFold
from sklearn.model_selection import TimeSeriesSplit

x, y = torch.randn(48, 4), torch.arange(48) % 2

def make():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))

def fit(model, rows, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()

def start_again(model):
    for layer in model:
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()

model = make()
"""
WRONG = {
    "KFold": """
for fold, (rows, others) in enumerate(KFold(4).split(x)):  # here
    fit(model, rows)
    print(model(x[others]).argmax(1))
""",
    "StratifiedKFold": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
splits = StratifiedKFold(4)
for rows, others in splits.split(x, y):  # here
    for epoch in range(2):
        fit(model, rows, optimizer)
""",
    "GroupKFold": """
def main(model):
    for rows, others in GroupKFold(4).split(x, groups=list(range(12)) * 4):  # here
        fit(model, rows)

main(model)
""",
}
RIGHT = {
    "made in the loop": "    model = make()\n    fit(model, rows)",
    "made by a function": "    fit(make(), rows)",
    "a copy": "    fit(copy.deepcopy(model), rows)",
    "weights set back": "    start_again(model)\n    fit(model, rows)",
    "weights set back by apply": "    model.apply(lambda layer: None)\n    fit(model, rows)",
    "weights put back": "    model.load_state_dict(state)\n    fit(model, rows)",
    "one fold alone": "    if fold != 1:\n        continue\n    fit(model, rows)",
    "the first fold alone": "    fit(model, rows)\n    break",
    "no torch": "    print(len(rows))",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRONG)
def test_a_model_that_is_older_than_the_folds_is_told(tmp_path, kind):
    (found,) = observed(tmp_path, START + WRONG[kind]).shared_folds
    assert (found.kind, found.folds, found.model) == (kind, 4, "Sequential")
    assert found.site.code.endswith("# here")


@pytest.mark.parametrize("case", RIGHT)
def test_folds_that_begin_with_new_weights_are_left_alone(tmp_path, case):
    loop = "state = copy.deepcopy(model.state_dict())\n"
    loop += "for fold, (rows, others) in enumerate(KFold(4).split(x)):\n" + RIGHT[case]
    assert observed(tmp_path, f"{START}{loop}\nfit(model, rows)\n").shared_folds == []


@pytest.mark.parametrize(
    "script",
    [
        "for rows, others in TimeSeriesSplit(4).split(x):\n    fit(model, rows)\n",
        "rows, others = next(KFold(4).split(x))\nfit(model, rows)\n",
        "folds = KFold(4).split(x)\nrows, others = next(folds)\nfit(model, rows)\n",
        "rows, others = list(KFold(4).split(x))[2]\nfit(model, rows)\n",
    ],
)
def test_no_cross_validation_is_none(tmp_path, script):
    assert observed(tmp_path, START + script).shared_folds == []
