"""Learn to draw points of two moons, by a generator and a discriminator."""

import argparse

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy


def moons(count):
    angle, upper = torch.rand(count) * torch.pi, torch.randint(0, 2, (count,)) * 2 - 1
    points = torch.stack([angle.cos(), angle.sin() * upper], 1)
    return points + upper[:, None] * torch.tensor([-0.5, 0.2]) + 0.1 * torch.randn(count, 2)


def network(inputs, outputs):
    parts = [nn.Linear(inputs, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2)]
    return nn.Sequential(*parts, nn.Linear(128, outputs))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    data = moons(4096)
    generator, discriminator = network(16, 2), network(2, 1)
    opt_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=True)
    opt_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=True)
    for epoch in range(args.epochs):
        for step, rows in enumerate(torch.randperm(len(data)).split(128), 1):
            real = data.index_select(0, rows)
            fake = generator(torch.randn(len(rows), 16))
            true, false = torch.ones(len(rows), 1), torch.zeros(len(rows), 1)
            opt_d.zero_grad()
            loss_d = cross_entropy(discriminator(real), true)
            loss_d = loss_d + cross_entropy(discriminator(fake), false)
            loss_d.backward(retain_graph=True)  # <- here
            opt_d.step()
            opt_g.zero_grad()
            loss_g = cross_entropy(discriminator(fake), true)
            loss_g.backward()
            opt_g.step()
            if step == args.steps:
                break
        print(f"epoch {epoch}: discriminator {loss_d.item():.3f}, generator {loss_g.item():.3f}")


if __name__ == "__main__":
    main()
