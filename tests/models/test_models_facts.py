import pytest
from torch import nn

from flatout.models import adapter_of, facts_of, is_batch_coupled, uses_convolution


def test_batch_norm_couples_the_samples_while_it_trains():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert is_batch_coupled(model)
    assert not is_batch_coupled(model.eval())
    # Without running statistics it always takes those of the batch.
    assert is_batch_coupled(nn.BatchNorm1d(2, track_running_stats=False).eval())
    assert not is_batch_coupled(nn.Sequential(nn.LayerNorm(2), nn.GroupNorm(1, 2)))


@pytest.mark.parametrize(
    ("module", "draws"),
    [
        (nn.Dropout(0.1), True),
        (nn.Dropout2d(0.1), True),
        (nn.AlphaDropout(0.1), True),
        (nn.Dropout(0.0), False),
        (nn.RReLU(), True),
        (nn.LSTM(2, 2, num_layers=2, dropout=0.1), True),
        (nn.LSTM(2, 2), False),
        (nn.MultiheadAttention(2, 1, dropout=0.1), True),
        (nn.MultiheadAttention(2, 1), False),
        (nn.TransformerEncoderLayer(2, 1), True),
        (nn.ReLU(), False),
    ],
    ids=str,
)
def test_layers_that_draw(module, draws):
    assert adapter_of(nn.Sequential(module)).draws_random() is draws


def test_convolutions_on_images():
    assert uses_convolution(nn.Sequential(nn.Conv2d(1, 1, 1)))
    assert uses_convolution(nn.ConvTranspose2d(1, 1, 1))
    assert not uses_convolution(nn.Sequential(nn.Conv1d(1, 1, 1), nn.Linear(1, 1)))


def test_facts_for_the_recipe():
    facts = facts_of(nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.2)), "cpu")
    assert (facts.batch_coupled, facts.draws_random, facts.device) == (True, True, "cpu")
