"""Weights in their own files: the name's ending decides the format."""

import os
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

import forked
from flatout import Trainer
from flatout.errors import CheckpointError
from flatout.save.weights_file import load_weights_file, save_weights


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))


def trainer(model: nn.Module) -> Trainer:
    return Trainer(model, say=lambda line: None)


@pytest.mark.parametrize("ending", [".pt", ".pth"])
def test_torch_alone_reads_it_and_the_trainer_takes_it_back(tmp_path: Path, ending: str) -> None:
    model = net()
    path = tmp_path / f"m{ending}"
    assert trainer(model).save(path) == path
    program = f"""
import sys
sys.modules["flatout"] = None
import torch
found = torch.load({str(path)!r}, weights_only=True)
assert type(found) is dict and all(type(v) is torch.Tensor for v in found.values())
print(list(found))
"""
    told = forked.run(["-c", program], tmp_path, os.environ, forked.TORCH)
    assert told.returncode == 0, told.stderr
    assert told.stdout.strip() == str(list(model.state_dict()))
    for load in (lambda m: trainer(m).load(path), lambda m: Trainer(m, warm_start=path)):
        other = net(1)
        load(other)
        assert all(map(torch.equal, other.state_dict().values(), model.state_dict().values()))
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_what_others_saved_is_read_and_what_is_no_weights_is_refused(tmp_path: Path) -> None:
    model, other = net(), net(1)
    torch.save({"state_dict": OrderedDict(model.state_dict()), "epoch": 3}, tmp_path / "a.ckpt")
    trainer(other).load(tmp_path / "a.ckpt")
    assert torch.equal(other[0].weight, model[0].weight)
    torch.save(model, tmp_path / "whole.pt")
    with pytest.raises(CheckpointError, match="execute code"):
        trainer(other).load(tmp_path / "whole.pt")
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "else.pt")
    with pytest.raises(CheckpointError, match=r"another model(.|\n)*else\.pt"):
        trainer(other).load(tmp_path / "else.pt")


def test_which_of_two_sets_of_weights_was_loaded_is_printed(tmp_path: Path) -> None:
    model, average, other = net(), net(1), net(2)
    content = {"state_dict": model.state_dict(), "state_dict_ema": average.state_dict()}
    torch.save(content, tmp_path / "a.pt")
    lines: list[str] = []
    Trainer(other, say=lines.append).load(tmp_path / "a.pt")
    assert torch.equal(other[0].weight, model[0].weight)
    Trainer(net(3), warm_start=tmp_path / "a.pt", say=lines.append)
    assert ["state_dict is taken, not state_dict_ema" in line for line in lines] == [True, True]
    lines.clear()
    torch.save({"net": model.state_dict(), "epoch": 3}, tmp_path / "b.pt")
    Trainer(other, say=lines.append).load(tmp_path / "b.pt")
    assert lines == []


@pytest.mark.parametrize("name", ["m", "m.bin", "m.keras", "m.h5", "m.onnx", "m.pt.zip"])
def test_other_endings_are_refused_with_those_that_are_known(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=r"\.safetensors, \.pt or \.pth"):
        trainer(net()).save(tmp_path / name)
    assert not list(tmp_path.iterdir())
    if not name.endswith(".bin"):
        with pytest.raises(CheckpointError, match=r"\.safetensors, \.pt or \.pth"):
            trainer(net()).load(tmp_path / name)


def test_a_view_brings_no_more_than_itself_and_tied_weights_stay_one(tmp_path: Path) -> None:
    large = torch.randn(1_000_000)
    tied = torch.randn(1000)
    weights = {"a": large[:10], "b": tied, "c": tied, "d": torch.randn(2, 3).t()}
    save_weights(tmp_path / "w.pt", weights)
    assert (tmp_path / "w.pt").stat().st_size < 10_000
    found, _ = load_weights_file(tmp_path / "w.pt")
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    with pytest.raises(CheckpointError, match="cannot store 'x'"):
        save_weights(tmp_path / "w.pt", {"x": torch.eye(3).to_sparse()})
    assert load_weights_file(tmp_path / "w.pt")[0].keys() == weights.keys()


def test_damaged_text_beside_the_weights_is_told(tmp_path: Path) -> None:
    file = tmp_path / "a.pt"
    save_weights(file, {"a": torch.ones(2)}, {"note": "some words"})
    content = file.read_bytes()
    assert load_weights_file(file)[1] == {"note": "some words"}
    file.write_bytes(content.replace(b"some words", b"same words"))
    with pytest.raises(CheckpointError, match=r"damaged: Bad CRC-32 .*flatout\.json"):
        load_weights_file(file)
    entry = content.rindex(b"PK\1\2")
    file.write_bytes(content[: entry + 8] + b"\1" + content[entry + 9 :])  # as if encrypted
    with pytest.raises(CheckpointError, match=r"damaged: .*flatout\.json|damaged: .*encrypted"):
        load_weights_file(file)


def test_every_flipped_byte_of_a_torch_file_is_found(tmp_path: Path) -> None:
    file = tmp_path / "a.pt"
    weights = {"a": torch.randn(4, 3), "b": torch.arange(5)}
    save_weights(file, weights, {"note": "some words"})
    content = file.read_bytes()
    begin = content.index(weights["a"].numpy().tobytes())
    for at in (*range(begin, begin + 48), *range(content.index(b"PK\1\2"), len(content), 2)):
        damaged = bytearray(content)
        damaged[at] ^= 1 << at % 8
        file.write_bytes(damaged)
        try:
            found, _ = load_weights_file(file)
        except CheckpointError:
            continue
        assert all(torch.equal(found[name], weights[name]) for name in weights), at
    for size in range(0, len(content), 7):
        file.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"a\.pt"):
            load_weights_file(file)


def test_a_torch_file_without_checksums_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a.pt"
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(3)}, file)
    finally:
        torch.serialization.set_crc32_options(before)
    assert torch.equal(load_weights_file(file)[0]["a"], torch.ones(3))
