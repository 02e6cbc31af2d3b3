"""Who watches what in a served store: each revision is written out once for all who watch the same keys.

A watcher whose outlet is full falls behind alone: it reads on from the history when there is room again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from elaunch.rendezvous.engine.engine import Engine
from elaunch.rendezvous.engine.mvcc import UNBOUNDED, Compacted, KeyValue, WrittenRevision, within

# What one reading of the history may give to a watcher that is behind.
_BATCH_REVISIONS = 1000
_BATCH_BYTES = 256 << 10


class Outlet(Protocol):
    """Where a watcher's lines go."""

    def has_room(self) -> bool: ...

    def send(self, line: bytes) -> None: ...


class Lines(Protocol):
    """How what happened is written."""

    def events(self, revision: int, events: Sequence[KeyValue]) -> bytes: ...

    def compacted(self, revision: int) -> bytes: ...


class KeyRange(NamedTuple):
    """A range of keys that is watched."""

    key: bytes
    end: bytes


class Watcher:
    """`next_revision` is the first that it may be told of; one that is `behind` is told nothing new meanwhile."""

    def __init__(self, keys: KeyRange, next_revision: int, outlet: Outlet) -> None:
        self.keys = keys
        self.next_revision = next_revision
        self.outlet = outlet
        self.behind = False


class Watchers:
    """All of them. `told` is the engine's listener; `catch_up` is called whenever an outlet has room again."""

    def __init__(self, engine: Engine, lines: Lines) -> None:
        self._engine = engine
        self._lines = lines
        self._watching: dict[KeyRange, set[Watcher]] = {}

    def add(self, keys: KeyRange, start_revision: int, outlet: Outlet) -> Watcher:
        """Begin to watch from `start_revision`, 0 for now; what has been since is sent at once, if there is room."""
        watcher = Watcher(keys, start_revision or self._engine.revision + 1, outlet)
        self._watching.setdefault(keys, set()).add(watcher)
        watcher.behind = True
        self.catch_up(watcher)
        return watcher

    def remove(self, watcher: Watcher) -> None:
        """It is told nothing more; one that has gone already is no error."""
        same = self._watching.get(watcher.keys, set())
        same.discard(watcher)
        if not same:
            self._watching.pop(watcher.keys, None)

    def told(self, written: WrittenRevision) -> None:
        for keys, watchers in self._watching.items():
            events = [event for event in written.events if within(event.key, *keys)]
            if not events:
                continue
            line = self._lines.events(written.revision, events)
            for watcher in watchers:
                if watcher.behind or watcher.next_revision > written.revision:
                    continue
                if watcher.outlet.has_room():
                    watcher.outlet.send(line)
                else:
                    watcher.next_revision = written.revision
                    watcher.behind = True

    def catch_up(self, watcher: Watcher) -> None:
        """Send what a watcher that is behind has missed, until it has missed nothing or its outlet is full."""
        while watcher.behind and watcher.outlet.has_room():
            try:
                history = self._engine.since(watcher.next_revision, _BATCH_REVISIONS)
            except Compacted as compacted:
                watcher.outlet.send(self._lines.compacted(compacted.revision))
                watcher.behind = False
                self.remove(watcher)
                return
            if history:
                self._send_some(watcher, history)
            watcher.behind = bool(history) and watcher.next_revision <= self._engine.revision

    def _send_some(self, watcher: Watcher, history: Sequence[WrittenRevision]) -> None:
        # While a thousand agents join, each begins a watch some hundreds of revisions in the past: this is the loop
        # that counts.
        key, end = watcher.keys
        bounded = end != UNBOUNDED
        events: list[KeyValue] = []
        size = 0
        for written in history:
            for event in written.events:
                if (key <= event.key and (not bounded or event.key < end)) if end else event.key == key:
                    events.append(event)
                    size += len(event.value)
            # Never a part of a revision: who watches could not tell.
            if size > _BATCH_BYTES:
                break
        watcher.next_revision = written.revision + 1
        if events:
            watcher.outlet.send(self._lines.events(self._engine.revision, events))
