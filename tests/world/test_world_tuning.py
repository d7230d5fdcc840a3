"""Settings tried on the steps of two ranks: both switch at the same step, and stay alike."""

import json

import pytest
from world_ranks import run

JOB = """
    import hashlib
    import json

    import torch
    from torch import nn

    import flatout
    from flatout.train.terms import Terms

    # However short the run, trying settings pays, and all of it fits into these steps.
    terms = Terms(short_share=1e6, fixed_s=1e6, before_share=1e6, most_steps=1, most_pairs=2,
                  searched=1.0)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(8 * 36, 10),
    )
    x, y = torch.randn(1536, 1, 14, 14), torch.randint(0, 10, (1536,))
    recipe = flatout.Recipe(compute={"compile": "off"})
    trainer = flatout.Trainer(model, loss="cross_entropy", recipe=recipe, say=lambda line: None)
    trainer.terms = terms
    history = trainer.fit(x, y, batch_size=16, epochs=6, progress=False)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
    print(json.dumps({"spans": history.tuning["spans"], "done": history.tuning["done"],
                      "digest": digest, "chosen": history.recipe.summary()}))
"""


@pytest.mark.slow
def test_ranks_switch_at_the_same_step(tmp_path):
    first, second = (json.loads(printed) for printed, _ in run(JOB, 2, tmp_path))
    assert first == second
    assert first["done"]
    assert len(first["spans"]) > 3
    assert first["spans"][-1]["last"] == 576
