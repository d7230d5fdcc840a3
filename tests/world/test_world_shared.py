"""Ranks of one node that add up in each other's memory: how they meet, and when they do not."""

import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from io import FileIO

import pytest
import torch
from world_ranks import run

from flatout.measure import usable_cpus
from flatout.world.barrier import Barrier

two_cpus = pytest.mark.skipif(usable_cpus() < 2, reason="two ranks take two CPUs")


def barriers(count, timeout_s=100.0):
    ends = {(a, b): os.pipe() for a in range(count) for b in range(count) if a != b}
    return [
        Barrier(
            {other: FileIO(ends[own, other][1], "wb") for other in range(count) if other != own},
            {other: FileIO(ends[other, own][0], "rb") for other in range(count) if other != own},
            timeout_s,
        )
        for own in range(count)
    ]


def test_no_rank_goes_on_before_all_have_come():
    came, wrong = [0] * 3, []

    def rank(own, meet):
        for turn in range(200):
            if own == turn % 3:
                time.sleep(0.0005)
            came[own] = turn + 1
            meet()
            if min(came) < turn + 1:
                wrong.append((own, turn))
            meet()

    threads = [threading.Thread(target=rank, args=one) for one in enumerate(barriers(3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert came == [200] * 3
    assert not wrong


def test_a_rank_that_has_ended_is_named():
    first, second = barriers(2)
    del second
    with pytest.raises(RuntimeError, match="rank 1 has closed its pipe"):
        first()


def test_a_rank_that_ends_while_it_is_waited_for_is_named():
    first, second = barriers(2)
    pipes = [*second._to.values(), *second._of.values()]
    threading.Timer(0.2, lambda: [pipe.close() for pipe in pipes]).start()
    with pytest.raises(RuntimeError, match="rank 1 has closed its pipe"):
        first()


def test_a_rank_that_does_not_come_is_named():
    first, _second = barriers(2, timeout_s=0.2)
    with pytest.raises(RuntimeError, match=r"rank 1 has not come for 0\.2 s"):
        first()


JOB = """
    import os, sys
    from pathlib import Path
    import torch
    from torch import nn
    import flatout
    from flatout.recipe import World as Asked
    from flatout.strategies.reductions import Shared, reduction_of
    from flatout.world import barrier, join

    world = join()
    cpu = torch.device("cpu")

    def files():
        return len(os.listdir("/proc/self/fd"))

    open_files = barrier.opened
    def out_of_reach(pid, fd, flags):
        if world.rank == 1:
            raise PermissionError("as in another container")
        return open_files(pid, fd, flags)

    reduction_of(Asked(), world, cpu)  # what is opened once
    before = files()
    barrier.opened = out_of_reach
    without = reduction_of(Asked(), world, cpu)
    barrier.opened = open_files
    said = {
        "kinds": [type(without).__name__, type(reduction_of(Asked(), world, cpu)).__name__],
        "left open": files() - before,
        "exact": type(reduction_of(Asked(), world, cpu, exact=True)).__name__,
        "compressed": type(reduction_of(Asked(compression="bf16"), world, cpu)).__name__,
    }
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
    weights = {}
    for asked in ("auto", "all_reduce"):
        torch.manual_seed(0)
        recipe = flatout.Recipe(world={"reduction": asked}, process={"threads": 1})
        trainer = flatout.Trainer(
            nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3)), loss="cross_entropy",
            lr=0.01, allow="exact", recipe=recipe, say=lambda line: None,
        )
        history = trainer.fit((x, x.argmax(1) % 3), batch_size=8, epochs=3, progress=False)
        weights[asked] = trainer.model.state_dict()
        said[asked] = history.recipe.choices["world.reduction"].value
    said["weights"] = weights
    torch.save(said, Path(sys.argv[1]) / f"said-{world.rank}.pt")
"""


@two_cpus
@pytest.mark.slow
def test_two_ranks_take_it_unasked_and_get_the_same_bits(tmp_path):
    run(JOB, 2, tmp_path)
    for rank in range(2):
        said = torch.load(tmp_path / f"said-{rank}.pt")
        assert said["kinds"] == ["AllReduce", "Shared"]
        assert said["left open"] == 0
        assert said["exact"] == "Shared"
        assert said["compressed"] == "Halves"
        assert said["auto"] == "shared"
        assert said["all_reduce"] == "all_reduce"
        for name, weight in said["weights"]["auto"].items():
            assert weight.equal(said["weights"]["all_reduce"][name])


CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc")
IN_CONTAINERS = """
    import os
    import torch
    import torch.distributed as dist
    from flatout.world.barrier import barrier_of
    from flatout.world import Group

    rank, folder = int(os.environ["RANK"]), os.environ["MEET"]
    dist.init_process_group("gloo", init_method=f"file://{folder}/met", rank=rank, world_size=2)
    # As many files in both, so that the numbers of the pipes are the same.
    while os.dup(0) < 60:
        pass
    print(os.getpid(), barrier_of(Group((0, 1), rank, None), 20.0) is None)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run([*CONTAINER, "true"], capture_output=True).returncode != 0,
    reason="no namespaces of processes can be made",
)
def test_ranks_of_two_containers_are_not_taken_for_one_another(tmp_path):
    """Each has the process number 1, and would find its own pipe in place of the other's."""
    path = tmp_path / "job.py"
    path.write_text(textwrap.dedent(IN_CONTAINERS))
    ranks = [
        subprocess.Popen(
            [*CONTAINER, sys.executable, str(path)],
            env={
                **os.environ,
                "RANK": str(rank),
                "MEET": str(tmp_path),
                "GLOO_SOCKET_IFNAME": "lo",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=120)[0] for rank in ranks] == ["1 True\n"] * 2


@pytest.mark.slow
@pytest.mark.skipif(usable_cpus() < 2, reason="ranks take CPUs")
def test_three_ranks_keep_the_librarys_order_where_bits_count(tmp_path):
    job = """
        import sys
        from pathlib import Path
        import torch
        from flatout.recipe import World as Asked
        from flatout.strategies.reductions import reduction_of
        from flatout.world import join
        world, cpu = join(), torch.device("cpu")
        kinds = [type(reduction_of(Asked(), world, cpu, exact=e)).__name__ for e in (True, False)]
        Path(sys.argv[1], f"kinds-{world.rank}").write_text(" ".join(kinds))
    """
    run(job, 3, tmp_path)
    assert (tmp_path / "kinds-2").read_text() == "AllReduce Shared"


EXCHANGES = """
    import random
    import sys
    import torch
    from flatout.world import join, messages

    world = join()
    own, common = random.Random(world.rank), random.Random(7)
    kinds = [torch.float32, torch.int64, torch.uint8, torch.bfloat16]

    def tensor():
        # Some need larger memory than there was.
        length = own.choice([0, 1, 3, 500, 70_001])
        return torch.randint(200, (length, own.choice([1, 3]))).to(own.choice(kinds))

    for turn in range(40):
        note = [own.randint(-5, 5) for _ in range(common.randint(0, 3))]
        parts = [[tensor() for _ in range(own.randint(0, 2))] for _ in range(world.size)]
        notes, found = world.exchange(note, parts)
        found = [one.clone() for one in found]
        other_notes, others = messages.exchange(note, parts, None)
        assert notes == other_notes
        assert all(map(torch.equal, found, others))
        _, again = messages.exchange(note, parts, [len(one) for one in found])
        assert all(map(torch.equal, found, again))
        mine = torch.full((common.choice([1, 400_000]),), world.rank, dtype=torch.float32)
        each = world.gather_tensors(mine)
        assert [float(one.mean()) for one in each] == list(range(world.size))
    assert world._mailbox() is not None
"""


@pytest.mark.slow
@pytest.mark.skipif(usable_cpus() < 2, reason="ranks take CPUs")
def test_what_ranks_find_in_one_anothers_memory_is_what_messages_bring(tmp_path):
    run(EXCHANGES, 3, tmp_path)
