"""Takes the stacks of processes with py-spy, at any time and from outside: they need not be prepared for it.

py-spy reads the memory of a process without pausing it (`--nonblocking`), so healthy training is not disturbed, and
a process that was stopped by SIGSTOP can be read too. It takes 10 to 30 ms for each process.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from elaunch.agent import linux
from elaunch.agent.diagnosis.stack_groups import Frame, Stack, ThreadStack
from elaunch.agent.linux import in_threads
from elaunch.rendezvous.format import plain
from elaunch.strict_json import parse_json
from elaunch.threads import is_own, only_listens

# Where the kernel denies it: another user, or Yama's kernel.yama.ptrace_scope of 2 or 3.
_DENIED = (
    "this process may not read it: run elaunch as the workers' user with kernel.yama.ptrace_scope 0 or 1, or give"
    " it the capability SYS_PTRACE (docker run --cap-add SYS_PTRACE; in a pod: securityContext.capabilities)"
)
TOOL = "py-spy"
NO_TOOL = f"{TOOL} is not installed; `pip install {TOOL}` installs it"
_LATE = f"{TOOL} did not finish in time"
_TAKE_S = 10.0
# A py-spy that is killed at the end of that time has this long to exit.
_KILL_S = 0.5
# A stack that is just changing may be read wrongly; a retry reads it right.
_TRIES = 3
_CHILDREN_MAX = 16
_THREADS_MAX = 256
_FRAMES_MAX = 200
_TEXT_MAX = 300
_OUTPUT_BYTES_MAX = 8 << 20

# The first argument of these system calls is a file descriptor.
_OF_A_FILE = {
    *("read", "write", "readv", "writev", "pread64", "pwrite64", "fsync", "fdatasync", "flock", "fcntl"),
    *("connect", "accept", "accept4", "sendto", "recvfrom", "sendmsg", "recvmsg"),
}


def take(pids: Mapping[int, int], *, within_s: float = _TAKE_S) -> tuple[Stack, ...]:
    """The stacks of these processes (by rank) and of their children, by rank, at most half a second after `within_s`.

    It never raises: a stack that cannot be taken has its `trouble`. It waits for py-spy: the agent's loop calls it in a
    thread.
    """
    if not pids:
        return ()
    tool, until_s = find_tool(), time.monotonic() + within_s
    tasks = {rank: partial(_take_tree, tool, rank, pid, until_s) for rank, pid in sorted(pids.items())}
    # A py-spy that waits for a process in an uninterruptible sleep does not exit even on SIGKILL.
    found = in_threads(tasks, within_s + _KILL_S, "elaunch-stacks")
    return tuple(
        found.get(rank) or Stack(rank, pids[rank], state=linux.state(pids[rank]), trouble=_LATE) for rank in tasks
    )


def find_tool() -> str | None:
    """Where py-spy is: beside this interpreter, since a virtual environment need not be on the PATH; or there."""
    beside = Path(sys.executable).with_name(TOOL)
    return str(beside) if beside.is_file() else shutil.which(TOOL)


def _take_tree(tool: str | None, rank: int, pid: int, until_s: float) -> Stack:
    stack = _take_one(tool, rank, pid, until_s)
    children = []
    for child in linux.children(pid)[:_CHILDREN_MAX]:
        taken = _take_one(tool, rank, child, until_s)
        # A shell or a compiler among the children has no Python stack to show.
        if taken.threads:
            children.append(taken)
    return replace(stack, children=tuple(children))


def _take_one(tool: str | None, rank: int, pid: int, until_s: float) -> Stack:
    state = linux.state(pid)
    if state in ("", "Z", "X"):
        return Stack(rank, pid, state=state, trouble="the process is gone")
    if tool is None:
        return Stack(rank, pid, state=state, trouble=NO_TOOL)
    for _ in range(_TRIES):
        items, trouble = _dump(tool, pid, until_s)
        if items or time.monotonic() >= until_s:
            break
    threads = tuple(item for item in items if item.is_main or not only_listens(_files(item.frames)))
    if any(thread.is_main and thread.is_active for thread in threads):
        again, _ = _dump(tool, pid, until_s, "--locals")
        main = next((each for each in again if each.is_main), None)
        # What could not be read may have changed. elaunch's own thread takes the GIL to reply: a sample at that moment
        # does not show what the main thread is doing.
        values, held = (main.values, main.holds_gil) if main else (f"unread at {time.monotonic()}", False)
        threads = tuple(
            replace(each, values=values, holds_gil=each.holds_gil or held) if each.is_main else each for each in threads
        )
    return Stack(rank, pid, threads, linux.state(pid), trouble)


def _dump(tool: str, pid: int, until_s: float, *more: str) -> tuple[list[ThreadStack], str]:
    """The process's threads, or the trouble."""
    command = [tool, "dump", "--json", "--nonblocking", "--full-filenames", *more, "--pid", str(pid)]
    # py-spy prints tens of frames of its own where this is set.
    env = {"RUST_BACKTRACE": "0", "PATH": "/usr/bin:/bin"}
    try:
        left_s = max(until_s - time.monotonic(), 0.0)
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=left_s, env=env, check=False
        )
    except subprocess.TimeoutExpired:
        return [], _LATE
    except OSError as error:
        return [], f"{TOOL} cannot be started ({error.strerror})"
    if ended.returncode:
        return [], _trouble(ended.stderr.decode(errors="replace"))
    if len(ended.stdout) > _OUTPUT_BYTES_MAX:
        return [], "its stacks are too long to show"
    try:
        return [_parsed(pid, item) for item in parse_json(ended.stdout)[:_THREADS_MAX]], ""
    except (ValueError, KeyError, TypeError, AttributeError):
        return [], f"{TOOL} printed something that cannot be parsed"


def _trouble(printed: str) -> str:
    """py-spy's error message as the end of a sentence."""
    if "Permission" in printed or "Operation not permitted" in printed:
        return _DENIED
    if "Failed to find python version" in printed or "Failed to find a python interpreter" in printed:
        return "it is not a Python process, or its interpreter is still starting"
    if "Check that the process is running" in printed or "No such process" in printed:
        return "the process is gone"
    causes = [line.strip().removeprefix("Error: ") for line in printed.splitlines() if line.strip()]
    return f"{TOOL} could not read it ({causes[0][:_TEXT_MAX]})" if causes else f"{TOOL} could not read it"


def _parsed(pid: int, item: dict[str, Any]) -> ThreadStack:
    """One thread of py-spy's JSON. Raises KeyError, TypeError and ValueError where it has another form."""
    found = item["frames"]
    if not isinstance(found, list):
        raise TypeError("no frames")
    found, tid, is_active = found[:_FRAMES_MAX], int(item["os_thread_id"]), bool(item["active"])
    frames = tuple(Frame(_text(f["name"]), _text(f["filename"]), int(f["line"])) for f in found)
    call, target = ("", "") if is_active else _sleeps_in(pid, tid)
    return ThreadStack(
        _text(item.get("thread_name") or f"of id {tid}"),
        frames,
        is_main=tid == pid,
        is_own=tid != pid and is_own(_files(frames)),
        is_active=is_active,
        holds_gil=bool(item["owns_gil"]),
        syscall=call,
        target=target,
        values=_hash([frame.get("locals") for frame in found]),
    )


def _files(frames: tuple[Frame, ...]) -> list[str]:
    return [frame.file for frame in frames]


def _hash(values: list[object]) -> str:
    """Local variables as a hash: they may be secrets, and only a change of them is of use."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16] if any(values) else ""


def _text(value: object) -> str:
    """A text of the program for a log and for a terminal: cut, and without control characters."""
    return plain(str(value)[:_TEXT_MAX])


def _sleeps_in(pid: int, tid: int) -> tuple[str, str]:
    """The system call in which a thread sleeps and the file of that call; both empty where they are unknown."""
    call, rest = linux.thread_call(pid, tid)
    if call not in _OF_A_FILE:
        return call, ""
    with suppress(OSError, ValueError):
        return call, _text(Path(f"/proc/{pid}/fd/{int(rest.partition(' ')[0], 16)}").readlink())
    return call, ""
