"""Check for a graph's loss over nodes that are held out."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at
from flatout.doctor.finding import Finding
from flatout.observe import Observation


@check()
def look(observation: Observation) -> Findings:
    """Report losses over nodes that a mask or index of the script holds out."""
    if not observation.loss_looks:
        raise NoSignal("no loss was observed")
    for item in observation.held_out_nodes:
        yield Finding(
            kind="danger",
            what=f"the loss is taken over {item.nodes:,} nodes, among them {item.in_loss:,} of "
            f"{item.name}: the model is trained on the labels that it is to be tested by",
            do="loss(output[train_mask], target[train_mask])",
            where=at(item.site),
            parity="changes learning",
        )
