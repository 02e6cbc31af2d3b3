"""All copies of a training's state: in this node's memory, on other nodes, on the disk. Made, and restored from."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elaunch.trainer.checkpoint.catalog import marks, unwritable
from elaunch.trainer.checkpoint.checkpoints import Checkpoints
from elaunch.trainer.checkpoint.loading import Unreadable
from elaunch.trainer.memory.device_copy import GpuCopies, HostCopies
from elaunch.trainer.memory.mirror import Mirror
from elaunch.trainer.memory.recovery_plan import repeated, sentence
from elaunch.trainer.memory.replicated import NoRoom, ReplicatedMemory
from elaunch.trainer.memory.restore import NodeMemory, agree, restore_own, take_over
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.ranks.place import RankInfo
from elaunch.trainer.state import rng_state
from elaunch.trainer.state.packing import NotPlain
from elaunch.trainer.state.training_state import Training
from elaunch.trainer.state.version import Version

if TYPE_CHECKING:
    # It imports torch.distributed.checkpoint, which takes a while: a start whose state is replicated does without.
    from elaunch.trainer.memory.sharded import ShardedMemory


class Copies:
    """Keeps what `training` consists of; `folder` is the node's memory, `directory` that of the checkpoints, if any.

    Made by all ranks together. `save_replicated`, `put_down` and `done` are one rank's own business, all else is
    collective.
    """

    def __init__(
        self,
        training: Training,
        peers: Peers,
        place: RankInfo,
        *,
        folder: str,
        directory: Path | None,
        name: str,
        say: Callable[[str], None],
    ) -> None:
        training.require_plain(durably=directory is not None)
        self._training, self._peers, self._place, self._say = training, peers, place, say
        self.gpu = GpuCopies(training.device) if training.device.type == "cuda" else HostCopies()
        self._shelf = None
        if folder:
            layout, speaks = training.layout(), place.local_rank == 0
            self._shelf = NodeMemory(ReplicatedMemory(Path(folder), name, layout), name, layout, speaks, say)
        self._parts: ShardedMemory | None = None
        if training.is_in_parts and all(peers.from_all(bool(folder))):
            parts = Path(folder, f"{name}.parts")
            parts.mkdir(mode=0o700, exist_ok=True)
            from elaunch.trainer.memory.sharded import ShardedMemory

            self._parts = ShardedMemory(parts, peers.group, say, generation=place.generation)
        self._records = None if self._shelf is None else self._shelf.records(peers.rank)
        # What found no room once is not tried again.
        self._has_room, self._has_room_for_own = True, True
        self._mirror = self._mirrored()
        # Where a state is of use only with all ranks' records: the newest snapshot, which some may lack yet, and the
        # one before it that all are known to have. A copy for a failure is written over neither of them.
        self._newest: Version | None = None
        self._full: Version | None = None
        self._is_kept = True
        self._said: set[str] = set()
        self._directory, self._checkpoints, self._checkpointed = directory, None, -1
        if directory is not None:
            self._checkpoints = Checkpoints(directory, generation=place.generation, say=say, group=peers.group)
            if peers.leads and (why := unwritable(directory)):
                say(f"checkpoints cannot be written to {directory}: {why}; until they can, there are none")
        self._put: tuple[object, dict[str, Any]] = (None, {})
        # How many steps that had been done `restore` has gone back.
        self.repeated = 0

    @property
    def paces(self) -> bool:
        """Whether this rank decides when its node's snapshots are due."""
        return self._shelf is not None and self._shelf.speaks

    def restore(self) -> Version:
        """Put the newest state that is anywhere into the objects, and say so; the version, of step 0 where none is."""
        fresh = Version(self._place.generation, 0)
        if self._training.is_in_parts:
            return self._restore_parts(fresh)
        decision, inventories = agree(self._shelf, self._peers, large=self._training.has_large)
        completed = max((i.completed for i in inventories if i.completed is not None), default=None)
        done = 0 if completed is None else completed.step
        from_disk = self._restore_from_disk(newer_than=-1 if decision is None else decision.version.step, done=done)
        if from_disk is not None:
            return from_disk
        if decision is None:
            self._say_nothing_is_there(done)
            return fresh
        take_over(decision, inventories, self._shelf, self._peers, self._training)
        if self._training.has_large and not decision.reset:
            self._full = decision.version
        self.repeated = decision.repeated
        self._tell(sentence(decision))
        return decision.version

    def begin(self, version: Version) -> Version:
        """What was restored is this generation's: there are records of it, and where it may travel a snapshot."""
        now = Version(self._place.generation, version.step)
        if version.step and (self._parts is not None or self._mirror is not None):
            # What came from elsewhere is on one node less until then.
            self.snapshot(now)
            version = now
        # First: it takes little room, and what else there is not room for is counted by it.
        self.done(now)
        if self._records is None or self._records.find(version) is None:
            # What was just restored from is not written over: it may be the only copy.
            self.put_down(version)
        return version

    def put_down(self, version: Version, *, unless_same: bool = False) -> None:
        """Have this rank's own state in memory as that of `version`."""
        if self._records is None or self._parts is not None or not self._has_room_for_own:
            return
        own = self._training.own()
        stamp = (version, [(buffer.data_ptr(), buffer._version) for buffer in own["buffers"].values()])
        if unless_same and stamp == self._put[0] and rng_state.same(own["random"], self._put[1]):
            return
        self._put = (stamp, own["random"])
        try:
            self._records.stage(version, own)
        except (OSError, NotPlain) as error:
            self._has_room_for_own = False
            self._say(f"rank {self._peers.rank} keeps no buffers and random states in memory: {_reason(error)}")

    def done(self, version: Version) -> None:
        """This rank has completed that step."""
        if self._records is not None:
            with contextlib.suppress(OSError):
                self._records.done(version)

    def newest_done(self) -> Version | None:
        """The newest step that any worker of this node has completed."""
        return None if self._shelf is None else self._shelf.completed()

    def before_snapshot(self) -> None:
        """Wait until the snapshot before is on all nodes or will not be: it decides which one may be written over.

        May wait for a peer that is dead, so nothing that a rescue needs is to be held meanwhile.
        """
        has_arrived = self._mirror is None or self._mirror.wait()
        if self._newest is None:
            return
        if self._parts is not None:
            # A record is of no use without its part.
            is_full = self._parts.wait()
        else:
            is_full = self._peers.largest([not (self._is_kept and has_arrived)]) == [0]
        if is_full:
            self._full = self._newest
        self._newest = None

    def snapshot(self, version: Version) -> None:
        """Copy the state to this node's memory: each rank what is its own, the node's first the replicated part."""
        self.before_snapshot()
        spare, record = self._spare, None
        if self._parts is not None or self._training.has_large:
            self._newest = version
        if self._records is not None:
            try:
                record = self._records.keep(version, self._training.own(large=True), spare)
            except (OSError, NotPlain) as error:
                self._say_once(f"rank {self._peers.rank} keeps no snapshots of its own state: {_reason(error)}")
        self._is_kept = record is not None
        if self._parts is not None:
            self._parts.save(version.step, self._training.whole())
        elif self.paces:
            self._is_kept &= self.save_replicated(version)
        if self._mirror is not None:
            self._mirror.exchange(record, spare)

    def save_replicated(self, version: Version) -> bool:
        """Have the replicated state in this node's memory, unless another worker has put it there; whether it is.

        With a large part of records it is no use alone: then it is not written over a snapshot that may yet be needed.
        """
        if self._shelf is None or self._training.is_in_parts or not self._has_room:
            return False
        try:
            found = self._shelf.memory.save(version, self._training.replicated, self.gpu.copy, self._spare)
            return found >= version
        except NoRoom as error:
            self._has_room = False
            self._say(str(error))
        except NotPlain as error:
            self._say_once(f"the state is not copied to memory any more: {error}")
        except OSError as error:
            self._say(f"step {version.step} could not be copied to {self._shelf.memory.folder}: {error}")
        return False

    @property
    def _spare(self) -> list[Version]:
        """The snapshots that must not be written over."""
        return [version for version in (self._full, self._newest) if version is not None]

    def checkpoint(self, version: Version) -> None:
        """Begin to make the state durable, unless it is."""
        if self._checkpoints is None or version.step in (0, self._checkpointed):
            return
        self._checkpointed = version.step
        random = self._peers.from_all(rng_state.capture(self._training.device))
        # At a stop this is the last word, see `Peers.part`.
        self._peers.largest([0])
        self._checkpoints.save_async(version.step, self._training.whole(random))

    def look(self) -> None:
        """Say what has failed meanwhile, as soon as that is known; one rank's own business."""
        if self._checkpoints is not None:
            self._checkpoints.look()

    def failure(self) -> str:
        """What was said of the newest checkpoint if it has failed; on all ranks, and then it may be made again."""
        if self._checkpoints is None:
            return ""
        why = self._peers.from_rank_0(self._checkpoints.failure)
        # The last word before an end, see `Peers.part`.
        self._peers.largest([0])
        if why:
            self._checkpointed = -1
        return why

    def where_to_go_on(self, step: int) -> str:
        """What the same command goes on from after a stop at `step`, as the rest of a sentence; on rank 0."""
        if self._directory is None:
            return ""
        try:
            there = marks(self._directory)
        except OSError:
            return ""
        if not there:
            return "; there is no checkpoint, and the same command begins anew"
        newest = there[-1].step
        return f"; the same command goes on from {'there' if newest == step else f'the checkpoint of step {newest}'}"

    def wait(self) -> None:
        """Until everything that was begun is where it belongs."""
        self.before_snapshot()
        if self._checkpoints is not None:
            self._checkpoints.wait()

    def _restore_parts(self, fresh: Version) -> Version:
        newest = None if self._parts is None else self._parts.newest()
        told: list[Version | None] = self._peers.from_all(self.newest_done())
        done = max((version.step for version in told if version is not None), default=0)
        from_disk = self._restore_from_disk(newer_than=newest[1] if newest else -1, done=done)
        if from_disk is not None:
            return from_disk
        if newest is None or self._parts is None:
            self._say_nothing_is_there(done)
            return fresh
        self._full = version = Version(*newest)
        self._training.load_whole(self._parts.load, self._peers.rank, self._peers.world_size)
        assert self._shelf is not None
        has_own = restore_own(version, self._shelf, self._peers, self._training)
        without = [rank for rank, has in enumerate(self._peers.from_all(has_own)) if not has]
        lost = f"; the random state of rank {', '.join(map(str, without))} is lost and new" if without else ""
        said = f"restored step {version.step} from memory (of generation {version.generation}, in parts)"
        self.repeated = max(0, done - version.step)
        self._tell(f"{said}; {repeated(self.repeated)}{lost}")
        return version

    def _mirrored(self) -> Mirror | None:
        """Who sends the records to a second node; None where there is none, or a rank without memory. Collective."""
        shelf = self._shelf
        nodes = self._peers.from_all("" if shelf is None else shelf.memory.node)
        if shelf is None or not all(nodes) or len(set(nodes)) == 1:
            return None
        return Mirror(self._peers, nodes, shelf.records, self._say_once)

    def _restore_from_disk(self, *, newer_than: int, done: int) -> Version | None:
        if self._checkpoints is None or self._directory is None:
            return None
        newest = max((mark.step for mark in marks(self._directory)), default=-1) if self._peers.leads else -1
        if self._peers.from_rank_0(newest) <= newer_than:
            return None
        try:
            mark = self._training.load_whole(self._checkpoints.load_newest, self._peers.rank, self._peers.world_size)
        except Unreadable as error:
            if newer_than < 0:
                raise
            self._tell(f"{error}; there is an older state in memory, which is taken")
            return None
        # It may be an older one, where the newest was torn.
        if mark is None or mark.step <= newer_than:
            return None
        self.repeated = max(0, done - mark.step)
        # Of another job nobody is left who could say how far it was.
        lost = f"; {repeated(self.repeated)}" if done else ""
        self._tell(f"restored step {mark.step} from the checkpoint in {os.fspath(self._directory)}{lost}")
        self._checkpointed = mark.step
        return Version(self._place.generation, mark.step)

    def _say_nothing_is_there(self, done: int) -> None:
        self.repeated = done
        if self._place.generation:
            self._tell(f"there is no state to restore: training begins at step 1; {repeated(done)}")

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)

    def _tell(self, text: str) -> None:
        if self._peers.leads:
            self._say(text)


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
