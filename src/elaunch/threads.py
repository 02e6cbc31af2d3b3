"""The threads of a worker: which of them are elaunch's own, and the stacks of all of them as text.

The agent (from outside, with py-spy) and the worker (by itself) show stacks. Both use the same rule: threads that only
listen to the agent are left out, and other threads of elaunch's come last.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Sequence
from types import FrameType

OWN = "elaunch's own"
# Where elaunch's threads begin in a worker. Its folder may be a link to a folder of another name.
_BEGINS = re.compile(r"/elaunch/(?:agent/forkserver/collectives\.py|trainer/(?:\w+/)*\w+\.py)$")
# A thread there waits for the agent, or writes these stacks.
_LISTENS = re.compile(r"/elaunch/(?:agent/forkserver/collectives|trainer/link|threads)\.py$")
_PYTHONS = ("/threading.py", "/concurrent/futures/thread.py")
_FRAMES_MAX = 100


def is_own(files: Sequence[str]) -> bool:
    """Whether elaunch has started a thread with frames in these files, innermost first. Not for a main thread."""
    return bool(_BEGINS.search(next((file for file in reversed(files) if not file.endswith(_PYTHONS)), "")))


def only_listens(files: Sequence[str]) -> bool:
    """Whether elaunch has started the thread, and it only waits for the agent. Not for a main thread."""
    return is_own(files) and bool(_LISTENS.search(files[0]))


def stacks_text() -> str:
    """The stacks of this process's threads: the main thread first. It reads no file: a disk may be why they hang."""
    main, found = threading.main_thread().ident, []
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        lines = _lines(frame)
        files = [file for file, _ in lines]
        if ident != main and only_listens(files):
            continue
        own = ident != main and is_own(files)
        head = f"thread {names.get(ident, f'of id {ident}')}{f' ({OWN})' if own else ''}, most recent call first:"
        found.append((own, ident != main, "\n".join([head, *(line for _, line in lines)])))
    return "\n".join(text for *_, text in sorted(found, key=lambda each: each[:2])) + "\n"


def _lines(frame: FrameType | None) -> list[tuple[str, str]]:
    """Each frame's file and its line of the text, innermost first, without the middle of a deep recursion."""
    found = []
    while frame is not None:
        file = frame.f_code.co_filename
        found.append((file, f'  File "{file}", line {frame.f_lineno} in {frame.f_code.co_name}'))
        frame = frame.f_back
    if len(found) > _FRAMES_MAX:
        found[_FRAMES_MAX:-1] = [("", f"  … {len(found) - _FRAMES_MAX - 1} more frames")]
    return found
