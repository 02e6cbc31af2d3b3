"""torch's TCPStore without the rest of torch: it costs a process 0.5 s of CPU, a whole `import torch` costs 2 s.

The class is in torch's native code, `torch._C`, and is set up by `torch._C._c10d_init()`. When torch is imported, both
happen while its packages `torch` and `torch.distributed` have begun and have nothing in them yet. Empty packages do
as well (torch/csrc/distributed/c10d/init.cpp).
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
    """This torch cannot be had in parts, and a part of it is in this process now; its text says what happened."""


def tcp_store() -> Any:
    """The class TCPStore: of a torch that was imported before, else from torch's native code alone.

    Raises Unlike where only a whole torch has it: that needs a process that has not tried. Raises ImportError where
    there is no torch.
    """
    spec = find_spec("torch")
    # Preloaded torch has another loader; what has no native code is not torch, but stands in for it.
    is_source = spec is not None and isinstance(spec.loader, SourceFileLoader)
    if not spec or not is_source or "torch" in sys.modules or not _native_code(spec):
        return importlib.import_module("torch.distributed").TCPStore
    try:
        return _alone(spec)
    except Exception as error:
        raise Unlike(f"{type(error).__name__}: {error}") from error


def _native_code(torch: ModuleSpec) -> bool:
    found = PathFinder.find_spec("torch._C", torch.submodule_search_locations)
    return found is not None and (found.origin or "").endswith(".so")


def _alone(torch: ModuleSpec) -> Any:
    sys.modules["torch"] = module_from_spec(torch)
    distributed = find_spec("torch.distributed")
    assert distributed
    sys.modules["torch.distributed"] = module_from_spec(distributed)
    # What torch/__init__.py begins with: torch's libraries are to find the symbols of these.
    symbols = Path(torch.origin or "").with_name("lib") / "libtorch_global_deps.so"
    if symbols.exists():
        ctypes.CDLL(str(symbols), mode=ctypes.RTLD_GLOBAL)
    native: Any = importlib.import_module("torch._C")
    if not native._c10d_init():
        raise ImportError("this torch has no torch.distributed")
    return native._distributed_c10d.TCPStore
