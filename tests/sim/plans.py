"""Draws the world of a seed: a job, its nodes, delays and losses, and faults with their times."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import Enum

from elaunch.rendezvous.times import Times

# Short waits: virtual time costs nothing, but every second of it costs renewals.
TIMES = Times(
    failure_grace_s=1.0,
    stop_grace_s=3.0,
    boundary_wait_s=0.5,
    last_call_s=1.0,
    join_timeout_s=40.0,
    store_timeout_s=25.0,
    join_backoff_max_s=16.0,
)
OTHER_TIMES = (
    Times.for_lease(
        2, failure_grace_s=0.5, stop_grace_s=2.0, last_call_s=0.5, join_timeout_s=40.0, store_timeout_s=25.0
    ),
    Times.for_lease(6, failure_grace_s=2.0, stop_grace_s=5.0, join_timeout_s=60.0, store_timeout_s=30.0),
)
FOREVER_S = 1e9


class Strike(Enum):
    """Faults, and actions of people and schedulers, that can happen at a moment."""

    KILL = "agent killed"
    KILL_AT = "agent killed at an action"
    KILL_LEADER = "leader killed at a write"
    POWER = "host lost without a message"
    STOP = "agent stopped and continued"
    WEDGE = "agent's loop wedged"
    CUT = "host cut from everything"
    STORELESS = "host cut from the store"
    AWAY = "store away, leases live on"
    AWAY_ENDING = "store away, leases end"
    FULL = "store full, leases live on"
    REFUSED = "host refused by the store"
    DEAF = "watch deaf"
    LEAVE = "SIGTERM or SIGUSR1 to the agent"
    INTERRUPT = "SIGINT to the agent"
    RESTART = "elaunch restart"
    PREEMPT = "the same to agent and workers"
    CANCEL = "the same to all agents and workers"
    WORKER = "worker fails"
    SERVICE = "worker store lost"
    FORK_SERVER = "fork server lost"
    SLOW_CLEAR = "clearing up takes long"
    HANG = "workers hang"
    SICK = "a host's workers fail soon, again and again"
    GARBAGE = "bad record"
    HISTORY = "history lost"


FATAL = (Strike.GARBAGE, Strike.HISTORY)
# Ranks that stand still hang after this time.
HANG_AFTER_S = 6.0
# Faults that last for a while. Their effects end when they end.
LASTING = (
    Strike.SICK,
    Strike.STOP,
    Strike.WEDGE,
    Strike.CUT,
    Strike.STORELESS,
    Strike.AWAY,
    Strike.AWAY_ENDING,
    Strike.POWER,
)
REFUSALS = (Strike.FULL, Strike.REFUSED)


@dataclass(frozen=True)
class Fault:
    """A fault on one host. `host` is an index, modulo the number of hosts. `number` is that of an action or a write."""

    at_s: float
    what: Strike
    host: int = 0
    lasts_s: float = 0.0
    number: int = 1


class Program(Enum):
    """The behaviour of the workers' program."""

    GOOD = "works"
    UNSTARTABLE = "never starts"
    UNSTARTABLE_HERE = "never starts on the last host"
    ERRONEOUS = "raises the same error soon after every start"


@dataclass(frozen=True)
class HostPlan:
    """One host, and the agent that is started on it at `start_s`. The host's clock runs at `rate` from `clock_s`.

    `again_s` is the time from the agent's death to the start of another one there, or None. `behind_s` is how much
    later than other hosts it learns of anything.
    """

    name: str
    slots: int
    start_s: float = 0.0
    rate: float = 1.0
    clock_s: float = 0.0
    again_s: float | None = None
    wrong_terms: bool = False
    node_rank: int = -1
    topology: str = ""
    behind_s: float = 0.0
    role: str = "default"


@dataclass(frozen=True)
class Plan:
    """One world. Until `heal_s` its lines to the store lose and delay messages.

    `call_s` and `watch_s` are the longest times of a call and of a watch's report. `lost` is the share of answers that
    never come, `twice` the share of requests that arrive again later. `work_s` is the training time that the job needs.
    A `collective` program blocks if a rank is missing, and fails if one dies. `peers_blind` is the share of workers
    that do not notice a peer's death. `obedient` workers die of SIGTERM at once; others react in other ways. If the
    program `listens`, agents notify its workers on their links of stops and failures. Agents that `watch` sample their
    workers from outside, and find out together that the job hangs; else one of them is notified.
    """

    seed: int
    hosts: tuple[HostPlan, ...]
    nodes_min: int
    nodes_max: int
    max_restarts: int = 3
    restart_window_s: float | None = None
    program: Program = Program.GOOD
    collective: bool = True
    obedient: bool = True
    peers_blind: float = 0.0
    work_s: float = 10.0
    call_s: float = 0.002
    watch_s: float = 0.002
    loop_s: float = 0.001
    lost: float = 0.0
    twice: float = 0.0
    interleave: float = 0.2
    lease_slack_s: float = 0.0
    again: bool = False
    listens: bool = False
    exclude_after: int = 0
    no_restart_codes: tuple[int, ...] = ()
    watches: bool = False
    faults: tuple[Fault, ...] = ()
    times: Times = TIMES

    @property
    def heal_s(self) -> float:
        """The time after which nothing fails any more."""
        return max((fault.at_s + min(fault.lasts_s, 60.0) for fault in self.faults), default=0.0) + 0.5

    def __str__(self) -> str:
        lines = [f"{name}={value!r}" for name, value in vars(self).items() if name not in ("hosts", "faults", "times")]
        hosts = [f"  {host}" for host in self.hosts]
        faults = [f"  {fault}" for fault in sorted(self.faults, key=lambda fault: fault.at_s)]
        return "\n".join((", ".join(lines), *hosts, *faults))


_COMMON = (
    *(Strike.KILL, Strike.KILL_AT, Strike.KILL_AT, Strike.KILL_LEADER, Strike.KILL_LEADER, Strike.POWER),
    *(Strike.STOP, Strike.WEDGE, Strike.CUT, Strike.STORELESS, Strike.AWAY, Strike.AWAY_ENDING, Strike.DEAF),
    *(Strike.LEAVE, Strike.PREEMPT, Strike.SERVICE, Strike.FORK_SERVER, Strike.SLOW_CLEAR, Strike.SLOW_CLEAR),
    *[Strike.WORKER] * 6,
)
_RARE = (Strike.INTERRUPT, Strike.CANCEL)


def draw(seed: int) -> Plan:
    """The world of a seed."""
    rng = random.Random(seed)
    nodes = rng.choice([1, 2, 2, 3, 3, 3, 4, 4, 5, 5, 7, 12])
    hosts = _hosts(rng, nodes)
    nodes_max = rng.choice([nodes, nodes, nodes, max(1, nodes - 1), max(1, nodes - 1), nodes + 1])
    enough = nodes_max if rng.random() < 0.05 else min(nodes, nodes_max)
    nodes_min = rng.choice([enough, enough, max(1, enough - 1), 1, rng.randint(1, enough)])
    slow = rng.choice([0.0005, 0.002, 0.02, 0.15])
    plan = Plan(
        seed,
        hosts,
        nodes_min,
        nodes_max,
        max_restarts=rng.choice([0, 1, 2, 3, 3, 12, 12]),
        restart_window_s=rng.choice([None, None, None, 15.0]),
        program=rng.choice([*[Program.GOOD] * 12, *Program]),
        collective=rng.random() < 0.8,
        obedient=rng.random() < 0.5,
        peers_blind=rng.choice([0.0, 0.0, 0.2, 1.0]),
        work_s=rng.choice([3.0, 15.0, 30.0, 80.0]),
        call_s=slow,
        watch_s=rng.choice([slow, slow, 0.3, 2.0]),
        loop_s=rng.choice([0.0005, 0.01, 0.2]),
        lost=rng.choice([0.0, 0.0, 0.02, 0.2]),
        twice=rng.choice([0.0, 0.0, 0.02, 0.2]),
        interleave=rng.choice([0.0, 0.2, 0.5]),
        lease_slack_s=rng.choice([0.0, 0.5]),
        again=rng.random() < 0.1,
        faults=_faults(rng, nodes),
        times=rng.choice([TIMES, TIMES, TIMES, *OTHER_TIMES]),
    )
    hangs = [Fault(rng.uniform(2, 12), Strike.HANG, rng.randrange(nodes)) for _ in range(rng.choice([0, 0, 0, 1, 2]))]
    listens = rng.random() < 0.5
    refusals = [
        Fault(rng.uniform(0, 15), rng.choice(REFUSALS), rng.randrange(nodes), rng.uniform(0.1, 20))
        for _ in range(rng.choice([0, 0, 0, 1, 3]))
    ]
    watches = rng.random() < 0.5
    times = replace(plan.times, hang_after_s=HANG_AFTER_S) if watches else plan.times
    # Drawn apart, so that the worlds of older seeds stay as they were.
    apart = random.Random(f"sick {seed}")
    sick = [Fault(apart.uniform(0, 8), Strike.SICK, apart.randrange(nodes), apart.uniform(5, 30))]
    roles = random.Random(f"roles {seed}")
    names = roles.choice([("default",)] * 5 + [("ps", "trainer", "trainer"), ("ps=1,trainer=1", "trainer")])
    exclude_after, is_sick = apart.choice([0, 1, 2, 3, 3]), apart.random() < 0.15
    codes = random.Random(f"codes {seed}").choice([(), (), (3,)])
    orders = random.Random(f"orders {seed}")
    restarts = [Fault(orders.uniform(1, 15), Strike.RESTART, orders.randrange(nodes)) for _ in range(2)]
    is_ordered = orders.random() < 0.2
    return replace(
        plan,
        hosts=tuple(replace(host, role=roles.choice(names)) for host in plan.hosts),
        listens=listens,
        watches=watches,
        times=times,
        exclude_after=exclude_after,
        no_restart_codes=codes,
        faults=(*plan.faults, *hangs, *refusals, *(sick if is_sick else []), *(restarts if is_ordered else [])),
    )


def _hosts(rng: random.Random, nodes: int) -> tuple[HostPlan, ...]:
    slots = rng.choice([1, 1, 2])
    mixed, late = rng.random() < 0.3, rng.choice([0.0, 0.0, 0.5, 4.0, 20.0])
    drift = rng.choice([0.0, 0.0, 0.02])
    chosen = rng.random() < 0.2
    wrong = nodes > 1 and rng.random() < 0.05
    return tuple(
        HostPlan(
            f"host-{index}",
            rng.randint(1, 3) if mixed else slots,
            start_s=0.0 if index == 0 or rng.random() < 0.5 else rng.uniform(0, late),
            rate=1 + rng.uniform(-drift, drift),
            clock_s=rng.choice([0.0, rng.uniform(0, 1e5)]),
            again_s=rng.choice([None, rng.uniform(0.05, 1.0), rng.uniform(0, 8)]),
            wrong_terms=wrong and index == nodes - 1,
            node_rank=nodes - 1 - index if chosen else -1,
            topology=rng.choice(["", "left", "right"]),
            behind_s=rng.choice([0.0, 0.0, 0.0, 0.3]),
        )
        for index in range(nodes)
    )


def _faults(rng: random.Random, nodes: int) -> tuple[Fault, ...]:
    number = rng.choice([0, 1, 2, 3, 5, 8, 12, 16, 25, 40])
    # Some worlds have only one kind of fault, and many of it. Some have several faults within moments.
    theme = rng.choice([*_COMMON]) if rng.random() < 0.3 else None
    within_s = rng.choice([1.0, 10.0, 20.0, 60.0])
    begin_s = rng.choice([0.0, 0.0, 2.0, 6.0])
    faults = []
    for _ in range(number):
        what = theme or rng.choice(_RARE if rng.random() < 0.02 else _COMMON)
        lasts_s = rng.choice([rng.uniform(0.1, 3), rng.uniform(2, 8), rng.uniform(5, 20)]) if what in LASTING else 0.0
        if what is Strike.WEDGE and rng.random() < 0.3:
            lasts_s = FOREVER_S
        if what is Strike.SLOW_CLEAR:
            lasts_s = rng.choice([2.0, 20.0])
        counted = rng.randint(1, 25) if what is Strike.KILL_AT else rng.randint(1, 4)
        at_s = begin_s + rng.uniform(0, within_s)
        faults.append(Fault(at_s, what, rng.randrange(nodes), lasts_s, counted))
    if rng.random() < 0.02:
        faults.append(Fault(begin_s + rng.uniform(0, within_s), rng.choice(FATAL), number=rng.randrange(5)))
    return tuple(faults)
