"""What bench/choices.py makes of the choices of several runs."""

import pytest

import choices


def test_settings_are_chosen_alike_by_the_share_of_pairs_that_agree():
    half, fused = {"compute.precision": "bf16"}, {"compute.fused_optimizer": "on"}
    chosen = [{**half, **fused}] * 4 + [half]
    alike = choices.alike(chosen)
    assert alike == {"compute.precision": 1.0, "compute.fused_optimizer": pytest.approx(0.6)}
    row = {"chosen": chosen, "alike": alike}
    assert choices.share(row) == pytest.approx(0.8)
    assert choices.words(row) == "bf16 · fused optimizer (4 of 5)"
    nothing = {"chosen": [{}, {}], "alike": choices.alike([{}, {}])}
    assert choices.share(nothing) == 1.0
    assert choices.words(nothing) == "as plain PyTorch"
