"""What a process that crashed in native code has left to read: faulthandler's stack, and the last words of C++."""

from __future__ import annotations

import re
from dataclasses import dataclass

from elaunch.threads import only_listens

# faulthandler's names of the signals that it handles (CPython, Modules/faulthandler.c).
_NAMES = {
    -4: ("Illegal instruction",),
    -6: ("Aborted",),
    -7: ("Bus error",),
    -8: ("Floating point exception", "Floating-point exception"),
    -11: ("Segmentation fault",),
}
CODES = frozenset(_NAMES)
_FATAL = "Fatal Python error: "
_CURRENT = re.compile(r"^Current thread 0x[0-9a-f]+.*\(most recent call first\):$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
_LIBRARY = re.compile(r"[/\\](site-packages|dist-packages)[/\\]|[/\\]lib[/\\]python3\.\d+[/\\]|^<")
_THROWN = re.compile(r"^terminate called after throwing an instance of '(?P<type>[^'\n]{1,200})'$", re.MULTILINE)
_WHAT = re.compile(r"^ *what\(\): +(?P<text>.+)$", re.MULTILINE)
_STACK_LINES_MAX = 200


@dataclass(frozen=True)
class Crash:
    """`frame` is the innermost frame of the user's code in the thread that crashed, empty if it ran no Python."""

    frame: str
    stack: str


def parse(text: str, code: int) -> Crash | None:
    """The last stack that faulthandler wrote into `text` for the signal `-code`."""
    start = max((text.rfind(_FATAL + name) for name in _NAMES.get(code, ())), default=-1)
    if start < 0:
        return None
    lines = text[start:].splitlines()
    # After the stacks Python 3.10 and later list the extension modules.
    end = next((i for i, line in enumerate(lines) if line.startswith("Extension modules:")), len(lines))
    stack = "\n".join(lines[: min(end, _STACK_LINES_MAX)]).rstrip()
    current = _CURRENT.search(stack)
    text = "\n\n".join(block for block in stack.split("\n\n") if not _only_listens(block))
    if current is None:
        return Crash("", text)
    own = stack[current.end() :].partition("\n\n")[0]
    frames = list(_FRAME.finditer(own))
    mine = [frame for frame in frames if not _LIBRARY.search(frame["file"])] or frames
    where = f"{mine[0]['file']}:{mine[0]['line']} in {mine[0]['function']}" if mine else ""
    return Crash(where, text)


def _only_listens(block: str) -> bool:
    """Whether it is the stack of a thread by which elaunch listens in the worker."""
    files = [frame["file"] for frame in _FRAME.finditer(block)]
    return block.startswith("Thread ") and bool(files) and only_listens(files)


def is_stack(text: str) -> bool:
    """Whether `text` is a stack as `parse` returns it."""
    return text.startswith(_FATAL)


def last_words(tail: str) -> str:
    """The C++ exception that ended a process by SIGABRT: its type and the first line of its text."""
    thrown = list(_THROWN.finditer(tail))
    if not thrown:
        return ""
    what = _WHAT.search(tail, thrown[-1].end())
    return f"{thrown[-1]['type']}: {what['text'].strip()}" if what else thrown[-1]["type"]


def shown(frame: str, words: str = "") -> str:
    """The words in brackets behind "was killed by SIGSEGV"."""
    said = [f"crashed in {frame}"] if frame else []
    if words:
        said.append(words)
    return f" ({'; '.join(said)})" if said else ""
