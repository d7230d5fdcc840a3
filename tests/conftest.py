"""What holds for all tests: no measured answer from elsewhere, no request from the environment."""

import itertools
import math
import os
import random
import re
import signal
import sys
import time
import warnings
from collections import defaultdict

import pytest
from hypothesis import HealthCheck, settings

from process_state import differences, seed_all, state

# How long examples take to make is a matter of how busy the machine is.
settings.register_profile(
    "any machine", suppress_health_check=[HealthCheck.too_slow], deadline=None
)
settings.load_profile("any machine")

# Keras reads it when it is imported.
os.environ.setdefault("KERAS_BACKEND", "torch")

# A shell that runs the tests in its background has them ignore Ctrl-C, and so all that they start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


_numbers = itertools.count()
_BEGAN = time.monotonic()
_STATE, _THREADS = pytest.StashKey[dict](), pytest.StashKey[int | None]()
# A test with this number of sets of parameters, or more, is in the default part with a quarter of
# them. The other sets are slow tests.
_MANY_SETS, _QUICK_SHARE = 4, 0.25
# Folders whose tests fail if they leave the process changed; other tests get a warning.
_LEAVE_NOTHING = {"data", "devices", "measure", "models", "optim", "recipe", "save", "train"}
_leaks: dict[str, list[str]] = {}


def pytest_addoption(parser):
    parser.addoption("--order", default="", help="seed of a random order of files and their tests")
    said = "skip the tests that have not begun after this number of minutes"
    parser.addoption("--minutes", type=float, default=float("inf"), help=said)


def pytest_report_header(config):
    seed = config.getoption("order")
    return f"order of the tests: --order {seed}" if seed else "order of the tests: as written"


@pytest.hookimpl(tryfirst=True, wrapper=True)
def pytest_collection_modifyitems(config, items):
    if not any("[" in name for name in config.args):  # tests that are named run
        _mark_many_sets_as_slow(items)
    result = yield
    seed = config.getoption("order")
    if seed:
        # Drawn from the names, so that each worker process finds the same order.
        items.sort(key=lambda item: (_place(seed, item.path.name), _place(seed, item.nodeid)))
    return result


def _mark_many_sets_as_slow(items):
    families = defaultdict(list)
    for item in items:
        families[item.nodeid.partition("[")[0]].append(item)
    for family in families.values():
        if len(family) >= _MANY_SETS and "combinations" not in family[0].path.parts:
            family.sort(key=lambda item: _place("quick", item.nodeid))
            for item in family[math.ceil(len(family) * _QUICK_SHARE) :]:
                item.add_marker(pytest.mark.slow)


def _place(seed, name):
    return random.Random(f"{seed} {name}").random()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if time.monotonic() - _BEGAN > 60 * item.config.getoption("minutes"):
        pytest.skip("the time limit of --minutes is reached")
    # Tests that do not use torch do not import it here.
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() > 2:
        torch.set_num_threads(2)
    seed_all()
    item.stash[_THREADS] = None if torch is None else torch.get_num_threads()
    item.stash[_STATE] = state()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item):
    result = yield
    if _STATE not in item.stash:  # the test was skipped
        return result
    # The threads that a Recipe names stay after its fit: they are a setting of the process.
    threads = item.stash[_THREADS]
    if threads is not None and sys.modules["torch"].get_num_threads() != threads:
        sys.modules["torch"].set_num_threads(threads)
    # A rerun begins with the changes of the first run.
    leaks = _leaks.setdefault(item.nodeid, differences(item.stash[_STATE], state()))
    if leaks and item.path.parent.name in _LEAVE_NOTHING:
        pytest.fail("the test leaves the process changed: " + "; ".join(leaks), pytrace=False)
    for leak in leaks:
        warnings.warn(f"{item.nodeid} leaves the process changed: {leak}", stacklevel=1)
    return result


@pytest.fixture
def tmp_path(request, tmp_path_factory):
    """As pytest's own, which reads the names of all tests' folders to find the next number."""
    name = re.sub(r"\W", "_", request.node.name)[:25]
    return tmp_path_factory.mktemp(f"{name}-{next(_numbers)}", numbered=False)


@pytest.fixture(autouse=True)
def _on_its_own(monkeypatch, tmp_path_factory):
    # Made only where something is measured.
    cache = tmp_path_factory.getbasetemp() / f"cache-{next(_numbers)}"
    monkeypatch.setenv("FLATOUT_CACHE", str(cache))
    for name in (
        "FLATOUT_RECIPE",
        "FLATOUT_SET",
        "WORLD_SIZE",
        "OMPI_COMM_WORLD_SIZE",
        "PMI_SIZE",
        "RANK",
    ):
        monkeypatch.delenv(name, raising=False)
    # What another test compiled would have hooks keep what they have put into torch.
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None:
        dynamo.counters.clear()
    before = set(os.environ)
    yield
    for name in [n for n in os.environ if n.startswith("FLATOUT_") and n not in before]:
        del os.environ[name]


class FakeClock:
    """In place of perf_counter_ns: a microsecond passes with each look, and what a test sleeps."""

    def __init__(self):
        self.now = time.perf_counter_ns()

    def __call__(self):
        self.now += 1000
        return self.now

    def perf_counter(self):
        return self() / 1e9

    def sleep(self, seconds):
        self.now += round(seconds * 1e9)


@pytest.fixture
def fake_clock(monkeypatch):
    """The clock of all modules of Flatout, those included that are imported meanwhile."""
    clock, real = FakeClock(), time.perf_counter_ns
    monkeypatch.setattr(time, "perf_counter_ns", clock)
    for module, name in _names_of(real):
        monkeypatch.setattr(module, name, clock)
    yield clock
    for module, name in _names_of(clock):
        setattr(module, name, real)


def _names_of(function):
    return [
        (module, name)
        for key, module in list(sys.modules.items())
        if key.startswith("flatout")
        for name, value in list(vars(module).items())
        if value is function
    ]


@pytest.fixture
def one_thread():
    """For many small steps: on a busy machine two threads wait for each other in each operator."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
