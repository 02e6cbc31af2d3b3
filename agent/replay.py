"""Has torch read again what it reads from the environment only when it is imported."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

# Read in C++ when torch or numpy is loaded, where nobody can see it from Python; those that have a call are below.
_IN_CPP = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES")
_THREADS = {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"}
# Looks its variables up again whenever it needs them.
_ASKS_AGAIN = "torch._inductor.runtime.cache_dir_utils"
_LOGGING = "torch._logging._internal"
# Looks them up for the options of all configuration modules.
_CONFIG = "torch.utils._config_module"


def replay(changed: Collection[str], readers: Mapping[str, Collection[str]]) -> set[str]:
    """Apply the variables of `changed`; returns those that come too late.

    `readers` are the modules that looked each one up when torch was imported. Thread counts are `fresh.set_threads`'s.
    """
    late: set[str] = set()
    for name in set(changed) - _THREADS:
        if name == "TORCH_DISTRIBUTED_DEBUG":
            torch: Any = sys.modules["torch"]
            torch.distributed.set_debug_level_from_env()
        elif name == "TORCH_CPP_LOG_LEVEL" and _initialise_cpp_logging():
            continue
        elif name.startswith(_IN_CPP) or not all(_reads_again(reader) for reader in readers.get(name, ())):
            late.add(name)
    return late


def _reads_again(reader: str) -> bool:
    """Have the module of that name look its variables up again; whether it could be asked to."""
    if reader == _ASKS_AGAIN:
        return True
    module: Any = sys.modules[reader]
    try:
        if reader == _LOGGING:
            module._init_logs()
            return True
        if reader == _CONFIG:
            for config in [m for m in sys.modules.values() if _is_config(m)]:
                _evaluate_again(config)
            return True
        if _is_config(module):
            _evaluate_again(module)
            return True
    except Exception:
        # Another version of torch has other insides.
        return False
    return False


def _is_config(module: ModuleType) -> bool:
    return type(module).__name__ == "ConfigModuleInstance"


def _evaluate_again(config: Any) -> None:
    """Run a configuration module's own text once more, and take over what it comes to.

    Torch computes its defaults there, many from the environment (torch/utils/_config_module.py).
    """
    name = config.__name__
    again: Any = ModuleType(name)
    vars(again).update({key: vars(config)[key] for key in ("__file__", "__spec__", "__loader__", "__package__")})
    sys.modules[name] = again
    try:
        exec(config.__spec__.loader.get_code(name), vars(again))
    finally:
        sys.modules[name] = config
    vars(config)["_config"] = again._config


def _initialise_cpp_logging() -> bool:
    with suppress(OSError, AttributeError):
        c10 = ctypes.CDLL(str(Path(sys.modules["torch"].__file__ or os.curdir).parent / "lib" / "libc10.so"))
        c10._ZN3c1011initLoggingEv()
        return True
    return False
