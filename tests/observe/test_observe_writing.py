"""The thread that writes what was seen, and looks at the job before that."""

import json
import threading
from types import SimpleNamespace

from flatout.observe import writing
from flatout.observe.observation import Observation
from flatout.observe.writing import Writer
from flatout.world.place import Place

LOOKS = 8


class Clock(threading.Event):
    """Time passes only where the writer waits, which ends it after some seconds."""

    now = worked = 0.0

    def monotonic(self):
        return self.now

    def thread_time(self):
        self.worked += 1e-6
        return self.worked

    def wait(self, seconds):
        self.now += seconds
        return self.now > 3.5


def test_the_job_is_looked_at_in_its_first_seconds_and_then_let_alone(tmp_path, monkeypatch):
    looks, written = [], []

    def look():
        looks.append(clock.now)
        return len(looks) > 2  # as of a job that steps from then on

    def seen():
        written.append(clock.now)
        return Observation(["train.py"], steps=1)

    clock = Clock()
    threads = SimpleNamespace(**{**vars(threading), "Event": lambda: clock})
    monkeypatch.setattr(writing, "threading", threads)
    monkeypatch.setattr(writing, "time", clock)
    writer = Writer(tmp_path / "rank-0.json", look, seen, Place())
    writer._thread.join()
    writer.stop()
    assert looks == [0.25 * (look + 1) for look in range(LOOKS + 2)]
    assert written[:3] == [1.0, 2.0, 3.0]
    assert json.loads((tmp_path / "rank-0.json").read_text())["steps"] == 1
    # By its clock each took a microsecond: the looks from the third one on, and the first writing.
    assert round(writer.first_seconds * 1e6) == LOOKS + 1
    assert round(writer.cpu_seconds * 1e6) == len(written) - 1
