"""An agent's view of its job's keys: a watch keeps it up to date, and a read repairs it.

Nothing is decided here. A change of the view posts `SnapshotPending`; `snapshot` then parses the newest view.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from elaunch.agent.core.events import SnapshotChanged, SnapshotPending, StoreEvent, StoreLost
from elaunch.process_identity import is_dead_here
from elaunch.rendezvous.rules.snapshot import Keys, SnapshotReader
from elaunch.rendezvous.store import (
    Changes,
    HistoryLost,
    NoneNewer,
    Present,
    Rejected,
    Store,
    StoreError,
    TimedOut,
    Txn,
    Unavailable,
    Update,
    View,
    Watch,
)

# etcd refuses a transaction of more than 128 operations. A leader sees all keys. If there are too many, it reads them.
_COMPARED_MAX = 100
Post = Callable[[StoreEvent | SnapshotPending], None]


@dataclass(frozen=True)
class JobStore:
    """The store, and the names of the job's keys in it.

    `is_remote`: it is in another process. Such a store keeps a lease only for an agent that renews it, and an agent
    watches no more of it than it needs.
    """

    store: Store
    keys: Keys
    is_remote: bool


@dataclass(frozen=True)
class LocalHost:
    """This host's `name`, and the parts of it that a test replaces.

    `draw(n)` gives n random bits, `now()` is the monotonic time. `is_dead(process)` is whether an agent's process (as
    `this_process` names it) ran on this host and has exited.
    """

    name: str
    draw: Callable[[int], int] = random.SystemRandom().getrandbits
    is_dead: Callable[[str], bool] = is_dead_here
    now: Callable[[], float] = time.monotonic


class StoreView:
    """One agent's view of its job's keys.

    Methods that make requests raise what the store raises, and can then be called again. `post` takes events, from any
    thread. `reread_s` is the time between two reads that repair the view.
    """

    def __init__(self, job_store: JobStore, post: Post, reread_s: float) -> None:
        self._store = job_store.store
        self._keys = job_store.keys
        self._post = post
        self._reread_s = reread_s
        self._reader = SnapshotReader(self._keys)
        self._view: View | None = None
        self._view_lock = threading.Lock()
        self._watch: Watch | None = None
        self._has_watch_ended = False
        # The prefix that is read and watched: the control keys; all keys for a leader.
        self._scope = self._keys.control if job_store.is_remote else self._keys.root
        self._is_whole = False
        self._is_dirty = False
        self._epoch = 0
        self._reread_due_s = 0.0
        self._is_closed = False

    def snapshot(self) -> SnapshotChanged | StoreLost:
        """The keys as they are now."""
        with self._view_lock:
            self._is_dirty = False
            view, is_whole = self._view, self._is_whole
        assert view is not None
        try:
            return SnapshotChanged(self._reader.read(view, whole=is_whole))
        except ValueError as error:
            return StoreLost(str(error))

    @property
    def is_of_all_keys(self) -> bool:
        """Whether all of the job's keys are watched, as by a leader, or are about to be."""
        return self._scope == self._keys.root

    def lease_of(self, key: str) -> int:
        """The lease of that key; 0 where there is no such key, or it has none."""
        with self._view_lock:
            entry = self._view.entries.get(key) if self._view else None
        return entry.lease if entry else 0

    def begin(self) -> None:
        """Begin the watch, and with it a first view, unless it has begun."""
        if self._watch is not None:
            return
        # Many agents start at once: a store that allows the watch gets no other request. Else `check` raises the cause.
        try:
            self._begin_watch()
        except TimedOut:
            raise
        except (Rejected, Unavailable):
            self._store.check()
            self._begin_watch()

    def widen(self) -> None:
        """Watch all of the job's keys from now on: the watch's first update has all of them."""
        # Not waited for: this thread has a lease to renew.
        self._follow(self._keys.root, None)

    def refresh(self) -> None:
        """Read the keys once, beside the watch."""
        self._show(self._store.read(self._scope))

    def put_off_read(self, now_s: float) -> None:
        """The view is up to date: the next read that repairs it is due in `reread_s`."""
        self._reread_due_s = now_s + self._reread_s

    def repair(self, now: Callable[[], float]) -> None:
        """If it is time, find what the watch has missed; a watch that has ended, or missed something, is replaced."""
        if now() < self._reread_due_s and not self._has_watch_ended:
            return
        has_watch = self._watch is not None and not self._has_watch_ended
        if not has_watch or not self._is_current():
            view = self._store.read(self._scope)
            with self._view_lock:
                is_known = self._view is not None and self._view.entries == view.entries
            self._show(view)
            if not has_watch or not is_known:
                self._follow(self._scope, view.revision)
        # Counted from here: a store that is slow to respond gets the same pause.
        self.put_off_read(now())

    def close(self) -> None:
        """Stop watching, and let no other thread begin to."""
        self._is_closed = True
        if watch := self._watch:
            watch.close()

    def _begin_watch(self) -> None:
        self._follow(self._scope, None)
        assert self._watch
        try:
            self._watch.begun()
        except StoreError:
            self._watch = None
            raise

    def _follow(self, scope: str, after: int | None) -> None:
        """Watch `scope` from now on, or from revision `after`, at which it was read."""
        with self._view_lock:
            self._scope = scope
            # Updates that the old watch still has to deliver may be of a narrower scope.
            self._epoch += 1
            self._has_watch_ended = False
            notify = partial(self._updated, self._epoch)
        if self._watch:
            self._watch.close()
            self._watch = None
        if self._is_closed:
            raise Unavailable("the store's client is closed")
        self._watch = self._store.watch(scope, after, notify)

    def _is_current(self) -> bool:
        """Whether all keys are still as in the view, which then gets the newest revision.

        This costs a few bytes. A read would bring each node the rank table, which grows with the number of nodes.
        """
        with self._view_lock:
            # While a wider watch begins, the view is still the narrow one's.
            view = self._view if self._is_whole == (self._scope == self._keys.root) else None
        if view is None or len(view.entries) > _COMPARED_MAX:
            return False
        # No write to any key is newer, and none of them was deleted.
        there = tuple(Present(key) for key in view.entries)
        response = self._store.commit(Txn((NoneNewer(self._scope, view.revision), *there)))
        if response.held:
            self._show(replace(view, revision=response.revision))
        return response.held

    def _updated(self, epoch: int, update: Update) -> None:
        match update:
            case View():
                self._show(update, epoch)
            case Changes(revision, changed):
                with self._view_lock:
                    view = self._view
                    if epoch != self._epoch or view is None or revision <= view.revision:
                        return
                    entries = {key: entry for key, entry in view.entries.items() if key not in changed}
                    entries |= {key: entry for key, entry in changed.items() if entry is not None}
                    self._put(replace(view, revision=revision, entries=entries))
            case HistoryLost():
                # The first watch reports its own failure to its caller.
                if epoch == self._epoch and self._view is not None:
                    self._post(StoreLost(str(update)))
            case StoreError():
                # The next read finds the changes, and begins another watch, or is refused too.
                self._has_watch_ended |= epoch == self._epoch

    def _show(self, view: View, epoch: int | None = None) -> None:
        with self._view_lock:
            if epoch not in (None, self._epoch) or (self._view and view.revision < self._view.revision):
                return
            self._is_whole = self._scope == self._keys.root
            self._put(view)

    def _put(self, view: View) -> None:
        """Store the view, with the lock held, and post an event unless one is pending."""
        self._view = view
        if not self._is_dirty:
            self._is_dirty = True
            self._post(SnapshotPending())
