import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flatout
from flatout.devices import allocator

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or "LD_PRELOAD" in os.environ,
    reason="another C library or allocator",
)
# Debian's is linked for a fixed address, which others are not.
SYSTEMS = "/usr/bin/python3"
RECENT = [SYSTEMS, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
HAS_SYSTEMS = os.path.exists(SYSTEMS) and subprocess.run(RECENT, check=False).returncode == 0
PYTHONS = [sys.executable, *([SYSTEMS] if HAS_SYSTEMS else [])]
each_python = pytest.mark.parametrize("python", PYTHONS)

# Four blocks of 20 MB at once, as a step's activations are: more than glibc keeps by itself.
FAULTS = """
import json, resource
from flatout.devices import allocator

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        blocks = [b"x" * 20_000_000 for _ in range(4)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
"""


def run(code: str, python: str = sys.executable, **environment: str) -> list:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    clean["PYTHONPATH"] = os.fspath(Path(flatout.__file__).parents[1])
    done = subprocess.run(
        [python, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=clean | environment,
    )
    return json.loads(done.stdout)


@each_python
def test_glibcs_allocator_is_found_in_whatever_way_python_is_linked(python) -> None:
    code = """
import json
from flatout.devices import allocator as a
print(json.dumps([a.supported(), a.keep_memory(), a.current(), sorted(a.environment())]))
"""
    *said, names = run(code, python)
    assert said == [True, True, "keep"]
    assert names == sorted(allocator.environment())


def test_kept_memory_is_not_faulted_in_again_and_the_default_is() -> None:
    plain, states, kept, default = run(
        FAULTS
        + """
plain, states = faults(), [allocator.current()]
assert allocator.keep_memory()
states.append(allocator.current())
faults()
kept = faults()
assert allocator.default_memory()
states.append(allocator.current())
print(json.dumps([plain, states, kept, faults()]))
"""
    )
    assert states == ["default", "keep", "default"]
    assert plain > 50_000
    assert kept < plain / 10
    assert default > 10 * kept


def test_the_environment_does_the_same_from_the_start() -> None:
    state, kept = run(
        FAULTS + "print(json.dumps([allocator.current(), faults()]))", **allocator.environment()
    )
    assert state == "keep"
    assert kept < 5_000


def test_the_default_gives_free_memory_back_at_once() -> None:
    kept, given_back = run(
        FAULTS
        + """
from flatout.measure.meters import resident_bytes
allocator.keep_memory()
faults()
kept = resident_bytes()
allocator.default_memory()
print(json.dumps([kept, resident_bytes()]))
"""
    )
    assert kept - given_back > 50_000_000


def test_blocks_of_other_threads_are_served_too() -> None:
    (equal,) = run(
        """
import json, threading
from flatout.devices import allocator
allocator.keep_memory()
results = []
def work():
    blocks = [bytes([n]) * 90_000_000 for n in range(2)]
    results.append(all(block[-1] == n for n, block in enumerate(blocks)))
threads = [threading.Thread(target=work) for _ in range(3)]
[t.start() for t in threads]; [t.join() for t in threads]
print(json.dumps([results == [True] * 3]))
"""
    )
    assert equal


def test_other_variables_than_ours_are_no_keep() -> None:
    code = (
        "import json; from flatout.devices import allocator as a; print(json.dumps([a.current()]))"
    )
    assert run(code, MALLOC_TOP_PAD_="1000") == ["default"]


OTHER_ALLOCATOR = """
#include <stddef.h>
void *__libc_malloc(size_t size);
void *malloc(size_t size) { return __libc_malloc(size); }
size_t malloc_usable_size(void *block) { return 0; }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler to build an allocator with")
@each_python
def test_an_allocator_that_is_preloaded_is_left_alone(tmp_path, python) -> None:
    (tmp_path / "other.c").write_text(OTHER_ALLOCATOR)
    library = tmp_path / "libother.so"
    build = ["cc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "other.c")]
    subprocess.run(build, check=True)
    code = """
import json
from flatout.devices import allocator as a
done = [a.supported(), a.keep_memory(), a.default_memory(), a.environment(), a.current()]
print(json.dumps(done))
"""
    assert run(code, python, LD_PRELOAD=str(library)) == [False, False, False, {}, "default"]
