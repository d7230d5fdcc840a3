"""Mistakes that no error tells: each is named with its line, and no training that comes near one.

All of them are trained in forks of one process, which has imported torch.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from training_styles import styles

from flatout.devices.inventory import inventory
from flatout.doctor.judge import judge
from flatout.observe import Observation
from pitfalls import absence, read_index

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SCRIPTS = (
    "accumulation_undivided", "accumulation_undivided_made", "accumulation_undivided_raw",
    "activation_twice", "activation_twice_divergence", "batch_first_missing", "best_copied",
    "called_twice", "clip_scaled", "clip_useless", "debugging_left_on", "encoder_without_grad",
    "eval_missing_function", "freeze_without_effect", "frozen_norm_moves",
    "generator_without_grad", "gradients_added",
    "gradients_discarded", "gradients_of_target", "gradients_unused", "history_copied",
    "history_grows", "labels_sorted", "layers_in_list", "loss_broadcast", "losses_kept",
    "nan_hidden", "normalization_by_hand", "normalization_in_dataset", "normalization_leaks",
    "normalization_of_three", "normalization_of_windows", "normalization_to_range",
    "optimizer_extreme", "optimizer_misses", "padding_in_loss", "parameters_unreached",
    "recurrent_by_step", "sampler_repeats", "saved_each_step", "schedule_forgotten",
    "schedule_misplaced", "schedule_misplaced_raw", "schedule_of_parts", "shards_of_workers",
    "steps_skipped", "steps_skipped_read", "validation_overlaps", "validation_overlaps_files",
    "validation_overlaps_frames", "validation_overlaps_raw", "validation_overlaps_windows",
    "workers_repeat", "zero_grad_missing",
    "labels_in_table", "noise_repeated", "optimizer_remade", "seed_repeated", "target_in_input",
    "folds_share_model", "held_out_in_loss", "load_without_effect", "loss_term_cut",
    "next_token_seen", "plateau_reversed", "scores_bounded", "softmax_of_one", "softmax_over_batch",
    "teacher_in_train_mode", "views_equal",
)  # fmt: skip
NOT_STYLE = ("gradients_unused", "history_grows", "recurrent_by_step", "retained_graph")
NAMED = [pitfall for pitfall in read_index() if pitfall.name in SCRIPTS]
PITFALLS = [pitfall for pitfall in NAMED if not absence(pitfall)]


# The line that makes the optimizer of a whole model: the model can be wrapped before it.
OPTIMIZED = re.compile(r"^( *)(\w+ = torch\.optim\.\w+\((\w+)\.parameters\(\))", re.M)
GROUP = (
    "torch.distributed.is_initialized() or torch.distributed.init_process_group('gloo', "
    "store=torch.distributed.HashStore(), rank=0, world_size=1)"
)
# These scripts load weights or replace a layer by names of the model without its wrapper.
NOT_WRAPPED = ("gradients_of_target", "optimizer_misses")
HIDDEN_BY_COMPILING = (
    "activation_twice_divergence", "batch_first_missing", "eval_missing_function",
    "generator_without_grad", "gradients_discarded", "noise_repeated", "scores_bounded",
    "softmax_of_one", "steps_skipped",
)  # fmt: skip


def findings_of(commands, folder):
    """Return the findings in the first steps of each script, by name."""
    return {name: verdict.findings for name, verdict in verdicts_of(commands, folder).items()}


def verdicts_of(commands, folder):
    """Return the verdict on the first steps of each script, by name."""
    work = []
    for name, command in commands.items():
        (folder / name).mkdir()
        work.append([str(folder / name), command])
    subprocess.run(
        [sys.executable, str(HERE / "observe_each.py")],
        input=json.dumps(work),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        timeout=600,
        check=True,
    )
    verdicts, machine = {}, inventory()
    for name in commands:
        (file,) = (folder / name / "seen").glob("rank-*.json")
        seen = Observation.of(json.loads(file.read_text()))
        assert seen.steps > 20, (name, seen.error, (folder / name / "log").read_text())
        verdicts[name] = judge([seen], machine)
    return verdicts


def test_each_mistake_is_named_with_its_line(tmp_path):
    assert len(NAMED) == len(SCRIPTS)
    named = findings_of({one.name: [str(one.script)] for one in PITFALLS}, tmp_path)
    for one in PITFALLS:
        mine = [finding for finding in named[one.name] if finding.name in one.checks]
        assert len(mine) == 1, (one.name, named[one.name])
        assert mine[0].kind == ("danger" if one.danger else "slow")
        file, _, line = mine[0].where.rpartition(":")
        assert (Path(file).name, int(line) in one.marked) == (one.script.name, True), mine


def verdicts_of_wrapped(wrapper, pitfalls, folder):
    """Return the verdicts on these scripts with their models wrapped, by name."""
    commands = {}
    for one in pitfalls:
        put = rf"\1{GROUP}; \3 = {wrapper}; \2"
        source, count = OPTIMIZED.subn(put, one.script.read_text())
        if count and one.name not in NOT_WRAPPED:
            script = folder / one.script.name
            script.write_text(source)
            commands[one.name] = [str(script)]
    return verdicts_of(commands, folder)


def test_each_mistake_is_named_with_its_line_in_a_distributed_model(tmp_path):
    ddp = r"torch.nn.parallel.DistributedDataParallel(\3, find_unused_parameters=True)"
    verdicts = verdicts_of_wrapped(ddp, PITFALLS, tmp_path)
    assert len(verdicts) > len(PITFALLS) - 8
    for one in [one for one in PITFALLS if one.name in verdicts]:
        verdict = verdicts[one.name]
        mine = [finding for finding in verdict.findings if finding.name in one.checks]
        if one.checks == ("accumulation_undivided",):
            assert one.checks[0] in dict(verdict.unknown)
        else:
            assert len(mine) == 1, (one.name, verdict.findings)
            assert int(mine[0].where.rpartition(":")[2]) in one.marked, mine


def test_checks_of_mistakes_that_compiled_code_hides_do_not_pass(tmp_path):
    hidden = [one for one in PITFALLS if one.name in HIDDEN_BY_COMPILING]
    verdicts = verdicts_of_wrapped(r"torch.compile(\3, backend='aot_eager')", hidden, tmp_path)
    assert len(verdicts) == len(hidden) > 6
    for one in hidden:
        assert not {*one.checks} & {*verdicts[one.name].passed}, one.name


def test_no_mistake_is_in_the_clean_scripts(tmp_path):
    scripts = {one.name: [str(one.write_clean(tmp_path))] for one in PITFALLS}
    (tmp_path / "clean").mkdir()
    found = findings_of(scripts, tmp_path / "clean")
    for one in PITFALLS:
        assert not [f for f in found[one.name] if f.kind == "danger" or f.name in one.checks]


def test_trainings_that_come_near_a_mistake_have_no_danger(tmp_path):
    script = str(HERE / "training_styles.py")
    found = findings_of({name: [script, name] for name in styles}, tmp_path)
    assert len(found) > 30
    wrong = [
        (name, one)
        for name, all_of in found.items()
        for one in all_of
        if one.kind == "danger" or one.name in NOT_STYLE
    ]
    assert wrong == []
