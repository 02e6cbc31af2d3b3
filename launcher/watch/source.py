"""Where the facts about one job come from: the agents of this host, the job's store, or both."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from elaunch.agent.answers.answers import STACKS_S
from elaunch.agent.core.leaving import OrderAnswer
from elaunch.agent.diagnosis.stack_groups import Stack, StackAnswer, read_stack_answer, stacks_in
from elaunch.launcher.errors import SiteError
from elaunch.launcher.store.connect import store_of
from elaunch.launcher.store.locate import RendezvousPlan, plan_by
from elaunch.launcher.watch.asking import NobodyAsked, ask_nodes, patience_s, read_job
from elaunch.launcher.watch.local import (
    ANSWER_S,
    AgentGone,
    LocalAgent,
    NoAnswer,
    ask_all,
    order_to,
    stacks_of,
    status_of,
    way_to_store,
)
from elaunch.launcher.watch.record import Gathered, absence
from elaunch.rendezvous.codec import decode
from elaunch.rendezvous.job_spec import job_name
from elaunch.rendezvous.rules.questions import Topic
from elaunch.rendezvous.rules.reports import JobReport, JobState, NodeReport, job_report, read_node_report
from elaunch.rendezvous.rules.snapshot import Keys, Snapshot
from elaunch.rendezvous.store import Denied, OwnLimit, Store, StoreError, Unavailable
from elaunch.rendezvous.types import host_of

_OF_NO_JOB = (JobState.ENDED, JobState.GONE)


@dataclass(frozen=True)
class NodeStacks:
    """The stacks of a job's workers, by rank; `silent` are the names of hosts with what is to say of them."""

    run_id: str
    stacks: tuple[Stack, ...]
    silent: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class JobOver(SiteError):
    """The job's agent on this host has ended since the last look, so there is nobody to ask any more."""


class JobSource(Protocol):
    """One job, which can be asked again and again."""

    def take(self) -> Gathered:
        """What is known now. Raises SiteError, and JobOver where there was more to know a moment ago."""
        ...

    def stacks(self) -> NodeStacks:
        """The stacks of all workers, taken now. Raises SiteError."""
        ...

    def order(self, topic: Topic) -> OrderAnswer:
        """Have the whole job do as ordered. Raises SiteError."""
        ...

    def close(self) -> None: ...


class StoreSource:
    """A job by its store: this host need not be one of the job's."""

    def __init__(self, plan: RendezvousPlan, run_id: str) -> None:
        """Raises UsageError, and SiteError if the store cannot be reached."""
        self._keys = Keys(run_id, plan.prefix)
        self._where = ",".join(str(endpoint) for endpoint in plan.endpoints)
        self.notes: list[str] = []
        self._store: Store = store_of(plan, self.notes.append)
        try:
            self._store.check()
        except StoreError as error:
            self._store.close()
            is_away = isinstance(error, Unavailable) and not isinstance(error, OwnLimit)
            away = f"the job's store at {self._where} does not answer: " if is_away else ""
            raise SiteError(f"{away}{error}") from None

    def snapshot(self) -> Snapshot:
        """All that the store says of the job. Raises SiteError if there is no such job."""
        try:
            snapshot = read_job(self._store, self._keys)
        except (StoreError, ValueError) as error:
            raise SiteError(str(error)) from None
        if snapshot.generation is None:
            raise SiteError(
                f"the store at {self._where} has no {job_name(self._keys.run_id)} (under {self._keys.prefix});"
                " name it as its nodes do, with --run-id, and --rdzv-conf etcd_prefix if they have one"
            )
        return snapshot

    def take(self) -> Gathered:
        snapshot = self.snapshot()
        job = job_report(snapshot)
        answers, silent, notes = self.ask(Topic.STATUS, snapshot)
        nodes = {node_id: report for node_id, text in answers.items() if (report := read_node_report(text, node_id))}
        return Gathered(job, nodes, silent, (*self.notes, *notes))

    def stacks(self) -> NodeStacks:
        return self.stacks_beside(())

    def stacks_beside(self, known: Collection[StackAnswer]) -> NodeStacks:
        """The stacks of the nodes in `known`, and of all others, which are asked."""
        snapshot = self.snapshot()
        here = {answer.node_id: answer for answer in known}
        texts, silent, notes = self.ask(Topic.STACKS, snapshot, here.keys(), STACKS_S)
        for node_id, text in texts.items():
            if answer := read_stack_answer(text, node_id):
                here[node_id] = answer
            else:
                silent[node_id] = "sent stacks that cannot be read"
        table = snapshot.table
        seats = (
            {seat.node_id: range(seat.first_rank, seat.first_rank + seat.slots) for seat in table.seats}
            if table
            else {}
        )
        # Only a node's own ranks count, whatever its answer says.
        stacks = [
            stack for id_, answer in here.items() for stack in stacks_in([answer]) if stack.rank in seats.get(id_, ())
        ]
        said = [f"{host_of(id_)} {why}" for id_, why in silent.items() if id_ in seats]
        return NodeStacks(self._keys.run_id, tuple(stacks), tuple(said), (*self.notes, *notes))

    def order(self, topic: Topic) -> OrderAnswer:
        snapshot = self.snapshot()
        if snapshot.ended:
            return OrderAnswer(topic is Topic.STOP, f"the job has ended: {snapshot.ended.reason}")
        leader = snapshot.leader
        if leader is None or leader not in snapshot.members:
            raise SiteError("no node leads the job now; wait for a moment, and type it again")
        try:
            text = ask_nodes(self._store, self._keys, topic, {leader}, patience_s(len(snapshot.members))).get(leader)
            if text:
                return decode(OrderAnswer, text)
        except (NobodyAsked, StoreError, ValueError) as error:
            raise SiteError(f"the job did not get the order: {error}") from None
        raise SiteError(
            f"{host_of(leader)}, which leads the job, did not answer: it may run an older elaunch, or be stopped; on a"
            " host of the job, send SIGINT to its elaunch"
        )

    def ask(
        self, topic: Topic, snapshot: Snapshot, known: Collection[str] = (), seconds: float = 0.0
    ) -> tuple[dict[str, str], dict[str, str], list[str]]:
        """The members' answers, why others gave none, both by node id, and notes. Those in `known` are not asked."""
        job = job_report(snapshot)
        if job.state in _OF_NO_JOB:
            return {}, {}, []
        said = {"left": "left the job", "lost": "was lost: its lease has ended"}
        missing = {seat.node_id: said[absence(job, seat.node_id)] for seat in job.seats if not seat.is_member}
        wanted = snapshot.members.keys() - set(known)
        if not wanted:
            return {}, missing, []
        wait_s = patience_s(len(wanted)) + seconds
        try:
            answers = ask_nodes(self._store, self._keys, topic, wanted, wait_s)
        except NobodyAsked as error:
            return {}, missing, [f"the nodes were not asked: {error}"]
        except StoreError as error:
            may = "the store allows reading only, so " if isinstance(error, Denied) else ""
            return {}, missing, [f"{may}the nodes were not asked: {error}"]
        late = f"did not answer within {wait_s:.2g} s; its lease still holds"
        return answers, {**missing, **dict.fromkeys(wanted - answers.keys(), late)}, []

    def close(self) -> None:
        self._store.close()


class LocalSource:
    """A job of this host: its agents here say how they are, and how the store is reached where there are more nodes."""

    def __init__(self, agents: Collection[LocalAgent]) -> None:
        """`agents` are of one job, and at least one."""
        self._agents = list(agents)
        self._store: StoreSource | None = None

    def take(self) -> Gathered:
        said = ask_all([partial(status_of, agent.path) for agent in self._agents])
        now = [answer for answer in said if isinstance(answer, LocalAgent)]
        troubles = [error for error in said if isinstance(error, NoAnswer) and not isinstance(error, AgentGone)]
        if not now:
            if self._store:
                return self._store.take()
            over = f"{job_name(self._agents[0].job.run_id)}: its elaunch on this host has ended"
            raise SiteError("; ".join(map(str, troubles))) if troubles else JobOver(over)
        reports = {agent.node.node_id: agent.node for agent in now}
        # Where the store is silent for one of them, another one may know more.
        job = max((agent.job for agent in now), key=_how_new)
        is_alone = not any(agent.is_remote for agent in self._agents)
        known = Gathered(job, reports, {}) if is_alone else self._with_others(job, reports)
        return replace(known, notes=(*known.notes, *map(str, troubles)))

    def _with_others(self, job: JobReport, reports: dict[str, NodeReport]) -> Gathered:
        """With what the store says, and the nodes on other hosts."""
        try:
            source = self.store()
            snapshot = source.snapshot()
        except SiteError as error:
            said = f"only what the agents on this host know: {error}"
            return Gathered(job, reports, {}, (said,))
        answers, silent, notes = source.ask(Topic.STATUS, snapshot, reports.keys())
        others = {node_id: report for node_id, text in answers.items() if (report := read_node_report(text, node_id))}
        return Gathered(job_report(snapshot), {**others, **reports}, silent, (*source.notes, *notes))

    def stacks(self) -> NodeStacks:
        wait_s = ANSWER_S + STACKS_S
        said = ask_all([partial(stacks_of, agent, wait_s) for agent in self._agents], wait_s)
        answers = [answer for answer in said if isinstance(answer, StackAnswer)]
        silent = [str(why) for why in said if isinstance(why, NoAnswer)]
        notes: tuple[str, ...] = ()
        if any(agent.is_remote for agent in self._agents):
            try:
                return self.store().stacks_beside(answers)
            except SiteError as error:
                notes = (f"only the workers on this host: {error}",)
        elif not answers:
            raise SiteError("; ".join(silent))
        return NodeStacks(self._agents[0].job.run_id, stacks_in(answers), tuple(silent), notes)

    def order(self, topic: Topic) -> OrderAnswer:
        # One agent is enough: it tells the others. A spare runs no workers.
        agent = min(self._agents, key=lambda agent: agent.node.state not in ("running", "done"))
        try:
            return order_to(agent, topic)
        except NoAnswer as error:
            raise SiteError(str(error)) from None

    def store(self) -> StoreSource:
        """The job's store, as its agent here reaches it. Raises SiteError."""
        if self._store is None:
            agent = next((agent for agent in self._agents if agent.is_own and agent.is_remote), None)
            if agent is None:
                # Another user's agent could name any place and any file for root to use.
                raise SiteError("it is another user's job; its own user sees the other nodes too")
            try:
                plan = plan_by(way_to_store(agent))
            except (NoAnswer, ValueError) as error:
                raise SiteError(str(error)) from None
            self._store = StoreSource(plan, agent.job.run_id)
        return self._store

    def close(self) -> None:
        if self._store:
            with suppress(StoreError):
                self._store.close()


def _how_new(job: JobReport) -> tuple[bool, int, bool]:
    return job.ended is not None, job.generation.number if job.generation else -1, job.is_whole
