"""A key-value store for the ranks, kept by the process that has the listening socket."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import suppress

CONNECT_S = 60.0


class TCPStore:
    """The master's store. It serves in threads of this process until the process ends."""

    def __init__(self, host: str, port: int, *, is_master: bool, wait_for_workers: bool, master_listen_fd: int) -> None:
        assert is_master
        assert not wait_for_workers
        self._keys: dict[str, str] = {}
        self._changed = threading.Condition()
        self._listener = socket.socket(fileno=master_listen_fd)
        assert self._listener.getsockname()[1] == port, f"another port was given for {host}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            client, _ = self._listener.accept()
            threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        with suppress(OSError), client, client.makefile("rw") as stream:
            for line in stream:
                key, value, waits = json.loads(line)
                with self._changed:
                    if value is not None:
                        self._keys[key] = value
                        self._changed.notify_all()
                    if waits:
                        self._changed.wait_for(lambda key=key: key in self._keys)
                    found = self._keys.get(key)
                stream.write(json.dumps(found) + "\n")
                stream.flush()


class Client:
    """A rank's connection to the store."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = connected(host, port)
        self._stream = self._socket.makefile("rw")

    def set(self, key: str, value: str) -> None:
        self._asked(key, value)

    def get(self, key: str) -> str:
        """The key's value, once somebody has set it."""
        return str(self._asked(key, None))

    def check(self, keys: list[str]) -> bool:
        """Whether somebody has set them all."""
        return all(self._asked(key, None, waits=False) is not None for key in keys)

    def _asked(self, key: str, value: str | None, *, waits: bool = True) -> str | None:
        self._stream.write(json.dumps([key, value, waits]) + "\n")
        self._stream.flush()
        line = self._stream.readline()
        if not line:
            raise RuntimeError("the store has closed the connection")
        found: str | None = json.loads(line)
        return found


def connected(host: str, port: int) -> socket.socket:
    """A connection. Tries again for a while, since a node may be late or its link down."""
    until_s = time.monotonic() + CONNECT_S
    while True:
        try:
            return socket.create_connection((host, port))
        except OSError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.05)
