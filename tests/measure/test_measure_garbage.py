import gc
import threading

import pytest

from flatout.measure.garbage import CollectorClock


@pytest.fixture
def clock():
    gc.disable()
    clock = CollectorClock()
    yield clock
    clock.stop()
    gc.enable()


@pytest.mark.slow
def test_a_collection_is_noted_with_its_duration(clock):
    clock.start()
    gc.collect()
    clock.stop()
    gc.collect()
    [(began, took)] = clock.noted
    assert began > 0
    assert took > 0


@pytest.mark.slow
def test_several_clocks_share_one_callback(clock):
    before = len(gc.callbacks)
    other = CollectorClock()
    clock.start()
    clock.start()
    other.start()
    assert len(gc.callbacks) == before + 1
    gc.collect()
    other.stop()
    assert len(gc.callbacks) == before + 1
    gc.collect()
    assert (len(clock.noted), len(other.noted)) == (2, 1)
    clock.stop()
    clock.stop()
    assert len(gc.callbacks) == before


def test_starting_and_stopping_from_many_threads_ends_clean():
    before = list(gc.callbacks)

    def flap():
        clock = CollectorClock()
        for _ in range(500):
            clock.start()
            clock.stop()

    threads = [threading.Thread(target=flap) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert gc.callbacks == before


def test_taking_splits_by_time(clock):
    for began in (10, 20, 30, 40):
        clock.note(began, 5)
    assert clock.take_since(32) == 5 + 5
    assert clock.take_before(20) == [(10, 5)]
    assert clock.noted == [(20, 5)]
    assert clock.take_since(25) == 0
    assert clock.take_before(10) == []


def test_memory_is_bounded_and_no_time_is_lost(clock):
    for began in range(100_000):
        clock.note(began, 3)
    assert len(clock.noted) <= 4096
    assert sum(took for _, took in clock.noted) == 300_000
    assert clock.noted == sorted(clock.noted)
