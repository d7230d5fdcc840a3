import threading
import time

import numpy as np
import pytest
from data_made_up import MadeUp, same

from flatout.data.own_pipes import OwnPipe, own_pipe
from flatout.data.pipeline import Pipeline
from flatout.errors import DataError


class Flow:
    """Made-up rows that come in pieces of drawn sizes."""

    def __init__(self, rows=50, sizes=0, pause=0.0, known=True):
        self._made = MadeUp(rows)
        self.schema = self._made.schema
        self.rows = rows if known else None
        self.count = rows
        self.digest = f"flow {rows}"
        self.opened = []
        self._draw = np.random.default_rng(sizes)
        self._pause = pause

    def blocks(self, epoch, buffers):
        self.opened.append(epoch)
        start = 0
        while start < self.count:
            stop = min(self.count, start + int(self._draw.integers(1, 12)))
            time.sleep(self._pause)
            yield self._made.take(np.arange(start, stop), buffers)
            start = stop

    def describe(self):
        return f"a flow of {self.rows} rows"

    def notes(self):
        return []


def numbers(pipeline, epoch=0, start=0):
    return [batch.indices.tolist() for batch in pipeline.batches(epoch, start)]


def test_batches_do_not_depend_on_how_rows_come():
    for sizes in range(3):
        made = Pipeline(Flow(sizes=sizes)).batch(8)
        assert all(map(same, made.batches(0), Pipeline(MadeUp(50)).batch(8).batches(0)))
    assert made.steps == 7
    assert made.counted
    assert not made.seekable
    assert Pipeline(Flow(known=False)).batch(8).steps is None


@pytest.mark.parametrize(("last", "sizes"), [("keep", [20, 20, 10]), ("drop", [20, 20])])
def test_repeated_batches_keep_the_borders_of_passes(last, sizes):
    made = Pipeline(Flow()).batch(20, last=last).repeat(2)
    assert [len(n) for n in numbers(made)] == sizes * 2
    assert made.steps == 2 * len(sizes)
    samples = Pipeline(Flow()).repeat(2).batch(20, last=last)
    assert [len(n) for n in numbers(samples)] == [20] * 5
    assert samples.steps == 5


def test_windows_are_shuffled_alike_however_rows_come():
    found = [
        numbers(Pipeline(Flow(sizes=sizes)).shuffle(seed=1, window=10).batch(8), 1)
        for sizes in range(3)
    ]
    assert found[0] == found[1] == found[2]
    everything = [n for batch in found[0] for n in batch]
    assert sorted(everything) == list(range(50))
    assert everything != list(range(50))
    assert found[0] != numbers(Pipeline(Flow()).shuffle(seed=1, window=10).batch(8), 0)


def test_a_window_behind_batch_shuffles_rows_as_one_before_it():
    behind = numbers(Pipeline(Flow()).batch(8).shuffle(seed=1, window=10), 1)
    assert behind == numbers(Pipeline(Flow()).shuffle(seed=1, window=10).batch(8), 1)
    assert behind != numbers(Pipeline(Flow()).batch(8), 1)


def test_functions_filters_and_ends():
    made = Pipeline(Flow()).filter(lambda x, y: y != 2).map(lambda x, y: (x["x"] * 2, y))
    batches = list(made.batch(8, last="drop").map(lambda x, y: (x + 1, y)).batches(0))
    assert [batch.size for batch in batches] == [8] * 5
    first = [n for n in range(50) if n % 5 != 2][:8]
    assert batches[0].inputs[:, 0].tolist() == [2 * n + 1 for n in first]
    assert made.batch(8).samples is None


def test_a_resume_reads_what_comes_before_and_drops_it():
    made = Pipeline(Flow()).shuffle(seed=1, window=10).batch(8)
    assert numbers(made, 0, 3) == numbers(made, 0)[3:]
    with pytest.raises(DataError, match="ended after 7 batches, but the run to resume had taken 9"):
        numbers(made, 0, 9)


def test_peeking_uses_nothing_up():
    flow = Flow()
    made = Pipeline(flow).batch(8)
    ahead = made.peek(2)
    assert len(ahead) == 2
    found = list(made.batches(0))
    assert all(map(same, found, Pipeline(MadeUp(50)).batch(8).batches(0)))
    assert all(map(same, ahead, found))
    assert flow.opened == [0]
    numbers(made, 1)
    assert flow.opened == [0, 1]


def test_leaving_the_loop_ends_the_thread():
    before = threading.active_count()
    for _ in Pipeline(Flow(rows=5000, pause=0.001)).batch(8).batches(0):
        break
    deadline = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_an_error_in_the_stream_comes_to_the_loop():
    class Broken(Flow):
        def blocks(self, epoch, buffers):
            yield from super().blocks(epoch, buffers)
            raise DataError("the writer died", where="pipe: byte 7")

    taken = []
    with pytest.raises(DataError, match="the writer died"):
        taken.extend(batch.size for batch in Pipeline(Broken()).batch(8).batches(0))
    assert taken == [8] * 6


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: p.shuffle(1).batch(4), "shuffled only among rows that are near"),
        (lambda p: p.batch(4).cache(), "cache wants rows that can be found by number"),
        (lambda p: p.batch(4).split(0.5)[0], "split wants rows"),
        (lambda p: p.batch(4).shard(0, 2, by="rows"), r"shard\(by='rows'\) wants rows"),
        (lambda p: p.batch(4).shard(0, 8), "each of which reads its own pipe"),
        (lambda p: p.batch(4, last="pad"), 'last="pad"'),
    ],
)
def test_what_a_stream_cannot_do_is_refused(make, words):
    with pytest.raises(DataError, match=words):
        list(make(Pipeline(Flow())).batches(0))


def test_a_rank_has_its_share_of_each_batch_in_any_number_of_rows():
    for known in (True, False):
        sizes = [
            [batch.size for batch in Pipeline(Flow(known=known)).batch(9).shard(rank, 2).batches(0)]
            for rank in range(2)
        ]
        assert sizes == [[4] * 12 + [2], [5] * 10]


def test_rows_are_spread_over_the_steps_that_ranks_have_agreed_on():
    made = Pipeline(Flow()).shuffle(seed=1, window=8).batch(16)
    own = own_pipe(made, 0, 2, lambda one: [one, {"places": [], "rows": 19}])
    assert own.steps == 5  # 69 rows in batches of 16
    assert [batch.size for batch in own.batches(0)] == [10] * 5
    assert own_pipe(made, 0, 2, None) is own
    twice = own_pipe(
        Pipeline(Flow()).batch(16).repeat(2), 0, 2, lambda one: [one, {"places": [], "rows": 19}]
    )
    assert twice.steps == 10
    assert [batch.indices[0].item() for batch in twice.batches(0)] == [0, 10, 20, 30, 40] * 2
    few = own_pipe(Pipeline(Flow()).batch(4), 0, 2, lambda one: [one, {"places": [], "rows": 9}])
    assert few.steps is None  # fewer rows than steps: all end when it runs dry


def test_a_pipe_that_was_left_in_the_middle_is_not_read_again():
    flow, said = Flow(), []
    flow.leave = lambda: said.append("left")
    made = own_pipe(Pipeline(flow).batch(8), 0, 2, lambda one: [one, {"places": [], "rows": None}])
    dry = iter([0, 0, 1])
    pipe = OwnPipe(made, lambda own: next(dry), lambda own: [own, [0, False]], said.append, 0.0)
    assert [batch.size for batch in pipe.batches(0)] == [4, 4]
    assert said[0] == "left"
    assert said[1].endswith("after 2 steps, when a rank's pipe had run dry; "
                            "left over: more than 8 samples of rank 0")  # fmt: skip
