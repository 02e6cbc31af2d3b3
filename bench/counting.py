"""Counts the requests of a store's client to its servers, and the bytes in both directions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from elaunch.rendezvous.endpoint import Endpoint
from elaunch.rendezvous.etcd.transport import AnswerStream, Json, Rpc, RpcTransport

TOLD = "told"
# Transactions that write nothing. With them an agent compares its view with the store, once per lease time.
COMPARED = "compared"


@dataclass(frozen=True)
class Traffic:
    """Requests by the path of their call; COMPARED ones have a key of their own.

    `sent` and `received` are the bytes of the requests' and answers' bodies and of a watch's messages.
    """

    requests: Mapping[str, int]
    sent: int
    received: int


class Tally:
    """Collects what all transports of one process carry."""

    def __init__(self) -> None:
        # Only references are kept. Sizes are computed later, when no time is measured. Appending needs no lock.
        self._carried: list[tuple[str, Json, Json]] = []

    def note(self, kind: str, request: Json, answer: Json) -> None:
        self._carried.append((kind, request, answer))

    def take(self) -> Traffic:
        """Return the traffic since the last call."""
        carried = self._carried[:]
        del self._carried[: len(carried)]
        return Traffic(
            dict(Counter(kind for kind, _, _ in carried)),
            sum(_size(request) for _, request, _ in carried),
            sum(_size(answer) for _, _, answer in carried),
        )


class Counting:
    """A `RpcTransport` that wraps another one and counts what it carries."""

    def __init__(self, transport: RpcTransport, tally: Tally) -> None:
        self._transport = transport
        self._tally = tally

    def version(self, endpoint: Endpoint, token: str, deadline_s: float) -> str:
        version = self._transport.version(endpoint, token, deadline_s)
        self._tally.note(Rpc.STATUS.value, {}, {"version": version})
        return version

    def call(self, endpoint: Endpoint, rpc: Rpc, request: Json, token: str, deadline_s: float) -> Json:
        answer: Json = {}
        try:
            answer = self._transport.call(endpoint, rpc, request, token, deadline_s)
        finally:
            self._tally.note(COMPARED if rpc is Rpc.TXN and not _writes(request) else rpc.value, request, answer)
        return answer

    def stream(self, endpoint: Endpoint, rpc: Rpc, request: Json, token: str, deadline_s: float) -> AnswerStream:
        self._tally.note(rpc.value, request, {})
        return _CountingStream(self._transport.stream(endpoint, rpc, request, token, deadline_s), self._tally)

    def close(self) -> None:
        self._transport.close()


class _CountingStream:
    def __init__(self, stream: AnswerStream, tally: Tally) -> None:
        self._stream = stream
        self._tally = tally

    def next(self, deadline_s: float | None) -> Json:
        answer = self._stream.next(deadline_s)
        self._tally.note(TOLD, {}, answer)
        return answer

    def hang_up(self) -> None:
        self._stream.hang_up()

    def close(self) -> None:
        self._stream.close()


def _writes(txn: Json) -> bool:
    return any("request_range" not in op for op in (*txn["success"], *txn["failure"]))


def _size(body: Json) -> int:
    # This is how the client writes JSON. etcd's own answers are as compact.
    return len(json.dumps(body, separators=(",", ":"))) if body else 0
