"""torch.profiler around a script's steps: its table of operators, with the lines that led to them.

doctor_torch_profiler.py script.py [its arguments]
"""

import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from torch._C._profiler import _ExperimentalConfig
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile


def main():
    sys.argv = sys.argv[1:]
    path = Path(sys.argv[0])
    code = compile(path.read_bytes(), str(path), "exec")
    script = ModuleType("__main__")
    script.__file__ = str(path)
    sys.modules["__main__"] = script
    profiler = profile(
        activities=[ProfilerActivity.CPU],
        with_stack=True,
        experimental_config=_ExperimentalConfig(verbose=True),  # or the lines are not in the table
    )
    # Of code that is gone by the end, as that of an import, the profiler cannot tell the name, and
    # fails: what modules run is kept, and the profiler begins after the first step.
    kept, get_code = [], SourceFileLoader.get_code

    def get_and_keep(loader, name):
        kept.append(get_code(loader, name))
        return kept[-1]

    SourceFileLoader.get_code = get_and_keep
    begun = []

    def begin(optimizer, args, kwargs):
        if not begun:
            begun.append(True)
            profiler.start()

    register_optimizer_step_post_hook(begin)
    exec(code, vars(script))
    profiler.stop()
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
