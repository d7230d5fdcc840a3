"""A script that is observed from its first line to its last, for tests of what is seen in it."""

import json
import os

import forked
from flatout.observe import Observation


def observed(folder, source):
    """What is seen in a script; no look may have failed."""
    (folder / "script.py").write_text(source)
    start = ("-m", "flatout.observe.start", folder / "seen", "script.py")
    ran = forked.run(start, folder, {**os.environ, "OMP_NUM_THREADS": "1"}, forked.TORCH)
    assert ran.returncode == 0, ran.stderr
    seen = Observation.of(json.loads((folder / "seen" / "rank-0.json").read_text()))
    assert not [note for note in seen.notes if "a look failed" in note]
    return seen
