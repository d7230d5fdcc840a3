import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flatout.data.batches.batch import Batch
from flatout.errors import ModelError
from flatout.train.losses.losses import as_loss, in_shape_of

CLASSES = 5


def batch(targets, weight=None):
    return Batch(torch.empty(len(targets), 1), targets, weight, None, len(targets))


def labels(*shape, seed=0):
    return torch.randint(0, CLASSES, shape, generator=torch.Generator().manual_seed(seed))


def scores(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mean(value):
    return value[0] / value[1] if isinstance(value, tuple) else value


PAIRS = {
    "cross_entropy": (scores(6, CLASSES), labels(6), F.cross_entropy),
    "nll": (scores(6, CLASSES).log_softmax(1), labels(6), F.nll_loss),
    "binary_cross_entropy": (
        scores(6, 2),
        labels(6, 2) % 2,
        lambda o, t: F.binary_cross_entropy_with_logits(o, t.double()),
    ),
    "mse": (scores(6, 3), scores(6, 3, seed=2), F.mse_loss),
    "mae": (scores(6, 3), scores(6, 3, seed=2), F.l1_loss),
    "huber": (scores(6, 3), scores(6, 3, seed=2) * 3, F.huber_loss),
}


@pytest.mark.parametrize("unweighted", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_standard_names_are_torchs_losses(name, unweighted):
    output, target, plain = PAIRS[name]
    value = as_loss(name)(output, batch(target), unweighted=unweighted)
    torch.testing.assert_close(mean(value), plain(output, target), rtol=1e-14, atol=0)
    if unweighted:
        assert not isinstance(value, tuple)
        assert torch.equal(value, plain(output, target))


@pytest.mark.parametrize("name", PAIRS)
def test_half_precision_outputs_are_computed_in_float32(name):
    output, target, plain = PAIRS[name]
    half = output.bfloat16()
    target = target.float() if target.is_floating_point() else target
    value = mean(as_loss(name)(half, batch(target)))
    assert value.dtype == torch.float32
    theirs = plain(half.float(), target).float()
    torch.testing.assert_close(value, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["cross_entropy", "nll"])
@pytest.mark.parametrize("shape", [(6,), (6, 4), (6, 2, 3)])
@pytest.mark.parametrize("ignored", [0, 3, "all"])
def test_ignored_labels_carry_no_weight(name, shape, ignored):
    target = labels(*shape)
    target.flatten()[: target.numel() if ignored == "all" else ignored] = -100
    output = scores(shape[0], CLASSES, *shape[1:]).log_softmax(1).requires_grad_()
    total, weight = as_loss(name)(output, batch(target))
    assert weight == (target != -100).sum()
    if ignored == "all":
        assert total == 0
        return
    plain = PAIRS[name][2](output, target)
    torch.testing.assert_close(total / weight, plain, rtol=1e-14, atol=0)
    (ours,) = torch.autograd.grad(total / weight, output, retain_graph=True)
    (theirs,) = torch.autograd.grad(plain, output)
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-16)


def parts(loss, output, given):
    """(sum, weight) added over micro-batches, as a step does."""
    sums = torch.zeros((), dtype=torch.float64)
    weights = 0.0
    start = 0
    for piece in given.split(3):
        value = loss(output[start : start + piece.size], piece)
        total, weight = value if isinstance(value, tuple) else (value * piece.size, piece.size)
        sums, weights = sums + total, weights + weight
        start += piece.size
    return sums / weights


LOSSES = {
    "cross_entropy": "cross_entropy",
    "weighted": nn.CrossEntropyLoss(weight=torch.linspace(0.1, 2, CLASSES, dtype=torch.float64)),
    "smoothed": nn.CrossEntropyLoss(label_smoothing=0.2),
    "weighted and smoothed": nn.CrossEntropyLoss(
        weight=torch.linspace(0.1, 2, CLASSES, dtype=torch.float64), label_smoothing=0.1
    ),
    "ignores 2": nn.CrossEntropyLoss(ignore_index=2),
    "ignores 255": nn.CrossEntropyLoss(
        weight=torch.linspace(0.1, 2, CLASSES, dtype=torch.float64), ignore_index=255
    ),
    "nll weighted": nn.NLLLoss(
        weight=torch.linspace(0.5, 1, CLASSES, dtype=torch.float64), ignore_index=1
    ),
}


@pytest.mark.parametrize("name", LOSSES)
@given(data=st.data())
@settings(max_examples=25)
def test_micro_batches_add_up_to_the_whole_batch(name, data):
    loss = as_loss(LOSSES[name])
    kept = st.integers(0, CLASSES - 1)
    values = st.one_of(kept, st.just(loss.ignore_index))
    target = torch.tensor(data.draw(st.lists(values, min_size=7, max_size=7)))
    target[3] = 0  # at least one that counts
    output = scores(7, CLASSES)
    plain = LOSSES[name] if isinstance(LOSSES[name], nn.Module) else F.cross_entropy
    whole = mean(loss(output, batch(target)))
    torch.testing.assert_close(whole, plain(output, target), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(
        parts(loss, output, batch(target)), plain(output, target), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("shape", [(7,), (7, 3)])
def test_sample_weights_of_one_change_nothing(name, shape):
    loss, target = as_loss(LOSSES[name]), labels(*shape)
    output = scores(7, CLASSES, *shape[1:])
    ours = mean(loss(output, batch(target, torch.ones(7, dtype=torch.float64))))
    torch.testing.assert_close(ours, mean(loss(output, batch(target))), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", [*LOSSES, *PAIRS])
def test_a_sample_weight_counts_like_repeated_samples(name):
    if name in PAIRS:
        loss, (output, target, _) = as_loss(name), PAIRS[name]
    else:
        loss, output, target = as_loss(LOSSES[name]), scores(6, CLASSES), labels(6)
    times = torch.tensor([0, 1, 2, 3, 1, 2])
    weighted = mean(loss(output, batch(target, times.double())))
    repeated = loss(output.repeat_interleave(times, 0), batch(target.repeat_interleave(times, 0)))
    torch.testing.assert_close(weighted, mean(repeated), rtol=1e-12, atol=1e-14)


def test_sample_weights_and_ignored_tokens():
    target = labels(4, 3)
    target[0, 1:] = -100
    target[2] = -100
    output, weight = scores(4, CLASSES, 3), torch.tensor([1.0, 2.0, 3.0, 0.5]).double()
    total, counted = as_loss("cross_entropy")(output, batch(target, weight))
    each = F.cross_entropy(output, target, reduction="none")
    assert counted == 1 * 1 + 2 * 3 + 0.5 * 3
    torch.testing.assert_close(total, (each * weight[:, None]).sum())


def test_class_probabilities_as_targets():
    output, target = scores(6, CLASSES, 2), scores(6, CLASSES, 2, seed=3).softmax(1)
    plain = F.cross_entropy(output, target)
    loss = as_loss("cross_entropy")
    torch.testing.assert_close(mean(loss(output, batch(target))), plain)
    ones = torch.ones(6, dtype=torch.float64)
    torch.testing.assert_close(mean(loss(output, batch(target, ones))), plain)
    weighted = nn.CrossEntropyLoss(weight=torch.rand(CLASSES, dtype=torch.float64))
    torch.testing.assert_close(
        mean(as_loss(weighted)(output, batch(target))), weighted(output, target)
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.bool])
def test_labels_of_any_integer_type(dtype):
    output, target = scores(6, CLASSES), labels(6) % 2
    value = as_loss("cross_entropy")(output, batch(target.to(dtype)))
    torch.testing.assert_close(mean(value), F.cross_entropy(output, target))


def test_unweighted_holds_only_where_every_label_counts_the_same():
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]).double())
    value = as_loss(weighted)(scores(4, 2), batch(torch.tensor([0, 1, 1, 1])), unweighted=True)
    assert isinstance(value, tuple)
    assert value[1] == 7


# -- shapes ----------------------------------------------------------------------------------------


def test_one_column_fits_no_column():
    output, target = scores(5, 1), scores(5, seed=4)
    assert torch.equal(as_loss("mse")(output, batch(target)), F.mse_loss(output[:, 0], target))
    assert torch.equal(
        as_loss("mse")(output[:, 0], batch(target[:, None])), F.mse_loss(output[:, 0], target)
    )


@pytest.mark.parametrize(
    ("output", "target"), [((4, 3), (4, 2)), ((4, 2, 3), (4, 3, 2)), ((4, 3), (3, 4)), ((4,), (5,))]
)
def test_other_shapes_are_refused(output, target):
    with pytest.raises(ModelError) as caught:
        in_shape_of(torch.zeros(output), torch.zeros(target))
    assert str(output) in str(caught.value)
    assert str(target) in str(caught.value)


# -- callables -------------------------------------------------------------------------------------


def test_a_callable_gives_a_mean_or_sum_and_weight():
    output, target = scores(4, 3), scores(4, 3, seed=5)
    by_mean = as_loss(lambda o, t: (o - t).abs().mean())
    assert torch.equal(by_mean(output, batch(target)), F.l1_loss(output, target))
    by_sum = as_loss(lambda o, t: ((o - t).abs().sum(), 12.0))
    torch.testing.assert_close(mean(by_sum(output, batch(target))), F.l1_loss(output, target))


def test_a_callable_gets_whatever_the_model_returns():
    seen = []

    def loss(output, target):
        seen.append((output, target))
        return output["a"].sum()

    target = {"x": torch.ones(2)}
    as_loss(loss)({"a": torch.ones(2)}, Batch(torch.ones(2), target, None, None, 2))
    assert seen[0][1] is target


def test_torch_modules_and_functions():
    output, target = scores(4, 3), scores(4, 3, seed=5)
    assert torch.equal(
        as_loss(nn.SmoothL1Loss())(output, batch(target)), F.smooth_l1_loss(output, target)
    )
    assert as_loss(F.cross_entropy) is as_loss("cross_entropy")
    assert as_loss(F.nll_loss) is as_loss("nll")
    given = as_loss("mse")
    assert as_loss(given) is given


def test_names_are_for_people():
    def focal(output, target):
        return output.sum()

    assert [as_loss(x).name for x in (focal, nn.CrossEntropyLoss(), nn.MSELoss(), "mae")] == [
        "focal",
        "CrossEntropyLoss",
        "MSELoss",
        "mae",
    ]


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, nn.MSELoss])
def test_torch_losses_that_give_no_mean_are_refused(kind, reduction):
    with pytest.raises(ModelError, match=f"reduction='{reduction}'") as caught:
        as_loss(kind(reduction=reduction))
    assert "reduction='mean'" in caught.value.do


def test_unknown_names_and_things():
    with pytest.raises(ModelError, match="unknown loss 'crossentropy'; known: cross_entropy"):
        as_loss("crossentropy")
    with pytest.raises(ModelError, match="found int"):
        as_loss(3)


@pytest.mark.parametrize(
    ("value", "found"),
    [(torch.ones(3), r"\(3,\)"), (1.0, "float"), ((torch.ones(2), 2), r"\(2,\)"), (None, "None")],
)
def test_a_callable_that_gives_something_else(value, found):
    with pytest.raises(ModelError, match=f"must return one number.*found {found}"):
        as_loss(lambda o, t: value)(scores(3, 1), batch(torch.ones(3)))


def test_a_callable_cannot_take_sample_weights():
    with pytest.raises(ModelError, match="weights of samples"):
        as_loss(lambda o, t: o.sum())(scores(3, 1), batch(torch.ones(3), torch.ones(3)))


@pytest.mark.parametrize(("output", "target"), [((scores(3, 2),), labels(3)), (scores(3, 2), None)])
def test_standard_losses_compare_two_tensors(output, target):
    with pytest.raises(ModelError, match="compares one tensor with one tensor"):
        as_loss("cross_entropy")(output, Batch(torch.ones(3), target, None, None, 3))


@pytest.mark.gpu
def test_class_weights_follow_the_output_to_the_gpu():
    loss = nn.CrossEntropyLoss(weight=torch.linspace(0.1, 2, CLASSES))
    output, target = scores(6, CLASSES).float(), labels(6)
    plain = loss(output, target)
    value = as_loss(loss)(output.cuda(), batch(target.cuda()))
    torch.testing.assert_close(mean(value).cpu(), plain)
