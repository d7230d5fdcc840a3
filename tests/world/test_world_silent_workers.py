"""Tests that name a silent DataLoader worker of one of two ranks."""

import os
import re
import signal
import time

import pytest
from world_ranks import start

SCRIPT = """
    import sys
    import time
    from pathlib import Path

    import torch
    from torch.utils.data import DataLoader, Dataset

    import flatout
    from flatout.world import place


    class Hangs(Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            if index == 40 and place().rank == 1:
                (Path(sys.argv[1]) / "hangs").touch()
                time.sleep(600)
            return torch.zeros(4), torch.tensor(0)


    torch.manual_seed(0)
    recipe = flatout.Recipe(world={"patience": 2})
    trainer = flatout.Trainer(torch.nn.Linear(4, 2), recipe=recipe, run=Path(sys.argv[1]) / "run")
    trainer.fit(DataLoader(Hangs(), 8, num_workers=1), epochs=1, progress=False)
"""


@pytest.mark.slow
def test_the_rank_that_waits_names_the_worker_and_the_other_names_the_rank(tmp_path):
    ranks = start(SCRIPT, 2, tmp_path)
    try:
        until = time.monotonic() + 120
        while not (tmp_path / "hangs").exists():
            assert time.monotonic() < until
            time.sleep(0.1)
        time.sleep(30)  # twice the patience for a worker
        for rank in ranks:
            os.kill(rank.pid, signal.SIGTERM)
        (_, first), (_, second) = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    line = r"rank 1 waited \d+ s so far for a batch of a DataLoader by worker 0 \(pid \d+\)"
    assert len(re.findall(line, second)) == 1, second
    assert "by worker" not in first
    assert re.search(r"rank 0 has waited \d+ s in .* for rank 1", first), first
    assert [rank.returncode for rank in ranks] == [-signal.SIGTERM] * 2
