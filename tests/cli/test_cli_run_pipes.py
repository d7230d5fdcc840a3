"""`flatout run --devices 2`: each rank reads its own pipe."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from flatout.measure import usable_cpus

pytestmark = pytest.mark.skipif(usable_cpus() < 2, reason="two ranks take two CPUs")

JOB = """
    import os
    import sys
    import threading
    from pathlib import Path

    import torch
    from torch import nn

    import flatout
    from flatout.errors import DataError
    from flatout.world import place

    rank = place().rank
    written, threads = [], []


    def rows_of(rank, count):
        return range(100 * rank, 100 * rank + count)


    def write(path, count, passes):
        for turn in range(passes):
            with open(f"{path}_{turn}", "w") as pipe:
                for number in rows_of(rank, count):
                    pipe.write(f"{number} 1:{number} 2:1\\n")
        written.append(path)


    def pipe(name, counts, *, passes=2, path=None, **options):
        path = path or f"{name}-{rank}"
        for turn in range(passes):
            os.mkfifo(f"{path}_{turn}")
        threads.append(threading.Thread(target=write, args=(path, counts[rank], passes)))
        threads[-1].daemon = True
        threads[-1].start()
        return flatout.data.fifo(path, schema=schema, timeout_s=100, **options)


    def number(output, target):
        # Its mean over an epoch tells which rows were trained on.
        return output.sum() * 0 + target.sum(), len(target)


    def train(name, data, epochs=2):
        torch.manual_seed(0)
        trainer = flatout.Trainer(
            nn.Linear(2, 1), loss=number, optimizer="sgd", lr=0.1, allow="exact"
        )
        history = trainer.fit(data, epochs=epochs, progress=False)
        found[name] = {
            "steps": history.timeline.steps,
            "means": [logs["loss"] for logs in history.epochs],
            "notes": history.notes,
        }
        return trainer


    Path(f"schema-{rank}.svm").write_text("3 1:1 2:1\\n")
    schema = flatout.data.libsvm(f"schema-{rank}.svm").schema
    found = {}
    even, uneven = (60, 60), (60, 30)

    window = pipe("shuffled", even).shuffle(seed=1, window=20).batch(16)
    train("shuffled", window)
    train("presharded", pipe("p", even).shuffle(1, window=20).batch(16).shard(presharded=True))
    train("dry", pipe("dry", uneven).batch(16))
    train("shuffled, dry", pipe("sd", uneven).shuffle(seed=1, window=8).batch(16))
    trainer = train("counted", pipe("counted", uneven, rows=uneven[rank]).batch(16))
    # The same rows come to both ranks, by a pipe each: each keeps every second of them.
    rows_of_rank, rows_of = rows_of, lambda rank, count: range(count)
    train("shared", pipe("shared", (90, 90), rows=90, presharded="node").batch(16))
    rows_of = rows_of_rank
    found["evaluated"] = trainer.evaluate(pipe("e", even, passes=1).batch(16))["loss"]
    for thread in threads:
        thread.join(100)
    found["written"] = len(written)
    try:
        trainer.predict(pipe("predicted", even).batch(16))
    except DataError as error:
        found["predict"] = str(error)
    if rank == 0:
        os.mkfifo("one_0")
    try:
        trainer.fit(flatout.data.fifo("one", schema=schema).batch(16), epochs=1)
    except DataError as error:
        found["one pipe"] = str(error)
    torch.save(found, f"found-{rank}.pt")
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipes")
    (folder / "train.py").write_text(textwrap.dedent(JOB))
    call = "from flatout.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", call, "run", "--devices", "2", "train.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "FLATOUT_CACHE": str(folder / "cache")},
    )
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"found-{rank}.pt") for rank in range(2)], done.stderr


def mean(*counts):
    rows = [100 * rank + row for rank, count in enumerate(counts) for row in range(count)]
    return pytest.approx(sum(rows) / len(rows), rel=1e-5)


@pytest.mark.parametrize("name", ["shuffled", "presharded"])
def test_each_rank_trains_on_all_rows_of_its_pipe(found, name):
    for one in found[0]:
        assert one[name]["steps"] == 2 * 8  # of 60 rows, in batches of 8 on each rank
        assert one[name]["means"] == [mean(60, 60)] * 2


def test_all_ranks_end_where_one_runs_dry_and_say_what_is_left_over(found):
    for one in found[0]:
        assert one["dry"]["steps"] == 2 * 4
        assert one["dry"]["means"] == [mean(32, 30)] * 2
        assert one["shuffled, dry"]["steps"] == 2 * 4
    said = "ended after 4 steps, when a rank's pipe had run dry; left over: 28 samples of rank 0"
    for epoch in (1, 2):
        assert found[1].count(f"epoch {epoch} {said}") == 2  # of two fits, by one rank
        assert any(f"epoch {epoch} {said}" in note for note in found[0][0]["dry"]["notes"])


def test_pipes_are_read_to_their_end_so_that_no_writer_is_cut_off(found):
    assert all(one["written"] == 7 for one in found[0])


@pytest.mark.slow
def test_rows_that_are_known_are_spread_over_as_many_steps_on_each_rank(found):
    for one in found[0]:
        assert one["counted"]["steps"] == 2 * 6  # 90 rows in batches of 16
        assert one["counted"]["means"] == [mean(60, 30)] * 2


def test_ranks_to_whose_pipes_the_same_rows_come_share_them_out(found):
    for one in found[0]:
        assert one["shared"]["steps"] == 2 * 6
        assert one["shared"]["means"] == [pytest.approx(89 / 2, rel=1e-5)] * 2


def test_an_evaluation_counts_the_rows_of_all_pipes(found):
    assert all(one["evaluated"] == mean(60, 60) for one in found[0])


def test_two_ranks_that_read_one_pipe_are_named(found):
    for one in found[0]:
        assert "ranks 0 and 1 read one pipe" in one["one pipe"]
        assert "one" in one["one pipe"]
        assert "no common order" in one["predict"]
