"""`Trainer(model, devices=2)`: in a notebook on its own ranks, in a script an error."""

import os
import queue
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from torch import nn

import flatout
from flatout.errors import ModelError, WorldError
from flatout.measure import usable_cpus

two_cpus = pytest.mark.skipif(usable_cpus() < 2, reason="two ranks take two CPUs")

# As in a cell: the classes are the notebook's own.
BEGIN = """
    import os, time
    import numpy as np, torch, flatout
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5))

        def forward(self, x):
            return self.inner(x)

    class Seen(flatout.Callback):
        every = 1

        def __init__(self):
            self.losses = []

        def on_step(self, state):
            open(f"step-{os.environ.get('RANK', '0')}", "w").write(str(state.step))
            time.sleep(PAUSE)

        def on_epoch_end(self, state):
            self.losses.append(state.logs["loss"])
            self.model = state.model
            print(f"seen epoch {state.epoch}", flush=True)

    PAUSE = 0
    rng = np.random.default_rng(1)
    x = rng.normal(size=(200, 20)).astype(np.float32)
    y = rng.integers(0, 5, 200)

    def trainer(model=None, **given):
        torch.manual_seed(0)
        model = Net() if model is None else model()
        schedule = lambda o: torch.optim.lr_scheduler.StepLR(o, 3)
        return flatout.Trainer(model, lr=0.01, allow="exact", metrics=["accuracy"],
                               scheduler=schedule, schedule_every="epoch", **given)
"""


class Prompt:
    """An interactive interpreter, which takes a cell at a time."""

    def __init__(self, folder):
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-i"],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "FLATOUT_CACHE": str(folder / "cache")},
        )
        self.cells = 0

    def enter(self, cell):
        self.cells += 1
        path = self.folder / f"cell-{self.cells}"
        path.write_text(textwrap.dedent(cell))
        self.process.stdin.write(f"exec(compile(open({str(path)!r}).read(), 'cell', 'exec'))\n")
        self.process.stdin.flush()

    def end(self):
        try:
            return self.process.communicate(timeout=120)
        finally:
            self.process.kill()


def wait_for_step(folder, step):
    until = time.monotonic() + 60
    while time.monotonic() < until:
        path = folder / "step-1"
        if path.exists() and int(path.read_text() or 0) >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"no step {step}")


def ranks_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        children = [int(child) for child in file.read().split()]
    found = {}
    for child in children:
        with open(f"/proc/{child}/environ") as file:
            variables = dict(one.partition("=")[::2] for one in file.read().split("\0") if one)
        if "RANK" in variables:
            found[int(variables["RANK"])] = child
    return found


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@two_cpus
@pytest.mark.slow
def test_afterwards_the_notebook_holds_what_it_would_have_trained_itself(tmp_path):
    prompt = Prompt(tmp_path)
    prompt.enter(BEGIN)
    prompt.enter("""
        there, seen = trainer(devices=2), Seen()
        weight = there.model.inner[0].weight
        history = there.fit((x, y), batch_size=10, epochs=3, callbacks=[seen],
                            validation_data=(x, y))
        assert there.model.inner[0].weight is weight
        assert there.optimizer.param_groups[0]["params"][0] is weight
        here, own = trainer(), Seen()
        alone = here.fit((x, y), batch_size=10, epochs=3, callbacks=[own],
                         validation_data=(x, y), progress=False)
        close = dict(rtol=1e-4, atol=2e-6)
        compare = torch.testing.assert_close
        compare(there.model.state_dict(), here.model.state_dict(), **close)
        compare(there.optimizer.state_dict(), here.optimizer.state_dict(), **close)
        assert there.scheduler.state_dict() == here.scheduler.state_dict()
        figures = [[{k: v for k, v in e.items() if k != "seconds"} for e in h.epochs]
                   for h in (history, alone)]
        compare(*figures, **close)
        assert history is there.history and len(history.step_times) == 60
        compare(seen.losses, own.losses, **close)
        assert seen.model is there.model
        compare(there.evaluate(x, y), here.evaluate(x, y), **close)
        compare(there.predict(x), here.predict(x), **close)
        print("all well")
    """)
    out, error = prompt.end()
    assert "all well" in out, error
    assert out.count("seen epoch 0") == 2
    assert "epoch 3/3" in error


@two_cpus
@pytest.mark.slow
@pytest.mark.long
def test_errors_come_from_the_ranks_and_a_second_fit_goes_on(tmp_path):
    prompt = Prompt(tmp_path)
    prompt.enter(BEGIN)
    prompt.enter("""
        there = trainer(devices=2)
        first = there.fit((x, y), batch_size=10, epochs=1, progress=False)
        again = there.fit((x, y), batch_size=10, epochs=1, progress=False)
        assert again.epochs[0]["loss"] < first.epochs[0]["loss"]
        try:
            there.fit((x, y + 100), batch_size=10)
        except flatout.errors.DataError as error:
            print("refused:", error.__cause__, error)
        try:
            there.fit(((a, b) for a, b in zip(x, y)), batch_size=10)
        except flatout.errors.DataError as error:
            print("not sent:", error)
        print("all well")
    """)
    out, error = prompt.end()
    assert "all well" in out, error
    assert "check_labels(" in out
    assert "is not in 0..4" in out
    assert "not sent: the fit cannot be sent to other processes: cannot pickle 'generator'" in out


@two_cpus
@pytest.mark.slow
@pytest.mark.long
def test_a_killed_rank_starts_again_and_a_lost_notebook_takes_its_ranks_along(tmp_path):
    prompt = Prompt(tmp_path)
    prompt.enter(BEGIN)
    prompt.enter("""
        PAUSE = 0.05
        recipe = flatout.Recipe().replace({"save.every": 5})
        there = trainer(devices=2, run="runs", recipe=recipe)
        there.fit((x, y), batch_size=10, epochs=2, callbacks=[Seen()])
        print("finished", len(there.history.epochs), flush=True)
        there.fit((x, y), batch_size=10, epochs=1000, callbacks=[Seen()], resume=True)
    """)
    wait_for_step(tmp_path, 8)
    os.kill(ranks_of(prompt.process.pid)[1], signal.SIGKILL)
    for line in prompt.process.stdout:
        if line.startswith("finished"):
            assert line == "finished 2\n"
            break
    wait_for_step(tmp_path, 45)
    ranks = ranks_of(prompt.process.pid)
    prompt.process.kill()
    _, error = prompt.process.communicate(timeout=60)
    assert "was killed by SIGKILL; all ranks start again" in error
    assert "resumed step" in error
    time.sleep(0.5)
    assert not any(alive(pid) for pid in ranks.values())


@two_cpus
@pytest.mark.slow
def test_a_kernel_that_is_interrupted_keeps_what_was_trained(tmp_path):
    manager = pytest.importorskip("jupyter_client.manager")
    pytest.importorskip("ipykernel")
    kernel, client = manager.start_new_kernel(
        cwd=str(tmp_path), env={**os.environ, "FLATOUT_CACHE": str(tmp_path / "cache")}
    )
    try:
        said(client, textwrap.dedent(BEGIN))
        client.execute(
            "PAUSE = 0.05\nthere = trainer(devices=2)\n"
            "there.fit((x, y), batch_size=10, epochs=1000, callbacks=[Seen()])"
        )
        wait_for_step(tmp_path, 25)
        kernel.interrupt_kernel()
        text = heard(client)
        assert "KeyboardInterrupt" in text
        assert "seen epoch 0" in text
        assert "-> checkpoint runs/" in text
        ranks = "there.history.timeline.steps, there.evaluate(x, y)['loss'] < 1.55"
        steps, _, better = said(client, ranks).strip().strip("()").partition(",")
        assert int(steps) >= 25
        assert better.strip() == "True"
        assert not ranks_of(kernel.provisioner.pid)
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)


def said(client, cell):
    client.execute(cell)
    return heard(client)


def heard(client):
    """What a cell shows until it is done."""
    text = ""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        try:
            message = client.get_iopub_msg(timeout=1)
        except queue.Empty:
            continue
        content = message["content"]
        if message["msg_type"] == "stream":
            text += content["text"]
        elif message["msg_type"] == "error":
            text += f"{content['ename']}: {content['evalue']}"
        elif message["msg_type"] == "execute_result":
            text += content["data"]["text/plain"]
        elif message["msg_type"] == "status" and content["execution_state"] == "idle":
            return text
    raise AssertionError(text)


@two_cpus
@pytest.mark.slow
@pytest.mark.long
def test_keras_models_without_compile_train_there_too(tmp_path):
    pytest.importorskip("keras")
    prompt = Prompt(tmp_path)
    prompt.enter(BEGIN)
    prompt.enter("""
        os.environ["KERAS_BACKEND"] = "torch"
        import keras

        def dense():
            keras.utils.set_random_seed(0)
            return keras.Sequential([keras.Input((20,)), keras.layers.Dense(32, "relu"),
                                     keras.layers.Dense(5)])

        there, here = trainer(dense, devices=2), trainer(dense)
        for one in (there, here):
            one.fit((x, y), batch_size=10, epochs=2, progress=False)
        for a, b in zip(there.model.get_weights(), here.model.get_weights()):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6)
        assert any(one is there.model.layers[0].kernel.value
                   for one in there.optimizer.param_groups[0]["params"])
        print("all well")
    """)
    out, error = prompt.end()
    assert "all well" in out, error


def test_in_a_script_the_command_is_named(monkeypatch):
    monkeypatch.delattr(sys, "ps1", raising=False)
    pytest.importorskip("ipykernel")  # which a script may import for its own reasons
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.1"])
    with pytest.raises(WorldError, match=r"flatout run --devices 2 train\.py --lr 0\.1"):
        flatout.Trainer(nn.Linear(3, 2), devices=2)
    flatout.Trainer(nn.Linear(3, 2), devices=1)
    for wrong in (0, True, "auto"):
        with pytest.raises(ModelError, match="a number of ranks from 1"):
            flatout.Trainer(nn.Linear(3, 2), devices=wrong)


def test_what_flatout_run_has_started_must_agree(monkeypatch):
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    flatout.Trainer(nn.Linear(3, 2), devices=2)
    flatout.Trainer(nn.Linear(3, 2), devices=1)
    with pytest.raises(WorldError, match="devices=3, but 2 ranks were started on this node"):
        flatout.Trainer(nn.Linear(3, 2), devices=3)


def test_more_devices_than_there_are(monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(WorldError, match="999 ranks were asked for, but this node has"):
        flatout.Trainer(nn.Linear(3, 2), devices=999)


@two_cpus
def test_compiled_keras_models_take_one_rank(monkeypatch):
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("adam", "mse")
    flatout.Trainer(model, devices=1)
    with pytest.raises(WorldError, match="flatout run --devices 2"):
        flatout.Trainer(model, devices=2)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(ModelError, match="started by the command, not in a notebook"):
        flatout.Trainer(model, devices=2)


def test_a_timeline_goes_to_another_process():
    import pickle

    from flatout.measure import Timeline

    timeline = Timeline()
    timeline.record(0, 1_000, 0, 2_000, 3_000, 0, 4_000, 0)
    there = pickle.loads(pickle.dumps(timeline))
    assert there.steps == 1
    assert there.lanes() == timeline.lanes()
    there.record(20_000, 1_000, 0, 2_000, 3_000, 0, 4_000, 0)
    assert (there.steps, timeline.steps) == (2, 1)


@pytest.mark.slow
@two_cpus
def test_classes_that_a_notebook_observes_are_sent_to_ranks_as_written(tmp_path):
    pytest.importorskip("IPython")
    cells = [
        "%load_ext flatout",
        BEGIN,
        """
        class Rows(torch.utils.data.Dataset):
            def __len__(self):
                return len(x)

            def __getitem__(self, row):
                return x[row], y[row]

        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(4):
            for inputs, targets in torch.utils.data.DataLoader(Rows(), 16):
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(inputs), targets).backward()
                optimizer.step()
        """,
        """
        watched = "__call__" in vars(Net)
        history = trainer(devices=2).fit(Rows(), batch_size=50, epochs=1, verbose=0)
        print("RESULT", watched, "__call__" in vars(Net), len(history.epochs))
        """,
    ]
    script = tmp_path / "cells.py"
    script.write_text(
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        f"for cell in {[textwrap.dedent(cell) for cell in cells]!r}:\n"
        "    shell.run_cell(cell).raise_error()\n"
    )
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "FLATOUT_CACHE": str(tmp_path / "cache"), "IPYTHONDIR": str(tmp_path)},
    )
    assert "RESULT True True 1" in done.stdout, done.stdout + done.stderr
