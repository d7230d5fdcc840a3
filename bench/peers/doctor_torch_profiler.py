"""torch.profiler around a script as it is: its table of operators, with the lines that led to them.

doctor_torch_profiler.py script.py [its arguments]
"""

import sys
from pathlib import Path
from types import ModuleType

from torch.profiler import ProfilerActivity, profile


def main():
    sys.argv = sys.argv[1:]
    path = Path(sys.argv[0])
    # The profiler looks up names of functions at the end: what runpy makes would be gone by then.
    code = compile(path.read_bytes(), str(path), "exec")
    script = ModuleType("__main__")
    script.__file__ = str(path)
    sys.modules["__main__"] = script
    with profile(activities=[ProfilerActivity.CPU], with_stack=True) as profiler:
        exec(code, vars(script))
    rows = profiler.key_averages(group_by_stack_n=8)
    print(
        rows.table(
            sort_by="self_cpu_time_total",
            row_limit=10,
            max_name_column_width=80,
            max_src_column_width=200,
        )
    )


if __name__ == "__main__":
    main()
