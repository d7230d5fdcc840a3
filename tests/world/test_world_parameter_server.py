"""Ranks whose weights are stepped by servers, all together or each for itself."""

import json
import shutil

import pytest
from world_ranks import run, run_served

SCRIPT = """
    import json
    import os
    import signal
    import sys
    import time
    from pathlib import Path

    import torch
    from torch import nn

    import flatout
    from flatout.errors import NumbersError
    from flatout.strategies import digest_of
    from flatout.world import LostRank, place

    torch.set_num_threads(1)
    folder, phase = Path(sys.argv[1]), sys.argv[3]
    rank, ranks = place().rank, place().world_size
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(121, 8, generator=draw)
    y = 2 * x[:, :1] + 0.1 * torch.randn(121, 1, generator=draw)


    class Net(nn.Module):
        def __init__(self, norm, width):
            super().__init__()
            self.first = nn.Linear(8, width)
            self.norm = norm(width)
            self.spare = nn.Parameter(torch.ones(5))  # no loss reaches it
            self.twin, self.last = nn.Linear(8, width), nn.Linear(width, 1)
            self.twin.weight = self.first.weight

        def forward(self, x):
            return self.last(torch.tanh(self.norm(self.first(x) + self.twin(x * x))))


    KINDS = {
        "sgd": lambda p: torch.optim.SGD(p, 0.002, momentum=0.9),
        "plain": lambda p: torch.optim.SGD(p, 0.05),
        "adam": lambda p: torch.optim.Adam(p, 0.003),
        "fast": lambda p: torch.optim.Adam(p, 0.03),
        "adamw": lambda p: torch.optim.AdamW(p, 0.003, weight_decay=0.1),
        "wide": lambda p: torch.optim.SGD([
            {"params": [q for q in p if q.dim() > 1], "weight_decay": 0.1}, {"params": [
                q for q in p if q.dim() == 1]}], lr=2e-6, momentum=0.9),
        "groups": lambda p: torch.optim.RMSprop([
            {"params": [q for q in p if q.dim() > 1], "weight_decay": 0.1}, {"params": [
                q for q in p if q.dim() == 1]}], lr=0.003),
    }


    class Ends(flatout.Callback):
        every = 1
        has_ended = False

        def on_step(self, state):
            if state.step >= 9 and rank == ranks - 1 and not Ends.has_ended:
                Ends.has_ended = True
                os.kill(os.getpid(), signal.SIGTERM)


    class Pauses(flatout.Callback):
        def on_epoch_end(self, state):
            time.sleep(8 * (state.epoch == 0))  # longer than a collective may take


    class Slow(flatout.Callback):
        every = 1

        def on_step(self, state):
            time.sleep(0.01 * (rank == ranks - 1))


    def fit(
        world, epochs=3, run=None, norm=nn.LayerNorm, kind="adam", x=x, again=False, schedule=False,
        width=16, **given,
    ):
        torch.manual_seed(0)
        net = Net(norm, width)
        kept = list(net.parameters())
        optimizer = KINDS[kind](kept)
        recipe = dict(world=world, **given.pop("recipe", {}))
        said = []
        if schedule:
            once = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.004, total_steps=40)
            given["trainer"] = {"scheduler": once, "schedule_every": "step"}
        trainer = flatout.Trainer(
            net, loss="mse", optimizer=optimizer, allow="exact", metrics=["mae"],
            run=None if run is None else str(run), recipe=flatout.Recipe(**recipe),
            say=said.append, **given.pop("trainer", {}),
        )
        history = trainer.fit(
            (x, y), batch_size=24, epochs=epochs, validation_data=(x, y), shuffle=False,
            progress=False, resume=run is not None and run.exists(), **given,
        )
        logs = {k: v for k, v in history.epochs[-1].items() if k != "seconds"}
        if again:  # the optimizer goes on with its state
            again = {"drop_last": given.get("drop_last", False)}
            trainer.fit((x, y), batch_size=24, epochs=1, shuffle=False, progress=False, **again)
        assert all(a is b for a, b in zip(kept, net.parameters()))
        found = [p for group in optimizer.param_groups for p in group["params"]]
        assert set(found) == set(kept)
        assert all(s[k].shape == p.shape for p, s in optimizer.state.items()
                   for k in s if torch.is_tensor(s[k]) and s[k].dim())
        return {
            "logs": logs, "first": history.epochs[0]["val_loss"], "said": said,
            "notes": history.notes, "staleness": history.staleness,
            "weights": sum([p.double().flatten()[::width // 16].tolist()
                            for p in net.state_dict().values()], []),
            "bits": [digest_of(p) for p in net.state_dict().values()],
            "states": sum([s[k].double().flatten()[::width // 16].tolist()
                           for s in optimizer.state.values() for k in sorted(s)
                           if torch.is_tensor(s[k]) and s[k].dim()], []),
        }


    def exact(world, leave=()):
        fits = {
            "sgd": lambda: fit(world, kind="sgd", again=True),
            "adam": lambda: fit(world, trainer=dict(clip_norm=0.05)),
            "adamw": lambda: fit(
                world, kind="adamw", trainer=dict(clip_norm=0.5, accumulate=2),
                recipe=dict(memory=dict(micro_batch=3)),
            ),
            "norm": lambda: fit(
                world, norm=nn.BatchNorm1d, kind="sgd", drop_last=True,
                trainer=dict(clip_value=0.01),
                recipe=dict(compute=dict(fused_optimizer="on")),
            ),
            "groups": lambda: fit(world, kind="groups"),
            "cycle": lambda: fit(world, kind="sgd", schedule=True),
            "wide": lambda: fit(world, 2, kind="wide", width=50_000),
        }
        return {name: make() for name, make in fits.items() if name not in leave}


    def served(servers, staleness="sync"):
        return dict(strategy="parameter_server", servers=servers, staleness=staleness)


    # Ended by a signal, resumed, and ended by a sample that is no number.
    def stopped(world):
        try:
            fit(world, 4, folder / "stopped", callbacks=[Ends()])
        except SystemExit as error:
            names = sorted(os.listdir(folder / "stopped" / "checkpoints"))
            result = {"stopped": [error.code, names]}
        result["resumed"] = fit(world, 4, folder / "stopped", callbacks=[Ends()])
        spoiled = x.clone()
        spoiled[100] = float("nan")
        try:
            fit(world, x=spoiled)
        except (NumbersError, LostRank) as error:
            result["spoiled"] = str(error)
        return result


    found = {}
    if phase == "alone":
        found = exact({})
        found["whole"] = fit({}, 4)
        fit({}, 2, folder / "ddp")
    elif phase == "one":
        found["written on 1"] = fit({}, 4, folder / "written for 1")
    elif phase == "two":
        found = exact(served(2))
        found["single"] = fit(served(1), kind="sgd", again=True)
        fit(served(2), 2, folder / "written")
        fit({}, 2, folder / "ddp")
        found |= stopped(served(2))
    elif phase == "three":
        found = exact(served(2))
        found["written on 3"] = fit({}, 4, folder / "written for 3")
        found["ddp on 3"] = fit(served(3), 4, folder / "ddp for 3")
    elif phase == "nodes":  # servers that compute nothing, on nodes of their own
        found = exact(served(2), ("groups", "cycle", "norm"))
        fit(served(2), 2, folder / "written")
        found["from ddp"] = fit(served(2), 4, folder / "ddp")
        found |= stopped(served(2))
    elif phase == "tower":  # two of three ranks on one node
        found = exact(served(1), ("sgd", "adamw", "groups", "cycle"))
    elif phase == "four":  # beside the ranks, or on nodes of their own
        found = exact(served(3))
    elif phase == "here":
        found = exact(served(1), ("sgd", "adamw", "norm", "wide"))
    elif phase == "paused":
        found["paused"] = fit({**served(1, 2), "timeout": 6}, 2, callbacks=[Pauses()])
    else:
        for servers, bound in ((1, 1), (2, 3), (1, "unbounded")):
            found[f"{servers} {bound}"] = fit(
                served(servers, bound), 6, norm=nn.BatchNorm1d, kind="plain", callbacks=[Slow()],
                trainer=dict(clip_norm=1.0), again=servers == 2, drop_last=True,
            )
        fit(served(2, 2), 2, folder / "apart", kind="fast")
        found["resumed"] = fit(served(1, 2), 4, folder / "apart", kind="fast")
        if "FLATOUT_SERVERS" not in os.environ:
            found["as ddp"] = fit({}, 5, folder / "apart", kind="fast")
        try:
            fit(served(2, 2), 4, folder / "stopped", callbacks=[Ends()])
        except SystemExit as error:
            names = sorted(os.listdir(folder / "stopped" / "checkpoints"))
            found["stopped"] = [error.code, names]
        spoiled = x.clone()
        spoiled[5] = float("nan")
        try:
            fit(served(2, 2), x=spoiled)
        except (NumbersError, LostRank) as error:
            found["spoiled"] = str(error)
    (folder / f"{phase}{rank}.json").write_text(json.dumps(found))
"""


def close(found, wanted, bound=1e-5):
    for name in ("weights", "states"):
        assert found[name] == pytest.approx(wanted[name], abs=bound)
    for name, value in wanted["logs"].items():
        assert found["logs"][name] == pytest.approx(value, rel=10 * bound, abs=bound)


def read(folder, phase, ranks):
    return [json.loads((folder / f"{phase}{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one rank comes to, and its folder."""
    folder = tmp_path_factory.mktemp("alone")
    run(SCRIPT, 1, folder, "alone")
    [found] = read(folder, "alone", 1)
    return found, folder


@pytest.mark.slow
def test_servers_that_wait_for_all_give_what_one_rank_gives_and_its_checkpoints(tmp_path, alone):
    run(SCRIPT, 2, tmp_path, "two")
    for name, ranks in (("written", 1), ("written", 3), ("ddp", 3)):
        shutil.copytree(tmp_path / name, tmp_path / f"{name} for {ranks}")
    run(SCRIPT, 3, tmp_path, "three")
    run(SCRIPT, 1, tmp_path, "one")
    two, three, [one] = (
        read(tmp_path, phase, ranks) for phase, ranks in (("two", 2), ("three", 3), ("one", 1))
    )
    wanted, _ = alone
    for ranks in (two, three):
        assert all(other["adam"]["bits"] == ranks[0]["adam"]["bits"] for other in ranks)
        for name in ("sgd", "adam", "adamw", "norm", "groups", "cycle", "wide"):
            close(ranks[0][name], wanted[name])
    close(two[0]["single"], wanted["sgd"])
    assert any("2 servers have each" in line for line in two[0]["adam"]["said"])
    code, kept = two[0]["stopped"]
    assert code == 143
    assert kept[-1] == "step-000000010"
    close(two[0]["resumed"], wanted["whole"])
    for found in (one["written on 1"], three[0]["written on 3"], three[0]["ddp on 3"]):
        close(found, wanted["whole"])
    assert any("sample" in rank["spoiled"] and "nan" in rank["spoiled"].lower() for rank in two)


@pytest.mark.slow
def test_servers_that_compute_nothing_give_what_one_rank_gives_too(tmp_path, alone):
    wanted, folder = alone
    shutil.copytree(folder / "ddp", tmp_path / "ddp")
    run_served(SCRIPT, [0, 1], 2, tmp_path, "nodes")
    run_served(SCRIPT, [0, 0, 1], 1, tmp_path, "tower")
    run_served(SCRIPT, 2, 1, tmp_path, "here")
    shutil.copytree(tmp_path / "written", tmp_path / "written for 1")
    run(SCRIPT, 1, tmp_path, "one")
    phases = ("nodes", 2), ("tower", 3), ("here", 2), ("one", 1)
    nodes, tower, here, [one] = (read(tmp_path, phase, ranks) for phase, ranks in phases)
    for ranks in (nodes, tower, here):
        first, *others = ranks
        for name in ("adam", "wide"):
            for kind in ("bits", "states") if name in first else ():  # servers send them to all
                assert all(other[name][kind] == first[name][kind] for other in others), name
        for name in wanted.keys() & first.keys():
            close(first[name], wanted[name])
    assert any("on nodes of their own" in line for line in nodes[0]["adam"]["said"])
    assert any("ranks of a host send as one" in line for line in tower[0]["adam"]["said"])
    code, kept = nodes[0]["stopped"]
    assert (code, kept[-1]) == (143, "step-000000010")
    for found in (nodes[0]["resumed"], nodes[0]["from ddp"], one["written on 1"]):
        close(found, wanted["whole"])
    assert any("sample" in rank["spoiled"] and "nan" in rank["spoiled"].lower() for rank in nodes)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("nodes", [None, [0, 1, 2, 3], [0, 0, 1, 1]])
def test_four_ranks_give_what_one_rank_gives(tmp_path, alone, nodes):
    if nodes is None:
        run(SCRIPT, 4, tmp_path, "four")
    else:
        run_served(SCRIPT, nodes, 3, tmp_path, "four")
    first, *others = read(tmp_path, "four", 4)
    wanted, _ = alone
    for name in first:
        assert all(other[name]["bits"] == first[name]["bits"] for other in others)
        close(first[name], wanted[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "servers"), [pytest.param(2, 0, marks=pytest.mark.long), (3, 0), (2, 1)]
)
def test_servers_that_do_not_wait_learn_too_and_tell_how_old_gradients_were(
    tmp_path, ranks, servers
):
    if servers:  # that compute nothing
        run_served(SCRIPT, [0, 1], servers, tmp_path, "apart")
    else:
        run(SCRIPT, ranks, tmp_path, "apart")
    by_rank = read(tmp_path, "apart", ranks)
    first = by_rank[0]
    for name in ("1 1", "2 3", "1 unbounded", "resumed", *["as ddp"] * (not servers)):
        assert all(other[name]["bits"] == first[name]["bits"] for other in by_rank), name
        # Adam's steps are large for so few samples, with ddp as well.
        bound = first[name]["first"] if name[0].isdigit() else 5.0
        assert first[name]["logs"]["val_loss"] < bound, name
    for name, bound in (("1 1", 1), ("2 3", 3)):
        # While one gradient is computed others come so many steps ahead, from as many behind.
        facts = first[name]["staleness"]
        assert facts["most"] <= (2 * bound + 2) * ranks
        assert sum(sum(own.values()) for own in facts["by_rank"]) == 30 * ranks
        assert any("steps old on average" in line for line in first[name]["notes"])
    code, kept = first["stopped"]
    assert code == 143
    assert 9 <= int(kept[-1].split("-")[1]) <= 12
    assert any("nan" in other["spoiled"].lower() for other in by_rank)


@pytest.mark.slow
def test_a_server_waits_for_workers_that_evaluate(tmp_path):
    run(SCRIPT, 2, tmp_path, "paused")
    first, second = read(tmp_path, "paused", 2)
    assert first["paused"]["bits"] == second["paused"]["bits"]
    assert sum(sum(own.values()) for own in first["paused"]["staleness"]["by_rank"]) == 24
