"""All pairs of features: each case learns the same as a plain loop, or is refused by name."""

from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("keras")
from combinations.axes import Case, cases, listed
from combinations.run import found

CASES = listed()
# Every tenth case runs each time: all of them would take too long.
QUICK = {str(case) for case in CASES[::10]}


def parameter(case):
    marks = [] if str(case) in QUICK else [pytest.mark.slow]
    return pytest.param(case, id=str(case), marks=marks)


@pytest.fixture(scope="module")
def ran(request, tmp_path_factory):
    """Results of the selected cases; two cases run at the same time."""
    wanted = [
        item.callspec.params["case"]
        for item in request.session.items
        if item.originalname == test_a_case_is_right.__name__
    ]
    with ThreadPoolExecutor(2) as pool:
        yield {case: pool.submit(found, case, tmp_path_factory.mktemp("case")) for case in wanted}


@pytest.mark.timeout(1800)  # the first test waits for the forked processes
@pytest.mark.parametrize("case", [parameter(case) for case in CASES])
def test_a_case_is_right(ran, case):
    assert not ran[case].result()


@pytest.mark.slow
def test_the_list_has_all_pairs():
    assert listed() == list(cases())


def test_a_case_is_found_by_its_name():
    assert [Case.parse(str(case)) for case in CASES] == CASES
