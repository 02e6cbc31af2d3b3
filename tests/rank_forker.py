"""Forks ranks from one process that has imported torch: a group starts in 0.1 s. tests/ranks.py runs this script.

Its arguments are the path of its socket, and more modules to import. All test processes of a run share it. Each is a
client with a connection, and each line from it requests one group: `{"script", "args", "envs", "folder"}`, with an
environment per rank. It responds with the ranks' pids, and later with `{"pid", "code"}` for each rank that ends. Output
goes to FOLDER/out.RANK and err.RANK. A client that leaves takes its ranks along. The last one takes the forker along.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass, field

import torch
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.optim
import torch.distributed.tensor


def become(script: str, args: list[str], env: dict[str, str], folder: str, rank: int) -> None:
    """In the child: become what a fresh `python script args` would be."""
    code = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for name, descriptor in (("out", 1), ("err", 2)):
            file = os.open(f"{folder}/{name}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(file, descriptor)
        # A rank that crashes prints its stacks, and one that hangs when it is sent SIGABRT. No timer prints them: it
        # would read the frames of a thread that runs, and crash the rank of a slow machine.
        faulthandler.enable(file=2)
        os.environ.update(env)
        sys.argv = [script, *args]
        sys.path.insert(0, os.path.dirname(script))  # noqa: PTH120
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# A test process that has started the forker and was killed never connects.
FIRST_CLIENT_S = 60.0


@dataclass(eq=False)
class Client:
    """A test process, and its ranks that are alive."""

    connection: socket.socket
    pending: bytes = b""
    alive: set[int] = field(default_factory=set)

    def send(self, record: object) -> None:
        with suppress(ConnectionError):
            self.connection.sendall(json.dumps(record).encode() + b"\n")

    def receive(self) -> bool:
        """Fork what it requests. False if it has left."""
        try:
            content = self.connection.recv(65536)
        except ConnectionError:
            content = b""
        *lines, self.pending = (self.pending + content).split(b"\n")
        for line in lines:
            order = json.loads(line)
            pids = []
            for rank, env in enumerate(order["envs"]):
                pid = os.fork()
                if not pid:
                    become(order["script"], order["args"], env, order["folder"], rank)
                pids.append(pid)
            self.alive |= set(pids)
            self.send({"pids": pids})
        return bool(content)

    def close(self) -> None:
        for pid in self.alive:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self.connection.close()


def main() -> None:
    path, *modules = sys.argv[1:]
    torch.set_num_threads(1)
    for name in modules:
        importlib.import_module(name)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    events = selectors.DefaultSelector()
    events.register(listener, selectors.EVENT_READ)
    events.register(wake, selectors.EVENT_READ)
    clients: set[Client] = set()
    while ready := events.select(None if clients else FIRST_CLIENT_S):
        for key, _ in ready:
            if key.fileobj is listener:
                client = Client(listener.accept()[0])
                clients.add(client)
                events.register(client.connection, selectors.EVENT_READ, client)
                client.send("ready")
            elif key.fileobj == wake:
                os.read(wake, 65536)
            elif not key.data.receive():
                events.unregister(key.fileobj)
                clients.discard(key.data)
                key.data.close()
                if not clients:
                    return
        reap(clients)


def reap(clients: set[Client]) -> None:
    """Tell each client which of its ranks have ended."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            for client in clients:
                if pid in client.alive:
                    client.alive.discard(pid)
                    client.send({"pid": pid, "code": os.waitstatus_to_exitcode(status)})


if __name__ == "__main__":
    main()
