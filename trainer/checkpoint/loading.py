"""Loading the newest whole checkpoint: all ranks get the same one, whatever each of them sees of the disk."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from elaunch.trainer.checkpoint.layout import Contents, Saved, contents
from elaunch.trainer.checkpoint.storage import (
    LAYOUT,
    LAYOUT_BYTES_MAX,
    PLAIN,
    PLAIN_BYTES_MAX,
    Corrupt,
    Folder,
    Manifest,
    Mark,
    Storage,
    is_published,
    marks,
    read_manifest,
    read_verified,
    set_aside,
    verify,
)
from elaunch.trainer.files import reason
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.state.packing import unpack_plain
from elaunch.trainer.state.tree import OPTIMIZERS, PerRank, State, Tree, flatten, is_shard, rebuild, some
from elaunch.trainer.state.tree import Path as Place

# What `unpack_plain` returns.
Unpacked = tuple[Any, dict[str, Place], list[Place]]


class Unreadable(RuntimeError):
    """No checkpoint could be loaded, and at least one may be whole."""


@dataclass(frozen=True)
class _Offer:
    """A checkpoint that rank 0 has found. `plain` and `layout` are the verified bytes of those two files."""

    mark: Mark
    name: str
    manifest: Manifest
    plain: bytes
    layout: bytes

    @property
    def tensor_files(self) -> list[str]:
        return sorted(name for name in self.manifest.files if name not in (PLAIN, LAYOUT))

    def opened(self, folder: Folder) -> tuple[Unpacked, Contents]:
        """Parse both files. Raises ValueError or UnpicklingError for what this release does not write."""
        lengths = {name: length for name, (length, _) in self.manifest.files.items()}
        saved, found = unpack_plain(self.plain), contents(folder, self.layout, lengths)
        if missing := [name for name in saved[1] if name not in found.tensors]:
            raise ValueError(f"{LAYOUT} lacks {some(missing)}")
        return saved, found


def find_newest(storage: Storage, ranks: Peers, newer_than: int = -1) -> tuple[Mark | None, str]:
    """The mark of rank 0's newest checkpoint; or None, and why rank 0 cannot know. Collective.

    Raises ValueError if another rank's directory has a newer one, of a step after `newer_than`: the nodes do not share
    the directory, and rank 0 was on another node.
    """
    # One rank of each node lists them. An object store is the same for all.
    lists = ranks.leads or (storage.is_local and os.environ.get("LOCAL_RANK", "0") == "0")
    of_all = ranks.all_gather(_newest(storage) if lists else (None, ""))
    first, why = of_all[0]
    newest, place = max(((mark, -rank) for rank, (mark, _) in enumerate(of_all) if mark), default=(None, 0))
    if why or newest is None or not place or newest.step <= newer_than:
        return first, why
    # It may have been published meanwhile, or be visible by now.
    first, why = ranks.broadcast(_newest(storage) if ranks.leads else None)
    if not why and (first is None or first < newest):
        raise ValueError(
            f"{storage} on rank {-place}'s node has the checkpoint of step {newest.step}, and on rank 0's "
            f"{f'none after step {first.step}' if first else 'there is none'}: each node has a directory of its own "
            "there, and rank 0 alone reads its checkpoints. Give `checkpoints` a directory that all nodes share, copy "
            "that checkpoint to rank 0's node, or remove it"
        )
    return first, why


def _newest(storage: Storage) -> tuple[Mark | None, str]:
    """The mark of the newest checkpoint that this rank sees, and why it cannot know."""
    try:
        return max(marks(storage), default=None), ""
    except OSError as error:
        return None, f"the checkpoints in {storage} cannot be reached: {error.strerror}"


def load_newest(storage: Storage, state: State, ranks: Peers, log: Callable[[str], None]) -> Mark | None:
    """See `Checkpoints.load_newest`. Each rank reads its part of a sharded state; rank 0 broadcasts any other."""
    is_sharded = flatten(state).is_sharded
    find_newest(storage, ranks)
    unread: list[str] = []
    candidates = iter(_newest_first(storage, unread) if ranks.leads else ())
    # Only rank 0's list counts: another rank's view of a network file system may be stale.
    while offer := ranks.broadcast(_offer(storage, candidates, log, unread) if ranks.leads else None):
        folder = storage.folder(offer.name)
        saved, there = offer.opened(folder)
        tensors = there.tensors if is_sharded else {name: there.tensors[name] for name in saved[1]}
        # What is sent is in host memory. The state changes once all ranks agree that the checkpoint is whole.
        sent = {} if is_sharded else {name: _empty(its) for name, its in tensors.items()}
        reads = is_sharded or ranks.leads
        files = offer.tensor_files[ranks.rank :: ranks.world_size] if is_sharded else offer.tensor_files
        problems = ranks.all_gather(_problem(there, offer.manifest, files, sent) if reads else None)
        if unseen := [rank for rank, problem in enumerate(problems) if isinstance(problem, _Unseen)]:
            raise ValueError(
                f"rank {unseen[0]} does not see {folder}, which rank 0 found; the checkpoints of a sharded state need "
                "a directory that all ranks share"
            )
        found_wrong = [problem for problem in problems if problem is not None]
        if not found_wrong:
            share = Share(state, saved, tensors, str(folder), sent)
            if is_sharded:
                there.read(share.tensors)
            ranks.broadcast_tensors([*sent.values()])
            share.put()
            return offer.mark
        # One rank's proof is enough, whatever the others could not read.
        worst = next((problem for problem in found_wrong if isinstance(problem, Corrupt)), found_wrong[0])
        if ranks.leads:
            with _passing_over(storage, folder, log, unread):
                raise worst
    _require_read(unread, ranks)
    return None


def _offer(
    storage: Storage, candidates: Iterator[tuple[Mark, Folder]], log: Callable[[str], None], unread: list[str]
) -> _Offer | None:
    """Rank 0's next candidate; None at the end."""
    for mark, folder in candidates:
        with _passing_over(storage, folder, log, unread):
            manifest = read_manifest(folder)
            plain = read_verified(folder, manifest, PLAIN, PLAIN_BYTES_MAX)
            layout = read_verified(folder, manifest, LAYOUT, LAYOUT_BYTES_MAX)
            offer = _Offer(mark, folder.name, manifest, plain, layout)
            offer.opened(folder)
            return offer
    return None


class _Unseen(Exception):
    """This rank does not see the folder."""


def _problem(
    there: Contents, manifest: Manifest, files: Sequence[str], tensors: Mapping[str, Tensor]
) -> Exception | None:
    """Verify these files and fill `tensors`. Returns what is wrong with the checkpoint, if anything is."""
    try:
        if not is_published(there.folder):
            return _Unseen()
        verify(there.folder, manifest, files)
        there.read(tensors)
    except (Corrupt, OSError, MemoryError) as error:
        return error
    except Exception as error:
        # A library's exception may not survive pickling.
        return pickle.UnpicklingError(reason(error))
    return None


class Share:
    """What this rank needs of a saved state: fill `tensors`, by name, then `put` changes the state.

    `saved` is what `unpack_plain` returns, `there` has the saved tensors by name, and `source` is named in errors.
    Tensors in `sent` are filled already. Raises ValueError as `Checkpoints.load_newest` does.
    """

    def __init__(
        self,
        state: State,
        saved: Unpacked,
        there: Mapping[str, Saved],
        source: str,
        sent: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        self._state, self._sent = state, sent
        self._plain, paths, roots = saved
        target = flatten(state)
        _require(target, self._plain, there, source)
        self.tensors = {name: target.tensors[name] for name in target.common()}
        new = [name for name in paths if name not in self.tensors]
        self.tensors |= {name: sent[name] if name in sent else _empty(there[name]) for name in new}
        self._leaves: dict[Place, object] = {
            paths.get(name, target.paths.get(name, ())): tensor for name, tensor in self.tensors.items()
        }
        for root in roots:
            owned = target.per_rank.get(root, PerRank())
            depth = len(root)
            mine: dict[Place, Tensor] = {}
            for name, its in there.items():
                keys = tuple(map(str, its.path))
                if keys[:depth] == tuple(map(str, root)) and keys[depth] in owned:
                    mine[keys[depth:]] = self.tensors[name] = _own(target.tensors.get(name), name, its, source)
            self._leaves[root] = _nest(owned, mine)

    def put(self) -> None:
        """Change the state, when all tensors that were not sent are filled."""
        for name, tensor in self._sent.items():
            if tensor is not self.tensors[name]:
                self.tensors[name].detach().copy_(tensor)
        loaded = rebuild(self._plain, self._leaves)
        self._state.clear()
        self._state.update(loaded)


def _empty(saved: Saved) -> Tensor:
    return torch.empty(saved.size, dtype=saved.dtype)


def _own(there: Tensor | None, name: str, saved: Saved, source: str) -> Tensor:
    """The part of a PerRank's tensor to fill: only this rank's of a distributed one."""
    if there is None or not is_shard(there):
        return _empty(saved)
    _require_shape(source, name, saved.size, there)
    return there


def _nest(owned: PerRank, tensors: dict[Place, Tensor]) -> PerRank:
    """A PerRank of these tensors; names of `owned` that the checkpoint lacks are empty."""
    nest = PerRank({name: {} for name in owned})
    for place, tensor in tensors.items():
        level: Any = nest
        for key in place[:-1]:
            level = level.setdefault(key, {})
        level[place[-1]] = tensor
    return nest


def _require(target: Tree, plain: Any, there: Mapping[str, Saved], source: str) -> None:
    """Raise ValueError where the checkpoint has other optimizers, or cannot fill the state's tensors."""
    ours, theirs = target.plain.get(OPTIMIZERS), plain.get(OPTIMIZERS)
    if ours and theirs and not _agree(ours, theirs):
        raise ValueError(
            f"{source} has the state of {_named(theirs)}, and this program has {_named(ours)}; give it those, or other "
            '`checkpoints`. Checkpoints(folder, generation=0).load_newest({"model": model.state_dict()}) loads the '
            "weights alone"
        )
    common = target.common()
    if missing := [name for name in common if name not in there]:
        raise ValueError(f"{source} lacks {some(missing)}; it belongs to another model or optimizer")
    for name in common:
        _require_shape(source, name, there[name].size, target.tensors[name])


def _agree(ours: list[Any], theirs: list[Any]) -> bool:
    """Whether the classes are the same, and the sizes of the groups where both are known."""
    pairs = list(zip(ours, theirs, strict=False))
    return len(ours) == len(theirs) and all(
        one[0] == other[0] and (None in (one[1], other[1]) or one[1] == other[1]) for one, other in pairs
    )


def _named(optimizers: list[Any]) -> str:
    return " and ".join(
        name if sizes is None else f"{name} with {' + '.join(map(str, sizes))} parameters" for name, sizes in optimizers
    )


def _require_shape(source: str, name: str, held: torch.Size, target: Tensor) -> None:
    if held != target.shape:
        raise ValueError(
            f"{source} holds {name} of shape {tuple(held)}, not {tuple(target.shape)}; it belongs to another model "
            "or optimizer"
        )


def _newest_first(storage: Storage, unread: list[str]) -> list[tuple[Mark, Folder]]:
    try:
        return list(reversed(storage.found()))
    except OSError as error:
        unread.append(f"{storage} cannot be read ({error.strerror})")
        return []


@contextlib.contextmanager
def _passing_over(storage: Storage, folder: Folder, log: Callable[[str], None], unread: list[str]) -> Iterator[None]:
    """Skip an unusable checkpoint: it is set aside if its bytes prove to be corrupt, else noted in `unread`."""
    try:
        yield
    except MemoryError:
        # Nothing is wrong with the checkpoint, and the one before needs as much memory.
        raise
    except Corrupt as error:
        log(f"skipping {folder}: it is torn or corrupt ({reason(error)}); trying the one before it")
        set_aside(folder)
    # A failure of the disk, the network, the device or this release: the bytes may be right.
    except Exception as error:
        unread.append(f"{folder} cannot be read ({reason(error)})")
        log(f"skipping {folder}: it cannot be read ({reason(error)}); trying the one before it")


def _require_read(unread: list[str], ranks: Peers) -> None:
    """Raise Unreadable on all ranks if rank 0 has skipped a checkpoint that may be whole, and found no other."""
    if notes := ranks.broadcast(unread):
        raise Unreadable(
            f"{notes[0]}, and there is no older checkpoint to continue from; training does not start over while there "
            "is one that may be whole: start again when it can be read, or move it away"
        )
