"""Gives a paused interpreter another program: Python runs it as if its command line had named it.

Python keeps the program's name in its configuration (PyConfig, Include/cpython/initconfig.h) from its start until it
runs the program, after sitecustomize. The places are found by what they hold, so that no version's layout is assumed.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from typing import Any

from elaunch.rendezvous.job_spec import Program, ProgramKind

# The programs that a fork server names on its command line before it has any.
SCRIPT = "/elaunch/no/program/yet"
MODULE = "elaunch_no_program_yet"
_WORDS = 128
_WORD = struct.Struct("=Q")


class Unknown(Exception):
    """This Python does not show where it keeps its program; the text says what is missing."""


def without_program(program: Program) -> Program:
    """The program in place of which `set_program` can set any other of its kind."""
    target = MODULE if program.kind is ProgramKind.MODULE else SCRIPT
    return Program(program.kind, target, (), program.interpreter, program.interpreter_options)


def places(program: Program) -> list[int]:
    """The addresses of the pointers to the program's name. Raises Unknown."""
    try:
        config = ctypes.pythonapi._Py_GetConfig
    except AttributeError:
        raise Unknown("it has no _Py_GetConfig") from None
    config.restype = ctypes.c_void_p
    start = config()
    name = program.target.encode("utf-32-le" if sys.byteorder == "little" else "utf-32-be")
    found: list[int] = []
    memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for at in range(start, start + _WORDS * _WORD.size, _WORD.size):
            (pointer,) = _WORD.unpack(os.pread(memory, _WORD.size, at))
            found += _pointers_to(memory, at, pointer, name)
    except OSError as error:
        raise Unknown(f"its memory cannot be read ({error.strerror})") from error
    finally:
        os.close(memory)
    # The name of the program; of a script also the first of the arguments.
    if len(found) != (1 if program.kind is ProgramKind.MODULE else 2):
        raise Unknown(f"the program's name is in {len(found)} places of its configuration")
    return found


def _pointers_to(memory: int, at: int, pointer: int, name: bytes) -> list[int]:
    """`at` if the text at `pointer` is `name`; the first item if a list of texts is there that begins with it."""
    if _reads(memory, pointer, name):
        return [at]
    first = _read(memory, pointer, _WORD.size)
    if len(first) == _WORD.size and _reads(memory, _WORD.unpack(first)[0], name):
        return [pointer]
    return []


def _reads(memory: int, pointer: int, name: bytes) -> bool:
    end = bytes(ctypes.sizeof(ctypes.c_wchar))
    return _read(memory, pointer, len(name) + len(end)) == name + end


def _read(memory: int, pointer: int, count: int) -> bytes:
    try:
        return os.pread(memory, count, pointer)
    except (OSError, OverflowError):
        # No pointer.
        return b""


def set_program(program: Program, known: list[int]) -> None:
    """Have Python run `program`, at the places that were found for another one of its kind."""
    text = program.target
    # Python makes the script's path absolute when it starts, but not sys.argv[0].
    names = [absolute(text), text] if program.kind is ProgramKind.SCRIPT else [text]
    for at, name in zip(_sorted(known), names, strict=True):
        ctypes.c_void_p.from_address(at).value = _copied(name)
    first = "-m" if program.kind is ProgramKind.MODULE else text
    sys.argv[:] = [first, *program.args]
    sys.orig_argv[:] = program.argv


def _sorted(known: list[int]) -> list[int]:
    """The configuration's own pointer first, then that in its list of arguments."""
    config: Any = ctypes.pythonapi._Py_GetConfig
    start = config()
    return sorted(known, key=lambda at: not start <= at < start + _WORDS * _WORD.size)


def absolute(path: str) -> str:
    """The path as Python writes it into `__file__` (CPython, _Py_abspath)."""
    if path.startswith("/"):
        return path
    try:
        place = os.getcwd()  # noqa: PTH109
    except OSError:
        return path
    return place if path in ("", ".") else f"{place}/{path}"


def _copied(text: str) -> int:
    """A copy of the text that Python may free (PyMem_RawFree)."""
    allocate: Any = ctypes.pythonapi.PyMem_RawMalloc
    allocate.restype, allocate.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    buffer = ctypes.create_unicode_buffer(text)
    address: int = allocate(ctypes.sizeof(buffer))
    ctypes.memmove(address, buffer, ctypes.sizeof(buffer))
    return address
