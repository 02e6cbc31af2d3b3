"""Queries to the nodes of a job, over its store: `elaunch status` writes one, and each agent responds. Pure.

A query is one key that every node watches. It is on a lease of the client, and so are the responses: all of it is
deleted with the client. There is at most one query at a time. Responses are outside the job's own keys, where no
agent reads them. An order, as `elaunch stop` writes it, is a query too; the leader responds to it and does what its own
signals or failures would do. Nothing else of the protocol depends on a query or a response, whoever wrote it.
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
QUERY_BYTES_MAX = 512
RESPONSE_BYTES_MAX = 256 << 10
# All nodes of a job together send this many responses per second. A table with every seat is a larger load.
RESPONSES_PER_S = 200.0
_ID = re.compile("[0-9a-f]{16}")
_LEASE_END = 1 << 63


class Topic(Enum):
    """The subject of a query, or the order."""

    STATUS = "status"
    STACKS = "stacks"
    STOP = "stop"
    RESTART = "restart"

    @property
    def is_order(self) -> bool:
        """Whether it orders the job to do something: only the leader responds, and carries it out."""
        return self in (Topic.STOP, Topic.RESTART)


@dataclass(frozen=True)
class Query:
    """One query to all nodes; the responses are on the client's `lease`. `identity` is 16 random hex digits."""

    identity: str
    topic: Topic
    lease: int


def read_query(text: str) -> Query | None:
    """The query in the store's key; None if the text is not a valid one."""
    if len(text) > QUERY_BYTES_MAX:
        return None
    try:
        query = decode(Query, text)
    except ValueError:
        return None
    return query if _ID.fullmatch(query.identity) and 0 < query.lease < _LEASE_END else None


def post_query(keys: Keys, query: Query) -> Txn:
    """Query the nodes of a job that exists and has not ended; refused while another query exists."""
    guards = (Present(keys.generation), Absent(keys.ended), Absent(keys.query))
    return Txn(guards, (Put(keys.query, encode(query), query.lease),))


def post_response(keys: Keys, query: Query, node_id: str, text: str) -> Txn:
    """Respond while the query exists."""
    put = Put(keys.responses(query.identity, node_id), text, query.lease)
    return Txn((Present(keys.query),), (put,))
