"""The default group: rank 0 gathers every rank's integers, reduces them and sends them back."""

from __future__ import annotations

import json
import os
import selectors
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from enum import Enum
from typing import IO

from torch import Tensor
from torch.distributed.tcp_store import Client, connected

# Each function gets the integers of all ranks at one place. The names are torch's.
_REDUCERS: dict[str, Callable[[Iterable[int]], int]] = {"sum": sum, "max": max}


class ReduceOp(Enum):
    SUM = "sum"
    MAX = "max"


class ProcessGroup:
    """The default group: it has no backend of torch's, and so none of its timeouts."""

    group_name = "0"
    _device_types = ()


class group:
    """Names the default group, as torch does."""

    WORLD: ProcessGroup | None = None


class _Store:
    """The default group's store, whose values are bytes."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.check = client.check

    def set(self, key: str, value: bytes) -> None:
        self._client.set(key, value.decode("latin-1"))

    def get(self, key: str) -> bytes:
        return self._client.get(key).encode("latin-1")


class _Peer:
    """A connection to another rank, which sends lines."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._name = connection.getpeername()[0]
        self._stream: IO[str] = connection.makefile("rw")

    def fileno(self) -> int:
        return self._connection.fileno()

    def hear(self) -> object:
        """The next line. Raises as gloo does if the other rank is gone."""
        try:
            line = self._stream.readline()
        except OSError as error:
            raise RuntimeError(f"Read error [{self._name}]: {error.strerror}") from None
        if not line:
            raise RuntimeError(f"Connection closed by peer [{self._name}]")
        return json.loads(line)

    def say(self, what: object) -> None:
        try:
            self._stream.write(json.dumps(what) + "\n")
            self._stream.flush()
        except OSError as error:
            raise RuntimeError(f"Write error [{self._name}]: {error.strerror}") from None

    def close(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)


# At rank 0 the connections to all other ranks; at another rank the one to rank 0.
_peers: list[_Peer] | None = None
_store: _Store | None = None
default_pg_timeout = timedelta(minutes=30)


def init_process_group(backend: str) -> None:
    """Make the group. Returns when all ranks have come."""
    global _peers, _store
    group.WORLD = ProcessGroup()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = os.environ["MASTER_ADDR"]
    store = Client(address, int(os.environ["MASTER_PORT"]))
    _store = _Store(store)
    if rank:
        _peers = [_Peer(connected(address, int(store.get("port"))))]
        _peers[0].hear()
        return
    with _listening() as listener:
        store.set("port", str(listener.getsockname()[1]))
        _peers = [_Peer(listener.accept()[0]) for _ in range(size - 1)]
    for peer in _peers:
        peer.say("all are here")


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return _peers is not None


def get_rank(among: ProcessGroup) -> int:
    return int(os.environ["RANK"])


def get_world_size(among: ProcessGroup) -> int:
    return int(os.environ["WORLD_SIZE"])


def get_backend_config(among: ProcessGroup) -> str:
    return ""


def _get_default_store() -> _Store:
    assert _store is not None
    return _store


def all_reduce(tensor: Tensor, op: ReduceOp = ReduceOp.SUM) -> None:
    """Reduce the tensor over all ranks, in place."""
    assert _peers is not None
    if os.environ["RANK"] != "0":
        _peers[0].say(tensor.values)
        tensor.values = _peers[0].hear()  # type: ignore[assignment]
        return
    rows = [tensor.values, *_heard(_peers)]
    tensor.values = [_REDUCERS[op.value](column) for column in zip(*rows, strict=True)]
    for peer in _peers:
        peer.say(tensor.values)


def _heard(peers: list[_Peer]) -> list[list[int]]:
    """One line from each peer. A peer that is gone is noticed at once, even while another is silent."""
    rows = []
    with selectors.DefaultSelector() as selector:
        for peer in peers:
            selector.register(peer, selectors.EVENT_READ, peer)
        while len(rows) < len(peers):
            for key, _ in selector.select():
                rows.append(key.data.hear())
                selector.unregister(key.fileobj)
    return rows


def destroy_process_group() -> None:
    global _peers
    for peer in _peers or ():
        peer.close()
    _peers = None


def _listening() -> socket.socket:
    """A listener on all addresses of this host: MASTER_ADDR may mean another address here than on other nodes."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=100, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=100)
