"""Edits in whole scripts: what they train, what stays of the file, and the scripts of the bench."""

import ast
import multiprocessing
import os
import re
import runpy
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.devices.inventory import inventory
from flatout.doctor.edits import install
from flatout.doctor.edits.source import Source
from flatout.doctor.finding import Finding
from flatout.doctor.proposals import propose
from flatout.observe import Call, Loader, Model, Observation, Optimizer, Site
from flatout.observe.run_script import run
from pitfalls import read_index

PITFALLS = {pitfall.name: pitfall for pitfall in read_index()}

# Each line with what is wrong with it.
SCRIPT = '''
"""Trains; its optimizer.zero_grad(set_to_none=False) is no news."""
import gc, sys
import torch
from torch import nn

def validate(model, x, y):
    model.eval()
    right = (model(x).argmax(1) == y).float().mean()  # evaluate_with_grad
    model.train()
    return right.item()

def main(path):
    torch.manual_seed(0)
    x, y = torch.randn(96, 8), torch.randint(3, (96,))
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=0.01)
    history, total = [], 0.0
    for epoch in range(3):
        for step, rows in enumerate(torch.randperm(96).split(16)):
            \u00e9, b = x[rows], y[rows]; c = "x[rows]"  # advanced_indexing
            loss = nn.functional.cross_entropy(model(\u00e9), b)
            optimizer.zero_grad(set_to_none=False)  # zero_grad_zeros
            loss.backward()
            optimizer.step()
            history.append(loss)  # retained_graph
            total += loss.item() * len(rows)  # item_each_step
            print(epoch, step, loss.item())  # log_each_step
            gc.collect()  # garbage_each_step
        print(f"{total / 96:.9f} {validate(model, x, y):.3f}")
    print(f"{torch.stack(history).mean().item():.6f}", file=sys.stderr)
    torch.save(model.state_dict(), path)

if __name__ == "__main__":
    main(sys.argv[1])
'''.lstrip()


def findings_in(path):
    """A finding and an observation for each line whose comment names one."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        name = line.rpartition("# ")[2]
        if name in line and re.fullmatch(r"\w+_\w+", name):
            yield observed(path, name, number)


def observed(path, name, line, places=None):
    site = Site(str(path), line)
    text = path.read_bytes()
    steps = [n for n, one in enumerate(text.splitlines(), 1) if b"optimizer.step()" in one]
    kind = "torch.optim.adamw.AdamW" if b"AdamW(" in text else "torch.optim.adam.Adam"
    rows = [
        [n.lineno, n.col_offset, n.end_lineno, n.end_col_offset]
        for n in ast.walk(ast.parse(text))
        if isinstance(n, ast.Subscript) and n.lineno == line
    ]
    seen = Observation(
        [str(path)],
        calls=[Call("item", site, 9, steps=9), Call("index", site, detail={"rows": rows})],
        loaders=[Loader("torch.DataLoader", site, is_distributed=True)],
        optimizers=[Optimizer(kind, Site(str(path), one)) for one in steps[:1]],
        models=[Model("Net", site)],
    )
    recipe = {"input.workers": 1, "process.threads": 1}
    return Finding("slow", "module.", "do", name=name, where=str(site), recipe=recipe), seen


def edits_in(path):
    return [edit for finding, seen in findings_in(path) for edit in propose(finding, seen)]


@pytest.mark.slow
def test_a_script_trains_to_the_same_bits_with_all_exact_edits(
    tmp_path, capfd, monkeypatch, one_thread
):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    edits = edits_in(path)
    assert len(edits) == 7
    after = Source.read(str(path)).with_edits(edits)
    (tmp_path / "edited.py").write_bytes(after.encode())
    told, weights = {}, {}
    for name in ("train", "edited"):
        monkeypatch.setattr(sys, "argv", [name, str(tmp_path / f"{name}.pt")])
        runpy.run_path(str(tmp_path / f"{name}.py"), run_name="__main__")
        told[name], weights[name] = capfd.readouterr(), _weights(tmp_path / f"{name}.pt")
    assert weights["train"] == weights["edited"]
    # What is told stays the same too, but for the lines that are told less often.
    assert told["train"].err == told["edited"].err
    kept = [one for one in told["train"].out.splitlines() if re.match(r"\d 0 |\d+\.", one)]
    assert told["edited"].out.splitlines() == kept
    assert len(kept) == 6


def _weights(path):
    import torch

    return {name: value.numpy().tobytes() for name, value in torch.load(path).items()}


# -- the rest of a file --------------------------------------------------------------------------

NOISE = st.sampled_from(
    [
        "# total += loss, gc.collect()",
        "text = '''total += loss\n  gc.collect()'''",
        "s = 'loss.item()  # \u00fc'; t = f\"{s!r:>{9}}\"",
        "if  s :  pass",
        "",
        "   ",
        "y = [ 1,\n  2 ,# two\n]",
        "z = s \\\n  + t",
        "\x0cclass A: b = 1; c = 2",
        "def f(a, *, b = 1) : return  a",
        "@f\ndef g(a): return a",
        "with open(s) as h, open(t): pass",
        "\u540d = '\u540d'",
    ]
)
ENDS = ("\n", "\r\n")
MARKED = st.sampled_from(
    [
        ("garbage_each_step", "gc.collect()", None),
        ("zero_grad_zeros", "o.zero_grad(set_to_none=(False) )", "o.zero_grad( )"),
        (
            "advanced_indexing",
            "\u540d = '\u540d', x [rows]",
            "\u540d = '\u540d', x .index_select(0, rows)",
        ),
        ("log_each_step", "print( s,loss )", "if step % 50 == 0:\n\t\tprint( s,loss )"),
        ("retained_graph", "kept.append( loss )", "kept.append( loss.detach() )"),
    ]
)


@given(st.lists(NOISE, max_size=6), st.lists(NOISE, max_size=6), MARKED, st.sampled_from(ENDS))
def test_the_rest_of_a_random_program_stays(tmp_path_factory, above, below, marked, end):
    name, line, new = marked
    head = [*above, "for step, x in enumerate(data):", "\tloss = m(x); loss.backward()"]
    tail = ["\tmore(x)", *below]
    before = "\n".join([*head, f"\t{line}", *tail]).replace("\n", end)
    after = "\n".join([*head, *([f"\t{new}"] if new else []), *tail]).replace("\n", end)
    path = tmp_path_factory.mktemp("program") / "train.py"
    path.write_bytes(before.encode())
    number = "\n".join(head).count("\n") + 2
    edits = propose(*observed(path, name, number))
    assert Source.read(str(path)).with_edits(edits).encode() == after.encode()


# -- the scripts of the bench --------------------------------------------------------------------

WITH_EDITS = [
    "advanced_indexing",
    "channels_first",
    "eval_missing",
    "evaluate_with_grad",
    "fp32_slow",
    "garbage_each_step",
    "item_each_step",
    "last_batch_ragged",
    "log_each_step",
    "metric_slow",
    "optimizer_unfused",
    "retained_graph",
    "sampler_missing",
    "saved_wrapped",
    "set_epoch_missing",
    "threads_too_many",
    "train_not_restored",
    "unused_parameters_search",
    "worker_seeds_equal",
    "workers_restarted",
    "workers_too_many",
    "workers_zero",
    "zero_grad_zeros",
]
AS_THE_CLEAN = (
    *("advanced_indexing", "evaluate_with_grad", "fp32_slow", "metric_slow"),
    "unused_parameters_search",
)
OF_RANKS = ("sampler_missing", "saved_wrapped", "set_epoch_missing", "unused_parameters_search")
# The clean script sets its batches in the other format too, or draws other random numbers.
OTHERWISE = ("channels_first", "worker_seeds_equal", "workers_restarted", "workers_zero")


def edits_of(name):
    path = PITFALLS[name].script
    lines = path.read_text().splitlines()
    marked = [number for number, line in enumerate(lines, 1) if line.endswith("# <- here")]
    # The line that the doctor names is one of them, or where the optimizer steps.
    marked += [number for number, line in enumerate(lines, 1) if "optimizer.step()" in line]
    return next(edits for n in marked if (edits := propose(*observed(path, name, n))))


@pytest.mark.parametrize("name", WITH_EDITS)
def test_each_pitfall_with_an_edit_has_one_that_is_python(name, tmp_path):
    edits = edits_of(name)
    path = PITFALLS[name].script
    clean = PITFALLS[name].write_clean(tmp_path).read_text()
    after = Source.read(str(path)).with_edits(edits).text.replace("  # <- here", "")
    compile(after, str(path), "exec")
    if name in AS_THE_CLEAN:
        assert after == clean
    changed = [edit for edit in edits if edit.before != edit.after]
    assert changed == list(edits)


def trained(script, folder, edits=(), ranks=1):
    """The weights that a script leaves after a few steps, each rank in its own process."""
    import torch

    # Forked from a process that has imported all this once, and computed nothing: what was
    # computed here has left threads and locks behind, on which a fork can hang.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sklearn.datasets", "torch._dynamo", __name__])
    folder.mkdir()
    port = str(torch.distributed.TCPStore("127.0.0.1", 0, is_master=True).port)
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        context.Process(
            target=_train,
            args=(str(script), folder, edits, world | {"RANK": str(n), "LOCAL_RANK": str(n)}),
        )
        for n in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
        process.kill()
        assert process.exitcode == 0, (folder / "output").read_text()
    return {path.name: _weights(path) for path in folder.glob("*.pt")}


def _train(script, folder, edits, world):
    import torch

    os.chdir(folder)
    output = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(world)
    torch.set_num_threads(1)
    install(edits)
    # A DDP module that goes right after its last all-reduce may hang in torch 2.13: it holds the
    # GIL and joins gloo's thread, which waits for the GIL to drop that all-reduce. So it stays.
    kind, kept = torch.nn.parallel.DistributedDataParallel, []
    plain = kind.__init__

    def init(self, *args, **kwargs):
        kept.append(self)
        plain(self, *args, **kwargs)

    kind.__init__ = init
    run([script, "--epochs", "2", "--steps", "3"])
    if kept:
        os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_EDITS)
def test_an_edited_pitfall_behaves_as_the_clean_script(name, tmp_path):
    if name == "fp32_slow" and not any("bf16" in one for one in inventory().cpus.instructions):
        pytest.skip("bf16 is emulated on this CPU, which takes minutes")
    ranks = 2 if name in OF_RANKS else 1
    script = PITFALLS[name].write_clean(tmp_path)
    edited = trained(PITFALLS[name].script, tmp_path / "edited", edits_of(name), ranks)
    clean = trained(script, tmp_path / "clean", ranks=ranks)
    assert edited.keys() == clean.keys()
    if name not in OTHERWISE:
        assert edited == clean
