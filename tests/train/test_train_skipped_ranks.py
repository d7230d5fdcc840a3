"""Several ranks skip what one rank skips, learn what it learns, and tell of each image once."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "world"))
from world_ranks import finish, run, start

Image = pytest.importorskip("PIL.Image")

# Of batches of eight the first four are the whole part of a rank, the last two a whole batch.
BAD = {
    "train": ["a/00", "a/01", "a/02", "a/03", "a/07", "b/14", "b/20", "b/25", "b/26"],
    "val": ["a/02", "b/09"],
}
NO_IMAGE = "train/a/05"

JOB = """
    import os
    import signal
    import sys
    from pathlib import Path

    import torch
    from torch import nn

    import flatout
    from flatout.data.reading import error_policy
    from flatout.data.features.row_log import RECORD
    from flatout.recipe import Recipe
    from flatout.train.parts.features import features
    from flatout.train.parts.features.rows import ModelRows
    from flatout.train.parts.features.choice import Choice
    from flatout.world import join, place

    folder, size, mode = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    error_policy._TOLD = 20
    fixed = {
        "precision": "fp32", "memory_format": "contiguous", "rewrites": "off", "capture": "off",
        "fused_optimizer": "off", "matmul_precision": "highest",
    }
    whole = {"micro_batch": "whole"}
    exact = Recipe(compute=fixed, memory=whole, process={"threads": 1}, save={"every": 2})
    computed, compute = 0, ModelRows._computed


    def counted(rows, cut, inputs, samples, **more):
        global computed
        computed += samples
        return compute(rows, cut, inputs, samples, **more)


    def choose(options, samples, epochs, plain_s):
        best = min(options, key=lambda one: one.bytes)
        return Choice(best, "", plain_s, plain_s / 10, 2, best.bytes * samples * best.variants)


    ModelRows._computed = counted
    features.choose = choose


    def images(part, order=None):
        read = flatout.data.images(folder / "photos" / part, size=8, on_error="skip")
        return (read if order is None else read.shuffle(seed=order)).batch(8)


    def model(frozen=False):
        torch.manual_seed(0)
        first = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        made = nn.Sequential(first, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2))
        return flatout.freeze(made, until="0") if frozen else made


    def fitted(name, model, train, recipe=exact, allow="exact", run=None, **given):
        said = []
        trainer = flatout.Trainer(
            model, optimizer="sgd", loss="cross_entropy", lr=0.1, metrics=["accuracy"],
            recipe=recipe, allow=allow, run=run, say=said.append,
        )
        val = images("val")
        history = trainer.fit(train, validation_data=val, epochs=3, progress=False, **given)
        found[name] = {
            "weights": {k: v.clone() for k, v in trainer.model.state_dict().items()},
            "history": [{k: v for k, v in e.items() if k != "seconds"} for e in history.epochs],
            "prediction": trainer.predict(val),
            "said": said[:],
        }
        return trainer, val, said


    class Kill(flatout.Callback):
        def on_step(self, state):
            if mode == "killed" and state.step == 7 and place().rank == size - 1:
                os.kill(os.getpid(), signal.SIGKILL)


    def rows_kept():
        logs = Path(os.environ["FLATOUT_CACHE"]).glob("features/*/filled.log")
        return sum(log.stat().st_size for log in logs) // RECORD.itemsize


    def together(do):
        join().wait()
        if join().is_first:
            do()
        join().wait()


    found = {}
    if mode != "whole":
        given = {"run": folder / "run", "resume": mode == "resumed", "callbacks": [Kill()]}
        fitted("in order", model(), images("train"), **given)
    else:
        fitted("in order", model(), images("train"))
        fitted("shuffled", model(), images("train", 3))
        fitted("frozen", model(frozen=True), images("train", 3))
        kept = exact.replace({"input.features": "disk"})
        for name in ("kept", "found"):
            computed = 0
            given = {"recipe": kept, "allow": "tolerant"}
            trainer, val, said = fitted(name, model(frozen=True), images("train", 3), **given)
            found[name]["computed"], found[name]["rows"] = computed, rows_kept()
        said.clear()
        together((folder / "photos/val/b/07.png").unlink)
        trainer.evaluate(val)
        together((folder / "photos/val/b/08.png").unlink)
        trainer.predict(val)
        found["said later"] = said
        net, data, told = model(), images("train").normalize(), []
        loop = flatout.Loop(recipe=exact, allow="exact", say=told.append)


        def compute(batch):
            return nn.functional.cross_entropy(net(batch.inputs), batch.targets)


        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loop.prepare(net, optimizer, compute=compute, data=data)
        losses = []
        for epoch in loop.epochs(3):
            for batch in loop.batches(data):
                loop.step(compute, batch)
            losses.append(loop.mean_loss())
        loop.close()
        weights = {k: v.clone() for k, v in net.state_dict().items()}
        found["own loop"] = {"weights": weights, "losses": losses, "said": told}
    torch.save(found, folder / f"found-{mode}-{size}-{place().rank}.pt")
"""


def draw(folder):
    """27 pictures to train on, one of which is none, and ten to validate on; some are cut short."""
    for part, count in (("train", 27), ("val", 10)):
        for number in range(count):
            name, seed = "b" if 2 * number >= count else "a", number + 100 * (part == "val")
            path = folder / "photos" / part / name / f"{number:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(seed).integers(0, 200, (9, 8, 3)).astype(np.uint8)
            Image.fromarray(pixels + 50 * (name == "b")).save(path)
            if f"{name}/{number:02}" in BAD[part]:
                path.write_bytes(path.read_bytes()[:-30])
    (folder / f"photos/{NO_IMAGE}.png").write_bytes(b"no image")


def found_by(size, folder):
    """What each of so many ranks has to say; they share a store."""
    draw(folder)
    run(JOB, size, folder, "whole")
    return [torch.load(folder / f"found-whole-{size}-{rank}.pt") for rank in range(size)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return found_by(1, tmp_path_factory.mktemp("alone"))[0]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.long)])
def found(request, tmp_path_factory):
    return found_by(request.param, tmp_path_factory.mktemp("ranks"))


def named(lines, part):
    """How often each image is named as skipped."""
    lines = [line for line in lines if "skipped: " in line]
    return [sum(line.count(f"{part}/{name}.png") for line in lines) for name in BAD[part]]


FITS = ("in order", "shuffled", "frozen", "kept", "found")


@pytest.mark.slow
def test_they_learn_what_one_rank_learns_to_rounding(alone, found):
    for rank in found:
        for case in (*FITS, "own loop"):
            for key in {"weights", "history", "prediction", "losses"} & alone[case].keys():
                close = {"rtol": 1e-4, "atol": 1e-5, "msg": f"{case}: {key}"}
                torch.testing.assert_close(rank[case][key], alone[case][key], **close)
    heads = [alone[case]["weights"]["3.weight"] for case in (*FITS[:3], "own loop")]
    assert not any(torch.allclose(one, heads[2], rtol=1e-3) for one in (*heads[:2], heads[3]))


@pytest.mark.slow
def test_each_image_is_named_and_counted_once_by_the_first_rank(alone, found):
    for number, rank in enumerate((alone, *found)):
        speaks = int(number < 2)
        for case in FITS:
            said = rank[case]["said"]
            for part, bad in BAD.items():
                assert named(said, part) == [speaks] * len(bad), (number, case, part, said)
            counts = [int(line.split()[1]) for line in said if " skipped: " in line]
            assert sum(counts) == speaks * (len(BAD["train"]) + len(BAD["val"]) + 1)
        later = [line for line in rank["said later"] if "skipped: " in line]
        assert len(later) == 2 * speaks
        for line, name in zip(later, ("b/07", "b/08"), strict=False):
            assert line.startswith("input: 1 more bad row skipped: ")
            assert f"val/{name}.png" in line
        assert named(rank["own loop"]["said"], "train") == [speaks] * len(BAD["train"])


@pytest.mark.slow
def test_no_row_is_kept_of_what_is_skipped_and_all_others_are(alone, found):
    good = 26 - len(BAD["train"]) + 10 - len(BAD["val"])
    for ranks in ([alone], found):
        for case in ("kept", "found"):
            assert {rank[case]["rows"] for rank in ranks} == {good}
            # What fills up a batch of bad rows alone may be computed before it is kept.
            computed = sum(rank[case]["computed"] for rank in ranks)
            assert good <= computed <= good + len(ranks) if case == "kept" else computed == 0


@pytest.mark.slow
def test_killed_in_mid_epoch_they_go_on_as_if_nothing_had_been(found, tmp_path):
    draw(tmp_path)
    size = len(found)
    ranks = start(JOB, size, tmp_path, "killed")
    ended = [rank.communicate(timeout=120) for rank in ranks]
    assert all(rank.returncode for rank in ranks), ended
    assert any((tmp_path / "run/checkpoints").iterdir())
    finish(start(JOB, size, tmp_path, "resumed"))
    for rank, whole in enumerate(found):
        one = torch.load(tmp_path / f"found-resumed-{size}-{rank}.pt")["in order"]
        for key in ("weights", "history", "prediction"):
            torch.testing.assert_close(one[key], whole["in order"][key], rtol=0, atol=0)
        assert named(one["said"], "train") == [int(rank == 0)] * len(BAD["train"])
