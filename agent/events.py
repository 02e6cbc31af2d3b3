"""What can happen to an agent, and what it can do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elaunch.rendezvous.snapshot import Snapshot
from elaunch.rendezvous.store import Txn
from elaunch.rendezvous.types import Failure, Outcome, RankTable


@dataclass(frozen=True)
class Looked:
    """The store's keys were read."""

    snapshot: Snapshot


@dataclass(frozen=True)
class WorkerExited:
    """A worker is gone; `failure` is None where it exited with 0. `code` is as in `Failure`."""

    generation: int
    local_rank: int
    code: int
    failure: Failure | None = None


@dataclass(frozen=True)
class WorkerRaised:
    """A worker's program ended by an exception; the process is on its way out, and may never arrive."""

    generation: int
    local_rank: int


@dataclass(frozen=True)
class ServiceLost:
    """What serves all workers of this node is gone: the worker store, or the fork server and all workers with it."""

    generation: int
    failure: Failure
    workers_too: bool


@dataclass(frozen=True)
class Signalled:
    """The agent got a signal that it handles."""

    signum: int
    name: str


@dataclass(frozen=True)
class Cleared:
    """After `Clear`: no process of the generation is left, and all of its output has arrived.

    `tails` are the ends of the local ranks' stderr; `reached_store` says that a rank had used the worker store.
    """

    generation: int
    tails: Mapping[int, str] = field(default_factory=dict)
    reached_store: bool = False


@dataclass(frozen=True)
class Tick:
    """A deadline of the agent's may have passed."""


Event = Looked | WorkerExited | WorkerRaised | ServiceLost | Signalled | Cleared | Tick


@dataclass(frozen=True)
class Commit:
    """Write to the store. A refused transaction needs no answer: the next look shows what happened instead."""

    txn: Txn


@dataclass(frozen=True)
class Join:
    """Reserve a port and put this node's `joined` key for the generation."""

    generation: int


@dataclass(frozen=True)
class Spawn:
    """Start this node's workers."""

    table: RankTable
    group_rank: int


@dataclass(frozen=True)
class SignalWorkers:
    """Signal the workers of these local ranks."""

    generation: int
    local_ranks: frozenset[int]
    signum: int


@dataclass(frozen=True)
class Clear:
    """End what is left of a generation on this node and collect its output; answered by `Cleared`."""

    generation: int


@dataclass(frozen=True)
class ReplaceForkServer:
    """End a fork server that does not answer, and its workers; answered by `ServiceLost`."""

    generation: int


@dataclass(frozen=True)
class Say:
    """One sentence for the log."""

    text: str


@dataclass(frozen=True)
class Exit:
    """The agent's work is done."""

    outcome: Outcome


Action = Commit | Join | Spawn | SignalWorkers | Clear | ReplaceForkServer | Say | Exit
