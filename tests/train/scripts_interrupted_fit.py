"""A fit that waits to be interrupted, as a script of a user's own.

    python scripts_interrupted_fit.py RUN [--resume] [--wait=STEP] [--dawdle] [--workers]
                                          [--slow-validation]

Says on stdout which step was made, and the digest of the weights at the end. It waits in a step for
a signal to come, dawdles in every step whether one came or not, or reads slowly.
"""

import hashlib
import signal
import sys
import time

import torch
from torch.utils.data import Dataset
from train_jobs import data, network, saving

import flatout
from flatout.recipe import Recipe


class Slowly(Dataset):
    """Samples that take their time."""

    def __init__(self, x, y, seconds: float) -> None:
        self.x, self.y, self.seconds = x, y, seconds

    def __len__(self) -> int:
        return len(self.x)

    def __getitems__(self, indices: list[int]):
        time.sleep(self.seconds)
        return [(self.x[i], self.y[i]) for i in indices]


class Tell(flatout.Callback):
    """Says on stdout where training is, and waits there for a signal."""

    def __init__(self, wait_at: int, dawdles: bool) -> None:
        self.wait_at, self.dawdles = wait_at, dawdles

    def on_step(self, state) -> None:
        print("training", state.step, flush=True)
        until = time.monotonic() + 60
        while state.step == self.wait_at and time.monotonic() < until:
            time.sleep(0.01)
            if signal.getsignal(signal.SIGINT).__self__.received is not None:
                return
        if self.dawdles:
            time.sleep(60)

    def on_evaluate_end(self, state) -> None:
        print("evaluated", flush=True)


def main(run: str, *options: str) -> None:
    torch.set_num_threads(1)
    resume = "--resume" in options
    torch.manual_seed(50 if resume else 1)
    model = network()
    workers = 1 if "--workers" in options else 0
    job = flatout.Trainer(
        model,
        optimizer="adamw",
        lr=1e-2,
        metrics=["accuracy"],
        recipe=saving() if not workers else Recipe(input={"workers": workers}),
        allow="exact",
        run=None if run == "-" else run,
    )
    train = Slowly(*data(), 0.3) if workers else data()
    validation = Slowly(*data(seed=1), 0.05) if "--slow-validation" in options else data(seed=1)
    waits = [int(o.removeprefix("--wait=")) for o in options if o.startswith("--wait=")]
    tell = Tell(waits[0] if waits else 0, "--dawdle" in options)
    history = job.fit(
        train,
        batch_size=8,
        epochs=3,
        validation_data=validation,
        validation_batch_size=2,
        callbacks=[tell],
        resume=resume,
        progress=False,
    )
    digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in model.state_dict().values()))
    losses = [logs["val_loss"] for logs in history.epochs]
    print("done", digest.hexdigest(), losses, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
