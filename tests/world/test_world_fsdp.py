"""Ranks that hold a part of the model each: the results of one rank, and its checkpoints."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file
from world_ranks import run

SCRIPT = """
    import json
    import os
    import signal
    import sys
    from pathlib import Path

    import torch
    from torch import nn

    import flatout
    from flatout.errors import NumbersError
    from flatout.train import decide
    from flatout.world import LostRank, place

    torch.set_num_threads(1)
    folder, phase = Path(sys.argv[1]), sys.argv[3]
    rank, ranks = place().rank, place().world_size
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(121, 8, generator=draw)
    y = 2 * x[:, :1] + 0.1 * torch.randn(121, 1, generator=draw)


    class Block(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm = norm(16)
            self.up, self.down = nn.Linear(16, 33), nn.Linear(33, 16)

        def forward(self, x):
            return x + self.down(torch.tanh(self.up(self.norm(x))))


    class Net(nn.Module):
        def __init__(self, norm=nn.LayerNorm):
            super().__init__()
            self.first = nn.Linear(8, 16)
            self.blocks = nn.ModuleList(Block(norm) for _ in range(3))
            self.scale = nn.Parameter(torch.ones(1))
            self.spare = nn.Parameter(torch.ones(5))  # no loss reaches it
            self.twin, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
            self.twin.weight = self.first.weight

        def forward(self, x):
            x = self.first(x) + self.twin(x * x)
            for block in (*self.blocks, self.blocks[0]):
                x = block(x)
            # Read while another layer runs, so that it cannot be gathered with its own.
            return self.last(x) * self.scale + 0 * self.blocks[2].up.bias.sum()


    KINDS = {
        "sgd": lambda p: torch.optim.SGD(p, 0.001, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, 0.003),
        "adamw": lambda p: torch.optim.AdamW(p, 0.003, weight_decay=0.1),
    }
    held = {}


    class Ends(flatout.Callback):
        every = 1

        def on_step(self, state):
            if state.step == 9 and rank == ranks - 1:
                os.kill(os.getpid(), signal.SIGTERM)


    class Saves(flatout.Callback):
        def on_epoch_end(self, state):
            state.trainer.save(folder / f"saved{ranks}.safetensors")


    def fit(
        name, strategy="fsdp", epochs=3, run=None, norm=nn.LayerNorm, kind="adam", x=x,
        again=False, reduction="auto", **given,
    ):
        torch.manual_seed(0)
        net = Net(norm)
        recipe = dict(world=dict(strategy=strategy, reduction=reduction), **given.pop("recipe", {}))
        said = []
        trainer = flatout.Trainer(
            net, loss="mse", optimizer=KINDS[kind](net.parameters()), allow="exact",
            metrics=["mae"], run=None if run is None else str(run), recipe=flatout.Recipe(**recipe),
            say=said.append, **given.pop("trainer", {}),
        )
        history = trainer.fit(
            (x, y), batch_size=24, epochs=epochs, validation_data=(x, y), shuffle=False,
            progress=False, resume=run is not None and run.exists(), **given,
        )
        logs = {k: v for k, v in history.epochs[-1].items() if k != "seconds"}
        shape = [(n, list(p.shape), type(p).__name__) for n, p in net.named_parameters()]
        if again:  # the optimizer goes on with its state
            history = trainer.fit((x, y), batch_size=24, epochs=1, shuffle=False, progress=False)
        predicted = trainer.predict(x[:7])
        rounding = 0.1 if name == "bf16" else 1e-5
        found = net.eval()(x[:7])
        assert torch.allclose(predicted, found, atol=rounding), (name, predicted, found)
        strategy = trainer.loop.stepper.strategy
        if getattr(strategy, "held", None) is not None:
            # The user's own objects are there again, and train once more.
            assert all(p.shape == q.shape for p, q in zip(net.parameters(), Net(norm).parameters()))
            held[name] = [strategy.held.parameters, strategy.held.gradients, strategy.held.states]
        return {
            "logs": logs, "shape": shape, "said": said, "notes": history.notes,
            "weights": sum([p.double().flatten().tolist() for p in net.state_dict().values()], []),
            "reasons": {k: c.reason for k, c in history.recipe.choices.items()},
        }


    def exact(strategy):
        one = {"strategy": strategy}
        return {
            "sgd": fit("sgd", **one, kind="sgd", again=True, callbacks=[Saves()]),
            "adam": fit("adam", **one, trainer=dict(clip_norm=0.05)),
            **{
                reduction: fit(reduction, **one, reduction=reduction, trainer=dict(clip_norm=0.05))
                for reduction in ("all_reduce", "shared")
                if strategy == "fsdp"
            },
            "adamw": fit(
                "adamw", **one, kind="adamw", trainer=dict(clip_norm=0.5, accumulate=2),
                recipe=dict(memory=dict(micro_batch=3)),
            ),
            "norm": fit(
                "norm", **one, norm=nn.BatchNorm1d, drop_last=True, trainer=dict(clip_value=0.01)
            ),
            "recomputed": fit(
                "recomputed", **one, recipe=dict(memory=dict(activation_checkpointing="on"))
            ),
            "bf16": fit("bf16", **one, recipe=dict(compute=dict(precision="bf16"))),
            "fused": fit(
                "fused", **one, recipe=dict(compute=dict(fused_optimizer="on")),
                callbacks=[flatout.EarlyStopping(patience=1, min_delta=100.0)],
            ),
        }


    found = {}
    if phase == "one":
        found = exact("ddp")
        found["whole"] = fit("whole", "ddp", 4)
        for name in ("written", "pieces"):
            found[f"{name} on 1"] = fit(name, "ddp", 4, folder / f"{name} for 1")
    elif phase == "two":
        found = exact("fsdp")
        fit("written", "fsdp", 2, folder / "written")
        fit("pieces", "fsdp", 2, folder / "pieces", recipe=dict(save=dict(pieces="per_rank")))
        fit("ddp", "ddp", 2, folder / "ddp")
        # A checkpoint that does not know by which way ranks had sent.
        noted, decide._shared = decide._shared, lambda loop, resolved: resolved
        try:
            fit("stopped", "fsdp", 4, folder / "stopped", callbacks=[Ends()])
        except SystemExit as error:
            found["stopped"] = [error.code, sorted(os.listdir(folder / "stopped" / "checkpoints"))]
        decide._shared = noted
        found["resumed"] = fit("stopped", "fsdp", 4, folder / "stopped", callbacks=[Ends()])
        for reduction in ("all_reduce", "auto"):
            found["asked"] = fit("asked", "fsdp", 1, folder / "asked", reduction=reduction)
        spoiled = x.clone()
        spoiled[100] = float("nan")
        try:
            fit("spoiled", x=spoiled)
        except NumbersError as error:
            found["spoiled"] = str(error)
        except LostRank as error:
            found["spoiled"] = str(error)
    else:
        found = exact("fsdp")
        found["written on 3"] = fit("written", "ddp", 4, folder / "written for 3")
        found["ddp on 3"] = fit("ddp", "fsdp", 4, folder / "ddp for 3")
    (folder / f"{phase}{rank}.json").write_text(json.dumps({**found, "held": held}))
"""


def close(found, wanted, bound=1e-5):
    assert found["weights"] == pytest.approx(wanted["weights"], abs=bound)
    for name, value in wanted["logs"].items():
        assert found["logs"][name] == pytest.approx(value, rel=10 * bound, abs=bound)
    assert found["shape"] == wanted["shape"]


@pytest.mark.slow
def test_parts_on_ranks_give_what_one_rank_gives_and_its_checkpoints(tmp_path):
    run(SCRIPT, 2, tmp_path, "two")
    for name, ranks in (("written", 1), ("pieces", 1), ("written", 3), ("ddp", 3)):
        shutil.copytree(tmp_path / name, tmp_path / f"{name} for {ranks}")
    run(SCRIPT, 3, tmp_path, "three")
    run(SCRIPT, 1, tmp_path, "one")
    two, three, one = (
        [json.loads((tmp_path / f"{phase}{rank}.json").read_text()) for rank in range(ranks)]
        for phase, ranks in (("two", 2), ("three", 3), ("one", 1))
    )
    saved = [load_file(tmp_path / f"saved{ranks}.safetensors") for ranks in (1, 2, 3)]
    for found in saved[1:]:
        torch.testing.assert_close(found, saved[0], atol=1e-5, rtol=1e-5)
    for ranks in (two, three):
        assert all(other["adam"]["weights"] == ranks[0]["adam"]["weights"] for other in ranks)
        for name in ("sgd", "adam", "adamw", "norm", "recomputed", "fused"):
            close(ranks[0][name], one[0][name])
        close(ranks[0]["bf16"], one[0]["bf16"], 0.02)
        for name in ("all_reduce", "shared"):  # through sockets, and through shared memory
            close(ranks[0][name], one[0]["adam"])
    # Of two numbers every order has the same sum.
    assert two[0]["all_reduce"]["weights"] == two[0]["shared"]["weights"]
    whole = one[0]["whole"]
    for found in (one[0]["written on 1"], one[0]["pieces on 1"], two[0]["resumed"]):
        close(found, whole)
    for found in (three[0]["written on 3"], three[0]["ddp on 3"]):
        close(found, whole)
    # A signal to the last rank stops all, behind a checkpoint.
    checkpoints = ["step-000000006", "step-000000010"]
    assert two[0]["stopped"] == two[1]["stopped"] == [143, checkpoints]
    # A bad sample holds back the step of all, and its rank names it.
    assert "NaN or infinity in sample 100" in two[0]["spoiled"]
    assert "step 5 is not finite by the part of rank 0" in two[1]["spoiled"]
    # What a rank holds, of all that one rank would; its uneven parts included.
    parameters = sum(_numel(shape) for _, shape, _ in one[0]["adam"]["shape"]) * 4
    assert sum(two[0]["held"]["adam"]) <= 0.55 * 4 * parameters
    said = two[0]["adam"]["said"]
    assert any("each of 2 ranks will hold" in line for line in said)
    assert any("rank 0 holds" in line for line in said)
    for name in ("adam", "resumed"):
        reason = two[0][name]["reasons"]["world.reduction"]
        assert reason == "all ranks share one node's memory"
    assert two[0]["asked"]["reasons"]["world.reduction"] == "asked for"  # once, and kept
    for name in ("shared", "adam"):  # the same as where nothing is asked for
        told = two[0][name]["said"]
        shared = [re.findall(r", and (.*?) of memory that ranks share", line) for line in told]
        [(expected,), (taken,)] = filter(None, shared)
        assert expected == taken
    assert "fsdp" in two[0]["adam"]["reasons"]["compute.rewrites"]


def _numel(shape):
    count = 1
    for size in shape:
        count *= size
    return count


KINDS_SCRIPT = """
    import json
    import sys

    import torch
    from torch import nn

    import flatout
    from flatout.world import place

    torch.set_num_threads(1)
    rank, ranks = place().rank, place().world_size


    class Reads(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer, self.head = layer, nn.Linear(8, 2)
            self.kept = [self.head.weight]  # of the user's own, which no forward reads

        def forward(self, x):
            return self.head(self.layer(x.view(-1, 3, 4))[0][:, -1])


    def plain(frozen):
        net = nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 2))
        for name in frozen:
            net.get_parameter(name).requires_grad_(False)
        return net


    made = {
        "first": lambda: plain(["0.weight", "0.bias"]),
        "last": lambda: plain(["3.weight", "3.bias"]),
        "one of a layer": lambda: plain(["0.bias", "3.weight"]),
        "lstm": lambda: Reads(nn.LSTM(4, 8, batch_first=True)),
        "frozen gru": lambda: Reads(nn.GRU(4, 8, batch_first=True).requires_grad_(False)),
    }
    x = torch.randn(41, 12, generator=torch.Generator().manual_seed(1))
    y = (x.sum(1) > 0).long()
    found = {}
    for name, make in made.items():
        torch.manual_seed(0)
        net = make()
        before = {n: p.detach().clone() for n, p in net.named_parameters() if not p.requires_grad}
        trainer = flatout.Trainer(
            net, loss="cross_entropy", optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
            allow="exact", say=lambda line: None,
            recipe=flatout.Recipe(world={"strategy": "fsdp" if ranks > 1 else "ddp"}),
        )
        given = {"batch_size": 8, "epochs": 2, "progress": False, "validation_data": (x, y)}
        history = trainer.fit((x, y), **given)
        found[name] = [
            [epoch[key] for epoch in history.epochs for key in ("loss", "val_loss")],
            net.eval()(x).tolist(),
        ]
        for parameter, value in before.items():
            assert torch.equal(net.get_parameter(parameter), value), parameter
    print(json.dumps(found))
"""


@pytest.mark.slow
def test_frozen_and_recurrent_layers_train_like_others(tmp_path):
    found = [[json.loads(out) for out, _ in run(KINDS_SCRIPT, n, tmp_path)] for n in (1, 2)]
    [one], two = found
    assert two[0] == two[1]
    for name, (losses, outputs) in one.items():
        assert two[0][name][0] == pytest.approx(losses, rel=1e-5), name
        assert torch.allclose(torch.tensor(two[0][name][1]), torch.tensor(outputs), atol=1e-5), name
