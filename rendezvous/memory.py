"""The store in this process's memory: for jobs on one node, whose agent is the only client."""

from __future__ import annotations

from collections.abc import Callable

from elaunch.rendezvous.store import Absent, Entry, Guard, Txn, Unchanged, View


class MemoryStore:
    """A `Store` for one thread. It lives and dies with its process."""

    def __init__(self) -> None:
        self._revision = 1
        self._entries: dict[str, Entry] = {}
        self._watches: list[tuple[str, Callable[[], None]]] = []

    def read(self, prefix: str) -> View:
        found = {key: self._entries[key] for key in sorted(self._entries) if key.startswith(prefix)}
        return View(self._revision, found)

    def commit(self, txn: Txn) -> bool:
        if not all(self._holds(guard) for guard in txn.guards):
            return False
        revision = self._revision + 1
        deleted = {key for key in txn.deletes if self._entries.pop(key, None)}
        for key, value in txn.puts.items():
            old = self._entries.get(key)
            self._entries[key] = Entry(value, old.create_revision if old else revision, revision)
        written = deleted | txn.puts.keys()
        if written:
            self._revision = revision
        for prefix, changed in self._watches:
            if any(key.startswith(prefix) for key in written):
                changed()
        return True

    def watch(self, prefix: str, changed: Callable[[], None]) -> None:
        self._watches.append((prefix, changed))

    def _holds(self, guard: Guard) -> bool:
        match guard:
            case Absent(key):
                return key not in self._entries
            case Unchanged(key, mod_revision):
                return key in self._entries and self._entries[key].mod_revision == mod_revision
