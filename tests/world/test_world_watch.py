"""The watches of several ranks, on one store."""

import json
import time
from dataclasses import asdict, replace
from time import perf_counter_ns as clock

import pytest
import torch.distributed as dist
from world_ranks import free_port, start

from flatout.world.hangs import watch as watching
from flatout.world.hangs.collective_log import CollectiveLog, Waiting
from flatout.world.hangs.stacks import this_process
from flatout.world.hangs.watch import RankWatch
from flatout.world.place import Place

PATIENCE_S = 0.2


@pytest.fixture
def store():
    port = free_port()
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)


@pytest.fixture
def watches(store):
    """Makes the watch of each rank but those that are named, all with their logs."""
    made = []

    def make(size, absent=()):
        logs = [CollectiveLog() for _ in range(size)]
        for rank in set(range(size)) - set(absent):
            place = Place(rank, size, rank, size, address="127.0.0.1", port=store.port)
            made.append(RankWatch(place, logs[rank], PATIENCE_S))
            made[-1].start()
        return made, logs

    yield make
    for watch in made:
        watch.stop()


def come(log, what):
    log.waiting = Waiting(log.begin(what), clock())


def said(capsys, words, within_s=100.0):
    """What was printed, once that has `words` in it."""
    text, until = "", time.monotonic() + within_s
    while words not in text:
        assert time.monotonic() < until, text
        time.sleep(0.02)
        text += capsys.readouterr().err
    return text


@pytest.mark.slow
def test_the_lowest_rank_that_waits_tells_once_and_says_when_it_is_over(watches, capsys):
    made, logs = watches(3)
    for log in logs[:2]:
        come(log, "my sum")
    text = said(capsys, "rank 2 (process")
    time.sleep(5 * PATIENCE_S)
    text += capsys.readouterr().err
    assert text.count("has waited") == 1
    assert "flatout: rank 0 has waited" in text
    assert "in my sum for rank 2" in text
    assert "has not been in a collective yet" in text
    # The stack is that of the process' main thread, here.
    assert "test_the_lowest_rank_that_waits_tells_once" in text
    assert [watch.blame() for watch in made] == ["rank 2 did not come to my sum"] * 3
    for log in logs[:2]:
        log.waiting = None
    said(capsys, "and the job goes on")
    # The word is free again, and what was told before is told in short.
    for log in logs[:2]:
        come(log, "my sum")
    text = said(capsys, "has waited")
    assert "process" not in text


def test_a_collective_that_failed_is_not_said_to_be_over(watches, capsys):
    made, logs = watches(2)
    come(logs[1], "my sum")
    said(capsys, "for rank 0")
    logs[1].is_lost, logs[1].waiting = True, None
    time.sleep(3 * PATIENCE_S)
    assert "goes on" not in capsys.readouterr().err
    assert made[0].blame() == "rank 0 did not come to my sum"


class Timed:
    """A watch of rank 0 without its thread, on a clock that passes from look to look."""

    def __init__(self, store, monkeypatch, patience_s):
        self.now, self.log = 100.0, CollectiveLog()
        monkeypatch.setattr(watching, "monotonic", lambda: self.now)
        monkeypatch.setattr(watching, "clock", lambda: round(self.now * 1e9))
        place = Place(0, 2, 0, 2, address="127.0.0.1", port=store.port)
        self._watch = RankWatch(place, self.log, patience_s)
        self._watch._store = dist.PrefixStore("flatout-watch-0", store)

    def come(self, what):
        self.log.waiting = Waiting(self.log.begin(what), watching.clock())

    def look(self):
        self.now += self._watch._pause_s()
        self._watch._check_own_waiting()


def test_a_wait_is_told_when_patience_ends_and_not_some_beats_later(store, monkeypatch, capsys):
    timed = Timed(store, monkeypatch, 4.0)
    timed.come("my sum")
    while "has waited" not in capsys.readouterr().err:
        timed.look()
    assert timed.now == pytest.approx(100 + 4)


def test_short_waits_are_not_told(store, monkeypatch, capsys):
    timed = Timed(store, monkeypatch, 4.0)
    for _ in range(10):
        timed.come("my sum")
        since = timed.now
        while timed.now < since + 4 / 3:
            timed.look()
    assert timed.now > 100 + 4
    assert capsys.readouterr().err == ""


def test_a_host_that_does_not_answer(watches, store, capsys):
    process = replace(this_process(), machine="elsewhere", host="far", pid=7)
    theirs = dist.PrefixStore("flatout-watch-0", store)
    theirs.set("process/1", json.dumps(asdict(process)))
    _, logs = watches(2, absent=[1])
    come(logs[0], "my sum")
    text = said(capsys, "rank 1 (process 7 on host far)")
    assert "does not answer, nor does another rank on host far" in text


def test_a_rank_that_never_joined(watches, capsys):
    _, logs = watches(2, absent=[1])
    come(logs[0], "my sum")
    assert "rank 1 has not joined the others" in said(capsys, "  rank 1 ")


def test_one_rank_fails_first(watches):
    made, _ = watches(3)
    assert [watch.is_first_to_fail() for watch in made] == [True, False, False]


def test_without_a_store_nothing_is_watched():
    place = Place(0, 2, 0, 2, address="127.0.0.1", port=free_port())
    watch = RankWatch(place, CollectiveLog(), PATIENCE_S, store_s=0.2)
    watch.start()
    assert watch.is_first_to_fail()
    assert watch.blame() == ""
    watch.stop()


SLEEPER = """
    import time

    import torch

    import flatout
    from flatout.world import place


    class Sleeps(flatout.Callback):
        def on_step(self, state):
            if place().rank == 1 and state.step > 6:
                time.sleep(9999)


    settings = {"strategy": "parameter_server", "staleness": 2, "patience": 2, "timeout": 6}
    torch.manual_seed(0)
    trainer = flatout.Trainer(
        torch.nn.Linear(4, 2), recipe=flatout.Recipe(world=settings), allow="exact"
    )
    data = torch.ones(640, 4), torch.zeros(640).long()
    trainer.fit(data, batch_size=8, epochs=4, callbacks=[Sleeps()], progress=False)
"""


@pytest.mark.slow
def test_a_rank_that_hangs_while_servers_do_not_wait_is_named_and_the_job_ends(tmp_path):
    first, second = start(SLEEPER, 2, tmp_path)
    try:
        _, said = first.communicate(timeout=120)
        assert first.returncode == 75, said
        assert "no step came from rank 1" in said
        assert "time.sleep(9999)" in said
        assert "the job goes on" not in said
    finally:
        first.kill()
        second.kill()
