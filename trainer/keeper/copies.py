"""Makes and restores all copies of a training's state: in this node's memory, on other nodes, on disk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from elaunch.trainer import link
from elaunch.trainer.checkpoint.checkpoints import KEPT
from elaunch.trainer.checkpoint.storage import Storage
from elaunch.trainer.keeper.disk_copies import DiskCopies
from elaunch.trainer.keeper.per_rank_state import PerRankState
from elaunch.trainer.keeper.step_copies import StepCopies
from elaunch.trainer.memory.device_copy import GpuCopies, HostCopies
from elaunch.trainer.memory.mirror import Mirror
from elaunch.trainer.memory.node_memory import NodeMemory, NoRoom, drop_newer, take_over
from elaunch.trainer.memory.recovery_plan import Inventory, decide, decide_in_parts, repeated, sentence
from elaunch.trainer.memory.sharded import ShardedMemory
from elaunch.trainer.memory.slots import node_of
from elaunch.trainer.ranks import RankInfo
from elaunch.trainer.ranks.group_status import GroupStatus
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.state import Version
from elaunch.trainer.state.model_state import require_uncaptured
from elaunch.trainer.state.packing import NotPlain
from elaunch.trainer.state.training_state import Training
from elaunch.trainer.state.tree import State, cloned

# How long a part may take to be written: a first copy takes 2 s per GB, since the kernel clears its pages.
_WRITE_S = 1.0
_WRITE_S_PER_BYTE = 4e-9


class Copies:
    """Keeps the state of `training`. `folder` is the node's memory; `storage`, if any, holds the checkpoints.

    All ranks create it together. `save_replicated`, `store`, `done` and `close` are local to a rank; all other
    methods are collective. `steps` has the copies of each step, `disk` the checkpoints.
    """

    def __init__(
        self,
        training: Training,
        peers: Peers,
        place: RankInfo,
        *,
        folder: str,
        storage: Storage | None,
        name: str,
        log: Callable[[str], None],
        lose_at_most: int | None = None,
        kept: int = KEPT,
    ) -> None:
        try:
            training.compare_names(peers.all_gather)
            for one in training.optimizers:
                require_uncaptured(one)
            training.require_plain(durably=storage is not None)
        except (TypeError, ValueError) as error:
            link.refuse(str(error))
            raise
        self._training, self._peers, self._place, self._log, training_name = training, peers, place, log, name
        self.gpu = GpuCopies(training.device) if training.device.type == "cuda" else HostCopies()
        self.groups = GroupStatus()
        self._node_memory = None
        # Whether this rank decides when the snapshots of its node are due.
        self.paces = False
        # The nodes of this group's ranks: the job may have others on the node, of another role.
        self._nodes = peers.all_gather(node_of(Path(folder)) if folder else "")
        if folder:
            layout, self.paces = training.layout(), self._nodes.index(self._nodes[peers.rank]) == peers.rank
            # Another process on the node may keep a training of this name for itself too.
            name = f"{name}-{place.rank}" if peers.world_size == 1 < place.world_size else name
            whose = peers.rank, place.world_size
            self._node_memory = NodeMemory(Path(folder), name, layout, *whose, reports=self.paces, log=log)
        # The file of `boundary.Loops`.
        self.loops_path = Path(folder, f"{name}.left") if folder else None
        self._parts: ShardedMemory | None = None
        if training.is_in_parts and all(self._nodes):
            parts = Path(folder, f"{name}.parts")
            parts.mkdir(mode=0o700, exist_ok=True)
            self._parts = ShardedMemory(parts, peers, log, generation=place.generation)
        self._records = None if self._node_memory is None else self._node_memory.records(peers.rank)
        # Once memory was full, storing is not retried.
        self._has_room = True
        self._mirror = self._mirrored()
        # If a state needs the records of all ranks: `_newest` is the newest snapshot, which some ranks may still lack,
        # and `_full` the one before, which all ranks have. A copy made after a failure overwrites neither of them.
        self._newest: Version | None = None
        self._full: Version | None = None
        self._is_kept = True
        # Whether each rank waits within its commit until its node has a copy of the step.
        self.copies_in_commit = lose_at_most == 0 and self.can_rescue
        self._every = None if lose_at_most is None else max(1, lose_at_most)
        self.steps = StepCopies(
            self, training, peers, self._parts, self._every, self._records is not None, self._log_once
        )
        # Whether the state was checked again once the optimizers had theirs.
        self._is_checked = False
        self._logged: set[str] = set()
        self.disk = DiskCopies(training, peers, storage, place.generation, log, kept, training_name, folder)
        self.is_durable = storage is not None
        self.own = PerRankState(training, self._records, lambda text: log(f"rank {peers.rank}'s {text}"))
        # How many completed steps `restore` has lost.
        self.repeated = 0
        # The state that all ranks have compared, and the newest snapshot of such a state.
        self.compared: Version | None = None
        self.verified: Version | None = None

    @property
    def snapshot_every(self) -> int | None:
        """Steps between two snapshots; None if the measured cost decides.

        Training continues while what a rank alone has is sent to another node: until then the snapshot before counts.
        """
        is_sent = self._mirror is not None and (self._training.is_in_parts or self._training.has_large)
        return max(1, self._every // 2) if is_sent and self._every is not None else self._every

    @property
    def copied_step(self) -> int:
        """The newest step whose copies are as good as a snapshot, 0 if none are. The same on all ranks."""
        copied = None if self._parts is None else self._parts.copied
        return copied.step if copied else 0

    @property
    def copies_parts(self) -> bool:
        """Whether steps of a state in parts are copied. The same on all ranks.

        Then the first step is kept as a snapshot, and the step after a snapshot is copied in any case.
        """
        return self._parts is not None and not self.steps.is_off

    def restore(self) -> Version:
        """Load the newest state there is into the objects, and log which. Returns its version; step 0 without one."""
        if self._training.per_rank is not None:
            self._training.per_rank.expect_restore()
        large = self._training.has_large
        mine = Inventory(self._peers.rank, "", reports=False)
        if self._node_memory is not None:
            mine = self._node_memory.inventory(large=large)
        inventories = self._peers.all_gather(mine)
        if self._training.is_in_parts:
            decision = decide_in_parts(inventories, None if self._parts is None else self._parts.find())
        else:
            decision = decide(inventories, large=large)
        completed = max((i.completed for i in inventories if i.completed is not None), default=None)
        done = 0 if completed is None else completed.step
        newer_than = -1 if decision is None else decision.version.step
        if decision is not None and not decision.records and any(self._peers.all_gather(self._training.has_buffers)):
            # A state with new buffers (BatchNorm's) is not one of the training: any whole checkpoint is better.
            newer_than = 0
        from_disk = self.disk.restore(newer_than=newer_than, done=done)
        if from_disk is not None:
            version, self.repeated = from_disk
            return version
        if decision is None:
            self.repeated = done
            if self._place.generation:
                # Without room in memory the number of lost steps is unknown.
                lost = f"; {repeated(done)}" if done else ""
                self._log_on_rank_0(f"there is no state to restore: training begins at step 1{lost}")
            return Version(self._place.generation, 0)
        if self._parts is not None:
            place = self._peers.rank, self._peers.world_size
            self._training.load_whole(self._parts.load, *place, has_buffers=False)
        take_over(decision, inventories, self._node_memory, self._peers, self._training)
        if self._parts is not None or (large and not decision.reset):
            self._full = decision.version
        self.repeated = decision.repeated
        self._log_on_rank_0(sentence(decision))
        return decision.version

    def begin(self, version: Version) -> Version:
        """Make the restored state this generation's: record it, and take a snapshot if other nodes need a copy."""
        now = Version(self._place.generation, version.step)
        self._log_on_rank_0(self._training.settings.restored(version.step))
        if version.step and (self._parts is not None or self._mirror is not None):
            # A state that was restored from elsewhere lacks one copy until then.
            self.snapshot(now)
            version = now
        # First, since it takes little memory, and lost steps are counted by it.
        self.done(now)
        if self._records is None or self._records.find(version) is None:
            # The copy that was just restored is not overwritten: it may be the only one.
            self.store(version)
        else:
            self.own.restored(version)
        if (per_rank := self._training.per_rank) is not None and version.step:
            self._log_on_rank_0(per_rank.missed_sentence(self._peers.all_gather(per_rank.missed)))
        return version

    def store(self, version: Version, *, unless_same: bool = False, is_begun: bool = False) -> bool:
        """Store this rank's own state in memory as the state of `version`; `is_begun` if its commit is to come.

        Returns whether that replaces another state of that version, which a failure of this rank alone would have used.
        """
        if self.own.store(version, unless_same=unless_same, is_begun=is_begun) and version in self.steps.versions:
            self.keep(version)
        return self.own.is_replaced and self._peers.world_size > 1

    def begun_before(self) -> tuple[int, State]:
        """The newest step that this rank had begun before a failure, and what it had drawn and fetched; 0 if none."""
        if self._records is None or not self._place.generation:
            return 0, {}
        size, records = self._peers.world_size, self._records.versions()
        found = [one.version for one, _, is_full in records if not is_full and one.piece.world_size == size]
        own = self._records.find(max(found)) if found else None
        if own is None:
            return 0, {}
        return max(found).step, cloned({name: own[name] for name in ("random", "per_rank") if name in own})

    def redraw(self, version: Version) -> None:
        """Store the generators' current states with what `store(version)` has stored."""
        if self.own.redraw(version) and version in self.steps.versions:
            self.keep(version)

    def done(self, version: Version) -> None:
        """Record that this rank has completed the step of `version`."""
        if self._records is not None:
            with contextlib.suppress(OSError):
                self._records.done(version)

    def newest_done(self) -> Version | None:
        """The newest step that any worker of this node has completed."""
        return None if self._node_memory is None else self._node_memory.completed()

    def has_arrived(self) -> bool:
        """Whether this rank need not wait in `before_snapshot`, and has stored its part of the last snapshot."""
        is_there = self._mirror is None or self._mirror.has_arrived
        return self._newest is None or (self._is_kept and is_there)

    def before_snapshot(self) -> None:
        """Wait until the last snapshot is on all nodes, or has failed: that decides which one may be overwritten.

        This may wait for a dead peer, so the caller must not hold a lock that a rescue needs.
        """
        is_full = self._mirror is None or self._mirror.settle(is_kept=self._is_kept)
        if self._newest is None:
            return
        if self._parts is not None:
            # A record is useless without its part.
            is_full = self._parts.wait()
        elif self._mirror is None:
            is_full = self._peers.all_reduce_max([not self._is_kept]) == [0]
        if is_full:
            self._full = self._newest
        self._newest = None

    def snapshot(self, version: Version) -> None:
        """Copy the state to this node's memory: each rank its own part, the node's first rank the replicated part.

        Raises TypeError if the training now has something that cannot be kept: the previous copy stays.
        """
        if not self._is_checked:
            self._training.require_plain(durably=self.is_durable)
            self._is_checked = True
        self.before_snapshot()
        if self._parts is not None and version in (self._full, self._parts.copied):
            self._full = version
            return
        spare = self._spare
        record = self.keep(version)
        if self._parts is not None or self._training.has_large:
            self._newest = version
        self._is_kept = record is not None
        if self._parts is not None:
            # First, since it puts FSDP2's parts in place, to which `live` refers.
            large = self._training.large()
            live = self._training.live() if record is not None else None
            self._parts.save(version.step, large, self._training.small(), live)
            if self._peers.leads and not (self._parts.has_room_for_copies or self._parts.is_off):
                self._log_once(
                    "there is no room in memory for copies of each step beside snapshots; a failure goes back to the "
                    "last snapshot"
                )
            elif record is not None and (live is None or self._parts.is_refused):
                self._log_once(
                    "the state can be copied at snapshots only: its tensors are recreated each time, or other values "
                    "change with them; a failure goes back to the last snapshot"
                )
        elif self.paces:
            self._is_kept &= self.save_replicated(version)
        if self._mirror is not None:
            self._mirror.exchange(lambda: record, version, spare)
        if version == self.compared:
            self.verified = version
        # If a copy has failed before this snapshot, the next one may not.
        self.steps.has_failed = False

    def drop_unverified(self) -> None:
        """Delete all copies in memory that are newer than the newest compared one. Collective."""
        self.before_snapshot()
        if self._parts is not None:
            self._parts.drop_newer(self.verified or Version(-1, 0))
        drop_newer(self.verified or Version(-1, 0), self._node_memory, self._peers)

    def keep(self, version: Version) -> Tensor | None:
        """Store this rank's own state with the large part; None if there is no memory, or no room, for it."""
        if self._records is None:
            return None
        try:
            own = {**self._training.buffers(), **self._training.own(large=True), **self.own.of(version)}
            own["is_begun"] = self.own.is_begun(version)
            return self._records.keep(version, own, [*self._spare, *self.steps.versions[-1:]])
        except OSError as error:
            self._log_once(f"rank {self._peers.rank} keeps no snapshots of its own state: {error.strerror or error}")
            return None
        except NotPlain:
            # This error names the part.
            self._training.require_plain(durably=self.is_durable)
            raise

    def save_replicated(self, version: Version) -> bool:
        """Store the replicated state in this node's memory unless another worker has. Returns whether it is there.

        Raises TypeError for a state that cannot be kept: the previous copy stays.
        If records have a large part, this copy alone is useless, so it never overwrites a snapshot that may be needed.
        """
        if self._node_memory is None or self._training.is_in_parts or not self._has_room:
            return False
        try:
            # If all ranks have their own state of this step, this copy is worth more than the last snapshot. Otherwise
            # it is worth less than one that a rank a step behind has saved. Copies older than a snapshot that
            # counts are worth nothing.
            copied = self.steps.versions
            newer = [each for each in copied if all(each > other for other in self._spare)]
            spare = self._spare[:1] if version in copied else [*self._spare, *newer]
            with self.gpu.reading():
                found = self._node_memory.save(version, self._training.replicated, self.gpu.copy, spare)
            return found >= version
        except NoRoom as error:
            self._has_room = False
            self._log(str(error))
        except NotPlain:
            # This error names the part.
            self._training.require_plain(durably=self.is_durable)
            raise
        except OSError as error:
            # The same error may come with each further snapshot: it is logged once, with the first step.
            if (reason := error.strerror or str(error)) not in self._logged:
                self._logged.add(reason)
                self._log(f"step {version.step} could not be copied to {self._node_memory.folder}: {reason}")
        return False

    @property
    def can_rescue(self) -> bool:
        """Whether `save_replicated` can store a state, as far as is known."""
        return self._node_memory is not None and not self._training.is_in_parts and self._has_room

    def wait_for_part(self, step: int) -> None:
        """If a thread is writing this rank's part of the state, report that to the agent, and wait until it is written.

        The wait is bounded: on a GPU the thread may wait for a peer that has failed.
        """
        for slot in () if self._parts is None else self._parts.being_written:
            link.saving(step)
            slot.wait_until_settled(_WRITE_S + _WRITE_S_PER_BYTE * slot.size)

    @property
    def kept_step(self) -> int:
        """The newest step of which there is a copy in memory: on this node, or of this rank's part. 0 if of none."""
        if self._training.is_in_parts:
            part = None if self._parts is None else self._parts.kept
            return 0 if part is None else part.step
        if self._node_memory is None:
            return 0
        # This rank has stored what it alone has of these.
        own = [self._full, self._newest if self._is_kept else None, *self.steps.versions]
        kept = self._node_memory.versions()
        # As `decide` does: without a copy whose large part exists too, the large part is lost.
        kept = [each for each in kept if self._training.has_large and each in own] or kept
        return max(kept).step if kept else 0

    def discard_replicated(self, version: Version) -> None:
        """Mark this node's copy of that version as torn."""
        if self._node_memory is not None:
            self._node_memory.discard(version)

    @property
    def _spare(self) -> list[Version]:
        """The snapshots that must not be overwritten."""
        needs_all = self._parts is not None or self._training.has_large
        spared = (self._full, self._newest) if needs_all else (self.verified,)
        return [version for version in spared if version is not None]

    def checkpoint(self, version: Version) -> None:
        """Begin to write a checkpoint of this state, unless there is one."""
        self.disk.write(version, lambda: self.own.of(version))

    def wait(self) -> None:
        """Wait until all copies that were begun are complete."""
        self.before_snapshot()
        self.disk.wait()

    def close(self) -> None:
        """Close the connections of the threads that copy, after `wait`: then no thread uses them any more."""
        if self._mirror is not None:
            self._mirror.close()
        if self._parts is not None:
            self._parts.close()
        self.disk.close()

    def _mirrored(self) -> Mirror | None:
        """The mirror that sends records to a second node; None if there is no second node or no memory."""
        node_memory, nodes = self._node_memory, self._nodes
        if node_memory is None or not all(nodes) or len(set(nodes)) == 1:
            return None
        lost = "the communication hook" if self._training.has_large else "the random state of its ranks"
        loss = f"if a node is lost, {lost} starts over"
        return Mirror(self._peers, nodes, lambda rank: node_memory.records(rank).mirrored, self._log_once, loss=loss)

    def _log_once(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            self._log(text)

    def _log_on_rank_0(self, text: str) -> None:
        if text and self._peers.leads:
            self._log(text)
