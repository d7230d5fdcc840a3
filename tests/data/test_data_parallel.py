import threading
import time

import pytest

from flatout.data.workers.parallel import Ahead, Tuner


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_items_come_in_order(threads):
    def make(at):
        time.sleep(0.002 * (at % 3))
        return at

    assert list(Ahead(make, 3, 60, Tuner(threads, threads))) == list(range(3, 60))


def test_no_more_than_the_depth_is_made_ahead():
    made = []
    ahead = iter(Ahead(made.append, 0, 100, Tuner(3, 3, depth=4)))
    for taken in range(1, 10):
        next(ahead)
        time.sleep(0.02)
        assert len(made) <= taken + 4
    ahead.close()


def test_an_error_comes_where_its_item_would_have_come():
    def make(at):
        if at == 5:
            raise ValueError("five")
        return at

    taken = []
    with pytest.raises(ValueError, match="five"):
        taken.extend(Ahead(make, 0, 50, Tuner(4, 4)))
    assert taken == [0, 1, 2, 3, 4]


def test_threads_end_with_the_loop():
    before = threading.active_count()
    for item in Ahead(lambda at: at, 0, 1000, Tuner(3, 3)):
        if item == 10:
            break
    del item
    deadline = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def feed(tuner, rates, windows, waits):
    """Windows of a consumer whose rate and waiting depend on the number of threads."""
    used = []
    for _ in range(windows):
        used.append(tuner.threads)
        tuner.waited = waits(tuner.threads)
        tuner._judge(rates(tuner.threads))
    return used


def test_threads_are_added_while_that_helps():
    tuner = Tuner(8)
    used = feed(tuner, lambda n: min(n, 3), 20, lambda n: 0.5 if n < 4 else 0.4)
    assert max(used) == 4
    assert used.count(3) > used.count(4)  # the fourth was tried and put back
    assert tuner.in_vain
    assert any("put back" in trial for trial in tuner.trials)


def test_threads_that_are_not_needed_go():
    tuner = Tuner(8)
    tuner.threads = 4
    used = feed(tuner, lambda n: 1.0, 30, lambda n: 0.0)
    assert used[-1] == 1


def test_a_thread_that_is_needed_comes_back():
    tuner = Tuner(8)
    tuner.threads = 3
    feed(tuner, lambda n: min(n, 3) / 3, 12, lambda n: 0.0)
    assert tuner.threads == 3


def test_a_fixed_number_stays():
    tuner = Tuner(8, threads=2)
    for _ in range(2000):
        assert not tuner.consumed(1.0, 1)
    assert tuner.threads == 2


def test_a_notice_for_a_thread_that_ends_goes_to_another():
    """Another loop over the same pipeline may have changed the number of threads meanwhile."""
    for _ in range(5):
        tuner = Tuner(2, threads=2, depth=1)
        ahead = iter(Ahead(lambda at: at, 0, 50, tuner))
        assert next(ahead) == 0
        time.sleep(0.05)  # both threads wait for room
        tuner.threads = 1
        rest = []
        taking = threading.Thread(target=lambda to=rest, of=ahead: to.extend(of), daemon=True)
        taking.start()
        taking.join(100)
        assert rest == list(range(1, 50))


def test_a_loop_may_be_closed_by_one_of_its_own_threads():
    """As the garbage collector may do, once no one takes items any more."""
    gone, closed = threading.Event(), threading.Event()

    def make(at):
        if at == 2:
            gone.wait(100)
            ahead.close()
            closed.set()
        return at

    ahead = Ahead(make, 0, 50, Tuner(2, threads=2))
    loop = iter(ahead)
    assert next(loop) == 0
    gone.set()
    assert closed.wait(100)
    with pytest.raises(RuntimeError, match="closed"):
        list(loop)
