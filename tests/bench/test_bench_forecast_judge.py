"""The published judge: what is read, what is known to a prediction, and what comes of it."""

from dataclasses import replace

import numpy as np
import pytest

import forecast_accuracy
import forecast_judge as judging
from flatout.forecast.forecast import WIDENED, Spreading
from forecast_judge import Case, conformal_factor, factor_without, judge, keys, score, widening
from forecast_series import WORKER, series, sources, with_input


def one_named(name):
    (found,) = [one for one in series() if one.name == name]
    return found


def case(name, off, *, is_crossing=False, growth=2.0):
    """A prediction that is so many half widths off."""
    one = one_named(name)
    truth = one.rates[-1]
    middle = truth / 1.1**off
    found = Spreading(middle / 1.1, middle, middle * 1.1)
    return Case(one, 2, len(one.rates) - 1, growth, is_crossing, found)


def test_every_series_is_whole():
    names = [(source.name, one.name) for source in sources() for one in source.series]
    assert len(set(names)) == len(names) == 65
    for one in series():
        assert len(one.shapes) == len(one.rates) >= 2
        ranks = [shape.ranks for shape in one.shapes]
        assert ranks == sorted(set(ranks))
        assert all(shape.servers >= 1 for shape in one.shapes)
        # None is far from linear, either way, so that no figure was misread by ten.
        assert all(
            0.05 < rate / one.rates[0] * ranks[0] / count < 1.3
            for rate, count in zip(one.rates, ranks, strict=True)
        )
    assert {source.series[0].is_judged for source in sources()} == {True, False}


def test_a_series_has_no_say_in_its_own_interval():
    one = case("Piz Daint", 50.0)
    others = [case("p2.xlarge", 0.1 * n) for n in range(1, 11)]
    far = [case("p2.8xlarge", 9.0, growth=8.0), case("p2.8xlarge", 9.0, is_crossing=True)]
    assert factor_without([one, *others, *far], one) == pytest.approx(1.0)
    assert factor_without([one, *others], others[0]) == pytest.approx(50.0)
    assert widening([*others, *far]) == {"measured": pytest.approx(1.0), "given": 9.0}


def test_only_rows_before_are_known():
    """Later rows can say anything, and change no prediction from rows before."""
    one = one_named("p2.xlarge")
    other = replace(one, rates=(*one.rates[:4], *(9 * rate for rate in one.rates[4:])))
    early, changed = (
        [case.predicted for case in judge([each]) if case.rows <= 4] for each in (one, other)
    )
    assert early == changed


@pytest.mark.parametrize(
    ("name", "ranks", "error"),
    [
        ("p2.xlarge", [64, 128], 0.06),
        ("Piz Daint", [128], 0.25),
        ("ResNet-50 fp32, PyTorch, 8 workers", [8], 0.45),
    ],
)
def test_a_published_collapse_is_predicted(name, ranks, error):
    cases = judge([one_named(name)])
    collapses = judging.saturating(cases)
    assert [case.series.shapes[case.place].ranks for case in collapses] == ranks
    assert all(map(judging.is_seen, collapses))
    assert all(abs(case.error) < error for case in collapses)


def test_input_is_at_least_what_was_read_and_at_most_what_workers_decode():
    one = one_named("ResNet-50 fp32, PyTorch, 8 workers")
    assert with_input(one, 1000.0).input == (1000.0, 8 * WORKER[1])
    assert with_input(one, 100.0).input == (8 * WORKER[0], 1000.0)
    assert with_input(one, 5000.0).input == pytest.approx((5000.0, 5050.0))
    assert with_input(replace(one, workers=0), 1000.0).input == (1000.0, 10_000.0)
    # Of 48 workers on 24 cores no more than 24 decode at once.
    assert one_named("ResNet-50 fp32, PyTorch").workers == 24


def test_regret_is_what_a_choice_costs_or_is_late():
    one = one_named("ResNet-50, DGX-1")  # 219, 422, 852 and 1734 images/s on 1, 2, 4 and 8
    exact = [replace_found(case("ResNet-50, DGX-1", 0.0), place, 1.0) for place in (2, 3)]
    assert judging.decision_regrets(exact) == [0.0] * len(judging.DEADLINES)
    # Says of 4 GPUs that they are as fast as 8: taken for the last two deadlines, and late.
    wrong = [replace_found(exact[0], 2, 2.0), exact[1]]
    found = judging.decision_regrets(wrong)
    assert found[:3] == pytest.approx([one.rates[3] / 8 / (one.rates[2] / 4) - 1] * 3, abs=1e-6)
    assert found[3:] == [pytest.approx(422 / share / 852 - 1) for share in (0.4, 0.3)]


def replace_found(one, place, factor):
    """A case of two calibrated rows that says so many times the published rate."""
    rate = one.series.rates[place] * factor
    return replace(one, place=place, predicted=Spreading(rate, rate, rate))


def test_intervals_are_widened_as_errors_ask():
    found = Spreading(90.0, 100.0, 110.0)
    assert score(found, 100.0) == 0
    assert score(found, 110.0) == pytest.approx(1)
    assert score(found, 90.0**2 / 100) == pytest.approx(2)
    # ceil((10 + 1) 0.9) of ten scores, and the largest where there are too few.
    assert conformal_factor([0.1 * n for n in range(1, 11)], 0.9) == pytest.approx(1.0)
    assert conformal_factor([3.0, 1.0, 2.0], 0.9) == 3.0
    # Where errors are as the model says nine of ten, the interval stays as it is.
    rng = np.random.default_rng(0)
    normal = Spreading.of(np.exp(rng.normal(0, 0.1, 20_000)), 0.9)
    scores = [score(normal, float(truth)) for truth in np.exp(rng.normal(0, 0.1, 2_000))]
    assert conformal_factor(scores, 0.9) == pytest.approx(1.0, abs=0.06)


@pytest.mark.slow
def test_the_pages_of_all_errors_are_up_to_date(monkeypatch):
    """And the widening that forecasts use is what these errors ask for."""
    cases = judge()
    monkeypatch.setattr(forecast_accuracy, "judge", lambda: cases)
    for path, text in forecast_accuracy.pages().items():
        assert path.read_text() == text
    assert widening(cases) == WIDENED
    found = keys(cases)
    assert found["published_error_2x"] <= 0.06
    assert found["published_error_4x"] <= 0.10
    assert found["decision_regret"] <= 0.05
    assert found["collapse_predicted"] == 1.0
    assert found["collapse_mistaken"] <= 0.1
    assert 0.85 <= found["published_covered"] <= 0.97
    assert 0.85 <= found["published_covered_given"] <= 0.97
