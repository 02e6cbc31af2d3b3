"""Stacks of ranks as records; ranks with equal stacks as one group, as text and as a response of limited size; pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile

from elaunch.agent.diagnosis.exit_status import NOT_USER_CODE
from elaunch.rendezvous.codec import decode, encode
from elaunch.rendezvous.rules.queries import RESPONSE_BYTES_MAX
from elaunch.rendezvous.rules.reports import RANKS_MAX
from elaunch.threads import OWN

# By the states in /proc/PID/stat of a process that does not run.
_HELD = {"T": "stopped by a signal", "t": "stopped by a debugger"}
_RANKS_SHOWN = 12
# A frame's path is shown from the package on: torch/distributed/distributed_c10d.py.
_LIBRARY = re.compile(
    r".*[/\\](?:(?:(?:site|dist)-packages|lib[/\\]python3\.\d+)[/\\]|(?=elaunch[/\\]trainer[/\\]ranks[/\\]))"
)
# The functions in which ranks wait for each other.
_COLLECTIVES = ("torch/distributed/", "elaunch/trainer/ranks/peers.py")


@dataclass(frozen=True)
class Frame:
    """One call: the function, its file, and its current line."""

    function: str
    file: str
    line: int

    @property
    def is_users(self) -> bool:
        """Whether it is in the user's own code, not in a library or in Python."""
        return not NOT_USER_CODE.search(self.file)

    @property
    def short_file(self) -> str:
        """The file for messages: from the package on for a library, else only its name."""
        if shown := _LIBRARY.match(self.file):
            return self.file[shown.end() :]
        return self.file.replace("\\", "/").rpartition("/")[2]

    @property
    def text(self) -> str:
        return f"{self.function} ({self.short_file}:{self.line})"


@dataclass(frozen=True)
class ThreadStack:
    """One thread of a process; `frames` are innermost first.

    `is_active`: the thread was running or runnable. `syscall` is the system call that it sleeps in, empty if it
    runs or if that cannot be read; `target` is the file, pipe, terminal or socket of that call, if it has one.
    `is_own`: elaunch has started it, in the worker. `values` is a hash of its local variables, if they were read.
    """

    name: str
    frames: tuple[Frame, ...]
    is_main: bool = False
    is_own: bool = False
    is_active: bool = False
    holds_gil: bool = False
    syscall: str = ""
    target: str = ""
    values: str = ""

    @property
    def innermost_user_frame(self) -> Frame | None:
        return next((frame for frame in self.frames if frame.is_users), None)

    @property
    def library_frames(self) -> tuple[Frame, ...]:
        """The frames inside of the innermost user frame: what the user's code has called."""
        return tuple(takewhile(lambda frame: not frame.is_users, self.frames))


@dataclass(frozen=True)
class Stack:
    """The stacks of one process of a rank: of its worker, or of a child of the worker (a data loader).

    `state` is the letter in /proc/PID/stat. `trouble` is why there are no threads, as the end of a sentence. `children`
    are the worker's own child processes that run Python. `entered` is the rank's last collective in torch's flight
    recorder, empty if that is not known; `waits`: a collective has not ended.
    """

    rank: int
    pid: int
    threads: tuple[ThreadStack, ...] = ()
    state: str = ""
    trouble: str = ""
    children: tuple[Stack, ...] = ()
    entered: str = ""
    waits: bool = False

    @property
    def main(self) -> ThreadStack | None:
        return next((thread for thread in self.threads if thread.is_main), None)

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process."""
        return self.state == "T"

    @property
    def held(self) -> str:
        """How the process was stopped; empty if it was not."""
        return _HELD.get(self.state, "")


@dataclass(frozen=True)
class StackGroup:
    """Ranks whose main threads have equal stacks; `stack` is that of the first of `ranks`."""

    ranks: tuple[int, ...]
    stack: Stack


def grouped(stacks: Iterable[Stack]) -> tuple[StackGroup, ...]:
    """Ranks with equal stacks together; the largest group first, then by rank."""
    found: dict[object, list[Stack]] = {}
    for stack in sorted(stacks, key=lambda stack: stack.rank):
        main = stack.main
        where = main.frames if main else stack.trouble
        found.setdefault((where, stack.held), []).append(stack)
    groups = [StackGroup(tuple(stack.rank for stack in alike), alike[0]) for alike in found.values()]
    return tuple(sorted(groups, key=lambda group: (-len(group.ranks), group.ranks)))


def group_text(group: StackGroup) -> str:
    """One line: "ranks 0, 2–7: all_reduce (torch/distributed/distributed_c10d.py:2810) ← train_step (train.py:41)"."""
    return f"{ranks_text(group.ranks)}: {location_text(group.stack)}"


def location_text(stack: Stack) -> str:
    """Where the main thread is: its innermost frame, and the innermost one in the user's code if that is another."""
    held, main = stack.held, stack.main
    if main is None or not main.frames:
        return f"{held}{': ' if held else ''}{stack.trouble or 'no Python frame'}"
    called, mine = called_frame(main).text, main.innermost_user_frame
    caller = f" ← {mine.text}" if mine and mine != main.frames[0] else ""
    return f"{held}{', in ' if held else ''}{called}{caller}"


def called_frame(thread: ThreadStack) -> Frame:
    """The frame to name: a collective itself, or the data loader's `__next__`; else the innermost frame."""
    inner = thread.library_frames
    collective = next((f for f in inner if f.short_file.startswith(_COLLECTIVES) and is_named(f)), None)
    loader = next((f for f in reversed(inner) if f.short_file.startswith("torch/utils/data/")), None)
    return collective or loader or thread.frames[0]


def is_named(frame: Frame) -> bool:
    """Whether its function's name means something to a user: no wrapper, and no private helper."""
    name = frame.function.rpartition(".")[2]
    return name != "wrapper" and not name.startswith(("_", "<"))


def ranks_text(ranks: Sequence[int]) -> str:
    """ "rank 3", or "ranks 0, 2–7"; three numbers in a row are a range."""
    parts: list[str] = []
    # In a row the distance of a number to its place stays the same.
    for _, row in groupby(enumerate(sorted(ranks)), lambda placed: placed[1] - placed[0]):
        numbers = [number for _, number in row]
        parts += [f"{numbers[0]}–{numbers[-1]}"] if len(numbers) > 2 else map(str, numbers)
    shown = ", ".join(parts[:_RANKS_SHOWN]) + (", …" if len(parts) > _RANKS_SHOWN else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"


def full_text(stacks: Iterable[Stack]) -> str:
    """All threads of all ranks and their children, ranks with equal stacks once: for a file, or for a page."""
    parts = []
    for group in grouped(stacks):
        of = f" of rank {group.stack.rank}" if len(group.ranks) > 1 else ""
        parts.append(f"=== {ranks_text(group.ranks)} (pid {group.stack.pid}{of})")
        parts.append(_process_text(group.stack))
    return "\n".join(parts) + "\n"


def _process_text(stack: Stack, margin: str = "") -> str:
    lines = [f"{margin}{text}" for text in (stack.held, stack.trouble) if text]
    # The main thread first: most readers need no other.
    for thread in sorted(stack.threads, key=lambda thread: (thread.is_own, not thread.is_main)):
        own = f" ({OWN})" if thread.is_own else ""
        lines.append(f"{margin}thread {thread.name}{own}: {_thread_text(thread)}")
        lines += [f'{margin}  File "{frame.file}", line {frame.line}, in {frame.function}' for frame in thread.frames]
    for child in stack.children:
        lines += [f"{margin}child process, pid {child.pid}", _process_text(child, f"{margin}    ")]
    return "\n".join(lines)


def _thread_text(thread: ThreadStack) -> str:
    holds = ", holds the GIL" if thread.holds_gil else ""
    if thread.is_active:
        return f"runs{holds}"
    where = f" in {thread.syscall}" + (f" of {thread.target}" if thread.target else "") if thread.syscall else ""
    return f"waits{where}{holds}"


_TOO_LONG = "its stacks are too long to show"


@dataclass(frozen=True)
class StackResponse:
    """The workers of one node in its newest generation: ranks with equal stacks once."""

    node_id: str
    generation: int
    groups: tuple[StackGroup, ...]


def stack_response(node_id: str, generation: int, stacks: Iterable[Stack]) -> str:
    """The response as JSON. If it is too large, it has main threads only, then no stacks."""
    groups, text = grouped(stacks), ""
    for shorten in (lambda stack: stack, _of_main_thread, _without_threads):
        shorter = tuple(replace(group, stack=shorten(group.stack)) for group in groups)
        text = encode(StackResponse(node_id, generation, shorter))
        if len(text) <= RESPONSE_BYTES_MAX:
            break
    return text


def read_stack_response(text: str, node_id: str) -> StackResponse | None:
    """That node's response; None if the text is invalid or another node's."""
    try:
        response = decode(StackResponse, text)
    except ValueError:
        return None
    is_whole = response.node_id == node_id and sum(len(group.ranks) for group in response.groups) <= RANKS_MAX
    return response if is_whole else None


def stacks_in(responses: Iterable[StackResponse]) -> tuple[Stack, ...]:
    """The stack of each rank; ranks that were in one group have the same one."""
    return tuple(
        replace(group.stack, rank=rank) for response in responses for group in response.groups for rank in group.ranks
    )


def _of_main_thread(stack: Stack) -> Stack:
    return replace(stack, threads=(stack.main,) if stack.main else stack.threads[:1], children=())


def _without_threads(stack: Stack) -> Stack:
    return replace(stack, threads=(), children=(), trouble=stack.trouble or _TOO_LONG)


def what_keeps(stacks: Iterable[Stack]) -> Iterator[str]:
    """Sentences about the threads that keep a process alive after its program has ended."""
    for stack in stacks:
        for thread in stack.threads:
            if (frame := thread.innermost_user_frame) and not thread.is_own:
                yield f"rank {stack.rank} is kept alive by thread {thread.name or '?'}, in {frame.text}"
