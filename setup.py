"""The one thing pyproject.toml cannot say: C extensions that an install may do without."""

import sysconfig
from glob import glob

from setuptools import Extension, setup

free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
headers = ("_module", "_buffers", "_rows", "_bf16", "_parallel")
shared = [f"src/flatout/kernels/{name}.h" for name in headers]

setup(
    ext_modules=[
        Extension(
            f"flatout.kernels.{name}",
            sources=[f"src/flatout/kernels/{name}.c"],
            depends=glob(f"src/flatout/kernels/{name}*.h") + shared,
            extra_compile_args=["-O3", "-fno-math-errno", "-ffp-contract=off"],
            define_macros=[] if free_threaded else [("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=not free_threaded,
            optional=True,  # without a compiler most of Flatout works, and the rest says so
        )
        for name in (
            "_augment",
            "_batch_norm",
            "_clock",
            "_criteo",
            "_dropout",
            "_example",
            "_gather",
            "_ids",
            "_libsvm",
            "_lines",
            "_relu_pool",
            "_resize",
            "_stacks",
            "_table_rows",
        )
    ],
    options={} if free_threaded else {"bdist_wheel": {"py_limited_api": "cp311"}},
)
