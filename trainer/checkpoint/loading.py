"""Loading the newest whole checkpoint: all ranks get the same one, whatever each of them sees of the disk."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from elaunch.trainer.checkpoint.objects import StorageError
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
    read_manifest,
    read_verified,
    set_aside,
    verify,
)
from elaunch.trainer.files import reason
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.state.tree import OPTIMIZERS, PerRank, State, Tree, flatten, is_shard, rebuild, some, unpack
from elaunch.trainer.state.tree import Path as Place

if TYPE_CHECKING:
    # torch.distributed.checkpoint takes a while to import; see `Checkpoints`.
    from elaunch.trainer.checkpoint.dcp import Contents

Kinds = dict[str, tuple[torch.Size, torch.dtype]]


class Unreadable(RuntimeError):
    """There are checkpoints, none could be read, and none of those has proved to be corrupt."""


@dataclass(frozen=True)
class _Whole:
    """A checkpoint in host memory; `kinds` are the sizes and types of its tensors."""

    plain: Any
    paths: dict[str, Place]
    tensors: dict[str, Tensor]

    @property
    def kinds(self) -> Kinds:
        return {name: (tensor.shape, tensor.dtype) for name, tensor in self.tensors.items()}


def load_from_rank_0(storage: Storage, state: State, ranks: Peers, say: Callable[[str], None]) -> Mark | None:
    """Rank 0 reads and sends; see `Checkpoints.load_newest`."""
    mark, source, whole = None, "", None
    unread: list[str] = []
    for candidate, folder in _newest_first(storage, unread) if ranks.leads else ():
        with _passing_over(storage, folder, say, unread):
            whole = _read(folder)
            mark, source = candidate, str(folder)
            break
    _require_read(unread if whole is None else [], ranks)
    return _send(mark, source, whole, state, ranks)


def load_from_all(storage: Storage, state: State, ranks: Peers, say: Callable[[str], None]) -> Mark | None:
    """Every rank reads its part; see `Checkpoints.load_newest`."""
    unread: list[str] = []
    candidates = iter(_newest_first(storage, unread) if ranks.leads else ())
    while True:
        # Only rank 0's list counts: another's view of a network's file system may be old.
        offer = _offer(storage, candidates, say, unread) if ranks.leads else None
        (offer,) = ranks.from_rank_0([offer])
        if offer is None:
            _require_read(unread, ranks)
            return None
        mark, name, manifest = offer
        folder = storage.folder(name)
        opened, problem = _open_share(folder, manifest, ranks)
        problems = ranks.from_all(problem)
        if unseen := [rank for rank, problem in enumerate(problems) if isinstance(problem, _Unseen)]:
            raise ValueError(
                f"rank {unseen[0]} does not see {folder}, which rank 0 found; the checkpoints of a sharded state need "
                "a directory that all ranks share"
            )
        found_wrong = [problem for problem in problems if problem is not None]
        if opened is not None and not found_wrong:
            contents, packed = opened
            share = Share(state, unpack(packed), contents.kinds, contents.paths, str(folder))
            contents.read(share.tensors)
            share.put()
            return mark
        # One rank's proof is enough, whatever the others could not read.
        worst = next((problem for problem in found_wrong if isinstance(problem, Corrupt)), found_wrong[0])
        if ranks.leads:
            with _passing_over(storage, folder, say, unread):
                raise worst


def _offer(
    storage: Storage, candidates: Iterator[tuple[Mark, Folder]], say: Callable[[str], None], unread: list[str]
) -> tuple[Mark, str, Manifest] | None:
    """Rank 0's next candidate: its mark, its folder's name and its manifest; None at the end."""
    for mark, folder in candidates:
        with _passing_over(storage, folder, say, unread):
            return mark, folder.name, read_manifest(folder)
    return None


class _Unseen(Exception):
    """There is no such folder for this rank."""


def _open(folder: Folder, manifest: Manifest) -> tuple[Contents, bytes]:
    """What `tensors.json` says, and the packed plain values, verified.

    Raises Corrupt, OSError, and pickle.UnpicklingError for what this release does not write.
    """
    from elaunch.trainer.checkpoint import dcp

    packed = read_verified(folder, manifest, PLAIN, PLAIN_BYTES_MAX)
    layout = read_verified(folder, manifest, LAYOUT, LAYOUT_BYTES_MAX)
    lengths = {name: length for name, (length, _) in manifest.files.items()}
    return dcp.contents(folder, layout, lengths), packed


def _tensor_files(manifest: Manifest) -> list[str]:
    return sorted(name for name in manifest.files if name not in (PLAIN, LAYOUT))


def _open_share(
    folder: Folder, manifest: Manifest, ranks: Peers
) -> tuple[tuple[Contents, bytes] | None, Exception | None]:
    """The checkpoint, once this rank's share of the files is verified; or what is wrong with it."""
    try:
        if not is_published(folder):
            return None, _Unseen()
        verify(folder, manifest, _tensor_files(manifest)[ranks.rank :: ranks.world_size])
        opened = _open(folder, manifest)
        # What cannot be unpacked is passed over by all ranks, as what is torn.
        unpack(opened[1])
    except (Corrupt, OSError, MemoryError) as error:
        return None, error
    except Exception as error:
        # Another's exception may not survive the way to the other ranks.
        return None, pickle.UnpicklingError(reason(error))
    return opened, None


def _read(folder: Folder) -> _Whole:
    """A whole checkpoint, verified. Raises Corrupt, or torch's own error if torch cannot read a whole checkpoint."""
    manifest = read_manifest(folder)
    verify(folder, manifest, _tensor_files(manifest))
    contents, packed = _open(folder, manifest)
    plain, paths, _ = unpack(packed)
    kinds = contents.kinds
    tensors = {name: _empty(kinds[name]) for name in paths}
    contents.read(tensors)
    return _Whole(plain, paths, tensors)


def _send(mark: Mark | None, source: str, whole: _Whole | None, state: State, ranks: Peers) -> Mark | None:
    """Put what rank 0 has read into everybody's state."""
    head: Any = (mark, source, whole.plain, whole.paths, whole.kinds) if whole else None
    head = ranks.from_rank_0(head)
    if head is None:
        return None
    found_mark: Mark
    found_mark, source, plain, paths, kinds = head
    target = flatten(state)
    _require(target, plain, kinds, source)
    tensors = {name: _empty(kind) for name, kind in kinds.items()} if whole is None else whole.tensors
    ranks.fill_from_rank_0(list(tensors.values()))
    leaves: dict[Place, object] = {}
    for name, tensor in tensors.items():
        there = target.tensors.get(name)
        if there is not None:
            there.detach().copy_(tensor)
        leaves[paths[name]] = tensor if there is None else there
    _put(state, plain, leaves)
    return found_mark


class Share:
    """What this rank needs of a saved state: `tensors` are to be filled, by name, and then `put` changes the state.

    `saved` is what `tree.unpack` returns, `kinds` and `places` are sizes, types and paths of all saved tensors, and
    `source` is named in errors. Raises ValueError as `Checkpoints.load_newest` does.
    """

    def __init__(
        self,
        state: State,
        saved: tuple[Any, dict[str, Place], list[Place]],
        kinds: Kinds,
        places: Mapping[str, Place],
        source: str,
    ) -> None:
        self._state = state
        self._plain, paths, roots = saved
        target = flatten(state)
        _require(target, self._plain, kinds, source)
        self.tensors = {name: target.tensors[name] for name in target.common()}
        self.tensors |= {name: _empty(kinds[name]) for name in paths if name not in self.tensors}
        self._leaves: dict[Place, object] = {
            paths.get(name, target.paths.get(name, ())): tensor for name, tensor in self.tensors.items()
        }
        for root in roots:
            owned = target.per_rank.get(root, PerRank())
            depth = len(root)
            mine: dict[Place, Tensor] = {}
            for name, place in places.items():
                keys = tuple(map(str, place))
                if keys[:depth] == tuple(map(str, root)) and keys[depth] in owned:
                    mine[keys[depth:]] = self.tensors[name] = _own(target.tensors.get(name), name, kinds[name], source)
            self._leaves[root] = _nest(owned, mine)

    def put(self) -> None:
        """Change the state, when all tensors are filled."""
        _put(self._state, self._plain, self._leaves)


def _empty(kind: tuple[torch.Size, torch.dtype]) -> Tensor:
    return torch.empty(kind[0], dtype=kind[1])


def _own(there: Tensor | None, name: str, kind: tuple[torch.Size, torch.dtype], source: str) -> Tensor:
    """The part of a PerRank's tensor that is filled: of a distributed one only this rank's."""
    if there is None or not is_shard(there):
        return _empty(kind)
    _require_shape(source, name, kind[0], there)
    return there


def _nest(owned: PerRank, tensors: dict[Place, Tensor]) -> PerRank:
    """A PerRank of these tensors; a name that was held and has nothing in the checkpoint has nothing."""
    nest = PerRank({name: {} for name in owned})
    for place, tensor in tensors.items():
        level: Any = nest
        for key in place[:-1]:
            level = level.setdefault(key, {})
        level[place[-1]] = tensor
    return nest


def _require(target: Tree, plain: Any, kinds: Kinds, source: str) -> None:
    """Raise ValueError where the checkpoint is of other optimizers, or cannot fill the state's tensors."""
    ours, theirs = target.plain.get(OPTIMIZERS), plain.get(OPTIMIZERS)
    if ours and theirs and not _agree(ours, theirs):
        raise ValueError(
            f"{source} has the state of {_named(theirs)}, and this program has {_named(ours)}; give it those, or other "
            '`checkpoints`. Checkpoints(folder, generation=0).load_newest({"model": model.state_dict()}) loads the '
            "weights alone"
        )
    common = target.common()
    if missing := [name for name in common if name not in kinds]:
        raise ValueError(f"{source} lacks {some(missing)}; it is of another model or optimizer")
    for name in common:
        _require_shape(source, name, kinds[name][0], target.tensors[name])


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
            f"{source} holds {name} of shape {tuple(held)}, not {tuple(target.shape)}; it is of another model or "
            "optimizer"
        )


def _put(state: State, plain: Any, leaves: dict[Place, object]) -> None:
    loaded = rebuild(plain, leaves)
    state.clear()
    state.update(loaded)


def _newest_first(storage: Storage, unread: list[str]) -> list[tuple[Mark, Folder]]:
    try:
        return list(reversed(storage.found()))
    except StorageError as error:
        unread.append(f"{error.filename} cannot be read ({error.strerror})")
        return []


@contextlib.contextmanager
def _passing_over(storage: Storage, folder: Folder, say: Callable[[str], None], unread: list[str]) -> Iterator[None]:
    """Go on where a checkpoint is of no use: renamed where its bytes prove to be wrong, else noted in `unread`."""
    try:
        yield
    except MemoryError:
        # Nothing is wrong with the checkpoint, and there is no more room for the one before.
        raise
    except Corrupt as error:
        say(f"skipping {folder}: it is torn or corrupt ({reason(error)}); trying the one before it")
        set_aside(folder)
    # The disk's, the network's, the device's or this release's trouble: the bytes may be right.
    except Exception as error:
        unread.append(f"{folder} cannot be read ({reason(error)})")
        say(f"skipping {folder}: it cannot be read ({reason(error)}); trying the one before it")


def _require_read(unread: list[str], ranks: Peers) -> None:
    """Raise Unreadable on all ranks where rank 0 has passed over what may be whole, and found nothing else."""
    if told := ranks.from_rank_0(unread):
        raise Unreadable(
            f"{told[0]}, and there is no older checkpoint to go on from; training does not begin anew while there is "
            "one that may be whole: start again when it can be read, or move it away"
        )
