"""Many agents at once on one store: the time until all have ranks, at the start and after the death of a worker."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from bench.job import Trouble
from bench.samples import Sample
from tests.etcd import Etcd

FIRST, RESTART = "first rendezvous of many", "restart of many"
SEALED, RANKS = "sealed", "all have ranks"
NAME = "elaunch, etcd 3.5"
# The agents of one process share its interpreter lock. The agents of a real job share none.
_PROCESSES = 8
# etcd's own defaults. The tests' values are shorter and cost more.
_OPTIONS = ("--heartbeat-interval=100", "--election-timeout=1000")
# The time in which agents make up for what was late in the rendezvous.
_SETTLED_S = 3.2


def rendezvous(agents: int, limit_s: float) -> Iterator[Sample]:
    """`agents` agents without workers start at once, and restart when one worker has died."""
    section = FIRST
    with Etcd("3.5", options=_OPTIONS) as etcd:
        host, port = etcd.addresses[0].host, str(etcd.addresses[0].port)
        limits = [agents * i // _PROCESSES for i in range(_PROCESSES + 1)]
        shares = [(str(first), str(end - first)) for first, end in pairwise(limits) if end > first]
        try:
            with Crew([(host, "bench", port, str(agents), *share) for share in shares]) as crew:
                yield _seated(crew, agents, FIRST, "open", limit_s)
                time.sleep(_SETTLED_S)
                section = RESTART
                yield _seated(crew, agents, RESTART, "fail", limit_s)
        except Trouble as trouble:
            yield Sample(section, NAME, agents, why=str(trouble))


def _seated(crew: Crew, agents: int, section: str, order: str, limit_s: float) -> Sample:
    """Measure from an order until all agents have their ranks."""
    ordered_s = crew.order(order, first_only=order == "fail")
    responses = crew.responses(limit_s)
    values = {
        SEALED: min(response["first_s"] for response in responses) - ordered_s,
        RANKS: max(response["last_s"] for response in responses) - ordered_s,
    }
    return Sample(section, NAME, agents, values)


_START_LIMIT_S = 60.0
Message = dict[str, Any]


class Crew:
    """One `bench.crowd` for each list of arguments; a context manager that waits until they are ready, and ends them.

    One response with "trouble" is a failure of the crew.
    """

    def __init__(self, arguments: Sequence[Sequence[str]]) -> None:
        command, pipe = [sys.executable, "-m", "bench.crowd"], subprocess.PIPE
        self._processes = [
            subprocess.Popen([*command, *each], stdin=pipe, stdout=pipe, text=True) for each in arguments
        ]
        self._responses: list[queue.SimpleQueue[Message]] = [queue.SimpleQueue() for _ in arguments]
        self._readers = [
            threading.Thread(target=self._read, args=each, daemon=True)
            for each in zip(self._processes, self._responses, strict=True)
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Crew:
        try:
            self.responses(_START_LIMIT_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process, reader in zip(self._processes, self._readers, strict=True):
            process.kill()
            reader.join()
            # It waits for the end, and closes the pipes.
            process.__exit__(None, None, None)

    def order(self, name: str, *, first_only: bool = False) -> float:
        """Send an order to all processes, or the first only. Returns the monotonic time just before."""
        now_s = time.monotonic()
        for process in self._processes[: 1 if first_only else None]:
            assert process.stdin
            process.stdin.write(f"{name}\n")
            process.stdin.flush()
        return now_s

    def responses(self, limit_s: float) -> list[Message]:
        """One response of each process. Raises Trouble if one is later than `limit_s`, or responds with trouble."""
        end_s = time.monotonic() + limit_s
        responses = []
        for each in self._responses:
            try:
                response = each.get(timeout=max(0.0, end_s - time.monotonic()))
            except queue.Empty:
                raise Trouble(f"not all processes responded within {limit_s:g} s") from None
            if "trouble" in response:
                raise Trouble(str(response["trouble"]))
            responses.append(response)
        return responses

    @staticmethod
    def _read(process: subprocess.Popen[str], responses: queue.SimpleQueue[Message]) -> None:
        assert process.stdout
        for line in process.stdout:
            responses.put(json.loads(line))
        responses.put({"trouble": "one of the processes ended"})
