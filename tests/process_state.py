"""State of this process that outlives a test and may change the result of another test."""

import gc
import os
import random
import signal
import sys
import threading

# Not SIGCHLD: torch sets a handler for good where a DataLoader starts its first workers.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Set by pytest, and by packages when they are imported: Keras, torch.compile, polars, MLflow, Ray.
_NOT_OF_TESTS = {
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
    "_RJEM_MALLOC_CONF",
    "LD_LIBRARY_PATH",
    "TF_FORCE_GPU_ALLOW_GROWTH",
    "KMP_INIT_AT_FORK",
    "KMP_DUPLICATE_LIB_OK",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "RAY_CLIENT_MODE",
    "_MLFLOW_TELEMETRY_SESSION_ID",
}
# Attributes that tests replace, or that hooks wrap.
_CALLS = (
    ("torch.nn.modules.module", "Module", ("__call__", "__setattr__", "zero_grad")),
    ("torch.optim.optimizer", "Optimizer", ("__init__", "add_param_group", "zero_grad")),
    ("torch.utils.data.dataloader", "DataLoader", ("__init__", "__iter__", "_get_iterator")),
    ("torch._tensor", "Tensor", ("backward", "item", "__torch_function__")),
    ("torch.autograd", None, ("backward", "grad")),
)
_GLOBAL_HOOKS = (
    ("torch.nn.modules.module", "_global_forward_hooks"),
    ("torch.nn.modules.module", "_global_forward_pre_hooks"),
    ("torch.nn.modules.module", "_global_backward_hooks"),
    ("torch.nn.modules.module", "_global_module_registration_hooks"),
    ("torch.nn.modules.module", "_global_parameter_registration_hooks"),
    ("torch.optim.optimizer", "_global_optimizer_pre_hooks"),
    ("torch.optim.optimizer", "_global_optimizer_post_hooks"),
)


def seed_all():
    """Seed all random generators, so that each test begins with the same random numbers."""
    random.seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(0)


def state():
    """Return values by name that can be compared later; only of packages that are loaded."""
    found = {
        "the working folder": _folder(),
        "the file mode mask": _umask(),
        "usable CPUs": os.sched_getaffinity(0),
        "garbage collection": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
        "the trace function": (sys.gettrace(), threading.gettrace()),
        "hooks of exceptions": (sys.excepthook, threading.excepthook),
        **{f"the handler of {one.name}": signal.getsignal(one) for one in _SIGNALS},
        **{f"${name}": value for name, value in os.environ.items() if name not in _NOT_OF_TESTS},
    }
    if (torch := sys.modules.get("torch")) is not None:
        found |= _of_torch(torch)
    if (numpy := sys.modules.get("numpy")) is not None:
        found["numpy's errors"] = tuple(numpy.geterr().values())
    keras = sys.modules.get("keras")
    if hasattr(keras, "config"):
        policy = keras.config.dtype_policy().name
        found["Keras' types"] = (keras.config.floatx(), policy, keras.config.image_data_format())
    return found


def differences(before, after):
    """Return the changes in words; packages that were loaded in between do not count."""
    new = [name for name in after.keys() - before.keys() if name.startswith("$")]
    gone = before.keys() - after.keys()
    changed = [name for name in before.keys() & after.keys() if before[name] != after[name]]
    return [
        f"{name} was {before.get(name, 'not there')!r}, is {after.get(name, 'not there')!r}"
        for name in sorted([*new, *gone, *changed])
    ]


def _folder():
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "a folder that is gone"


def _umask():
    mask = os.umask(0o22)
    os.umask(mask)
    return oct(mask)


def _autocast_depth(torch):
    """Return the number of open contexts. Only the end of the outermost one empties the cache."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _of_torch(torch):
    found = {
        "torch's default type": torch.get_default_dtype(),
        "torch's grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "torch's autocast": [
            (torch.is_autocast_enabled(one), torch.get_autocast_dtype(one))
            for one in ("cpu", "cuda")
        ],
        "torch's autocast cache": (torch.is_autocast_cache_enabled(), _autocast_depth(torch)),
        "torch's deterministic algorithms": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        ),
        "torch's precision of matmul": torch.get_float32_matmul_precision(),
        "torch's cuDNN flags": (
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.enabled,
        ),
        "torch's oneDNN": torch.backends.mkldnn.enabled,
        "torch's anomaly mode": torch.is_anomaly_enabled(),
        "torch's modes": (
            torch._C._len_torch_function_stack(),
            torch._C._len_torch_dispatch_stack(),
        ),
        "torch's default device": torch.get_default_device(),
    }
    for module, owner, names in _CALLS:
        if (of := sys.modules.get(module)) is not None:
            of = of if owner is None else getattr(of, owner)
            found |= {f"{owner or module}.{name}": getattr(of, name, None) for name in names}
    for module, name in _GLOBAL_HOOKS:
        if (of := sys.modules.get(module)) is not None:
            found[f"torch's {name}"] = tuple(getattr(of, name, ()))
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available():
        found["torch's process group"] = distributed.is_initialized()
    return found
