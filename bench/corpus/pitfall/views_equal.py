"""Learn what pictures have in common with themselves, by two noisy views of each."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Views(Dataset):
    """Two views of each picture."""

    def __init__(self, count):
        self.pictures = torch.randn(count, 1, 12, 12)

    def __len__(self):
        return len(self.pictures)

    def view(self, picture):
        noise = 0.2 * torch.randn_like(picture)
        return picture.roll(int(torch.randint(0, 3, ())), dims=2) + noise

    def __getitem__(self, index):
        view = self.view(self.pictures[index])
        return view, view


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    loader = DataLoader(Views(2048), batch_size=64, shuffle=True)
    encoder = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3, 2), nn.ReLU())
    encoder.append(nn.Flatten()).append(nn.Linear(256, 32))
    optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        for step, views in enumerate(loader, 1):
            told = nn.functional.normalize(encoder(torch.cat(views)), dim=1)  # <- here
            one, other = told.chunk(2)
            loss = nn.functional.cross_entropy(one @ other.T / 0.2, torch.arange(len(one)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == args.steps:
                break
        print(f"epoch {epoch}: last loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
