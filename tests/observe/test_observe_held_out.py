"""A table from which the training was picked, and of which other batches are evaluated."""

import pytest

from flatout.observe.held_out import compare
from flatout.observe.observation import Loader, Table
from flatout.observe.samples import Samples
from flatout.observe.scalers import Scalers
from flatout.observe.watch import Watch


@pytest.mark.parametrize(
    ("rows", "batch", "shared"),
    [
        (range(6000), 128, None),  # what all folds are picked from
        (range(6000), 6000, (4800, 6000)),  # all of it at once
        (range(4000, 6000), 128, (800, 2000)),  # the validation, with some of training
    ],
)
def test_a_table_of_all_folds_is_no_validation(rows, batch, shared):
    train = Loader("torch.utils.data.DataLoader", in_training=True)
    table = Table("x", None, len(rows), batch, in_training=False)
    sets = [(train, Samples([*range(4800)], None)), (table, Samples([*rows], None))]
    compare(sets, Scalers(Watch()))
    assert table.shared_rows == shared
