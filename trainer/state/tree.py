"""A nested state as named tensors and plain values, and back; digests of tensors."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]
# The entry of a state with the classes and group sizes of its optimizers.
OPTIMIZERS = "optimizers_are"
Path = tuple[str | int, ...]

# Exact types: numpy's float64 is a float, but not plain.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, Counter)


class PerRank(dict[str, Any]):
    """Nested tensors that differ between ranks, by the name of their owner; for example the state of a parameter.

    When a state is loaded, a rank gets everything that any rank has saved under a name that it holds now. Below the
    names there are only tensors.
    """


@dataclass(frozen=True)
class Tree:
    """A disassembled state.

    `tensors` has every tensor by name, which is its path joined with dots; `paths` has the paths. `plain` is the nest
    of dictionaries, lists and tuples, with None in place of each tensor and PerRank. `per_rank` has the PerRanks by
    path.
    """

    tensors: dict[str, Tensor]
    paths: dict[str, Path]
    plain: Any
    per_rank: dict[Path, PerRank]

    @property
    def is_sharded(self) -> bool:
        """Whether no single rank has all of it. It is the same on every rank."""
        return bool(self.per_rank) or any(map(is_shard, self.tensors.values()))

    def common(self) -> dict[str, Path]:
        """The paths of the tensors of which every rank has at least a part: all except those in a PerRank."""
        return {name: path for name, path in self.paths.items() if self.owner(path) is None}

    def signature(self) -> str:
        """A digest of what a plan depends on: names, shapes, types, and how DTensors are distributed."""
        digest = hashlib.sha256()
        for name, tensor in self.tensors.items():
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {getattr(tensor, 'placements', '')}\n".encode())
        return digest.hexdigest()

    def owner(self, path: Path) -> Path | None:
        """For a path in a PerRank: the path of the owner's name."""
        inside = (root for root in self.per_rank if path[: len(root)] == root)
        return next((path[: len(root) + 1] for root in inside), None)


def is_shard(tensor: Tensor) -> bool:
    """Whether it is a DTensor or FSDP1's ShardedTensor. If the module is not imported, no such tensor exists."""
    for module, kind in (
        ("torch.distributed.tensor", "DTensor"),
        ("torch.distributed._shard.sharded_tensor", "ShardedTensor"),
    ):
        if module in sys.modules and isinstance(tensor, getattr(sys.modules[module], kind)):
            return True
    return False


def local_parts(tensor: Tensor) -> list[Tensor]:
    """This rank's part of a tensor; the whole tensor if it is not distributed."""
    if not is_shard(tensor):
        return [tensor.detach()]
    spread: Any = tensor
    return [spread.to_local().detach()] if hasattr(spread, "to_local") else [s.tensor for s in spread.local_shards()]


def flatten(state: Mapping[str, Any], leaf: type = Tensor) -> Tree:
    """Disassemble `state`. The tensors are the same objects; `leaf` is the type of what stands for them.

    A numpy number as a key becomes the equal Python number. Raises TypeError for a value that is neither a
    tensor nor plain, and for a value in a PerRank that is no tensor; ValueError for two tensors of one name.
    """
    tree = Tree({}, {}, None, {})

    def visit(value: Any, path: Path, inside: bool) -> Any:
        if isinstance(value, leaf):
            tensor: Any = value
            name = ".".join(map(str, path))
            if name in tree.tensors:
                raise ValueError(f"two tensors of the state are called {name}; rename one")
            tree.tensors[name], tree.paths[name] = tensor, path
            return None
        if isinstance(value, PerRank):
            tree.per_rank[path] = value
            for key, item in value.items():
                visit(item, (*path, key), True)
            return None
        if type(value) in (dict, OrderedDict):
            plain = {}
            for key, item in value.items():
                name = key.item() if is_numpy_scalar(key) else key
                if type(name) not in (str, int):
                    raise TypeError(f"{_where(path)} has the key {key!r}; keys are strings or integers")
                plain[name] = visit(item, (*path, name), inside)
            return plain
        if not inside and type(value) in (list, tuple, set):
            return type(value)(visit(item, (*path, index), inside) for index, item in enumerate(value))
        if inside or not (type(value) in _PLAIN or is_numpy_scalar(value)):
            kinds = "tensors" if inside else "tensors and plain Python values"
            raise TypeError(f"{_where(path)} is a {type(value).__name__}; only {kinds} of a state are kept")
        return value

    return Tree(tree.tensors, tree.paths, visit(dict(state), (), False), tree.per_rank)


def rebuild(plain: Any, leaves: Mapping[Path, object]) -> Any:
    """The nest that `plain` describes with `leaves`, tensors and PerRanks, in their places."""

    def build(value: Any, path: Path) -> Any:
        if path in leaves:
            return leaves[path]
        # The exact type: a Counter is a leaf.
        if type(value) is dict:
            return {key: build(item, (*path, key)) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(build(item, (*path, index)) for index, item in enumerate(value))
        return value

    return build(plain, ())


def is_numpy_scalar(value: object) -> bool:
    """Whether it is a number, a date or a string of numpy's."""
    generic = getattr(sys.modules.get("numpy"), "generic", None)
    return generic is not None and isinstance(value, generic) and value.dtype.kind not in "OV"


def numpy_scalar(kind: str, content: bytes) -> Any:
    """The numpy scalar with that `dtype.str` and those bytes. Raises ValueError if there is none."""
    import numpy

    dtype = numpy.dtype(str(kind))
    if dtype.kind in "OV":
        raise ValueError(f"{kind!r:.80} is not the dtype of a scalar")
    # A copy: an empty string has no bytes to read.
    return numpy.frombuffer(content, dtype)[0] if content else dtype.type()


def cloned(value: Any, device: torch.device | None = None) -> Any:
    """A copy of nested dictionaries, lists and tuples with their tensors, on `device` if it is given."""
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, dict):
        copy = value.copy()
        for key, item in value.items():
            copy[key] = cloned(item, device)
        return copy
    if type(value) in (list, tuple):
        return type(value)(cloned(item, device) for item in value)
    return value


def put_into(
    there: Any, saved: Any, known: dict[int, tuple[Any, Any]] | None = None, spare: Collection[int] = ()
) -> Any:
    """Copy `saved` into the tensors, dictionaries, lists and sets of `there`, which a program may hold elsewhere.

    Returns `there` with the content of `saved`, or a copy of `saved` if `there` is no such object. What is in several
    places of `there`, with different contents in `saved`, stays in the first of them. Tensors in the storages at the
    addresses in `spare` are never changed. `known` has the objects visited before.
    """
    if not isinstance(saved, Tensor | dict | list | tuple | set):
        return saved
    known = {} if known is None else known
    if isinstance(there, Tensor | dict | list | set):
        _, first = known.setdefault(id(there), (there, saved))
        if first is not saved and not equal(first, saved):
            there = None
    if isinstance(saved, Tensor):
        return _filled(there, saved, spare)
    if isinstance(saved, dict):
        before = there if isinstance(there, dict) else {}
        items = {key: put_into(before.get(key), item, known, spare) for key, item in saved.items()}
        target = there if isinstance(there, dict) else saved.copy()
        target.clear()
        for key, item in items.items():
            target[key] = item
        return target
    if isinstance(saved, set):
        if not isinstance(there, set):
            return saved.copy()
        there.clear()
        there.update(saved)
        return there
    old = there if isinstance(there, list | tuple) else ()
    values = [put_into(old[n] if n < len(old) else None, item, known, spare) for n, item in enumerate(saved)]
    if isinstance(there, list) and isinstance(saved, list):
        there[:] = values
        return there
    return values if isinstance(saved, list) else tuple(values)


def _filled(there: Any, saved: Tensor, spare: Collection[int]) -> Tensor:
    if not isinstance(there, Tensor):
        return saved.detach().clone()
    try:
        if spare and there.untyped_storage().data_ptr() in spare:
            return there if torch.equal(there.cpu(), saved) else saved.detach().to(there.device, copy=True)
        if there.shape == saved.shape and there.dtype == saved.dtype:
            there.detach().copy_(saved)
        else:
            there.data = saved.detach().to(there.device, copy=True)
    except RuntimeError:
        # It cannot be written, like an expanded or an inference tensor, so no alias of it is written either.
        return saved.detach().to(there.device, copy=True)
    return there


def equal(one: Any, other: Any) -> bool:
    """Whether two nests of dictionaries, lists and tuples hold the same tensors and values; NaN equals NaN."""
    if one is other:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and _are_equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other or (one != one and other != other))


def _are_equal(one: Tensor, other: Tensor) -> bool:
    if torch.equal(one, other):
        return True
    # Here NaN equals NaN with the same bits.
    is_alike = (one.dtype, one.shape) == (other.dtype, other.shape) and one.is_floating_point()
    return is_alike and bool(one.isnan().any()) and tensors_sha256([one]) == tensors_sha256([other])


def several(part: Any) -> Sequence[Any]:
    """The objects of a part: one, several or none."""
    if part is None:
        return ()
    return part if isinstance(part, list | tuple) else (part,)


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors in nested dictionaries, lists, tuples and dataclasses, in their order, with their paths."""
    if isinstance(value, Tensor):
        yield path, value
        return
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    elif is_dataclass(value):
        items = ((field.name, getattr(value, field.name)) for field in fields(value))
    for key, item in items:
        yield from tensors_in(item, f"{path}.{key}")


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
    """The first few of `names` and the number of the others, for a sentence."""
    names = list(names)
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


def _where(path: Path) -> str:
    return ".".join(map(str, path)) or "the state"


_WORD = 8


def digests(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The sum of each tensor's bytes as 8-byte integers: any single changed bit shows.

    It runs at about memory bandwidth, on the tensor's device, which returns one number for each tensor. The
    checksum of a `region` would need all tensors in one piece of host memory.
    """
    found = dict.fromkeys(tensors, 0)
    sums: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            sums.setdefault(tensor.device, {})[name] = _sum(tensor.detach())
    for its in sums.values():
        found.update(zip(its, torch.stack([*its.values()]).tolist(), strict=True))
    return found


def _sum(tensor: Tensor) -> Tensor:
    raw = tensor.contiguous().view(-1).view(torch.uint8)
    if raw.data_ptr() % _WORD:
        raw = raw.clone()
    whole = raw.numel() // _WORD * _WORD
    total = raw[:whole].view(torch.int64).sum()
    return total if whole == raw.numel() else total + raw[whole:].sum()
