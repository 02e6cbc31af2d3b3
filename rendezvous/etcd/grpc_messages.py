"""Loads the package etcd3 0.12 with any version of protobuf, with its messages in a private descriptor pool.

The package's generated modules are from 2018 and do not load with protobuf 4 or later. They also register `kv.proto`
and `rpc.proto` in the pool that the whole process shares, where another etcd client may use the same names. But each
module holds its descriptor as bytes, and every version of protobuf accepts those.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from elaunch.rendezvous.store import Denied

# In the order of their imports.
_FILES = ("kv", "auth", "rpc")
_VERBOSITY = "GRPC_VERBOSITY"
_ABSENT = "--rdzv-conf transport=grpc needs the package etcd3: pip install 'elaunch[etcd3]'"


@cache
def load() -> ModuleType:
    """The package `etcd3`; its `etcdrpc` holds messages and stubs. Raises Denied if it cannot be loaded."""
    if loaded := sys.modules.get("etcd3"):
        # Another part of the process has loaded it already, with an old protobuf.
        return loaded
    try:
        spec = importlib.util.find_spec("etcd3")
        _import_grpc_quietly()
        importlib.import_module("google.protobuf")
    except ImportError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise Denied(_ABSENT)
    package = Path(spec.submodule_search_locations[0])
    before = set(sys.modules)
    try:
        _put_in_place(_messages(package / "etcdrpc"), package)
        return importlib.import_module("etcd3")
    except Exception as error:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "etcd3":
                del sys.modules[name]
        raise Denied(
            f"the package etcd3 in {package} cannot be used ({type(error).__name__}: {error}); "
            "pip install etcd3==0.12.0"
        ) from error


def _import_grpc_quietly() -> None:
    """Keep gRPC from printing errors to stderr that its callers get anyway; it reads the variable when it is loaded."""
    said = os.environ.get(_VERBOSITY)
    os.environ[_VERBOSITY] = said or "NONE"
    try:
        importlib.import_module("grpc")
    finally:
        # Workers must not inherit the variable.
        if said is None:
            del os.environ[_VERBOSITY]


def _messages(folder: Path) -> dict[str, Any]:
    """The classes of all messages, by name, in a private pool."""
    pool_module: Any = importlib.import_module("google.protobuf.descriptor_pool")
    factory: Any = importlib.import_module("google.protobuf.message_factory")
    descriptors: Any = importlib.import_module("google.protobuf.descriptor_pb2")
    pool = pool_module.DescriptorPool()
    found = {}
    for name in _FILES:
        raw = _descriptor((folder / f"{name}_pb2.py").read_text())
        pool.AddSerializedFile(raw)
        file = descriptors.FileDescriptorProto.FromString(raw)
        for message in file.message_type:
            descriptor = pool.FindMessageTypeByName(f"{file.package}.{message.name}")
            # protobuf 3.20 and early 4.x have no GetMessageClass.
            found[message.name] = (
                factory.GetMessageClass(descriptor)
                if hasattr(factory, "GetMessageClass")
                else factory.MessageFactory(pool).GetPrototype(descriptor)
            )
    return found


def _descriptor(source: str) -> bytes:
    """The serialized descriptor in the source of a generated module."""
    literal = re.search(r"serialized_pb=_b\(('(?:[^'\\]|\\.)*')\)", source)
    if not literal:
        raise ValueError("no descriptor in its generated modules")
    return str(ast.literal_eval(literal[1])).encode("latin-1")


def _put_in_place(messages: dict[str, Any], package: Path) -> None:
    """Build `etcd3.etcdrpc` from `messages` and the package's own stubs, before the package imports it."""
    rpc = ModuleType("etcd3.etcdrpc")
    rpc.__path__ = [str(package / "etcdrpc")]
    generated = ModuleType("etcd3.etcdrpc.rpc_pb2")
    for module in (rpc, generated):
        vars(module).update(messages)
    parent = ModuleType("etcd3")
    parent.__path__ = [str(package)]
    sys.modules.update({"etcd3": parent, "etcd3.etcdrpc": rpc, "etcd3.etcdrpc.rpc_pb2": generated})
    stubs = importlib.import_module("etcd3.etcdrpc.rpc_pb2_grpc")
    vars(rpc).update({name: stub for name, stub in vars(stubs).items() if name.endswith("Stub")})
    # The package itself is imported later; its client then finds this `etcdrpc`.
    del sys.modules["etcd3"]
