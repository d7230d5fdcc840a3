"""Labels that come sorted, whatever the script calls what they are taken from."""

from threading import get_ident
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from flatout.doctor.checks import labels_sorted
from flatout.observe import Observation
from flatout.observe.labels import Labels
from flatout.observe.loaders import facts_of
from flatout.observe.watch import Watch

CLASSES, EACH, BATCH = 4, 100, 10


class Watched:
    """Steps under watch."""

    def __init__(self):
        self.watch = Watch()
        self.watch.lanes.thread = get_ident()
        self.labels = Labels(torch, self.watch)
        self.looks = 0
        later = self.labels._later
        later._looking = self._counted(later._looking)

    def _counted(self, looking):
        def hook(original):
            self.looks += 1
            return looking(original)

        return hook

    def step(self, *losses):
        """One in which backward is called on each of these."""
        # The hook of all backward passes looks at the first ones, from the same line.
        looks = self.watch.before_backward if self.watch.is_beginning else []
        for loss in losses:
            for call in (*looks, torch.Tensor.backward):
                call(loss)
        self.watch.lanes.steps += 1
        if self.watch.lanes.steps >= self.watch.lanes.due:
            self.watch.attend()

    def found(self):
        seen = Observation(["train.py"], steps=100, in_losses=self.labels.results())
        assert not self.watch.notes
        return [finding.what for finding in labels_sorted.look(seen)]


@pytest.fixture
def watched():
    result = Watched()
    yield result
    result.labels._later.close()


def scores(rows, classes=CLASSES):
    return torch.randn(rows, classes, requires_grad=True) * 2


def of_classes(labels):
    return functional.cross_entropy(scores(len(labels)), labels)


def of_one_hot(labels):
    return functional.cross_entropy(
        scores(len(labels)), functional.one_hot(labels, CLASSES).float()
    )


def of_two(labels):
    target = (labels > 1).float()[:, None]
    return functional.binary_cross_entropy_with_logits(scores(len(labels), 1), target) + 0.5


def grades(is_sorted):
    order = torch.arange(CLASSES * EACH) if is_sorted else torch.randperm(CLASSES * EACH)
    return order // EACH


class Rows(torch.utils.data.Dataset):
    """Samples of which the labels have a name of their own."""

    def __init__(self, held):
        self.held = held

    def __len__(self):
        return len(self.held)


NAMES = ("a", "b", "c", "d")
FORMS = {
    "entry": lambda kinds: {"rows": torch.randn(len(kinds), 3), "grade": kinds},
    "column": lambda kinds: torch.cat([torch.randn(len(kinds), 3), kinds[:, None].float()], 1),
    "array": lambda kinds: kinds.numpy().astype("float64"),
    "dicts": lambda kinds: [{"x": torch.randn(3), "grade": torch.tensor(int(k))} for k in kinds],
    "pairs": lambda kinds: [(torch.randn(3), int(k)) for k in kinds],
    "words": lambda kinds: [NAMES[int(k)] for k in kinds],
    "within": lambda kinds: Rows({"grade": kinds}),
    "frame": lambda kinds: pytest.importorskip("pandas").DataFrame(
        {"species": [NAMES[int(k)] for k in kinds], "size": torch.randn(len(kinds)).tolist()}
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_sorted", [True, False])
def test_sorted_labels_are_found_in_what_the_script_has(watched, form, is_sorted):
    kinds = grades(is_sorted)
    held, batches = FORMS[form](kinds), kinds[: 8 * BATCH].clone().split(BATCH)
    del kinds
    for batch in batches:
        watched.step(of_classes(batch))
    assert len(held)
    assert len(watched.found()) == is_sorted


@pytest.mark.parametrize("form", ["column", "dicts", "words", "frame"])
@pytest.mark.parametrize("is_sorted", [True, False])
def test_sorted_labels_are_found_in_a_dataset(watched, form, is_sorted):
    kinds = grades(is_sorted)
    data = torch.utils.data.Subset(Rows(FORMS[form](kinds)), range(20, 400))
    loader = torch.utils.data.DataLoader(data, BATCH)
    watched.watch.lanes.loader = SimpleNamespace(ref=lambda: loader, facts=facts_of(loader, None))
    given = kinds[20:]
    for rows in torch.arange(8 * 12).split(12):  # some batches have two classes
        watched.step(of_classes(given[rows]))
    assert len(watched.found()) == is_sorted


@pytest.mark.parametrize("loss", [of_classes, of_one_hot, of_two], ids=lambda loss: loss.__name__)
def test_labels_that_are_made_as_they_are_needed_are_looked_at_later(watched, loss):
    for step in range(120):
        watched.step(loss(torch.full((BATCH,), step // 30)))
    assert "2 different ones in turn" in watched.found()[0]
    assert watched.looks < 20


def test_labels_in_any_order_are_not_looked_at_later(watched):
    for _ in range(100):
        watched.step(of_classes(torch.randint(0, CLASSES, (BATCH,))))
    assert watched.looks == 1
    assert not watched.found()


def halves(step):
    """Of a GAN whose one function steps both networks: made samples are 0, then 1."""
    return torch.full((BATCH,), 2 * (step % 2))


def recurring(step):
    """States of a machine that come again."""
    return torch.full((BATCH,), step // 9 % 2)


def contrasts(step):
    return torch.arange(CLASSES).repeat(3)


def test_the_halves_of_a_loss_and_pairs_of_a_batch_are_no_order(watched):
    for step in range(60):
        watched.step(of_two(halves(step)))
        watched.step(of_classes(contrasts(step)))
    assert not watched.found()


def test_losses_of_one_class_each_are_told_apart(watched):
    for _ in range(60):
        watched.step(of_two(halves(0)), of_two(halves(1)), of_classes(halves(0)))
    assert not watched.found()


def test_halves_of_a_loss_are_looked_at_no_more(watched):
    for _ in range(60):
        watched.step(of_two(halves(0)), of_two(halves(1)))
    assert watched.looks == 1
    assert not watched.found()


def test_states_that_come_again_and_windows_of_a_series_are_no_order(watched):
    states = torch.cat([recurring(step) for step in range(80)])
    for rows in torch.arange(80).split(BATCH):
        watched.step(functional.cross_entropy(scores(BATCH, 2), states[rows]))
    assert not watched.found()


@pytest.mark.parametrize("is_series", [True, False])
def test_windows_of_a_series_are_taken_as_it_goes_on(watched, is_series):
    windows = torch.randn(400, 5).unfold(0, 16, 1 if is_series else 20)
    watched.labels._look_at_input(None, windows, True)
    kinds = grades(True)
    for rows in torch.arange(80).split(BATCH):
        watched.step(of_classes(kinds[rows]))
    assert len(watched.found()) == (not is_series)


def test_a_rare_class_and_another_column_that_lies_sorted_are_no_order(watched):
    rare = torch.zeros(800, dtype=torch.long)
    rare[torch.tensor([150, 400, 790])] = 1
    table = {"fold": torch.arange(800) // 400, "fraud": rare}
    for rows in torch.arange(80).split(BATCH):
        watched.step(functional.cross_entropy(scores(BATCH, 2), table["fraud"][rows]))
    assert not watched.found()
