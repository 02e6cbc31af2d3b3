"""Reads a pickle of records as data: nothing in it is imported, called or given a state.

DCP's `.metadata` is a pickle, and whoever may write the folder may write any other in its place. The `pickle` module
would let it set attributes of whatever it may name, so that a few harmless classes are enough to run code. This reader
has the few instructions that a pickle of plain records needs (protocols 2 to 5). What it names becomes a `Name`, and
what it makes becomes a `PickledRecord`. `dcp_records` copies the fields out, checks them, and makes torch's records.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

# Instructions work on the ends of a stack. A writer puts a thousand things there before it empties it.
_STACK_MAX = 100_000
_MARK = object()


@dataclass(frozen=True)
class Name:
    """A class or a function that the pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, slots=True)
class PickledRecord:
    """An instance of the class `name`; `args` are those that it was made of, and `state` is what it was given then.

    `made` is for the reader's use: what it has made of the record.
    """

    name: Name
    args: tuple[Any, ...]
    state: Any = None
    made: Any = None


def parse(content: bytes) -> Any:
    """The value that the pickle describes, with `Name` and `PickledRecord` in place of classes and instances.

    Dictionaries have texts and records as keys. Raises pickle.UnpicklingError where it has anything else in it.
    """
    try:
        return _Machine(content).run()
    # A pickle that ends too early, takes what is not there, or has text that is none.
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        raise pickle.UnpicklingError("it is no pickle, or a torn one") from error


def _refuse(what: str) -> NoReturn:
    raise pickle.UnpicklingError(f"it {what}, which has no place in a checkpoint")


class _Machine:
    def __init__(self, content: bytes) -> None:
        self.content = content
        self.at = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        content, stack = self.content, self.stack
        steps = _STEPS
        while True:
            code = content[self.at]
            self.at += 1
            if code == _STOP:
                (value,) = stack
                return value
            step = steps[code]
            if step is None:
                _refuse(f"has the instruction 0x{code:02x} of pickle")
            step(self)
            if len(stack) > _STACK_MAX:
                _refuse(f"has more than {_STACK_MAX} values in a row")

    def take(self, length: int) -> bytes:
        found = self.content[self.at : self.at + length]
        if len(found) != length:
            raise IndexError(length)
        self.at += length
        return found

    def number(self, length: int) -> int:
        return int.from_bytes(self.take(length), "little")

    def line(self) -> str:
        end = self.content.index(b"\n", self.at)
        found = self.content[self.at : end].decode("ascii")
        self.at = end + 1
        return found

    def since_mark(self) -> list[Any]:
        stack = self.stack
        # From the end: what is after the last mark.
        first = len(stack) - 1
        while stack[first] is not _MARK:
            first -= 1
            if first < 0:
                raise IndexError(first)
        found = stack[first + 1 :]
        del stack[first:]
        return found


def _push(value: Any) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        machine.stack.append(value)

    return step


def _skip(length: int) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        machine.take(length)

    return step


def _whole_number(length: int) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        machine.stack.append(machine.number(length))

    return step


def _signed(machine: _Machine) -> None:
    machine.stack.append(int.from_bytes(machine.take(4), "little", signed=True))


def _long(machine: _Machine) -> None:
    length = machine.number(1)
    if length > 9:
        _refuse(f"has a number of {length} bytes")
    machine.stack.append(int.from_bytes(machine.take(length), "little", signed=True))


def _text(length: int) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        machine.stack.append(machine.take(machine.number(length)).decode("utf-8", "surrogatepass"))

    return step


def _empty_list(machine: _Machine) -> None:
    machine.stack.append([])


def _empty_dict(machine: _Machine) -> None:
    machine.stack.append({})


def _tuple(length: int) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        stack = machine.stack
        if len(stack) < length:
            raise IndexError(length)
        items = tuple(stack[-length:])
        del stack[-length:]
        stack.append(_flat(items))

    return step


def _marked_tuple(machine: _Machine) -> None:
    machine.stack.append(_flat(tuple(machine.since_mark())))


def _flat(items: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same; what is in a tuple in it is no tuple with anything in it."""
    for item in items:
        if type(item) is tuple:
            for inner in item:
                if type(inner) is tuple and inner:
                    _refuse("nests tuples more than two deep")
    return items


def _mark(machine: _Machine) -> None:
    machine.stack.append(_MARK)


def _append(machine: _Machine) -> None:
    value = machine.stack.pop()
    _extend(machine.stack[-1], [value])


def _appends(machine: _Machine) -> None:
    values = machine.since_mark()
    _extend(machine.stack[-1], values)


def _extend(target: Any, values: list[Any]) -> None:
    if type(target) is not list:
        _refuse(f"appends to a {type(target).__name__}")
    if any(type(value) not in (str, PickledRecord) for value in values):
        _refuse("has a list of what are neither texts nor records")
    target.extend(values)


def _set_item(machine: _Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _update(machine.stack[-1], [key], [value])


def _set_items(machine: _Machine) -> None:
    values = machine.since_mark()
    _update(machine.stack[-1], values[::2], values[1::2])


def _update(target: Any, keys: list[Any], values: list[Any]) -> None:
    if type(target) is not dict:
        _refuse(f"sets items of a {type(target).__name__}")
    # The hash of a text or a record goes no deeper.
    if any(type(key) not in (str, PickledRecord) for key in keys):
        _refuse("has a key that is neither a text nor a record")
    target.update(zip(keys, values, strict=True))


def _memoize(machine: _Machine) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _put(length: int) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        machine.memo[machine.number(length)] = machine.stack[-1]

    return step


def _get(length: int) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        machine.stack.append(machine.memo[machine.number(length)])

    return step


def _get_short(machine: _Machine) -> None:
    machine.stack.append(machine.memo[machine.content[machine.at]])
    machine.at += 1


def _global(machine: _Machine) -> None:
    module, name = machine.line(), machine.line()
    machine.stack.append(Name(module, name))


def _stack_global(machine: _Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    if type(name) is not str or type(module) is not str:
        _refuse("names what is no text")
    machine.stack.append(Name(module, name))


def _make(machine: _Machine) -> None:
    """Both a call and a new instance: nothing is called, the arguments are kept."""
    args, name = machine.stack.pop(), machine.stack.pop()
    if type(name) is not Name:
        _refuse(f"calls a {type(name).__name__}")
    if type(args) is not tuple:
        _refuse(f"gives {name} a {type(args).__name__} for arguments")
    machine.stack.append(PickledRecord(name, args))


def _build(machine: _Machine) -> None:
    state = machine.stack.pop()
    record = machine.stack[-1]
    if type(record) is not PickledRecord:
        _refuse(f"gives a state to {record if type(record) is Name else type(record).__name__}")
    if record.state is not None:
        _refuse(f"gives a {record.name} two states")
    record.state = state


_STOP = pickle.STOP[0]
_TABLE: dict[bytes, Callable[[_Machine], None]] = {
    pickle.PROTO: _skip(1),
    pickle.FRAME: _skip(8),
    pickle.MARK: _mark,
    pickle.NONE: _push(None),
    pickle.NEWTRUE: _push(True),
    pickle.NEWFALSE: _push(False),
    pickle.BININT: _signed,
    pickle.BININT1: _whole_number(1),
    pickle.BININT2: _whole_number(2),
    pickle.LONG1: _long,
    pickle.BINUNICODE: _text(4),
    pickle.SHORT_BINUNICODE: _text(1),
    pickle.BINUNICODE8: _text(8),
    pickle.EMPTY_TUPLE: _push(()),
    pickle.TUPLE1: _tuple(1),
    pickle.TUPLE2: _tuple(2),
    pickle.TUPLE3: _tuple(3),
    pickle.TUPLE: _marked_tuple,
    pickle.EMPTY_LIST: _empty_list,
    pickle.APPEND: _append,
    pickle.APPENDS: _appends,
    pickle.EMPTY_DICT: _empty_dict,
    pickle.SETITEM: _set_item,
    pickle.SETITEMS: _set_items,
    pickle.MEMOIZE: _memoize,
    pickle.BINPUT: _put(1),
    pickle.LONG_BINPUT: _put(4),
    pickle.BINGET: _get_short,
    pickle.LONG_BINGET: _get(4),
    pickle.GLOBAL: _global,
    pickle.STACK_GLOBAL: _stack_global,
    pickle.REDUCE: _make,
    pickle.NEWOBJ: _make,
    pickle.BUILD: _build,
}
_STEPS = [_TABLE.get(bytes([code])) for code in range(256)]
