import hashlib
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import nn

from flatout.errors import CheckpointError
from flatout.save.model_file import load_model, open_model, save_model


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight


def test_loads_with_safetensors_alone_where_flatout_cannot_be_imported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tied()
    path = tmp_path / "model.safetensors"
    save_model(path, model.state_dict())
    torch.save(model.state_dict(), tmp_path / "expected.pt")
    program = """
import sys
sys.modules["flatout"] = None
import safetensors.torch, torch
found = safetensors.torch.load_file(sys.argv[1])
expected = torch.load(sys.argv[2], weights_only=True)
assert set(found) == set(expected), (set(found), set(expected))
for name, tensor in expected.items():
    assert found[name].dtype == tensor.dtype
    assert torch.equal(found[name], tensor), name
print(len(found))
"""
    command = [sys.executable, "-c", program, str(path), str(tmp_path / "expected.pt")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(len(model.state_dict()))


def test_comes_back_sorted_and_strict_loading_takes_it(tmp_path: Path) -> None:
    model = Tied()
    written = save_model(tmp_path / "m.safetensors", model.state_dict(), {"author": "me"})
    loaded, metadata, own = open_model(tmp_path / "m.safetensors")
    assert written.size == (tmp_path / "m.safetensors").stat().st_size
    assert list(loaded) == sorted(model.state_dict())
    assert metadata == {"format": "pt", "author": "me"}
    assert own
    other = Tied()
    other.load_state_dict(loaded)
    assert torch.equal(other.head.weight, model.head.weight)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.complex64,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.bool,
    ],
)
def test_every_type_and_layout_keeps_its_values(tmp_path: Path, dtype: torch.dtype) -> None:
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (2 * 3 * 4 * 5 * dtype.itemsize,))
    base = bits.to(torch.uint8).view(dtype).reshape(2, 3, 4, 5)
    state = {
        "plain": base,
        "channels_last": base.contiguous(memory_format=torch.channels_last),
        "sliced": base[:, 1:, :, ::2],
        "scalar": base[0, 0, 0, 0],
        "empty": base[:0],
        "odd": base.reshape(-1)[:3],
    }
    save_model(tmp_path / "m.safetensors", state)
    for found in [
        load_model(tmp_path / "m.safetensors"),
        safetensors.torch.load_file(tmp_path / "m.safetensors"),
    ]:
        for name, tensor in state.items():
            assert found[name].dtype == dtype
            assert found[name].shape == tensor.shape
            assert _bytes(found[name]) == _bytes(tensor), name


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_the_file_is_laid_out_as_the_library_lays_it_out(tmp_path: Path) -> None:
    state = {
        "b": torch.ones(3, dtype=torch.uint8),
        "a": torch.ones(2),
        "c": torch.zeros(1).double(),
    }
    save_model(tmp_path / "m.safetensors", state)
    safetensors.torch.save_file(state, tmp_path / "n.safetensors")
    ours, theirs = (
        _header((tmp_path / name).read_bytes()) for name in ("m.safetensors", "n.safetensors")
    )
    ours.pop("__metadata__")
    assert ours == theirs
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"


def _header(data: bytes) -> dict[str, object]:
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert isinstance(header, dict)
    return header


def test_the_checksums_are_those_that_are_documented(tmp_path: Path) -> None:
    save_model(tmp_path / "m.safetensors", {"w": torch.arange(6.0).reshape(2, 3).T})
    data = (tmp_path / "m.safetensors").read_bytes()
    text = data[8 : 8 + int.from_bytes(data[:8], "little")]
    metadata = json.loads(text)["__metadata__"]
    values = torch.tensor([0.0, 3, 1, 4, 2, 5]).numpy().tobytes()
    assert json.loads(metadata["flatout.tensors"]) == {"w": hashlib.sha256(values).hexdigest()}
    blank = re.sub(rb'("flatout.sha256": ")[0-9a-f]{64}', rb"\g<1>" + b"0" * 64, text)
    assert metadata["flatout.sha256"] == hashlib.sha256(blank).hexdigest()


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_model(path, {"first": torch.randn(5, 3), "second": torch.randn(4)})
    data = path.read_bytes()
    draw = random.Random(0)
    start = 8 + int.from_bytes(data[:8], "little")
    for position in range(len(data)):
        broken = bytearray(data)
        broken[position] ^= 1 << draw.randrange(8)
        path.write_bytes(broken)
        with pytest.raises(CheckpointError) as caught:
            load_model(path)
        assert str(path) in str(caught.value.where)
        if position >= start:
            name = "first" if position < start + 60 else "second"
            assert repr(name) in caught.value.what
            assert f"of {len(data)}" in str(caught.value.where)


def test_a_digest_in_capitals_is_not_the_digest(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_model(path, {"w": torch.ones(2)})
    data = path.read_bytes()
    seal = re.search(rb'"flatout.sha256": "([0-9a-f]{64})', data)
    assert seal is not None
    path.write_bytes(data.replace(seal[1], seal[1].upper()))
    with pytest.raises(CheckpointError, match="checksum"):
        load_model(path)


def test_every_cut_is_found(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_model(path, {"first": torch.randn(5, 3)})
    data = path.read_bytes()
    for length in [*range(12), len(data) // 2, len(data) - 60, len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"model.safetensors"):
            load_model(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(CheckpointError):
        load_model(path)


def test_files_of_others_load_without_checksums(tmp_path: Path) -> None:
    path = tmp_path / "theirs.safetensors"
    safetensors.torch.save_file({"w": torch.ones(3)}, path, {"author": "them"})
    tensors, metadata, own = open_model(path)
    assert torch.equal(tensors["w"], torch.ones(3))
    assert metadata == {"author": "them"}
    assert not own


@pytest.mark.parametrize("content", [b"", b"no tensors at all", b"\x08" + b"\0" * 7 + b"[1,2,3] "])
def test_what_is_no_model_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        load_model(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (3, "int is not a tensor"),
        (torch.eye(2).to_sparse(), "layout"),
        (torch.ones(2, dtype=torch.complex128), "complex128"),
        (torch.empty(2, device="meta"), "meta"),
        (nn.LazyLinear(3).weight, "UninitializedParameter"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_cannot_be_stored_is_named(tmp_path: Path, value: object, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason) as caught:
        save_model(tmp_path / "m.safetensors", {"layer.weight": value})  # type: ignore[dict-item]
    assert "layer.weight" in caught.value.what
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_tensor_is_refused(tmp_path: Path) -> None:
    tensor = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(CheckpointError, match="quantized"):
        save_model(tmp_path / "m.safetensors", {"w": tensor})


def test_in_a_store() -> None:
    url = "memory://models/model.safetensors"
    save_model(url, {"w": torch.ones(3)})
    assert torch.equal(load_model(url)["w"], torch.ones(3))


def test_an_older_file_is_replaced_and_stays_if_the_new_one_fails(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_model(path, {"w": torch.zeros(3)})
    with pytest.raises(CheckpointError):
        save_model(path, {"w": torch.eye(2).to_sparse()})
    assert torch.equal(load_model(path)["w"], torch.zeros(3))
    save_model(path, {"w": torch.ones(3)})
    assert torch.equal(load_model(path)["w"], torch.ones(3))
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]
