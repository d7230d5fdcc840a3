"""Workers that are killed while servers do not wait: the others go on without them."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
from torch import nn

import flatout
from flatout.strategies.servers.asynchronous import dropped_words
from flatout.strategies.servers.server import EpochParts

JOB = """
    import json
    import math
    import os
    import signal
    import sys
    import time
    from pathlib import Path

    import torch
    from torch import nn

    import flatout
    from flatout.world import place, restarts

    torch.set_num_threads(1)
    folder, settings, victims = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
    own, is_back = place().rank, "FLATOUT_COMES_BACK" in os.environ
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(121, 8, generator=draw)
    y = 2 * x[:, :1] + 0.1 * torch.randn(121, 1, generator=draw)


    class Ends(flatout.Callback):
        every = 1
        steps = 0

        def on_step(self, state):
            Ends.steps += 1
            time.sleep(0.02)  # so that no rank takes all of an epoch
            # Until then ranks try settings together, and a killed rank would stop them all.
            goes_on_alone = state.trainer.loop.feed.claims is not None
            if goes_on_alone and not is_back and victims.get(str(own), math.inf) <= Ends.steps:
                os.kill(os.getpid(), signal.SIGKILL)


    class Until(flatout.Callback):
        # Ends the fit with the epoch after the first one of a worker that is back.
        def on_epoch_end(self, state):
            note = folder / "back"
            if note.exists() and int(note.read_text()) < state.epoch:
                state.stop("the worker is back")
            elif is_back:
                (folder / "back.new").write_text(str(state.epoch))
                os.replace(folder / "back.new", note)


    def fit(run, epochs, **given):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))
        said = []
        trainer = flatout.Trainer(
            net, loss="mse", optimizer=torch.optim.SGD(net.parameters(), lr=0.05), allow="exact",
            run=run, recipe=flatout.Recipe(world={"strategy": "parameter_server", **settings}),
            say=said.append, metrics=["mae"], warm_start=victims.get("warm"),
        )
        history = trainer.fit(
            (x, y), batch_size=12, epochs=epochs, validation_data=(x, y), progress=False,
            resume=True, drop_last=True, **given,
        )
        score = trainer.evaluate((x, y))
        return {
            "losses": [one["val_loss"] for one in history.epochs], "said": said,
            "staleness": history.staleness, "score": score["loss"], "late": history.late,
            "world": trainer.world().size, "restarts": restarts(), "is_back": is_back,
        }


    wants = [Ends(), Until()] if "back" in victims else [Ends()]
    epochs = 1000 if "back" in victims else 3
    found = [fit(str(folder / "run"), epochs, callbacks=wants), fit(str(folder / "again"), 1)]
    (folder / f"found{own}.json").write_text(json.dumps(found))
"""

LAUNCH = """
import sys
from flatout.world import Nodes
from flatout.world.launch import launch
ranks, restarts, servers = map(int, sys.argv[1:4])
start = "flatout.strategies.start" if servers else "flatout.world.start"
command = [sys.executable, "-m", start, *sys.argv[4:]]
sys.exit(launch(command, Nodes(ranks=ranks, servers=servers), restarts, {}))
"""


def run(folder, ranks, victims, restarts=0, apart=0, **settings):
    """What each rank that came to the end found, and what was printed."""
    (folder / "job.py").write_text(textwrap.dedent(JOB))
    words = [str(folder), json.dumps(settings), json.dumps(victims)]
    own = {"FLATOUT_SERVERS": str(apart)} if apart else {}
    counts = map(str, (ranks, restarts, apart))
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, *counts, str(folder / "job.py"), *words],
        env={**os.environ, "FLATOUT_CACHE": str(folder / "cache"), **own},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    files = {rank: folder / f"found{rank}.json" for rank in range(ranks)}
    found = {rank: json.loads(file.read_text()) for rank, file in files.items() if file.exists()}
    return found, done.stdout + done.stderr


def gradients(fit):
    return sum(sum(own.values()) for own in fit["staleness"]["by_rank"])


@pytest.mark.slow
def test_the_others_go_on_without_workers_that_are_killed(tmp_path):
    found, printed = run(tmp_path, 4, {"1": 4, "3": 12}, staleness=4)
    assert set(found) == {0, 2}
    for rank in (1, 3):
        assert f"rank {rank} (process" in printed
    assert printed.count("was killed by SIGKILL; the others go on") == 2
    for first, again in found.values():
        assert [first["restarts"], first["world"], again["world"]] == [0, 2, 2]
        assert first["losses"] == found[0][0]["losses"]
        assert first["score"] == pytest.approx(first["losses"][-1], rel=1e-5)
    first, again = found[0]
    assert sum("the others go on" in line for line in first["said"]) == 2
    # Ten batches of four parts in each epoch, of which no one does without any but the last.
    untaken = 4 * 30 - gradients(first)
    assert 0 <= untaken <= 2 * 4
    assert first["losses"][2] < 2  # 4 of a model that is not trained
    assert gradients(again) == 2 * 10


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("restarts", [0, 2])
def test_a_server_goes_on_alone_without_its_only_worker(tmp_path, restarts):
    victims = {"1": 4, "back": 1} if restarts else {"1": 4}
    # In a long run without spare workers settings are tried first.
    settings = {"spare_workers": 1} if restarts else {"staleness": "unbounded"}
    found, printed = run(tmp_path, 2, victims, restarts=restarts, **settings)
    assert "rank 1 (process" in printed
    world = 2 if restarts else 1
    for first, again in found.values():
        assert [first["restarts"], first["world"], again["world"]] == [0, world, world]
        assert first["score"] == pytest.approx(first["losses"][-1], rel=1e-5)
        assert first["losses"][-1] < 2
    assert len(found) == world


@pytest.mark.slow
@pytest.mark.parametrize(
    ("apart", "settings"),
    [
        (0, {"spare_workers": 1}),
        pytest.param(1, {"spare_workers": 1}, marks=pytest.mark.long),
        # All ranks choose settings together, and so does a rank that is back.
        (1, {"staleness": 4}),
    ],
)
def test_a_worker_that_was_killed_is_started_again_and_taken_back(tmp_path, apart, settings):
    victims = {"2": 3, "back": 1}
    if "staleness" in settings:
        # Rank 2 comes back after the other ranks have evaluated the warm start.
        victims["warm"] = str(tmp_path / "warm.safetensors")
        layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1)
        flatout.Trainer(nn.Sequential(*layers), loss="mse").save(victims["warm"])
    found, printed = run(tmp_path, 3, victims, restarts=1, apart=apart, **settings)
    assert "rank 2 (process" in printed
    assert "the others go on, and it starts again (1 times at most)" in printed
    assert any(
        "rank 2 has joined again: all ranks continue" in line for line in found[0][0]["said"]
    )
    assert [found[rank][0]["is_back"] for rank in range(3)] == [False, False, True]
    for first, again in found.values():
        assert [first["restarts"], first["world"], again["world"]] == [0, 3, 3]
        assert first["losses"] == found[0][0]["losses"]  # of all epochs
        assert first["score"] == pytest.approx(first["losses"][-1], rel=1e-5)
    assert found[0][0]["losses"][-1] < 2


def test_parts_of_a_worker_that_has_ended_come_to_others_once():
    parts = EpochParts(2)
    parts.open(3)
    assert [parts.claim(0), parts.claim(1), parts.claim(1)] == [(0, 5), (1, 4), (2, 3)]
    parts.used(1, 1)
    parts.give_back(1)
    parts.give_back(1)
    assert [parts.claim(0) for _ in range(5)] == [(2, 3), (3, 2), (4, 1), (5, 0), (-1, 6)]
    parts.used(0, 4)
    parts.give_back(0)
    assert parts.untaken() == 1
    assert "1 part of 2 of a batch" in dropped_words([1], parts.untaken(), 2)
    parts.open(1)
    assert parts.untaken() == 0
    assert dropped_words([1, 2], 0, 2).startswith("ranks 1, 2 killed: the others go on")
