"""Trained, evaluated and observed models are freed after the user drops them."""

import os
import subprocess
import sys
import textwrap

import pytest

import forked

pytest.importorskip("psutil")

SCRIPT = """
    import contextlib, ctypes, gc, weakref
    import psutil, torch
    from torch import nn
    import flatout

    torch.set_num_threads(1)
    X, Y, WIDTH = torch.rand(64, 20), torch.arange(64) % 2, 700
    refs = []

    def model():
        layers = [nn.Linear(20, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)]
        result = nn.Sequential(*layers, nn.ReLU(), nn.Linear(WIDTH, 2))
        refs.extend(map(weakref.ref, result.parameters()))
        return result

    def quiet(line):
        pass

    def fit():
        flatout.Trainer(model(), say=quiet).fit((X, Y), batch_size=32, verbose=0)

    def frozen():
        net = model()
        flatout.freeze(net[0])
        trainer = flatout.Trainer(net, say=quiet)
        trainer.fit((X, Y), batch_size=16, epochs=2, verbose=0, validation_data=(X, Y))

    def evaluate():
        trainer = flatout.Trainer(model(), say=quiet)
        trainer.evaluate((X, Y))
        trainer.predict(X)
        trainer.worst((X, Y))

    def loop():
        net = model()
        source, loop = flatout.data.as_source((X, Y), batch_size=16), flatout.Loop(say=quiet)

        def compute(batch):
            return nn.functional.cross_entropy(net(batch.inputs), batch.targets)

        optimizer = torch.optim.Adam(net.parameters())
        loop.prepare(net, optimizer, compute=compute, data=source)
        for _ in loop.epochs(2):
            for batch in loop.batches(source):
                loop.step(compute, batch)
        loop.close()

    def plain():
        net = model()
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(X), Y).backward()
            optimizer.step()

    def alive(job, times):
        refs.clear()
        for _ in range(times):
            job()
        gc.collect()
        return sum(ref() is not None for ref in refs)

    def megabytes():
        with contextlib.suppress(AttributeError):  # glibc alone has it
            ctypes.CDLL(None).malloc_trim(0)
        return psutil.Process().memory_info().rss / 1e6
"""


def run(code, folder, *, in_fork=True):
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT) + textwrap.dedent(code))
    environment = {**os.environ, "FLATOUT_CACHE": str(folder / "cache")}
    if in_fork:
        result = forked.run([script], folder, environment)
    else:
        command = [sys.executable, script]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@pytest.mark.slow
def test_models_of_ten_fits_are_freed(tmp_path):
    code = """
        fit()
        before, WIDTH = megabytes(), 1500  # 9 MB of weights each
        print(alive(fit, 10), int(megabytes() - before))
    """
    left, grown = map(int, run(code, tmp_path))
    assert left == 0
    assert (
        grown < 75
    )  # ten models have 90 MB of weights; one fit also holds gradients and optimizer state


@pytest.mark.slow
@pytest.mark.parametrize("job", ["frozen", "evaluate", "loop"])
def test_models_of_a_job_are_freed(job, tmp_path):
    assert run(f"print(alive({job}, 2))", tmp_path) == ["0"]


@pytest.mark.slow
def test_models_in_an_observed_notebook_are_freed(tmp_path):
    pytest.importorskip("IPython")
    code = """
        import io
        from IPython.core.interactiveshell import InteractiveShell

        shell = InteractiveShell.instance()
        shell.user_ns.update(globals())
        with contextlib.redirect_stdout(io.StringIO()):
            for cell in ("%load_ext flatout", "left = alive(plain, 9)", "%flatout"):
                shell.run_cell(cell).raise_error()
        gc.collect()
        print(shell.user_ns["left"], sum(ref() is not None for ref in refs))
    """
    within, after = map(int, run(code, tmp_path, in_fork=False))
    assert within < 2 * 8  # the latest model, with 8 parameters, may still be observed
    assert after == 0
