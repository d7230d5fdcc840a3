"""Small jobs of each framework, run in their own process where they change global state."""

import time

import torch
from torch import nn

SAMPLES, BATCH = 96, 16


class Rows(torch.utils.data.Dataset):
    """Samples that take a known time to read."""

    def __init__(self, samples=SAMPLES, read_s=0.0):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(samples, 8, generator=generator)
        self.y = torch.randint(0, 2, (samples,), generator=generator)
        self.read_s = read_s

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        time.sleep(self.read_s)
        return self.x[index], self.y[index]


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 2))


def check_lanes(callback, seconds):
    """The lanes make up the time of the fit, and no more than that."""
    found = callback.as_dict()
    total = sum(callback.timeline.lanes().values()) * callback.timeline.steps / 1e3
    assert total <= seconds
    known = {lane: ms for lane, ms in found["lanes_ms"].items() if ms is not None}
    assert {lane for lane, ms in found["lanes_ms"].items() if ms is None} == set(found["hidden_in"])
    assert abs(sum(known.values()) - sum(callback.timeline.lanes().values())) < 1e-6
    assert found["critical_lane"] in known
    assert found["added_us_per_step"] > 0
    return total
