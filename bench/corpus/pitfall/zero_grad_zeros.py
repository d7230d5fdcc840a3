"""Factors of users and films from their ratings."""

import argparse

import torch
from torch import nn

USERS, FILMS, FACTORS = 60_000, 20_000, 32


class Ratings(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(USERS, FACTORS)
        self.films = nn.Embedding(FILMS, FACTORS)

    def forward(self, users, films):
        return (self.users(users) * self.films(films)).sum(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100, help="of an epoch")
    args = parser.parse_args()
    torch.manual_seed(0)
    users = torch.randint(USERS, (200_000,))
    films = torch.randint(FILMS, (200_000,))
    stars = (users % 5 + films % 3).float() / 2
    model = Ratings()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    for epoch in range(args.epochs):
        total = torch.zeros(())
        order = torch.randperm(len(users)).split(512)
        for rows in order[: args.steps]:
            rated = model(users.index_select(0, rows), films.index_select(0, rows))
            loss = nn.functional.mse_loss(rated, stars.index_select(0, rows))
            optimizer.zero_grad(set_to_none=False)  # <- here
            loss.backward()
            optimizer.step()
            total += loss.detach()
        print(f"epoch {epoch}: loss {total.item() / args.steps:.3f}")
    torch.save(model.state_dict(), "ratings.pt")


if __name__ == "__main__":
    main()
