"""Check for losses whose output and target are broadcast against each other."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import at, in_losses
from flatout.doctor.finding import Finding
from flatout.observe import Observation


@check(hooks=True)
def look(observation: Observation) -> Findings:
    """Report losses that broadcast n outputs against n targets to n x n pairs."""
    for loss in in_losses(observation, "pairs"):
        output, target = loss.detail["output"], loss.detail["target"]
        yield Finding(
            kind="danger",
            what=f"output {output} against target {target}: the loss is taken over all "
            f"{output[0] ** 2:,} pairs, and is least where every output is the targets' mean",
            do="output.squeeze(1), or target.unsqueeze(1), so that both have one shape",
            where=at(loss.site),
            parity="changes learning",
        )
