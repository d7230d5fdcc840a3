import threading

import numpy as np
import pytest
import torch

import flatout
from flatout import console
from flatout.data.reading.threads import Pool
from flatout.data.workers import process_pool, worker
from flatout.data.workers.parallel import Ahead, Tuner
from flatout.data.workers.prefetch import prefetch
from flatout.errors import DataError


@pytest.fixture
def no_threads(monkeypatch):
    """The system starts no thread: none has room for such a stack."""
    monkeypatch.setattr(console, "_said", set())
    before = threading.stack_size(1 << 46)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        threading.Thread(target=print).start()
    yield
    threading.stack_size(before)


def test_batches_are_made_all_the_same_and_it_is_said_once(no_threads, tmp_path, capfd):
    (tmp_path / "day.svm").write_text("".join(f"{n % 2} 1:{n}\n" for n in range(3000)))

    def opened():
        data = flatout.data.libsvm(str(tmp_path / "day.svm"))
        return data.map(lambda x, y: (x + 1, y)).shuffle(seed=1).batch(10)

    pipeline = opened().options(threads=2)
    made = [batch for epoch in range(2) for batch in pipeline.batches(epoch)]
    copied = list(prefetch(iter(made), torch.device("cpu")))
    said = capfd.readouterr().err
    threading.stack_size(0)
    expected = [batch for epoch in range(2) for batch in opened().batches(epoch)]
    for ours, copy, theirs in zip(made, copied, expected, strict=True):
        assert np.array_equal(ours.inputs, theirs.inputs)
        assert np.array_equal(copy.inputs, theirs.inputs)
    assert said.count("batches are made by 0 threads: can't start new thread") == 1
    assert said.count("files are read by fewer threads") == 1


def test_an_error_comes_where_its_item_would_have_come(no_threads):
    made = iter(Ahead(lambda at: 6 // (3 - at), 0, 9, Tuner(2)))
    assert [next(made), next(made), next(made)] == [2, 3, 6]
    with pytest.raises(ZeroDivisionError):
        next(made)


def test_fewer_threads_than_wanted(monkeypatch):
    monkeypatch.setattr(console, "_said", set())
    here = threading.get_ident()
    tuner = Tuner(3, threads=3)
    ahead = Ahead(lambda at: (at, threading.get_ident()), 0, 50, tuner)
    start, started = threading.Thread.start, []

    def starting(thread):
        # The third has no room for its stack.
        before = threading.stack_size(1 << 46 if len(started) == 2 else 0)
        try:
            start(thread)
        finally:
            threading.stack_size(before)
        started.append(thread)

    monkeypatch.setattr(threading.Thread, "start", starting)
    found = list(ahead)
    assert [at for at, _ in found] == list(range(50))
    assert (len(started), tuner.threads) == (2, 2)
    assert here not in {ident for _, ident in found}


def test_a_pool_without_threads(no_threads):
    with Pool(4) as pool:
        assert list(pool.map(lambda n: n * n, range(5))) == [0, 1, 4, 9, 16]
        with pytest.raises(ZeroDivisionError):
            pool.submit(lambda: 1 / 0).result()


def test_fewer_processes_than_wanted(monkeypatch, capfd):
    monkeypatch.setattr(console, "_said", set())

    class Started:
        ready = True

        def __init__(self, payload, name):
            if name.startswith("worker process 3"):
                raise worker.WorkerDied(f"{name} cannot be started: no room")

        def ask(self, task, what):
            return task[0]

        def close(self):
            pass

    monkeypatch.setattr(process_pool, "Worker", Started)
    some = process_pool.ProcessPool(None, 4)
    assert list(some.batches(lambda at: (at,), 0, 9)) == list(range(9))
    assert some.count == 2
    assert "batches are made by 2 processes: worker process 3 of 4" in capfd.readouterr().err
    monkeypatch.setattr(Started, "__init__", lambda *_: (_ for _ in ()).throw(DataError("none")))
    with pytest.raises(DataError, match="none"):
        list(process_pool.ProcessPool(None, 4).batches(lambda at: (at,), 0, 9))
