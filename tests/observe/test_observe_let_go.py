"""What a script does wrong is seen, too, where all is gone at its end: it trains in a function."""

import pytest

from observed import observed

START = """
import torch; torch.manual_seed(0)
from torch import nn

def main():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(PARAMETERS, lr=1e-3)
    for step in range(20):
        model.zero_grad()
        rows = torch.randn(8, 8)
        AFTER
        nn.functional.mse_loss(model(rows), torch.zeros(8, 4)).backward()
        optimizer.step()
        BEHIND
"""
BY_HAND = "[item.data.sub_(0.01 * item.grad) for item in model[2].parameters()]"


def model_of(tmp_path, *, whole=True, after="pass", behind="pass"):
    parameters = "model.parameters()" if whole else "model[0].parameters()"
    source = START.replace("PARAMETERS", parameters)
    source = source.replace("AFTER", after).replace("BEHIND", behind) + "main()\n"
    seen = observed(tmp_path, source)
    assert (seen.steps, seen.ended) == (20, "done")
    (model,) = seen.models
    return model


@pytest.mark.slow
def test_what_a_script_steps_by_hand_is_known_to_move(tmp_path):
    model = model_of(tmp_path, whole=False, behind=BY_HAND)
    assert (model.not_stepped, model.moved) == ([], ["2.weight", "2.bias"])


@pytest.mark.slow
def test_what_no_one_steps_is_still_known(tmp_path):
    model = model_of(tmp_path, whole=False)
    assert (model.not_stepped, model.moved) == (["2.weight", "2.bias"], [])


@pytest.mark.slow
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_weights_that_are_no_numbers_are_seen(tmp_path, value):
    after = f"rows[0, 0] = float('{value}') if step > 15 else 0.0"
    assert set(model_of(tmp_path, after=after).not_finite) >= {"0.bias", "2.bias"}


@pytest.mark.slow
def test_weights_that_are_numbers_are_not(tmp_path):
    assert model_of(tmp_path).not_finite == []
