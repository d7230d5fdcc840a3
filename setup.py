"""The one thing pyproject.toml cannot say: C extensions that an install may do without."""

import sysconfig
from glob import glob
from pathlib import Path

from setuptools import Extension, setup

free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
# The folder kernels/NAME has the sources of flatout.kernels._NAME.
folders = sorted(Path(source).parent for source in glob("src/flatout/kernels/*/*.c"))

setup(
    ext_modules=[
        Extension(
            f"flatout.kernels._{folder.name}",
            sources=[f"{folder}/{folder.name}.c"],
            depends=[
                *glob(f"{folder}/*.h"),
                *glob("src/flatout/kernels/shared/*.h"),
                "src/flatout/kernels/clock/core.h",  # read by stacks, too
            ],
            extra_compile_args=["-O3", "-fno-math-errno", "-ffp-contract=off"],
            define_macros=[] if free_threaded else [("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=not free_threaded,
            optional=True,  # without a compiler most of Flatout works, and the rest says so
        )
        for folder in folders
    ],
    options={} if free_threaded else {"bdist_wheel": {"py_limited_api": "cp311"}},
)
