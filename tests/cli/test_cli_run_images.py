"""Images on two ranks: the same classes, and the model of one rank to rounding."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from flatout.measure import usable_cpus
from flatout.save.model_file import load_model, open_model

Image = pytest.importorskip("PIL.Image")

pytestmark = pytest.mark.skipif(usable_cpus() < 2, reason="two ranks take two CPUs")

TRAIN = """
    import sys, torch, flatout

    train = flatout.data.images("train", size=8).shuffle(seed=1).batch(6).normalize(0.5, 0.25)
    val = flatout.data.images("val", size=8)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 3))
    trainer = flatout.Trainer(model, lr=0.01, allow="exact", metrics=["accuracy"])
    trainer.fit(train, validation_data=val, epochs=3, progress=False)
    output = trainer.predict("val/red/0.png")
    trainer.save(sys.argv[1])
    if trainer.world().is_first:
        print(trainer.classes[output[0].argmax()], trainer.history.epochs[-1]["val_accuracy"])
"""


@pytest.mark.slow
def test_two_ranks_train_on_images_as_one_does(tmp_path):
    for part, names in (("train", {"blue": 30, "green": 120, "red": 220}), ("val", {"red": 220})):
        for name, shade in names.items():
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(8):
                pixels = np.full((8, 8, 3), shade + number, np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / name / f"{number}.png")
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    for ranks in (1, 2):
        call = "from flatout.cli.main import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", call, "run", "--devices", str(ranks), "train.py",
             f"{ranks}.safetensors"],
            cwd=tmp_path,
            env={**os.environ, "FLATOUT_CACHE": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["red", "1.0"]
        assert "validation: classes have the model's numbers, 0 to 2" in done.stderr
    one, two = (load_model(tmp_path / f"{ranks}.safetensors") for ranks in (1, 2))
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-5)
    texts = [open_model(tmp_path / f"{ranks}.safetensors")[1] for ranks in (1, 2)]
    assert texts[0] == texts[1]
    assert "flatout.signature" in texts[0]
