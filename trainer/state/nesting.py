"""Refuses a file of torch.save whose values nest so deeply that reading it would end the process.

`torch.load(weights_only=True)` runs no code, but it takes the hash of a tuple that is a key. Python computes that with
a call for each tuple in the tuple and no limit: some 100,000 of them overflow the stack, and a few, each of which holds
another one twice, take for ever. The pickles in the file are read here first, without making anything of them.
"""

from __future__ import annotations

import mmap
import pickle
from dataclasses import dataclass
from typing import IO, Any, NoReturn

import torch

DEPTH_MAX = 500
_ZIP = b"PK\x03\x04"
# Before torch 1.6 a file had these pickles one after the other: magic number, protocol, system, state, storages.
_PICKLES_OF_OLD = 5
# With fewer tuples than this of more than one item, nothing can take long.
_FEW_TUPLES, _SHORT_BYTES = 20, 2000
_PAIRS = (pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE)


def require_shallow(file: IO[bytes], *, old: bool = False) -> None:
    """Raise pickle.UnpicklingError if `file` nests too deeply; with `old` it may be of torch before 1.6.

    The file is read from its present place, which it has again after that. Raises RuntimeError as torch does.
    """
    start = file.tell()
    is_zip = file.read(len(_ZIP)) == _ZIP
    file.seek(start)
    if is_zip:
        # By torch's own reader: another one could find another file in the same archive.
        reader: Any = torch._C.PyTorchFileReader(file)
        content: bytes = reader.get_record("data.pkl")
        file.seek(start)
        if len(content) > _SHORT_BYTES or sum(map(content.count, _PAIRS)) > _FEW_TUPLES:
            scan(content, 0)
        return
    if not old:
        raise pickle.UnpicklingError("it is no file of torch.save")
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        at = 0
        for _ in range(_PICKLES_OF_OLD):
            at = scan(mapped, at)


def require_shallow_value(value: object, nodes_max: int) -> None:
    """Raise pickle.UnpicklingError if dictionaries, lists and tuples nest too deeply, or hold too many values in all.

    A value that is in several places counts in each of them.
    """
    open_ones, nodes = [(value, 0)], 0
    while open_ones:
        found, depth = open_ones.pop()
        if depth > DEPTH_MAX:
            _refuse_depth()
        items = found.values() if isinstance(found, dict) else found if isinstance(found, list | tuple) else ()
        nodes += len(items)
        if nodes > nodes_max:
            raise pickle.UnpicklingError("it holds the same values in too many places")
        open_ones += [(item, depth + 1) for item in items if isinstance(item, dict | list | tuple)]


@dataclass(frozen=True, slots=True)
class _Tuple:
    """How deep tuples nest in a tuple, and how many values they hold in all."""

    depth: int
    size: int


def scan(content: bytes | mmap.mmap, at: int) -> int:
    """The end of the pickle that begins at `at`. Raises pickle.UnpicklingError if it nests too deeply, or is none."""
    try:
        return _scan(content, at)
    except (IndexError, KeyError) as error:
        raise pickle.UnpicklingError("it is no pickle, or a torn one") from error


def _scan(content: bytes | mmap.mmap, at: int) -> int:
    # The values on pickle's stack. Only for a tuple does it matter what the value is.
    stack: list[_Tuple | None] = []
    marks: list[int] = []
    memo: dict[int, _Tuple | None] = {}
    size_max = len(content)
    while True:
        code = content[at]
        at += 1
        if code in _PUSHES:
            at += _PUSHES[code]
            stack.append(None)
        elif code in _TEXTS:
            width = _TEXTS[code]
            at += width + int.from_bytes(content[at : at + width], "little")
            stack.append(None)
        elif code in _MEMO_PUTS:
            width = _MEMO_PUTS[code]
            memo[int.from_bytes(content[at : at + width], "little")] = stack[-1]
            at += width
        elif code in _MEMO_GETS:
            width = _MEMO_GETS[code]
            stack.append(memo[int.from_bytes(content[at : at + width], "little")])
            at += width
        elif code in _TUPLES:
            first = len(stack) - _TUPLES[code] if _TUPLES[code] else marks.pop()
            if first < 0:
                raise IndexError(first)
            stack[first:] = [_tuple_of(stack[first:], size_max)]
        elif code == _MARK:
            marks.append(len(stack))
        elif code in _UP_TO_MARK:
            del stack[marks.pop() :]
        elif code in _POPS:
            del stack[len(stack) - _POPS[code] :]
        elif code in _REPLACES:
            del stack[len(stack) - _REPLACES[code] :]
            stack.append(None)
        elif code == _GLOBAL:
            at = content.find(b"\n", content.find(b"\n", at) + 1) + 1
            if not at:
                raise IndexError(at)
            stack.append(None)
        elif code == _PROTO:
            at += 1
        elif code == _STOP:
            return at
        else:
            raise pickle.UnpicklingError(f"it has the instruction 0x{code:02x}, which torch.save does not write")


def _tuple_of(items: list[_Tuple | None], size_max: int) -> _Tuple:
    depth, size = 0, len(items)
    for item in items:
        if item is not None:
            depth, size = max(depth, item.depth), size + item.size
    if depth >= DEPTH_MAX:
        _refuse_depth()
    if size > size_max:
        raise pickle.UnpicklingError("it holds the same values in too many places")
    return _Tuple(depth + 1, size)


def _refuse_depth() -> NoReturn:
    raise pickle.UnpicklingError(f"it nests more than {DEPTH_MAX} deep")


def _codes(table: dict[bytes, int]) -> dict[int, int]:
    return {code[0]: number for code, number in table.items()}


_MARK, _GLOBAL, _PROTO, _STOP = (code[0] for code in (pickle.MARK, pickle.GLOBAL, pickle.PROTO, pickle.STOP))
# The bytes behind the instruction.
_PUSHES = _codes(
    {
        pickle.NONE: 0,
        pickle.NEWTRUE: 0,
        pickle.NEWFALSE: 0,
        pickle.BININT: 4,
        pickle.BININT1: 1,
        pickle.BININT2: 2,
        pickle.BINFLOAT: 8,
        pickle.EMPTY_LIST: 0,
        pickle.EMPTY_DICT: 0,
        pickle.EMPTY_SET: 0,
        pickle.EMPTY_TUPLE: 0,
    }
)
# The width of the length behind the instruction.
_TEXTS = _codes(
    {pickle.BINUNICODE: 4, pickle.SHORT_BINSTRING: 1, pickle.BINBYTES: 4, pickle.SHORT_BINBYTES: 1, pickle.LONG1: 1}
)
_MEMO_PUTS = _codes({pickle.BINPUT: 1, pickle.LONG_BINPUT: 4})
_MEMO_GETS = _codes({pickle.BINGET: 1, pickle.LONG_BINGET: 4})
# How many items; 0 is all since the mark.
_TUPLES = _codes({pickle.TUPLE1: 1, pickle.TUPLE2: 2, pickle.TUPLE3: 3, pickle.TUPLE: 0})
_UP_TO_MARK = _codes({pickle.APPENDS: 0, pickle.SETITEMS: 0, pickle.ADDITEMS: 0})
# How many values go from the stack.
_POPS = _codes({pickle.APPEND: 1, pickle.SETITEM: 2, pickle.BUILD: 1})
_REPLACES = _codes({pickle.REDUCE: 2, pickle.NEWOBJ: 2, pickle.BINPERSID: 1})
