"""A question to the nodes of a large job, over the store that a head serves: it is answered, and loads nobody."""

from __future__ import annotations

import threading
import time
import zlib

import psutil
import pytest

from elaunch.agent.serve.status_server import QueryQueue
from elaunch.launcher.inspect.job_source import patience_s, query_nodes, read_job
from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.endpoint import Access, Endpoint
from elaunch.rendezvous.etcd.discovery import FoundStore
from elaunch.rendezvous.rules.questions import Question, Topic, answer, read_question
from elaunch.rendezvous.rules.reports import NodeReport, RankReport, read_node_report
from elaunch.rendezvous.rules.snapshot import Keys
from elaunch.rendezvous.store import Changes, Put, Txn, Update, View
from elaunch.rendezvous.types import Generation, Node, OpenKind
from tests.served import TOKEN, ServerProcess

NODES = 1024
KEYS = Keys("night")
IDS = [f"node{number}-{number:08x}" for number in range(NODES)]


def client(server: ServerProcess) -> FoundStore:
    store = FoundStore(Endpoint(server.host, server.port), TOKEN, Access(), 5.0)
    store.check()
    return store


def report_of(number: int) -> NodeReport:
    ranks = tuple(RankReport(8 * number + local, local, 100, "running", 1200, "", 0.21, 0.3) for local in range(8))
    return NodeReport(IDS[number], f"node{number}", 9, "running", 5.0, 0, 4.0, ranks=ranks)


class Agents:
    """All nodes of the job: each of them answers when its own queue says so."""

    def __init__(self, store: FoundStore) -> None:
        self._store = store

    def tell(self, update: Update) -> None:
        if isinstance(update, (View, Changes)):
            entry = update.entries.get(KEYS.question)
            question = read_question(entry.value) if entry else None
            if question:
                threading.Thread(target=self._answer, args=(question,)).start()

    def _answer(self, question: Question) -> None:
        now_s = time.monotonic()
        shares = {number: zlib.crc32(IDS[number].encode()) / (1 << 32) for number in range(NODES)}
        queues = {number: QueryQueue().after(question, now_s, NODES, share) for number, share in shares.items()}
        for number, queue in sorted(queues.items(), key=lambda item: item[1].due_s or 0.0):
            assert queue.due_s is not None
            time.sleep(max(0.0, queue.due_s - time.monotonic()))
            self._store.commit(answer(KEYS, question, IDS[number], encode(report_of(number))))


@pytest.mark.slow
def test_a_thousand_nodes_answer_within_the_patience_and_leave_nothing() -> None:
    with ServerProcess() as server:
        job, agents, asker = (client(server) for _ in range(3))
        job.grant(77, 600)
        job.commit(Txn((), (Put(KEYS.generation, encode(Generation(0, OpenKind.START, "it starts")), 77),)))
        for first in range(0, NODES, 100):
            nodes = [Node(id_, id_.partition("-")[0], "10.0.0.1", 8) for id_ in IDS[first : first + 100]]
            job.commit(Txn((), tuple(Put(KEYS.member(node.node_id), encode(node), 77) for node in nodes)))
        watch = job.watch(KEYS.control, None, Agents(agents).tell)
        watch.begun()
        before = psutil.Process(server.process.pid).cpu_times()

        began_s = time.monotonic()
        answers = query_nodes(asker, KEYS, Topic.STATUS, read_job(asker, KEYS).members, patience_s(NODES))
        took_s = time.monotonic() - began_s

        after = psutil.Process(server.process.pid).cpu_times()
        watch.close()
        left = asker.read(KEYS.answers("")[: -len("/")], KEYS.question).entries
        for store in (job, agents, asker):
            store.close()

    used_s = after.user + after.system - before.user - before.system
    print(f"{len(answers)} answers in {took_s:.1f} s, {used_s:.2f} s of the store's processor")
    assert len(answers) == NODES
    assert all(read_node_report(text, node_id) for node_id, text in answers.items())
    assert took_s < patience_s(NODES)
    assert used_s < took_s / 2
    assert not left
