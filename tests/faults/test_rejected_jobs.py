"""A proxy refuses the agents' requests to etcd: a running job trains on, and a job that has not begun ends."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO

from elaunch.rendezvous.etcd.transport import Rpc
from tests.etcd import Etcd
from tests.faults.processes import Watched
from tests.harness import script, wait_for
from tests.relay import Listener, copy
from tests.standin import WITHOUT_TORCH

# An agent says a trouble within seconds, and on a busy machine within this time.
LOGGED_S = 60.0
OPTIONS = ("--nproc-per-node", "1", "--no-preload", "--rdzv-backend", "etcd")
# It shows what goes on: the same process, and its next steps.
STEPS = """
import itertools, os, time
from elaunch.trainer import link
for step in itertools.count():
    print("generation", os.environ["ELAUNCH_GENERATION"], "pid", os.getpid(), flush=True)
    link.report(step)
    time.sleep(0.1)
"""


@contextmanager
def agents(folder: Path, *endpoints: str) -> Iterator[list[Watched]]:
    """An agent for each of these endpoints, of one job."""
    program = script(folder, STEPS)
    words = ("--nnodes", str(len(endpoints)), "--rdzv-id", "job", *OPTIONS)
    with ExitStack() as stack:
        started = []
        for index, endpoint in enumerate(endpoints):
            home = folder / f"node{index}"
            home.mkdir()
            agent = Watched(home, *words, "--rdzv-endpoint", endpoint, str(program), env=WITHOUT_TORCH)
            started.append(agent)
            stack.push(agent)
        yield started


def wait_for_line(agent: Watched, pattern: str, after: int) -> None:
    """Wait until the agent has printed a line like `pattern`, after its first `after` characters."""
    wait_for(lambda: re.search(pattern, agent.stderr[after:]), f"a line like {pattern!r}", LOGGED_S)


def wait_for_steps(agent: Watched) -> None:
    """Wait until the agent's worker has done more steps."""
    begun = agent.stdout.count("pid")
    wait_for(lambda: agent.stdout.count("pid") >= begun + 5, "the worker goes on")


_RPCS = {f"/v3/{rpc.value}": rpc for rpc in Rpc}


@dataclass(frozen=True)
class Answer:
    """An answer in place of etcd's. Without a `status` none comes."""

    status: int
    body: str
    content_type: str = "application/json"

    @property
    def response(self) -> bytes:
        head = f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}\r\nContent-Type: {self.content_type}\r\n"
        return f"{head}Content-Length: {len(self.body)}\r\n\r\n{self.body}".encode()


def _error(status: int, code: int, text: str) -> Answer:
    return Answer(status, json.dumps({"error": text, "code": code, "message": text}))


NO_LEADER = _error(503, 14, "etcdserver: no leader")
CORRUPT = _error(500, 15, "etcdserver: corrupt cluster")
PERMISSION_DENIED = _error(403, 7, "etcdserver: permission denied")
BAD_GATEWAY = Answer(502, "<html><head><title>502 Bad Gateway</title></head></html>", "text/html")
HANG = Answer(0, "")


class Refusing(Listener):
    """The proxy, on a port of loopback; use it as a context manager. `struck` are the answers that it gave itself."""

    def __init__(self, etcd: Etcd) -> None:
        self._target = etcd.addresses[0]
        self._rules: dict[Rpc, Answer] = {}
        self._hung: list[socket.socket] = []
        self.struck: list[tuple[Rpc, Answer]] = []
        super().__init__(self._pass_on)

    def refuse(self, rpc: Rpc, answer: Answer) -> None:
        """From now on give this answer to requests of this kind, until `heal`."""
        self._rules[rpc] = answer

    def heal(self) -> None:
        """Refuse nothing any more, and end the connections whose requests hang."""
        self._rules.clear()
        hung, self._hung = self._hung, []
        for each in hung:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _pass_on(self, client: socket.socket) -> None:
        # TLS is not spoken here.
        if not client.recv(1, socket.MSG_PEEK).isalpha():
            return
        with (
            client.makefile("rb") as requests,
            socket.create_connection((self._target.host, self._target.port), 60) as server,
        ):
            server.settimeout(None)
            threading.Thread(target=copy, args=(server, client), daemon=True).start()
            while request := _next_request(requests):
                rpc = _RPCS.get(request.split(b" ", 2)[1].decode())
                answer = self._rules.get(rpc) if rpc else None
                if not (rpc and answer):
                    server.sendall(request)
                    continue
                self.struck.append((rpc, answer))
                if answer is HANG:
                    self._hung.append(client)
                    requests.read()
                    return
                client.sendall(answer.response)


def _next_request(stream: BinaryIO) -> bytes:
    """The next request, whose body has a known length; empty at the end."""
    head, length = b"", 0
    while (line := stream.readline()).strip():
        head += line
        name, _, value = line.partition(b":")
        length = int(value) if name.lower() == b"content-length" else length
    return head + line + stream.read(length)


AWAY = r"the store (is unreachable|is too slow|(refuses|denies) this node's requests): .*the workers continue"
BACK = r"the store is back after"
REFUSALS = (PERMISSION_DENIED, BAD_GATEWAY, CORRUPT, NO_LEADER, HANG)


def test_a_running_job_trains_on_under_each_refusal_logs_it_and_goes_on_when_it_is_fixed(tmp_path: Path) -> None:
    with (
        Etcd("3.5") as etcd,
        Refusing(etcd) as proxy,
        agents(tmp_path, etcd.endpoints, str(proxy.endpoint)) as (_, refused),
    ):
        refused.wait_for_output("generation 0 pid")

        for answer in REFUSALS:
            before = len(refused.stderr)
            proxy.refuse(Rpc.TXN, answer)
            wait_for_line(refused, AWAY, after=before)
            wait_for_steps(refused)
            assert (Rpc.TXN, answer) in proxy.struck

            proxy.heal()
            wait_for_line(refused, BACK, after=before)

        wait_for_steps(refused)
        assert len(set(re.findall(r"generation \d+ pid \d+", refused.stdout))) == 1, refused.output


def test_a_job_that_is_denied_before_it_began_ends_at_once_with_the_reason(tmp_path: Path) -> None:
    with Etcd("3.5") as etcd, Refusing(etcd) as proxy:
        proxy.refuse(Rpc.TXN, PERMISSION_DENIED)
        with agents(tmp_path, *[str(proxy.endpoint)] * 2) as both:
            assert [agent.wait() for agent in both] == [2, 2]

            words = "requires a user and a password, and none is given"
            assert all(words in agent.stderr for agent in both)
            assert (Rpc.TXN, PERMISSION_DENIED) in proxy.struck
