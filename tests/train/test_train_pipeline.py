import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import flatout
from flatout.data import iterable
from flatout.errors import DataError
from flatout.train.waiting import waiting_words
from plain_recipe import PLAIN


class Stop(flatout.Callback):
    def __init__(self, at=0):
        self.at = at

    def on_step(self, state):
        if state.step == self.at:
            state.stop("here")


def data(rows=200, seed=0):
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(rows, 4)).astype(np.float32)
    return flatout.data.arrays(x, (x.sum(axis=1) > 0).astype(np.int64))


def trainer(**arguments):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    return flatout.Trainer(model, lr=0.05, metrics=["accuracy"], recipe=PLAIN, **arguments)


def weights(job):
    return [parameter.detach().clone() for parameter in job.model.parameters()]


def mapped():
    return data().shuffle(seed=3).map(lambda x, y: (x * 2, y)).batch(16).cache()


def test_a_pipeline_trains_and_is_evaluated():
    train, val = mapped().split(0.8, seed=1, stratify=True)
    job = trainer()
    history = job.fit(train, validation_data=val, epochs=8, progress=False)
    assert history.epochs[-1]["val_accuracy"] > 0.9
    assert job.evaluate(val)["accuracy"] == pytest.approx(history.epochs[-1]["val_accuracy"])
    assert job.predict(data().batch(32)).shape == (200, 2)


def test_samples_without_batches_are_batched_by_fit():
    job = trainer()
    history = job.fit(data().shuffle(seed=1), batch_size=20, epochs=1, progress=False)
    assert history.batch_size == 20
    assert len(history.timeline.step_times()) == 10
    assert set(job.evaluate(data().map(lambda x, y: (x, y)))) == {"loss", "accuracy"}
    with pytest.raises(DataError, match="makes its own batches of 16"):
        job.fit(mapped(), batch_size=20, progress=False)
    with pytest.raises(DataError, match="the batch is larger than the data"):
        job.fit(data(10).shuffle(seed=1), batch_size=20, progress=False)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_resume_in_mid_epoch_is_bitwise(tmp_path, threads):
    whole = trainer()
    whole.fit(mapped(), epochs=3, progress=False)
    first = trainer(run=tmp_path / "run")
    first.fit(mapped(), epochs=3, progress=False, callbacks=[Stop(20)])
    again = trainer(run=tmp_path / "run")
    pipeline = mapped().options(threads=threads)
    again.fit(pipeline, epochs=3, progress=False, resume=True, callbacks=[Stop()])
    assert all(map(torch.equal, weights(whole), weights(again)))
    other = trainer(run=tmp_path / "run")
    with pytest.raises(DataError, match="differ from those of the checkpoint"):
        other.fit(mapped().split(0.5)[0], epochs=4, progress=False, resume=True, callbacks=[Stop()])


def test_what_the_pipeline_notes_is_said():
    said = []
    job = trainer(say=said.append)
    job.fit(mapped(), epochs=1, progress=False)
    assert any("input: cache before shuffle and batch: same batches" in line for line in said)


@pytest.mark.slow
def test_training_that_waits_for_its_input_hears_so_once_and_what_would_help(capsys):
    class Slow(Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, at):
            return slow(*(part[at] for part in arrays))

    def slow(x, y):
        time.sleep(0.02)
        return x, y

    arrays = (torch.zeros(64, 4), torch.zeros(64).long())
    waits = {
        "most of it for map slow; without waiting, training is up to": data(128)
        .map(slow)
        .batch(16)
        .options(threads=1),
        "__getitems__": Slow(),
        "a DataLoader with": DataLoader(Slow(), 16),
    }
    for words, made in waits.items():
        said = []
        history = trainer(say=said.append).fit(made, epochs=1, progress=False)
        (told,) = [line for line in said if "input held the training back: " in line]
        assert words in told
        assert history.notes[-1] == told
    trainer().fit(DataLoader(Slow(), 16), epochs=1)
    assert capsys.readouterr().err.count("input held the training back") == 1


def test_advice_knows_that_a_thread_reads_ahead():
    source = iterable(lambda: iter([(torch.zeros(4, 4), torch.zeros(4).long())]))
    lanes = {"input": 50.0, "forward": 50.0}
    told = waiting_words(source, lanes, 100, 4)
    assert "each batch is made when training asks for it" in told
    assert (
        "50% of the time was waiting; without waiting, training is up to 2.0 times as fast; "
        in told
    )
    source.reader.settled = "thread"
    assert "one thread makes batches ahead" in waiting_words(source, lanes, 100, 4)


def _mean_of_squares(output, target):
    return (output - target[:, None]).square().mean()


@pytest.mark.parametrize("loss", ["cross_entropy", torch.nn.CrossEntropyLoss(), _mean_of_squares])
def test_padded_batches_weigh_what_is_there(loss):
    # 2 samples and 14 rows of filling in the last batch.
    plain, padded = (data(50).batch(16, last=last) for last in ("keep", "pad"))
    job = trainer(loss=loss)
    expected, found = job.evaluate(plain), job.evaluate(padded)
    assert found == pytest.approx(expected, rel=1e-6)
    ours, theirs = trainer(loss=loss), trainer(loss=loss)
    logs = ours.fit(padded, epochs=2, progress=False).epochs
    others = theirs.fit(plain, epochs=2, progress=False).epochs
    for one, other in zip(logs, others, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["accuracy"] == pytest.approx(other["accuracy"])
    for one, other in zip(weights(ours), weights(theirs), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_predictions_are_of_the_samples_and_not_of_what_fills_batches_up():
    job = trainer()
    x = torch.from_numpy(np.array([b.inputs for b in data(50).batch(1).batches(0)])[:, 0])
    found = job.predict(data(50).batch(16, last="pad"))
    torch.testing.assert_close(
        found, job.predict(x, batch_size=16)
    )  # 16 rows and 2 may round apart
    assert len(found) == 50


def test_samples_per_second_are_of_the_samples_that_are_there():
    for last in ("keep", "pad"):
        job = trainer()
        history = job.fit(data(50).batch(48, last=last), epochs=3, progress=False)
        assert history.timeline.step_samples().tolist() == [48, 2] * 3
        assert history.timeline.samples == 150
        seconds = sum(3 * np.median(history.step_times[n::2]) for n in (0, 1))
        assert history.throughput == pytest.approx(150 / seconds)
        assert job._fit.state.samples == 150


def test_samples_of_accumulated_and_ragged_batches_are_counted():
    draw = torch.Generator().manual_seed(0)
    ready = [(torch.randn(n, 4, generator=draw), torch.zeros(n).long()) for n in (40, 3, 5, 2, 9)]
    history = trainer(accumulate=2).fit(ready, epochs=1, progress=False)
    assert history.timeline.step_samples().tolist() == [43, 7, 9]
    assert "3 steps of up to 43 samples" in history.summary()


@pytest.mark.parametrize("last", ["keep", "drop", "pad"])
def test_a_batch_of_a_pipeline_larger_than_the_data_is_an_error(last):
    made = data(30).batch(31, last=last)
    with pytest.raises(DataError, match=r"the batch is larger .* but there are 30 samples"):
        trainer().fit(made, progress=False)
    if last == "drop":
        with pytest.raises(DataError, match="drops all of the 30 samples"):
            trainer().evaluate(made)
    else:
        assert len(trainer().predict(made)) == 30


def test_a_batch_larger_than_a_pass_or_than_the_rows_of_all_ranks_is_an_error():
    for made in (data(30).batch(31).repeat(2), data(30).batch(31).shard(0, 2, by="rows")):
        with pytest.raises(DataError, match=r"the batch is larger .* but there are 30 samples"):
            trainer().fit(made, progress=False)
    for made in (data(30).repeat(2).batch(31), data(30).batch(30).shard(0, 2, by="rows")):
        flatout.data.as_source(made)
