"""Several optimizers on two ranks: the bits of a plain torch loop that adds up two half batches."""

import pytest
import torch
from world_ranks import run

# What both the ranks and the plain loop are made of. Half batches add up in the order of ranks, and
# all sizes are powers of two, so that no division rounds.
PARTS = """
    import sys
    from pathlib import Path

    import torch
    from torch import nn
    from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

    torch.set_num_threads(1)
    SAMPLES, BATCH, EPOCHS = 64, 16, 2
    draw = torch.Generator().manual_seed(1)
    real, noise = torch.randn(SAMPLES, 6, generator=draw), torch.randn(SAMPLES, 4, generator=draw)
    # Each row of the table at most once in a half batch: a sum of more has an order.
    words = torch.cat([torch.randperm(48, generator=draw)[:40] for _ in range(8)]).view(SAMPLES, 5)


    def layers(*sizes):
        return nn.Sequential(nn.Linear(*sizes[:2]), nn.Tanh(), nn.Linear(*sizes[1:]))


    class Models(nn.ModuleDict):
        def __init__(self):
            torch.manual_seed(0)
            table = nn.Embedding(48, 4, sparse=True)
            super().__init__(
                {"made": layers(4, 8, 6), "critic": layers(6, 8, 1), "table": table,
                 "rest": layers(4, 8, 1)}
            )
            self.optimizers = {
                "made": torch.optim.Adam(self["made"].parameters(), lr=1e-2),
                "critic": torch.optim.SGD(self["critic"].parameters(), lr=1e-2, momentum=0.9),
                "table": torch.optim.SparseAdam(self["table"].parameters(), lr=1e-2),
                "rest": torch.optim.Adam(self["rest"].parameters(), lr=1e-2),
            }

        def judged(self, x, is_real):
            found = self["critic"](x)
            wanted = torch.full_like(found, float(is_real))
            return binary_cross_entropy_with_logits(found, wanted, reduction="sum")

        def of_critic(self, x, z, _):
            return self.judged(x, 1) + self.judged(self["made"](z).detach(), 0)

        def of_made(self, x, z, _):
            return self.judged(self["made"](z), 1)  # leaves gradients in the critic

        def of_words(self, x, z, w):
            found = self["rest"](self["table"](w).mean(1))
            return mse_loss(found, x[:, :1], reduction="sum")

        def turns(self):
            opt = self.optimizers
            return [
                (self.of_critic, [opt["critic"]]),
                (self.of_made, [opt["made"]]),
                (self.of_words, [opt["table"], opt["rest"]]),
            ]
"""
RANKS = (
    PARTS
    + """
    import flatout
    from flatout.world import place

    folder, stop_at = Path(sys.argv[1]), int(sys.argv[3])
    models = Models()
    source = flatout.data.as_source(((real, noise, words), torch.zeros(SAMPLES)), batch_size=BATCH,
                                    shuffle=False)
    loop = flatout.Loop(allow="exact", run=folder / "run", resume=stop_at == 0)


    def first(batch):
        return models.of_critic(*batch.inputs), batch.size


    loop.prepare(models, list(models.optimizers.values()), compute=first, data=source)
    for _ in loop.epochs(EPOCHS):
        for batch in loop.batches(source):
            for loss, optimizers in models.turns():
                loop.step(lambda b: (loss(*b.inputs), b.size), batch, optimizers)
            if loop.step_count == stop_at:
                loop.save()
                loop.close()
                sys.exit()
    loop.close()
    torch.save(models.state_dict(), folder / f"rank-{place().rank}.pt")
"""
)
PLAIN = (
    PARTS
    + """
    models = Models()
    for epoch in range(EPOCHS):
        for at in torch.arange(SAMPLES).split(BATCH):
            for loss, optimizers in models.turns():
                for optimizer in optimizers:
                    optimizer.zero_grad()
                for half in at.chunk(2):
                    (loss(real[half], noise[half], words[half]) / BATCH).backward()
                for optimizer in optimizers:
                    optimizer.step()
    torch.save(models.state_dict(), Path(sys.argv[1]) / "plain.pt")
"""
)


def of_a_function(script):
    """The same, where no layer says that the table's gradients are sparse."""
    layer, function = 'self["table"](w)', 'embedding(w, self["table"].weight, sparse=True)'
    assert layer in script
    return script.replace(", sparse=True)", ")").replace(layer, f"nn.functional.{function}")


@pytest.mark.parametrize("stop_at", [None, pytest.param(9, marks=pytest.mark.slow)])
def test_two_ranks_have_the_bits_of_a_plain_loop(tmp_path, stop_at):
    run(PLAIN, 1, tmp_path)
    if stop_at:
        run(RANKS, 2, tmp_path, stop_at)
        run(RANKS, 2, tmp_path, 0)
    else:
        run(of_a_function(RANKS), 2, tmp_path, -1)
    plain = torch.load(tmp_path / "plain.pt")
    for rank in range(2):
        found = torch.load(tmp_path / f"rank-{rank}.pt")
        assert [name for name in plain if not torch.equal(found[name], plain[name])] == []
