import pytest
import torch
from torch import nn

from flatout.errors import CheckpointError
from flatout.save.fits import check_fits


def state() -> dict[str, torch.Tensor]:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).state_dict()


def test_the_same_model_fits_whatever_the_order() -> None:
    check_fits(state(), dict(reversed(state().items())))


def test_missing_unexpected_and_reshaped_keys_are_counted_and_named() -> None:
    loaded = {f"new.{i}": torch.zeros(1) for i in range(8)}
    loaded |= {key: value for key, value in state().items() if not key.startswith("1.")}
    loaded["0.weight"] = torch.zeros(5, 4)
    with pytest.raises(CheckpointError) as caught:
        check_fits(state(), loaded, "runs/a")
    text = str(caught.value)
    assert "5 missing from the checkpoint: 1.weight, 1.bias" in text
    assert "8 not in the model: new.0, new.1, new.2, new.3, new.4, … 3 more" in text
    assert "1 of another shape: 0.weight is (5, 4), the model has (3, 4)" in text
    assert "runs/a" in text


@pytest.mark.parametrize(
    ("prefix", "hint"),
    [
        ("module.", "flatout export --prefix module."),
        ("model.", "flatout export --prefix model."),
        ("_orig_mod.", "flatout export"),
        ("_fsdp_wrapped_module.", "flatout export"),
    ],
)
def test_a_prefix_that_is_the_only_difference_is_named(prefix: str, hint: str) -> None:
    wrapped = {prefix + key: value for key, value in state().items()}
    with pytest.raises(CheckpointError) as caught:
        check_fits(state(), wrapped)
    assert hint in str(caught.value.do)
    with pytest.raises(CheckpointError) as caught:
        check_fits(wrapped, state())
    assert "module inside the wrapper" in str(caught.value.do)


def test_a_level_in_the_middle_of_names() -> None:
    wrapped = {key.replace(".", "._orig_mod."): value for key, value in state().items()}
    with pytest.raises(CheckpointError) as caught:
        check_fits(state(), wrapped)
    assert "wrapper" in str(caught.value.do)


def test_other_differences_get_no_such_hint() -> None:
    with pytest.raises(CheckpointError) as caught:
        check_fits(state(), {"other": torch.zeros(1)})
    assert "wrapper" not in str(caught.value.do)
