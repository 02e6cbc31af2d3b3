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
    answers = crew.answers(limit_s)
    values = {
        SEALED: min(answer["first_s"] for answer in answers) - ordered_s,
        RANKS: max(answer["last_s"] for answer in answers) - ordered_s,
    }
    return Sample(section, NAME, agents, values)


_START_LIMIT_S = 60.0
Words = dict[str, Any]


class Crew:
    """One `bench.crowd` for each list of arguments; a context manager that waits until they are ready, and ends them.

    One answer with "trouble" is a failure of the crew.
    """

    def __init__(self, arguments: Sequence[Sequence[str]]) -> None:
        command, pipe = [sys.executable, "-m", "bench.crowd"], subprocess.PIPE
        self._processes = [
            subprocess.Popen([*command, *each], stdin=pipe, stdout=pipe, text=True) for each in arguments
        ]
        self._answers: list[queue.SimpleQueue[Words]] = [queue.SimpleQueue() for _ in arguments]
        self._readers = [
            threading.Thread(target=self._read, args=each, daemon=True)
            for each in zip(self._processes, self._answers, strict=True)
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Crew:
        try:
            self.answers(_START_LIMIT_S)
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

    def order(self, word: str, *, first_only: bool = False) -> float:
        """Send an order to all processes, or the first only. Returns the monotonic time just before."""
        now_s = time.monotonic()
        for process in self._processes[: 1 if first_only else None]:
            assert process.stdin
            process.stdin.write(f"{word}\n")
            process.stdin.flush()
        return now_s

    def answers(self, limit_s: float) -> list[Words]:
        """One answer of each process. Raises Trouble if one is later than `limit_s`, or answers with trouble."""
        end_s = time.monotonic() + limit_s
        answers = []
        for each in self._answers:
            try:
                answer = each.get(timeout=max(0.0, end_s - time.monotonic()))
            except queue.Empty:
                raise Trouble(f"not all processes answered within {limit_s:g} s") from None
            if "trouble" in answer:
                raise Trouble(str(answer["trouble"]))
            answers.append(answer)
        return answers

    @staticmethod
    def _read(process: subprocess.Popen[str], answers: queue.SimpleQueue[Words]) -> None:
        assert process.stdout
        for line in process.stdout:
            answers.put(json.loads(line))
        answers.put({"trouble": "one of the processes ended"})
