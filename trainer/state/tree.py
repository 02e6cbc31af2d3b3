"""A nested state as named tensors beside plain values, and back."""

from __future__ import annotations

import hashlib
import io
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]
Path = tuple[str | int, ...]

# What torch.load(weights_only=True) reads back. Exact types: numpy's float64 is a float, and is not among them.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, Counter)


class PerRank(dict[str, Any]):
    """Nested tensors of which every rank has others, by the name of what owns them: a part of the optimizer, say.

    The first level decides what is a rank's own when a state is loaded: whatever was saved below a name that the rank
    holds now, by whichever rank that was. There are tensors below and nothing else.
    """


@dataclass(frozen=True)
class Tree:
    """A state taken apart.

    `tensors` has every tensor by name, its path joined with dots, and `paths` their paths. `plain` is the nest of
    dictionaries, lists and tuples with None where a tensor or a PerRank was; `per_rank` has the paths of the latter.
    """

    tensors: dict[str, Tensor]
    paths: dict[str, Path]
    plain: Any
    per_rank: dict[Path, PerRank]

    @property
    def is_sharded(self) -> bool:
        """Whether it takes more than one rank to have all of it. The same answer on every rank."""
        return bool(self.per_rank) or any(map(is_shard, self.tensors.values()))

    def common(self) -> dict[str, Path]:
        """The paths of the tensors that every rank has, if in part only: all but those of a PerRank."""
        return {name: path for name, path in self.paths.items() if self.owner(path) is None}

    def signature(self) -> str:
        """What a plan for the state depends on: names, shapes and types, and how DTensors are spread."""
        digest = hashlib.sha256()
        for name, tensor in self.tensors.items():
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {getattr(tensor, 'placements', '')}\n".encode())
        return digest.hexdigest()

    def owner(self, path: Path) -> Path | None:
        """The path of the owner's name, for a path in a PerRank."""
        inside = (root for root in self.per_rank if path[: len(root)] == root)
        return next((path[: len(root) + 1] for root in inside), None)


def is_shard(tensor: Tensor) -> bool:
    """Whether it is a DTensor, or FSDP1's ShardedTensor; what nobody has imported, nobody has made one with."""
    for module, kind in (
        ("torch.distributed.tensor", "DTensor"),
        ("torch.distributed._shard.sharded_tensor", "ShardedTensor"),
    ):
        if module in sys.modules and isinstance(tensor, getattr(sys.modules[module], kind)):
            return True
    return False


def local_parts(tensor: Tensor) -> list[Tensor]:
    """What this rank holds of a tensor; all of it, where it is none that is spread over ranks."""
    if not is_shard(tensor):
        return [tensor.detach()]
    spread: Any = tensor
    return [spread.to_local().detach()] if hasattr(spread, "to_local") else [s.tensor for s in spread.local_shards()]


def flatten(state: Mapping[str, Any]) -> Tree:
    """Take `state` apart; its tensors are the same objects.

    Raises TypeError for a value that is neither a tensor nor plain, or is in a PerRank and no tensor, ValueError for
    two tensors of one name.
    """
    tree = Tree({}, {}, None, {})

    def visit(value: Any, path: Path, inside: bool) -> Any:
        if isinstance(value, Tensor):
            name = ".".join(map(str, path))
            if name in tree.tensors:
                raise ValueError(f"two tensors of the state are called {name}; rename one")
            tree.tensors[name], tree.paths[name] = value, path
            return None
        if isinstance(value, PerRank):
            tree.per_rank[path] = value
            for key, item in value.items():
                visit(item, (*path, key), True)
            return None
        if type(value) in (dict, OrderedDict):
            for key in value:
                if type(key) not in (str, int):
                    raise TypeError(f"{_where(path)} has the key {key!r}; keys are strings or integers")
            return {key: visit(item, (*path, key), inside) for key, item in value.items()}
        if not inside and type(value) in (list, tuple, set):
            return type(value)(visit(item, (*path, index), inside) for index, item in enumerate(value))
        if inside or type(value) not in _PLAIN:
            kinds = "tensors" if inside else "tensors and plain Python values"
            raise TypeError(f"{_where(path)} is a {type(value).__name__}; what is kept of a state is {kinds}")
        return value

    return Tree(tree.tensors, tree.paths, visit(dict(state), (), False), tree.per_rank)


def rebuild(plain: Any, leaves: Mapping[Path, object]) -> Any:
    """The nest that `plain` describes with `leaves`, tensors and PerRanks, in their places."""

    def build(value: Any, path: Path) -> Any:
        if path in leaves:
            return leaves[path]
        # Not a Counter, which is a leaf.
        if type(value) is dict:
            return {key: build(item, (*path, key)) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(build(item, (*path, index)) for index, item in enumerate(value))
        return value

    return build(plain, ())


def pack(tree: Tree) -> bytes:
    """The plain values and the places of the tensors, for `unpack`."""
    content = io.BytesIO()
    torch.save({"plain": tree.plain, "tensors": tree.common(), "per_rank": list(tree.per_rank)}, content)
    return content.getvalue()


def unpack(content: bytes | bytearray) -> tuple[Any, dict[str, Path], list[Path]]:
    """What `pack` was given: plain values, paths of tensors by name, paths of PerRanks. Runs no code from it."""
    held = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return held["plain"], held["tensors"], held["per_rank"]


def tensors_in(value: object) -> Iterator[Tensor]:
    """All tensors in nested dictionaries and lists, in their order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def tensors_sha256(tensors: Iterable[Tensor]) -> str:
    """SHA-256 over the raw bytes of the tensors, one after the other, each in row-major order."""
    digest = hashlib.sha256()
    for tensor in tensors:
        if tensor.numel():
            # Through a buffer that torch and Python share: Tensor.numpy() would need numpy.
            raw = bytearray(tensor.numel() * tensor.element_size())
            torch.frombuffer(raw, dtype=tensor.dtype).copy_(tensor.detach().flatten())
            digest.update(raw)
    return digest.hexdigest()


def some(names: Iterable[str], count: int = 3) -> str:
    """The first few of `names`, and how many there are more, for a sentence."""
    names = list(names)
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


def _where(path: Path) -> str:
    return ".".join(map(str, path)) or "the state"
