import subprocess
import sys

import pytest

from flatout import measure


def test_every_public_name_is_there():
    for name in measure.__all__:
        assert getattr(measure, name) is not None
    assert set(measure.__all__) <= set(dir(measure))
    assert callable(measure.fingerprint)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="stopwatch"):
        _ = measure.stopwatch


def test_the_limits_are_read_without_numpy_and_nothing_imports_torch():
    script = (
        "import sys\n"
        "from flatout.measure import usable_cpus, available_bytes\n"
        "assert usable_cpus() >= 1 and available_bytes() > 0\n"
        "assert 'numpy' not in sys.modules\n"
        "from flatout.measure import Timeline, run_trial\n"
        "assert 'torch' not in sys.modules and 'pydantic' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
