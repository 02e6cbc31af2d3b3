"""Makes an agent's requests to its store (lease, the run's lease, writes) and turns the responses into events.

Nothing is decided here, and nothing waits: the session's thread does, and retries failed requests.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from elaunch.agent.core.events import Committed, Leased, LeaseLost, Tag
from elaunch.agent.session.store_view import JobStore, LocalHost, Post, StoreView
from elaunch.rendezvous.codec import decode
from elaunch.rendezvous.rules.transactions import run_lease
from elaunch.rendezvous.store import Empty, LeaseGone, Put, Rejected, StoreError, Txn, TxnResponse
from elaunch.rendezvous.times import Times
from elaunch.rendezvous.types import Node

# Renewals of the run's lease in each of its times to live.
_RUN_RENEWALS = 4
# A node's transactions before it is a member.
_ENTERING = (Tag.RUN, Tag.JOIN)


class StoreClient:
    """One agent's requests to its store, and its view of it.

    Methods that make requests raise what the store raises, and can then be called again with the same arguments.
    `post` takes events, from any thread. `view` has the job's keys.
    """

    def __init__(self, job_store: JobStore, host: LocalHost, times: Times, post: Post) -> None:
        self._store = job_store.store
        self._keys = job_store.keys
        self._is_remote = job_store.is_remote
        self._host = host
        self._times = times
        self._post = post
        self.view = StoreView(job_store, post, times.lease_ttl_s)
        self._lease = 0
        # When the last successful grant or renewal was sent.
        self._renewed_s = 0.0
        # A lease of this node that the store reported as expired too soon; 0 for none.
        self._ended_early = 0
        # Whether no other incarnation of this agent has a lease.
        self._is_alone = False
        # When `tick` is due, on the monotonic clock.
        self.due_s: float | None = None
        self._run_renewal_due_s = 0.0
        # A lease for a run's keys that they may not be attached to.
        self._begun_for_run = 0

    def tick(self, now_s: float) -> bool:
        """Whether the lease is due for renewal: only a live loop keeps it."""
        # Read once: the session's thread may set it meanwhile.
        due_s = self.due_s
        if due_s is None or now_s < due_s:
            return False
        self.due_s = now_s + self._times.keepalive_s
        return True

    def begin(self) -> None:
        """Begin a watch with a first snapshot, and a lease."""
        # A repeated `begin` continues where it was, so that a slow store gets no request twice. The lease comes last,
        # or it would have to be renewed meanwhile.
        self.view.begin()
        if not self._lease:
            self._grant()

    def new_lease(self) -> None:
        """Revoke the lease and grant another, under a new name."""
        if self._lease:
            self._store.revoke(self._lease)
            self._lease = 0
        self._grant()

    def renew(self) -> None:
        """Renew the lease; a leader now and then renews the run's lease too.

        A store that rejects all writes still does both. Once per lease time, the keys are read too: a watch can
        miss changes.
        """
        lease, sent_s = self._lease, self._host.now()
        if lease and self._store.keep_alive(lease) > 0:
            self._renewed_s = sent_s
        elif lease:
            self._lose_lease(lease)
        if self.view.is_of_all_keys and self._host.now() >= self._run_renewal_due_s:
            self.renew_run()
        if lease:
            self.view.repair(self._host.now)

    def renew_run(self) -> None:
        """Renew the run's lease, the lease of the job's keys that belong to no node.

        The leader does so several times per TTL, and before it exits. So the keys expire after the job has ended or
        all its agents were killed.
        """
        lease = self._run_lease
        # The agent that granted the lease may have another `keys_ttl` than this one: the store's response counts.
        left_s = self._store.keep_alive(lease) if lease else 0.0
        self._run_renewal_due_s = self._host.now() + (left_s or self._times.keys_ttl_s) / _RUN_RENEWALS

    def commit(self, txn: Txn, tag: Tag | None) -> None:
        if tag in _ENTERING:
            self._revoke_former_lease()
        try:
            response = self._commit_with_run_lease(txn, tag)
        except LeaseGone as error:
            leases = {op.lease for op in (*txn.then, *txn.otherwise) if isinstance(op, Put)}
            if self._lease not in leases and self._run_lease in leases - {0}:
                # If the opening of a generation were dropped, no node would notice, and this node would wait for ever.
                # If the lease has really expired, or the store has lost its history, a read shows that.
                self.view.refresh()
                raise Rejected(f"{error}, and the job's keys are attached to it") from error
            if tag:
                self._post(Committed(tag, False, 0))
            if self._lease in leases:
                self._lose_lease(self._lease)
            return
        if tag is None:
            return
        self._is_alone |= response.held and tag in _ENTERING
        if not response.held:
            # The watch may never show why: it does not cover other nodes' keys.
            self.view.refresh()
        self._post(Committed(tag, response.held, response.revision))

    def offer(self, txn: Txn, held: Callable[[], object] | None) -> None:
        """Commit a best-effort write, without a retry if the store is unreachable or refuses it.

        `held` is called if the guards held.
        """
        with suppress(StoreError):
            if self._store.commit(txn).held and held:
                held()

    def revoke(self) -> None:
        """Revoke this node's lease, which deletes its keys. The leader renews the run's lease for the last time."""
        self._revoke_former_lease()
        if self._lease:
            self._store.revoke(self._lease)
        if self._begun_for_run:
            self._revoke_unless_used(self._begun_for_run, is_used=False)
        if self.view.is_of_all_keys:
            self.renew_run()

    def has_others(self) -> bool:
        """Whether the job still has members."""
        return bool(self._store.read(self._keys.members).entries)

    def _revoke_former_lease(self) -> None:
        """Revoke a lease that the store reported as expired too soon: it may still hold the key of an old name."""
        if self._ended_early:
            self._store.revoke(self._ended_early)
            self._ended_early = 0

    def _commit_with_run_lease(self, txn: Txn, tag: Tag | None) -> TxnResponse:
        """Commit; if that would start a run (its guards hold), grant the lease for the run's keys and try again."""
        lease = run_lease(self._keys, txn)
        try:
            response = self._commit_as(tag, txn)
        except LeaseGone:
            if not lease:
                raise
            # Noted first: the response may be lost.
            self._begun_for_run = lease
            self._store.grant(lease, self._times.keys_ttl_s)
            try:
                response = self._commit_as(tag, txn)
            except LeaseGone:
                # This node's own lease has expired.
                self._revoke_unless_used(lease, is_used=False)
                raise
        if lease and lease == self._begun_for_run:
            self._revoke_unless_used(lease, is_used=response.held)
        return response

    def _revoke_unless_used(self, lease: int, *, is_used: bool) -> None:
        """Revoke the lease granted for a run that another agent has started meanwhile.

        This agent's start may have succeeded, its response lost: then the run uses the lease.
        """
        if not is_used:
            spec = self._store.read(self._keys.spec).entries.get(self._keys.spec)
            if spec is None or spec.lease != lease:
                self._store.revoke(lease)
        self._begun_for_run = 0

    def _commit_as(self, tag: Tag | None, txn: Txn) -> TxnResponse:
        """Commit; where that enters the job, only after revoking the lease of this agent's former incarnation, if any.

        An agent that was restarted within a lease time revokes that lease first, and decides again: a run whose only
        member was itself is no run. Most agents have no such lease, and many start at once. So "this host has no
        member" is a guard of the transaction, and the members are read only if that guard may have refused it.
        """
        if tag not in _ENTERING or self._is_alone:
            return self._store.commit(txn)
        of_host = f"{self._keys.members}{self._host.name}-"
        response = self._store.commit(replace(txn, guards=(*txn.guards, Empty(of_host))))
        if response.held:
            return response
        others = self._store.read(of_host).entries.values()
        dead = [entry.lease for entry in others if entry.lease and self._is_dead_member(entry.value)]
        for lease in dead:
            self._store.revoke(lease)
        # A start of a run can be retried without the dead member; a join was decided from a view that has it.
        is_refused_for_good = bool(dead) and tag is not Tag.RUN
        return self._store.commit(txn) if others and not is_refused_for_good else response

    @property
    def _run_lease(self) -> int:
        """The lease of the run's keys; 0 without a run, or with one of an older elaunch."""
        return self.view.lease_of(self._keys.spec)

    def _grant(self) -> None:
        lease, sent_s = self._host.draw(62) + 1, self._host.now()
        self._store.grant(lease, self._times.lease_ttl_s)
        self._lease, self._renewed_s = lease, sent_s
        if self._is_remote:
            self.due_s = self._host.now() + self._times.keepalive_s
            self.view.put_off_read(self._host.now())
        self._post(Leased(lease, f"{self._host.name}-{self._host.draw(32):08x}"))

    def _lose_lease(self, lease: int) -> None:
        if lease and lease == self._lease:
            held_s = self._host.now() - self._renewed_s
            self._lease, self._ended_early = 0, lease if held_s < self._times.lease_ttl_s else 0
            self.due_s = None
            self._post(LeaseLost(lease))

    def _is_dead_member(self, member: str) -> bool:
        with suppress(ValueError):
            return self._host.is_dead(decode(Node, member).process)
        return False
