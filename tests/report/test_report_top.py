"""What is said of a process that is seen from outside."""

from flatout.measure.pulse import Pulse
from flatout.report.top import pulse_lines

STARVED = Pulse(60.0, 38.2, 50.0, workers=2, on_gpu=False, works=True)


def _said(**changes):
    return [line.plain for line in pulse_lines(Pulse(**{**vars(STARVED), **changes}))]


def test_a_starved_process_is_marked_with_the_reason():
    (line,) = _said()
    assert line.startswith("STARVED: it stood still 38 of 60 s while 2 workers of it computed")
    assert "while 1 worker of it computed" in _said(workers=1)[0]
    assert "it stood still 38 of 60 s while it read a disk" in _said(workers=0)[0]
    assert "its GPU stood still 38 of 60 s while it computed" in _said(workers=0, on_gpu=True)[0]


def test_what_cannot_be_told_from_outside_is_said():
    (line,) = _said(starved_s=2.0)
    assert "STARVED" not in line
    assert line.endswith("which cannot be told from outside")
    assert _said(starved_s=2.0, still_s=10.0) == []
    assert _said(works=False) == []
    assert _said(watched_s=3.0, starved_s=3.0, still_s=3.0) == []
