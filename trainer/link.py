"""The worker's line to its agent, for any training script: what it reports, and what it is told.

The agent leaves one end of a socket pair in the worker and its number in `ELAUNCH_LINK`; JSON lines go over it.
Without the variable nothing happens, so that a script needs no condition around a call. Nothing here imports torch,
but for `should_stop`, whose callers have it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from elaunch.trainer.files import parse_json

Word = TypeVar("Word")
Answered = TypeVar("Answered")

# The agent looks once a second; a line for each of a thousand steps would only fill the socket.
_PAUSE_S = 0.05
# What must arrive waits so long for an agent that does not read.
_SURELY_S = 1.0
_PHASE_CHARS_MAX = 100
_READ_BYTES = 4096
_LINE_BYTES_MAX = 1 << 16
_STDERR = 2


def report(step: int) -> None:
    """Say that optimizer step `step` is complete; call it after each one, from one thread.

    Never waits and never raises. A step that comes too soon after the one that was said last is left out.
    """
    _open_link().send_step(step, time.monotonic())


def phase(name: str) -> None:
    """Say what the work is now ("evaluating"): a sign of life where no step ends for long (`--hang-timeout`).

    Never waits and never raises. To be called where the work changes, not in an inner loop.
    """
    _open_link().send(_line(event="phase", name=name[:_PHASE_CHARS_MAX]))


def saving(step: int) -> None:
    """Say that `step` is being saved: after a peer's failure there is time for it until `--stop-grace` is over.

    Who does not say so has `--failure-grace`, also at a stop during which a peer fails. May be called from any thread;
    waits for a busy agent, a second at most.
    """
    _open_link().send_surely(_line(event="saving", step=step))


def saved(step: int) -> None:
    """Say, after a peer's failure, that all of this process up to `step` is kept elsewhere: the agent kills it then.

    The answer to `on_peer_failed`, to be given each time, also by who had saved before; it counts once every `rescue`
    has returned. May be called from any thread; waits for a busy agent, a second at most.
    """
    _open_link().answer(step)


def stopped(step: int) -> None:
    """Say that this process has stopped after `step`, as all ranks do, and is about to save what it must and to exit.

    With it, the exit (code 143, 130 or 0) is no failure and not the end of the job, whether this agent had asked for it
    or a peer's agent had. May be called from any thread; waits for a busy agent, a second at most.
    """
    _open_link().send_surely(_line(event="stopped", step=step))


def listen(
    on_stop: Callable[[str], None] | None = None,
    on_peer_failed: Callable[[int], None] | None = None,
    *,
    rescue: Callable[[int], int] | None = None,
) -> Listener:
    """Have the agent say when to stop, instead of sending SIGTERM; the callbacks run in one daemon thread.

    `on_stop(reason)` is to see to it that all ranks stop after the same step (`should_stop` does), call `stopped` and
    exit with code 143. `reason` is "join" (nodes come, training goes on at once), "leave" (this node or another goes)
    or "interrupt" (the job ends); another may follow. `on_peer_failed(generation)` is to save what this process alone
    holds and call `saved`: the group is broken, and the main thread may be stuck in a collective for minutes. Who
    takes no `on_peer_failed` gets SIGTERM then.

    `rescue(generation)` is for one of several parts of a program that know nothing of each other: it saves what is its
    own and returns the step. They are called before any `on_peer_failed`; where there is none, the lowest step is the
    answer, 0 of one that raises. Closing what `listen` returns takes all of it back.
    """
    return _open_link().listen(Listener(_open_link(), on_stop, on_peer_failed, rescue))


def should_stop(every: int = 1) -> bool:
    """Whether all ranks are to stop now: True on every rank at the same step, once any rank's agent has asked for it.

    Collective: every rank calls it once a step, with the same `every`, and at each so many-th call they ask each other
    (one integer, MAX over a gloo group of their own, made by the first of these calls). Without a process group the
    answer is this process's own. When it says True it has said `stopped`: save what is needed, and exit with code 143.
    """
    return _boundary().is_reached(every)


def _line(**said: object) -> bytes:
    return json.dumps(said).encode() + b"\n"


@dataclass(eq=False)
class Listener:
    """Who listens, until `close` or the end of a `with` block; made by `listen`."""

    link: _Link
    on_stop: Callable[[str], None] | None
    on_peer_failed: Callable[[int], None] | None
    rescue: Callable[[int], int] | None

    def close(self) -> None:
        """Listen no more: if nobody else does, the agent sends a signal instead from now on."""
        self.link.forget(self)

    def drop(self) -> None:
        """Listen no more, as an exception ends the program: a signal from the agent would hide that.

        So the agent is not told before it asks for a stop again.
        """
        self.link.forget(self, is_said=False)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Link:
    """One end of a stream socket on which whole lines are sent or dropped, or no socket at all.

    `step` is the newest that was to be reported.
    """

    def __init__(self, end: socket.socket | None) -> None:
        self.step = -1
        self._end = end
        self._listeners: list[Listener] = []
        # Whether the group has failed and all there was to rescue is rescued.
        self._is_rescued = False
        self._lock = threading.Lock()
        self._rest = b""
        self._next_s = 0.0
        self._thread: threading.Thread | None = None

    def send_step(self, step: int, now_s: float) -> None:
        self.step = step
        if now_s >= self._next_s:
            self._next_s = now_s + _PAUSE_S
            self.send(_line(event="progress", step=step))

    def send(self, line: bytes) -> None:
        """Send what fits now, or drop it."""
        if not self._lock.acquire(blocking=False):
            # Another thread has something to say that must arrive, and may wait.
            return
        try:
            # A line that went out in part must be finished first, or the agent would read two lines as one.
            if self._push():
                self._rest = line
                self._push(is_whole=True)
        finally:
            self._lock.release()

    def send_surely(self, line: bytes, wait_s: float = _SURELY_S) -> None:
        """Send it, though the agent may have to make room first."""
        end_s = time.monotonic() + wait_s
        # With a limit: it may be this very thread that has the lock, and a signal handler that calls.
        if not self._lock.acquire(timeout=wait_s):
            return
        try:
            self._rest += line
            while not self._push() and self._end is not None and time.monotonic() < end_s:
                poll = select.poll()
                poll.register(self._end, select.POLLOUT)
                poll.poll(max(1.0, 1000 * (end_s - time.monotonic())))
        finally:
            self._lock.release()

    def listen(self, listener: Listener) -> Listener:
        """Say what is listened to; hear it from now on."""
        self._listeners.append(listener)
        self._say_to_what()
        if self._thread is None and self._end is not None:
            self._thread = threading.Thread(target=self._hear, name="elaunch-link", daemon=True)
            self._thread.start()
        return listener

    def forget(self, listener: Listener, *, is_said: bool = True) -> None:
        """The thread stays: what the agent said before it knew is still answered."""
        if listener not in self._listeners:
            return
        self._listeners.remove(listener)
        if is_said:
            self._say_to_what()

    def answer(self, step: int) -> None:
        """The script has saved; before all else is rescued that is too soon, and it will be asked again."""
        if self._is_rescued or not any(listener.rescue for listener in self._listeners):
            self.send_surely(_line(event="saved", step=step))

    def close(self) -> None:
        if self._end is not None:
            with contextlib.suppress(OSError):
                self._end.close()
        self._end = None

    def abandon(self) -> None:
        """In a forked child: the link is its parent's, and so was whoever held the lock."""
        self._lock = threading.Lock()
        self.close()

    def _push(self, is_whole: bool = False) -> bool:
        """Send what fits of `_rest`; whether all of it is out. A whole line of which nothing fitted is dropped."""
        if not self._rest or self._end is None:
            self._rest = b""
            return self._end is not None
        try:
            sent = self._end.send(self._rest, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            if is_whole:
                self._rest = b""
            return False
        except OSError:
            # Not closed: the thread that listens reads from it, and finds out as well.
            self._rest = b""
            return False
        self._rest = self._rest[sent:]
        return not self._rest

    def _say_to_what(self) -> None:
        if self._end is not None:
            stop = any(listener.on_stop for listener in self._listeners)
            peer_failed = any(listener.on_peer_failed or listener.rescue for listener in self._listeners)
            self.send_surely(_line(event="listens", stop=stop, peer_failed=peer_failed))

    def _hear(self) -> None:
        """The thread of `listen`: until the agent hangs up."""
        for message in self._messages():
            match message:
                case {"event": "stop_at_step_boundary", "reason": str(reason)}:
                    self._stop(reason)
                case {"event": "peer_failed", "generation": int(generation)}:
                    self._peer_failed(generation)
                case {"event": "stacks"}:
                    os.write(_STDERR, b"elaunch: what this worker's threads are doing\n")
                    faulthandler.dump_traceback(file=_STDERR, all_threads=True)

    def _stop(self, reason: str) -> None:
        asked = [listener.on_stop for listener in [*self._listeners] if listener.on_stop]
        for on_stop in asked:
            _tried(on_stop, reason)
        if not asked:
            # Whoever heard it was dropped, and the program goes on without: it is to get the signal.
            self._say_to_what()

    def _peer_failed(self, generation: int) -> None:
        listeners = [*self._listeners]
        steps = [_tried(listener.rescue, generation) for listener in listeners if listener.rescue]
        self._is_rescued = True
        scripts = [listener.on_peer_failed for listener in listeners if listener.on_peer_failed]
        for on_peer_failed in scripts:
            _tried(on_peer_failed, generation)
        if not scripts:
            # Who listened once and does so no more has nothing left to save. Nor has a rescue that failed: of it
            # nothing is kept, and nobody is to wait for it.
            self.answer(min((step or 0 for step in steps), default=max(self.step, 0)))

    def _messages(self) -> Iterator[dict[str, Any]]:
        rest = b""
        while self._end is not None:
            try:
                data = self._end.recv(_READ_BYTES)
            except OSError:
                return
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            # No message is as long as this.
            rest = rest[-_LINE_BYTES_MAX:]
            for line in lines:
                with contextlib.suppress(ValueError):
                    message = parse_json(line)
                    if isinstance(message, dict):
                        yield message


class _Boundary:
    """What `should_stop` remembers between two calls."""

    def __init__(self) -> None:
        self._calls = 0
        self._is_asked = False
        self._is_reached = False
        self._world: Any = None
        self._gloo: Any = None
        listen(on_stop=self._ask)

    def is_reached(self, every: int) -> bool:
        self._calls += 1
        if not self._is_reached and self._calls % every == 0 and self._any_asked():
            self._is_reached = True
            stopped(_open_link().step)
        return self._is_reached

    def _ask(self, reason: str) -> None:
        self._is_asked = True

    def _any_asked(self) -> bool:
        dist: Any = sys.modules.get("torch.distributed")
        if dist is None or not dist.is_available() or not dist.is_initialized():
            return self._is_asked
        import torch

        if self._world is not dist.group.WORLD:
            self._world, self._gloo = dist.group.WORLD, dist.new_group(backend="gloo")
        asked = torch.tensor(int(self._is_asked))
        dist.all_reduce(asked, dist.ReduceOp.MAX, self._gloo)
        return bool(asked.item())


def _tried(callback: Callable[[Word], Answered], word: Word) -> Answered | None:
    """What the callback returns; its error is its own, and the next one may be the one that saves the state."""
    try:
        return callback(word)
    except Exception:
        traceback.print_exc()
        return None


@functools.cache
def _open_link() -> _Link:
    # Taken out: a program that this process starts would find a number there that means nothing to it.
    link = _Link(_inherited(os.environ.pop("ELAUNCH_LINK", "")))
    os.register_at_fork(after_in_child=link.abandon)
    return link


@functools.cache
def _boundary() -> _Boundary:
    return _Boundary()


def _inherited(number: str) -> socket.socket | None:
    """The socket with that descriptor number, close-on-exec from now on; None where there is no such socket."""
    try:
        end = socket.socket(fileno=int(number))
    except (ValueError, OSError):
        return None
    if end.family != socket.AF_UNIX or end.type != socket.SOCK_STREAM:
        end.detach()
        return None
    end.set_inheritable(False)
    return end
