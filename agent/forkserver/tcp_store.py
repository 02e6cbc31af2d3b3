"""torch's TCPStore without the rest of torch: it costs a process 0.3 s of CPU, a whole `import torch` costs 2 s.

The class is in torch's native code, `torch._C`, and is set up by `torch._C._c10d_init()`. Both look their packages,
`torch` and `torch.distributed`, up by name and use nothing of them, so empty ones do (torch/csrc/Module.cpp,
torch/csrc/distributed/c10d/init.cpp; tried with torch 2.13).
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any


class Unlike(Exception):
    """This torch cannot be imported in parts, and this process now has some of them; the text says what happened."""


def tcp_store() -> Any:
    """The class TCPStore: from a torch that was imported before, else from torch's native code alone.

    Raises Unlike if the whole of torch is needed: only a process that has not tried can import it. Raises what
    importing torch raises if there is no native code to take.
    """
    spec = None if has_torch() else find_spec("torch")
    # A torch without native code is a stand-in.
    if spec and _has_native_code(spec):
        try:
            return _alone(spec)
        except Exception as error:
            raise Unlike(f"{type(error).__name__}: {error}") from error
    return whole_tcp_store()


def has_torch() -> bool:
    """Whether this process has torch already, or gets it without an import; or there is none to import."""
    spec = None if "torch" in sys.modules else find_spec("torch")
    # A preloaded torch has another loader.
    return spec is None or not isinstance(spec.loader, SourceFileLoader)


def whole_tcp_store() -> Any:
    """The class TCPStore from an ordinary import of torch."""
    return importlib.import_module("torch.distributed").TCPStore


def _has_native_code(torch: ModuleSpec) -> bool:
    found = PathFinder.find_spec("torch._C", torch.submodule_search_locations)
    return found is not None and (found.origin or "").endswith(".so")


def _alone(torch: ModuleSpec) -> Any:
    modules: dict[str, Any] = sys.modules
    # torch._C imports numpy if it is there. That takes a third of the time, and a store has no arrays.
    modules.setdefault("numpy", None)
    modules["torch"] = module_from_spec(torch)
    distributed = find_spec("torch.distributed")
    assert distributed
    modules["torch.distributed"] = module_from_spec(distributed)
    # torch/__init__.py loads this before its native code, which needs the symbols of these libraries.
    symbols = Path(torch.origin or "").with_name("lib") / "libtorch_global_deps.so"
    if symbols.exists():
        ctypes.CDLL(str(symbols), mode=ctypes.RTLD_GLOBAL)
    native: Any = importlib.import_module("torch._C")
    if not native._c10d_init():
        raise ImportError("this torch has no torch.distributed")
    return native._distributed_c10d.TCPStore
