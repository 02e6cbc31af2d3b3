"""Many agents at once on one store: the time until all have ranks, and the cost of that and of training."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from bench.counting import COMPARED, TOLD
from bench.crew import Crew, cpu_s
from bench.job import Trouble
from bench.samples import Sample
from elaunch.rendezvous.etcd.transport import Rpc
from tests.etcd import Etcd

FIRST, RESTART, IDLE = "first rendezvous of many", "restart of many", "many that train"
SEALED, RANKS = "sealed", "all have ranks"
REQUESTS, SEEN, BYTES = "requests per agent", "seen by etcd, looks too", "bytes per agent"
AGENTS_CPU, ETCD_CPU = "CPU of all agents", "CPU of etcd"
VERSIONS = ("3.5", "3.4")
# The agents of one process share its interpreter lock. The agents of a real job share none.
_PROCESSES = 8
# A whole number of renewals (each 0.8 s) and of comparisons (with each fourth renewal).
IDLE_S = 6.4
# The time in which agents make up for what was late in the rendezvous.
_SETTLED_S = 3.2
_ANSWER_S = 20.0
# etcd's own defaults. The tests' values are shorter and cost more.
_OPTIONS = ("--heartbeat-interval=100", "--election-timeout=1000")
_STARTED = re.compile(r'^grpc_server_started_total\{.*grpc_method="(\w+)".*\} (\S+)$', re.MULTILINE)
_RENEWAL = "LeaseKeepAlive"
_METHODS = ("Range", "Txn", "LeaseGrant", _RENEWAL, "LeaseRevoke", "Watch", "Status")


def ours(version: str) -> str:
    """The name in the tables of elaunch on that version of etcd."""
    return f"elaunch, etcd {version}"


def rendezvous(version: str, agents: int, limit_s: float, idle_s: float = IDLE_S) -> Iterator[Sample]:
    """`agents` agents without workers start at once, run for `idle_s`, and restart when one worker has died."""
    name, section = ours(version), FIRST
    with Etcd(version, options=_OPTIONS) as etcd:
        host, port = etcd.addresses[0].host, str(etcd.addresses[0].port)
        arguments = [
            (host, "bench", port, str(agents), str(first), str(count)) for first, count in _shares(agents).items()
        ]
        try:
            with Crew("bench.crowd", arguments) as crew:
                round_ = _Round(etcd, crew, name, agents)
                yield round_.seated(FIRST, "open", limit_s)
                section = IDLE
                yield round_.idle(idle_s)
                section = RESTART
                yield round_.seated(RESTART, "fail", limit_s)
        except Trouble as trouble:
            yield Sample(section, name, agents, why=str(trouble))


def _shares(agents: int) -> dict[int, int]:
    """The first agent of each process, and the process's number of agents."""
    limits = [agents * i // _PROCESSES for i in range(_PROCESSES + 1)]
    return {first: end - first for first, end in pairwise(limits) if end > first}


class _Round:
    """One job's agents and their etcd."""

    def __init__(self, etcd: Etcd, crew: Crew, name: str, agents: int) -> None:
        self._etcd = etcd
        self._crew = crew
        self._name = name
        self._agents = agents

    def seated(self, section: str, order: str, limit_s: float) -> Sample:
        """Measure from an order until all agents have their ranks."""
        cpu_s, seen = self._cpu_s(), self._seen(renewals=False)
        ordered_s = self._crew.order(order, first_only=order == "fail")
        answers = self._crew.hear(limit_s)
        now_cpu_s = self._cpu_s()
        values = {
            SEALED: min(answer["first_s"] for answer in answers) - ordered_s,
            RANKS: max(answer["last_s"] for answer in answers) - ordered_s,
            **self._traffic(1.0, seen, renewals=False),
            AGENTS_CPU: now_cpu_s[0] - cpu_s[0],
            ETCD_CPU: now_cpu_s[1] - cpu_s[1],
        }
        return Sample(section, self._name, self._agents, values)

    def idle(self, idle_s: float) -> Sample:
        """Measure a stretch of training, per second."""
        time.sleep(_SETTLED_S)
        self._counts()
        cpu_s, seen = self._cpu_s(), self._seen(renewals=True)
        began_s = time.monotonic()
        time.sleep(idle_s)
        seconds = time.monotonic() - began_s
        now_cpu_s = self._cpu_s()
        values = {
            **self._traffic(seconds, seen, renewals=True),
            AGENTS_CPU: 100 * (now_cpu_s[0] - cpu_s[0]) / seconds,
            ETCD_CPU: 100 * (now_cpu_s[1] - cpu_s[1]) / seconds,
        }
        return Sample(IDLE, self._name, self._agents, values)

    def _cpu_s(self) -> tuple[float, float]:
        process = self._etcd.members[0].process
        assert process
        return self._crew.cpu_s(), cpu_s(process.pid)

    def _traffic(self, seconds: float, seen_before: int, *, renewals: bool) -> dict[str, float]:
        """The traffic per agent. Requests by the clock, such as renewals, are no part of a rendezvous."""
        seen = self._seen(renewals=renewals) - seen_before
        counts = self._counts()
        requests = sum(asked(count["requests"], renewals=renewals) for count in counts)
        transferred = sum(count["sent"] + count["received"] for count in counts)
        share = self._agents * seconds
        return {REQUESTS: requests / share, SEEN: seen / share, BYTES: transferred / share}

    def _counts(self) -> list[dict[str, Any]]:
        """The counts of the agents' processes since the last call."""
        self._crew.order("count")
        return self._crew.hear(_ANSWER_S)

    def _seen(self, *, renewals: bool) -> int:
        """The number of calls of our kinds that etcd has begun to answer."""
        with urllib.request.urlopen(f"http://{self._etcd.members[0].endpoint}/metrics") as answer:
            return started(answer.read().decode(), renewals=renewals)


def asked(requests: Mapping[str, int], *, renewals: bool) -> int:
    """The number of requests, with or without those by the clock. A watch's messages are no requests."""
    left_out = {TOLD} if renewals else {TOLD, COMPARED, Rpc.KEEP_ALIVE.value}
    return sum(count for kind, count in requests.items() if kind not in left_out)


def started(metrics: str, *, renewals: bool) -> int:
    """The number of calls that an etcd has begun to answer, by its own metrics. Only kinds that agents make count."""
    counted = set(_METHODS) - (set() if renewals else {_RENEWAL})
    return sum(int(float(count)) for method, count in _STARTED.findall(metrics) if method in counted)
