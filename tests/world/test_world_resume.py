"""A run that goes on with more ranks, or fewer, sees the samples that it would have seen."""

import json
from pathlib import Path

import pytest
import torch
from world_ranks import run_file

JOB = Path(__file__).with_name("resume_job.py")
STEPS, STOP_AT = 33, 17  # three epochs of eleven; stopped in the middle of the second


def job(size, folder, *arguments):
    run_file(JOB, size, folder, folder, *arguments)


def seen(folder, name, size):
    """The samples of each step, put together from the ranks' parts in their order."""
    found = [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(size)]
    steps = {}
    for step, first in found[0]["seen"].items():
        parts = [one["seen"][step] for one in found]
        # A batch of fewer samples than ranks goes to all of them.
        is_copy = size > 1 and all(part == first for part in parts)
        steps[int(step)] = first if is_copy else [n for part in parts for n in part]
    return steps, found[0]["history"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    job(1, folder, "whole", "merged", STEPS + 1)
    return *seen(folder, "whole-begin", 1), torch.load(folder / "whole-begin-0.pt")


def goes_on(undisturbed, folder, before, after, pieces):
    steps, history, weights = undisturbed
    job(before, folder, "run", pieces, STOP_AT)
    job(after, folder, "run", pieces, STEPS + 1, "resume")
    first, _ = seen(folder, "run-begin", before)
    rest, figures = seen(folder, "run-rest", after)
    assert list(first) == list(range(1, STOP_AT + 1))
    assert list(rest) == list(range(STOP_AT + 1, STEPS + 1))  # 0 repeated, 0 skipped
    assert first | rest == steps
    found = torch.load(folder / "run-rest-0.pt")
    torch.testing.assert_close(found, weights, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(figures, history, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_fewer_ranks_go_on_from_pieces(tmp_path, undisturbed):
    goes_on(undisturbed, tmp_path, 2, 1, "per_rank")


@pytest.mark.slow
@pytest.mark.parametrize("pieces", ["merged", "per_rank"])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (1, 2), (3, 2), (2, 2)])
@pytest.mark.long
def test_another_world_goes_on(tmp_path, undisturbed, before, after, pieces):
    goes_on(undisturbed, tmp_path, before, after, pieces)
