import json
import logging
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forked
from flatout import unfinished
from flatout.errors import CheckpointError, RecipeError
from flatout.save.checkpoint import Checkpoints
from flatout.save.storage import Folder

MODEL = {"a.weight": torch.arange(12.0).reshape(3, 4), "a.bias": torch.zeros(3)}
STATE = {"optimizer": {"state": {0: {"exp_avg": torch.ones(3, 4), "step": torch.tensor(7.0)}}}}


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "local" else f"memory://{uuid.uuid4().hex}/run"


@pytest.fixture(params=[True, False], ids=["asynchronous", "synchronous"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def fill(checkpoints: Checkpoints, *steps: int, scores: dict[int, float] | None = None) -> None:
    for step in steps:
        checkpoints.save(step, model(step), {"step": step}, score=(scores or {}).get(step))
    checkpoints.wait()


def save_and_wait(checkpoints: Checkpoints, step: int, state: dict[str, torch.Tensor]) -> None:
    checkpoints.save(step, state)
    checkpoints.wait()


def model(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((64,), float(step)), "b": torch.arange(5) + step}


def test_what_is_saved_comes_back(url: str, asynchronous: bool) -> None:
    checkpoints = Checkpoints(url, asynchronous=asynchronous)
    assert checkpoints.latest() is None
    assert checkpoints.best() is None
    name = checkpoints.save(120, MODEL, STATE, {"recipe": "x", 1: (2, 3)}, 0.5)
    checkpoints.wait()
    assert name == checkpoints.latest() == checkpoints.best() == "step-000000120"
    loaded = Checkpoints(url).load()
    assert (loaded.name, loaded.step, loaded.score) == (name, 120, 0.5)
    assert all(torch.equal(loaded.model[key], MODEL[key]) for key in MODEL)
    moments = loaded.state["optimizer"]["state"][0]
    assert torch.equal(moments["exp_avg"], torch.ones(3, 4))
    assert moments["step"] == 7
    assert loaded.meta["recipe"] == "x"
    assert loaded.meta[1] == (2, 3)
    assert loaded.meta["torch"] == torch.__version__
    assert len(loaded.meta["model_digest"]) == 16
    assert loaded.meta["time"].startswith("20")
    files = Folder(url).child(name).list()
    assert files == ["manifest.json", "model.safetensors", "state.json", "state.safetensors"]
    assert Folder(url).list() == [name]


def test_the_model_file_loads_without_flatout(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
    name = Checkpoints(tmp_path, asynchronous=False).save(1, net.state_dict())
    torch.save(net.state_dict(), tmp_path / "expected.pt")
    program = """
import sys
sys.modules["flatout"] = None
import json, hashlib, pathlib, safetensors.torch, torch
folder = pathlib.Path(sys.argv[1])
found = safetensors.torch.load_file(folder / "model.safetensors")
expected = torch.load(sys.argv[2], weights_only=True)
assert set(found) == set(expected)
assert all(torch.equal(found[k], expected[k]) for k in expected)
for name, entry in json.loads((folder / "manifest.json").read_text())["files"].items():
    data = (folder / name).read_bytes()
    assert (len(data), hashlib.sha256(data).hexdigest()) == (entry["size"], entry["sha256"])
"""
    command = ["-c", program, tmp_path / name, tmp_path / "expected.pt"]
    done = forked.run(command, tmp_path, os.environ, forked.TORCH)
    assert done.returncode == 0, done.stderr


def test_saving_copies_so_that_training_may_go_on(tmp_path: Path) -> None:
    weight = torch.zeros(1 << 20)
    moments = {"m": torch.zeros(1 << 20), "list": [0]}
    checkpoints = Checkpoints(tmp_path, keep_last=10)
    for step in range(5):
        weight.fill_(step)
        moments["m"].fill_(step)
        moments["list"][0] = step
        checkpoints.save(step, {"w": weight}, moments)
        weight.fill_(-1)
        moments["m"].fill_(-1)
        moments["list"][0] = -1
    checkpoints.wait()
    for step in range(5):
        loaded = checkpoints.load(f"step-{step:09d}")
        assert loaded.model["w"].unique().item() == step
        assert loaded.state["m"].unique().item() == step
        assert loaded.state["list"] == [step]


def test_entries_of_a_model_that_are_no_tensors(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"seen": 3, "ids": torch.arange(3)}

        def set_extra_state(self, state: Any) -> None:
            self.state = state

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, Counting(2, 2).state_dict())
    other = Counting(2, 2)
    other.load_state_dict(checkpoints.load().model)
    assert other.state["seen"] == 3
    assert torch.equal(other.state["ids"], torch.arange(3))


def test_the_last_and_the_best_are_kept(url: str) -> None:
    checkpoints = Checkpoints(url, keep_last=2, keep_best=2, mode="max")
    scores = {1: 0.9, 2: 0.2, 3: 0.95, 4: 0.1, 5: float("nan"), 6: 0.5}
    fill(checkpoints, *range(1, 7), scores=scores)
    assert Folder(url).list() == [f"step-{s:09d}" for s in (1, 3, 5, 6)]
    assert checkpoints.best() == "step-000000003"
    assert checkpoints.latest() == "step-000000006"
    assert Checkpoints(url, mode="min").best() == "step-000000006"
    assert checkpoints.load("step-000000005").score is None


def test_a_new_writer_takes_over_what_was_there(tmp_path: Path) -> None:
    fill(Checkpoints(tmp_path, keep_last=5, keep_best=1), 1, 2, 3, scores={1: 0.1, 2: 0.9, 3: 0.9})
    fill(Checkpoints(tmp_path, keep_last=2, keep_best=1), 4)
    assert Folder(tmp_path).list() == [f"step-{s:09d}" for s in (1, 3, 4)]


def test_a_step_saved_again_replaces_the_older_one(url: str) -> None:
    checkpoints = Checkpoints(url)
    fill(checkpoints, 1, 2)
    assert checkpoints.save(2, model(200)) == "step-000000002.1"
    checkpoints.wait()
    assert Folder(url).list() == ["step-000000001", "step-000000002.1"]
    assert checkpoints.load().model["w"][0] == 200
    again = Checkpoints(url)
    assert again.save(2, model(300)) == "step-000000002"
    assert again.load().model["w"][0] == 300
    assert Folder(url).list() == ["step-000000001", "step-000000002"]


def test_going_back_to_an_older_step_keeps_what_is_saved_from_there(tmp_path: Path) -> None:
    fill(Checkpoints(tmp_path, keep_last=3), 100, 200, 300)
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    fill(checkpoints, 110, 120)
    assert Folder(tmp_path).list() == ["step-000000110", "step-000000120"]


def test_two_writers_leave_each_other_alone(url: str) -> None:
    one, two = Checkpoints(url, keep_last=2), Checkpoints(url, keep_last=2)
    for step in range(1, 6):
        one.save(step, model(step))
        two.save(step, model(1000 + step))
    one.wait()
    two.wait()
    names = Folder(url).list()
    assert len(names) == 4
    values = sorted(one.load(name).model["w"][0].item() for name in names)
    assert values == [4, 5, 1004, 1005]


def test_many_writers_at_the_same_step(url: str) -> None:
    def write(number: int) -> None:
        barrier.wait()
        names[number] = writers[number].save(7, model(number))

    writers = [Checkpoints(url, keep_last=1, asynchronous=False) for _ in range(4)]
    names: dict[int, str] = {}
    barrier = threading.Barrier(4)
    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(names.values()) == Folder(url).list()
    assert len(set(names.values())) == 4
    for number, name in names.items():
        assert writers[0].load(name).model["w"][0] == number


def test_every_damaged_byte_is_found(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    fill(checkpoints, 1, 2)
    draw = random.Random(0)
    folder = tmp_path / "step-000000002"
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        positions = set(draw.sample(range(len(data)), min(60, len(data))))
        positions |= {0, 7, 8, 9, len(data) - 1}
        for position in positions:
            broken = bytearray(data)
            broken[position] ^= 1 << draw.randrange(8)
            path.write_bytes(broken)
            with pytest.raises(CheckpointError) as caught:
                checkpoints.load()
            assert str(path) in str(caught.value.where)
            assert "load the previous one: step-000000001" in str(caught.value.do)
        path.write_bytes(data)
    assert checkpoints.load().step == 2


def test_a_damaged_tensor_is_named(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    fill(checkpoints, 1)
    path = tmp_path / "step-000000001" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="tensor 'w'") as caught:
        checkpoints.load()
    assert "no older one is whole" in str(caught.value.do)


@pytest.mark.parametrize(
    "name", ["manifest.json", "model.safetensors", "state.json", "state.safetensors"]
)
@pytest.mark.parametrize("kind", ["cut", "missing"])
def test_the_latest_is_the_newest_whole_one(
    tmp_path: Path, name: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path)
    fill(checkpoints, 1, 2)
    path = tmp_path / "step-000000002" / name
    if kind == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    with caplog.at_level(logging.WARNING):
        assert checkpoints.latest() == "step-000000001"
    if (name, kind) == ("manifest.json", "missing"):
        assert checkpoints.load().step == 1  # without a manifest it is no checkpoint
        return
    assert str(path) in caplog.text
    with pytest.raises(CheckpointError) as caught:
        checkpoints.load()
    assert str(path) in str(caught.value)
    assert "load the previous one: step-000000001" in str(caught.value.do)


def test_a_damaged_checkpoint_neither_counts_nor_goes(tmp_path: Path) -> None:
    fill(Checkpoints(tmp_path), 1, 2)
    os.truncate(tmp_path / "step-000000002" / "state.json", 3)
    fill(Checkpoints(tmp_path, keep_last=2), 3)
    assert Folder(tmp_path).list() == [f"step-{s:09d}" for s in (1, 2, 3)]


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        checkpoints.load()
    fill(checkpoints, 1)
    with pytest.raises(CheckpointError, match="step-000000009") as caught:
        checkpoints.load("step-000000009")
    assert "step-000000001" in str(caught.value.do)


def test_a_newer_format_is_not_guessed_at(tmp_path: Path) -> None:
    import flatout.save.manifest as manifests
    from flatout.save.seal import BLANK, seal

    checkpoints = Checkpoints(tmp_path)
    fill(checkpoints, 1)
    path = tmp_path / "step-000000001" / manifests.MANIFEST
    fields = json.loads(path.read_text())
    fields |= {"format": 2, "manifest_sha256": BLANK}
    path.write_bytes(seal("manifest_sha256", json.dumps(fields).encode()))
    with pytest.raises(CheckpointError, match="format 2") as caught:
        checkpoints.load()
    assert "update Flatout" in str(caught.value.do)


def test_a_failed_save_costs_nothing(tmp_path: Path, asynchronous: bool) -> None:
    checkpoints = Checkpoints(tmp_path, asynchronous=asynchronous)
    fill(checkpoints, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, hard))
    try:
        with pytest.raises(CheckpointError, match="File too large") as caught:
            save_and_wait(checkpoints, 2, {"w": torch.zeros(1 << 16)})
        assert "bytes needed" in caught.value.what
        assert Folder(tmp_path).list() == ["step-000000001"]
        checkpoints.wait()  # an error is reported once
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    fill(checkpoints, 2)
    assert checkpoints.load().step == 2


def test_an_error_in_the_background_is_raised_by_the_next_save(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    fill(checkpoints, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, hard))
    try:
        checkpoints.save(2, {"w": torch.zeros(1 << 16)})
        with pytest.raises(CheckpointError, match="File too large"):
            checkpoints.save(3, model(3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    checkpoints.save(4, model(4))
    assert checkpoints.load().step == 4
    assert Folder(tmp_path).list() == ["step-000000001", "step-000000004"]


@pytest.mark.root
def test_a_full_disk_keeps_the_last_good_one(asynchronous: bool) -> None:
    with tempfile.TemporaryDirectory() as place:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], check=True)
        try:
            checkpoints = Checkpoints(place, keep_last=1, asynchronous=asynchronous)
            fill(checkpoints, 1)
            with pytest.raises(CheckpointError, match="No space left") as caught:
                save_and_wait(checkpoints, 2, {"w": torch.zeros(1 << 20)})
            assert "bytes free" in caught.value.what
            assert Folder(place).list() == ["step-000000001"]
            assert checkpoints.load().step == 1
            fill(checkpoints, 3)
            assert Folder(place).list() == ["step-000000003"]
        finally:
            subprocess.run(["umount", place], check=True)


def test_bad_state_and_meta_are_refused_by_the_call_itself(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match=r"state\['f'\]"):
        checkpoints.save(1, model(1), {"f": len})
    with pytest.raises(CheckpointError, match="meta"):
        checkpoints.save(1, model(1), meta={"t": torch.ones(1)})
    with pytest.raises(CheckpointError, match="0 or more"):
        checkpoints.save(-1, model(1))
    assert Folder(tmp_path).list() == []


def test_a_path_that_cannot_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    checkpoints = Checkpoints(tmp_path / "file" / "run")
    with pytest.raises(CheckpointError, match="a file is where a folder should be"):
        checkpoints.check_writable()
    with pytest.raises(CheckpointError, match="a file is where a folder should be"):
        checkpoints.save(1, model(1))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    fill(Checkpoints(tmp_path), 1)
    tmp_path.chmod(0o500)
    if os.access(tmp_path, os.W_OK):
        pytest.skip("this user may write everywhere")
    try:
        checkpoints = Checkpoints(tmp_path)
        assert checkpoints.load().step == 1
        with pytest.raises(CheckpointError, match="Permission denied"):
            checkpoints.check_writable()
        with pytest.raises(CheckpointError, match="Permission denied"):
            checkpoints.save(2, model(2))
    finally:
        tmp_path.chmod(0o700)


def test_a_folder_that_can_be_written_is_left_as_it_was(url: str) -> None:
    Checkpoints(url).check_writable()
    assert Folder(url).list() == []


def test_in_a_store_a_folder_without_manifest_does_not_count() -> None:
    url = f"memory://{uuid.uuid4().hex}"
    fill(Checkpoints(url), 1)
    store = Folder(url)
    live = unfinished.new_name()
    dead = live.rsplit("-", 2)[0] + "-1-0"
    for step, mark in [(2, live), (3, dead)]:
        store.write(f"step-{step:09d}/{mark}", [b"1"])
        store.write(f"step-{step:09d}/model.safetensors", [b"half"])
    checkpoints = Checkpoints(url)
    assert checkpoints.latest() == "step-000000001"
    assert checkpoints.load().step == 1
    assert store.list() == ["step-000000001", "step-000000002"]  # the dead writer's is gone
    assert checkpoints.save(2, model(2)) == "step-000000002.1"


@pytest.mark.parametrize("wrong", [{"keep_last": 0}, {"keep_best": -1}, {"mode": "best"}])
def test_settings_that_make_no_sense(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(RecipeError):
        Checkpoints(tmp_path, **wrong)


def test_a_program_that_ends_finishes_its_last_checkpoint(tmp_path: Path) -> None:
    program = """
import sys, torch
from flatout.save.checkpoint import Checkpoints
Checkpoints(sys.argv[1]).save(5, {"w": torch.ones(1 << 22)})
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    assert Checkpoints(tmp_path).load().step == 5


@pytest.mark.gpu
def test_from_the_gpu(tmp_path: Path, asynchronous: bool) -> None:
    weight = torch.randn(1 << 20, device="cuda")
    expected = weight.cpu()
    checkpoints = Checkpoints(tmp_path, asynchronous=asynchronous)
    checkpoints.save(1, {"w": weight}, {"m": weight * 2})
    weight.zero_()
    loaded = checkpoints.load()
    assert torch.equal(loaded.model["w"], expected)
    assert torch.equal(loaded.state["m"], expected * 2)
