"""A proxy refuses the agents' requests to etcd: a running job trains on, and a job that has not begun ends."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO

from elaunch.rendezvous.etcd.transport import Rpc
from tests.etcd import Etcd
from tests.faults.processes import Watched, is_alive
from tests.harness import DEADLINE_S, wait_for
from tests.relay import Listener, copy
from tests.standin import WITHOUT_TORCH

LIVELY = Path(__file__).with_name("lively.py")
# An agent says a trouble within seconds, and on a busy machine within this time.
LOGGED_S = 60.0
OPTIONS = ("--nproc-per-node", "1", "--no-preload", "--max-restarts", "1000", "--rdzv-backend", "etcd")


@dataclass(frozen=True)
class Life:
    """The newest line that a worker has written about itself."""

    generation: int
    pid: int
    step: int


class Fleet:
    """One agent for each of `endpoints`, started; use it as a context manager. `folder` is made."""

    def __init__(self, folder: Path, endpoints: Collection[str], *options: str, job: str = "job") -> None:
        folder.mkdir()
        self.folder = folder
        self.job = job
        self.agents: list[Watched] = []
        for index, endpoint in enumerate(endpoints):
            home = folder / f"node{index}"
            home.mkdir()
            words = ("--nnodes", str(len(endpoints)), "--rdzv-endpoint", endpoint, "--rdzv-id", job)
            env = {"LIVELY_NODE": str(index), **WITHOUT_TORCH}
            self.agents.append(Watched(home, *words, *OPTIONS, *options, str(LIVELY), str(folder), env=env))

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            agent.__exit__()

    def life(self, node: int) -> Life | None:
        """The newest line of that node's worker, dead or alive. None before the first line."""
        with suppress(FileNotFoundError):
            return Life(*map(int, (self.folder / f"life-{node}").read_text().split()))
        return None

    def is_alive(self, node: int) -> bool:
        life = self.life(node)
        return life is not None and is_alive(life.pid)

    def run(self, generation: int, deadline_s: float = DEADLINE_S) -> None:
        """Wait until a worker of that generation, or of a newer one, lives on each node."""

        def all_live() -> bool:
            lives = [self.life(node) for node in range(len(self.agents))]
            return all(life and life.generation >= generation and is_alive(life.pid) for life in lives)

        self.wait_for(all_live, f"generation {generation} runs on all nodes", deadline_s)

    def goes_on(self, node: int) -> None:
        """Wait until that node's worker, the same one, has done more steps."""
        first = self.life(node)
        assert first, f"node {node} has no worker"

        def stepped() -> bool:
            now = self.life(node)
            assert now
            assert now.pid == first.pid, f"node {node} has another worker than {first}: {now}\n{self.story()}"
            return now.step >= first.step + 5

        self.wait_for(stepped, f"the worker of node {node} goes on")

    def says(self, node: int, pattern: str, after: int = 0) -> None:
        """Wait until that node's agent has printed a line like `pattern`, after its first `after` characters."""
        agent = self.agents[node]
        self.wait_for(
            lambda: re.search(pattern, agent.stderr[after:], re.MULTILINE), f"node {node} says {pattern!r}", LOGGED_S
        )

    def wait_for(self, fact: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
        """Wait for a fact. The failure message has the agents' output."""
        try:
            wait_for(fact, what, deadline_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None

    def story(self) -> str:
        return "\n".join(f"--- node{i} ({a.process.poll()}):\n{a.stderr}" for i, a in enumerate(self.agents))


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
        Fleet(tmp_path / "job", [etcd.endpoints, str(proxy.endpoint)]) as fleet,
    ):
        fleet.run(0)

        for answer in REFUSALS:
            before = len(fleet.agents[1].stderr)
            proxy.refuse(Rpc.TXN, answer)
            fleet.says(1, AWAY, after=before)
            fleet.goes_on(1)
            assert (Rpc.TXN, answer) in proxy.struck

            proxy.heal()
            fleet.says(1, BACK, after=before)

        life = fleet.life(1)
        assert life
        assert life.generation == 0, fleet.story()
        fleet.goes_on(1)


def test_a_job_that_is_denied_before_it_began_ends_at_once_with_the_reason(tmp_path: Path) -> None:
    with Etcd("3.5") as etcd, Refusing(etcd) as proxy:
        proxy.refuse(Rpc.TXN, PERMISSION_DENIED)
        with Fleet(tmp_path / "job", [str(proxy.endpoint)] * 2) as fleet:
            codes = [agent.wait() for agent in fleet.agents]

            assert codes == [2, 2], fleet.story()
            words = "requires a user and a password, and none is given"
            assert all(words in agent.stderr for agent in fleet.agents), fleet.story()
            assert (Rpc.TXN, PERMISSION_DENIED) in proxy.struck
