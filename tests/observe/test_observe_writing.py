"""The thread that writes what was seen, and looks at the job before that."""

import json
import time

from flatout.observe.observation import Observation
from flatout.observe.writing import Writer
from flatout.world.place import Place

LOOKS = 8


def _until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_job_is_looked_at_in_its_first_seconds_and_then_let_alone(tmp_path):
    looks, written = [], []

    def look():
        looks.append(time.monotonic())
        return len(looks) > 2  # as of a job that steps from then on

    def seen():
        written.append(time.monotonic())
        return Observation(["train.py"], steps=1)

    began = time.monotonic()
    writer = Writer(tmp_path / "rank-0.json", look, seen, Place())
    try:
        _until(lambda: len(written) > 2)
    finally:
        writer.stop()
    assert len([one for one in looks if one < written[0]]) >= 1
    assert len(looks) == LOOKS + 2
    assert written[0] - began >= 1
    assert json.loads((tmp_path / "rank-0.json").read_text())["steps"] == 1
    assert writer.cpu_seconds > 0
