"""What is prescribed of cures whose effects are known: on a simulated machine, with its noise."""

import math
import os
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from flatout.doctor.finding import Edit, Finding
from flatout.doctor.judge import Verdict
from flatout.doctor.prescription import Prescription
from flatout.doctor.prove import Proving
from flatout.doctor.proving.cure import NOTHING, cures_of, together
from flatout.doctor.proving.other_work import OtherWork
from flatout.doctor.trials.arm import Block, Showed
from flatout.doctor.trials.pair import Pair
from flatout.measure.trial import run_trial
from flatout.observe import Observation, Optimizer
from flatout.recipe import Parity

BF16, LAST, FUSED = "compute.precision", "compute.memory_format", "compute.fused_optimizer"
ALLOCATOR = "memory.allocator"
VALUES = {
    BF16: "bf16", LAST: "channels_last", FUSED: "on", "script.garbage": "scheduled",
    ALLOCATOR: "keep",
}  # fmt: skip
LOSSES = np.linspace(2.0, 1.0, 60).tolist()


class Machine:
    """A Bench on which a step takes as long as a function of the cures says, with noise.

    Args:
        step_ms: by the set of the cures' fields.
        seed: of the noise: 1% from process to process.
        noise: from block to block; half of it in blocks four times as long.

    Attributes:
        cpu_noise: of CPU time, where that is counted.
        budget_s: seconds for all trials; a start takes 2, a block half.
    """

    def __init__(self, step_ms, seed: int = 0, budget_s: float = 300.0, noise=0.02) -> None:
        self.noise = noise
        self.cpu_noise: float | None = None
        self.longer = 1.0
        self.floor, self.start_s, self.held, self.refused = 0.02, 2.0, "overlay", []
        self.left_s, self.needed_s = budget_s, 7.0
        self.setup_s = dict[frozenset[str], float]()
        self.out_of_reach = set[str]()
        self.too_long = list[frozenset[str]]()  # to be measured again
        self.churn = 0.0  # more noise, where memory is not kept
        self.luck = 1.0  # of B every second life takes so many times as long there
        self._beside = NOTHING
        self.too_noisy = list[frozenset[str]]()  # once they are measured again
        self.too_short = list[frozenset[str]]()  # for long blocks: the script ends within them
        self.faults = dict[frozenset[str], int]()  # per step
        self._step_ms = step_ms
        self._rng = np.random.default_rng(seed)

    def against(self, cure):
        self.left_s -= self.start_s
        return closing(
            SimpleNamespace(
                step_ms=self._process(cure),
                noise=self._noise_of(cure),
                has_ended=False,
                close=lambda: None,
            )
        )

    @contextmanager
    def beside(self, cure):
        self._beside = cure
        with self.against(NOTHING) as against:
            yield against
        self._beside = NOTHING

    def _process(self, cure) -> float:
        cure = together([self._beside, cure])
        fields = cure.fields - self.out_of_reach | ({"edits"} if cure.own_edits else set())
        return self._step_ms(fields) * np.exp(self._rng.normal(0, 0.01))

    def _noise_of(self, cure) -> float:
        is_kept = ALLOCATOR in together([self._beside, cure]).fields
        return self.noise + (0.0 if is_kept else self.churn)

    def measure(
        self,
        against,
        cure,
        budget_s,
        *,
        min_pairs=2,
        max_pairs=4,
        block_s=0.5,
        precision=math.inf,
        pace_s=0.0,
        fresh=False,
        lives=1,
    ) -> Pair:
        if min_pairs > 2 and cure.fields in self.too_long:
            late = "b: the end of a block of 9 steps did not come in the time given"
            return Pair(reason=late, held="overlay")
        if pace_s and cure.fields in self.too_short:
            self.left_s -= self.start_s
            soon = "b: the script ended by itself before the trial did"
            return Pair(reason=soon, is_too_short=True, held="overlay")
        is_noisy = min_pairs > 2 and cure.fields in self.too_noisy
        blocks = []
        cpu: dict[str, list[float]] = {"a": [], "b": []}

        def block(side, step_ms, noise, fields=frozenset()):
            own_ms = step_ms
            noise = 1.5 if is_noisy else noise / math.sqrt(self.longer)
            step_ms *= np.exp(self._rng.normal(0, noise))
            if self.cpu_noise is not None:
                cpu[side].append(own_ms * np.exp(self._rng.normal(0, self.cpu_noise)))
            faults = 10 * self.faults.get(fields, 0)
            blocks.append(Block(side, 10, 0, int(step_ms * 1e7), 0, faults))
            return step_ms / 1e3

        lucks = (1.0, 1.0 if ALLOCATOR in cure.fields else self.luck)
        processes = [self._process(cure) * lucks[life % 2] for life in range(lives)]
        result = run_trial(
            lambda: block("a", against.step_ms, against.noise),
            lambda: block(
                "b", processes[len(blocks) // 4 % lives], self._noise_of(cure), cure.fields
            ),
            min_pairs=max(min_pairs, min(lives, max_pairs)),
            max_pairs=max_pairs,
            floor=self.floor,
            precision=precision,
        )
        self.left_s -= self.start_s + (block_s * self.longer + pace_s / 2) * len(blocks)
        applied = [name for name in cure.recipe if name not in self.out_of_reach]
        first_s = self.setup_s.get(cure.fields, 0.0)
        a, b = Showed(LOSSES), Showed(LOSSES, applied=applied, first_s=first_s)
        of_cpu = None
        if self.cpu_noise is not None:
            pairs = len(cpu["a"]) // 2
            sides = map(iter, (cpu["a"], cpu["b"]))
            of_cpu = run_trial(
                *(partial(next, side) for side in sides), min_pairs=pairs, max_pairs=pairs
            )
        return Pair(result=result, cpu=of_cpu, blocks=blocks, a=a, b=b, held="overlay")


def proven(
    machine: Machine, *fields: str, what=("train.py",), edits=(), lanes_ms=None
) -> Prescription:
    findings = [Finding("slow", "", "", name=f, recipe={f: VALUES[f]}, edits=edits) for f in fields]
    rank = Observation(command=["train.py"], steps=9, ended="stopped", optimizers=[Optimizer("A")])
    rank.lanes_ms = dict(lanes_ms or {})
    verdict = Verdict([rank], {}, None, findings, [], [])
    cures = cures_of(verdict, Parity.TOLERANT)
    proving = Proving(verdict, what, machine, Parity.TOLERANT, lambda line: None)
    proving.run(cures)
    return proving.prescription(cures)


def outcomes(given: Prescription) -> dict[str, str]:
    return {proof.names[0]: proof.outcome for proof in given.proofs}


def by_set(**times):
    """Step times by the last words of fields joined by _and_; what is missing is as plain."""

    def step_ms(fields: frozenset[str]) -> float:
        name = "_and_".join(sorted(field.rpartition(".")[2] for field in fields))
        return times.get(name, times["plain"])

    return step_ms


def test_a_script_that_ends_soon_with_a_cure_is_measured_again_by_shorter_blocks():
    machine = Machine(by_set(plain=10, precision=0.5))
    machine.too_short = [frozenset({BF16})]
    given = proven(machine, BF16)
    assert outcomes(given) == {BF16: "prescribed"}
    assert given.together.trial.ratio == pytest.approx(20, rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_slower_alone_is_prescribed_where_it_pays_beside_another(seed):
    times = by_set(plain=10, precision=15, memory_format=7, memory_format_and_precision=3)
    given = proven(Machine(times, seed), LAST, BF16)
    assert outcomes(given) == {LAST: "prescribed", BF16: "prescribed"}
    assert given.proofs[1].reason.startswith("pays together with channels_last: ")
    assert given.together is not None
    assert given.together.recipe == {LAST: "channels_last", BF16: "bf16"}
    assert given.together.trial is not None
    assert given.together.trial.ratio == pytest.approx(10 / 3, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_what_pays_only_together_is_found(seed):
    times = by_set(plain=10, precision=10, memory_format=10, memory_format_and_precision=4)
    given = proven(Machine(times, seed), LAST, BF16)
    assert outcomes(given) == {LAST: "prescribed", BF16: "prescribed"}
    assert given.proofs[0].reason == "pays with the others: channels_last, bf16"


def test_what_adds_nothing_to_another_goes():
    times = by_set(plain=10, precision=3, memory_format=4, memory_format_and_precision=3)
    dropped = 0
    for seed in range(20):
        given = proven(Machine(times, seed), LAST, BF16)
        assert outcomes(given)[BF16] == "prescribed"
        if outcomes(given)[LAST] == "left alone":
            dropped += 1
            assert given.proofs[0].reason == "adds nothing to bf16"
            assert given.together is not None
            assert given.together.names == (BF16,)
    assert dropped >= 14  # in the others noise speaks for it


def test_what_adds_nothing_to_another_follows_where_that_cannot_be_told_from_noise():
    times = by_set(plain=10, precision=3, memory_format=4, memory_format_and_precision=3)
    followed = 0
    for seed in range(20):
        machine = Machine(times, seed)
        machine.too_noisy = [frozenset({BF16}), frozenset({BF16, LAST})]
        given = proven(machine, LAST, BF16)
        if given.together is not None and given.together.names == (LAST,):
            followed += 1
            assert outcomes(given) == {LAST: "prescribed", BF16: "left alone"}
            assert given.proofs[1].reason.endswith("noise when measured again")
            assert given.together.trial.ratio == pytest.approx(2.5, rel=0.1)
    assert followed >= 14


@pytest.mark.parametrize("seed", range(5))
def test_memory_that_a_cure_makes_come_again_in_each_step_is_tried_to_be_kept(seed):
    machine = Machine(by_set(plain=10, memory_format=8, allocator_and_memory_format=5), seed)
    machine.faults[frozenset({LAST})] = 3000
    given = proven(machine, LAST)
    assert outcomes(given) == {LAST: "prescribed", "memory_returned": "prescribed"}
    kept = given.proofs[1]
    assert kept.reason == "together with channels_last"
    assert kept.trial is not None
    assert kept.trial.ratio == pytest.approx(8 / 5, rel=0.05)
    assert given.together is not None
    assert given.together.recipe == {LAST: "channels_last", "memory.allocator": "keep"}
    assert given.together.trial is not None
    assert given.together.trial.ratio == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_memory_that_costs_nothing_to_come_again_is_left_to_the_allocator(seed):
    machine = Machine(by_set(plain=10, memory_format=8, allocator_and_memory_format=8), seed)
    machine.faults[frozenset({LAST})] = 3000
    given = proven(machine, LAST)
    assert outcomes(given) == {LAST: "prescribed", "memory_returned": "left alone"}
    assert given.together is not None
    assert given.together.recipe == {LAST: "channels_last"}
    (proof,) = given.prescribed
    assert proof.trial is given.together.trial  # what was measured last is what is told


def test_where_noise_comes_of_memory_that_comes_again_cures_are_tried_with_it_kept():
    """A third of each step: beyond what is to be told from blocks that differ by half."""

    def given(seed, **times):
        machine = Machine(by_set(plain=10, allocator=9.5, **times), seed)
        machine.churn = 0.4
        return proven(machine, ALLOCATOR, LAST, FUSED)

    both = 0
    for seed in range(20):
        found = given(seed, allocator_and_memory_format=6.5, memory_format=7)
        assert found.floor < 0.2
        assert not found.noise
        if found.together is not None:
            both += 1
            assert outcomes(found) == {
                ALLOCATOR: "prescribed", LAST: "prescribed", FUSED: "left alone",
            }  # fmt: skip
            fast = found.proofs[1]
            assert fast.reason == "together with memory kept by the allocator"
            assert fast.trial.ratio == pytest.approx(9.5 / 6.5, rel=0.1)
    assert both >= 14
    times = {"allocator_and_memory_format": 9.5, "allocator_and_fused_optimizer": 9.5}
    assert sum(given(seed, **times).together is not None for seed in range(40)) <= 2


def test_memory_is_kept_beside_another_cure_where_some_processes_would_give_it_back():
    kept = 0
    for seed in range(20):
        times = by_set(plain=10, allocator=9, memory_format=5, allocator_and_memory_format=5)
        machine = Machine(times, seed)
        machine.luck = 1.6
        given = proven(machine, ALLOCATOR, LAST)
        assert outcomes(given)[LAST] == "prescribed"
        kept += outcomes(given)[ALLOCATOR] == "prescribed"
    assert kept >= 14


def test_noise_that_stays_with_memory_kept_has_another_cause():
    machine = Machine(by_set(plain=10, allocator=9, memory_format=2), noise=1.0)
    given = proven(machine, ALLOCATOR, LAST)
    assert given.noise
    assert given.floor > 0.2
    assert not any("together with" in proof.reason for proof in given.proofs)


def test_memory_that_comes_again_in_a_few_steps_is_not_looked_after():
    machine = Machine(by_set(plain=10, memory_format=8, allocator_and_memory_format=5))
    machine.faults[frozenset({LAST})] = 100  # a hundredth of a step
    assert outcomes(proven(machine, LAST)) == {LAST: "prescribed"}
    late = Machine(by_set(plain=10, memory_format=8, allocator_and_memory_format=5), budget_s=30)
    late.faults[frozenset({LAST})] = 3000
    given = proven(late, LAST)
    assert outcomes(given) == {LAST: "prescribed", "memory_returned": "not tried"}
    assert given.proofs[1].reason == "no time was left for it"


@pytest.mark.parametrize("seed", range(5))
def test_the_best_alone_is_left_of_cures_that_do_not_bear_one_another(seed):
    times = by_set(plain=10, precision=6, memory_format=8, memory_format_and_precision=14)
    given = proven(Machine(times, seed), LAST, BF16)
    assert given.together is not None
    assert given.together.names == (BF16,)
    assert outcomes(given) == {LAST: "left alone", BF16: "prescribed"}


def test_evaluation_and_saving_dilute_what_a_step_gains():
    between = {"forward": 8.0, "evaluation": 6.0, "saving": 4.0}
    machine = Machine(by_set(plain=10, memory_format=5))
    given = proven(machine, LAST, lanes_ms=between)
    assert given.before_s is None
    assert given.step_before_s == pytest.approx(0.020, rel=0.05)
    assert given.step_after_s == pytest.approx(0.015, rel=0.05)
    plain = proven(Machine(by_set(plain=10)), LAST, lanes_ms=between)
    assert (plain.step_before_s, plain.step_after_s) == (None, None)


def test_a_script_that_lacks_nothing_is_left_as_it_is():
    wrong = [
        seed
        for seed in range(60)
        if proven(Machine(by_set(plain=10), seed), LAST, BF16, FUSED, "script.garbage").prescribed
    ]
    assert len(wrong) <= 1


def test_what_noise_hides_is_seen_by_the_longest_trial():
    def prescribed(seed, budget_s=300.0, **times):
        machine = Machine(by_set(plain=10, **times), seed, budget_s, noise=0.12)
        given = proven(machine, LAST, "script.garbage")
        if given.together is not None:
            assert given.together.names == (LAST,)
            assert outcomes(given)[LAST] == "prescribed"
            (kept,) = [proof for proof in given.proofs if proof.names == (LAST,)]
            assert kept.trial is not None
            assert kept.trial.wins
        return given.together is not None

    assert sum(prescribed(seed, memory_format=7.5) for seed in range(20)) >= 15
    assert sum(prescribed(seed) for seed in range(40)) <= 1


def test_cures_for_which_no_time_is_left_are_not_tried():
    times = by_set(plain=10, memory_format=5)
    given = proven(Machine(times, budget_s=30), LAST, BF16, FUSED, "script.garbage")
    assert given.together is not None
    assert given.together.names == (LAST,)
    assert outcomes(given)["script.garbage"] == "not tried"
    assert given.proofs[-1].reason == "no time was left for it"


@pytest.mark.parametrize("seed", range(5))
def test_where_there_is_time_for_one_trial_it_is_made_and_has_the_last_word(seed):
    machine = Machine(by_set(plain=10, memory_format=5), seed, budget_s=20)
    given = proven(machine, LAST, BF16)
    assert given.together is not None
    assert given.together.names == (LAST,)
    assert given.together.trial is not None
    assert given.together.trial.pairs >= 4
    assert outcomes(given)[BF16] == "not tried"
    assert machine.left_s < machine.needed_s


def test_what_ran_out_of_time_when_measured_again_has_not_failed():
    alone = Machine(by_set(plain=10, precision=4))
    alone.too_long.append(frozenset({BF16}))
    given = proven(alone, BF16)
    assert outcomes(given) == {BF16: "prescribed"}
    assert given.together is not None
    assert given.together.trial is not None

    both = Machine(by_set(plain=10, precision=4, memory_format=7, memory_format_and_precision=3))
    both.too_long.append(frozenset({BF16, LAST}))
    given = proven(both, LAST, BF16)
    assert outcomes(given) == {LAST: "not tried", BF16: "prescribed"}
    assert given.proofs[0].reason == "no time was left to measure it with the others"
    assert given.together is not None
    assert given.together.recipe == {BF16: "bf16"}


def test_set_up_that_the_run_does_not_repay_is_not_prescribed():
    times = by_set(plain=10, precision=5)
    machine = Machine(times)
    machine.setup_s[frozenset({BF16})] = 20.0
    short = proven(machine, BF16, what=("train.py", "--max-steps", "1950"))
    assert short.together is None
    assert short.proofs[0].outcome == "left alone"
    assert short.proofs[0].reason.endswith("; you run 1,950")
    assert short.proofs[0].repays_after == pytest.approx(4000, rel=0.1)
    machine = Machine(times)
    machine.setup_s[frozenset({BF16})] = 20.0
    long = proven(machine, BF16, what=("train.py", "--max-steps", "100000"))
    assert long.together is not None
    assert long.before_s is not None
    assert long.after_s is not None
    assert long.after_s == pytest.approx(100_000 * 0.005 + 20, rel=0.05)
    assert long.before_s == pytest.approx(100_000 * 0.010, rel=0.05)


def test_what_a_recipe_does_not_reach_is_tried_as_a_change_of_the_code():
    machine = Machine(by_set(plain=10, edits=4))
    machine.out_of_reach = {"script.garbage"}
    edits = (Edit("train.py", 7, "    gc.collect()", ""),)
    given = proven(machine, "script.garbage", edits=edits)
    assert given.together is not None
    assert given.together.words == "script.garbage (train.py:7)"
    assert given.together.recipe == {}
    assert given.together.edits == edits
    machine = Machine(by_set(plain=10, edits=4))
    machine.out_of_reach = {"script.garbage"}
    without = proven(machine, "script.garbage")
    assert without.proofs[0].reason.startswith("it stays as written")


def test_on_a_noisy_machine_small_wins_are_not_prescribed_and_the_cause_is_told(monkeypatch):
    told = "other processes took 1.4 CPUs during trials, most of it python (7)"
    monkeypatch.setattr("flatout.doctor.prove.OtherWork.words", lambda self: told)
    noisy = []
    for seed in range(12):
        machine = Machine(by_set(plain=10, memory_format=8), seed, noise=0.8)
        given = proven(machine, LAST)
        assert given.noise == (told if given.floor > 0.2 else "")
        if given.floor > 0.4:
            noisy.append(given)
            assert machine.floor == given.floor
    assert len(noisy) >= 6
    assert not any(given.prescribed for given in noisy)
    large = proven(Machine(by_set(plain=10, memory_format=1), 3, noise=0.05), LAST)
    assert (large.noise, outcomes(large)[LAST]) == ("", "prescribed")


def test_other_work_is_counted_without_ours():
    busy = [sys.executable, "-c", "while True: pass"]
    before = OtherWork()
    ours = subprocess.Popen(busy)
    try:
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            pass
        assert f"({ours.pid})" not in before.words()
        assert f"({os.getpid()})" not in before.words()
    finally:
        ours.kill()
        ours.wait()


def busy(step_ms, seed, noise=0.6, cpu_noise=0.01):
    machine = Machine(step_ms, seed, noise=noise, budget_s=400.0)
    machine.cpu_noise = cpu_noise
    return machine


def test_cpu_time_tells_where_wall_time_cannot_and_the_verdict_says_so():
    prescribed = by_cpu = 0
    for seed in range(12):
        given = proven(busy(by_set(plain=10, memory_format=6), seed), LAST)
        together = given.together
        if together is None:
            continue
        prescribed += 1
        if together.rests_on == "CPU time":
            by_cpu += 1
            assert together.reason.startswith("rests on CPU time, 1.")
            assert given.step_before_s is None  # what wall time is saved is not known
    assert prescribed >= 8
    assert by_cpu >= 4


def test_nothing_is_prescribed_by_cpu_time_where_there_is_nothing_to_gain():
    found = [proven(busy(by_set(plain=10), seed), LAST, FUSED) for seed in range(12)]
    assert not any(given.prescribed for given in found)


def test_on_a_calm_machine_cpu_time_says_nothing():
    machine = busy(by_set(plain=10), 1, noise=0.01)
    machine.cpu_noise = 0.01
    given = proven(machine, LAST)
    assert not given.prescribed
    assert machine.longer == 1.0


def test_blocks_are_longer_where_noise_is_large():
    machine = Machine(by_set(plain=10), 1, noise=0.6)
    proven(machine, LAST)
    assert 2.0 <= machine.longer <= 4.0
