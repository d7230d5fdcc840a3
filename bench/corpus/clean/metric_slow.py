"""Will a customer leave? Logistic regression with the area under the curve at hand."""

import argparse

import torch
from sklearn.metrics import roc_auc_score
from torch import nn


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(6400, 20)
    y = (x[:, 0] - x[:, 1] + torch.randn(6400) > 0).float()
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        scores, truths = [], []
        for step, rows in enumerate(torch.randperm(len(x)).split(64), 1):
            truth = y.index_select(0, rows)
            score = model(x.index_select(0, rows)).squeeze(1)
            loss = nn.functional.binary_cross_entropy_with_logits(score, truth)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scores.append(score.detach())
            truths.append(truth)
            if step == args.steps:
                break
        auc = roc_auc_score(torch.cat(truths), torch.cat(scores))
        print(f"epoch {epoch}: last loss {loss.item():.3f}, area under the curve {auc:.3f}")
    torch.save(model.state_dict(), "leavers.pt")


if __name__ == "__main__":
    main()
