"""Questions to the nodes of a job, over its store: `elaunch status` asks, and each agent answers. Pure.

A question is one key that every node watches. It stands on a lease of the asker, and so do the answers: all of it goes
with the asker. There is at most one question at a time. Answers are outside of the job's own keys, where no agent reads
them. An order, as `elaunch stop` writes it, is a question too; the leader answers it and does what its own signals or
failures would do. Nothing else of the protocol depends on a question or an answer, whoever wrote it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from elaunch.rendezvous.codec import decode, encode
from elaunch.rendezvous.store import Absent, Present, Put, Txn

if TYPE_CHECKING:
    from elaunch.rendezvous.rules.snapshot import Keys

# Both limits are far below what a store takes in one request.
QUESTION_BYTES_MAX = 512
ANSWER_BYTES_MAX = 256 << 10
# All nodes of a job together give this many answers per second. A table with every seat is a larger load.
ANSWERS_PER_S = 200.0
_ID = re.compile("[0-9a-f]{16}")
_LEASE_END = 1 << 63


class Topic(Enum):
    """What is asked."""

    STATUS = "status"
    STACKS = "stacks"
    STOP = "stop"
    RESTART = "restart"

    @property
    def is_order(self) -> bool:
        """Whether it asks the job to do something: only the leader answers, and sees to it."""
        return self in (Topic.STOP, Topic.RESTART)


@dataclass(frozen=True)
class Question:
    """One question to all nodes; the answers stand on the asker's `lease`. `identity` is 16 random hex digits."""

    identity: str
    topic: Topic
    lease: int


def read_question(text: str) -> Question | None:
    """The question in the store's key; None if it is not one, whatever it is."""
    if len(text) > QUESTION_BYTES_MAX:
        return None
    try:
        question = decode(Question, text)
    except ValueError:
        return None
    return question if _ID.fullmatch(question.identity) and 0 < question.lease < _LEASE_END else None


def ask(keys: Keys, question: Question) -> Txn:
    """Ask the nodes of a job that is there and has not ended; refused while another question stands."""
    guards = (Present(keys.generation), Absent(keys.ended), Absent(keys.question))
    return Txn(guards, (Put(keys.question, encode(question), question.lease),))


def answer(keys: Keys, question: Question, node_id: str, text: str) -> Txn:
    """Answer while the question stands."""
    put = Put(keys.answers(question.identity, node_id), text, question.lease)
    return Txn((Present(keys.question),), (put,))
