"""What an agent asks of its store, and which events the answers become: its lease, its view of the keys, its writes.

Nothing is decided here, and nothing waits: the thread that does so, and its tries, are the session's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from elaunch.agent.core.events import Committed, Leased, LeaseLost, Looked, StoreEvent, StoreLost, Tag, WatchRefused
from elaunch.agent.session.retry_queue import Errands
from elaunch.rendezvous.codec import decode
from elaunch.rendezvous.rules.snapshot import Keys, SnapshotReader
from elaunch.rendezvous.rules.transactions import claim_start, run_lease
from elaunch.rendezvous.rules.trimming import content_bytes, trimmed
from elaunch.rendezvous.store import (
    Answer,
    Changes,
    Empty,
    HistoryLost,
    LeaseGone,
    NoneNewer,
    Present,
    Put,
    Rejected,
    Store,
    StoreError,
    TimedOut,
    TooLarge,
    Txn,
    Unavailable,
    Update,
    View,
    Watch,
    WatchBlocked,
)
from elaunch.rendezvous.times import Times
from elaunch.rendezvous.types import Node

# A transaction of more operations than 128 is refused; a leader, who sees all keys, reads them.
_COMPARED_MAX = 100
# Renewals of the run's lease in each of its times to live.
_RUN_RENEWALS = 4
# What a node does before it is a member, and with others in sight.
_ENTERING = (Tag.RUN, Tag.JOIN)


class Dealings:
    """One agent's dealings with its store.

    What asks the store may raise what the store raises, and can then be done again from its start. `post` takes
    events, from any thread; `look_again` is called, from any thread, when `look()` has something new. `draw` gives that
    many random bits, `now` the monotonic time; `is_dead` says whether an agent's process is known to be gone.
    `is_remote` stores keep leases only for those that renew them, and look narrowly at first.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        host: str,
        times: Times,
        post: Callable[[StoreEvent], None],
        look_again: Callable[[], None],
        *,
        draw: Callable[[int], int],
        is_dead: Callable[[str], bool],
        now: Callable[[], float],
        is_remote: bool,
    ) -> None:
        self._store = store
        self._keys = keys
        self._host = host
        self._times = times
        self._post = post
        self._look_again = look_again
        self._draw = draw
        self._is_dead = is_dead
        self._now = now
        self._is_remote = is_remote
        self._reader = SnapshotReader(keys)
        self._view: View | None = None
        self._view_lock = threading.Lock()
        self._watch: Watch | None = None
        self._has_watch_ended = False
        self._is_deaf_said = False
        # The revision behind which a read found what the watch has not told yet.
        self._untold: int | None = None
        # What is read and watched: the control keys, or, for a leader, all.
        self._scope = keys.control if is_remote else keys.root
        self._is_whole = False
        self._is_dirty = False
        self._epoch = 0
        self._lease = 0
        # Whether no other life of this agent has a lease.
        self._is_alone = False
        self._renewal_due_s: float | None = None
        self._reread_due_s = 0.0
        self._is_reread_ordered = False
        self._run_renewal_due_s = 0.0
        # A lease for a run's keys on which the run may not stand.
        self._begun_for_run = 0
        self._is_closed = False

    def look(self) -> Looked | StoreLost:
        """What the keys say now."""
        with self._view_lock:
            self._is_dirty = False
            view, is_whole = self._view, self._is_whole
        assert view is not None
        try:
            return Looked(self._reader.read(view, whole=is_whole))
        except ValueError as error:
            return StoreLost(str(error))

    @property
    def due_s(self) -> float | None:
        """When `tick` is due, on the monotonic clock."""
        return self._renewal_due_s

    def tick(self, now_s: float, errands: Errands) -> bool:
        """Order a renewal of the lease, if it is time: only a loop that lives keeps it. Once a lease time, a read too.

        A watch can be deaf; what it did not tell is then found here.
        """
        # Read once: the session's thread may set it meanwhile.
        due_s = self._renewal_due_s
        if due_s is None or now_s < due_s:
            return False
        self._renewal_due_s = now_s + self._times.keepalive_s
        errands.order_renewal()
        if now_s >= self._reread_due_s and not self._is_reread_ordered:
            self._reread_due_s = now_s + self._times.lease_ttl_s
            self._is_reread_ordered = True
            errands.order(self.read_again)
        return True

    def begin(self) -> None:
        """A first look, word of what changes from then on, and a lease."""
        # Tried again, it goes on where it was: a store that is slow for many is not asked everything anew. The lease
        # comes last, or it would have to be renewed meanwhile.
        if self._watch is None:
            self._look_first()
        if not self._lease:
            self._grant()

    def new_lease(self) -> None:
        """Let go of the lease and begin another, under a new name."""
        if self._lease:
            self._store.revoke(self._lease)
            self._lease = 0
        self._grant()

    def renew(self) -> None:
        """Begin the lease's time anew, and a leader now and then that of the run's lease too.

        Both are renewals: a store that takes no writes any more does these still.
        """
        lease = self._lease
        if lease and self._store.keep_alive(lease) <= 0:
            self._lose_lease(lease)
        if self._scope == self._keys.root and self._now() >= self._run_renewal_due_s:
            self.renew_run()

    def renew_run(self) -> None:
        """Renew the run's lease, on which stand all keys of the job that belong to no node.

        The leader does so several times in the lease's time to live, and before it goes. So the keys go by themselves
        when the job has ended or all its agents were killed.
        """
        lease = self._run_lease
        # The agent that granted the lease may have another `keys_ttl` than this one: the store's answer counts.
        left_s = self._store.keep_alive(lease) if lease else 0.0
        self._run_renewal_due_s = self._now() + (left_s or self._times.keys_ttl_s) / _RUN_RENEWALS

    def commit(self, txn: Txn, tag: Tag | None) -> None:
        try:
            answer = self._commit_with_run_lease(txn, tag)
        except LeaseGone as error:
            leases = {op.lease for op in (*txn.then, *txn.otherwise) if isinstance(op, Put)}
            if self._lease not in leases and self._run_lease in leases - {0}:
                # A dropped opening would be missed by nobody, and its node would wait for ever. If the lease has
                # really ended, its keys are gone, and the watch tells that.
                raise Rejected(f"{error}, and the job's keys stand on it") from error
            if tag:
                self._post(Committed(tag, False, 0))
            if self._lease in leases:
                self._lose_lease(self._lease)
            return
        if tag is None:
            return
        self._is_alone |= answer.held and tag in (Tag.FIRST_RUN, *_ENTERING)
        if not answer.held and tag is not Tag.FIRST_RUN:
            # Why, the watch may never say: it does not tell of keys that other nodes have. (Of a first run it does.)
            self._show(self._read_beside())
        self._post(Committed(tag, answer.held, answer.revision))

    def read_again(self) -> None:
        """Find what the watch did not tell; one that has not told by the next time what was found is replaced."""
        is_deaf = self._watch is None or self._has_watch_ended or self._untold is not None
        if is_deaf or not self._is_as_seen():
            view = self._read_beside()
            self._show(view)
            if is_deaf:
                self._follow(self._scope, view.revision)
        self._is_reread_ordered = False

    def widen(self) -> None:
        """Look at all of the job's keys from now on: the watch's first word is what is there."""
        # Not waited for: this thread has a lease to renew.
        self._follow(self._keys.root, None)

    def give_back(self) -> None:
        """End this node's lease, and with it its keys. The leader renews the run's lease for the last time."""
        if self._lease:
            self._store.revoke(self._lease)
        if self._begun_for_run:
            self._end_unless_used(self._begun_for_run, is_used=False)
        if self._scope == self._keys.root:
            self.renew_run()

    def has_others(self) -> bool:
        """Whether the job has a member still."""
        return bool(self._store.read(self._keys.members).entries)

    def close(self) -> None:
        """Stop watching, also where another thread begins to."""
        self._is_closed = True
        if watch := self._watch:
            watch.close()

    def _look_first(self) -> None:
        """A store that lets this be seen is asked nothing more: many come at once. Of another, `check` says why."""
        try:
            self._begin_watch()
        except TimedOut:
            raise
        except (Rejected, Unavailable):
            self._store.check()
            self._begin_watch()

    def _begin_watch(self) -> None:
        self._follow(self._scope, None)
        assert self._watch
        try:
            self._watch.begun()
        except StoreError:
            self._watch = None
            raise

    def _commit_with_run_lease(self, txn: Txn, tag: Tag | None) -> Answer:
        """Commit. The agent whose transaction would start a run, its guards held, begins a lease for the run's keys."""
        lease = run_lease(self._keys, txn)
        if tag is Tag.FIRST_RUN and lease != self._begun_for_run:
            claim = self._claim(txn, tag)
            if not claim.held:
                return claim
        try:
            answer = self._commit_as(tag, txn)
        except LeaseGone:
            if not lease:
                raise
            # Noted first: the answer may be lost.
            self._begun_for_run = lease
            self._store.grant(lease, self._times.keys_ttl_s)
            answer = self._commit_again(tag, txn, lease)
        if lease and lease == self._begun_for_run:
            self._end_unless_used(lease, is_used=answer.held)
        return answer

    def _claim(self, txn: Txn, tag: Tag) -> Answer:
        """Claim the start of a job's first run. A claim that was sent twice is refused the second time, and held."""
        claim = claim_start(self._keys, txn)
        answer = self._commit_as(tag, claim)
        if answer.held:
            return answer
        (mine,) = (op for op in claim.then if isinstance(op, Put))
        found = self._store.read(mine.key).entries.get(mine.key)
        return replace(answer, held=found is not None and found.lease == mine.lease)

    def _commit_again(self, tag: Tag | None, txn: Txn, lease: int) -> Answer:
        try:
            return self._commit_as(tag, txn)
        except LeaseGone:
            # It is this node's own that has ended.
            self._end_unless_used(lease, is_used=False)
            raise

    def _end_unless_used(self, lease: int, *, is_used: bool) -> None:
        """End the lease that was begun for a run that another agent has started meanwhile.

        A start of one's own may have been done, and its answer lost: then the run stands on it.
        """
        if not is_used:
            spec = self._store.read(self._keys.spec).entries.get(self._keys.spec)
            if spec is None or spec.lease != lease:
                self._store.revoke(lease)
        self._begun_for_run = 0

    def _commit_as(self, tag: Tag | None, txn: Txn) -> Answer:
        if tag in _ENTERING and not self._is_alone:
            return self._commit_alone(txn, tag)
        return self._commit_small(txn)

    def _commit_alone(self, txn: Txn, tag: Tag) -> Answer:
        """Enter the job, once no agent's lease that was this one's last life's stands there any more.

        One that was started again within a lease time ends that lease first, and decides anew: a run whose only member
        was itself is none. Most have none, and many come at once: that this host has no member is a guard, and only
        where that may be why it is refused is looked who there is.
        """
        of_host = f"{self._keys.members}{self._host}-"
        answer = self._commit_small(replace(txn, guards=(*txn.guards, Empty(of_host))))
        if answer.held:
            return answer
        others = self._store.read(of_host).entries.values()
        dead = [entry.lease for entry in others if entry.lease and self._is_dead_member(entry.value)]
        for lease in dead:
            self._store.revoke(lease)
        # A run stands or falls with the job's members; a join was decided on with the dead one in sight.
        is_refused_for_good = bool(dead) and tag is not Tag.RUN
        return self._commit_small(txn) if others and not is_refused_for_good else answer

    @property
    def _run_lease(self) -> int:
        """The lease on which the run's keys stand; 0 where there is no run, or one of an older elaunch."""
        with self._view_lock:
            spec = self._view.entries.get(self._keys.spec) if self._view else None
        return spec.lease if spec else 0

    def _commit_small(self, txn: Txn) -> Answer:
        """Commit. If the store says that the transaction is too large, cut its texts until it fits."""
        while True:
            try:
                return self._store.commit(txn)
            except TooLarge:
                smaller = trimmed(txn, content_bytes(txn) // 2)
                if smaller is None:
                    raise
                txn = smaller

    def _grant(self) -> None:
        lease = self._draw(62) + 1
        self._store.grant(lease, self._times.lease_ttl_s)
        self._lease = lease
        if self._is_remote:
            self._renewal_due_s = self._now() + self._times.keepalive_s
            self._reread_due_s = self._now() + self._times.lease_ttl_s
        self._post(Leased(lease, f"{self._host}-{self._draw(32):08x}"))

    def _lose_lease(self, lease: int) -> None:
        if lease and lease == self._lease:
            self._lease = 0
            self._renewal_due_s = None
            self._post(LeaseLost(lease))

    def _follow(self, scope: str, after: int | None) -> None:
        """Watch `scope` from now on, or beside what was read of it at revision `after`."""
        with self._view_lock:
            self._scope = scope
            # What the watch until now still has to tell may be of a smaller one.
            self._epoch += 1
            self._untold = None
            self._has_watch_ended = False
            tell = partial(self._told, self._epoch)
        if self._watch:
            self._watch.close()
            self._watch = None
        if self._is_closed:
            raise Unavailable("the store is let go of")
        self._watch = self._store.watch(scope, after, tell)

    def _is_as_seen(self) -> bool:
        """Whether all keys are as the view has them, which is shown as the newest then.

        A few bytes instead of the rank table, which is as long as there are nodes, for each of them.
        """
        with self._view_lock:
            # While a wider watch begins, the view is still the narrow one's.
            view = self._view if self._is_whole == (self._scope == self._keys.root) else None
        if view is None or len(view.entries) > _COMPARED_MAX:
            return False
        # No write to any key is newer, and none of them was deleted.
        there = tuple(Present(key) for key in view.entries)
        answer = self._store.commit(Txn((NoneNewer(self._scope, view.revision), *there)))
        if answer.held:
            self._show(replace(view, revision=answer.revision))
        return answer.held

    def _told(self, epoch: int, update: Update) -> None:
        match update:
            case View(revision):
                self._heard(epoch, revision)
                self._show(update, epoch)
            case Changes(revision, changed):
                self._heard(epoch, revision)
                with self._view_lock:
                    view = self._view
                    if epoch != self._epoch or view is None or revision <= view.revision:
                        return
                    entries = {key: entry for key, entry in view.entries.items() if key not in changed}
                    entries |= {key: entry for key, entry in changed.items() if entry is not None}
                    is_news = self._put(replace(view, revision=revision, entries=entries))
                if is_news:
                    self._look_again()
            case WatchBlocked(why):
                # The first watch reports its own failure to its caller. Each later one is refused too: say it once.
                if self._view is not None and not self._is_deaf_said:
                    self._post(WatchRefused(why))
                self._is_deaf_said = True
            case HistoryLost():
                # The first watch reports its own failure to its caller.
                if epoch == self._epoch and self._view is not None:
                    self._post(StoreLost(str(update)))
            case StoreError():
                # The next read finds the changes, and begins another watch, or is refused too.
                self._has_watch_ended |= epoch == self._epoch
                self._reread_due_s = 0.0

    def _heard(self, epoch: int, revision: int) -> None:
        """The watch is not deaf."""
        self._is_deaf_said = False
        with self._view_lock:
            if epoch == self._epoch and self._untold is not None and revision > self._untold:
                self._untold = None

    def _read_beside(self) -> View:
        """A read beside the watch, which may only be a little late."""
        view = self._store.read(self._scope)
        with self._view_lock:
            known = self._view
            if known and view.revision > known.revision and view.entries != known.entries and self._untold is None:
                self._untold = known.revision
        return view

    def _show(self, view: View, epoch: int | None = None) -> None:
        with self._view_lock:
            if epoch not in (None, self._epoch) or (self._view and view.revision < self._view.revision):
                return
            self._is_whole = self._scope == self._keys.root
            is_news = self._put(view)
        if is_news:
            self._look_again()

    def _put(self, view: View) -> bool:
        """Keep the view; whether nobody has been told to look since the last one was looked at."""
        self._view = view
        is_news, self._is_dirty = not self._is_dirty, True
        return is_news

    def _is_dead_member(self, member: str) -> bool:
        with suppress(ValueError):
            return self._is_dead(decode(Node, member).process)
        return False
