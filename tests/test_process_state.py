"""Tests that leave the process changed fail by name, and a seed sets the order of tests."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from process_state import differences, seed_all, state

LEAKS = {
    "$LEFT_BEHIND": "os.environ['LEFT_BEHIND'] = '1'",
    "the working folder": "os.chdir('/')",
    "the file mode mask": "os.umask(0o7)",
    "the handler of SIGHUP": "signal.signal(signal.SIGHUP, lambda number, frame: None)",
    "garbage collection": "gc.disable()",
    "torch's default type": "torch.set_default_dtype(torch.float64)",
    "torch's grad mode": "torch.set_grad_enabled(False)",
    "torch's autocast": "torch.set_autocast_enabled('cpu', True)",
    "torch's autocast cache": "torch.autocast('cpu', enabled=False).__enter__()",
    "torch's deterministic algorithms": "torch.use_deterministic_algorithms(True)",
    "torch's precision of matmul": "torch.set_float32_matmul_precision('medium')",
    "torch's modes": "torch.overrides.BaseTorchFunctionMode().__enter__()",
    "torch's _global_forward_hooks": "register(lambda *given: None)",
    "Module.__call__": "torch.nn.Module.__call__ = lambda *given: None",
}


@pytest.mark.parametrize("name", LEAKS)
def test_what_a_test_leaves_behind_is_named(name):
    """Change the state in a fork of this process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        import gc
        import signal

        from torch.nn.modules.module import register_module_forward_hook as register

        before = state()
        exec(LEAKS[name], {**globals(), "gc": gc, "signal": signal, "register": register})
        os.write(write, "\n".join(differences(before, state())).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as found:
        assert found.read().startswith(f"{name} was ")
    assert os.waitpid(child, 0)[1] == 0
    assert differences(state(), state()) == []


def test_each_test_begins_with_the_same_random_numbers():
    drawn = [(seed_all(), torch.rand(3).tolist())[1] for _ in range(2)]
    assert drawn[0] == drawn[1]


TESTS = """
import os
def test_one(): pass
def test_two(): os.environ["LEFT_BEHIND"] = "1"
def test_three(): pass
"""


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    """A function that runs three tests in two files with this conftest."""
    folder = tmp_path_factory.mktemp("suite") / "optim"
    folder.mkdir()
    for name in ("conftest.py", "process_state.py"):
        (folder / name).write_bytes((Path(__file__).parent / name).read_bytes())
    for name in ("test_a.py", "test_b.py"):
        (folder / name).write_text(TESTS)

    def run(*options):
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:randomly", *options]
        command += ["--rootdir", folder, "-c", os.devnull, "-p", "no:cacheprovider"]
        env = os.environ | {"PYTEST_ADDOPTS": ""}  # reruns would fail what leaks, and pass it
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=250
        )
        return done.stdout

    return run


def order_of(printed):
    lines = [line.split() for line in printed.splitlines() if "::test_" in line]
    return [words[0] for words in lines if words[1:2] == ["PASSED"]]


@pytest.mark.slow
def test_a_seed_gives_an_order_in_which_files_stay_whole(tried):
    written, *shuffled = [tried("--order", seed) for seed in ("", "1", "1", "2", "3", "4")]
    assert order_of(written) == sorted(order_of(written), key=lambda name: name[:9])
    assert "order of the tests: --order 1" in shuffled[0]
    orders = [order_of(printed) for printed in shuffled]
    assert orders[0] == orders[1]
    assert len({tuple(order) for order in orders}) > 2
    for order in orders:
        assert sorted(order) == sorted(order_of(written))
        assert len(list(itertools.groupby(order, key=lambda name: name[:9]))) == 2


@pytest.mark.slow
def test_no_test_begins_after_the_time_limit(tried):
    printed = tried("--minutes", "0")
    assert "6 skipped" in printed
    assert "error" not in printed


@pytest.mark.slow
def test_a_test_that_leaks_fails_and_so_does_its_rerun(tried):
    printed = tried("--reruns", "1", "test_a.py")
    assert "ERROR at teardown of test_two" in printed
    assert "$LEFT_BEHIND was 'not there', is '1'" in printed
    assert "1 error" in printed
