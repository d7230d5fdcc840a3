"""Other frameworks' code of the documentation beside ours: run where the framework is installed.

Both are run word for word, and what they learn is compared.
"""

import re
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_docs_blocks import DOCS, blocks, need, run

MIGRATE = sorted((DOCS / "migrate").glob("*.md"))
# The page of the systems that have ended shows only our side.
ENDED = "ended_systems"
# Which settings win differs between machines; at this one the result is the plain job's.
PLAIN = '["compute.precision=fp32"]'


def write_files(page, folder):
    for block in blocks(page):
        if block.title is not None:
            (folder / block.title).write_text(block.body)


def python(script, folder, *arguments, **variables):
    command = [sys.executable, script, *arguments]
    return run(command, folder, FLATOUT_SET=PLAIN, **variables)


def figures(said):
    """Loss, where it was said, and accuracy in the last line that says both."""
    line = re.findall(r"^(?:loss [\d.]+, )?accuracy [\d.]+$", said, re.MULTILINE)[-1]
    return [float(number) for number in re.findall(r"[\d.]+", line)]


def assert_same_weights(a, b):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("page", MIGRATE, ids=lambda page: page.stem)
def test_a_page_shows_both_sides_and_both_are_python(page):
    titles = [block.title for block in blocks(page) if block.title is not None]
    assert page.stem == ENDED or f"with_{page.stem}.py" in titles
    assert "with_flatout.py" in titles
    for block in blocks(page):
        if block.language == "python":
            compile(block.body, f"{page.name}: {block.title}", "exec")


@pytest.mark.slow
def test_lightning_and_we_learn_the_same(tmp_path):
    need("lightning")
    write_files(DOCS / "migrate" / "lightning.md", tmp_path)
    theirs = python("with_lightning.py", tmp_path)
    ours = python("with_flatout.py", tmp_path)
    assert figures(ours) == pytest.approx(figures(theirs), rel=1e-4)
    assert figures(ours)[-1] > 0.8
    command = "flatout export lightning.ckpt plain.safetensors"
    assert command in (DOCS / "migrate" / "lightning.md").read_text()
    run(command.split(), tmp_path)
    assert_same_weights(
        load_file(tmp_path / "plain.safetensors"), load_file(tmp_path / "model.safetensors")
    )


@pytest.mark.slow
def test_hugging_face_and_we_learn_the_same(tmp_path):
    need("transformers")
    write_files(DOCS / "migrate" / "hugging_face.md", tmp_path)
    theirs = python("with_hugging_face.py", tmp_path, HF_HUB_OFFLINE="1")
    ours = python("with_flatout.py", tmp_path)
    assert figures(ours) == figures(theirs)
    assert_same_weights(
        torch.load(tmp_path / "model.pt"), load_file(tmp_path / "out" / "model.safetensors")
    )


@pytest.mark.slow
def test_fastai_and_we_learn_the_same(tmp_path):
    need("fastai")
    write_files(DOCS / "migrate" / "fastai.md", tmp_path)
    theirs, ours = (python(f"with_{name}.py", tmp_path) for name in ("fastai", "flatout"))
    assert figures(ours) == pytest.approx(figures(theirs), abs=2e-4)
    assert figures(ours)[-1] > 0.8
    learned = torch.load(tmp_path / "fastai.pt")
    assert_same_weights(load_file(tmp_path / "model.safetensors"), learned)


@pytest.mark.slow
def test_accelerate_and_we_learn_the_same(tmp_path):
    need("accelerate")
    write_files(DOCS / "migrate" / "accelerate.md", tmp_path)
    names = ("with_accelerate.py", "with_flatout.py", "with_trainer.py")
    theirs, loop, trainer = (figures(python(name, tmp_path)) for name in names)
    assert loop == trainer == theirs
    assert theirs[-1] > 0.8
    learned = load_file(tmp_path / "state" / "model.safetensors")
    assert_same_weights(torch.load(tmp_path / "model.pt"), learned)
    assert_same_weights(load_file(tmp_path / "model.safetensors"), learned)


PREDICT = """
import sys
import keras
import numpy as np
from sklearn.datasets import load_digits

model = keras.saving.load_model(sys.argv[1])
pixels = load_digits().data.astype("float32") / 16
inputs = pixels.reshape(-1, *model.input_shape[1:])
np.save(sys.argv[2], model.predict(inputs, verbose=0))
"""


def assert_predicts_the_same(file, folder, *backends):
    (folder / "predict.py").write_text(PREDICT)
    for backend in backends:
        python("predict.py", folder, file, f"{backend}.npy", KERAS_BACKEND=backend)
    first, *others = (np.load(folder / f"{backend}.npy") for backend in backends)
    assert len(first) == 1797
    for other in others:
        np.testing.assert_allclose(other, first, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("backend", ["torch", "tensorflow", "jax"])
def test_one_line_of_keras_changes_and_files_go_both_ways(backend, tmp_path):
    need("keras")
    need(backend)
    write_files(DOCS / "keras.md", tmp_path)
    train = tmp_path / "train.py"
    assert train.read_text().count("flatout.Trainer(model).fit(") == 1
    keras_alone = train.read_text().replace("flatout.Trainer(model).fit(", "model.fit(")
    train.write_text(keras_alone.replace("import flatout\n", ""))
    said = python("train.py", tmp_path, KERAS_BACKEND=backend)
    assert said.splitlines()[-1] == "['accuracy', 'loss', 'val_accuracy', 'val_loss']"
    said = run(["flatout", "run", "continue.py"], tmp_path, FLATOUT_SET=PLAIN)
    before, now = re.search(r"trained for (\d+) steps before, (\d+) now", said).groups()
    assert int(before) > 0
    assert int(now) == int(before) + 29  # an epoch of 1,797 samples
    assert_predicts_the_same("continued.keras", tmp_path, "torch", backend)


@pytest.mark.slow
def test_mirrored_strategy_and_we_learn_the_same_and_go_on_with_its_file(tmp_path):
    need("keras")
    need("tensorflow")
    write_files(DOCS / "migrate" / "mirrored_strategy.md", tmp_path)
    theirs = figures(python("with_mirrored_strategy.py", tmp_path))
    ours = figures(run(["flatout", "run", "with_flatout.py"], tmp_path, FLATOUT_SET=PLAIN))
    # Each shuffles in its own way: the same job in another order.
    assert ours == pytest.approx(theirs, abs=0.03)
    assert ours[-1] > 0.9
    loaded = figures(run(["flatout", "run", "go_on.py"], tmp_path, FLATOUT_SET=PLAIN))
    assert loaded == pytest.approx(theirs, abs=0.001)
    assert_predicts_the_same("mirrored.keras", tmp_path, "torch", "tensorflow")
