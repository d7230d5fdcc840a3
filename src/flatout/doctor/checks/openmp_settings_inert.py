"""Check for variables of Intel's OpenMP in a process that has another OpenMP library."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.finding import Finding
from flatout.doctor.machine import KMP_DO, kmp_words, of_intel
from flatout.observe import Observation

_READ_BY = ("libiomp5", "libomp")
"""Libraries that read the variables: Intel's, and LLVM's, which is the same code."""


@check()
def look(observation: Observation) -> Findings:
    """Report KMP_* variables that no library of the process reads."""
    if observation.openmp is None:
        raise NoSignal("the OpenMP library of the process was not observed")
    names = of_intel(observation.openmp_settings)
    if not names or any(library.startswith(_READ_BY) for library in observation.openmp):
        return
    if not observation.openmp:
        raise NoSignal("the process has loaded no OpenMP library")
    set_here = [
        call.site
        for call in observation.calls
        if call.kind == "setenv" and call.detail["name"] in names
    ]
    yield Finding(
        kind="note",
        what=f"{kmp_words(names)}, and this process has {', '.join(observation.openmp)}: they "
        "have no effect",
        do=f"{KMP_DO}; before torch is imported",
        where=str(set_here[0]) if set_here else "",
        parity="rounding",
    )
