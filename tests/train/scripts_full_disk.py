"""A fit whose disk is full from some size of file on.

python scripts_full_disk.py RUN LIMIT asynchronous|waiting
"""

import resource
import signal
import sys

import torch
from train_jobs import CLASSES, FEATURES, saving

import flatout
from flatout.errors import CheckpointError


class Limit(flatout.Callback):
    """From step 7 on no file may grow beyond the limit; there is no way back for a process."""

    def on_step(self, state) -> None:
        if state.step == 7:
            state.trainer.loop.checkpoints.wait()  # the one of step 5 is whole
            limit = int(sys.argv[2])
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


if __name__ == "__main__":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    torch.set_num_threads(1)
    x = torch.randn(150, FEATURES, generator=torch.Generator().manual_seed(0))
    y = (x.sum(1) > 0).long()
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 500), torch.nn.Linear(500, CLASSES))
    asynchronous = sys.argv[3] == "asynchronous"
    job = flatout.Trainer(
        model, recipe=saving(every=5, asynchronous=asynchronous), run=sys.argv[1], allow="exact"
    )
    try:
        job.fit((x, y), batch_size=10, callbacks=[Limit()], progress=False)
    except CheckpointError as error:
        print(f"step {job.loop.step_count}: {error}")
        print(job.evaluate(x, y))  # the model is still there
        sys.exit(5)
