"""A checkpoint in parts, one for each rank, and model files in several parts."""

import json
import shutil
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flatout.errors import CheckpointError
from flatout.save.checkpoint import Checkpoints
from flatout.save.export import export
from flatout.save.model_file import load_model
from flatout.save.pieces import file_of, parts, shares

sys.path.append(str(Path(__file__).parents[1] / "world"))
from world_ranks import run, start

SAVE = """
    import sys
    import torch
    from flatout.save.checkpoint import Checkpoints
    from flatout.save.pieces import Pieces
    from flatout.world import join

    folder = sys.argv[1]
    world = join()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 3))
    weights = model.state_dict()
    moments = {name: weight * 2 for name, weight in weights.items()}
    state = {"optimizer": moments, "words": "common", "more": torch.arange(5)}
    own = {"rank": world.rank, "draws": torch.full((world.rank + 1,), world.rank)}
    for asynchronous in (True, False):
        checkpoints = Checkpoints(
            f"{folder}/{asynchronous}", keep_last=2, asynchronous=asynchronous,
            pieces=Pieces(world),
        )
        for step in (1, 2, 3):
            name = checkpoints.save(
                step, weights, state, {"note": "x"}, own=[own], replicated=["optimizer"]
            )
            assert name == f"step-{step:09d}", name
        checkpoints.wait()
    if world.is_first:
        torch.save((weights, state), f"{folder}/expected.pt")
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pieces")
    run(SAVE, 3, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_the_ranks_have_written_is_one_checkpoint(saved, asynchronous):
    weights, state = torch.load(saved / "expected.pt")
    folder = saved / str(asynchronous)
    assert sorted(p.name for p in folder.iterdir()) == ["step-000000002", "step-000000003"]
    loaded = Checkpoints(folder).load()
    assert loaded.meta["note"] == "x"
    torch.testing.assert_close(loaded.model, dict(weights), rtol=0, atol=0)
    assert loaded.state.pop("words") == state.pop("words")
    torch.testing.assert_close(loaded.state, state, rtol=0, atol=0)
    assert [own["rank"] for own in loaded.own] == [0, 1, 2]
    assert [own["draws"].tolist() for own in loaded.own] == [[0], [1, 1], [2, 2, 2]]


def test_the_weights_are_plain_files_with_an_index(saved, tmp_path):
    weights, _ = torch.load(saved / "expected.pt")
    folder = saved / "True" / "step-000000003"
    files = sorted(folder.glob("model-*.safetensors"))
    assert [f.name for f in files] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    held = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert {name: file.name for file in files for name in load_file(file)} == held
    for path in (folder / "model.safetensors.index.json", folder / "model.safetensors"):
        torch.testing.assert_close(load_model(path), dict(weights), rtol=0, atol=0)
    done = export(folder, tmp_path / "whole.safetensors")
    assert done.source.endswith("model.safetensors.index.json")
    torch.testing.assert_close(load_file(done.target), dict(weights), rtol=0, atol=0)
    # The files alone, without what makes them a checkpoint.
    plain = tmp_path / "plain"
    plain.mkdir()
    for file in (*files, folder / "model.safetensors.index.json"):
        shutil.copy(file, plain)
    assert export(plain / "model.safetensors.index.json").target == str(plain / "model.safetensors")
    assert export(plain, tmp_path / "again.safetensors").tensors == 4


def test_a_part_that_is_missing_or_damaged_is_named(saved, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(saved / "True", folder)
    newest = folder / "step-000000003"
    part = newest / "model-00001-of-00003.safetensors"
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    with pytest.raises(
        CheckpointError, match=r"damaged: tensor '(.|\n)*load the previous one: step-0+2"
    ):
        Checkpoints(folder).load()
    part.unlink()
    assert Checkpoints(folder).latest() == "step-000000002"


@pytest.mark.parametrize("file", ["../other.safetensors", "/etc/passwd", 3, "weights.pt"])
def test_an_index_names_files_beside_it_and_no_others(tmp_path, file):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CheckpointError, match="expected names of safetensors files beside it"):
        load_model(index)


def test_an_index_that_is_none(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    for text in ("", "[]", "{}", '{"weight_map": [1]}'):
        index.write_text(text)
        with pytest.raises(CheckpointError, match="expected JSON with a weight_map"):
            load_model(index)


def test_files_of_others_in_parts(tmp_path):
    save_file({"a": torch.ones(2), "left": torch.ones(1)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "two.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    assert list(load_model(index)) == ["a", "b"]
    index.write_text(json.dumps({"weight_map": {"c": "two.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"'c' is not in it, though .* says so"):
        load_model(index)


def test_each_rank_writes_about_as_much():
    tensors = {str(n): torch.zeros(n) for n in range(1, 60)} | {"none": torch.zeros(0)}
    for ranks in (1, 2, 3, 7):
        found = shares(tensors, ranks)
        assert sorted(name for names in found for name in names) == sorted(tensors)
        numels = [sum(tensors[name].numel() for name in names) for names in found]
        assert max(numels) - min(numels) < 60
    assert shares({"a": torch.zeros(3)}, 3) == [["a"], [], []]


def test_a_large_table_and_its_moments_lie_on_different_ranks(saved):
    weights, state = torch.load(saved / "expected.pt")
    newest = saved / "True" / "step-000000003"
    sizes = [
        sum(file.stat().st_size for file in newest.glob(f"*-0000{n}-of-00003.safetensors"))
        for n in (1, 2, 3)
    ]
    large = 4 * 30 * 40
    assert len(weights) == len(state["optimizer"]) == 4
    # The two large tensors hold most of all bytes. No rank has both of them.
    assert sum(size > large for size in sizes) == 2
    assert max(sizes) < 1.5 * large


def test_names_of_parts():
    names = [file_of("state", rank, 11, "json") for rank in range(11)]
    assert names[10] == "state-00011-of-00011.json"
    assert (
        parts([*names[::-1], "state.json", "model-00001-of-00011.json"], "state", "json") == names
    )


FULL = """
    import resource, signal, sys
    import torch
    from flatout.save.checkpoint import Checkpoints
    from flatout.save.pieces import Pieces
    from flatout.world import join

    world = join()
    checkpoints = Checkpoints(sys.argv[1] + "/run", asynchronous=True, pieces=Pieces(world))
    weights = {name: torch.ones(100_000) for name in "abcd"}
    checkpoints.save(1, weights, {})
    checkpoints.wait()
    if world.rank == 1:  # no byte more, as on a full disk
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    checkpoints.save(2, weights, {})
    checkpoints.wait()
"""


def test_a_rank_whose_disk_is_full_says_so_and_the_last_good_one_stays(tmp_path):
    first, second = start(FULL, 2, tmp_path)
    try:
        (_, quiet), (_, said) = (rank.communicate(timeout=60) for rank in (first, second))
    finally:
        first.kill()
        second.kill()
    assert second.returncode == 1
    assert "CheckpointError" in said
    assert "File too large" in said
    assert "model-00002-of-00002.safetensors" in said
    assert first.returncode == 75  # the code of a rank that has lost another
    assert not quiet
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["step-000000001"]
    assert Checkpoints(tmp_path / "run").load().step == 1


LAST = """
    import json, signal, sys, time, resource
    import torch
    from flatout.errors import CheckpointError
    from flatout.recipe import Save
    from flatout.save.storage import Folder
    from flatout.train.checkpointing import Checkpointing
    from flatout.world import join

    folder, asynchronous, bad = sys.argv[1], sys.argv[3] == "True", int(sys.argv[4])
    world = join()
    asked = Save(pieces="per_rank", asynchronous=asynchronous)
    checkpointing = Checkpointing(f"{folder}/run", world, asked)
    checkpointing.begin()
    weights = {name: torch.ones(100_000) for name in "abcdef"}
    said = "nothing"
    if world.rank == bad:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, -1))
    elif world.rank > 0:  # they still write when the bad one has failed
        write = Folder.write
        Folder.write = lambda *given: (time.sleep(0.2), write(*given))[1]
    try:
        checkpointing.write(1, weights, {"optimizers": {}}, {}, meta={}, score=None, metadata={})
        checkpointing.wait()
    except CheckpointError as error:
        said = error.what
    resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
    together = world.gather(said)  # all are here: none waits for one that has left
    if world.is_first:
        with open(f"{folder}/said.json", "w") as file:
            json.dump(together, file)
"""


@pytest.mark.parametrize(("asynchronous", "bad"), [(True, 0), (False, 1)])
def test_a_part_that_fails_last_is_an_error_on_every_rank(tmp_path, asynchronous, bad):
    run(LAST, 3, tmp_path, asynchronous, bad)
    said = json.loads((tmp_path / "said.json").read_text())
    assert all("File too large" in words for words in said)
    assert all(f"rank {bad}" in words for rank, words in enumerate(said) if rank != bad)
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


APART = """
    import os, sys
    import flatout, torch
    from flatout.world import place

    folder = f"{sys.argv[1]}/node{place().rank}"  # as on nodes that share nothing
    recipe = flatout.Recipe().replace({"save.pieces": "per_rank"})
    trainer = flatout.Trainer(torch.nn.Linear(3, 2), recipe=recipe, run=folder, allow="exact")
    trainer.fit((torch.randn(8, 3), torch.zeros(8, dtype=torch.long)), progress=False)
"""


@pytest.mark.slow
def test_ranks_that_do_not_share_a_folder_are_told_before_training(tmp_path):
    ranks = start(textwrap.dedent(APART), 2, tmp_path)
    try:
        said = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, words in zip(ranks, said, strict=True):
        assert rank.returncode == 1
        assert "rank 1 (node 0): it does not see what rank 0 has written there" in words
        assert "put run on a path that all nodes share, or set save.pieces=merged" in words
    assert not any(path.is_file() for path in tmp_path.glob("node*/**/*"))


MERGED = """
    import sys
    import flatout, torch
    from flatout.world import place

    def fit(folder, epochs, **given):
        torch.manual_seed(0)
        x, y = torch.randn(40, 3), torch.arange(40) % 2
        layers = torch.nn.Linear(3, 8), torch.nn.Dropout(), torch.nn.Linear(8, 2)
        model = torch.nn.Sequential(*layers)
        trainer = flatout.Trainer(model, run=folder, allow="exact", metrics=["auc"])
        trainer.fit((x, y), batch_size=8, epochs=epochs, progress=False, **given)
        return model.state_dict()

    folder = f"{sys.argv[1]}/node{place().rank}"
    fit(folder, 1)
    resumed = fit(folder, 2, resume=True)
    whole = fit(folder + "-whole", 2)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
"""


@pytest.mark.slow
def test_without_a_shared_folder_the_first_rank_sends_what_it_has_merged(tmp_path):
    run(MERGED, 2, tmp_path)
    found = {path.parent.parent.name for path in tmp_path.glob("node*/checkpoints/step-*")}
    assert found == {"node0", "node0-whole"}
