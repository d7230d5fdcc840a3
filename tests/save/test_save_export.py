import argparse
import os
import pickle
import shlex
import subprocess
import sys
import uuid
from collections import defaultdict
from pathlib import Path
from typing import Any
from xml.dom.minidom import NodeList

import numpy
import pytest
import safetensors.torch
import torch
from torch import nn

import forked
from flatout.errors import CheckpointError, ModelError
from flatout.save.checkpoint import Checkpoints
from flatout.save.export import export, export_program, export_program_of
from flatout.save.model_file import load_model, save_model


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))


STATE = net().state_dict()


def assert_plain(path: str | Path, state: dict[str, torch.Tensor] = STATE) -> None:
    """The file loads into the bare module, with safetensors and torch alone."""
    program = """
import sys
sys.modules["flatout"] = None
import safetensors.torch, torch
found = safetensors.torch.load_file(sys.argv[1])
expected = torch.load(sys.argv[2], weights_only=True)
assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
assert all(torch.equal(found[k], expected[k]) for k in expected)
"""
    expected = Path(path).with_suffix(".expected")
    torch.save(dict(state), expected)
    done = subprocess.run(
        [sys.executable, "-c", program, str(path), str(expected)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    expected.unlink()


def assert_same(path: str | Path, state: dict[str, torch.Tensor] = STATE) -> None:
    found = safetensors.torch.load_file(path)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[key], state[key]) for key in state)


def prefixed(prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + key: value for key, value in STATE.items()}


@pytest.mark.slow
def test_from_a_run_a_folder_of_checkpoints_and_a_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    checkpoints = Checkpoints(run / "checkpoints")
    checkpoints.save(1, {key: torch.zeros_like(value) for key, value in STATE.items()})
    checkpoints.save(2, STATE, {"optimizer": [1, 2]})
    checkpoints.wait()
    done = export(run, tmp_path / "out" / "model.safetensors")
    assert done.tensors == len(STATE)
    assert done.bytes == (tmp_path / "out" / "model.safetensors").stat().st_size
    assert done.stripped == done.left_out == ()
    assert done.source.endswith("step-000000002/model.safetensors")
    assert_plain(done.target)
    assert_same(export(run / "checkpoints", tmp_path / "b.safetensors").target)
    old = export(run / "checkpoints" / "step-000000001", tmp_path / "c.safetensors")
    assert load_model(old.target)["3.weight"].abs().max() == 0
    assert_same(export(run).target)
    assert (tmp_path / "runs" / "a.safetensors").is_file()


def test_own_names_that_look_like_wrappers_stay(tmp_path: Path) -> None:
    own = {"module.w": torch.ones(2), "module.model.b": torch.zeros(2)}
    Checkpoints(tmp_path / "run", asynchronous=False).save(1, own)
    assert_same(export(tmp_path / "run", tmp_path / "a.safetensors").target, own)
    save_model(tmp_path / "b.safetensors", own)
    assert_same(export(tmp_path / "b.safetensors", tmp_path / "c.safetensors").target, own)


WRAPPED = {
    "ddp": ("module.{}", ("module.",)),
    "compiled": ("_orig_mod.{}", ("_orig_mod.",)),
    "compiled ddp": ("_orig_mod.module.{}", ("_orig_mod.", "module.")),
    "ddp of compiled": ("module._orig_mod.{}", ("_orig_mod.", "module.")),
    "fsdp": ("_fsdp_wrapped_module.{}", ("_fsdp_wrapped_module.",)),
    "checkpointed": ("_checkpoint_wrapped_module.{}", ("_checkpoint_wrapped_module.",)),
    "plain": ("{}", ()),
}


@pytest.mark.parametrize("kind", WRAPPED)
@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt", ".safetensors"])
def test_wrappers_are_taken_off_foreign_files(tmp_path: Path, kind: str, suffix: str) -> None:
    pattern, stripped = WRAPPED[kind]
    state = {pattern.format(key): value for key, value in STATE.items()}
    path = tmp_path / f"theirs{suffix}"
    if suffix == ".safetensors":
        safetensors.torch.save_file(state, path)
    else:
        torch.save(state, path)
    done = export(path, tmp_path / "new")
    assert done.stripped == stripped
    assert done.target == str(tmp_path / "new" / "model.safetensors")
    assert_same(done.target)


@pytest.mark.slow
def test_real_wrappers(tmp_path: Path) -> None:
    model = net()
    model[0] = torch.compile(model[0])  # a level in the middle of names
    wrapped = nn.DataParallel(torch.compile(model))
    assert any("0._orig_mod.weight" in key for key in wrapped.state_dict())
    torch.save(wrapped.state_dict(), tmp_path / "w.pt")
    done = export(tmp_path / "w.pt")
    assert done.stripped == ("_orig_mod.", "module.")
    assert done.target == str(tmp_path / "w.safetensors")
    assert_plain(done.target)


def test_lightning(tmp_path: Path) -> None:
    content: dict[str, Any] = {
        "epoch": 3,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": prefixed("model."),
        "optimizer_states": [{"state": {0: {"step": torch.tensor(1.0)}}}],
        "hyper_parameters": {"lr": 0.1},
    }
    torch.save(content, tmp_path / "last.ckpt")
    done = export(tmp_path / "last.ckpt")
    assert done.stripped == ("model.",)
    assert_same(done.target)
    content["state_dict"]["criterion.weight"] = torch.ones(2)
    torch.save(content, tmp_path / "two.ckpt")
    both = export(tmp_path / "two.ckpt")
    assert both.stripped == ()
    assert "criterion.weight" in load_model(both.target)
    chosen = export(tmp_path / "two.ckpt", prefix="model.", overwrite=True)
    assert chosen.stripped == ("model.",)
    assert chosen.left_out == ("criterion.weight",)
    assert_same(chosen.target)


def test_model_is_a_prefix_only_in_lightning_checkpoints(tmp_path: Path) -> None:
    torch.save(prefixed("model."), tmp_path / "x.bin")
    assert_same(export(tmp_path / "x.bin").target, prefixed("model."))


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model", "module"])
def test_weights_among_other_state(tmp_path: Path, key: str) -> None:
    optimizer = torch.optim.Adam(net().parameters())
    content = {"epoch": 1, key: STATE, "optimizer": optimizer.state_dict(), "best": torch.ones(1)}
    torch.save(content, tmp_path / "x.pt")
    assert_same(export(tmp_path / "x.pt").target)


def test_entries_that_are_no_tensors_are_reported(tmp_path: Path) -> None:
    torch.save({**STATE, "version": 3, "_extra_state": None}, tmp_path / "x.pt")
    done = export(tmp_path / "x.pt")
    assert done.left_out == ("version", "_extra_state")
    assert_same(done.target)


def test_an_empty_prefix_takes_off_nothing(tmp_path: Path) -> None:
    torch.save(prefixed("module."), tmp_path / "x.pt")
    done = export(tmp_path / "x.pt", prefix="")
    assert done.stripped == ()
    assert_same(done.target, prefixed("module."))


def test_names_that_would_become_equal_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1), "_orig_mod.a": torch.zeros(1)}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="both become 'a'"):
        export(tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"no name begins with 'net\.'"):
        export(tmp_path / "x.pt", prefix="net.")
    assert sorted(os.listdir(tmp_path)) == ["x.pt"]
    assert export(tmp_path / "x.pt", prefix="").tensors == 2
    assert export(tmp_path / "x.pt", prefix="_orig_mod.", overwrite=True).left_out == ("a",)


def test_tied_weights_keep_both_names(tmp_path: Path) -> None:
    shared = torch.randn(3, 3)
    torch.save({"head": shared, "embedding": shared}, tmp_path / "x.pt")
    assert_same(export(tmp_path / "x.pt").target, {"head": shared, "embedding": shared})


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "x.pt")
    target = tmp_path / "x.safetensors"
    target.write_bytes(b"mine")
    with pytest.raises(CheckpointError, match="exists") as caught:
        export(tmp_path / "x.pt")
    assert "--overwrite" in str(caught.value.do)
    assert target.read_bytes() == b"mine"
    export(tmp_path / "x.pt", overwrite=True)
    assert_same(target)
    with pytest.raises(CheckpointError, match="exists"):
        export(target)
    export(target, overwrite=True)
    assert_same(target)


def test_metadata_of_others_is_kept(tmp_path: Path) -> None:
    safetensors.torch.save_file(STATE, tmp_path / "x.safetensors", {"author": "them"})
    export(tmp_path / "x.safetensors", tmp_path / "y.safetensors")
    with safetensors.safe_open(tmp_path / "y.safetensors", "pt") as file:
        assert file.metadata()["author"] == "them"
        assert file.metadata()["format"] == "pt"


def test_through_a_store(tmp_path: Path) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    Checkpoints(f"{url}/run/checkpoints", asynchronous=False).save(1, STATE)
    done = export(f"{url}/run", f"{url}/out/model.safetensors")
    assert done.target == f"{url}/out/model.safetensors".replace("memory://", "memory:///")
    assert_same(export(done.target, tmp_path / "here.safetensors").target)


# -- what must not be loaded -----------------------------------------------------------------


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("suffix", [".pt", ".bin", ".ckpt"])
@pytest.mark.parametrize("kind", ["zip", "legacy", "pickle"])
def test_code_in_a_file_is_never_executed(tmp_path: Path, suffix: str, kind: str) -> None:
    path = tmp_path / f"bomb{suffix}"
    content = {"state_dict": STATE, "hyper": Bomb(tmp_path / "executed")}
    if kind == "pickle":
        path.write_bytes(pickle.dumps(content["hyper"], protocol=2))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=kind == "zip")
    with pytest.raises(CheckpointError) as caught:
        export(path, tmp_path / "out.safetensors")
    assert "execute code" in caught.value.what
    assert "system" in caught.value.what
    assert sorted(os.listdir(tmp_path)) == [path.name]


class Settings:
    """A class of the user's, as scripts put some beside the weights."""

    def __init__(self) -> None:
        self.rate = torch.ones(1)


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize(
    "beside",
    [
        argparse.Namespace(lr=0.1),
        numpy.float32(0.5),
        {numpy.int64(3): numpy.float64(0.5), "path": Path("x")},
        [numpy.ones(2), numpy.random.default_rng(0).bit_generator.state],
        defaultdict(list, {"loss": [0.5]}),
        Settings(),
        Settings,
        print,
    ],
    ids=["Namespace", "number", "keys", "arrays", "defaultdict", "object", "class", "function"],
)
def test_weights_are_read_whatever_else_the_file_holds(
    tmp_path: Path, beside: Any, is_zip: bool
) -> None:
    content = {"beside": beside, "model": STATE}
    torch.save(content, tmp_path / "x.pt", _use_new_zipfile_serialization=is_zip)
    done = export(tmp_path / "x.pt")
    assert (done.key, done.other_keys) == ("model", ())
    assert_same(done.target)
    torch.save({**STATE, "beside": beside}, tmp_path / "flat.pt")
    flat = export(tmp_path / "flat.pt")
    assert flat.left_out == ("beside",)
    assert_same(flat.target)


def test_an_object_of_a_file_is_never_made(tmp_path: Path) -> None:
    class Loud:
        def __reduce__(self) -> Any:
            return exec, (f"open({str(tmp_path / 'executed')!r}, 'w')",)

    torch.save({"model": STATE, "hyper": Loud()}, tmp_path / "x.pt")
    before = set(torch.serialization.get_safe_globals())
    assert_same(export(tmp_path / "x.pt").target)
    assert not (tmp_path / "executed").exists()
    assert set(torch.serialization.get_safe_globals()) == before


# torch reads what lists of other kinds hold only with the class itself.
NODES = NodeList([1])


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (net(), "model"),
        ({"epoch": 3, "model": net(), "ema": net()}, "model"),
        ({"generator": net().state_dict(), "options": NODES}, "generator"),
        (
            {"state_dict": STATE, "optimizer": torch.optim.SGD([torch.ones(1)]), "o": NODES},
            "state_dict",
        ),
        ({**STATE, "options": NODES}, ""),
    ],
    ids=["a model", "two models", "options", "optimizer", "flat"],
)
def test_the_way_to_convert_a_file_that_names_code_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any, key: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "it's $HOME.pt"
    torch.save(content, path)
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="would execute code") as caught:
        export(path)
    _, convert, then = str(caught.value.do).splitlines()
    _, *arguments = shlex.split(convert)
    done = forked.run(arguments, tmp_path, os.environ, forked.TORCH)
    assert done.returncode == 0, done.stderr
    *_, name = shlex.split(then)
    found = export(name)
    assert found.key == key
    assert_same(found.target)
    assert path.read_bytes() == before


# -- several sets of weights in one file -----------------------------------------------------


def filled(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((2, 2), value), "bias": torch.full((2,), value)}


# Kinds of files, whether one set is taken by default, and the keys of all sets.
SETS: dict[str, tuple[dict[str, Any], bool, list[str]]] = {
    "ema": (
        {"state_dict": filled(0), "state_dict_ema": filled(1)},
        True,
        ["state_dict", "state_dict_ema"],
    ),
    "ema first": (
        {"model_ema": filled(1), "epoch": 3, "model": filled(0)},
        True,
        ["model", "model_ema"],
    ),
    "two models": (
        {"generator": filled(0), "discriminator": filled(1)},
        False,
        ["generator", "discriminator"],
    ),
    "parts": (
        {"model": {"encoder": filled(0), "decoder": filled(1)}},
        False,
        ["model.encoder", "model.decoder"],
    ),
    "a list": ({"nets": [filled(0), filled(1)]}, False, ["nets.0", "nets.1"]),
    "a set beside tensors": ({**filled(0), "head": filled(1)}, False, ["", "head"]),
    "state of others": (
        {
            "net": filled(0),
            "optimizer": torch.optim.SGD([torch.ones(2)], momentum=0.9).state_dict(),
            "optimizer_states": [{"state": {0: filled(1)}, "param_groups": []}],
            "random": {"cpu": torch.get_rng_state()},
            "figures": {"accuracy": torch.tensor(0.5)},
        },
        True,
        ["net"],
    ),
}


@pytest.mark.parametrize("kind", SETS)
def test_each_set_of_weights_is_named_and_can_be_taken(tmp_path: Path, kind: str) -> None:
    content, is_clear, keys = SETS[kind]
    path = tmp_path / "x.pth"
    torch.save(content, path)
    if not is_clear:
        with pytest.raises(CheckpointError, match=f"2 sets of weights.*{keys[1]}"):
            export(path)
    else:
        done = export(path)
        assert [done.key, *done.other_keys] == keys
        assert all(key in done.sets for key in keys[1:])
        assert_same(done.target, filled(0))
    for value, key in enumerate(keys):
        done = export(path, tmp_path / "y.safetensors", key=key, overwrite=True)
        assert done.key == key
        assert_same(done.target, filled(value))
    with pytest.raises(CheckpointError, match="no set of weights 'absent'"):
        export(path, tmp_path / "z.safetensors", key="absent")


def test_a_key_is_for_files_of_torch_alone(tmp_path: Path) -> None:
    save_model(tmp_path / "x.safetensors", STATE)
    Checkpoints(tmp_path / "run", asynchronous=False).save(1, STATE)
    for name in ("x.safetensors", "run"):
        with pytest.raises(CheckpointError, match="the set 'model'") as caught:
            export(tmp_path / name, tmp_path / "y.safetensors", key="model")
        assert caught.value.do == "leave --key out"
        export(tmp_path / name, tmp_path / f"{name}.plain.safetensors")


def test_a_file_whose_dicts_hold_one_another_is_read(tmp_path: Path) -> None:
    content: dict[str, Any] = {"model": STATE}
    content["self"] = content
    torch.save(content, tmp_path / "x.pt")
    assert_same(export(tmp_path / "x.pt").target)


@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel], ids=["bare", "parallel"])
def test_an_averaged_model_becomes_the_model(tmp_path: Path, wrap: Any) -> None:
    average = torch.optim.swa_utils.AveragedModel(wrap(net()))
    torch.save({"model": filled(0), "model_ema": average.state_dict()}, tmp_path / "x.pt")
    done = export(tmp_path / "x.pt", key="model_ema")
    assert done.left_out == ("n_averaged",)
    assert set(done.stripped) == {"module."}
    assert_same(done.target)
    own = {"module.weight": torch.ones(2), "n_averaged": torch.tensor(1)}
    save_model(tmp_path / "own.safetensors", own)
    assert_same(export(tmp_path / "own.safetensors", tmp_path / "y.safetensors").target, own)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("content", [b"", b"garbage" * 100, b"PK\x03\x04" + b"\0" * 300])
def test_damaged_files_are_named(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="not a") as caught:
        export(path, tmp_path / "y.safetensors")
    assert str(path) in str(caught.value.where)


def test_a_cut_torch_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save(STATE, path)
    data = path.read_bytes()
    for length in (10, len(data) // 2, len(data) - 10):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match="damaged"):
            export(path)


def test_other_sources_and_targets_are_refused(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "x.pt")
    torch.save(torch.ones(2), tmp_path / "tensor.pt")
    torch.save({"epoch": 3, "name": "x"}, tmp_path / "empty.pt")
    (tmp_path / "x.onnx").write_bytes(b"onnx")
    for source, target, words in [
        ("absent.pt", None, "no such file"),
        ("x.onnx", None, "expected a run"),
        (".", "y.safetensors", "found none of them"),
        ("tensor.pt", None, "expected a dict of tensors, found a Tensor"),
        ("empty.pt", None, "no weights in it, only 'epoch', 'name'"),
        ("x.pt", "y.keras", "expected a target in .safetensors"),
    ]:
        to = None if target is None else tmp_path / target
        with pytest.raises(CheckpointError, match=words):
            export(tmp_path / source, to)


# -- programs --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_program_runs_without_flatout_and_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    model = net()
    model.insert(0, nn.Dropout(0.5))
    model[2].eval()
    modes = [module.training for module in model.modules()]
    example = torch.randn(2, 1, 4, 4)
    done = export_program(model, [example], tmp_path / "out" / "m.pt2")
    assert [module.training for module in model.modules()] == modes
    assert done.parity in ("bit-identical", "rounding")
    assert done.bytes == (tmp_path / "out" / "m.pt2").stat().st_size
    model.eval()
    torch.save([example, model(example).detach()], tmp_path / "expected.pt")
    program = """
import sys
sys.modules["flatout"] = None
import torch
x, y = torch.load(sys.argv[2], weights_only=True)
torch.testing.assert_close(torch.export.load(sys.argv[1]).module()(x), y)
"""
    command = [sys.executable, "-c", program, done.target, str(tmp_path / "expected.pt")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    with pytest.raises(CheckpointError, match="exists"):
        export_program(model, [example], tmp_path / "out" / "m.pt2")


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x - 1


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


@pytest.mark.parametrize(
    ("model", "words"), [(Branching(), "cannot trace Branching"), (Noisy(), "other outputs")]
)
def test_what_cannot_be_exported_leaves_no_file(
    tmp_path: Path, model: nn.Module, words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        export_program(model, [torch.ones(3)], tmp_path / "m.pt2")
    assert list(tmp_path.iterdir()) == []


def test_a_program_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shop.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), "
        "nn.Linear(16, 2))\n"
        "def other():\n    return nn.Linear(2, 2)\n"
        "number = 3\n"
        "def wrong():\n    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    torch.save(prefixed("module."), "w.pt")
    export_program_of("w.pt", "w.pt2", "shop:build", ["2x1x4x4"])
    example = torch.randn(2, 1, 4, 4)
    found = torch.export.load("w.pt2").module()(example)
    torch.testing.assert_close(found, net().eval()(example))
    with pytest.raises(CheckpointError, match="another model"):
        export_program_of("w.pt", "x.pt2", "shop:other", ["2x2"])
    for factory in ["shop:absent", "absent:build", "shop", "shop:number", "shop:wrong"]:
        with pytest.raises(ModelError, match=factory):
            export_program_of("w.pt", "x.pt2", factory, ["2x1x4x4"])
    for shape in ["", "axb", "2x-1", "2x2:float99", "2x2:save"]:
        with pytest.raises(ModelError, match="expected an input like"):
            export_program_of("w.pt", "x.pt2", "shop:build", [shape])
