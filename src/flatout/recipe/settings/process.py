"""The section `process`: how the process uses the processor."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from flatout.recipe.parity import Parity
from flatout.recipe.setting import Live, NotNegative, Positive, Section, Trial, setting, switch_word


def _one_is_a_list(value: Any) -> Any:
    return (value,) if isinstance(value, int) and not isinstance(value, bool) else value


def _as_a_set(cpus: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(set(cpus)))


CpuList = Annotated[
    tuple[NotNegative, ...],
    # TOML has lists, and the operating system returns sets. Their CPU numbers stay strict.
    Field(strict=False, min_length=1, json_schema_extra={"allowed": "a list of CPU numbers"}),
    BeforeValidator(_one_is_a_list),
    AfterValidator(_as_a_set),
]
Denormals = Annotated[Literal["default", "on", "off"], BeforeValidator(switch_word)]


class Process(Section):
    """How the process uses the processor."""

    threads: Literal["auto"] | Positive = setting(
        "auto",
        "Threads inside one operator (torch.set_num_threads).",
        parity=Parity.TOLERANT,
        words="{} threads",
        trial=Trial(
            lambda job: job.cpus if job.threads != job.cpus else max(1, job.cpus // 2),
            lambda job: job.is_on_cpu and job.threads is not None and job.cpus > 1,
            others=lambda cpus: [1, max(1, cpus // 2), cpus],
        ),
        live=Live(
            lambda at, value: at.set_threads(value),
            now=lambda at: at.torch.get_num_threads(),
            switches="seldom",
            in_passes=False,
        ),
        unmeasured=lambda at: (at.torch.get_num_threads(), "torch's own"),
        written=lambda seen: seen.threads,
    )
    interop_threads: Literal["default"] | Positive = setting(
        "default",
        "Threads that run operators side by side (torch.set_num_interop_threads). `default` "
        "leaves torch's own number.",
        # No operator of a step is divided among these threads, so no sum changes its order.
        parity=Parity.EXACT,
        words="{} interop threads",
    )
    affinity: Literal["per_rank", "off"] | CpuList = setting(
        "per_rank",
        "The CPUs that the process is bound to. `per_rank` gives each of several ranks on a "
        "node its own CPUs, and leaves one rank alone as it is; `off` takes back what was "
        "bound.",
        parity=Parity.EXACT,
        words="CPUs {}",
    )
    flush_denormals: Denormals = setting(
        "default",
        "Treat numbers too small for full precision as zero; CPUs are slow on them. `default` "
        "leaves it as the process has it: torch begins with `off`.",
        parity=Parity.TOLERANT,
        words="denormals flushed",
    )
