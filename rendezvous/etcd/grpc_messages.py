"""etcd3 0.12 as a Python package beside any protobuf: its messages in a descriptor pool that nobody else sees.

Its own generated modules are of 2018 and do not load with protobuf 4 and later; they also enter `kv.proto` and
`rpc.proto` into the pool that all of a process share, where another etcd client has the same names. But each holds its
descriptor as bytes, and those every protobuf still takes.
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
    """The package `etcd3`, whose `etcdrpc` holds messages and stubs. Raises Denied where it cannot be had."""
    if loaded := sys.modules.get("etcd3"):
        # Somebody else has got it to load, with a protobuf old enough.
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
    """gRPC says on stderr what its callers get as errors; it reads when it is loaded whether to."""
    said = os.environ.get(_VERBOSITY)
    os.environ[_VERBOSITY] = said or "NONE"
    try:
        importlib.import_module("grpc")
    finally:
        # It is not for the workers.
        if said is None:
            del os.environ[_VERBOSITY]


def _messages(folder: Path) -> dict[str, Any]:
    """The classes of all messages, by name, in a pool of their own."""
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
            # protobuf 3.20 and early 4 have the first of the two only.
            found[message.name] = (
                factory.GetMessageClass(descriptor)
                if hasattr(factory, "GetMessageClass")
                else factory.MessageFactory(pool).GetPrototype(descriptor)
            )
    return found


def _descriptor(source: str) -> bytes:
    """The serialized descriptor that a generated module holds."""
    literal = re.search(r"serialized_pb=_b\(('(?:[^'\\]|\\.)*')\)", source)
    if not literal:
        raise ValueError("no descriptor in its generated modules")
    return str(ast.literal_eval(literal[1])).encode("latin-1")


def _put_in_place(messages: dict[str, Any], package: Path) -> None:
    """Make `etcd3.etcdrpc` of `messages` and of the package's own stubs, before the package asks for it."""
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
    # The package itself is to be imported yet, and its client finds `etcdrpc` in place.
    del sys.modules["etcd3"]
