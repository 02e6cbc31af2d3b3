"""Asks the nodes of a job over its store, from any host that reaches it."""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Collection
from contextlib import suppress

from elaunch.rendezvous.rules.questions import ANSWER_BYTES_MAX, ANSWERS_PER_S, Question, Topic, ask
from elaunch.rendezvous.rules.snapshot import Keys, Snapshot, SnapshotReader
from elaunch.rendezvous.store import Changes, Store, StoreError, Update, View

# A node that is well answers at once. The nodes of a large job take turns.
PATIENCE_S = 3.0
# The lease outlives the question, so that no answer comes too late to be deleted with it.
_LEASE_SPARE_S = 5.0
_AGAIN_S = 0.2


class NobodyAsked(Exception):
    """The question could not be put; the message says why, without a full stop."""


def read_job(store: Store, keys: Keys) -> Snapshot:
    """All that the store says of the job. Raises StoreError, and ValueError for keys that cannot be read."""
    return SnapshotReader(keys).read(store.read(keys.root), whole=True)


def patience_s(nodes: int, base_s: float = PATIENCE_S) -> float:
    """How long the answers of that many nodes may take."""
    return base_s + nodes / ANSWERS_PER_S


def ask_nodes(
    store: Store, keys: Keys, topic: Topic, node_ids: Collection[str], wait_s: float, seconds: float = 0.0
) -> dict[str, str]:
    """The nodes' answers as text, by node id: of all of `node_ids`, or of those that answer within `wait_s`.

    While another question stands, it is waited for, within the same time. Raises StoreError and NobodyAsked.
    """
    question = Question(secrets.token_hex(8), topic, secrets.randbits(62) + 1)
    heard = _Heard(keys.answers(question.identity), frozenset(node_ids))
    end_s = time.monotonic() + wait_s
    store.grant(question.lease, math.ceil(wait_s + seconds + _LEASE_SPARE_S))
    try:
        watch = store.watch(keys.answers(question.identity), None, heard.tell)
        try:
            watch.begun()
            while not store.commit(ask(keys, question)).held:
                if time.monotonic() > end_s:
                    raise NobodyAsked(f"somebody else asks this job's nodes, for more than {wait_s:g} s by now")
                time.sleep(_AGAIN_S)
            return heard.wait(wait_s)
        finally:
            watch.close()
    finally:
        with suppress(StoreError):
            store.revoke(question.lease)


class _Heard:
    """Collects answers that a watch tells, from any thread."""

    def __init__(self, prefix: str, wanted: frozenset[str]) -> None:
        self._prefix = prefix
        self._wanted = wanted
        self._answers: dict[str, str] = {}
        self._changed = threading.Condition()
        self._error: StoreError | None = None

    def tell(self, update: Update) -> None:
        with self._changed:
            match update:
                case View(_, entries) | Changes(_, entries):
                    for key, entry in entries.items():
                        node_id = key[len(self._prefix) :]
                        if entry and node_id in self._wanted and len(entry.value) <= ANSWER_BYTES_MAX:
                            self._answers[node_id] = entry.value
                case StoreError():
                    self._error = update
            self._changed.notify_all()

    def wait(self, wait_s: float) -> dict[str, str]:
        with self._changed:
            self._changed.wait_for(lambda: self._error or len(self._answers) == len(self._wanted), wait_s)
            return dict(self._answers)
