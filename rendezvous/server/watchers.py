"""The watches of a served store. Each revision is serialized once for all watches of the same keys.

A watch whose outlet is full falls behind alone: when there is room again, it continues from the history.
"""

from __future__ import annotations

from typing import Protocol

from elaunch.rendezvous.engine.engine import Compacted, Engine
from elaunch.rendezvous.server.routes import Routes
from elaunch.rendezvous.store import Changes

# Limits of one read from the history for a watch that is behind.
_BATCH_REVISIONS = 1000
_BATCH_BYTES = 256 << 10


class Outlet(Protocol):
    """The connection to which a watch sends its lines."""

    def has_room(self) -> bool: ...

    def send(self, line: bytes) -> None: ...


class Watcher:
    """One watch. `next_revision` is the next that it must send. While it is `behind`, it gets no new events."""

    def __init__(self, prefix: str, next_revision: int, outlet: Outlet) -> None:
        self.prefix = prefix
        self.next_revision = next_revision
        self.outlet = outlet
        self.behind = True


class Watchers:
    """All watches. `told` is the engine's listener. Call `catch_up` whenever an outlet has room again."""

    def __init__(self, engine: Engine, routes: Routes) -> None:
        self._engine = engine
        self._routes = routes
        self._watching: dict[str, set[Watcher]] = {}

    def add(self, prefix: str, start_revision: int, outlet: Outlet) -> Watcher:
        """Begin a watch at `start_revision`, 0 for now. Events since then are sent at once, if there is room."""
        watcher = Watcher(prefix, start_revision or self._engine.revision + 1, outlet)
        self._watching.setdefault(prefix, set()).add(watcher)
        self.catch_up(watcher)
        return watcher

    def remove(self, watcher: Watcher) -> None:
        """End a watch. One that has ended already is no error."""
        same = self._watching.get(watcher.prefix, set())
        same.discard(watcher)
        if not same:
            self._watching.pop(watcher.prefix, None)

    def told(self, changes: Changes) -> None:
        for prefix, watchers in self._watching.items():
            if not (seen := changes.under(prefix)):
                continue
            line = self._routes.events(changes.revision, [seen])
            for watcher in watchers:
                if watcher.behind or watcher.next_revision > changes.revision:
                    continue
                if watcher.outlet.has_room():
                    watcher.outlet.send(line)
                else:
                    watcher.next_revision = changes.revision
                    watcher.behind = True

    def catch_up(self, watcher: Watcher) -> None:
        """Send the events that a watch has missed, until it is up to date or its outlet is full."""
        while watcher.behind and watcher.outlet.has_room():
            try:
                history = self._engine.since(watcher.next_revision, _BATCH_REVISIONS)
            except Compacted as compacted:
                watcher.outlet.send(self._routes.compacted(compacted.revision))
                watcher.behind = False
                self.remove(watcher)
                return
            found: list[Changes] = []
            size = 0
            for changes in history:
                if seen := changes.under(watcher.prefix):
                    found.append(seen)
                    size += sum(len(entry.value) for entry in seen.entries.values() if entry)
                watcher.next_revision = changes.revision + 1
                # Never send a part of a revision: the client would take it for the whole.
                if size > _BATCH_BYTES:
                    break
            if found:
                watcher.outlet.send(self._routes.events(self._engine.revision, found))
            watcher.behind = bool(history) and watcher.next_revision <= self._engine.revision
