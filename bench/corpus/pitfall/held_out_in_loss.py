"""Tell kinds of nodes apart in a graph of 2,000."""

import argparse

import torch
from torch import nn


class GraphNet(nn.Module):
    """Two layers, each over a node and its neighbors."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(32, width), nn.Linear(width, 5)

    def forward(self, x, adjacency):
        x = torch.relu(adjacency @ self.first(x))
        return adjacency @ self.second(x)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--width", type=int, default=16)
    args = parser.parse_args()
    torch.manual_seed(0)
    y = torch.randint(0, 5, (2000,))
    x = torch.randn(5, 32)[y] + 3 * torch.randn(2000, 32)
    edges = torch.randint(0, 2000, (2, 40000))
    edges = edges[:, (y[edges[0]] == y[edges[1]]) | (torch.rand(40000) < 0.1)]
    weights = torch.ones(edges.shape[1]) / 20
    adjacency = torch.sparse_coo_tensor(edges, weights, (2000, 2000)).coalesce()
    order = torch.randperm(2000)
    train_mask = torch.zeros(2000, dtype=torch.bool)
    test_mask = torch.zeros(2000, dtype=torch.bool)
    train_mask[order[:200]], test_mask[order[1000:]] = True, True
    model = GraphNet(args.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
    for epoch in range(args.epochs):
        model.train()
        out = model(x, adjacency)
        loss = nn.functional.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()  # <- here
        optimizer.step()
        if epoch % 10 == 9:
            model.eval()
            with torch.no_grad():
                out = model(x, adjacency)
            right = (out.argmax(1) == y)[test_mask].float().mean().item()
            print(f"epoch {epoch}: loss {loss.item():.4f}, test {right:.3f}")


if __name__ == "__main__":
    main()
