"""What is tried, how long, and what losses say: as plain data, without a trial."""

import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.doctor.finding import Edit, Finding
from flatout.doctor.judge import Verdict
from flatout.doctor.proposals import with_edits
from flatout.doctor.proving.bench import Bench, why_left
from flatout.doctor.proving.cure import NOTHING, Cure, cures_of, together
from flatout.doctor.proving.losses import compare
from flatout.doctor.proving.obstacles import why_no_trial
from flatout.doctor.proving.whole_run import (
    between_s,
    epoch_steps,
    evaluated_every,
    run_steps,
    setup_s,
    whole_s,
)
from flatout.doctor.trials.arm import Block, Showed
from flatout.doctor.trials.pair import Against, Pair
from flatout.doctor.trials.process import Ended
from flatout.doctor.trials.schedule import Lives, Schedule
from flatout.doctor.trials.scratch import scratch
from flatout.observe import Loader, Model, Observation, Optimizer
from flatout.recipe import SET_VARIABLE, Parity

RNG = np.random.default_rng(0)
CURVE = (2.0 * np.exp(-np.arange(200) / 60) + 0.1 * RNG.random(200)).tolist()


def seen(**others) -> Observation:
    loader = Loader("torch.DataLoader", length=320, batch_size=32, num_workers=0, epochs=2)
    loader.batches = 15
    facts = {"loaders": [loader], "optimizers": [Optimizer("SGD")], "usable_cpus": 4, "threads": 4}
    return Observation(**{"command": ["t.py"], "steps": 15, "ended": "stopped", **facts, **others})


def verdict(*findings: Finding, **others) -> Verdict:
    return Verdict([seen(**others)], {}, None, list(findings), [], [])


def slow(name: str, **others) -> Finding:
    return Finding("slow", "", "", name=name, **others)


# -- which cures ---------------------------------------------------------------------------------


def test_cures_come_in_the_order_of_their_findings_compiling_last():
    edit = Edit("t.py", 3, "a", "b")
    found = cures_of(
        verdict(
            slow("compile", recipe={"compute.compile": "on"}),
            slow("workers_zero", recipe={"input.workers": 3}, parity="redrawn"),
            slow("fp32_slow", recipe={"compute.precision": "bf16"}, parity="rounding"),
            slow("log_each_step", edits=(edit,)),
            slow("starvation"),
            Finding("danger", "", "", name="eval_missing", edits=(edit,)),
        ),
        Parity.TOLERANT,
    )
    assert [cure.names for cure in found] == [
        ("fp32_slow",),
        ("log_each_step",),
        ("workers_zero",),
        ("compile",),
    ]
    assert [cure.parity for cure in found] == [
        Parity.TOLERANT,
        Parity.EXACT,
        Parity.REDRAWN,
        Parity.TOLERANT,
    ]
    assert found[1].own_edits == (edit,)


def test_numbers_of_workers_and_threads_are_tried_in_several_values():
    found = cures_of(
        verdict(
            slow("workers_zero", recipe={"input.workers": 3}),
            slow("threads_too_many", recipe={"process.threads": 2}),
        ),
        Parity.REDRAWN,
    )
    workers, threads = found
    # Four threads of torch's would hold on to the CPUs that the workers need.
    assert workers.words == "workers 0 to 3, threads 4 to 1"
    assert workers.recipe == {"input.workers": 3, "process.threads": 1}
    assert [dict(other.recipe) for other in workers.others] == [
        {"input.workers": 3},
        {"input.workers": 1, "process.threads": 3},
        {"input.workers": 2, "process.threads": 2},
    ]
    assert [other.recipe["process.threads"] for other in threads.others] == [1]  # 4 is as written


def test_the_edits_of_other_values_say_those_values(tmp_path):
    script = tmp_path / "t.py"
    script.write_text("import torch\nloader = DataLoader(data)\nfor x in loader:\n    pass\n")
    finding = slow("workers_zero", recipe={"input.workers": 3}, where=f"{script}:3")
    wanted = with_edits(finding, [seen()])
    found = cures_of(verdict(wanted, threads=2), Parity.REDRAWN)[0]
    tried = {one.words: "".join(edit.after for edit in one.edits) for one in (found, *found.others)}
    stays = "persistent_workers=True)"
    assert tried == {
        "workers 0 to 3, threads 2 to 1": "torch.set_num_threads(1)\n"
        f"loader = DataLoader(data, num_workers=3, {stays}",
        "workers 0 to 3": f"loader = DataLoader(data, num_workers=3, {stays}",
        "workers 0 to 1": f"loader = DataLoader(data, num_workers=1, {stays}",
        "workers 0 to 2": f"loader = DataLoader(data, num_workers=2, {stays}",
    }


def test_what_a_cure_may_do_where_the_input_is_the_same():
    def same_input(recipe, layers=(), **facts):
        model = Model("Net", layers=dict.fromkeys(layers, 1))
        cure = cures_of(
            verdict(slow("x", recipe=recipe, parity="redrawn"), models=[model], **facts),
            Parity.REDRAWN,
        )[0]
        assert cure.parity is Parity.REDRAWN
        return cure.same_input, together([cure, cure]).same_input

    assert same_input({"script.cache": "memory"}) == (Parity.EXACT, Parity.EXACT)
    assert same_input({"input.workers": 2}, threads=1) == (Parity.EXACT, Parity.EXACT)
    assert same_input({"input.workers": 2}, threads=4) == (Parity.TOLERANT, Parity.TOLERANT)
    # Dropout draws again in another memory format, whatever comes in.
    drawn = same_input({"compute.memory_format": "channels_last"}, ["Dropout"])
    assert drawn == (Parity.REDRAWN, Parity.REDRAWN)


@pytest.mark.parametrize("facts", [{"threads": 1}, {"device": "cuda:0"}])
def test_threads_stay_where_workers_find_a_cpu_anyway(facts):
    found = cures_of(
        verdict(slow("workers_zero", recipe={"input.workers": 3}), **facts), Parity.REDRAWN
    )
    tried = [dict(one.recipe) for one in (found[0], *found[0].others)]
    assert tried == [{"input.workers": workers} for workers in (3, 1, 2, 4)]


def test_two_findings_with_one_cure_are_one_cure():
    found = cures_of(
        verdict(
            slow("workers_zero", recipe={"input.workers": 3}),
            slow("small_files", recipe={"input.workers": 8}),
        ),
        Parity.REDRAWN,
    )
    assert [cure.names for cure in found] == [("workers_zero", "small_files")]
    assert 8 in [other.recipe["input.workers"] for other in found[0].others]


def test_the_farther_of_rule_and_finding_is_the_parity():
    dropout = {"recipe": {"compute.fused_optimizer": "on"}, "parity": "changes learning"}
    found = cures_of(verdict(slow("one", **dropout)), Parity.TOLERANT)
    assert found[0].parity is Parity.LEARNING


def test_cures_together_have_all_changes_and_the_farthest_parity():
    edit = Edit("t.py", 3, "a", "b")
    cures = cures_of(
        verdict(
            slow("fp32_slow", recipe={"compute.precision": "bf16"}), slow("log", edits=(edit,))
        ),
        Parity.TOLERANT,
    )
    both = together(cures)
    assert both.names == ("fp32_slow", "log")
    assert both.recipe == {"compute.precision": "bf16"}
    assert both.own_edits == (edit,)
    assert both.parity is Parity.TOLERANT
    assert together([cures[1]]) == cures[1]


def test_a_cure_that_found_no_hold_is_told_with_why():
    cure = cures_of(verdict(slow("w", recipe={"input.workers": 3})), Parity.REDRAWN)[0]
    assert why_left(cure, Showed(applied=["input.workers"])) == ""
    left = Showed(applied=["process.threads"], left={"input.workers": "an IterableDataset"})
    assert "IterableDataset" in why_left(cure, left)


# -- what losses say -----------------------------------------------------------------------------


def losses(values, **others) -> Showed:
    return Showed(losses=list(values), **others)


@pytest.mark.parametrize("parity", list(Parity)[:3])
def test_equal_losses_hold_for_every_parity(parity):
    found = compare(losses(CURVE), losses(CURVE[:120]), parity, is_repeatable=True)
    assert found.holds
    assert found.is_equal
    assert found.words == "the same in all 120 steps"
    # Nothing was drawn again, as these losses show.
    assert found.parity is (Parity.EXACT if parity is Parity.REDRAWN else parity)


def test_one_other_bit_is_not_bit_identical():
    other = [*CURVE[:-1], math.nextafter(CURVE[-1], 9)]
    assert not compare(losses(CURVE), losses(other), Parity.EXACT, is_repeatable=True).holds
    assert compare(losses(CURVE), losses(other), Parity.TOLERANT, is_repeatable=True).holds
    # A script that does not repeat its own losses cannot be asked for more.
    assert compare(losses(CURVE), losses(other), Parity.EXACT, is_repeatable=False).holds


def test_rounding_holds_and_another_loss_does_not():
    rounded = [loss * (1 + 4e-3 * RNG.standard_normal()) for loss in CURVE]
    assert compare(losses(CURVE), losses(rounded), Parity.TOLERANT, is_repeatable=True).holds
    scaled = [1.12 * loss for loss in CURVE]
    found = compare(losses(CURVE), losses(scaled), Parity.TOLERANT, is_repeatable=True)
    assert not found.holds
    assert found.words == "12% apart on average over 200 steps"


def test_redrawn_holds_for_the_same_level_and_not_for_another():
    def drawn(level):
        return losses([level * loss * RNG.uniform(0.7, 1.3) for loss in CURVE])

    def judged(level):
        return compare(drawn(1), drawn(level), Parity.REDRAWN, is_repeatable=True)

    assert sum(judged(1.0).holds for _ in range(50)) >= 48
    assert not any(judged(1.3).holds for _ in range(50))


def test_what_was_not_redrawn_is_judged_by_rounding():
    rounded = [loss * (1 + 4e-3 * RNG.standard_normal()) for loss in CURVE]

    def parity(one, other, **batches):
        a, b = losses(CURVE, contents=one), losses(rounded, contents=other, **batches)
        exact = Parity.EXACT
        return compare(a, b, Parity.REDRAWN, is_repeatable=True, same_input=exact).parity

    assert parity({"0": [1, 2]}, {"0": [1, 2, 3]}) is Parity.TOLERANT
    for one, other in [
        ({}, {}),
        ({"0": [1, 2]}, {"0": [1, 3]}),
        ({"0": [1, None]}, {"0": [1, None]}),
        ({"0": [1]}, {"0": [1], "1": [4]}),
        ({"0": [1]}, {"0": []}),
    ]:
        assert parity(one, other) is Parity.REDRAWN
    # Its first batches hold the same numbers, and it is another loss all the same.
    a = losses(CURVE, contents={"0": [1]})
    scaled = losses([1.12 * loss for loss in CURVE], contents={"0": [1]})
    given = {"is_repeatable": True, "same_input": Parity.EXACT}
    assert not compare(a, scaled, Parity.REDRAWN, **given).holds
    # What the model draws again is not seen in its input.
    other = losses(rounded, contents={"0": [1]})
    drawn = {"is_repeatable": True, "same_input": Parity.REDRAWN}
    assert compare(a, other, Parity.REDRAWN, **drawn).parity is Parity.REDRAWN


def test_a_loss_that_is_no_number_on_one_side_never_holds():
    broken = [*CURVE[:50], *[math.nan] * 150]
    found = compare(losses(CURVE), losses(broken), Parity.REDRAWN, is_repeatable=False)
    assert not found.holds
    assert found.words == "finite on one side only from step 51 on"
    assert compare(losses(broken), losses(broken), Parity.EXACT, is_repeatable=True).holds


def test_batches_are_compared_as_far_as_both_went():
    a = Showed(CURVE, {"0": [1, 2, 3], "1": [4]})
    same, other = Showed(CURVE, {"0": [1, 2, 3, 5]}), Showed(CURVE, {"0": [1, 3, 2]})
    assert compare(a, same, Parity.EXACT, is_repeatable=True).same_batches is True
    assert compare(a, other, Parity.EXACT, is_repeatable=True).same_batches is False
    assert compare(a, Showed(CURVE), Parity.EXACT, is_repeatable=True).same_batches is None


# -- how long ------------------------------------------------------------------------------------


def test_blocks_are_longer_than_the_queue_and_whole_epochs_where_they_can_be():
    plain = Schedule(max_pairs=4, block_s=1.0)
    assert plain.steps(0.01, 100, dropped=2, most=None) == 98
    assert plain.steps(1.0, 100, dropped=14, most=None) == 13
    assert Schedule(block_s=1.0, epoch_steps=30).steps(0.01, 1e3, 2, None) == 90
    assert Schedule(block_s=1.0, epoch_steps=300).steps(0.01, 1e3, 2, None) == 98
    assert Schedule(block_s=1.0, epoch_steps=300, in_epochs=True).steps(0.01, 1e3, 2, None) == 300


def test_blocks_fit_into_short_scripts_or_are_refused():
    terms = Schedule(max_pairs=4, block_s=1.0)
    steps = terms.steps(0.01, 1000, dropped=2, most=90)
    assert 4 * (steps + 2) + 2 + 3 + 1 <= 90
    with pytest.raises(Ended, match="takes 8 steps only"):
        terms.steps(0.01, 1000, dropped=2, most=8)


def test_both_sides_leave_out_as_many_steps_unless_each_is_to_find_its_pace():
    plain = Schedule(block_s=1.0).length(0.01, 1e3, dropped=2, steps=98, most=None)
    assert plain.of(0.001) == plain.of(0.01) == (2, 98)
    terms = Schedule(block_s=1.0, pace_s=0.5)
    paced = terms.length(0.01, 1e3, dropped=2, steps=100, most=None)
    assert paced.of(0.01) == (50, 100)
    assert paced.of(0.001) == (500, 1000)
    assert paced.of(0.001, is_paced=False) == (2, 1000)  # it has just run
    assert paced.seconds(0.01) == pytest.approx(1.5)
    queue = terms.length(1.0, 1e3, dropped=14, steps=13, most=None)
    assert queue.of(1.0) == (14, 13)  # never fewer
    short = terms.length(0.01, 1e3, dropped=2, steps=98, most=300)
    assert short.of(0.001) == (2, 98)  # a short script has no room for a pace


def test_the_time_to_find_a_pace_is_a_share_of_what_is_left():
    terms = Schedule(block_s=1.0, pace_s=1.0, min_pairs=2)
    short = terms.length(0.01, 5, dropped=2, steps=30, most=None)
    assert short.of(0.01) == (25, 30)
    assert terms.length(0.01, -1, dropped=2, steps=30, most=None).of(0.001) == (2, 30)


def test_whole_epochs_stay_whole_where_a_side_finds_its_pace():
    terms = Schedule(block_s=1.0, pace_s=0.5, epoch_steps=30)
    paced = terms.length(0.01, 1e3, dropped=2, steps=90, most=None)
    assert paced.of(0.01) == (30, 90)
    assert paced.of(0.001) == (480, 900)
    slow = terms.length(0.1, 1e3, dropped=2, steps=30, most=None)
    assert slow.of(0.1) == (2, 30)  # 0.5 s: there is no half epoch


@given(st.data(), st.integers(1, 40))
def test_lives_are_spread_over_the_quadruples_there_is_room_for(data, quadruples):
    lives = Lives(data.draw(st.integers(1, min(6, quadruples))), quadruples)
    restarts = [done for done in range(quadruples) if lives.restart(4 * done)]
    assert len(restarts) == lives.count - 1
    assert lives.fewest == (restarts[-1] if restarts else 0) + 1
    each = [end - begin for begin, end in itertools.pairwise([0, *restarts, quadruples])]
    assert max(each) - min(each) <= 1
    assert not any(lives.restart(blocks) for blocks in range(4 * quadruples) if blocks % 4)


def test_steps_of_an_epoch_are_known_where_one_loader_gives_them():
    assert epoch_steps(seen()) == 10
    assert epoch_steps(seen(optimizers=[Optimizer("SGD", backwards=2.0)])) == 5
    assert epoch_steps(seen(loaders=[])) is None
    broken_off = seen()
    broken_off.loaders[0].batches = 8  # in two epochs: the loop breaks off early
    assert epoch_steps(broken_off) is None


@pytest.mark.parametrize(("every", "found"), [([30], 30), ([30, None], 30), ([30, 8], None)])
def test_a_loop_without_a_loader_is_measured_from_evaluation_to_evaluation(every, found):
    models = [Model("Net", evaluated_every=steps) for steps in every]
    judged = verdict(loaders=[], models=models)
    assert evaluated_every(judged.observations[0]) == found
    asked = []
    against = SimpleNamespace(measure=lambda job, terms, **_: asked.append(terms) or Pair())
    with scratch() as folder:
        bench = Bench(judged, ["t.py"], folder, budget_s=60)
        bench.measure(against, Cure(("a",), "a", {"script.evaluation": "no_grad"}), 10)
    assert asked[0].steps(0.01, 1e3, 2, None) == (60 if found else 48)
    assert asked[0].in_epochs == bool(found)


def test_what_is_measured_beside_a_cure_has_it_on_both_sides(monkeypatch):
    def settings(job):
        return sorted(json.loads(job.variables.get(SET_VARIABLE, "[]")))

    sides = []
    monkeypatch.setattr(Against, "__init__", lambda against, job, *_, **__: sides.append(job))
    monkeypatch.setattr(Against, "close", lambda against: None)
    monkeypatch.setattr(
        Against, "measure", lambda against, job, *_, **__: sides.append(job) or Pair()
    )
    kept = Cure(("a",), "a", {"memory.allocator": "keep"})
    last = Cure(("b",), "b", {"compute.memory_format": "channels_last"})
    with scratch() as folder:
        bench = Bench(verdict(), ["t.py"], folder, budget_s=60)
        with bench.beside(kept) as against:
            bench.measure(against, last, 10)
        with bench.against(NOTHING) as against:
            bench.measure(against, last, 10)
    both = ["compute.memory_format=channels_last", "memory.allocator=keep"]
    assert [settings(side) for side in sides] == [both[1:], both, [], both[:1]]


def test_steps_of_the_run_are_known_from_its_end_or_its_options(tmp_path):
    assert run_steps(verdict(ended="done"), ["t.py"]) == 15
    assert run_steps(verdict(), ["t.py", "--epochs", "7"]) == 70
    assert run_steps(verdict(), ["t.py", "--max_steps=123"]) == 123
    assert run_steps(verdict(), ["t.py"]) is None
    script = tmp_path / "t.py"
    script.write_text("p.add_argument('-e', '--epochs', type=int, default=4)\n")
    assert run_steps(verdict(), [str(script)]) == 40


def test_what_lies_between_steps_is_what_the_trial_has_seen_of_it():
    def blocks(side, *ms):
        return [Block(side, 10, 0, 10**9, int(each * 1e6)) for each in ms]

    plain = blocks("a", 0, 8, 8, 8, 8)
    of_b = blocks("b", 4, 4, 4, 4, 0)
    assert between_s([*plain, *of_b], 9.0) == pytest.approx((0.00064, 0.00032))
    of_b = blocks("b", 9, 9, 9, 9, 9)
    assert between_s([*plain, *of_b], 9.0) == pytest.approx((0.00064, 0.0009))
    # Too few to tell how often they come: one more or less would decide.
    assert between_s([*plain, *blocks("b", 4, 4, 4, 0, 0)], 0.5) == (0.5, 0.25)
    assert between_s([*blocks("a", 8, 8, 16), *blocks("b", *[4] * 9)], 0.5) == (0.5, 0.25)
    # One alone may have been disturbed.
    assert between_s([*plain, *blocks("b", 4, 0, 0, 0, 0)], 0.5) == (0.5, 0.5)
    assert between_s([], 0.5) == (0.5, 0.5)


def test_what_a_cure_takes_once_counts_in_the_whole_run():
    a = Showed(started_s=5.0, first_s=1.0, warm_s=0.9, warm_steps=9)
    b = Showed(started_s=35.0, first_s=30.0, warm_s=0.45, warm_steps=9)
    assert setup_s(a, b, 0.1, 0.05) == pytest.approx(29.95 - 0.9, abs=0.01)
    assert whole_s(a, a, 1000, 0.1, 0.0) == pytest.approx(4 + 0.9 + 100)
    assert whole_s(a, b, 1000, 0.05, 0.01) == pytest.approx(4 + 29.95 + 60)


def test_why_no_trial_can_be_made():
    assert "no optimizer step" in why_no_trial(verdict(steps=0))
    assert "failed by itself" in why_no_trial(verdict(ended="failed"))
    assert "two copies of the script" in why_no_trial(verdict(memory_mb=[1e9]))
    assert why_no_trial(verdict(memory_mb=[10.0])) == ""
