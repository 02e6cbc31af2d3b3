"""The watches of a served store. Each revision is serialized once for all watches of the same keys.

A watch whose outlet is full falls behind alone: when there is room again, it continues from the history.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from elaunch.rendezvous.engine.engine import Engine
from elaunch.rendezvous.engine.mvcc import UNBOUNDED, Compacted, KeyValue, WrittenRevision, within

# Limits of one read from the history for a watch that is behind.
_BATCH_REVISIONS = 1000
_BATCH_BYTES = 256 << 10


class Outlet(Protocol):
    """The connection to which a watch sends its lines."""

    def has_room(self) -> bool: ...

    def send(self, line: bytes) -> None: ...


class Lines(Protocol):
    """Serializes events as lines."""

    def events(self, revision: int, events: Sequence[KeyValue]) -> bytes: ...

    def compacted(self, revision: int) -> bytes: ...


class KeyRange(NamedTuple):
    """A range of keys that is watched."""

    key: bytes
    end: bytes


class Watcher:
    """One watch. `next_revision` is the next that it must send. While it is `behind`, it gets no new events."""

    def __init__(self, keys: KeyRange, next_revision: int, outlet: Outlet) -> None:
        self.keys = keys
        self.next_revision = next_revision
        self.outlet = outlet
        self.behind = False


class Watchers:
    """All watches. `told` is the engine's listener. Call `catch_up` whenever an outlet has room again."""

    def __init__(self, engine: Engine, lines: Lines) -> None:
        self._engine = engine
        self._lines = lines
        self._watching: dict[KeyRange, set[Watcher]] = {}

    def add(self, keys: KeyRange, start_revision: int, outlet: Outlet) -> Watcher:
        """Begin a watch at `start_revision`, 0 for now. Events since then are sent at once, if there is room."""
        watcher = Watcher(keys, start_revision or self._engine.revision + 1, outlet)
        self._watching.setdefault(keys, set()).add(watcher)
        watcher.behind = True
        self.catch_up(watcher)
        return watcher

    def remove(self, watcher: Watcher) -> None:
        """End a watch. One that has ended already is no error."""
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
        """Send the events that a watch has missed, until it is up to date or its outlet is full."""
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
        # While a thousand agents join, each begins a watch some hundreds of revisions in the past. Then this loop takes
        # most of the server's time.
        key, end = watcher.keys
        bounded = end != UNBOUNDED
        events: list[KeyValue] = []
        size = 0
        for written in history:
            for event in written.events:
                if (key <= event.key and (not bounded or event.key < end)) if end else event.key == key:
                    events.append(event)
                    size += len(event.value)
            # Never send a part of a revision: the client would take it for the whole.
            if size > _BATCH_BYTES:
                break
        watcher.next_revision = written.revision + 1
        if events:
            watcher.outlet.send(self._lines.events(self._engine.revision, events))
