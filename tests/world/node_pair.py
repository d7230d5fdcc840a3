"""Runs a script on two nodes, each with its own agent, as in two terminals."""

import os
import subprocess
import sys
import textwrap
import time

from world_ranks import free_port

PATIENCE_S = 120

TRAIN = """
    import os, sys, time
    import numpy as np, torch, flatout

    class Slow(flatout.Callback):
        every = 1
        def on_step(self, state):
            open(f"step-{os.environ.get('RANK', '0')}", "w").write(str(state.step))
            time.sleep(0.02)

    rng = np.random.default_rng(1)
    x = rng.normal(size=(200, 20)).astype(np.float32)
    y = rng.integers(0, 5, 200)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 5))
    recipe = flatout.Recipe().replace({"save.every": 5})
    trainer = flatout.Trainer(model, lr=0.01, allow="exact", recipe=recipe, run=sys.argv[1])
    trainer.fit((x, y), batch_size=10, epochs=int(sys.argv[2]), callbacks=[Slow()],
                resume="resume" in sys.argv)
    trainer.save(sys.argv[1] + ".safetensors")
    print(trainer.world(), flush=True)
"""


class Node:
    """The agent of one node; what stands before the command puts it on its own host."""

    def __init__(self, folder, rank, rendezvous, *arguments, options=(), before=(), script=TRAIN):
        path = folder / "train.py"
        path.write_text(textwrap.dedent(script))
        call = "from flatout.cli.main import main; main()"
        self._path = folder / f"node-{rank}-{time.monotonic_ns()}"
        with open(self._path, "w") as output:
            self.process = subprocess.Popen(
                [
                    *before,
                    *(sys.executable, "-c", call, "run", "--nodes", "2", "--node-rank", str(rank)),
                    *("--rendezvous", rendezvous, *options, str(path), *arguments),
                ],
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "FLATOUT_CACHE": str(folder / "cache")},
            )

    @property
    def said(self):
        return self._path.read_text()

    def end(self):
        """The exit code; what was said stays in `said`."""
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self.process.wait()

    def ranks(self):
        """The processes of the ranks on this node."""
        return children(self.process.pid)


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def both(folder, *arguments, options=(), rendezvous=None, befores=((), ()), script=TRAIN):
    rendezvous = rendezvous or f"127.0.0.1:{free_port()}"
    return [
        Node(folder, rank, rendezvous, *arguments, options=options, before=before, script=script)
        for rank, before in enumerate(befores)
    ]


def wait_for(happened, seconds=60):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := happened():
            return found
        time.sleep(0.02)
    raise AssertionError("it did not happen")


def wait_for_step(folder, step, nodes):
    until = time.monotonic() + 60
    while time.monotonic() < until and all(node.process.poll() is None for node in nodes):
        try:
            if int((folder / "step-1").read_text() or 0) >= step:
                return
        except (OSError, ValueError):
            pass
        time.sleep(0.01)
    raise AssertionError(f"no step {step}: {[node.said for node in nodes]}")


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
