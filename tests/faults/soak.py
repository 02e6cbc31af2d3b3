"""A job whose store refuses requests at random, and the oracle: the job goes on, ends, or says why not within seconds.

Each agent has a proxy of its own (refusing.py), which knows the requests that the agent repeats in vain. An agent is
silent if one request has been tried for `SAID_S` without a good answer, and no line names the store's trouble. It is
also silent if a node has no living worker for `STANDING_S`, and no agent has said anything about the store or nodes.
"""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elaunch.rendezvous.etcd.transport import Rpc
from tests.etcd import Etcd
from tests.faults.answers import ALL, MAY_PASS, Answer
from tests.faults.fleet import Fleet, Hearing
from tests.faults.refusing import Refusing

# The promise is 2 s, but the tests' machines are shared.
SAID_S = 5.5
STANDING_S = 15.0
# A line about the store counts this long: a minute later the agent logs another one.
LINE_HOLDS_S = 90.0
# The longest time between two tries of one request: a pause of 3 s while the store was never reached, and a call's
# deadline.
BETWEEN_TRIES_S = 5.0
# With these options an agent gives up a store that stays away in 26 s, the shortest time with a --stop-grace of 1 s.
OPTIONS = ("--stop-grace", "1", "--rdzv-conf", "join_timeout=26,store_timeout=26")
# The join timeout, the form deadline, two lease times. By then the last agent has ended, whatever happens.
ENDED_S = 26 + 19 + 7 + 20
POLL_S = 0.1

# A line names the store by a word or by its address, which is a proxy's.
_TROUBLE = re.compile(r"\b(store|etcd)\b|127\.0\.0\.1:\d", re.IGNORECASE)
_OVER = re.compile(r"the store (is back|answers|does as asked)")
_WAITING = re.compile(r"\b(store|etcd|waiting|waits|node)\b", re.IGNORECASE)
# TXN comes most often: a job once hung on a write that was refused while its leases were renewed.
_KINDS: tuple[Rpc | None, ...] = (None, None, Rpc.RANGE, *[Rpc.TXN] * 4, Rpc.GRANT, Rpc.KEEP_ALIVE, Rpc.WATCH)


@dataclass(frozen=True)
class Phase:
    """A time with these answers, at this rate, to requests of one kind (None: all), of one agent (None: all)."""

    duration_s: float
    answers: tuple[Answer, ...] = ()
    rate: float = 0.0
    rpc: Rpc | None = None
    node: int | None = None
    # The node whose worker is killed, and how long after the phase has begun.
    kill: tuple[int, float] | None = None
    # The phase is over as soon as there are workers on all nodes.
    until_running: bool = False

    def __str__(self) -> str:
        kill = f", kills worker {self.kill[0]} after {self.kill[1]:.1f} s" if self.kill else ""
        if not self.answers:
            return f"{self.duration_s:.1f} s quiet{', until all run' if self.until_running else ''}{kill}"
        what = str(self.answers[0]) if len(self.answers) == 1 else f"any of {len(self.answers)} answers"
        whom = "all" if self.node is None else f"node {self.node}"
        kind = self.rpc.name if self.rpc else "any request"
        return f"{self.duration_s:.1f} s {what} to {self.rate:.0%} of {kind} of {whom}{kill}"


@dataclass(frozen=True)
class Plan:
    """One job: its nodes, what happens to it, and whether its store is ever well again."""

    nodes: int
    phases: tuple[Phase, ...]
    heals: bool

    def __str__(self) -> str:
        last = "healed" if self.heals else "never healed"
        return "\n".join([f"{self.nodes} nodes", *(f"  {phase}" for phase in self.phases), f"  {last}"])


START = Phase(20, until_running=True)


def drawn(dice: random.Random) -> Plan:
    """A plan."""
    nodes = dice.choice((2, 2, 3))
    phases = [START] if dice.random() < 0.8 else []
    phases += [_phase(dice, nodes) for _ in range(dice.randint(1, 4))]
    return Plan(nodes, tuple(phases), heals=dice.random() < 0.8)


def _phase(dice: random.Random, nodes: int) -> Phase:
    duration_s = dice.choice((1.0, 3.0, 9.0, 9.0)) * dice.uniform(0.9, 1.3)
    kill = (dice.randrange(nodes), dice.uniform(0, 1)) if dice.random() < 0.7 else None
    node = dice.randrange(nodes) if dice.random() < 0.4 else None
    rpc = dice.choice(_KINDS)
    kind = dice.random()
    if kind < 0.15:
        return Phase(duration_s / 3, kill=kill)
    if kind < 0.75:
        return Phase(duration_s, (dice.choice(ALL),), dice.choice((1.0, 1.0, 0.7)), rpc, node, kill)
    table = MAY_PASS if dice.random() < 0.7 else ALL
    return Phase(duration_s, table, dice.choice((0.05, 0.3, 0.8)), rpc, node, kill)


@dataclass
class Watching:
    """One agent under the oracle. `silences` are the silent states that were found, by a name for each kind."""

    node: int
    fleet: Fleet
    proxy: Refusing
    hearing: Hearing
    lived_s: float
    silences: dict[str, str] = field(default_factory=dict)

    def look(self, now_s: float, is_standing_said: Callable[[float], bool]) -> None:
        self.hearing.listen()
        if self.fleet.agents[self.node].process.poll() is not None:
            return
        if self.fleet.is_alive(self.node):
            self.lived_s = now_s
        for (rpc, body), since_s in self.proxy.waiting.now(BETWEEN_TRIES_S).items():
            # A job does not need its watch: it also reads the changes that the watch would report.
            if rpc is not Rpc.WATCH and now_s - since_s > SAID_S and not self._has_said(since_s, now_s):
                self._found(now_s, rpc.name, since_s, self._answers(rpc, since_s), body)
        standing_s = now_s - self.lived_s
        if standing_s > STANDING_S and not is_standing_said(self.lived_s):
            self._found(now_s, "standing", self.lived_s, self._answers(None, self.lived_s), b"")

    def _has_said(self, since_s: float, now_s: float) -> bool:
        """Whether the agent's last line about its store is about trouble, or a good line is too recent to judge."""
        of_store = [(at_s, line) for at_s, line in self.hearing.lines if _TROUBLE.search(line)]
        if not of_store:
            return False
        at_s, line = of_store[-1]
        return now_s - at_s < (SAID_S if _OVER.search(line) else LINE_HOLDS_S)

    def _answers(self, rpc: Rpc | None, since_s: float) -> Counter[str]:
        return Counter(str(s.answer) for s in self.proxy.strikes(rpc) if s.at_s >= since_s - 0.1)

    def _found(self, now_s: float, what: str, since_s: float, answers: Counter[str], body: bytes) -> None:
        has_worker = "its worker lives" if self.fleet.is_alive(self.node) else "no worker lives"
        of = answers.most_common(1)[0][0] if len(answers) == 1 else f"{len(answers)} kinds of answers"
        name = f"{what}, {has_worker}: {of}"
        self.silences.setdefault(
            name, f"node {self.node} at {now_s:.2f}, for {now_s - since_s:.1f} s: {dict(answers)} {body[:300]!r}"
        )


def played(folder: Path, etcd: Etcd, plan: Plan, seed: str) -> dict[str, str]:
    """Run one job by its plan. Returns the silent states that were found, by what tells them apart."""
    proxies = [Refusing(etcd) for _ in range(plan.nodes)]
    found: dict[str, str] = {}
    try:
        _begin(plan.phases[0], proxies, seed)
        with Fleet(folder, [str(proxy.endpoint) for proxy in proxies], *OPTIONS, job=folder.name) as fleet:
            watching = _Job(fleet, proxies)
            watching.play(plan, seed)
            found = watching.verdict(plan)
            if found:
                found = {name: f"{text}\n{watching.history()}" for name, text in found.items()}
    finally:
        for proxy in proxies:
            proxy.__exit__()
    return found


def _begin(phase: Phase, proxies: Sequence[Refusing], seed: str) -> None:
    for node, proxy in enumerate(proxies):
        proxy.heal()
        if phase.answers and phase.node in (None, node):
            dice = random.Random(f"{seed}-{node}-{phase}").randrange(1 << 30)
            proxy.chaos(dice, phase.rate, phase.answers, phase.rpc)


class _Job:
    def __init__(self, fleet: Fleet, proxies: Sequence[Refusing]) -> None:
        self._fleet = fleet
        self._proxies = proxies
        now_s = time.monotonic()
        self._agents = [
            Watching(node, fleet, proxy, Hearing(fleet.agents[node]), now_s) for node, proxy in enumerate(proxies)
        ]
        self._log: list[tuple[float, str]] = []
        self._late: dict[str, str] = {}

    def play(self, plan: Plan, seed: str) -> None:
        for index, phase in enumerate(plan.phases):
            self._log.append((time.monotonic(), f"phase: {phase}"))
            if index:
                _begin(phase, self._proxies, f"{seed}-{index}")
            if self._lasts(phase):
                break
        if plan.heals:
            self._log.append((time.monotonic(), "healed"))
            for proxy in self._proxies:
                proxy.heal()
        self._fleet.end()
        self._log.append((time.monotonic(), "the workers may end"))
        end_s = time.monotonic() + ENDED_S
        while not self._has_ended() and not self._found():
            self._look()
            if time.monotonic() > end_s and not plan.heals and plan.phases[-1].rate < 1:
                # Some requests succeed, so each trouble is a new one. The job goes on slowly, and says so.
                break
            if time.monotonic() > end_s:
                running = [a.node for a in self._agents if self._fleet.agents[a.node].process.poll() is None]
                how = "healed" if plan.heals else "never healed"
                self._late[f"no end within {ENDED_S} s, {how}"] = f"nodes {running} run still"
                break

    def verdict(self, plan: Plan) -> dict[str, str]:
        found = self._found()
        if not found:
            for each in self._agents:
                each.hearing.listen()
                found |= _end_is_said(each)
        return found

    def history(self) -> str:
        log = list(self._log)
        for each in self._agents:
            log += [(at_s, f"node {each.node} says: {line}") for at_s, line in each.hearing.lines if line]
            log += [(s.at_s, f"node {each.node} struck: {str(s)[:200]}") for s in each.proxy.struck[-150:]]
        return "\n".join(f"{at_s:.2f} {text}" for at_s, text in sorted(log))

    def _lasts(self, phase: Phase) -> bool:
        """Whether the job has ended, or a silent state was found, before the phase was over."""
        begun_s = time.monotonic()
        kill = phase.kill
        while (now_s := time.monotonic()) < begun_s + phase.duration_s:
            if kill and now_s >= begun_s + kill[1]:
                done = self._fleet.kill_worker(kill[0])
                self._log.append((now_s, f"worker {kill[0]} {'killed' if done else 'is not there'}"))
                kill = None
            self._look()
            if self._has_ended() or self._found():
                return True
            if phase.until_running and all(self._fleet.is_alive(each.node) for each in self._agents):
                return False
        return False

    def _look(self) -> None:
        now_s = time.monotonic()
        for each in self._agents:
            each.look(now_s, self._is_standing_said)
        time.sleep(POLL_S)

    def _is_standing_said(self, since_s: float) -> bool:
        return any(_WAITING.search(line) for each in self._agents for at, line in each.hearing.lines if at >= since_s)

    def _has_ended(self) -> bool:
        return all(agent.process.poll() is not None for agent in self._fleet.agents)

    def _found(self) -> dict[str, str]:
        found = dict(self._late)
        for each in self._agents:
            found |= each.silences
        return found


def _end_is_said(each: Watching) -> dict[str, str]:
    """An exit code other than 0 comes with a sentence. If the store is the reason, the sentence names the store."""
    agent = each.fleet.agents[each.node]
    code = agent.process.poll()
    last = [line for _, line in each.hearing.lines if line][-3:]
    if "Traceback" in agent.stderr:
        return {"a traceback": f"node {each.node}"}
    # The code is None for an agent that still runs, because it may go on slowly.
    if code in (0, None) or (code in (2, 3) and any(_TROUBLE.search(line) for line in last)) or (code == 1 and last):
        return {}
    return {f"exit code {code} without a reason": f"node {each.node}: {last}"}
