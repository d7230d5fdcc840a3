"""Copies to a device that do not block, and tensors that are made where they are used."""

import pytest

from flatout.doctor.finding import Finding
from flatout.doctor.proposals import propose
from flatout.observe import Call, Observation, Site


def edited(tmp_path, name, line):
    script = tmp_path / "train.py"
    script.write_text(f"import torch\n{line}\n")
    site = Site(str(script), 2, line)
    seen = Observation(["train.py"], device="cuda:0", calls=[Call("to_device", site, 1, 1.0, 1)])
    edits = propose(Finding("slow", "", "", name=name, where=str(site)), seen)
    return edits[0].after if edits else None


@pytest.mark.parametrize(
    ("line", "after"),
    [
        ("x, y = x.to(device), y.cuda()",
         "x, y = x.to(device, non_blocking=True), y.cuda(non_blocking=True)"),
        ("x = x.to(device, non_blocking=False)", "x = x.to(device, non_blocking=True)"),
        ('x, y = x.to(device), y.to("cpu")', None),
        ("x = move(x)", None),
    ],
)  # fmt: skip
def test_each_copy_of_the_line_no_longer_blocks(tmp_path, line, after):
    assert edited(tmp_path, "copy_blocks", line) == after


@pytest.mark.parametrize(
    ("line", "after"),
    [
        ("w = torch.ones(10).to(device)", "w = torch.ones(10, device=device)"),
        ("w = torch.zeros(2, 3).cuda() + 1", 'w = torch.zeros(2, 3, device="cuda") + 1'),
        ("w = (torch.full((2,), 0.5)).to(self.device)",
         "w = (torch.full((2,), 0.5, device=self.device))"),
        ("w = torch.ones(10).to(torch.float16)", None),
        ("w = torch.ones(10).to(device, torch.float16)", None),
        ("w = torch.randn(10).to(device)", None),
        ("w = np.ones(10).to(device)", None),
    ],
)  # fmt: skip
def test_a_constant_is_made_on_the_device(tmp_path, line, after):
    assert edited(tmp_path, "made_on_host", line) == after
