"""What a live kernel needs of the observer: pauses between cells, and beginning again."""

from flatout.measure.timeline import LANES
from flatout.observe.lanes import BACKWARD, HOST, OPTIMIZER
from flatout.observe.observation import Site
from flatout.observe.sites import here, name_files, read
from flatout.observe.watch import Watch

MINUTE, HOUR = 60.0, 3600.0


def let_pass(lanes, seconds):
    """Its time is read on: far more than what runs here takes on any machine."""
    lanes.last -= int(seconds * 1e9)
    lanes.began -= int(seconds * 1e9)


def _step(watch):
    watch.lanes.begin_batch()
    watch.lanes.switch(BACKWARD)
    watch.lanes.backwards += 1
    watch.lanes.switch(OPTIMIZER)
    _close(watch)


def _close(watch):
    """As at the end of an optimizer's step."""
    if watch.lanes.lap(False):
        watch.attend()


def test_what_is_between_two_cells_counts_nowhere():
    lanes = (watch := Watch()).lanes
    _step(watch)
    lanes.switch(HOST)
    lanes.pause()
    assert lanes.thread == 0
    let_pass(lanes, HOUR)
    lanes.resume()
    _step(watch)
    assert lanes.steps == 2
    assert sum(lanes.step_ms()) < MINUTE * 1e3


def test_a_step_may_take_several_cells_but_not_an_error():
    lanes = (watch := Watch()).lanes
    _step(watch)
    for keep in (True, False):
        lanes.begin_batch()
        let_pass(lanes, MINUTE)
        lanes.switch(BACKWARD)
        lanes.backwards += 1
        lanes.pause(keep=keep)
        let_pass(lanes, HOUR)
        lanes.resume()
        lanes.switch(OPTIMIZER)
        _close(watch)
    _, kept, dropped = lanes.step_ms()
    assert MINUTE * 1e3 <= kept < HOUR * 1e3
    assert dropped < MINUTE * 1e3


def test_all_that_was_seen_is_forgotten():
    watch = Watch()
    again = []
    watch.on_renewal.append(lambda: again.append(True))
    looked = []
    watch.at(2, lambda: looked.append(watch.lanes.steps))
    _step(watch)
    _step(watch)
    watch.calls.note("item", 5, depth=1)
    watch.saved.append({})
    watch.notes["x"] = None
    lanes, calls = watch.lanes, watch.calls
    watch.renew()
    assert (watch.lanes, watch.calls) == (lanes, calls)  # hooks hold them
    assert (lanes.steps, calls.all(), watch.saved, watch.notes) == (0, [], [], {})
    assert again == [True]
    _step(watch)
    watch.calls.note("item", 5, depth=1)
    assert lanes.lanes_ms().keys() == set(LANES)
    assert [call.kind for call in calls.all()] == ["item"]
    assert looked == [2]
    _step(watch)
    assert looked == [2, 2]  # what is looked at in a step is looked at in that one again


def test_a_cell_is_named_as_its_user_knows_it():
    assert str(Site("/a/train.py", 12)) == "/a/train.py:12"
    assert str(Site("cell 3", 12)) == "cell 3, line 12"
    site = here()
    name_files(lambda file: "cell 7" if file == __file__ else file)
    try:
        named = read(site)
    finally:
        name_files(str)
    assert (named.file, named.line) == ("cell 7", site.line)
    assert named.code == "site = here()"
    assert read(site).file == __file__
