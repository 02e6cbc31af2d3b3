"""Answers what is asked of this node: on its socket, and over the job's store; passes orders on to the agent's core."""

from __future__ import annotations

import json
import os
import threading
import time
import zlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from elaunch.agent.answers.limits import Allowance, Docket
from elaunch.agent.answers.local_socket import Asked
from elaunch.agent.core.events import Event
from elaunch.agent.core.state import Agent
from elaunch.agent.linux import start_thread
from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.rules.questions import ANSWER_BYTES_MAX, Question, Topic, answer
from elaunch.rendezvous.store import Txn

if TYPE_CHECKING:
    # Reports are imported when somebody asks: most jobs are never asked, and each start would pay for it.
    from elaunch.agent.core.timeline import WorkersSeen

VERSION = 1
# py-spy has this long for all workers of the node.
STACKS_S = 5.0
_LIVE = ("running", "stopped")


class Answers:
    """This node's answers. The agent's loop calls all methods.

    `agent` is the agent as it is now, `seen` its workers as they are now. `offer` writes to the store what nothing
    depends on, and calls back, in any thread, if the guards held. `way` is how another process of this user reaches the
    store (JSON), empty where the store is this process. `begun_s` is when the agent began, on the monotonic clock.
    `post` takes the event of a person's order.
    """

    def __init__(
        self,
        agent: Callable[[], Agent],
        seen: Callable[[float], WorkersSeen | None],
        offer: Callable[[Txn, Callable[[], object] | None], None],
        way: str,
        begun_s: float,
        post: Callable[[Event], None],
    ) -> None:
        self._agent = agent
        self._seen = seen
        self._offer = offer
        self._way = way
        self._begun_s = begun_s
        self._post = post
        self._allowance = Allowance(at_s=time.monotonic())
        self._docket = Docket()
        self._is_idle = threading.Lock()

    @property
    def due_s(self) -> float | None:
        """When `tick` is due, on the monotonic clock; None while no question waits."""
        return self._docket.due_s

    def note(self, question: Question | None) -> None:
        """Hear what the store's key asks now."""
        if question is None and self._docket.waiting is None:
            return
        agent = self._agent()
        table = agent.snapshot.table
        # Equal for each question, and different from node to node.
        share = zlib.crc32(agent.me.node_id.encode()) / (1 << 32)
        self._docket = self._docket.after(question, time.monotonic(), len(table.seats) if table else 1, share)

    def tick(self, now_s: float) -> None:
        """Answer the store's question, if it is time."""
        self._docket, question = self._docket.take_due(now_s)
        agent = self._agent()
        if question is None or question.lease in (agent.membership.lease, agent.snapshot.lease):
            return
        keys, node_id = agent.snapshot.keys, agent.me.node_id
        if question.topic.is_order:
            if agent.leads:
                text, event = self._ordered(question.topic)
                # The answer is written only while the asker waits for it, and the store may go with the job.
                self._offer(answer(keys, question, node_id, text), lambda: event and self._post(event))
        elif question.topic is Topic.STATUS:
            text = self._status(now_s)
            if len(text) <= ANSWER_BYTES_MAX:
                self._offer(answer(keys, question, node_id, text), None)
        elif not self._take_stacks(lambda text: self._offer(answer(keys, question, node_id, text), None)):
            self._docket = self._docket.postponed(question, now_s)

    def asked(self, asked: Asked) -> None:
        """Answer a process of this host."""
        now_s = time.monotonic()
        self._allowance, is_allowed = self._allowance.take(now_s)
        if not is_allowed:
            asked.reply(_refusal("it is asked too often; ask again in a second"))
            return
        match asked.topic:
            case "status":
                from elaunch.rendezvous.rules.reports import job_report

                job = encode(job_report(self._agent().snapshot))
                is_remote = "true" if self._way else "false"
                status = self._status(now_s)
                asked.reply(f'{{"version":{VERSION},"is_remote":{is_remote},"job":{job},"node":{status}}}')
            case "stacks":
                tell = partial(_tell_locally, asked)
                if not self._take_stacks(tell):
                    asked.reply(_refusal("it takes the stacks for somebody else; ask again in a second"))
            case Topic.STOP.value | Topic.RESTART.value:
                text, event = self._ordered(Topic(asked.topic))
                # One who waits no longer was told that there was no answer, and may have done something else.
                if asked.reply(f'{{"version":{VERSION},"order":{text}}}') and event:
                    self._post(event)
            case "store" if self._way:
                asked.reply(f'{{"version":{VERSION},"store":{self._way}}}')
            case _:
                asked.reply(_refusal(f"it does not know the question {asked.topic[:40]!r}"))

    def _ordered(self, topic: Topic) -> tuple[str, Event | None]:
        """The answer to an order, and the event by which it is obeyed, once the answer has reached the asker."""
        from elaunch.agent.core.leaving import order

        event, said = order(self._agent(), topic)
        return encode(said), event

    def _status(self, now_s: float) -> str:
        from elaunch.agent.answers.usage import with_usage
        from elaunch.agent.core.timeline import node_report

        report = node_report(self._agent(), os.getpid(), now_s - self._begun_s, self._seen(now_s))
        return encode(with_usage(report))

    def _take_stacks(self, tell: Callable[[str], None]) -> bool:
        """Have a thread take the workers' stacks and `tell` them as JSON. Returns False if another one does so now."""
        if not self._is_idle.acquire(blocking=False):
            return False
        from elaunch.agent.core.timeline import node_report
        from elaunch.agent.diagnosis.stack_groups import stack_answer
        from elaunch.agent.diagnosis.stacks import take

        now_s = time.monotonic()
        report = node_report(self._agent(), os.getpid(), 0.0, self._seen(now_s))
        pids = {rank.rank: rank.pid for rank in report.ranks if rank.state in _LIVE and rank.pid > 0}

        def work() -> None:
            try:
                tell(stack_answer(report.node_id, report.generation, take(pids, within_s=STACKS_S)))
            finally:
                self._is_idle.release()

        if start_thread(work, "elaunch-stacks"):
            return True
        self._is_idle.release()
        return False


def _tell_locally(asked: Asked, stacks: str) -> None:
    asked.reply(f'{{"version":{VERSION},"stacks":{stacks}}}')


def _refusal(why: str) -> str:
    return json.dumps({"version": VERSION, "error": why})
