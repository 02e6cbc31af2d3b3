"""A job on several nodes with a real etcd, and the checks that fault tests make on it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.etcd import Etcd, Member
from tests.faults.meetings import Meeting, Records
from tests.faults.processes import Watched, described
from tests.harness import LIGHT, wait_for
from tests.nodes import Node, Nodes
from tests.standin import WITHOUT_TORCH

REDUCER = Path(__file__).with_name("reducer.py")
# For jobs of which no node is lost: on a busy machine a node may be silent for longer than the default of 3 s.
PATIENT = ("--rdzv-conf", "lease_ttl=60")
# Only torch: its optimizers are not used here, and each node imports for itself, all on the same two cores.
PRELOAD = ("--preload", "torch")
PORT = 2379


class Cluster:
    """`count` nodes for agents, and an etcd: one member on a node of its own, or several on `members_on`.

    With `head` there is no etcd: node 0 serves the store.

    Use it as a context manager, which ends everything. All nodes see `folder`; workers and tests exchange files there.
    """

    # The modules that every node preloads, and further variables of its environment.
    _preload: tuple[str, ...] = PRELOAD
    _environment: Mapping[str, str] = {}

    def __init__(
        self,
        folder: Path,
        count: int = 2,
        *,
        members_on: Sequence[int] = (),
        head: bool = False,
        family: str = "ipv4",
        own_name_is_loopback: bool = False,
    ) -> None:
        self.folder = folder
        self.logs = folder / "logs"
        self.records = Records(folder / "records")
        self.agents: dict[int, Watched] = {}
        self._all_agents: list[Watched] = []
        self._etcd: Etcd | None = None
        alone = not (members_on or head)
        where = list(members_on) or [count]
        self.nodes = Nodes(count + alone, own_name_is_loopback=own_name_is_loopback)
        if head:
            self.endpoints = f"{self.nodes[0].name}:{PORT}"
            return
        try:
            self._etcd = Etcd(
                members=len(where),
                hosts=[getattr(self.nodes[i], family) for i in where],
                ports=[port for _ in where for port in (PORT, PORT + 1)],
                prefix=lambda i: self.nodes[where[i]].prefix,
            )
        except BaseException:
            self.nodes.close()
            raise
        self.endpoints = self._etcd.endpoints

    @property
    def etcd(self) -> Etcd:
        assert self._etcd, "the head serves the store"
        return self._etcd

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self._all_agents:
            agent.__exit__()
        if self._etcd:
            self._etcd.close()
        self.nodes.close()

    def start(
        self,
        *indices: int,
        nnodes: str,
        options: Sequence[str] = (),
        job: str = "job",
        program: Path = REDUCER,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Type the command on these nodes, each in a folder of its own. The agent of node i is then `agents[i]`."""
        words = ["--nnodes", nnodes, "--rdzv-endpoint", self.endpoints, "--rdzv-id", job]
        words += ["--log-dir", str(self.logs), *self._preload, *options, str(program), str(self.folder)]
        for i in indices:
            self.type(i, *words, env=env)

    def type(self, index: int, *words: str, env: Mapping[str, str] | None = None) -> None:
        """Type exactly these words after the command's name."""
        home = self.folder / self.nodes[index].name
        home.mkdir(exist_ok=True)
        variables = {**self._environment, **(env or {})}
        self.agents[index] = Watched(home, *words, env=variables, prefix=self.nodes[index].prefix)
        self._all_agents.append(self.agents[index])

    def meeting(self, world_size: int, after: Meeting | None = None) -> Meeting:
        """Wait until a generation newer than `after` has `world_size` ranks and all have met. Returns it.

        Fails unless the ranks agree on all variables that must be the same.
        """
        oldest = after.generation + 1 if after else 0
        try:
            found = wait_for(
                lambda: self.records.meeting(world_size, oldest), f"{world_size} ranks meet in {oldest} or later"
            )
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None
        self.records.check(found, {node.name: (node.ipv4, node.ipv6) for node in self.nodes})
        return found

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    def goes_on(self, meeting: Meeting, records: int = 3) -> None:
        """Wait until every rank of that generation has recorded more steps than now; fail if a newer one started."""
        since = len(self.records.all())
        wanted = records * len(meeting.records)

        def trained() -> bool:
            newer = [r for r in self.records.of("started", since=since) if r["generation"] > meeting.generation]
            assert not newer, f"generation {meeting.generation} did not go on:\n{self.story()}"
            return len(self.records.of("step", meeting.generation, since=since)) >= wanted

        wait_for(trained, f"generation {meeting.generation} goes on")

    def trains_for(self, meeting: Meeting, duration_s: float) -> None:
        """Let that generation train for this long. Fail if a newer one starts, or if training stands still."""
        until_s = time.monotonic() + duration_s
        while time.monotonic() < until_s:
            self.goes_on(meeting)

    def wait_for_leaders_output(self, text: str) -> None:
        """Wait until an agent has logged what only a leader says. Any agent may become the next leader."""

        def is_said() -> bool:
            return any(text in agent.stderr for agent in self.agents.values())

        try:
            wait_for(is_said, f"an agent says {text!r}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None

    def ask(self, what: str, *, generation: int, rank: int) -> None:
        """Make a rank fail after its next step: see reducer.py."""
        partial = self.folder / f".step-{generation}-{rank}"
        partial.write_text(what)
        partial.rename(self.folder / f"step-{generation}-{rank}")

    def end(self, *indices: int) -> None:
        """Let the training end. These agents (else all that run) must end with exit code 0, and leave nothing."""
        (self.folder / "end").touch()
        self.ended(dict.fromkeys(indices or self.agents, 0))

    def ended(self, codes: Mapping[int, int]) -> None:
        """Check that these agents end with these exit codes, leave nothing on their nodes, and all logs are there."""
        got = {i: self.agents[i].wait() for i in codes}
        assert got == codes, self.story()
        for i in codes:
            self.assert_nothing_is_left(self.nodes[i])
        self.assert_logs_of_all_generations()

    def assert_nothing_is_left(self, node: Node) -> None:
        """No process (except etcd's), no cgroup and no run directory of elaunch is on the node."""
        index = node.index

        def left() -> list[str]:
            found = [f"{p.pid} {described(p)}" for p in node.processes() if p.pid not in self._etcd_pids()]
            found += [str(path) for path in node.cgroups()]
            return found + [str(p) for p in self.agents[index].run_dirs()] + node.shared_memory()

        try:
            wait_for(lambda: not left(), "nothing is left")
        except AssertionError:
            raise AssertionError(f"left on {node}: {left()}\n{self.story()}") from None

    def assert_logs_of_all_generations(self) -> None:
        """The log folder has the output of every worker of every generation."""
        texts = [path.read_text() for path in self.logs.glob("*_*/attempt_*/*/stdout.log")]
        for each in self.records.of("started"):
            assert sum(json.dumps(each) in text for text in texts) == 1, f"not logged (once): {each}"

    def story(self) -> str:
        """The agents' output and the last records, to find out why a test failed."""
        parts = [f"--- agent on node{i} ({a.process.poll()}):\n{a.stderr}" for i, a in self.agents.items()]
        records = [
            f"{r['at_s']:.2f} generation {r['generation']} rank {r['rank']} on {r['host']}: {r['event']}"
            for r in self.records.of()
            if r["event"] != "step" or not r["step"]
        ]
        return "\n".join([*parts, "--- records:", *records[-60:]])

    def _etcd_pids(self) -> set[int]:
        return {m.process.pid for m in self._etcd.members if m.process} if self._etcd else set()

    def leader(self, job: str = "job") -> int:
        """The index of the node whose agent leads the job."""
        key = f"/elaunch/{job}/ctl/leader"
        get = ("get", "--print-value-only", key)
        held = wait_for(lambda: self.etcd.ctl(*get).strip().strip('"'), "a leader", every_s=0.1)
        return self.node(held.rpartition("-")[0]).index

    def member_on(self, node: Node) -> Member:
        return next(m for m in self.etcd.members if m.endpoint.startswith(f"{node.ipv4}:"))


class LightCluster(Cluster):
    """A cluster whose nodes have a stand-in for torch, for tests of agents, nodes and the store."""

    _preload = LIGHT
    _environment = WITHOUT_TORCH


class Shared:
    """A job without torch on which one test after another causes a failure: a restart is cheaper than a new job.

    If an earlier test has not left the whole job running, a new job is started. Use it as a context manager.
    """

    def __init__(
        self,
        folders: pytest.TempPathFactory,
        agents: int,
        *,
        nodes: int | None = None,
        members_on: Sequence[int] = (),
        **start: Any,
    ) -> None:
        """The first `agents` of the `nodes` run an agent each. `start` are arguments of LightCluster.start for them."""
        self._folders, self._agents, self._nodes = folders, agents, nodes or agents
        self._members_on, self._start = members_on, start
        self._now: LightCluster | None = None

    def __enter__(self) -> Shared:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def job(self) -> tuple[LightCluster, Meeting]:
        """The job, all of whose ranks are training, and their meeting."""
        with suppress(AssertionError):
            if self._now:
                return self._now, self._training(self._now)
        self._close()
        self._now = LightCluster(self._folders.mktemp("job"), self._nodes, members_on=self._members_on)
        self.start(*range(self._agents))
        return self._now, self._now.meeting(self._agents)

    def start(self, *indices: int) -> None:
        """Type the job's command on these nodes, as at the job's start."""
        assert self._now
        self._now.start(*indices, **self._start)

    def _close(self) -> None:
        if self._now:
            self._now.__exit__()
        self._now = None

    def _training(self, cluster: LightCluster) -> Meeting:
        there = [*cluster.agents.values(), *cluster.etcd.members]
        assert all(each.process and each.process.poll() is None for each in there)
        meeting = cluster.records.meeting(self._agents)
        assert meeting
        cluster.goes_on(meeting, 1)
        return meeting
