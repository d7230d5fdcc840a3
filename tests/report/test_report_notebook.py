"""`%load_ext flatout` in real shells: one of IPython's own, and a Jupyter kernel."""

import json
import os
import re
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("IPython")

# torch is there before anyone observes, and so is an iteration over a loader.
BEFORE = """
    import hashlib, torch
    from torch.utils.data import DataLoader, TensorDataset
    x, y = torch.randn(256, 16), torch.randint(0, 4, (256,))
    torch.set_num_threads(1)
    begun = iter(DataLoader(TensorDataset(x, y), 32))
"""
MODEL = """
    layers = [torch.nn.Linear(16, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 4)]
    loader = DataLoader(TensorDataset(x, y), 32, shuffle=True)

    def fit(epochs):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*layers)
        for layer in layers:
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(epochs):
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(inputs), targets)
                loss.backward()
                optimizer.step()
                loss.item()
        with torch.no_grad():
            model(x)
        weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        return hashlib.sha256(weights).hexdigest()
"""
SHELL = """
import contextlib, io, json, sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
told = []
for cell in json.load(sys.stdin):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        result = shell.run_cell(cell, store_history=True)
    told.append([out.getvalue(), repr(result.result)])
json.dump(told, sys.stdout)
"""


def _line_of(source, code):
    return next(n for n, line in enumerate(source.splitlines(), 1) if code in line)


def _in_shell(cells, folder):
    cells = [textwrap.dedent(cell).strip("\n") for cell in cells]
    shell = subprocess.run(
        [sys.executable, "-c", SHELL],
        input=json.dumps(cells),
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "FLATOUT_CACHE": str(folder / "cache"), "IPYTHONDIR": str(folder)},
        timeout=120,
    )
    assert shell.returncode == 0, shell.stderr
    assert not list((folder / "cache" / "live").glob("[!.]*"))  # nothing is left of the shell
    return json.loads(shell.stdout)


@pytest.mark.slow
def test_cells_are_observed_until_the_extension_is_unloaded(tmp_path):
    cells = [BEFORE, MODEL, "fit(3)", "%load_ext flatout", "next(begun)[0].shape", "fit(3)"]
    cells += ["%flatout", "%flatout", "fit(3)", "%flatout reset", "%flatout", "%flatout now"]
    cells += ["%%flatout\nn = 2\nfit(n)", "%unload_ext flatout", "fit(3)", "%flatout"]
    cells += ["%load_ext flatout\nfit(1)\n%flatout"]
    told = _in_shell(cells, tmp_path)
    said, values = [out for out, _ in told], [value for _, value in told]
    assert "%flatout tells what holds it back" in said[3]
    assert values[4] == "torch.Size([32, 16])"
    # Observed or not, the weights are the same.
    assert values[2] == values[5] == values[14] != "None"
    verdict = said[6]
    assert "FIRST LOOK at 24 steps" in verdict
    line = _line_of(textwrap.dedent(MODEL).strip("\n"), "model(x)")
    assert f"DANGER     cell 2, line {line} validates without eval()" in verdict
    assert "flatout run" not in verdict  # no script that could be run by a Recipe
    assert "no optimizer step was seen" in said[7]  # it tells of what ran since the last one
    assert "no optimizer step was seen" in said[10]
    assert "takes nothing, or reset; found 'now'" in said[11]
    assert "FIRST LOOK at 16 steps" in said[12]
    assert len(values[12]) == len(values[2])  # the value of the cell is that of its last line
    assert "`%flatout` not found" in said[15]
    assert "FIRST LOOK at 8 steps" in said[16]


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    manager = pytest.importorskip("jupyter_client").KernelManager()
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    # The kernel of this Python, whatever is installed for Jupyter.
    manager.kernel_spec.argv = [sys.executable, *manager.kernel_spec.argv[1:]]
    manager.start_kernel(cwd=str(tmp_path))
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def _run(client, cell):
    """What a cell prints, and its reply."""
    out = []

    def hear(message):
        if message["msg_type"] == "stream":
            out.append(message["content"]["text"])

    code = textwrap.dedent(cell).strip("\n")
    reply = client.execute_interactive(code, timeout=60, output_hook=hear)
    return _plain("".join(out)), reply["content"]


def _plain(text):
    return re.sub(r"\x1b\[[\d;]*m", "", text)


@pytest.mark.slow
def test_a_kernel_tells_cells_by_their_numbers(kernel, tmp_path):
    for cell in (BEFORE, "%load_ext flatout", MODEL):
        assert _run(kernel, cell)[1]["status"] == "ok"
    in_cell = """
        %%flatout
        model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for inputs, targets in loader:
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(x)
    """
    verdict, _ = _run(kernel, in_cell)
    line = _line_of(textwrap.dedent(in_cell).strip("\n"), "model(x)")
    assert "FIRST LOOK at 8 steps" in verdict
    assert f"DANGER     cell 4, line {line} validates" in verdict

    # While it trains, it is a job like others.
    seen_in_top = """
        import subprocess, sys, time
        fit(10)
        top = "from flatout.cli.main import main; main()"
        until = time.monotonic() + 40  # a slow machine writes more rarely
        while True:
            said = subprocess.run([sys.executable, "-c", top, "top", "--json"],
                                  capture_output=True, text=True).stdout
            if '"steps": 80' in said or time.monotonic() > until:
                break
            time.sleep(1)
        print(said)
    """
    (job,) = json.loads(_run(kernel, seen_in_top)[0])["jobs"]
    assert job["command"] == ["notebook"]
    assert job["ranks"][0]["steps"] == 80

    # An error stays an error, so that what follows is not run.
    verdict, reply = _run(kernel, "%%flatout\nfit(1)\n1 / 0\n")
    assert "FIRST LOOK at 8 steps" in verdict
    assert (reply["status"], reply["ename"]) == ("error", "ZeroDivisionError")
    assert re.search(r"Cell In\[6\], line 3", _plain("\n".join(reply["traceback"])))
