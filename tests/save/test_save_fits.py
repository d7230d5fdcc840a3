import shlex
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from flatout import Trainer
from flatout.cli.main import app
from flatout.errors import CheckpointError
from flatout.save.fits import check_fits
from flatout.save.model_file import save_model


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def state() -> dict[str, torch.Tensor]:
    return net().state_dict()


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
        ("module.", "--prefix module."),
        ("model.", "--prefix model."),
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


def averaged(model: nn.Module) -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(model)


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
@pytest.mark.parametrize("kind", ["compiled", "a level", "model.", "averaged"])
def test_a_file_that_only_a_wrapper_keeps_from_loading_loads_as_advised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    model, other = net(0), net(1)
    saved = {
        "compiled": {f"_orig_mod.{key}": value for key, value in model.state_dict().items()},
        "a level": {
            key.replace(".", "._orig_mod."): value for key, value in model.state_dict().items()
        },
        "model.": {f"model.{key}": value for key, value in model.state_dict().items()},
        "averaged": averaged(model).state_dict(),
    }[kind]
    path = tmp_path / f"it's mine{ending}"
    torch.save(saved, path) if ending == ".pt" else save_model(path, saved)
    trainer = Trainer(other, say=lambda line: None)
    with pytest.raises(CheckpointError, match="another model") as caught:
        trainer.load(path)
    flatout, export, *arguments = shlex.split(str(caught.value.do).split("`")[1])
    assert (flatout, export) == ("flatout", "export")
    done = CliRunner().invoke(app, [export, *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    trainer.load("plain.safetensors")
    assert all(map(torch.equal, other.state_dict().values(), model.state_dict().values()))
    if kind == "averaged":
        with pytest.raises(CheckpointError, match="module inside the wrapper"):
            Trainer(averaged(net(2)), say=lambda line: None).load("plain.safetensors")
