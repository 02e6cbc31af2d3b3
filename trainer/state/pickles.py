"""Rejects pickles that nest too deeply, as in files written by torch.save, before anything loads them.

`torch.load(weights_only=True)` runs no code, but it hashes a tuple that is a key. Python does that recursively without
a limit: some 100,000 nested tuples overflow the stack, and a few, each of which holds the next one twice, take forever.
So the opcodes of a pickle are scanned here first, without executing them.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import IO, Any, NoReturn

import torch

DEPTH_MAX = 500
_ZIP = b"PK\x03\x04"
# With so few tuples of two or more items, and so few bytes, nothing can take long.
_FEW_TUPLES, _SHORT_BYTES = 20, 2000
_PAIRS = (pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE)
# The opcodes that torch.save, DCP and `packing` write.
_KNOWN = """
    ADDITEMS APPEND APPENDS BINBYTES BINFLOAT BINGET BININT BININT1 BININT2 BINPERSID BINPUT BINUNICODE BINUNICODE8
    BUILD EMPTY_DICT EMPTY_LIST EMPTY_SET EMPTY_TUPLE FRAME GLOBAL LONG1 LONG_BINGET LONG_BINPUT MARK MEMOIZE NEWFALSE
    NEWOBJ NEWTRUE NONE PROTO REDUCE SETITEM SETITEMS SHORT_BINBYTES SHORT_BINSTRING SHORT_BINUNICODE STACK_GLOBAL STOP
    TUPLE TUPLE1 TUPLE2 TUPLE3
"""
# A value on pickle's stack: how deep tuples nest in it, and how many values they hold in all.
_Nested = tuple[int, int]


def require_shallow(file: IO[bytes]) -> None:
    """Raise pickle.UnpicklingError if torch.save (1.6 or later) did not write `file`, or it nests too deeply.

    The file is read from its current position, which is restored. Raises RuntimeError as torch does.
    """
    start = file.tell()
    is_zip = file.read(len(_ZIP)) == _ZIP
    file.seek(start)
    if is_zip:
        # With torch's own reader: another one could find another file in the same archive.
        reader: Any = torch._C.PyTorchFileReader(file)
        content: bytes = reader.get_record("data.pkl")
        if len(content) > _SHORT_BYTES or sum(map(content.count, _PAIRS)) > _FEW_TUPLES:
            scan(content)
    else:
        raise pickle.UnpicklingError("it is not a file that torch.save wrote")
    file.seek(start)


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


def scan(content: bytes | bytearray) -> None:
    """Raise pickle.UnpicklingError if `content` nests too deeply, or is not one pickle."""
    try:
        _scan(content)
    except (IndexError, KeyError, ValueError) as error:
        raise pickle.UnpicklingError("it is not a pickle, or is truncated") from error


def _scan(content: bytes | bytearray) -> None:
    stack: list[_Nested] = []
    marks: list[int] = []
    memo: dict[int, _Nested] = {}
    known, size_max = set(_KNOWN.split()), len(content)
    file = io.BytesIO(content)
    argument: Any
    for op, argument, _ in pickletools.genops(file):
        name = op.name
        if name not in known:
            raise pickle.UnpicklingError(f"it has the opcode {name}, which no checkpoint has")
        if name == "MARK":
            marks.append(len(stack))
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name.endswith("BINPUT"):
            # pickle's memo is an array as long as the largest index.
            if argument > size_max:
                raise KeyError(argument)
            memo[argument] = stack[-1]
        elif name.endswith("BINGET"):
            stack.append(memo[argument])
        elif name.startswith("TUPLE"):
            first = len(stack) - len(op.stack_before) if name != "TUPLE" else marks.pop()
            if first < 0:
                raise IndexError(first)
            stack[first:] = [_tuple_of(stack[first:], size_max)]
        else:
            taken = [each.name for each in op.stack_before]
            if "mark" in taken:
                del stack[marks.pop() :]
                taken = taken[: taken.index("mark")]
            if len(stack) < len(taken):
                raise IndexError(name)
            del stack[len(stack) - len(taken) :]
            stack += [(0, 0)] * len(op.stack_after)
    if file.read(1):
        raise ValueError("trailing data")


def _tuple_of(items: list[_Nested], size_max: int) -> _Nested:
    depth = max((depth for depth, _ in items), default=0)
    size = len(items) + sum(size for _, size in items)
    if depth >= DEPTH_MAX:
        _refuse_depth()
    if size > size_max:
        raise pickle.UnpicklingError("it holds the same values in too many places")
    return depth + 1, size


def _refuse_depth() -> NoReturn:
    raise pickle.UnpicklingError(f"it nests more than {DEPTH_MAX} deep")
