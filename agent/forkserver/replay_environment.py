"""Makes torch read again the environment variables that it reads only when it is imported."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

# C++ code reads these when torch or numpy is loaded, unseen by Python. Most of them cannot be read again.
_IN_CPP = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES")
_THREADS = {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"}
# This module looks its variables up again whenever it needs them.
_ASKS_AGAIN = "torch._inductor.runtime.cache_dir_utils"
LOGGING = "torch._logging._internal"
# This module looks up the variables for the options of all configuration modules.
_CONFIG = "torch.utils._config_module"


def replay(
    changed: Collection[str], readers: Mapping[str, Collection[str]], modules: Mapping[str, ModuleType]
) -> set[str]:
    """Apply the variables in `changed` to `modules`, which the program imports now. Returns those that come too late.

    `readers` gives, for each variable, the modules that looked it up when they were loaded. The variables of thread
    counts are left to `after_fork.set_threads`.
    """
    return {name for name in set(changed) - _THREADS if not _takes_effect(name, readers.get(name, ()), modules)}


def _takes_effect(name: str, readers: Collection[str], modules: Mapping[str, ModuleType]) -> bool:
    if name == "TORCH_DISTRIBUTED_DEBUG" and "torch" in modules:
        distributed: Any = modules["torch.distributed"]
        distributed.set_debug_level_from_env()
        return True
    if name == "TORCH_CPP_LOG_LEVEL" and "torch" in modules:
        return _initialise_cpp_logging(modules["torch"])
    if name.startswith(_IN_CPP) and not modules.keys().isdisjoint(("torch", "numpy")):
        return False
    return all(_reads_again(modules, reader) for reader in readers)


def _reads_again(modules: Mapping[str, ModuleType], reader: str) -> bool:
    """Make a module look its variables up again. Returns whether that was possible."""
    module: Any = modules.get(reader, sys.modules.get(reader))
    if reader == _ASKS_AGAIN or module is None:
        return True
    try:
        if reader == LOGGING:
            module.log_state.clear()
            module._init_logs()
            return True
        configs = [m for m in modules.values() if is_config(m)] if reader == _CONFIG else [module]
        if not all(is_config(config) for config in configs):
            return False
        for config in configs:
            _evaluate_again(config)
    except Exception:
        # Another version of torch may have other internals.
        return False
    return True


def is_config(module: ModuleType) -> bool:
    return type(module).__name__ == "ConfigModuleInstance"


def _evaluate_again(config: Any) -> None:
    """Run a configuration module's code again, and take over its results.

    Torch computes its defaults there, many from the environment (torch/utils/_config_module.py).
    """
    name = config.__name__
    # Not under the module's own name, by which another thread may import it meanwhile.
    again: Any = ModuleType(f"{name} again")
    vars(again).update({key: vars(config)[key] for key in ("__file__", "__spec__", "__loader__", "__package__")})
    sys.modules[again.__name__] = again
    try:
        exec(config.__spec__.loader.get_code(name), vars(again))
    finally:
        del sys.modules[again.__name__]
    vars(config)["_config"] = again._config


def _initialise_cpp_logging(torch: ModuleType) -> bool:
    with suppress(OSError, AttributeError):
        c10 = ctypes.CDLL(str(Path(torch.__file__ or os.curdir).parent / "lib" / "libc10.so"))
        c10._ZN3c1011initLoggingEv()
        return True
    return False
